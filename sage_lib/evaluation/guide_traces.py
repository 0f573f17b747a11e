"""What the guides do to real completions, token by token: Figure 1 from a trained policy instead of a drawing."""

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from sage_lib.algorithm.guide_choice import resolve_branch
from sage_lib.algorithm.guides import GuideInputs, RandomGuide, TokenGuide
from sage_lib.errors import SageError
from sage_lib.evaluation import token_impact
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, read_json, write_json, write_text
from sage_lib.policy import loading, token_signals
from sage_lib.policy.sampling import rollouts, sample_seed
from sage_lib.tasks.verifier import Verifier

#: Completions of each traced problem: a group, as the profiles' RL has it.
COMPLETIONS = 8
#: The thresholds of Table 6, nats.
THRESHOLDS = (0.8, 1.2, 2.0)


@torch.no_grad()
def measure(profile: Profile, run: Run) -> dict:
    """Trace completions of the first method's policy; returns the run record.

    Writes traces.json, {"problem", "answer", "method", "progress", "tokens": [a row per token of one completion]} with text,
    pi, pi_ref (probabilities of the sampled token), entropy (of pi, nats), surprisal (-log pi, nats) and q of each guide
    at the start of a run, and signals.json: entropy and surprisal over all completions as ``token_signals.summary`` has them, the share of tokens
    "above" each threshold of Table 6 and above the branch guide's own, and the "kept_mass" that min-p sampling leaves;
    updates.csv (:func:`updates`) and impact.csv (:func:`impacts`).
    """
    method, seed, of = runs.rl_runs(profile)[0]
    if not of.done():
        raise SageError(
            f"the traces are of the policy {of.name}, which is not there: run the stage rl first"
        )
    record = Record(
        "trace",
        profile.name,
        run.fingerprint,
        seed,
        {
            "method": method,
            "problems": profile.evaluation.traced,
            "completions": COMPLETIONS,
            "continuations": token_impact.CONTINUATIONS,
        },
    )
    model, tokenizer = loading.load(profile, of.model)
    reference, _ = loading.load(profile, runs.sft_run(profile).model)
    guides = {
        "random": RandomGuide(),
        "token": TokenGuide(),
        "branch": resolve_branch(
            profile.guide, read_json(runs.sft_run(profile).measured / "entropy.json")
        ),
    }
    run.samples.unlink(missing_ok=True)
    verifier, generator = Verifier(), torch.Generator().manual_seed(seed)
    chosen, entropies, surprisals, kept, gradients, replaced = None, [], [], [], [], []
    for number, item in enumerate(
        problems.evaluation_items(profile, ood=False)[: profile.evaluation.traced]
    ):
        out, start, mask = rollouts(
            model, tokenizer, item, COMPLETIONS, profile.rl, sample_seed(seed, item, 0)
        )
        new, mask = out[:, start:], mask.bool()
        texts = [
            tokenizer.decode(row[keep], skip_special_tokens=True)
            for row, keep in zip(new, mask, strict=True)
        ]
        verdicts = problems.judge([item] * len(texts), texts, verifier)
        # One completion at a time: with a large vocabulary a whole group's distributions would fill a GPU.
        read = [
            _signals(model, reference, out[i : i + 1], start, mask[i], alpha, profile.rl)
            for i, alpha in enumerate(_advantages(verdicts))
        ]
        *by_token, masses, norms = zip(*read, strict=True)
        logps, ref, entropy = (torch.stack(x) for x in by_token)
        q = {
            name: guide(
                GuideInputs(
                    entropies=entropy, logps=logps, mask=mask, progress=0.0, generator=generator
                )
            )
            for name, guide in guides.items()
        }
        entropies.append(entropy[mask].cpu().numpy())
        surprisals.append(-logps[mask].cpu().numpy())
        kept += masses
        gradients += norms
        if number % 2 == 0:
            replaced += token_impact.impacts(
                model,
                tokenizer,
                profile,
                item,
                out[0, :start].tolist(),
                new[0][mask[0]].tolist(),
                entropy[0][mask[0]].tolist(),
                seed,
                verifier,
            )
        for row, (text, correct) in enumerate(zip(texts, verdicts, strict=True)):
            keep = mask[row]
            tokens = [
                {
                    "text": tokenizer.decode([t]),
                    "pi": p,
                    "pi_ref": r,
                    "entropy": h,
                    "surprisal": -s,
                    **{name: float(q[name][row, i]) for name in q},
                }
                for i, (t, p, r, h, s) in enumerate(
                    zip(
                        new[row][keep].tolist(),
                        logps[row][keep].exp().tolist(),
                        ref[row][keep].exp().tolist(),
                        entropy[row][keep].tolist(),
                        logps[row][keep].tolist(),
                        strict=True,
                    )
                )
            ]
            append_line(
                run.samples,
                {"problem": item.id, "text": text, "correct": correct, "tokens": tokens},
            )
            # The one that is shown: among correct completions (all, if none is) the one with the most uncertain state.
            rank = (correct, max(t["entropy"] for t in tokens))
            if chosen is None or rank > chosen[0]:
                chosen = (
                    rank,
                    {
                        "problem": item.question,
                        "answer": text,
                        "correct": correct,
                        "method": method,
                        "progress": 0.0,
                        "tokens": tokens,
                    },
                )
    write_json(run.measured / "traces.json", chosen[1])
    entropies, branch = np.concatenate(entropies), guides["branch"]
    write_text(
        run.measured / "updates.csv",
        token_impact.updates(entropies, np.concatenate(gradients)).to_csv(
            index=False, float_format="%.6g"
        ),
    )
    write_text(
        run.measured / "impact.csv", pd.DataFrame(replaced).to_csv(index=False, float_format="%.6g")
    )
    above = {str(t): float((entropies > t).mean()) for t in (*THRESHOLDS, branch.threshold)}
    write_json(
        run.measured / "signals.json",
        {
            "entropy": token_signals.summary(entropies),
            "surprisal": token_signals.summary(np.concatenate(surprisals)),
            "above": above,
            "min_p": profile.rl["min_p"],
            "kept_mass": {
                "mean": float(np.mean(np.concatenate(kept))),
                "lowest": float(np.min(np.concatenate(kept))),
            },
            "branch": {"threshold": branch.threshold, "ratio": branch.ratio},
        },
    )
    return record.finish(run.record, of=of.name, completions=(number + 1) * COMPLETIONS)


