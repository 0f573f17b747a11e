"""SageTrainer: GRPOTrainer with a guided anchor, eq. 3 and 6.

TRL's loss reads the reference in one place only, the KL term, and after its own forward pass has given log-probabilities
and token entropies. So nothing of the loss is copied: the batch is handed on as a shallow copy, and as soon as that pass
returns, the copy's reference log-probabilities become log pi_ref + log q. No forward pass is added.
"""

import hashlib
import logging
import os
import time
from contextlib import contextmanager
from typing import Literal

# first: Unsloth patches what is imported after it
from sage_lib.algorithm.backend import GRPOTrainer

# isort: split

import torch
from peft import PeftModel

from sage_lib.algorithm import anchors
from sage_lib.algorithm.guides import Guide, GuideInputs
from sage_lib.errors import SageError

Anchor = Literal["k3", "k3_corrected", "sequence", "forward_kl"]


class SageTrainer(GRPOTrainer):
    """GRPOTrainer whose KL is taken to q·pi_ref. Every argument of GRPOTrainer keeps its meaning.

    Args:
        guide: maps a GuideInputs, whose tensors have shape (batch, time), to q of that shape; None is plain GRPO.
            Entropies are in nats, at the sampling temperature. q is a constant to the gradient, is computed once for
            every batch of completions, and stays fixed while that batch is optimised (Section 4), also over
            ``num_iterations`` > 1. It shapes training; an evaluation's KL is the one to pi_ref.
        anchor: how the KL term is estimated. "k3": per token, eq. 38, as the paper's code, the default with a guide (TRL's
            own default is the next one, under which a guide of the state alone has no expected effect). "k3_corrected":
            per token, multiplied by the importance ratio. "sequence": eq. 8, the log-ratio of the whole completion
            credited through the advantages. "forward_kl": KL(pi_ref ‖ pi) per token, exact over the vocabulary, without a
            guide. None: what ``args`` say.
        dynamic_sampling: DAPO's: up to so many fresh batches of prompts replace the groups whose rewards are all equal.

    It logs, beside TRL's metrics: ``kl_ref``, the mean k3 to pi_ref itself (eq. 38, q = 1), while ``kl`` is the divergence
    that the loss has, to the shaped anchor; ``guide/mean``, ``min``, ``max`` of q, ``guide/acting`` and ``guide/clamped``,
    the shares of tokens where q is not 1 and where it is at its clamp; ``sampling/rounds`` and ``sampling/flat`` (share of
    groups left without a spread) with dynamic sampling; ``time/generation``, ``time/reward``, ``time/scoring`` (reference
    and everything else before the loss) and ``time/loss`` (forward pass and loss), seconds.

    Raises:
        SageError: at construction where the guide could not reach the loss; at the first step when it did not, or when
            the policy does not start at its reference (``kl_ref`` above 1e-3); after a resume, when the reference is
            another than before.
    """

    def __init__(
        self,
        *args,
        guide: Guide | None = None,
        anchor: Anchor | None = None,
        dynamic_sampling: int = 0,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.guide, self.dynamic_sampling = guide, dynamic_sampling
        self.anchor: Anchor | None = anchor or ("k3" if guide is not None else None)
        # Unsloth's GPU replacement of GRPOTrainer computes its loss elsewhere and returns no entropies: there the anchor is
        # shaped where the reference is scored, at the price of one forward pass without a gradient.
        self._seam: Literal["loss", "scoring"] = (
            "scoring"
            if any(
                "unsloth" in f"{c.__module__}.{c.__qualname__}".lower() for c in type(self).__mro__
            )
            else "loss"
        )
        self._require_usable()
        if self.anchor is not None and self.args.use_bias_correction_kl != (
            self.anchor == "k3_corrected"
        ):
            if anchor is None:
                logging.getLogger(__name__).warning(
                    "use_bias_correction_kl is set to False: the anchor is k3, as in the paper's code; pass anchor='k3_corrected' for the other one"
                )
            self.args.use_bias_correction_kl = self.anchor == "k3_corrected"
        self._shaping: dict | None = None
        self._q: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self._hidden: list[torch.Tensor] | None = None
        self._guide_checked = False
        # Streams of their own for each process, so that neither a guide nor fresh prompts shift the sampling.
        self.guide_generator, self.prompt_generator = (
            torch.Generator(device="cpu").manual_seed(
                self.args.seed * 1009 + self.accelerator.process_index + offset
            )
            for offset in (0, 2**31)
        )
        self._reference_hash = self._hash_reference()
        if self.anchor == "forward_kl":
            for model in {
                id(m): m
                for m in (self._plain(self.model), self._plain(self.ref_model))
                if m is not None
            }.values():
                model.get_decoder().register_forward_hook(self._keep_hidden)

    def _require_usable(self) -> None:
        def refuse(condition: bool, sentence: str) -> None:
            if condition:
                raise SageError(sentence)

        refuse(
            self.guide is not None and self.beta == 0,
            "a guide needs beta > 0: without a KL term there is no anchor to shape",
        )
        refuse(
            self.anchor not in (None, "k3", "k3_corrected", "sequence", "forward_kl"),
            f"there is no anchor {self.anchor!r}: choose k3, k3_corrected, sequence or forward_kl",
        )
        refuse(
            self.anchor in ("sequence", "forward_kl") and self.beta == 0,
            f"the anchor {self.anchor!r} needs beta > 0",
        )
        refuse(
            self.anchor is not None and getattr(self.args, "use_liger_kernel", False),
            "the anchor cannot be shaped inside Liger's kernel: set use_liger_kernel to False",
        )
        refuse(
            self.anchor in ("sequence", "forward_kl") and self.loss_type not in anchors.REDUCTIONS,
            f"the anchor {self.anchor!r} works with loss_type {', '.join(anchors.REDUCTIONS)}, not {self.loss_type!r}",
        )
        refuse(
            self.anchor == "sequence" and self.importance_sampling_level != "token",
            "the anchor 'sequence' credits tokens one by one: set importance_sampling_level to token",
        )
        refuse(
            self.anchor == "forward_kl" and self.guide is not None,
            "the exact forward KL has no sampled token for a guide to act on: use the anchor k3 with it, or no guide",
        )
        refuse(
            self.anchor == "forward_kl" and (self.is_fsdp_enabled or self.is_deepspeed_enabled),
            "the exact forward KL needs whole weights on every process: use data parallelism without FSDP or ZeRO",
        )
        refuse(
            self._seam == "scoring" and self.anchor not in (None, "k3"),
            f"Unsloth's GPU trainer has the loss of the anchor 'k3' only, not of {self.anchor!r}: use plain TRL for it",
        )
        local = self.args.per_device_train_batch_size * self.args.steps_per_generation
        refuse(
            bool(self.dynamic_sampling) and local % self.num_generations != 0,
            f"dynamic sampling needs whole groups on every process: {local} completions are not a multiple of num_generations {self.num_generations}",
        )
        refuse(
            bool(self.dynamic_sampling) and self.scale_rewards == "batch",
            "dynamic sampling needs rewards scaled within their group: set scale_rewards to group or none",
        )

    # -- the seam ------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model, inputs):
        if (
            not self.model.training
            or "ref_per_token_logps" not in inputs
            or self._seam == "scoring"
        ):
            with self._timed("loss"):
                return super()._compute_loss(model, inputs)
        self._shaping = dict(
            inputs
        )  # shallow: TRL keeps the batch for further iterations, and it must stay as it was
        try:
            with self._timed("loss"):
                loss = super()._compute_loss(model, self._shaping)
                beside = self._shaping.pop("_beside", None)
                if beside is not None:  # a term that TRL's loss has no place for
                    loss = loss + self.beta * self._reduce(beside, self._shaping)
                if self.anchor in ("sequence", "forward_kl"):
                    self._metrics["train"]["kl"][-1] = self._shaping["_kl"]  # TRL saw a KL of 0
        finally:
            shaped, self._shaping, self._hidden = (
                self._shaping,
                None,
                None,
            )  # or the next generation would fill it
        if self.anchor is not None and not self._guide_checked:
            self._require_shaped_kl(shaped, loss)
        return loss

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self._hidden = []
        logps, entropies, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._shaping is not None and entropies is not None:
            self._shape(self._shaping, logps, entropies.detach())
        return logps, entropies, *rest

    def _shape(self, batch: dict, logps: torch.Tensor, entropies: torch.Tensor) -> None:
        """Put log(q·pi_ref) where the loss will read log pi_ref. ``logps`` and ``entropies``: shape (batch, time)."""
        mask, reference, fixed = _mask(batch), batch["ref_per_token_logps"], logps.detach()
        kl_ref = self._mean(anchors.k3(reference, fixed), mask)
        self._metrics["train"]["kl_ref"].append(kl_ref)
        if self.state.global_step == 0 and self._step == 0 and kl_ref > 1e-3:
            raise SageError(
                f"the policy does not start at its reference (KL {kl_ref:.3g} at step 0): merge the SFT adapter and save the model before RL"
            )
        if self.anchor is None:
            return
        log_q, credit = self._guided(fixed, entropies, reference, mask)
        if self.anchor == "forward_kl":
            hidden, width = torch.cat(self._hidden), logps.shape[1]
            batch["_beside"] = anchors.exact_forward_kl(
                hidden[:, -width - 1 : -1], batch["ref_hidden"], *self._heads(), self.temperature
            )
            batch["_kl"] = self._mean(batch["_beside"].detach(), mask)
            batch["ref_per_token_logps"] = fixed  # k3 of equals: no value, no gradient
        elif self.anchor == "sequence":
            advantages = batch["advantages"]
            batch["advantages"] = (
                advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
            ) + self.beta * credit
            batch["_kl"] = self._mean(fixed - reference - (0 if log_q is None else log_q), mask)
            batch["ref_per_token_logps"] = fixed
        elif log_q is not None:
            batch["ref_per_token_logps"] = reference + log_q
        batch["_expected_kl"] = batch.get(
            "_kl", self._mean(anchors.k3(batch["ref_per_token_logps"], fixed), mask)
        )

    def _guided(
        self,
        logps: torch.Tensor,
        entropies: torch.Tensor,
        reference: torch.Tensor,
        mask: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """log q and the credit of eq. 8 of this batch, shape (batch, time); from the first pass over it, whatever the iteration."""
        slot = self._step % self.args.steps_per_generation
        first = (
            self._step % (self.args.steps_per_generation * self.num_iterations)
            < self.args.steps_per_generation
        )
        if first or slot not in self._q:
            log_q = None if self.guide is None else self._log_q(logps, entropies, mask)
            self._q[slot] = (
                log_q,
                anchors.return_credit(logps, reference, log_q, mask)
                if self.anchor == "sequence"
                else None,
            )
        return self._q[slot]

    def _log_q(
        self, logps: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Ask the guide, check and log what it says: log q, shape (batch, time)."""
        progress = self.state.global_step / max(self.state.max_steps, 1)
        q = self.guide(
            GuideInputs(
                entropies=entropies,
                logps=logps,
                mask=mask,
                progress=progress,
                generator=self.guide_generator,
            )
        )
        if q.shape != logps.shape or not torch.isfinite(q).all() or (q <= 0).any():
            raise SageError(
                f"the guide must return positive finite values of shape {tuple(logps.shape)}, one for each token"
            )
        self._log_guide_metrics(q.detach(), mask)
        return q.detach().to(logps.dtype).log()

    def _reduce(self, per_token: torch.Tensor, batch: dict) -> torch.Tensor:
        return anchors.reduce(
            per_token,
            _mask(batch),
            self.loss_type,
            self.max_completion_length,
            batch.get("num_items_in_batch"),
            self.accelerator.num_processes,
            self.current_gradient_accumulation_steps,
            self.args.steps_per_generation,
        )

    def _require_shaped_kl(self, batch: dict, loss: torch.Tensor) -> None:
        """The canary: what TRL made of the first batch must be what the shaped anchor asks for."""
        self._guide_checked = True
        name, logged, expected = "KL", self._metrics["train"]["kl"][-1], batch["_expected_kl"]
        if (
            self.anchor == "sequence"
            and not self._entropy_bonus_enabled
            and self.top_entropy_quantile == 1
            and self.args.delta is None
            and not self.use_vllm
        ):
            # On-policy the ratio is 1 and the loss is minus the advantages, credit included.
            name, logged, expected = (
                "loss",
                loss.item(),
                -self._reduce(batch["advantages"], batch).item(),
            )
        if abs(logged - expected) > 1e-5 + 1e-3 * abs(expected):
            raise SageError(
                f"the guide did not reach the loss ({name} {logged:.3g} instead of {expected:.3g}): "
                "this version of TRL reads the reference elsewhere; use the pinned one"
            )

    # -- the exact forward KL ------------------------------------------------------------------------------------------

    def _plain(self, model: torch.nn.Module | None) -> torch.nn.Module | None:
        """The causal language model below wrappers and adapters."""
        if model is None:
            return None
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if isinstance(model, PeftModel) else model

    def _keep_hidden(self, module, inputs, output) -> None:
        if self._hidden is not None:
            self._hidden.append(output.last_hidden_state)

    def _heads(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        policy = self._plain(self.model).get_output_embeddings()
        return policy, policy if self.ref_model is None else self._plain(
            self.ref_model
        ).get_output_embeddings()

    # -- sampling ------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs):
        batch = self._scored(inputs)
        if not self.dynamic_sampling or not self.model.training:
            return batch
        rounds, group = 1, torch.arange(len(inputs)).view(-1, self.num_generations)
        while (
            rounds <= self.dynamic_sampling
            and self.accelerator.gather(_flat(batch, self.num_generations).any()).any()
        ):
            count = len(group)
            chosen = torch.randint(
                len(self.train_dataset), (count,), generator=self.prompt_generator
            ).tolist()
            fresh = self._scored(
                [self.train_dataset[i] for i in chosen for _ in range(self.num_generations)]
            )
            needed, offered = (
                _flat(batch, self.num_generations).nonzero().flatten().cpu(),
                (~_flat(fresh, self.num_generations)).nonzero().flatten().cpu(),
            )
            used = min(len(needed), len(offered))
            batch = anchors.replace_rows(
                batch,
                group[needed[:used]].flatten().tolist(),
                fresh,
                group[offered[:used]].flatten().tolist(),
                self._tokenizer.pad_token_id,
            )
            rounds += 1
        if "num_items_in_batch" in batch:
            batch["num_items_in_batch"] = self.accelerator.gather(_mask(batch).sum()).sum()
        self._metrics["train"]["sampling/rounds"].append(float(rounds))
        self._metrics["train"]["sampling/flat"].append(
            self.accelerator.gather(_flat(batch, self.num_generations).float().mean()).mean().item()
        )
        return batch

    def _scored(self, inputs) -> dict:
        """TRL's generation and scoring, with the time it takes and, for the exact forward KL, the reference's hidden states."""
        started = time.perf_counter()
        batch = super()._generate_and_score_completions(inputs)
        if self.anchor == "forward_kl":  # the reference is scored last
            width = batch["completion_ids"].shape[1]
            batch["ref_hidden"] = torch.cat(self._hidden)[:, -width - 1 : -1].detach()
        self._hidden = None
        if self._seam == "scoring" and self.model.training and "ref_per_token_logps" in batch:
            self._shape_scored(batch)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["time/scoring"].append(
            time.perf_counter()
            - started
            - metrics["time/generation"][-1]
            - metrics["time/reward"][-1]
        )
        return batch

    @torch.no_grad()
    def _shape_scored(self, batch: dict) -> None:
        """The seam "scoring": q from a pass of its own, put into the reference log-probabilities of the whole batch."""
        mask, reference, parts = _mask(batch), batch["ref_per_token_logps"], []
        if reference.shape != mask.shape:
            raise SageError(
                f"the reference is scored in shape {tuple(reference.shape)}, the completions have {tuple(mask.shape)}: this version of Unsloth packs them differently; use plain TRL"
            )
        ids, attention = (
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        )
        size = self.args.per_device_train_batch_size
        for rows, seen, drawn in zip(
            ids.split(size), attention.split(size), batch["completion_ids"].split(size), strict=True
        ):
            log_pi = (
                self.model(input_ids=rows, attention_mask=seen)
                .logits[:, -drawn.shape[1] - 1 : -1]
                .float()
                / self.temperature
            ).log_softmax(-1)
            parts.append(
                (log_pi.gather(-1, drawn[..., None])[..., 0], -(log_pi.exp() * log_pi).sum(-1))
            )
        logps, entropies = (torch.cat(p) for p in zip(*parts, strict=True))
        self._metrics["train"]["kl_ref"].append(self._mean(anchors.k3(reference, logps), mask))
        if self.guide is not None:
            batch["ref_per_token_logps"] = reference + self._log_q(logps, entropies, mask)

    def _generate(self, prompts):
        with self._timed("generation"):
            return super()._generate(prompts)

    def _calculate_rewards(self, *args, **kwargs):
        with self._timed("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    # -- metrics -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, part: str):
        started = time.perf_counter()
        yield
        self._metrics["train" if self.model.training else "eval"][f"time/{part}"].append(
            time.perf_counter() - started
        )

    def _mean(self, per_token: torch.Tensor, mask: torch.Tensor) -> float:
        """Mean over the masked tokens of all processes."""
        totals = self.accelerator.reduce(
            torch.stack([(per_token * mask).sum(), mask.sum().to(per_token)]), reduction="sum"
        )
        return (totals[0] / totals[1].clamp(min=1)).item()

    def _log_guide_metrics(self, q: torch.Tensor, mask: torch.Tensor) -> None:
        low, high = (getattr(self.guide, name, None) for name in ("low", "high"))
        means = {"mean": q, "acting": (q != 1).to(q)} | (
            {} if low is None else {"clamped": ((q <= low) | (q >= high)).to(q)}
        )
        for name, value in means.items():
            self._metrics["train"][f"guide/{name}"].append(self._mean(value, mask))
        ends = self.accelerator.gather(
            torch.stack(
                [
                    q.masked_fill(mask == 0, torch.inf).min(),
                    -q.masked_fill(mask == 0, -torch.inf).max(),
                ]
            ).unsqueeze(0)
        ).amin(0)
        self._metrics["train"]["guide/min"].append(ends[0].item())
        self._metrics["train"]["guide/max"].append(-ends[1].item())

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _hash_reference(self) -> str:
        """Hash of what makes the reference differ from the model below it: its weights, or its adapter's; "" without one."""
        if self.beta == 0 or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return ""
        named = (
            self.ref_model.named_parameters()
            if self.ref_model is not None
            else ((n, p) for n, p in self.model.named_parameters() if ".ref." in n)
        )
        digest = hashlib.sha256()
        for name, p in named:
            digest.update(name.encode())
            digest.update(p.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:12]

    def _state_file(self, folder: str) -> str:
        return os.path.join(folder, f"sage_state_{self.accelerator.process_index}.pt")

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        folder = os.path.join(
            self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}"
        )
        torch.save(
            {
                "guide": self.guide_generator.get_state(),
                "prompts": self.prompt_generator.get_state(),
                "reference": self._reference_hash,
            },
            self._state_file(folder),
        )

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
        if checkpoint and os.path.isfile(path := self._state_file(checkpoint)):
            state = torch.load(path, weights_only=True)
            self.guide_generator.set_state(state["guide"])
            self.prompt_generator.set_state(state["prompts"])
            if state["reference"] != self._hash_reference():
                raise SageError(
                    "the reference policy is not the one that this run started with: resume with the same SFT model and adapter settings, or start a new run"
                )


def _mask(batch: dict) -> torch.Tensor:
    """The tokens that TRL's loss counts, shape (batch, time)."""
    return (
        batch["completion_mask"] * batch["tool_mask"]
        if "tool_mask" in batch
        else batch["completion_mask"]
    )


def _flat(batch: dict, generations: int) -> torch.Tensor:
    """Groups whose rewards are all equal, and so teach nothing: bool of shape (groups,)."""
    return batch["advantages"].view(-1, generations).abs().amax(1) < 1e-6
