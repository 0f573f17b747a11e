"""The grid runner: order, states, kills, failures and collapses, several runners, submitit."""

import argparse
import signal
import subprocess
import sys
from collections import Counter

import pytest
from test_stages import calls, fake, is_alive, starts, wait_for

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import records, runs
from sage_lib.experiment.grid import load_grid
from sage_lib.experiment.profile import load_profile
from sage_lib.files import read_lines, write_json
from sage_lib.pipeline import cli, grid, stages
from sage_lib.pipeline.loaded import Loader

__all__ = ["fake"]  # the fixture

#: Two methods and seeds of one profile, then the base alone of another one.
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


#: What makes a process a quick runner of fake stages.
QUICK = """
import submitit
from sage_lib.pipeline import cli, grid, stages
grid.EVERY, grid.NICE, submitit.Job._results_timeout_s = 0.1, 0, 1
stages.PROGRAM = "fake_stages"
"""
#: And has it fork them from one process: for tests in which no runner is ended.
FORKED = """
from pathlib import Path
from sage_lib.pipeline.loaded import Loader
loader = Loader(stages.PROGRAM, [], Path("/dev/null"), stages.environment())
launch = stages.launch
stages.launch = lambda profile, job: launch(profile, job, loader)
"""


@pytest.fixture
def trial(fake, tmp_path):
    """The path of a grid of fake stages."""
    (tmp_path / "little.yaml").write_text(LITTLE)
    (tmp_path / "trial.yaml").write_text(GRID)
    fake(seconds=0.1)
    return tmp_path / "trial.yaml"


