"""Counts from the layouts of other trainers and evaluations, each as its source writes it: TRL,
verl, Inspect, verifiers, passk-inference, and a sample a line."""

import io
import json
import math
import struct
import sys
import zipfile

import pandas as pd
import pyarrow as pa
import pytest
from test_sample_files import counted
from test_sample_files import write_lines as write

from sage_lib.errors import SageError
from sage_lib.evaluation import sample_files
from sage_lib.evaluation.policy_counts import read_policy

#: Right and wrong samples of two problems.
RIGHT = {"a": [1, 0, 1], "b": [0, 0, 0]}
SAMPLES = [(problem, right) for problem, all_of in RIGHT.items() for right in all_of]


def failing(path, **choice):
    with pytest.raises(SageError) as error:
        sample_files.read_sample_file(path, **choice)
    assert "\n" not in str(error.value)
    return str(error.value)


HAND = [(3, 2), (3, 0)]


def test_counts_by_id_of_text_or_number_with_seeds(tmp_path):
    rows = [{"id": 1, "c": 2, "n": 3}, {"id": "b", "c": 0, "n": 3, "source": "aime24"}]
    assert counted(write(tmp_path / "a.jsonl", rows)) == HAND
    seeds = [{**row, "seed": seed} for row in rows for seed in (3, 4)]
    policy = read_policy(str(write(tmp_path / "b.jsonl", seeds)))
    assert policy.seeds == [3, 4] and policy.c.tolist() == [[2, 0], [2, 0]]
    broken = [{"c": 4}, {"n": 0, "c": 0}, {"c": True}, {"c": 1.0}, {"id": None}, {"id": 1}]
    path = write(tmp_path / "c.jsonl", [rows[0], *({**rows[1], **one} for one in broken)])
    found = sample_files.read_sample_file(path)
    assert list(found.counts.values()) == [(3, 2)]
    assert [line for line, _ in found.unreadable] == [2, 3, 4, 5, 6, 7]
    assert found.unreadable[0][1].startswith("has c = 4 and n = 3: 0 <= c <= n")
    assert found.unreadable[-1][1] == "repeats what line 1 has of 1"


@pytest.mark.parametrize("key", ["problem", "id", "prompt"])
def test_a_sample_a_line_needs_no_data_set_and_no_number(tmp_path, key):
    rows = [{key: problem, "correct": bool(right)} for problem, right in SAMPLES]
    assert counted(write(tmp_path / "a.jsonl", rows)) == HAND
    if key != "prompt":
        numbers = [{**row, key: "ab".index(row[key])} for row in rows]
        assert counted(write(tmp_path / "b.jsonl", numbers)) == HAND
    else:  # a conversation
        told = [{**row, key: [{"role": "user", "content": row[key]}]} for row in rows]
        assert counted(write(tmp_path / "b.jsonl", told)) == HAND
    lacking = write(tmp_path / "c.jsonl", [{"problem": "a", "right": True}])
    assert "has the fields of no format: problem, right" in failing(lacking)


def trl(folder, step, **rewards):
    """trl/trainer/grpo_trainer.py, log: one row for each completion of the last steps."""
    rewards = rewards or {"accuracy_reward": [float(right) for _, right in SAMPLES]}
    prompts = [[{"role": "user", "content": problem}] for problem, _ in SAMPLES]
    texts = [[{"role": "assistant", "content": "text"}]] * len(prompts)
    table = {"step": [step] * len(prompts), "prompt": prompts, "completion": texts}
    table |= {**rewards, "advantage": [0.5] * len(prompts)}
    path = folder / f"completions_{step:05d}.parquet"
    pd.DataFrame(table).to_parquet(path)
    return path


def test_completions_of_trl_are_grouped_by_prompt(tmp_path):
    path = trl(tmp_path, 10)
    found = sample_files.read_sample_file(path)
    assert counted(path) == HAND and found.format == "TRL's completions" and found.steps == [10]
    assert read_policy(str(path)).notes == []
    trl(tmp_path, 20)
    both = read_policy(f"grpo={tmp_path}/completions_*.parquet")
    assert both.label == "grpo" and both.n.tolist() == [[6, 6]]
    assert both.notes == ["grpo: samples of training steps 10, 20, so of several policies"]


