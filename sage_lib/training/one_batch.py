"""One batch of a SageTrainer on a tiny random model: what its loss read, and what it came to.

For looking at the loss, as notebook 05 does; nothing is trained.
"""

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# first: Unsloth patches what is imported after it, and prints what machine it found
with contextlib.redirect_stdout(sys.stderr):
    from sage_lib.algorithm.backend import GRPOConfig
    from sage_lib.algorithm.trainer import SageTrainer

# isort: split

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from sage_lib.algorithm.guides import Guide
from sage_lib.experiment.profile import Model
from sage_lib.policy import tiny_qwen
from sage_lib.tasks import prompts

#: Completions of a prompt, prompts, and the longest completion, tokens.
GROUP, PROMPTS, LONGEST = 4, 2, 16
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class LossBatch:
    """What the loss of one batch is made of; of shape (batch, time) where nothing else is said."""

    logps: torch.Tensor  # log pi of the sampled tokens, without a gradient
    reference: torch.Tensor  # log pi_ref of them
    entropies: torch.Tensor  # before each token, nats (eq. 12)
    mask: torch.Tensor  # 1 on completion tokens, else 0
    advantages: torch.Tensor  # shape (batch,)
    loss: float  # SageTrainer's


class _Watched(SageTrainer):
    """Keeps what its last pass over the policy gave."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.seen = found[:2]
        return found


def loss_batch(guide: Guide, beta: float, seed: int = 0) -> LossBatch:
    """Sample completions of a tiny random model, move it off its reference, and take the loss.

    The anchor is k3, the loss type "grpo" (1/|o|), as in the paper's code. The reward is no task's:
    it only has to differ between completions.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        spec = Model(tiny_qwen.NAME, 64, seed=seed, architecture=_SHAPE, largest_number=20)
        tiny_qwen.create(folder, spec)
        question = [f"reach {n} from 1 2 3 4" for n in range(PROMPTS)]
        trainer = _Watched(
            guide=guide,
            model=AutoModelForCausalLM.from_pretrained(folder),
            processing_class=tiny_qwen.load_tokenizer(folder),
            reward_funcs=_spread,
            train_dataset=Dataset.from_list([{"prompt": prompts.messages(q)} for q in question]),
            args=GRPOConfig(
                output_dir=made,
                per_device_train_batch_size=GROUP * PROMPTS,
                num_generations=GROUP,
                max_completion_length=LONGEST,
                beta=beta,
                loss_type="grpo",
                use_bias_correction_kl=False,
                seed=seed,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
                disable_tqdm=True,
            ),
        )
        return _first_loss(trainer, seed)


def _first_loss(trainer: _Watched, seed: int) -> LossBatch:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [trainer.train_dataset[i // GROUP] for i in range(GROUP * PROMPTS)]
    batch = trainer._prepare_inputs(rows)
    trainer.state.global_step, trainer.state.max_steps = 1, 2  # the start is past
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    loss = trainer._compute_loss(trainer.model, batch)
    logps, entropies = (seen.detach() for seen in trainer.seen)
    return LossBatch(
        logps=logps,
        reference=batch["ref_per_token_logps"],
        entropies=entropies,
        mask=batch["completion_mask"],
        advantages=batch["advantages"],
        loss=loss.item(),
    )


def _spread(completions: Sequence[Sequence[dict[str, str]]], **others: Any) -> list[float]:
    return [len(turns[0]["content"]) % 7 / 7 for turns in completions]
