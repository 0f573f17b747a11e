"""The comparisons of notebook 03: each estimator's gradient and fixed point on small trees.

The guides here are toys, of one kind each: none, a function of the token, a function of the state,
or noise. They stand for what a guide can depend on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm

from sage_lib.algorithm.guides import HIGH, LOW
from sage_lib.errors import SageError
from sage_lib.theory import estimators, losses, solutions, two_path
from sage_lib.theory.losses import PLAIN, Loss
from sage_lib.theory.tree import Completion, Tree, random_tree

#: What a toy guide depends on: nothing, the token, the state, or chance.
KINDS = ("none", "token", "state", "noise")
#: What holds for a plain sum over tokens; :func:`claims` measures by how much it fails elsewhere.
CLAIMS = {
    "forward": "k3 is the forward KL",
    "scales": "a guide of the state scales k3 by q",
    "nothing": "a guide of the state changes nothing under corrected k3",
    "eq. 8": "the sequence's credit is eq. 8",
}


def log_guide(
    tree: Tree, kind: str, log_policy: torch.Tensor, threshold: float = 0.7, draws: int = 64
) -> torch.Tensor:
    """log q_t of every edge, clamped as the authors' code does, the policy's statistics held fixed.

    "token": eq. 10 without its noise, 1 + 0.3 w with w the surprisal scaled to [0, 1] over the
        tree; shape (E,).
    "state": eq. 11, 1 + 0.3 max(0, H - threshold), the same for every token of a state; threshold
        in nats; shape (E,).
    "noise": eq. 9 acting on every token, 1 + 0.15 z; shape (draws, E), z at equally likely
        quantiles of N(0, 1) and the same for every token, so that the mean over draws is the
        expectation and not one sample of it.
    """
    tree.check_edges(log_policy, "log_policy")
    if kind == "none":
        return torch.zeros_like(log_policy)
    if kind == "token":
        # A token that never comes has no surprisal to scale by.
        surprisal = -log_policy.masked_fill(log_policy == -torch.inf, 0)
        spread = surprisal.max() - surprisal.min()
        q = 1 + 0.3 * (surprisal - surprisal.min()) / spread
    elif kind == "state":
        excess = (tree.entropies(log_policy) - threshold).clamp(min=0)
        q = 1 + 0.3 * excess[tree.state_of]
    elif kind == "noise":
        z = torch.as_tensor(norm.ppf((np.arange(draws) + 0.5) / draws))
        q = (1 + 0.15 * z)[:, None].expand(draws, len(tree.edges))
    else:
        raise SageError(f"there is no guide {kind!r} here: choose one of {', '.join(KINDS)}")
    return q.clamp(LOW, HIGH).log()


def gradients(seeds: Iterable[int], depth: int = 3, branches: int = 3) -> pd.DataFrame:
    """Each estimator's expected gradient with each kind of guide, over random trees and policies.

    Columns: estimator, kind, to_reverse and to_forward (largest relative difference to the gradient
    of the per-token reverse, forward KL to q·pi_ref, visits held fixed), guide_effect (largest
    relative change that the guide makes), trees.
    """
    rows = []
    for seed in seeds:
        tree, log_policy, log_reference = random_policies(seed, depth, branches)
        for kind in KINDS:
            rows += _gradient_rows(tree, kind, log_policy, log_reference)
    by_case = pd.DataFrame(rows).groupby(["estimator", "kind"], sort=False)
    return by_case.max().assign(trees=by_case.size()).reset_index()


def _gradient_rows(
    tree: Tree, kind: str, log_policy: torch.Tensor, log_reference: torch.Tensor
) -> list[dict[str, Any]]:
    log_q = log_guide(tree, kind, log_policy)
    mean_log_q = estimators.mean_over_draws(log_q)
    log_mean_q = estimators.mean_over_draws(log_q.exp()).log()
    reverse = estimators.reverse_kl_gradient(tree, log_policy, log_reference, mean_log_q)
    forward = estimators.forward_kl_gradient(tree, log_policy, log_reference, log_mean_q)
    rows = []
    for estimator in estimators.ESTIMATORS:
        guided = estimators.kl_gradient(tree, estimator, log_policy, log_reference, log_q)
        plain = estimators.kl_gradient(tree, estimator, log_policy, log_reference)
        vanishes = not plain.norm() > 1e-9
        row = {
            "estimator": estimator,
            "kind": kind,
            "to_reverse": _relative_difference(guided, reverse),
            "to_forward": _relative_difference(guided, forward),
            "guide_effect": 0.0 if vanishes else _relative_difference(guided, plain),
        }
        rows.append(row)
    return rows


def _relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def random_policies(
    seed: int, depth: int = 3, branches: int = 3
) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """A random tree with log pi and log pi_ref of every edge."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, depth, branches)
    log_reference = tree.log_policy(torch.as_tensor(rng.normal(size=len(tree.edges))))
    return tree, tree.log_policy(torch.as_tensor(rng.normal(size=len(tree.edges)))), log_reference


