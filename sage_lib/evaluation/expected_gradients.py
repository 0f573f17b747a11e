"""Notebook 03's finding on the embedded model: what the branch guide adds to the expected gradient of each anchor.

Per token every anchor's gradient is a weight times the gradient of log pi(v), so one forward pass serves them all. At every
sampled state the expectation over the next token is taken exactly, over the vocabulary; only the states, and for the
sequence-level anchor what comes later, are sampled. Squared norms are means over *pairs* of independent batches of one
prompt, which is unbiased: noise alone gives 0, not a positive number.
"""

import itertools

import numpy as np
import pandas as pd
import torch
from torch.nn.utils import parameters_to_vector

from sage_lib.algorithm.anchors import return_credit
from sage_lib.algorithm.guide_choice import resolve_branch
from sage_lib.algorithm.guides import GuideInputs
from sage_lib.errors import SageError
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, read_json, write_json
from sage_lib.policy import loading
from sage_lib.policy.sampling import rollouts

PROMPTS, BATCHES, COMPLETIONS = 4, 3, 64
#: Standard deviation of the noise that moves the policy off its reference, relative to each weight tensor's own.
MOVED = 0.25
ANCHORS = ("k3", "k3_corrected", "sequence")


def weights(
    anchor: str,
    log_pi: torch.Tensor,
    log_ref: torch.Tensor,
    log_q: torch.Tensor,
    later: torch.Tensor,
    drawn: torch.Tensor,
) -> torch.Tensor:
    """The factor of the gradient of log pi(v) in an anchor's expected on-policy gradient, shape (batch, time, vocabulary).

    Args:
        log_pi, log_ref: shape (batch, time, vocabulary).
        log_q: of the state, shape (batch, time).
        later: sum of log pi - log pi_ref - log q over the later tokens of the completion, shape (batch, time).
        drawn: the sampled tokens, shape (batch, time).
    """
    pi, d = log_pi.exp(), log_ref - log_pi + log_q[..., None]
    if anchor == "k3":
        return pi * (1 - d.exp())
    if anchor == "k3_corrected":
        return -pi * d
    return (-pi * d).scatter_add(-1, drawn[..., None], later[..., None])


def pair_mean(a: np.ndarray, b: np.ndarray) -> float:
    """Mean of a_i · b_j over i != j, for the rows of two (batches, parameters) arrays."""
    dots = a @ b.T
    return float((dots.sum() - np.trace(dots)) / (len(dots) * (len(dots) - 1)))


def measure(profile: Profile, run: Run) -> dict:
    """Write effects.json: for each anchor the squared norm of the expected gradient ("pull"), of what the branch guide adds
    to it ("added"), their ratio ("share"), and how far the addition points along the pull ("along": 0.1 is a pull that is
    a tenth stronger), means over prompts with their standard errors; returns the run record."""
    if profile.task is None:
        raise SageError(
            "the guides' effect on the expected gradient is measured on the embedded model only: gradients of all weights are kept for every batch"
        )
    base = runs.sft_run(profile)
    record = Record(
        "effects",
        profile.name,
        run.fingerprint,
        profile.rl["seed"],
        {"prompts": PROMPTS, "batches": BATCHES, "completions": COMPLETIONS, "moved": MOVED},
    )
    reference, tokenizer = loading.load(profile, base.model)
    model, _ = loading.load(profile, base.model)
    noise = torch.Generator().manual_seed(profile.rl["seed"])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(MOVED * p.std(correction=0) * torch.randn(p.shape, generator=noise))
    model.eval()
    parameters = [p.requires_grad_() for p in model.parameters()]
    guide, items = (
        resolve_branch(profile.guide, read_json(base.measured / "entropy.json")),
        problems.rl_items(profile)[:PROMPTS],
    )
    run.live_steps.unlink(missing_ok=True)
    run.samples.unlink(missing_ok=True)
    found, kl, acting = [], [], []
    untruncated = {
        **profile.rl,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
    }  # the expectation is under pi itself
    for number, item in enumerate(items):
        gradients: dict[tuple[str, str], list[np.ndarray]] = {
            key: [] for key in itertools.product(ANCHORS, ("pull", "added"))
        }
        for batch in range(BATCHES):
            out, start, mask = rollouts(
                model,
                tokenizer,
                item,
                COMPLETIONS,
                untruncated,
                profile.rl["seed"] + number * BATCHES + batch,
            )
            log_pi = (
                model(out, attention_mask=torch.ones_like(out))
                .logits[:, start - 1 : -1]
                .float()
                .log_softmax(-1)
            )
            with torch.no_grad():
                log_ref = (
                    reference(out, attention_mask=torch.ones_like(out))
                    .logits[:, start - 1 : -1]
                    .float()
                    .log_softmax(-1)
                )
            new, fixed, mask = out[:, start:], log_pi.detach(), mask.float()
            logps, refs = (x.gather(-1, new[..., None])[..., 0] for x in (fixed, log_ref))
            entropy = -(fixed.exp() * fixed).sum(-1)
            log_q = guide(
                GuideInputs(
                    entropies=entropy,
                    logps=logps,
                    mask=mask,
                    progress=0.0,
                    generator=torch.Generator(),
                )
            ).log()
            kl.append(float(((fixed.exp() * (fixed - log_ref)).sum(-1) * mask).sum() / mask.sum()))
            acting.append(float((log_q[mask == 1] != 0).float().mean()))
            for anchor in ANCHORS:
                sides = []
                for q in (torch.zeros_like(log_q), log_q):
                    credit = -return_credit(logps, refs, q, mask)
                    sides.append(
                        weights(anchor, fixed, log_ref, q, credit - (logps - refs - q) * mask, new)
                        * mask[..., None]
                    )
                for part, weight in (("pull", sides[0]), ("added", sides[1] - sides[0])):
                    gradients[anchor, part].append(
                        parameters_to_vector(
                            torch.autograd.grad(
                                (weight * log_pi).sum() / COMPLETIONS, parameters, retain_graph=True
                            )
                        )
                        .double()
                        .numpy()
                    )
            append_line(run.live_steps, {"step": number * BATCHES + batch + 1})
        append_line(run.samples, {"problem": item.id, "completions": COMPLETIONS * BATCHES})
        for anchor in ANCHORS:
            pull, added = (np.stack(gradients[anchor, part]) for part in ("pull", "added"))
            pull2, added2 = pair_mean(pull, pull), pair_mean(added, added)
            found.append(
                {
                    "anchor": anchor,
                    "problem": item.id,
                    "pull": pull2,
                    "added": added2,
                    "share": added2 / pull2,
                    "along": pair_mean(added, pull) / pull2,
                }
            )
    frame = pd.DataFrame(found).drop(columns="problem").groupby("anchor", sort=False)
    rows = [
        {
            "anchor": a,
            **g.drop(columns="anchor").mean().to_dict(),
            **g.drop(columns="anchor").sem().add_suffix("_se").to_dict(),
        }
        for a, g in frame
    ]
    write_json(
        run.measured / "effects.json",
        {
            "anchors": rows,
            "prompts": len(items),
            "batches": BATCHES,
            "completions": COMPLETIONS,
            "kl": float(np.mean(kl)),
            "acting": float(np.mean(acting)),
        },
    )
    return record.finish(run.record, of="sft")
