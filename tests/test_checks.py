"""The checks of notebook 02: that they can fail, and what is known of their subjects."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from sage_lib.theory import checks, solutions


def test_ascents_end_at_the_closed_forms_and_would_not_at_others(monkeypatch):
    assert checks.ascents(range(2), 1, [0.5])["error"].max() < 1e-6
    tilted = solutions.tilted

    def too_flat(reference, reward, beta, guide=None):
        return tilted(reference, reward, 1.1 * beta, guide)

    monkeypatch.setattr(solutions, "tilted", too_flat)
    errors = checks.ascents(range(2), 1, [0.5]).groupby("objective")["error"].max()
    assert errors["eq. 1 against eq. 2"] > 1e-3, "a wrong closed form is noticed"


def test_ascent_leaves_a_plateau():
    tree, reference, reward, _ = checks.random_instance(0)
    start = torch.zeros(len(tree.edges), dtype=torch.float64)
    start[::2] = 12.0  # a policy that is nearly certain of arbitrary tokens

    def eq_1(policy):
        return policy @ reward - 0.1 * solutions.pseudo_kl(policy, reference)

    found = solutions.ascend(tree, eq_1, start)
    assert (found - solutions.tilted(reference, reward, 0.1)).abs().max() < 1e-6


def test_theorem_4_3_is_an_equivalence_and_its_shortcuts_are_not():
    frame = checks.support_conditions(range(400), [0.001, 0.01, 0.05], [0.05, 0.2, 0.5, 1.0])
    entered = frame["entered"]
    assert entered.any() and not entered.all()
    assert (frame["theorem"] == entered).all()
    assert (frame["correct_only"] & ~entered).any()
    assert (~frame["reference_only"] & entered).any()


def test_the_reward_brings_more_completions_into_the_support_than_the_guide():
    given = range(200), [0.001, 0.01, 0.05], [0.05, 0.2, 0.5, 1.0]
    table = checks.entries(*given).set_index("step")
    assert table.loc["reward", "enter"] > 3 * table.loc["guide", "enter"] > 0
    assert table.loc["reward", "leave"] == 0, "eq. 2 raises every correct completion"
    left = table.loc["reward", "outside"] - table.loc["reward", "enter"]
    conditions = checks.support_conditions(*given)
    assert table.loc["guide", "outside"] == left == len(conditions)
    assert table.loc["guide", "enter"] == conditions["entered"].sum()
    assert table.loc["guide", "leave"] > 0, "what one completion gains others lose"


def test_verdicts_count_what_each_reading_says():
    readings = {
        "entered": [True, True, False, False],
        "theorem": [True, True, False, False],
        "correct_only": [True, False, True, True],
        "reference_only": [False, False, False, False],
    }
    table = checks.verdicts(pd.DataFrame(readings)).set_index("condition")
    assert table.loc["Theorem 4.3"].tolist() == [2, 0, 0]
    assert table.filter(like="correct", axis=0).iloc[0].tolist() == [3, 2, 1]
    assert table.loc["pi_ref for pi_RLVR"].tolist() == [0, 0, 2]


def test_separation_implies_less_wrong_mass_and_its_failure_need_not():
    frame = checks.separations(range(400), [0.05, 0.2, 0.5, 1.0, 3.0])
    less = frame["sage"] < frame["forward"]
    holds = frame["eq30"]
    assert holds.nunique() == 2
    assert less[holds].all() and not less[~holds].all()


def test_entropy_bonus_slopes():
    _, reference, reward, _ = checks.random_instance(1)
    frame = checks.bonuses(reference, reward, 0.5, [0.0, 0.5])
    assert frame["deviation"].max() < 1e-12
    assert frame["slope"].tolist() == [1.0, 0.5]


def test_a_guide_on_one_completion_multiplies_its_odds_by_q():
    _, reference, reward, _ = checks.random_instance(1)
    frame = checks.guided(reference, reward, 0.5, 2, [1.0, 1.7])
    probabilities = frame.drop(columns="q")
    assert probabilities.iloc[0].tolist() == solutions.tilted(reference, reward, 0.5).tolist()
    odds = probabilities[2] / probabilities[0]
    assert odds[1] / odds[0] == pytest.approx(1.7)
    assert probabilities.sum(axis=1).tolist() == pytest.approx([1, 1])


def test_forward_kl_solution_is_exact_where_the_multiplier_is_close_to_the_reward():
    reference = torch.tensor([1 - 1e-9, 1e-9], dtype=torch.float64)
    reward = torch.tensor([0.0, 1.0], dtype=torch.float64)
    solution, _ = solutions.forward_kl(reference, reward, 0.01)
    # Two completions: beta a/(g+1) + beta b/g = 1 is a quadratic in the gap g.
    beta, a, b = 0.01, 1 - 1e-9, 1e-9
    p = 1 - beta * a - beta * b
    gap = 2 * beta * b / (p + np.sqrt(p**2 + 4 * beta * b))
    assert solution[1].item() == pytest.approx(beta * b / gap, rel=1e-9)


def test_gaussian_fits_against_moments_and_adaptive_quadrature():
    fits, density = checks.gaussian_fits((-2.0, 2.5), (0.6, 0.9), (0.45, 0.55))
    forward = fits[fits["divergence"].str.startswith("forward")]
    reverse = fits[fits["divergence"].str.startswith("reverse")]
    mean = 0.45 * -2.0 + 0.55 * 2.5  # the forward KL matches moments
    sd = np.sqrt(0.45 * (0.6**2 + 4) + 0.55 * (0.9**2 + 2.5**2) - mean**2)
    assert forward["mean"].to_numpy() == pytest.approx(mean, abs=1e-4)
    assert forward["sd"].to_numpy() == pytest.approx(sd, abs=1e-4)
    best = reverse.iloc[0]

    def integrand(x):
        log_q = norm.logpdf(x, best["mean"], best["sd"])
        left = np.log(0.45) + norm.logpdf(x, -2.0, 0.6)
        right = np.log(0.55) + norm.logpdf(x, 2.5, 0.9)
        return np.exp(log_q) * (log_q - np.logaddexp(left, right))

    assert quad(integrand, -10, 15, limit=200)[0] == pytest.approx(best["value"], abs=1e-6)
    assert reverse["mean"].min() < -1.5 < 2.0 < reverse["mean"].max(), "one optimum at each mode"
    assert np.trapezoid(density["target"], density["x"]) == pytest.approx(1, abs=1e-6)


def test_detection_is_the_complement_of_never():
    frame = checks.detection([0.1], [1, 2])
    assert frame.iloc[0].tolist() == pytest.approx([0.1, 0.1, 0.19])