def _advantages(correct: list[bool]) -> np.ndarray:
    """GRPO's advantages of one group; on the policy that drew it they are the weight alpha_t of every token (eq. 4 of the report)."""
    rewards = np.asarray(correct, dtype=np.float64)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)


def _signals(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    out: torch.Tensor,
    start: int,
    mask: torch.Tensor,
    alpha: float,
    settings: dict,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """Of one completion, ``out`` of shape (1, prompt and time): log pi and log pi_ref of its tokens and the entropies, shape
    (time,), and of the tokens within ``mask`` the kept mass and G_t at the weight ``alpha``."""
    drawn = out[0, start:]
    (log_pi, hidden), (log_ref, _) = (
        _log_probabilities(m, out, start, settings["temperature"]) for m in (model, reference)
    )
    logps, ref = (x.gather(-1, drawn[:, None])[:, 0] for x in (log_pi, log_ref))
    gradients = token_signals.gradient_norm(
        np.full(int(mask.sum()), alpha),
        log_pi[mask].cpu().numpy(),
        drawn[mask].cpu().numpy(),
        hidden[mask].cpu().numpy(),
    )
    return (
        logps,
        ref,
        -(log_pi.exp() * log_pi).sum(-1),
        token_signals.kept_mass(log_pi[mask], settings["min_p"] or 0.0).cpu().numpy(),
        gradients,
    )


def _log_probabilities(
    model: torch.nn.Module, out: torch.Tensor, start: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """At every token of one completion: log pi over the vocabulary at the sampling temperature, shape (time, vocabulary), and
    the last hidden state, shape (time, width)."""
    result = model(out, attention_mask=torch.ones_like(out), output_hidden_states=True)
    return (result.logits[0, start - 1 : -1].float() / temperature).log_softmax(
        -1
    ), result.hidden_states[-1][0, start - 1 : -1].float()
