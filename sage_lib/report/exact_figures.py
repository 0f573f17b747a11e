"""Figures of exact pass@k on countdown: nothing is sampled, training seeds are the only noise."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from sage_lib.experiment.profile import BASE, Profile
from sage_lib.report import exact_tables
from sage_lib.report.panels import lines_of, panel_rows, seeds
from sage_lib.report.style import NARROW, STYLE, band, count, sentence

#: k of the curves.
KS = tuple(2**n for n in range(11))


def exact_pass_at_k(profile: Profile, ood: bool = False) -> Figure:
    """Exact pass@k by k for each data set and every evaluated method; bands span the seeds.

    Of the data of Table 1, with ``ood`` of those outside it.
    """
    found = exact_tables.probabilities(profile, ood)
    datasets = list(dict.fromkeys(found["dataset"]))
    methods = [BASE, *profile.evaluated]
    with plt.rc_context(STYLE):
        figure, rows = panel_rows(profile, methods, [1] * len(datasets), sharey=True)
        for group, axes in rows:
            for axis, dataset in zip(axes.flat, datasets, strict=True):
                of_set = found[found["dataset"] == dataset]
                for method, chosen in lines_of(group):
                    of_method = of_set[of_set["method"] == method].groupby("run", sort=False)
                    by_run = [
                        exact_tables.pass_at_k(run["valid"], KS).mean(axis=0)
                        for _, run in of_method
                    ]
                    axis.plot(KS, np.mean(by_run, axis=0), markevery=2, **chosen)
                    if len(by_run) > 1:
                        band(axis, KS, np.min(by_run, axis=0), np.max(by_run, axis=0), **chosen)
                axis.set_xscale("log", base=2)
                axis.set_xticks(KS[::2], [str(k) for k in KS[::2]])
                problems = count(of_set["problem"].nunique(), "problem")
                axis.set(xlabel="k", ylim=(-0.02, 1.02), title=f"{dataset}\n{problems}")
            axes.flat[0].set_ylabel("exact pass@k")
        figure.suptitle(f"{profile.name}: valid work, no sampling; {seeds(profile)}")
    return figure


def exact_training(profile: Profile) -> Figure:
    """Exact pass@1, pass@256 and the rare way's mass along training, means over data sets.

    Thick lines are means over seeds, thin ones each seed. A sentence where nothing was logged.
    """
    found = exact_tables.along_training(profile)
    if found.empty:
        with plt.rc_context(STYLE):
            figure, axis = plt.subplots(figsize=(NARROW, 2.1))
            sentence(axis, f"{profile.name}: no exact evaluation\nalong training")
        return figure
    panels = {
        "pass@1": "exact pass@1",
        "pass@256": "exact pass@256",
        "rare": "mass of the rare way",
    }
    methods = list(dict.fromkeys(found["method"]))
    with plt.rc_context(STYLE):
        figure, rows = panel_rows(profile, methods, [1] * len(panels))
        for group, axes in rows:
            for axis, (column, name) in zip(axes.flat, panels.items(), strict=True):
                for method, chosen in lines_of([m for m in group if m in methods]):
                    table = found[found["method"] == method].pivot(
                        index="step", columns="seed", values=column
                    )
                    axis.plot(table.index, table.mean(axis=1), **chosen)
                    for seed in table if table.shape[1] > 1 else ():
                        thin = {**chosen, "linewidth": 0.4, "marker": "", "alpha": 0.6}
                        axis.plot(table.index, table[seed], **thin)
                axis.set(xlabel="RL step", ylabel=name)
        every = profile.evaluation.every
        figure.suptitle(f"{profile.name}: no sampling, every {every} RL steps; {seeds(profile)}")
    return figure
