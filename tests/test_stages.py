"""Processes of the stages: they end with their parent, never do a run twice, and one that fails
does not stop the others."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.runs import starts_from
from sage_lib.files import read_lines
from sage_lib.pipeline import reproduce, stages
from sage_lib.pipeline.loaded import Loader, is_useful

FAKE_STAGES = Path(__file__).parent / "fake_stages.py"
#: A process that runs a stage as a notebook's kernel does.
PARENT = """
import sys
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import stages
stages.PROGRAM = "fake_stages"
stages.run(load_profile("smoke"), "sft")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Fake stages in folders of their own; a function that says what they do."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(stages, "PROGRAM", "fake_stages")
    monkeypatch.setenv("PYTHONPATH", str(FAKE_STAGES.parent))

    def told(**fate):
        monkeypatch.setenv("FAKE", json.dumps(fate))

    told()
    return told


def calls(tmp_path):
    return read_lines(tmp_path / "build" / "calls.jsonl")


def wait_for(condition, seconds=180):
    """The condition's value once it holds, within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def is_alive(pid):
    """Whether a process runs: a zombie that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_stage_ends_when_its_parent_is_ended(fake, tmp_path, number):
    fake(seconds=60)
    # Below nohup SIGHUP is ignored, and so do children ignore it.
    heeding = f"import signal; signal.signal({number}, signal.SIG_DFL)\n"
    source = PARENT if number == signal.SIGKILL else heeding + PARENT
    parent = subprocess.Popen([sys.executable, "-c", source], env=stages.environment())
    [call] = wait_for(lambda: calls(tmp_path))
    assert is_alive(call["pid"])
    parent.send_signal(number)
    assert parent.wait(timeout=20) == -number
    wait_for(lambda: not is_alive(call["pid"]), seconds=20)


def test_an_interrupted_parent_ends_its_stage_before_it_goes_on(fake, tmp_path):
    """As the stop button of a notebook does."""
    fake(seconds=60)
    # A job in a shell's background ignores the signal, and so do its children.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    source = heeding + PARENT.replace("stages.run(", "try:\n    stages.run(")
    source += f"except KeyboardInterrupt:\n    open({str(tmp_path / 'after')!r}, 'w')"
    parent = subprocess.Popen([sys.executable, "-c", source], env=stages.environment())
    [call] = wait_for(lambda: calls(tmp_path))
    parent.send_signal(signal.SIGINT)
    wait_for((tmp_path / "after").exists, seconds=20)
    assert not is_alive(call["pid"])
    assert parent.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_ended_reproduce_ends_its_kernel_and_the_kernels_stages(fake, tmp_path, number):
    fake(seconds=60)
    note = f"open({str(tmp_path / 'kernel')!r}, 'w').write(str(os.getpid()))"
    # A call that reproduce does not see, and so does not make before the notebook runs.
    hidden = PARENT.replace("stages.run(", "make = stages.run\nmake(")
    cells = ["profile = 'smoke'", f"import os\n{note}", hidden]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    notebook.cells[0].metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata |= {"kernelspec": kernel, "sage": {"about": "a trial"}}
    nbformat.write(notebook, tmp_path / "99_trial.ipynb")
    place = f"paths.NOTEBOOKS = pathlib.Path({str(tmp_path)!r})"
    source = f"import pathlib, sys; from sage_lib import paths; {place}; "
    source += "from sage_lib.pipeline import cli; cli.main(['reproduce'])"
    parent = subprocess.Popen([sys.executable, "-c", source], env=stages.environment())
    [call] = wait_for(lambda: calls(tmp_path))
    pids = [call["pid"], int((tmp_path / "kernel").read_text())]
    assert all(is_alive(pid) for pid in pids)
    parent.send_signal(number)
    parent.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in pids), seconds=20)


