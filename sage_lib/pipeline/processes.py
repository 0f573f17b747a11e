"""Processes that import the libraries once and do one task after another.

A worker ends with the process that started it, killed or not: a thread of the worker sees that the
kernel closes the pipe by which it is given its tasks.
"""

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sage_lib.errors import SageError
from sage_lib.files import disk_errors

#: Status of a task that another process does, or did just now.
BUSY = os.EX_TEMPFAIL


class Worker:
    """A process that runs the module ``program``, which calls :func:`serve`.

    It leads a session of its own: an interrupt from the keyboard does not reach it.
    """

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            bufsize=0,
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.orders, self.answers = self.process.stdin, self.process.stdout
        os.set_blocking(self.answers.fileno(), False)
        self.is_idle = True  # it can be given a task
        self.is_asked = False  # of a task whose end nobody has read yet

    def send(self, words: list[str], log: Path) -> None:
        """Have it do a task, whose output is added to ``log``."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.is_idle, self.is_asked = False, True
        with contextlib.suppress(BrokenPipeError):  # it was killed, as poll says
            self.orders.write(f"{json.dumps([words, str(log.absolute())])}\n".encode())

    def poll(self) -> int | None:
        """None while a task goes on, then its status; below 0 the signal that killed the worker."""
        ended = self.process.poll()
        answer = self.answers.read()
        if not answer:
            self.is_asked = ended is None
            return ended
        status, self.is_idle = json.loads(answer)
        self.is_asked = False
        return int(status)

    def end(self) -> None:
        """End it with all that it started, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.orders.close()
        self.answers.close()


def serve(do: Callable[[list[str]], int]) -> None:
    """Do every task that the process which started this one sends: ``do`` gets its words and
    returns its status. The process ends after a failure, and where there is a GPU: what a run
    leaves there must not meet the next one."""
    answers, orders = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for line in orders:
            tasks.put(line)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    again = True
    while again:
        words, log = json.loads(tasks.get())
        with open(log, "a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        with contextlib.suppress(OSError):  # Linux: the peak memory of a run is its own
            Path("/proc/self/clear_refs").write_text("5")
        status = status_of(do, words)
        gc.collect()
        torch: Any = sys.modules.get("torch")
        again = status in (0, BUSY) and not (torch and torch.accelerator.is_available())
        print(json.dumps([status, again]), file=answers, flush=True)


def status_of(do: Callable[[list[str]], int], words: list[str]) -> int:
    """The status of a task: 1 if it failed, which the last line of its output explains."""
    status = 1
    try:
        with disk_errors():
            status = do(words)
    except SageError as error:
        print(f"error: {error}")
    except Exception:
        traceback.print_exc(file=sys.stdout)
    sys.stdout.flush()
    sys.stderr.flush()
    return status
