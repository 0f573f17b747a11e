"""Stage 2: RL with verifiable rewards (Table 8) by SageTrainer, a run for each method and seed."""

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# First: Unsloth, where it is needed, comes before what it patches.
from sage_lib.algorithm.backend import REPLACED, GRPOConfig

# isort: split

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from sage_lib.algorithm.trainer import SageTrainer
from sage_lib.errors import SageError
from sage_lib.experiment import problems, runs
from sage_lib.experiment.runs import Run
from sage_lib.experiment.settings import Profile, Training
from sage_lib.files import write_bytes
from sage_lib.policy import loading
from sage_lib.policy.loading import weights_hash
from sage_lib.tasks import prompts
from sage_lib.tasks.judging import digest, judge, require_golds, require_steps
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.tasks.verifier import Verifier
from sage_lib.training import rft
from sage_lib.training.callbacks import Collapse, StepLog, arguments, exact_log, train_on
from sage_lib.training.models import add_lora, load_model, merged


def train(training: Training, run: Run) -> dict:
    """Train a method from the SFT model, save the policy, and return the run record.

    ``run.profile`` gives the base, the problems and the machine's limits. A run that collapses is a
    result: its policy is kept, and the record's ``collapsed`` says at which step and why.
    """
    profile = run.profile
    method = training.method
    base = runs.finished(profile, run.policy)
    for earlier in run.earlier:
        runs.finished(profile, earlier)
    if method.rft is not None:
        return rft.train(profile, run)
    runs.require_entropies(profile, method.guide)
    guide = None if method.guide is None else runs.guide_of(profile, method.guide)
    recorded = {"method": run.method, **method.recorded(), "rl": training.rl}
    recorded |= {"q": repr(guide), "lora": training.lora}
    record = run.begin(training.rl["seed"], recorded)
    checkpoints = run.build / "checkpoints"
    trainer, tokenizer, rl_problems = make_trainer(training, profile, checkpoints)
    trainer.add_callback(StepLog(run.live_steps))
    exact = exact_log(profile, run, tokenizer)
    if exact:
        trainer.add_callback(exact)
    collapsed = run_to_end(trainer, checkpoints)
    save_policy(profile, run, trainer.model, tokenizer)
    run.publish_steps()
    if exact:
        write_bytes(run.measured / "exact.jsonl", exact.path.read_bytes())
    written = run.finish(
        record,
        data=digest(rl_problems),
        prompts=len(rl_problems),
        too_long=len(problems.rl_problems(profile)) - len(rl_problems),  # and left out
        reference=weights_hash(base.model),
        weights=weights_hash(run.model),
        collapsed=collapsed,
    )
    shutil.rmtree(checkpoints, ignore_errors=True)
    return written


