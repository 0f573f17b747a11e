"""Groups of completions of a problem, drawn as RL draws them, for the exploration stages."""

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
        return [ids[mask].tolist() for ids, mask in zip(self.drawn, self.mask, strict=True)]


class Drawer:
    """Draws groups from the policy that a run reads, or from another model of the profile."""

    def __init__(self, profile: Profile, run: Run):
        self.profile, self.policy = profile, runs.finished(profile, run.policy)
        self.model, self.tokenizer = loading.load(profile.model, self.policy.model)
        self.verifier = Verifier(workers=profile.compute.threads)

    def draw(self, problem: Problem, count: int, seed: int, model: Any = None) -> Group:
        """Draw ``count`` completions of a problem, by the policy of the run or by ``model``.

        The seed and the problem's name make the random stream.
        """
        stream, rl = sample_seed(seed, problem, 0), self.profile.rl
        out, start, mask = rollouts(model or self.model, self.tokenizer, problem, count, rl, stream)
        in_completion = mask.bool()
        texts = [
            self.tokenizer.decode(ids[row], skip_special_tokens=True)
            for ids, row in zip(out[:, start:], in_completion, strict=True)
        ]
        return Group(out, start, in_completion, texts, self.are_correct(problem, texts))

    def are_correct(self, problem: Problem, texts: list[str]) -> list[bool]:
        """Return whether the last answer of each completion is correct."""
        return judge([problem] * len(texts), texts, self.verifier, self.profile.model.boxed)


def signals(
    model: PreTrainedModel, group: Group, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entropies (nats) before the tokens of a group, and the tokens' log-probabilities.

    A model reads the group at a temperature. Both results have shape (completions, time).
    """
    logits = probs.completion_logits(model, group.out, group.start)
    log_pi = probs.log_probabilities(logits, temperature)
    return probs.entropies_of(log_pi), probs.drawn_log_probabilities(log_pi, group.drawn)
