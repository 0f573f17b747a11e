"""What SageTrainer refuses: settings that cannot work, a first batch that the guide did not reach,
and a policy that does not start at its reference."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

# First: Unsloth, where it is needed, comes before what it patches.
from sage_lib.algorithm.backend import Batch, counted_tokens, use_adapter

# isort: split

import torch
from datasets import IterableDataset

from sage_lib.algorithm.anchors import Anchor, Shaped, k3, masks_tokens
from sage_lib.algorithm.checkpoints import is_of_reference
from sage_lib.algorithm.guides import GuideInputs, IdentityGuide
from sage_lib.algorithm.padding import depends_on_width
from sage_lib.errors import SageError

#: Mean k3 between the policy and its reference at the first step above which they are compared. A
#: trigger, no test: of equal weights it is 0 in float32, and rounding in bfloat16.
START_KL = 1e-3


def require_usable(trainer: Any) -> None:
    """Raise a SageError with the first reason why these settings cannot work together."""
    for reason in _refusals(trainer):
        raise SageError(reason)


def _refusals(t: Any) -> Iterator[str]:
    sharded = t.is_fsdp_enabled or t.is_deepspeed_enabled
    if t.trim_padding and depends_on_width(t.model.config):
        yield "trim_padding needs rotary positions that do not follow the longest row of a batch"
    if t.beta < 0:
        yield f"beta is the weight of the KL and at least 0, not {t.beta:g}"
    if t.guide is not None and t.beta == 0:
        yield "a guide needs beta > 0: without a KL term there is no anchor to shape"
    corrected = t.args.use_bias_correction_kl if t.anchor is None else t.anchor.bias_corrected
    if t.beta != 0 and corrected and t.importance_sampling_level == "sequence":
        yield (
            "with importance_sampling_level sequence TRL multiplies the KL of every token by the "
            "ratio of the whole completion, which is not the corrected KL: pass anchor='k3', or "
            "set importance_sampling_level to token"
        )
    if t.args.sync_ref_model and sharded and t.args.save_strategy != "no":
        yield "no checkpoint keeps a sharded reference that sync_ref_model moves: save none"
    copied = any(is_of_reference(name) for name, _ in t.model.named_parameters())
    if t.reference_reset and (sharded or not copied):
        yield (
            "reference_reset needs beta > 0, and a PeftModel as the model in place of peft_config, "
            "which keeps no copy of the reference; for whole models set sync_ref_model"
        )
    for part in (t.anchor, t.advantage):
        if part is not None:
            yield from part.requires(t)
    if not t.resampling:
        return
    if t.args.per_device_train_batch_size * t.args.steps_per_generation % t.num_generations:
        yield (
            "dynamic sampling needs whole groups on every process: make "
            "per_device_train_batch_size x steps_per_generation a multiple of num_generations"
        )
    if t.scale_rewards == "batch" or t.multi_objective_aggregation == "normalize_then_sum":
        yield (
            "dynamic sampling needs advantages made within their group: set scale_rewards to group "
            "or none, and multi_objective_aggregation to sum_then_normalize"
        )
    if isinstance(t.train_dataset, IterableDataset):
        yield "dynamic sampling draws prompts by number: train on a Dataset, not an IterableDataset"


def warn_if_idle(guide: Any, q: torch.Tensor, seen: GuideInputs) -> None:
    """Warn where a guide left every token of its first batch as it was, and say what it saw."""
    counted = seen.mask.bool()
    if isinstance(guide, IdentityGuide) or not counted.any() or (q[counted] != 1).any():
        return
    shares = torch.tensor([0.5, 0.9, 0.99], device=q.device)
    quantiles = seen.entropies[counted].float().quantile(shares)
    told = ", ".join(f"{number:.2g}" for number in quantiles.tolist())
    logging.getLogger(__name__).warning(
        "the guide is 1 at every token of the first batch, so it changes nothing there: entropies "
        "have the quantiles %s nats (50 %%, 90 %%, 99 %%); choose a threshold among them",
        told,
    )


# -- the canary ------------------------------------------------------------------------------------


def settle(t: Any, anchor: Anchor, shaped: Shaped, batch: Batch, loss: torch.Tensor) -> None:
    """After TRL's loss: log the anchor's own KL, and compare what TRL made of the first batch with
    what the shaped anchor asks for.

    TRL's own KL under an anchor that puts it to 0 is looked at in every batch: at the first one the
    policy is its reference, and 0 says nothing yet.
    """
    if anchor.kl_is_trls and t.reached_loss:
        return
    logged = t._metrics["train"]["kl"]
    found, expected = logged[-1], t._mean(shaped.kl, counted_tokens(batch))
    if not anchor.kl_is_trls:
        require_equal("KL", found, 0.0)
        logged[-1] = expected
    if t.reached_loss or math.isnan(expected):  # in which no token counts
        return
    t.reached_loss = True
    if anchor.kl_is_trls:
        require_equal("KL", found, expected)
    first_loss = anchor.first_loss(shaped)
    # Where TRL's loss of a first batch has no other terms, clips or weights of tokens.
    more = t._entropy_bonus_enabled or t.aux_loss_enabled or masks_tokens(t) or t.use_vllm
    if first_loss is not None and not more and t.args.delta is None:
        require_equal("loss", loss.item(), t._reduced(first_loss, batch).item())


def require_equal(
    name: str, found: float, expected: float, share: float = 1e-3, least: float = 1e-5
) -> None:
    """SageError unless two numbers are equal up to a share of the expected one."""
    if not abs(found - expected) <= least + share * abs(expected):  # nor where it is no number
        raise SageError(
            f"the guide did not reach the loss ({name} {found:.3g} instead of {expected:.3g}): "
            f"this version of TRL or Unsloth reads the reference elsewhere; use the pinned one"
        )


# -- the start -------------------------------------------------------------------------------------


def require_start(t: Any, batch: Batch, kl_ref: float) -> None:
    """Raise a SageError where the reference is another policy than the one that starts.

    Precision and noise (dropout, NEFTune) part two equal policies too: what counts is whether they
    have the same weights, or score alike without that noise.
    """
    first = t.state.global_step == 0 and t._step == 0
    if not first or kl_ref <= START_KL or t.other_reference or _same_weights(t):
        return
    kl = _quiet_kl(t, batch)
    if kl <= START_KL:
        return
    remedy = "merge the SFT adapter and save the model before RL"
    if t.is_fsdp_enabled:
        remedy = f"set fsdp_cpu_ram_efficient_loading to false under FSDP, {remedy}"
    raise SageError(
        f"the policy does not start at its reference (KL {kl:.3g} at step 0, and other "
        f"weights): {remedy}, or pass other_reference=True if that is the reference you want"
    )


@torch.no_grad()
def _quiet_kl(t: Any, batch: Batch) -> float:
    """The mean k3 to the reference without noise of training. A reference model was scored so; an
    adapter's reference, which is the model without it or with its copy, is scored again."""
    kept, modes = t.states and t.states.kept, [(m, m.training) for m in t.model.modules()]
    if t.states:
        t.states.kept = None
    t.model.eval()
    (logps, _), reference = t._policy_signals(batch), batch["ref_per_token_logps"]
    if t.ref_model is None:
        model = t.accelerator.unwrap_model(t.model)
        with use_adapter(model, "ref" if "ref" in model.peft_config else None):
            reference, _ = t._policy_signals(batch)
    for module, training in modes:
        module.training = training
    if t.states:
        t.states.kept = kept
    kl: float = t._mean(k3(reference, logps), counted_tokens(batch))
    return kl


def _same_weights(t: Any) -> bool:
    """Whether policy and reference have the same weights on every process. False where ZeRO hands
    out no whole ones. The reference of an adapter without a copy is the model without it: equal
    while LoRA's B matrices are 0."""
    policy = dict(t.accelerator.unwrap_model(t.model).named_parameters())
    if t.ref_model is not None:
        reference = dict(t.accelerator.unwrap_model(t.ref_model).named_parameters())
    else:
        copies = {n.replace(".ref.", ".default."): p for n, p in policy.items() if ".ref." in n}
        reference = copies or {n: torch.zeros_like(p) for n, p in policy.items() if ".lora_B." in n}
    seen = bool(reference) and not t.is_deepspeed_enabled
    same = seen and all(n in policy and _equal(policy[n], p) for n, p in reference.items())
    everywhere = t.accelerator.gather(torch.tensor([same], device=t.accelerator.device))
    return bool(everywhere.all())


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two weights are equal up to the rounding of the coarser of their types."""
    whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in (a.detach(), b.detach())]
    if a.dtype != b.dtype:
        coarser = max(a.dtype, b.dtype, key=lambda t: torch.finfo(t).eps)
        whole = [x.to(coarser) for x in whole]
    return torch.equal(*whole)
