"""SageTrainer: GRPOTrainer with a guided anchor, eq. 3 and 6.

TRL's loss reads the reference in one place only, the KL term, and after its own forward pass has
given log-probabilities and token entropies. So nothing of the loss is copied: the batch is handed
on as a shallow copy, and as soon as that pass returns, the copy's reference log-probabilities
become log pi_ref + log q. No forward pass is added.

What this needs of TRL's and transformers' private members is checked in tests/test_trl_members.py.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

# First: Unsloth, where it is needed, comes before what it patches.
from sage_lib.algorithm.backend import (
    REPLACED,
    Batch,
    add_fused_lm_head,
    counted_tokens,
    disable_dropout_in_model,
)

# isort: split

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from sage_lib.algorithm import anchors, checks
from sage_lib.algorithm.advantages import (
    AdvantageShaper,
    BatchTokens,
    TokenShaper,
    build_advantage,
)
from sage_lib.algorithm.anchors import K3, Anchor, K3Corrected, Shaped, Tokens, build_anchor
from sage_lib.algorithm.checkpoints import Checkpoints, ReferenceReset
from sage_lib.algorithm.forward_kl import HiddenStates, require_same
from sage_lib.algorithm.guides import Guide, GuideInputs, check_guide, check_q
from sage_lib.algorithm.merging import merged_to_score
from sage_lib.algorithm.padding import by_length
from sage_lib.algorithm.rollouts import REWARDS
from sage_lib.algorithm.unsloth_seam import ShapedAtScoring
from sage_lib.errors import SageError


@dataclass
class _Pass:
    """A batch on its way through TRL's loss."""

    batch: Batch  # the shallow copy that TRL reads
    shaped: Shaped | None = None  # what the anchor made of it after the forward pass
    beside: torch.Tensor | None = None  # what the advantage adds to the loss, per token


