"""Larger studies: their order, what is kept, and jobs of submitit's."""

import argparse
import signal
import subprocess
import sys

import pytest
from test_pipeline import TINY
from test_stages import calls, fake, starts, wait_for

from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.blocks import load_grid
from sage_lib.experiment.profile import load_profile
from sage_lib.files import read_lines
from sage_lib.pipeline import cli, grid, jobs

__all__ = ["fake"]  # the fixture

#: Two methods and seeds of one profile, then one more, then the base alone of another profile.
LITTLE = """
name: little
extends: smoke
train: [grpo, grpo_branch, grpo_token]
seeds: [1, 2]
evaluation: {methods: [grpo, grpo_branch, grpo_token]}
"""
GRID = """
name: trial
about: a trial
blocks:
  - {name: first, about: "two methods", profile: little.yaml, methods: [grpo_branch, grpo]}
  - {name: second, about: "one more", profile: little.yaml, methods: [grpo, grpo_token]}
  - {name: base, about: "a base", profile: little.yaml+model.seed=1}
"""
OTHER = "little+model.seed=1"


@pytest.fixture
def trial(fake, tmp_path):
    """The path of a grid of fake stages."""
    (tmp_path / "little.yaml").write_text(LITTLE)
    (tmp_path / "trial.yaml").write_text(GRID)
    fake(seconds=0.05)
    return tmp_path / "trial.yaml"


def done(tmp_path):
    """(profile, run) of what was done, in that order."""
    return [(call["profile"], call["run"]) for call in calls(tmp_path) if call["what"] == "end"]


def test_the_base_comes_before_the_runs_and_each_evaluation_after_its_run(trial):
    blocks = load_grid(trial)
    names = [(task.profile.name, task.run.name) for task in grid.jobs_of(blocks, [])]
    little = [name for profile, name in names if profile == "little"]
    assert little[:2] == ["sft", "entropies"] and little[2] == "eval-sft"
    assert little[3:] == [
        *("grpo_branch-s1", "eval-grpo_branch-s1", "grpo-s1", "eval-grpo-s1"),
        *("grpo_branch-s2", "eval-grpo_branch-s2", "grpo-s2", "eval-grpo-s2"),
        *("grpo_token-s1", "eval-grpo_token-s1", "grpo_token-s2", "eval-grpo_token-s2"),
    ]
    assert names[len(little) :] == [(OTHER, "sft"), (OTHER, "eval-sft")]
    of_block = grid.jobs_of([blocks[1]], [2])
    trained = [task.run.name for task in of_block if task.stage.name == "rl"]
    assert trained == ["grpo-s2", "grpo_token-s2"]


