"""log rho of each guide at the optimum, by enumeration of the base's completions.

All numbers are of the base alone. Nothing is trained, and only the noise of guides is sampled.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.algorithm.guide_choices import reads_rewards
from sage_lib.algorithm.guides import BranchGuide, Guide, GuideInputs
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run
from sage_lib.files import write_text
from sage_lib.policy import loading
from sage_lib.policy.enumeration import Enumeration, enumerate_completions
from sage_lib.policy.exact import valid_mass
from sage_lib.policy.scoring import valid_probabilities
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.theory.optimum import Prefixes

#: The least probability of a completion that is listed.
FLOOR = 1e-5
#: Draws of a noisy guide, over which q of a completion is a mean.
DRAWS = 16
#: Values of beta at which q is refreshed to its fixed point: until no completion's log q changes by
#: more than SETTLED, or REFRESHES times.
BETAS, SETTLED, REFRESHES = (0.2, 0.4, 0.8, 1.6, 3.2), 1e-6, 60
#: The branch guide with the paper's threshold and ratio (Table 8), in addition to a profile's.
PAPER: dict[str, Guide] = {"branch, 1.2 nats": BranchGuide()}
COLUMNS = ["dataset", "problem", "guide", "beta", "p", "covered", "listed", "acted"]
COLUMNS += ["log_rho", "low", "high", "rare"]


def measure_optimum(profile: Profile, run: Run) -> dict[str, Any]:
    """Write optimum.csv (docs/data_tables.md), a row for each problem and guide; return the run
    record."""
    policy = runs.finished(profile, run.policy)
    listed = profile.evaluation.listed
    sizes = {"floor": FLOOR, "problems": listed, "draws": DRAWS, "betas": BETAS}
    record = run.begin(profile.seeds[0], sizes)
    model, tokenizer = loading.load(profile.model, policy.model)
    guides = guides_of(profile)
    in_average = problems.evaluation_problems(profile, ood=False, limit=listed)
    rows: list[tuple[Any, ...]] = []
    longest = profile.evaluation.max_new_tokens
    for problem in tqdm(in_average, desc="optimum"):
        listing = completions_with_measures(model, tokenizer, problem, FLOOR, longest)
        p = float(valid_mass(valid_probabilities(model, tokenizer, [problem])).sum())
        rows += problem_rows(problem, *listing, p, guides, profile.seeds[0])
    table = pd.DataFrame(rows, columns=COLUMNS)
    write_text(run.measured / "optimum.csv", table.to_csv(index=False, float_format="%.8g"))
    return run.finish(record, policy=policy.name, problems=len(in_average))


def completions_with_measures(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problem: Problem,
    floor: float,
    longest: int,
) -> tuple[Enumeration, list[dict[str, Any]]]:
    """List a policy's completions of a problem of an exact task, with their ``Task.measures``.

    ``floor`` and ``longest`` are as in :func:`enumerate_completions`.
    """
    prompt = loading.encode(tokenizer, problem.question)
    enumeration = enumerate_completions(model, prompt, tokenizer.eos_token_id, floor, longest)
    texts, task = enumeration.texts(tokenizer), task_of(problem.task)
    return enumeration, [task.measures(problem, text, True) for text in texts]


def guides_of(profile: Profile) -> dict[str, Guide]:
    """Return the distinct guides of a profile, and the paper's branch guide.

    The name of a guide is the first method that has it at the paper's anchor. Guides of Table 6,
    guides that read rewards and shuffled guides, whose q(y) is the same, are left out.
    """
    guides: dict[str, Guide] = {}
    for key, method in profile.methods.items():
        if method.guide is None or method.kl_form != "k3" or method.family == "table6":
            continue
        if method.guide["name"] == "shuffled" or reads_rewards(method.guide):
            continue
        guide = runs.guide_of(profile, method.guide)
        if guide not in guides.values():
            guides[key] = guide
    return guides | PAPER


def problem_rows(
    problem: Problem,
    enumeration: Enumeration,
    measures: Sequence[Mapping[str, Any]],
    p: float,
    guides: Mapping[str, Guide],
    seed: int,
) -> list[tuple[Any, ...]]:
    """Return the rows of a problem, with the columns COLUMNS.

    Args:
        problem, enumeration, measures: as in :func:`completions_with_measures`.
        p: the probability of all valid completions, listed or not.
        guides: by name.
        seed: of the guides that draw.
    """
    valid, rare = (
        np.array([row.get(name) for row in measures], bool) for name in ("valid", "valid_rare")
    )
    base, mask = enumeration.probabilities.numpy(), enumeration.mask.numpy()
    entropies, logps = enumeration.entropies.double().numpy(), enumeration.logps.double().numpy()
    prefixes = Prefixes(enumeration.ids.numpy(), mask)
    rows = []

    def add(name: str, beta: float, q: np.ndarray, acted: float) -> None:
        size = (p, float(base.sum()), len(base), acted)
        bounds = log_rho_bounds(base, valid, q, p)
        of_rare = np.nan
        if (valid & rare).any():
            means = [np.average(q[group], weights=base[group]) for group in (valid & rare, valid)]
            of_rare = float(np.log(means[0] / means[1]))
        rows.append((problem.dataset, problem.id, name, beta, *size, *bounds, of_rare))

    for name, guide in guides.items():
        draws = 1 if isinstance(guide, BranchGuide) else DRAWS
        qs = [_q(guide, entropies, logps, mask, seed + n) for n in range(draws)]
        acted = float(np.mean([(q != 1)[mask].mean() for q in qs]))
        add(name, np.nan, np.mean([q.prod(axis=1) for q in qs], axis=0), acted)
        for beta in BETAS if isinstance(guide, BranchGuide) else ():
            of_token = np.ones(mask.shape)
            for _ in range(REFRESHES):
                before = np.log(of_token).sum(axis=1)
                tilted = np.exp(before + np.log(base) + (valid - 1.0) / beta)
                of_token = _q(guide, prefixes.entropies(tilted), logps, mask, seed)
                if np.abs(np.log(of_token).sum(axis=1) - before).max() < SETTLED:
                    break
            else:
                print(f"{problem.id}: q of {name} at beta {beta} is not settled")
            add(name, beta, of_token.prod(axis=1), float((of_token != 1)[mask].mean()))
    return rows


def log_rho_bounds(
    base: np.ndarray, valid: np.ndarray, q: np.ndarray, p: float
) -> tuple[float, float, float]:
    """Compute log rho of the listed completions, and its bounds over all completions.

    Args:
        base: probability of each listed completion, shape (completions,).
        valid: which of them are valid, shape (completions,).
        q: of each of them, shape (completions,). The others' q lies in the same range.
        p: the probability of all valid completions, listed or not.

    Returns:
        log rho, and its lower and upper bound; all NaN where none or all of the listed are valid.
    """
    if not valid.any() or valid.all():
        return np.nan, np.nan, np.nan
    low, mean, high = [], [], []
    for members, total in ((valid, p), (~valid, 1 - p)):
        listed, weighted = base[members].sum(), (base * q)[members].sum()
        unlisted = max(total - listed, 0.0)
        mean.append(np.log(weighted / listed))
        low.append(np.log((weighted + unlisted * q.min()) / (listed + unlisted)))
        high.append(np.log((weighted + unlisted * q.max()) / (listed + unlisted)))
    return float(mean[0] - mean[1]), float(low[0] - high[1]), float(high[0] - low[1])


def _q(
    guide: Guide, entropies: np.ndarray, logps: np.ndarray, mask: np.ndarray, seed: int
) -> np.ndarray:
    """Return q of each token at the start of a run, where a guide's schedules are highest."""
    state, drawn, on = (torch.as_tensor(x) for x in (entropies, logps, mask))
    generator = torch.Generator().manual_seed(seed)
    inputs = GuideInputs(state, drawn, on, 0.0, generator, torch.zeros_like(on, dtype=torch.long))
    q: np.ndarray = guide(inputs).double().numpy()
    return q
