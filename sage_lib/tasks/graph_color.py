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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.tasks import problem as shared
from sage_lib.tasks import reasoning_gym
from sage_lib.tasks.problem import Demonstration, Problem, TaskSettings
from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START, WORK_END, WORK_START
from sage_lib.tasks.puzzles import WAYS
from sage_lib.tasks.verifier import LENGTH_LIMIT, Verifier

COMMON, _ = WAYS
LOGGED = ("valid", "unsound")
COUNTED = ("rare", "valid_common", "valid_rare")
MOST_VERTICES = 6
#: What the tiny model's vocabulary needs besides numbers, "=", "," and "-".
WORDS = ("color", "with", ":", "{", "}", *(f'"{vertex}":' for vertex in range(MOST_VERTICES)))
#: Entries that one seed makes, many of them twice: there are 2^15 graphs of six vertices.
SIZE = 1_000_000

Share = Annotated[float, Field(ge=0, le=1)]
Edges = Annotated[int, Field(ge=1, le=12)]


@dataclass(frozen=True, kw_only=True, config=shared.STRICT)
class Settings(TaskSettings):
    name: str = "graph_color"
    vertices: Annotated[int, Field(ge=3, le=MOST_VERTICES)] = 6
    colors: Annotated[int, Field(ge=2, le=3)] = 3
    edge_probability: Annotated[float, Field(gt=0, le=0.9)] = 0.4  # of each pair of vertices
    fewest: Edges = 1  # edges of a problem: the more, the fewer colorings are right
    most: Edges = 12
    #: Of demonstrations that aim at nothing: true steps whose colors are drawn at random.
    aimless_share: Share = 0.0
    #: Distinct graphs that demonstrations are made of; None is one for each row.
    distinct: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        # The most edges that so many colors allow: groups of equal size, all joined (Turan).
        size, more = divmod(self.vertices, self.colors)
        groups = [size + 1] * more + [size] * (self.colors - more)
        bound = sum(a * b for a, b in itertools.combinations(groups, 2))
        if self.fewest > min(self.most, bound):
            raise SageError(
                f"graph_color's fewest edges, {self.fewest}, are more than most, {self.most}, or "
                f"than {self.vertices} vertices and {self.colors} colors allow, {bound}"
            )

    @property
    def words(self) -> tuple[str, ...]:
        return WORDS


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
        """As the package's scorer reads it."""
        puzzle = {
            "vertices": list(range(self.vertices)),
            "edges": list(self.edges),
            "color_options": list(range(1, self.colors + 1)),
        }
        return {"metadata": {"puzzle": puzzle}}


def label(settings: Settings) -> str:
    """The task, and numbers of vertices, colors and edges other than the usual ones."""
    found, usual = settings.name, (Settings.fewest, Settings.most)
    if settings.vertices != Settings.vertices or settings.colors != Settings.colors:
        found += f"_{settings.vertices}_with_{settings.colors}"
    if (settings.fewest, settings.most) != usual:
        found += f"_{settings.fewest}_to_{settings.most}_edges"
    return found


def _drawn(settings: Settings, seed: int) -> Iterator[Problem]:
    made, dataset = _generator(settings, seed), label(settings)
    for index in range(SIZE):
        found = made[index]["metadata"]
        edges = tuple((a, b) for a, b in found["puzzle"]["edges"])
        if settings.fewest <= len(edges) <= settings.most:
            graph = Graph(settings.vertices, settings.colors, edges)
            first = found["possible_answer"]
            _, gold = worked(graph, [first[vertex] for vertex in range(graph.vertices)])
            yield Problem(graph.id, dataset, graph.question, gold, settings.name, graph)


stream = shared.stream_of(_drawn)


def _generator(settings: Settings, seed: int) -> Any:
    config = {
        "num_colors": settings.colors,
        "min_num_vertices": settings.vertices,
        "max_num_vertices": settings.vertices,
        "edge_probability": settings.edge_probability,
    }
    return reasoning_gym.generator("graph_color", json.dumps(config), seed, SIZE)


problems = shared.problems_of(stream)


