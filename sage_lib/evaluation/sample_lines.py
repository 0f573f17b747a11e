"""A line of each format in which samples are stored, read as counts of right samples.

A reader of a line raises ValueError, whose text goes on "line 3 ...". Nothing is filled in. The
outside formats are what these sources write:

- passk-inference 0.3, counts: passk_inference/io.py
- TRL 1.15, ``completions/completions_*.parquet``: trl/trainer/grpo_trainer.py (log)
- verl, ``validation_data_dir/{step}.jsonl``: verl/trainer/ppo/ray_trainer.py (_dump_generations)
- Inspect, ``.eval`` and ``.json``: inspect_ai/log/_log.py (EvalSample, EvalSampleSummary) and
  inspect_ai/scorer/_metric.py (value_to_float)
- verifiers, ``traces.jsonl``: verifiers/v1/episode.py, trace.py and task.py; ``results.jsonl`` of
  before: verifiers/legacy/utils/save_utils.py
- lm-evaluation-harness 0.4, ``samples_*.jsonl``: lm_eval/evaluator.py (the fields),
  lm_eval/loggers/evaluation_tracker.py (the file), lm_eval/filters/selection.py (repeats)
- lighteval 0.13, ``details_*.parquet``: src/lighteval/logging/info_loggers.py (the fields) and
  evaluation_tracker.py (the file), src/lighteval/metrics/metrics_sample.py (AvgAtN, PassAtK)
- limit-of-RLVR, ``.jsonl``: math/examples/math_eval/math_eval.py and evaluate.py
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Right samples and all samples of a line; or a sentence that says why they are not known.
Found = tuple[int, int] | str
Row = dict[str, Any]
Reader = Callable[[Row, float | None], "Line"]


@dataclass(frozen=True)
class Line:
    """One line. verdicts: by metric. number: of the sample, where lines are numbered. is_sample:
    other lines of the same problem are other samples, and no repetition. step: of training. sample:
    its texts, a :class:`sample_texts.Sample`, where they are read."""

    problem: str
    verdicts: dict[str, Found]
    filter: str = ""
    seed: int = -1
    number: int | None = None
    is_sample: bool = False
    step: int | None = None
    sample: Any = None


def field(row: Row, name: str, kind: type | tuple[type, ...]) -> Any:
    """Return a field of a type. Raises ValueError where it is missing or has another type."""
    if name not in row:
        raise ValueError(f"has no {name}")
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(row[name], kind) or (isinstance(row[name], bool) and bool not in kinds):
        raise ValueError(f"has a {name} that is a {type(row[name]).__name__}")
    return row[name]


def digest(value: Any) -> str:
    """Return 8 hexadecimal digits by which two files name the same text, or conversation."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]


def is_right(value: Any, name: str, threshold: float | None) -> bool:
    """Return whether a verdict, or a score of at least `threshold`, is right."""
    number = isinstance(value, bool | int | float) and math.isfinite(value)
    if number and threshold is not None:
        return bool(value >= threshold)
    if not number or value not in (0, 1):
        remedy = "; for scores, give --threshold" if number else ""
        raise ValueError(f"has {value!r:.40} for {name}, not 0 or 1{remedy}")
    return bool(value)


def _one(value: Any, name: str, threshold: float | None) -> Found:
    return int(is_right(value, name, threshold)), 1


def _each(values: list[Any], name: str, threshold: float | None) -> Found:
    if not values:
        raise ValueError("has no samples")
    return sum(is_right(value, name, threshold) for value in values), len(values)


def _by_metric(names: Iterable[str], find: Callable[[str], Found]) -> dict[str, Found]:
    verdicts: dict[str, Found] = {}
    for name in names:
        try:
            verdicts[name] = find(name)
        except ValueError as error:  # it matters only if this metric is chosen
            verdicts[name] = str(error)
    return verdicts


def _shared(share: Any, name: str, n: int) -> Found:
    """Right ones of ``n`` samples of which a share is right."""
    right = share * n if isinstance(share, bool | int | float) and 0 <= share <= 1 else math.nan
    if n < 1 or math.isnan(right) or not abs(right - round(right)) < 1e-6 * n:
        raise ValueError(f"has {share!r:.40} for {name}, which is no share of {n} samples")
    return round(right), n


