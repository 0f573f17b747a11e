"""pass@k of samples in files, with intervals, paired differences and crossings."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics, sample_files
from sage_lib.files import write_text
from sage_lib.pipeline import plan
from sage_lib.report import inference, passk, style
from sage_lib.report.inference import Values

#: How many unreadable lines are printed; unreadable.csv has all.
SHOWN = 10
COLUMNS = [
    *("what", "policy", "against", "k", "value", "low", "high", "seeds", "problems", "samples"),
    *("detectable", "problems_to_tell", "seeds_to_tell", "samples_to_tell"),
]


@dataclass(frozen=True)
class Policy:
    """One side. n, c: samples and right ones, a row for each problem and a column for each seed;
    -1 stands for a file that names none. read: what to print of its files."""

    label: str
    n: pd.DataFrame
    c: pd.DataFrame
    read: list[str]
    unreadable: list[tuple[str, int, str]]

    def values(self, ks: Sequence[int], problems: Sequence[str] | None = None) -> Values:
        """Return pass@k, shape (seeds, problems, ks), of these problems, or of all."""
        rows = list(self.n.index if problems is None else problems)
        n, c = self.n.loc[rows], self.c.loc[rows]
        curves = np.stack([metrics.pass_at_k_curve(n[seed], c[seed], ks) for seed in n])
        seeds = [None if seed < 0 else seed for seed in n]
        return Values(self.label, curves, [f"pass@{k}" for k in ks], ["all"] * len(rows), seeds)

    def noise(self, ks: Sequence[int], problems: Sequence[str], seeds: Sequence[Any]) -> np.ndarray:
        """Return the variance, shape (ks,), that drawing samples gives the mean pass@k of these
        seeds."""
        used = [seed for seed in self.n if self.n.columns.tolist() == [-1] or seed in seeds]
        n, c = (table.loc[problems, used].to_numpy().ravel() for table in (self.n, self.c))
        sums = [metrics.variance_of_pass_at_k(n, c, k).sum() for k in ks]
        return np.array(sums) / len(n) ** 2


def policy(text: str, metric: str | None = None, filter: str | None = None) -> Policy:
    """Read a policy from an argument [LABEL=]FILE[:METHOD], where ``+`` joins files with other
    samples of the same policy, and ``,`` files of another training seed."""
    label, equals, rest = text.partition("=")
    if Path(text).exists() or not equals or "/" in label:
        label, rest = "", text
    frames, read, unreadable, names = [], [], [], []
    for place, of_seed in enumerate(_parts(rest, ","), 1):
        for part in _parts(of_seed, "+"):
            path, method = _place(part)
            if part in names:
                raise SageError(f"{part} is given twice: its samples would count twice")
            names.append(part)
            samples = sample_files.read_sample_file(path, method, metric, filter)
            unreadable += [(str(path), *line) for line in samples.unreadable]
            lost = style.count(len(samples.unreadable), "unreadable line")
            problems = style.count(samples.frame["problem"].nunique(), "problem")
            size = f"{problems}, {style.count(len(samples.frame), 'sample')}"
            read.append(f"{part}: {samples.format}, {size}, {lost}")
            seeds, several = samples.frame["seed"], len(_parts(rest, ",")) > 1
            named = seeds.where(seeds >= 0, place) if several else seeds
            frames.append(samples.frame.assign(seed=named, place=place))
            label = label or method or path.name.removesuffix(".gz").rsplit(".", 1)[0]
    frame = pd.concat(frames, ignore_index=True)
    twice = frame[["seed", "place"]].drop_duplicates()["seed"]
    if twice.duplicated().any():
        seed = twice[twice.duplicated()].iloc[0]
        raise SageError(f"{label}: seed {seed} is in two files; join them by + if that is meant")
    if (frame["seed"] < 0).any() and (frame["seed"] >= 0).any():
        raise SageError(f"{label}: only some of the files joined by + name seeds: join others")
    # The samples of a problem that some seed lacks are no pair.
    table = frame.groupby(["problem", "seed"], sort=False)["correct"].agg(["size", "sum"]).unstack()
    whole = table.dropna().astype(int)
    if whole.empty:
        raise SageError(f"{label}: no problem is in the files of all seeds")
    if len(whole) < len(table):
        lost = style.count(len(table) - len(whole), "problem")
        read.append(f"{label}: {lost} not in the files of all seeds, left out")
    return Policy(label, whole["size"], whole["sum"], read, unreadable)


def _parts(text: str, between: str) -> list[str]:
    """Split a list of files at a sign; a file whose name has that sign is not split."""
    return [text] if Path(text).exists() else text.split(between)


def _place(text: str) -> tuple[Path, str | None]:
    """Split FILE:METHOD; FILE alone has no method."""
    file, colon, method = text.rpartition(":")
    if colon and not Path(text).exists() and Path(file).is_file():
        return Path(file), method
    return Path(text), None


def powers(policies: Sequence[Policy]) -> list[int]:
    """Return 1, 2, 4, ... up to the fewest samples that a problem has."""
    fewest = min(int(side.n.to_numpy().min()) for side in policies)
    return [2**i for i in range(fewest.bit_length())]


def curve(side: Policy, ks: Sequence[int]) -> pd.DataFrame:
    """Return pass@k with its 95 % interval: over problems, and with three or more seeds over seeds,
    too. With one seed the interval is a bootstrap, which holds with few problems."""
    values = side.values(ks)
    if len(values.seeds) > 1:
        levels = passk.levels({side.label: values})
        mean, low, high = (levels[name] for name in ("mean", "low", "high"))
    else:
        mean = metrics.mean_over_sets(values.values[0])
        low, high = metrics.bootstrap_interval(values.values[0], resamples=10_000, seed=0)
    columns = {"what": "pass@k", "policy": side.label, "k": ks, "value": mean}
    size = {"seeds": len(values.seeds), "problems": len(side.n), "samples": side.n.to_numpy().min()}
    return pd.DataFrame({**columns, **size, "low": low, "high": high})


def difference(ours: Policy, theirs: Policy, ks: Sequence[int]) -> tuple[pd.DataFrame, str]:
    """Compare two policies on the problems that both have.

    Returns rows of COLUMNS: `ours` less `theirs` at each k, and where the curves cross; and a
    sentence about the crossing. Raises SageError for fewer than two problems.
    """
    both = [problem for problem in ours.n.index if problem in theirs.n.index]
    pair = f"{ours.label} and {theirs.label}"
    if len(both) < 2:
        raise SageError(f"{pair} share {style.count(len(both), 'problem')}: a difference needs two")
    (a, b), seeds = inference.at_common_seeds(ours.values(ks, both), theirs.values(ks, both))
    mean, low, high = metrics.paired_difference(a, b)
    noise = ours.noise(ks, both, seeds) + theirs.noise(ks, both, seeds)
    data, samples = metrics.times_as_much(a - b, noise)
    drawn = min(int(side.n.loc[both].to_numpy().min()) for side in (ours, theirs))
    size = {"seeds": len(seeds), "problems": len(both), "samples": drawn}
    pair_of = {"policy": ours.label, "against": theirs.label, **size}
    rows: dict[str, Any] = {"what": "difference", "k": ks, "value": mean, "low": low, "high": high}
    rows["detectable"] = metrics.minimum_detectable_effect(a - b)
    rows["problems_to_tell"] = np.ceil(data * len(both))
    rows["seeds_to_tell"] = np.ceil(data * len(seeds)) if len(seeds) > 1 else 1.0
    rows["samples_to_tell"] = np.ceil(samples * drawn)
    # Whichever curve comes from below first.
    options = [(ours, theirs, a, b), (theirs, ours, b, a)]
    crossings = [(metrics.crossing_interval(y, x, ks), up, down) for up, down, x, y in options]
    crossing, up, down = min(crossings, key=lambda row: (np.isnan(row[0]["k"]), row[0]["k"]))
    ends = {key: crossing[key] for key in ("low", "high")}
    row = {"what": "crossing", "policy": up.label, "against": down.label, **size}
    row |= {"value": crossing["k"], **ends}
    sentence = _crossing(crossing, up.label, down.label, ks)
    return pd.concat([pd.DataFrame({**pair_of, **rows}), pd.DataFrame([row])]), sentence


def _crossing(crossing: dict[str, float], up: str, down: str, ks: Sequence[int]) -> str:
    if np.isnan(crossing["k"]):
        return f"The curves do not cross between k = {ks[0]} and {ks[-1]}."
    sentence = f"{up} passes {down} at k = {crossing['k']:.3g}."
    low, high = crossing["low"], crossing["high"]
    start = f"below {ks[0]}" if np.isnan(low) else f"{low:.3g}"
    end = f"beyond {ks[-1]}" if np.isnan(high) else f"{high:.3g}"
    doubt = "" if crossing["crosses"] else ", so that there may be no crossing"
    return f"{sentence} The 95 % interval of this k is {start} to {end}{doubt}."


def draw(table: pd.DataFrame, ks: Sequence[int]) -> Figure:
    """Draw the curves with their intervals and, where there are any, the differences."""
    kinds = ["pass@k", "difference"] if (table["what"] == "difference").any() else ["pass@k"]
    figure = Figure(figsize=(style.NARROW * len(kinds), 2.6))
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axis, kind in zip(panels, kinds, strict=True):
        of_kind = table[table["what"] == kind]
        for place, (label, rows) in enumerate(of_kind.groupby("policy", sort=False)):
            look = style.series(place)
            axis.plot(rows["k"], rows["value"], label=label, **look)
            style.band(axis, rows["k"], rows["low"], rows["high"], **look)
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(ks), [str(k) for k in ks])
        axis.minorticks_off()
        axis.set_xlabel("k")
        axis.set_ylabel(kind)
        if kind == "pass@k":
            axis.legend()
            continue
        axis.set_ylabel(f"pass@k less that of {of_kind['against'].iloc[0]}")
        axis.axhline(0, color="0.4", linewidth=0.8)
        order = list(of_kind["policy"].unique())
        crossings = table[(table["what"] == "crossing") & table["value"].notna()]
        for row in crossings.itertuples():  # on the line of no difference
            label = row.policy if row.policy in order else row.against
            look = style.points({**style.series(order.index(label)), "marker": "|"})
            low = ks[0] if np.isnan(row.low) else row.low  # an open end
            high = ks[-1] if np.isnan(row.high) else row.high
            style.error_bar(axis, 0, row.value, low, high, horizontal=True, **look)
    labels = ", ".join(table.loc[table["what"] == "pass@k", "policy"].unique())
    bars = (
        "bars at 0: where curves cross, and its interval, to the edge if open"
        if len(kinds) > 1
        else ""
    )
    style.describe(figure, f"pass@k of {labels}", "Bands: 95 % intervals", bars)
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "[LABEL=]FILE[:METHOD]; FILE,FILE: other training seeds; FILE+FILE: more samples"
    parser.add_argument("files", nargs="+", metavar="FILE", help=about)
    about = "what each FILE is compared with; of two FILEs, the second is"
    parser.add_argument("--against", metavar="FILE", help=about)
    about = "the values of k; without them powers of 2"
    parser.add_argument("--ks", nargs="+", type=int, metavar="K", help=about)
    about = "which metric of lm-evaluation-harness or lighteval is the verdict"
    parser.add_argument("--metric", help=about)
    parser.add_argument("--filter", help="which filter of lm-evaluation-harness")
    about = "where pass_at_k.csv and the picture go (default: pass_at_k)"
    parser.add_argument("--out", type=Path, default=Path("pass_at_k"), metavar="FOLDER", help=about)


def run_pass_at_k(options: argparse.Namespace) -> None:
    words = [*options.files, *([options.against] if options.against else [])]
    if options.out.exists() and not options.out.is_dir():
        raise SageError(f"--out {options.out} is a file: name a folder")
    sides = [policy(word, options.metric, options.filter) for word in words]
    labels = [side.label for side in sides]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise SageError(f"two policies are called {twice}: write LABEL=FILE for one of them")
    ks = sorted(set(options.ks or powers(sides)))
    print(*(line for side in sides for line in side.read), sep="\n")
    lost = [line for side in sides for line in side.unreadable]
    for file, number, why in lost[:SHOWN]:
        print(f"  {Path(file).name}, line {number} {why}")
    if len(lost) > SHOWN:
        print(f"  and {len(lost) - SHOWN} more lines, in {options.out / 'unreadable.csv'}")
    tables = [curve(side, ks) for side in sides]
    names = ["policy", "k", "value", "low", "high", "seeds", "problems", "samples"]
    print("\npass@k, the mean over problems, and its 95 % interval")
    print(_shown(pd.concat(tables)[names]))
    compared = options.against or len(sides) == 2
    for ours in sides[:-1] if compared else []:
        rows, sentence = difference(ours, sides[-1], ks)
        tables.append(rows)
        print(f"\n{ours.label} less {sides[-1].label}, paired by problem")
        for side, opposite in ((ours, sides[-1]), (sides[-1], ours)):
            alone = len(side.n.index.difference(opposite.n.index))
            if alone:
                print(f"{style.count(alone, 'problem')} only in {side.label}, left out")
        of_k = rows[rows["what"] == "difference"]
        print(_shown(of_k[["k", "value", "low", "high", "seeds", "problems", *COLUMNS[10:]]]))
        print(sentence)
    table = pd.concat(tables, ignore_index=True).reindex(columns=COLUMNS)
    made = [write_text(options.out / "pass_at_k.csv", table.to_csv(index=False))]
    (options.out / "unreadable.csv").unlink(missing_ok=True)  # of an earlier call
    if lost:
        text = pd.DataFrame(lost, columns=["file", "line", "reason"]).to_csv(index=False)
        made.append(write_text(options.out / "unreadable.csv", text))
    with matplotlib.rc_context(style.STYLE):
        made += style.save_figure(draw(table, ks), "pass_at_k", options.out)
    print("\nwritten:", ", ".join(str(path) for path in made))


def _shown(table: pd.DataFrame) -> str:
    """Write a dash for what is not known, and whole numbers without a fraction."""
    whole = [name for name in table if name.endswith("_to_tell")]
    shown = table.astype(object)
    shown[whole] = table[whole].map(lambda number: "none" if np.isinf(number) else f"{number:.0f}")
    return plan.text(shown.where(table.notna(), "-"))