def claims(seeds: Iterable[int], by_name: Mapping[str, Loss]) -> pd.DataFrame:
    """By how much each of CLAIMS fails under each loss, on the trees of :func:`gradients`.

    Columns: loss, claim, seed, unequal (completions differ in length), difference. The difference
    is relative, of expected gradients: "forward": k3 to the exact forward KL under the same loss;
    "scales": k3 with a guide of the state to q times k3 without; "nothing": corrected k3 with it to
    without; "eq. 8": the credit of the sequence, times the number that brings it closest (a loss
    may scale all), to eq. 8's gradient.
    """
    rows = []
    for seed in seeds:
        tree, log_policy, log_reference = random_policies(seed)
        unequal = len(set(tree.lengths.tolist())) > 1
        log_q = log_guide(tree, "state", log_policy)
        for name, loss in by_name.items():
            found = _claims(tree, log_policy, log_reference, log_q, loss)
            rows += [(name, claim, seed, unequal, off) for claim, off in found.items()]
    return pd.DataFrame(rows, columns=["loss", "claim", "seed", "unequal", "difference"])


def _claims(
    tree: Tree,
    log_policy: torch.Tensor,
    log_reference: torch.Tensor,
    log_q: torch.Tensor,
    loss: Loss,
) -> dict[str, float]:
    def gradient(estimator: str, guide: torch.Tensor | None, under: Loss = loss) -> torch.Tensor:
        return estimators.kl_gradient(tree, estimator, log_policy, log_reference, guide, under)

    nothing = torch.zeros_like(log_q)
    k3, corrected = gradient("k3", None), gradient("k3_corrected", None)
    forward = estimators.forward_kl_gradient(tree, log_policy, log_reference, nothing, loss)
    credit, eq_8 = gradient("sequence", log_q), gradient("sequence", log_q, PLAIN)
    closest = (credit @ eq_8) / (credit @ credit)
    differences = (
        _relative_difference(k3, forward),
        _relative_difference(gradient("k3", log_q), log_q.exp() * k3),
        _relative_difference(gradient("k3_corrected", log_q), corrected),
        _relative_difference(closest * credit, eq_8),
    )
    return dict(zip(CLAIMS, differences, strict=True))


