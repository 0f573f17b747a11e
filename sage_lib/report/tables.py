"""Tables made from counts, exact probabilities, step logs and traces alone, in the paper's layout."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.evaluation import counts, metrics
from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile
from sage_lib.files import read_json, read_lines
from sage_lib.report import reported

BASE_LABEL = "Base Model"
#: The methods in groups that are drawn together: Table 1, Table 3, and the anchors and controls of this companion.
FAMILIES = {
    "training_curves": (
        "grpo",
        "grpo_no_kl",
        "grpo_forward_kl",
        "grpo_random",
        "grpo_token",
        "grpo_branch",
    ),
    "training_losses": ("grpo", "bnpo_no_kl", "bnpo_branch", "dapo_no_kl", "dapo_branch"),
    "training_controls": (
        "grpo",
        "grpo_branch",
        "branch_corrected",
        "branch_sequence",
        "identity",
        "shuffled_branch",
        "random_reward",
        "grpo_entropy",
    ),
}


def families(profile: Profile) -> dict[str, tuple[str, ...]]:
    """The groups of :data:`FAMILIES` with the methods that the profile has; a group that adds none to those before it is left out."""
    found, shown = {}, set()
    for name, methods in FAMILIES.items():
        present = tuple(m for m in methods if m in profile.methods)
        if set(present) - shown:
            found[name] = present
            shown |= set(present)
    return found


def label(profile: Profile, method: str) -> str:
    """The paper's name for a method key; "base" is the SFT model."""
    return BASE_LABEL if method == "base" else profile.methods[method].label


def chosen_sets(profile: Profile, ood: bool = False) -> list[str]:
    """Names of the evaluation data of Table 1, or with ``ood`` of those outside it."""
    return [d.label for d in profile.evaluation.data if d.ood == ood]


def evaluations(profile: Profile, ood: bool = False) -> pd.DataFrame:
    """Counts of every finished evaluation on the data of Table 1 (with ``ood`` on those outside it), one row per run and
    problem: columns method, seed, run and counts.COLUMNS."""
    frames = [
        counts.read(run.measured / "counts.csv").assign(method=method, seed=seed, run=of.name)
        for method, seed, run, of in runs.evaluations(profile)
    ]
    for frame in frames[1:]:  # an optional data set may have loaded for one run and not for another
        unequal = set(frames[0]["dataset"] + "/" + frames[0]["problem"]) ^ set(
            frame["dataset"] + "/" + frame["problem"]
        )
        if unequal:
            raise SageError(
                f"the evaluations of {frames[0]['run'][0]} and {frame['run'][0]} hold different problems ({min(unequal)} and {len(unequal) - 1} more in one alone): delete the folder of the one that lacks them and run with --resume"
            )
    found = of_sets(pd.concat(frames, ignore_index=True), profile, ood)
    if found.empty:
        raise SageError(
            f"profile {profile.name} has no evaluation data {'marked' if ood else 'without'} ood: true: add a data set to its evaluation.data"
        )
    return found


def curves(frame: pd.DataFrame, method: str, ks: Sequence[int]) -> tuple[np.ndarray, list[str]]:
    """pass@k of each problem of a method, the mean over its seeds, shape (problems, len(ks)), and the data set of each problem.

    ``frame`` is (a part of) what :func:`evaluations` gives; problems come in the same order for every method.
    """
    of_method = frame[frame["method"] == method]
    runs = [g for _, g in of_method.groupby("run", sort=False)]
    return np.mean(
        [metrics.pass_at_k_curve(g["n"], g["c"], tuple(ks)) for g in runs], axis=0
    ), list(runs[0]["dataset"])


def read(run: runs.Run, name: str) -> pd.DataFrame:
    """A CSV table that a stage kept under ``run``; SageError where it is not there."""
    path = run.measured / name
    if not path.is_file():
        raise SageError(
            f"{run.measured.parent.name}/{run.name}/{name} is missing: run the notebooks that make it for this profile first (python -m sage_lib.pipeline.reproduce --resume)"
        )
    return pd.read_csv(path)