def demonstrations(
    settings: Settings,
    rows: int,
    seed: int,
    exclude: frozenset[str] = frozenset(),
    revision: str | None = None,
    *,
    count_tokens: Callable[[str], int],
    max_seq_length: int,
) -> list[Demonstration]:
    """Colored graphs. All are short.

    A right coloring is drawn from all right ones. With ``distinct`` each graph is shown several
    times, each time with a coloring drawn anew.
    """
    rng = random.Random(seed)
    drawn = problems(settings, min(rows, settings.distinct or rows), seed, exclude, revision)
    shown = drawn if settings.distinct is None else []
    while len(shown) < rows:
        shown += rng.sample(drawn, len(drawn))
    found = []
    for problem in shown[:rows]:
        graph: Graph = problem.detail
        if settings.aimless_share and rng.random() < settings.aimless_share:
            coloring = tuple(rng.randint(1, graph.colors) for _ in range(graph.vertices))
        else:
            coloring = rng.choice(colorings(graph))
        found.append(Demonstration(problem.question, *worked(graph, coloring)))
    return found


def could_draw(settings: Settings, problem: Problem) -> bool:
    """Whether the question is one of these with as many vertices, colors and edges, wherever it
    comes from."""
    edge = "[0-9] - [0-9]"
    shape = f"color {settings.vertices} with {settings.colors} : {edge}(?: , {edge})*"
    asked = problem.question
    edges = asked.count(" - ")
    return bool(re.fullmatch(shape, asked)) and settings.fewest <= edges <= settings.most


def require_golds(problems: Sequence[Problem], verifier: Verifier) -> None:
    """Every gold is the generator's own, and no formula."""


def judge(
    problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
) -> list[bool]:
    """Whether the package's scorer gives each answer its full score."""
    return [correct(p.detail, answer) for p, answer in zip(problems, answers, strict=True)]


def correct(graph: Graph, answer: str | None) -> bool:
    """Whether the package's scorer gives ``answer`` 1.0; it takes any JSON map that has every
    vertex, also one with vertices besides."""
    if answer is None or len(answer) > LENGTH_LIMIT:
        return False
    return reasoning_gym.score(_scorer(), answer, graph.entry) >= 1.0


@lru_cache(maxsize=1)
def _scorer() -> Any:
    return reasoning_gym.generator("graph_color", "{}", 0, 1)


def measures(problem: Problem, text: str, correct: bool) -> dict[str, bool]:
    """``valid`` is work that is listed in :func:`completions`, ``unsound`` a correct answer without
    valid work. No work is rare."""
    valid = check(problem.detail, text)
    return {
        "valid": valid,
        "rare": False,
        "unsound": correct and not valid,
        "valid_common": valid,
        "valid_rare": False,
    }


def check(graph: Graph, text: str) -> bool:
    """Whether a completion (the text after the generation prompt) states every step truly, colors
    the graph rightly, and has an answer that says the same and nothing else."""
    work, marker, rest = text.removeprefix(WORK_START).partition(WORK_END)
    answer = rest.strip()
    marked = answer.startswith(SOLUTION_START) and answer.endswith(SOLUTION_END)
    inside = answer.removeprefix(SOLUTION_START).removesuffix(SOLUTION_END)
    written = (" ".join(work.split()), " ".join(inside.split()))
    return bool(marker) and marked and written in _right(graph)


@lru_cache(maxsize=1024)
def _right(graph: Graph) -> frozenset[tuple[str, str]]:
    return frozenset(worked(graph, one) for one in colorings(graph))


def completions(problem: Problem) -> list[tuple[str, str, str]]:
    """(way, working, answer) of every right coloring; the way is always the common one."""
    graph: Graph = problem.detail
    return [(COMMON, *worked(graph, one)) for one in colorings(graph)]


@lru_cache(maxsize=1024)
def colorings(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Every right coloring: the colors of vertices 0, 1, ..."""
    found: list[tuple[int, ...]] = [()]
    for vertex in range(graph.vertices):
        found = [
            (*one, color)
            for one in found
            for color in range(1, graph.colors + 1)
            if all(one[neighbour] != color for neighbour in graph.before(vertex))
        ]
    return tuple(found)


def worked(graph: Graph, coloring: Sequence[int]) -> tuple[str, str]:
    """Work and answer of a coloring: ``0 = 1 , 1 - 1 = 2`` and ``{ "0": 1 , "1": 2 }``."""
    steps = []
    for vertex, color in enumerate(coloring):
        colored = "".join(f" {coloring[neighbour]}" for neighbour in graph.before(vertex))
        steps.append(f"{vertex} -{colored} = {color}" if colored else f"{vertex} = {color}")
    answer = " , ".join(f'"{vertex}": {color}' for vertex, color in enumerate(coloring))
    return " , ".join(steps), f"{{ {answer} }}"
