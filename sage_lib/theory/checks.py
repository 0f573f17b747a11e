"""The checks of notebook 02: closed forms against enumeration and optimisers.

They cover Sections 3 and 4 and Appendix A of the paper.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize
from scipy.stats import norm

from sage_lib.algorithm.guides import HIGH, LOW
from sage_lib.theory import solutions
from sage_lib.theory.tree import Tree, random_tree

Objective = Callable[[torch.Tensor], torch.Tensor]


def random_instance(
    seed: int, depth: int = 3, branches: int = 3, sharpness: float = 1.5
) -> tuple[Tree, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A random tree with pi_ref, a reward with both outcomes, and q of its completions, (L,) each.

    q_t of every token lies within the clamp; pi_ref's logits have the standard deviation
    ``sharpness``.
    """
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, depth, branches)
    logits = torch.as_tensor(sharpness * rng.normal(size=len(tree.edges)))
    reference = tree.completion_probabilities(tree.log_policy(logits))
    log_q = torch.as_tensor(np.log(rng.uniform(LOW, HIGH, len(tree.edges))))
    guide = solutions.product_guide(tree, log_q)
    correct = rng.permutation(len(tree.completions)) % 2 == 0
    reward = torch.as_tensor(correct.astype(float))
    return tree, reference, reward, guide


def ascents(seeds: Iterable[int], starts: int, betas: Sequence[float]) -> pd.DataFrame:
    """Gradient ascent on each objective from random starts, against its closed form.

    Columns: objective (eq. 1, eq. 6, the entropy bonus of eq. 19, forward KL), beta, seed, start,
    error (largest absolute difference of a completion's probability).
    """
    rows = []
    for seed in seeds:
        # Flatter than elsewhere: at a pi_ref of 1e-6 the objective is flat to rounding.
        tree, reference, reward, guide = random_instance(seed, sharpness=0.8)
        rng = np.random.default_rng(seed + 10_000)
        for beta in betas:
            cases = _objectives(reference, reward, guide, beta)
            for start in range(starts):
                logits = torch.as_tensor(rng.normal(size=len(tree.edges)))
                for name, (objective, solution) in cases.items():
                    found = solutions.ascend(tree, objective, logits)
                    error = float((found - solution).abs().max())
                    rows.append((name, beta, seed, start, error))
    return pd.DataFrame(rows, columns=["objective", "beta", "seed", "start", "error"])


def _objectives(
    reference: torch.Tensor, reward: torch.Tensor, guide: torch.Tensor, beta: float
) -> dict[str, tuple[Objective, torch.Tensor]]:
    """Each objective as a function of pi, with its closed-form solution."""

    def eq_1(pi: torch.Tensor) -> torch.Tensor:
        return pi @ reward - beta * solutions.pseudo_kl(pi, reference)

    def eq_6(pi: torch.Tensor) -> torch.Tensor:
        return pi @ reward - beta * solutions.pseudo_kl(pi, guide * reference)

    def eq_19(pi: torch.Tensor) -> torch.Tensor:
        without_bonus = eq_1(pi)
        minus_entropy: torch.Tensor = torch.special.xlogy(pi, pi).sum()
        return without_bonus - beta * minus_entropy

    def forward(pi: torch.Tensor) -> torch.Tensor:
        return pi @ reward - beta * (reference * (reference / pi).log()).sum()

    return {
        "eq. 1 against eq. 2": (eq_1, solutions.tilted(reference, reward, beta)),
        "eq. 6 against eq. 4": (eq_6, solutions.tilted(reference, reward, beta, guide)),
        "eq. 19 against eq. 21": (eq_19, solutions.entropy_bonus(reference, reward, beta, beta)),
        "forward KL against eq. 27": (forward, solutions.forward_kl(reference, reward, beta)[0]),
    }


