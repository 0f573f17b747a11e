"""Drawing and scoring of completions by TRL, with metrics, and the steps for whole groups."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

# First: Unsloth, where it is needed, comes before what it patches.
from sage_lib.algorithm.backend import Batch, GRPOTrainer, counted_tokens, whole_rows

# isort: split

import torch

from sage_lib.algorithm import dynamic_sampling
from sage_lib.algorithm import token_probabilities as probs
from sage_lib.algorithm.advantages import Completions, CompletionShaper
from sage_lib.algorithm.forward_kl import REF_HIDDEN
from sage_lib.algorithm.guided_trainer import is_sharded
from sage_lib.algorithm.merging import may_merge, merged_adapters
from sage_lib.algorithm.shared_prompts import prompts_read_once

#: Added to the batch for a guide that reads it: weighted sum of each completion's rewards.
REWARDS = "summed_rewards"
#: The same: log pi_ref of the likeliest right completion of each one's group.
BEST_LOGPS = "best_ref_logps"
#: The k of pass@k that training logs, up to the size of a group.
TRAINING_KS = (1, 2, 4, 8)
#: Float32 logits at a time, where the policy is scored outside the loss: 1 GB.
LOGITS = 2**28


class Rollouts(GRPOTrainer):  # type: ignore[misc]
    """Trainer that makes batches for the loss from prompts, and logs metrics of them."""

    # -- metrics -----------------------------------------------------------------------------------

    def _record(self, name: str, value: float) -> None:
        """Log a value, unless it is NaN, the mean of no tokens."""
        if not math.isnan(value):
            self._metrics["train"][name].append(value)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        phase = "train" if self.model.training else "eval"
        self._metrics[phase][f"time/{name}"].append(time.perf_counter() - started)

    def _mean(self, per_token: torch.Tensor, mask: torch.Tensor) -> float:
        """Return the mean over the masked tokens of all processes; NaN where there are none."""
        local = torch.stack([(per_token * mask).sum(), mask.sum().to(per_token)])
        total, count = self.accelerator.reduce(local, reduction="sum")
        mean: float = (total / count).item()
        return mean

    def _reduced(self, per_token: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the mean of a quantity of tokens, with its gradient, as TRL's loss takes its own.
        The loss_type is one of ``kl_forms.REDUCTIONS``."""
        accumulation: int = self.current_gradient_accumulation_steps
        mask = counted_tokens(batch)
        masked = per_token * mask
        if self.loss_type == "grpo":
            mean = (masked.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        elif self.loss_type == "bnpo":
            mean = masked.sum() / mask.sum().clamp(min=1.0)
        elif self.loss_type == "dr_grpo":
            mean = masked.sum() / (len(masked) * self.max_completion_length)
        else:  # "dapo" divides by the tokens of the whole generation batch of all processes
            tokens = batch["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            share: torch.Tensor = tokens * accumulation / self.args.steps_per_generation
            return masked.sum() / share
        return mean / accumulation

    def _log_advantages(
        self, advantages: torch.Tensor, touched: torch.Tensor, mask: torch.Tensor
    ) -> None:
        self._record("advantage/touched", self._mean(touched.to(advantages), mask))
        self._record("advantage/size", self._mean(advantages.abs(), mask))

    def _log_entropies(self, batch: Batch, entropies: torch.Tensor) -> None:
        """Log mean entropies (nats) of completions with positive and with negative advantages."""
        mask, advantages = counted_tokens(batch), batch["advantages"]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        least = 1e-3 * advantages.abs().max()  # rounding leaves a sign where rewards are equal
        self._record("entropy/positive", self._mean(entropies, mask * (advantages > least)))
        self._record("entropy/negative", self._mean(entropies, mask * (advantages < -least)))

    def _log_guide(self, q: torch.Tensor, mask: torch.Tensor) -> None:
        self._record("guide/mean", self._mean(q, mask))
        self._record("guide/acting", self._mean((q != 1).to(q), mask))
        low, high = getattr(self.guide, "low", None), getattr(self.guide, "high", None)
        if low is not None and high is not None:
            self._record("guide/clamped", self._mean(((q <= low) | (q >= high)).to(q), mask))
        lowest = q.masked_fill(mask == 0, torch.inf).min()
        highest = q.masked_fill(mask == 0, -torch.inf).max()
        # One gather for both: the largest is the smallest of the negatives.
        ends = self.accelerator.gather(torch.stack([lowest, -highest]).unsqueeze(0)).amin(0)
        if ends.isfinite().all():  # not where no token counts on any process
            self._record("guide/min", ends[0].item())
            self._record("guide/max", -ends[1].item())

    # -- drawing and scoring -----------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> Any:
        with self._timed("generation"):
            return super()._generate(prompts)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self._sharing(self.model):
            if not may_merge(self):
                return super()._generate_single_turn(*args, **kwargs)
            # The results are lists: no inference tensor, which has no gradient, reaches the loss.
            with torch.inference_mode(), merged_adapters(self.model, rounded=True):
                return super()._generate_single_turn(*args, **kwargs)

    def _sharing(self, model: Any, prompt: int | None = None) -> AbstractContextManager[None]:
        """Return a context in which prompts are read once, if ``share_prompts`` and it can be."""
        unsupported = self.shaped_at_scoring or is_sharded(self) or self.states is not None
        if not self.share_prompts or unsupported:
            return nullcontext()
        return prompts_read_once(self._plain(model), prompt)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed("reward"):
            rewards = super()._calculate_rewards(*args, **kwargs)
        self._reward_terms = rewards * self.reward_weights.to(rewards.device)
        self._log_pass_at_k(rewards)
        return rewards

    def _log_pass_at_k(self, rewards: torch.Tensor) -> None:
        """Log the unbiased pass@k of groups under each reward that is 0 or 1. ``rewards``, of all
        processes, have shape (rows, functions); groups stand together."""
        training = self.model.training
        size = self.num_generations if training else self.num_generations_eval
        if len(rewards) % size:
            return
        ks = TRAINING_KS if training else range(1, size + 1)
        metrics = self._metrics["train" if training else "eval"]
        for name, values in zip(self.reward_func_names, rewards.T, strict=True):
            if not ((values == 0) | (values == 1)).all():  # a score, or no reward of some rows
                continue
            wrong = (size - values.view(-1, size).sum(1).long()).tolist()
            for k in (k for k in ks if k <= size):
                # A value for each group (Chen et al. 2021): the mean of the log is one over groups.
                of_groups = [1 - math.comb(w, k) / math.comb(size, k) for w in wrong]
                metrics[f"rewards/{name}/pass@{k}"] += of_groups

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        batch = self._scored(inputs)
        if self.resampling and self.model.training:
            batch = dynamic_sampling.fill_batch(self, batch, self.resampling)
        if self._is_packed(batch):
            self._pack(batch)
        return batch

    def _scored(self, inputs: list[dict[str, Any]]) -> Batch:
        """Generate and score by TRL; then change whole groups, and log the time of scoring."""
        started, training = time.perf_counter(), self.model.training
        batch: Batch = super()._generate_and_score_completions(inputs)
        if self.states is not None:
            if training:  # the reference is scored last
                states = self.states.before(batch["completion_ids"].shape[1])
                batch[REF_HIDDEN] = states.detach()
            self.states.last = None
        if self._is_packed(batch):
            self._unpack(batch)
        if training:
            # Each reward times its weight, of this process, shape (rows, functions).
            of_processes = self._reward_terms.split(len(batch["completion_ids"]))
            terms = of_processes[self.accelerator.process_index]
            if self.resampling:
                batch[dynamic_sampling.REWARD_TERMS] = terms
            if self.guide is not None:  # it, or its inner guide, may read them
                batch[REWARDS] = rewards = _summed(terms)
                if "ref_per_token_logps" in batch and len(rewards) % self.num_generations == 0:
                    logps = (batch["ref_per_token_logps"] * counted_tokens(batch)).sum(1)
                    batch[BEST_LOGPS] = best_logps(logps, rewards, self.num_generations)
            if isinstance(self.advantage, CompletionShaper):
                self._shape_completions(self.advantage, batch, _summed(terms))
            if self.shaped_at_scoring and "ref_per_token_logps" in batch:
                self._shape_scored(batch)
        metrics = self._metrics["train" if training else "eval"]
        other_seconds = metrics["time/generation"][-1] + metrics["time/reward"][-1]
        metrics["time/scoring"].append(time.perf_counter() - started - other_seconds)
        return batch

    @torch.no_grad()
    def _shape_completions(
        self, shaper: CompletionShaper, batch: Batch, rewards: torch.Tensor
    ) -> None:
        """Put the shaper's advantages in the place of TRL's, while the groups are whole."""
        mask, log_perplexity = counted_tokens(batch), None
        if shaper.reads_perplexity:
            logps = batch.get("old_per_token_logps")
            logps = self._policy_signals(batch)[0] if logps is None else logps
            log_perplexity = -(logps * mask).sum(1) / mask.sum(1)
        completions = Completions(
            advantages=batch["advantages"],
            rewards=rewards,
            generations=self.num_generations,
            log_perplexity=log_perplexity,
        )
        shaped = shaper.shape(completions)
        touched = (shaped != batch["advantages"]).unsqueeze(1).expand(mask.shape)
        batch["advantages"] = shaped
        self._log_advantages(shaped.unsqueeze(1), touched, mask)

    def _policy_signals(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log pi of the sampled tokens and the entropies (nats) before them, (batch, time).

        For Unsloth's trainer the padding is moved to the right: its models read none on the left.
        """
        ids, start, attention = whole_rows(batch)
        packing = self._packing(batch) if self.shaped_at_scoring else None
        if packing is not None:
            ids, attention, start = packing.moved(ids), packing.moved(attention), packing.start
        logps, entropies = self._signals_of(self.model, ids, start, attention)
        if packing is None:
            return logps, entropies
        return packing.unpack(logps), packing.unpack(entropies)

    def _signals_of(
        self, model: torch.nn.Module, ids: torch.Tensor, start: int, attention: torch.Tensor
    ) -> probs.Signals:
        """Return the signals of whole rows under a model. It reads at most a training batch of rows
        at a time, and :data:`LOGITS` logits."""
        vocabulary_size = self._plain(model).get_output_embeddings().weight.shape[0]
        fitting = max(1, LOGITS // (ids.shape[1] * vocabulary_size))
        size = min(self.args.per_device_train_batch_size, fitting)
        parts = [
            probs.completion_signals(model, rows, start, mask, self.temperature)
            for rows, mask in zip(ids.split(size), attention.split(size), strict=True)
        ]
        return probs.Signals(*(torch.cat(signal) for signal in zip(*parts, strict=True)))


def best_logps(logps: torch.Tensor, rewards: torch.Tensor, size: int) -> torch.Tensor:
    """Return the largest value of ``logps`` among the rewarded rows of each group of ``size``
    neighbours, -inf where no row is; all of shape (rows,)."""
    right = logps.masked_fill(~(rewards > 0), -torch.inf).view(-1, size)
    return right.amax(1).repeat_interleave(size)


def _summed(terms: torch.Tensor) -> torch.Tensor:
    """Return the rewards of completions, shape (rows,), NaN where no function gave one."""
    return terms.nansum(1).masked_fill(terms.isnan().all(1), torch.nan)
