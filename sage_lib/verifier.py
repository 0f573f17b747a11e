"""The one verifier, for the reward and for evaluation: Math-Verify on the last answer, gold first.

Math-Verify's own time limits use signals, which fail in threads and cancel an outer alarm. It is called without them,
in a worker process that is killed when one pair takes too long; the process also has a memory limit. Identical (gold,
answer) pairs are verified once.
"""

import atexit
import logging
import multiprocessing
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import TimeoutError as PairTimeout
from dataclasses import dataclass
from functools import lru_cache

from pebble import ProcessExpired, ProcessPool

from sage_lib.errors import SageError
from sage_lib.prompts import SOLUTION_END, SOLUTION_START

#: One pair may take this long (seconds; an ordinary one takes about 0.01), and a worker this much memory beyond its start.
TIME_LIMIT, MEMORY_LIMIT_BYTES = 5.0, 2_000_000_000
#: A longer answer is refused unread (characters).
LENGTH_LIMIT = 400


@dataclass(frozen=True)
class Verdict:
    """``correct``, and why: "verified", "no answer", "too long", "timeout" or "worker died"."""

    correct: bool
    reason: str


def last_answer(text: str) -> str | None:
    """The text between the last complete pair of solution markers, stripped; None when there is none."""
    head, closing, _ = text.rpartition(SOLUTION_END)
    _, opening, answer = head.rpartition(SOLUTION_START)
    return answer.strip() if closing and opening else None


def _limit_worker() -> None:
    import resource

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of every call without its own time limit
    try:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LIMIT_BYTES,) * 2)
    except (OSError, ValueError):
        pass  # no such limit on this platform: time and length still hold


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> list:
    from math_verify import parse

    parsed = parse(f"${gold}$", parsing_timeout=None)
    return parsed if any(not isinstance(p, str) for p in parsed) else []  # bare text means that nothing was understood


def _verify(pair: tuple[str, str]) -> bool | None:
    """In the worker: None for a gold that does not parse, otherwise Math-Verify's verdict."""
    from math_verify import parse, verify

    gold = _parse_gold(pair[0])
    if not gold:
        return None
    return bool(verify(gold, parse(f"${pair[1]}$", parsing_timeout=None), timeout_seconds=None))


class Verifier:
    """Verifies pairs in ``workers`` killable processes, started at the first pair that needs one.

    ``counts`` says what happened to every pair asked about: "asked", "cached" and each reason of :class:`Verdict`.
    Safe to call from threads, notebooks and TRL's reward call.
    """

    def __init__(self, workers: int = 1, time_limit: float = TIME_LIMIT):
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            raise SageError("the package math-verify is missing, and without it every answer would score 0: install requirements.lock") from error
        self.workers, self.time_limit = workers, time_limit
        self.counts: Counter[str] = Counter()
        self._known: dict[tuple[str, str], Verdict] = {}
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()

    def verify_answers(self, golds: Sequence[str], answers: Sequence[str | None]) -> list[Verdict]:
        """A verdict for each (gold, answer) pair; an answer of None is not correct.

        Raises:
            SageError: for a gold that Math-Verify cannot parse; such a problem must not be in a data set.
        """
        with self._lock:
            pairs = list(zip(golds, answers, strict=True))
            self.counts["asked"] += len(pairs)
            self._verify_new(list(dict.fromkeys(p for p in pairs if p not in self._known)))
            verdicts = [self._known[p] for p in pairs]
            self.counts.update(v.reason for v in verdicts)
            return verdicts

    def _verify_new(self, pairs: list[tuple[str, str | None]]) -> None:
        self.counts["distinct"] += len(pairs)
        hard = []
        for pair in pairs:
            if pair[1] is None:
                self._known[pair] = Verdict(False, "no answer")
            elif len(pair[1]) > LENGTH_LIMIT:
                self._known[pair] = Verdict(False, "too long")
            else:
                hard.append(pair)
        if not hard:
            return
        results = self._workers().map(_verify, hard, timeout=self.time_limit, chunksize=1).result()
        for pair in hard:
            try:
                correct = next(results)
            except PairTimeout:
                self._known[pair] = Verdict(False, "timeout")
            except (ProcessExpired, MemoryError, RecursionError):
                self._known[pair] = Verdict(False, "worker died")
            else:
                if correct is None:
                    raise SageError(f"the gold answer {pair[0]!r} cannot be parsed: correct or drop its problem")
                self._known[pair] = Verdict(correct, "verified")

    def _workers(self) -> ProcessPool:
        if self._pool is None:
            # spawn: a fork of a process that runs torch threads may hang.
            self._pool = ProcessPool(self.workers, initializer=_limit_worker, context=multiprocessing.get_context("spawn"))
            atexit.register(self.close)
        return self._pool

    def close(self) -> None:
        """End the worker processes; a later call starts new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


@lru_cache(maxsize=1)
def shared() -> Verifier:
    """The verifier that the reward function uses, one for the process."""
    return Verifier()


def accuracy_reward(completions: Sequence, answer: Sequence[str], **kwargs) -> list[float]:
    """TRL reward function: 1.0 where the last answer equals the gold, else 0.0.

    ``completions`` are texts or one-turn conversations; ``answer`` is the data set's column of gold answers.
    """
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(v.correct) for v in shared().verify_answers(answer, [last_answer(t) for t in texts])]
