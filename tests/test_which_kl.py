"""The numbers of docs/which_kl.md against closed forms, and the page against its table."""

import numpy as np
import pytest
import torch
import which_kl

from sage_lib.report import kl_forms
from sage_lib.theory import estimators, objectives, solutions, two_path

TREE, LOG_REFERENCE, REWARD = two_path.branch_tree()
GUIDE = objectives.log_guide(TREE, "state", LOG_REFERENCE, kl_forms.THRESHOLD)


@pytest.fixture(scope="module")
def table():
    return kl_forms.fixed_points().set_index("form")


def myopic():
    """Reverse KL at each token: pi(a) is proportional to pi_ref(a) e^(Q(a)/beta), from the last
    token backwards."""
    edges = {edge: place for place, edge in enumerate(TREE.edges)}
    chances, values = {}, {}
    for state in sorted(TREE.states, key=len, reverse=True):
        mine = [(token, place) for (of, token), place in edges.items() if of == state]
        q = {}
        for token, _ in mine:
            after = (*state, token)
            done = TREE.completions.index(after) if after in TREE.completions else None
            q[token] = values[after] if done is None else float(REWARD[done])
        weights = {
            token: float(LOG_REFERENCE[place].exp()) * np.exp(q[token] / kl_forms.BETA)
            for token, place in mine
        }
        total = sum(weights.values())
        chances |= {(state, token): weight / total for token, weight in weights.items()}
        values[state] = sum(weights[token] / total * q[token] for token in q)
    rare = np.prod(
        [chances[("rare", "b0", "end")[:i], t] for i, t in enumerate(("rare", "b0", "end"))]
    )
    return values[()], rare


def test_k2_and_corrected_k3_rest_where_each_token_follows_its_own_value(table):
    for form in ("k2 as a loss", "k3, bias-corrected"):
        assert table.loc[form].tolist() == pytest.approx([*myopic()] * 2, abs=1e-8)


def test_k1_in_the_reward_and_in_the_return_rest_at_eq_4(table):
    reference = TREE.completion_probabilities(LOG_REFERENCE)
    expected = []
    for guide in (torch.ones_like(reference), solutions.product_guide(TREE, GUIDE)):
        weights = reference * guide * (REWARD / kl_forms.BETA).exp()
        policy = weights / weights.sum()
        expected += [float(policy @ REWARD), float(policy[1])]
    for form in ("k1 in the reward", "k1 in the return (eq. 8)"):
        assert table.loc[form].tolist() == pytest.approx(expected, abs=1e-8)


def test_k3_rests_at_its_closed_form(table):
    _, values = solutions.k3_fixed_point(TREE, REWARD, LOG_REFERENCE, kl_forms.BETA)
    assert table.loc["k3 as a loss", "success"] == pytest.approx(float(values[0]), abs=1e-8)
    assert table.loc["exact forward KL", "rare"] == table.loc["k3 as a loss", "rare"]


@pytest.mark.parametrize("guide", [None, GUIDE])
def test_k1_as_a_loss_holds_nothing(guide):
    """So the table has success 1 for it."""
    at = LOG_REFERENCE, LOG_REFERENCE
    pull = estimators.kl_gradient(TREE, "k1_loss", *at, guide)
    assert pull.numpy() == pytest.approx(0, abs=1e-12)


def test_the_page_has_these_numbers():
    text = which_kl.PAGE.read_text()
    assert which_kl.page() == text
    success, rare = kl_forms.reference()
    words = f"right with probability {success:.4f}, and is the rare right one with {rare:.4f}"
    assert words in " ".join(text.split())
