"""SAGE in one file: GRPO whose KL is taken to q times the reference, with torch and transformers.

    python examples/sage_in_one_file.py                      a random model learns to copy a digit
    python examples/sage_in_one_file.py FOLDER PROBLEMS      a model, and lines {"prompt", "answer"}

Equations are those of the paper, arXiv 2605.18864. A test of this project holds that losses and
weights of three steps are those of SageTrainer (docs/own_code.md), which has the rest: LoRA,
several GPUs, vLLM, resuming, checks. Here each batch is used for one update. So the importance
ratio is 1, and GRPO's clip never acts.
"""

import copy
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config


@dataclass
class Settings:
    steps: int = 200
    prompts: int = 8  # of a step
    completions: int = 8  # of a prompt: a group
    longest: int = 2  # completion, tokens
    learning_rate: float = 3e-3  # at the first step; it falls to 0 in a line
    temperature: float = 1.0
    beta: float = 0.05  # weight of the KL
    threshold: float = 1.2  # of the Branch guide, nats (Table 8)
    ratio: float = 0.3  # of the Branch guide (Table 8); 0 is GRPO
    low: float = 0.6  # q stays between these two
    high: float = 1.4


# -- 1. sample -------------------------------------------------------------------------------------


@dataclass
class Batch:
    ids: torch.Tensor  # prompts, padded on the left, and completions: (batch, prompt + time)
    attention: torch.Tensor  # 1 on tokens that the model reads, of the same shape
    mask: torch.Tensor  # 1 on tokens of completions up to the first end: (batch, time)
    texts: list[str]


def _text(tokenizer, prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)


@torch.no_grad()
def sample(model, tokenizer, prompts: Sequence, settings: Settings) -> Batch:
    """Draw a group of completions for each prompt, a text or a conversation."""
    texts = [_text(tokenizer, prompt) for prompt in prompts for _ in range(settings.completions)]
    read = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    read = {name: read[name].to(model.device) for name in ("input_ids", "attention_mask")}
    ids = model.generate(
        **read,
        max_new_tokens=settings.longest,
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    drawn = ids[:, read["input_ids"].shape[1] :]
    ended = (drawn == tokenizer.eos_token_id).cumsum(1)
    mask = (ended - (drawn == tokenizer.eos_token_id).long() == 0).long()
    attention = torch.cat([read["attention_mask"], mask], 1)
    return Batch(ids, attention, mask, tokenizer.batch_decode(drawn, skip_special_tokens=True))


# -- 2. reward and advantage -----------------------------------------------------------------------


def exact_match(text: str, answer: str) -> float:
    return float(text.strip() == answer)


def advantages(rewards: torch.Tensor, size: int) -> torch.Tensor:
    """Rewards of groups of ``size``, standardised within their group: shape (batch,)."""
    groups = rewards.view(-1, size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


# -- 3. the guide and the loss ---------------------------------------------------------------------


def log_probabilities(model, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi of the sampled tokens, and the entropies before them in nats: both (batch, time)."""
    time = batch.mask.shape[1]
    positions = (batch.attention.cumsum(1) - 1).clamp(min=0)
    read = {"attention_mask": batch.attention, "position_ids": positions}
    logits = model(batch.ids, **read, logits_to_keep=time + 1).logits[:, :-1]
    every = (logits / temperature).log_softmax(-1)
    drawn = every.gather(-1, batch.ids[:, -time:].unsqueeze(-1)).squeeze(-1)
    return drawn, -(every.exp() * every).sum(-1)


def branch(entropies: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Eq. 11: q is above 1 where the policy is unsure."""
    q = 1 + settings.ratio * (entropies - settings.threshold).clamp(min=0)
    return q.clamp(settings.low, settings.high)


def sage_loss(
    logps: torch.Tensor,
    reference: torch.Tensor,
    q: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """GRPO's loss with the KL to q times the reference (eq. 3 and 38), a mean over completions.

    ``logps`` alone has a gradient. All are of shape (batch, time), ``advantage`` is (batch,).
    """
    importance = (logps - logps.detach()).exp()  # 1, with the gradient of log pi
    difference = reference + q.log() - logps
    k3 = difference.exp() - difference - 1
    per_token = -importance * advantage.unsqueeze(1) + beta * k3
    return ((per_token * mask).sum(1) / mask.sum(1)).mean()


# -- 4. update -------------------------------------------------------------------------------------


def train(
    model,
    tokenizer,
    batches: Iterable[Sequence[dict]],
    settings: Settings,
    reward: Callable[[str, str], float] = exact_match,
) -> list[dict[str, float]]:
    """Train in place on the problems of each step; return its loss, mean reward and mean q."""
    reference = copy.deepcopy(model).eval()
    optimiser = torch.optim.AdamW(model.parameters(), settings.learning_rate, weight_decay=0.0)
    falling = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / settings.steps)
    log = []
    for _, problems in zip(range(settings.steps), batches, strict=False):
        batch = sample(model, tokenizer, [one["prompt"] for one in problems], settings)
        answers = [one["answer"] for one in problems for _ in range(settings.completions)]
        scored = [reward(*pair) for pair in zip(batch.texts, answers, strict=True)]
        rewards = torch.tensor(scored, device=model.device)
        logps, entropies = log_probabilities(model, batch, settings.temperature)
        with torch.no_grad():
            ref_logps, _ = log_probabilities(reference, batch, settings.temperature)
            q = branch(entropies, settings)
        advantage = advantages(rewards, settings.completions)
        loss = sage_loss(logps, ref_logps, q, advantage, batch.mask, settings.beta)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        falling.step()
        mean_q = q[batch.mask == 1].mean()
        log.append({"loss": loss.item(), "reward": rewards.mean().item(), "q": mean_q.item()})
    return log


def copying():
    """Make a random model of 30,000 weights, its tokenizer, and ten problems: "copy 7", "7"."""
    words = {word: i for i, word in enumerate(["<pad>", "<end>", "copy", *map(str, range(10))])}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"pad_token": "<pad>", "eos_token": "<end>", "padding_side": "left"}
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(words)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**shape, eos_token_id=1, pad_token_id=0))
    problems = [{"prompt": f"copy {digit}", "answer": str(digit)} for digit in range(10)]
    return model, PreTrainedTokenizerFast(tokenizer_object=core, **ends), problems


def main(words: Sequence[str]) -> None:
    if words:
        folder, file = words
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
        problems = [json.loads(line) for line in Path(file).read_text().splitlines()]
        settings = Settings(longest=256, learning_rate=1e-6)
    else:
        (model, tokenizer, problems), settings = copying(), Settings()
    order = (torch.randint(len(problems), (settings.prompts,)).tolist() for _ in iter(int, 1))
    batches = ([problems[i] for i in chosen] for chosen in order)
    for step, row in enumerate(train(model, tokenizer, batches, settings), 1):
        if step % 20 == 0:
            print(step, *(f"{name} {value:.3f}" for name, value in row.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
