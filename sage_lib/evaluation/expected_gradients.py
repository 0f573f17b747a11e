"""The branch guide's share of each anchor's gradient on a network: notebook 03 has it on a tree.

The expectation over the next token is exact at each sampled state. Squared norms are means over
*pairs* of independent batches of one prompt, which is unbiased: noise alone gives 0."""

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
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, write_json
from sage_lib.policy import loading
from sage_lib.policy.sampling import rollouts

PROMPTS, BATCHES, COMPLETIONS = 4, 3, 64
MOVED = 0.25  # noise that moves the policy, relative to the spread of each weight tensor
#: The forms of the KL (names of algorithm.kl_forms.KL_FORMS) for which :func:`weights` are known.
WEIGHTS = ("k3", "k3_corrected", "sequence")


def weights(
    kl_form: str,
    log_pi: torch.Tensor,
    log_ref: torch.Tensor,
    log_q: torch.Tensor,
    later: torch.Tensor,
    drawn: torch.Tensor,
) -> torch.Tensor:
    """Return the factor of the gradient of log pi(v) in a KL form's expected on-policy gradient.

    Args:
        kl_form: a name of WEIGHTS.
        log_pi: of all tokens, shape (batch, time, vocabulary).
        log_ref: the same of the reference policy.
        log_q: of the state, shape (batch, time).
        later: the sum of log pi - log pi_ref - log q over the later tokens, shape (batch, time).
        drawn: ids of the tokens, shape (batch, time).

    Returns:
        Factors, shape (batch, time, vocabulary).
    """
    d = log_ref - log_pi + log_q[..., None]
    if kl_form == "k3":
        return log_pi.exp() * (1 - d.exp())
    of_token = -log_pi.exp() * d
    if kl_form == "k3_corrected":
        return of_token
    return of_token.scatter_add(-1, drawn[..., None], later[..., None])


def pair_mean(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean of a_i · b_j over i != j, for rows of two (batches, parameters) arrays."""
    dots = a @ b.T
    return float((dots.sum() - np.trace(dots)) / (dots.size - len(dots)))


def measure_effects(profile: Profile, run: Run) -> dict:
    """Write effects.json, whose keys are in docs/data_tables.md; return the run record."""
    base = runs.finished(profile, runs.sft_run(profile))
    runs.require_entropies(profile, profile.guide_choice("branch"))
    sizes = {"prompts": PROMPTS, "batches": BATCHES, "completions": COMPLETIONS, "moved": MOVED}
    seed = profile.rl["seed"]
    record = run.begin(seed, sizes)
    ref_model, tokenizer = loading.load(profile.model, base.model)
    model, _ = loading.load(profile.model, base.model)
    _move(model, seed)
    guide = runs.guide_of(profile, profile.guide_choice("branch"))
    prompts = problems.rl_problems(profile)[:PROMPTS]
    run.live_steps.unlink(missing_ok=True)
    # The expectation is under pi itself: nothing is cut off.
    untruncated = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
    rl = {**profile.rl, **untruncated}
    prompt_rows, divergences, acting = [], [], []
    for number, problem in enumerate(prompts):
        gradients: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
        for batch in range(BATCHES):
            step = number * BATCHES + batch
            drawn = rollouts(model, tokenizer, problem, COMPLETIONS, rl, seed + step)
            of_batch, kl, share = _batch(model, ref_model, guide, *drawn)
            for key, gradient in of_batch.items():
                gradients[key].append(gradient)
            divergences.append(kl)
            acting.append(share)
            append_line(run.live_steps, {"step": step + 1})
        for anchor in WEIGHTS:
            pull, added = (np.stack(gradients[anchor, part]) for part in ("pull", "added"))
            pull2, added2 = pair_mean(pull, pull), pair_mean(added, added)
            row = {"anchor": anchor, "pull": pull2, "added": added2, "share": added2 / pull2}
            prompt_rows.append({**row, "along": pair_mean(added, pull) / pull2})
    by_anchor = pd.DataFrame(prompt_rows).groupby("anchor", sort=False)
    over_prompts = by_anchor.mean().join(by_anchor.sem().add_suffix("_se"))
    effects = {
        "anchors": over_prompts.reset_index().to_dict("records"),
        "prompts": len(prompts),
        "batches": BATCHES,
        "completions": COMPLETIONS,
        "kl": float(np.mean(divergences)),
        "acting": float(np.mean(acting)),
    }
    write_json(run.measured / "effects.json", effects)
    return run.finish(record, policy="sft")


def _move(model: PreTrainedModel, seed: int) -> None:
    """Add seeded noise to the policy's weights, and let all of them have gradients."""
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
    ref_model: PreTrainedModel,
    guide: Callable[[GuideInputs], torch.Tensor],
    out: torch.Tensor,
    start: int,
    in_completion: torch.Tensor,
) -> tuple[dict[tuple[str, str], np.ndarray], float, float]:
    """Return gradients by (anchor, "pull" or "added"), the KL in nats, and the share with q != 1.

    ``out``, ``start`` and ``in_completion`` are as ``sampling.rollouts`` returns them.
    """
    mask = in_completion.float()
    log_pi = probs.log_probabilities(probs.completion_logits(model, out, start))
    with torch.no_grad():
        log_ref = probs.log_probabilities(probs.completion_logits(ref_model, out, start))
    drawn, fixed = out[:, start:], log_pi.detach()
    logps, ref_logps = (probs.drawn_log_probabilities(x, drawn) for x in (fixed, log_ref))
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
            credit = -return_credit(logps, ref_logps, q, mask)
            later = credit - (logps - ref_logps - q) * mask
            sides.append(weights(anchor, fixed, log_ref, q, later, drawn) * mask[..., None])
        gradients[anchor, "pull"] = gradient(sides[0])
        gradients[anchor, "added"] = gradient(sides[1] - sides[0])
    kl = float((divergence * mask).sum() / mask.sum())
    return gradients, kl, float((log_q[mask == 1] != 0).float().mean())
