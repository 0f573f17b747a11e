"""Entropies of the base policy, whose quantiles can be a guide's threshold; and q of the guides on
real completions, token by token: Figure 1 from a trained policy."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from sage_lib.algorithm import token_probabilities as probs
from sage_lib.algorithm.guides import GuideInputs
from sage_lib.evaluation import groups
from sage_lib.experiment import problems, runs
from sage_lib.experiment.made_from import TRACED
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, write_json
from sage_lib.policy import loading, token_signals
from sage_lib.policy.sampling import rollouts
from sage_lib.tasks.judging import digest
from sage_lib.tasks.table import task_of

COMPLETIONS = 8  # of each of ``evaluation.traced`` problems


@torch.no_grad()
def measure_entropies(profile: Profile, run: Run) -> dict:
    """Write entropy.json, the distribution of entropies (nats, eq. 12); return the run record.

    They are those before each token that the base draws, the end token included, at RL's
    temperature.
    """
    policy = runs.finished(profile, run.policy)
    sizes = {"prompts": profile.evaluation.traced, "completions": COMPLETIONS}
    record = run.begin(profile.rl["seed"], sizes)
    model, tokenizer = loading.load(profile.model, policy.model)
    prompts = problems.rl_problems(profile)[: profile.evaluation.traced]
    entropies = []
    for seed, problem in enumerate(prompts, profile.rl["seed"]):
        out, start, mask = rollouts(model, tokenizer, problem, COMPLETIONS, profile.rl, seed)
        logits = probs.completion_logits(model, out, start)
        entropy = probs.entropies(logits, profile.rl["temperature"])
        entropies.append(entropy[mask.bool()].cpu().numpy())
    write_json(run.measured / "entropy.json", token_signals.summary(np.concatenate(entropies)))
    return run.finish(record, policy=policy.name, data=digest(prompts))


@torch.no_grad()
def trace_guides(profile: Profile, run: Run) -> dict:
    """Trace completions of the baseline's policy; return the run record.

    traces.json has one completion, with text, pi, pi_ref (probabilities of the drawn token),
    entropy (of pi, nats), surprisal (-log pi, nats) and q of each guide at the start of a run, by
    token. signals.json has entropy and surprisal over all completions, the share of tokens "above"
    each threshold, and the "kept_mass" that min-p sampling leaves.
    """
    drawer = groups.Drawer(profile, run)
    for name in TRACED:
        runs.require_entropies(profile, profile.guide_choice(name))
    seed, traced = profile.seeds[0] if run.seed is None else run.seed, profile.evaluation.traced
    sizes = {"method": run.method, "problems": traced, "completions": COMPLETIONS}
    record = run.begin(seed, sizes)
    ref_model, _ = loading.load(profile.model, runs.sft_run(profile).model)
    guides = {name: runs.guide_of(profile, profile.guide_choice(name)) for name in TRACED}
    run.samples.unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(seed)
    entropies, surprisals, masses = [], [], []
    best_rank, example = (False, False, -1.0), dict[str, Any]()
    traced_problems = problems.sampled_problems(profile, ood=False)[:traced]
    for problem in traced_problems:
        group = drawer.draw(problem, COMPLETIONS, seed)
        logps, ref_logps, entropy, mass = _signals(drawer, ref_model, group)
        inputs = GuideInputs(entropy, logps, group.mask, 0.0, generator, ids=group.drawn)
        columns = {"pi": logps.exp(), "pi_ref": ref_logps.exp(), "entropy": entropy}
        columns |= {"surprisal": -logps}
        columns |= {name: guide(inputs) for name, guide in guides.items()}
        entropies.append(entropy[group.mask].cpu().numpy())
        surprisals.append(-logps[group.mask].cpu().numpy())
        masses.append(mass)
        for row, (text, correct) in enumerate(zip(group.texts, group.correct, strict=True)):
            tokens = [
                {"text": drawer.tokenizer.decode([token])}
                | {name: float(values[row, t]) for name, values in columns.items()}
                for t, token in enumerate(group.bodies[row])
            ]
            line = {"problem": problem.id, "text": text, "correct": correct, "tokens": tokens}
            append_line(run.samples, line)
            # Of completions with valid work, the one with the most uncertain state is shown.
            measures = task_of(problem.task).measures(problem, text, correct)
            sound = measures.get("valid", correct)
            rank = (sound, correct, max(token["entropy"] for token in tokens))
            if rank > best_rank:
                best_rank = rank
                example = {"problem": problem.question, "answer": text, "correct": correct}
                example |= {"valid": sound} if "valid" in measures else {}
                example |= {"method": run.method, "progress": 0.0, "tokens": tokens}
    write_json(run.measured / "traces.json", example)
    branch: Any = guides["branch"]
    all_entropies, all_masses = np.concatenate(entropies), np.concatenate(masses)
    thresholds = (0.8, 1.2, 2.0, branch.threshold)  # nats: Table 6, and the guide
    signals = {
        "entropy": token_signals.summary(all_entropies),
        "surprisal": token_signals.summary(np.concatenate(surprisals)),
        "above": {str(t): float((all_entropies > t).mean()) for t in thresholds},
        "min_p": profile.rl["min_p"],
        "kept_mass": {"mean": float(np.mean(all_masses)), "lowest": float(np.min(all_masses))},
        "branch": {"threshold": branch.threshold, "ratio": branch.ratio},
    }
    write_json(run.measured / "signals.json", signals)
    return run.finish(
        record, policy=drawer.policy.name, completions=len(traced_problems) * COMPLETIONS
    )


def _signals(
    drawer: groups.Drawer, ref_model: PreTrainedModel, group: groups.Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
    """Return log pi and log pi_ref of the drawn tokens, the entropies and the masses of min-p.

    The first three have shape (completions, time); the last has a number for each token within the
    mask.
    """
    rows, masses, rl = [], [], drawer.profile.rl
    # One at a time: with a large vocabulary a whole group's distributions would fill a GPU.
    for number, mask in enumerate(group.mask):
        out, drawn = group.out[number : number + 1], group.drawn[number]
        logits = (probs.completion_logits(x, out, group.start) for x in (drawer.model, ref_model))
        log_pi, log_ref = (probs.log_probabilities(x, rl["temperature"])[0] for x in logits)
        of_drawn = [probs.drawn_log_probabilities(x, drawn) for x in (log_pi, log_ref)]
        rows.append((*of_drawn, probs.entropies_of(log_pi)))
        masses.append(token_signals.kept_mass(log_pi[mask], rl["min_p"] or 0.0).cpu().numpy())
    logps, ref_logps, entropy = map(torch.stack, zip(*rows, strict=True))
    return logps, ref_logps, entropy, np.concatenate(masses)