def _seed(row: Row) -> int:
    return -1 if row.get("seed") is None else int(field(row, "seed", int))


# --- own, and counts ------------------------------------------------------------------------------


def _own_line(row: Row, threshold: float | None) -> Line:
    if "correct" not in row:
        raise ValueError("has no verdicts: give the samples.jsonl.gz of the evaluation's folder")
    right, texts = field(row, "correct", list), field(row, "completions", list)
    if len(right) != len(texts):
        raise ValueError(f"has {len(texts)} completions and {len(right)} verdicts")
    problem = f"{field(row, 'dataset', str)}/{field(row, 'problem', str)}"
    return Line(problem, {"": _each(right, "correct", threshold)})


def _own_row(row: Row, threshold: float | None) -> Line:
    """A sample a line. Without a number each line is another sample of its problem."""
    key = next(name for name in ("problem", "id", "prompt") if name in row)
    problem = row[key] if key != "prompt" else digest(row[key])
    if isinstance(problem, bool) or not isinstance(problem, str | int) or problem == "":
        raise ValueError(f"has a {key} that is a {type(problem).__name__}: give a text or a number")
    set_of = f"{field(row, 'dataset', str)}/" if "dataset" in row else ""
    number = field(row, "number", int) if row.get("number") is not None else None
    is_judged = "correct" in row  # if not, a judge may say it
    verdict = _one(row["correct"], "correct", threshold) if is_judged else "has no correct"
    return Line(f"{set_of}{problem}", {"": verdict}, "", _seed(row), number, is_sample=True)


def _counts(row: Row, threshold: float | None) -> Line:
    problem, c, n = field(row, "id", (str, int)), field(row, "c", int), field(row, "n", int)
    if not (1 <= n <= 10**9 and 0 <= c <= n):
        raise ValueError(f"has c = {c} and n = {n}: 0 <= c <= n and 1 <= n <= 10^9 are needed")
    return Line(str(problem), {"": (c, n)}, seed=_seed(row))


# --- trainers -------------------------------------------------------------------------------------


def _trl(row: Row, threshold: float | None) -> Line:
    """A completion with the rewards of its functions, which have names of their own."""
    others = {"step", "prompt", "completion", "advantage", "image", "seed"}
    names = [name for name, value in row.items() if name not in others and _is_number(value)]
    if not names:
        raise ValueError("has no reward")
    verdicts = _by_metric(names, lambda name: _one(row[name], name, threshold))
    return Line(digest(row["prompt"]), verdicts, is_sample=True, step=field(row, "step", int))


def _verl(row: Row, threshold: float | None) -> Line:
    """A response with its score; a reward function may add verdicts such as acc."""
    others = {"input", "output", "gts", "step"}
    others |= {"reward"} if row.get("reward") == row["score"] else set()  # a copy
    names = [name for name, value in row.items() if name not in others and _is_number(value)]
    verdicts = _by_metric(names, lambda name: _one(row[name], name, threshold))
    verdicts = {"score": "has no score that is a number", **verdicts}
    step = row.get("step")
    problem = digest(field(row, "input", str))
    return Line(problem, verdicts, is_sample=True, step=step if isinstance(step, int) else None)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


# --- evaluations ----------------------------------------------------------------------------------

#: Values of Inspect's scorers; no answer counts as wrong there, too (value_to_float).
_INSPECT = {"C": 1, "I": 0, "N": 0, "CORRECT": 1, "INCORRECT": 0}


def _inspect(row: Row, threshold: float | None) -> Line:
    """A sample, or its summary; an epoch is another sample of the same problem."""
    scores = row.get("scores")
    if not isinstance(scores, dict) or not scores:
        error = row.get("error")
        why = f": it ended in an error ({error!s:.60})" if error else ""
        raise ValueError(f"has no scores{why}")

    values: Row = {}
    for scorer, score in scores.items():
        value = score.get("value") if isinstance(score, dict) else None
        if isinstance(value, dict):
            values |= {f"{scorer}/{name}": part for name, part in value.items()}
        else:
            values[scorer] = value

    def find(name: str) -> Found:
        value = values[name]
        value = _INSPECT.get(value, value) if isinstance(value, str) else value
        return _one(value, name, threshold)

    problem = str(field(row, "id", (str, int)))
    epoch = field(row, "epoch", int)
    return Line(problem, _by_metric(values, find), number=epoch, is_sample=True)