def total_variation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Half the sum of absolute differences: the mass that must move to turn one into the other."""
    return float((a - b).abs().sum() / 2)


def full_tree_instance(
    seed: int, depth: int, branches: int, sharpness: float
) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """A full tree, log pi_ref of every edge, and a reward of 1 for half the completions.

    The reference's logits have the standard deviation ``sharpness``.
    """
    rng = np.random.default_rng(seed)
    tree = Tree.full(depth, branches)
    log_reference = tree.log_policy(torch.as_tensor(sharpness * rng.normal(size=len(tree.edges))))
    correct = rng.permutation(len(tree.completions)) % 2 == 0
    return tree, log_reference, torch.as_tensor(correct.astype(float))


def mean_entropy(tree: Tree, log_policy: torch.Tensor) -> float:
    """Mean token entropy (nats) over the states, each by how often the policy visits it."""
    state_visits = tree.sum_by_state(tree.visits(log_policy))
    return float((state_visits * tree.entropies(log_policy)).sum() / state_visits.sum())


def distances(
    betas: Sequence[float],
    depths: Iterable[int],
    sharpnesses: Sequence[float],
    seeds: Sequence[int],
    kind: str = "none",
) -> pd.DataFrame:
    """Total variation between where an anchor leads and eq. 4: a row per instance and anchor.

    Columns: beta, depth, sharpness, seed, estimator, entropy (the reference's mean token entropy,
    nats), distance. An instance whose fixed point was not found is left out; the caller sees how
    many rows there are. ``kind``: of the toy guide, see :func:`log_guide`.
    """
    rows = []
    for depth in depths:
        for sharpness, seed in product(sharpnesses, seeds):
            tree, log_reference, reward = full_tree_instance(seed, depth, 3, sharpness)
            log_q = log_guide(tree, kind, log_reference)
            entropy = mean_entropy(tree, log_reference)
            for beta in betas:
                found = _distances_to_eq_4(tree, log_reference, reward, beta, log_q)
                rows += [
                    (beta, depth, sharpness, seed, estimator, entropy, distance)
                    for estimator, distance in found.items()
                ]
    columns = ["beta", "depth", "sharpness", "seed", "estimator", "entropy", "distance"]
    return pd.DataFrame(rows, columns=columns)


def _distances_to_eq_4(
    tree: Tree, log_reference: torch.Tensor, reward: torch.Tensor, beta: float, log_q: torch.Tensor
) -> dict[str, float]:
    """Total variation to eq. 4 of every anchor whose fixed point was found."""
    reference = tree.completion_probabilities(log_reference)
    guide = solutions.product_guide(tree, log_q)
    target = solutions.tilted(reference, reward, beta, guide)
    found = {}
    for anchor in estimators.OFFERED:
        try:
            log_pi = estimators.fixed_point(tree, anchor, reward, log_reference, beta, log_q)
        except SageError:
            continue
        found[anchor] = total_variation(tree.completion_probabilities(log_pi), target)
    return found


def fixed_points(
    tree: Tree, log_reference: torch.Tensor, reward: torch.Tensor, beta: float, log_q: torch.Tensor
) -> pd.DataFrame:
    """Probability of every completion: the reference, eq. 2, 4 and 27, and where anchors lead.

    Columns: completion, correct, and one per policy.
    """
    reference = tree.completion_probabilities(log_reference)
    guide = solutions.product_guide(tree, log_q)
    policies = {
        "reference": reference,
        "eq. 2 (no guide)": solutions.tilted(reference, reward, beta),
        "eq. 4": solutions.tilted(reference, reward, beta, guide),
        "eq. 27 (forward KL)": solutions.forward_kl(reference, reward, beta)[0],
    }
    for anchor in estimators.OFFERED:
        log_pi = estimators.fixed_point(tree, anchor, reward, log_reference, beta, log_q)
        policies[anchor] = tree.completion_probabilities(log_pi)
    frame = pd.DataFrame({name: policy.tolist() for name, policy in policies.items()})
    frame.insert(0, "completion", [" ".join(c) for c in tree.completions])
    frame.insert(1, "correct", (reward == 1).tolist())
    return frame


def by_ratio(
    ratios: Iterable[float],
    beta: float,
    threshold: float,
    completion: Completion,
    rare: float = 0.05,
    spread: int = 6,
) -> pd.DataFrame:
    """Probability of ``completion`` on two_path.branch_tree by the ratio of eq. 11, unclamped.

    Columns: ratio, "eq. 4", and one per anchor.
    """
    tree, log_reference, reward = two_path.branch_tree(rare, spread)
    excess = (tree.entropies(log_reference) - threshold).clamp(min=0)[tree.state_of]
    row = tree.completions.index(completion)
    policies = ["eq. 4", *estimators.OFFERED]
    rows = []
    for ratio in ratios:
        log_q = torch.log1p(ratio * excess)
        table = fixed_points(tree, log_reference, reward, beta, log_q)
        rows.append((ratio, *table.loc[row, policies]))
    return pd.DataFrame(rows, columns=["ratio", *policies])


def by_loss(
    by_name: Mapping[str, Loss], beta: float, threshold: float, rare: float = 0.05, longer: int = 3
) -> pd.DataFrame:
    """Where each loss leads on two_path.branch_tree, the rare correct completion being longer.

    Columns: loss, estimator, none and state (probability of the rare correct completion at the
    fixed point without a guide and with the branch guide), change (of it by the guide, relative).
    """
    tree, log_reference, reward = two_path.branch_tree(rare, longer=longer)
    row = 2  # the rare correct one
    guides = {kind: log_guide(tree, kind, log_reference, threshold) for kind in ("none", "state")}
    rows = []
    for (name, loss), anchor in product(by_name.items(), estimators.OFFERED):
        found = {}
        for kind, log_q in guides.items():
            rest = estimators.fixed_point(tree, anchor, reward, log_reference, beta, log_q, loss)
            found[kind] = float(tree.completion_probabilities(rest)[row])
        rows.append((name, anchor, *found.values(), found["state"] / found["none"] - 1))
    return pd.DataFrame(rows, columns=["loss", "estimator", *guides, "change"])


def by_groups(
    betas: Sequence[float], seeds: Iterable[int], group: int, sharpness: float = 1.0
) -> pd.DataFrame:
    """Group normalisation in the sequence-level objective, on full trees of depth 2.

    Columns: beta, seed, success (of the policy at rest), kappa (there), at_beta and at_beta_kappa
    (total variation to eq. 2 at beta, and at beta/kappa).
    """
    loss = Loss(group=group, batch=group)
    rows = []
    for seed, beta in product(seeds, betas):
        tree, log_reference, reward = full_tree_instance(seed, 2, 3, sharpness)
        log_pi = estimators.fixed_point(tree, "sequence", reward, log_reference, beta, loss=loss)
        policy = tree.completion_probabilities(log_pi)
        reference = tree.completion_probabilities(log_reference)
        scaled, factor = losses.tilted_by_groups(reference, reward, beta, group)
        plain = solutions.tilted(reference, reward, beta)
        off = total_variation(policy, plain), total_variation(policy, scaled)
        rows.append((beta, seed, float(policy @ reward), factor, *off))
    columns = ["beta", "seed", "success", "kappa", "at_beta", "at_beta_kappa"]
    return pd.DataFrame(rows, columns=columns)


def by_truncation(
    min_ps: Sequence[float], seeds: Iterable[int], beta: float, tokens: int = 8
) -> pd.DataFrame:
    """What min-p does to where each anchor leads: one choice of ``tokens``, no guide.

    Columns: min_p, seed, estimator, cut (the mass of the tokens that min-p would not sample, of the
    policy at rest without it), pushed (norm of the expected update with min-p there, relative to
    that of its reward part; 0 without), moved (total variation to the policy at rest with min-p;
    not a number where the search found none). Advantages are those of groups of 8, not scaled:
    with the truncation a constant in the reward is no longer without effect.
    """
    rows = []
    for seed, anchor in product(seeds, estimators.OFFERED):
        tree, log_reference, reward = full_tree_instance(seed, 1, tokens, 1.5)
        whole = Loss(group=8, scaled=False)
        rest = estimators.fixed_point(tree, anchor, reward, log_reference, beta, loss=whole)
        policy = tree.completion_probabilities(rest)
        for min_p in min_ps:
            loss = replace(whole, min_p=min_p)
            gain = estimators.reward_gradient(tree, rest, reward, loss)
            pull = estimators.kl_gradient(tree, anchor, rest, log_reference, loss=loss)
            pushed = float((gain - beta * pull).norm() / gain.norm())
            kept = losses.sampled_policy(tree, rest, min_p)
            cut = float(policy[tree.completion_probabilities(kept) == 0].sum())
            try:
                there = estimators.fixed_point(tree, anchor, reward, log_reference, beta, loss=loss)
                moved = total_variation(tree.completion_probabilities(there), policy)
            except SageError:
                moved = np.nan
            rows.append((min_p, seed, anchor, cut, pushed, moved))
    return pd.DataFrame(rows, columns=["min_p", "seed", "estimator", "cut", "pushed", "moved"])
