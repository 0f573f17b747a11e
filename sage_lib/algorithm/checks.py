"""Refusals of SageTrainer: arguments that cannot work, a first batch that the guide did not reach,
and a policy that does not start at its reference."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

# First: Unsloth, where it is needed, comes before what it patches.
from sage_lib.algorithm.backend import Batch, counted_tokens, use_adapter

# isort: split

import torch
from datasets import IterableDataset

from sage_lib.algorithm.advantages import need_whole_groups
from sage_lib.algorithm.checkpoints import is_of_reference
from sage_lib.algorithm.guided_trainer import GuidedTrainer, is_sharded
from sage_lib.algorithm.guides import Guide, GuideInputs, IdentityGuide
from sage_lib.algorithm.kl_forms import KlForm, Shaped, k3, masks_tokens
from sage_lib.algorithm.padding import depends_on_width
from sage_lib.errors import SageError

#: Mean k3 between the policy and its reference at the first step above which they are compared. A
#: trigger, no test: of equal weights it is 0 in float32, and rounding in bfloat16.
START_KL = 1e-3


def refusals(trainer: GuidedTrainer) -> Iterator[str]:
    """Yield a sentence for each reason why a trainer's arguments cannot work together."""
    for name, number in (
        ("dynamic_sampling", trainer.resampling),
        ("reference_reset", trainer.reference_reset),
    ):
        if type(number) is not int or number < 0:  # True would be one round
            yield f"{name} is a whole number, 0 or more, not {number!r}"
    if trainer.trim_padding and depends_on_width(trainer.model.config):
        yield "trim_padding needs rotary positions that do not follow the longest row of a batch"
    if trainer.beta < 0:
        yield f"beta is the weight of the KL and at least 0, not {trainer.beta:g}"
    if trainer.guide is not None and trainer.beta == 0:
        yield "a guide needs beta > 0: without a KL term there is no anchor to shape"
    form = trainer.kl_form
    corrected = trainer.args.use_bias_correction_kl if form is None else form.bias_corrected
    if trainer.beta != 0 and corrected and trainer.importance_sampling_level == "sequence":
        yield (
            "with importance_sampling_level sequence TRL multiplies the KL of every token by the "
            "ratio of the whole completion, which is not the corrected KL: pass kl_form='k3', or "
            "set importance_sampling_level to token"
        )
    sharded = is_sharded(trainer)
    if trainer.args.sync_ref_model and sharded and trainer.args.save_strategy != "no":
        yield "no checkpoint keeps a sharded reference that sync_ref_model moves: save none"
    has_copy = any(is_of_reference(name) for name, _ in trainer.model.named_parameters())
    if trainer.reference_reset and (sharded or not has_copy):
        yield (
            "reference_reset needs beta > 0, and a PeftModel as the model in place of peft_config, "
            "which keeps no copy of the reference; for whole models set sync_ref_model"
        )
    for component in (form, trainer.advantage):
        if component is not None:
            yield from component.requires(trainer)
    if not trainer.resampling:
        return
    yield from need_whole_groups(trainer, "dynamic sampling")
    if (
        trainer.scale_rewards == "batch"
        or trainer.multi_objective_aggregation == "normalize_then_sum"
    ):
        yield (
            "dynamic sampling needs advantages made within their group: set scale_rewards to group "
            "or none, and multi_objective_aggregation to sum_then_normalize"
        )
    if isinstance(trainer.train_dataset, IterableDataset):
        yield "dynamic sampling draws prompts by number: train on a Dataset, not an IterableDataset"


def warn_if_idle(guide: Guide, q: torch.Tensor, seen: GuideInputs) -> None:
    """Warn where a guide left every token of its first batch as it was, and say what it saw."""
    counted = seen.mask.bool()
    if isinstance(guide, IdentityGuide) or not counted.any() or (q[counted] != 1).any():
        return
    shares = torch.tensor([0.5, 0.9, 0.99], device=q.device)
    quantiles = seen.entropies[counted].float().quantile(shares)
    listed = ", ".join(f"{number:.2g}" for number in quantiles.tolist())
    logging.getLogger(__name__).warning(
        "the guide is 1 at every token of the first batch, so it changes nothing there: entropies "
        "have the quantiles %s nats (50 %%, 90 %%, 99 %%); choose a threshold among them",
        listed,
    )


# -- the canary ------------------------------------------------------------------------------------