def test_a_grid_is_done_in_its_order_and_kept_afterwards(trial, tmp_path, capsys):
    words = ["grid", str(trial), "--only", "base", "first", "--seeds", "1", "--parallel", "1"]
    cli.main(words)
    little = ["sft", "entropies", "eval-sft", "grpo_branch-s1", "eval-grpo_branch-s1"]
    little += ["grpo-s1", "eval-grpo-s1"]
    expected = [(OTHER, "sft"), (OTHER, "eval-sft"), *(("little", name) for name in little)]
    assert done(tmp_path) == expected
    cli.main(words)
    assert len(starts(tmp_path)) == 9
    capsys.readouterr()
    cli.main(["grid", str(trial), "--dry-run"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    states = {(line[0], line[1]): " ".join(line[2:]) for line in lines}
    assert states["little", "rl/grpo-s1"] == "done" and states["little", "rl/grpo-s2"] == "to do"


def test_a_wrong_command_line_or_file_names_what_is_wrong(trial):
    for words, sentence in (
        (["grid", "none"], "there is no grid 'none'"),
        (["grid", str(trial), "--only", "third"], "no block 'third': choose one of first"),
        (["grid", str(trial), "--executor", "slurm", "--hours", "0.05"], "--hours 0.05: .* 0.1 or"),
        (["grid", str(trial), "--executor", "local", "--hours", "nan"], "--hours nan: .* 0.1 or"),
        (["grid", str(trial), "--seeds", "1", "99"], "has the seed 99: correct"),
        (["grid", str(trial), "--parallel", "0"], "--parallel 0: give 1 or more"),
    ):
        with pytest.raises(SystemExit, match=sentence):
            cli.main(words)
    for change, sentence in (
        ("methods: [grpx]", "block first: profile little has no method or family 'grpx'"),
        ("methods: [main]", "has no method or family 'main'"),
        ("families: [grpo]", "has no method or family 'grpo'"),
        ("method: [grpo]", "grid .*: blocks.0.method: extra inputs are not permitted"),
        ("methods: grpo", "grid .*: blocks.0.methods: .*valid list"),
    ):
        trial.write_text(GRID.replace("methods: [grpo_branch, grpo]", change))
        with pytest.raises(SageError, match=sentence) as caught:
            load_grid(trial)
        assert "\n" not in str(caught.value)
    blocks = GRID.partition("blocks:\n")[2]
    for text, sentence in (
        ("blocks: []", "at least 1 item"),
        (GRID + blocks, "two blocks 'first'"),
    ):
        trial.write_text(text)
        with pytest.raises(SageError, match=sentence):
            load_grid(trial)


def test_states_of_jobs_are_those_of_squeue():
    """Without sacct, which is missing where SLURM keeps no accounts. A job that was cancelled ends,
    and so does one that squeue no longer knows; one that is queued again does not."""
    watcher = grid.Watcher(delay_s=60)
    for job in ("3", "4", "5", "6", "7"):
        watcher.register_job(job)
    printed = b"3|RUNNING|node\n4|CANCELLED|node\n5|PENDING|\n6|COMPLETING|node\n9|FAILED|node\n"
    watcher._info_dict.update(watcher.read_info(printed))
    assert watcher._make_command()[0] == "squeue"
    over = {job: watcher.is_done(job, mode="cache") for job in ("3", "4", "5", "6", "7")}
    assert over == {"3": False, "4": True, "5": False, "6": False, "7": True}
    watcher._info_dict.update(watcher.read_info(b""))
    assert watcher.is_done("3", mode="cache")


def test_nobody_else_may_write_what_jobs_unpickle(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path))
    (tmp_path / "grids").mkdir(mode=0o777)
    options = argparse.Namespace(executor="local", partition=None, hours=1.0)
    grid.Submitit(options)
    assert (tmp_path / "grids").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_job_of_submitit_is_taken_up_again_when_it_is_to_stop(work_folder):
    """With its executor for one machine, and true work: SIGUSR2, by which SLURM stops a job for its
    time, has it queued again, and the run goes on from its checkpoint."""
    import psutil

    longer = TINY.replace("sft: {max_steps: 6", "sft: {max_steps: 200, save_steps: 20")
    longer = longer.replace("sft_data: {rows: 64}", "sft_data: {rows: 1600}")
    (work_folder / "tiny.yaml").write_text(longer)
    block = {"name": "base", "about": "", "profile": "tiny.yaml"}
    (work_folder / "own.yaml").write_text(str({"name": "own", "about": "", "blocks": [block]}))
    words = ["grid", str(work_folder / "own.yaml"), "--executor", "local", "--parallel", "1"]
    words = [sys.executable, "-m", "sage_lib.pipeline.cli", *words]
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(words, env=jobs.environment(threads=1), **more)
    build = work_folder / "build" / "tiny" / "sft"
    wait_for(lambda: [*build.glob("checkpoints/checkpoint-*")] or process.poll() is not None)
    job = [p for p in psutil.Process(process.pid).children(True) if "submitit" in str(p.cmdline())]
    job[-1].send_signal(signal.SIGUSR2)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    base = runs.sft_run(load_profile(work_folder / "tiny.yaml"))
    assert base.done() and "failed" not in output
    steps = [row["step"] for row in read_lines(build / "steps.jsonl")]
    assert steps == list(range(10, 201, 10)), "no step is lost or doubled"


def test_a_run_whose_policy_another_one_reads_comes_with_it():
    """The guide of `success` reads the first seed of `rft`, also if later seeds are asked for."""
    names = [job.run.name for job in grid.jobs_of(load_grid("guides"), [3408])]
    assert "success-s3408" in names
    assert names.index("rft-s3407") < names.index("success-s3408")


def test_a_profile_that_changes_while_its_runs_are_made_is_said(trial, tmp_path):
    blocks = load_grid(trial)
    job = next(job for job in grid.jobs_of(blocks, []) if job.run.name == "grpo-s1")
    (tmp_path / "little.yaml").write_text(LITTLE + "rl: {beta: 0.3}\n")
    with pytest.raises(SageError, match="profile little has changed since this began"):
        job.function(*job.arguments)
