"""Checks of closed forms (Sections 3 and 4, Appendix A) on random trees, for notebook 02."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sage_lib.algorithm.guides import HIGH, LOW
from sage_lib.theory import solutions
from sage_lib.theory.solutions import Objective
from sage_lib.theory.tree import Tree, random_tree


def random_instance(seed: int, sharpness: float = 1.5) -> tuple[Tree, Tensor, Tensor, Tensor]:
    """Return a random tree with pi_ref, a reward with both outcomes and q, each of shape (L,).

    All q_t are within the clamp; pi_ref's logits have the standard deviation ``sharpness``.
    """
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    logits = torch.as_tensor(sharpness * rng.normal(size=len(tree.edges)))
    reference = tree.completion_probabilities(tree.log_policy(logits))
    log_q = torch.as_tensor(np.log(rng.uniform(LOW, HIGH, len(tree.edges))))
    correct = rng.permutation(len(tree.completions)) % 2 == 0
    reward = torch.as_tensor(correct.astype(float))
    return tree, reference, reward, solutions.product_guide(tree, log_q)


def ascents(seeds: Iterable[int], starts: int, betas: Sequence[float]) -> pd.DataFrame:
    """Compare gradient ascent on each objective with the closed form.

    Args:
        seeds: one for each tree.
        starts: random starts for each.
        betas: coefficients of the KL.

    Returns:
        Columns objective, beta, seed, start, error (largest difference of a probability).
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
                    pi = solutions.ascend(tree, objective, logits)
                    rows.append((name, beta, seed, start, float((pi - solution).abs().max())))
    return pd.DataFrame(rows, columns=["objective", "beta", "seed", "start", "error"])


def _objectives(
    reference: Tensor, reward: Tensor, guide: Tensor, beta: float
) -> dict[str, tuple[Objective, Tensor]]:
    """Return each objective as a function of pi, with its closed-form solution."""

    def eq_3(pi: Tensor, anchor: Tensor = reference) -> Tensor:
        return pi @ reward - beta * solutions.pseudo_kl(pi, anchor)

    def eq_19(pi: Tensor) -> Tensor:
        minus_entropy: Tensor = torch.special.xlogy(pi, pi).sum()
        return eq_3(pi) - beta * minus_entropy

    def forward(pi: Tensor) -> Tensor:
        return pi @ reward - beta * solutions.pseudo_kl(reference, pi)

    eq_2, eq_4 = (solutions.tilted(reference, reward, beta, q) for q in (None, guide))
    return {
        "eq. 1 against eq. 2": (eq_3, eq_2),
        "eq. 6 against eq. 4": (lambda pi: eq_3(pi, guide * reference), eq_4),
        "eq. 19 against eq. 21": (eq_19, solutions.entropy_bonus(reference, reward, beta, beta)),
        "forward KL against eq. 27": (forward, solutions.forward_kl(reference, reward, beta)[0]),
    }


def supports(
    seeds: Iterable[int], epsilons: Sequence[float], betas: Sequence[float]
) -> pd.DataFrame:
    """Check Theorem 4.3 on random instances.

    Args:
        seeds: one for each tree.
        epsilons: of Definition 4.1.
        betas: coefficients of the KL; the trees take them in turn.

    Returns:
        A row for each correct completion and epsilon. Columns seed, beta, epsilon, identity (error
        of eq. 24); reference, rlvr, sage (whether the completion is in that policy's support);
        theorem (its condition).
    """
    frames = []
    for seed in seeds:
        _, reference, reward, guide = random_instance(seed)
        beta, correct = betas[seed % len(betas)], reward == 1
        rlvr = solutions.tilted(reference, reward, beta)
        sage = solutions.tilted(reference, reward, beta, guide)
        eq_24 = rlvr * guide / (rlvr * guide).sum()
        for epsilon in epsilons:
            columns = {
                "reference": solutions.support(reference, reward, epsilon),
                "rlvr": solutions.support(rlvr, reward, epsilon),
                "sage": solutions.support(sage, reward, epsilon),
                "theorem": solutions.theorem_4_3(rlvr, guide, epsilon),
            }
            frame = pd.DataFrame({name: holds[correct].numpy() for name, holds in columns.items()})
            identity = float((sage - eq_24).abs().max())
            frames.append(frame.assign(seed=seed, beta=beta, epsilon=epsilon, identity=identity))
    return pd.concat(frames, ignore_index=True)


def separations(seeds: Iterable[int], betas: Sequence[float]) -> pd.DataFrame:
    """Check eq. 30-32 on random instances, whose guides favour correct completions or wrong ones.

    Columns: seed, beta, eq30, eq32 (whether they hold), forward, sage (mass on wrong completions).
    """
    rows = []
    for seed in seeds:
        _, reference, reward, guide = random_instance(seed)
        beta = betas[seed % len(betas)]
        guide = guide * (np.random.default_rng(seed + 20_000).uniform(-1, 1) * reward).exp()
        forward, lagrange = solutions.forward_kl(reference, reward, beta)
        sage = solutions.tilted(reference, reward, beta, guide)
        wrong = [float(policy[reward == 0].sum()) for policy in (forward, sage)]
        rows.append((seed, beta, *solutions.separation(guide, reward, beta, lagrange), *wrong))
    return pd.DataFrame(rows, columns=["seed", "beta", "eq30", "eq32", "forward", "sage"])
