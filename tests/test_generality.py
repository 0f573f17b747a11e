"""The verdict's two differences in other settings: which arms are held against which, planted."""

import dataclasses

import numpy as np
import pytest

from sage_lib.experiment.profile import BASE, load_profile, profile_names
from sage_lib.pipeline import draw
from sage_lib.report import exact_tables, generality_figures, generality_tables, style
from sage_lib.report.generality_tables import GUIDE, NO_KL, SETTINGS
from sage_lib.report.verdict import AGREES, IN_PART, MISSING, OPEN

SEEDS = (3407, 3408, 3409, 3410)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: one.name)
def test_the_arms_of_a_setting_differ_in_one_thing(setting):
    assert "countdown" + setting.suffix in profile_names()
    profile = load_profile("countdown" + setting.suffix)

    def of(key):
        method = profile.methods[key]
        rl = {**profile.rl, **method.rl}
        return dataclasses.replace(method, label="", family="", seeds=None, rl=rl)

    guided, plain = of(setting.guided), of(setting.plain)
    assert guided.guide is not None and plain.guide is None and plain.rl["beta"] > 0
    assert dataclasses.replace(guided, guide=None) == plain
    if setting.no_kl is not None:
        no_kl = of(setting.no_kl)
        assert no_kl.rl["beta"] == 0 and {**no_kl.rl, "beta": plain.rl["beta"]} == plain.rl
        assert no_kl.lora == plain.lora and no_kl.guide is None
    assert {setting.guided, setting.plain} <= {*profile.methods}


def test_profiles_of_other_settings_are_drawn_in_their_notebook_alone(capsys):
    beside = {name for name in profile_names() if generality_tables.read_beside(name)}
    assert beside == {"countdown" + one.suffix for one in SETTINGS if one.suffix}
    assert {generality_tables.read_beside(name) for name in beside} == {"countdown"}
    assert draw.redraw([load_profile("countdown_larger")], theory=False)
    printed = capsys.readouterr().out
    assert "countdown_larger: read beside countdown in notebook 20" in printed
    assert "0 notebooks in" in printed


@pytest.fixture
def found(monkeypatch):
    """Planted exact values: the guide raises both at beta 1, with all weights pass@256 alone;
    without KL pass@256 falls at beta 1."""
    planted = {
        BASE: ((0.30, 0.86), (None,)),
        "grpo": ((0.32, 0.84), SEEDS),
        "branch_strong": ((0.34, 0.86), SEEDS),
        "grpo_no_kl": ((0.33, 0.70), SEEDS),
        "full_grpo": ((0.32, 0.84), SEEDS),
        "full_branch": ((0.32, 0.86), SEEDS),
        "early": ((0.32, 0.84), SEEDS[:1]),
        "early_branch": ((0.40, 0.90), SEEDS[:1]),
    }
    exact = {}
    for key, (point, seeds) in planted.items():
        rng = np.random.default_rng(sum(map(ord, key)))
        noise = rng.normal(0, 0.0005, (len(seeds), 30, 2))
        values = np.array(point) + noise - noise.mean(axis=(0, 1))
        exact[key] = exact_tables.Exact(key, values, noise[..., 0], ["both"] * 30, [*seeds])
    monkeypatch.setattr(exact_tables, "by_method", lambda *a, **k: exact)
    monkeypatch.setattr(exact_tables, "evaluated", lambda profile: set(exact))
    countdown = load_profile("countdown")
    methods = {
        key: dataclasses.replace(countdown.methods[key], seeds=seeds)
        for key, (_, seeds) in planted.items()
        if key != BASE
    }
    return {"": dataclasses.replace(countdown, methods=methods)}


def test_each_setting_is_judged_by_its_own_pair(found):
    judged = generality_tables.outcomes(found).set_index("setting")
    raises, falls = judged["guide raises both"], judged["pass@256 falls without KL"]
    assert raises["beta 1 (strong Branch)"] == AGREES and falls["beta 1 (strong Branch)"] == AGREES
    assert raises["all weights trained"] == IN_PART, "pass@1 does not rise there"
    assert raises["an earlier reference"] == OPEN, "one seed decides nothing"
    assert raises["a larger model"] == MISSING and falls["all weights trained"] == MISSING
    assert judged.loc["beta 1 (strong Branch)", "seeds, guide"] == len(SEEDS)
    said = generality_tables.takeaways(judged.reset_index(), generality_tables.table(found))
    assert f"guide raises both: {AGREES} in 1 setting (beta 1 (strong Branch))" in said
    assert "no KL, the same runs: beta 1 (strong Branch); an earlier reference" in said


def test_differences_are_those_that_were_planted(found):
    table = generality_tables.table(found).set_index(["setting", "asked", "metric"])
    at = table["difference"]
    assert at["beta 1 (strong Branch)", GUIDE, "pass@1"] == pytest.approx(0.02, abs=1e-9)
    assert at["beta 1 (strong Branch)", NO_KL, "pass@256"] == pytest.approx(-0.14, abs=1e-9)
    assert "problems alone" in table.loc[("an earlier reference", GUIDE, "pass@1"), "interval over"]
    figure = generality_figures.differences(table.reset_index())
    assert "without KL above 0 in 0, below in 1 of 1" in style.described(figure)
    assert "no KL, the same runs: beta 1 (strong Branch); an earlier ref" in style.described(figure)
    empty = generality_figures.differences(generality_tables.table({}))
    assert "finished pair" in empty.axes[0].texts[0].get_text()
