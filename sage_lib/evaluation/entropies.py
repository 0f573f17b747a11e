"""Entropies of the base policy, token by token: quantiles of them can be a guide's threshold."""

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.algorithm.token_probabilities import completion_logits, entropies
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run
from sage_lib.files import write_json
from sage_lib.policy import loading
from sage_lib.policy.sampling import rollouts
from sage_lib.policy.token_signals import summary
from sage_lib.tasks.judging import digest
from sage_lib.tasks.problem import Problem

COMPLETIONS = 8  # of each of ``evaluation.traced`` prompts


def measure_entropies(profile: Profile, run: Run) -> dict:
    """Write entropy.json, the distribution of :func:`token_entropies`; return the run record."""
    policy = runs.finished(profile, run.policy)
    sizes = {"prompts": profile.evaluation.traced, "completions": COMPLETIONS}
    record = run.begin(profile.rl["seed"], sizes)
    model, tokenizer = loading.load(profile.model, policy.model)
    prompts = problems.rl_problems(profile)[: profile.evaluation.traced]
    distribution = summary(token_entropies(model, tokenizer, profile, prompts))
    write_json(run.measured / "entropy.json", distribution)
    return run.finish(record, policy=policy.name, data=digest(prompts))


@torch.no_grad()
def token_entropies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    profile: Profile,
    prompts: list[Problem],
) -> np.ndarray:
    """Return the entropies of a policy before each token that it draws, end token included.

    Args:
        model: the policy.
        tokenizer: of the policy.
        profile: of whose RL the temperature and the length are; the vocabulary is whole.
        prompts: the problems.

    Returns:
        Entropies (nats, eq. 12), shape (tokens,).
    """
    parts = []
    for number, problem in enumerate(prompts):
        seed = profile.rl["seed"] + number
        out, start, mask = rollouts(model, tokenizer, problem, COMPLETIONS, profile.rl, seed)
        entropy = entropies(completion_logits(model, out, start), profile.rl["temperature"])
        parts.append(entropy[mask.bool()].cpu().numpy())
    return np.concatenate(parts)