def save_policy(
    profile: Profile, run: Run, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Save the policy of a run: the adapter alone where the profile says so, or a whole model."""
    if profile.compute.keeps_adapter and isinstance(model, PeftModel):
        base = runs.start_run(profile, profile.methods[run.method]).model
        loading.save_adapter(model, run.model, base)
    else:
        merged(model).save_pretrained(run.model)
    tokenizer.save_pretrained(run.model)


def make_trainer(
    training: Training,
    profile: Profile,
    checkpoints: Path,
    trainer_class: type[SageTrainer] = SageTrainer,
) -> tuple[SageTrainer, PreTrainedTokenizerBase, list[Problem]]:
    """Make the trainer of an RL run, and return it with its tokenizer and its problems. The profile
    gives the base, the problems and the machine's limits."""
    method, rl, lora = training.method, training.rl, training.lora
    checkpointing, base = rl["gradient_checkpointing"], runs.start_run(profile, method).model
    guide_method = method.guide_policy
    fast = profile.compute.backend == "unsloth"
    if REPLACED and not fast:
        raise SageError(
            "this process has imported Unsloth, which replaces TRL's trainer: "
            "train RL in a separate process, or set compute.backend to unsloth"
        )
    model, tokenizer = load_model(profile, base, lora is None, checkpointing, fast)
    if lora is not None:
        model = add_lora(model, lora, rl["seed"], checkpointing, fast)
    rl_problems = within_limit(profile, rl, tokenizer)
    verifier = Verifier(workers=profile.compute.threads)
    require_golds(rl_problems, verifier)
    section = between_draws(rl)
    trainer = trainer_class(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward(rl_problems, verifier, method.reward, profile.model.boxed),
        guide=None if method.guide is None else runs.guide_of(profile, method.guide),
        guide_model=None if guide_method is None else runs.first_run(profile, guide_method).model,
        kl_form=method.kl_form if rl["beta"] else None,
        advantage=method.advantage,
        dynamic_sampling=method.dynamic_sampling,
        merge_adapter=profile.compute.merge_adapter,
        trim_padding=profile.compute.trim_padding,
        share_prompts=profile.compute.share_prompts,
        reference_reset=method.reference_reset,
        train_dataset=Dataset.from_list(rows(rl_problems)),
        args=arguments(GRPOConfig, section, f"{profile.name}: rl", output_dir=str(checkpoints)),
    )
    return trainer, tokenizer, rl_problems


def within_limit(
    profile: Profile, rl: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> list[Problem]:
    """Return the problems of RL whose prompt and completion fit the model's length: TRL cuts none.
    ``rl`` is the section of the run."""
    all_problems = problems.rl_problems(profile)
    limit = profile.model.max_seq_length - rl["max_completion_length"]
    fitting = [p for p in all_problems if len(loading.encode(tokenizer, p.question)) <= limit]
    if not fitting:
        raise SageError(
            f"no prompt of {profile.name} has at most {limit} tokens, which are left beside "
            f"max_completion_length {rl['max_completion_length']}: raise model.max_seq_length"
        )
    if len(fitting) < len(all_problems):
        left_out = len(all_problems) - len(fitting)
        print(f"{left_out} prompts of more than {limit} tokens are left out")
    return fitting


def between_draws(rl: dict[str, Any]) -> dict[str, Any]:
    """Return the section ``rl`` with ``save_steps`` raised to the next step before completions are
    drawn: no checkpoint holds completions that are still to be learned from."""
    batches = rl.get("gradient_accumulation_steps") or 1
    draw_size = rl.get("steps_per_generation") or batches
    draw_size *= rl.get("num_iterations") or 1
    updates, save_steps = draw_size // math.gcd(draw_size, batches), rl.get("save_steps")
    if save_steps is None:
        save_steps = 500  # TRL's default
    elif 0 < save_steps < 1:  # a share of all steps
        save_steps = math.ceil(save_steps * rl["max_steps"])
    return {**rl, "save_steps": -(-save_steps // updates) * updates}


def run_to_end(trainer: SageTrainer, checkpoints: Path) -> dict[str, Any] | None:
    """Train from the last whole checkpoint. Return step and reason of a collapse, or None."""
    try:
        train_on(trainer, checkpoints)
    except Collapse as collapse:
        return {"step": collapse.step, "reason": collapse.reason}
    except RuntimeError as error:  # torch.multinomial's
        if "probability tensor contains" not in str(error):
            raise
        reason = "the policy's probabilities are not finite"
        return {"step": trainer.state.global_step + 1, "reason": reason}
    return None


def rows(rl_problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """Return the rows of TRL's training set."""
    return [
        {"prompt": prompts.messages(problem.question), "answer": problem.gold, "number": number}
        for number, problem in enumerate(rl_problems)
    ]


def reward(
    rl_problems: Sequence[Problem],
    verifier: Verifier,
    kind: str = "accuracy",
    boxed: bool = False,
) -> Callable:
    """Make TRL's reward function of a kind over the rows of :func:`rows`.

    - "accuracy": 1 where the last answer is right.
    - "valid": 1 where the task's step checker accepts the work as well.
    - "random": a fair coin from torch's global stream, which checkpoints keep.

    It logs the measures of the problems' tasks (``LOGGED``) as ``task/NAME``, shares of all
    samples, and unless the reward is the accuracy, ``task/accuracy``. In the batches where the
    verifier cut answers off at a limit, ``task/cut`` is their share.
    """
    tasks = [task_of(task) for task in {p.task for p in rl_problems}]
    logged = sorted({name for task in tasks for name in task.LOGGED})
    if kind == "valid":
        require_steps(rl_problems)

    def rewards(
        completions: list[list[dict]],
        number: list[int],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        posed = [rl_problems[n] for n in number]
        texts = [turns[-1]["content"] for turns in completions]
        cut_before = verifier.cut()
        correct = judge(posed, texts, verifier, boxed)
        cut = verifier.cut() - cut_before
        measured = [
            task_of(problem.task).measures(problem, text, verdict)
            for problem, text, verdict in zip(posed, texts, correct, strict=True)
        ]
        if log_metric is not None:
            for name in logged:
                count = sum(bool(measures.get(name)) for measures in measured)
                log_metric(f"task/{name}", count / len(texts))
            if cut:
                log_metric("task/cut", cut / len(texts))
            if kind != "accuracy":
                log_metric("task/accuracy", sum(correct) / len(correct))
        if kind == "random":
            return (torch.rand(len(correct)) < 0.5).float().tolist()
        if kind == "valid":
            return [float(measures["valid"]) for measures in measured]
        return [float(verdict) for verdict in correct]

    return rewards