def support_conditions(
    seeds: Iterable[int], epsilons: Sequence[float], betas: Sequence[float]
) -> pd.DataFrame:
    """Theorem 4.3 on random instances: a row per correct completion outside supp_eps of pi_RLVR.

    Columns: seed, beta, epsilon, identity (error of eq. 24), entered (is it in supp_eps(pi_SAGE)?),
    theorem (the condition), and two readings that are easier to check: correct_only (E[q] over
    correct completions alone, as Appendix C has it) and reference_only (pi_ref in the place of
    pi_RLVR, which needs no rewards).
    """
    rows = []
    for seed in seeds:
        _, reference, reward, guide = random_instance(seed)
        beta = betas[seed % len(betas)]
        correct = reward == 1
        rlvr = solutions.tilted(reference, reward, beta)
        sage = solutions.tilted(reference, reward, beta, guide)
        eq_24 = rlvr * guide / (rlvr * guide).sum()
        identity = float((sage - eq_24).abs().max())
        mean_among_correct = (rlvr * guide)[correct].sum() / rlvr[correct].sum()
        for epsilon in epsilons:
            readings = {
                "entered": solutions.support(sage, reward, epsilon),
                "theorem": solutions.theorem_4_3(rlvr, guide, epsilon),
                "correct_only": guide / mean_among_correct > epsilon / rlvr,
                "reference_only": solutions.theorem_4_3(reference, guide, epsilon),
            }
            outside = torch.nonzero(correct & (rlvr <= epsilon)).flatten().tolist()
            for y in outside:
                row = {"seed": seed, "beta": beta, "epsilon": epsilon, "identity": identity}
                row.update({name: bool(said[y]) for name, said in readings.items()})
                rows.append(row)
    return pd.DataFrame(rows)


def entries(
    seeds: Iterable[int], epsilons: Sequence[float], betas: Sequence[float]
) -> pd.DataFrame:
    """Who brings correct completions into the support, on :func:`support_conditions`' instances.

    A row per step, pi_ref to eq. 2 ("reward") and eq. 2 to eq. 4 ("guide"). Columns: step, outside
    (correct completions at most epsilon probable before it), enter, leave (those that were more
    probable and no longer are).
    """
    counts = {step: np.zeros(3, dtype=int) for step in ("reward", "guide")}
    for seed in seeds:
        _, reference, reward, guide = random_instance(seed)
        beta = betas[seed % len(betas)]
        rlvr = solutions.tilted(reference, reward, beta)
        sage = solutions.tilted(reference, reward, beta, guide)
        for epsilon in epsilons:
            for step, before, after in (("reward", reference, rlvr), ("guide", rlvr, sage)):
                was = solutions.support(before, reward, epsilon)
                now = solutions.support(after, reward, epsilon)
                outside = (reward == 1) & ~was
                found = (outside, ~was & now, was & ~now)
                counts[step] += [int(which.sum()) for which in found]
    rows = [(step, *found.tolist()) for step, found in counts.items()]
    return pd.DataFrame(rows, columns=["step", "outside", "enter", "leave"])


