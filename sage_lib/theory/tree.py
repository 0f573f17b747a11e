"""Exact RLVR on small token trees: policies, anchors and solutions by enumeration, in float64.

A completion is a path from the root to a leaf. A policy is a distribution over the next token at
every inner node, kept as one logit per edge; nothing here samples, and nothing knows of trainers.
Arrays are torch tensors, so that autograd gives every gradient.

Shapes: L leaves (completions), E edges (a state and a token), S states (inner nodes). Whatever has
a number for every edge (logits, log pi, log q) has them in the order of :attr:`Tree.edges`, which
is sorted and not that in which completions were given; :meth:`Tree.by_edge` puts them there. A
token may have probability 0, a log pi of -inf: the completions through it then have none.
"""

from collections.abc import Mapping
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
        """(state, token) of every edge, sorted; the edges of a state stand together."""
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

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Tokens of every completion, shape (L,)."""
        return torch.tensor([len(completion) for completion in self.completions])

    @cached_property
    def depths(self) -> torch.Tensor:
        """Tokens before every edge, shape (E,)."""
        return torch.tensor([len(state) for state, _ in self.edges])

    def by_edge(self, values: Mapping[Edge, float], otherwise: float = 0.0) -> torch.Tensor:
        """Numbers by (state, token), in the order of the edges, shape (E,); float64.

        ``otherwise`` is that of the edges which are not named. Raises SageError for an edge that
        the tree does not have.
        """
        unknown = set(values) - set(self.edges)
        if unknown:
            raise SageError(f"the tree has no edge {min(unknown)}: its edges are {self.edges}")
        numbers = [values.get(edge, otherwise) for edge in self.edges]
        return torch.tensor(numbers, dtype=torch.float64)

    def check_edges(self, values: torch.Tensor, what: str) -> None:
        """Raise SageError unless ``values`` has a number for every edge (its last axis is E)."""
        if not values.dim() or values.shape[-1] != len(self.edges):
            raise SageError(
                f"{what} must have a number for each of the tree's {len(self.edges)} edges, in "
                f"their order (Tree.edges), not the shape {tuple(values.shape)}"
            )

    def check_completions(self, values: torch.Tensor, what: str) -> None:
        """Raise SageError unless ``values`` has shape (L,)."""
        if values.shape != (len(self.completions),):
            raise SageError(
                f"{what} must have a number for each of the tree's {len(self.completions)} "
                f"completions (Tree.completions), not the shape {tuple(values.shape)}"
            )

    def along_paths(self, values: torch.Tensor) -> torch.Tensor:
        """A quantity of every edge, shape (E,), summed along each completion, shape (L,).

        -inf where the completion takes an edge that has it.
        """
        self.check_edges(values, "a quantity of edges")
        closed = values == -torch.inf
        total = self.paths @ values.masked_fill(closed, 0)
        # Not 0 times -inf, which is no number, where a completion does not take that edge.
        return total.masked_fill(self.paths @ closed.to(self.paths.dtype) > 0, -torch.inf)

    def sum_by_state(self, values: torch.Tensor) -> torch.Tensor:
        """A quantity of every edge, shape (E,), summed over the edges of each state, shape (S,)."""
        self.check_edges(values, "a quantity of edges")
        nothing = torch.zeros(len(self.states), dtype=values.dtype)
        return nothing.index_add(0, self.state_of, values)

    def mean_by_state(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over the edges of each state, shape (S,), of a quantity of shape (E,)."""
        return self.sum_by_state(values) / torch.bincount(self.state_of)

    def max_by_state(self, values: torch.Tensor) -> torch.Tensor:
        """The largest over the edges of each state, shape (S,), of a quantity of shape (E,)."""
        self.check_edges(values, "a quantity of edges")
        lowest = torch.full((len(self.states),), -torch.inf, dtype=values.dtype)
        return lowest.scatter_reduce(0, self.state_of, values, "amax")

    def log_policy(self, logits: torch.Tensor) -> torch.Tensor:
        """log pi(token | state) of every edge from logits, both of shape (E,), as edges are sorted.

        A logit of -inf gives the token probability 0. Raises SageError where a state is left
        without a token, or where the number of logits is not that of the edges.
        """
        self.check_edges(logits, "logits")
        top = self.max_by_state(logits.detach())
        if (top == -torch.inf).any():
            state = self.states[int((top == -torch.inf).nonzero()[0])]
            raise SageError(f"every token after {state} has probability 0: leave one of them some")
        shifted = logits - top[self.state_of]
        total = self.sum_by_state(shifted.exp())
        return shifted - total.log()[self.state_of]

    def completion_probabilities(self, log_policy: torch.Tensor) -> torch.Tensor:
        """pi(y) of every completion, shape (L,), from log pi(token | state), shape (E,)."""
        return self.along_paths(log_policy).exp()

    def conditionals(self, probabilities: torch.Tensor) -> torch.Tensor:
        """log pi(token | state) of every edge, shape (E,), from pi(y), shape (L,).

        pi(y) says nothing of a state that no completion with mass passes: its tokens are taken as
        equally likely.
        """
        self.check_completions(probabilities, "probabilities")
        mass = self.paths.T @ probabilities
        never = (self.sum_by_state(mass) == 0)[self.state_of]
        mass = mass.masked_fill(never, 1)
        return (mass / self.sum_by_state(mass)[self.state_of]).log()

    def visits(self, log_policy: torch.Tensor) -> torch.Tensor:
        """Probability that a completion takes each edge, shape (E,)."""
        return self.paths.T @ self.completion_probabilities(log_policy)

    def entropies(self, log_policy: torch.Tensor) -> torch.Tensor:
        """Token entropy H (nats, eq. 12) of every state, shape (S,)."""
        log_p = log_policy.masked_fill(log_policy == -torch.inf, 0)  # 0 log 0 is 0
        return self.sum_by_state(-log_policy.exp() * log_p)


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
