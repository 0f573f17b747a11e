"""Figures of GRPO's front over beta and of the methods beside it: exact, nothing is sampled."""

from collections.abc import Sequence
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.report import exact_tables, front_tables
from sage_lib.report.measured import drawn, named
from sage_lib.report.panels import choices, intervals, keep_near
from sage_lib.report.result_tables import common_seeds
from sage_lib.report.style import NARROW, STYLE, WIDE, count, counts, describe, look, points

#: Up to so many methods are named in a title, and in a caption.
NAMED, NAMED_BELOW = 2, 8
#: How much of a front's range is shown on each of its sides.
NEAR = 0.5
#: A front that takes less than this share of a panel has no room for the names of its points.
SQUEEZED = 0.3
#: A beta beside its point, to be read on lines: above it on the right, or below it on the left.
BESIDE: dict[str, Any] = {
    **{"textcoords": "offset points", "fontsize": 6, "zorder": 5, "annotation_clip": True},
    "path_effects": [withStroke(linewidth=1.2, foreground="white")],
}
ABOVE = {"xytext": (4, 4)}
BELOW = {"xytext": (-4, -4), "ha": "right", "va": "top"}
#: What a beta's name takes, points.
NAME_SIZE = (18, 8)
#: Looks of the fronts of the anchors, in the order of their names here.
FRONTS = {"k3": "grpo", "k3_corrected": "corrected", "sequence": "sequence"}


def front(profile: Profile, methods: Sequence[str] | None = None) -> Figure:
    """pass@1 against pass@256: GRPO's front over beta with each seed, and methods as points.

    ``methods``: keys of the points beside the front; None is those of the first method's family
    that lie on no front, and with these the fronts of other anchors are drawn where they are
    known. The base is the front's end. Right, the same around the points; their bars are the 95 %
    intervals of what tells them apart, the paired differences to the profile's first method.
    """
    exact = exact_tables.by_method(profile, front_tables.AXES)
    table = front_tables.points(profile).set_index("method")
    fronts = {anchor: _on_front(profile, anchor, exact) for anchor in FRONTS}
    own_front, *others = FRONTS if methods is None else list(FRONTS)[:1]
    fronts = {own_front: fronts[own_front]} | {
        anchor: fronts[anchor] for anchor in others if _is_known(profile, fronts[anchor], exact)
    }
    fronts = {anchor: keys for anchor, keys in fronts.items() if len(keys) > 1}
    on_front = {key for keys in fronts.values() for key in keys}
    if methods is None:
        beside = [key for key in table.index if key not in {BASE, *on_front}]
        own = profile.methods[profile.reference].family
        methods = [key for key in beside if profile.methods[key].family == own]
    beyond: list[str] = []
    with plt.rc_context(STYLE):
        beside = [key for key in methods if key != BASE]
        size = (WIDE if beside else NARROW + 0.9, 3.4 + 0.09 * len(beside))
        line = table.loc[[*fronts.get(own_front, []), BASE], ["pass@1", "pass@256"]]
        everything = pd.concat([line, table.loc[beside, list(line)]])
        squeezed = (np.ptp(line, axis=0) < SQUEEZED * np.ptp(everything, axis=0)).all()
        shares = {"width_ratios": [1, 2] if squeezed else [1, 1]} if beside else {}
        [axes] = plt.subplots(
            1, 2 if beside else 1, figsize=size, squeeze=False, gridspec_kw=shares
        )[1]
        figure = axes[0].figure
        for axis in axes:
            for anchor, keys in fronts.items():
                of_front = [*(exact[key] for key in keys), exact[BASE]]
                # The numbers and seeds of several fronts would hide them.
                _draw_front(axis, profile, anchor, of_front, seeds=anchor == own_front)
            for key in beside:
                row = table.loc[key]
                name = f"{profile.label(key)} ({_seeds_of(row)})"
                axis.plot(row["pass@1"], row["pass@256"], label=name, **points(look(key)))
            axis.set(xlabel="exact pass@1", ylabel="exact pass@256")
        if beside:
            beyond = _draw_paired(axes[1], profile, table.loc[beside], line)
            axes[0].set_title("all" if squeezed else "the whole front")
            axes[1].set_title("around the points")
        for axis in axes[1:] if squeezed else axes:
            _name_betas(axis, profile, line, below=squeezed)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        problems = count(int(table["problems"].iloc[0]), "problem")
        thin = any(axis_line.get_alpha() for axis_line in axes[0].lines)
        outside = front_tables.outside(profile).set_index("method")
        describe(
            figure,
            _message(
                profile, outside.loc[[key for key in beside if key in outside.index]], _own(outside)
            ),
            f"{profile.name}. {problems}, exact, nothing sampled",
            "numbers: beta"
            + (" of GRPO" if len(fronts) > 1 else "")
            + (", thin lines: its single seeds" if thin else ""),
            f"bars right: 95 % of the paired difference to {profile.label(profile.reference)} at "
            f"beta {front_tables.beta_of(profile, profile.reference):g}"
            if beside
            else "",
            _alone(table.loc[[*methods], "seeds"]),
            _unequal(profile, [*fronts.get(own_front, []), *beside]),
            f"too far off for the right panel: {named(profile, beyond)}" if beyond else "",
            *_told(profile, outside.loc[[key for key in beside if key in outside.index]]),
        )
    return figure


