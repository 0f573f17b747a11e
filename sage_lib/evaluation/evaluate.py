"""Stage 3: n samples per problem of one model, in three steps: drawn, judged, scored; and the exact
probabilities of valid completions, where they can be listed.

Drawing appends to samples.jsonl and goes on where it stopped. Judging and scoring read those
samples, and can be done again without drawing any."""

import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.errors import SageError
from sage_lib.evaluation.counts import COLUMNS
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, write_bytes, write_text
from sage_lib.policy import loading
from sage_lib.policy.sampling import collect, sample, transformers_engine, vllm_engine
from sage_lib.policy.scoring import score, valid_probabilities
from sage_lib.tasks.judging import digest, judge, require_golds
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.tasks.verifier import Verifier


def evaluate(profile: Profile, run: Run) -> dict:
    """Sample the model of ``run.policy`` and write counts.csv, samples.jsonl.gz and scores.csv, of
    the problems that are sampled, and support.csv, of all whose valid completions can be listed
    (``exact`` in the record: how many problems, and the seconds these took); returns the record.

    Under ``accelerate launch`` the processes share the drawing; the main one judges, scores and
    writes."""
    policy = run.policy
    if policy is None or not policy.done():
        stage = "sft" if run.method == BASE else "rl"
        raise SageError(
            f"there is no finished model of {run.name.removeprefix('eval-')} in profile "
            f"{profile.name}: sage-companion stage {stage} --profile {profile.spec} makes it, "
            "or notebook 08"
        )
    record = Record(
        "evaluation",
        profile.name,
        run.fingerprint,
        profile.evaluation.seed,
        profile.flat(methods=False),
    )
    tokenizer = loading.load_tokenizer(profile.model, policy.model)
    # vLLM loads the model itself, and wants a GPU's memory for it: ours comes after.
    by_vllm = profile.evaluation.engine == "vllm"
    model = None if by_vllm else loading.load(profile, policy.model)[0]
    asked = problems.sampled_problems(profile)
    verifier = Verifier(workers=profile.compute.threads)
    require_golds(asked, verifier)
    if not draw(profile, run, model, tokenizer, asked):
        return {}
    if model is None:
        model, _ = loading.load(profile, policy.model)
    files = sorted(run.build.glob("samples*.jsonl"))
    rows = collect(files, asked, profile.evaluation.samples)
    counts = judged(asked, rows, verifier)
    write_text(run.measured / "counts.csv", counts.to_csv(index=False))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    write_bytes(run.measured / "samples.jsonl.gz", gzip.compress(lines.encode(), mtime=0))
    base = model
    if policy.stage != "sft":
        base, _ = loading.load(profile, runs.sft_run(profile).model)
    scores = score(model, base, tokenizer, asked, rows, profile.evaluation.scored)
    _write(run.measured / "scores.csv", scores)
    listed, started = problems.listed_problems(profile), time.perf_counter()
    exact: dict[str, float] = {}
    if listed:
        support = valid_probabilities(model, tokenizer, listed)
        _write(run.measured / "support.csv", support)
        exact = {"problems": len(listed), "seconds": round(time.perf_counter() - started, 2)}
    sets = dict.fromkeys(problem.dataset for problem in asked)
    return run.finish(
        record,
        policy=policy.name,
        tokens=sum(sum(row["tokens"]) for row in rows),
        exact=exact,
        verifier=dict(verifier.counts),
        data={name: digest([p for p in asked if p.dataset == name]) for name in sets},
    )


def _write(path: Path, table: pd.DataFrame) -> None:
    write_text(path, table.to_csv(index=False, float_format="%.6g"))


def draw(
    profile: Profile,
    run: Run,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Problem],
) -> bool:
    """Step 1: this process's share of the samples, of ``model``, or without one by vLLM; True in
    the process that goes on with them."""
    assert run.policy is not None
    settings = profile.evaluation
    # One process, or those of accelerate launch.
    state = PartialState(cpu=not torch.cuda.is_available())
    own = run.samples
    if not state.is_main_process:
        own = run.samples.with_name(f"samples.{state.process_index}.jsonl")
    others = [path for path in run.build.glob("samples*.jsonl") if path != own]
    if model is None:
        engine = vllm_engine(run.policy.model, tokenizer, asked, settings)
    else:
        engine = transformers_engine(model, tokenizer, asked, settings)
    if state.is_main_process:  # only shows progress: the samples are in a file of their own
        run.live_steps.unlink(missing_ok=True)

    def progress(done: int, total: int, rate: float) -> None:
        if state.is_main_process:
            append_line(run.live_steps, {"step": done, "tokens_per_second": rate})

    try:
        sample(
            engine,
            tokenizer,
            asked,
            settings,
            own,
            progress,
            state.process_index,
            state.num_processes,
            others,
        )
    finally:
        engine.close()
    state.wait_for_everyone()
    return bool(state.is_main_process)


def judged(asked: Sequence[Problem], rows: Sequence[dict], verifier: Verifier) -> pd.DataFrame:
    """Step 2: judge all samples; returns what counts.csv holds, and puts "correct" into each
    row."""
    counted = dict.fromkeys(name for p in asked for name in task_of(p.task).COUNTED)
    found = []
    for problem, row in zip(asked, rows, strict=True):
        texts = row["completions"]
        row["correct"] = judge([problem] * len(texts), texts, verifier)
        truncated = row["finished"].count(False)
        line = [problem.dataset, problem.id, len(texts), sum(row["correct"]), truncated]
        found.append([*line, *_counts(problem, texts, row["correct"], list(counted))])
    return pd.DataFrame(found, columns=[*COLUMNS, *counted])


def _counts(
    problem: Problem, texts: Sequence[str], correct: Sequence[bool], names: Sequence[str]
) -> list[int | None]:
    """How many samples are what, for each name; None where the problem's task does not say."""
    task = task_of(problem.task)
    if not task.COUNTED:
        return [None] * len(names)
    measures = [task.measures(problem, t, ok) for t, ok in zip(texts, correct, strict=True)]
    return [sum(one[name] for one in measures) if name in task.COUNTED else None for name in names]