def of_sets(frame: pd.DataFrame, profile: Profile, ood: bool) -> pd.DataFrame:
    """The rows whose column dataset is among :func:`chosen_sets`."""
    return frame[frame["dataset"].isin(chosen_sets(profile, ood))].reset_index(drop=True)


def training(profile: Profile) -> pd.DataFrame:
    """Step logs of every RL run: columns method, seed, step and every logged metric."""
    frames = [
        pd.DataFrame(read_lines(run.measured / "steps.jsonl")).assign(method=method, seed=seed)
        for method, seed, run in runs.rl_runs(profile)
    ]
    return pd.concat(frames, ignore_index=True)


def table1(profile: Profile) -> pd.DataFrame:
    """Table 1, measured and tidy: columns row, dataset, metric, mean, std, low, high, seeds, problems.

    ``mean`` and ``std`` are over seeds (std is NaN for one seed). ``low`` and ``high`` bound the 95 % bootstrap interval
    over problems of the seed-averaged pass@k: what another draw of as many problems could give. The data set "Avg" is
    the mean over data sets, as the paper has it; its interval resamples problems within each data set.
    """
    frame, settings = evaluations(profile), profile.evaluation
    ks = (1, max(settings.ks))
    rows = []
    for method, of_method in frame.groupby("method", sort=False):
        draws, seed_means = {}, {}
        for number, (dataset, group) in enumerate(of_method.groupby("dataset", sort=False)):
            per_seed = [
                metrics.pass_at_k_curve(g["n"], g["c"], ks)
                for _, g in group.groupby("run", sort=False)
            ]
            seed_means[dataset] = np.stack([p.mean(0) for p in per_seed])
            draws[dataset] = metrics.bootstrap_means(
                np.mean(per_seed, axis=0), settings.resamples, settings.seed + number
            )
        problems = {d: int(g["problem"].nunique()) for d, g in of_method.groupby("dataset")}
        seed_means["Avg"], draws["Avg"], problems["Avg"] = (
            np.mean(list(seed_means.values()), axis=0),
            np.mean(list(draws.values()), axis=0),
            sum(problems.values()),
        )
        for dataset, values in seed_means.items():
            for column, k in enumerate(ks):
                mean, std = metrics.mean_std(values[:, column])
                low, high = np.quantile(draws[dataset][:, column], [0.025, 0.975])
                rows.append(
                    (
                        label(profile, method),
                        dataset,
                        f"pass@{k}",
                        mean,
                        std,
                        low,
                        high,
                        len(values),
                        problems[dataset],
                    )
                )
    return pd.DataFrame(
        rows,
        columns=["row", "dataset", "metric", "mean", "std", "low", "high", "seeds", "problems"],
    )


def modes(profile: Profile) -> pd.DataFrame:
    """Exact mode metrics of the embedded task, a row per method with 95 % intervals over problems.

    rare_share: share of samples that take the rare way. both_ways: share of problems of kind "both" for which a valid
    sample of each way was drawn (coverage; NaN without such problems). unsound: share of rewarded samples whose work is not valid.
    """
    frame, settings = evaluations(profile), profile.evaluation
    rows = []
    for method, group in frame.groupby("method", sort=False):
        by_problem = group.groupby(["dataset", "problem"], sort=False)[
            ["n", "c", "rare", "valid_common", "valid_rare"]
        ].sum()
        low, high = metrics.ratio_interval(
            by_problem["rare"], by_problem["n"], settings.resamples, settings.seed
        )
        both = group[group["dataset"] == "both"]
        covered = (
            ((both["valid_common"] > 0) & (both["valid_rare"] > 0))
            .groupby(both["problem"])
            .mean()
            .to_numpy()
        )
        both_low, both_high = (
            (
                float(x[0])
                for x in metrics.bootstrap_interval(
                    covered[:, None], settings.resamples, settings.seed
                )
            )
            if len(covered)
            else (np.nan, np.nan)
        )
        correct = by_problem["c"].sum()
        unsound = (
            1 - (by_problem["valid_common"] + by_problem["valid_rare"]).sum() / correct
            if correct
            else np.nan
        )
        rows.append(
            {
                "row": label(profile, method),
                "rare_share": by_problem["rare"].sum() / by_problem["n"].sum(),
                "rare_low": low,
                "rare_high": high,
                "both_ways": float(covered.mean()) if len(covered) else np.nan,
                "both_ways_low": both_low,
                "both_ways_high": both_high,
                "unsound": float(unsound),
                "samples": int(by_problem["n"].sum()),
            }
        )
    return pd.DataFrame(rows)


