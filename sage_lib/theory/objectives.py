"""The comparisons of notebook 03: each estimator's gradient and fixed point on small trees."""

from collections.abc import Iterable, Mapping
from itertools import product

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from torch import Tensor

from sage_lib.algorithm.guides import HIGH, LOW
from sage_lib.errors import SageError
from sage_lib.theory import estimators, solutions
from sage_lib.theory.losses import Loss
from sage_lib.theory.tree import Tree, random_tree

#: What a toy guide depends on: nothing, the token, the state, or chance.
KINDS = ("none", "token", "state", "noise")
#: What holds for a plain sum over tokens; :func:`claims` measures by how much it fails elsewhere.
CLAIMS = {
    "forward": "k3 is the forward KL",
    "scales": "a guide of the state scales k3 by q",
    "nothing": "a guide of the state changes nothing under corrected k3",
    "eq. 8": "k1 in the return is eq. 8",
}


def log_guide(tree: Tree, kind: str, log_policy: Tensor, threshold: float = 0.7) -> Tensor:
    """log q_t of every edge, clamped as in the authors' code; shape (E,), of noise (64, E).

    "token": eq. 10 without its noise, 1 + 0.3 w, w the surprisal scaled to [0, 1] over the tree.
    "state": eq. 11, 1 + 0.3 max(0, H - threshold); threshold in nats.
    "noise": eq. 9 at every token, 1 + 0.15 z, z at equally likely quantiles of N(0, 1).
    """
    tree.check_edges(log_policy, "log_policy")
    if kind == "none":
        return torch.zeros_like(log_policy)
    if kind == "token":
        # A token that never comes has no surprisal to scale by.
        surprisal = -log_policy.masked_fill(log_policy == -torch.inf, 0)
        q = 1 + 0.3 * (surprisal - surprisal.min()) / (surprisal.max() - surprisal.min())
    elif kind == "state":
        q = 1 + 0.3 * (tree.entropies(log_policy) - threshold).clamp(min=0)[tree.state_of]
    elif kind == "noise":
        z = torch.as_tensor(norm.ppf((np.arange(64) + 0.5) / 64))
        q = (1 + 0.15 * z)[:, None].expand(len(z), len(tree.edges))
    else:
        raise SageError(f"there is no guide {kind!r} here: choose one of {', '.join(KINDS)}")
    return q.clamp(LOW, HIGH).log()


