"""SageTrainer: GRPOTrainer with a guided anchor, eq. 3 and 6.

TRL's loss reads the reference in one place only, the KL term, and after its own forward pass has
given log-probabilities and token entropies. So nothing of the loss is copied: the batch is handed
on as a shallow copy, and as soon as that pass returns, the copy's reference log-probabilities
become log pi_ref + log q. No forward pass is added.

What this needs of TRL's and transformers' private members is listed in tests/test_trl_members.py.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

# First: Unsloth, where it is needed, comes before what it patches.
from sage_lib.algorithm.backend import (
    REPLACED,
    GRPOTrainer,
    add_fused_lm_head,
    disable_dropout_in_model,
    use_adapter,
)

# isort: split

import torch
from datasets import IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel

from sage_lib.algorithm import anchors
from sage_lib.algorithm.advantages import (
    AdvantageShaper,
    BatchTokens,
    Completions,
    CompletionShaper,
    TokenShaper,
    build_advantage,
)
from sage_lib.algorithm.anchors import Anchor, Setting, Shaped, Tokens, Vocabulary, build_anchor
from sage_lib.algorithm.batches import Batch, counted_tokens, groups_without_spread, replace_rows
from sage_lib.algorithm.guides import Guide, GuideInputs, check_guide, check_q, try_guide
from sage_lib.algorithm.merging import merged_adapters
from sage_lib.algorithm.packing import Packing
from sage_lib.algorithm.padding import by_length, depends_on_width
from sage_lib.algorithm.prompt_order import EpochOrder
from sage_lib.algorithm.reference_reset import ReferenceReset
from sage_lib.algorithm.token_probabilities import (
    completion_logits,
    drawn_log_probabilities,
    entropies_of,
    log_probabilities,
    logits_from_hidden,
)
from sage_lib.errors import SageError

#: Ours in TRL's batch, for an anchor that keeps hidden states: the reference's, shape
#: (batch, time, width). TRL shuffles and splits its batch after scoring, and they must stay with
#: their rows.
REFERENCE_HIDDEN = "ref_hidden"
#: Ours in the batch while dynamic sampling replaces its rows: each reward times its weight, shape
#: (batch, reward functions).
REWARD_TERMS = "reward_terms"
#: Ours in the first batches on Unsloth's trainer: the KL that its loss must have, (batch, time).
EXPECTED_KL = "expected_kl"
#: What Unsloth's trainer keeps in a layout of its own (:mod:`packing`).
PACKED = ("ref_per_token_logps", "old_per_token_logps")
#: Its mark of that layout in the batch: the padding of the most padded prompt, for every row.
MOST_PADDING = "max_left_pad"
#: Its loss clamps the log-ratio of the KL and the KL itself, nats.
UNSLOTHS_CLAMPS = (20.0, 10.0)
#: Mean k3 between the policy and its reference at the first step above which their weights are
#: compared. A trigger, no test: of equal weights it is 0 in float32, and rounding in bfloat16.
START_KL = 1e-3
#: How far the log-probability of a token, computed twice, may lie apart on average: in float32, and
#: where one of the two is rounded to bfloat16.
SINGLE_GAP, HALF_GAP = 1e-3, 0.15
#: Share of the expected KL by which Unsloth's may miss it, where either is in half precision.
HALF_SHARE = 0.25
#: Float32 logits at a time, where the policy is scored beside the loss: 1 GB.
LOGITS = 2**28
#: Tokens over whose whole vocabulary the canary of an anchor looks.
CANARY_TOKENS = 64
#: File of a checkpoint with the reference's weights, where ``sync_ref_model`` moves them.
MOVED_REFERENCE = "sage_reference.pt"


def _restore_on_processor(storage: Any, location: str) -> Any:
    """torch.load knows "cpu" alone. Where several processes share the processor, accelerate calls
    it "cpu:0", and transformers asks for the optimiser of a checkpoint there."""
    return storage if re.fullmatch(r"cpu:\d+", location) else None


torch.serialization.register_package(11, lambda storage: None, _restore_on_processor)


@dataclass
class _Pass:
    """A batch on its way through TRL's loss."""

    model: torch.nn.Module  # as TRL passes it on, wrapped
    batch: Batch  # the shallow copy that TRL reads
    score: Callable[[], tuple[Any, ...]] | None = None  # TRL's forward pass, once more
    aux_loss: torch.Tensor | None = None  # of a mixture of experts' router, from that pass
    shaped: Shaped | None = None  # what the anchor made of the batch after it
    beside: torch.Tensor | None = None  # what the advantage adds to the loss, per token


@dataclass(frozen=True)
class _Fixed:
    """What stays as it is while a batch is optimised; shape (batch, time)."""

    log_q: torch.Tensor | None
    credit: torch.Tensor | None


class SageTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose KL is taken to q·pi_ref. Every argument of GRPOTrainer keeps its meaning.

    Args:
        guide: maps a GuideInputs to q of shape (batch, time); None is plain GRPO. A GuideInputs has
            ``entropies`` (nats, at the sampling temperature), ``logps``, ``mask`` and ``ids`` of
            that shape, ``progress`` and ``generator``. q counts as 1 outside the mask. It is a
            constant to the gradient, is computed once for every batch of completions, and stays
            fixed while it is optimised (Section 4), also over ``num_iterations`` > 1. It shapes
            training; an evaluation's KL is the one to pi_ref.
        anchor: how the KL term is estimated, a name of ``anchors.ANCHORS`` or an Anchor. "k3": per
            token, eq. 38, as the paper's code, the default with a guide. "k3_corrected": per token,
            multiplied by the importance ratio, TRL's own default; a guide of the state alone then
            cancels in expectation if tokens are drawn from the policy untruncated and weigh a
            constant (loss_type "dr_grpo"), not if they weigh 1/|o| or by the tokens of the batch.
            "sequence": the log-ratio of the whole completion credited through the advantages; under
            the same conditions the gradient of eq. 8. "forward_kl": KL(pi_ref ‖ pi) per token over
            the whole vocabulary, without a guide; the prefixes are the sampled ones. None: what
            ``args`` say.
        dynamic_sampling: DAPO's: up to so many fresh batches of prompts replace the groups whose
            rewards are all equal, up to the rounding of a float32.
        other_reference: the policy is not meant to start at its reference, and the first step does
            not ask whether it does.
        reference: the policy of the anchor, where it is not the one that training starts from, with
            an adapter too; ``other_reference`` is then understood. None: as in GRPOTrainer.
        merge_adapter: a LoRA adapter is merged while completions are drawn and scored, by
            ``merging.merged_adapters``: the same policy, loss and gradient up to the rounding of
            single precision, in fewer operations. Checkpoints are those of the adapter as it is,
            and no weight is written. It takes the memory of the adapted layers' weights once more.
            Where it would be another policy, or not reach what samples (half precision, 4 bits,
            DoRA, dropout, FSDP, ZeRO, vLLM, Unsloth's kernels), nothing is merged, and with
            gradient checkpointing nothing in the loss.
        trim_padding: completions are scored with others of about their length, without most of the
            padding, by ``padding.by_length``: the same up to rounding, in fewer operations where
            lengths differ. Nothing is trimmed with several processes or the exact forward KL.
        advantage: what completions or tokens count for, a choice of ``advantages.ADVANTAGES`` or an
            AdvantageShaper; None: TRL's own. It shapes training.
        reference_reset: ProRL's: every so many steps the reference becomes the policy as it then
            is, and the optimiser starts anew; 0 is never. For adapters, where TRL has no
            ``sync_ref_model``.

    ``guide=None, anchor=None`` without ``merge_adapter`` and ``trim_padding`` is stock GRPOTrainer
    bit for bit. So is q = 1 with the anchor that ``args`` ask for: "k3" with
    ``use_bias_correction_kl=False``, "k3_corrected" with True, which is TRL's default. A guide
    without an anchor changes that setting to False, and says so.

    It logs, beside TRL's metrics: ``entropy/positive`` and ``entropy/negative``, the mean entropy
    (nats) of tokens of completions above and below their group's mean reward; ``kl_ref``, the mean
    k3 to pi_ref itself (eq. 38, q = 1), while ``kl`` is the divergence that the loss has, to the
    shaped anchor; ``guide/mean``, ``min``, ``max`` of q, ``guide/acting`` and ``guide/clamped``,
    the shares of tokens where q is not 1 and where it is at its clamp; ``advantage/touched``, the
    share of tokens whose advantage is shaped, and ``advantage/size``, the mean of its absolute
    value; ``sampling/rounds`` and
    ``sampling/flat`` (share of groups left without a spread) with dynamic sampling;
    ``time/generation``, ``time/reward``, ``time/scoring`` (reference and everything else before the
    loss) and ``time/loss`` (forward pass and loss), seconds.

    Raises:
        SageError: at construction where the guide is none, or could not reach the loss; at the
            first step when it did not, or when the policy does not start at its reference: other
            weights, beyond the rounding of the coarser of both precisions, and ``kl_ref`` above
            1e-3 without dropout and other noise; after a resume, when the base model or the
            reference is another than before.
    """

    def __init__(
        self,
        *args: Any,
        guide: Guide | None = None,
        anchor: str | Anchor | None = None,
        dynamic_sampling: int = 0,
        other_reference: bool = False,
        reference: PreTrainedModel | None = None,
        merge_adapter: bool = False,
        trim_padding: bool = False,
        advantage: str | Mapping[str, Any] | AdvantageShaper | None = None,
        reference_reset: int = 0,
        **kwargs: Any,
    ) -> None:
        if guide is not None:
            check_guide(guide)
            try_guide(guide)
        chosen = None if anchor is None else build_anchor(anchor)
        self.advantage = None if advantage is None else build_advantage(advantage)
        super().__init__(*args, **kwargs)
        self.guide = guide
        self.trim_padding = trim_padding
        self.anchor = anchors.K3() if chosen is None and guide is not None else chosen
        self.dynamic_sampling = dynamic_sampling
        self.other_reference = other_reference or reference is not None
        self.merge_adapter = merge_adapter
        self.reference_reset = reference_reset
        # Unsloth's GPU replacement of GRPOTrainer computes its loss elsewhere and returns no
        # entropies: there the anchor is shaped where the reference is scored, at the price of one
        # forward pass without a gradient.
        self._seam: Literal["loss", "scoring"] = "scoring" if REPLACED else "loss"
        self._require_usable()
        if reference is not None:
            self._anchor_to(reference)
        self._set_bias_correction(warn=chosen is None)
        self._passing: _Pass | None = None
        self._losing: Batch | None = None
        self._fixed: dict[int, _Fixed] = {}
        self._hidden: list[torch.Tensor] | None = None
        self._guide_checked = False
        self._reward_terms: torch.Tensor | None = None
        # Streams of their own for each process, so that neither a guide nor fresh prompts shift the
        # sampling.
        seed = self.args.seed * 1009 + self.accelerator.process_index
        self.guide_generator = torch.Generator(device="cpu").manual_seed(seed)
        self.prompt_generator = torch.Generator(device="cpu").manual_seed(seed + 2**31)
        self.advantage_generator = torch.Generator(device="cpu").manual_seed(seed + 2**32)
        self._base_hash = self._hash_base()
        if reference_reset:
            self.add_callback(ReferenceReset(reference_reset))
        if self.anchor is not None and self.anchor.keeps_hidden:
            models = [self._plain(m) for m in (self.model, self.ref_model) if m is not None]
            for model in {id(m): m for m in models}.values():
                model.get_decoder().register_forward_hook(self._keep_hidden)

    def _require_usable(self) -> None:
        """Raise a SageError with the first reason why these settings cannot work together."""
        for reason in self._refusals():
            raise SageError(reason)

    def _anchor_to(self, reference: PreTrainedModel) -> None:
        """Make ``reference`` TRL's ``ref_model``, which it asks before any adapter; as its
        constructor makes the one of a model without an adapter."""
        if self.beta == 0:
            raise SageError("a reference needs beta > 0: without a KL term there is no anchor")
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise SageError("a reference of its own is not sharded: train without FSDP and ZeRO")
        if self.args.disable_dropout:
            disable_dropout_in_model(reference)
        add_fused_lm_head(
            reference,
            temperature=self.temperature,
            cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
        )
        self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    def _refusals(self) -> Iterator[str]:
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.trim_padding and depends_on_width(self.model.config):
            yield (
                "trim_padding needs a model that scores a completion alike in a batch of any "
                "width: this one's rotary positions follow the longest row"
            )
        if self.guide is not None and self.beta == 0:
            yield "a guide needs beta > 0: without a KL term there is no anchor to shape"
        if self.args.sync_ref_model and sharded and self.args.save_strategy != "no":
            yield (
                "checkpoints cannot hold a sharded reference that sync_ref_model moves: set "
                "save_strategy to no, or use data parallelism without FSDP or ZeRO"
            )
        if self.reference_reset and (sharded or not self._has_reference_adapter()):
            yield (
                "reference_reset moves a reference adapter, as SageTrainer has it for a model with "
                "an adapter and beta > 0: set sync_ref_model where all weights are trained"
            )
        completions = self.args.per_device_train_batch_size * self.args.steps_per_generation
        updates = self.args.steps_per_generation * self.num_iterations
        setting = Setting(
            beta=self.beta,
            loss_type=self.loss_type,
            importance_sampling_level=self.importance_sampling_level,
            use_liger_kernel=self.args.use_liger_kernel,
            masks_tokens=self._masks_tokens(),
            guided=self.guide is not None,
            sharded=sharded,
            at_scoring=self._seam == "scoring",
            masks_off_policy=self.off_policy_mask_threshold is not None,
            on_policy=self.args.gradient_accumulation_steps % updates == 0,
            generations=self.num_generations,
            whole_groups=completions % self.num_generations == 0,
        )
        for part in (self.anchor, self.advantage):
            if part is not None:
                yield from part.requires(setting)
        if not self.dynamic_sampling:
            return
        if not setting.whole_groups:
            yield (
                f"dynamic sampling needs whole groups on every process: {completions} completions "
                f"are not a multiple of num_generations {self.num_generations}"
            )
        if self.scale_rewards == "batch":
            yield (
                "dynamic sampling needs rewards scaled within their group: "
                "set scale_rewards to group or none"
            )
        if self.multi_objective_aggregation == "normalize_then_sum":
            yield (
                "dynamic sampling needs advantages made within their group: "
                "set multi_objective_aggregation to sum_then_normalize"
            )
        if isinstance(self.train_dataset, IterableDataset):
            yield (
                "dynamic sampling draws fresh prompts by their number: "
                "train on a Dataset, not on an IterableDataset"
            )

    def _has_reference_adapter(self) -> bool:
        return any(_is_of_reference_adapter(name) for name, _ in self.model.named_parameters())

    def _masks_tokens(self) -> bool:
        """Whether TRL takes tokens out of its loss, and leaves their KL in."""
        return self.top_entropy_quantile < 1 or self.off_policy_mask_threshold is not None

    def _set_bias_correction(self, warn: bool) -> None:
        """Let TRL's KL be the anchor's; ``warn`` where the anchor was not asked for by name."""
        anchor = self.anchor
        if anchor is None or self.args.use_bias_correction_kl == anchor.bias_corrected:
            return
        if warn:
            logging.getLogger(__name__).warning(
                "use_bias_correction_kl is set to False: the anchor is k3, as in the paper's code; "
                "pass anchor='k3_corrected' for the other one"
            )
        self.args.use_bias_correction_kl = anchor.bias_corrected

    # -- the seam ----------------------------------------------------------------------------------

    def _compute_loss(self, model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
        self._losing = inputs if self.model.training else None
        try:
            return self._shaped_loss(model, inputs)
        finally:
            self._losing = None

    def _shaped_loss(self, model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
        read = "ref_per_token_logps" in inputs or isinstance(self.advantage, TokenShaper)
        shaped_here = self._seam == "loss" and read
        if not self.model.training or not shaped_here:
            with self._timed("loss"):
                untouched: torch.Tensor = super()._compute_loss(model, inputs)
            return untouched
        # Shallow: TRL keeps the batch for further iterations, and it must stay as it was.
        passing = self._passing = _Pass(model, dict(inputs))
        try:
            with self._timed("loss"):
                loss: torch.Tensor = super()._compute_loss(model, passing.batch)
                if passing.shaped is not None and passing.shaped.beside is not None:
                    beside = self._reduced(passing.shaped.beside, passing.batch)
                    loss = loss + self.beta * beside
        finally:
            self._passing = self._hidden = None  # or the next generation would fill it
        if self.anchor is not None:
            self._settle(self.anchor, passing, loss)
        if passing.beside is not None:
            loss = loss + self._reduced(passing.beside, passing.batch)
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self._hidden = [] if self._keeps_hidden() else None
        if self._leaves_reference_to_anchor(*args):
            return self._reference_states(*args, **kwargs)
        score = partial(super()._get_per_token_logps_and_entropies, *args, **kwargs)
        if self.trim_padding and self._hidden is None and self.accelerator.num_processes == 1:
            score = partial(by_length, super()._get_per_token_logps_and_entropies, *args, **kwargs)
        with self._merged_to_score(*args):
            logps, entropies, *rest = score()
        passing = self._passing
        if self._losing is not None and entropies is not None:
            self._log_entropies(self._losing, entropies.detach())
        if passing is not None and entropies is not None:
            passing.score = score
            passing.aux_loss = rest[0] if rest else None
            if isinstance(self.advantage, TokenShaper):
                self._shape_tokens(self.advantage, passing, logps, entropies.detach())
            if "ref_per_token_logps" in passing.batch:
                self._shape(passing, logps, entropies.detach())
        return logps, entropies, *rest

    def _shape_tokens(
        self,
        shaper: TokenShaper,
        passing: _Pass,
        live_logps: torch.Tensor,
        entropies: torch.Tensor,
    ) -> None:
        """Put the shaper's advantages where the loss, and the anchor, will read TRL's."""
        batch, mask = passing.batch, counted_tokens(passing.batch)
        aligned = "old_per_token_logps" not in batch
        tokens = BatchTokens(
            advantages=batch["advantages"].unsqueeze(1).expand(mask.shape),
            live_logps=live_logps,
            old_logps=live_logps.detach() if aligned else batch["old_per_token_logps"],
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
        self._record("kl_ref", kl_ref)  # not where the anchor scores the reference
        self._require_start(kl_ref, partial(self._quiet_kl, passing))
        if self.anchor is None:
            return
        fixed = self._fixed_for(self.anchor, batch, logps, entropies)
        vocabulary = self._vocabulary(batch) if self.anchor.keeps_hidden else None
        if vocabulary is not None and not self._guide_checked:
            self._require_vocabulary(vocabulary, batch, logps)
        tokens = Tokens(
            live_logps=live_logps,
            logps=logps,
            reference=reference,
            log_q=fixed.log_q,
            credit=fixed.credit,
            advantages=batch["advantages"],
            beta=self.beta,
            vocabulary=vocabulary,
        )
        passing.shaped = shaped = self.anchor.shape(tokens)
        if shaped.scored_reference is not None and math.isnan(kl_ref):
            self._record("kl_ref", self._mean(anchors.k3(shaped.scored_reference, logps), mask))
        batch["ref_per_token_logps"] = shaped.reference
        if shaped.advantages is not None:
            batch["advantages"] = shaped.advantages

    def _fixed_for(
        self, anchor: Anchor, batch: Batch, logps: torch.Tensor, entropies: torch.Tensor
    ) -> _Fixed:
        """log q and the anchor's credit, from the first pass over a batch, whatever the
        iteration."""
        steps = self.args.steps_per_generation
        slot = self._step % steps
        first = self._step % (steps * self.num_iterations) < steps
        if first or slot not in self._fixed:
            log_q = None if self.guide is None else self._log_q(batch, logps, entropies)
            reference, mask = batch["ref_per_token_logps"], counted_tokens(batch)
            self._fixed[slot] = _Fixed(log_q, anchor.credit(logps, reference, log_q, mask))
        return self._fixed[slot]

    def _progress(self) -> float:
        """How far the run is, in [0, 1]."""
        progress: float = self.state.global_step / max(self.state.max_steps, 1)
        return progress

    def _log_q(self, batch: Batch, logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        """Ask the guide, check and log what it says: log q, shape (batch, time)."""
        assert self.guide is not None
        mask = counted_tokens(batch)
        inputs = GuideInputs(
            entropies=entropies,
            logps=logps,
            mask=mask,
            progress=self._progress(),
            generator=self.guide_generator,
            ids=batch["completion_ids"],
        )
        q = check_q(self.guide(inputs), inputs).detach()
        self._log_guide_metrics(q, mask)
        return q.to(logps.dtype).log()

    def _settle(self, anchor: Anchor, passing: _Pass, loss: torch.Tensor) -> None:
        """After TRL's loss: log the anchor's own KL, and let the canary look.

        The canary: what TRL made of the first batch must be what the shaped anchor asks for. TRL's
        own KL under an anchor that puts it to 0 is looked at in every batch: at the first one the
        policy is its reference, and 0 says nothing yet.
        """
        shaped, batch = passing.shaped, passing.batch
        if shaped is None or (anchor.kl_is_trls and self._guide_checked):
            return
        logged = self._metrics["train"]["kl"]
        found, expected = logged[-1], self._mean(shaped.kl, counted_tokens(batch))
        if not anchor.kl_is_trls:
            self._require_equal("KL", found, 0.0)
            logged[-1] = expected
        if self._guide_checked or math.isnan(expected):  # in which no token counts
            return
        self._guide_checked = True
        if anchor.kl_is_trls:
            self._require_equal("KL", found, expected)
        first_loss = anchor.first_loss(shaped)
        if first_loss is not None and self._loss_is_plain():
            asked = self._reduced(first_loss, batch).item() + self._routers_share(passing)
            self._require_equal("loss", loss.item(), asked)

    def _require_equal(
        self, name: str, found: float, expected: float, share: float = 1e-3, least: float = 1e-5
    ) -> None:
        if not abs(found - expected) <= least + share * abs(expected):  # nor where it is no number
            raise SageError(
                f"the guide did not reach the loss ({name} {found:.3g} instead of {expected:.3g}): "
                f"this version of TRL or Unsloth reads the reference elsewhere; use the pinned one"
            )

    def _loss_is_plain(self) -> bool:
        """Whether TRL's loss of a first batch has no entropy bonus, clips or weights of tokens."""
        return (
            not self._entropy_bonus_enabled
            and not self._masks_tokens()
            and self.args.delta is None
            and not self.use_vllm
        )

    def _routers_share(self, passing: _Pass) -> float:
        """What TRL adds to its loss for a mixture of experts: the load-balancing term."""
        if not self.aux_loss_enabled or passing.aux_loss is None:
            return 0.0
        share: float = self.router_aux_loss_coef / self.current_gradient_accumulation_steps
        return share * passing.aux_loss.item()

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

    # -- the start ---------------------------------------------------------------------------------

    def _require_start(self, kl_ref: float, quiet_kl: Callable[[], float]) -> None:
        """Raise a SageError where the reference is another policy than the one that starts.

        Precision, dropout and noise on embeddings (NEFTune) part two equal policies too: what
        counts is whether they have the same weights, or score alike without that noise.
        """
        first = self.state.global_step == 0 and self._step == 0
        if not first or kl_ref <= START_KL or self.other_reference or self._same_weights():
            return
        kl = quiet_kl()
        if kl <= START_KL:
            return
        remedy = "merge the SFT adapter and save the model before RL"
        if self.is_fsdp_enabled:
            remedy = f"set fsdp_cpu_ram_efficient_loading to false under FSDP, {remedy}"
        raise SageError(
            f"the policy does not start at its reference (KL {kl:.3g} at step 0, and other "
            f"weights): {remedy}, or pass other_reference=True if that is the reference you want"
        )

    def _same_weights(self) -> bool:
        """Whether policy and reference have the same weights on every process, up to the rounding
        of the coarser precision. False where that cannot be seen: ZeRO hands out no whole weights.
        The reference of an adapter without a copy is the model without it: equal while LoRA's B
        matrices are 0."""
        policy = dict(self.accelerator.unwrap_model(self.model).named_parameters())
        if self.ref_model is not None:
            model = self.accelerator.unwrap_model(self.ref_model)
            reference = dict(model.named_parameters())
        else:
            copies = [(n, p) for n, p in policy.items() if _is_of_reference_adapter(n)]
            reference = {n.replace(".ref.", ".default."): p for n, p in copies}
        if self.ref_model is None and not reference:
            reference = {n: torch.zeros_like(p) for n, p in policy.items() if ".lora_B." in n}
        seen = bool(reference) and not self.is_deepspeed_enabled
        same = seen and all(n in policy and _equal(policy[n], p) for n, p in reference.items())
        everywhere = self.accelerator.gather(torch.tensor([same], device=self.accelerator.device))
        return bool(everywhere.all())

    @torch.no_grad()
    def _quiet_kl(self, passing: _Pass) -> float:
        """``kl_ref`` of a batch without dropout and other noise of training: passes of their own.

        A reference model of its own was scored without noise already.
        """
        assert passing.score is not None
        reference = passing.batch["ref_per_token_logps"]
        hidden, self._hidden = self._hidden, None
        with _without_noise(passing.model):
            logps, *_ = passing.score()
            if self.ref_model is None:
                model = self.accelerator.unwrap_model(self.model)
                with use_adapter(model, "ref" if "ref" in model.peft_config else None):
                    reference, *_ = passing.score()
        self._hidden = hidden
        return self._mean(anchors.k3(reference, logps), counted_tokens(passing.batch))

    # -- hidden states -----------------------------------------------------------------------------

    def _keeps_hidden(self) -> bool:
        """Hidden states are of use to training alone."""
        return self.anchor is not None and self.anchor.keeps_hidden and self.model.training

    def _leaves_reference_to_anchor(self, model: torch.nn.Module, *rest: Any) -> bool:
        """Whether this is the reference's scoring and its log-probabilities are the anchor's to
        make, from the same states. Not before the canary has compared them with TRL's."""
        asked = self.anchor is not None and self.anchor.scores_reference and self._keeps_hidden()
        of_reference = model is self.ref_model or self._scores_reference()
        return asked and self._guide_checked and of_reference

    def _reference_states(
        self,
        model: torch.nn.Module,
        ids: torch.Tensor,
        attention: torch.Tensor,
        time: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """TRL's forward pass of the reference, for its hidden states: the head, whose work grows
        with the vocabulary, sees one token of each completion."""
        with self._merged_to_score(model):
            logps, *rest = super()._get_per_token_logps_and_entropies(
                model, ids, attention, 1, *args, **kwargs
            )
        return logps.new_full((len(ids), time), torch.nan), *rest

    def _plain(self, model: torch.nn.Module) -> Any:
        """The causal language model below wrappers and adapters."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if isinstance(model, PeftModel) else model

    def _keep_hidden(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._hidden is not None:
            self._hidden.append(output.last_hidden_state)

    def _kept_hidden(self, time: int) -> torch.Tensor:
        """What the last scoring pass left: the states before each of ``time`` completion tokens,
        shape (batch, time, width)."""
        assert self._hidden is not None
        return torch.cat(self._hidden)[:, -time - 1 : -1]

    def _vocabulary(self, batch: Batch) -> Vocabulary:
        policy = self._plain(self.model)
        head = logits_from_hidden(policy)
        reference_head = head
        if self.ref_model is not None:
            reference_head = logits_from_hidden(self._plain(self.ref_model))
        return Vocabulary(
            hidden=self._kept_hidden(batch["completion_ids"].shape[1]),
            reference_hidden=batch[REFERENCE_HIDDEN],
            head=head,
            reference_head=reference_head,
            temperature=self.temperature,
            drawn=batch["completion_ids"],
            head_trained=any(p.requires_grad for p in policy.get_output_embeddings().parameters()),
        )

    @torch.no_grad()
    def _require_vocabulary(
        self, vocabulary: Vocabulary, batch: Batch, logps: torch.Tensor
    ) -> None:
        """The canary of an anchor that reads the whole vocabulary: its distributions must give the
        first sampled tokens of one completion what TRL's own kernel gave them."""
        v, mask = vocabulary, counted_tokens(batch)
        row = int(mask.sum(1).argmax())
        first = slice(CANARY_TOKENS)
        mask = mask[row, first]
        half = self.accelerator.mixed_precision != "no" or v.hidden.dtype.itemsize < 4
        tolerance = HALF_GAP if half else SINGLE_GAP
        sides = (
            ("policy", v.hidden, v.head, logps),
            ("reference", v.reference_hidden, v.reference_head, batch["ref_per_token_logps"]),
        )
        for name, hidden, head, expected in sides:
            log_pi = log_probabilities(head(hidden[row, first][None])[0], v.temperature)
            found = drawn_log_probabilities(log_pi, batch["completion_ids"][row, first])
            gaps = (found - expected[row, first]).abs() * mask
            gap = (gaps.sum() / mask.sum().clamp(min=1)).item()
            if gap > tolerance:
                raise SageError(
                    f"the anchor's distributions are not those of the {name} in TRL's loss "
                    f"(log-probabilities of the sampled tokens differ by {gap:.3g}): "
                    f"use the anchor k3 with this model"
                )

    # -- sampling ----------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        batch = self._scored(inputs)
        if self.dynamic_sampling and self.model.training:
            batch = self._resampled(batch)
        if self._is_packed(batch):
            self._pack(batch)
        return batch

    def _resampled(self, batch: Batch) -> Batch:
        """``batch`` after dynamic sampling."""
        rounds = 1
        while rounds <= self.dynamic_sampling and self._any_without_spread(batch):
            batch = self._refilled(batch)
            rounds += 1
        if "num_items_in_batch" in batch:
            items = counted_tokens(batch).sum()
            batch["num_items_in_batch"] = self.accelerator.gather(items).sum()
        left = self._without_spread(batch).float().mean()
        del batch[REWARD_TERMS]
        self._record("sampling/rounds", float(rounds))
        self._record("sampling/flat", self.accelerator.gather(left).mean().item())
        return batch

    def _any_without_spread(self, batch: Batch) -> bool:
        """On any process: all of them sample again, or none."""
        here = self._without_spread(batch).any()
        return bool(self.accelerator.gather(here).any())

    def _without_spread(self, batch: Batch) -> torch.Tensor:
        return groups_without_spread(batch[REWARD_TERMS], self.num_generations)

    def _refilled(self, batch: Batch) -> Batch:
        """``batch`` with as many of its groups without a spread as a fresh batch can replace."""
        generations = self.num_generations
        rows = torch.arange(len(batch["completion_ids"])).view(-1, generations)
        prompts = torch.randint(
            len(self.train_dataset), (len(rows),), generator=self.prompt_generator
        )
        examples = [self.train_dataset[i] for i in prompts.tolist() for _ in range(generations)]
        fresh = self._scored(examples)
        needed = self._without_spread(batch).nonzero().flatten().cpu()
        offered = (~self._without_spread(fresh)).nonzero().flatten().cpu()
        used = min(len(needed), len(offered))
        return replace_rows(
            batch,
            rows[needed[:used]].flatten().tolist(),
            fresh,
            rows[offered[:used]].flatten().tolist(),
            self._tokenizer.pad_token_id,
        )

    def _scored(self, inputs: list[dict[str, Any]]) -> Batch:
        """TRL's generation and scoring, and the time it takes; the reference's hidden states for an
        anchor that keeps them, the rewards for dynamic sampling."""
        started = time.perf_counter()
        batch: Batch = super()._generate_and_score_completions(inputs)
        if self._keeps_hidden():  # the reference is scored last
            states = self._kept_hidden(batch["completion_ids"].shape[1])
            batch[REFERENCE_HIDDEN] = states.detach()
        self._hidden = None
        training = self.model.training
        if self._is_packed(batch):
            self._unpack(batch)
        if self.dynamic_sampling and training:
            batch[REWARD_TERMS] = self._own_reward_terms(batch)
        if isinstance(self.advantage, CompletionShaper) and training:
            self._shape_completions(self.advantage, batch)
        if self._seam == "scoring" and training and "ref_per_token_logps" in batch:
            self._shape_scored(batch)
        taken = time.perf_counter() - started
        metrics = self._metrics[self._phase()]
        elsewhere = (metrics["time/generation"][-1], metrics["time/reward"][-1])
        metrics["time/scoring"].append(taken - elsewhere[0] - elsewhere[1])
        return batch

    def _own_reward_terms(self, batch: Batch) -> torch.Tensor:
        """The rewards of this process's completions, each times its weight, in the order of the
        rows; shape (rows, reward functions)."""
        assert self._reward_terms is not None
        rows = len(batch["completion_ids"])
        own: torch.Tensor = self._reward_terms.split(rows)[self.accelerator.process_index]
        return own

    @torch.no_grad()
    def _shape_completions(self, shaper: CompletionShaper, batch: Batch) -> None:
        """Put the shaper's advantages in place of TRL's, while the groups are whole."""
        mask, terms = counted_tokens(batch), self._own_reward_terms(batch)
        log_perplexity = None
        if shaper.reads_perplexity:
            if "old_per_token_logps" in batch:
                logps = batch["old_per_token_logps"]
            else:
                logps, _ = self._policy_signals(batch)
            log_perplexity = -(logps * mask).sum(1) / mask.sum(1)
        completions = Completions(
            advantages=batch["advantages"],
            rewards=terms.nansum(1).masked_fill(terms.isnan().all(1), torch.nan),
            generations=self.num_generations,
            log_perplexity=log_perplexity,
        )
        shaped = shaper.shape(completions)
        touched = (shaped != batch["advantages"]).unsqueeze(1).expand(mask.shape)
        batch["advantages"] = shaped
        self._log_advantages(shaped.unsqueeze(1), touched, mask)

    # -- the seam "scoring", on Unsloth's trainer --------------------------------------------------

    def _is_packed(self, batch: Batch) -> bool:
        """Whether Unsloth keeps this batch of training in its layout: it does for texts."""
        return self._seam == "scoring" and self.model.training and MOST_PADDING in batch

    def _packing(self, batch: Batch) -> Packing:
        return Packing(batch["prompt_ids"], batch["completion_ids"], self._tokenizer.pad_token_id)

    def _unpack(self, batch: Batch) -> None:
        """Log-probabilities in shape (batch, time), as everything here reads them."""
        packing = self._packing(batch)
        for key in PACKED:
            if key not in batch:
                continue
            if batch[key].shape[1] != packing.width:
                raise SageError(
                    f"Unsloth keeps {key} in {batch[key].shape[1]} columns, not {packing.width}: "
                    "use the pinned version, or set compute.backend to trl"
                )
            batch[key] = packing.unpack(batch[key])

    def _pack(self, batch: Batch) -> None:
        """Back into Unsloth's layout, of the rows that the batch now has."""
        packing = self._packing(batch)
        for key in PACKED:
            if key in batch:
                batch[key] = packing.pack(batch[key])
        batch[MOST_PADDING] = torch.full_like(batch[MOST_PADDING], packing.padding)

    @torch.no_grad()
    def _shape_scored(self, batch: Batch) -> None:
        """q from a pass of its own, put into the reference log-probabilities of the whole batch."""
        mask, reference = counted_tokens(batch), batch["ref_per_token_logps"]
        logps, entropies = self._policy_signals(batch)
        kl_ref = self._mean(anchors.k3(reference, logps), mask)
        self._record("kl_ref", kl_ref)
        self._require_start(kl_ref, partial(self._quiet_kl_at_scoring, batch))
        if self.guide is not None:
            reference = reference + self._log_q(batch, logps, entropies)
            batch["ref_per_token_logps"] = reference
        if not self._guide_checked:
            most_ratio, most = UNSLOTHS_CLAMPS
            ratio = (reference - logps).clamp(-most_ratio, most_ratio)
            batch[EXPECTED_KL] = anchors.k3(ratio, torch.zeros_like(ratio)).clamp(max=most)

    @torch.no_grad()
    def _quiet_kl_at_scoring(self, batch: Batch) -> float:
        """:meth:`_quiet_kl` of a batch whose reference Unsloth scored, which it does without."""
        with _without_noise(self.model):
            logps, _ = self._policy_signals(batch)
        return self._mean(anchors.k3(batch["ref_per_token_logps"], logps), counted_tokens(batch))

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Unsloth's loss stands here, and not in ``_compute_loss``; so does its canary."""
        loss: torch.Tensor = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training and EXPECTED_KL in inputs and not self._guide_checked:
            expected = self._mean_of_rows(inputs)
            if math.isnan(expected):  # in which no token counts
                return loss
            self._guide_checked = True
            half = self.accelerator.mixed_precision != "no" or self.model.dtype.itemsize < 4
            share, least = (HALF_SHARE, START_KL) if half else (1e-3, 1e-5)
            found = self._metrics["train"]["kl"][-1]
            self._require_equal("KL", found, expected, share, least)
        return loss

    def _mean_of_rows(self, batch: Batch) -> float:
        """The expected KL as Unsloth logs it: of each completion, then of this process's rows; its
        loss counts no token whose id is that of padding."""
        counted = counted_tokens(batch) * (batch["completion_ids"] != self._tokenizer.pad_token_id)
        rows = (batch[EXPECTED_KL] * counted).sum(1) / counted.sum(1).clamp(min=1)
        mean: float = rows[counted.sum(1) > 0].mean().item()
        return mean

    # -- the policy's own signals ------------------------------------------------------------------

    def _policy_signals(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """log pi of the sampled tokens and the entropies before them (nats), shape (batch, time), a
        training batch at a time, and no more rows than :data:`LOGITS` allows.

        On Unsloth's trainer with padding on the right: its models see none on the left.
        """
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        start = batch["prompt_ids"].shape[1]
        packing = self._packing(batch) if self._seam == "scoring" else None
        if packing is not None:
            ids, attention, start = packing.moved(ids), packing.moved(attention), packing.start
        drawn = ids[:, start:]
        words = self._plain(self.model).get_output_embeddings().weight.shape[0]
        fits = max(1, LOGITS // (drawn.shape[1] * words))
        size = min(self.args.per_device_train_batch_size, fits)
        logps, entropies = [], []
        for first in range(0, len(ids), size):
            rows = slice(first, first + size)
            logits = completion_logits(self.model, ids[rows], start, attention[rows])
            log_pi = log_probabilities(logits, self.temperature)
            logps.append(drawn_log_probabilities(log_pi, drawn[rows]))
            entropies.append(entropies_of(log_pi))
        found = torch.cat(logps), torch.cat(entropies)
        return found if packing is None else (packing.unpack(found[0]), packing.unpack(found[1]))

    def _generate(self, prompts: list[Any]) -> Any:
        with self._timed("generation"):
            return super()._generate(prompts)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if not self._merges():
            return super()._generate_single_turn(*args, **kwargs)
        # What comes out are lists: no tensor without a gradient's books reaches the loss.
        with torch.inference_mode(), merged_adapters(self.model):
            return super()._generate_single_turn(*args, **kwargs)

    def _merges(self) -> bool:
        """Whether the policy's active adapter is to be merged, and may be."""
        elsewhere = self.use_vllm or self.use_transformers_continuous_batching
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        asked = self.merge_adapter and isinstance(self.model, PeftModel)
        return asked and not elsewhere and not sharded and self._seam == "loss"

    def _merged_to_score(self, model: torch.nn.Module, *rest: Any) -> AbstractContextManager[Any]:
        """Its adapter merged for a pass of ``model`` over whole completions, with gradients or
        without. Not where layers run again on the way back, nor where their products are rounded to
        half precision."""
        if not self._merges() or model is self.ref_model:
            return nullcontext()
        again = torch.is_grad_enabled() and self.model.is_gradient_checkpointing
        half = self.accelerator.mixed_precision != "no"
        merges = not again and not half
        return merged_adapters(self.model) if merges else nullcontext()

    def _scores_reference(self) -> bool:
        """Whether TRL now has the policy's model score as the reference, by its copy of the
        adapter as it was at the start."""
        if torch.is_grad_enabled() or self.ref_model is not None:
            return False
        model = self.accelerator.unwrap_model(self.model)
        return isinstance(model, PeftModel) and model.active_adapters == ["ref"]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed("reward"):
            rewards = super()._calculate_rewards(*args, **kwargs)
        self._reward_terms = rewards * self.reward_weights.to(rewards.device)
        return rewards

    # -- metrics -----------------------------------------------------------------------------------

    def _phase(self) -> str:
        return "train" if self.model.training else "eval"

    def _record(self, name: str, value: float) -> None:
        """Log a value, unless it is the mean of no tokens."""
        if not math.isnan(value):
            self._metrics["train"][name].append(value)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._metrics[self._phase()][f"time/{part}"].append(time.perf_counter() - started)

    def _mean(self, per_token: torch.Tensor, mask: torch.Tensor) -> float:
        """Mean over the masked tokens of all processes; not a number where there are none."""
        local = torch.stack([(per_token * mask).sum(), mask.sum().to(per_token)])
        total, count = self.accelerator.reduce(local, reduction="sum")
        mean: float = (total / count).item()
        return mean

    def _log_advantages(
        self, advantages: torch.Tensor, touched: torch.Tensor, mask: torch.Tensor
    ) -> None:
        self._record("advantage/touched", self._mean(touched.to(advantages), mask))
        self._record("advantage/size", self._mean(advantages.abs(), mask))

    def _log_entropies(self, batch: Batch, entropies: torch.Tensor) -> None:
        """Mean entropy (nats) of the tokens of completions that beat their group's mean, and of
        those that fall short of it; TRL logs that of all tokens. ``entropies``: (batch, time)."""
        mask, advantages = counted_tokens(batch), batch["advantages"]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        # In a group of equal rewards rounding can leave a sign.
        least = 1e-3 * advantages.abs().max()
        signs = {"positive": advantages > least, "negative": advantages < -least}
        for name, chosen in signs.items():
            self._record(f"entropy/{name}", self._mean(entropies, mask * chosen))

    def _log_guide_metrics(self, q: torch.Tensor, mask: torch.Tensor) -> None:
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

    # -- checkpoints -------------------------------------------------------------------------------

    def _hash_base(self) -> str:
        """Hash of the weights that training never changes: the reference model's, and those of the
        policy that are frozen, which is all of the base model below an adapter.

        Computed once, of the bytes as they lie, a tensor at a time. SHA-256 takes 1 to 2 GB a
        second on one core: for 7B parameters in bfloat16 (15 GB) 8 to 15 seconds, and the copy from
        a GPU a few more. No hash where no process has whole weights.
        """
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return ""
        frozen = [(n, p) for n, p in self.model.named_parameters() if not p.requires_grad]
        kept = [(n, p) for n, p in frozen if not _is_of_reference_adapter(n)]
        if self.ref_model is not None:
            kept += [(f"reference.{n}", p) for n, p in self.ref_model.named_parameters()]
        return _digest(kept)

    def _hash_reference(self) -> str:
        """Hash of what the reference policy is made of: the base, and the reference's adapter as it
        is now (a resume loads it from the checkpoint)."""
        named = self.model.named_parameters()
        adapter = [(n, p) for n, p in named if _is_of_reference_adapter(n)]
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        return f"{self._base_hash}-{'' if sharded else _digest(adapter)}"

    def _state_file(self, folder: str) -> str:
        return os.path.join(folder, f"sage_state_{self.accelerator.process_index}.pt")

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        root = self._get_output_dir(trial=trial)
        folder = os.path.join(root, f"checkpoint-{self.state.global_step}")
        state = {
            "guide": self.guide_generator.get_state(),
            "prompts": self.prompt_generator.get_state(),
            "advantages": self.advantage_generator.get_state(),
            "reference": self._hash_reference(),  # as it is now: a reset moves it
        }
        torch.save(state, self._state_file(folder))
        if self.args.sync_ref_model and self.args.should_save:
            moved = self.accelerator.unwrap_model(self.ref_model).state_dict()
            torch.save(moved, os.path.join(folder, MOVED_REFERENCE))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        """Also load the trained adapter. TRL adds a second one, "ref"; transformers 5.17 then looks
        for adapters in the checkpoint's subfolders only, where "default" is not, and would resume
        from an untrained one without a word. And load the reference where it moves, which neither
        of them keeps."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.args.sync_ref_model:
            self._load_reference(resume_from_checkpoint)
        model = self.model if model is None else model
        trained = os.path.join(resume_from_checkpoint, "adapter_model.safetensors")
        if not isinstance(model, PeftModel) or not os.path.isfile(trained):
            return
        if len(model.peft_config) > 1:
            active = model.active_adapters[0]
            model.load_adapter(resume_from_checkpoint, active, is_trainable=True)

    def _load_reference(self, folder: str) -> None:
        path = os.path.join(folder, MOVED_REFERENCE)
        if not os.path.isfile(path):
            raise SageError(
                f"{folder} does not hold the reference that sync_ref_model had moved: "
                f"start a new run, or resume from a checkpoint with {MOVED_REFERENCE}"
            )
        moved = torch.load(path, map_location="cpu", weights_only=True)
        self.accelerator.unwrap_model(self.ref_model).load_state_dict(moved)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        if not getattr(sampler, "shuffle", False):
            return sampler
        return EpochOrder(sampler, lambda: int(self.state.epoch or 0))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if not checkpoint or not os.path.isfile(self._state_file(checkpoint)):
            return
        state = torch.load(self._state_file(checkpoint), weights_only=True)
        self.guide_generator.set_state(state["guide"])
        self.prompt_generator.set_state(state["prompts"])
        if "advantages" in state:  # not in a checkpoint of an earlier version
            self.advantage_generator.set_state(state["advantages"])
        if state["reference"] != self._hash_reference():
            raise SageError(
                "the base model or reference policy is not the one that this run started with: "
                "resume with the same SFT model and adapter settings, or start a new run"
            )


def _is_of_reference_adapter(name: str) -> bool:
    """TRL's copy of the adapter as it was at the start, in PEFT's names of parameters."""
    return ".ref." in name


@contextmanager
def _without_noise(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout and other noise of training; every module's mode is as before at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two weights, sharded alike or not at all, are equal up to the rounding of the coarser
    of their types."""
    whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in (a.detach(), b.detach())]
    types = {x.dtype for x in whole}
    if len(types) > 1 and not all(t.is_floating_point for t in types):
        return False
    coarsest = max(types, key=lambda t: torch.finfo(t).eps) if len(types) > 1 else a.dtype
    return torch.equal(whole[0].to(coarsest), whole[1].to(coarsest))


def _digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash of names, types, shapes and bytes of weights, 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, weight in named:
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        as_bytes = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(as_bytes.numpy().data)
    return digest.hexdigest()[:12]