class SageTrainer(ShapedAtScoring, Checkpoints):
    """GRPOTrainer whose KL is taken to q·pi_ref. Every argument of GRPOTrainer keeps its meaning;
    docs/own_code.md says more of these:

    Args:
        guide: maps GuideInputs to q of shape (batch, time), a constant to the gradient (Section 4).
        anchor: the KL term with a guide and without, a name of ``anchors.ANCHORS`` or an Anchor;
            "k3" is the paper's (eq. 38). None: the one of ``args.use_bias_correction_kl``.
        advantage: a choice of ``advantages.ADVANTAGES`` or an AdvantageShaper; None: TRL's own.
        dynamic_sampling: how many fresh batches of prompts may replace groups of equal rewards.
        reference: the policy of the anchor, a model or its folder, where training starts from
            another one.
        other_reference: the policy is not meant to start at its reference.
        reference_reset: every so many steps an adapter's reference becomes the policy, and the
            optimiser starts anew (ProRL); 0 is never.
        merge_adapter, trim_padding, share_prompts: the same up to rounding, in fewer operations.

    Without a guide, and with q = 1, ``anchor=None`` is stock GRPOTrainer bit for bit. So is "k3"
    where ``args`` set ``use_bias_correction_kl`` to False. TRL's default is True: then a warning
    says that k3 is trained in its place. The caller's ``args`` stay as they are.

    It logs besides: ``kl_ref``, the mean k3 to pi_ref itself, while ``kl`` is the divergence that
    the loss has; ``entropy/positive`` and ``negative`` (nats, tokens of completions above and below
    their group's mean); ``guide/mean``, ``min``, ``max``, ``acting`` (share where q is not 1) and
    ``clamped``; ``advantage/touched`` (share) and ``size``; ``sampling/rounds`` and ``flat`` (share
    of groups left without a spread); ``rewards/NAME/pass@k`` of each reward that is 0 or 1,
    unbiased from the group's counts, for k = 1, 2, 4, 8, in evaluation for k = 1 to its group's
    size; seconds as ``time/...``.

    Raises SageError where settings cannot work together; at the first step where the guide did not
    reach the loss, or the policy does not start at its reference; after a resume with another base.
    """

    def __init__(
        self,
        *args: Any,
        guide: Guide | None = None,
        anchor: str | Anchor | None = "k3",
        dynamic_sampling: int = 0,
        other_reference: bool = False,
        reference: PreTrainedModel | str | None = None,
        merge_adapter: bool = False,
        trim_padding: bool = False,
        share_prompts: bool = False,
        advantage: str | Mapping[str, Any] | AdvantageShaper | None = None,
        reference_reset: int = 0,
        **kwargs: Any,
    ) -> None:
        if guide is not None:
            check_guide(guide)
        chosen = None if anchor is None else build_anchor(anchor)
        self.advantage = None if advantage is None else build_advantage(advantage)
        super().__init__(*args, **kwargs)
        self.args: Any = copy.copy(self.args)  # another trainer may be given the caller's
        self.guide = guide
        if chosen is None and guide is not None:
            chosen = (K3Corrected if self.args.use_bias_correction_kl else K3)()
        self.anchor = chosen
        self.other_reference = other_reference or reference is not None
        self.merge_adapter, self.trim_padding = merge_adapter, trim_padding
        self.share_prompts = share_prompts
        self.reference_reset, self.resampling = reference_reset, dynamic_sampling
        # Unsloth's GPU replacement of GRPOTrainer has its loss elsewhere (:mod:`unsloth_seam`).
        self.shaped_at_scoring = REPLACED
        self.reached_loss = False
        checks.require_usable(self)
        if isinstance(reference, str):
            reference = AutoModelForCausalLM.from_pretrained(reference, dtype=self.model.dtype)
        if reference is not None:
            self._anchor_to(reference)
        if self.anchor is not None:
            dropped = self.args.use_bias_correction_kl and not self.anchor.bias_corrected
            if dropped and self.anchor.kl_is_trls and self.beta != 0:
                logging.getLogger(__name__).warning(
                    "use_bias_correction_kl is set to False: the anchor is k3, the paper's KL, "
                    "with a guide and without; anchor=None keeps the KL that args ask for"
                )
            self.args.use_bias_correction_kl = self.anchor.bias_corrected
        self._guide_seen = False
        self._passing: _Pass | None = None
        #: log q and the anchor's credit of each batch, which stay while it is optimised.
        self._fixed: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        # Streams of their own for each process: neither a guide nor fresh prompts shift sampling.
        seed = self.args.seed * 1009 + self.accelerator.process_index
        self.guide_generator = torch.Generator(device="cpu").manual_seed(seed)
        self.prompt_generator = torch.Generator(device="cpu").manual_seed(seed + 2**31)
        self.advantage_generator = torch.Generator(device="cpu").manual_seed(seed + 2**32)
        self._base_hash = self._hash_base()
        if reference_reset:
            self.add_callback(ReferenceReset(reference_reset))
        self.states: HiddenStates | None = None
        if self.anchor is not None and self.anchor.keeps_hidden:
            policy = self._plain(self.model)
            apart = self.ref_model is not None
            self.states = HiddenStates(policy, self._plain(self.ref_model) if apart else policy)

    def _anchor_to(self, reference: PreTrainedModel) -> None:
        """Make ``reference`` TRL's ``ref_model``, as its constructor makes a plain model's."""
        if self.beta == 0 or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise SageError("a reference needs beta > 0, and training without FSDP and ZeRO")
        if self.args.disable_dropout:
            disable_dropout_in_model(reference)
        cast = self.args.cast_lm_head_to_fp32
        add_fused_lm_head(reference, temperature=self.temperature, cast_lm_head_to_fp32=cast)
        self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    # -- the seam ----------------------------------------------------------------------------------

    def _compute_loss(self, model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
        # Shallow: TRL keeps the batch for further iterations, and it must stay as it was.
        passing = _Pass(dict(inputs))
        self._passing = passing if self.model.training else None
        try:
            with self._timed("loss"):
                loss: torch.Tensor = super()._compute_loss(model, passing.batch)
                if passing.shaped is not None and passing.shaped.beside is not None:
                    loss = loss + self.beta * self._reduced(passing.shaped.beside, passing.batch)
        finally:
            self._passing = None
            if self.states is not None:
                self.states.kept = None  # or the next generation would fill it
        if self.anchor is not None and passing.shaped is not None:
            checks.settle(self, self.anchor, passing.shaped, passing.batch, loss)
        if passing.beside is not None:
            loss = loss + self._reduced(passing.beside, passing.batch)
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """TRL's forward pass; in a loss of training the batch is shaped as soon as it returns."""
        if self.states is not None:
            self.states.kept = [] if self.model.training else None
        score = super()._get_per_token_logps_and_entropies
        alone = self.accelerator.num_processes == 1
        if self.trim_padding and alone and (self.states is None or not self.model.training):
            score = partial(by_length, score)
        prompt = args[0].shape[1] - args[2] if self.share_prompts else None
        with merged_to_score(self, model), self._sharing(model, prompt):
            logps, entropies, *rest = score(model, *args, **kwargs)
        passing = self._passing
        if passing is not None and entropies is not None:
            self._log_entropies(passing.batch, entropies.detach())
            if isinstance(self.advantage, TokenShaper):
                self._shape_tokens(self.advantage, passing, logps, entropies.detach())
            if "ref_per_token_logps" in passing.batch:
                self._shape(passing, logps, entropies.detach())
        return logps, entropies, *rest

    def _shape_tokens(
        self, shaper: TokenShaper, passing: _Pass, live_logps: torch.Tensor, entropies: torch.Tensor
    ) -> None:
        """Put the shaper's advantages where the loss, and the anchor, will read TRL's."""
        batch, mask = passing.batch, counted_tokens(passing.batch)
        old_logps = batch.get("old_per_token_logps")
        tokens = BatchTokens(
            advantages=batch["advantages"].unsqueeze(1).expand(mask.shape),
            live_logps=live_logps,
            old_logps=live_logps.detach() if old_logps is None else old_logps,
            entropies=entropies,
            mask=mask,
            progress=self._progress(),
            generator=self.advantage_generator,
        )
        shaped = shaper.shape(tokens)
        batch["advantages"], passing.beside = shaped.advantages, shaped.beside
        self._log_advantages(shaped.advantages, shaped.touched, mask)

    def _shape(self, passing: _Pass, live_logps: torch.Tensor, entropies: torch.Tensor) -> None:
        """Put log(q·pi_ref) where the loss will read log pi_ref.

        Args:
            live_logps: log pi of the sampled tokens with its gradient, shape (batch, time).
            entropies: before them, nats, without one.
        """
        batch, logps = passing.batch, live_logps.detach()
        mask, reference = counted_tokens(batch), batch["ref_per_token_logps"]
        kl_ref = self._mean(anchors.k3(reference, logps), mask)
        self._record("kl_ref", kl_ref)
        checks.require_start(self, batch, kl_ref)
        if self.anchor is None:
            return
        # From the first pass over a batch.
        steps = self.args.steps_per_generation
        slot = self._step % steps
        first = self._step % (steps * self.num_iterations) < steps
        if first or slot not in self._fixed:
            log_q = None if self.guide is None else self._log_q(batch, logps, entropies)
            returns = self.anchor.credits_returns
            credit = anchors.return_credit(logps, reference, log_q, mask) if returns else None
            self._fixed[slot] = log_q, credit
        log_q, credit = self._fixed[slot]
        vocabulary = None
        if self.states is not None:
            vocabulary = self.states.vocabulary(batch, self.temperature)
            if not self.reached_loss:
                require_same(vocabulary, batch, logps, self._is_half())
        tokens = Tokens(
            live_logps=live_logps,
            logps=logps,
            reference=reference,
            log_q=log_q,
            credit=credit,
            advantages=batch["advantages"],
            beta=self.beta,
            vocabulary=vocabulary,
        )
        passing.shaped = shaped = self.anchor.shape(tokens)
        batch["ref_per_token_logps"] = shaped.reference
        if shaped.advantages is not None:
            batch["advantages"] = shaped.advantages

    def _log_q(self, batch: Batch, logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        """Ask the guide, check and log what it says: log q, shape (batch, time)."""
        assert self.guide is not None
        mask, ids = counted_tokens(batch), batch["completion_ids"]
        seen = GuideInputs(
            *(entropies, logps, mask, self._progress(), self.guide_generator, ids),
            reference=batch["ref_per_token_logps"],
            rewards=batch.get(REWARDS),
        )
        q = check_q(self.guide(seen), seen).detach()
        self._log_guide(q, mask)
        if not self._guide_seen:
            self._guide_seen = True
            checks.warn_if_idle(self.guide, q, seen)
        return q.to(logps.dtype).log()

    def _reduced(self, per_token: torch.Tensor, batch: Batch) -> torch.Tensor:
        return anchors.reduce(
            per_token,
            counted_tokens(batch),
            self.loss_type,
            self.max_completion_length,
            batch.get("num_items_in_batch"),
            self.accelerator.num_processes,
            self.current_gradient_accumulation_steps,
            self.args.steps_per_generation,
        )

    def _progress(self) -> float:
        """How far the run is, in [0, 1]."""
        return float(self.state.global_step / max(self.state.max_steps, 1))

    # -- models ------------------------------------------------------------------------------------

    def _plain(self, model: torch.nn.Module) -> Any:
        """The causal language model below wrappers and adapters."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if isinstance(model, PeftModel) else model

    def _is_half(self) -> bool:
        """Whether products of the model are rounded to half precision."""
        return bool(self.accelerator.mixed_precision != "no" or self.model.dtype.itemsize < 4)
