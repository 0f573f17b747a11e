"""Figures of the exact notebooks: what they show is what the tables say."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

from sage_lib.report import theory_figures
from sage_lib.theory import estimators
from sage_lib.theory.tree import Tree
from sage_lib.theory.two_path import Example


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_fixed_points_shows_every_policy_of_one_completion():
    policies = ["reference", "eq. 4", "eq. 27 (forward KL)", *estimators.OFFERED]
    rows = {"completion": ["a", "b"]}
    rows.update({policy: [0.1 * i, 0.5] for i, policy in enumerate(policies)})
    figure = theory_figures.fixed_points({"none": pd.DataFrame(rows)}, "a")
    heights = [shown.get_ydata()[0] for shown in figure.axes[0].lines]
    assert heights == pytest.approx([0.1 * i for i in range(len(policies))])
    assert legend_of(figure)[3:] == [estimators.LABELS[name] for name in estimators.OFFERED]


def test_the_map_says_where_the_theorem_holds_nowhere_and_everywhere():
    figure = theory_figures.two_path_region(Example(), (0.001, 0.0083, 0.0099))
    notes = [text.get_text().split(": ")[1:] for text in figure.axes[0].get_legend().get_texts()]
    assert notes == [["nowhere"], [], ["everywhere"]]


def test_the_caption_of_the_sliders_follows_them():
    above = theory_figures.explore_two_path(0.0083, 0.5, 0.01, 1.2, 0.3)
    below = theory_figures.explore_two_path(0.0083, 0.5, 0.01, 1.2, 0.0)
    assert "0.01062, above epsilon" in above.get_supxlabel()
    assert "not above epsilon" in below.get_supxlabel()
    assert not plt.get_fignums(), "the notebook shows the value, not an open figure too"


def test_instances_keep_their_look_when_all_are_of_one_kind():
    frame = pd.DataFrame(
        {"eq30": [True, False], "forward": [0.1, 0.2], "sage": [0.1, 0.2], "seed": [0, 1]}
    )
    both = theory_figures.separation(frame).axes[0].collections
    alone = theory_figures.separation(frame[frame["eq30"]]).axes[0].collections
    assert alone[0].get_label() == both[1].get_label() == "eq. 30 holds (1)"
    assert alone[0].get_edgecolor().tolist() == both[1].get_edgecolor().tolist()


def test_a_tree_is_drawn_with_every_probability_entropy_and_column():
    tree = Tree((("a", "x"), ("a", "y"), ("b",)))
    policy = tree.log_policy(torch.zeros(len(tree.edges), dtype=torch.float64))
    columns = {"q": torch.tensor([1.0, 1.25, 2.0])}
    figure = theory_figures.token_tree(tree, policy, "a title", columns)
    words = [text.get_text() for text in figure.axes[0].texts]
    edges, states, leaves = words[:4], words[4:6], words[6:]
    assert edges == ["a 0.5", "b 0.5", "x 0.5", "y 0.5"]
    assert states == ["H=0.69", "H=0.69"]
    assert leaves == ["q", "1.0000", "1.2500", "2.0000"]
    places = {text.get_text(): text.xy[1] for text in figure.axes[0].texts[7:]}
    assert places == {"1.0000": 0, "1.2500": -1, "2.0000": -2}
