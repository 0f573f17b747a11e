"""Tables 3 and 6, measured beside reported; where runs started."""

import pandas as pd
import pytest

from sage_lib.experiment import runs
from sage_lib.experiment.profile import load_profile
from sage_lib.report import front_tables, measured, paper_tables, training_tables


def points(*methods):
    return pd.DataFrame({"method": methods, "pass@1": [0.1 * n for n in range(len(methods))]})


def test_table3_is_of_the_losses_beside_base_and_first_method(monkeypatch):
    profile = load_profile("countdown")
    every = points("base", "grpo", "grpo_branch", "bnpo_no_kl", "dapo_branch")
    monkeypatch.setattr(front_tables, "points", lambda profile: every)
    found = paper_tables.table3(profile)
    assert list(found["method"]) == ["base", "grpo", "bnpo_no_kl", "dapo_branch"]
    monkeypatch.setattr(front_tables, "points", lambda profile: every.iloc[:3])
    assert paper_tables.table3(profile).empty and "pass@1" in paper_tables.table3(profile)


def test_table6_names_the_thresholds_and_ratios_that_were_trained_with(monkeypatch):
    profile = load_profile("countdown")
    quantiles = {"0.8": 0.2, "0.9": 0.5, "0.95": 0.7, "0.98": 0.9, "0.99": 1.1, "0.999": 1.5}
    monkeypatch.setattr(runs, "entropies", lambda profile: {"quantiles": quantiles})
    keys = [key for key, method in profile.methods.items() if method.family == "table6"]
    monkeypatch.setattr(front_tables, "points", lambda profile: points("base", *keys))
    found = paper_tables.table6(profile)
    assert len(found) == 9 and list(found.columns[:3]) == ["method", "threshold", "ratio"]
    assert sorted(set(found["threshold"])) == pytest.approx([0.2, 0.5, 0.7])
    # The ratio lets q reach 1.4 at the second quantile: 0.4 over the distance of the two.
    first = found[found["threshold"] == 0.2]
    assert list(first["ratio"]) == pytest.approx([0.4 / 1.3, 0.4 / 0.9, 0.4 / 0.7])
    monkeypatch.setattr(front_tables, "points", lambda profile: points("base", "grpo"))
    assert paper_tables.table6(profile).empty


def test_reported_table6_has_the_printed_cells_in_their_places():
    found = paper_tables.reported_table6()
    assert found.shape == (3, 6) and found.loc[1.2, ("pass@1", 0.3)] == 0.433
    assert found.loc[2.0, ("pass@256", 0.3)] == 0.983 and found.notna().all(axis=None)


def test_starts_counts_the_references_of_a_seed_and_leaves_other_anchors_out(monkeypatch):
    profile = load_profile("countdown")
    runs_of = [("grpo", 1, "a"), ("grpo_branch", 1, "a"), ("early", 1, "z"), ("grpo", 2, "b")]
    runs_of.append(("grpo_branch", 2, "c"))  # the fault: not the base of the seed's other run
    records = {
        f"{method}-s{seed}": {"settings": {"method": method}, "seed": seed, "reference": reference}
        for method, seed, reference in runs_of
    }
    log = pd.DataFrame(
        [
            ("grpo", 1, 1, 1e-9),
            ("grpo", 1, 2, 0.5),
            ("early", 1, 1, 0.7),
            ("grpo", 2, 1, 2e-9),
            ("grpo_branch", 2, 1, 1e-9),
        ],
        columns=["method", "seed", "step", "kl_ref"],
    )
    monkeypatch.setattr(measured, "training", lambda profile: log)
    found = training_tables.starts(profile, records).set_index("seed")
    assert list(found["runs"]) == [2, 2] and list(found["references"]) == [1, 2]
    assert list(found["with a KL"]) == [1, 2], "not the one of another reference, nor step 2"
    assert list(found["kl_ref"]) == pytest.approx([1e-9, 2e-9])