def _alone(seeds: pd.Series) -> str:
    """What an interval does not cover where there are methods with one seed, and that those of two
    are not drawn; "" else."""
    parts = ["of 1 seed: over problems alone"] if (seeds == 1).any() else []
    return "; ".join([*parts, *(["of 2 seeds: none"] if (seeds == 2).any() else [])])


def _unequal(profile: Profile, methods: Sequence[str]) -> str:
    """Which methods were trained for other numbers of steps than most; "" where none was."""
    of_steps: dict[int, list[str]] = {}
    for method in methods:
        if method != BASE:
            of_steps.setdefault(profile.steps_of(method), []).append(method)
    usual = max(of_steps, key=lambda steps: len(of_steps[steps]), default=0)
    others = of_steps.keys() - {usual}
    if not others:
        return ""
    parts = [f"{steps} of {named(profile, of_steps[steps])}" for steps in sorted(others)]
    return f"steps: {usual}, but {', '.join(parts)}"


def _own(outside: pd.DataFrame) -> float:
    """The largest excess of GRPO's own points against the front without them."""
    return float(outside.loc[outside["on_front"], "excess"].max())


def _message(profile: Profile, outside: pd.DataFrame, own: float) -> str:
    """How many of some rows of front_tables.outside lie outside the front, and whether any is
    farther out than GRPO's own points are (``own``)."""
    if outside.empty:
        return "GRPO's front over beta"
    if (outside["seeds"] < front_tables.FEWEST_SEEDS).all():
        needed = count(front_tables.FEWEST_SEEDS, "seed")
        return f"Fewer than {needed} decide nothing about GRPO's front over beta"
    few = int((outside["seeds"] < front_tables.FEWEST_SEEDS).sum())
    outside = outside[outside["seeds"] >= front_tables.FEWEST_SEEDS]
    rest = f"; {few} with fewer than {count(front_tables.FEWEST_SEEDS, 'seed')}" if few else ""
    found = {name: outside.index[outside["verdict"] == name] for name in ("outside", "inside")}
    if not any(map(len, found.values())):
        told = count(len(outside), "method")
        return f"None of {told} can be told from GRPO's front over beta{rest}"
    parts = []
    for name, keys in found.items():
        which = f" ({named(profile, keys)})" if 0 < len(keys) <= NAMED else ""
        parts.append(f"{len(keys)} {name}{which}")
    beyond = outside.loc[found["outside"], "excess"]
    if len(beyond) and (beyond <= own).all():
        parts[0] += ", no farther than GRPO's own points,"
    methods = count(len(outside), "method")
    untold = f"{len(outside) - sum(map(len, found.values()))} not told from it{rest}"
    return f"Of {methods} beside GRPO's front, {' and '.join(parts)}; {untold}"


