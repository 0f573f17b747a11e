"""The one verifier, for the reward and for evaluation: Math-Verify on the last answer, gold first.

Math-Verify's own time limits use signals, which fail in threads and cancel an outer alarm. It is
called without them, in worker processes with limits of their own: processor time (a busy machine
changes no verdict), memory, and as a last resort the clock, after which a worker is killed.
Identical (gold, answer) pairs are verified once, two plain integers are compared on the spot, and
two numbers that are far apart by their values.

Both texts are first written as Math-Verify reads them (:func:`parse`), e-notation among it. What it
gets wrong and is not mended: upper and lower case, a number and its percentage, a number and one of
another base or unit, a set of two and a pair are the same; names of several letters, primes and
second derivatives are products and powers of letters; log has base 10; bare words, x for times,
units such as m/s and "about" are not understood. tests/test_gold_values.py holds an example of
each.
"""

from __future__ import annotations

import ast
import atexit
import dataclasses
import importlib.util
import logging
import math
import multiprocessing
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as PairTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from sage_lib.errors import SageError
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START

#: Processor time that one pair may take (seconds; an ordinary one takes about 0.01).
TIME_LIMIT = 3
#: Memory that a worker may take beyond its start.
MEMORY_LIMIT_BYTES = 2_000_000_000
#: What a worker is given may take so many times its processor time by the clock.
CLOCK = 10
#: A longer answer is refused unread (characters).
LENGTH_LIMIT = 400
#: Pairs that a worker is given at a time.
CHUNK = 32
#: What is compared without Math-Verify. Never \d, which matches the digits of every script.
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_ARITHMETIC = re.compile(r"[-+*/^(). 0-9]+")
#: 4.5e33, 4.5E+33: digits, e, digits, without spaces. Not e^{2}, 24 e, 3e, 2e^x, 3e2t or 3e8.5,
#: where e is Euler's number.
_SCIENTIFIC = re.compile(
    r"(?<![\w.\\^])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([+-]?)0*([0-9]+)(?![\w^]|\.[0-9])", re.ASCII
)
#: 2**3, 10^-5: of these Math-Verify would read the base alone.
_POWER = re.compile(r" ?\*\* ?([+-]?[0-9]+)?|\^ ?([+-][0-9]+)(?![\w.])", re.ASCII)
#: What else is written in another way, so that Math-Verify reads it: -3./2; the letters gamma
#: (Lorentz factor) and E_0 (energies), which it takes for Euler's numbers; the sun's index.
_SPELLINGS = (
    (re.compile(r"(?<=[0-9])\.(?=\s*[-+*/^)])"), ""),
    (re.compile(r"\\gamma(?![A-Za-z(])"), r"\\mathcal{g}"),
    (re.compile(r"(?<![A-Za-z\\])([Ee])(?=_)"), r"\\mathcal{\1}"),
    (re.compile(r"_(?:\{\\odot\}|\\odot\b)"), "_{sun}"),
)
#: Digits of the largest exponent of ten that is read: no double has more.
_EXPONENT_DIGITS = 3
#: Decimals up to which Math-Verify compares, and digits that it computes: its defaults.
_DECIMALS, _PRECISION = 6, 15
#: Numbers below it are compared up to more decimals: six would make all of them 0.
_SMALL = 1e-3
#: Part of a number by which it may differ from a rounded one in an equation.
_ROUNDING = 0.1
#: Decimals beyond six at most.
_MOST_DECIMALS = 400

#: A gold answer and an answer, both as text.
Pair = tuple[str, str]


@dataclass(frozen=True)
class Verdict:
    """``correct``, and why: "verified", "no answer", "too long", "timeout", "out of memory",
    "not understood" or "worker died"."""

    correct: bool
    reason: str


def last_answer(text: str, boxed: bool = False) -> str | None:
    r"""The answer in the last pair of solution markers, with single spaces and without a full stop
    at its end; None when there is none.

    The last pair goes from the last opening marker that is closed to the first closing one after
    it. With ``boxed`` it is the content of the last \boxed{...} instead, as models write it that
    were not taught the markers.
    """
    if boxed:
        answer = last_boxed(text)
        return None if answer is None else " ".join(answer.split())
    last_end = text.rfind(SOLUTION_END)
    opening = text.rfind(SOLUTION_START, 0, max(last_end, 0))
    if opening < 0:
        return None
    after = text[opening + len(SOLUTION_START) :]
    answer = after.partition(SOLUTION_END)[0]
    # Single spaces: a line break would hide the answer from Math-Verify, and a vote counts equal
    # texts.
    return " ".join(answer.split()).removesuffix(".").rstrip()


