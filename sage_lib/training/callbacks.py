"""What every training does besides: check its settings, log each step so that a kill loses none,
resume, and measure the policy on the way."""

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback

from sage_lib.errors import SageError
from sage_lib.experiment import problems
from sage_lib.experiment.checked import check_section, digest
from sage_lib.experiment.runs import Run, sft_run
from sage_lib.experiment.settings import Profile
from sage_lib.files import append_line, read_json, read_lines, rewrite_lines, write_json
from sage_lib.policy import tiny_qwen
from sage_lib.policy.exact import exact_summary
from sage_lib.policy.scoring import valid_probabilities
from sage_lib.tasks import judging
from sage_lib.tasks.problem import Problem

#: A run whose every group earned one and the same reward for this many steps has collapsed.
FLAT_STEPS = 50
#: File that marks a checkpoint as whole; written last. It holds the sizes of the others, and of the
#: logs of its run.
WHOLE = "whole"


# -- settings --------------------------------------------------------------------------------------


def check_sections(profile: Profile) -> None:
    """SageError for any setting that SFTConfig, GRPOConfig or PEFT does not know or accept."""
    from peft import LoraConfig

    from sage_lib.algorithm.backend import GRPOConfig, SFTConfig

    by_name = {"SFTConfig": SFTConfig, "GRPOConfig": GRPOConfig, "LoraConfig": LoraConfig}
    for name, place, section in profile.configured():
        cls, where = by_name[name], f"{profile.name}: {place}"
        check_section(cls, section, where)
        # What is known may still not go together. (On another machine than theirs, profiles for a
        # GPU would be refused for that alone.)
        if section and cls is not LoraConfig and not profile.compute.requires_gpu:
            arguments(cls, section, where, output_dir=profile.name)
    tiny_qwen.check_architecture(profile.model)


def arguments(cls: type, section: dict[str, Any], where: str, **fixed: Any) -> Any:
    """An instance of ``cls`` (SFTConfig, GRPOConfig) from a profile's section."""
    try:
        return cls(**{"report_to": "none", **section, "disable_tqdm": True, **fixed})
    except (TypeError, ValueError, ArithmeticError) as error:  # TRL divides by num_generations
        raise SageError(
            f"{where}: {cls.__name__} does not accept these settings: "
            f"{' '.join(str(error).split())}"
        ) from error


# -- steps -----------------------------------------------------------------------------------------


class Collapse(SageError):
    """Training ended before its last step. Of RL that is a result, not an error."""

    def __init__(self, step: int, reason: str):
        super().__init__(f"collapsed at step {step}: {reason}")
        self.step, self.reason = step, reason


class _Finished(Exception):
    """The checkpoint that training starts from is that of its last step."""