def _told(profile: Profile, outside: pd.DataFrame) -> list[str]:
    """Who lies outside and who inside, where the title has no room for it."""
    found = {name: outside.index[outside["verdict"] == name] for name in ("outside", "inside")}
    several = {name: keys for name, keys in found.items() if NAMED < len(keys) <= NAMED_BELOW}
    return [f"{name}: {named(profile, keys)}" for name, keys in several.items()]


def _draw_paired(
    axis: Axes, profile: Profile, of_methods: pd.DataFrame, line: pd.DataFrame
) -> list[str]:
    """The intervals of the paired differences as bars of the points, which fill the panel; points
    that lie far from the front (``line``) do not widen it, nor do bars that reach so far: returns
    the keys of these points."""
    found = front_tables.paired(profile, profile.reference, list(of_methods.index))
    near = of_methods.index
    ends_of_bars = line.min() - np.inf, line.max() + np.inf
    if len(line) > 1:
        (low, high), ends_of_bars = _around(line), _around(line, 2 * NEAR)
        values = of_methods[list(line)]
        near = of_methods.index[((values >= low) & (values <= high)).all(axis=1)]
    ends = {name: [*of_methods.loc[near, name]] for name in line}
    errors: dict[str, dict[str, list[list[float]]]] = {}
    for key, rows in found.groupby("method", sort=False):
        row, by_metric = of_methods.loc[key], rows.set_index("metric")
        if row["seeds"] == 2:  # an interval of two seeds is as wide as anything
            continue
        errors[key] = {}
        for name in line:
            of_metric = by_metric.loc[name]
            below = of_metric["difference"] - of_metric["low"]
            above = of_metric["high"] - of_metric["difference"]
            errors[key][name] = [[below], [above]]
            if key in near:
                reached = np.array([row[name] - below, row[name] + above])
                ends[name] += [*reached.clip(*(end[name] for end in ends_of_bars))]
    inside = pd.Series(True, index=of_methods.index)
    for side, (name, values) in zip("xy", ends.items(), strict=True):
        finite = np.array(values)[np.isfinite(values)]
        if len(finite):
            room = 0.05 * np.ptp(finite) or 0.01
            limits = finite.min() - room, finite.max() + room
            axis.set(**{f"{side}lim": limits})
            inside &= of_methods[name].between(*limits)
    for key, lengths in errors.items():
        if inside[key]:  # the bars of a point beyond would be lines that belong to nothing
            at = of_methods.loc[key]
            axis.errorbar(
                *(at["pass@1"], at["pass@256"], lengths["pass@256"], lengths["pass@1"]),
                fmt="none",
                color=look(key)["color"],
                linewidth=0.7,
                capsize=1.5,
                zorder=1,
            )
    return list(of_methods.index[~inside])


def _around(line: pd.DataFrame, share: float = NEAR) -> tuple[pd.Series, pd.Series]:
    """The least and the largest of each column of a front that is still near it."""
    room = share * (line.max() - line.min())
    return line.min() - room, line.max() + room


def _is_arm(profile: Profile, method: str) -> bool:
    return method == BASE or profile.methods[method].family not in front_tables.TRIED


def _seeds_of(row: pd.Series) -> str:
    return count(int(row["seeds"]), "seed")


def _on_front(profile: Profile, anchor: str, exact: dict[str, Any]) -> list[str]:
    return [key for key in front_tables.front_methods(profile, anchor) if key in exact]


