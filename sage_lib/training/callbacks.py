"""Parts of all trainings: checks of sections, logs of steps that outlive a kill, exact evaluations
on the way, and resuming from checkpoints."""

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
from sage_lib.files import AGAIN, append_line, read_json, read_lines, rewrite_lines, write_json
from sage_lib.policy import tiny_qwen
from sage_lib.policy.exact import exact_summary
from sage_lib.policy.scoring import valid_probabilities
from sage_lib.tasks import judging
from sage_lib.tasks.problem import Problem

#: Steps after which a run whose groups all have equal rewards has collapsed.
FLAT_STEPS = 50
#: File that marks a checkpoint as whole; written last. It holds the sizes of the other files, and
#: of the logs of its run.
WHOLE = "whole"


# -- sections --------------------------------------------------------------------------------------


def check_sections(profile: Profile) -> None:
    """Raise SageError for a key or value that SFTConfig, GRPOConfig or PEFT does not accept."""
    from peft import LoraConfig

    from sage_lib.algorithm.backend import GRPOConfig, SFTConfig

    by_name = {"SFTConfig": SFTConfig, "GRPOConfig": GRPOConfig, "LoraConfig": LoraConfig}
    for name, path, section in profile.configured():
        cls, where = by_name[name], f"{profile.name}: {path}"
        check_section(cls, section, where)
        # Known keys may still contradict each other. On a machine without a GPU, the classes would
        # refuse a profile for a GPU because of the machine.
        if section and cls is not LoraConfig and not profile.compute.requires_gpu:
            arguments(cls, section, where, output_dir=profile.name)
    tiny_qwen.check_architecture(profile.model)


def arguments(cls: type, section: dict[str, Any], where: str, **fixed: Any) -> Any:
    """Make an SFTConfig or a GRPOConfig from a profile's section and ``fixed`` keywords, which the
    section does not decide. SageError, with the place of the section, for what the class refuses.
    """
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
    """Training starts from the checkpoint of its last step."""


def truncate_log(log: Path, step: int) -> list[dict[str, Any]]:
    """Delete the rows of a log after a checkpoint's step, and return the others."""
    rows = [row for row in read_lines(log) if row["step"] <= step]
    rewrite_lines(log, rows)
    return rows