def last_boxed(text: str) -> str | None:
    r"""Contents of the last \boxed{...} with balanced braces; None when there is none."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len(r"\boxed{")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def _start_worker() -> None:
    """Limit the memory and load Math-Verify, before the first pair's time runs."""
    import math_verify

    # It warns of every call without its own time limit.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    math_verify.parse("$1$", parsing_timeout=None)
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, _time_up)
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (ImportError, OSError, ValueError):
        pass  # no such limit on this platform: time and length still hold


class _TimeUp(BaseException):
    """Raised in the worker by the alarm; nothing that catches Exception stops it."""


def _time_up(number: int, frame: FrameType | None) -> None:
    raise _TimeUp


def _set_alarm(seconds: float) -> None:
    """Let _TimeUp be raised once this process has used so much more processor time; 0 stops it.

    Where that does not help, as in a long computation of one big number, the kernel ends the
    process (SIGXCPU) a second or two later.
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


def parse(text: str, units: bool = True) -> list:
    """What Math-Verify makes of a text that is one formula; [] when it is none.

    Left to itself Math-Verify would pick a number out of any text. That is done for whole
    arithmetic on plain numbers alone, and not for a broken piece of it, such as ( 9.

    With ``units`` a last letter is one and is dropped, as in 5 m; without, it is a variable.
    """
    import math_verify

    readable = _rewritten(text)
    if readable is None:
        return []
    formula = f"${readable}$"
    config = _latex() if units else _latex_without_units()
    parsed = math_verify.parse(formula, extraction_config=[config], parsing_timeout=None)
    if not _understood(parsed) and _is_arithmetic(text):
        parsed = math_verify.parse(formula, parsing_timeout=None)
    return parsed


@lru_cache(maxsize=1)
def _latex() -> Any:
    import math_verify

    return math_verify.LatexExtractionConfig()


@lru_cache(maxsize=1)
def _latex_without_units() -> Any:
    usual = _latex()
    normal = dataclasses.replace(usual.normalization_config, units=False)
    return dataclasses.replace(usual, normalization_config=normal)


def _rewritten(text: str) -> str | None:
    r"""The text in a spelling that Math-Verify reads; None where an exponent of ten is too long to
    be held.

    It reads 4.5e33 as 4.5 times Euler's number times 33, 2**3 as 2, 10^-5 as 10, -3./2 as -3 and
    \gamma^2 as an infinity, and nothing with E_0 or M_\odot in it.
    """
    exponents = [match[3] for match in _SCIENTIFIC.finditer(text)]
    if any(len(digits) > _EXPONENT_DIGITS for digits in exponents):
        return None
    readable = _SCIENTIFIC.sub(_power_of_ten, text) if exponents else text
    readable = _POWER.sub(_braced_power, readable)
    for written, read in _SPELLINGS:
        readable = written.sub(read, readable)
    return readable


def _braced_power(match: re.Match[str]) -> str:
    exponent = match[1] or match[2]
    return f"^{{{exponent}}}" if exponent else "^"


def _power_of_ten(match: re.Match[str]) -> str:
    mantissa, sign, exponent = match.groups()
    sign = "-" if sign == "-" else ""
    mantissa = mantissa.removesuffix(".")
    return rf"({mantissa} \cdot 10^{{{sign}{exponent}}})"


def _understood(parsed: list) -> bool:
    """Bare text alone means that nothing was understood."""
    return any(not isinstance(part, str) for part in parsed)


def _is_arithmetic(text: str) -> bool:
    if not _ARITHMETIC.fullmatch(text):
        return False
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        return False
    return True


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> tuple[list, bool]:
    """What Math-Verify makes of a gold, [] when it is no formula, and whether it has variables, in
    which case it has no units."""
    parsed = parse(gold)
    if not _understood(parsed):
        return [], False
    if _has_variables(parsed[0]):
        return _plain_symbols(parse(gold, units=False)), True
    return parsed, False


def _has_variables(formula: Any) -> bool:
    """Whether the formula, or the right side of the equation, has variables."""
    value = getattr(formula, "rhs", formula)
    return bool(value.free_symbols)


def _plain_symbols(parsed: list) -> list:
    """With i for the imaginary unit, one kind of variable, a variable in place of dx/dt, and
    fractions for decimals.

    Math-Verify leaves i a variable, takes those beside 5 i for complex and those beside 5i for real
    ones, which then differ, works out dx/dt as 0, and finds arcsin(1.3 x) unlike arcsin(13 x / 10).
    """
    import sympy

    found = []
    for part in parsed:
        if not isinstance(part, str):
            plain = {s: sympy.Symbol(s.name, real=True) for s in part.free_symbols}
            plain.update({s: sympy.I for s in plain if s.name == "i"})
            rates = {d: sympy.Symbol(str(d), real=True) for d in part.atoms(sympy.Derivative)}
            plain.update({d: rate for d, rate in rates.items() if d.expr.is_Symbol})
            plain.update(_written_decimals(part))
            part = part.xreplace(plain)
        found.append(part)
    return found


def _verify(pair: Pair) -> bool | None:
    """None for a gold that does not parse, otherwise Math-Verify's verdict."""
    from math_verify import verify

    gold, answer = pair
    expected, has_variables = _parse_gold(gold)
    if not expected:
        return None
    given = parse(answer)
    if has_variables:
        given = _plain_symbols(parse(answer, units=False) + given)
    if any(_contradicts_itself(part) for part in given):
        return False
    a, b = _number(gold, expected), _number(answer, given)
    if a is not None and b is not None:
        if _far_apart(a, b):
            return False
        if _same_fraction(expected[0], given[0]):
            return True
    decimals = _decimals(expected + given)
    digits = max(_PRECISION, decimals + _PRECISION - _DECIMALS)
    return bool(verify(expected, given, decimals, digits, timeout_seconds=None))


def _contradicts_itself(part: Any) -> bool:
    """Whether it holds an equation of two different numbers, such as 4 = 5, of which Math-Verify
    compares the right side alone. Decimals may be rounded, as in 1/3 = 0.33."""
    import sympy

    if not isinstance(part, sympy.logic.boolalg.Boolean):
        return False
    for equation in part.atoms(sympy.Eq):
        if all(_is_number(side) for side in equation.args):
            a, b = (complex(side) for side in equation.args)
            rounding = _ROUNDING if equation.has(sympy.Float) else 10**-_DECIMALS
            if abs(a - b) > rounding * max(abs(a), abs(b)):
                return True
    return False


def _is_number(side: Any) -> bool:
    import sympy

    return isinstance(side, sympy.Expr) and side.is_number


def _number(text: str, parsed: list) -> float | None:
    """The value of a text that is one real number and nothing else; None for all else, and for what
    has two readings (28%)."""
    if len(parsed) != 2 or "%" in text:
        return None
    formula = parsed[0]
    if not _is_number(formula):
        return None
    value = formula.evalf(15)
    return float(value) if value.is_Float or value.is_Rational else None


def _far_apart(a: float, b: float) -> bool:
    """True for two numbers that no rounding makes equal.

    Math-Verify would simplify their difference to say so, which is most of the time that wrong
    answers take.
    """
    return abs(a - b) > 0.001 * max(1.0, abs(a), abs(b))


def _same_fraction(a: Any, b: Any) -> bool:
    """Whether both are products and powers of integers and decimals, and of one value.

    Math-Verify computes with doubles, in which 2.19 times 10^6 and 21.9 times 10^5 may differ.
    """
    fractions = [_fraction(formula) for formula in (a, b) if _is_product(formula)]
    return len(fractions) == 2 and fractions[0].is_Rational and fractions[0] == fractions[1]


def _is_product(formula: Any) -> bool:
    import sympy

    parts = sympy.preorder_traversal(formula)
    return all(isinstance(part, (sympy.Number, sympy.Mul, sympy.Pow)) for part in parts)


def _fraction(product: Any) -> Any:
    """The product with its decimals as they were written, multiplied out."""
    return product.xreplace(_written_decimals(product)).doit()


def _written_decimals(formula: Any) -> dict:
    """Each decimal of a formula, and the fraction that it stands for."""
    import sympy

    return {number: sympy.Rational(str(number)) for number in formula.atoms(sympy.Float)}


def _decimals(parsed: list) -> int:
    """The decimals that Math-Verify is to compare: its six, and more for small numbers.

    Six decimals of 7.4e-12 and of 0 are the same.
    """
    smallest = min((size for part in parsed for size in _sizes(part)), default=1.0)
    if smallest >= _SMALL:
        return _DECIMALS
    return _DECIMALS + min(math.ceil(-math.log10(smallest)), _MOST_DECIMALS)


def _sizes(part: Any) -> Iterator[float]:
    """The sizes of the numbers other than 0 in what was parsed."""
    import sympy

    if isinstance(part, str):
        return
    parts = sympy.preorder_traversal(part)
    for piece in parts:
        if _is_product(piece):
            parts.skip()
            size = float(abs(piece.evalf(_DECIMALS)))
            if size > 0:
                yield size


def _verify_chunk(chunk: list[Pair], seconds: float) -> list[bool | str | None]:
    """In the worker: for each pair what :func:`_verify` says, or the reason why it says nothing."""
    found: list[bool | str | None] = []
    for pair in chunk:
        verdict: bool | str | None
        try:
            _set_alarm(seconds)
            try:
                verdict = _verify(pair)
            finally:
                _set_alarm(0)
        except _TimeUp:
            verdict = "timeout"
        except (MemoryError, RecursionError):
            verdict = "out of memory"
        except Exception:
            # Whatever Math-Verify or sympy trips over is an answer they do not understand.
            verdict = "not understood"
        found.append(verdict)
    return found


class Verifier:
    """Verifies pairs in ``workers`` killable processes, started at the first pair that needs one.

    ``counts`` says what happened to every pair asked about: "asked", "distinct" (new ones) and each
    reason of :class:`Verdict`. Safe to call from threads, notebooks and TRL's reward call.
    ``time_limit`` is in seconds of processor time.
    """

    def __init__(self, workers: int = 1, time_limit: float = TIME_LIMIT) -> None:
        if importlib.util.find_spec("math_verify") is None:  # the workers import it, in a second
            raise SageError(
                "the package math-verify is missing, and without it every answer would score 0: "
                "install requirements.lock"
            )
        self.workers, self.time_limit = workers, time_limit
        self.counts: Counter[str] = Counter()
        self._known: dict[tuple[str, str | None], Verdict] = {}
        self._pool: ProcessPool | None = None
        self._served = False  # whether that pool has done anything
        self._lock = threading.Lock()

    def verify_answers(
        self, golds: Sequence[str | int], answers: Sequence[str | int | None]
    ) -> list[Verdict]:
        """A verdict for each (gold, answer) pair; an answer of None is not correct.

        Raises:
            SageError: for a gold that Math-Verify cannot parse, or other numbers of golds and
                answers.
        """
        if len(golds) != len(answers):
            raise SageError(f"{len(golds)} gold answers do not go with {len(answers)} answers")
        pairs = [
            (str(gold), None if answer is None else str(answer))
            for gold, answer in zip(golds, answers, strict=True)
        ]
        with self._lock:
            self.counts["asked"] += len(pairs)
            self._verify_new([pair for pair in dict.fromkeys(pairs) if pair not in self._known])
            verdicts = [self._known[pair] for pair in pairs]
            self.counts.update(verdict.reason for verdict in verdicts)
            return verdicts

    def require_golds(self, golds: Sequence[str | int]) -> None:
        """Raise SageError for the first gold that Math-Verify cannot parse: before any sampling."""
        distinct = list(dict.fromkeys(golds))
        self.verify_answers(distinct, ["0"] * len(distinct))
        self.counts.clear()

    def _verify_new(self, pairs: list[tuple[str, str | None]]) -> None:
        self.counts["distinct"] += len(pairs)
        hard: list[Pair] = []
        for gold, answer in pairs:
            if answer is None:
                self._known[gold, answer] = Verdict(False, "no answer")
            elif len(answer) > LENGTH_LIMIT:
                self._known[gold, answer] = Verdict(False, "too long")
            elif _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
                self._known[gold, answer] = Verdict(int(gold) == int(answer), "verified")
            else:
                hard.append((gold, answer))
        # Together first, since handing pairs over costs more than most of them; what a killed
        # worker takes with it, one by one.
        lost = self._verify_chunks([hard[i : i + CHUNK] for i in range(0, len(hard), CHUNK)])
        lost = self._verify_chunks([[pair] for pair in lost])
        while lost:
            lost = self._verify_chunks([[pair] for pair in lost], last=True)

    def _verify_chunks(self, chunks: list[list[Pair]], last: bool = False) -> list[Pair]:
        """Verify each chunk in one go; returns the pairs of the chunks of several that a limit
        ended, of those that a broken pool did not come to, and, but for the ``last`` time, those
        whose worker died: somebody else may have killed it."""
        lost: list[Pair] = []
        if not chunks:
            return lost
        seconds = [self.time_limit] * len(chunks)
        patience = CLOCK * self.time_limit
        job = self._workers().map(_verify_chunk, chunks, seconds, timeout=patience, chunksize=1)
        results = job.result()
        for number, chunk in enumerate(chunks):
            try:
                found = next(results)
                self._served = True
            except BrokenProcessPool as error:
                self.close()
                if self._served:  # a worker was killed as it took or gave something
                    return lost + [pair for left in chunks[number:] for pair in left]
                raise SageError(
                    "the verifier's processes could not start: in a script of your own, put what "
                    "runs under if __name__ == '__main__':"
                ) from error
            except (PairTimeout, ProcessExpired, MemoryError) as error:
                reason = _reason(error)
                if len(chunk) > 1 or (reason == "worker died" and not last):
                    lost += chunk
                    continue
                found = [reason]
            for pair, verdict in zip(chunk, found, strict=True):
                self._known[pair] = _as_verdict(pair, verdict)
        return lost

    def _workers(self) -> ProcessPool:
        if self._pool is not None and not self._pool.active:
            self.close()
        if self._pool is None:
            # spawn: a fork of a process that runs torch threads may hang.
            context = multiprocessing.get_context("spawn")
            self._served = False
            self._pool = ProcessPool(self.workers, initializer=_start_worker, context=context)
            atexit.register(self.close)
        return self._pool

    def close(self) -> None:
        """End the worker processes; a later call starts new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


def _reason(error: Exception) -> str:
    """Why a worker gave no verdict on its one pair."""
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, ProcessExpired) and error.exitcode != -signal.SIGXCPU:
        return "worker died"
    return "timeout"


def _as_verdict(pair: Pair, found: bool | str | None) -> Verdict:
    """What a worker found, as a verdict; SageError where the gold did not parse."""
    if found is None:
        raise SageError(
            f"the gold answer {pair[0]!r} cannot be parsed: correct or drop its problem"
        )
    if isinstance(found, str):
        return Verdict(False, found)
    return Verdict(found, "verified")


def judge_by_math(
    problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
) -> list[bool]:
    """Whether Math-Verify finds each answer equal to the gold of the problem beside it."""
    golds = [problem.gold for problem in problems]
    return [verdict.correct for verdict in verifier.verify_answers(golds, answers)]


def require_math_golds(problems: Sequence[Problem], verifier: Verifier) -> None:
    """Raise SageError for the first gold that Math-Verify cannot parse."""
    verifier.require_golds([problem.gold for problem in problems])


@lru_cache(maxsize=1)
def shared() -> Verifier:
    """The verifier that the reward function uses, one for the process."""
    return Verifier()


_LOG = logging.getLogger(__name__)
#: Of which forms of answers a first batch was read.
_FIRST_SEEN: set[bool] = set()


def _nothing_read(texts: Sequence[str], boxed: bool) -> str:
    """What is said of a batch of which no answer was read."""
    example = next((text for text in texts if (r"\boxed{" in text) != boxed), texts[0])
    form = r"\boxed{...}" if boxed else f"{SOLUTION_START}...{SOLUTION_END}"
    other = "without boxed=True" if boxed else "with boxed=True, as functools.partial gives it"
    return (
        f"accuracy_reward read no answer in the first {len(texts)} completions, so all earn 0: it "
        f"looks for {form}, and one of them ends in {example[-80:]!r}; ask for that form in the "
        f"prompt, or call it {other}"
    )


def accuracy_reward(
    completions: Sequence,
    answer: Sequence[str | int] | None = None,
    boxed: bool = False,
    **kwargs: Any,
) -> list[float]:
    """TRL reward function: 1.0 where the last answer equals the gold, else 0.0.

    ``completions`` are texts or one-turn conversations; ``answer`` is the data set's column of gold
    answers, without which there is a SageError; ``boxed`` as in :func:`last_answer`: an answer
    outside the solution markers, or of ``boxed`` outside of \\boxed{}, counts as none. A first
    batch of which no answer can be read is said once, as a warning.
    """
    if answer is None:
        raise SageError(
            "accuracy_reward compares with the data set's column answer, which it does not have: "
            "add one with the right answers"
        )
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    answers = [last_answer(text, boxed) for text in texts]
    if boxed not in _FIRST_SEEN:
        _FIRST_SEEN.add(boxed)
        if texts and not any(answers):
            _LOG.warning("%s", _nothing_read(texts, boxed))
    return [float(verdict.correct) for verdict in shared().verify_answers(answer, answers)]