def _verifiers(row: Row, threshold: float | None) -> Line:
    """An episode: the traces of one task. Every trace of an agent is a sample. In older files a
    line is a trace, and a reward a number without a weight."""
    traces = field(row, "traces", list) if "traces" in row else [row]
    task = field(row, "task", dict)
    key = task.get("key") or task.get("hash") or digest(field(task, "data", dict))
    if not all(isinstance(trace, dict) for trace in traces):
        raise ValueError("has a trace that is not an object")
    several = len({_agent(trace) for trace in traces}) > 1
    values: dict[str, list[Any]] = {}
    for trace in traces:
        before = f"{_agent(trace)}/" if several else ""
        rewards = trace.get("rewards")
        rewards_by_name = rewards.items() if isinstance(rewards, dict) else ()
        parts = {
            name: _score_and_weight(item) for name, item in rewards_by_name if item is not None
        }
        for name, (score, _) in parts.items():
            values.setdefault(f"{before}{name}", []).append(score)
        if len(parts) > 1 and all(_is_number(item) for pair in parts.values() for item in pair):
            total = sum(score * weight for score, weight in parts.values())
            values.setdefault(f"{before}sum of rewards", []).append(total)
    if not values:
        errors = [error for item in (row, *traces) for error in item.get("errors") or []]
        kind = errors[0].get("type") if errors and isinstance(errors[0], dict) else None
        raise ValueError("has no rewards" + (f": it ended in {kind}" if kind else ""))
    verdicts = _by_metric(values, lambda name: _each(values[name], name, threshold))
    return Line(str(key), verdicts, is_sample=True)


def _score_and_weight(reward: Any) -> tuple[Any, Any]:
    if isinstance(reward, dict):
        return reward.get("score"), reward.get("weight", 1.0)
    return reward, 1.0


def _agent(trace: Row) -> str:
    agent = trace.get("agent")
    return str(agent.get("name", "agent")) if isinstance(agent, dict) else "agent"


def _verifiers_row(row: Row, threshold: float | None) -> Line:
    """A rollout of verifiers before traces.jsonl: one reward and, beside it, metrics."""
    problem = f"{field(row, 'example_id', (str, int))}:{digest(row.get('prompt'))}"
    if row.get("error") is not None:
        raise ValueError("ended in an error")
    metrics = row["metrics"] if isinstance(row.get("metrics"), dict) else {}
    values = {"reward": row["reward"], **metrics}
    verdicts = _by_metric(values, lambda name: _one(values[name], name, threshold))
    return Line(problem, verdicts, is_sample=True)


def _rlvr(row: Row, threshold: float | None) -> Line:
    """A question with one score for each pred. evaluate.py scores a timeout as False."""
    scores, preds = field(row, "score", list), field(row, "pred", list)
    if len(scores) != len(preds):
        raise ValueError(f"has {len(preds)} preds and {len(scores)} scores")
    problem = f"{field(row, 'idx', int)}:{digest(field(row, 'question', str))}"
    return Line(problem, {"": _each(scores, "score", threshold)})


#: Fields of a harness line that are no metric: evaluator.py; older files have no list "metrics".
_HARNESS = {
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"),
    *("doc_hash", "prompt_hash", "target_hash"),
}

#: Its writer prints what JSON does not know, such as NumPy's bools (handle_non_serializable in
#: lm_eval/utils.py).
_PRINTED = {"True": True, "False": False, "1.0": True, "0.0": False}


