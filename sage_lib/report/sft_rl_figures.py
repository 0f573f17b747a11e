"""Figure 1 of the exploration report with other arms: base, more SFT, rejection sampling, RL."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sage_lib.experiment.profile import Profile
from sage_lib.report import exact_tables, sft_rl_tables
from sage_lib.report.exact_figures import KS
from sage_lib.report.exploration_figures import upset
from sage_lib.report.panels import intervals, lines_of, spread
from sage_lib.report.sft_rl_tables import ROLLOUTS
from sage_lib.report.style import STYLE, WIDE, count, counts, describe

PANELS = {
    "diversity": "(b) valid completions\nto choose among",
    "branching": "(d) branching factor,\ntop 95 % (tokens)",
}


def figure1(profile: Profile, means: pd.DataFrame) -> Figure:
    """(a) exact pass@k, (b) exact diversity, (d) branching factor of sampled states, by arm.

    ``means`` as :func:`sft_rl_tables.table` gives them. Bars: 95 % over seeds and problems; (c) is
    :func:`unsolvable`.
    """
    methods = sft_rl_tables.arms(profile)
    found = exact_tables.probabilities(sft_rl_tables.narrowed(profile))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, 3, figsize=(WIDE, 1.6 + 0.2 * len(methods)), width_ratios=[1.5, 1, 1]
        )
        curves, *others = axes
        last: dict[str, float] = {}
        for method, chosen in lines_of(methods):
            of_method = found[found["method"] == method]
            by_set = [
                exact_tables.pass_at_k(group["valid"], KS).mean(axis=0)
                for _, group in of_method.groupby("dataset", sort=False)
            ]
            curves.plot(KS, np.mean(by_set, axis=0), markevery=2, **chosen)
            last[method] = float(np.mean(by_set, axis=0)[KS.index(ROLLOUTS)])
        curves.set_xscale("log", base=2)
        curves.set_xticks(KS[::2], [str(k) for k in KS[::2]])
        curves.set(xlabel="k", ylabel="exact pass@k", title="(a) pass@k")
        for axis, (name, title) in zip(others, PANELS.items(), strict=True):
            rows = means[means["metric"] == name]
            intervals(axis, profile, rows)
            axis.set_title(title)
        others[1].tick_params(labelleft=False)
        seeds = means.loc[means["method"] != "base", "seeds"]
        shown = counts(seeds, "seed") if len(seeds) else "no trained arm"
        problems = {name: int(n) for name, n in means.groupby("metric")["problems"].max().items()}
        describe(
            figure,
            spread(profile, last, f"Exact pass@{ROLLOUTS}"),
            f"{profile.name}. {shown}",
            "letters: the report's Figure 1, whose (c) is a figure by itself",
            f"(a), (b) {count(problems['diversity'], 'problem')}, exact; (a) has the marks of (b)",
            f"(d) {count(problems['branching'], 'problem')}, sampled",
            "bars: 95 % over seeds and problems",
        )
    return figure


def unsolvable(profile: Profile, sets: dict[str, set[str]]) -> Figure:
    """(c) Which problems stay unsolvable for which arms, as an UpSet plot: exact."""
    caption = (
        f"{profile.name}. Problems with exact pass@{sft_rl_tables.ROLLOUTS} below "
        f"{sft_rl_tables.THRESHOLD:g}, mean over seeds"
    )
    return upset(profile, sets, "unsolvable for exactly the marked arms", caption)
