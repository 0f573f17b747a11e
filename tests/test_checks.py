"""The checks of notebook 02: that they can fail, and what is known of their subjects in closed form."""

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
    monkeypatch.setattr(
        solutions,
        "tilted",
        lambda reference, reward, beta, guide=None: tilted(reference, reward, 1.1 * beta, guide),
    )
    wrong = checks.ascents(range(2), 1, [0.5])
    assert wrong.groupby("objective")["error"].max()["eq. 1 against eq. 2"] > 1e-3, (
        "a wrong closed form is noticed"
    )


def test_ascent_leaves_a_plateau():
    tree, reference, reward, _ = checks.instance(0)
    start = torch.zeros(len(tree.edges), dtype=torch.float64)
    start[::2] = 12.0  # a policy that is nearly certain of arbitrary tokens
    found = solutions.ascend(
        tree, lambda p: p @ reward - 0.1 * solutions.pseudo_kl(p, reference), start
    )
    assert (found - solutions.tilted(reference, reward, 0.1)).abs().max() < 1e-6


def test_theorem_4_3_is_an_equivalence_and_its_shortcuts_are_not():
    frame = checks.support_conditions(range(400), [0.001, 0.01, 0.05], [0.05, 0.2, 0.5, 1.0])
    assert (
        (frame["theorem"] == frame["entered"]).all()
        and frame["entered"].any()
        and not frame["entered"].all()
    )
    assert (frame["correct_only"] & ~frame["entered"]).any() and (
        ~frame["reference_only"] & frame["entered"]
    ).any()


def test_separation_implies_less_wrong_mass_and_its_failure_need_not():
    frame = checks.separations(range(400), [0.05, 0.2, 0.5, 1.0, 3.0])
    less = frame["sage"] < frame["forward"]
    assert (
        less[frame["eq30"]].all()
        and not less[~frame["eq30"]].all()
        and frame["eq30"].nunique() == 2
    )


def test_entropy_bonus_slopes():
    _, reference, reward, _ = checks.instance(1)
    frame = checks.bonuses(reference, reward, 0.5, [0.0, 0.5])
    assert frame["deviation"].max() < 1e-12 and frame["slope"].tolist() == [1.0, 0.5]


def test_forward_kl_solution_is_exact_where_the_multiplier_is_close_to_the_reward():
    reference, reward = (
        torch.tensor([1 - 1e-9, 1e-9], dtype=torch.float64),
        torch.tensor([0.0, 1.0], dtype=torch.float64),
    )
    solution, _ = solutions.forward_kl(reference, reward, 0.01)
    # Two completions: beta a/(g+1) + beta b/g = 1 is a quadratic in the gap g.
    beta, a, b = 0.01, 1 - 1e-9, 1e-9
    p = 1 - beta * a - beta * b
    gap = 2 * beta * b / (p + np.sqrt(p**2 + 4 * beta * b))
    assert solution[1].item() == pytest.approx(beta * b / gap, rel=1e-9)


def test_gaussian_fits_against_moments_and_adaptive_quadrature():
    fits, density = checks.gaussian_fits((-2.0, 2.5), (0.6, 0.9), (0.45, 0.55))
    forward, reverse = (fits[fits["divergence"].str.startswith(d)] for d in ("forward", "reverse"))
    mean = 0.45 * -2.0 + 0.55 * 2.5  # the forward KL matches moments
    sd = np.sqrt(0.45 * (0.6**2 + 4) + 0.55 * (0.9**2 + 2.5**2) - mean**2)
    assert forward["mean"].to_numpy() == pytest.approx(mean, abs=1e-4) and forward[
        "sd"
    ].to_numpy() == pytest.approx(sd, abs=1e-4)
    best = reverse.iloc[0]

    def integrand(x):
        log_q = norm.logpdf(x, best["mean"], best["sd"])
        return np.exp(log_q) * (
            log_q
            - np.logaddexp(
                np.log(0.45) + norm.logpdf(x, -2.0, 0.6), np.log(0.55) + norm.logpdf(x, 2.5, 0.9)
            )
        )

    assert quad(integrand, -10, 15, limit=200)[0] == pytest.approx(best["value"], abs=1e-6)
    assert reverse["mean"].min() < -1.5 < 2.0 < reverse["mean"].max(), "one optimum at each mode"
    assert np.trapezoid(density["target"], density["x"]) == pytest.approx(1, abs=1e-6)


def test_detection_is_the_complement_of_never():
    frame = checks.detection([0.1], [1, 2])
    assert (
        isinstance(frame, pd.DataFrame)
        and frame[1].iloc[0] == pytest.approx(0.1)
        and frame[2].iloc[0] == pytest.approx(0.19)
    )
