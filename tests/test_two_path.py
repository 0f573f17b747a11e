"""Appendix C: the printed example, the tree, and the map of Theorem 4.3.

Each against a computation of its own.
"""

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
    table = two_path.path_entropies(tree, log_reference).set_index("completion")
    assert table.loc["rare b0 end", "H_2"] == pytest.approx(math.log(6))
    assert table.loc["common on right"].max() < 0.4
    assert reward.sum() == 2


def test_the_map_agrees_with_the_theorem_and_with_eq_4_point_by_point():
    example = Example()
    thresholds = torch.linspace(0, 2, 9, dtype=torch.float64)
    ratios = torch.linspace(0, 1, 7, dtype=torch.float64)
    tree, log_reference, right = two_path.branch_tree(0.05, 6)
    table = two_path.path_entropies(tree, log_reference).drop(columns="completion").fillna(0.0)
    of_tree = tree.completion_probabilities(log_reference), right, torch.tensor(table.to_numpy())
    for inputs in ((example.reference, example.reward, example.entropies), of_tree):
        margin = two_path.margins(inputs, example, thresholds, ratios)
        reference, reward, entropies = inputs
        rlvr = solutions.tilted(reference, reward, example.beta)
        for i, ratio in enumerate(ratios):
            for j, threshold in enumerate(thresholds):
                q = two_path.branch_q(entropies, threshold, ratio).prod(-1)
                sage = solutions.tilted(reference, reward, example.beta, q)
                said = bool(margin[i, j] > 0)
                assert said == bool(sage[1] > example.epsilon)
                assert said == bool(solutions.theorem_4_3(rlvr, q, example.epsilon)[1])


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
