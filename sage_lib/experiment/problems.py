"""The problems of a profile: what is trained on, what is held out, and that the two never meet."""

import dataclasses
from collections.abc import Callable
from typing import Any

from sage_lib.errors import SageError
from sage_lib.experiment.checked import digest
from sage_lib.experiment.settings import Data, Profile
from sage_lib.tasks import prompts
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of

_DRAWABLE: dict[str, frozenset[str]] = {}


def evaluation_problems(
    profile: Profile, ood: bool | None = None, limit: int | None = None
) -> list[Problem]:
    """The held-out problems, data set after data set.

    ``ood``: of which data sets, as in :meth:`Profile.data_sets`. ``limit``: so many of each.
    """
    found: list[Problem] = []
    for data in profile.data_sets(ood):
        found += load(data)[:limit]
    if len({(problem.dataset, problem.id) for problem in found}) < len(found):
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
    """Rows {"prompt", "completion"} of chat messages for SFTTrainer, none of them longer than half
    of the model's length by ``count_tokens`` (Appendix E.2)."""
    data = profile.sft_data
    if data is None:
        raise SageError(f"profile {profile.name} has no section sft_data: name what SFT trains on")
    given = (data.settings, data.rows, data.seed, held_out(profile, data), data.revision)
    longest = {"count_tokens": count_tokens, "max_seq_length": profile.model.max_seq_length}
    rows = []
    for shown in task_of(data.name).demonstrations(*given, **longest):
        answer = {"role": "assistant", "content": prompts.answer_turn(shown.working, shown.answer)}
        rows.append({"prompt": prompts.messages(shown.question), "completion": [answer]})
    return rows


def load(data: Data, exclude: frozenset[str] = frozenset()) -> list[Problem]:
    """The problems of one data set, none of whose questions is in ``exclude``."""
    given = (data.settings, data.rows, data.seed, exclude, data.revision)
    return task_of(data.name).problems(*given)


def held_out(profile: Profile, data: Data | None) -> frozenset[str]:
    """Questions of the evaluation that the training set ``data`` could otherwise draw: of sets of
    its name and of files, or of all where training is on a file."""
    if data is None:
        return frozenset()
    asked = profile.evaluation.data
    return _drawable(
        data, [one for one in asked if data.name == "file" or one.name in (data.name, "file")]
    )


def _drawable(data: Data, sets: list[Data]) -> frozenset[str]:
    """The questions of ``sets`` that ``data`` could draw; every stage asks for them."""
    key = digest([{**vars(one), "settings": one.settings.identity()} for one in (data, *sets)])
    if key not in _DRAWABLE:
        could_draw = task_of(data.name).could_draw
        found = [problem for one in sets for problem in load(one)]
        _DRAWABLE[key] = frozenset(p.question for p in found if could_draw(data.settings, p))
    return _DRAWABLE[key]


def met(profile: Profile, data: Data | None) -> frozenset[str]:
    """The held-out questions that the training set ``data`` would meet: what it is made from.

    Of a file of one's own only those count that stand in the training stream, far enough ahead for
    every one of them to have been replaced.
    """
    every = held_out(profile, data)
    if data is None or data.name == "file":
        return every
    found = _drawable(data, [one for one in profile.evaluation.data if one.name == data.name])
    others = every - found
    if not others:
        return found
    ahead = dataclasses.replace(data, rows=data.rows + len(others))
    return found | (others & {problem.question for problem in load(ahead, found)})
