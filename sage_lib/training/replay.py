"""A second pass through a finished RL run that measures each update (exploration report, 3.2): the
change of each token's probability and entropy, and the size of its gradient.

The measurement draws nothing and changes no weight; the record says whether the weights are the
same.
"""

import shutil
from typing import Any

# First: Unsloth, where it is needed, comes before what it patches.
from sage_lib.training import rl

# isort: split

import numpy as np
import pandas as pd
import torch
from transformers import TrainerCallback, TrainerState

from sage_lib.algorithm import token_probabilities as probs
from sage_lib.algorithm.backend import Batch, counted_tokens, whole_rows
from sage_lib.algorithm.trainer import SageTrainer
from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.runs import Run
from sage_lib.experiment.settings import Profile
from sage_lib.files import append_line, read_lines, write_text
from sage_lib.policy import token_groups
from sage_lib.policy.loading import weights_hash
from sage_lib.policy.token_signals import gradient_norm
from sage_lib.training.callbacks import StepLog, truncate_log

#: Updates whose means are a row.
BLOCK = 10
KEYS = ("step", "by", "group", "sign")


def replay_run(profile: Profile, run: Run) -> dict:
    """Replay the run whose policy ``run`` reads, and return the run record.

    Writes moves.csv (docs/data_training.md): means over :data:`BLOCK` updates.
    """
    policy = runs.finished(profile, run.policy)
    assert policy.seed is not None
    training = profile.training(policy.method, policy.seed)
    record = run.begin(policy.seed, {"block": BLOCK})
    checkpoints, log = run.build / "checkpoints", run.build / "groups.jsonl"
    trainer, tokenizer, _ = rl.make_trainer(training, profile, checkpoints, Watched)
    assert isinstance(trainer, Watched)
    trainer.add_callback(StepLog(run.live_steps))
    trainer.add_callback(_Watch(trainer, log))
    collapsed = rl.run_to_end(trainer, checkpoints)
    table = in_blocks(read_lines(log))
    write_text(run.measured / "moves.csv", table.to_csv(index=False, float_format="%.6g"))
    rl.save_policy(profile, run, trainer.model, tokenizer)
    reproduced = weights_hash(run.model) == policy.weights
    written = run.finish(record, reproduced=reproduced, collapsed=collapsed)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return written


def in_blocks(watched: list[dict[str, Any]]) -> pd.DataFrame:
    """Return rows {"step", "groups"} as a table of means over blocks of updates, by tokens."""
    frames, last = [], watched[-1]["step"]
    for row in watched:
        block = min(-(-row["step"] // BLOCK) * BLOCK, last)
        frames.append(pd.DataFrame(row["groups"]).assign(step=block))
    return token_groups.merged(pd.concat(frames, ignore_index=True), KEYS)


class Watched(SageTrainer):
    """SageTrainer that reads each batch of an update again, before and after it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._batches: list[tuple[Batch, dict[str, np.ndarray]]] = []

    def _compute_loss(self, model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        if self.model.training:
            self._batches.append((inputs, self._signals(inputs)))
        return loss

    def moves(self) -> pd.DataFrame:
        """Return the changes of the last update to its tokens, as ``token_groups.grouped``."""
        if not self._batches:
            raise SageError(runs.NOT_WATCHED)
        frames, first = [], 0
        for batch, before in self._batches:
            after = self._signals(batch)
            mask = counted_tokens(batch).bool().cpu().numpy()
            ids = batch["completion_ids"].cpu().numpy()
            rows, columns = np.nonzero(mask)
            signs = _signs(batch["advantages"])
            of_tokens = {
                "completion": first + rows,
                "sign": signs[rows],
                "kind": token_groups.kinds(self._tokenizer, ids[mask].tolist()),
                "place": columns / mask.sum(1)[rows],
                "before": before["entropy"][mask],
                "after": after["entropy"][mask],
                "p_before": before["p"][mask],
                "p_after": after["p"][mask],
                "gradient": before["gradient"][mask],
            }
            frames.append(pd.DataFrame(of_tokens))
            first += len(mask)
        self._batches = []
        return token_groups.grouped(pd.concat(frames, ignore_index=True))

    @torch.no_grad()
    def _signals(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return entropy (nats), probability of the drawn token and G_t, shape (batch, time)."""
        drawn, training = batch["completion_ids"], self.model.training
        model = self.model.eval()
        logits, hidden = probs.completion_logits_and_hidden(model, *whole_rows(batch))
        self.model.train(training)
        log_pi = probs.log_probabilities(logits, self.temperature)
        advantages = batch["advantages"].float().reshape(len(drawn), -1).expand(drawn.shape)
        signals = advantages.flatten(), log_pi.flatten(0, 1), drawn.flatten(), hidden.flatten(0, 1)
        gradients = gradient_norm(*(signal.cpu().numpy() for signal in signals))
        return {
            "entropy": probs.entropies_of(log_pi).cpu().numpy(),
            "p": probs.drawn_log_probabilities(log_pi, drawn).exp().cpu().numpy(),
            "gradient": gradients.reshape(tuple(drawn.shape)),
        }


def _signs(advantages: torch.Tensor) -> np.ndarray:
    """Return the sign of each completion's advantage in words; rounding does not count as one."""
    values = advantages.float().cpu().numpy().reshape(len(advantages), -1)[:, 0]
    least = 1e-3 * np.abs(values).max()
    return np.where(values > least, "positive", np.where(values < -least, "negative", "even"))


class _Watch(TrainerCallback):
    """Appends the groups of each update to a JSONL file, as StepLog does."""

    def __init__(self, trainer: Watched, log: Any):
        self.trainer, self.log = trainer, log

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        truncate_log(self.log, state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        groups = self.trainer.moves()
        rows = groups.astype(object).where(groups.notna(), None).to_dict("records")
        append_line(self.log, {"step": state.global_step, "groups": rows})
