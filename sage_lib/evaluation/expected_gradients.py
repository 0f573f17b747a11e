"""Notebook 03's finding on a network: what the branch guide adds to each anchor's gradient.

At every sampled state the expectation over the next token is taken exactly. Squared norms are means
over *pairs* of independent batches of one prompt, which is unbiased: noise alone gives 0."""

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch.nn.utils import parameters_to_vector
from transformers import PreTrainedModel

from sage_lib.algorithm import token_probabilities as probs
from sage_lib.algorithm.guides import GuideInputs
from sage_lib.algorithm.kl_forms import return_credit
from sage_lib.errors import SageError
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, write_json
from sage_lib.policy import loading
from sage_lib.policy.sampling import rollouts

PROMPTS, BATCHES, COMPLETIONS = 4, 3, 64
MOVED = 0.25  # noise off the reference, relative to the spread of each weight tensor
#: The forms of the KL (names of algorithm.kl_forms.KL_FORMS) for which :func:`weights` are known.
WEIGHTS = ("k3", "k3_corrected", "sequence")


def weights(
    anchor: str,
    log_pi: torch.Tensor,
    log_ref: torch.Tensor,
    log_q: torch.Tensor,
    later: torch.Tensor,
    drawn: torch.Tensor,
) -> torch.Tensor:
    """The factor of the gradient of log pi(v) in an anchor's expected on-policy gradient.

    ``log_pi`` and ``log_ref`` have shape (batch, time, vocabulary), as the result has; ``log_q`` of
    the state, ``later`` (the sum of log pi - log pi_ref - log q over the later tokens) and the
    ``drawn`` tokens have shape (batch, time).
    """
    d = log_ref - log_pi + log_q[..., None]
    if anchor == "k3":
        return log_pi.exp() * (1 - d.exp())
    own = -log_pi.exp() * d
    if anchor == "k3_corrected":
        return own
    return own.scatter_add(-1, drawn[..., None], later[..., None])


def pair_mean(a: np.ndarray, b: np.ndarray) -> float:
    """Mean of a_i · b_j over i != j, for the rows of two (batches, parameters) arrays."""
    dots = a @ b.T
    return float((dots.sum() - np.trace(dots)) / (dots.size - len(dots)))


def measure(profile: Profile, run: Run) -> dict:
    """Write effects.json, whose keys are in docs/data_tables.md; returns the run record."""
    base = runs.finished(profile, runs.sft_run(profile))
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
            drawn = rollouts(model, tokenizer, problem, COMPLETIONS, settings, seed + step)
            of_batch, kl, share = _batch(model, reference, guide, *drawn)
            for key, gradient in of_batch.items():
                gradients[key].append(gradient)
            divergences.append(kl)
            acting.append(share)
            append_line(run.live_steps, {"step": step + 1})
        for anchor in WEIGHTS:
            pull, added = (np.stack(gradients[anchor, part]) for part in ("pull", "added"))
            pull2, added2 = pair_mean(pull, pull), pair_mean(added, added)
            row = {"anchor": anchor, "pull": pull2, "added": added2, "share": added2 / pull2}
            found.append({**row, "along": pair_mean(added, pull) / pull2})
    over_prompts = []
    for anchor, rows in pd.DataFrame(found).groupby("anchor", sort=False):
        values = rows.drop(columns="anchor")
        errors = values.sem().add_suffix("_se")
        over_prompts.append({"anchor": anchor, **values.mean().to_dict(), **errors.to_dict()})
    effects = {
        "anchors": over_prompts,
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
    if sum(p.numel() for p in parameters) > 20_000_000:  # each batch keeps gradients of all
        raise SageError("the guides' effect is measured up to 20,000,000 parameters only")
    noise = torch.Generator().manual_seed(seed)
    for p in parameters:
        with torch.no_grad():
            p.add_(MOVED * p.std(correction=0) * torch.randn(p.shape, generator=noise))
        p.requires_grad_()
    model.eval()


def _batch(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    guide: Callable[[GuideInputs], torch.Tensor],
    out: torch.Tensor,
    start: int,
    kept: torch.Tensor,
) -> tuple[dict[tuple[str, str], np.ndarray], float, float]:
    """Gradients by (anchor, "pull" or "added"), KL to the reference (nats), share with q != 1."""
    mask = kept.float()
    log_pi = probs.log_probabilities(probs.completion_logits(model, out, start))
    with torch.no_grad():
        log_ref = probs.log_probabilities(probs.completion_logits(reference, out, start))
    drawn, fixed = out[:, start:], log_pi.detach()
    logps, refs = (probs.drawn_log_probabilities(x, drawn) for x in (fixed, log_ref))
    inputs = GuideInputs(probs.entropies_of(fixed), logps, mask, 0.0, torch.Generator(), ids=drawn)
    log_q = guide(inputs).log()
    divergence = (fixed.exp() * (fixed - log_ref)).sum(-1)
    parameters = list(model.parameters())

    def gradient(weight: torch.Tensor) -> np.ndarray:
        value = (weight * log_pi).sum() / COMPLETIONS
        parts = torch.autograd.grad(value, parameters, retain_graph=True)
        return np.asarray(parameters_to_vector(parts).double())

    gradients: dict[tuple[str, str], np.ndarray] = {}
    for anchor in WEIGHTS:
        sides: list[torch.Tensor] = []
        for q in (torch.zeros_like(log_q), log_q):
            credit = -return_credit(logps, refs, q, mask)
            later = credit - (logps - refs - q) * mask
            sides.append(weights(anchor, fixed, log_ref, q, later, drawn) * mask[..., None])
        gradients[anchor, "pull"] = gradient(sides[0])
        gradients[anchor, "added"] = gradient(sides[1] - sides[0])
    kl = float((divergence * mask).sum() / mask.sum())
    return gradients, kl, float((log_q[mask == 1] != 0).float().mean())
