"""The checks of notebook 02: every closed form of Sections 3, 4 and Appendix A against enumeration and optimisers."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize
from scipy.stats import norm

from sage_lib.algorithm.guides import HIGH, LOW
from sage_lib.theory import solutions
from sage_lib.theory.tree import Tree, random_tree


def instance(
    seed: int, depth: int = 3, branches: int = 3, sharpness: float = 1.5
) -> tuple[Tree, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A random tree, pi_ref and q of its completions (q_t of every token within the clamp), and a reward with both outcomes.

    pi_ref's logits have the standard deviation ``sharpness``.
    """
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, depth, branches)
    reference = tree.completion_probabilities(
        tree.log_policy(torch.as_tensor(sharpness * rng.normal(size=len(tree.edges))))
    )
    guide = solutions.product_guide(
        tree, torch.as_tensor(np.log(rng.uniform(LOW, HIGH, len(tree.edges))))
    )
    reward = torch.as_tensor((rng.permutation(len(tree.completions)) % 2 == 0).astype(float))
    return tree, reference, reward, guide


def ascents(seeds: Iterable[int], starts: int, betas: Sequence[float]) -> pd.DataFrame:
    """Gradient ascent on eq. 1, eq. 6, the entropy bonus (eq. 19) and forward KL from random starts, against each closed form.

    Columns: objective, beta, seed, start, error (largest absolute difference of a completion's probability).
    """
    rows = []
    for seed in seeds:
        tree, reference, reward, guide = instance(
            seed, sharpness=0.8
        )  # at a pi_ref of 1e-6 the objective is flat to rounding
        rng = np.random.default_rng(seed + 10_000)
        for beta in betas:
            kl = solutions.pseudo_kl
            cases = {
                "eq. 1 against eq. 2": (
                    lambda p, b=beta: p @ reward - b * kl(p, reference),
                    solutions.tilted(reference, reward, beta),
                ),
                "eq. 6 against eq. 4": (
                    lambda p, b=beta: p @ reward - b * kl(p, guide * reference),
                    solutions.tilted(reference, reward, beta, guide),
                ),
                "eq. 19 against eq. 21": (
                    lambda p, b=beta: (
                        p @ reward - b * kl(p, reference) - b * torch.special.xlogy(p, p).sum()
                    ),
                    solutions.entropy_bonus(reference, reward, beta, beta),
                ),
                "forward KL against eq. 27": (
                    lambda p, b=beta: p @ reward - b * (reference * (reference / p).log()).sum(),
                    solutions.forward_kl(reference, reward, beta)[0],
                ),
            }
            for start in range(starts):
                logits = torch.as_tensor(rng.normal(size=len(tree.edges)))
                rows += [
                    (
                        name,
                        beta,
                        seed,
                        start,
                        float((solutions.ascend(tree, objective, logits) - solution).abs().max()),
                    )
                    for name, (objective, solution) in cases.items()
                ]
    return pd.DataFrame(rows, columns=["objective", "beta", "seed", "start", "error"])


def support_conditions(
    seeds: Iterable[int], epsilons: Sequence[float], betas: Sequence[float]
) -> pd.DataFrame:
    """Theorem 4.3 on random instances: a row per correct completion that lies outside supp_eps of pi_RLVR.

    Columns: seed, beta, epsilon, identity (error of eq. 24), entered (is it in supp_eps(pi_SAGE)?), theorem (the condition),
    and two readings that are easier to check: correct_only (E[q] over correct completions alone, as Appendix C has it)
    and reference_only (pi_ref in the place of pi_RLVR, which needs no rewards).
    """
    rows = []
    for seed in seeds:
        _, reference, reward, guide = instance(seed)
        beta, correct = betas[seed % len(betas)], reward == 1
        rlvr, sage = (
            solutions.tilted(reference, reward, beta),
            solutions.tilted(reference, reward, beta, guide),
        )
        identity = float((sage - rlvr * guide / (rlvr * guide).sum()).abs().max())
        among_correct = (rlvr * guide)[correct].sum() / rlvr[correct].sum()
        for epsilon in epsilons:
            before = solutions.theorem_4_3(reference, guide, epsilon)
            condition, needed = solutions.theorem_4_3(rlvr, guide, epsilon), epsilon / rlvr
            entered = solutions.support(sage, reward, epsilon)
            for y in torch.nonzero(correct & (rlvr <= epsilon)).flatten().tolist():
                rows.append(
                    (
                        seed,
                        beta,
                        epsilon,
                        identity,
                        bool(entered[y]),
                        bool(condition[y]),
                        bool(guide[y] / among_correct > needed[y]),
                        bool(before[y]),
                    )
                )
    return pd.DataFrame(
        rows,
        columns=[
            "seed",
            "beta",
            "epsilon",
            "identity",
            "entered",
            "theorem",
            "correct_only",
            "reference_only",
        ],
    )


