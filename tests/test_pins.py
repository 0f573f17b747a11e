"""Trained weights, bit for bit, as they were when they were pinned. Another processor rounds in
another way: where it has no hashes here, the test is skipped. Processors of one name may still
round differently, so a name may have several sets of hashes, and the weights must equal one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

PROFILE = """
name: pin
extends: smoke
model: {architecture: {hidden_size: 48, intermediate_size: 96, num_hidden_layers: 2,
                       num_attention_heads: 4, num_key_value_heads: 4}}
task_defaults: {countdown: {fewest: 2, most: 2, limit: 9}}
sft_data: {rows: 4800, distinct: 20, early_rare_share: 0.03}
sft: {max_steps: 100, per_device_train_batch_size: 48}
rl_data: {rows: 12, kinds: {both: 1.0, forward: 0.0, reverse: 0.0}}
rl: {max_steps: 5, per_device_train_batch_size: 16, max_completion_length: 24}
guide_defaults:
  branch: {threshold: 0.5, ratio: 0.3, threshold_quantile: null, clamp_quantile: null}
methods:
  grpo: {rl: {max_steps: 5}}
  branch: {label: B, guide: {name: branch}}
  forward: {label: F, kl_form: forward_kl}
  dapo: {label: D, rl: {loss_type: dapo, epsilon_high: 0.28}, dynamic_sampling: 3}
train: [grpo, branch, forward, dapo]
evaluation:
  {methods: null, every: 0, samples: 8, ks: [1, 8],
   data: [{name: countdown, rows: 4, seed: 1001, kinds: {both: 1.0}}]}
"""
NAMES = ("sft", "grpo", "branch", "forward", "dapo")
HASHES = {
    "AMD EPYC, AVX512": [
        ("01cba63a4078", "a433b12a0b51", "4230783df021", "f8f85e852b91", "dbfa8c725647"),
        ("f2075f64d134", "b0d7725c86e8", "ab56359b1571", "f59e9688a736", "ed214b4db49c"),
    ],
}
RUN = """
import sys
name, file = sys.argv[1:]
if name == "sft":
    from sage_lib.training.sft import train
else:
    from sage_lib.training.rl import train
from sage_lib.experiment import runs
from sage_lib.experiment.profile import load_profile
profile = load_profile(file)
run = runs.sft_run(profile) if name == "sft" else runs.rl_run(profile, name, 3407)
run.prepare()
print("weights", train(runs.STAGES[run.stage].gets(run), run)["weights"])
"""


def processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else ''}, {torch.backends.cpu.get_cpu_capability()}"


def test_the_trained_weights_are_those_that_were_pinned(work_folder, monkeypatch):
    pinned = HASHES.get(processor())
    if pinned is None:
        pytest.skip(f"no weights are pinned for the processor {processor()!r}")
    (work_folder / "pin.yaml").write_text(PROFILE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    weights = []
    for name in NAMES:
        words = [sys.executable, "-c", RUN, name, str(work_folder / "pin.yaml")]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        weights.append(done.stdout.split("weights ")[-1].strip())
    assert tuple(weights) in pinned
