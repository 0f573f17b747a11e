"""Completions of one problem as RL draws them, judged: what the exploration stages read."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from sage_lib.algorithm import token_probabilities as probs
from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run
from sage_lib.policy import loading
from sage_lib.policy.sampling import rollouts, sample_seed
from sage_lib.tasks.judging import judge
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.verifier import Verifier


@dataclass(frozen=True)
class Group:
    out: torch.Tensor  # token ids of prompt and completion, shape (completions, prompt and time)
    start: int  # length of the prompt
    mask: torch.Tensor  # True up to and with the end token, shape (completions, time)
    texts: list[str]
    correct: list[bool]

    @property
    def drawn(self) -> torch.Tensor:  # token ids of the completions, shape (completions, time)
        return self.out[:, self.start :]

    @property
    def bodies(self) -> list[list[int]]:  # of each completion, the end token included
        return [ids[kept].tolist() for ids, kept in zip(self.drawn, self.mask, strict=True)]


class Drawer:
    """Draws groups from the policy that a run reads, or from another ``model`` of the profile."""

    def __init__(self, profile: Profile, run: Run):
        self.profile, self.policy = profile, runs.finished(profile, run.policy)
        self.model, self.tokenizer = loading.load(profile, self.policy.model)
        self.verifier = Verifier(workers=profile.compute.threads)

    def draw(self, problem: Problem, count: int, seed: int, model: Any = None) -> Group:
        """``count`` completions of one problem, with a random stream of their own."""
        stream, settings = sample_seed(seed, problem, 0), self.profile.rl
        drawer = model or self.model
        out, start, mask = rollouts(drawer, self.tokenizer, problem, count, settings, stream)
        pairs = zip(out[:, start:], mask.bool(), strict=True)
        texts = [self.tokenizer.decode(ids[kept], skip_special_tokens=True) for ids, kept in pairs]
        return Group(out, start, mask.bool(), texts, self.judge(problem, texts))

    def judge(self, problem: Problem, texts: list[str]) -> list[bool]:
        return judge([problem] * len(texts), texts, self.verifier)


def signals(
    model: PreTrainedModel, group: Group, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropy (nats) before each token, log-probability of the drawn one: (completions, time)."""
    logits = probs.completion_logits(model, group.out, group.start)
    log_pi = probs.log_probabilities(logits, temperature)
    return probs.entropies_of(log_pi), probs.drawn_log_probabilities(log_pi, group.drawn)
