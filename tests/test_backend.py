"""What trains: plain TRL and PEFT, or Unsloth, which must then be imported first."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sage_lib.algorithm import unsloth_first
from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import stages

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}


def fresh(code):
    """What a new process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()


@pytest.mark.parametrize(
    ("trl", "gpu", "triton", "needed"),
    [
        ("1.15.0", True, True, False),
        ("1.15.0", True, False, True),
        ("1.15.0", False, True, True),
        ("1.16.0", False, False, False),
        ("2.0.1", False, False, False),
    ],
)
def test_unsloth_is_needed_where_trl_has_no_kernel_for_this_machine(
    monkeypatch, trl, gpu, triton, needed
):
    monkeypatch.setattr(unsloth_first, "version", lambda name: trl)
    monkeypatch.setattr(unsloth_first, "has_gpu", lambda: gpu)
    monkeypatch.setattr(unsloth_first.importlib.util, "find_spec", lambda name: triton or None)
    assert unsloth_first.is_needed() is needed


def test_a_process_of_rl_imports_no_unsloth_where_trl_does_without():
    code = """
import sys
from sage_lib.algorithm import unsloth_first
unsloth_first.is_needed = lambda: False
import sage_lib.training.rl, sage_lib.training.replay
from sage_lib import SageTrainer
print("unsloth" in sys.modules, "trl" in sys.modules)
"""
    assert fresh(code)[-1] == "False True"


def test_without_unsloth_and_without_need_of_it_everything_imports():
    """``stages sft`` then has plain TRL, too; ``None`` there makes every import of it fail."""
    code = """
import sys
sys.modules["unsloth"] = sys.modules["unsloth_zoo"] = None
from sage_lib.algorithm import unsloth_first
unsloth_first.is_needed = unsloth_first.is_installed = lambda: False
unsloth_first.is_loaded = lambda: False
import sage_lib.training.sft, sage_lib.training.rft, sage_lib.training.rl
print(sage_lib.training.sft.SFTTrainer.__module__)
"""
    assert fresh(code)[-1] == "trl.trainer.sft_trainer"


def test_one_sentence_where_unsloth_is_needed_and_not_there():
    code = """
from sage_lib.algorithm import unsloth_first
unsloth_first.is_needed, unsloth_first.is_installed = (lambda: True), (lambda: False)
try:
    from sage_lib import SageTrainer
except Exception as error:
    print(type(error).__name__, error, sep=": ")
"""
    assert fresh(code)[-1] == (
        "SageError: Unsloth is needed here and not installed: install the extra unsloth, "
        "or trl 1.16 or newer, which trains without a GPU by itself"
    )


def test_unsloth_does_not_come_after_trl_on_a_gpu(monkeypatch):
    monkeypatch.setattr(unsloth_first, "is_loaded", lambda: False)
    monkeypatch.setattr(unsloth_first, "is_installed", lambda: True)
    monkeypatch.setattr(unsloth_first, "has_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "trl", object())
    with pytest.raises(SageError, match="imported before them: start a new process"):
        unsloth_first.load()


def test_the_setting_has_two_values_and_one_default():
    assert load_profile("smoke").compute.backend == load_profile("paper").compute.backend == "trl"
    with pytest.raises(SageError, match=r"no compute.backend 'vllm'; choose one of trl, unsloth"):
        load_profile("smoke+compute.backend=vllm")
    with pytest.raises(SageError, match=r"4 bits with Unsloth alone: set compute.backend"):
        load_profile("smoke+model.load_in_4bit=true")
    load_profile("smoke+model.load_in_4bit=true+compute.backend=unsloth")


def test_only_rl_by_unsloth_is_another_run():
    """Its loss is another one to the last digit; the base, and rounds of SFT, are the same."""
    plain, other = (load_profile("countdown" + c) for c in ("", "+compute.backend=unsloth"))
    assert runs.sft_run(plain).fingerprint == runs.sft_run(other).fingerprint
    for method in ("grpo", "rft"):
        both = [runs.rl_run(p, method, 3407).fingerprint for p in (plain, other)]
        assert (both[0] == both[1]) is (method == "rft")


@pytest.mark.parametrize(
    ("stage", "method", "backend", "installed", "loads"),
    [
        ("rl", "grpo", "trl", True, False),
        ("rl", "grpo", "unsloth", True, True),
        ("replay", "grpo", "unsloth", True, True),
        ("rl", "rft", "trl", True, True),  # fine-tuning, as SFT
        ("rl", "rft", "trl", False, False),
        ("evaluate", "grpo", "unsloth", True, False),
    ],
)
def test_a_stage_imports_unsloth_first_where_its_run_trains_with_it(
    monkeypatch, stage, method, backend, installed, loads
):
    profile = load_profile(f"countdown+compute.backend={backend}")
    loaded = []
    monkeypatch.setattr(unsloth_first, "is_installed", lambda: installed)
    monkeypatch.setattr(unsloth_first, "load", lambda: loaded.append(stage))
    stages._import_unsloth(profile, stages.STAGES[stage], runs.rl_run(profile, method, 3407))
    assert bool(loaded) is loads


def test_rl_is_refused_in_a_process_with_the_other_backend(monkeypatch):
    from sage_lib.training import rl

    monkeypatch.setattr(unsloth_first, "load", lambda: None)
    monkeypatch.setattr(rl, "REPLACED", True)
    with pytest.raises(SageError, match=r"train RL in a process of its own"):
        rl._by_unsloth(load_profile("smoke"))
    assert rl._by_unsloth(load_profile("smoke+compute.backend=unsloth"))


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
    done = subprocess.run([sys.executable, script, backend], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.strip().splitlines()[-1].removeprefix("SAID "))
    assert said["first"]["found"] == pytest.approx(said["first"]["expected"], abs=1e-4)
    assert said["first"]["padding"] > 0 and len(said["runs"]) == 6
