"""The runner and the stages: processes end with their parent, no run is done twice, and one that
fails does not stop the others."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import fake_stages
import forks
import nbformat
import psutil
import pytest

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.files import read_lines
from sage_lib.pipeline import jobs, notebooks, plan, reproduce, stages

FAKE_STAGES = Path(__file__).parent / "fake_stages.py"
#: A process that does a stage.
PARENT = """
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import jobs, stages
import fake_stages
jobs.start_worker = fake_stages.start_worker
stages.run(load_profile("smoke"), "sft")
"""
#: A job in a shell's background ignores these, and so do its children.
HEED = "import signal; signal.signal({0}, signal.{1})\n"


@pytest.fixture
def fake(work_folder, monkeypatch):
    """Fake stages in folders of their own, before which no process imports TRL to check settings; a
    function that says what they do."""
    monkeypatch.setattr(jobs, "start_worker", fake_stages.start_worker)
    monkeypatch.setattr(plan, "check_settings", lambda profile: None)
    monkeypatch.setenv("PYTHONPATH", str(FAKE_STAGES.parent))

    def told(**fate):
        monkeypatch.setenv("FAKE", json.dumps(fate))

    told()
    return told


def calls(tmp_path):
    return read_lines(tmp_path / "build" / "calls.jsonl")


def starts(tmp_path):
    return [call for call in calls(tmp_path) if call["what"] != "end"]


def wait_for(condition, process=None):
    """The condition's value once it holds, within 300 seconds; else what the process printed."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    if process:
        process.kill()
    raise AssertionError(process.communicate()[0] if process else "it did not happen")


def is_alive(pid):
    """Whether a process runs: a zombie that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def parent(source=PARENT, **more):
    """A process that does a stage, its output read as it comes."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = [sys.executable, "-uc", source]
    return subprocess.Popen(words, **{"env": jobs.environment(), **output, **more})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_worker_ends_when_its_parent_is_ended(fake, tmp_path, number):
    fake(seconds=600)
    heed = "" if number == signal.SIGKILL else HEED.format(number, "SIG_DFL")
    process = parent(heed + PARENT)
    [call] = wait_for(lambda: calls(tmp_path))
    assert is_alive(call["pid"])
    process.send_signal(number)
    assert process.wait(timeout=300) == -number
    wait_for(lambda: not is_alive(call["pid"]))


def test_an_interrupted_parent_ends_its_worker_before_it_goes_on(fake, tmp_path):
    fake(seconds=600)
    source = HEED.format("signal.SIGINT", "default_int_handler")
    source += PARENT.replace("stages.run(", "try:\n    stages.run(")
    process = parent(source + "except KeyboardInterrupt:\n    print('after')")
    [call] = wait_for(lambda: calls(tmp_path))
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=300)[0]
    assert output.endswith("after\n") and not is_alive(call["pid"])


def notebook(folder, name, *cells, parameters="profile = 'smoke'", **sage):
    """The path of a notebook with these code cells below its parameters."""
    made = [nbformat.v4.new_code_cell(cell) for cell in (parameters, *cells)]
    made[0].metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "sage": {"about": "a trial", **sage}}
    path = folder / f"{name}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=metadata), path)
    return path


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_ended_runner_ends_the_kernels_of_its_notebooks(tmp_path, number):
    """An interrupt from the keyboard shows no traceback."""
    note = f"import os, time\nopen(f'{tmp_path}/{{os.getpid()}}.pid', 'w').write('x')"
    for name in ("98_one", "99_other"):
        notebook(tmp_path, name, f"{note}\ntime.sleep(600)")
    source = HEED.format("signal.SIGINT", "default_int_handler") + "import pathlib\n"
    source += f"from sage_lib import paths; paths.NOTEBOOKS = pathlib.Path({str(tmp_path)!r})\n"
    source += "from sage_lib.pipeline import cli; cli.main(['figures'])"
    folders = {"SAGE_BUILD": str(tmp_path / "build"), "SAGE_RESULTS": str(tmp_path)}
    process = parent(source, start_new_session=True, env=jobs.environment() | folders)
    wait_for(lambda: len([*tmp_path.glob("*.pid")]) == 2, process)
    kernels = [int(path.stem) for path in tmp_path.glob("*.pid")]
    workers = [psutil.Process(pid).ppid() for pid in kernels]
    assert len(set(workers)) == 2 and process.pid not in workers
    os.killpg(process.pid, number)
    printed = process.communicate(timeout=300)[0]
    wait_for(lambda: not any(is_alive(pid) for pid in [*kernels, *workers]))
    assert process.returncode and "Traceback" not in printed, printed
    assert number == signal.SIGKILL or "the same command goes on" in printed.splitlines()[-1]


