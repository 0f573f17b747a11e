"""What trains: plain TRL and PEFT, or Unsloth, which must then be imported first."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch

from sage_lib.algorithm import unsloth_first
from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.profile import load_profile
from sage_lib.paths import ROOT
from sage_lib.pipeline import stages

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}


@pytest.mark.parametrize(
    ("trl", "gpu", "triton", "needed"),
    [
        ("1.15.0", True, True, False),
        ("1.15.0", True, False, True),
        ("1.15.0", False, True, True),
        ("1.16.0", False, False, False),
    ],
)
def test_unsloth_is_needed_where_trl_has_no_kernel_for_this_machine(
    monkeypatch, trl, gpu, triton, needed
):
    monkeypatch.setattr(unsloth_first, "version", lambda name: trl)
    monkeypatch.setattr(unsloth_first, "has_gpu", lambda: gpu)
    monkeypatch.setattr(unsloth_first.importlib.util, "find_spec", lambda name: triton or None)
    assert unsloth_first.is_needed() is needed


#: What a new process does after it has loaded ``unsloth_first``, and its last line.
PROCESSES = [
    (
        "import sys; unsloth_first.is_needed = lambda: False\n"
        "import sage_lib.training.rl, sage_lib.training.replay\n"
        "print('unsloth' in sys.modules, 'trl' in sys.modules)",
        "False True",
    ),
    (  # None makes every import of it fail
        "import sys; sys.modules['unsloth'] = sys.modules['unsloth_zoo'] = None\n"
        "for name in ('is_needed', 'is_installed', 'is_loaded'):\n"
        "    setattr(unsloth_first, name, lambda: False)\n"
        "import sage_lib.training.sft, sage_lib.training.rft, sage_lib.training.rl\n"
        "print(sage_lib.training.sft.SFTTrainer.__module__)",
        "trl.trainer.sft_trainer",
    ),
    (
        "unsloth_first.is_needed, unsloth_first.is_installed = (lambda: True), (lambda: False)\n"
        "try:\n    from sage_lib import SageTrainer\n"
        "except Exception as error: print(error)",
        "Unsloth is needed here and not installed: install the extra unsloth, "
        "or trl 1.16 or newer, which trains without a GPU by itself",
    ),
]


@pytest.mark.parametrize(("code", "said"), PROCESSES)
def test_a_process_imports_unsloth_where_it_is_needed_alone(code, said):
    assert forks.fresh(f"from sage_lib.algorithm import unsloth_first\n{code}")[-1] == said


def test_unsloth_does_not_come_after_trl_on_a_gpu(monkeypatch):
    monkeypatch.setattr(unsloth_first, "is_loaded", lambda: False)
    monkeypatch.setattr(unsloth_first, "is_installed", lambda: True)
    monkeypatch.setattr(unsloth_first, "has_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "trl", object())
    with pytest.raises(SageError, match="imported before them: start a new process"):
        unsloth_first.load_unsloth()


@pytest.mark.parametrize(
    ("stage", "method", "backend", "installed", "loads"),
    [
        ("rl", "grpo", "trl", True, False),
        ("rl", "grpo", "unsloth", True, True),
        ("replay", "grpo", "unsloth", True, True),
        ("rl", "rft", "trl", True, True),  # fine-tuning, as SFT
        ("rl", "rft", "trl", False, False),
        ("evaluation", "grpo", "unsloth", True, False),
    ],
)
def test_a_stage_imports_unsloth_first_where_its_run_trains_with_it(
    monkeypatch, stage, method, backend, installed, loads
):
    profile = load_profile(f"study+compute.backend={backend}")
    loaded = []
    monkeypatch.setattr(unsloth_first, "is_installed", lambda: installed)
    monkeypatch.setattr(unsloth_first, "load_unsloth", lambda: loaded.append(stage))
    run = dataclasses.replace(runs.rl_run(profile, method, 3407), stage=stage)
    stages._import_unsloth(profile, run)
    assert bool(loaded) is loads


def test_rl_is_refused_in_a_process_with_the_other_backend(monkeypatch, tmp_path):
    from sage_lib.training import rl

    monkeypatch.setattr(rl, "REPLACED", True)
    profile = load_profile("smoke")
    with pytest.raises(SageError, match=r"train RL in a separate process"):
        rl.make_trainer(profile.training("grpo", 3407), profile, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_backends_train_the_same_model(tiny_model, dtype):
    """Weights, adapter and what is trained, bit for bit: on a CPU Unsloth has transformers' models
    and PEFT's adapters, too."""
    from sage_lib.training.models import add_lora, load_model

    pytest.importorskip("unsloth")
    profile = load_profile(f"smoke+model.dtype={dtype}")
    made = []
    for by_unsloth in (False, True):
        model, tokenizer = load_model(profile, tiny_model, False, False, by_unsloth)
        torch.manual_seed(by_unsloth)  # which must not matter
        made.append((add_lora(model, LORA, 7, False, by_unsloth), tokenizer))
    (plain, mine), (fast, theirs) = made
    assert mine.chat_template == theirs.chat_template and mine.get_vocab() == theirs.get_vocab()
    assert mine.pad_token_id == theirs.pad_token_id
    ours, others = dict(plain.named_parameters()), dict(fast.named_parameters())
    assert ours.keys() == others.keys()
    for name, weight in ours.items():
        assert weight.dtype == others[name].dtype and torch.equal(weight, others[name])
        assert weight.requires_grad == others[name].requires_grad == ("lora_" in name)
    assert {str(w.dtype) for n, w in ours.items() if "lora_" not in n} == {f"torch.{dtype}"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trl", "unsloth"])
def test_what_make_test_gpu_starts_runs_here_too(backend):
    """On a processor: tests/test_gpu.py looks at the same on a GPU."""
    script = Path(__file__).with_name("gpu_run.py")
    printed = forks.output_of([sys.executable, script, backend])
    said = json.loads(printed.strip().splitlines()[-1].removeprefix("SAID "))
    assert said["first"]["found"] == pytest.approx(said["first"]["expected"], abs=1e-4)
    assert said["first"]["padding"] > 0 and len(said["runs"]) == 6


def test_an_unsloth_that_cannot_be_imported_is_one_sentence(tmp_path):
    """What an adopter met: 'NoneType' object has no attribute 'apply', from deep within."""
    (tmp_path / "unsloth.py").write_text("None.apply\n")
    code = "from sage_lib.algorithm import unsloth_first as first\n"
    code += "first.is_needed = lambda: True\nimport sage_lib.algorithm.backend\n"
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sage_lib.errors.SageError: Unsloth is needed here and cannot be import")
    assert "no attribute 'apply'" in last and "trl 1.16 or newer" in last
