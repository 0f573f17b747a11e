"""The outcomes of the guides' predictions, on runs whose differences are planted."""

import numpy as np
import pandas as pd
import pytest
from ruamel.yaml import YAML
from scipy.special import expit

from sage_lib.experiment.profile import BASE, load_profile
from sage_lib.paths import ROOT
from sage_lib.report import trained_guides

#: What is added to the base's logit: on problems that it often solves, and on those it seldom does.
PLANTED = {
    "front_beta0.05": (1.0, -1.0),
    "reverse_matched": (0.6, -0.4),
    "grpo": (0.4, -0.2),
    "front_beta0.4": (0.2, 0.0),
    "reverse": (0.6, -0.4),
    "hard": (0.4, -0.2),
    "likeliest": (0.4, -0.2),
    "success": (0.7, 0.3),
    "from_success": (1.2, 1.0),
    "maxrl": (0.3, -1.5),
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Write runs of three seeds: half of the problems easy, half hard."""
    start = np.r_[np.linspace(-1.5, 0, 20), np.linspace(-6, -4, 20)]
    easy = start > -3
    rows = [(BASE, np.nan, start)]
    rng = np.random.default_rng(0)  # without noise there is no interval
    for seed in (3407, 3408, 3409):
        for method, (on_easy, on_hard) in PLANTED.items():
            noise = rng.normal(0, 0.002, 40)
            rows.append((method, seed, start + np.where(easy, on_easy, on_hard) + noise))
    tables = [
        pd.DataFrame(
            {"dataset": "d", "problem": [f"p{n}" for n in range(40)], "p": expit(logits)}
        ).assign(profile="guides", method=method, seed=seed)
        for method, seed, logits in rows
    ]
    path = tmp_path / "runs.parquet"
    pd.concat(tables).to_parquet(path)
    monkeypatch.setattr(trained_guides, "RUNS", path)


def test_predictions_are_judged_as_the_runs_were_made(planted):
    table = trained_guides.outcomes("guides").set_index(["prediction", "method"])
    outcomes = table["outcome"].to_dict()
    assert outcomes["reverse k3", "reverse"] == "agrees", "it equals the matched beta"
    assert outcomes["hard k3", "hard"] == "disagrees", "it equals GRPO and was expected above"
    assert outcomes["success k3", "success"] == "agrees", "+0.4 in the mean logit"
    assert table.loc[("success k3", "success"), "measured"].startswith("logit +0.400 [")
    assert outcomes["control", "success"] == "agrees", "its control has more of both"
    assert outcomes["none outside", "success"] == "disagrees", "more of both than any beta"
    assert outcomes["none outside", "reverse"] == "agrees"
    assert outcomes["maxrl", "maxrl"] == "agrees", "inside the curve"
    assert "success sequence" not in table.index.get_level_values(0), "it has no run"


def test_fewer_than_three_seeds_tell_no_outcome(planted):
    table = pd.read_parquet(trained_guides.RUNS)
    table[table["seed"] != 3409].to_parquet(trained_guides.RUNS)
    assert set(trained_guides.outcomes("guides")["outcome"]) == {"cannot tell"}


def test_both_tasks_have_predictions_of_methods_that_their_profiles_train():
    claims = YAML(typ="safe").load(ROOT / "sage_lib/report/guides_claims.yaml")
    for profile, name in trained_guides.TASKS.items():
        for claim in claims[name]:
            methods = claim.get("methods", [claim.get("method")])
            methods += [claim["against"]] if "against" in claim else []
            assert set(methods) <= set(load_profile(profile).methods), claim["name"]
