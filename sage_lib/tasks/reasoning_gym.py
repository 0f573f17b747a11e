"""Any data set of the package reasoning-gym, judged by its own scorer.

A line of a profile names the data set and its parameters:
``{name: reasoning_gym, dataset: chain_sum, config: {max_terms: 3}, rows: 50, seed: 1}``. An answer
is right where the package's ``score_answer`` gives it ``threshold`` or more. Below 1.0 lies partial
credit for wrong answers, so 1.0 is the default.

Scorers run in this process. Data sets whose scorer runs an answer as code, can be kept busy for
minutes or takes wrong answers are refused by name, and so are those whose problems are not a
function of the seed (:data:`REFUSED`, of version 0.1.25).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.tasks import problem as shared
from sage_lib.tasks import verifier as verifiers
from sage_lib.tasks.problem import Problem, TaskSettings
from sage_lib.tasks.verifier import LENGTH_LIMIT, Verifier

LOGGED = COUNTED = ()
measures, completions = shared.no_measures, shared.no_completions
#: Answers keep their lines: many of these data sets ask for a grid.
last_answer = functools.partial(verifiers.last_answer, lines=True)
#: Entries that one seed makes; some data sets plan all of them at once.
SIZE = 20_000

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


@dataclass(frozen=True, kw_only=True, config=shared.STRICT)
class Settings(TaskSettings):
    name: str = "reasoning_gym"
    dataset: str  # a name of reasoning-gym's own list
    #: Parameters of the data set, by the names of its configuration class.
    config: dict[str, Any] = field(default_factory=dict)
    threshold: Annotated[float, Field(gt=0, le=1)] = 1.0  # the least score of a right answer

    def __post_init__(self) -> None:
        if self.dataset in REFUSED:
            raise SageError(f"reasoning-gym's {self.dataset} is refused: {REFUSED[self.dataset]}")
        try:
            plain = json.loads(json.dumps(self.config, sort_keys=True, allow_nan=False))
        except (TypeError, ValueError):
            raise SageError(
                f"the config of {self.dataset} must hold numbers, texts, lists and maps alone"
            ) from None
        _check(self.dataset, plain)
        object.__setattr__(self, "config", plain)


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the scorer needs to know of a problem."""

    threshold: float
    made: Any = dataclasses.field(compare=False, repr=False)  # the package's data set object
    entry: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)


def label(settings: Settings) -> str:
    """The data set, and the parameters that a line of a profile gives it."""
    given = "".join(f"_{key}_{value}" for key, value in settings.config.items())
    return settings.dataset + re.sub(r"[^\w.]+", "-", given)


def _drawn(settings: Settings, seed: int) -> Iterator[Problem]:
    dataset = label(settings)
    made = generator(settings.dataset, json.dumps(settings.config), seed, SIZE)
    for index in range(SIZE):
        entry = made[index]
        gold = "" if entry["answer"] is None else str(entry["answer"])
        detail = Entry(settings.threshold, made, entry)
        question = entry["question"].strip()
        yield Problem(f"{seed}-{index}", dataset, question, gold, settings.name, detail)


stream = shared.stream_of(_drawn)


problems = shared.problems_of(stream)


def _worked(
    settings: Settings, seed: int, exclude: frozenset[str], revision: str | None
) -> Iterator[Problem]:
    for problem in stream(settings, seed, exclude, revision):
        if not problem.gold:
            raise SageError(
                f"reasoning-gym's {settings.dataset} lists no answers to learn from: choose "
                "another data set for sft_data, or leave out sft"
            )
        yield problem


#: The package's own answers, without work: it has none that all data sets share.
demonstrations = shared.demonstrations_of(_worked)


def could_draw(settings: Settings, problem: Problem) -> bool:
    """Whether it comes from reasoning-gym, or stands in a file, which may hold such questions."""
    return problem.task in (settings.name, "file")


def require_golds(problems: Sequence[Problem], verifier: Verifier) -> None:
    """SageError for the first listed answer that its own scorer puts below the threshold."""
    for problem in problems:
        if problem.gold and not correct(problem, problem.gold):
            raise SageError(
                f"the scorer of {problem.dataset} puts its own answer of problem {problem.id} "
                f"below {problem.detail.threshold}: lower threshold, or choose another data set"
            )


def judge(
    problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
) -> list[bool]:
    return [correct(p, answer) for p, answer in zip(problems, answers, strict=True)]


def correct(problem: Problem, answer: str | None) -> bool:
    """Whether the scorer gives ``answer`` the threshold or more; what is much longer than the
    listed answer is refused unread."""
    limit = max(LENGTH_LIMIT, 2 * len(problem.gold))
    if answer is None or len(answer) > limit:
        return False
    detail: Entry = problem.detail
    return score(detail.made, answer, detail.entry) >= detail.threshold


def score(made: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """What a data set of reasoning-gym scores an answer, from 0 to 1."""
    try:
        return float(made.score_answer(answer, entry))
    except Exception:  # whatever a scorer trips over in an answer that it cannot read
        return 0.0


@lru_cache(maxsize=16)
def generator(dataset: str, config: str, seed: int, size: int) -> Any:
    """The package's data set object; ``config`` is JSON.

    The package makes entry i of seed s from s + i: neighbouring seeds would have nearly all
    problems in common. So they are spread first.
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
    """SageError for a data set that the package does not have, or a config that it refuses."""
    known = _package().factory.DATASETS
    if dataset not in known:
        near = difflib.get_close_matches(dataset, known, 3) or sorted(known)
        raise SageError(f"reasoning-gym has no data set {dataset!r}: take one such as {near}")
    make = known[dataset][1]
    names = {one.name for one in dataclasses.fields(make)} - {"seed", "size"}
    for key in config:
        if key not in names:
            listed = ", ".join(sorted(names))
            raise SageError(f"reasoning-gym's {dataset} has no parameter {key!r}; it has: {listed}")
    try:
        made = make(**config)
        if hasattr(made, "validate"):
            made.validate()
    except Exception as error:  # an assertion, or what its check of a mistyped value raises
        said = " ".join(str(error).split()) or type(error).__name__
        raise SageError(f"reasoning-gym's {dataset} refuses its config: {said}") from None
