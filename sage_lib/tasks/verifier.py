"""The verifier of the reward and of evaluation: Math-Verify compares gold and last answer.

Math-Verify's own time limits use signals, which fail in threads. It is called without them, in
worker processes with limits of their own: processor time, memory, and as a last resort the clock,
after which a worker is killed. Processor time is counted in units of a known formula, which each
worker measures as it starts. So neither a busy machine nor a slow one changes a verdict.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import TimeoutError as PairTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pebble import ProcessExpired, ProcessPool

from sage_lib.errors import SageError
from sage_lib.tasks import worker
from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START

#: A longer answer or gold is refused unread (characters).
LENGTH_LIMIT = 400
#: What a pair may take, in units of the known formula of :mod:`sage_lib.tasks.worker`; and what it
#: may take at first. The slow ones of a batch, a sixth of its pairs or ten, have a second try.
LIMIT, FIRST_LIMIT = 150.0, 20.0
#: Verdicts that are kept, some ten megabytes; beyond, all are forgotten before the next batch.
MOST_KNOWN = 100_000
#: Seconds of the clock after which a worker is killed that processor time does not stop.
PATIENCE = 300
#: Reasons of :class:`Verdict` for an answer that was cut off, and not read to its end.
CUT = ("timeout", "out of memory", "worker died")
CHUNK = 32  # pairs that a worker takes at a time
#: Integers are compared without Math-Verify. Never \d, which matches the digits of every script.
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
#: Forms of answers (boxed or not) of which a first batch was read.
_FIRST_SEEN: set[bool] = set()

Pair = tuple[str, str]  # a gold answer and an answer


@dataclass(frozen=True)
class Verdict:
    correct: bool
    reason: str  # "verified", or why there is no verdict


def last_answer(text: str, boxed: bool = False, lines: bool = False) -> str | None:
    r"""Return the last answer of a completion.

    Args:
        text: the completion.
        boxed: the answer stands in \boxed{...}, and not between solution markers. Then a full stop
            at its end stays, and ``lines`` is not read.
        lines: blanks, line breaks and a full stop at the end stay, as a grid needs them. Otherwise
            blanks become single: a line break would hide the answer from Math-Verify.

    Returns:
        The answer, None where there is none.
    """
    if boxed:
        answer = last_boxed(text)
        return None if answer is None else " ".join(answer.split())
    last_end = text.rfind(SOLUTION_END)
    opening = text.rfind(SOLUTION_START, 0, max(last_end, 0))
    if opening < 0:
        return None
    answer = text[opening + len(SOLUTION_START) :].partition(SOLUTION_END)[0]
    return answer.strip() if lines else " ".join(answer.split()).removesuffix(".").rstrip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} with balanced braces; None without any."""
    _, box, content = text.rpartition(r"\boxed{")
    depth = 1
    for position, character in enumerate(content if box else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return content[:position]
    return None


class Verifier:
    """Verifies pairs of gold and answer in processes that can be killed. Threads may share it.

    ``counts`` has the number of "pairs", of "distinct" (new) ones, and of each reason of
    :class:`Verdict`.
    """

    def __init__(self, workers: int = 1, limit: float = LIMIT) -> None:
        """Start no process yet. There are at most 8 workers, or one a core if these are more.
        ``limit`` is that of a pair, in units of the processor time that ``worker.UNIT`` takes."""
        if workers < 1:
            raise SageError(f"a verifier needs at least one worker, not {workers}")
        self.workers, self.limit = min(workers, max(8, os.cpu_count() or 1)), limit
        self.counts: Counter[str] = Counter()
        self._known: dict[tuple[str, str | None], Verdict] = {}
        self._untried: list[Pair] = []  # slow pairs of this batch that had no second try
        self._warned = False
        self._pool: ProcessPool | None = None
        self._served = False  # whether that pool has returned anything
        self._lock = threading.Lock()

    def verify_answers(
        self, golds: Sequence[str | int], answers: Sequence[str | int | None]
    ) -> list[Verdict]:
        """Return a verdict for each gold, a formula or a number, and its answer.

        No answer, None, is not correct. SageError for a gold that is missing (None or NaN), too
        long, or cannot be parsed.
        """
        columns = zip(golds, answers, strict=True)
        pairs = [(_gold_text(gold), _answer_text(answer)) for gold, answer in columns]
        with self._lock:
            self.counts["pairs"] += len(pairs)
            if len(self._known) > MOST_KNOWN:
                self._known.clear()
            self._verify_new([pair for pair in dict.fromkeys(pairs) if pair not in self._known])
            verdicts = [self._known[pair] for pair in pairs]
            for pair in self._untried:  # another batch may have more time for it
                del self._known[pair]
            self.counts.update(verdict.reason for verdict in verdicts)
            self._warn(pairs, verdicts)
            return verdicts

    def cut(self) -> int:
        """Return how many pairs were cut off at a limit, so that nobody knows their verdict."""
        return sum(self.counts[reason] for reason in CUT)

    def _warn(self, pairs: Sequence[tuple[str, str | None]], verdicts: Sequence[Verdict]) -> None:
        """Warn, once, of an answer that was cut off and is about as short as its gold."""
        for (gold, answer), verdict in zip(pairs, verdicts, strict=True):
            honest = answer is not None and len(answer) <= 2 * len(gold) + 10
            if honest and verdict.reason in CUT and not self._warned:
                self._warned = True
                logging.getLogger(__name__).warning(
                    "the verifier cut off the answer %r to the gold %r (%s), which counts as "
                    "wrong: if it looks right to you, verify with a larger limit than %g",
                    answer, gold, verdict.reason, self.limit,
                )  # fmt: skip

    def require_golds(self, golds: Sequence[str | int]) -> None:
        """Raise SageError for the first gold that cannot be verified: before any sampling."""
        distinct = list(dict.fromkeys(golds))
        verdicts = self.verify_answers(distinct, ["0"] * len(distinct))
        self.counts.clear()
        for gold, verdict in zip(distinct, verdicts, strict=True):
            if verdict.reason != "verified":
                raise SageError(
                    f"the gold answer {gold!r} cannot be verified ({verdict.reason}): correct or "
                    "drop its problem"
                )

    def _verify_new(self, pairs: list[tuple[str, str | None]]) -> None:
        self.counts["distinct"] += len(pairs)
        self._untried = []
        hard: list[Pair] = []
        for gold, answer in pairs:
            if answer is None or answer == TOO_LONG:
                self._known[gold, answer] = Verdict(False, "too long" if answer else "no answer")
            elif _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
                self._known[gold, answer] = Verdict(int(gold) == int(answer), "verified")
            else:
                hard.append((gold, answer))
        self._verify_hard(hard, min(FIRST_LIMIT, self.limit))
        slow = [pair for pair in hard if self._known[pair].reason == "timeout"]
        if self.limit > FIRST_LIMIT:
            again = slow[: max(10, len(pairs) // 6)]
            self._verify_hard(again, self.limit)
            self._untried = slow[len(again) :]

    def _verify_hard(self, pairs: list[Pair], limit: float) -> None:
        # Together first, since handing over costs time; the pairs of a killed worker one by one.
        together = [pairs[i : i + CHUNK] for i in range(0, len(pairs), CHUNK)]
        lost = self._verify_chunks(together, limit)
        lost = self._verify_chunks([[pair] for pair in lost], limit)
        while lost:
            lost = self._verify_chunks([[pair] for pair in lost], limit, last=True)

    def _verify_chunks(
        self, chunks: list[list[Pair]], limit: float, last: bool = False
    ) -> list[Pair]:
        """Verify chunks of pairs, and remember the verdicts; return lost pairs, for another try.

        A pair whose worker died is refused in the ``last`` try alone: another program may have
        killed the worker.
        """
        lost: list[Pair] = []
        if not chunks:
            return lost
        limits = [limit] * len(chunks)
        job = self._workers().map(
            worker.verify_chunk, chunks, limits, timeout=PATIENCE, chunksize=1
        )
        results = job.result()
        for number, chunk in enumerate(chunks):
            try:
                verdicts = next(results)
                self._served = True
            except BrokenProcessPool as error:
                self.close()
                if self._served:  # a worker was killed as it took or returned something
                    return lost + [pair for rest in chunks[number:] for pair in rest]
                raise SageError(
                    "the verifier's processes could not start: put what your script runs under "
                    "if __name__ == '__main__':"
                ) from error
            except (PairTimeout, ProcessExpired, MemoryError) as error:
                reason = "out of memory" if isinstance(error, MemoryError) else "timeout"
                if isinstance(error, ProcessExpired) and error.exitcode != -signal.SIGXCPU:
                    reason = "worker died"
                if len(chunk) > 1 or (reason == "worker died" and not last):
                    lost += chunk
                    continue
                verdicts = [reason]
            for pair, verdict in zip(chunk, verdicts, strict=True):
                if verdict is None:
                    raise SageError(
                        f"the gold answer {pair[0]!r} cannot be parsed: correct or drop its problem"
                    )
                reason = verdict if isinstance(verdict, str) else "verified"
                self._known[pair] = Verdict(verdict is True, reason)
        return lost

    def _workers(self) -> ProcessPool:
        if self._pool is not None and not self._pool.active:
            self.close()
        if self._pool is None:
            # spawn: a fork of a process that runs torch threads may hang.
            context = multiprocessing.get_context("spawn")
            self._served = False
            self._pool = ProcessPool(self.workers, initializer=worker.start, context=context)
            atexit.register(self.close)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


#: In the place of every answer that is too long: none is kept.
TOO_LONG = "." * (LENGTH_LIMIT + 1)


def _answer_text(answer: str | int | None) -> str | None:
    text = None if answer is None else str(answer)
    return TOO_LONG if text and len(text) > LENGTH_LIMIT else text


def _gold_text(gold: str | int) -> str:
    text = str(gold)
    if gold is None or gold != gold:
        raise SageError(f"a problem has the gold answer {text}: fill it in, or drop the problem")
    if len(text) > LENGTH_LIMIT:
        raise SageError(
            f"the gold answer {text[:40]!r}... has {len(text):,} characters, and at most "
            f"{LENGTH_LIMIT} are read: correct or drop its problem"
        )
    return text


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a turn: None has none, and a list is of parts, some of which are texts."""
    parts = [{"text": content}] if isinstance(content, str) else content or []
    return "".join(part.get("text") or "" for part in parts)


@lru_cache(maxsize=1)
def shared() -> Verifier:
    return Verifier()


def accuracy_reward(
    completions: Sequence,
    answer: Sequence[str | int] | None = None,
    boxed: bool = False,
    **kwargs: Any,
) -> list[float]:
    """Reward completions for TRL: 1.0 where the last answer equals the gold, else 0.0.

    A first batch without any answer gives a warning.

    Args:
        completions: texts or one-turn conversations.
        answer: the data set's column of gold answers.
        boxed: as in :func:`last_answer`.
        kwargs: further columns, which are not read.

    Returns:
        One reward for each completion.

    Raises:
        SageError: without the column; for a gold that is missing, too long, or cannot be parsed.
    """
    if answer is None:
        raise SageError(
            "accuracy_reward needs a column 'answer' of gold answers: add it to the data"
        )
    if len(answer) != len(completions):
        raise SageError(
            f"accuracy_reward got {len(completions)} completions and {len(answer)} gold answers: "
            "give one for each"
        )
    texts = [c if isinstance(c, str) else _text(c[-1]["content"]) for c in completions]
    answers = [last_answer(text, boxed) for text in texts]
    if boxed not in _FIRST_SEEN:
        _FIRST_SEEN.add(boxed)
        if texts and not any(answers):
            form = r"\boxed{...}" if boxed else f"{SOLUTION_START}...{SOLUTION_END}"
            logging.getLogger(__name__).warning(
                "accuracy_reward looks for %s and read no answer in %d completions, so all earn 0; "
                "one ends in %r: ask for that form in the prompt, or call it with boxed=%s",
                form, len(texts), texts[0][-80:], not boxed,
            )  # fmt: skip
    return [float(verdict.correct) for verdict in shared().verify_answers(answer, answers)]
