"""Prompt, completion and gold answer of each sample, in the formats of :mod:`sample_lines`.

The formats' sources are named there. Like its readers, what is here raises ValueError, whose text
goes on "line 3 ...".
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from sage_lib.evaluation.sample_lines import Row, field


class Sample(NamedTuple):
    """A completion. is_correct: None where a judge has not been asked yet."""

    problem: str
    prompt: str | list[dict[str, Any]]  # as a text, or as the messages of a conversation
    completion: str
    gold: str
    is_correct: bool | None = None


def rows_of_samples(format: str, row: Row, judged: bool) -> Iterator[Row]:
    """Yield a row of the same format for each sample of a line.

    ``format`` is a name of ``sample_lines.FORMATS``. ``judged`` says whether a judge decides. If
    none does, a line that has one verdict for several samples raises ValueError.
    """
    if format == "limit-of-RLVR":
        lists = zip(*(field(row, name, list) for name in ("code", "pred", "score")), strict=True)
        for code, pred, score in lists:
            yield {**row, "code": [code], "pred": [pred], "score": [score]}
        return
    if format == "verifiers' traces" and "traces" in row:
        yield from ({**row, "traces": [trace]} for trace in field(row, "traces", list))
        return
    if format == "lm-evaluation-harness":
        texts = row["resps"][0] if row["resps"] and isinstance(row["resps"][0], list) else []
        rows = [{**row, "resps": [[text]], "filtered_resps": [text]} for text in texts]
    elif format == "lighteval":
        texts = field(field(row, "model_response", dict), "text", list)
        rows = [{**row, "model_response": {"text": [text]}} for text in texts]
    else:
        rows = [row]
    if len(rows) > 1 and not judged:
        raise ValueError(f"has one verdict for {len(rows)} samples: name a judge by --judge")
    yield from rows


def texts(format: str, row: Row, gold: str) -> tuple[Any, str, str]:
    """Return prompt, completion and gold answer of a row of :func:`rows_of_samples`.

    The prompt is a text or a list of messages. ``gold`` is the field of the gold answer, in formats
    that name none. The answer is "" where there is none.
    """
    prompt, completion, answer = row.get("prompt"), row.get("completion"), row.get(gold)
    if format == "limit-of-RLVR":
        prompt, completion, answer = row["question"], row["code"][0], row.get("gt")
    elif format == "lm-evaluation-harness":
        prompt = row["arguments"]["gen_args_0"]["arg_0"]
        completion, answer = row["resps"][0][0], row.get("target")
    elif format == "lighteval":
        doc = row["doc"]
        index = doc.get("gold_index")
        index = index[0] if isinstance(index, list) and index else index
        answer = doc["choices"][index] if isinstance(index, int) and doc.get("choices") else None
        prompt, completion = doc["query"], row["model_response"]["text"][0]
    elif format == "verl's generations":
        prompt, completion, answer = row["input"], row["output"], row.get("gts")
    elif format == "Inspect":
        output = row.get("output") or {}
        choices = output.get("choices") or [{}]
        prompt, answer = row.get("input"), row.get("target")
        completion = output.get("completion") or choices[0].get("message")
    elif format == "verifiers' traces":
        trace = row["traces"][0] if "traces" in row else row
        messages = [node.get("message", node) for node in trace["nodes"]]
        if sum(message.get("role") == "assistant" for message in messages) > 1:
            raise ValueError("has several turns of the model: guide-gain reads a single one")
        prompt, completion = messages[:-1], messages[-1:]
        answer = row["task"].get("data", {}).get(gold)
    if prompt in (None, "", []) or completion is None:
        raise ValueError("has no text of its prompt and completion")
    return prompt, _text(completion), "" if answer is None else str(answer)


def _text(completion: Any) -> str:
    """Return the text of a completion: of itself, of a message, or of its last message."""
    if isinstance(completion, list) and completion:
        completion = completion[-1]
    if isinstance(completion, dict):
        completion = completion.get("content", completion.get("text"))
    if isinstance(completion, list) and completion:  # parts of a content
        return "".join(_text(part) for part in completion)
    if not isinstance(completion, str):
        raise ValueError("has no text of its completion")
    return completion