def separations(seeds: Iterable[int], betas: Sequence[float]) -> pd.DataFrame:
    """Eq. 30-32 on random instances. Columns: seed, beta, eq30, eq32, forward and sage (their mass on wrong completions).

    The guides lean towards correct completions by a random amount, so that instances on both sides of the conditions occur.
    """
    rows = []
    for seed in seeds:
        _, reference, reward, guide = instance(seed)
        rng, beta = np.random.default_rng(seed + 20_000), betas[seed % len(betas)]
        guide = guide * (rng.uniform(-1, 1) * reward).exp()
        forward, lagrange = solutions.forward_kl(reference, reward, beta)
        exact, enough = solutions.separation(guide, reward, beta, lagrange)
        sage = solutions.tilted(reference, reward, beta, guide)
        rows.append(
            (
                seed,
                beta,
                exact,
                enough,
                float(forward[reward == 0].sum()),
                float(sage[reward == 0].sum()),
            )
        )
    return pd.DataFrame(rows, columns=["seed", "beta", "eq30", "eq32", "forward", "sage"])


def detection(probabilities: Iterable[float], rollouts: Sequence[int]) -> pd.DataFrame:
    """Chance that a completion of probability p is among the rollouts: columns probability and one per number of rollouts."""
    p = np.asarray(list(probabilities))
    return pd.DataFrame(
        {
            "probability": p,
            **{n: solutions.detection_probability(torch.as_tensor(p), n).numpy() for n in rollouts},
        }
    )


def bonuses(
    reference: torch.Tensor, reward: torch.Tensor, beta: float, strengths: Sequence[float]
) -> pd.DataFrame:
    """Eq. 21 for several lambda: a row per lambda with the probability of every completion and ``slope``.

    ``slope`` is the log-odds of every pair of equally rewarded completions divided by their log-odds under pi_ref: one
    number, beta/(beta + lambda), when the bonus is a temperature. The largest deviation from it is ``deviation``.
    """
    rows = []
    for strength in strengths:
        pi = solutions.entropy_bonus(reference, reward, beta, strength)
        worst = 0.0
        for outcome in (0.0, 1.0):
            ours, theirs = pi[reward == outcome].log(), reference[reward == outcome].log()
            worst = max(
                worst,
                float(
                    ((ours[:, None] - ours) - beta / (beta + strength) * (theirs[:, None] - theirs))
                    .abs()
                    .max()
                ),
            )
        rows.append(
            {
                "lambda": strength,
                "slope": beta / (beta + strength),
                "deviation": worst,
                **{i: float(v) for i, v in enumerate(pi)},
            }
        )
    return pd.DataFrame(rows)


def gaussian_fits(
    means: Sequence[float] = (-2.0, 2.5),
    sds: Sequence[float] = (0.6, 0.9),
    weights: Sequence[float] = (0.45, 0.55),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Figure 5: one Gaussian fitted to a mixture of two by each KL, on a fine grid.

    Returns the fits (columns divergence, start, mean, sd, value in nats; one row per start of the optimiser, best first)
    and the densities (columns x, target, reverse, forward).
    """
    x = np.linspace(-12, 12, 6001)
    dx = x[1] - x[0]
    log_target = np.logaddexp(
        *(np.log(w) + norm.logpdf(x, m, s) for m, s, w in zip(means, sds, weights, strict=True))
    )
    target = np.exp(log_target)

    def reverse(free: np.ndarray) -> float:
        log_q = norm.logpdf(x, free[0], np.exp(free[1]))
        return float(np.sum(np.exp(log_q) * (log_q - log_target)) * dx)

    def forward(free: np.ndarray) -> float:
        return float(np.sum(target * (log_target - norm.logpdf(x, free[0], np.exp(free[1])))) * dx)

    rows = []
    for name, divergence in (
        ("reverse KL(pi ‖ target)", reverse),
        ("forward KL(target ‖ pi)", forward),
    ):
        found = [
            (
                name,
                start,
                *minimize(
                    divergence,
                    [start, 0.0],
                    method="Nelder-Mead",
                    options={"xatol": 1e-9, "fatol": 1e-12},
                ).x,
            )
            for start in (means[0], sum(means) / 2, means[1])
        ]
        rows += sorted(
            ((n, s, m, float(np.exp(v)), divergence(np.array([m, v]))) for n, s, m, v in found),
            key=lambda r: r[-1],
        )
    fits = pd.DataFrame(rows, columns=["divergence", "start", "mean", "sd", "value"])
    best = fits.groupby("divergence", sort=False).first()
    density = pd.DataFrame(
        {
            "x": x,
            "target": target,
            **{
                key: norm.pdf(x, best.iloc[i]["mean"], best.iloc[i]["sd"])
                for i, key in enumerate(("reverse", "forward"))
            },
        }
    )
    return fits, density