def support(profile: Profile, epsilons: Sequence[float] = (0.05, 0.01, 0.001)) -> pd.DataFrame:
    """Empirical support (Definition 4.1) of the embedded task's valid completions, exactly, on the data of Table 1.

    Columns row, epsilon, size (completions in supp_eps), of (all valid ones), entered and left (against the base's), and with
    no epsilon about them: valid_common and valid_rare (mean probability over problems of valid work in each way), both_ways (share of
    problems of kind "both" with a completion of each way in the support). Means over seeds.
    """
    frames = [
        of_sets(read(run, "support.csv"), profile, ood=False).assign(method=method, run=of.name)
        for method, _, run, of in runs.evaluations(profile)
    ]
    frame = pd.concat(frames, ignore_index=True)
    frame["p"] = np.exp(frame["logp"])
    frame["name"] = (
        frame["dataset"] + "/" + frame["problem"] + "/" + frame["completion"].astype(str)
    )
    base, rows = frame[frame["method"] == "base"].set_index("name")["p"].to_dict(), []
    for method, of_method in frame.groupby("method", sort=False):
        by_run = [g for _, g in of_method.groupby("run", sort=False)]
        mass = pd.concat(
            [
                g.groupby(["dataset", "problem", "way"])["p"]
                .sum()
                .unstack("way", fill_value=0)
                .reindex(columns=["L", "R"], fill_value=0)
                for g in by_run
            ]
        )
        for epsilon in epsilons:
            reference, sets = (
                metrics.empirical_support(base, epsilon),
                [
                    metrics.empirical_support(g.set_index("name")["p"].to_dict(), epsilon)
                    for g in by_run
                ],
            )
            both = [
                g[g["dataset"] == "both"]
                .assign(inside=g["p"] > epsilon)
                .groupby(["problem", "way"])["inside"]
                .any()
                .groupby("problem")
                .all()
                .mean()
                for g in by_run
            ]
            rows.append(
                {
                    "row": label(profile, method),
                    "epsilon": epsilon,
                    "size": np.mean([len(s) for s in sets]),
                    "of": len(base),
                    "entered": np.mean([len(s - reference) for s in sets]),
                    "left": np.mean([len(reference - s) for s in sets]),
                    "both_ways": float(np.mean(both)),
                    "valid_common": mass["L"].mean(),
                    "valid_rare": mass["R"].mean(),
                }
            )
    return pd.DataFrame(rows)


def sampled_against_exact(profile: Profile) -> pd.DataFrame:
    """The share of valid work among a policy's samples against its exact probability, over all problems of the embedded task.

    Columns row, run, exact, sampled, z (their difference in standard errors, given the problems). The two agree where samples
    come from the very distribution: temperature 1, nothing cut off.
    """
    rows = []
    for method, _, run, of in runs.evaluations(profile):
        exact = (
            read(run, "support.csv")
            .assign(p=lambda t: np.exp(t["logp"]))
            .groupby(["dataset", "problem"])["p"]
            .sum()
        )
        found = (
            counts.read(run.measured / "counts.csv").set_index(["dataset", "problem"]).join(exact)
        )
        valid, expected = (
            (found["valid_common"] + found["valid_rare"]).sum(),
            (found["n"] * found["p"]).sum(),
        )
        rows.append(
            (
                label(profile, method),
                of.name,
                expected / found["n"].sum(),
                valid / found["n"].sum(),
                (valid - expected) / np.sqrt((found["n"] * found["p"] * (1 - found["p"])).sum()),
            )
        )
    return pd.DataFrame(rows, columns=["row", "run", "exact", "sampled", "z"])


