"""A process that loads the libraries once, from which the process of every run is forked.

Importing what trains takes 5 to 10 s, longer than a short run. A fork has it all, and is a process
of its own otherwise: its group, its log, its environment, its random numbers, its end.

    loader = Loader("sage_lib.pipeline.stages", ["smoke", "rl"], log, environment)
    process = loader.start(["rl", "--run", "grpo-s3407", "--child"], log, environment)

Only Linux forks safely what these libraries start (:func:`is_useful`), and what they start on a GPU
does not outlive a fork: there, every process loads them for itself.
"""

import atexit
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from sage_lib.pipeline import processes

#: What the process says when everything is loaded.
LOADED = "loaded"
#: The threads of GNU OpenMP are not there in a fork, which waits for them for ever: none is made
#: while the libraries are loaded. A run sets its own number of threads.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def is_useful(count: int, needs_gpu: bool) -> bool:
    """Whether ``count`` processes are sooner forked than started one by one."""
    return count > 1 and not needs_gpu and sys.platform == "linux"


class Forked:
    """A process that a :class:`Loader` forked: what of subprocess.Popen those need who wait."""

    def __init__(self, loader: "Loader", pid: int):
        self.loader, self.pid = loader, pid

    def poll(self) -> int | None:
        """None while it goes on, then its status; below 0 the signal that ended it."""
        self.loader.listen(0)
        return self.loader.statuses.get(self.pid, -signal.SIGKILL if self.loader.gone else None)

    def wait(self, timeout: float | None = None) -> int:
        """Its status once it has ended; subprocess.TimeoutExpired after so many seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.loader.listen(left)
        return status


class Loader:
    """The process that loads: it calls ``load(words)`` of the module ``program``. Its forks run
    ``main`` of that module with words of their own, as ``python -m`` would.

    It ends with :meth:`end` or with this process, in whatever way that ends, and all its forks with
    it. What loading prints is added to ``log``.
    """

    def __init__(
        self, program: str, words: Sequence[str], log: Path, environment: Mapping[str, str]
    ):
        #: Of the forks that have ended.
        self.statuses: dict[int, int] = {}
        #: Whether the process that loaded is no more, and so none of its forks.
        self.gone = False
        self.loaded = False
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), program, *words]
        with theirs:
            self.process = processes.start(
                command, log, {**environment, **ONE_THREAD}, keep=[theirs.fileno()]
            )

    def end(self) -> None:
        processes.end([self.process])
        self.connection.close()

    def start(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Forked:
        """Fork a process, once everything is loaded; its output is added to ``log``.

        ChildProcessError where there is nothing to fork from: loading ended, as its log says."""
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.connection.send((list(words), str(log.absolute()), dict(environment)))
            while not isinstance(told := self.connection.recv(), int):
                self._note(told)
        except (EOFError, OSError) as error:
            self.gone = True
            raise ChildProcessError("the process that loads the libraries ended") from error
        self.statuses.pop(told, None)  # of one that ended long ago and had the same number
        return Forked(self, told)

    def listen(self, seconds: float | None) -> None:
        """Take note of the forks that have ended; wait at most so long for the first of them."""
        try:
            while not self.gone and self.connection.poll(seconds):
                self._note(self.connection.recv())
                seconds = 0
        except (EOFError, OSError):
            self.gone = True

    def is_ready(self) -> bool:
        """Whether :meth:`start` answers at once: everything is loaded, or nothing ever will be."""
        self.listen(0)
        return self.loaded or self.gone

    def _note(self, told: str | int | tuple[int, int]) -> None:
        if isinstance(told, tuple):
            pid, status = told
            self.statuses[pid] = status
        elif told == LOADED:  # or the number of a fork that nobody waited for
            self.loaded = True


def serve(connection: Connection, program: str, to_load: Sequence[str]) -> None:
    """Load, then fork for every message, and send back its number, and its status at its end."""
    processes.end_with_parent()
    import_module(program).load(to_load)
    # No fork looks through all that the libraries made whenever it collects garbage, nor copies it.
    gc.freeze()
    connection.send(LOADED)
    # A fork reads its end as other processes read the end of their parent's pipe.
    alive, held = os.pipe()
    # By what tells the end of each. (Its sentinel is a pipe, which its own forks hold open, too.)
    running: dict[int, BaseProcess] = {}
    while True:
        ready = wait([connection, *running])
        for ended in running.keys() & set(ready):
            process = running.pop(ended)
            os.close(ended)
            process.join()
            connection.send((process.pid, process.exitcode))
        if connection in ready:
            try:
                words, log, environment = connection.recv()
            except EOFError:
                return
            files = (alive, held, connection.fileno())
            process = _forked(program, words, log, environment, files)
            assert process.pid is not None
            running[os.pidfd_open(process.pid)] = process
            connection.send(process.pid)


def _forked(
    program: str, words: list[str], log: str, environment: dict[str, str], files: tuple[int, ...]
) -> BaseProcess:
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_run, args=(program, words, log, environment, files))
    with warnings.catch_warnings():
        # From Python 3.12 on it warns where there are other threads: here the one that waits for
        # the parent's end, and pyarrow's.
        warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
        process.start()
    assert process.pid is not None
    os.setpgid(process.pid, process.pid)  # on both sides: whoever is first, the group is there
    return process


def _run(
    program: str, words: list[str], log: str, environment: dict[str, str], files: tuple[int, ...]
) -> None:
    """What a fork does: it becomes a process as :func:`processes.start` makes one, and runs."""
    os.setpgid(0, 0)
    alive, *others = files
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number, source in enumerate((alive, written, written)):
        os.dup2(source, number)
    for number in (alive, written, *others):
        os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    # No two forks draw the same numbers where nothing is seeded. (Python's own see to that.)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
    sys.argv = [program, *words]
    # What the run leaves to its end is done before multiprocessing waits for the processes that it
    # started, as those of the verifier; what the loading process leaves to its own end is not, such
    # as folders that it deletes. Two of these are everybody's, and register once a process.
    atexit._clear()
    for inherited in weakref.finalize._registry:  # type: ignore[attr-defined]
        inherited.atexit = False
    atexit.register(logging.shutdown)
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    try:
        import_module(program).main(words)
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    _, number, program, *to_load = sys.argv
    serve(Connection(int(number)), program, to_load)
