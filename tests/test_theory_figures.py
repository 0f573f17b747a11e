"""Figures of the exact notebooks: what they show is what the tables say."""

import os
from itertools import pairwise

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
import torch

from sage_lib import paths
from sage_lib.report import theory_figures
from sage_lib.theory import estimators, objectives
from sage_lib.theory.losses import Loss
from sage_lib.theory.tree import Tree
from sage_lib.theory.two_path import Example

PNG = b"\x89PNG"
WIDGET = "application/vnd.jupyter.widget-view+json"


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


def test_the_bars_of_a_policy_can_be_found_by_their_key():
    rows = {"completion": ["a", "b", "c"]}
    rows |= {policy: [0.1 * i, 0.2, 0.5] for i, policy in enumerate(theory_figures.LED, 1)}
    figure = theory_figures.leads(pd.DataFrame(rows), {"c": "C", "a": "A, x"}, 0.5)
    heights = {}
    for bar in figure.axes[0].patches:
        heights.setdefault(bar.get_gid(), []).append(bar.get_height())
    assert list(heights) == list(theory_figures.led())
    assert list(heights.values()) == [
        pytest.approx([0.5, 0.1 * i]) for i in range(1, len(heights) + 1)
    ]
    assert not any(" " in gid for gid in heights), "an id has no spaces"


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


def test_moving_a_slider_draws_another_picture_in_a_real_kernel():
    """As JupyterLab does it: the notebook's cells run, then a comm message sets a slider's value.

    What counts is what the kernel sends back for the picture on display.
    """
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(
        kernel_name="python3", cwd=str(paths.NOTEBOOKS), env=kernel_environment()
    )
    try:
        widgets = {}  # states by comm, as a front end keeps them
        shown = []

        def listen(request):
            while True:
                message = client.get_iopub_msg(timeout=60)
                kind, content = message["msg_type"], message["content"]
                if message["parent_header"].get("msg_id") != request:
                    continue
                if kind == "error":
                    raise AssertionError("\n".join(content["traceback"]))
                data = content.get("data", {})
                if kind in ("comm_open", "comm_msg") and "state" in data:
                    state = widgets.setdefault(content["comm_id"], {})
                    state.update(data["state"])
                    for path, buffer in zip(
                        data.get("buffer_paths", []), message["buffers"], strict=True
                    ):
                        state[path[0]] = bytes(buffer)
                if kind == "display_data" and WIDGET in data:
                    shown.append(data[WIDGET]["model_id"])
                if kind == "status" and content["execution_state"] == "idle":
                    return

        for source in slider_cells():
            listen(client.execute(source))
        box = widgets[shown[-1]]
        children = [widgets[child.removeprefix("IPY_MODEL_")] for child in box["children"]]
        picture, sliders = children[-1], children[:-1]
        before = picture["value"]
        assert before.startswith(PNG), "drawn before anything is moved"
        at = next(i for i, slider in enumerate(sliders) if slider["description"] == "ratio")
        target = box["children"][at].removeprefix("IPY_MODEL_")
        for value in (0.9, sliders[at]["value"]):
            update = {"method": "update", "state": {"value": value}, "buffer_paths": []}
            moved = client.session.msg("comm_msg", {"comm_id": target, "data": update})
            client.shell_channel.send(moved)
            listen(moved["header"]["msg_id"])
            assert picture["value"].startswith(PNG)
            assert (picture["value"] != before) == (value == 0.9), "another picture, and back"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def kernel_environment():
    return {**os.environ, "PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"}


def slider_cells():
    """The code of notebook 01 that the sliders need: parameters, imports, example, and sliders."""
    notebook = nbformat.read(paths.NOTEBOOKS / "01_toy_two_path.ipynb", as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return [*code[:3], *(source for source in code[3:] if "slider" in source.lower())]


def test_headers_of_the_columns_beside_a_tree_do_not_meet():
    tree = Tree((("a", "x"), ("a", "y"), ("b",)))
    policy = tree.log_policy(torch.zeros(len(tree.edges), dtype=torch.float64))
    names = ["eq. 2 (no guide)", "eq. 27 (forward KL)", "q", "k3, bias-corrected"]
    columns = dict.fromkeys(names, torch.ones(3))
    figure = theory_figures.token_tree(tree, policy, "a title", columns)
    figure.draw_without_rendering()
    of_name = {text.get_text(): text.get_window_extent() for text in figure.axes[0].texts}
    boxes = [of_name[name] for name in names]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    leaves = max(shown.get_window_extent().x1 for shown in figure.axes[0].lines)
    assert leaves < boxes[0].x0 and boxes[-1].x1 <= figure.bbox.x1


def test_claims_shows_a_point_per_tree_and_the_median():
    by_name = {"sum": Loss(), "grpo": Loss("grpo")}
    frame = objectives.claims(range(4), by_name)
    figure = theory_figures.claims(frame)
    unequal = frame[frame["unequal"] & (frame["loss"] == "grpo")]
    for axis, claim in zip(figure.axes, objectives.CLAIMS, strict=True):
        values = unequal.loc[unequal["claim"] == claim, "difference"]
        drawn = axis.lines[1].get_ydata()
        assert drawn == pytest.approx(values.clip(lower=1e-13).to_numpy(), rel=1e-5)
        median = axis.collections[1].get_segments()[0][0][1]
        assert median == pytest.approx(values.clip(lower=1e-13).median(), rel=1e-5)
        assert [label.get_text() for label in axis.get_xticklabels()] == ["sum", "grpo"]


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
