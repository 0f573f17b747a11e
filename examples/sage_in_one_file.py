"""SAGE in one file: GRPO with a guided KL, with torch and transformers alone.

GRPO draws several completions of a prompt, rewards them, and makes those above their group's mean
more likely. A KL term, weighted by beta, keeps the policy near the reference: the model at the
start. SAGE multiplies the probabilities of the reference by a guide q, one number for each token.

    python examples/sage_in_one_file.py                      a random model learns to copy a digit
    python examples/sage_in_one_file.py FOLDER PROBLEMS      a model, and lines {"prompt", "answer"}

Equations are of the paper, arXiv 2605.18864. A test holds that losses and weights of three steps
are those of SageTrainer (docs/own_code.md). Each batch has one update: the importance ratio is 1.
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
    longest: int = 2  # tokens of a completion, at most
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
    options = {"add_generation_prompt": True, "tokenize": False}
    return prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt, **options)


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
    is_end = (drawn == tokenizer.eos_token_id).long()
    mask = (is_end.cumsum(1) - is_end == 0).long()  # no end before: the first end itself counts
    attention = torch.cat([read["attention_mask"], mask], 1)
    return Batch(ids, attention, mask, tokenizer.batch_decode(drawn, skip_special_tokens=True))


# -- 2. reward and advantage -----------------------------------------------------------------------


def exact_match(text: str, answer: str) -> float:
    """1 if the whole completion is the answer. For a model that explains, write another."""
    return float(text.strip() == answer)


def advantages(rewards: torch.Tensor, size: int) -> torch.Tensor:
    """Rewards of groups of ``size``, standardised within their group: shape (batch,)."""
    groups = rewards.view(-1, size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()  # 0 where all are equal


# -- 3. the guide and the loss ---------------------------------------------------------------------


def log_probabilities(model, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi of the sampled tokens, and the entropies before them in nats: both (batch, time)."""
    time = batch.mask.shape[1]
    positions = (batch.attention.cumsum(1) - 1).clamp(min=0)
    read = {"attention_mask": batch.attention, "position_ids": positions}
    logits = model(batch.ids, **read, logits_to_keep=time + 1).logits[:, :-1]
    log_pi = (logits / temperature).log_softmax(-1)  # of all tokens of the vocabulary
    drawn = log_pi.gather(-1, batch.ids[:, -time:].unsqueeze(-1)).squeeze(-1)
    return drawn, -(log_pi.exp() * log_pi).sum(-1)


def branch(entropies: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Eq. 11: q is above 1 where the policy is unsure, at ratio 0.3 from 1.2 nats on."""
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

    ``logps`` alone has a gradient. Shapes: (batch, time), and (batch,) of ``advantage``."""
    importance = (logps - logps.detach()).exp()  # 1, with the gradient of log pi
    difference = reference + q.log() - logps
    k3 = difference.exp() - difference - 1  # at least 0: an estimate of the KL from one token
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
        batch = sample(model, tokenizer, [problem["prompt"] for problem in problems], settings)
        answers = [problem["answer"] for problem in problems for _ in range(settings.completions)]
        rewards = torch.tensor(list(map(reward, batch.texts, answers)), device=model.device)
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
        folder, file = words  # of a model, and .jsonl
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.generation_config = type(model.generation_config)()  # no penalties: pi alone
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        problems = [json.loads(line) for line in Path(file).read_text().splitlines()]
        settings = Settings(longest=256, learning_rate=1e-6)  # 16 bits would lose such steps
    else:
        (model, tokenizer, problems), settings = copying(), Settings()
    draws = (torch.randint(len(problems), (settings.prompts,)) for _ in range(settings.steps))
    batches = ([problems[place] for place in draw.tolist()] for draw in draws)
    for step, row in list(enumerate(train(model, tokenizer, batches, settings), 1))[19::20]:
        print(step, *(f"{name} {value:.3f}" for name, value in row.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
