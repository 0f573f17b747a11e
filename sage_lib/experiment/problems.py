"""The problems of a profile: what is trained on, what is held out, and that the two never meet."""

import dataclasses
from collections.abc import Callable
from typing import Any

from sage_lib.errors import SageError
from sage_lib.experiment.profile import Data, Profile, digest
from sage_lib.tasks import prompts
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of

#: Held-out questions by the digest of what asks for them: every stage's fingerprint needs them.
_HELD_OUT: dict[str, frozenset[str]] = {}


def evaluation_problems(
    profile: Profile, ood: bool | None = None, limit: int | None = None
) -> list[Problem]:
    """The held-out problems, data set after data set; ids are unique within a data set.

    With ``ood``, only the data sets that are so marked, or only the others; with ``limit``, only
    the first so many of each. A data set that is marked optional and does not load is left out,
    with a line that says why."""
    found: list[Problem] = []
    for data in profile.evaluation.data:
        if ood is not None and data.ood != ood:
            continue
        try:
            found += load(data)[:limit]
        except SageError as error:
            if not data.optional:
                raise
            print(f"{data.name} is left out: {error}", flush=True)
    places = [(problem.dataset, problem.id) for problem in found]
    if len(set(places)) < len(places):
        raise SageError(
            "the evaluation data hold a problem twice: give each data set its own seed or name"
        )
    return found


def sampled_problems(profile: Profile, ood: bool | None = None) -> list[Problem]:
    """The held-out problems that are sampled: of each data set the first ``evaluation.sampled``."""
    return evaluation_problems(profile, ood, profile.evaluation.sampled)


def listed_problems(profile: Profile, ood: bool | None = None) -> list[Problem]:
    """The held-out problems all of whose valid completions can be listed."""
    found = evaluation_problems(profile, ood)
    return [problem for problem in found if task_of(problem.task).completions(problem)]


def rl_problems(profile: Profile) -> list[Problem]:
    """The prompts of RL, none of which is a held-out problem of the same task."""
    if profile.rl_data is None:
        raise SageError(f"profile {profile.name} has no section rl_data: name what RL trains on")
    return load(profile.rl_data, held_out(profile, profile.rl_data))


def sft_rows(profile: Profile, count_tokens: Callable[[str], int]) -> list[dict[str, Any]]:
    """Rows {"prompt", "completion"} of chat messages for SFTTrainer.

    ``count_tokens`` measures a text for Appendix E.2: "restricted to samples whose prompt length
    does not exceed half of the maximum sequence length" (the public loader measures the whole
    solution)."""
    data = profile.sft_data
    if data is None:
        raise SageError(f"profile {profile.name} has no section sft_data: name what SFT trains on")
    demonstrations = task_of(data.name).demonstrations(
        data.settings,
        data.rows,
        data.seed,
        held_out(profile, data),
        data.revision,
        count_tokens=count_tokens,
        max_seq_length=profile.model.max_seq_length,
    )
    return [
        {
            "prompt": prompts.messages(shown.question),
            "completion": [
                {"role": "assistant", "content": prompts.answer_turn(shown.working, shown.answer)}
            ],
        }
        for shown in demonstrations
    ]


def load(data: Data, exclude: frozenset[str] = frozenset()) -> list[Problem]:
    """The problems of one data set, none of whose questions is in ``exclude``."""
    task = task_of(data.name)
    return task.problems(data.settings, data.rows, data.seed, exclude, data.revision)


def held_out(profile: Profile, data: Data | None) -> frozenset[str]:
    """Questions of the evaluation that the training set ``data`` could otherwise draw.

    Asked of sets of the same name and of files of one's own (of all sets, where training is on a
    file): so public sets need not be there to say what a training run is made from. A set that is
    optional and not there holds nothing out.
    """
    if data is None:
        return frozenset()
    same = [one for one in profile.evaluation.data if one.name in (data.name, "file")]
    # A file may hold anything, and so anything is held out of it.
    sets = list(profile.evaluation.data) if data.name == "file" else same
    key = digest([(vars(one) | {"settings": one.settings.identity()}) for one in (data, *sets)])
    if key not in _HELD_OUT:
        could_draw = task_of(data.name).could_draw
        problems = [problem for one in sets for problem in _load_if_there(one)]
        drawable = [problem for problem in problems if could_draw(data.settings, problem)]
        _HELD_OUT[key] = frozenset(problem.question for problem in drawable)
    return _HELD_OUT[key]


def met(profile: Profile, data: Data | None) -> frozenset[str]:
    """The held-out questions that the training set ``data`` would meet: what it is made from.

    Of a file of one's own only those count that stand in the training stream, far enough ahead for
    every one of them to have been replaced: another file leaves a trained policy as it is.
    """
    if data is None:
        return frozenset()
    if data.name == "file":
        return held_out(profile, data)
    sets = [one for one in profile.evaluation.data if one.name == data.name]
    without = dataclasses.replace(profile.evaluation, data=tuple(sets))
    found = held_out(dataclasses.replace(profile, evaluation=without), data)
    others = held_out(profile, data) - found
    if not others:
        return found
    ahead = dataclasses.replace(data, rows=data.rows + len(others))
    return found | (others & {problem.question for problem in load(ahead, found)})


def _load_if_there(data: Data) -> list[Problem]:
    try:
        return load(data)
    except SageError:
        if not data.optional:
            raise
        return []
