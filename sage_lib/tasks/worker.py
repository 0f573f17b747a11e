"""What a process of the verifier does: it compares golds and answers by Math-Verify, within limits
of memory and of its own processor time. That is counted in units of a known formula."""

from __future__ import annotations

import logging
import math
import signal
import statistics
import time
from pathlib import Path
from types import FrameType

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
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, _time_up)
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2_000_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (ImportError, OSError, ValueError):
        pass  # no such limit on this platform: time and length still hold


class _TimeUp(BaseException):
    """The alarm raises it, and ``except Exception`` does not catch it."""


def _time_up(number: int, frame: FrameType | None) -> None:
    raise _TimeUp


def _set_alarm(seconds: float) -> None:
    """Set an alarm that raises _TimeUp after some processor time; 0 stops it.

    If nothing listens to it, the kernel ends the process soon after (SIGXCPU).
    """
    try:
        import resource

        signal.setitimer(signal.ITIMER_PROF, seconds)
        if seconds:
            used = int(time.process_time())
            hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (used + 2 + math.ceil(seconds), hard_limit))
    except (ImportError, AttributeError, OSError, ValueError):
        pass  # no such limits on this platform: the clock's holds


def verify_chunk(chunk: list[tuple[str, str]], limit: float) -> list[bool | str | None]:
    """Compare gold and answer of each pair, in a worker.

    Args:
        chunk: pairs.
        limit: of each, in units of the known formula.

    Returns:
        For each pair whether they are equal; None for a gold that does not parse; or the reason
        why nobody can tell.
    """
    from sage_lib.tasks.mathematics import equal

    verdicts: list[bool | str | None] = []
    for pair in chunk:
        try:
            _set_alarm(limit * _unit)
            try:
                verdict: bool | str | None = equal(*pair)
            finally:
                _set_alarm(0)
        except _TimeUp:
            verdict = "timeout"
        except (MemoryError, RecursionError):
            verdict = "out of memory"
        except Exception:  # whatever Math-Verify or sympy trips over
            verdict = "not understood"
        verdicts.append(verdict)
    return verdicts
