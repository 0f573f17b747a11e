"""Appendix C: the printed example, the tree, and the map of Theorem 4.3.

Each against a computation of its own.
"""

import math

import pytest
import torch

from sage_lib.errors import SageError
from sage_lib.theory import solutions, two_path
from sage_lib.theory.two_path import Example


def test_every_statement_of_the_appendix_holds_with_the_chosen_numbers():
    assert two_path.conditions(Example())["holds"].all()


@pytest.mark.parametrize(
    "change", [{"ratio": 0.0}, {"threshold": 1.9}, {"rare": 0.004}, {"epsilon": 0.02}]
)
def test_each_number_matters(change):
    assert not two_path.conditions(Example(**change))["holds"].all()


def test_the_printed_example_by_hand():
    e = Example(common=0.9, rare=0.0083, beta=0.5)
    z = (0.9 + 0.0083) * math.e**2 + 0.0917
    q = 1 + 0.3 * (1.8 - 1.2)
    rlvr = 0.0083 * math.e**2 / z
    mean_q = 1 + rlvr * (q - 1)
    table = two_path.conditions(e).set_index("equation")
    assert table.loc["35", "value"] == pytest.approx(mean_q)
    assert table.loc["Thm. 4.3", "value"] == pytest.approx(rlvr * q / mean_q)


def test_a_fork_at_the_first_token_gives_both_paths_one_entropy_whatever_the_policy():
    tree, _ = two_path.fork_first()
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        policy = tree.log_policy(torch.randn(len(tree.edges), dtype=torch.float64, generator=rng))
        assert two_path.path_entropies(tree, policy)["H_1"].nunique() == 1


def test_on_the_tree_the_rare_path_alone_passes_the_high_entropy_state():
    tree, log_reference, reward = two_path.branch_tree(0.05, 6)
    table = two_path.path_entropies(tree, log_reference).set_index("completion")
    assert table.loc["rare b0 end", "H_2"] == pytest.approx(math.log(6))
    assert table.loc["common on right"].max() < 0.4
    assert reward.sum() == 2


def test_the_smallest_spread_is_the_first_whose_entropy_exceeds_the_threshold():
    assert two_path.smallest_spread(1.2) == 4
    assert math.log(3) < 1.2 < math.log(4)


def test_the_map_agrees_with_the_theorem_and_with_eq_4_point_by_point():
    example = Example()
    thresholds = torch.linspace(0, 2, 9, dtype=torch.float64)
    ratios = torch.linspace(0, 1, 7, dtype=torch.float64)
    for inputs in (two_path.example_inputs(example), two_path.tree_inputs(0.05, 6)):
        margin = two_path.margins(*inputs, example.beta, example.epsilon, thresholds, ratios)
        reference, reward, entropies = inputs
        rlvr = solutions.tilted(reference, reward, example.beta)
        for i, ratio in enumerate(ratios):
            for j, threshold in enumerate(thresholds):
                q = two_path.branch_q(entropies, threshold, ratio).prod(-1)
                sage = solutions.tilted(reference, reward, example.beta, q)
                said = bool(margin[i, j] > 0)
                assert said == bool(sage[1] > example.epsilon)
                assert said == bool(solutions.theorem_4_3(rlvr, q, example.epsilon)[1])


def test_an_example_without_room_for_wrong_completions_is_refused():
    with pytest.raises(SageError, match="room for wrong"):
        Example(common=0.99, rare=0.02)