class StepLog(TrainerCallback):
    """Appends each logged step to a JSONL file. A resume deletes the steps after its checkpoint.

    It raises :class:`Collapse` where rewards no longer differ, and before a gradient that is not
    finite destroys the weights.

    Args:
        path: of the file.
        before: steps of earlier trainers.
        constants: further entries of all rows.
    """

    def __init__(self, path: Path, before: int = 0, constants: dict[str, float] | None = None):
        self.path, self.before, self.constants = path, before, constants or {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.flat, self.counted, self.clock = 0, self.before, time.perf_counter()
        for row in truncate_log(self.path, self.before + state.global_step):
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
        row = {"step": step, **self.constants, **numbers, "seconds": round(now - self.clock, 4)}
        self.clock = now
        append_line(self.path, row)
        self._count_flat(row)
        if self.flat >= FLAT_STEPS:
            reason = f"every group of the last {FLAT_STEPS} steps earned one and the same reward"
            raise Collapse(step, reason)

    def _count_flat(self, row: dict[str, Any]) -> None:
        steps, self.counted = row["step"] - self.counted, row["step"]
        self.flat = self.flat + steps if row.get("frac_reward_zero_std") == 1 else 0

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        if args.fp16:  # whose scaler meets such gradients now and then, and leaves the step out
            return
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise Collapse(self.before + state.global_step + 1, "the gradient is not finite")


class ExactLog(TrainerCallback):
    """Appends exact pass@k of the policy to a JSONL file: a row for each data set and step.

    It reads the probabilities of all valid completions, and moves no random stream.

    Args:
        path: of the file.
        tokenizer: of the policy.
        problems: whose valid completions are listed.
        interval: steps between two evaluations.
        start_path: file of the rows before the first step, which runs from the same base share. The
            first run writes it.
        tempered: further temperatures than 1.
    """

    #: k of pass@k in the rows.
    KS = (1, 8, 64, 256, 1024)

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        problems: Sequence[Problem],
        interval: int,
        start_path: Path,
        tempered: Sequence[float] = (),
    ):
        self.path, self.tokenizer, self.problems = path, tokenizer, problems
        self.interval, self.start_path, self.tempered = interval, start_path, tempered

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        begins = state.global_step == 0  # also after a kill before the first checkpoint
        truncate_log(self.path, -1 if begins else state.global_step)
        if begins:
            self.begin(kwargs["model"])

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.interval == 0:
            self.append(kwargs["model"], state.global_step)

    def begin(self, model: PreTrainedModel) -> None:
        """Append the rows of the policy before its first step."""
        try:
            rows = read_json(self.start_path)
        except SageError:  # not measured yet, or damaged
            rows = self._measure(model)
            with contextlib.suppress(SageError):  # in another profile's folder, read-only
                write_json(self.start_path, rows)
        self._append_rows(rows, 0)

    def append(self, model: PreTrainedModel, step: int) -> None:
        """Append the rows of the policy after a step."""
        self._append_rows(self._measure(model), step)

    def _measure(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        training = model.training
        table = valid_probabilities(model.eval(), self.tokenizer, self.problems, self.tempered)
        model.train(training)
        return exact_summary(table, self.KS)

    def _append_rows(self, rows: Sequence[dict[str, Any]], step: int) -> None:
        for row in rows:
            append_line(self.path, {"step": step, **row})


def exact_log(profile: Profile, run: Run, tokenizer: PreTrainedTokenizerBase) -> ExactLog | None:
    """Make the log of exact evaluations of a run. None where ``evaluation.every`` is 0, or the
    valid completions of no problem can be listed."""
    interval = profile.evaluation.every
    listed = problems.listed_problems(profile, ood=False) if interval else []
    if not listed:
        return None
    base = run.policy or sft_run(profile)
    # Whether the base is loaded for an adapter or to train all weights decides the last digits.
    loaded_for = (profile.methods[run.method].lora, profile.rl_lora, profile.model)
    tempered = profile.evaluation.tempered
    identity = (base.weights, judging.digest(listed), ExactLog.KS, loaded_for, tempered)
    start_path = base.build / f"exact-{digest(identity)}.json"
    path = run.build / "exact.jsonl"
    return ExactLog(path, tokenizer, listed, interval, start_path, tempered)


class Bar(TrainerCallback):
    """A progress bar on a terminal, in the place of logged rows."""

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
    """Train from the last whole checkpoint, or from the start. At the last step nothing is trained.

    ``trainer`` has a :class:`StepLog`. Checkpoints are read by torch's unpickler for tensors and
    plain values alone.
    """
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Bar())
    checkpoint = last_checkpoint(checkpoints)
    if checkpoint and hasattr(trainer, "_total_train_tokens"):  # SFT's, which would count from zero
        rows = read_json(Path(checkpoint) / TRAINER_STATE_NAME)["log_history"]
        counted = max((row.get("num_tokens", 0) for row in rows), default=0)
        trainer._total_train_tokens = int(counted)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except _Finished:
        pass
    except UnpicklingError as error:
        raise SageError(
            f"a file of {checkpoint} holds what no run writes there, and was not read: delete that "
            f"checkpoint, and {AGAIN}"
        ) from error


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest whole checkpoint, or None. A kill can leave a half-written one without its
    mark, and a disk can lose the end of a file or of a log."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rsplit("-", 1)[1]))
    return next((str(path) for path in reversed(checkpoints) if _is_whole(path)), None)


def _sizes(folder: Path, pattern: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob(pattern) if path.is_file()}


def _log_sizes(checkpoint: Path) -> dict[str, int]:
    """Return the sizes of the logs of a checkpoint's run, next to the folder of checkpoints."""
    return _sizes(checkpoint.parent.parent, "*.jsonl")


def _is_whole(checkpoint: Path) -> bool:
    try:
        expected = read_json(checkpoint / WHOLE)
    except SageError:
        return False
    files, logs = _sizes(checkpoint, "*"), _log_sizes(checkpoint)
    has_files = all(files.get(name) == size for name, size in expected["files"].items())
    return has_files and all(logs.get(name, 0) >= size for name, size in expected["logs"].items())