def test_two_processes_never_make_one_run(fake, tmp_path):
    fake(until=str(tmp_path / "go"))
    first = parent()
    wait_for(lambda: calls(tmp_path))
    second = parent()
    assert second.stdout.readline() == "sft: another process makes it, waiting\n"
    (tmp_path / "go").touch()
    assert second.communicate()[0] == "sft: made by another process, kept\n"
    first.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert [call["what"] for call in calls(tmp_path)] == ["start at 0", "end"]


def test_a_killed_holder_frees_its_run_which_goes_on_where_it_stopped(fake, tmp_path):
    fake(until=str(tmp_path / "go"))
    holder = parent()
    [first] = wait_for(lambda: calls(tmp_path))
    second = parent()
    assert any("another process makes it, waiting" in line for line in second.stdout)
    wait_for(lambda: read_lines(tmp_path / "build" / "smoke" / "sft" / "steps.jsonl"))
    holder.kill()
    holder.communicate()
    (tmp_path / "go").touch()
    output = second.communicate()[0]
    assert second.returncode == 0, output
    assert not is_alive(first["pid"]) and len(starts(tmp_path)) == 2
    again = starts(tmp_path)[1]
    assert again["pid"] != first["pid"] and int(again["what"].split()[-1]) > 0


def test_a_run_by_hand_waits_for_the_one_that_makes_it(fake, tmp_path):
    fake(until=str(tmp_path / "go"))
    command = [sys.executable, "-u", str(FAKE_STAGES), "sft", "--run", "sft", "--profile", "smoke"]
    more = {"env": jobs.environment(), "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, **more)
    wait_for(lambda: calls(tmp_path))
    several = more | {"env": more["env"] | {"WORLD_SIZE": "2"}, "stderr": subprocess.STDOUT}
    assert "error: another process makes sft" in subprocess.run(command, **several).stdout
    second = subprocess.Popen(command, **more)
    assert second.stdout.readline() == "sft: another process makes it, waiting\n"
    (tmp_path / "go").touch()
    assert second.communicate()[0] == "sft: already made from the same settings, kept\n"
    assert first.communicate()[0] == "sft: done\n"
    assert first.returncode == 0 and len(starts(tmp_path)) == 1


def test_a_build_folder_in_use_is_not_put_aside(fake, tmp_path, monkeypatch):
    fake(seconds=600)
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    holder = parent()
    wait_for(lambda: calls(tmp_path))
    with pytest.raises(SageError, match=r"another process works .* share its work with --resume"):
        reproduce.reproduce(load_profile("smoke"))
    holder.kill()
    holder.communicate()
    assert (tmp_path / "build" / "smoke" / "sft").is_dir()


def test_a_run_that_starts_as_its_folder_is_put_aside_keeps_it(tmp_path, monkeypatch):
    """The first look at the locks comes just before its start, as if it had found none."""
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path))
    folder = tmp_path / "smoke" / "sft"
    folder.mkdir(parents=True)
    looks, is_locked = [], reproduce.is_locked

    def look(lock):
        looks.append(lock)
        return len(looks) > 1 and is_locked(lock)

    monkeypatch.setattr(reproduce, "is_locked", look)
    with forks.held(folder / "run.lock"):
        with pytest.raises(SageError, match="another process works in the build folder of smoke"):
            reproduce._start_afresh(load_profile("smoke"))
        assert len(looks) == 2 and looks[0] != looks[1]
        assert [path.name for path in tmp_path.iterdir()] == ["smoke"] and folder.is_dir()


def test_progress_counts_to_the_steps_of_each_method():
    profile = load_profile("study+train=[grpo, clip_higher, rft]+seeds=[3407]")
    found = {task.run.method: task.steps for task in stages.jobs_of(profile, ["rl"])}
    assert (found["grpo"], found["clip_higher"], found["rft"]) == (200, 800, 100)
    [base] = stages.jobs_of(profile, ["sft"])
    assert base.steps == profile.sft["max_steps"]


