"""Runs that are killed at random moments end as undisturbed ones, and leave no process behind.

A kill is SIGKILL: to a worker, whose run the same call makes again, or to the runner itself, whose
workers then have to end themselves.
"""

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from sage_lib.files import read_json, read_lines
from sage_lib.pipeline import jobs

#: The one method has all that a resumed run could lose: noise of a guide, coins for rewards, fresh
#: prompts in the place of even groups, a log of exact evaluations; and checkpoints every few steps.
PROFILE = """
name: killed
extends: smoke
train: [killed]
model:
  architecture:
    {hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
     num_key_value_heads: 2}
sft_data: {rows: 192}
sft: {max_steps: 120, per_device_train_batch_size: 8, logging_steps: 1, save_steps: 15}
rl_data: {rows: 64}
rl: {max_steps: 40, per_device_train_batch_size: 16, max_completion_length: 12, save_steps: 6}
guide_defaults:
  branch: {threshold: 1.0, ratio: 0.2, threshold_quantile: null, clamp_quantile: null}
methods:
  killed: {label: Killed, guide: {name: random}, reward: random, dynamic_sampling: 2}
evaluation:
  data:
    - {name: countdown, rows: 16, seed: 1001, kinds: {both: 1.0}}
    - {name: countdown, rows: 16, seed: 1002, kinds: {forward: 1.0}}
    - {name: countdown, rows: 16, seed: 1003, kinds: {reverse: 1.0}}
  samples: 16
  ks: [1, 16]
  batch_size: 16
  max_new_tokens: 12
  every: 4
  traced: 4
  methods: null
compute: {parallel: 2, disk_gb: 0}
"""
RUNNER = """
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import stages
stages.run(load_profile("killed.yaml"), "sft", "entropies", "rl", "evaluation")
"""
KILLS = 8


def start(folder):
    folder.mkdir(exist_ok=True)
    (folder / "killed.yaml").write_text(PROFILE)
    own = {"SAGE_BUILD": str(folder / "build"), "SAGE_RESULTS": str(folder / "results")}
    with (folder / "output.txt").open("a") as output:
        more = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        more |= {"cwd": folder, "env": jobs.environment(threads=1) | own}
        return subprocess.Popen([sys.executable, "-c", RUNNER], start_new_session=True, **more)


def processes_of(folder):
    """Every process that works in a folder, known by the environment that it inherited."""
    found = []
    for process in psutil.process_iter():
        try:
            here = process.environ().get("SAGE_BUILD") == str(folder / "build")
            if here and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def progress(folder):
    """Lines of every log of steps and of all samples."""
    logs = [*folder.glob("build/killed/**/steps.jsonl"), *folder.glob("build/**/samples*.jsonl")]
    return sum(path.read_bytes().count(b"\n") for path in logs if path.is_file())


def made(folder):
    """What is made, by file: weights, logs of steps and exact values without their times, counts,
    samples and probabilities."""
    measured, found = folder / "results" / "measured" / "killed", {}
    for path in sorted([*measured.rglob("*.csv"), *measured.rglob("samples.jsonl.gz")]):
        found[str(path.relative_to(measured))] = hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(measured.rglob("*.jsonl")):
        still = [
            {k: row[k] for k in row if not re.search("time|second", k)} for row in read_lines(path)
        ]
        found[str(path.relative_to(measured))] = still
    for path in sorted(measured.rglob("record.json")):
        found[str(path.relative_to(measured))] = read_json(path).get("weights")
    return found


@pytest.mark.slow
def test_eight_kills_lose_nothing_and_leave_nothing(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait() == 0, (whole / "output.txt").read_text()[-3000:]
    expected, last = made(whole), progress(whole)
    weights = [expected[name] for name in ("sft/record.json", "rl/killed-s3407/record.json")]
    assert None not in weights and len(set(weights)) == 2, "a run that learns"
    rng, aims = random.Random(0), []
    for number in range(KILLS):  # each further on than the one before
        aims.append(int(last * (number + rng.random()) / KILLS))
    for number, aim in enumerate(aims):
        process = start(killed)
        while process.poll() is None and progress(killed) < aim:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.1)
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        workers = [child for child in children if "resource_tracker" not in str(child.cmdline())]
        if number % 2 and workers:
            workers[0].send_signal(signal.SIGKILL)
            process.wait()  # the others go on, and what was killed is named
        else:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        deadline = time.monotonic() + 300
        while processes_of(killed) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not processes_of(killed), f"kill {number} left a process"
    assert start(killed).wait() == 0, (killed / "output.txt").read_text()[-3000:]
    assert made(killed) == expected
    assert "ended by SIGKILL" in (killed / "output.txt").read_text()