def test_a_reward_is_chosen_by_name_and_a_score_by_its_threshold(tmp_path):
    right = [float(one) for _, one in SAMPLES]
    path = trl(tmp_path, 1, accuracy=right, format=[1.0] * 6, length=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert "choose a metric by --metric, one of accuracy, format" in failing(path)
    assert counted(path, metric="accuracy") == HAND
    said = failing(path, metric="length")
    assert "has 0.1 for length, not 0 or 1; for scores, give --threshold" in said
    assert counted(path, metric="length", threshold=0.3) == [(3, 1), (3, 3)]
    for threshold in (math.nan, math.inf):
        said = failing(path, metric="length", threshold=threshold)
        assert said == f"the threshold must be a number, not {threshold}: give a score"
    assert "one of accuracy, format, length" in failing(path, metric="other")


def test_generations_of_verl_are_grouped_by_input(tmp_path):
    """verl/trainer/ppo/ray_trainer.py, _dump_generations and _validate: reward repeats score."""
    rows = [
        {
            **{"input": f"user\n{problem}\nassistant\n", "output": "text", "gts": "1"},
            **{"score": float(right), "step": 7, "reward": float(right)},
        }
        for problem, right in SAMPLES
    ]
    found = sample_files.read_sample_file(write(tmp_path / "7.jsonl", rows))
    assert [*found.counts.values()] == HAND
    assert (found.format, found.metric, found.steps) == ("verl's generations", "score", [7])
    # dapo's scores are -1 and 1, with acc beside them
    dapo = [{**row, "score": 2 * row["score"] - 1, "acc": bool(row["score"])} for row in rows]
    for row in dapo:
        row["reward"] = row["score"]
    path = write(tmp_path / "8.jsonl", dapo)
    assert "choose a metric by --metric, one of score, acc" in failing(path)
    assert counted(path, metric="acc") == HAND
    assert counted(path, metric="score", threshold=1) == HAND


def inspect_samples(summaries=False):
    """inspect_ai/log/_log.py, EvalSample and EvalSampleSummary."""
    samples = []
    for number, (problem, all_of) in enumerate(RIGHT.items(), 1):
        for epoch, right in enumerate(all_of, 1):
            score = {"value": "C" if right else "I", "answer": "1", "history": []}
            sample = {"id": number, "epoch": epoch, "input": problem, "target": "1"}
            rest = {} if summaries else {"messages": [], "output": {}, "events": []}
            samples.append({**sample, "scores": {"match": score}, **rest})
    return samples


def archive(path, members, zstandard=False):
    """An .eval, whose members Inspect packs with deflate, and since 2026 with Zstandard."""
    written, sizes = io.BytesIO(), []
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as file:
        for name, value in members.items():
            data = json.dumps(value).encode()
            sizes.append(struct.pack("<I", len(data)))
            if zstandard:
                data = pa.Codec("zstd").compress(data, asbytes=True)
            file.writestr(name, data, zipfile.ZIP_STORED if zstandard else None)
        places = [(info.header_offset, info) for info in file.infolist()]
    packed = bytearray(written.getvalue())
    if zstandard:  # zipfile cannot write method 93 before Python 3.14
        at = packed.index(b"PK\x01\x02")
        for (offset, info), size in zip(places, sizes, strict=True):
            packed[offset + 8 : offset + 10] = struct.pack("<H", 93)
            packed[at + 10 : at + 12] = struct.pack("<H", 93)
            packed[offset + 22 : offset + 26] = packed[at + 24 : at + 28] = size
            at += 46 + len(info.filename)
    path.write_bytes(packed)
    return path


@pytest.mark.parametrize("zstandard", [False, True])
def test_logs_of_inspect_count_epochs(tmp_path, zstandard):
    log = {"version": 2, "status": "success", "eval": {"task": "t"}, "samples": inspect_samples()}
    (tmp_path / "log.json").write_text(json.dumps(log, indent=2))
    assert counted(tmp_path / "log.json") == HAND
    header = {"header.json": {"version": 2}, "_journal/start.json": {}}
    whole = {**header, "summaries.json": inspect_samples(summaries=True)}
    assert counted(archive(tmp_path / "whole.eval", whole, zstandard)) == HAND
    names = {f"samples/{s['id']}_epoch_{s['epoch']}.json": s for s in inspect_samples()}
    cut = archive(tmp_path / "cut.eval", {"_journal/start.json": {}, **names}, zstandard)
    assert counted(cut) == HAND


def test_a_sample_of_inspect_without_a_score_is_named(tmp_path):
    samples = inspect_samples()
    samples[0]["scores"]["match"]["value"] = "P"
    samples[1]["scores"]["match"]["value"] = "N"
    samples[2] |= {"scores": None, "error": "timeout"}
    log = {"version": 2, "eval": {}, "samples": [*samples, samples[5]]}
    (tmp_path / "log.json").write_text(json.dumps(log))
    found = sample_files.read_sample_file(tmp_path / "log.json")
    assert list(found.counts.values()) == [(1, 0), (3, 0)]
    assert found.unreadable == [
        (1, "has 'P' for match, not 0 or 1"),
        (3, "has no scores: it ended in an error (timeout)"),
        (7, "repeats what line 6 has of 2"),
    ]
    (tmp_path / "other.zip").write_bytes(archive(tmp_path / "x", {"a.json": 1}).read_bytes())
    assert "a ZIP archive without a header" in failing(tmp_path / "other.zip")
    (tmp_path / "cut.eval").write_bytes((tmp_path / "x").read_bytes()[:30])
    assert "cannot be read" in failing(tmp_path / "cut.eval")
    (tmp_path / "none.json").write_text(json.dumps({"version": 2, "eval": {}}))
    assert "log of Inspect without samples" in failing(tmp_path / "none.json")


def episode(problem, right, **rewards):
    """verifiers/v1/episode.py and trace.py, as dumped with exclude_none."""
    task = {"type": "Echo", "data": {"idx": 0, "prompt": problem}, "key": f"key-{problem}"}
    given = rewards or {"exact": {"score": float(right), "weight": 1.0}}
    trace = {"version": 1, "id": "0" * 32, "task": task, "agent": {"name": "agent", "config": {}}}
    trace |= {"nodes": [], "rewards": given, "metrics": {}, "is_completed": True, "ok": True}
    return {"id": "1" * 32, "env": {"id": "echo"}, "task": task, "ok": True, "traces": [trace]}


def test_traces_of_verifiers_are_grouped_by_task(tmp_path):
    rows = [episode(*sample) for sample in SAMPLES]
    assert counted(write(tmp_path / "traces.jsonl", rows)) == HAND
    older = [
        {**row["traces"][0], "rewards": {"exact": float(right)}}
        for row, (_, right) in zip(rows, SAMPLES, strict=True)
    ]
    assert counted(write(tmp_path / "older.jsonl", older)) == HAND
    failed = {**rows[0], "ok": False, "traces": [], "errors": [{"type": "TaskError"}]}
    found = sample_files.read_sample_file(write(tmp_path / "f.jsonl", [failed, *rows]))
    assert found.unreadable == [(1, "has no rewards: it ended in TaskError")]
    form = {"score": 1, "weight": 0.2}
    weighed = [
        episode(problem, right, exact={"score": right, "weight": 0.8}, form=form)
        for problem, right in SAMPLES
    ]
    path = write(tmp_path / "w.jsonl", weighed)
    assert "choose a metric by --metric, one of exact, form, sum of rewards" in failing(path)
    assert counted(path, metric="sum of rewards", threshold=1) == HAND
    duet = rows[0] | {"traces": [dict(rows[0]["traces"][0], agent={"name": n}) for n in "xy"]}
    assert "one of x/exact, y/exact" in failing(write(tmp_path / "d.jsonl", [duet]), metric="z")


def test_results_of_verifiers_are_grouped_by_example(tmp_path):
    """verifiers/legacy/utils/save_utils.py, state_to_output."""
    rows = [
        {
            **{"example_id": "ab".index(problem), "prompt": [{"role": "user", "content": problem}]},
            **{"completion": [], "reward": float(right), "metrics": {"correct_answer": right}},
        }
        for problem, right in SAMPLES
    ]
    assert counted(write(tmp_path / "results.jsonl", rows)) == HAND


def test_the_standard_input_is_a_file(monkeypatch):
    text = "".join(json.dumps({"id": p, "correct": r}) + "\n\n" for p, r in SAMPLES)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    policy = read_policy("-")
    assert policy.label == "stdin" and policy.c.tolist() == [[2, 0]]


# --- texts, which guide-gain reads ----------------------------------------------------------------


def rows_with_texts():
    """A wrong and a right sample of "a" in each format: its rows, as its source writes them."""
    turn = [{"role": "user", "content": "a"}]
    doc = {"query": "a", "choices": ["7"], "gold_index": [0], "task_name": "t"}
    harness = {"doc_id": 1, "doc": {}, "target": "7", "metrics": ["exact_match"], "filter": "none"}
    harness["arguments"] = {"gen_args_0": {"arg_0": "a", "arg_1": {}}}
    lists = {"code": ["no", "yes"], "pred": ["1", "7"], "score": [False, True]}
    rows = {"limit-of-RLVR": [{"idx": 1, "question": "a", "gt": "7", **lists}]}
    for right, text in enumerate(("no", "yes")):
        reply, parts = {"role": "assistant", "content": text}, [{"type": "text", "text": text}]
        trace = episode("a", right)
        trace["traces"][0]["nodes"] = [{"message": turn[0]}, {"message": reply}]
        trace["task"]["data"]["answer"] = "7"
        of_sample = {
            "a sample a line": {"prompt": "a", "completion": text, "correct": right, "answer": "7"},
            "verifiers' traces": trace,
            "verifiers' results": {"example_id": 1, "prompt": turn, "completion": [reply]}
            | {"reward": float(right), "answer": 7},
            "verl's generations": {"input": "a", "output": text, "gts": "7", "score": float(right)},
            "Inspect": {"id": 1, "epoch": right + 1, "input": turn, "target": "7"}
            | {"output": {"choices": [{"message": {"content": parts}}]}}
            | {"scores": {"match": {"value": "IC"[right]}}},
            "lm-evaluation-harness": {**harness, "resps": [[text]], "filtered_resps": [text]}
            | {"exact_match": float(right), "doc_hash": text},
            "lighteval": {"doc": {**doc, "id": text}, "model_response": {"text": [text]}}
            | {"metric": {"em": right}},
        }
        for format, row in of_sample.items():
            rows.setdefault(format, []).append(row)
    return rows


@pytest.mark.parametrize(
    "format, rows", rows_with_texts().items(), ids=lambda value: str(value)[:20]
)
def test_prompt_text_and_gold_of_each_format(tmp_path, format, rows):
    path = write(tmp_path / "a.jsonl", rows)
    read = sample_files.read_sample_file(path, gold="answer")
    assert read.format == format and not read.unreadable
    assert [(s.completion, s.gold, s.is_correct) for s in read.samples] == [
        ("no", "7", False),
        ("yes", "7", True),
    ]
    assert {str(s.prompt) for s in read.samples} <= {"a", "[{'role': 'user', 'content': 'a'}]"}
    judged = sample_files.read_sample_file(path, gold="answer", judge=lambda g, t: t == "no")
    assert [s.is_correct for s in judged.samples] == [True, False]


def test_texts_that_a_file_lacks_are_named(tmp_path):
    row = {"doc_id": 1, "arguments": {"gen_args_0": {"arg_0": "a"}}, "metrics": ["pass@1"]}
    row |= {"resps": [["no", "yes"]], "filtered_resps": [["no", "yes"]], "pass@1": 0.5}
    path = write(tmp_path / "repeats.jsonl", [row])
    assert "line 1 has one verdict for 2 samples: name a judge" in failing(path, gold="answer")
    judged = sample_files.read_sample_file(path, gold="answer", judge=lambda g, t: t == "yes")
    assert [s.is_correct for s in judged.samples] == [False, True]
    counts = write(tmp_path / "counts.jsonl", [{"id": 1, "c": 1, "n": 2}])
    assert "line 1 has counts and no texts" in failing(counts, gold="answer")
    bare = write(tmp_path / "bare.jsonl", [{"problem": "a", "correct": True}])
    assert "line 1 has no text of its prompt and completion" in failing(bare, gold="answer")
    traces = episode("a", 1)
    reply = {"message": {"role": "assistant", "content": "x"}}
    traces["traces"][0]["nodes"] = [{"message": {"role": "user", "content": "a"}}, reply, reply]
    several = write(tmp_path / "several.jsonl", [traces])
    assert "line 1 has several turns of the model" in failing(several, gold="answer")
    del traces["traces"][0]["nodes"]
    without = write(tmp_path / "without.jsonl", [traces])
    assert "line 1 has no text of its prompt and completion" in failing(without, gold="answer")


def test_an_archive_of_inspect_gives_its_texts(tmp_path):
    """Its summaries have none: the samples beside them are read."""
    rows = rows_with_texts()["Inspect"]
    summaries = [{**row, "output": {}} for row in rows]
    members = {"header.json": {"version": 2}, "summaries.json": summaries}
    members |= {f"samples/1_epoch_{row['epoch']}.json": row for row in rows}
    path = archive(tmp_path / "log.eval", members)
    read = sample_files.read_sample_file(path, gold="answer")
    assert [sample.completion for sample in read.samples] == ["no", "yes"]