def test_one_failure_and_one_collapse_stop_no_other_run(fake, tmp_path, capsys):
    """The first fails, the second is killed, the third collapses, the fourth goes on."""
    methods = ["grpo", "grpo_no_kl", "grpo_random", "grpo_token"]
    profile = load_profile(f"smoke+train=[{', '.join(methods)}]")
    first, second, third, fourth = names = [f"{method}-s3407" for method in methods]
    with pytest.raises(SageError, match=r"4 runs failed.*there is no finished model of sft"):
        stages.run(profile, "rl")
    assert not starts(tmp_path), "nothing is started that could not start"
    stages.run(profile, "sft")
    fake(**{first: "fail", second: "crash", third: "collapse"})
    with pytest.raises(SageError) as error:
        stages.run(profile, "rl")
    sentence = str(error.value)
    assert "GRPO, seed 3407 failed: the fake work was told to fail (whole log:" in sentence
    assert "; GRPO w/o KL, seed 3407 failed: ended by SIGKILL (whole log: /" in sentence
    assert "Random" not in sentence and "Token" not in sentence
    ended = {call["run"] for call in calls(tmp_path) if call["what"] == "end"}
    assert ended == {"sft", third, fourth}
    assert "collapsed at step 4: told to" in capsys.readouterr().out
    assert {call["run"] for call in starts(tmp_path)} == {"sft", *names}
    fake()
    stages.run(profile, "rl")
    assert len(starts(tmp_path)) == 7, "what is done, the collapsed run too, is kept"
    assert "kept; collapsed at step 4: told to" in capsys.readouterr().out


def test_a_failure_stops_its_like_and_a_kill_does_not(fake, tmp_path):
    """Three seeds: of the method whose first seed fails no other is started, of the one whose first
    is killed they are; and what needs a run that failed is not started."""
    seeds, methods = (3407, 3408, 3409), ("grpo", "grpo_no_kl", "grpo_random")
    spec = f"smoke+train=[{', '.join(methods)}]+seeds=[3407, 3408, 3409]+compute.parallel=1"
    profile = load_profile(spec)
    fake(seconds=0.05, **{"grpo-s3407": "fail", "grpo_no_kl-s3407": "crash"})
    planned = stages.jobs_of(profile, ["sft", "rl", "evaluation"])
    outcomes = jobs.run(planned, 1)
    by_name = {job.run.name: outcomes[job.key] for job in planned}
    assert by_name["grpo-s3408"].state == "not started"
    assert by_name["grpo-s3408"].reason.startswith("GRPO, seed 3407 failed, of the same method")
    assert by_name["eval-grpo_no_kl-s3407"].reason == "it needs GRPO w/o KL, seed 3407"
    made = {f"{method}-s{seed}" for method in methods for seed in seeds}
    failed = {"grpo-s3407", "grpo-s3408", "grpo-s3409", "grpo_no_kl-s3407"}
    assert {name for name in made if by_name[name].ok} == made - failed
    assert by_name["eval-sft"].ok and by_name["eval-grpo_random-s3409"].ok


def test_a_worker_does_one_run_after_another_and_a_failure_ends_it(fake, tmp_path):
    profile = load_profile("smoke+train=[grpo, grpo_branch, identity]+compute.parallel=1")
    fake(seconds=0.05, **{"grpo_branch-s3407": "fail"})
    with pytest.raises(SageError, match="told to fail"):
        stages.run(profile, "sft", "entropies", "rl")
    pids = [call["pid"] for call in starts(tmp_path)]
    assert len(pids) == 5 and len(set(pids[:4])) == 1 and pids[4] != pids[0]
    assert not any(is_alive(pid) for pid in pids)


def test_where_there_is_a_gpu_each_run_has_a_process_of_its_own(fake, tmp_path):
    fake(seconds=0.05, gpu=True)
    stages.run(load_profile("smoke+train=[grpo]+compute.parallel=1"), "sft", "entropies")
    pids = [call["pid"] for call in starts(tmp_path)]
    assert len(pids) == len(set(pids)) == 2


def test_a_run_is_named_as_a_grid_lists_it_or_by_its_folder():
    profile, stage = load_profile("smoke"), stages.STAGES["evaluation"]
    for name in ("eval-grpo-s3407", "evaluation/grpo-s3407", "grpo-s3407"):
        assert stages._named(profile, stage, name).name == "eval-grpo-s3407"