def _is_known(profile: Profile, keys: list[str], exact: dict[str, Any]) -> bool:
    """Whether another anchor's front may be drawn: a line through points of single seeds would bend
    as these do."""
    own = [key for key in keys if front_tables.beta_of(profile, key) > 0]
    least = min((len(exact[key].seeds) for key in own), default=0)
    return len(own) > 1 and least >= front_tables.FEWEST_SEEDS


def _draw_front(
    axis: Axes,
    profile: Profile,
    anchor: str,
    of_front: list[exact_tables.Exact],
    seeds: bool,
) -> None:
    """A front, with thin lines for the ``seeds`` that all its points have."""
    chosen = look(FRONTS[anchor])
    means = [metrics.mean_over_sets(one.values.mean(axis=0), one.sets) for one in of_front]
    line = np.array(means)
    name = "GRPO" if anchor == "k3" else f"GRPO, {anchor.replace('_', ' ')}"
    number = counts((len(one.seeds) for one in of_front if one.method != BASE), "seed")
    axis.plot(line[:, 0], line[:, 1], label=f"{name}, front over beta ({number})", **chosen)
    values, common = common_seeds([(one.values, one.seeds) for one in of_front])
    for i in range(len(common)) if seeds and len(common) > 1 else ():
        of_seed = [
            metrics.mean_over_sets(one[i if len(one) > 1 else 0], of_front[0].sets)
            for one in values
        ]
        path = np.array(of_seed)
        thin = {**chosen, "marker": "", "linewidth": 0.5, "alpha": 0.5}
        axis.plot(path[:, 0], path[:, 1], **thin)


def _name_betas(axis: Axes, profile: Profile, line: pd.DataFrame, below: bool = False) -> None:
    """The betas of a front beside its points, whose two columns are those of the axes: above them,
    or ``below``; of two close to each other on different sides. Once the axes have their limits."""
    axis.autoscale_view()  # what is drawn counts, not the limits of empty axes
    dots, before, side = axis.figure.dpi / 72, None, below
    for key, place in line.iterrows():
        name = "base" if key == BASE else f"{front_tables.beta_of(profile, str(key)):g}"
        at = axis.transData.transform(place.to_numpy(dtype=float)) / dots
        close = before is not None and (np.abs(at - before) < NAME_SIZE).all()
        side, before = (not side if close else below), at
        axis.annotate(name, tuple(place), **BESIDE, **(BELOW if side else ABOVE))


def pass_at(profile: Profile, table: pd.DataFrame, k: int) -> Figure:
    """pass@1 against pass@k of every method, GRPO's front over beta as a line to the base.

    ``table``: front_tables.points with this k. A method's point has its key as gid. The picture is
    that of the front and of what is near it; below it the methods beyond are named.
    """
    means = table.set_index("method")
    front = [key for key in front_tables.front_methods(profile) if key in means.index]
    line = means.loc[[*front, *([BASE] if BASE in means.index else [])]]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.9, 3))
        axis.plot(line["pass@1"], line[f"pass@{k}"], **look("grpo"))
        beside = list(beside_front(profile, table))
        beyond: list[str] = []
        for key in beside:
            point = [[means.loc[key, "pass@1"]], [means.loc[key, f"pass@{k}"]]]
            axis.plot(*point, gid=key, markersize=6, **points(look(key)))
        names = ["pass@1", f"pass@{k}"]
        low, high = _around(line[names])
        if (high > low).all():
            axis.set(xlim=(low.iloc[0], high.iloc[0]), ylim=(low.iloc[1], high.iloc[1]))
            near = means.loc[beside, names]
            beyond = list(near.index[((near < low) | (near > high)).any(axis=1)])
        problems = count(int(table["problems"].iloc[0]), "problem")
        axis.set(
            xlabel="exact pass@1",
            ylabel=f"exact pass@{k}",
            title=f"{profile.name}: {problems}; line: GRPO's front over beta",
        )
        _name_betas(axis, profile, line[names])
        if beyond:
            labels = "; ".join(map(profile.label, beyond))
            axis.annotate(
                fill(f"Farther off than the picture: {labels}", 88),
                (0, -0.2),
                xycoords="axes fraction",
                va="top",
                fontsize=6,
                color="0.3",
            )
    return figure


