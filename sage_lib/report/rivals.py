"""What notebooks 16 to 19 share: methods beside each other, from one base or from two.

Where methods were trained from a second base as well (a study of its own), each difference is taken
within a base, and the seeds of both count.
"""

from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from sage_lib import paths
from sage_lib.experiment import results
from sage_lib.experiment.results import Study
from sage_lib.report import inference, passk
from sage_lib.report.inference import Values
from sage_lib.report.style import STYLE, look

#: The smallest differences that matter, fixed before the final evaluations; pass@k first, then
#: nats, valid completions and tokens.
MARGINS = {"pass@1": 5e-3, "pass@256": 5e-3, "entropy": 2e-3, "diversity": 1e-2, "branching": 1e-2}
COLUMNS = [
    *("statement", "method", "against", "metric", "expects"),
    *("difference", "low", "high", "seeds", "outcome"),
]
#: What a reader is shown of them.
SHOWN = ["statement", "method", "against", "metric", "difference", "outcome"]


def bases(study: Study) -> list[Study]:
    """The study, and that of a second base where there is one ("countdown_rebased")."""
    name = f"{study.name}_rebased"
    there = paths.measured(name, published=not study.own).is_dir()
    return [study, results.load(name, own=study.own)] if there else [study]


def exact(study: Study) -> dict[str, Values]:
    """Exact pass@1 and pass@256 of each method, a seed being (number of the base, seed)."""
    return inference.stacked(*(passk.exact(one) for one in bases(study)))


def at_the_end(study: Study, column: str = "entropy") -> pd.Series:
    """A column's mean over the last fifth of the steps, by method, number of the base and seed."""
    found = {}
    for number, one in enumerate(bases(study)):
        log = one.steps.dropna(subset=[column, "seed"])
        late = log["step"] > 0.8 * log.groupby("run")["step"].transform("max")
        found[number] = log[late].groupby(["method", "seed"])[column].mean()
    return pd.concat(found, names=["base"]).swaplevel("base", "method").sort_index()


def statements(
    said: Iterable[tuple[str, ...]], values: dict[str, Values], logged: dict[str, pd.Series]
) -> pd.DataFrame:
    """Each (statement, method, against, metric, expects) with its difference and its outcome.

    ``logged``: by metric what is known by seed alone (:func:`at_the_end`).
    """
    rows = []
    for statement, method, against, metric, expects in said:
        row: dict[str, Any] = {"statement": statement, "method": method, "against": against}
        row |= {"metric": metric, "expects": expects, "seeds": 0, "outcome": inference.NOT_RUN}
        known = logged[metric].index.levels[0] if metric in logged else values
        if {method, against} <= set(known):
            if metric in logged:
                of_metric = logged[metric]
                found = inference.difference_of_seeds(of_metric[method], of_metric[against])
            else:
                table = inference.difference(values[method], values[against])
                found = table.set_index("metric").loc[metric].to_dict()
            if not metric.startswith("pass@"):  # no share: it has no floor at 0 and no ceiling at 1
                found = {k: v for k, v in found.items() if k not in ("ours", "theirs")}
            row |= {name: found[name] for name in ("difference", "low", "high", "seeds")}
            row["outcome"] = inference.judged(expects, found, MARGINS[metric])
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def in_short(table: pd.DataFrame) -> pd.DataFrame:
    """Statements as a reader sees them: a difference with its interval and seeds in one column."""
    digits = [
        f"{row.difference:+.4f} [{row.low:+.4f}, {row.high:+.4f}], {row.seeds} seeds"
        if row.seeds
        else ""
        for row in table.itertuples()
    ]
    return table.assign(difference=digits)[SHOWN]


def forest(study: Study, table: pd.DataFrame) -> Figure:
    """Differences with intervals, a panel for each metric; a number where one lies far off."""
    wanted = list(dict.fromkeys(table["metric"]))
    methods = list(dict.fromkeys(table["method"]))
    with plt.rc_context(STYLE):
        size = (6.75, 0.9 + 0.2 * len(methods))
        figure, axes = plt.subplots(1, len(wanted), figsize=size, sharey=True, squeeze=False)
        for axis, metric in zip(axes[0], wanted, strict=True):
            rows = table[table["metric"] == metric].dropna(subset=["difference"])
            near = 6 * rows[["low", "high"]].abs().max(axis=1).median()
            for row in rows.itertuples():
                y = methods.index(row.method)
                if abs(row.difference) > near:
                    side, x = ("right", 0.97) if row.difference > 0 else ("left", 0.03)
                    place = {"transform": axis.get_yaxis_transform(), "ha": side, "va": "center"}
                    axis.text(x, y, f"{row.difference:+.3f}", size=6, **place)
                    continue
                bar = [[row.difference - row.low], [row.high - row.difference]]
                shown = {**look(row.method), "linestyle": "none"}
                axis.errorbar(row.difference, y, xerr=bar, capsize=2, **shown)
            axis.axvline(0, color="0.3", linewidth=0.8)
            axis.set_xlabel(metric)
            axis.locator_params(axis="x", nbins=3)
        axes[0, 0].set_yticks(range(len(methods)), [study.label(key) for key in methods])
        axes[0, 0].set_ylim(len(methods) - 0.5, -0.5)
    return figure
