"""What supervised fine-tuning and RL share: resolved settings, a step log that survives a kill,
resumption."""

import contextlib
import dataclasses
import os
import sys
import time
import typing
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from tqdm import tqdm
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback

from sage_lib.errors import SageError
from sage_lib.experiment import problems
from sage_lib.experiment.profile import Profile, digest
from sage_lib.experiment.runs import Run, sft_run
from sage_lib.experiment.typed_fields import kinds_of, refuse_unknown, typed
from sage_lib.files import append_line, read_json, read_lines, rewrite_lines, write_json
from sage_lib.policy import tiny_qwen
from sage_lib.policy.scoring import exact_summary, valid_probabilities
from sage_lib.tasks import judging
from sage_lib.tasks.problem import Problem

#: A run whose every group earned one and the same reward for this many steps has collapsed: it
#: trains nothing any more.
FLAT_STEPS = 50
#: File that marks a checkpoint as whole; written last. It holds the sizes of the others, and of the
#: logs of its run.
WHOLE = "whole"


def check_sections(profile: Profile) -> None:
    """SageError for any setting that SFTConfig, GRPOConfig or PEFT does not know, before anything
    is trained."""
    from peft import LoraConfig

    from sage_lib.algorithm.backend import GRPOConfig, SFTConfig

    by_name = {"SFTConfig": SFTConfig, "GRPOConfig": GRPOConfig, "LoraConfig": LoraConfig}
    for name, place, section in profile.configured():
        cls = by_name[name]
        refuse_unknown(place, section, _settings(cls), name)
        _typed(cls, section)
        # What is known may still not go together, or be no name of theirs. (On another machine than
        # theirs, profiles for a GPU would be refused for that alone.)
        if section and cls is not LoraConfig and not profile.compute.requires_gpu:
            arguments(cls, section, output_dir=str(profile.name), report_to="none")
    tiny_qwen.check_architecture(profile.model)


def _settings(cls: type) -> set[str]:
    return {f.name for f in dataclasses.fields(cls) if f.init}


def _typed(cls: type, section: dict[str, Any]) -> None:
    """SageError for a value of another type than the setting of ``cls`` has: TRL and PEFT take any
    value, and fail at their first use of it."""
    hints = typing.get_type_hints(cls)
    for name, value in section.items():
        kinds = set(kinds_of(hints[name]))
        as_word = str in kinds and isinstance(value, bool)  # scale_rewards: false is "none" in TRL
        if kinds <= _PLAIN and not as_word:
            typed(value, hints[name], name, cls.__name__)
        if isinstance(value, list) and kinds >= {list, str}:
            for one in value:
                typed(one, str, f"an entry of {name}", cls.__name__)


#: Annotations whose values a profile can write, and that can be checked.
_PLAIN = {int, float, str, bool, dict, list, type(None)}


def arguments(cls: type, section: dict[str, Any], **fixed: Any) -> Any:
    """An instance of ``cls`` (SFTConfig, GRPOConfig, LoraConfig) from a profile's section; unknown
    keys raise SageError."""
    refuse_unknown(cls.__name__, section, _settings(cls), cls.__name__)
    _typed(cls, section)
    try:
        return cls(**{**section, **fixed})
    except (TypeError, ValueError, ArithmeticError) as error:  # TRL divides by num_generations
        raise SageError(
            f"{cls.__name__} does not accept the profile's settings: {' '.join(str(error).split())}"
        ) from error


class Collapse(SageError):
    """Training came to its end before its last step. Of RL that is a result, not an error."""

    def __init__(self, step: int, reason: str):
        super().__init__(f"collapsed at step {step}: {reason}")
        self.step, self.reason = step, reason


class _Finished(Exception):
    """The checkpoint that training starts from is that of its last step."""


