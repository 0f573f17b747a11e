"""The published weights: their exact pass@k is that of the runs, and they are small."""

import numpy as np
import pandas as pd
import pytest

from sage_lib import load_profile, paths
from sage_lib.experiment.problems import evaluation_problems
from sage_lib.policy import loading
from sage_lib.policy.scoring import valid_probabilities

POLICIES = paths.ROOT / "data" / "policies"


def test_all_five_have_under_four_megabytes():
    files = [path for path in POLICIES.rglob("*") if path.is_file()]
    assert len({path.parent for path in files} - {POLICIES}) == 5
    assert sum(path.stat().st_size for path in files) < 4e6


@pytest.mark.parametrize("method", ["base", "grpo", "grpo_branch", "branch_strong", "grpo_no_kl"])
def test_pass_at_1_is_what_the_run_had(method):
    """The run's merged weights gave the published table; these are a base and an adapter."""
    profile = load_profile("operating_point")
    table = pd.read_parquet(paths.PUBLISHED / profile.name / "exact.parquet")
    run, step = ("grpo", 0) if method == "base" else (method, 50)
    rows = table[(table["method"] == run) & (table["seed"] == 3407) & (table["step"] == step)]
    expected = rows.set_index("dataset")["pass@1"]
    problems = [p for p in evaluation_problems(profile) if p.dataset == "forward_3_digits"]
    model, tokenizer = loading.load(profile.model, POLICIES / method)
    listed = valid_probabilities(model, tokenizer, problems)
    pass_at_1 = np.exp(listed["logp"]).sum()
    assert pass_at_1 / len(problems) == pytest.approx(expected["forward_3_digits"], rel=1e-4)
