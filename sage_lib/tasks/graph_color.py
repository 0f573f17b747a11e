"""Graph coloring of reasoning-gym: a color for every vertex, and none that a neighbour has.

Graphs are reasoning-gym's, and so is the scorer. With six vertices and three colors there are 729
answers, of which 6 to some hundred are right, so the probability of a right one is exact. The
question is shorter than the package's, in words that a word-level tokenizer has.

The work colors one vertex after the other: ``3 - 1 2 = 3`` says that the neighbours of vertex 3
before it have colors 1 and 2, and that it gets 3. The answer is the package's: a JSON map of
vertices to colors. A coloring has one work and one answer, so there is no rare way.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib.tasks import reasoning_gym
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.prompts import split_completion
from sage_lib.tasks.task import ExactTask, distinct_problems
from sage_lib.tasks.verifier import LENGTH_LIMIT
from sage_lib.validation import STRICT

MOST_VERTICES = 6
#: What the tiny model's vocabulary needs besides numbers, "=", "," and "-".
WORDS = ("color", "with", ":", "{", "}", *(f'"{vertex}":' for vertex in range(MOST_VERTICES)))
#: Entries that one seed makes, many of them twice: there are 2^15 graphs of six vertices.
SIZE = 1_000_000

Edges = Annotated[int, Field(ge=1, le=12)]


@plain_dataclass(frozen=True)
class Graph:
    vertices: int  # numbered from 0
    colors: int  # numbered from 1
    edges: tuple[tuple[int, int], ...]  # (smaller, larger) vertex, in order

    @property
    def id(self) -> str:
        return ".".join(f"{a}-{b}" for a, b in self.edges)

    @property
    def question(self) -> str:
        """Edges in the order in which the work needs them, the later vertex first."""
        edges = " , ".join(f"{b} - {a}" for a, b in sorted(self.edges, key=lambda edge: edge[::-1]))
        return f"color {self.vertices} with {self.colors} : {edges}"

    def before(self, vertex: int) -> list[int]:
        """The neighbours of a vertex with smaller numbers."""
        return [a for a, b in self.edges if b == vertex]

    @property
    def entry(self) -> dict[str, Any]:
        """The graph as the package's scorer reads it."""
        puzzle = {
            "vertices": list(range(self.vertices)),
            "edges": list(self.edges),
            "color_options": list(range(1, self.colors + 1)),
        }
        return {"metadata": {"puzzle": puzzle}}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GraphColor(ExactTask):
    COUNTED: ClassVar[tuple[str, ...]] = ("rare", "valid_common", "valid_rare")
    WAYS: ClassVar[Mapping[str, str]] = {"L": "common", "R": "rare"}

    name: Literal["graph_color"] = "graph_color"
    vertices: Annotated[int, Field(ge=3, le=MOST_VERTICES)] = 6
    colors: Annotated[int, Field(ge=2, le=3)] = 3
    edge_probability: Annotated[float, Field(gt=0, le=0.9)] = 0.4  # of each pair of vertices
    fewest: Edges = 1  # edges of a problem: the more, the fewer colorings are right
    most: Edges = 12

    def __post_init__(self) -> None:
        # The most edges that so many colors allow: groups of equal size, all joined (Turan).
        size, more = divmod(self.vertices, self.colors)
        groups = [size + 1] * more + [size] * (self.colors - more)
        bound = sum(a * b for a, b in itertools.combinations(groups, 2))
        if self.fewest > min(self.most, bound):
            raise ValueError(
                f"fewest edges, {self.fewest}, are more than most, {self.most}, or than "
                f"{self.vertices} vertices and {self.colors} colors allow, {bound}"
            )

    @property
    def words(self) -> tuple[str, ...]:
        return WORDS

    @property
    def display_label(self) -> str:
        """The task, and numbers of vertices, colors and edges that differ from the usual ones."""
        usual, label = (GraphColor.fewest, GraphColor.most), str(self.name)
        if self.vertices != GraphColor.vertices or self.colors != GraphColor.colors:
            label += f"_{self.vertices}_with_{self.colors}"
        if (self.fewest, self.most) != usual:
            label += f"_{self.fewest}_to_{self.most}_edges"
        return label

    def stream(self, seed: int, exclude: frozenset[str], revision: str | None) -> Iterator[Problem]:
        return distinct_problems(self._drawn(seed), exclude)

    def _drawn(self, seed: int) -> Iterator[Problem]:
        config = {
            "num_colors": self.colors,
            "min_num_vertices": self.vertices,
            "max_num_vertices": self.vertices,
            "edge_probability": self.edge_probability,
        }
        entries = reasoning_gym.generator("graph_color", json.dumps(config), seed, SIZE)
        label = self.display_label
        for index in range(SIZE):
            metadata = entries[index]["metadata"]
            edges = tuple((a, b) for a, b in metadata["puzzle"]["edges"])
            if self.fewest <= len(edges) <= self.most:
                graph = Graph(self.vertices, self.colors, edges)
                coloring = metadata["possible_answer"]
                _, gold = worked(graph, [coloring[vertex] for vertex in range(graph.vertices)])
                yield Problem(graph.id, label, graph.question, gold, self.name, graph)

    def demonstrate(
        self, problem: Problem, rng: random.Random, aimless: bool, early: bool
    ) -> tuple[str, str]:
        """Draw one of all right colorings, or any coloring where it is ``aimless``.

        Args and result are as in :meth:`ExactTask.demonstrate`.
        """
        graph: Graph = problem.detail
        if aimless:
            coloring = tuple(rng.randint(1, graph.colors) for _ in range(graph.vertices))
        else:
            coloring = rng.choice(colorings(graph))
        return worked(graph, coloring)

    def could_draw(self, problem: Problem) -> bool:
        """Return whether the question has as many vertices, colors and edges, from any task."""
        edge, question = "[0-9] - [0-9]", problem.question
        shape = f"color {self.vertices} with {self.colors} : {edge}(?: , {edge})*"
        return bool(re.fullmatch(shape, question)) and (
            self.fewest <= question.count(" - ") <= self.most
        )

    @classmethod
    def is_correct(cls, problem: Problem, answer: str | None) -> bool:
        """Return whether the package's scorer gives an answer 1.0.

        It takes any JSON map that has every vertex, also one with further keys.
        """
        if answer is None or len(answer) > LENGTH_LIMIT:
            return False
        graph: Graph = problem.detail
        scorer = reasoning_gym.generator("graph_color", "{}", 0, 1)
        return reasoning_gym.score(scorer, answer, graph.entry) >= 1.0

    @classmethod
    def measures(cls, problem: Problem, text: str, correct: bool) -> dict[str, bool]:
        return {**super().measures(problem, text, correct), "rare": False}

    @classmethod
    def way_of(cls, problem: Problem, text: str) -> str | None:
        return "L" if check(problem.detail, text) else None

    @classmethod
    def completions(cls, problem: Problem) -> list[tuple[str, str, str]]:
        graph: Graph = problem.detail
        return [("L", *worked(graph, coloring)) for coloring in colorings(graph)]


