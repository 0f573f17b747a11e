"""SageTrainer: GRPOTrainer with a guided anchor, eq. 3 and 6.

TRL's loss reads the reference in one place only, the KL term, and after its own forward pass has given log-probabilities
and token entropies. So nothing of the loss is copied: the batch is handed on as a shallow copy, and as soon as that pass
returns, the copy's reference log-probabilities become log pi_ref + log q. No forward pass is added.
"""

import os
import time
from contextlib import contextmanager

from sage_lib.backend import GRPOTrainer  # first: Unsloth patches what is imported after it

import torch
from peft import PeftModel

from sage_lib.errors import SageError
from sage_lib.guides import Guide, GuideInputs

class SageTrainer(GRPOTrainer):
    """GRPOTrainer whose KL is taken to q·pi_ref. Every argument of GRPOTrainer keeps its meaning.

    Args:
        guide: maps a GuideInputs, whose tensors have shape (batch, time), to q of that shape; None is plain GRPO.
            Entropies are in nats, at the sampling temperature. q is a constant to the gradient, is computed once for
            every batch of completions, and stays fixed while that batch is optimised (Section 4), also over
            ``num_iterations`` > 1.

    It logs, beside TRL's metrics: ``kl_ref``, the mean k3 to pi_ref itself (eq. 38, q = 1); ``guide/mean``, ``min``,
    ``max`` of q and ``guide/acting``, the share of tokens where q is not 1; ``time/generation``, ``time/reward``,
    ``time/scoring`` (reference and everything else before the loss) and ``time/loss`` (forward pass and loss), seconds.

    Raises:
        SageError: at construction where the guide could not reach the loss; at the first step when it did not, or when
            the policy does not start at its reference (``kl_ref`` above 1e-3).
    """

    def __init__(self, *args, guide: Guide | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.guide = guide
        self._shaping: dict | None = None
        self._log_q: dict[int, torch.Tensor] = {}
        self._guide_checked = False
        # One stream of noise per process, apart from the global one, so that a guide never shifts the sampling.
        self.guide_generator = torch.Generator(device="cpu").manual_seed(self.args.seed * 1009 + self.accelerator.process_index)
        if guide is not None and self.beta == 0:
            raise SageError("a guide needs beta > 0: without a KL term there is no anchor to shape")
        if guide is not None and getattr(self.args, "use_liger_kernel", False):
            raise SageError("a guide cannot reach the loss inside Liger's kernel: set use_liger_kernel to False")

    def _compute_loss(self, model, inputs):
        if not self.model.training or "ref_per_token_logps" not in inputs:
            with self._timed("loss"):
                return super()._compute_loss(model, inputs)
        self._shaping = dict(inputs)  # shallow: TRL keeps the batch for further iterations, and it must stay as it was
        try:
            with self._timed("loss"):
                loss = super()._compute_loss(model, self._shaping)
        finally:
            self._shaping = None
        if self.guide is not None and not self._guide_checked:
            self._require_shaped_kl()
        return loss

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, entropies, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        batch = self._shaping
        if batch is not None and entropies is not None:
            self._shape(batch, logps.detach(), entropies.detach())
        return logps, entropies, *rest

    def _shape(self, batch: dict, logps: torch.Tensor, entropies: torch.Tensor) -> None:
        """Put log(q·pi_ref) where the loss will read log pi_ref. ``logps`` and ``entropies``: shape (batch, time)."""
        mask, reference = _mask(batch), batch["ref_per_token_logps"]
        kl_ref = _mean_k3(reference, logps, mask)
        self._metrics["train"]["kl_ref"].append(kl_ref)
        if self._step == 0 and kl_ref > 1e-3:
            raise SageError(f"the policy does not start at its reference (KL {kl_ref:.3g} at step 0): merge the SFT adapter and save the model before RL")
        if self.guide is not None:
            batch["ref_per_token_logps"] = reference + self._log_guide(logps, entropies, mask)
            self._expected_kl = _mean_k3(batch["ref_per_token_logps"], logps, mask)

    def _log_guide(self, logps: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """log q of this batch, shape (batch, time); from the first pass over it, whatever the iteration."""
        slot = self._step % self.args.steps_per_generation
        first = self._step % (self.args.steps_per_generation * self.num_iterations) < self.args.steps_per_generation
        if first or slot not in self._log_q:
            progress = self.state.global_step / max(self.state.max_steps, 1)
            q = self.guide(GuideInputs(entropies=entropies, logps=logps, mask=mask, progress=progress, generator=self.guide_generator))
            if q.shape != logps.shape or not torch.isfinite(q).all() or (q <= 0).any():
                raise SageError(f"the guide must return positive finite values of shape {tuple(logps.shape)}, one for each token")
            self._log_q[slot] = q.detach().to(logps.dtype).log()
            self._log_guide_metrics(q.detach(), mask)
        return self._log_q[slot]

    def _log_guide_metrics(self, q: torch.Tensor, mask: torch.Tensor) -> None:
        on = q[mask.bool()]
        for name, value in (("mean", on.mean()), ("min", on.min()), ("max", on.max()), ("acting", (on != 1).float().mean())):
            self._metrics["train"][f"guide/{name}"].append(value.item())

    def _require_shaped_kl(self) -> None:
        """The canary: the KL that TRL logged at the first step must be the one to the shaped anchor."""
        self._guide_checked = True
        logged, expected = self._metrics["train"]["kl"][-1], self._expected_kl
        # One process sees its own shard only, and the logged value is the mean over all of them.
        if self.accelerator.num_processes == 1 and abs(logged - expected) > 1e-5 + 1e-3 * abs(expected):
            raise SageError(f"the guide did not reach the loss (KL {logged:.3g} instead of {expected:.3g}): "
                            "this version of TRL reads the reference elsewhere; use the pinned one")

    @contextmanager
    def _timed(self, part: str):
        started = time.perf_counter()
        yield
        self._metrics["train" if self.model.training else "eval"][f"time/{part}"].append(time.perf_counter() - started)

    def _generate(self, prompts):
        with self._timed("generation"):
            return super()._generate(prompts)

    def _calculate_rewards(self, *args, **kwargs):
        with self._timed("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        started = time.perf_counter()
        result = super()._generate_and_score_completions(inputs)
        metrics = self._metrics["train" if self.model.training else "eval"]
        rest = time.perf_counter() - started - metrics["time/generation"][-1] - metrics["time/reward"][-1]
        metrics["time/scoring"].append(rest)
        return result

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        torch.save(self.guide_generator.get_state(), os.path.join(folder, f"guide_rng_{self.accelerator.process_index}.pt"))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Also load the trained adapter. TRL adds a second one, "ref"; transformers 5.17 then looks for adapters in the
        checkpoint's subfolders only, where "default" is not, and would resume from an untrained one without a word."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        model = self.model if model is None else model
        root = os.path.join(resume_from_checkpoint, "adapter_model.safetensors")
        if isinstance(model, PeftModel) and len(model.peft_config) > 1 and os.path.isfile(root):
            model.load_adapter(resume_from_checkpoint, model.active_adapters[0], is_trainable=True)

    def _load_rng_state(self, checkpoint):
        super()._load_rng_state(checkpoint)
        path = os.path.join(checkpoint or "", f"guide_rng_{self.accelerator.process_index}.pt")
        if checkpoint and os.path.isfile(path):
            self.guide_generator.set_state(torch.load(path, weights_only=True))


def _mask(batch: dict) -> torch.Tensor:
    """The tokens that TRL's loss counts, shape (batch, time)."""
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]


def _mean_k3(anchor: torch.Tensor, logps: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean of k3 over the masked tokens (eq. 38). On-policy, the bias-corrected k3 has the same value."""
    difference = anchor - logps
    k3 = difference.exp() - difference - 1
    return ((k3 * mask).sum() / mask.sum().clamp(min=1)).item()
