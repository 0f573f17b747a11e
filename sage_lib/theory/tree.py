"""Exact RLVR on small token trees: all completions are enumerated, in float64.

A completion is a path from the root to a leaf. A policy is a distribution over the next token in
each inner node, with a logit for each edge. Arrays are torch tensors, for autograd.

Shapes: L leaves (completions), E edges (a state and a token), S states (inner nodes). Values of
edges (logits, log pi, log q) stand in the order of :attr:`Tree.edges`, which is sorted;
:meth:`Tree.by_edge` brings them into it. A token may have probability 0, a log pi of -inf.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
from torch import Tensor

from sage_lib.errors import SageError

Completion = tuple[str, ...]
#: A state (the tokens before) and the next token.
Edge = tuple[Completion, str]


@dataclass(frozen=True)
class Tree:
    """All completions of a prompt. No completion may be the beginning of another."""

    completions: tuple[Completion, ...]

    def __post_init__(self) -> None:
        leaves = set(self.completions)
        states = {c[:t] for c in self.completions for t in range(len(c))}
        if not leaves or len(leaves) < len(self.completions) or states & leaves:
            raise SageError(
                "a tree needs distinct completions, none of them the beginning of another"
            )

    @classmethod
    def full(cls, depth: int, branches: int) -> "Tree":
        """Return the tree in which each of ``depth`` tokens has ``branches`` values."""
        return cls(tuple(product(map(str, range(branches)), repeat=depth)))

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The (state, token) of each edge, sorted; the edges of a state are neighbours."""
        return tuple(sorted({(c[:t], c[t]) for c in self.completions for t in range(len(c))}))

    @cached_property
    def states(self) -> tuple[Completion, ...]:
        """Inner nodes in the order of their edges."""
        return tuple(dict.fromkeys(state for state, _ in self.edges))

    @cached_property
    def state_of(self) -> Tensor:
        """Number of the state of each edge, shape (E,)."""
        number = {state: i for i, state in enumerate(self.states)}
        return torch.tensor([number[state] for state, _ in self.edges])

    @cached_property
    def paths(self) -> Tensor:
        """1 where a completion takes an edge, shape (L, E), float64."""
        column = {edge: i for i, edge in enumerate(self.edges)}
        paths = torch.zeros(len(self.completions), len(self.edges), dtype=torch.float64)
        for row, c in enumerate(self.completions):
            paths[row, [column[c[:t], c[t]] for t in range(len(c))]] = 1
        return paths

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each completion, shape (L,)."""
        return torch.tensor([len(completion) for completion in self.completions])

    def by_edge(self, values: Mapping[Edge, float], otherwise: float = 0.0) -> Tensor:
        """Return numbers by (state, token), or ``otherwise``, in the order of the edges, (E,)."""
        unknown = set(values) - set(self.edges)
        if unknown:
            raise SageError(f"the tree has no edge {min(unknown)}: its edges are {self.edges}")
        numbers = [values.get(edge, otherwise) for edge in self.edges]
        return torch.tensor(numbers, dtype=torch.float64)

    def check_edges(self, values: Tensor, what: str = "a quantity of edges") -> None:
        """Raise SageError unless the last axis of ``values`` has a number for every edge."""
        if not values.dim() or values.shape[-1] != len(self.edges):
            raise SageError(
                f"{what} must be of each of the tree's {len(self.edges)} edges: {[*values.shape]}"
            )

    def along_paths(self, values: Tensor) -> Tensor:
        """Sum values of edges, (E,), along each completion, (L,); -inf where an edge is -inf."""
        self.check_edges(values)
        closed = values == -torch.inf
        total = self.paths @ values.masked_fill(closed, 0)
        # Not 0 times -inf, which is NaN, where a completion does not take the edge.
        return total.masked_fill(self.paths @ closed.to(self.paths.dtype) > 0, -torch.inf)

    def sum_by_state(self, values: Tensor) -> Tensor:
        """Sum values of edges, shape (E,), over the edges of each state, shape (S,)."""
        self.check_edges(values)
        nothing = torch.zeros(len(self.states), dtype=values.dtype)
        return nothing.index_add(0, self.state_of, values)

    def mean_by_state(self, values: Tensor) -> Tensor:
        """Return the mean over the edges of each state, shape (S,), of values of shape (E,)."""
        return self.sum_by_state(values) / torch.bincount(self.state_of)

    def log_policy(self, logits: Tensor) -> Tensor:
        """Return log pi(token | state) of each edge from logits, both of shape (E,).

        A logit of -inf gives the token probability 0; a state without a token raises SageError.
        """
        self.check_edges(logits, "logits")
        lowest = torch.full((len(self.states),), -torch.inf, dtype=logits.dtype)
        top = lowest.scatter_reduce(0, self.state_of, logits.detach(), "amax")
        if (top == -torch.inf).any():
            state = self.states[int((top == -torch.inf).nonzero()[0])]
            raise SageError(f"every token after {state} has probability 0: leave one of them some")
        shifted = logits - top[self.state_of]
        return shifted - self.sum_by_state(shifted.exp()).log()[self.state_of]

    def completion_probabilities(self, log_policy: Tensor) -> Tensor:
        """Return pi(y) of each completion, shape (L,), from log pi(token | state), shape (E,)."""
        return self.along_paths(log_policy).exp()

    def visits(self, log_policy: Tensor) -> Tensor:
        """Return the probability that a completion takes each edge, shape (E,)."""
        return self.paths.T @ self.completion_probabilities(log_policy)

    def entropies(self, log_policy: Tensor) -> Tensor:
        """Return the token entropy H (nats, eq. 12) of each state, shape (S,)."""
        log_p = log_policy.masked_fill(log_policy == -torch.inf, 0)  # 0 log 0 is 0
        return self.sum_by_state(-log_policy.exp() * log_p)


def random_tree(rng: np.random.Generator, depth: int = 3, branches: int = 3) -> Tree:
    """Return a random tree with at least one fork, at most ``depth`` tokens of a completion and at
    most ``branches`` tokens after a state. Paths end early with probability 0.2."""

    def grow(prefix: Completion) -> list[Completion]:
        if len(prefix) == depth or (prefix and rng.random() < 0.2):
            return [prefix]
        number = rng.integers(1 if prefix else 2, branches + 1)
        return [leaf for b in range(number) for leaf in grow((*prefix, str(b)))]

    return Tree(tuple(grow(())))
