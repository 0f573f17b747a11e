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
    ("change", "fails"),
    [
        ({"ratio": -0.3}, [3, 4, 5, 6]),
        ({"threshold": 1.75}, [5, 6]),
        ({"rare": 0.004}, [5, 6]),
        ({"epsilon": 0.02}, [5, 6]),
        ({"rare": 0.02}, [0, 1]),
        ({"common_entropies": (1.5, 0.3)}, [2]),
    ],
)
def test_each_number_matters(change, fails):
    holds = two_path.conditions(Example(**change))["holds"]
    assert holds.index[~holds].tolist() == fails
    unguided = two_path.conditions(Example(ratio=0.0))["holds"]
    assert not unguided[3] and not unguided[4], "q is 1, and so is its mean"


def test_the_printed_example_by_hand():
    e = Example(common=0.9, rare=0.0087, beta=0.5)
    z = (0.9 + 0.0087) * math.e**2 + 0.0913
    q = 1 + 0.3 * (1.8 - 1.2)
    rlvr = 0.0087 * math.e**2 / z
    mean_q = 1 + rlvr * (q - 1)
    table = two_path.conditions(e).set_index("equation")
    assert table.loc["35", "value"] == pytest.approx(mean_q)
    assert table.loc["Thm. 4.3", "value"] == pytest.approx(rlvr * q / mean_q)
    bounds = [0.01, 0.01, 1, 1, q, 0.01 / rlvr, 0.01]
    values = [0.0087, rlvr, 1, q, mean_q, q / mean_q, rlvr * q / mean_q]
    assert table["value"].tolist() == pytest.approx(values)
    assert table["bound"].tolist() == pytest.approx(bounds)


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
    assert max(entropies.values()) < 0.4
    p = tree.completion_probabilities(log_reference)
    right, rare, wrong, *others = p.tolist()
    assert reward.tolist() == [1, 1, 0, *[0] * 5] and tree.completions[2][-1] == "wrong"
    assert [right, wrong] == pytest.approx([0.95 * 0.9, 0.95 * 0.1])
    assert [rare, *others] == pytest.approx([0.05 / 6] * 6)
    for ratio, most, q in ((0.5, 1.4, 0.5 * math.log(6) + 0.4), (2, 1.4, 1.4), (2, 9, None)):
        guide = two_path.tree_guide(tree, log_reference, 1.2, ratio, most)
        expected = q or 1 + 2 * (math.log(6) - 1.2)
        assert guide.tolist() == pytest.approx([1, expected, 1, *[expected] * 5])


@pytest.mark.parametrize(("common", "rare"), [(0.99, 0.02), (0.3, 0.4), (0.3, 0.3), (0.9, 0.0)])
def test_other_probabilities_than_those_of_a_common_and_a_rare_completion_are_refused(common, rare):
    with pytest.raises(SageError, match="0 < rare < common, together at most 1"):
        Example(common=common, rare=rare)


def test_a_tree_is_drawn_with_every_probability_entropy_and_column():
    tree = Tree((("a", "x"), ("a", "y"), ("b",)))
    policy = tree.log_policy(torch.zeros(len(tree.edges), dtype=torch.float64))
    figure = token_tree(tree, policy, "a title", {"q": torch.tensor([1.0, 1.25, 2.0])})
    words = {text.get_text(): text.get_position()[1] for text in figure.axes[0].texts}
    assert {"a 0.5", "b 0.5", "x 0.5", "y 0.5", "H=0.69", "q"} <= set(words)
    assert [words["1.0000"], words["1.2500"], words["2.0000"]] == [0, -1, -2]
    plt.close(figure)
