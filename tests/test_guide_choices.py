"""Guides that a profile chooses: ours and the user's, and refusals."""

import subprocess
import sys

import pytest
import torch

from sage_lib import consent
from sage_lib.algorithm.guide_choices import (
    build_guide,
    check_choice,
    needs_entropies,
    reads_rewards,
)
from sage_lib.algorithm.guides import (
    GUIDES,
    BranchGuide,
    CosineSchedule,
    GuideInputs,
    IdentityGuide,
    RandomGuide,
    ShuffledGuide,
    TokenGuide,
)
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.paths import ROOT

QUANTILES = {"0.5": 0.03341073170304298, "0.9": 0.25246456265449524, "0.999": 3.1509079933166504}
MEASURED = {"name": "branch", "threshold_quantile": 0.9, "clamp_quantile": 0.999}
THRESHOLD, TOP = QUANTILES["0.9"], QUANTILES["0.999"]
FROM_ENTROPIES = BranchGuide(threshold=THRESHOLD, ratio=(1.4 - 1) / (TOP - THRESHOLD))


@pytest.mark.parametrize(
    ("choice", "guide"),
    [
        ({"name": "branch", "threshold": 1, "ratio": 0.3}, BranchGuide(1.0, 0.3)),
        (MEASURED, FROM_ENTROPIES),
        ({**MEASURED, "threshold": None, "ratio": None}, FROM_ENTROPIES),
        ({"name": "random", "low": 0.7, "high": 1.3}, RandomGuide(low=0.7, high=1.3)),
        (
            {"name": "random", "probability": {"high": 0.5, "low": 0.1, "periods": 2}},
            RandomGuide(CosineSchedule(0.5, 0.1, periods=2)),
        ),
        ({"name": "token", "weight": "rank"}, TokenGuide("rank")),
        ({"name": "identity"}, IdentityGuide()),
        ({"name": "shuffled", "inner": MEASURED}, ShuffledGuide(FROM_ENTROPIES)),
    ],
)
def test_a_choice_becomes_its_guide(choice, guide):
    check_choice(choice)
    assert build_guide(choice, QUANTILES) == guide
    wants = FROM_ENTROPIES in (guide, getattr(guide, "inner", None))
    assert needs_entropies(choice) == wants
    if wants:
        with pytest.raises(SageError, match="measure them first"):
            build_guide(choice)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (3, "no guide 3; choose one of branch"),
        ({"weight": "rank"}, "the key name is missing: choose one of branch"),
        ({"name": "median"}, "no guide 'median'; choose one of branch, random, token, reward"),
        ({"name": "identity", "low": 0.6}, "low is unknown; choose one of"),
        ({"name": "token", "weight": "median"}, "weight: .*'rank'.*, not 'median'"),
        ({"name": "token", "low": True}, "low: .*valid number, not True"),
        ({**MEASURED, "low": 1.1}, "clamped around 1"),
        ({"name": "random", "scale": {"high": 0.1}}, "scale.low: field required"),
        ({"name": "random", "scale": {"high": 0.1, "low": 0.2}}, "from high down to low"),
        (
            {"name": "shuffled", "inner": {"name": "tokn"}},
            "inner: .* 'tokn'; did you mean token",
        ),
        ({"name": "branch"}, r"either threshold and ratio .*1.2 and 0.3.*: give both of one pair"),
        ({"name": "random", "probability": {"high": 10.0, "low": 0.0}}, "between 0 and 1"),
        ({**MEASURED, "threshold": 1.2, "ratio": 0.3}, "either threshold and ratio"),
        ({**MEASURED, "clamp_quantile": 0.5}, "threshold_quantile must lie below clamp_quantile"),
    ],
)
def test_a_wrong_choice_is_told_in_one_sentence_that_begins_with_its_place(choice, reason):
    with pytest.raises(SageError, match=reason) as told:
        check_choice(choice, "profile mine: methods.a.guide")
    assert str(told.value).startswith("profile mine: methods.a.guide")


def test_a_choice_reads_rewards_where_its_guide_or_one_inside_it_does():
    choice = {"name": "reward", "power": 0.5}
    for _ in range(3):
        assert reads_rewards(choice)
        choice = {"name": "shuffled", "inner": choice}
    for choice in (MEASURED, {"name": "shuffled", "inner": MEASURED}):
        assert not reads_rewards(choice)


