"""pass@k of policies against enumeration, in a study of frames written by hand; and what the
paper's spread is."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.results import load_results
from sage_lib.policy.exact import exact_pass_at_k
from sage_lib.report import inference, passk, reported

#: The mass of each way: of the base, then of two seeds of GRPO, by problem.
MASSES = {
    ("base", None): {"a": (0.2, 0.1), "b": (0.5, 0.0)},
    ("grpo", 2): {"a": (0.4, 0.2), "b": (0.6, 0.0)},
    ("grpo", 1): {"a": (0.3, 0.1), "b": (0.9, 0.0)},
}


@pytest.fixture
def results():
    """Two problems of two data sets, each way of a problem in one or two completions."""
    rows, counts = [], []
    for (method, seed), masses in MASSES.items():
        for problem, (common, rare) in masses.items():
            where = {"run": f"{method}{seed}", "method": method, "seed": seed, "problem": problem}
            where["dataset"] = {"a": "both", "b": "forward"}[problem]
            ways = [("L", common * 0.25), ("L", common * 0.75), *([("R", rare)] if rare else [])]
            rows += [{**where, "way": way, "logp": np.log(mass)} for way, mass in ways]
            counts.append({**where, "n": 8, "c": round(8 * (common + rare))})
    support, counts = (pd.DataFrame(one).astype({"seed": "Int64"}) for one in (rows, counts))
    found = SimpleNamespace(support=support, counts=counts, name="planted")
    found.profile = load_profile("study")
    return found


def test_exact_pass_at_k_is_the_chance_of_one_success_by_enumeration():
    """All 2^k outcomes of k independent samples, for two problems."""
    p, k = [0.3, 0.05], 4
    outcomes = [np.array(hits) for hits in itertools.product((0, 1), repeat=k) if any(hits)]
    expected = [sum(np.where(hits, x, 1 - x).prod() for hits in outcomes) for x in p]
    assert exact_pass_at_k(p, (k,))[:, 0] == pytest.approx(expected)
    assert exact_pass_at_k([0.0, 1.0], (1, 256)).tolist() == [[0, 0], [1, 1]]
    assert exact_pass_at_k([1e-18], (1,)).item() == pytest.approx(1e-18), "not rounded away"


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_of_right_answers_is_unbiased_by_enumeration(k):
    """Over all outcomes of 14 samples that are valid, right without valid work, or wrong."""
    p, r, n, expected = 0.15, 0.1, 14, 0.0
    for u, v in itertools.product(range(n + 1), repeat=2):
        if u + v > n:
            continue
        ways = math.comb(n, u) * math.comb(n - u, v)
        chance = ways * r**u * p**v * (1 - p - r) ** (n - u - v)
        expected += chance * passk.right_at([p], [n - v], [u], (k,)).item()
    assert expected == pytest.approx(1 - (1 - p - r) ** k, abs=1e-6)


def test_right_answers_without_valid_work_count_beside_the_exact_rest(results):
    results.counts = results.counts.assign(n=8, valid_common=2, valid_rare=1, c=[3, 5] * 3)
    values = passk.right(results, (1, 2, 8))
    grpo = values["grpo"].values[0]  # seed 1: problem a has p = 0.4, b has 0.9
    assert grpo[0] == pytest.approx([0.4, 1 - 0.6**2, 1 - 0.6**8]), "no lucky one of 5"
    none = [3 / 5, 3 / 10, 0.0]  # of 1, 2, 8 draws from 5 samples, 2 of them lucky
    assert grpo[1] == pytest.approx(1 - 0.1 ** np.array([1, 2, 8]) * none)
    assert values["grpo"].columns == ["right pass@1", "right pass@2", "right pass@8"]


def test_completions_of_a_problem_are_added_up_by_their_way(results):
    found = passk.probabilities(results)
    grpo = found[found["run"] == "grpo2"].set_index("problem")
    assert grpo.loc["a", ["common", "rare", "valid"]].tolist() == pytest.approx([0.4, 0.2, 0.6])
    assert grpo.loc["b", ["common", "rare"]].tolist() == pytest.approx([0.6, 0.0])
    assert len(found) == 6 and found["seed"].isna().sum() == 2, "the base has no seed"
    results.support = results.support.assign(way="P")  # of a task whose ways have other names
    others = passk.probabilities(results)
    assert others["valid"].tolist() == pytest.approx(found["valid"])
    results.support["logp"] = np.log(1 / 2 + 1e-9)  # two or three completions
    assert set(passk.probabilities(results)["valid"]) == {1.0}, "rounding adds no probability"


def test_exact_values_stand_by_seed_and_problem(results):
    values = passk.exact(results, (1, 4))
    assert list(values) == ["base", "grpo"] and values["base"].seeds == [None]
    grpo = values["grpo"]
    assert grpo.seeds == [1, 2] and grpo.sets == ["both", "forward"]
    assert grpo.columns == ["pass@1", "pass@4", "rare mass"]
    assert grpo.values[0, 0] == pytest.approx([0.4, 1 - 0.6**4, 0.1])
    assert grpo.values[1, 1] == pytest.approx([0.6, 1 - 0.4**4, 0.0])


def test_only_the_data_that_is_asked_for_counts(results):
    other = results.support.assign(dataset="both_other_words")
    assert "both_other_words" in {d.label for d in results.profile.evaluation.data if d.ood}
    results.support = pd.concat([results.support, other])
    assert set(passk.probabilities(results)["dataset"]) == {"both", "forward"}
    assert set(passk.probabilities(results, ood=True)["dataset"]) == {"both_other_words"}
    assert len(passk.probabilities(results, ood=None)) == 12


def test_sampled_values_are_the_unbiased_estimates(results):
    grpo = passk.sampled(results, (1, 3))["grpo"].values
    right = [round(8 * p) for p in (0.4, 0.9)]  # of seed 1
    for problem, c in enumerate(right):
        draws = list(itertools.combinations([True] * c + [False] * (8 - c), 3))
        assert grpo[0, problem] == pytest.approx([c / 8, np.mean([any(one) for one in draws])])


def test_pass_at_k_is_sampled_where_it_is_not_exact_and_of_the_data_that_is_asked_for(results):
    other = results.counts.assign(dataset="both_other_words", c=8)
    results.counts = pd.concat([results.counts, other])
    results.support = results.support.assign(dataset="both")
    exact = passk.exact_or_sampled(results)
    assert exact["grpo"].columns == ["pass@1", "pass@256", "rare mass"]
    assert passk.axes(results.profile) == (1, 256)
    results.profile = SimpleNamespace(
        exact=False, data_sets=results.profile.data_sets, evaluation=SimpleNamespace(ks=[1, 2, 4])
    )
    assert passk.axes(results.profile) == (1, 4), "the largest k"
    values = passk.exact_or_sampled(results)["grpo"]
    assert values.columns == ["pass@1", "pass@4"] and values.sets == ["both", "forward"]
    assert values.values[0, :, 0].tolist() == [3 / 8, 7 / 8]
    assert (
        passk.exact_or_sampled(results, [2], ood=True)["grpo"].values.tolist() == [[[1], [1]]] * 2
    )


def test_levels_are_means_over_data_sets_within_0_and_1(results):
    values = passk.exact(results, (1,))
    levels = passk.levels(values).set_index(["method", "metric"])
    assert levels.loc[("base", "pass@1"), "mean"] == pytest.approx((0.3 + 0.5) / 2)
    assert levels.loc[("grpo", "pass@1")][["low", "high"]].isna().all(), "two seeds have none"
    drawn = np.random.default_rng(0).random((4, 9, 1)) ** 9
    many = inference.Values("m", drawn, ["x"], ["s"] * 6 + ["t"] * 3, [*range(4)])
    row = passk.levels({"m": many}).iloc[0]
    means = [many.values[:, :6].mean(), many.values[:, 6:].mean()]
    assert row["mean"] == pytest.approx(np.mean(means))
    assert (row["seeds"], row["problems"]) == (4, 9)
    known = metrics.paired_difference(many.values, 0 * many.values, many.sets)
    assert (row["low"], row["high"]) == pytest.approx((max(known[1][0], 0), known[2][0]))


def test_exact_pass_at_k_is_of_countdown_alone(results):
    results.profile = load_profile("smollm")
    with pytest.raises(SageError, match="no countdown data"):
        passk.exact(results)


def test_curves_along_training_are_those_of_the_published_runs():
    results = load_results("smoke")
    along = passk.along_training(results)
    [first] = results.runs.query("stage == 'rl' and method == 'grpo'")["run"]
    rows = results.exact[(results.exact["run"] == first) & (results.exact["step"] == 0)]
    found = along[(along["method"] == "grpo") & (along["step"] == 0)].iloc[0]
    assert found["pass@256"] == pytest.approx(rows["pass@256"].mean()) and len(rows) > 1
    second = results.exact.assign(seed=1, **{"pass@256": 0.0})
    results.exact = pd.concat([results.exact, second])
    assert passk.along_training(results)["pass@256"].tolist() == [
        *along["pass@256"],
        *[0.0] * len(along),
    ], "each seed has rows of its own"


def reachable(seeds, total, squares, most):
    """Whether ``seeds`` whole numbers from 0 to ``most`` have this sum and this sum of squares."""
    if seeds == 0:
        return total == squares == 0
    if squares * seeds < total**2:
        return False
    middle = total / seeds
    width = np.sqrt((squares - total**2 / seeds) * (seeds - 1) / seeds) + 1e-9
    values = range(max(0, int(np.ceil(middle - width))), min(most, int(middle + width)) + 1)
    return any(reachable(seeds - 1, total - x, squares - x * x, most) for x in values)


@pytest.mark.parametrize(("table", "cells"), [("1", 42), ("3", 30), ("4", 18)])
def test_the_papers_spread_is_that_of_five_counts_of_problems(table, cells):
    """What notebook 09 says of the paper's ±: five whole counts, the deviation with ddof = 1."""

    def fits(mean, std, problems, seeds, ddof):
        half, places = 0.0005 + 1e-9, problems * seeds
        totals = range(int((mean - half) * places), int((mean + half) * places) + 2)
        for total in (t for t in totals if abs(t / places - mean) <= half):
            least, most = (
                (max(std + side, 0) * problems) ** 2 * (seeds - ddof) + total**2 / seeds
                for side in (-half, half)
            )
            squares = range(int(np.ceil(least - 1e-9)), int(most + 1e-9) + 1)
            if any(reachable(seeds, total, found, problems) for found in squares):
                return True
        return False

    problems = {"AIME": 60, "AMC23": 40, "MATH-500": 134}
    printed = reported.read_table(f"sage_table{table}").dropna(subset="std")
    assert len(printed) == cells

    def fitting(seeds, ddof):
        return sum(
            fits(cell.mean, cell.std, problems[cell.dataset], seeds, ddof)
            for cell in printed[["mean", "std", "dataset"]].itertuples(name="Cell")
        )

    assert fitting(5, 1) == cells
    assert max(fitting(5, 0), fitting(4, 1), fitting(3, 1)) < 0.7 * cells