def test_an_ended_reproduce_ends_notebooks_that_ran_beside_each_other(tmp_path):
    """Those that train nothing: each in a worker of a pool, and in a kernel below that."""
    note = f"open({str(tmp_path)!r} + f'/{{os.getpid()}}.pids', 'w').write(str(os.getppid()))"
    for name in ("98_one", "99_other"):
        cells = ["profile = 'smoke'", f"import os, time\n{note}\ntime.sleep(60)"]
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        notebook.cells[0].metadata["tags"] = ["parameters"]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook.metadata |= {"kernelspec": kernel, "sage": {"about": "a trial"}}
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    place = f"paths.NOTEBOOKS = pathlib.Path({str(tmp_path)!r})"
    source = f"import pathlib, sys; from sage_lib import paths; {place}; "
    source += "from sage_lib.pipeline import cli; cli.main(['reproduce'])"
    folders = {"SAGE_BUILD": str(tmp_path / "build"), "SAGE_RESULTS": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", source], env=stages.environment() | folders)
    wait_for(lambda: len([one for one in tmp_path.glob("*.pids") if one.read_text()]) == 2, 60)
    kernels = {int(path.stem): int(path.read_text()) for path in tmp_path.glob("*.pids")}
    assert len(set(kernels.values())) == 2 and parent.pid not in kernels.values()
    pids = [*kernels, *kernels.values()]
    assert all(is_alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in pids), seconds=20)


def starts(tmp_path):
    return [call for call in calls(tmp_path) if call["what"] != "end"]


