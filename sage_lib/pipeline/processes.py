"""Processes that end with the one that started them, in whatever way that one ends.

The parent holds the writing end of a pipe that is the child's standard input. The kernel closes it
when the parent ends, killed or not, and a thread of the child sees that. (Linux can send a signal
instead, but when the parent's *thread* ends, and there alone.)
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Protocol

#: Seconds that a process has to end by itself before it is killed.
GRACE = 10


class Process(Protocol):
    """A process that leads a group: of subprocess.Popen, what those need who wait for its end."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """None while it goes on, then its status; below 0 the signal that ended it."""

    def wait(self, timeout: float | None = None) -> int:
        """Its status once it has ended; subprocess.TimeoutExpired after so many seconds."""


def start(
    words: list[str], log: Path, environment: Mapping[str, str], keep: Sequence[int] = ()
) -> subprocess.Popen:
    """Start a command whose program calls :func:`end_with_parent`; its output is added to ``log``.

    ``keep``: files of this process that stay open in it. It leads a process group of its own: its
    workers end with it, and an interrupt from the keyboard reaches the parent alone, which then
    calls :func:`end`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            pass_fds=keep,
        )


def end_with_parent() -> None:
    """Have this process and its group killed as soon as the one that started it is gone."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def end_with_pool() -> None:
    """The same for a worker of a process pool, which has no such pipe: the initializer of the pool.

    Without it the workers of a killed parent wait for work for ever. An interrupt from the keyboard
    ends a worker without a word: its parent has one.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("this process is no worker of a pool")

    signal.signal(signal.SIGINT, lambda *_: os._exit(1))

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end(processes: Collection[Process]) -> None:
    """End processes, each with all that it started, and wait until they are gone."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        _signal(process, signal.SIGTERM)
    for process in running:
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
