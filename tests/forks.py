"""Commands of Python in processes that have loaded the libraries once for many tests."""

import atexit
import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pebble import ProcessPool

from sage_lib.pipeline import jobs

#: Pools of one process that has nothing to do.
_idle = []


@atexit.register
def _end():
    for pool in _idle:
        pool.stop()
        pool.join()


def do(folder, environment, *words):
    """``python -m`` of a module, or ``python`` of a file, in a folder and an environment."""
    sys.argv = list(words)
    os.chdir(folder)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(json.loads(environment))
    status = 0
    try:
        if sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            kept = sys.modules.pop(sys.argv[0], None)  # it runs as __main__
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            if kept is not None:
                sys.modules[sys.argv[0]] = kept
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code)
    os.environ.clear()
    os.environ.update(before)
    return status


def environment():
    """That of every process, in which the modules of this folder are found, too."""
    own = jobs.environment()
    return own | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), own["PYTHONPATH"]])}


class Command:
    """A command that runs in a worker: of subprocess.Popen what tests use, with one output."""

    def __init__(self, words, given):
        spawn = multiprocessing.get_context("spawn")
        new = {"max_workers": 1, "initializer": jobs.start_worker, "context": spawn}
        self.pool = _idle.pop() if _idle else ProcessPool(**new)
        self.log, self.returncode = Path(tempfile.mkdtemp()) / "command.log", None
        self.pid = self.pool.schedule(os.getpid).result()
        arguments = [os.getcwd(), json.dumps(given), *words]
        self.future = self.pool.schedule(jobs.work, [do, arguments, self.log])

    def poll(self):
        if self.returncode is None and self.future.done():
            self.returncode = jobs.ended(self.future)
            _idle.append(self.pool)
        return self.returncode

    def wait(self, timeout=300):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.01)
        return self.returncode

    def kill_at(self, there):
        """Kill it once ``there()`` holds, before which it does not end."""
        deadline = time.monotonic() + 300
        while not there():
            alive = self.poll() is None and time.monotonic() < deadline
            assert alive, self.log.read_text()[-3000:]
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def communicate(self, timeout=300):
        self.wait(timeout)
        return self.log.read_text(errors="replace")


def fresh(code):
    """The lines that a new interpreter prints, which has loaded nothing before this code."""
    return output_of([sys.executable, "-c", code]).strip().splitlines()


def output_of(words, **more):
    """The output of a command that ends well."""
    more = {"capture_output": True, "text": True, "timeout": 1800, **more}
    done = subprocess.run(list(map(str, words)), **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@contextlib.contextmanager
def held(lock):
    """Another process holds a lock until the end of the block, and is killed there."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX)\n"
    words = [sys.executable, "-c", f"{code}print(flush=True); input()", lock]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as holder:
        holder.stdout.readline()
        yield
        holder.kill()


def stage(profile, name, run):
    """The words of a run of a stage, for :func:`start` and :func:`finish`."""
    return "sage_lib.pipeline.stages", name, "--run", run, "--profile", profile.spec


def start(*words, **more):
    """``python -m`` of a module, or ``python`` of a file, with these words, here, in this
    environment and ``more``."""
    return Command(words, environment() | more)


def finish(*words, timeout=300, **more):
    """What it prints, once it has ended well."""
    command = start(*words, **more)
    output = command.communicate(timeout)
    assert command.returncode == 0, output[-3000:]
    return output
