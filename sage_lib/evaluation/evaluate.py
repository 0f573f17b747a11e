"""Stage 3: samples of a policy are drawn, compared with golds and scored; exact probabilities."""

import gzip
import json
import time
from collections.abc import Sequence

import pandas as pd
import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, write_bytes, write_text
from sage_lib.policy import loading
from sage_lib.policy.prefixes import prefix_engine
from sage_lib.policy.sampling import collect, sample, transformers_engine
from sage_lib.policy.scoring import score, valid_probabilities
from sage_lib.policy.vllm_engine import vllm_engine
from sage_lib.tasks.judging import digest, judge, require_golds
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.tasks.verifier import Verifier

#: One row of counts.csv per problem: n samples, c of them correct, and how many the length limit
#: cut off. After these come the numbers that the problem's task counts (``COUNTED``), empty for
#: other tasks.
COLUMNS = ("dataset", "problem", "n", "c", "truncated")


def evaluate_policy(profile: Profile, run: Run) -> dict:
    """Evaluate the model of ``run.policy``; return the record.

    The run's files are counts.csv, samples.jsonl.gz, scores.csv and support.csv. Under ``accelerate
    launch`` the processes share the drawing; the main one does the rest.
    """
    policy, evaluation = runs.finished(profile, run.policy), profile.evaluation
    record = run.begin(evaluation.seed, profile.flat(methods=False))
    tokenizer = loading.load_tokenizer(profile.model, policy.model)
    # vLLM loads the model itself, and needs a GPU's memory for it: ours comes after.
    model = None if evaluation.engine == "vllm" else loading.load(profile.model, policy.model)[0]
    sampled = problems.sampled_problems(profile)
    verifier = Verifier(workers=profile.compute.threads)
    require_golds(sampled, verifier)
    if not draw_samples(profile, run, model, tokenizer, sampled):
        return {}
    if model is None:
        model, _ = loading.load(profile.model, policy.model)
    rows = collect(sorted(run.build.glob("samples*.jsonl")), sampled, evaluation.samples)
    counts = count_correct(sampled, rows, verifier, profile.model.boxed)
    write_text(run.measured / "counts.csv", counts.to_csv(index=False))
    lines = "".join(json.dumps(first(row, evaluation.texts)) + "\n" for row in rows)
    write_bytes(run.measured / "samples.jsonl.gz", gzip.compress(lines.encode(), mtime=0))
    base = model
    if policy.stage != "sft":
        base, _ = loading.load(profile.model, runs.sft_run(profile).model)
    scores = score(model, base, tokenizer, sampled, rows, evaluation.scored)
    write_text(run.measured / "scores.csv", scores.to_csv(index=False, float_format="%.6g"))
    listed, started = problems.listed_problems(profile), time.perf_counter()
    exact: dict[str, float] = {}
    if listed:
        support = valid_probabilities(model, tokenizer, listed, evaluation.tempered)
        write_text(run.measured / "support.csv", support.to_csv(index=False, float_format="%.6g"))
        exact = {"problems": len(listed), "seconds": round(time.perf_counter() - started, 2)}
    sets = dict.fromkeys(problem.dataset for problem in sampled)
    return run.finish(
        record,
        policy=policy.name,
        tokens=sum(sum(row["tokens"]) for row in rows),
        exact=exact,
        verifier=dict(verifier.counts),
        data={name: digest([p for p in sampled if p.dataset == name]) for name in sets},
    )


def draw_samples(
    profile: Profile,
    run: Run,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    sampled: Sequence[Problem],
) -> bool:
    """Draw this process's share of the samples, and return whether this is the main process.

    Samples that an earlier call drew are kept. ``model`` is None for vLLM, which loads the policy
    itself.
    """
    assert run.policy is not None
    evaluation = profile.evaluation
    state = PartialState(cpu=not torch.cuda.is_available())
    number = state.process_index
    local = run.samples.with_name(f"samples.{number}.jsonl") if number else run.samples
    others = [path for path in run.build.glob("samples*.jsonl") if path != local]
    if model is None:
        engine = vllm_engine(run.policy.model, tokenizer, sampled, evaluation)
    else:
        of_model = prefix_engine if evaluation.engine == "prefixes" else transformers_engine
        engine = of_model(model, tokenizer, sampled, evaluation)
    if state.is_main_process:
        run.live_steps.unlink(missing_ok=True)

    def progress(done: int, total: int, rate: float) -> None:
        if state.is_main_process:
            append_line(run.live_steps, {"step": done, "tokens_per_second": rate})

    shared = (number, state.num_processes, others)
    try:
        sample(engine, tokenizer, sampled, evaluation, local, progress, *shared)
    finally:
        engine.close()
    state.wait_for_everyone()
    return bool(state.is_main_process)


def first(row: dict, number: int | None) -> dict:
    """Return a row of :func:`sampling.collect` with the first samples alone; None keeps all."""
    return {key: value[:number] if isinstance(value, list) else value for key, value in row.items()}


def count_correct(
    sampled: Sequence[Problem], rows: Sequence[dict], verifier: Verifier, boxed: bool = False
) -> pd.DataFrame:
    """Return the table counts.csv, and put a list "correct" into each row.

    ``rows`` are those of ``sampling.collect``, one for each problem. ``boxed`` is as in
    :func:`judge`. The table has the columns COLUMNS, and the numbers that the tasks count.
    """
    names = dict.fromkeys(name for p in sampled for name in task_of(p.task).COUNTED)
    lines = []
    for problem, row in zip(sampled, rows, strict=True):
        texts, task = row["completions"], task_of(problem.task)
        row["correct"] = judge([problem] * len(texts), texts, verifier, boxed)
        line = [problem.dataset, problem.id, len(texts), sum(row["correct"])]
        line.append(row["finished"].count(False))
        pairs = zip(texts, row["correct"], strict=True)
        measures = [task.measures(problem, *pair) for pair in pairs] if task.COUNTED else []
        line += [sum(m[name] for m in measures) if name in task.COUNTED else None for name in names]
        lines.append(line)
    return pd.DataFrame(lines, columns=[*COLUMNS, *names])
