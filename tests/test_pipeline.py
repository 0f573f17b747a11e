"""The three stages end to end on a model of a few thousand parameters: LoRA SFT that is merged, RL that is killed, samples."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

from sage_lib import files
from sage_lib.evaluation import counts
from sage_lib.experiment import records, runs
from sage_lib.experiment.profile import load_profile
from sage_lib.paths import PROFILES, ROOT
from sage_lib.training import callbacks

SMALLER = [  # smoke, two orders of magnitude down
    ("name: smoke", "name: tiny"),
    ("hidden_size: 128", "hidden_size: 32"),
    ("intermediate_size: 384", "intermediate_size: 32"),
    ("num_hidden_layers: 4", "num_hidden_layers: 1"),
    ("num_attention_heads: 4", "num_attention_heads: 2"),
    ("num_key_value_heads: 4", "num_key_value_heads: 2"),
    ("rows: 15000", "rows: 64"),
    ("rows: 2000", "rows: 64"),
    ("max_steps: 320", "max_steps: 6"),
    ("per_device_train_batch_size: 96", "per_device_train_batch_size: 8"),
    ("sft_lora: null", "sft_lora: {r: 4, lora_alpha: 8, target_modules: [q_proj, v_proj]}"),
    ("max_steps: 4 ", "max_steps: 24 "),
    ("per_device_train_batch_size: 64", "per_device_train_batch_size: 16"),
    ("max_completion_length: 48", "max_completion_length: 12"),
    ("samples: 32 ", "samples: 8 "),
    ("batch_size: 512", "batch_size: 16"),
    ("ks: [1, 2, 4, 8, 16, 32]", "ks: [1, 8]"),
    ("rows: 8,", "rows: 2,"),
    ("max_new_tokens: 48", "max_new_tokens: 12"),
    ("threshold: null ", "threshold: 1.0 "),
    ("ratio: null ", "ratio: 0.2 "),
    ("threshold_quantile: 0.90 ", "threshold_quantile: null "),
    ("clamp_quantile: 0.999 ", "clamp_quantile: null "),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    text = (PROFILES / "smoke.yaml").read_text()
    for old, new in SMALLER:
        assert old in text, old
        text = text.replace(old, new)
    # An untrained policy earns nothing, and a run of equal rewards stops after 50 steps: 24 steps stay below that.
    (folder / "tiny.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAGE_BUILD", str(folder / "build"))
        patch.setenv("SAGE_RESULTS", str(folder))
        yield load_profile(folder / "tiny.yaml")


def start(profile, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "sage_lib.pipeline.stages", *words, "--profile", profile.path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ},
    )


def finish(profile, *words):
    process = start(profile, *words)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]


@pytest.fixture(scope="module")
def base(tiny):
    finish(tiny, "sft")
    return runs.sft_run(tiny)


def test_sft_merges_its_adapter_and_records_what_it_did(tiny, base):
    assert base.done() and not list(base.model.glob("adapter*")), (
        "RL's reference is one plain model"
    )
    record = records.load(base.record)
    assert (
        record["rows"] == 64 and record["seconds"] > 0 and record["settings"]["sft.max_steps"] == 6
    )
    assert json.loads((base.measured / "entropy.json").read_text())["tokens"] > 0


@pytest.mark.parametrize("method", ["grpo_token", "dapo_branch"])
def test_a_run_killed_at_random_points_ends_at_the_very_same_weights(tiny, base, method, tmp_path):
    """Noise of a guide, fresh prompts of dynamic sampling, optimiser, schedule, reference: all survive kill -9, thrice."""
    words = ("rl", "--method", method, "--seed", "3407")
    run = runs.rl_run(tiny, method, 3407)
    rng = random.Random(method)
    for step in sorted(rng.sample(range(2, 23), 3)):
        process = start(tiny, *words)
        deadline = time.monotonic() + 120
        while len(files.read_lines(run.live_steps)) < step:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][
                -3000:
            ]
            time.sleep(0.002)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not run.done()
    finish(tiny, *words)
    killed = records.load(run.record)
    assert [r["step"] for r in files.read_lines(run.measured / "steps.jsonl")] == list(
        range(1, 25)
    ), "no step is lost or doubled"
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # the same run from the same base, undisturbed, elsewhere
        shutil.copytree(base.build, tmp_path / "build" / tiny.name / "sft")
        shutil.copytree(base.measured, tmp_path / "data" / "measured" / tiny.name / "sft")
        patch.setenv("SAGE_RESULTS", str(tmp_path))
        patch.setenv("SAGE_BUILD", str(tmp_path / "build"))
        finish(tiny, *words)
        whole = records.load(runs.rl_run(tiny, method, 3407).record)
    assert killed["reference"] == whole["reference"] and killed["weights"] == whole["weights"]


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    for step, whole in ((4, True), (8, True), (12, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if whole:
            (tmp_path / f"checkpoint-{step}" / callbacks.WHOLE).touch()
    assert callbacks.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")
    assert callbacks.last_checkpoint(tmp_path / "none") is None


def test_traces_agree_with_the_guides_formulas_and_with_themselves(tiny, base):
    finish(tiny, "rl", "--method", "grpo", "--seed", "3407")
    finish(tiny, "trace")
    run = runs.trace_run(tiny)
    assert run.done()
    shown, measured = (
        json.loads((run.measured / f"{name}.json").read_text()) for name in ("traces", "signals")
    )
    for token in shown["tokens"]:  # eq. 11, by hand
        assert token["branch"] == pytest.approx(
            min(1.4, 1 + 0.2 * max(0.0, token["entropy"] - 1.0)), abs=1e-6
        )
        assert (
            token["pi"] == pytest.approx(math.exp(-token["surprisal"]), rel=1e-5)
            and 0.6 <= token["random"] <= 1.4
        )
    rows = files.read_lines(run.samples)
    assert len(rows) == 6 * 8 and measured["entropy"]["tokens"] == sum(
        len(r["tokens"]) for r in rows
    )
    assert max(t["entropy"] for t in shown["tokens"]) == pytest.approx(
        max(t["entropy"] for r in rows for t in r["tokens"])
    )
    assert 0 < measured["kept_mass"]["lowest"] <= measured["kept_mass"]["mean"] <= 1
    updates, impact = (pd.read_csv(run.measured / f"{name}.csv") for name in ("updates", "impact"))
    assert (
        updates["tokens"].sum() == measured["entropy"]["tokens"]
        and updates["entropy"].is_monotonic_increasing
    )
    assert set(impact["token"]) == {"most uncertain", "another"} and impact[
        ["kept", "replaced"]
    ].isin([i / 16 for i in range(17)]).all(axis=None)


def test_evaluation_counts_every_sample_and_goes_on_after_a_kill(tiny, base):
    finish(tiny, "evaluate")
    run = runs.evaluation_run(tiny, base)
    table = counts.read(run.measured / "counts.csv")
    assert len(table) == 8 and (table["n"] == 8).all()
    whole, kept = run.samples.read_text(), (run.measured / "samples.jsonl.gz").read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 64
    run.samples.write_text(
        "".join(lines[:19]) + lines[19][:40]
    )  # as a kill in the middle of a write leaves it
    run.record.unlink()
    finish(tiny, "evaluate")
    assert (
        run.samples.read_text() == whole
        and (run.measured / "samples.jsonl.gz").read_bytes() == kept
    )


def test_two_processes_evaluate_to_the_same_samples(tiny, base, tmp_path):
    run = runs.evaluation_run(tiny, base)
    if not run.done():
        finish(tiny, "evaluate")
    kept = (run.measured / "samples.jsonl.gz").read_bytes()
    shutil.copytree(base.build, tmp_path / "build" / tiny.name / "sft")
    shutil.copytree(base.measured, tmp_path / "data" / "measured" / tiny.name / "sft")
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "accelerate" / "cpu_gloo.yaml"),
        "--main_process_port",
        "0",
        "-m",
        "sage_lib.pipeline.stages",
        "evaluate",
        "--profile",
        tiny.path,
    ]
    done = subprocess.run(
        launch,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "SAGE_BUILD": str(tmp_path / "build"), "SAGE_RESULTS": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    evaluation = tmp_path / "data" / "measured" / tiny.name / "evaluation" / "sft"
    assert (evaluation / "samples.jsonl.gz").read_bytes() == kept
    drawn = [
        len(files.read_lines(p))
        for p in (tmp_path / "build" / tiny.name / "evaluation" / "sft").glob("samples*.jsonl")
    ]
    assert sorted(drawn) == [32, 32], "each process drew its share and nothing twice"


def test_rl_without_its_reference_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path))
    process = start(tiny, "rl", "--method", "grpo", "--seed", "3407")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and output.strip().splitlines()[-1].startswith(
        "error: RL starts from the SFT model"
    )
