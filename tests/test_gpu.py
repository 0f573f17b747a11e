"""What only a GPU can show: make test-gpu. It takes minutes, mostly to compile.

Nothing else may use the card: vLLM stops where another process frees memory while it starts.

SageTrainer on plain TRL, on Unsloth's trainer and with vLLM, each in a process of its own; the
stages; and a short run of a pretrained model, where SAGE_GPU_MODEL names one.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from sage_lib.algorithm import unsloth_first

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HERE = Path(__file__).parent
#: Seconds that one process may take. On an H100 Unsloth compiled for more than 200.
LIMIT = 600
WAYS = [
    "trl",
    pytest.param(
        "unsloth",
        marks=pytest.mark.skipif(not unsloth_first.is_installed(), reason="no Unsloth: make"),
    ),
    pytest.param(
        "trl vllm",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("vllm") is None, reason="no vLLM is installed"
        ),
    ),
    pytest.param(
        "trl model",
        marks=pytest.mark.skipif(
            "SAGE_GPU_MODEL" not in os.environ,
            reason="SAGE_GPU_MODEL names a local folder with a small pretrained model",
        ),
    ),
]


@pytest.fixture(scope="module", autouse=True)
def card():
    """Said first, so that whatever fails is known to fail on it."""
    found, memory = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info()
    half = "with" if torch.cuda.is_bf16_supported() else "without"
    print(
        f"\n{found.name}, compute capability {found.major}.{found.minor}, {half} bfloat16, "
        f"{memory[0] / 1e9:.1f} of {memory[1] / 1e9:.1f} GB free, CUDA {torch.version.cuda}"
    )


def process(*words, **more):
    started = time.perf_counter()
    command, environment = [sys.executable, *words], os.environ | more
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    print(f"{' '.join(words)}: {time.perf_counter() - started:.0f} s, status {done.returncode}")
    return done


@cache
def run(way):
    done = process(str(HERE / "gpu_run.py"), *way.split())
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert lines, (done.stdout + done.stderr)[-3000:]
    said = json.loads(lines[-1].removeprefix("SAID "))
    print(json.dumps({key: value for key, value in said.items() if key != "runs"}))
    for name, one in said["runs"].items():
        print(f"  {name}: {one['seconds']:.1f} s, {json.dumps(one['log'][-1])}")
    return said


@pytest.mark.parametrize("way", WAYS)
def test_a_guide_reaches_the_loss_with_prompts_of_unequal_length(way):
    """The loss of a first batch, again from the ids of its tokens."""
    said = run(way)
    first, half = said["first"], said["dtype"] != "float32"
    assert first["padding"] > 0
    assert first["found"] == pytest.approx(first["expected"], abs=1e-3 if half else 1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_every_run_learns_and_starts_at_its_reference(way):
    for name, one in run(way)["runs"].items():
        log = one["log"]
        assert len(log) == 3, name
        assert all(math.isfinite(value) for row in log for value in row.values()), name
        assert 0 <= log[0]["kl_ref"] < 1e-3 and log[0]["grad_norm"] > 0, name
        if "no guide" not in name:
            assert log[0]["kl"] > 0.01 > 10 * log[0]["kl_ref"], "the KL is the one to q·pi_ref"


def test_plain_trl_has_no_unsloth_in_its_process_and_unsloth_has_its_own_trainer():
    assert not run("trl")["unsloth"] and "unsloth" not in run("trl")["class"].lower()
    if unsloth_first.is_installed():
        assert "unsloth" in run("unsloth")["class"].lower()


@pytest.mark.parametrize("backend", ["trl", "unsloth"])
def test_the_stages_train_a_base_and_a_policy(backend, tmp_path):
    """SFT by Unsloth where it is installed, RL by either, each in its process."""
    if backend == "unsloth" and not unsloth_first.is_installed():
        pytest.skip("no Unsloth")
    changes = {
        "sft.max_steps": 20,
        "train": "[grpo_branch]",
        "methods.grpo_branch.rl.max_steps": 3,
        "evaluation.every": 0,
        "evaluation.methods": "[grpo_branch]",
        "compute.backend": backend,
    }
    spec = "+".join(["smoke", *(f"{key}={value}" for key, value in changes.items())])
    for stage in ("sft", "entropies", "rl"):
        words = ("-m", "sage_lib.pipeline.cli", "stage", stage, "--profile", spec)
        done = process(*words, SAGE_BUILD=str(tmp_path), SAGE_RESULTS=str(tmp_path / "results"))
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
