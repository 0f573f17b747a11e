"""What all tasks have in common. A task is a family of problems; its fields are its settings."""

from __future__ import annotations

import dataclasses
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.tasks import verifier as verifiers
from sage_lib.tasks.problem import Demonstration, Problem
from sage_lib.tasks.verifier import Verifier
from sage_lib.validation import STRICT, default_of

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Task(ABC):
    """A family of problems, and the settings by which a profile chooses among them.

    A new task is a subclass and a line in ``table.TASKS``. It needs :meth:`stream`, and overrides
    what differs from the methods below. If all its valid completions can be listed, it extends
    :class:`ExactTask`.
    """

    #: Fields that no line of a profile names -> the setting of the whole profile that fills them.
    FILLED: ClassVar[Mapping[str, str]] = {}
    #: Names of :meth:`measures`: RL logs the shares of these, and counts.csv has counts of those.
    LOGGED: ClassVar[tuple[str, ...]] = ()
    COUNTED: ClassVar[tuple[str, ...]] = ()
    #: Whether its data have revisions, such as commits.
    HAS_REVISIONS: ClassVar[bool] = False
    #: Whether examples of any length are learned from. Otherwise they fit half of the context.
    ANY_LENGTH: ClassVar[bool] = False

    name: str

    # -- settings ----------------------------------------------------------------------------------

    @property
    def display_label(self) -> str:
        """The data set's name in tables and figures."""
        return self.name

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the task's texts that the tiny model's vocabulary lacks."""
        return ()

    def changes(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, the name first."""
        changed = {"name": self.name}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in self.FILLED and value != default_of(field):
                changed[field.name] = value
        return changed

    def identity(self) -> dict[str, Any]:
        """Return what decides which problems the task draws, as JSON: for fingerprints."""
        return self.changes()

    # -- problems ----------------------------------------------------------------------------------

    @abstractmethod
    def stream(self, seed: int, exclude: frozenset[str], revision: str | None) -> Iterator[Problem]:
        """Yield problems in an order that depends on the settings and the arguments alone.

        Args:
            seed: of the random draws.
            exclude: questions that are left out.
            revision: of the data, None for the usual one; None unless ``HAS_REVISIONS``.

        Returns:
            Problems with different questions.
        """

    def worked(self, problems: Iterator[Problem], rows: int, seed: int) -> Iterator[Demonstration]:
        """Turn problems into worked examples.

        Args:
            problems: of :meth:`stream`.
            rows: how many examples are needed.
            seed: of random draws.

        Returns:
            ``rows`` examples, or more. SageError where a problem has no worked answer.
        """
        for problem in problems:
            if problem.working is None:
                raise SageError(
                    f"{problem.dataset} has no worked answers: choose other data for sft_data, or "
                    "name the column of your file that has them, as in working: COLUMN"
                )
            yield Demonstration(problem.question, problem.working, problem.gold)

    def problems(
        self,
        rows: int,
        seed: int,
        exclude: frozenset[str] = frozenset(),
        revision: str | None = None,
    ) -> list[Problem]:
        """Return the first ``rows`` problems, or all where there are fewer.

        The other Args are as in :meth:`stream`.
        """
        return list(itertools.islice(self._checked_stream(seed, exclude, revision), rows))

    def demonstrations(
        self,
        rows: int,
        seed: int,
        exclude: frozenset[str] = frozenset(),
        revision: str | None = None,
        *,
        count_tokens: Callable[[str], int],
        max_seq_length: int,
    ) -> list[Demonstration]:
        """Return worked examples for SFT, no longer than half of the context (Appendix E.2).

        Args:
            rows: how many.
            seed, exclude, revision: as in :meth:`stream`.
            count_tokens: returns how many tokens a text has.
            max_seq_length: of the context, tokens.

        Returns:
            The first ``rows`` examples of :meth:`worked` that are short enough.
        """
        examples = self.worked(self._checked_stream(seed, exclude, revision), rows, seed)
        if not self.ANY_LENGTH:
            half = max_seq_length / 2
            examples = (e for e in examples if count_tokens(e.question + e.working) <= half)
        return list(itertools.islice(examples, rows))

    def _checked_stream(
        self, seed: int, exclude: frozenset[str], revision: str | None
    ) -> Iterator[Problem]:
        if revision is not None and not self.HAS_REVISIONS:
            raise SageError(f"the task {self.name} has no revisions: leave out {revision!r}")
        return self.stream(seed, exclude, revision)

    def could_draw(self, problem: Problem) -> bool:
        """Return whether a problem of any task may also stand in this task's stream.

        Such a held-out problem is left out of training. A file may hold problems of any task.
        """
        return problem.task in (self.name, "file")

    # -- completions of problems -------------------------------------------------------------------

    @staticmethod
    def last_answer(text: str) -> str | None:
        """Return the answer in a completion, None where it has none."""
        return verifiers.last_answer(text)

    @classmethod
    def is_correct(cls, problem: Problem, answer: str | None) -> bool | None:
        """Return whether an answer is correct; None where Math-Verify is to compare it."""
        return None

    @classmethod
    def are_correct(
        cls, problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
    ) -> list[bool]:
        """Return whether each answer is correct.

        Args:
            problems: of this task, with any settings.
            answers: as :meth:`last_answer` reads them, one for each problem.
            verifier: runs Math-Verify where :meth:`is_correct` leaves it the decision.

        Returns:
            One truth value for each problem. No answer, None, is not correct.
        """
        correct = [cls.is_correct(*pair) for pair in zip(problems, answers, strict=True)]
        numbers = [number for number, verdict in enumerate(correct) if verdict is None]
        if numbers:
            golds = [problems[number].gold for number in numbers]
            verdicts = verifier.verify_answers(golds, [answers[number] for number in numbers])
            for number, verdict in zip(numbers, verdicts, strict=True):
                correct[number] = verdict.correct
        return [bool(verdict) for verdict in correct]

    @classmethod
    def require_golds(cls, problems: Sequence[Problem], verifier: Verifier) -> None:
        """Raise SageError for the first gold that no answer could equal: before any sampling."""
        by_math = []
        for problem in problems:
            verdict = cls.is_correct(problem, problem.gold)
            if verdict is None:
                by_math.append(problem.gold)
            elif problem.gold and not verdict:
                raise SageError(
                    f"{problem.dataset} refuses its own answer of problem {problem.id}: correct "
                    "its settings, or choose another data set"
                )
        verifier.require_golds(by_math)

    @classmethod
    def measures(cls, problem: Problem, text: str, correct: bool) -> dict[str, bool]:
        """Return what the task reads off a completion. Nothing of it is the reward.

        Args:
            problem: of this task.
            text: the completion, which follows the generation prompt.
            correct: whether its answer is correct.

        Returns:
            Name -> truth value, with all names of ``LOGGED`` and ``COUNTED``.
        """
        return {}

    @classmethod
    def completions(cls, problem: Problem) -> list[tuple[str, str, str]]:
        """Return (way, working, answer) of all valid completions, [] where nobody can list them."""
        return []


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ExactTask(Task):
    """A task that checks work step by step, and lists all valid completions of a problem.

    So the probability of a valid completion is exact. A subclass gives :attr:`WAYS`,
    :meth:`completions`, :meth:`way_of` and :meth:`demonstrate`.
    """

    LOGGED: ClassVar[tuple[str, ...]] = ("valid", "unsound")
    ANY_LENGTH: ClassVar[bool] = True
    #: The ways of valid work: each as :meth:`completions` lists it -> its name in measures.
    WAYS: ClassVar[Mapping[str, str]] = {}

    #: Share of demonstrations that aim at nothing: their steps are true, and drawn at random.
    aimless_share: Share = 0.0
    #: Different problems among the demonstrations; None is one for each row.
    distinct: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    @abstractmethod
    def way_of(cls, problem: Problem, text: str) -> str | None:
        """Return the way, a key of :attr:`WAYS`, of a valid completion; None of any other."""

    @abstractmethod
    def demonstrate(
        self, problem: Problem, rng: random.Random, aimless: bool, early: bool
    ) -> tuple[str, str]:
        """Draw an example of a problem.

        Args:
            problem: of this task.
            rng: source of the draws.
            aimless: the steps are true, and lead anywhere.
            early: the example stands in the first half of the demonstrations.

        Returns:
            Work and answer.
        """

    def worked(self, problems: Iterator[Problem], rows: int, seed: int) -> Iterator[Demonstration]:
        """Yield ``rows`` examples. With ``distinct`` problems come again, in a random order.

        Args are as in :meth:`Task.worked`.
        """
        rng = random.Random(seed)
        pool = list(itertools.islice(problems, min(rows, self.distinct or rows)))
        order = [] if self._is_shuffled else pool
        while len(order) < rows:
            order += rng.sample(pool, len(pool))
        for number, problem in enumerate(order[:rows]):
            aimless = bool(self.aimless_share) and rng.random() < self.aimless_share
            work = self.demonstrate(problem, rng, aimless, early=number < rows // 2)
            yield Demonstration(problem.question, *work)

    @property
    def _is_shuffled(self) -> bool:
        return self.distinct is not None

    @classmethod
    def measures(cls, problem: Problem, text: str, correct: bool) -> dict[str, bool]:
        """Return whether the work is "valid", in each way; "unsound": correct without being valid.

        Args and result are as in :meth:`Task.measures`.
        """
        way = cls.way_of(problem, text)
        by_way = {f"valid_{name}": way == key for key, name in cls.WAYS.items()}
        return {"valid": way is not None, "unsound": correct and way is None, **by_way}


def distinct_problems(problems: Iterable[Problem], exclude: frozenset[str]) -> Iterator[Problem]:
    """Yield the problems whose questions are new, and are not in ``exclude``.

    SageError when ``problems`` end, or a thousand in a row are not new.
    """
    seen, misses = set(exclude), 0
    for problem in problems:
        misses = misses + 1 if problem.question in seen else 0
        if misses == 1000:
            break
        if not misses:
            seen.add(problem.question)
            yield problem
    raise SageError(f"only {len(seen) - len(exclude)} different problems were found: ask for fewer")