def test_the_quantiles_0_and_1_are_quantiles():
    ends = {"name": "branch", "threshold_quantile": 0, "clamp_quantile": 1}
    assert build_guide(ends, {"0.0": 0.0, "1.0": 2.0}).ratio == pytest.approx(0.2)


def test_entropies_that_do_not_give_a_guide_are_refused():
    with pytest.raises(SageError, match=r"that are measured, 0.5, 0.9, 0.999"):
        build_guide({**MEASURED, "threshold_quantile": 0.8}, QUANTILES)
    with pytest.raises(SageError, match="choose them further apart"):
        build_guide(MEASURED, {"0.9": 0.1, "0.999": 0.1})


def test_choices_are_checked_without_torch():
    choices = [{"name": name} for name in GUIDES if name not in ("branch", "shuffled")]
    choices += [MEASURED, {"name": "shuffled", "inner": MEASURED}]
    code = (
        "import sys; from sage_lib.algorithm import guide_choices, kl_forms\n"
        f"for choice in {choices}: guide_choices.build_guide(choice, {QUANTILES})\n"
        "print('torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


OWN_GUIDES = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Unsure:
    threshold: float
    reads_rewards = False

    def __call__(self, inputs):
        return 1 + 0.2 * (inputs.entropies > self.threshold)

def half(threshold):
    return Unsure(threshold / 2)

class Rewarded(Unsure):
    reads_rewards = True

def nothing():
    return None
"""


@pytest.fixture
def own_guides(tmp_path, monkeypatch):
    (tmp_path / "my_guides.py").write_text(OWN_GUIDES)
    monkeypatch.syspath_prepend(tmp_path)
    names = [f"my_guides:{name}" for name in ("Unsure", "half", "Rewarded", "Certain", "nothing")]
    monkeypatch.setenv(consent.VARIABLE, ",".join([*names, "other_guides:Unsure"]))
    yield
    sys.modules.pop("my_guides", None)


def test_code_of_a_guide_is_not_imported_without_consent(own_guides, monkeypatch):
    monkeypatch.delenv(consent.VARIABLE)
    with pytest.raises(SageError, match="my_guides:half, which is code that it runs"):
        check_choice({"name": "my_guides:half"})
    assert "my_guides" not in sys.modules


def test_a_profile_takes_a_guide_of_the_users(own_guides):
    profile = load_profile("smoke+methods.grpo.guide={name: 'my_guides:Unsure', threshold: 0.8}")
    choice = profile.methods["grpo"].guide
    entropies, mask = torch.tensor([[0.5, 1.0, 2.0]]), torch.ones(1, 3)
    stream = torch.Generator().manual_seed(0)
    inputs = GuideInputs(entropies, -entropies, mask, 0.0, stream, ids=mask.long())
    for name, q in (("Unsure", [1.0, 1.2, 1.2]), ("half", [1.2, 1.2, 1.2])):
        guide = build_guide({**choice, "name": f"my_guides:{name}"})
        assert guide(inputs)[0].tolist() == pytest.approx(q)
    shuffled = build_guide({"name": "shuffled", "inner": choice})(inputs)
    assert sorted(shuffled[0].tolist()) == pytest.approx([1.0, 1.2, 1.2])
    assert not needs_entropies(choice) and not reads_rewards(choice)
    assert reads_rewards({"name": "shuffled", "inner": {"name": "my_guides:Rewarded"}})


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (
            {"name": "my_guides:Unsure", "treshold": 1},
            "treshold is unknown; did you mean methods.a.guide.threshold",
        ),
        ({"name": "my_guides:Unsure"}, "missing 1 required .*'threshold'"),
        ({"name": "my_guides:Certain"}, "cannot be imported .*add its folder to PYTHONPATH"),
        ({"name": "other_guides:Unsure"}, "cannot be imported .*other_guides"),
        ({"name": "my_guides:nothing"}, "a guide is called with a GuideInputs"),
    ],
)
def test_a_guide_of_the_users_that_cannot_be_made_is_told_in_one_sentence(
    own_guides, choice, reason
):
    with pytest.raises(SageError, match=reason) as error:
        check_choice(choice, "mine: methods.a.guide")
    assert str(error.value).startswith("mine: methods.a.guide")
