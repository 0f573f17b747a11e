"""What a process of the verifier does: it compares golds and answers by Math-Verify, within limits
of memory and of its own processor time. That is counted in units of a known formula."""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The known formula: a gold, and an answer that is written in another way. {} is a number.
UNIT = (r"\frac{{x^2 + {}}}{{2}}", r"\frac{{x^2}}{{2}} + \frac{{{}}}{{2}}")

_unit = 0.0  # in a worker: seconds of processor time that the known formula takes


def start() -> None:
    """Limit the worker's memory and measure the known formula, before the first pair's time runs.

    The first of four, which loads Math-Verify, does not count, and of the others the median does.
    """
    global _unit
    from sage_lib.tasks.mathematics import equal

    # It warns of every call without its own time limit.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    times = []
    for number in range(11, 15):  # it remembers what it parsed
        begun = time.process_time()
        equal(*(side.format(number) for side in UNIT))
        times.append(time.process_time() - begun)
    _unit = statistics.median(times[1:])
    with contextlib.suppress(OSError, ValueError):  # without it time and length still hold
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2_000_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class TimeUp(BaseException):
    """:func:`limited` raises it, and ``except Exception`` does not catch it."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeUp after some processor time of a ``with`` block, which the main thread runs."""

    def time_up(*signal_and_frame: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGPROF, time_up)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _limit_process(seconds: float) -> None:
    """Let the kernel end this process (SIGXCPU) soon after a pair's time, if nothing listens to the
    alarm."""
    with contextlib.suppress(OSError, ValueError):  # without it the clock's limit holds
        used, hard_limit = int(time.process_time()), resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (used + 2 + math.ceil(seconds), hard_limit))


def verify_chunk(chunk: list[tuple[str, str]], limit: float) -> list[bool | str | None]:
    """Compare gold and answer of each pair, in a worker.

    ``limit`` is that of a pair, in units of the known formula. Returns for each pair whether they
    are equal; None for a gold that does not parse; or the reason why nobody can tell.
    """
    from sage_lib.tasks.mathematics import equal

    verdicts: list[bool | str | None] = []
    for pair in chunk:
        try:
            _limit_process(limit * _unit)
            with limited(limit * _unit):
                verdict: bool | str | None = equal(*pair)
        except TimeUp:
            verdict = "timeout"
        except (MemoryError, RecursionError):
            verdict = "out of memory"
        except Exception:  # whatever Math-Verify or sympy trips over
            verdict = "not understood"
        verdicts.append(verdict)
    return verdicts