def test_a_worker_that_is_killed_without_a_job_is_replaced(fake, tmp_path):
    """pebble gives a pool up where nothing ran in it."""
    workers, job = jobs.Workers(1), jobs.Job("a", "a", print, ("said",), tmp_path / "a.log")
    pid = workers.pool.schedule(os.getpid).result()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not workers.pool.active)
    assert jobs.ended(workers.start(job)) == 0
    workers.end()
    assert (tmp_path / "a.log").read_text() == "said\n" and not is_alive(pid)


def test_jobs_come_after_what_their_runs_start_from():
    """By what each run says that it needs, which is another place than the order of the stages."""
    profile = load_profile("smoke")
    every = stages.jobs_of(profile, stages.STAGES)
    place = {task.key: number for number, task in enumerate(every)}
    for task in every:
        assert all(place[key] < place[task.key] for key in task.needs)
        if run := task.run.policy:
            assert (profile.name, run.stage, run.method, run.seed) in task.needs
    guided = [task for task in every if task.stage.name == "rl"]
    assert all((profile.name, "entropies", "base", None) in task.needs for task in guided)
    assert len({task.label for task in every}) == len(every)
    assert {"sft", "GRPO, seed 3407", "GRPO, seed 3407 (replay)", "Base Model (evaluation)"} < {
        task.label for task in every
    }


def test_runs_of_two_stages_go_on_side_by_side(fake, tmp_path):
    fake(seconds=0.4)
    profile = load_profile("smoke+train=[grpo]")
    stages.run(profile, "sft", "entropies", "rl", "replay", "trace", "impact")
    begun = {call["run"]: call["time"] for call in starts(tmp_path)}
    ended = {call["run"]: call["time"] for call in calls(tmp_path) if call["what"] == "end"}
    assert ended["sft"] < begun["entropies"] and ended["entropies"] < begun["grpo-s3407"]
    pids = [call["pid"] for call in starts(tmp_path)]
    assert len(set(pids)) == 2, "two at a time, and no third"


def test_no_profile_starts_more_processes_than_a_machine_bears(monkeypatch):
    asked, pool = [], types.SimpleNamespace(end=lambda: None)
    monkeypatch.setattr(jobs, "Workers", lambda parallel, threads: asked.append(parallel) or pool)
    jobs.run([], 10**6)
    jobs.run([], 2)
    assert asked == [max(8, os.cpu_count()), 2]


def test_notebooks_go_on_beside_the_runs_that_they_do_not_need(fake, tmp_path, monkeypatch, capsys):
    """The walk's wait for each other, those that read results for the runs, of which one fails."""
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    note = "import time\nopen('order', 'a').write(f'{}\\n')"
    for name in ("01_theory", "04_walk", "06_walk"):
        notebook(tmp_path, name, note.format(name), parameters="other = 1")
    notebook(tmp_path, "08_results", note.format("08"))
    fake(seconds=0.1, effects="fail")
    failed = r"effects of smoke\+train=_grpo_.*failed.*--resume goes on"
    with pytest.raises(SageError, match=failed):
        reproduce.reproduce(load_profile("smoke+train=[grpo]"))
    order = (tmp_path / "order").read_text().split()
    assert order.index("04_walk") < order.index("06_walk") and "01_theory" in order
    rows = [line.split() for line in capsys.readouterr().out.split("\nnotebook")[-1].splitlines()]
    states = {row[0]: " ".join(row[2:]) for row in rows if row and row[0][:2].isdigit()}
    done = dict.fromkeys(["01_theory", "04_walk", "06_walk"], "done")
    assert states == {**done, "08_results": "not started"}
    assert [notebook.number for notebook in notebooks.select()] == ["01", "04", "06", "08"]
    assert [notebook.number for notebook in notebooks.select(["4"])] == ["04"]


def test_progress_says_how_long_the_rest_takes_at_this_pace(tmp_path, monkeypatch, capsys):
    """A run resumed at step 10 does ten steps in two minutes: the other 30 take six."""
    live, now = tmp_path / "steps.jsonl", [1000.0]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])

    def shown(steps, step):
        live.write_text(json.dumps({"step": 10, "loss": 1.0}) + "\n")
        job = jobs.Job("run", "a run", print, (), tmp_path / "log", live=live, steps=steps)
        progress = jobs.Progress(job)
        live.write_text(json.dumps({"step": step, "loss": 0.5}) + "\n")
        now[0] += 120
        progress.show(is_over=False)
        return capsys.readouterr().out.splitlines()[-1]

    assert shown(50, 20) == "a run: step 20; 6 min left; loss 0.5"
    assert shown(-1, 20) == "a run: step 20; loss 0.5", "its length is not known in steps"