def beside_front(profile: Profile, table: pd.DataFrame) -> dict[str, tuple[str, str, str]]:
    """The arms of ``table`` (front_tables.points) beside the front: key -> label, colour, mark."""
    front = {BASE, *front_tables.front_methods(profile)}
    others = [key for key in table["method"] if key not in front and _is_arm(profile, key)]
    return choices(profile, others)


def excess(profile: Profile, anchor: str = "k3", family: str | None = None) -> Figure:
    """How far a family's methods lie outside GRPO's front over beta, with 95 % intervals, paired.

    In units of the range that the front spans; GRPO's own points against the front without them
    stand below the line: what lies no farther out than these has shown nothing.
    """
    table = front_tables.outside(profile, anchor).sort_values("on_front", kind="stable")
    beside = list(table.loc[~table["on_front"], "method"])
    methods, others = drawn(profile, beside, family) if beside else ((), "")
    table = table[table["on_front"] | table["method"].isin(methods)]
    with plt.rc_context(STYLE):
        height = max(1.9, 0.9 + 0.22 * len(table))
        figure, axis = plt.subplots(figsize=(WIDE, height))
        intervals(axis, profile, table, ("excess", "low", "high"))
        off = keep_near(axis, table, ("excess", "low", "high"))
        axis.axvline(0, color="black", linewidth=0.6)
        axis.axhline((~table["on_front"]).sum() - 0.5, color="grey", linewidth=0.6)
        axis.set_xlabel("excess over the front (share of its range); left of 0 is inside")
        shown = counts(table["seeds"], "seed")
        describe(
            figure,
            _message(profile, table[~table["on_front"]].set_index("method"), _own(table)),
            f"{profile.name}. {shown}, paired by seed and problem, bars: 95 %",
            "below the line GRPO's own points, each against the front without it",
            others,
            _alone(table["seeds"]),
            "numbers: those beyond the panel; arrows: bars that leave it" if off else "",
        )
    return figure


def against(profile: Profile, reference: str, methods: Sequence[str]) -> Figure:
    """Paired differences of exact pass@1, pass@256 and the rare way's mass to one method."""
    table = front_tables.paired(profile, reference, methods)
    with plt.rc_context(STYLE):
        names = list(dict.fromkeys(table["metric"]))
        height = max(1.9, 0.9 + 0.22 * len(methods))
        figure, axes = plt.subplots(1, len(names), figsize=(WIDE, height), sharey=True)
        off = 0
        for axis, name in zip(axes, names, strict=True):
            rows = table[table["metric"] == name]
            intervals(axis, profile, rows, ("difference", "low", "high"), seeds=True)
            off += keep_near(axis, rows, ("difference", "low", "high"))
            axis.axvline(0, color="black", linewidth=0.6)
            axis.set_xlabel(name)
        label = BASE
        if reference != BASE:
            beta = front_tables.beta_of(profile, reference)
            label = f"{profile.label(reference)} (beta {beta:g})"
        shown = counts(table["seeds"], "seed")
        clear = table[(table["low"] > 0) | (table["high"] < 0)].groupby("metric").size()
        number = table["method"].nunique()  # not the reference, which may be among ``methods``
        parts = [f"{name} {clear.get(name, 0)} of {number}" for name in names]
        describe(
            figure,
            f"Minus {label}, intervals clear of 0: {', '.join(parts)}",
            f"{profile.name}. Exact, paired by seed and problem, bars: 95 %, {shown}",
            "numbers: those beyond the panel; arrows: bars that leave it" if off else "",
            "no bar: all differences are the same" if table["low"].isna().any() else "",
        )
    return figure
