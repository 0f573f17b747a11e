"""Commands of Python, forked from a process that has loaded the libraries once for all tests here.

Importing them takes 5 to 10 s, longer than what most tests start a process for. That true processes
start, with their imports in the right order, test_pipeline.py and test_public.py see to.
"""

import importlib
import os
import runpy
import signal
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import known_settings, processes, stages
from sage_lib.pipeline.loaded import Loader, is_useful

#: What the process that loads says.
LOADED = Path(tempfile.mkdtemp(prefix="forks")) / "loaded.log"


def load(words):
    """These modules, and the work of every stage, of sft first: Unsloth comes before TRL."""
    stages.load(["smoke", "sft", *stages.STAGES])
    for name in words:
        importlib.import_module(name)
    known_settings.check(load_profile("smoke"))  # which leaves its files read


def main(words):
    """``python -m`` of a module, or ``python`` of a file, in a folder."""
    processes.end_with_parent()
    folder, *sys.argv = words
    os.chdir(folder)
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    sys.modules.pop(sys.argv[0], None)  # it runs as __main__; whoever imports it loads it anew
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def environment():
    """That of every process, in which the modules of this folder are found, too."""
    own = stages.environment()
    folders = [str(Path(__file__).parent), own["PYTHONPATH"]]
    return own | {"PYTHONPATH": os.pathsep.join(folders)}


@cache
def loader():
    """The process that loads: it and its forks end with this one."""
    cache_of_code = {"UNSLOTH_COMPILE_LOCATION": str(LOADED.parent)}
    words = ["pandas", "sage_lib.pipeline.cli"]
    return Loader("forks", words, LOADED, environment() | cache_of_code)


class Command:
    """A process that runs: of subprocess.Popen what tests use, with one output for both pipes."""

    def __init__(self, process, log):
        self.process, self.log, self.pid = process, log, process.pid
        self.poll, self.wait = process.poll, process.wait

    @property
    def returncode(self):
        return self.poll()

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def kill_at(self, there, seconds=0.0):
        """Kill it so many seconds after ``there()`` holds, before which it does not end."""
        deadline = time.monotonic() + 300
        while not there():
            alive = self.poll() is None and time.monotonic() < deadline
            assert alive, self.log.read_text()[-3000:]
            time.sleep(0.002)
        time.sleep(seconds)
        self.kill()
        self.wait()

    def communicate(self, timeout=None):
        self.wait(timeout)
        return self.log.read_text(errors="replace")


def start(*words, **more):
    """``python -m`` of a module, or ``python`` of a file, with these words, here, in this
    environment and ``more``."""
    log, given = Path(tempfile.mkdtemp()) / "command.log", environment() | more
    if is_useful(2, False):
        try:
            return Command(loader().start([os.getcwd(), *words], log, given), log)
        except ChildProcessError:
            assert "GPU" in LOADED.read_text(), "the one reason to fork nothing"
    how = [] if words[0].endswith(".py") else ["-m"]
    return Command(processes.start([sys.executable, *how, *words], log, given), log)


def finish(*words, timeout=300, **more):
    """What it prints, once it has ended well."""
    command = start(*words, **more)
    output = command.communicate(timeout)
    assert command.returncode == 0, output[-3000:]
    return output
