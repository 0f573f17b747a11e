"""The comparisons of notebook 03: each estimator's gradient and fixed point, for each kind of guide, on random trees."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm

from sage_lib.algorithm.guides import HIGH, LOW
from sage_lib.errors import SageError
from sage_lib.theory import estimators, solutions, two_path
from sage_lib.theory.tree import Tree, random_tree

GUIDES = ("none", "token", "state", "noise")


def log_guide(
    tree: Tree, kind: str, log_policy: torch.Tensor, threshold: float = 0.7, draws: int = 64
) -> torch.Tensor:
    """log q_t of every edge, clamped as the authors' code does, the policy's statistics held fixed.

    "token": eq. 10 without its noise, 1 + 0.3 w with w the surprisal scaled to [0, 1] over the tree; shape (E,).
    "state": eq. 11, 1 + 0.3 max(0, H - threshold), the same for every token of a state; shape (E,).
    "noise": eq. 9 acting on every token, 1 + 0.15 z; shape (draws, E), z at equally likely quantiles of N(0, 1) and the
    same for every token, so that the mean over draws is the expectation and not one sample of it.
    """
    if kind == "none":
        return torch.zeros_like(log_policy)
    if kind == "token":
        surprisal = -log_policy
        spread = surprisal.max() - surprisal.min()
        q = 1 + 0.3 * (surprisal - surprisal.min()) / spread
    elif kind == "state":
        q = 1 + 0.3 * (tree.entropies(log_policy) - threshold).clamp(min=0)[tree.state_of]
    elif kind == "noise":
        z = torch.as_tensor(norm.ppf((np.arange(draws) + 0.5) / draws))
        q = (1 + 0.15 * z)[:, None].expand(draws, len(tree.edges))
    else:
        raise SageError(f"there is no guide {kind!r} here: choose one of {', '.join(GUIDES)}")
    return q.clamp(LOW, HIGH).log()


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return (
        float(a @ b / (a.norm() * b.norm()))
        if a.norm() > 1e-12 and b.norm() > 1e-12
        else float("nan")
    )


def gradients(seeds: Iterable[int], depth: int = 3, branches: int = 3) -> pd.DataFrame:
    """For every estimator and guide, over random trees and policies: how its expected gradient compares.

    Columns: estimator, guide, to_reverse and to_forward (largest relative difference to the gradient of the per-token
    reverse, forward KL to q·pi_ref, visits held fixed), guide_effect (largest relative change that the guide makes),
    trees.
    """
    rows = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        tree = random_tree(rng, depth, branches)
        log_reference, log_policy = (
            tree.log_policy(torch.as_tensor(rng.normal(size=len(tree.edges)))) for _ in range(2)
        )
        for kind in GUIDES:
            log_q = log_guide(tree, kind, log_policy)
            mean_log_q = log_q.reshape(-1, log_q.shape[-1]).mean(0)
            mean_q = log_q.exp().reshape(-1, log_q.shape[-1]).mean(0)
            reverse = estimators.reverse_kl_gradient(tree, log_policy, log_reference, mean_log_q)
            forward = estimators.forward_kl_gradient(tree, log_policy, log_reference, mean_q.log())
            for estimator in estimators.ESTIMATORS:
                g = estimators.kl_gradient(tree, estimator, log_policy, log_reference, log_q)
                plain = estimators.kl_gradient(tree, estimator, log_policy, log_reference)
                scale = plain.norm().clamp(min=1e-9)
                rows.append(
                    (
                        estimator,
                        kind,
                        float((g - reverse).norm() / reverse.norm()),
                        float((g - forward).norm() / forward.norm()),
                        float((g - plain).norm() / scale) if plain.norm() > 1e-9 else 0.0,
                    )
                )
    frame = pd.DataFrame(
        rows, columns=["estimator", "guide", "to_reverse", "to_forward", "guide_effect"]
    )
    return (
        frame.groupby(["estimator", "guide"], sort=False)
        .max()
        .assign(trees=frame.groupby(["estimator", "guide"], sort=False).size())
        .reset_index()
    )


def total_variation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Half the sum of absolute differences: the probability mass that must move to turn one into the other."""
    return float((a - b).abs().sum() / 2)


