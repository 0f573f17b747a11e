"""SageTrainer: GRPOTrainer with a guided anchor, eq. 3 and 6.

Its loss, with loss_type "grpo" and the KL form "k3" or "sequence" (tests/test_loss.py compares)::

    def sage_loss(logits, batch, guide, beta, kl_form="k3", clip=0.2):
        # logits: (rows, time, vocabulary), before each token of the completions.
        # batch: ids, mask, old_logps and ref_logps (rows, time), rewards (prompts, generations).
        mask = batch["mask"]
        log_pi = logits.log_softmax(-1)
        logps = log_pi.gather(-1, batch["ids"].unsqueeze(-1)).squeeze(-1)
        entropies = -(log_pi.exp() * log_pi).sum(-1)  # eq. 12

        # Group-relative advantages: one for each completion.
        rewards = batch["rewards"]
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)

        # The anchor q·pi_ref (eq. 6). The guide's q (eq. 9-11) has no gradient.
        q = guide(entropies.detach(), logps.detach())
        log_anchor = batch["ref_logps"] + q.log()
        if kl_form == "k3":  # eq. 38, for each token
            difference = log_anchor - logps
            kl = difference.exp() - difference - 1
        else:  # "sequence": eq. 8, from each token to the end, in the advantages
            log_ratio = (logps - log_anchor).detach() * mask
            to_come = log_ratio.flip(1).cumsum(1).flip(1)
            advantages = advantages - beta * to_come
            kl = torch.zeros_like(logps)

        # PPO's clipped surrogate, and the mean over tokens, then over completions.
        ratio = (logps - batch["old_logps"]).exp()
        clipped = ratio.clamp(1 - clip, 1 + clip)
        surrogate = torch.min(ratio * advantages, clipped * advantages)
        of_token = (beta * kl - surrogate) * mask
        return (of_token.sum(1) / mask.sum(1).clamp(min=1)).mean()

Nothing of TRL's loss is copied. It reads the reference in the KL term alone, after its forward pass
has returned log-probabilities and entropies. The batch is handed on as a shallow copy, and after
that pass log q is added to the copy's reference log-probabilities. No forward pass is added.

TRL's and transformers' private members that this needs are checked in tests/test_trl_members.py.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# First: Unsloth, where it is needed, comes before what it patches.
from sage_lib.algorithm.backend import (
    REPLACED,
    Batch,
    SyncRefModelCallback,
    add_fused_lm_head,
    counted_tokens,
    disable_dropout_in_model,
    whole_rows,
)

# isort: split

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from sage_lib.algorithm import checks, kl_forms
from sage_lib.algorithm.advantage_choices import build_advantage
from sage_lib.algorithm.advantages import AdvantageShaper, BatchTokens, TokenShaper
from sage_lib.algorithm.checkpoints import Checkpoints, ReferenceReset
from sage_lib.algorithm.forward_kl import HiddenStates, require_same
from sage_lib.algorithm.guided_trainer import is_sharded
from sage_lib.algorithm.guides import Guide, GuideInputs, check_guide, check_q
from sage_lib.algorithm.kl_forms import K3, K3Corrected, KlForm, Shaped, Tokens, build_kl_form
from sage_lib.algorithm.merging import merged_to_score
from sage_lib.algorithm.padding import by_length
from sage_lib.algorithm.rollouts import BEST_LOGPS, REWARDS
from sage_lib.algorithm.unsloth_seam import ShapedAtScoring
from sage_lib.errors import SageError
from sage_lib.validation import rename_key


@dataclass
class _Pass:
    """A batch on its way through TRL's loss."""

    batch: Batch  # the shallow copy that TRL reads
    shaped: Shaped | None = None  # the result of the KL form after the forward pass
    extra_loss: torch.Tensor | None = None  # of the advantage, per token
    on_policy: bool = True  # every importance ratio is 1, up to rounding