def layout_of_table1(tidy: pd.DataFrame) -> pd.DataFrame:
    """A tidy table (reported or measured) as printed: a row per method, "mean ± std" under data set and metric."""

    def cell(row) -> str:
        return f"{row['mean']:.3f}" + ("" if np.isnan(row["std"]) else f" ± {row['std']:.3f}")

    shown = tidy.assign(cell=[cell(r) for _, r in tidy.iterrows()])
    wide = shown.pivot(index="row", columns=["dataset", "metric"], values="cell")
    return wide.loc[
        list(dict.fromkeys(tidy["row"])),
        list(dict.fromkeys(zip(tidy["dataset"], tidy["metric"], strict=True))),
    ]


def reported_table1(profile: Profile) -> pd.DataFrame:
    """The paper's own Table 1, the rows that this profile has, tidy."""
    frame = reported.load("sage_table1")
    rows = [BASE_LABEL, *(m.label for m in profile.methods.values())]
    return frame[frame["row"].isin(rows)].reset_index(drop=True)


def time_split(profile: Profile) -> pd.DataFrame:
    """Median seconds of an RL step and of its parts by run, after the first step: generation, scoring, reward, loss."""
    frame = training(profile)
    columns = ["time/generation", "time/scoring", "time/reward", "time/loss", "step_time"]
    return (
        frame[frame["step"] > 1]
        .groupby(["method", "seed"], sort=False)[columns]
        .median()
        .reset_index()
    )


def entropy(profile: Profile) -> dict:
    """The base model's token entropies as the SFT stage measured them."""
    return read_json(runs.sft_run(profile).measured / "entropy.json")


def differences(profile: Profile, against: str, ood: bool = False) -> pd.DataFrame:
    """pass@1 and pass@max k of each method minus those of ``against`` (a method key or "base"), paired over problems.

    Columns row, metric, difference, low, high (95 % bootstrap over problems, within each data set, averaged over data
    sets), problems, seeds. ``ood``: on the data outside Table 1.
    """
    frame, settings = evaluations(profile, ood), profile.evaluation
    ks, rows = (1, max(settings.ks)), []
    reference, sets = curves(frame, against, ks)
    for method in dict.fromkeys(frame["method"]):
        if method == against or (method == "base" and against != "base"):
            continue
        found = metrics.paired_difference(
            curves(frame, method, ks)[0], reference, settings.resamples, settings.seed, sets
        )
        rows += [
            (
                f"{label(profile, method)} - {label(profile, against)}",
                f"pass@{k}",
                *(float(x) for x in values),
                len(sets),
                frame[frame["method"] == method]["run"].nunique(),
            )
            for k, *values in zip(ks, *found, strict=True)
        ]
    return pd.DataFrame(
        rows, columns=["row", "metric", "difference", "low", "high", "problems", "seeds"]
    )


def compared(profile: Profile, ood: bool = False) -> pd.DataFrame:
    """The paired differences of every method to GRPO (where the profile has it) and to the base, as :func:`differences` has them."""
    against = [m for m in ("grpo", "base") if m == "base" or m in runs.evaluated(profile)]
    return pd.concat([differences(profile, m, ood) for m in against], ignore_index=True)


def measured(profile: Profile) -> bool:
    """True where the counts of every evaluation of the profile are there."""
    return all(
        (run.measured / "counts.csv").is_file() for _, _, run, _ in runs.evaluations(profile)
    )


def table5(profile: Profile) -> pd.DataFrame:
    """Table 5, measured: mean gradient norm of the first, middle and last third of the steps. Columns row, early, mid, late
    (means over seeds), and each with _std over seeds (NaN for one), seeds. The norm is that before clipping."""
    rows = []
    for method, group in training(profile).groupby("method", sort=False):
        thirds = np.stack(
            [
                [
                    part.mean()
                    for part in np.array_split(run.sort_values("step")["grad_norm"].to_numpy(), 3)
                ]
                for _, run in group.groupby("seed")
            ]
        )
        row = {"row": label(profile, method)}
        for i, name in enumerate(("early", "mid", "late")):
            row[name], row[f"{name}_std"] = metrics.mean_std(thirds[:, i])
        rows.append({**row, "seeds": len(thirds)})
    return pd.DataFrame(rows)


