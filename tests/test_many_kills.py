"""Commands that are killed at random moments, or run two at once on one folder, end as undisturbed
ones: reproduce, publish and guide-gain. The figures are printed.

A kill is SIGKILL: to the command, whose workers then have to end themselves, or to a worker, whose
run the next command makes again.

The commands are those of the command line. Notebooks are left out, a user's profile may be
published, and published results are in the test's folder.
"""

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

from sage_lib.files import read_json, read_lines
from sage_lib.pipeline import jobs

pytestmark = pytest.mark.slow

#: How many; the variables have fewer, for a first look.
KILLS = int(os.environ.get("SAGE_KILLS", "50"))
PAIRS = int(os.environ.get("SAGE_PAIRS", "20"))
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
COMMAND = """
import sys
import zlib
from pathlib import Path
from sage_lib import paths
from sage_lib.pipeline import cli, figures, notebooks, plan, publish
from sage_lib.tasks.countdown import Countdown
paths.PUBLISHED = Path("published").resolve()
publish.YAML_ENDINGS = ()
notebooks.select = lambda only: []
plan.check_settings = lambda profile: None
figures.draw = lambda *arguments: None
# guide-gain needs right answers, and a model of this size finds hardly one: a hash says which are.
Countdown.are_correct = classmethod(
    lambda cls, problems, answers, verifier: [zlib.crc32(str(a).encode()) % 3 == 0 for a in answers]
)
if __name__ == "__main__":
    cli.main(sys.argv[1:])
"""
WORDS = {
    "reproduce": ["reproduce", "--profile", "killed.yaml", "--resume"],
    "publish": ["publish", "--profile", "killed.yaml"],
    "guide-gain": ["guide-gain", "--profile", "killed.yaml", "--out", "gain"],
}


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


def start(folder, name):
    """Start a command in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "killed.yaml").write_text(PROFILE)
    (folder / "command.py").write_text(COMMAND)
    own = {"SAGE_BUILD": str(folder / "build"), "SAGE_RESULTS": str(folder / "results")}
    with (folder / f"{name}.txt").open("a") as output:
        more = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        more |= {"cwd": folder, "env": jobs.environment(threads=1) | own}
        words = [sys.executable, "command.py", *WORDS[name]]
        return subprocess.Popen(words, start_new_session=True, **more)


def finish(folder, name):
    """Do a command to its end; the seconds that it took."""
    begun = time.monotonic()
    assert start(folder, name).wait() == 0, (folder / f"{name}.txt").read_text()[-3000:]
    return time.monotonic() - begun


def results(folder):
    """What the three commands made, by file."""
    found = {f"runs/{name}": value for name, value in made(folder).items()}
    for path in [*(folder / "published" / "killed").glob("*"), *(folder / "gain").glob("*.csv")]:
        found[f"{path.parent.name}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def wait_for_none(folder):
    deadline = time.monotonic() + 600
    while left := processes_of(folder):
        assert time.monotonic() < deadline, f"left: {[process.cmdline() for process in left]}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder in which nothing was disturbed, and the seconds of each command."""
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    seconds = {name: finish(folder, name) for name in WORDS}
    return folder, seconds


def stable(found):
    """Without files that hold times of runs, or the folder. The steps are those of runs/, too."""
    other = ("runs.parquet", "steps.parquet", "profile.json")
    return {name: value for name, value in found.items() if not name.endswith(other)}


def test_kills_at_random_moments_lose_nothing(whole, tmp_path, capsys):
    undisturbed, seconds = whole
    folder, rng, done = tmp_path / "killed", random.Random(0), Counter()
    last = progress(undisturbed)
    order = ["reproduce"] * (KILLS * 7 // 10)
    order += ["publish", "guide-gain"] * ((KILLS - len(order) + 1) // 2)
    aims = iter([int(last * (n + rng.random()) / KILLS * 10 / 7) for n in range(KILLS)])
    for number, name in enumerate(order[:KILLS]):
        if name != "reproduce" and order[number - 1] == "reproduce":
            finish(folder, "reproduce")
        process, aim = start(folder, name), next(aims)
        late = time.monotonic() + rng.random() * seconds[name] / 2
        while process.poll() is None:
            there = progress(folder) >= aim if name == "reproduce" else time.monotonic() > late
            if there:
                break
            time.sleep(0.01)
        time.sleep(rng.random() * 0.1)
        victims = [process]
        if name == "reproduce" and number % 2 and process.poll() is None:
            children = psutil.Process(process.pid).children()
            victims = [c for c in children if "resource_tracker" not in str(c.cmdline())] or victims
        done[name] += process.poll() is None
        for victim in victims[:1]:
            victim.send_signal(signal.SIGKILL)
        process.wait()
        wait_for_none(folder)
    for name in WORDS:
        finish(folder, name)
    with capsys.disabled():
        print(f"\nkilled before their end: {dict(done)} of {KILLS}")
    assert KILLS < 8 or "ended by SIGKILL" in (folder / "reproduce.txt").read_text()
    expected = stable(results(undisturbed))
    weights = {expected[f"runs/{run}/record.json"] for run in ("sft", "rl/killed-s3407")}
    assert None not in weights and len(weights) == 2, "a run that learns"
    assert stable(results(folder)) == expected


def test_two_commands_at_once_lose_nothing(whole, tmp_path, capsys):
    """Every pair of commands in turn, the second at a random moment of the first. What needs
    finished runs may be refused while there are none; it is then done at the end."""
    undisturbed, seconds = whole
    rng, said = random.Random(1), Counter()
    names = list(WORDS)
    pairs = [(a, b) for a in names for b in names]
    for number in range(PAIRS):
        first, second = pairs[number % len(pairs)]
        folder = tmp_path / f"pair{number}"
        if "reproduce" not in (first, second):
            shutil.copytree(undisturbed, folder)
            for made_there in ("published", "gain"):
                shutil.rmtree(folder / made_there)
        processes = [start(folder, first)]
        time.sleep(rng.random() * seconds[first] / 2)
        processes.append(start(folder, second))
        for name, process in zip((first, second), processes, strict=True):
            said[name, process.wait()] += 1
            text = (folder / f"{name}.txt").read_text()
            assert process.returncode in (0, 1) and "Traceback" not in text, text[-3000:]
        wait_for_none(folder)
        for name in names:
            finish(folder, name)
        assert stable(results(folder)) == stable(results(undisturbed)), (first, second)
        shutil.rmtree(folder)
    with capsys.disabled():
        print(f"\n{PAIRS} pairs; exit states: {dict(said)}")