def _harness(row: Row, threshold: float | None) -> Line:
    """A problem under one filter. With repeats, a metric is one number for all responses; only the
    share of right ones, pass@1, says how many are right (tasks/humaneval/utils.py, mbpp)."""
    responses, filtered = field(row, "resps", list), field(row, "filtered_resps", list)
    if not (responses and filtered and isinstance(responses[0], list)):
        raise ValueError("has no responses")
    repeats = len(responses[0])

    def find(name: str) -> Found:
        value = row.get(name)
        value = _PRINTED.get(value, value) if isinstance(value, str) else value
        if repeats == 1:
            return _one(value, name, threshold)
        if name in ("pass@1", "pass_at_1") and isinstance(filtered[0], list):
            return _shared(value, name, len(filtered[0]))
        raise ValueError(
            f"has one {name} for {repeats} responses: evaluate with the metric pass@1, or "
            "with repeats: 1 several times, and join the files by +"
        )

    other_fields = [name for name in row if name not in _HARNESS]
    names = (
        [str(name) for name in field(row, "metrics", list)] if "metrics" in row else other_fields
    )
    problem = f"{field(row, 'doc_id', int)}:{str(row.get('doc_hash', ''))[:8]}"
    return Line(problem, _by_metric(names, find), str(row.get("filter", "")))


def _lighteval(row: Row, threshold: float | None) -> Line:
    """A problem with its texts. Details have no verdict for each text, but avg@n, and pass@k with
    k = 1, are the share of right ones among the first n (metrics_sample.py)."""
    doc, metrics = field(row, "doc", dict), field(row, "metric", dict)
    texts = field(field(row, "model_response", dict), "text", list)

    def find(name: str) -> Found:
        kind, _, arguments = name.partition(":")
        numbers = {key: int(number) for key, number in re.findall(r"(\w+)=(\d+)", arguments)}
        n = numbers.get("n", len(texts))
        if n > len(texts):
            raise ValueError(f"has {len(texts)} texts, fewer than {name} tells of")
        if kind == "avg@n" or (kind.endswith("pass@k") and numbers.get("k") == 1):
            return _shared(metrics[name], name, n)
        if len(texts) <= 1:  # none where a choice was scored
            return _one(metrics[name], name, threshold)
        raise ValueError(
            f"has one {name} for {len(texts)} texts: evaluate with the metric avg@n, or pass@k "
            "with k = 1"
        )

    name = f"{field(doc, 'task_name', str)}/{doc.get('id', '')}"
    return Line(f"{name}:{digest(field(doc, 'query', str))}", _by_metric(list(metrics), find))


class Format(NamedTuple):
    """A format, the fields by which a line of it is known, and the reader of a line."""

    name: str
    fields: set[str]
    read: Reader


#: The first that fits is taken.
FORMATS = [
    Format("samples of this project", {"dataset", "problem", "completions"}, _own_line),
    Format("lm-evaluation-harness", {"doc_id", "resps", "filtered_resps"}, _harness),
    Format("lighteval", {"doc", "metric", "model_response"}, _lighteval),
    Format("limit-of-RLVR", {"idx", "question", "code", "pred"}, _rlvr),
    Format("verifiers' traces", {"task", "traces"}, _verifiers),
    Format("verifiers' traces", {"task", "nodes", "rewards"}, _verifiers),
    Format("verifiers' results", {"example_id", "reward"}, _verifiers_row),
    Format("Inspect", {"id", "epoch", "scores"}, _inspect),
    Format("TRL's completions", {"step", "prompt", "completion", "advantage"}, _trl),
    Format("verl's generations", {"input", "output", "score"}, _verl),
    Format("counts", {"id", "c", "n"}, _counts),
    Format("a sample a line", {"problem", "correct"}, _own_row),
    Format("a sample a line", {"id", "correct"}, _own_row),
    Format("a sample a line", {"prompt", "correct"}, _own_row),
    Format("a sample a line", {"prompt", "completion"}, _own_row),
]
#: What a file may be, for a message.
KNOWN = (
    "known are lines with id, c and n, or with problem (or id, or prompt) and correct; TRL's "
    "completions, verl's generations, Inspect's and verifiers' logs, lm-evaluation-harness's "
    "samples_*.jsonl, lighteval's details_*.parquet and limit-of-RLVR's .jsonl"
)
