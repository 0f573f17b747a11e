"""Stage 3: n samples per problem of one model, verified and counted; tables are made from the counts alone."""

import gzip
import json
from collections.abc import Callable

import pandas as pd
import torch
from accelerate import PartialState

from sage_lib.errors import SageError
from sage_lib.evaluation.counts import COLUMNS
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import write_bytes, write_text
from sage_lib.policy import loading
from sage_lib.policy.sampling import collect, sample, transformers_engine, vllm_engine
from sage_lib.policy.scoring import score, valid_probabilities
from sage_lib.tasks import countdown
from sage_lib.tasks.verifier import Verifier


def evaluate(
    profile: Profile, run: Run, of: Run, progress: Callable[[int, int, float], None]
) -> dict:
    """Sample the model that ``of`` made and write counts.csv, samples.jsonl.gz, scores.csv and, of the embedded task,
    support.csv; returns the run record.

    Under ``accelerate launch`` the processes share the work; the main one collects, verifies and writes.
    """
    if not of.done():
        raise SageError(
            f"there is no finished model of {of.name} in profile {profile.name}: train it first"
        )
    record = Record(
        "evaluation", profile.name, run.fingerprint, profile.evaluation.seed, profile.flat()
    )
    model, tokenizer = loading.load(profile, of.model)
    items = problems.evaluation_items(profile)
    verifier = Verifier(workers=profile.compute.threads)
    problems.require_golds(items, verifier)
    state = PartialState(
        cpu=not torch.cuda.is_available()
    )  # one process, or those of accelerate launch
    path = (
        run.samples
        if state.is_main_process
        else run.samples.with_name(f"samples.{state.process_index}.jsonl")
    )
    others = [p for p in run.build.glob("samples*.jsonl") if p != path]
    draw = (
        vllm_engine(of.model, tokenizer, items, profile.evaluation)
        if profile.evaluation.engine == "vllm"
        else transformers_engine(model, tokenizer, items, profile.evaluation)
    )
    sample(
        draw,
        tokenizer,
        items,
        profile.evaluation,
        path,
        progress if state.is_main_process else lambda *_: None,
        state.process_index,
        state.num_processes,
        others,
    )
    state.wait_for_everyone()
    if not state.is_main_process:
        return {}
    rows = collect(sorted(run.build.glob("samples*.jsonl")), items, profile.evaluation.samples)
    for item, row in zip(items, rows, strict=True):
        row["correct"] = problems.judge(
            [item] * len(row["completions"]), row["completions"], verifier
        )
    table = pd.DataFrame(
        [_count(item, row) for item, row in zip(items, rows, strict=True)], columns=COLUMNS
    )
    base = model if of.name == "sft" else loading.load(profile, runs.sft_run(profile).model)[0]
    write_text(
        run.measured / "scores.csv",
        score(model, base, tokenizer, items, rows, profile.evaluation.scored).to_csv(
            index=False, float_format="%.6g"
        ),
    )
    if profile.task is not None:
        write_text(
            run.measured / "support.csv",
            valid_probabilities(model, tokenizer, items, profile.task.limit).to_csv(
                index=False, float_format="%.6g"
            ),
        )
    write_text(run.measured / "counts.csv", table.to_csv(index=False))
    write_bytes(
        run.measured / "samples.jsonl.gz",
        gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0),
    )
    tokens = sum(sum(r["tokens"]) for r in rows)
    read = {
        name: problems.digest(i for i in items if i.dataset == name)
        for name in dict.fromkeys(i.dataset for i in items)
    }
    return record.finish(
        run.record, of=of.name, tokens=tokens, verifier=dict(verifier.counts), data=read
    )


def _count(item: problems.Item, row: dict) -> list:
    texts = row["completions"]
    counts = [item.dataset, item.id, len(texts), sum(row["correct"]), row["finished"].count(False)]
    if item.problem is None:
        return [*counts, None, None, None]
    checks = [countdown.check(item.problem, t) for t in texts]
    return [
        *counts,
        sum(c.way == "R" for c in checks),
        sum(c.valid and c.way == "L" for c in checks),
        sum(c.valid and c.way == "R" for c in checks),
    ]
