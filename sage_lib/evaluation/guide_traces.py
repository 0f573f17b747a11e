"""What the guides do to real completions, token by token: Figure 1 from a trained policy."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from sage_lib.algorithm import token_probabilities as probs
from sage_lib.algorithm.guides import GuideInputs
from sage_lib.evaluation import groups
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, write_json
from sage_lib.policy import loading, token_signals
from sage_lib.tasks.table import task_of

COMPLETIONS = 8  # of each traced problem


@torch.no_grad()
def measure(profile: Profile, run: Run) -> dict:
    """Trace completions of the reference method's policy; returns the run record.

    Writes traces.json, one completion with its text, pi, pi_ref (probabilities of the drawn token),
    entropy (of pi, nats), surprisal (-log pi, nats) and q of each guide at the start of a run, by
    token; and signals.json: entropy and surprisal over all completions, the share of tokens "above"
    each threshold, and the "kept_mass" that min-p sampling leaves.
    """
    drawer = groups.Drawer(profile, run)
    for name in runs.TRACED:
        runs.require_entropies(profile, profile.guide_choice(name))
    seed, traced = profile.seeds[0] if run.seed is None else run.seed, profile.evaluation.traced
    settings = {"method": run.method, "problems": traced, "completions": COMPLETIONS}
    record = Record("trace", profile.name, run.fingerprint, seed, settings)
    reference, _ = loading.load(profile, runs.sft_run(profile).model)
    guides = {name: runs.guide_of(profile, profile.guide_choice(name)) for name in runs.TRACED}
    run.samples.unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(seed)
    entropies, surprisals, kept_mass = [], [], []
    best, shown = (False, False, -1.0), dict[str, Any]()
    asked = problems.sampled_problems(profile, ood=False)[:traced]
    for problem in asked:
        group = drawer.draw(problem, COMPLETIONS, seed)
        logps, reference_logps, entropy, kept = _signals(drawer, reference, group)
        inputs = GuideInputs(entropy, logps, group.mask, 0.0, generator, ids=group.drawn)
        columns = {"pi": logps.exp(), "pi_ref": reference_logps.exp(), "entropy": entropy}
        columns |= {"surprisal": -logps}
        columns |= {name: guide(inputs) for name, guide in guides.items()}
        entropies.append(entropy[group.mask].cpu().numpy())
        surprisals.append(-logps[group.mask].cpu().numpy())
        kept_mass.append(kept)
        for row, (text, correct) in enumerate(zip(group.texts, group.correct, strict=True)):
            tokens = [
                {"text": drawer.tokenizer.decode([token])}
                | {name: float(values[row, t]) for name, values in columns.items()}
                for t, token in enumerate(group.bodies[row])
            ]
            line = {"problem": problem.id, "text": text, "correct": correct, "tokens": tokens}
            append_line(run.samples, line)
            # Shown is the completion with the most uncertain state, among those of valid work.
            measures = task_of(problem.task).measures(problem, text, correct)
            sound = measures.get("valid", correct)
            rank = (sound, correct, max(token["entropy"] for token in tokens))
            if rank > best:
                best = rank
                shown = {"problem": problem.question, "answer": text, "correct": correct}
                shown |= {"valid": sound} if "valid" in measures else {}
                shown |= {"method": run.method, "progress": 0.0, "tokens": tokens}
    write_json(run.measured / "traces.json", shown)
    branch: Any = guides["branch"]
    all_entropies, mass = np.concatenate(entropies), np.concatenate(kept_mass)
    thresholds = (0.8, 1.2, 2.0, branch.threshold)  # those of Table 6, nats, and the guide's own
    signals = {
        "entropy": token_signals.summary(all_entropies),
        "surprisal": token_signals.summary(np.concatenate(surprisals)),
        "above": {str(t): float((all_entropies > t).mean()) for t in thresholds},
        "min_p": profile.rl["min_p"],
        "kept_mass": {"mean": float(np.mean(mass)), "lowest": float(np.min(mass))},
        "branch": {"threshold": branch.threshold, "ratio": branch.ratio},
    }
    write_json(run.measured / "signals.json", signals)
    return run.finish(record, policy=drawer.policy.name, completions=len(asked) * COMPLETIONS)


def _signals(
    drawer: groups.Drawer, reference: PreTrainedModel, group: groups.Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
    """log pi and log pi_ref of the drawn tokens and the entropies, shape (completions, time), and
    the kept mass of every token within the mask."""
    found, kept, rl = [], [], drawer.profile.rl
    # One at a time: with a large vocabulary a whole group's distributions would fill a GPU.
    for row, mask in enumerate(group.mask):
        one, drawn = group.out[row : row + 1], group.drawn[row]
        logits = (probs.completion_logits(x, one, group.start) for x in (drawer.model, reference))
        log_pi, log_reference = (probs.log_probabilities(x, rl["temperature"])[0] for x in logits)
        of_drawn = [probs.drawn_log_probabilities(x, drawn) for x in (log_pi, log_reference)]
        found.append((*of_drawn, probs.entropies_of(log_pi)))
        kept.append(token_signals.kept_mass(log_pi[mask], rl["min_p"] or 0.0).cpu().numpy())
    logps, reference_logps, entropy = map(torch.stack, zip(*found, strict=True))
    return logps, reference_logps, entropy, np.concatenate(kept)
