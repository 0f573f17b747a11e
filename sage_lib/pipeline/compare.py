"""A user's own tables beside the published ones of the same profile: identical, within its
interval, or by how much they differ.

    sage-companion compare --profile smoke
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import records, runs
from sage_lib.experiment.profile import Profile, load_profile, published_specs
from sage_lib.files import SAME, write_text
from sage_lib.pipeline import plan, stages

IDENTICAL, WITHIN, DIFFERS = "identical", "within its interval", "differs"
MISSING = "not made"
#: Columns of the comparison.
COLUMNS = ["table", "verdict", "largest difference", "where"]
#: The column of a lower bound: what is before "low", and behind it.
_LOW = re.compile(r"(|.*[_ ])low(| over seeds)")


def compare(profile: Profile) -> pd.DataFrame:
    """Columns :data:`COLUMNS`, a row for each published table, and first one for the weights.

    A cell is within its interval where the own value lies between the low and the high that the
    published table gives for it. Words, and numbers without an interval, must be the same; seconds
    are a machine's own and are left out. The
    largest difference is own minus published, of the cells that are not within their interval where
    there are such. Raises SageError where nothing is published for the profile, or what is belongs
    to other settings, and where nothing of one's own was made yet.
    """
    names = published_specs()
    if profile.name not in names:
        known = ", ".join(names) or "nothing yet"
        raise SageError(
            f"nothing is published for {profile.name} to compare with: there is {known}. Your "
            f"tables of it, once made, are in {_place(paths.measured(profile.name))}; a notebook "
            f'shows them with results = "own" and profile = "{profile.spec}" in its first cell'
        )
    theirs = load_profile(profile.spec, "published")
    runs.require_current(theirs)
    own, published = paths.measured(profile.name), paths.measured(profile.name, published=True)
    tables = sorted(published.glob("*.csv"))
    rows = [_weights(profile, theirs)]
    if rows[0][1] == MISSING and not any((own / path.name).is_file() for path in tables):
        raise SageError(
            f"there is nothing of your own of {profile.name} to compare: "
            f"`sage-companion reproduce --profile {profile.name}` makes it"
        )
    for path in tables:
        if (own / path.name).is_file():
            found = compare_tables(pd.read_csv(own / path.name), pd.read_csv(path))
        else:
            found = MISSING, float("nan"), ""
        rows.append((path.stem, *found))
    return pd.DataFrame(rows, columns=COLUMNS)


def _weights(profile: Profile, published: Profile) -> tuple[str, str, float, str]:
    """Of how many trained models the weights are bit for bit the published ones."""
    pairs = [
        (one.name, records.load(one.record)["weights"], records.load(other.record)["weights"])
        for one, other in zip(runs.policy_runs(profile), runs.policy_runs(published), strict=True)
        if one.record.is_file() and other.record.is_file()
    ]
    if not pairs:
        return "weights", MISSING, float("nan"), ""
    others = [name for name, one, other in pairs if one != other]
    where = f"{len(others)} of {len(pairs)} models, {others[0]} first" if others else ""
    return "weights", DIFFERS if others else IDENTICAL, float("nan"), where


def compare_tables(own: pd.DataFrame, published: pd.DataFrame) -> tuple[str, float, str]:
    """Verdict, largest difference and its cell of two tables, row by row."""
    if list(own) != list(published) or len(own) != len(published):
        sizes = " and ".join(f"{len(one)} x {len(one.columns)}" for one in (own, published))
        return DIFFERS, float("nan"), f"other rows or columns: {sizes}"
    numeric = [
        name
        for name in published
        if all(pd.api.types.is_numeric_dtype(frame[name]) for frame in (own, published))
    ]
    words = [name for name in published if name not in numeric]
    for name in words:
        unequal = np.flatnonzero(own[name].fillna("") != published[name].fillna(""))
        if len(unequal):
            row = unequal[0]
            cells = f"{own[name][row]!r} and {published[name][row]!r}"
            return DIFFERS, float("nan"), f"{name} of row {row + 1}: {cells}"
    bounds, inner = intervals(list(published))
    identical = True
    inside: list[tuple[float, int, str]] = []
    outside: list[tuple[float, int, str]] = []
    for name in numeric:
        if "seconds" in name:
            continue
        one, other = (frame[name].to_numpy(dtype=float) for frame in (own, published))
        same = np.isclose(one, other, rtol=SAME, atol=1e-12, equal_nan=True)
        identical &= bool(same.all())
        if name in inner:  # the interval itself, and what spreads around its value
            continue
        within = np.zeros(len(one), dtype=bool)
        if name in bounds:
            low, high = (published[bound].to_numpy(dtype=float) for bound in bounds[name])
            within = (low <= one) & (one <= high)
        for row in map(int, np.flatnonzero(~same)):
            cell = (float(one[row] - other[row]), row, name)
            (inside if within[row] else outside).append(cell)
    if identical:
        return IDENTICAL, 0.0, ""
    verdict = DIFFERS if outside else WITHIN
    if not (outside or inside):  # nothing but the intervals differ
        return verdict, 0.0, "only the intervals"
    difference, row, name = max(outside or inside, key=lambda cell: _size(cell[0]))
    place = ", ".join(str(published[word][row]) for word in words) or f"row {row + 1}"
    return verdict, difference, f"{name} of {place}"


def _size(difference: float) -> float:
    """A difference to a value that is missing on one side is the largest of all."""
    return float("inf") if np.isnan(difference) else abs(difference)


def intervals(columns: list[str]) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """Value -> its columns low and high; and the columns that only describe another one's spread.

    ``low`` and ``high``, or ``x_low`` and ``x_high``, or ``x low`` and ``x high``, belong to the
    nearest column before them that is no standard deviation; with ``over seeds`` behind them they
    are a second interval of the same value.
    """
    bounds: dict[str, tuple[str, str]] = {}
    inner: set[str] = set()
    value = ""
    spread: list[str] = []
    for name in columns:
        if name == "std" or name.endswith("_std"):
            spread.append(name)
        elif found := _LOW.fullmatch(name):
            high = f"{found[1]}high{found[2]}"
            if not found[2]:
                bounds[value] = name, high
            inner |= {name, high, *spread}
        elif name not in inner:
            value, spread = name, []
    return bounds, inner


def inside(own: pd.DataFrame, published: pd.DataFrame) -> tuple[int, int]:
    """How many values of a table lie in the interval that the published one gives for them, and how
    many have one there; (0, 0) of tables with other rows or columns."""
    if list(own) != list(published) or len(own) != len(published):
        return 0, 0
    within = known = 0
    for name, ends in intervals(list(published))[0].items():
        columns = [published[end] for end in ends] + [own[name]] if name in own else []
        if not columns or not all(map(pd.api.types.is_numeric_dtype, columns)):
            continue
        low, high, values = columns
        known += int((low.notna() & high.notna()).sum())
        within += int(((low <= values) & (values <= high)).sum())
    return within, known


def sentences(profile: Profile, found: pd.DataFrame) -> Iterator[str]:
    """What a comparison comes to: on which processors the models were trained, how many values lie
    in the published intervals, and which tables are the same."""
    theirs = load_profile(profile.spec, "published")
    mine, other = (
        sorted({records.load(one.record)["machine"]["processor"] for one in those})
        for those in (
            [one for one in runs.policy_runs(profile) if one.record.is_file()],
            [one for one in runs.policy_runs(theirs) if one.record.is_file()],
        )
    )
    if mine and other:
        processors = f"trained on {', '.join(mine)}, the published ones on {', '.join(other)}"
        if found["verdict"].iloc[0] == DIFFERS and mine != other:
            processors += (
                ": another processor rounds otherwise, and other weights make other samples and "
                "tables. That is expected"
            )
        yield f"your models were {processors}"
    own, published = paths.measured(profile.name), paths.measured(profile.name, published=True)
    pairs = [
        inside(pd.read_csv(own / path.name), pd.read_csv(path))
        for path in sorted(published.glob("*.csv"))
        if (own / path.name).is_file()
    ]
    within, known = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
    if known:
        yield f"of {known} values with a published interval {within} lie within it"
    same = found.loc[found["verdict"] == IDENTICAL, "table"]
    yield f"identical: {', '.join(same) or 'no table'}"


def show(profile: Profile) -> None:
    """Print the comparison, and keep it in results/compared."""
    found = compare(profile)
    path = paths.results() / "compared" / f"{profile.name}.csv"
    write_text(path, found.to_csv(index=False, float_format="%.4g"))
    shown = found.assign(**{COLUMNS[2]: [_number(value) for value in found[COLUMNS[2]]]})
    print(f"\nown results of {profile.name} beside the published ones", flush=True)
    print(f"{plan.text(shown)}\nkept as {_place(path)}", flush=True)
    for sentence in sentences(profile, found):
        print(sentence, flush=True)


def _number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:+.3g}" if value else "0"


def _place(path: Path) -> str:
    return "/".join(path.parts[-3:])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`do` reads from a command line."""
    stages.add_profile(parser)


def do(options: argparse.Namespace) -> None:
    show(stages.given_profile(options))
