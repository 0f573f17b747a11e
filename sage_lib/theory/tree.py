"""Exact RLVR on small token trees: policies, anchors and solutions by enumeration, in float64.

A completion is a path from the root to a leaf. A policy is a distribution over the next token at
every inner node, kept as one logit per edge; nothing here samples, and nothing knows of trainers.
Arrays are torch tensors, so that autograd gives every gradient.

Shapes: L leaves (completions), E edges (a state and a token), S states (inner nodes).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from sage_lib.errors import SageError

Completion = tuple[str, ...]
#: A state (the tokens before) and the next token.
Edge = tuple[Completion, str]


@dataclass(frozen=True)
class Tree:
    """All completions of one prompt. No completion may be the beginning of another."""

    completions: tuple[Completion, ...]

    def __post_init__(self) -> None:
        leaves = set(self.completions)
        states = {c[:t] for c in self.completions for t in range(len(c))}
        repeated = len(leaves) < len(self.completions)
        if not leaves or repeated or states & leaves:
            raise SageError(
                "a tree needs distinct completions, none of them the beginning of another"
            )

    @classmethod
    def full(cls, depth: int, branches: int) -> "Tree":
        """The tree in which each of ``depth`` tokens is one of ``branches``."""
        paths: list[Completion] = [()]
        for _ in range(depth):
            paths = [(*p, str(b)) for p in paths for b in range(branches)]
        return cls(tuple(paths))

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """(state, token) of every edge; the edges of a state stand together."""
        return tuple(sorted({(c[:t], c[t]) for c in self.completions for t in range(len(c))}))

    @cached_property
    def states(self) -> tuple[Completion, ...]:
        """Inner nodes in the order of their edges."""
        return tuple(dict.fromkeys(state for state, _ in self.edges))

    @cached_property
    def state_of(self) -> torch.Tensor:
        """Index of the state of every edge, shape (E,)."""
        index = {state: i for i, state in enumerate(self.states)}
        return torch.tensor([index[state] for state, _ in self.edges])

    @cached_property
    def paths(self) -> torch.Tensor:
        """1 where an edge lies on a completion's path, shape (L, E)."""
        index = {edge: i for i, edge in enumerate(self.edges)}
        paths = torch.zeros(len(self.completions), len(self.edges), dtype=torch.float64)
        for row, completion in enumerate(self.completions):
            for t in range(len(completion)):
                paths[row, index[completion[:t], completion[t]]] = 1
        return paths

    def sum_by_state(self, values: torch.Tensor) -> torch.Tensor:
        """A quantity of every edge, shape (E,), summed over the edges of each state, shape (S,)."""
        nothing = torch.zeros(len(self.states), dtype=values.dtype)
        return nothing.index_add(0, self.state_of, values)

    def mean_by_state(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over the edges of each state, shape (S,), of a quantity of shape (E,)."""
        return self.sum_by_state(values) / torch.bincount(self.state_of)

    def log_policy(self, logits: torch.Tensor) -> torch.Tensor:
        """log pi(token | state) of every edge from logits, both of shape (E,)."""
        lowest = torch.full((len(self.states),), -torch.inf, dtype=logits.dtype)
        top = lowest.scatter_reduce(0, self.state_of, logits.detach(), "amax")
        shifted = logits - top[self.state_of]
        total = self.sum_by_state(shifted.exp())
        return shifted - total.log()[self.state_of]

    def completion_probabilities(self, log_policy: torch.Tensor) -> torch.Tensor:
        """pi(y) of every completion, shape (L,), from log pi(token | state), shape (E,)."""
        return (self.paths @ log_policy).exp()

    def conditionals(self, probabilities: torch.Tensor) -> torch.Tensor:
        """log pi(token | state) of every edge, shape (E,), from pi(y), shape (L,)."""
        mass = self.paths.T @ probabilities
        return (mass / self.sum_by_state(mass)[self.state_of]).log()

    def visits(self, log_policy: torch.Tensor) -> torch.Tensor:
        """Probability that a completion takes each edge, shape (E,)."""
        return self.paths.T @ self.completion_probabilities(log_policy)

    def entropies(self, log_policy: torch.Tensor) -> torch.Tensor:
        """Token entropy H (nats, eq. 12) of every state, shape (S,)."""
        return self.sum_by_state(-log_policy.exp() * log_policy)


def random_tree(
    rng: np.random.Generator, depth: int = 3, branches: int = 3, stop: float = 0.2
) -> Tree:
    """A random tree with at least one fork: paths end early with probability ``stop``."""

    def grow(prefix: Completion) -> list[Completion]:
        if len(prefix) == depth or (prefix and rng.random() < stop):
            return [prefix]
        fewest = 1 if prefix else 2
        leaves = []
        for b in range(rng.integers(fewest, branches + 1)):
            leaves += grow((*prefix, str(b)))
        return leaves

    return Tree(tuple(grow(())))