def taken_back(log: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a log up to a checkpoint's step; later ones leave the file."""
    rows = [row for row in read_lines(log) if row["step"] <= step]
    rewrite_lines(log, rows)
    return rows


class StepLog(TrainerCallback):
    """Appends every logged step to a JSONL file; after a resume, later steps are taken back first.

    ``before``: steps of trainers that came before; ``more``: what every row says besides. Raises
    :class:`Collapse` where nothing is left to learn from, and before a gradient that is not finite
    destroys the weights.
    """

    def __init__(self, path: Path, before: int = 0, more: dict[str, float] | None = None):
        self.path, self.before, self.more = path, before, more or {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.flat, self.clock = 0, time.perf_counter()
        for row in taken_back(self.path, self.before + state.global_step):
            self._count_flat(row)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:  # where transformers would take one step more
            raise _Finished

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_json(folder / WHOLE, {"files": _sizes(folder, "*"), "logs": _log_sizes(folder)})

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        if not logs or "train_runtime" in logs:
            return
        now, step = time.perf_counter(), self.before + state.global_step
        numbers = {k: v for k, v in logs.items() if isinstance(v, (int, float))}
        row = {"step": step, **self.more, **numbers, "seconds": round(now - self.clock, 4)}
        self.clock = now
        append_line(self.path, row)
        self._count_flat(row)
        if self.flat >= FLAT_STEPS:
            reason = f"every group of the last {FLAT_STEPS} steps earned one and the same reward"
            raise Collapse(step, reason)

    def _count_flat(self, row: dict[str, Any]) -> None:
        self.flat = self.flat + 1 if row.get("frac_reward_zero_std") == 1 else 0

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        if args.fp16:  # whose scaler meets such gradients now and then, and leaves the step out
            return
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise Collapse(self.before + state.global_step + 1, "the gradient is not finite")


class ExactLog(TrainerCallback):
    """Exact pass@k of the policy in training, every so many steps: a row per data set and step.

    From the probabilities of all valid completions of ``problems``; no random stream moves.
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
        tempered: Sequence[float] = (),
    ):
        self.path, self.tokenizer, self.problems = path, tokenizer, problems
        self.every, self.start, self.tempered = every, start, tempered

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        begins = state.global_step == 0  # anew, too, after an end before the first checkpoint
        taken_back(self.path, -1 if begins else state.global_step)
        if begins:
            self.begin(kwargs["model"])

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self.append(kwargs["model"], state.global_step)

    def begin(self, model: PreTrainedModel) -> None:
        """The rows of the policy before its first step."""
        rows = None
        with contextlib.suppress(SageError):  # not measured yet, or damaged
            rows = read_json(self.start) if self.start else None
        if rows is None:
            rows = self._measured(model)
            with contextlib.suppress(SageError):  # in another profile's folder, read-only
                if self.start is not None:
                    write_json(self.start, rows)
        self._note(rows, 0)

    def append(self, model: PreTrainedModel, step: int) -> None:
        """The rows of one step, of the policy as it stands."""
        self._note(self._measured(model), step)

    def _measured(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        training = model.training
        found = valid_probabilities(model.eval(), self.tokenizer, self.problems, self.tempered)
        model.train(training)
        return exact_summary(found, self.KS)

    def _note(self, rows: Sequence[dict[str, Any]], step: int) -> None:
        for row in rows:
            append_line(self.path, {"step": step, **row})


def exact_log(profile: Profile, run: Run, tokenizer: PreTrainedTokenizerBase) -> ExactLog | None:
    """The log of a run that starts from the profile's base; None where the profile asks for none,
    or has no problem whose valid completions can be listed."""
    every = profile.evaluation.every
    listed = problems.listed_problems(profile, ood=False) if every else []
    if not listed:
        return None
    base = sft_run(profile)
    # How the base is loaded, for an adapter or for all of its weights, decides the last digits.
    how = (profile.methods[run.method].lora, profile.rl_lora, profile.model)
    tempered = profile.evaluation.tempered
    measured = (base.weights, judging.digest(listed), ExactLog.KS, how, tempered)
    start = base.build / f"exact-{digest(measured)}.json"
    return ExactLog(run.build / "exact.jsonl", tokenizer, listed, every, start, tempered)


class Bar(TrainerCallback):
    """A progress bar where a user looks on: on a terminal, in place of every logged row."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        steps = {"total": state.max_steps, "initial": state.global_step, "unit": "step"}
        # Not sys.stderr: Unsloth puts a filter in its place, which shows no bar.
        self.bar = tqdm(**steps, file=sys.__stderr__, disable=None)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.bar.update()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.bar.close()


# -- checkpoints -----------------------------------------------------------------------------------


def train_on(trainer: Any, checkpoints: Path) -> None:
    """Train from the last whole checkpoint, if there is one; from that of the last step, take its
    weights and train nothing (``trainer`` has a :class:`StepLog`).

    Checkpoints are read by torch's unpickler for tensors and plain values alone.
    """
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Bar())
    found = last_checkpoint(checkpoints)
    if found and hasattr(trainer, "_total_train_tokens"):  # SFT's, which would count from zero
        rows = read_json(Path(found) / TRAINER_STATE_NAME)["log_history"]
        counted = max((row.get("num_tokens", 0) for row in rows), default=0)
        trainer._total_train_tokens = int(counted)
    try:
        trainer.train(resume_from_checkpoint=found)
    except _Finished:
        pass
    except UnpicklingError as error:
        raise SageError(
            f"a file of {found} holds what no run writes there, and was not read: delete that "
            "checkpoint and run with --resume"
        ) from error


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint, or None. A kill can leave one half-written, without its mark; a
    disk can lose the end of a file in it, or of a log."""
    ordered = sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rsplit("-", 1)[1]))
    whole = [path for path in ordered if (path / WHOLE).is_file() and _is_whole(path / WHOLE)]
    return str(whole[-1]) if whole else None


def _sizes(folder: Path, pattern: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob(pattern) if path.is_file()}


def _log_sizes(checkpoint: Path) -> dict[str, int]:
    """Of the logs of a checkpoint's run, which lie beside the folder of all checkpoints."""
    return _sizes(checkpoint.parent.parent, "*.jsonl")


def _is_whole(mark: Path) -> bool:
    if not mark.stat().st_size:  # written before marks held sizes
        return True
    try:
        said = read_json(mark)
    except SageError:
        return False
    files, logs = _sizes(mark.parent, "*"), _log_sizes(mark.parent)
    same = all(files.get(name) == size for name, size in said["files"].items())
    return same and all(logs.get(name, 0) >= size for name, size in said["logs"].items())