def taken_back(log: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a log up to a checkpoint's step; later ones are taken out of the file."""
    rows = [row for row in read_lines(log) if row["step"] <= step]
    rewrite_lines(log, rows)
    return rows


class StepLog(TrainerCallback):
    """Appends every logged step to a JSONL file; after a resume, steps past the checkpoint are
    taken back first.

    ``before``: steps that stand in the log already, of trainers that came before; ``more``: what
    every row says besides. Raises :class:`Collapse` where nothing is left to learn from, and before
    a gradient that is not finite destroys the weights.
    """

    def __init__(self, path: Path, before: int = 0, more: dict[str, float] | None = None):
        self.path, self.before, self.more = path, before, more or {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        rows = taken_back(self.path, self.before + state.global_step)
        self.flat, self.clock = 0, time.perf_counter()
        for row in rows:
            self._count_flat(row)

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if state.global_step >= state.max_steps:  # where transformers would take one step more
            raise _Finished

    def _count_flat(self, row: dict[str, Any]) -> None:
        self.flat = self.flat + 1 if row.get("frac_reward_zero_std") == 1 else 0

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        logs = {log.name: log.stat().st_size for log in _logs(folder)}
        write_json(folder / WHOLE, {"files": sizes, "logs": logs})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "train_runtime" in logs:
            return
        now = time.perf_counter()
        row = {
            "step": self.before + state.global_step,
            **self.more,
            **{k: v for k, v in logs.items() if isinstance(v, (int, float))},
            "seconds": round(now - self.clock, 4),
        }
        self.clock = now
        append_line(self.path, row)
        self._count_flat(row)
        if self.flat >= FLAT_STEPS:
            raise Collapse(
                self.before + state.global_step,
                f"every group of the last {FLAT_STEPS} steps earned one and the same reward",
            )

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if args.fp16:  # whose scaler meets such gradients now and then, and leaves the step out
            return
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise Collapse(self.before + state.global_step + 1, "the gradient is not finite")


class ExactLog(TrainerCallback):
    """Exact pass@k of the policy in training, every so many steps: a row per data set and step.

    From the probabilities of all valid completions of ``problems``; nothing is sampled, so no
    random stream moves. After a resume, steps past the checkpoint are taken back first.

    ``start``: a file for the rows of the policy before its first step, which are the same for all
    that start from it: measured where it is missing, and read by the others.
    """

    #: k of the pass@k that are kept.
    KS = (1, 8, 64, 256, 1024)

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        problems: Sequence[Problem],
        every: int,
        start: Path | None = None,
    ):
        self.path, self.tokenizer, self.problems, self.every = path, tokenizer, problems, every
        self.start = start

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        begins = state.global_step == 0  # anew, too, after an end before the first checkpoint
        taken_back(self.path, -1 if begins else state.global_step)
        if begins:
            self.begin(kwargs["model"])

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if state.global_step % self.every == 0:
            self.append(kwargs["model"], state.global_step)

    def begin(self, model: PreTrainedModel) -> None:
        """The rows of the policy before its first step."""
        try:
            rows = None if self.start is None else read_json(self.start)
        except SageError:  # not measured yet, or damaged
            rows = None
        if rows is None:
            rows = self._measured(model)
            if self.start is not None:
                with contextlib.suppress(SageError):  # in another profile's folder, say, read-only
                    write_json(self.start, rows)
        self._note(rows, 0)

    def append(self, model: PreTrainedModel, step: int) -> None:
        """The rows of one step, of the policy as it stands."""
        self._note(self._measured(model), step)

    def _measured(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        training = model.training
        model.eval()
        try:
            found = valid_probabilities(model, self.tokenizer, self.problems)
        finally:
            model.train(training)
        return exact_summary(found, self.KS)

    def _note(self, rows: Sequence[dict[str, Any]], step: int) -> None:
        for row in rows:
            append_line(self.path, {"step": step, **row})


def exact_log(
    profile: Profile,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
) -> ExactLog | None:
    """The log of a run that starts from the profile's base; None where the profile asks for none,
    or has no problem whose valid completions can be listed."""
    every = profile.evaluation.every
    listed = problems.listed_problems(profile, ood=False) if every else []
    if not listed:
        return None
    base = sft_run(profile)
    # How the base is loaded, for an adapter or for all of its weights, decides the last digits.
    how = (profile.methods[run.method].lora, profile.rl_lora, profile.model)
    measured = (base.weights, judging.digest(listed), ExactLog.KS, how)
    start = base.build / f"exact-{digest(measured)}.json"
    return ExactLog(run.build / "exact.jsonl", tokenizer, listed, every, start)


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint to resume from, or None.

    A kill can leave one half-written, without its mark; a disk can lose the end of a file that it
    took: of one in the checkpoint, or of a log, whose steps would then be missing."""
    ordered = sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rsplit("-", 1)[1]))
    now = time.time()
    for age, path in enumerate(reversed(ordered), 1):
        # The trainer deletes the one that is oldest by its date: after a clock was set back, the
        # newest.
        os.utime(path, (now - age, now - age))
    whole = [path for path in ordered if (path / WHOLE).is_file() and _is_whole(path / WHOLE)]
    return str(whole[-1]) if whole else None


class Bar(TrainerCallback):
    """A progress bar where a user looks on: on a terminal, in place of every logged row."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        steps = {"total": state.max_steps, "initial": state.global_step, "unit": "step"}
        # Not sys.stderr: Unsloth puts a filter in its place, which shows no bar.
        self.bar = tqdm(**steps, file=sys.__stderr__, disable=None)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar.update()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar.close()


def train_on(trainer: Any, checkpoints: Path) -> None:
    """Train from the last whole checkpoint, if there is one; from that of the last step, take its
    weights and train nothing (``trainer`` has a :class:`StepLog`).

    What a checkpoint holds beside weights is read by torch's unpickler for tensors and plain values
    alone: SageError where there is anything else.
    """
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Bar())
    found = last_checkpoint(checkpoints)
    if found and hasattr(trainer, "_total_train_tokens"):
        trainer._total_train_tokens = _tokens_until(Path(found))
    try:
        trainer.train(resume_from_checkpoint=found)
    except _Finished:
        pass
    except UnpicklingError as error:
        raise SageError(
            f"a file of {found} holds what no run writes there, and was not read: delete that "
            "checkpoint and run with --resume"
        ) from error


def _tokens_until(checkpoint: Path) -> int:
    """The tokens that TRL's SFTTrainer had counted when it last logged: after a resume it would
    count from zero."""
    rows = read_json(checkpoint / TRAINER_STATE_NAME)["log_history"]
    return int(max((row.get("num_tokens", 0) for row in rows), default=0))


def _logs(checkpoint: Path) -> list[Path]:
    """The logs of the run that a checkpoint belongs to: they lie beside the folder of all."""
    return sorted(checkpoint.parent.parent.glob("*.jsonl"))


def _is_whole(mark: Path) -> bool:
    if not mark.stat().st_size:  # written before marks held sizes
        return True
    try:
        said = read_json(mark)
    except SageError:
        return False
    now = {path.name: path.stat().st_size for path in mark.parent.iterdir()}
    logs = {path.name: path.stat().st_size for path in _logs(mark.parent)}  # which have grown
    files = all(now.get(name) == size for name, size in said["files"].items())
    return files and all(logs.get(name, 0) >= size for name, size in said["logs"].items())
