"""How uncertain the base policy is, token by token: what a guide's threshold may be taken from."""

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.algorithm.token_probabilities import completion_logits, entropies
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import write_json
from sage_lib.policy import loading
from sage_lib.policy.sampling import rollouts
from sage_lib.policy.token_signals import summary
from sage_lib.tasks.judging import digest
from sage_lib.tasks.problem import Problem

COMPLETIONS = 8  # of each of ``evaluation.traced`` prompts


def measure(profile: Profile, run: Run) -> dict:
    """Write entropy.json, the distribution of :func:`token_entropies`; returns the run record."""
    policy = runs.finished(profile, run.policy)
    kept = {"prompts": profile.evaluation.traced, "completions": COMPLETIONS}
    record = Record("entropies", profile.name, run.fingerprint, profile.rl["seed"], kept)
    model, tokenizer = loading.load(profile, policy.model)
    asked = problems.rl_problems(profile)[: profile.evaluation.traced]
    found = summary(token_entropies(model, tokenizer, profile, asked))
    write_json(run.measured / "entropy.json", found)
    return run.finish(record, policy=policy.name, data=digest(asked))


@torch.no_grad()
def token_entropies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    profile: Profile,
    asked: list[Problem],
) -> np.ndarray:
    """Entropies (nats, eq. 12) of the model's own tokens, end token included, shape (tokens,).

    Drawn on ``asked`` as RL samples, at RL's temperature over the whole vocabulary.
    """
    found = []
    for number, problem in enumerate(asked):
        seed = profile.rl["seed"] + number
        out, start, mask = rollouts(model, tokenizer, problem, COMPLETIONS, profile.rl, seed)
        entropy = entropies(completion_logits(model, out, start), profile.rl["temperature"])
        found.append(entropy[mask.bool()].cpu().numpy())
    return np.concatenate(found)