class SageTrainer(ShapedAtScoring, Checkpoints):
    """GRPOTrainer whose KL is taken to q·pi_ref. The arguments of GRPOTrainer keep their meaning;
    docs/own_code.md describes the others:

    Args:
        guide: maps GuideInputs to q of shape (batch, time), a constant to the gradient (Section 4).
        kl_form: the KL term with a guide and without, a name of ``kl_forms.KL_FORMS`` or a KlForm;
            "k3" is the paper's (eq. 38). None: as ``args.use_bias_correction_kl`` says.
        advantage: a choice of ``advantage_choices.ADVANTAGES`` or an AdvantageShaper; None: TRL's.
        dynamic_sampling: the most fresh batches of prompts that replace groups of equal rewards.
        ref_model: the reference, a model or its folder, if training starts from another policy.
        guide_model: a model or its folder, whose log-probabilities the guide reads.
        other_reference: the policy may start apart from its reference.
        reference_reset: steps after which an adapter's reference becomes the policy, and the
            optimiser starts anew (ProRL); 0 is never.
        merge_adapter, trim_padding, share_prompts: the same up to rounding, in fewer operations.

    Without a guide, and with q = 1, ``kl_form=None`` is stock GRPOTrainer bit for bit, except that
    it refuses a corrected KL with ``importance_sampling_level="sequence"``. So is "k3" where
    ``args`` set ``use_bias_correction_kl`` to False. TRL's default is True: then a warning says
    that k3 is trained instead. The caller's ``args`` stay as they are. ``kl_form`` was ``anchor``,
    and ``ref_model`` was ``reference``; the old names work in this release.

    docs/own_code.md also explains what it logs besides GRPOTrainer's metrics.

    Raises:
        SageError: where arguments cannot work together; at the first step where the guide did not
            reach the loss, or the policy does not start at its reference; after a resume with
            another base.
    """

    def __init__(
        self,
        *args: Any,
        guide: Guide | None = None,
        kl_form: str | KlForm | None = "k3",
        dynamic_sampling: int = 0,
        other_reference: bool = False,
        ref_model: PreTrainedModel | str | Path | None = None,
        guide_model: PreTrainedModel | str | Path | None = None,
        merge_adapter: bool = False,
        trim_padding: bool = False,
        share_prompts: bool = False,
        advantage: str | Mapping[str, Any] | AdvantageShaper | None = None,
        reference_reset: int = 0,
        **kwargs: Any,
    ) -> None:
        renamed = (
            ("anchor", "kl_form", kl_form, "k3"),
            ("reference", "ref_model", ref_model, None),
        )
        for old, new, value, default in renamed:
            if old in kwargs and value != default:
                kwargs[new] = value  # both names, which is refused
            rename_key(kwargs, old, new, "SageTrainer")
        kl_form, ref_model = kwargs.pop("kl_form", kl_form), kwargs.pop("ref_model", ref_model)
        if guide is not None:
            check_guide(guide)
        self.kl_form = None if kl_form is None else build_kl_form(kl_form)
        self.advantage = None if advantage is None else build_advantage(advantage)
        super().__init__(*args, **kwargs)
        self.args: Any = copy.copy(self.args)  # the caller may hand the same to another trainer
        self.guide = guide
        if self.kl_form is None and guide is not None:
            self.kl_form = (K3Corrected if self.args.use_bias_correction_kl else K3)()
        self.other_reference = other_reference or ref_model is not None
        self.merge_adapter, self.trim_padding = merge_adapter, trim_padding
        self.share_prompts = share_prompts
        self.reference_reset, self.resampling = reference_reset, dynamic_sampling
        # Unsloth's GPU replacement of GRPOTrainer has another loss (:mod:`unsloth_seam`).
        self.shaped_at_scoring = REPLACED
        self.reached_loss = False
        for reason in checks.refusals(self):
            raise SageError(reason)
        if ref_model is not None:
            self._set_reference(self._loaded(ref_model))
        if guide_model is not None and guide is None:
            raise SageError("guide_model is read by a guide alone: pass guide, too")
        self.guide_model: Any = None
        if guide_model is not None:
            self.guide_model = self._loaded(guide_model).to(self.accelerator.device).eval()
        if self.kl_form is not None:
            dropped = self.args.use_bias_correction_kl and not self.kl_form.bias_corrected
            if dropped and self.kl_form.kl_is_trls and self.beta != 0:
                logging.getLogger(__name__).warning(
                    "use_bias_correction_kl is set to False: kl_form is k3, the paper's KL, "
                    "with a guide and without; kl_form=None keeps the KL that args ask for"
                )
            self.args.use_bias_correction_kl = self.kl_form.bias_corrected
        self._guide_called = False
        self._passing: _Pass | None = None
        #: log q and the credit of returns of each batch, which stay while it is optimised.
        self._batch_signals: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        # Separate streams for each process: neither a guide nor fresh prompts shift sampling.
        seed = self.args.seed * 1009 + self.accelerator.process_index
        self.guide_generator = torch.Generator(device="cpu").manual_seed(seed)
        self.prompt_generator = torch.Generator(device="cpu").manual_seed(seed + 2**31)
        self.advantage_generator = torch.Generator(device="cpu").manual_seed(seed + 2**32)
        self._base_hash = self._hash_base()
        if reference_reset:
            self.add_callback(ReferenceReset(reference_reset))
        self.states: HiddenStates | None = None
        if self.kl_form is not None and self.kl_form.keeps_hidden:
            policy = self._plain(self.model)
            reference = policy if self.ref_model is None else self._plain(self.ref_model)
            self.states = HiddenStates(policy, reference)

    def _loaded(self, model: PreTrainedModel | str | Path) -> PreTrainedModel:
        """Return a model, or that of a folder, in the precision of the policy."""
        if isinstance(model, (str, Path)):
            return AutoModelForCausalLM.from_pretrained(model, dtype=self.model.dtype)
        return model

    def _set_reference(self, model: PreTrainedModel) -> None:
        """Make a model TRL's ``ref_model``, as TRL's constructor does for a plain model."""
        if self.beta == 0 or is_sharded(self):
            raise SageError("ref_model needs beta > 0, and training without FSDP and ZeRO")
        if self.reference_reset:
            raise SageError("reference_reset moves an adapter's own reference: leave out ref_model")
        if model is self.model:
            raise SageError("ref_model is the policy itself: leave it out, or load it once more")
        if self.args.disable_dropout:
            disable_dropout_in_model(model)
        cast = self.args.cast_lm_head_to_fp32
        add_fused_lm_head(model, temperature=self.temperature, cast_lm_head_to_fp32=cast)
        self.ref_model = self.accelerator.prepare_model(model, evaluation_mode=True)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SyncRefModelCallback):  # which holds TRL's own copy
                callback.ref_model = self.ref_model

    # -- the seam ----------------------------------------------------------------------------------

    def _compute_loss(self, model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
        # Shallow: TRL keeps the batch for further iterations, and it must stay as it was.
        passing = _Pass(dict(inputs))
        self._passing = passing if self.model.training else None
        try:
            with self._timed("loss"):
                loss: torch.Tensor = super()._compute_loss(model, passing.batch)
                if passing.shaped is not None and passing.shaped.extra_loss is not None:
                    extra = self._reduced(passing.shaped.extra_loss, passing.batch)
                    loss = loss + self.beta * extra
        finally:
            self._passing = None
            if self.states is not None:
                self.states.last = None  # or the next generation would fill it
        if self.kl_form is not None and passing.shaped is not None:
            seen = passing.shaped, passing.batch, loss, passing.on_policy
            checks.compare_loss(self, self.kl_form, *seen)
        if passing.extra_loss is not None:
            loss = loss + self._reduced(passing.extra_loss, passing.batch)
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run TRL's forward pass. In a loss of training, shape the batch as soon as it returns."""
        if self.states is not None:
            self.states.last = [] if self.model.training else None
        score = super()._get_per_token_logps_and_entropies
        single = self.accelerator.num_processes == 1
        if self.trim_padding and single and (self.states is None or not self.model.training):
            score = partial(by_length, score)
        prompt = args[0].shape[1] - args[2] if self.share_prompts else None
        with merged_to_score(self, model), self._sharing(model, prompt):
            logps, entropies, *others = score(model, *args, **kwargs)
        passing = self._passing
        if passing is not None and entropies is not None:
            self._log_entropies(passing.batch, entropies.detach())
            if isinstance(self.advantage, TokenShaper):
                self._shape_tokens(self.advantage, passing, logps, entropies.detach())
            if "ref_per_token_logps" in passing.batch:
                self._shape(passing, logps, entropies.detach())
        return logps, entropies, *others

    def _shape_tokens(
        self, shaper: TokenShaper, passing: _Pass, live_logps: torch.Tensor, entropies: torch.Tensor
    ) -> None:
        """Put the shaper's advantages where the loss, and the KL form, will read TRL's."""
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
        batch["advantages"], passing.extra_loss = shaped.advantages, shaped.extra_loss
        self._log_advantages(shaped.advantages, shaped.touched, mask)

    def _shape(self, passing: _Pass, live_logps: torch.Tensor, entropies: torch.Tensor) -> None:
        """Put log(q·pi_ref) where the loss will read log pi_ref. Only log pi of the sampled tokens,
        ``live_logps``, has a gradient; shapes are (batch, time)."""
        batch, logps = passing.batch, live_logps.detach()
        mask, ref_logps = counted_tokens(batch), batch["ref_per_token_logps"]
        kl_ref = self._mean(kl_forms.k3(ref_logps, logps), mask)
        if (old_logps := batch.get("old_per_token_logps")) is not None:
            passing.on_policy = torch.allclose(old_logps * mask, logps * mask, rtol=0, atol=1e-4)
        self._record("kl_ref", kl_ref)
        checks.require_start(self, batch, kl_ref)
        if self.kl_form is None:
            return
        # q is of the first pass over a batch.
        steps = self.args.steps_per_generation
        batch_index = self._step % steps
        is_first_pass = self._step % (steps * self.num_iterations) < steps
        if is_first_pass or batch_index not in self._batch_signals:
            log_q = None if self.guide is None else self._log_q(batch, logps, entropies)
            returns = self.kl_form.credits_returns
            credit = kl_forms.return_credit(logps, ref_logps, log_q, mask) if returns else None
            self._batch_signals[batch_index] = log_q, credit
        log_q, credit = self._batch_signals[batch_index]
        vocabulary = None
        if self.states is not None:
            vocabulary = self.states.vocabulary(batch, self.temperature)
            if not self.reached_loss:
                require_same(vocabulary, batch, logps, self._is_half())
        tokens = Tokens(
            live_logps=live_logps,
            logps=logps,
            ref_logps=ref_logps,
            log_q=log_q,
            credit=credit,
            advantages=batch["advantages"],
            beta=self.beta,
            vocabulary=vocabulary,
        )
        passing.shaped = shaped = self.kl_form.shape(tokens)
        batch["ref_per_token_logps"] = shaped.ref_logps
        if shaped.advantages is not None:
            batch["advantages"] = shaped.advantages

    def _log_q(self, batch: Batch, logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        """Call the guide, check and log its q, and return log q, shape (batch, time)."""
        assert self.guide is not None
        inputs = GuideInputs(
            entropies=entropies,
            logps=logps,
            mask=counted_tokens(batch),
            progress=self._progress(),
            generator=self.guide_generator,
            ids=batch["completion_ids"],
            ref_logps=batch["ref_per_token_logps"],
            rewards=batch.get(REWARDS),
            best_logps=batch.get(BEST_LOGPS),
        )
        if self.guide_model is not None:
            with torch.no_grad():
                drawn = self._signals_of(self.guide_model, *whole_rows(batch))
            inputs = replace(inputs, guide_logps=drawn.logps)
        q = check_q(self.guide(inputs), inputs).detach()
        self._log_guide(q, inputs.mask)
        counted = self._counted_by_unsloth(batch) if self.shaped_at_scoring else inputs.mask
        kl_ref = kl_forms.k3(batch["ref_per_token_logps"], logps)
        self._record("guide/kl", self._mean(q * kl_ref, counted))
        if not self._guide_called:
            self._guide_called = True
            checks.warn_if_idle(self.guide, q, inputs)
        return q.to(logps.dtype).log()

    def _progress(self) -> float:
        """Return the share of the steps that are done, in [0, 1]."""
        return float(self.state.global_step / max(self.state.max_steps, 1))

    # -- models ------------------------------------------------------------------------------------

    def _plain(self, model: torch.nn.Module) -> Any:
        """Return the causal language model below wrappers and adapters."""
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if isinstance(model, PeftModel) else model

    def _is_half(self) -> bool:
        """Return whether products of the model are rounded to half precision."""
        return bool(self.accelerator.mixed_precision != "no" or self.model.dtype.itemsize < 4)
