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
from sage_lib.tasks.task import ExactTask

_DRAWABLE: dict[str, frozenset[str]] = {}


def evaluation_problems(
    profile: Profile, ood: bool | None = None, limit: int | None = None
) -> list[Problem]:
    """Return the held-out problems, data set after data set.

    ``ood``: of which data sets, as in :meth:`Profile.data_sets`. ``limit``: so many of each.
    """
    problems: list[Problem] = []
    for data in profile.data_sets(ood):
        problems += load(data)[:limit]
    if len({(problem.dataset, problem.id) for problem in problems}) < len(problems):
        raise SageError(
            "the evaluation data hold a problem twice: give each data set its own seed or name"
        )
    return problems


def sampled_problems(profile: Profile, ood: bool | None = None) -> list[Problem]:
    """Return the held-out problems that are sampled: of each data set ``evaluation.sampled``."""
    return evaluation_problems(profile, ood, profile.evaluation.sampled)


def listed_problems(profile: Profile, ood: bool | None = None) -> list[Problem]:
    """Return the held-out problems whose valid completions can all be listed."""
    problems = evaluation_problems(profile, ood)
    return [problem for problem in problems if task_of(problem.task).completions(problem)]


def rl_problems(profile: Profile) -> list[Problem]:
    """Return the prompts of RL, without the held-out problems of the same task."""
    if profile.rl_data is None:
        raise SageError(f"profile {profile.name} has no section rl_data: name what RL trains on")
    return load(profile.rl_data, held_out(profile, profile.rl_data))


def sft_rows(profile: Profile, count_tokens: Callable[[str], int]) -> list[dict[str, Any]]:
    """Return rows {"prompt", "completion"} of chat messages for SFTTrainer. By ``count_tokens``
    none is longer than half of the model's length (Appendix E.2)."""
    data = profile.sft_data
    if data is None:
        raise SageError(f"profile {profile.name} has no section sft_data: name what SFT trains on")
    demonstrations = data.task.demonstrations(
        *(data.rows, data.seed, held_out(profile, data), data.revision),
        count_tokens=count_tokens,
        max_seq_length=profile.model.max_seq_length,
    )
    # Exact tasks list their valid completions with the markers.
    marked = profile.model.asks_for_markers or isinstance(data.task, ExactTask)
    rows = []
    for shown in demonstrations:
        turn = prompts.answer_turn(shown.working, shown.answer, boxed=not marked)
        answer = {"role": "assistant", "content": turn}
        rows.append({"prompt": prompts.messages(shown.question), "completion": [answer]})
    return rows


def load(data: Data, exclude: frozenset[str] = frozenset()) -> list[Problem]:
    """Return the problems of a data set, without those whose questions are in ``exclude``."""
    skipped = data.skipped or 0
    return data.task.problems(skipped + data.rows, data.seed, exclude, data.revision)[skipped:]


def held_out(profile: Profile, data: Data | None) -> frozenset[str]:
    """Return the questions of evaluation that the training set ``data`` must not draw.

    They are of the evaluation's data sets with the same name, and of its files. Where training is
    on a file, they are of all data sets."""
    if data is None:
        return frozenset()
    sets = profile.evaluation.data
    names = {data.name, "file"}
    return _drawable(data, [test for test in sets if data.name == "file" or test.name in names])


def _drawable(data: Data, sets: list[Data]) -> frozenset[str]:
    """Return the questions of ``sets`` that ``data`` could draw; every stage needs them."""
    key = digest([{**vars(test), "task": test.task.identity()} for test in (data, *sets)])
    if key not in _DRAWABLE:
        problems = [problem for test in sets for problem in load(test)]
        _DRAWABLE[key] = frozenset(p.question for p in problems if data.task.could_draw(p))
    return _DRAWABLE[key]


def met(profile: Profile, data: Data | None) -> frozenset[str]:
    """Return the held-out questions that the training set ``data`` would meet, on which its content
    depends.

    Questions of a user's file count only where they stand in the training stream. The stream is
    read far enough ahead to replace all of them.
    """
    excluded = held_out(profile, data)
    if data is None or data.name == "file":
        return excluded
    same_task = [test for test in profile.evaluation.data if test.name == data.name]
    drawable = _drawable(data, same_task)
    others = excluded - drawable
    if not others:
        return drawable
    ahead = dataclasses.replace(data, rows=data.rows + len(others))
    return drawable | (others & {problem.question for problem in load(ahead, drawable)})