def check(graph: Graph, text: str) -> bool:
    """Return whether a completion, which follows the generation prompt, is valid.

    It states every step truly, colors the graph rightly, and its answer says the same and nothing
    else.
    """
    work, answer = split_completion(text)
    return answer is not None and (" ".join(work), " ".join(answer)) in _right(graph)


@lru_cache(maxsize=1024)
def _right(graph: Graph) -> frozenset[tuple[str, str]]:
    return frozenset(worked(graph, coloring) for coloring in colorings(graph))


@lru_cache(maxsize=1024)
def colorings(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return every right coloring: the colors of vertices 0, 1, ..."""
    partial: list[tuple[int, ...]] = [()]
    for vertex in range(graph.vertices):
        partial = [
            (*colors, color)
            for colors in partial
            for color in range(1, graph.colors + 1)
            if all(colors[neighbour] != color for neighbour in graph.before(vertex))
        ]
    return tuple(partial)


def worked(graph: Graph, coloring: Sequence[int]) -> tuple[str, str]:
    """Return work and answer of a coloring: ``0 = 1 , 1 - 1 = 2``, ``{ "0": 1 , "1": 2 }``."""
    steps = []
    for vertex, color in enumerate(coloring):
        colored = "".join(f" {coloring[neighbour]}" for neighbour in graph.before(vertex))
        steps.append(f"{vertex} -{colored} = {color}" if colored else f"{vertex} = {color}")
    answer = " , ".join(f'"{vertex}": {color}' for vertex, color in enumerate(coloring))
    return " , ".join(steps), f"{{ {answer} }}"
