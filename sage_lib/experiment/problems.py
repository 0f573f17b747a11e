"""Problems of a profile, whatever their source, as one kind of record with one prompt."""

import dataclasses
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.experiment.profile import Data, Profile
from sage_lib.tasks import countdown, knights_knaves, prompts, public_sets, word_problems
from sage_lib.tasks.verifier import Verifier, last_answer


@dataclass(frozen=True)
class Item:
    """One problem. ``problem`` is there for the embedded task alone, whose steps can be checked; ``judge`` says what decides
    about an answer, "math" (Math-Verify) or "knights_knaves"."""

    id: str
    dataset: str
    question: str
    gold: str
    problem: countdown.Problem | None = None
    judge: str = "math"


def evaluation_items(profile: Profile, ood: bool | None = None) -> list[Item]:
    """The held-out problems, data set after data set; ids are unique within a data set. With ``ood``, only the data sets that
    are so marked, or only the others. A data set that is marked optional and does not load is left out, with a line that says why."""
    items = []
    for data in profile.evaluation.data:
        if ood is not None and data.ood != ood:
            continue
        try:
            items += _items(profile, data, frozenset())
        except SageError as error:
            if not data.optional:
                raise
            print(f"{data.name} is left out: {error}", flush=True)
    ids = [(item.dataset, item.id) for item in items]
    if len(set(ids)) < len(ids):
        raise SageError(
            "the evaluation data hold a problem twice: give each data set its own seed or name"
        )
    return items


def rl_items(profile: Profile) -> list[Item]:
    """The prompts of RL. On the embedded task, none of them is a held-out problem."""
    return _items(profile, profile.rl_data, _held_out(profile))


def judge(items: Sequence[Item], completions: Sequence[str], verifier: Verifier) -> list[bool]:
    """Whether the last answer of each completion is correct for the problem beside it: the one decision of training and evaluation.

    ``items`` and ``completions`` (texts) have the same length, as has the result.
    """
    answers = [last_answer(text) for text in completions]
    by_math = [(n, item) for n, item in enumerate(items) if item.judge == "math"]
    verdicts = dict(
        zip(
            (n for n, _ in by_math),
            verifier.verify_answers(
                [item.gold for _, item in by_math], [answers[n] for n, _ in by_math]
            ),
            strict=True,
        )
    )
    return [
        verdicts[n].correct if n in verdicts else knights_knaves.correct(item.gold, answer)
        for n, (item, answer) in enumerate(zip(items, answers, strict=True))
    ]


def require_golds(items: Sequence[Item], verifier: Verifier) -> None:
    """Raise SageError for the first gold that Math-Verify cannot parse, of the problems that it judges."""
    verifier.require_golds([item.gold for item in items if item.judge == "math"])


def sft_rows(profile: Profile, count_tokens: Callable[[str], int]) -> list[dict]:
    """Rows {"prompt", "completion"} of chat messages for SFTTrainer.

    ``count_tokens`` measures a text for Appendix E.2: "restricted to samples whose prompt length does not exceed half
    of the maximum sequence length" (the public loader measures the whole solution).
    """
    if profile.sft_data.name == "gsm_symbolic":
        chosen = itertools.islice(
            word_problems.problems(
                profile.sft_data.seed, profile.sft_data.longest, _held_out(profile)
            ),
            profile.sft_data.rows,
        )
        pairs = [(p.question, p.working, p.answer) for p in chosen]
    elif profile.task is None:
        pairs = public_sets.load_sft(
            profile.sft_data.name,
            profile.sft_data.revision,
            profile.model.max_seq_length,
            count_tokens,
        )
        pairs = pairs[: profile.sft_data.rows]
    else:
        rng = random.Random(profile.sft_data.seed)
        rare, limit = profile.sft_data.rare_share, profile.task.limit
        pairs = [
            (i.question, *countdown.demonstration(i.problem, rare, rng, limit))
            for i in _items(profile, profile.sft_data, _held_out(profile))
        ]
    return [
        {
            "prompt": prompts.messages(question),
            "completion": [{"role": "assistant", "content": prompts.answer_turn(working, answer)}],
        }
        for question, working, answer in pairs
    ]


def digest(rows: Iterable[Item | dict]) -> str:
    """Hash (16 hex digits) of problems or training rows in order: a run's record keeps that of what it has read."""
    found = hashlib.sha256()
    for row in rows:
        found.update(
            json.dumps(
                dataclasses.asdict(row) if isinstance(row, Item) else row, sort_keys=True
            ).encode()
        )
    return found.hexdigest()[:16]


def _items(profile: Profile, data: Data, exclude: frozenset[str]) -> list[Item]:
    if data.name == "gsm_symbolic":
        return [
            Item(p.id, data.label, p.question, p.answer)
            for p in itertools.islice(
                word_problems.problems(data.seed, data.longest, exclude), data.rows
            )
        ]
    if data.name == "knights_knaves":
        return [
            Item(p.id, data.label, p.question, p.answer, judge="knights_knaves")
            for p in knights_knaves.puzzles(data.people, data.rows, data.seed)
        ]
    if profile.task is None:
        left_out = (
            public_sets.SOURCES[data.name].unparseable if data.name in public_sets.SOURCES else ()
        )
        items = public_sets.load(data.name, data.revision)[: data.rows]
        if any(i.gold in left_out for i in items):
            print(
                f"{data.name}: {sum(i.gold in left_out for i in items)} of {len(items)} problems are left out, whose gold answers Math-Verify cannot parse",
                flush=True,
            )
        return [Item(i.id, data.label, i.question, i.gold) for i in items if i.gold not in left_out]
    stream = countdown.problems(
        data.seed, data.digits or profile.task.digits, profile.task.limit, data.kinds, set(exclude)
    )
    return [
        Item(p.id, data.label, p.question, str(p.target), p)
        for p in itertools.islice(stream, data.rows)
    ]


def _held_out(profile: Profile) -> frozenset[str]:
    """What generated training data must not contain: ids of the embedded task, questions of word problems."""
    if profile.task is not None:
        return frozenset(item.id for item in evaluation_items(profile))
    return frozenset(
        item.question
        for data in profile.evaluation.data
        if data.name == "gsm_symbolic"
        for item in _items(profile, data, frozenset())
    )