def random_instance(
    seed: int, depth: int, branches: int, sharpness: float
) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """A full tree, a reference whose logits have standard deviation ``sharpness``, and a reward for half the completions."""
    rng = np.random.default_rng(seed)
    tree = Tree.full(depth, branches)
    log_reference = tree.log_policy(torch.as_tensor(sharpness * rng.normal(size=len(tree.edges))))
    return (
        tree,
        log_reference,
        torch.as_tensor((rng.permutation(len(tree.completions)) % 2 == 0).astype(float)),
    )


def distances(
    betas: Iterable[float],
    depths: Iterable[int],
    sharpnesses: Iterable[float],
    seeds: Iterable[int],
    guide: str = "none",
) -> pd.DataFrame:
    """Total variation between where an estimator leads and eq. 4, a row per instance and estimator.

    Columns: beta, depth, sharpness, seed, estimator, entropy (the reference's mean token entropy, nats), distance.
    An instance whose fixed point was not found is left out; the caller sees how many rows there are.
    """
    rows, seeds = [], list(seeds)
    for depth in depths:
        for sharpness in sharpnesses:
            for seed in seeds:
                tree, log_reference, reward = random_instance(seed, depth, 3, sharpness)
                log_q = log_guide(tree, guide, log_reference)
                reference = tree.completion_probabilities(log_reference)
                at_state = torch.zeros(len(tree.states), dtype=torch.float64).index_add(
                    0, tree.state_of, tree.visits(log_reference)
                )
                entropy = float((at_state * tree.entropies(log_reference)).sum() / at_state.sum())
                for beta in betas:
                    target = solutions.tilted(
                        reference, reward, beta, solutions.product_guide(tree, log_q)
                    )
                    for estimator in ("k3", "k3_corrected", "sequence"):
                        try:
                            found = estimators.fixed_point(
                                tree, estimator, reward, log_reference, beta, log_q
                            )
                        except SageError:
                            continue
                        rows.append(
                            (
                                beta,
                                depth,
                                sharpness,
                                seed,
                                estimator,
                                entropy,
                                total_variation(tree.completion_probabilities(found), target),
                            )
                        )
    return pd.DataFrame(
        rows, columns=["beta", "depth", "sharpness", "seed", "estimator", "entropy", "distance"]
    )


def fixed_points(
    tree: Tree, log_reference: torch.Tensor, reward: torch.Tensor, beta: float, log_q: torch.Tensor
) -> pd.DataFrame:
    """Probability of every completion: the reference, eq. 4, eq. 27, and where k3, k3_corrected and sequence lead.

    Columns: completion, correct, and one per policy.
    """
    reference = tree.completion_probabilities(log_reference)
    columns = {
        "completion": [" ".join(c) for c in tree.completions],
        "correct": (reward == 1).tolist(),
        "reference": reference.tolist(),
        "eq. 2 (no guide)": solutions.tilted(reference, reward, beta).tolist(),
        "eq. 4": solutions.tilted(
            reference, reward, beta, solutions.product_guide(tree, log_q)
        ).tolist(),
        "eq. 27 (forward KL)": solutions.forward_kl(reference, reward, beta)[0].tolist(),
    }
    for estimator in ("k3", "k3_corrected", "sequence"):
        columns[estimator] = tree.completion_probabilities(
            estimators.fixed_point(tree, estimator, reward, log_reference, beta, log_q)
        ).tolist()
    return pd.DataFrame(columns)


def by_ratio(
    ratios: Iterable[float],
    beta: float,
    threshold: float,
    completion: tuple[str, ...],
    rare: float = 0.05,
    spread: int = 6,
) -> pd.DataFrame:
    """Probability of ``completion`` on two_path.branch_tree against the branch guide's ratio, q not clamped.

    Columns: ratio, "eq. 4", k3, k3_corrected, sequence.
    """
    tree, log_reference, reward = two_path.branch_tree(rare, spread)
    excess = (tree.entropies(log_reference) - threshold).clamp(min=0)[tree.state_of]
    row = tree.completions.index(completion)
    rows = []
    for ratio in ratios:
        table = fixed_points(tree, log_reference, reward, beta, torch.log1p(ratio * excess))
        rows.append((ratio, *table.loc[row, ["eq. 4", "k3", "k3_corrected", "sequence"]]))
    return pd.DataFrame(rows, columns=["ratio", "eq. 4", "k3", "k3_corrected", "sequence"])