def verdicts(conditions: pd.DataFrame) -> pd.DataFrame:
    """How often each reading of Theorem 4.3 is right; ``conditions``: :func:`support_conditions`.

    Columns: condition, and the numbers of completions of which it "says it enters", "and it does
    not", and of those that it does not name, "enters unannounced".
    """
    readings = {
        "Theorem 4.3": "theorem",
        "E[q] over correct completions only (Appendix C)": "correct_only",
        "pi_ref for pi_RLVR": "reference_only",
    }
    entered = conditions["entered"]
    rows = []
    for label, reading in readings.items():
        said = conditions[reading]
        row = {
            "condition": label,
            "says it enters": int(said.sum()),
            "and it does not": int((said & ~entered).sum()),
            "enters unannounced": int((~said & entered).sum()),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def separations(seeds: Iterable[int], betas: Sequence[float]) -> pd.DataFrame:
    """Eq. 30-32 on random instances.

    Columns: seed, beta, eq30, eq32 (whether they hold), forward and sage (their mass on wrong
    completions). The guides lean towards correct completions by a random amount, so that instances
    on both sides of the conditions occur.
    """
    rows = []
    for seed in seeds:
        _, reference, reward, guide = random_instance(seed)
        rng = np.random.default_rng(seed + 20_000)
        beta = betas[seed % len(betas)]
        guide = guide * (rng.uniform(-1, 1) * reward).exp()
        forward, lagrange = solutions.forward_kl(reference, reward, beta)
        eq_30, eq_32 = solutions.separation(guide, reward, beta, lagrange)
        sage = solutions.tilted(reference, reward, beta, guide)
        wrong = reward == 0
        rows.append(
            {
                "seed": seed,
                "beta": beta,
                "eq30": eq_30,
                "eq32": eq_32,
                "forward": float(forward[wrong].sum()),
                "sage": float(sage[wrong].sum()),
            }
        )
    return pd.DataFrame(rows)


def detection(probabilities: Iterable[float], rollouts: Sequence[int]) -> pd.DataFrame:
    """Chance that a completion of probability p is among the rollouts.

    Columns: probability and one per number of rollouts.
    """
    frame = pd.DataFrame({"probability": np.asarray(list(probabilities))})
    p = torch.as_tensor(frame["probability"].to_numpy(copy=True))
    for n in rollouts:
        frame[n] = solutions.detection_probability(p, n).numpy()
    return frame


def bonuses(
    reference: torch.Tensor, reward: torch.Tensor, beta: float, strengths: Sequence[float]
) -> pd.DataFrame:
    """Eq. 21 for several lambda: a row per lambda, a column per completion (its number).

    ``slope`` is the log-odds of every pair of equally rewarded completions divided by their
    log-odds under pi_ref: one number, beta/(beta + lambda), when the bonus is a temperature. The
    largest deviation from it is ``deviation``.
    """
    rows = []
    for strength in strengths:
        pi = solutions.entropy_bonus(reference, reward, beta, strength)
        slope = beta / (beta + strength)
        deviation = 0.0
        for outcome in (0.0, 1.0):
            alike = reward == outcome
            off = _log_odds(pi[alike]) - slope * _log_odds(reference[alike])
            deviation = max(deviation, float(off.abs().max()))
        rows.append([strength, slope, deviation, *pi.tolist()])
    return pd.DataFrame(rows, columns=["lambda", "slope", "deviation", *range(len(reference))])


def guided(
    reference: torch.Tensor,
    reward: torch.Tensor,
    beta: float,
    completion: int,
    strengths: Sequence[float],
) -> pd.DataFrame:
    """Eq. 4 with a guide that acts on one completion alone: a row per strength of its q.

    Columns: q, and one per completion (its number).
    """
    rows = []
    for q in strengths:
        guide = torch.ones_like(reference)
        guide[completion] = q
        rows.append([q, *solutions.tilted(reference, reward, beta, guide).tolist()])
    return pd.DataFrame(rows, columns=["q", *range(len(reference))])


def _log_odds(probabilities: torch.Tensor) -> torch.Tensor:
    """log p_i - log p_j of every pair, shape (n, n)."""
    logs = probabilities.log()
    return logs[:, None] - logs


def gaussian_fits(
    means: Sequence[float] = (-2.0, 2.5),
    sds: Sequence[float] = (0.6, 0.9),
    weights: Sequence[float] = (0.45, 0.55),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Figure 5: one Gaussian fitted to a mixture of two by each KL, on a fine grid.

    Returns the fits (columns divergence, start, mean, sd, value in nats; one row per start of the
    optimiser, best first) and the densities (columns x, target, reverse, forward).
    """
    x = np.linspace(-12, 12, 6001)
    dx = x[1] - x[0]
    modes = zip(means, sds, weights, strict=True)
    log_target = np.logaddexp(*(np.log(w) + norm.logpdf(x, m, s) for m, s, w in modes))
    target = np.exp(log_target)

    def reverse(free: np.ndarray) -> float:
        log_q = norm.logpdf(x, free[0], np.exp(free[1]))
        return float(np.sum(np.exp(log_q) * (log_q - log_target)) * dx)

    def forward(free: np.ndarray) -> float:
        log_q = norm.logpdf(x, free[0], np.exp(free[1]))
        return float(np.sum(target * (log_target - log_q)) * dx)

    divergences = {
        "reverse": ("reverse KL(pi ‖ target)", reverse),
        "forward": ("forward KL(target ‖ pi)", forward),
    }
    starts = (means[0], sum(means) / 2, means[1])
    density = pd.DataFrame({"x": x, "target": target})
    fits = []
    for key, (name, divergence) in divergences.items():
        found = pd.DataFrame([_fit(divergence, start) for start in starts])
        found = found.sort_values("value", kind="stable")
        found.insert(0, "divergence", name)
        density[key] = norm.pdf(x, found["mean"].iloc[0], found["sd"].iloc[0])
        fits.append(found)
    return pd.concat(fits, ignore_index=True), density


def _fit(divergence: Callable[[np.ndarray], float], start: float) -> dict[str, float]:
    """The mean and sd that minimise a divergence of (mean, log sd), from mean ``start``, sd 1."""
    precise = {"xatol": 1e-9, "fatol": 1e-12}
    best = minimize(divergence, [start, 0.0], method="Nelder-Mead", options=precise).x
    return {
        "start": start,
        "mean": best[0],
        "sd": float(np.exp(best[1])),
        "value": divergence(best),
    }