def effects(profile: Profile) -> pd.DataFrame:
    """What the branch guide adds to each anchor's expected gradient, as the stage effects measured it."""
    return pd.DataFrame(effects_size(profile)["anchors"])


def effects_size(profile: Profile) -> dict:
    """The whole of effects.json: prompts, batches a prompt, completions a batch, KL to the reference, share of tokens acted on."""
    return read_json(runs.effects_run(profile).measured / "effects.json")


def traced(profile: Profile, name: str) -> pd.DataFrame:
    """A table of the stage trace: "updates" (size of the update by entropy) or "impact" (tokens replaced by their runner-up)."""
    return read(runs.trace_run(profile), f"{name}.csv")


def benchmark(name: str) -> pd.DataFrame:
    """A result of tools/bench.py as it is kept in data/measured/benchmarks."""
    path = paths.BENCHMARKS / f"{name}.csv"
    if not path.is_file():
        raise SageError(
            f"there is no benchmark {name!r} in data/measured/benchmarks: python tools/bench.py {name} makes it"
        )
    return pd.read_csv(path)


def means_with_intervals(profile: Profile, frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Mean of each column by method, over data sets of the means over problems, with its 95 % bootstrap interval over problems:
    columns row, metric, mean, low, high, problems."""
    rows = []
    for method, group in frame.groupby("method", sort=False):
        by_problem = group.groupby(["dataset", "problem"], sort=False)[columns].mean()
        values, sets = by_problem.to_numpy(), by_problem.index.get_level_values("dataset")
        low, high = metrics.bootstrap_interval(
            values, profile.evaluation.resamples, profile.evaluation.seed, sets
        )
        rows += [
            (label(profile, method), *found, len(values))
            for found in zip(columns, metrics.mean_over_sets(values, sets), low, high, strict=True)
        ]
    return pd.DataFrame(rows, columns=["row", "metric", "mean", "low", "high", "problems"])


def unsolvable(profile: Profile, methods: Sequence[str]) -> dict[str, set[str]]:
    """The k-rollout unsolvable set of each method, k the samples of one run: label -> problems. Of several seeds the first one's
    run is taken, since the base has one run and more rollouts would shrink the set of whatever has more."""
    frame = evaluations(profile)
    found = {}
    for method in methods:
        of_method = frame[frame["method"] == method]
        one = of_method[of_method["run"] == of_method["run"].iloc[0]]
        found[label(profile, method)] = metrics.unsolvable(
            [f"{d}/{p}" for d, p in zip(one["dataset"], one["problem"], strict=True)], one["c"]
        )
    return found


def crossings(profile: Profile) -> pd.DataFrame:
    """Where each method's pass@k curve passes GRPO's (the base's in a profile that does not evaluate GRPO), and the smallest effect
    this evaluation can see. pass@k is the mean over data sets, as in Table 1.

    Columns: row, k, low, high, crosses (share of bootstrap resamples that cross), detectable at the smallest and at the largest k
    (80 % power), problems.
    """
    frame, settings = evaluations(profile), profile.evaluation
    against = "grpo" if "grpo" in runs.evaluated(profile) else "base"
    (reference, sets), rows = curves(frame, against, settings.ks), []
    for method in dict.fromkeys(frame["method"]):
        if method != against:
            ours, _ = curves(frame, method, settings.ks)
            found, effect = (
                metrics.crossing_interval(
                    reference, ours, settings.ks, settings.resamples, settings.seed, sets
                ),
                metrics.minimum_detectable_effect(ours - reference, sets),
            )
            rows.append(
                {
                    "row": f"{label(profile, method)} over {label(profile, against)}",
                    **found,
                    f"detectable at {settings.ks[0]}": effect[0],
                    f"detectable at {settings.ks[-1]}": effect[-1],
                    "problems": len(ours),
                }
            )
    return pd.DataFrame(rows)
