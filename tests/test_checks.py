"""The checks of notebook 02: that they can fail, and what is known of their subjects."""

import numpy as np
import pytest
import torch

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


GIVEN = range(400), [0.001, 0.01, 0.05], [0.05, 0.2, 0.5, 1.0]


def test_theorem_4_3_is_an_equivalence():
    frame = checks.supports(*GIVEN)
    frame = frame[~frame["rlvr"]]
    entered = frame["sage"]
    assert entered.any() and not entered.all()
    assert (frame["theorem"] == entered).all()


def test_the_reward_brings_more_completions_into_the_support_than_the_guide():
    frame = checks.supports(*GIVEN)
    by_reward = (~frame["reference"] & frame["rlvr"]).sum()
    by_guide = (~frame["rlvr"] & frame["sage"]).sum()
    assert by_reward > 3 * by_guide > 0
    assert not (frame["reference"] & ~frame["rlvr"]).any(), "eq. 2 raises every correct completion"
    assert (frame["rlvr"] & ~frame["sage"]).any(), "what one completion gains others lose"


def test_separation_implies_less_wrong_mass_and_its_failure_need_not():
    frame = checks.separations(range(400), [0.05, 0.2, 0.5, 1.0, 3.0])
    less = frame["sage"] < frame["forward"]
    holds = frame["eq30"]
    assert holds.nunique() == 2
    assert less[holds].all() and not less[~holds].all()


def test_forward_kl_solution_is_exact_where_the_multiplier_is_close_to_the_reward():
    reference = torch.tensor([1 - 1e-9, 1e-9], dtype=torch.float64)
    reward = torch.tensor([0.0, 1.0], dtype=torch.float64)
    solution, _ = solutions.forward_kl(reference, reward, 0.01)
    # Two completions: beta a/(g+1) + beta b/g = 1 is a quadratic in the gap g.
    beta, a, b = 0.01, 1 - 1e-9, 1e-9
    p = 1 - beta * a - beta * b
    gap = 2 * beta * b / (p + np.sqrt(p**2 + 4 * beta * b))
    assert solution[1].item() == pytest.approx(beta * b / gap, rel=1e-9)
