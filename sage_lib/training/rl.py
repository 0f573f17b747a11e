"""Stage 2: RL with verifiable rewards (Table 8), one run per method and seed, through
SageTrainer."""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

# First: Unsloth patches what is imported after it.
from sage_lib.algorithm.backend import GRPOConfig

# isort: split

import torch
from datasets import Dataset

from sage_lib.algorithm.trainer import SageTrainer
from sage_lib.errors import SageError
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import write_bytes
from sage_lib.policy.loading import weights_hash
from sage_lib.tasks import prompts
from sage_lib.tasks.judging import digest, judge, require_golds
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.tasks.verifier import Verifier
from sage_lib.training import rft
from sage_lib.training.callbacks import Collapse, ExactLog, StepLog, arguments, last_checkpoint
from sage_lib.training.sft import add_lora, load_model, merged


def train(profile: Profile, run: Run) -> dict:
    """Train one method from the SFT model; save the merged policy; returns the run record.

    A run that collapses is a result: its policy is kept as it stood, and the record says at which
    step and why (``collapsed``, null otherwise).
    """
    reference = runs.sft_run(profile)
    if not reference.done():
        raise SageError(
            f"RL starts from the SFT model of profile {profile.name}, which is not there: "
            f"sage-companion stage sft --profile {profile.spec} makes it"
        )
    chosen = profile.methods[run.method]
    if chosen.rft is not None:
        return rft.train(profile, run)
    runs.require_entropies(profile, chosen.guide)
    seed = profile.seeds[0] if run.seed is None else run.seed
    settings: dict[str, Any] = {**profile.rl, **chosen.rl, "seed": seed}
    guide = None if chosen.guide is None else runs.guide_of(profile, chosen.guide)
    lora = profile.rl_lora if chosen.lora else None
    kept = {"method": run.method, **dataclasses.asdict(chosen), "rl": settings, "lora": lora}
    record = Record("rl", profile.name, run.fingerprint, seed, {**kept, "q": repr(guide)})
    checkpointing = settings["gradient_checkpointing"]
    model, tokenizer = load_model(profile, reference.model, lora is None, checkpointing)
    if lora is not None:
        model = add_lora(model, lora, seed, checkpointing)
    asked = problems.rl_problems(profile)
    verifier = Verifier(workers=profile.compute.threads)
    require_golds(asked, verifier)
    checkpoints = run.build / "checkpoints"
    fixed = {"output_dir": str(checkpoints), "disable_tqdm": True}
    listed = problems.listed_problems(profile, ood=False) if profile.evaluation.every else []
    log = run.build / "exact.jsonl"
    exact = [ExactLog(log, tokenizer, listed, profile.evaluation.every)] if listed else []
    trainer = SageTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward(asked, verifier, chosen.reward),
        guide=guide,
        anchor=chosen.anchor if settings["beta"] else None,
        advantage=chosen.advantage,
        dynamic_sampling=chosen.dynamic_sampling,
        merge_adapter=profile.compute.merge_adapter,
        reference_reset=chosen.reference_reset,
        train_dataset=Dataset.from_list(rows(asked)),
        args=arguments(GRPOConfig, {"report_to": "none", **settings}, **fixed),
        callbacks=[StepLog(run.live_steps), *exact],
    )
    collapsed = None
    try:
        trainer.train(resume_from_checkpoint=last_checkpoint(checkpoints))
    except Collapse as found:
        collapsed = {"step": found.step, "reason": found.reason}
    except RuntimeError as error:  # torch.multinomial's
        if "probability tensor contains" not in str(error):
            raise
        reason = "the policy's probabilities are not finite"
        collapsed = {"step": trainer.state.global_step + 1, "reason": reason}
    merged(trainer.model).save_pretrained(run.model)
    tokenizer.save_pretrained(run.model)
    run.publish_steps()
    if listed:
        write_bytes(run.measured / "exact.jsonl", log.read_bytes())
    written = run.finish(
        record,
        data=digest(asked),
        reference=weights_hash(reference.model),
        weights=weights_hash(run.model),
        collapsed=collapsed,
    )
    shutil.rmtree(checkpoints, ignore_errors=True)
    return written


def rows(asked: Sequence[Problem]) -> list[dict[str, Any]]:
    """The rows of TRL's training set: prompt, gold answer, and the problem's number."""
    return [
        {"prompt": prompts.messages(problem.question), "answer": problem.gold, "number": number}
        for number, problem in enumerate(asked)
    ]


def reward(asked: Sequence[Problem], verifier: Verifier, kind: str = "accuracy") -> Callable:
    """TRL's reward function over the rows of :func:`rows`.

    "accuracy": 1 where the last answer is right, as :func:`judge` says. "random": a fair coin for
    every completion, drawn from torch's global stream, which checkpoints keep; the accuracy is then
    the metric ``task/accuracy``. What the problems' task measures besides (``LOGGED``) becomes the
    metrics ``task/NAME``, shares of all samples that earn nothing.
    """
    logged = {name for task in {p.task for p in asked} for name in task_of(task).LOGGED}

    def accuracy(
        completions: list[list[dict]],
        number: list[int],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        posed = [asked[n] for n in number]
        texts = [turns[-1]["content"] for turns in completions]
        verdicts = judge(posed, texts, verifier)
        if log_metric is not None:
            found: Counter[str] = Counter(dict.fromkeys(sorted(logged), 0))
            for problem, text, correct in zip(posed, texts, verdicts, strict=True):
                measures = task_of(problem.task).measures(problem, text, correct)
                found.update(name for name in logged if measures.get(name))
            for name, count in found.items():
                log_metric(f"task/{name}", count / len(texts))
            if kind == "random":
                log_metric("task/accuracy", sum(verdicts) / len(verdicts))
        if kind == "random":
            return (torch.rand(len(verdicts)) < 0.5).float().tolist()
        return [float(correct) for correct in verdicts]

    return accuracy
