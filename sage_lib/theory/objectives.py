"""The comparisons of notebook 03: each estimator's gradient on random trees."""

from collections.abc import Iterable, Mapping
from itertools import product

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from torch import Tensor

from sage_lib.algorithm.guides import HIGH, LOW
from sage_lib.errors import SageError
from sage_lib.theory import estimators
from sage_lib.theory.losses import Loss
from sage_lib.theory.tree import Tree, random_tree

#: Inputs of a toy guide: none, the token, the state, or noise.
KINDS = ("none", "token", "state", "noise")
#: Statements that are exact for a plain sum over tokens. :func:`claims` measures their errors under
#: other losses.
CLAIMS = {
    "forward": "k3 is the forward KL",
    "scales": "a guide of the state scales k3 by q",
    "nothing": "a guide of the state changes nothing under corrected k3",
    "eq. 8": "k1 in the return is eq. 8",
}


def log_guide(tree: Tree, kind: str, log_policy: Tensor, threshold: float = 0.7) -> Tensor:
    """Compute log q_t of each edge, clamped as in the authors' code.

    Args:
        tree: its completions.
        kind: one of KINDS. "token": eq. 10 without its noise, 1 + 0.3 w, w the surprisal scaled to
            [0, 1] over the tree, 0 where it does not vary. "state": eq. 11, 1 + 0.3 max(0, H -
            threshold). "noise": eq. 9 at all tokens, 1 + 0.15 z, z at 64 equally likely quantiles
            of N(0, 1).
        log_policy: of each edge, shape (E,).
        threshold: of the kind "state", nats.

    Returns:
        Shape (E,); for "noise" (64, E), a row for each z. SageError for another kind.
    """
    tree.check_edges(log_policy, "log_policy")
    if kind == "none":
        return torch.zeros_like(log_policy)
    if kind == "token":
        # The surprisal of a token of probability 0 is infinite: it counts as 0.
        surprisal = -log_policy.masked_fill(log_policy == -torch.inf, 0)
        above = surprisal - surprisal.min()
        q = 1 + 0.3 * above / above.max().clamp(min=torch.finfo(above.dtype).tiny)
    elif kind == "state":
        q = 1 + 0.3 * (tree.entropies(log_policy) - threshold).clamp(min=0)[tree.state_of]
    elif kind == "noise":
        z = torch.as_tensor(norm.ppf((np.arange(64) + 0.5) / 64))
        q = (1 + 0.15 * z)[:, None].expand(len(z), len(tree.edges))
    else:
        raise SageError(f"there is no guide {kind!r} here: choose one of {', '.join(KINDS)}")
    return q.clamp(LOW, HIGH).log()


def random_policies(seed: int) -> tuple[Tree, Tensor, Tensor]:
    """Return a random tree with log pi and log pi_ref of each edge, shape (E,)."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    log_reference = tree.log_policy(torch.as_tensor(rng.normal(size=len(tree.edges))))
    return tree, tree.log_policy(torch.as_tensor(rng.normal(size=len(tree.edges)))), log_reference


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def gradients(seeds: Iterable[int]) -> pd.DataFrame:
    """Compare the estimators' expected gradients with each kind of guide, over random trees, one
    for each seed.

    Columns: estimator, kind, to_reverse and to_forward (largest relative difference to the gradient
    of the per-token reverse and forward KL to q·pi_ref, visits constant), guide_effect (largest
    relative change by the guide), trees.
    """
    rows = []
    for seed, kind in product(seeds, KINDS):
        tree, log_policy, log_reference = random_policies(seed)
        policies = tree, log_policy, log_reference
        log_q = log_guide(tree, kind, log_policy)
        log_mean_q = estimators.mean_over_draws(log_q.exp()).log()
        reverse = estimators.reverse_kl_gradient(*policies, estimators.mean_over_draws(log_q))
        forward = estimators.forward_kl_gradient(*policies, log_mean_q)
        for estimator in estimators.ESTIMATORS:
            plain, guided = (
                estimators.kl_gradient(tree, estimator, log_policy, log_reference, guide)
                for guide in (None, log_q)
            )
            effect = _relative_difference(guided, plain) if plain.norm() > 1e-9 else 0.0
            to_kls = [_relative_difference(guided, kl) for kl in (reverse, forward)]
            rows.append((estimator, kind, *to_kls, effect))
    columns = ["estimator", "kind", "to_reverse", "to_forward", "guide_effect"]
    by_case = pd.DataFrame(rows, columns=columns).groupby(["estimator", "kind"], sort=False)
    return by_case.max().assign(trees=by_case.size()).reset_index()


def claims(seeds: Iterable[int], by_name: Mapping[str, Loss]) -> pd.DataFrame:
    """Measure the error of each of CLAIMS under each loss, on the trees of :func:`gradients`.

    Columns loss, claim, seed, unequal (completions differ in length), difference: the relative
    difference of two expected gradients. They are, where "guided" is with a guide of the state:

    - "forward": k3, and the exact forward KL under the same loss.
    - "scales": guided k3, and q times k3.
    - "nothing": guided corrected k3, and corrected k3.
    - "eq. 8": a multiple of the guided credit of the sequence, the nearest one, and eq. 8.
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
        multiple = (credit @ eq_8) / (credit @ credit)
        pairs = {
            "forward": (plain["k3"], forward),
            "scales": (guided["k3"], log_q.exp() * plain["k3"]),
            "nothing": (guided["k3_corrected"], plain["k3_corrected"]),
            "eq. 8": (multiple * credit, eq_8),
        }
        unequal = len(set(tree.lengths.tolist())) > 1
        for claim, pair in pairs.items():
            rows.append((name, claim, seed, unequal, _relative_difference(*pair)))
    return pd.DataFrame(rows, columns=["loss", "claim", "seed", "unequal", "difference"])


def full_tree_instance(
    seed: int, depth: int, branches: int, sharpness: float
) -> tuple[Tree, Tensor, Tensor]:
    """Return a full tree, log pi_ref of each edge, and a reward of 1 for half the completions.
    ``sharpness`` is the standard deviation of the reference's logits."""
    rng = np.random.default_rng(seed)
    tree = Tree.full(depth, branches)
    log_reference = tree.log_policy(torch.as_tensor(sharpness * rng.normal(size=len(tree.edges))))
    correct = rng.permutation(len(tree.completions)) % 2 == 0
    return tree, log_reference, torch.as_tensor(correct.astype(float))
