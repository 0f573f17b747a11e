"""Appendix C: the printed example and the tree, each against a computation of its own."""

import math

import matplotlib.pyplot as plt
import pytest
import torch

from sage_lib.errors import SageError
from sage_lib.report.theory import token_tree
from sage_lib.theory import solutions, two_path
from sage_lib.theory.tree import Tree
from sage_lib.theory.two_path import Example


def test_every_statement_of_the_appendix_holds_with_the_chosen_numbers():
    assert two_path.conditions(Example())["holds"].all()


def test_they_hold_with_the_two_right_completions_of_the_paper_alone():
    """By hand: without anything wrong the reward moves nothing, and q alone decides."""
    example = Example(common=1 - Example.rare)
    assert float(example.reference[2]) < 1e-15 and two_path.conditions(example)["holds"].all()
    assert 0.0087 * 1.18 / (1 + 0.0087 * 0.18) > example.epsilon > 0.0083 * 1.18


@pytest.mark.parametrize(
    "change", [{"ratio": 0.0}, {"threshold": 1.9}, {"rare": 0.004}, {"epsilon": 0.02}]
)
def test_each_number_matters(change):
    assert not two_path.conditions(Example(**change))["holds"].all()


def test_the_printed_example_by_hand():
    e = Example(common=0.9, rare=0.0087, beta=0.5)
    z = (0.9 + 0.0087) * math.e**2 + 0.0913
    q = 1 + 0.3 * (1.8 - 1.2)
    rlvr = 0.0087 * math.e**2 / z
    mean_q = 1 + rlvr * (q - 1)
    table = two_path.conditions(e).set_index("equation")
    assert table.loc["35", "value"] == pytest.approx(mean_q)
    assert table.loc["Thm. 4.3", "value"] == pytest.approx(rlvr * q / mean_q)


def test_without_a_clamp_or_a_wrong_completion():
    e = Example(0.92, 0.08, rare_entropies=(4.0,), ratio=1.0, most=math.inf)
    assert e.reference.tolist() == pytest.approx([0.92, 0.08, 0])
    assert e.guide.tolist() == pytest.approx([1, 1 + 4.0 - 1.2, 1])
    sage = solutions.tilted(e.reference, e.reward, e.beta, e.guide)
    assert sage.tolist() == pytest.approx([0.92 / 1.224, 0.08 * 3.8 / 1.224, 0])
    assert Example(rare_entropies=(4.0,), ratio=1.0).guide[1] == 1.4


def test_on_the_tree_the_rare_path_alone_passes_the_high_entropy_state():
    tree, log_reference, reward = two_path.branch_tree(0.05, 6)
    entropies = dict(zip(tree.states, tree.entropies(log_reference).tolist(), strict=True))
    assert entropies.pop(("rare",)) == pytest.approx(math.log(6))
    assert max(entropies.values()) < 0.4 and reward.sum() == 2


def test_probabilities_over_1_are_refused():
    with pytest.raises(SageError, match="at most 1"):
        Example(common=0.99, rare=0.02)


def test_a_tree_is_drawn_with_every_probability_entropy_and_column():
    tree = Tree((("a", "x"), ("a", "y"), ("b",)))
    policy = tree.log_policy(torch.zeros(len(tree.edges), dtype=torch.float64))
    figure = token_tree(tree, policy, "a title", {"q": torch.tensor([1.0, 1.25, 2.0])})
    words = {text.get_text(): text.get_position()[1] for text in figure.axes[0].texts}
    assert {"a 0.5", "b 0.5", "x 0.5", "y 0.5", "H=0.69", "q"} <= set(words)
    assert [words["1.0000"], words["1.2500"], words["2.0000"]] == [0, -1, -2]
    plt.close(figure)
