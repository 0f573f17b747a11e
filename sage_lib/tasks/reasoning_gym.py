"""Any data set of the package reasoning-gym, judged by its own scorer.

A line of a profile names the data set and its parameters:
``{name: reasoning_gym, dataset: chain_sum, config: {max_terms: 3}, rows: 50, seed: 1}``. An answer
is right where the package's ``score_answer`` gives it ``threshold`` or more. Below 1.0 lies partial
credit for wrong answers, so 1.0 is the default.

Scorers run in this process, for at most :data:`LIMIT` seconds of its time. A data set is refused by
name if its scorer runs an answer as code, can be busy for minutes or accepts wrong answers, or if
its problems are no function of the seed (:data:`REFUSED`, of version 0.1.25).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import random
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue
from pydantic.dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.tasks import verifier as verifiers
from sage_lib.tasks.problem import Demonstration, Problem
from sage_lib.tasks.task import Task, distinct_problems
from sage_lib.tasks.verifier import LENGTH_LIMIT
from sage_lib.tasks.worker import TimeUp, limited
from sage_lib.validation import STRICT, pick

#: Entries that one seed makes; some data sets plan all of them at once.
SIZE = 20_000
#: Seconds of processor time that a scorer may take for an answer.
LIMIT = 10.0

_CODE = "its scorer runs answers as Python code"
_BUSY = "a short answer can keep its scorer busy for minutes"
_LENIENT = "its scorer gives wrong answers the full score"
_VARIES = "its problems differ from one process to the next"
_OWN = "it is a task of its own: write name: {}"
#: Data set -> why it is not taken.
REFUSED = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _CODE),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), _CODE),
    **dict.fromkeys(("simple_integration", "intermediate_integration"), _CODE),
    **dict.fromkeys(("coin_flip", "rubiks_cube", "rush_hour"), _BUSY),
    # bool("False") is True; a distance of nan counts as none.
    **dict.fromkeys(("game_of_life_halting", "complex_arithmetic"), _LENIENT),
    **dict.fromkeys(("codeio", "isomorphic_strings", "knight_swap", "list_functions"), _VARIES),
    **dict.fromkeys(("ransom_note", "word_ladder"), _VARIES),
    **{name: _OWN.format(name) for name in ("gsm_symbolic", "knights_knaves")},
    "composite": "it mixes other data sets: give each a line of its own",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the scorer reads of a problem."""

    threshold: float
    dataset: Any = dataclasses.field(compare=False, repr=False)  # the package's object
    entry: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReasoningGym(Task):
    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str  # a name of reasoning-gym's own list
    #: Parameters of the data set, by the names of its configuration class.
    config: dict[str, JsonValue] = field(default_factory=dict)
    threshold: Annotated[float, Field(gt=0, le=1)] = 1.0  # the least score of a right answer
    #: What demonstrations show as work: a text of the entries' metadata, such as number_sequence's
    #: rule. Without it they show the answer alone.
    work: str | None = None

    def __post_init__(self) -> None:
        if self.dataset in REFUSED:
            raise ValueError(f"reasoning-gym's {self.dataset} is refused: {REFUSED[self.dataset]}")
        _check(self.dataset, self.config)
        # One order whatever the file's, since the label has it.
        ordered = json.loads(json.dumps(self.config, sort_keys=True))
        object.__setattr__(self, "config", ordered)

    @property
    def display_label(self) -> str:
        """The data set, and the parameters that a line of a profile names."""
        parameters = "".join(f"_{key}_{value}" for key, value in self.config.items())
        return self.dataset + re.sub(r"[^\w.]+", "-", parameters)

    def stream(self, seed: int, exclude: frozenset[str], revision: str | None) -> Iterator[Problem]:
        return distinct_problems(self._drawn(seed), exclude)

    def _drawn(self, seed: int) -> Iterator[Problem]:
        label = self.display_label
        entries = generator(self.dataset, json.dumps(self.config), seed, SIZE)
        for index in range(SIZE):
            entry = entries[index]
            gold = "" if entry["answer"] is None else str(entry["answer"])
            detail, question = Entry(self.threshold, entries, entry), entry["question"].strip()
            working = entry["metadata"].get(self.work) if self.work else ""
            if not isinstance(working, str):
                texts = [key for key, value in entry["metadata"].items() if isinstance(value, str)]
                where = f"the metadata of reasoning-gym's {self.dataset}"
                raise SageError(f"{where} has no text {self.work!r}: take one of {texts}")
            yield Problem(f"{seed}-{index}", label, question, gold, self.name, detail, working)

    def worked(self, problems: Iterator[Problem], rows: int, seed: int) -> Iterator[Demonstration]:
        # The package's answers; work where ``work`` names it, as all data sets share none.
        for example in super().worked(problems, rows, seed):
            if not example.answer:
                raise SageError(
                    f"reasoning-gym's {self.dataset} lists no answers to learn from: choose "
                    "another data set for sft_data, or leave out sft"
                )
            yield example

    @staticmethod
    def last_answer(text: str) -> str | None:
        """Return the last answer with its lines: many of these data sets ask for a grid."""
        return verifiers.last_answer(text, lines=True)

    @classmethod
    def is_correct(cls, problem: Problem, answer: str | None) -> bool:
        """Return whether the scorer gives an answer the threshold or more.

        An answer much longer than the listed one is refused unread.
        """
        limit = max(LENGTH_LIMIT, 2 * len(problem.gold))
        if answer is None or len(answer) > limit:
            return False
        detail: Entry = problem.detail
        return score(detail.dataset, answer, detail.entry) >= detail.threshold


def score(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Return the score, from 0 to 1, of an answer to an entry of a data set of reasoning-gym.

    It is 0 where the scorer fails at the answer, or takes longer than the limit.
    """
    # Alarms reach the first thread alone: in another one there is no limit.
    is_first = threading.current_thread() is threading.main_thread()
    try:
        with limited(LIMIT) if is_first else contextlib.nullcontext():
            return float(dataset.score_answer(answer, entry))
    except TimeUp:
        logging.getLogger(__name__).warning(
            "the scorer of %s took more than %g s for the answer %r, which counts as wrong",
            type(dataset).__name__, LIMIT, answer,
        )  # fmt: skip
    except Exception:  # whatever a scorer trips over in an answer that it cannot read
        pass
    return 0.0


@lru_cache(maxsize=16)
def generator(dataset: str, config: str, seed: int, size: int) -> Any:
    """Return the package's object of a data set, by its name and its parameters as JSON.

    The object makes each entry when it is read, and scores answers. The package makes entry i of
    seed s from s + i: neighbouring seeds would have nearly all problems in common. So they are
    spread first.
    """
    spread = random.Random(seed).getrandbits(31)
    create = _package().create_dataset
    return create(dataset, **json.loads(config), size=size, seed=spread)


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise SageError(
            f"the package reasoning-gym cannot be imported ({error}): install it, for instance by "
            "pip install reasoning-gym"
        ) from None
    return reasoning_gym


def _check(dataset: str, config: Mapping[str, Any]) -> None:
    """Raise an error for a data set that the package lacks, or a config that it refuses."""
    make = pick(dataset, _package().factory.DATASETS, "reasoning-gym", "data set")[1]
    try:
        parameters = make(**config, seed=0, size=1)
        if hasattr(parameters, "validate"):
            parameters.validate()
    except Exception as error:  # an unknown parameter, an assertion, a mistyped value
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"reasoning-gym's {dataset} refuses its config: {reason}") from None