def parent():
    """A process that does a stage, its output read as it comes."""
    return subprocess.Popen(
        [sys.executable, "-uc", PARENT],
        env=stages.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


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
    assert not is_alive(first["pid"])
    again = starts(tmp_path)[1]
    assert again["pid"] != first["pid"] and int(again["what"].split()[-1]) > 0
    assert len(starts(tmp_path)) == 2


def test_a_run_by_hand_waits_for_the_one_that_makes_it(fake, tmp_path):
    fake(until=str(tmp_path / "go"))
    words = ["sft", "--run", "sft", "--profile", "smoke"]
    command = [sys.executable, str(FAKE_STAGES), *words]
    environment = stages.environment()
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    wait_for(lambda: calls(tmp_path))
    several = subprocess.run(
        command, env={**environment, "WORLD_SIZE": "2"}, capture_output=True, text=True
    )
    assert "error: another process makes sft" in several.stderr
    second = subprocess.Popen(
        [command[0], "-u", *command[1:]], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert second.stdout.readline() == "sft: another process makes it, waiting\n"
    (tmp_path / "go").touch()
    assert second.communicate()[0] == "sft: already made from the same settings, kept\n"
    assert first.wait() == 0 and len(starts(tmp_path)) == 1


def test_a_build_folder_in_use_is_not_put_aside(fake, tmp_path, monkeypatch):
    fake(seconds=60)
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    holder = parent()
    wait_for(lambda: calls(tmp_path))
    with pytest.raises(SageError, match=r"another process works .* share its work with --resume"):
        reproduce.reproduce(load_profile("smoke"))
    holder.kill()
    holder.communicate()
    assert (tmp_path / "build" / "smoke" / "sft").is_dir()


def test_progress_counts_to_the_steps_of_each_method():
    profile = load_profile("countdown")
    rl = stages.STAGES["rl"]
    found = {run.method: rl.steps(profile, run) for run in rl.runs(profile)}
    assert (found["grpo"], found["clip_higher"], found["rft"]) == (300, 1200, 300)
    assert stages.STAGES["sft"].steps(profile, None) == profile.sft["max_steps"]


def test_one_failure_and_one_collapse_stop_no_other_run(fake, tmp_path, capsys):
    """The first fails, the second is killed, the third collapses, the fourth goes on."""
    methods = ["grpo", "grpo_no_kl", "grpo_random", "grpo_token"]
    profile = load_profile(f"smoke+train=[{', '.join(methods)}]")
    two_seeds = load_profile(f"smoke+train=[{', '.join(methods)}]+seeds=[3407, 3408]")
    first, second, third, fourth = names = [f"{method}-s3407" for method in methods]
    with pytest.raises(SageError, match=r"the stage rl of .* starts from sft, which is not there"):
        stages.run(profile, "rl")
    assert not starts(tmp_path), "what no run could start from is said once, and nothing started"
    stages.run(profile, "sft")
    for chosen, which in ((profile, ", which is"), (two_seeds, " and 1 more, which are")):
        found = rf"from grpo-s3407{which} not there: sage-companion stage rl .* --run grpo-s3407 m"
        with pytest.raises(SageError, match=found):
            stages.run(chosen, "impact")
    fake(**{first: "fail", second: "crash", third: "collapse"})
    with pytest.raises(SageError) as error:
        stages.run(profile, "rl")
    sentence = str(error.value)
    assert sentence.startswith("GRPO, seed 3407 failed: the fake work was told to fail (whole log:")
    assert "; GRPO w/o KL, seed 3407 failed: ended by SIGKILL (whole log: rl/" in sentence
    assert "Random" not in sentence and "Token" not in sentence
    assert {call["run"] for call in calls(tmp_path) if call["what"] == "end"} == {
        "sft",
        third,
        fourth,
    }
    collapsed = "GRPO + Random, seed 3407: collapsed at step 4: told to"
    assert collapsed in capsys.readouterr().out
    assert {call["run"] for call in starts(tmp_path)} == {"sft", *names}

    fake()
    found = stages.run(profile, "rl")
    assert found[third]["collapsed"] == {"step": 4, "reason": "told to"}
    assert len(starts(tmp_path)) == 7, "what is done, the collapsed run too, is kept"
    assert "kept; collapsed at step 4: told to" in capsys.readouterr().out


def test_a_failure_stops_its_like_and_a_kill_does_not(fake, tmp_path):
    """Three seeds: of the method whose first seed fails no other is started, of the one whose first
    is killed they are; a second method that fails for the same reason ends the stage."""
    seeds, methods = (3407, 3408, 3409), ("grpo", "grpo_no_kl", "grpo_random", "grpo_token")
    spec = f"smoke+train=[{', '.join(methods)}]+seeds=[3407, 3408, 3409]+compute.parallel=1"
    profile = load_profile(spec)
    stages.run(profile, "sft")
    fake(seconds=0.05, **{"grpo-s3407": "fail", "grpo_no_kl-s3407": "crash"})
    with pytest.raises(SageError, match="4 runs failed") as error:
        stages.run(profile, "rl")
    assert "GRPO, seed 3407 failed: the fake work was told to fail" in str(error.value)
    started = {call["run"] for call in starts(tmp_path)} - {"sft"}
    every = {f"{method}-s{seed}" for method in methods for seed in seeds}
    assert started == every - {"grpo-s3408", "grpo-s3409"}

    fake(seconds=0.05, **{"grpo-s3407": "fail", "grpo_no_kl-s3407": "fail"})
    before = len(starts(tmp_path))
    with pytest.raises(SageError, match="failed"):
        stages.run(profile, "rl")
    again = [call["run"] for call in starts(tmp_path)[before:]]
    assert again == ["grpo-s3407", "grpo_no_kl-s3407"]
    alike = stages.Failures()
    jobs = {
        m: stages.Job(stages.STAGES["rl"], runs.rl_run(profile, m, 3407), m, 1) for m in methods
    }
    alike.note(jobs["grpo"], "one reason")
    assert alike.like("rl", "grpo") == "grpo failed, of the same method (one reason)"
    alike.note(jobs["grpo_no_kl"], "another reason")
    assert not alike.like("rl", "grpo_token") and not alike.like("evaluate", "grpo")
    alike.note(jobs["grpo_random"], "one reason")
    assert (
        alike.like("rl", "grpo_token") == "grpo and grpo_random failed for one reason (one reason)"
    )


@pytest.mark.skipif(not is_useful(2, False), reason="nothing is forked here")
def test_runs_of_a_stage_are_forked_and_what_they_are_forked_from_ends(fake, tmp_path, monkeypatch):
    forked = []
    made = Loader.start

    def noted(loader, *given):
        forked.append(made(loader, *given))
        return forked[-1]

    monkeypatch.setattr(Loader, "start", noted)
    fake(seconds=0.2)
    profile = load_profile("smoke+train=[grpo, grpo_branch, identity]")
    stages.run(profile, "sft")
    assert not forked, "a single run gains nothing by it"
    runs = stages.run(profile, "rl")
    assert {one.pid for one in forked} <= {call["pid"] for call in starts(tmp_path)}
    assert len(forked) == len(runs) == 3 and len(calls(tmp_path)) == 2 * 4
    assert not any(is_alive(pid) for pid in {forked[0].loader.process.pid, forked[0].pid})


def test_a_stage_goes_on_without_the_process_that_loads(fake, tmp_path, monkeypatch):
    def nothing(*given):
        raise ChildProcessError

    monkeypatch.setattr(Loader, "start", nothing)
    fake(seconds=0.2)
    found = stages.run(load_profile("smoke+train=[grpo, grpo_branch, identity]"), "sft", "rl")
    assert len(starts(tmp_path)) == len(found) == 4


def test_stages_come_after_what_their_runs_start_from():
    """By what each run says that it needs, which is another place than the order of the stages."""
    turns = stages.in_turn(stages.STAGES)
    assert [name for turn in turns for name in turn] == list(stages.STAGES)
    assert turns[:3] == [["sft"], ["entropies"], ["rl"]]
    place = {name: number for number, turn in enumerate(turns) for name in turn}
    profile = load_profile("smoke")
    for name, stage in stages.STAGES.items():
        for run in stage.runs(profile):
            assert all(place[one.stage] < place[name] for _, one in starts_from(profile, run))
    assert stages.in_turn(["impact", "replay", "sft"]) == [["sft"], ["replay", "impact"]]


def test_independent_stages_share_the_places_with_what_runs_beside_them(fake, tmp_path):
    """Two places: one is kept for a run, the other is offered first to what runs beside."""
    fake(seconds=0.4)
    profile = load_profile("smoke+train=[grpo]")
    told = []

    def beside(places, left):
        told.append((places, left))
        return int("entropies" in left or "sft" in left)  # one process until these are made

    names = ["sft", "entropies", "rl", "replay", "trace", "impact"]
    found = stages.run(profile, *names, beside=beside)
    assert len(found) == len(names)
    assert told[1] == (1, set(names)), "before the first run is made nothing is"
    assert {places for places, left in told if "sft" in left} == {0, 1}
    begun = {call["run"]: call["time"] for call in starts(tmp_path)}
    ended = {call["run"]: call["time"] for call in calls(tmp_path) if call["what"] == "end"}
    assert ended["sft"] < begun["entropies"]
    last = sorted(begun, key=begun.get)[-3:]
    assert begun[last[1]] < ended[last[0]], "two of the last turn's runs at a time"
    assert begun[last[2]] > min(ended[one] for one in last[:2]), "and no third"


def test_with_one_place_a_run_waits_for_what_runs_beside_it(fake, tmp_path):
    told = []

    def beside(places, left):
        told.append((places, len(starts(tmp_path))))
        return int(len(told) <= 6)

    stages.run(load_profile("smoke+compute.parallel=1"), "sft", beside=beside)
    assert [begun for _, begun in told[:6]] == [0] * 6 and len(starts(tmp_path)) == 1
    assert max(places for places, _ in told) == 1


def test_a_stage_that_failed_is_not_taken_for_made(fake, tmp_path):
    """While others of its turn go on: a notebook that asks for it would try it once more."""
    fake(seconds=0.5, effects="fail")
    told = []

    def beside(places, left):
        told.append(left)
        return 0

    profile = load_profile("smoke+train=[grpo]")
    with pytest.raises(SageError, match="effects failed: the fake work was told to fail"):
        stages.run(profile, "sft", "entropies", "rl", "effects", "impact", beside=beside)
    assert all("effects" in left for left in told) and stages.unmade(
        profile, ["rl", "effects", "impact"]
    ) == {"effects"}


def test_an_interrupted_reproduce_says_how_it_goes_on(monkeypatch):
    def interrupted(*given, **named):
        raise stages.Interrupted("the same once more goes on")

    monkeypatch.setattr(stages, "run", interrupted)
    monkeypatch.setattr(stages, "load_for", lambda *given: None)
    with pytest.raises(KeyboardInterrupt, match=r"interrupted: .* with --resume goes on"):
        reproduce._make(load_profile("smoke"), ["sft"], lambda places, left: 0)


def test_a_notebook_runs_as_soon_as_what_it_asks_for_is_made(fake, tmp_path, monkeypatch, capsys):
    """sft ends once the first notebook has run, which asks for nothing; the second finds it done;
    of the third, whose stage fails, that is what is said."""
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    ask = "from sage_lib.experiment.profile import load_profile\nfrom sage_lib.pipeline import "
    ask += 'stages\nprint(stages.run(load_profile(profile), "{}"))'
    cells = {
        "96_nothing": f"open({str(tmp_path / 'go')!r}, 'w')",
        "97_base": ask.format("sft"),
        "98_entropies": ask.format("entropies"),
        "99_nothing": "",
    }
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for name, source in cells.items():
        made = [nbformat.v4.new_code_cell(cell) for cell in ("profile = 'smoke'", source)]
        notebook = nbformat.v4.new_notebook(cells=made)
        notebook.cells[0].metadata["tags"] = ["parameters"]
        notebook.metadata |= {"kernelspec": kernel, "sage": {"about": "a trial"}}
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    fake(until=str(tmp_path / "go"), entropies="fail")
    assert reproduce.reproduce(load_profile("smoke")) is False
    assert [call["run"] for call in starts(tmp_path)] == ["sft", "entropies"], "and not once more"
    printed = capsys.readouterr()
    states = dict(re.findall(r"^(\d\d_\w+) .*  (ok|failed|not run)$", printed.out, re.M))
    assert list(states.values()) == ["ok", "ok", "failed", "not run"]
    assert "error: entropies failed: the fake work was told to fail" in printed.err


def test_runs_of_every_stage_have_names_of_their_own():
    profile = load_profile("smoke")
    names = [
        stages._label(profile, stage, run)
        for stage in stages.STAGES.values()
        for run in stage.runs(profile)
    ]
    assert len(set(names)) == len(names)
    assert {"sft", "GRPO, seed 3407", "GRPO, seed 3407 (replay)", "Base Model (evaluate)"} < {
        *names
    }


def test_an_interrupt_from_the_keyboard_shows_no_traceback(tmp_path):
    """Which reaches the workers of the pool, too: the busy one and the idle one."""
    source = f"open({str(tmp_path / 'kernel')!r}, 'w')\nimport time\ntime.sleep(60)"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in ("profile = 'smoke'", source)]
    )
    notebook.cells[0].metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata |= {"kernelspec": kernel, "sage": {"about": "a trial"}}
    nbformat.write(notebook, tmp_path / "99_trial.ipynb")
    # A job in a shell's background ignores the signal, and so do its children.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import pathlib"
    code += f"; from sage_lib import paths; paths.NOTEBOOKS = pathlib.Path({str(tmp_path)!r})"
    code += "; from sage_lib.pipeline import cli; cli.main(['reproduce'])"
    folders = {"SAGE_BUILD": str(tmp_path / "build"), "SAGE_RESULTS": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=stages.environment() | folders,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_for((tmp_path / "kernel").exists, 60)
    os.killpg(process.pid, signal.SIGINT)
    printed = process.communicate(timeout=30)[0]
    assert process.returncode and "Traceback" not in printed, printed
    assert "--resume goes on" in printed.splitlines()[-1]