def compare_loss(
    trainer: GuidedTrainer,
    form: KlForm,
    shaped: Shaped,
    batch: Batch,
    loss: torch.Tensor,
    on_policy: bool,
) -> None:
    """Log the form's KL, and compare TRL's KL and loss of the first batch with the form's.

    A form that computes its KL itself puts TRL's to 0. That is checked in every batch: at the first
    one the policy is its reference, and 0 proves nothing.

    Args:
        trainer: after TRL's loss.
        form: of the KL.
        shaped: the form's result for the batch.
        batch: as TRL's loss read it.
        loss: TRL's, with the form's addition.
        on_policy: whether the importance ratios are 1, up to rounding. With dropout they are not
            where another pass scored the old policy.
    """
    if form.kl_is_trls and trainer.reached_loss:
        return
    logged = trainer._metrics["train"]["kl"]
    trl_kl, expected = logged[-1], trainer._mean(shaped.kl, counted_tokens(batch))
    if not form.kl_is_trls:
        require_equal("KL", trl_kl, 0.0)
        logged[-1] = expected
    if trainer.reached_loss or math.isnan(expected):  # in which no token counts
        return
    trainer.reached_loss = True
    if form.kl_is_trls:
        require_equal("KL", trl_kl, expected)
    first_loss = form.first_loss(shaped)
    # Where TRL's loss of a first batch has no other terms, clips or weights of tokens.
    has_other_terms = (
        trainer._entropy_bonus_enabled
        or trainer.aux_loss_enabled
        or masks_tokens(trainer)
        or trainer.use_vllm
        or not on_policy
    )
    if first_loss is not None and not has_other_terms and trainer.args.delta is None:
        require_equal("loss", loss.item(), trainer._reduced(first_loss, batch).item())


def require_equal(
    name: str, value: float, expected: float, share: float = 1e-3, least: float = 1e-5
) -> None:
    """Raise SageError unless the value of a quantity in TRL's loss is about the expected one: they
    may differ by ``least`` and a ``share`` of what is expected. NaN is refused."""
    if not abs(value - expected) <= least + share * abs(expected):
        raise SageError(
            f"the KL form did not reach the loss ({name} {value:.3g} instead of {expected:.3g}): "
            f"this version of TRL or Unsloth reads the reference elsewhere; use the pinned one"
        )


# -- the start -------------------------------------------------------------------------------------


def require_start(trainer: GuidedTrainer, batch: Batch, kl_ref: float) -> None:
    """Raise a SageError where training starts from another policy than the reference.

    ``kl_ref`` is the mean k3 between the two in the batch, nats. Precision and noise (dropout,
    NEFTune) part equal policies, too. So the weights are compared, and then scores without noise.
    """
    first = trainer.state.global_step == 0 and trainer._step == 0
    if not first or kl_ref <= START_KL or trainer.other_reference or _same_weights(trainer):
        return
    kl = _quiet_kl(trainer, batch)
    if kl <= START_KL:
        return
    remedy = "merge the SFT adapter and save the model before RL"
    if trainer.is_fsdp_enabled:
        remedy = f"set fsdp_cpu_ram_efficient_loading to false under FSDP, {remedy}"
    raise SageError(
        f"the policy does not start at its reference (KL {kl:.3g} at step 0, and other "
        f"weights): {remedy}, or pass other_reference=True if that is the reference you want"
    )


@torch.no_grad()
def _quiet_kl(trainer: GuidedTrainer, batch: Batch) -> float:
    """Return the mean k3 to the reference without noise of training.

    A reference model was scored so. An adapter's reference, the model without the adapter or with
    its copy, is scored again.
    """
    last_states = trainer.states.last if trainer.states else None
    modes = [(m, m.training) for m in trainer.model.modules()]
    if trainer.states:
        trainer.states.last = None
    trainer.model.eval()
    (logps, _), ref_logps = trainer._policy_signals(batch), batch["ref_per_token_logps"]
    if trainer.ref_model is None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        with use_adapter(model, "ref" if "ref" in model.peft_config else None):
            ref_logps, _ = trainer._policy_signals(batch)
    for module, training in modes:
        module.training = training
    if trainer.states:
        trainer.states.last = last_states
    kl: float = trainer._mean(k3(ref_logps, logps), counted_tokens(batch))
    return kl


def _same_weights(trainer: GuidedTrainer) -> bool:
    """Return whether policy and reference have the same weights on every process.

    False where ZeRO hands out no whole weights. The reference of an adapter without a copy is the
    model without the adapter: they are equal while LoRA's B matrices are 0.
    """
    policy = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    if trainer.ref_model is not None:
        ref_weights = dict(trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters())
    else:
        copies = {n.replace(".ref.", ".default."): p for n, p in policy.items() if ".ref." in n}
        zeros = {n: torch.zeros_like(p) for n, p in policy.items() if ".lora_B." in n}
        ref_weights = copies or zeros
    readable = bool(ref_weights) and not trainer.is_deepspeed_enabled
    same = readable and all(n in policy and _equal(policy[n], p) for n, p in ref_weights.items())
    everywhere = trainer.accelerator.gather(torch.tensor([same], device=trainer.accelerator.device))
    return bool(everywhere.all())


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two weights are equal up to the rounding of the coarser of their types."""
    full = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in (a.detach(), b.detach())]
    if a.dtype != b.dtype:
        coarser = max(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        full = [x.to(coarser) for x in full]
    return torch.equal(*full)
