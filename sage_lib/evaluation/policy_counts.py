"""A policy as counts of its right samples, by training seed and problem."""

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics, sample_files
from sage_lib.text import count, ranges

Counts = Mapping[Any, tuple[int, int]]


@dataclass(frozen=True)
class PolicyCounts:
    """One policy. n, c: samples and right ones, shape (seeds, problems). seeds: None stands for
    files that name none. files: what was read. unreadable: file, line and reason. notes: what a
    reader of the result should know."""

    label: str
    problems: list[str] = field(repr=False)
    seeds: list[int | None]
    n: NDArray[np.int64] = field(repr=False)
    c: NDArray[np.int64] = field(repr=False)
    files: list[dict[str, Any]] = field(default_factory=list)
    unreadable: list[tuple[str, int, str]] = field(default_factory=list, repr=False)
    notes: list[str] = field(default_factory=list)

    @property
    def fewest(self) -> int:
        """The fewest samples that a problem has."""
        return int(self.n.min())

    def at(self, problems: Sequence[str], seeds: Sequence[int | None]) -> "PolicyCounts":
        """Return the policy with these problems and seeds alone; one without seeds stays."""
        numbers = {problem: number for number, problem in enumerate(self.problems)}
        columns = [numbers[problem] for problem in problems]
        rows = [0] if self.seeds == [None] else [self.seeds.index(seed) for seed in seeds]
        cells = np.ix_(rows, columns)
        its_seeds = [self.seeds[row] for row in rows]
        return PolicyCounts(self.label, list(problems), its_seeds, self.n[cells], self.c[cells])

    def curves(self, ks: Sequence[int]) -> NDArray[np.float64]:
        """Return pass@k, shape (seeds, problems, ks)."""
        values = metrics.pass_at_k_curve(self.n.ravel(), self.c.ravel(), ks)
        return values.reshape(*self.n.shape, len(ks))

    def sampling_variance(self, ks: Sequence[int]) -> NDArray[np.float64]:
        """Return the variance, shape (ks,), that drawing samples gives the mean pass@k, without
        bias: NaN where a problem has fewer than 2 k samples.

        It is the square of the estimated chance that k draws are wrong, less an unbiased estimate
        of the square: the chance that 2 k draws are wrong.
        """
        n, c, sizes = self.n.ravel(), self.c.ravel(), np.asarray(ks)
        variance, has_samples = np.full(len(sizes), np.nan), 2 * sizes <= self.fewest
        if has_samples.any():
            wrong = (1 - metrics.pass_at_k_curve(n, c, sizes[has_samples].tolist())) ** 2
            wrong -= 1 - metrics.pass_at_k_curve(n, c, (2 * sizes[has_samples]).tolist())
            variance[has_samples] = wrong.sum(axis=0) / n.size**2
        return variance


