"""Figures of exact pass@k on countdown: nothing is sampled, training seeds are the only noise."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from sage_lib.experiment.profile import BASE, Profile
from sage_lib.report import exact_tables
from sage_lib.report.measured import drawn
from sage_lib.report.panels import lines_of, panels, seeds, spread
from sage_lib.report.style import NARROW, STYLE, band, count, describe, sentence, steps

#: k of the curves.
KS = tuple(2**n for n in range(11))


def exact_pass_at_k(profile: Profile, ood: bool = False, family: str | None = None) -> Figure:
    """Exact pass@k by k for each data set, for the methods of a family; bands span the seeds.

    Of the data of Table 1, with ``ood`` of those outside it.
    """
    found = exact_tables.probabilities(profile, ood)
    datasets = list(dict.fromkeys(found["dataset"]))
    methods, others = drawn(profile, [BASE, *profile.evaluated], family)
    last: dict[str, list[float]] = {}
    with plt.rc_context(STYLE):
        figure, axes = panels(profile, methods, [1] * len(datasets), sharey=True)
        for axis, dataset in zip(axes.flat, datasets, strict=True):
            of_set = found[found["dataset"] == dataset]
            for method, chosen in lines_of(methods):
                of_method = of_set[of_set["method"] == method].groupby("run", sort=False)
                by_run = [
                    exact_tables.pass_at_k(run["valid"], KS).mean(axis=0) for _, run in of_method
                ]
                mean = np.mean(by_run, axis=0)
                axis.plot(KS, mean, markevery=2, **chosen)
                last.setdefault(method, []).append(float(mean[-1]))
                if len(by_run) > 1:
                    band(axis, KS, np.min(by_run, axis=0), np.max(by_run, axis=0), **chosen)
            axis.set_xscale("log", base=2)
            axis.set_xticks(KS[::2], [str(k) for k in KS[::2]])
            problems = count(of_set["problem"].nunique(), "problem")
            axis.set(
                xlabel="k", ylim=(-0.02, 1.02), title=f"{dataset.replace('_', ' ')}\n{problems}"
            )
        axes.flat[0].set_ylabel("exact pass@k")
        means = {method: float(np.mean(values)) for method, values in last.items()}
        several = found.groupby("method")["run"].nunique().max() > 1
        describe(
            figure,
            spread(profile, means, f"Exact pass@{KS[-1]}"),
            f"{profile.name}. Valid work, all completions listed, nothing sampled",
            seeds(profile, methods),
            "bands: lowest to highest seed" if several else "",
            others,
        )
    return figure


def exact_training(profile: Profile, family: str | None = None) -> Figure:
    """Exact pass@1, pass@256 and the rare way's mass along training, means over data sets.

    Thick lines are means over seeds, thin ones each seed. A sentence where nothing was logged.
    """
    found = exact_tables.along_training(profile)
    if found.empty:
        with plt.rc_context(STYLE):
            figure, axis = plt.subplots(figsize=(NARROW, 2.1))
            sentence(axis, f"{profile.name}: no exact evaluation\nalong training")
        return figure
    shown = {
        "pass@1": "exact pass@1",
        "pass@256": "exact pass@256",
        "rare": "mass of the rare way",
    }
    methods, others = drawn(profile, list(dict.fromkeys(found["method"])), family)
    found = found[found["method"].isin(methods)]
    with plt.rc_context(STYLE):
        figure, axes = panels(profile, methods, [1] * len(shown))
        for axis, (column, name) in zip(axes.flat, shown.items(), strict=True):
            for method, chosen in lines_of(methods):
                table = found[found["method"] == method].pivot(
                    index="step", columns="seed", values=column
                )
                axis.plot(table.index, table.mean(axis=1), **chosen)
                for seed in table if table.shape[1] > 1 else ():
                    thin = {**chosen, "linewidth": 0.4, "marker": "", "alpha": 0.6}
                    axis.plot(table.index, table[seed], **thin)
            axis.set_ylabel(name)
            steps(axis)
        means = found.groupby(["method", "step"])["pass@256"].mean()
        # A run shorter than the distance of two evaluations has none at its end.
        ended = set(found.loc[found["step"] > found["step"].min(), "method"])
        last = {m: float(means[m].iloc[-1]) for m in methods if m in ended or not ended}
        start = float(found.loc[found["step"] == found["step"].min(), "pass@256"].mean())
        several = found.groupby("method")["seed"].nunique().max() > 1
        describe(
            figure,
            spread(profile, last, f"Exact pass@256 at the end ({start:.3f} at the start)"),
            f"{profile.name}. Nothing sampled",
            f"evaluated every {_every(profile.evaluation.every)}",
            seeds(profile, methods) + (", thin lines: each of them" if several else ""),
            others,
        )
    return figure


def _every(number: int) -> str:
    return "RL step" if number == 1 else f"{number} RL steps"
