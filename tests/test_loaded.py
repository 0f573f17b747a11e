"""Processes forked from one that loaded the libraries: each as one of its own would be."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from test_stages import is_alive, wait_for

from sage_lib.pipeline import processes, stages
from sage_lib.pipeline.loaded import Loader, is_useful

pytestmark = pytest.mark.skipif(not is_useful(2, False), reason="nothing is forked here")

#: Appends a line when it loads, so that loading twice would be seen.
PROGRAM = """
import os, sys, time
from sage_lib.pipeline import processes

def load(names):
    if "broken" in names:
        raise ImportError("broken")
    if "numpy" in names:
        import numpy, tempfile
        global inherited
        inherited = tempfile.TemporaryDirectory()
    with open("loads", "a") as file:
        file.write(" ".join(names) + chr(10))

def main(words):
    processes.end_with_parent()
    what, *rest = words
    if what == "say":
        print(os.environ["WORD"], sys.argv, os.getpgrp() == os.getpid(), flush=True)
        print("to stderr", file=sys.stderr)
    if what == "draw":
        import numpy
        print(numpy.random.random())
    if what == "verify":
        from sage_lib.tasks.verifier import accuracy_reward
        print(accuracy_reward(["<SOLUTION> 8 - 1 </SOLUTION>"], ["7"]))
    if what == "sleep":
        time.sleep(60)
    if what == "leave":
        import tempfile
        global left
        left = tempfile.TemporaryDirectory()
        print(left.name, inherited.name, flush=True)
    if what == "helper" and os.fork() == 0:
        os.setsid()
        time.sleep(8)
        os._exit(0)
    if what == "exit":
        sys.exit(int(rest[0]) if rest[0].isdigit() else rest[0])
    if what == "fail":
        raise ValueError("told to")
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def loader(place):
    made = Loader("program", ["a", "numpy"], place / "loaded.log", stages.environment())
    yield made
    made.end()


def ended(loader, place, *words, **more):
    """Status of a fork with these words, and what it wrote."""
    log = place / "logs" / f"{len(list(place.glob('logs/*')))}.log"
    fork = loader.start(words, log, {**stages.environment(), **more})
    return fork.wait(60), log.read_text()


def test_forks_have_words_log_environment_and_group_of_their_own_and_load_once(loader, place):
    for word in ("one", "two"):
        status, said = ended(loader, place, "say", word, WORD=word)
        assert status == 0
        assert said == f"{word} ['program', 'say', '{word}'] True\nto stderr\n"
    assert (place / "loads").read_text() == "a numpy\n"
    log = place / "logs" / "0.log"
    assert loader.start(["exit", "5"], log, stages.environment()).wait(60) == 5
    assert log.read_text().startswith("one"), "a log is added to"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["exit", "0"], 0, ""),
        (["exit", "75"], 75, ""),
        (["exit", "error: why"], 1, "error: why\n"),
        (["fail"], 1, "ValueError: told to\n"),
    ],
)
def test_a_fork_ends_as_an_interpreter_does(loader, place, words, status, said):
    code = f"import program; program.processes.end_with_parent = int; program.main({words!r})"
    own = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert own.returncode == status and own.stderr.endswith(said)
    found, wrote = ended(loader, place, *words)
    assert found == status and wrote.endswith(said)


def test_forks_draw_other_numbers(loader, place):
    drawn = {ended(loader, place, "draw")[1] for _ in range(3)}
    assert len(drawn) == 3, "a plain fork repeats its parent's stream"
    np.random.random()  # this process's own stream has no part in it


def test_a_fork_ends_the_processes_that_it_left_to_its_end(loader, place):
    """The reward leaves the verifier's pool open, whose processes end with their pool alone."""
    assert ended(loader, place, "verify") == (0, "[1.0]\n")


def test_a_killed_fork_says_so_and_an_ended_one_waits_until_it_is_gone(loader, place):
    sleepers = [loader.start(["sleep"], place / "log", stages.environment()) for _ in range(2)]
    assert [one.poll() for one in sleepers] == [None, None]
    with pytest.raises(subprocess.TimeoutExpired):
        sleepers[0].wait(0.1)
    os.kill(sleepers[0].pid, signal.SIGKILL)
    assert sleepers[0].wait(20) == -signal.SIGKILL
    processes.end(sleepers)
    assert sleepers[1].poll() == -signal.SIGTERM and not is_alive(sleepers[1].pid)


def test_forks_end_with_what_they_are_forked_from(loader, place):
    sleeper = loader.start(["sleep"], place / "log", stages.environment())
    os.kill(loader.process.pid, signal.SIGKILL)
    assert sleeper.wait(20) == -signal.SIGKILL
    wait_for(lambda: not is_alive(sleeper.pid), seconds=20)
    with pytest.raises(ChildProcessError):
        loader.start(["sleep"], place / "log", stages.environment())


def test_forks_end_with_a_killed_parent(place):
    code = """
        import pathlib, time
        from sage_lib.pipeline import stages
        from sage_lib.pipeline.loaded import Loader
        loader = Loader("program", ["a"], pathlib.Path("loaded.log"), stages.environment())
        one = loader.start(["sleep"], pathlib.Path("log"), stages.environment())
        pathlib.Path("pids.new").write_text(f"{loader.process.pid} {one.pid}")
        pathlib.Path("pids.new").rename("pids")
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=stages.environment()
    )
    wait_for((place / "pids").exists)
    pids = [int(pid) for pid in (place / "pids").read_text().split()]
    assert all(is_alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in pids), seconds=20)


def test_where_loading_fails_there_is_nothing_to_fork_from(place):
    loader = Loader("program", ["broken"], place / "loaded.log", stages.environment())
    try:
        with pytest.raises(ChildProcessError):
            loader.start(["say"], place / "log", stages.environment())
    finally:
        loader.end()
    assert "ImportError: broken" in (place / "loaded.log").read_text()


def test_a_fork_clears_up_what_it_leaves_and_nothing_of_what_it_was_forked_from(loader, place):
    for _ in range(2):
        status, said = ended(loader, place, "leave")
        own, inherited = map(Path, said.split())
        assert status == 0 and not own.exists() and inherited.is_dir()


def test_the_end_of_a_fork_is_seen_while_a_helper_of_it_goes_on(loader, place):
    started = time.monotonic()
    fork = loader.start(["helper"], place / "log", stages.environment())
    assert fork.wait(20) == 0 and time.monotonic() - started < 6, "the helper takes 8 s"


def test_the_number_of_a_fork_that_nobody_waited_for_disturbs_no_other(loader, place):
    first = loader.start(["sleep"], place / "log", stages.environment())
    # As an interrupt leaves it, between the question and the answer.
    loader.connection.send((["exit", "0"], str(place / "log"), stages.environment()))
    wait_for(lambda: loader.connection.poll(0))
    assert first.poll() is None
    processes.end([first])
    assert first.poll() == -signal.SIGTERM
