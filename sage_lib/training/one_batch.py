"""A batch of a SageTrainer on a tiny random model: the terms of its loss, its value and gradient.

For notebook 06; nothing is trained. The batch is computed in a separate process without a GPU: on
a GPU Unsloth might replace TRL's loss.
"""

import io
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from sage_lib.algorithm.guides import Guide
from sage_lib.experiment.settings import Model

#: Completions of a prompt, prompts, and the most tokens of a completion.
GROUP, PROMPTS, LONGEST = 4, 2, 16
#: Standard deviation of the noise by which the policy's weights differ from the reference's.
NOISE = 0.1
#: Of weights, noise and samples.
SEED = 0
_ARCHITECTURE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class LossBatch:
    """The terms of the loss of a batch, of shape (batch, time) unless a comment says otherwise."""

    logps: torch.Tensor  # log pi of the sampled tokens, without a gradient
    ref_logps: torch.Tensor  # log pi_ref of the sampled tokens
    entropies: torch.Tensor  # of pi before each token, nats (eq. 12)
    mask: torch.Tensor  # 1 on completion tokens, else 0
    advantages: torch.Tensor  # shape (batch,)
    gradient: torch.Tensor  # d loss / d logps
    loss: float  # of SageTrainer


def loss_batch(guide: Guide, beta: float) -> LossBatch:
    """Sample completions of a tiny random model near its reference, and compute the loss.

    The KL form is k3 and the loss type "grpo" (1/|o|), as in the paper's code. Probabilities come
    from separate forward passes, not from the trainer's.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        arrays, loss = pool.submit(_arrays, guide, beta).result()
    return LossBatch(**{name: torch.tensor(values) for name, values in arrays.items()}, loss=loss)


def _arrays(guide: Guide, beta: float) -> tuple[dict[str, np.ndarray], float]:
    """Return the tensors of a :class:`LossBatch` as arrays, and the loss."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    messages = io.StringIO()  # of libraries, about the machine and files
    with redirect_stdout(messages), redirect_stderr(messages), TemporaryDirectory() as folder:
        from sage_lib.algorithm.backend import whole_rows  # first: Unsloth before transformers
        from sage_lib.algorithm.token_probabilities import completion_signals

        trainer = _trainer(Path(folder), guide, beta)
        rows = [trainer.train_dataset[i // GROUP] for i in range(GROUP * PROMPTS)]
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        batch = trainer._prepare_inputs(rows)
        live_logps = _record_logps(trainer)
        loss = trainer._compute_loss(trainer.model, batch)
        [gradient] = torch.autograd.grad(loss, live_logps)
        with torch.no_grad():
            models = trainer.model, trainer.ref_model
            policy, ref = (completion_signals(model, *whole_rows(batch)) for model in models)
        tensors = {
            "logps": policy.logps,
            "ref_logps": ref.logps,
            "entropies": policy.entropies,
            "mask": batch["completion_mask"],
            "advantages": batch["advantages"],
            "gradient": gradient,
        }
        return {name: np.array(tensor) for name, tensor in tensors.items()}, loss.item()


def _record_logps(trainer: Any) -> list[torch.Tensor]:
    """Return a list to which the next loss will append its log pi, shape (batch, time)."""
    live_logps, score = [], trainer._get_per_token_logps_and_entropies

    def recording(*args: Any, **kwargs: Any) -> Any:
        scored = score(*args, **kwargs)
        if scored[0].requires_grad:
            live_logps.append(scored[0])
        return scored

    trainer._get_per_token_logps_and_entropies = recording
    return live_logps


def _trainer(folder: Path, guide: Guide, beta: float) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from sage_lib.algorithm.backend import GRPOConfig
    from sage_lib.algorithm.trainer import SageTrainer
    from sage_lib.policy import loading, tiny_qwen
    from sage_lib.tasks import prompts

    shape = Model(tiny_qwen.NAME, 64, seed=SEED, architecture=_ARCHITECTURE, largest_number=20)
    tiny_qwen.create(folder, shape)
    model = AutoModelForCausalLM.from_pretrained(folder, **loading.SAFE)
    noise = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(NOISE * torch.randn(weight.shape, generator=noise))
    questions = [f"reach {n} from 1 2 3 4" for n in range(PROMPTS)]
    return SageTrainer(
        guide=guide,
        model=model,
        ref_model=AutoModelForCausalLM.from_pretrained(folder, **loading.SAFE),
        processing_class=tiny_qwen.load_tokenizer(folder),
        reward_funcs=_reward,
        train_dataset=Dataset.from_list([{"prompt": prompts.messages(q)} for q in questions]),
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=GROUP * PROMPTS,
            num_generations=GROUP,
            max_completion_length=LONGEST,
            temperature=1.0,
            beta=beta,
            loss_type="grpo",
            use_bias_correction_kl=False,
            seed=SEED,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        ),
    )


def _reward(completions: Sequence[Sequence[dict[str, str]]], **others: Any) -> list[float]:
    return [len(turns[0]["content"]) % 7 / 7 for turns in completions]