def random_policies(seed: int, depth: int = 3, branches: int = 3) -> tuple[Tree, Tensor, Tensor]:
    """A random tree with log pi and log pi_ref of every edge."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, depth, branches)
    log_reference = tree.log_policy(torch.as_tensor(rng.normal(size=len(tree.edges))))
    return tree, tree.log_policy(torch.as_tensor(rng.normal(size=len(tree.edges)))), log_reference


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def gradients(seeds: Iterable[int], depth: int = 3, branches: int = 3) -> pd.DataFrame:
    """Each estimator's expected gradient with each kind of guide, over random trees and policies.

    Columns: estimator, kind, to_reverse and to_forward (largest relative difference to the gradient
    of the per-token reverse and forward KL to q·pi_ref, visits held fixed), guide_effect (largest
    relative change by the guide), trees.
    """
    rows = []
    for seed, kind in product(seeds, KINDS):
        tree, log_policy, log_reference = random_policies(seed, depth, branches)
        given = tree, log_policy, log_reference
        log_q = log_guide(tree, kind, log_policy)
        log_mean_q = estimators.mean_over_draws(log_q.exp()).log()
        reverse = estimators.reverse_kl_gradient(*given, estimators.mean_over_draws(log_q))
        forward = estimators.forward_kl_gradient(*given, log_mean_q)
        for estimator in estimators.ESTIMATORS:
            plain, guided = (
                estimators.kl_gradient(tree, estimator, log_policy, log_reference, guide)
                for guide in (None, log_q)
            )
            effect = _relative_difference(guided, plain) if plain.norm() > 1e-9 else 0.0
            off = [_relative_difference(guided, theirs) for theirs in (reverse, forward)]
            rows.append((estimator, kind, *off, effect))
    columns = ["estimator", "kind", "to_reverse", "to_forward", "guide_effect"]
    by_case = pd.DataFrame(rows, columns=columns).groupby(["estimator", "kind"], sort=False)
    return by_case.max().assign(trees=by_case.size()).reset_index()


def sequence_forms(seeds: Iterable[int]) -> pd.DataFrame:
    """Ways to charge a completion with the sum of its k1 = log pi - log q·pi_ref, beside eq. 8.

    A row for each tree: the relative difference of each form's expected gradient to that of
    eq. 8, and "variance": that of one completion's gradient under the return-to-go, relative to the
    variance where each token is charged with the whole sum. The guide is of the kind "token".
    """
    rows = []
    for seed in seeds:
        tree, log_policy, log_reference = random_policies(seed)
        free = log_policy.clone().requires_grad_()
        live = tree.log_policy(free)
        k1 = live - log_guide(tree, "token", log_policy) - log_reference
        sums, drawn = tree.paths @ k1, tree.completion_probabilities(live).detach()
        depth = torch.tensor([len(state) for state, _ in tree.edges])
        not_before = (depth[:, None] >= depth).to(k1.dtype)
        charged = tree.paths * k1.detach()
        whole = tree.paths * charged.sum(1, keepdim=True)
        to_come = tree.paths * (charged @ not_before)
        forms = {
            "eq. 8": tree.completion_probabilities(live) @ sums,
            "k1 of the sum in the reward": drawn @ whole @ live,
            "k2 of the sum as a loss": drawn @ sums**2 / 2,
            "return-to-go": drawn @ to_come @ live,
            "k2 of each token as a loss": drawn @ tree.paths @ k1**2 / 2,
        }
        eq_8, *found = (torch.autograd.grad(f, free, retain_graph=True)[0] for f in forms.values())
        score = torch.autograd.functional.jacobian(tree.log_policy, log_policy)
        squares = [drawn @ (credit @ score).square().sum(1) for credit in (to_come, whole)]
        of_one, of_whole = (float(square - eq_8.square().sum()) for square in squares)
        off = [_relative_difference(gradient, eq_8) for gradient in found]
        rows.append((*off, of_one / of_whole))
    return pd.DataFrame(rows, columns=[*list(forms)[1:], "variance"])


def claims(seeds: Iterable[int], by_name: Mapping[str, Loss]) -> pd.DataFrame:
    """By how much each of CLAIMS fails under each loss, on the trees of :func:`gradients`.

    Columns: loss, claim, seed, unequal (completions differ in length), difference. The difference
    is relative, of expected gradients: "forward": k3 to the exact forward KL under the same loss;
    "scales": k3 with a guide of the state to q times k3 without; "nothing": corrected k3 with it to
    without; "eq. 8": the credit of the sequence, times the number that brings it closest, to eq. 8.
    """
    rows = []
    for seed, (name, loss) in product(seeds, by_name.items()):
        tree, log_policy, log_reference = random_policies(seed)
        log_q = log_guide(tree, "state", log_policy)
        policies = log_policy, log_reference
        plain, guided = (
            {
                name: estimators.kl_gradient(tree, name, *policies, guide, loss)
                for name in estimators.OFFERED
            }
            for guide in (None, log_q)
        )
        forward = estimators.forward_kl_gradient(tree, *policies, torch.zeros_like(log_q), loss)
        credit = guided["sequence"]
        eq_8 = estimators.kl_gradient(tree, "sequence", *policies, log_q)
        closest = (credit @ eq_8) / (credit @ credit)
        pairs = {
            "forward": (plain["k3"], forward),
            "scales": (guided["k3"], log_q.exp() * plain["k3"]),
            "nothing": (guided["k3_corrected"], plain["k3_corrected"]),
            "eq. 8": (closest * credit, eq_8),
        }
        unequal = len(set(tree.lengths.tolist())) > 1
        rows += [(name, c, seed, unequal, _relative_difference(*p)) for c, p in pairs.items()]
    return pd.DataFrame(rows, columns=["loss", "claim", "seed", "unequal", "difference"])


def total_variation(a: Tensor, b: Tensor) -> float:
    """Half the sum of absolute differences: the mass that must move to turn one into the other."""
    return float((a - b).abs().sum() / 2)


def full_tree_instance(
    seed: int, depth: int, branches: int, sharpness: float
) -> tuple[Tree, Tensor, Tensor]:
    """A full tree, log pi_ref of every edge, and a reward of 1 for half the completions.

    The reference's logits have the standard deviation ``sharpness``.
    """
    rng = np.random.default_rng(seed)
    tree = Tree.full(depth, branches)
    log_reference = tree.log_policy(torch.as_tensor(sharpness * rng.normal(size=len(tree.edges))))
    correct = rng.permutation(len(tree.completions)) % 2 == 0
    return tree, log_reference, torch.as_tensor(correct.astype(float))


def fixed_points(
    tree: Tree, log_reference: Tensor, reward: Tensor, beta: float, log_q: Tensor
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
        rest = estimators.fixed_point(tree, anchor, reward, log_reference, beta, log_q)
        policies[anchor] = tree.completion_probabilities(rest)
    frame = pd.DataFrame({name: policy.tolist() for name, policy in policies.items()})
    frame.insert(0, "completion", [" ".join(c) for c in tree.completions])
    frame.insert(1, "correct", (reward == 1).tolist())
    return frame