def read_policy(
    text: str,
    metric: str | None = None,
    filter: str | None = None,
    threshold: float | None = None,
) -> PolicyCounts:
    """Read a policy from [LABEL=]FILE[:METHOD].

    ``+``, or a pattern such as ``completions_*.parquet``, joins files with other samples of the
    same policy, and ``,`` files of another training seed. ``-`` is the standard input.
    """
    label, equals, names = text.partition("=")
    if _exists(text) or not equals or "/" in label:
        label, names = "", text
    counts: dict[tuple[int, str], tuple[int, int]] = {}
    number_of: dict[int, int] = {}  # seed -> its files' number in the list
    files: list[dict[str, Any]] = []
    unreadable, notes, steps, sources = [], [], set(), []
    of_seeds = _split(names, ",")
    for number, of_seed in enumerate(of_seeds, 1):
        for name in [file for pattern in _split(of_seed, "+") for file in _matches(pattern)]:
            path, method = _method(name)
            if (path.resolve(), method) in sources:
                raise SageError(f"{name} is given twice: its samples would count twice")
            sources.append((path.resolve(), method))
            read = sample_files.read_sample_file(path, method, metric, filter, threshold)
            unreadable += [(str(path), *line) for line in read.unreadable]
            steps |= set(read.steps)
            samples = sum(n for n, _ in read.counts.values())
            files.append(
                {
                    **{"file": name, "format": read.format, "metric": read.metric or None},
                    **{"problems": len({problem for _, problem in read.counts})},
                    **{"samples": samples, "unreadable": len(read.unreadable)},
                    "sha256": read.sha256,
                }
            )
            stem = path.name.removesuffix(".gz").rsplit(".", 1)[0]
            label = label or method or ("stdin" if name == sample_files.STDIN else stem)
            for (named, problem), (n, c) in read.counts.items():
                seed = number if named < 0 and len(of_seeds) > 1 else named
                if number_of.setdefault(seed, number) != number:
                    raise SageError(
                        f"{label}: seed {seed} is in two files; join them by + if that is meant"
                    )
                old = counts.get((seed, problem), (0, 0))
                counts[seed, problem] = (old[0] + n, old[1] + c)
    if -1 in number_of and len(number_of) > 1:
        raise SageError(f"{label}: only some of the files joined by + name seeds: join others")
    if len(steps) > 1:
        listed = ranges(sorted(steps)) if len(steps) < 9 else f"{min(steps)} to {max(steps)}"
        notes.append(f"{label}: samples of training steps {listed}, so of several policies")
    seeds = sorted(number_of)
    problems = list(dict.fromkeys(problem for _, problem in counts))
    # The samples of a problem that some seed lacks are no pair.
    common = [name for name in problems if all((seed, name) in counts for seed in seeds)]
    if not common:
        raise SageError(f"{label}: no problem is in the files of all seeds")
    if len(common) < len(problems):
        others = count(len(problems) - len(common), "problem")
        notes.append(f"{label}: {others} not in the files of all seeds, left out")
    table = np.array([[counts[seed, problem] for problem in common] for seed in seeds])
    training_seeds: list[int | None] = [None if seed < 0 else seed for seed in seeds]
    return PolicyCounts(
        label, common, training_seeds, table[..., 0], table[..., 1], files, unreadable, notes
    )


def counted(label: str, counts: Counts | Sequence[Counts]) -> PolicyCounts:
    """Make a policy of counts in memory: right ones and samples by problem, once for each seed.

    Raises SageError where seeds have other problems, or a count is not 0 <= c <= n.
    """
    by_seed = [counts] if isinstance(counts, Mapping) else list(counts)
    if not by_seed or not by_seed[0]:
        raise SageError(f"{label}: give counts of at least one problem")
    problems = list(by_seed[0])
    if any(set(counts_of_seed) != set(problems) for counts_of_seed in by_seed):
        raise SageError(f"{label}: every seed needs counts of the same problems")
    try:
        table = np.array(
            [[counts_of_seed[problem] for problem in problems] for counts_of_seed in by_seed]
        )
        right, samples = table[..., 0], table[..., 1]
    except (ValueError, IndexError):
        raise SageError(f"{label}: counts are pairs (right, samples) by problem") from None
    if not np.issubdtype(table.dtype, np.integer):
        raise SageError(f"{label}: counts are whole numbers, not {table.dtype}")
    if ((right < 0) | (right > samples) | (samples < 1)).any():
        raise SageError(f"{label}: counts are (right, samples): 0 <= right <= samples, from 1 on")
    seeds: list[int | None] = [None] if len(by_seed) == 1 else [*range(1, len(by_seed) + 1)]
    return PolicyCounts(label, list(map(str, problems)), seeds, samples, right)


def _exists(text: str) -> bool:
    """Return whether a file has this name; a list of files can be longer than any name."""
    try:
        return Path(text).exists()
    except OSError:
        return False


def _split(text: str, between: str) -> list[str]:
    """Split a list of files at a sign; a file whose name has that sign is not split."""
    return [text] if _exists(text) else text.split(between)


def _matches(text: str) -> list[str]:
    """The files of a pattern; a name without a pattern is itself."""
    if _exists(text) or not glob.has_magic(text):
        return [text]
    files = sorted(glob.glob(text))
    if not files:
        raise SageError(f"{text} fits no file: check the pattern")
    return files


def _method(text: str) -> tuple[Path, str | None]:
    """Split FILE:METHOD; FILE alone has no method."""
    file, colon, method = text.rpartition(":")
    if colon and not _exists(text) and Path(file).is_file():
        return Path(file), method
    return Path(text), None
