"""Notebook 03's finding on a network: what the branch guide adds to each anchor's expected
gradient.

Per token every anchor's gradient is a weight times the gradient of log pi(v), so one forward pass
serves them all. At every sampled state the expectation over the next token is taken exactly, over
the vocabulary; only the states, and for the sequence-level anchor what comes later, are sampled.
Squared norms are means over *pairs* of independent batches of one prompt, which is unbiased: noise
alone gives 0, not a positive number."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.nn.utils import parameters_to_vector
from transformers import PreTrainedModel

from sage_lib.algorithm.anchors import return_credit
from sage_lib.algorithm.guides import GuideInputs
from sage_lib.algorithm.token_probabilities import (
    completion_logits,
    drawn_log_probabilities,
    entropies_of,
    log_probabilities,
)
from sage_lib.errors import SageError
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, write_json
from sage_lib.policy import loading
from sage_lib.policy.sampling import rollouts

PROMPTS, BATCHES, COMPLETIONS = 4, 3, 64
#: Standard deviation of the noise that moves the policy off its reference, relative to each weight
#: tensor's own.
MOVED = 0.25
#: Gradients of all weights are kept for every batch: a larger model would not fit.
LARGEST = 20_000_000


def _k3(
    log_pi: torch.Tensor, d: torch.Tensor, later: torch.Tensor, drawn: torch.Tensor
) -> torch.Tensor:
    return log_pi.exp() * (1 - d.exp())


def _k3_corrected(
    log_pi: torch.Tensor, d: torch.Tensor, later: torch.Tensor, drawn: torch.Tensor
) -> torch.Tensor:
    return -log_pi.exp() * d


def _sequence(
    log_pi: torch.Tensor, d: torch.Tensor, later: torch.Tensor, drawn: torch.Tensor
) -> torch.Tensor:
    own = -log_pi.exp() * d
    return own.scatter_add(-1, drawn[..., None], later[..., None])


#: By anchor (a name of algorithm.anchors.ANCHORS): the factor of the gradient of log pi(v), from
#: log pi, d = log q·pi_ref - log pi, the later log-ratio and the drawn tokens.
WEIGHTS: dict[str, Callable[..., torch.Tensor]] = {
    "k3": _k3,
    "k3_corrected": _k3_corrected,
    "sequence": _sequence,
}


def weights(
    anchor: str,
    log_pi: torch.Tensor,
    log_ref: torch.Tensor,
    log_q: torch.Tensor,
    later: torch.Tensor,
    drawn: torch.Tensor,
) -> torch.Tensor:
    """The factor of the gradient of log pi(v) in an anchor's expected on-policy gradient, shape
    (batch, time, vocabulary).

    Args:
        anchor: a key of :data:`WEIGHTS`.
        log_pi, log_ref: shape (batch, time, vocabulary).
        log_q: of the state, shape (batch, time).
        later: sum of log pi - log pi_ref - log q over the later tokens, shape (batch, time).
        drawn: the sampled tokens, shape (batch, time).
    """
    return WEIGHTS[anchor](log_pi, log_ref - log_pi + log_q[..., None], later, drawn)


def pair_mean(a: np.ndarray, b: np.ndarray) -> float:
    """Mean of a_i · b_j over i != j, for the rows of two (batches, parameters) arrays."""
    dots = a @ b.T
    pairs = len(dots) * (len(dots) - 1)
    return float((dots.sum() - np.trace(dots)) / pairs)


def measure(profile: Profile, run: Run) -> dict:
    """Write effects.json; returns the run record.

    For each anchor the squared norm of the expected gradient ("pull"), of what the branch guide
    adds to it ("added"), their ratio ("share"), and how far the addition points along the pull
    ("along": 0.1 is a pull that is a tenth stronger): means over prompts with their standard
    errors."""
    base = runs.sft_run(profile)
    if not base.done():
        raise SageError(
            f"the SFT model of profile {profile.name} is not there: "
            f"sage-companion stage sft --profile {profile.spec} makes it"
        )
    runs.require_entropies(profile, profile.guide_choice("branch"))
    kept = {"prompts": PROMPTS, "batches": BATCHES, "completions": COMPLETIONS, "moved": MOVED}
    seed = profile.rl["seed"]
    record = Record("effects", profile.name, run.fingerprint, seed, kept)
    reference, tokenizer = loading.load(profile, base.model)
    model, _ = loading.load(profile, base.model)
    _move(model, seed)
    guide = runs.guide_of(profile, profile.guide_choice("branch"))
    asked = problems.rl_problems(profile)[:PROMPTS]
    run.live_steps.unlink(missing_ok=True)
    # The expectation is under pi itself: nothing is cut off.
    untruncated = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
    settings = {**profile.rl, **untruncated}
    found, divergences, acting = [], [], []
    for number, problem in enumerate(asked):
        gradients: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
        for batch in range(BATCHES):
            step = number * BATCHES + batch
            out, start, mask = rollouts(
                model, tokenizer, problem, COMPLETIONS, settings, seed + step
            )
            one = _batch(model, reference, guide, out, start, mask.float())
            for key, gradient in one.gradients.items():
                gradients[key].append(gradient)
            divergences.append(one.kl)
            acting.append(one.acting)
            append_line(run.live_steps, {"step": step + 1})
        for anchor in WEIGHTS:
            pull, added = (np.stack(gradients[anchor, part]) for part in ("pull", "added"))
            pull2, added2 = pair_mean(pull, pull), pair_mean(added, added)
            row = {"anchor": anchor, "pull": pull2, "added": added2, "share": added2 / pull2}
            found.append({**row, "along": pair_mean(added, pull) / pull2})
    effects = {
        "anchors": _over_prompts(pd.DataFrame(found)),
        "prompts": len(asked),
        "batches": BATCHES,
        "completions": COMPLETIONS,
        "kl": float(np.mean(divergences)),
        "acting": float(np.mean(acting)),
    }
    write_json(run.measured / "effects.json", effects)
    return run.finish(record, policy="sft")


def _move(model: PreTrainedModel, seed: int) -> None:
    """Move the policy off its reference by seeded noise, and let all its weights have gradients."""
    parameters = list(model.parameters())
    if sum(p.numel() for p in parameters) > LARGEST:
        raise SageError(
            "the guides' effect on the expected gradient is measured on small models only (up to "
            f"{LARGEST:,} parameters): gradients of all weights are kept for every batch"
        )
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            p.add_(MOVED * p.std(correction=0) * torch.randn(p.shape, generator=noise))
    for p in parameters:
        p.requires_grad_()
    model.eval()


class _Batch:
    """Gradients by (anchor, "pull" or "added"), KL to the reference (nats), share of tokens acted
    on."""

    def __init__(self, gradients: dict[tuple[str, str], np.ndarray], kl: float, acting: float):
        self.gradients, self.kl, self.acting = gradients, kl, acting


def _batch(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    guide: Callable[[GuideInputs], torch.Tensor],
    out: torch.Tensor,
    start: int,
    mask: torch.Tensor,
) -> _Batch:
    log_pi = log_probabilities(completion_logits(model, out, start))
    with torch.no_grad():
        log_ref = log_probabilities(completion_logits(reference, out, start))
    drawn, fixed = out[:, start:], log_pi.detach()
    logps, refs = (drawn_log_probabilities(x, drawn) for x in (fixed, log_ref))
    inputs = GuideInputs(
        entropies=entropies_of(fixed),
        logps=logps,
        mask=mask,
        progress=0.0,
        generator=torch.Generator(),
        ids=drawn,
    )
    log_q = guide(inputs).log()
    divergence = (fixed.exp() * (fixed - log_ref)).sum(-1)
    parameters = list(model.parameters())

    def gradient(weight: torch.Tensor) -> np.ndarray:
        value = (weight * log_pi).sum() / COMPLETIONS
        parts = torch.autograd.grad(value, parameters, retain_graph=True)
        vector: np.ndarray = parameters_to_vector(parts).double().numpy()
        return vector

    gradients: dict[tuple[str, str], np.ndarray] = {}
    for anchor in WEIGHTS:
        sides: list[Any] = []
        for q in (torch.zeros_like(log_q), log_q):
            credit = -return_credit(logps, refs, q, mask)
            later = credit - (logps - refs - q) * mask
            sides.append(weights(anchor, fixed, log_ref, q, later, drawn) * mask[..., None])
        gradients[anchor, "pull"] = gradient(sides[0])
        gradients[anchor, "added"] = gradient(sides[1] - sides[0])
    kl = float((divergence * mask).sum() / mask.sum())
    return _Batch(gradients, kl, float((log_q[mask == 1] != 0).float().mean()))


def _over_prompts(found: pd.DataFrame) -> list[dict[str, Any]]:
    """Means over prompts by anchor, and their standard errors as columns ending in _se."""
    rows = []
    for anchor, group in found.groupby("anchor", sort=False):
        values = group.drop(columns="anchor")
        errors = values.sem().add_suffix("_se")
        rows.append({"anchor": anchor, **values.mean().to_dict(), **errors.to_dict()})
    return rows
