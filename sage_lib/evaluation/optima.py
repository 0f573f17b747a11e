"""Where the objective leads from the base: its completions enumerated, and log rho of each guide.

Every number is of the base alone. Nothing is trained, and nothing is sampled but the noise of the
guides that have some.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from sage_lib.algorithm.guide_choices import reads_rewards
from sage_lib.algorithm.guides import BranchGuide, Guide, GuideInputs
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import write_bytes
from sage_lib.policy import loading
from sage_lib.policy.enumeration import Enumeration, enumerate_completions
from sage_lib.policy.scoring import valid_probabilities
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.theory.optimum import Prefixes

#: The least probability of a completion that is listed.
FLOOR = 1e-5
#: Draws of a noisy guide over which q of a completion is averaged.
DRAWS = 16
#: Values of beta at which q is refreshed to its fixed point: until log q of no completion changes
#: by more than this, or so often.
BETAS, SETTLED, REFRESHES = (0.2, 0.4, 0.8, 1.6, 3.2), 1e-6, 60
#: The branch guide with the paper's own threshold and ratio (Table 8), beside a profile's guides.
PAPER = ("branch, 1.2 nats", BranchGuide())
COLUMNS = ["dataset", "problem", "guide", "beta", "p", "covered", "listed", "acted"]
COLUMNS += ["log_rho", "low", "high", "rare"]


def measure(profile: Profile, run: Run) -> dict[str, Any]:
    """Write optimum.csv, a row for each problem and guide; returns the run record.

    Columns: docs/data_tables.md. The bounds hold if q of what is not listed lies within that of
    what is.
    """
    policy = runs.finished(profile, run.policy)
    listed = profile.evaluation.listed
    settings = {"floor": FLOOR, "problems": listed, "draws": DRAWS, "betas": BETAS}
    record = Record("optimum", profile.name, run.fingerprint, profile.seeds[0], settings)
    model, tokenizer = loading.load(profile, policy.model)
    guides = guides_of(profile)
    asked = problems.evaluation_problems(profile, ood=False, limit=listed)
    rows: list[tuple[Any, ...]] = []
    for problem in tqdm(asked, desc="optimum"):
        prompt = loading.encode(tokenizer, problem.question)
        longest = profile.evaluation.max_new_tokens
        found = enumerate_completions(model, prompt, tokenizer.eos_token_id, FLOOR, longest)
        texts = tokenizer.batch_decode(
            [ids[mask] for ids, mask in zip(found.ids, found.mask, strict=True)],
            skip_special_tokens=True,
        )
        every = valid_probabilities(model, tokenizer, [problem])["logp"]
        p = float(np.exp(every).sum())
        rows += of_problem(problem, found, texts, p, guides, profile.seeds[0])
    table = pd.DataFrame(rows, columns=COLUMNS)
    csv = table.to_csv(index=False, float_format="%.8g")
    write_bytes(run.measured / "optimum.csv", csv.encode())
    return run.finish(record, policy=policy.name, problems=len(asked))


def guides_of(profile: Profile) -> dict[str, Guide]:
    """The distinct guides of a profile, each by the first method that has it at the paper's anchor,
    and the paper's own; without those of Table 6, shuffled ones, whose q(y) is the same, and
    those that read rewards."""
    found: dict[str, Guide] = {}
    for key, method in profile.methods.items():
        if method.guide is None or method.kl_form != "k3" or method.family == "table6":
            continue
        if method.guide["name"] == "shuffled" or reads_rewards(method.guide):
            continue
        guide = runs.guide_of(profile, method.guide)
        if guide not in found.values():
            found[key] = guide
    return found | dict([PAPER])


def of_problem(
    problem: Problem,
    found: Enumeration,
    texts: list[str],
    p: float,
    guides: Mapping[str, Guide],
    seed: int,
) -> list[tuple[Any, ...]]:
    """The rows of one problem, of whose completions the valid ones have the probability ``p``."""
    measure = task_of(problem.task).measures
    judged = [measure(problem, text, True) for text in texts]
    valid, rare = (
        np.array([one[name] for one in judged], bool) for name in ("valid", "valid_rare")
    )
    reference, mask = found.probabilities.numpy(), found.mask.numpy()
    prefixes = Prefixes(found.ids.numpy(), mask)
    logps = found.logps.double().numpy()
    rows = []

    def add(name: str, beta: float, q: np.ndarray, acted: float) -> None:
        size = (p, float(reference.sum()), len(reference), acted)
        bounds = log_rho_bounds(reference, valid, q, p)
        of_rare = np.nan
        if (valid & rare).any():
            of_rare = float(np.log(_mean(reference, q, valid & rare) / _mean(reference, q, valid)))
        rows.append((problem.dataset, problem.id, name, beta, *size, *bounds, of_rare))

    for name, guide in guides.items():
        draws = 1 if isinstance(guide, BranchGuide) else DRAWS
        qs = [
            _q(guide, found.entropies.double().numpy(), logps, mask, seed + n) for n in range(draws)
        ]
        acted = float(np.mean([(one != 1)[mask].mean() for one in qs]))
        add(name, np.nan, np.mean([one.prod(axis=1) for one in qs], axis=0), acted)
        for beta in BETAS if isinstance(guide, BranchGuide) else ():
            of_token = np.ones(mask.shape)
            for _ in range(REFRESHES):
                before = np.log(of_token).sum(axis=1)
                tilted = np.exp(before + np.log(reference) + (valid - 1.0) / beta)
                of_token = _q(guide, prefixes.entropies(tilted), logps, mask, seed)
                if np.abs(np.log(of_token).sum(axis=1) - before).max() < SETTLED:
                    break
            else:
                print(f"{problem.id}: q of {name} at beta {beta} is not settled")
            add(name, beta, of_token.prod(axis=1), float((of_token != 1)[mask].mean()))
    return rows


def log_rho_bounds(
    reference: np.ndarray, valid: np.ndarray, q: np.ndarray, p: float
) -> tuple[float, float, float]:
    """log rho of what is listed, and its bounds with the rest, whose q lies in the listed range.

    Shapes (completions,); ``p`` is the probability of all valid completions, listed or not.
    """
    if not valid.any() or valid.all():
        return np.nan, np.nan, np.nan
    sides = [(valid, p), (~valid, 1 - p)]
    low, mean, high = [], [], []
    for side, whole in sides:
        mass, weighted = reference[side].sum(), (reference * q)[side].sum()
        rest = max(whole - mass, 0.0)
        mean.append(weighted / mass)
        low.append((weighted + rest * q.min()) / (mass + rest))
        high.append((weighted + rest * q.max()) / (mass + rest))
    log = np.log
    return (
        float(log(mean[0] / mean[1])),
        float(log(low[0] / high[1])),
        float(log(high[0] / low[1])),
    )


def _mean(reference: np.ndarray, q: np.ndarray, chosen: np.ndarray) -> float:
    return float((reference * q)[chosen].sum() / reference[chosen].sum())


def _q(
    guide: Guide, entropies: np.ndarray, logps: np.ndarray, mask: np.ndarray, seed: int
) -> np.ndarray:
    """q of each token, at the start of a run, when a guide's schedules are at their height."""
    state, drawn, on = (torch.as_tensor(one) for one in (entropies, logps, mask))
    generator = torch.Generator().manual_seed(seed)
    inputs = GuideInputs(state, drawn, on, 0.0, generator, torch.zeros_like(on, dtype=torch.long))
    found: np.ndarray = guide(inputs).double().numpy()
    return found