def runner(trial, *words, forked=False):
    """A process of the grid runner."""
    return subprocess.Popen(
        [sys.executable, "-uc", QUICK + FORKED * forked + "cli.main()", "grid", str(trial), *words],
        env=stages.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def quick(fake, tmp_path, monkeypatch):
    """The same for the runner in this process."""
    log = tmp_path / "loaded.log"
    launch, loader = stages.launch, Loader("fake_stages", [], log, stages.environment())
    monkeypatch.setattr(stages, "launch", lambda profile, job: launch(profile, job, loader))
    monkeypatch.setattr(grid, "EVERY", 0.1)
    monkeypatch.setattr(grid, "NICE", 0)
    yield
    loader.end()


def done(tmp_path):
    """(profile, run) of what was done, in that order."""
    return [(call["profile"], call["run"]) for call in calls(tmp_path) if call["what"] == "end"]


def all_of(trial):
    return [(t.profile.name, t.run().name) for t in grid.tasks(load_grid(trial), [], [])]


def test_the_base_comes_before_the_runs_and_each_evaluation_after_its_run(trial):
    names = all_of(trial)
    little = [name for profile, name in names if profile == "little"]
    assert little == [
        *("sft", "entropies", "eval-sft"),
        *("grpo_branch-s1", "eval-grpo_branch-s1", "grpo-s1", "eval-grpo-s1"),
        *("grpo_branch-s2", "eval-grpo_branch-s2", "grpo-s2", "eval-grpo-s2"),
        *("grpo_token-s1", "eval-grpo_token-s1", "grpo_token-s2", "eval-grpo_token-s2"),
    ]
    assert names[len(little) :] == [(OTHER, "sft"), (OTHER, "eval-sft")]
    of_block = grid.tasks(load_grid(trial), ["second"], [2])
    assert [t.run().name for t in of_block if t.stage == "rl"] == ["grpo-s2", "grpo_token-s2"]


def test_a_grid_is_done_in_its_order_and_kept_afterwards(trial, quick, tmp_path, capsys):
    words = ["grid", str(trial), "--only", "base", "first", "--seeds", "1", "--parallel", "1"]
    cli.main(words)
    assert done(tmp_path) == [
        *((OTHER, name) for name in ("sft", "eval-sft")),
        *(("little", name) for name in ("sft", "entropies", "eval-sft")),
        *(("little", name) for name in ("grpo_branch-s1", "eval-grpo_branch-s1")),
        *(("little", name) for name in ("grpo-s1", "eval-grpo-s1")),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 of 9 done, time left not known yet; at most 1 at a time"
    assert lines[1] == f"{OTHER}/sft: started"
    assert lines[2].startswith(f"{OTHER}/sft: finished, ") and "1 of 9 done, " in lines[2]
    assert lines[-1].endswith("9 of 9 done, about 0 h 00 min left") and len(lines) == 1 + 2 * 9
    cli.main(words)
    assert len(starts(tmp_path)) == 9
    assert capsys.readouterr().out.startswith("9 of 9 done, about 0 h 00 min left")


def test_other_seeds_of_what_failed_twice_are_not_started(fake, trial, tmp_path):
    fake(seconds=0.05, **{"grpo-s1": "fail"})
    process = runner(trial, "--only", "second", "--parallel", "1", forked=True)
    output = process.communicate()[0]
    assert process.returncode == 1
    words = "little/rl/grpo-s2 was not started: little/rl/grpo-s1 failed, of the same method"
    assert words in output
    made = {name for _, name in done(tmp_path)}
    assert "grpo_token-s2" in made and "grpo-s2" not in {c["run"] for c in starts(tmp_path)}


def test_failures_are_tried_twice_and_stop_nothing_else(fake, trial, tmp_path):
    fates = {"grpo-s1": "fail", "grpo_branch-s1": "fail once", "grpo_token-s1": "collapse"}
    fake(seconds=0.1, **fates)
    process = runner(trial, "--only", "second", "first", "--seeds", "1", forked=True)
    output = process.communicate()[0]
    assert process.returncode == 1
    lines = output.splitlines()
    assert sum("little/rl/grpo-s1 failed after" in line for line in lines[:-1]) == 2
    assert "failed after" in lines[-1] and lines[-1].startswith("error: little/rl/grpo-s1 failed")
    assert lines[-1].endswith("little/evaluation/grpo-s1 was not done: it needs little/rl/grpo-s1")
    assert any("grpo_branch-s1" in line and "it is tried once more" in line for line in lines)
    assert any("little/rl/grpo_token-s1: collapsed at step 4: told to" in line for line in lines)
    made = {name for _, name in done(tmp_path)}
    assert {"eval-grpo_branch-s1", "eval-grpo_token-s1"} <= made and "grpo-s1" not in made
    tried = Counter(call["run"] for call in starts(tmp_path))
    assert tried["grpo-s1"] == 2 and tried["grpo_branch-s1"] == 2 and tried["grpo_token-s1"] == 1


def test_a_killed_runner_leaves_nothing_running_and_the_next_one_goes_on(fake, trial, tmp_path):
    fake(seconds=0.1)
    first = runner(trial, "--only", "second", "--seeds", "1", "--parallel", "1")
    wait_for(lambda: ("little", "eval-sft") in done(tmp_path))
    first.kill()
    first.communicate()
    before = starts(tmp_path)
    fake(seconds=0.1)
    second = runner(trial, "--only", "second", "--seeds", "1", "--parallel", "1")
    output = second.communicate()[0]
    assert second.returncode == 0, output
    assert not any(is_alive(call["pid"]) for call in before)
    assert sorted(done(tmp_path)) == sorted(set(done(tmp_path))), "nothing is done twice"
    assert len(done(tmp_path)) == 7


def test_a_terminated_runner_ends_its_runs(fake, trial, tmp_path):
    fake(seconds=60)
    process = runner(trial)
    [call] = wait_for(lambda: calls(tmp_path))
    process.terminate()
    process.communicate()
    assert process.returncode == 143 and not is_alive(call["pid"])


def test_two_runners_share_the_work(fake, trial, tmp_path):
    fake(until=str(tmp_path / "go"))
    words = ["--only", "second", "--seeds", "1", "--parallel", "1"]
    both = [runner(trial, *words, forked=True)]
    wait_for(lambda: calls(tmp_path))
    both.append(runner(trial, *words, forked=True))
    assert any("what is left waits for runs of other" in line for line in both[1].stdout)
    (tmp_path / "go").touch()
    outputs = [one.communicate()[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], outputs
    assert len(done(tmp_path)) == len(set(done(tmp_path))) == 7
    shares = [text.count(": finished, ") for text in outputs]
    assert sum(shares) == 7 and min(shares) > 0, outputs
    assert sum(text.count(": made by another process; ") for text in outputs) == 7


def test_runs_never_use_more_than_the_cores(trial, monkeypatch):
    started = []

    class Executor:
        cores = 1.0

        def start(self, profile, job):
            started.append(job.run.name)
            return self

        def poll(self):
            return None

        def end(self, handles):
            pass

    one = grid.Runner(grid.tasks(load_grid(trial), [], []), Executor(), parallel=4)
    one.start_next()
    assert started == ["sft"], "of the other profile, too, the base waits for the cores"
    with pytest.raises(SageError, match="--parallel is 1 or more"):
        grid._at_a_time(0, Executor(), one.tasks)
    assert grid._at_a_time(8, Executor(), one.tasks) == 1


def test_what_is_published_is_not_done_again(trial, tmp_path, monkeypatch, capsys):
    """By the settings alone: the weights that made it lie elsewhere."""
    monkeypatch.setattr(paths, "PUBLISHED", tmp_path / "published")
    loaded, profile = load_grid(trial), load_profile(tmp_path / "little.yaml")

    def publish(run, **changes):
        fields = dict.fromkeys(records.KEYS, "") | {"recipe": run.recipe, "seconds": 5.0}
        fields |= changes
        folder = paths.measured("little", published=True) / run.place
        write_json(folder / "record.json", fields)

    policy = runs.rl_run(profile, "grpo", 1)
    publish(policy)
    publish(runs.evaluation_run(profile, policy))
    other = runs.rl_run(profile, "grpo_token", 1)
    publish(other)  # without its evaluation, which needs its weights
    publish(runs.rl_run(profile, "grpo_token", 2), recipe="of other settings")
    every = grid.tasks(loaded, ["second"], [])
    published = grid.published_seconds(every)
    left = [task.run().name for task in grid.without_published(every, published)]
    assert left == [
        *("sft", "entropies", "eval-sft", "grpo_token-s1", "eval-grpo_token-s1"),
        *("grpo-s2", "eval-grpo-s2", "grpo_token-s2", "eval-grpo_token-s2"),
    ]
    cli.main(["grid", str(trial), "--only", "second", "--dry-run"])
    printed = capsys.readouterr().out.splitlines()
    states = {tuple(line.split()[:2]): line.split()[2] for line in printed[1:-1]}
    assert states["little", "rl/grpo-s1"] == "published" and states["little", "sft"] == "to"
    # grpo-s1, its evaluation and grpo_token-s1 are; the last one is done again for its evaluation.
    assert printed[-1].startswith("0 of 9 done, 2 more published, time left not known yet; ")


def test_published_seconds_stand_in_until_runs_are_done_here(trial):
    """Means by hand: two published runs of 100 and 300 s, then one of 40 s that was done here."""
    every = grid.tasks(load_grid(trial), ["second"], [])
    trained = [task for task in every if task.stage == "rl"]
    published = dict(zip([task.key for task in trained], (100.0, 300.0), strict=False))
    left = [task for task in trained if task.key not in published]
    runner = grid.Runner(left, grid.Processes(), 1, published=published)
    assert runner.mean(left[0]) == 200
    minutes = round(len(left) * 200 / 60)
    done = f"0 of {len(left)} done, 2 more published"
    assert runner.opening() == f"{done}, about 0 h {minutes:02d} min left"
    runner.note(left[0], 40.0)
    assert runner.mean(left[1]) == 40


def test_the_recipe_is_of_the_settings_and_the_fingerprint_of_the_weights_too(trial, tmp_path):
    profile = load_profile(tmp_path / "little.yaml")
    before = {task.key: task.run() for task in grid.tasks(load_grid(trial), ["first"], [])}
    base = runs.sft_run(profile)
    base.model.mkdir(parents=True)
    record = dict.fromkeys(records.KEYS, "") | {"weights": "1", "fingerprint": base.fingerprint}
    record["seconds"] = 1.0
    write_json(base.record, record)
    for task in grid.tasks(load_grid(trial), ["first"], []):
        assert task.run().recipe == before[task.key].recipe
        same = task.run().fingerprint == before[task.key].fingerprint
        assert same == (task.stage == "sft")
    warmer = load_profile(f"{tmp_path / 'little.yaml'}+sft.max_steps=7")
    for make in (runs.sft_run, runs.entropy_run, lambda p: runs.rl_run(p, "grpo", 1)):
        assert make(warmer).recipe != make(profile).recipe
    sampled = load_profile(f"{tmp_path / 'little.yaml'}+evaluation.seed=7")
    policies = [runs.rl_run(p, "grpo", 1) for p in (profile, sampled)]
    assert policies[0].recipe == policies[1].recipe
    evaluations = [
        runs.evaluation_run(p, r) for p, r in zip((profile, sampled), policies, strict=True)
    ]
    assert evaluations[0].recipe != evaluations[1].recipe


def test_dry_run_lists_states_and_times(fake, trial, quick, tmp_path, capsys):
    words = ["grid", str(trial), "--only", "second", "--seeds", "1"]
    fake(seconds=0.1, **{"grpo-s1": "collapse", "grpo_token-s1": "fail"})
    with pytest.raises(SystemExit, match="error: little/rl/grpo_token-s1 failed"):
        cli.main(words)
    capsys.readouterr()
    cli.main([*words, "--dry-run"])
    printed = capsys.readouterr().out.splitlines()
    by_run = {line.split()[1]: " ".join(line.split()[2:]) for line in printed[1:-1]}
    assert by_run["sft"].startswith("done ")
    assert by_run["rl/grpo-s1"].startswith("collapsed at step 4: told to")
    assert by_run["rl/grpo_token-s1"].startswith("begun ~")
    assert by_run["evaluation/grpo_token-s1"].startswith("to do ~")
    assert printed[-1].startswith("5 of 7 done, about 0 h 00 min left; ")


def test_a_wrong_command_line_names_what_there_is(trial):
    for words, sentence in (
        (["grid", "none"], "there is no grid 'none'"),
        (["grid", str(trial), "--only", "third"], "has no block 'third': choose one of first"),
        (["grid", str(trial), "--seeds", "9"], "no run has the seed 9: there are 1, 2"),
        (["grid", str(trial), "--set", "rl"], "a change is KEY=VALUE"),
        (["grid", str(trial), "--executor", "slurm"], "submitit cannot submit to slurm"),
    ):
        with pytest.raises(SystemExit, match=sentence):
            cli.main(words)


def test_changed_settings_are_those_of_every_profile(trial, tmp_path, capsys):
    cli.main(["grid", str(trial), "--set", "rl.max_steps=2", "--dry-run"])
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]}
    assert names == {"little+rl.max_steps=2", f"{OTHER}+rl.max_steps=2"}


def test_a_killed_worker_of_submitit_is_taken_up_again(fake, trial, tmp_path):
    """With its executor for one machine: the worker dies, its run with it, and goes on later."""
    import psutil

    fake(until=str(tmp_path / "go"))
    words = ["--executor", "local", "--only", "base", "--parallel", "1"]
    process = runner(trial, *words)
    [call] = wait_for(lambda: calls(tmp_path))
    wait_for(lambda: len(read_lines(tmp_path / "build" / OTHER / "sft" / "steps.jsonl")) > 1)
    worker = psutil.Process(call["pid"]).parent()
    assert "submitit" in " ".join(worker.cmdline())
    worker.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_alive(call["pid"]))  # before it may end as if nothing had happened
    (tmp_path / "go").touch()
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert f"{OTHER}/sft failed after" in output and "it is tried once more" in output
    assert not is_alive(call["pid"])
    again = starts(tmp_path)[1]
    assert again["run"] == "sft" and int(again["what"].split()[-1]) > 1
    assert [name for _, name in done(tmp_path)] == ["sft", "eval-sft"]


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_worker_that_is_to_stop_is_queued_again_and_its_run_goes_on(
    fake, trial, tmp_path, number
):
    """As SLURM stops it for its time or for others: SIGUSR2 queues it again, from its checkpoint; a
    SIGTERM alone, which SLURM may send before, ends nothing. Neither counts as a failure."""
    import psutil

    fake(until=str(tmp_path / "go"))
    process = runner(trial, "--executor", "local", "--only", "base", "--parallel", "1")
    [call] = wait_for(lambda: calls(tmp_path))
    log = tmp_path / "build" / OTHER / "sft" / "steps.jsonl"
    wait_for(lambda: len(read_lines(log)) == 3)
    psutil.Process(call["pid"]).parent().send_signal(number)
    if number == signal.SIGUSR2:
        wait_for(lambda: len(starts(tmp_path)) == 2)
        assert not is_alive(call["pid"])
    (tmp_path / "go").touch()
    output = process.communicate()[0]
    assert process.returncode == 0 and "failed" not in output, output
    assert output.count(f"{OTHER}/sft: started") == 1
    began = [one["what"] for one in starts(tmp_path) if one["run"] == "sft"]
    assert began == ["start at 0", "start at 3"][: 1 + (number == signal.SIGUSR2)]
    assert [row["step"] for row in read_lines(log)] == [1, 2, 3, 4]
    assert [name for _, name in done(tmp_path)] == ["sft", "eval-sft"]


def test_a_long_run_may_reach_its_time_more_often_than_submitit_allows(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path))
    options = argparse.Namespace(partition=None)
    made = grid.Submitit("local", "trial", options).executor._executor
    assert made.max_num_timeout == grid.TIMEOUTS > 24, "a day, an hour at a time"
