"""Figure 1 of the exploration report with our policies: what SFT and RL do to a base.

Exact where it can be: pass@k, the problems that stay unsolved, and the diversity of valid
completions come from the probabilities of all of them. The branching factor comes from the scored
samples.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t

from sage_lib.evaluation import metrics
from sage_lib.experiment import runs
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.report import exact_tables, front_tables, measured
from sage_lib.report.arm_tables import BASES
from sage_lib.report.front_tables import FEWEST_SEEDS
from sage_lib.report.measured import by_seed, of_sets, table_of
from sage_lib.report.result_tables import common_seeds, difference_rows
from sage_lib.report.style import count
from sage_lib.report.verdict import AGREES, DISAGREES, MISSING, OPEN, outcome

#: The arms, where they were run: base, SFT that goes on, rejection sampling, RL.
SFT_ARMS, RL_ARMS = ("more_sft", "diverse_sft"), ("grpo_no_kl", "grpo", "branch_strong")
ARMS = (BASE, *SFT_ARMS, "rft", *RL_ARMS)
#: A problem is unsolvable for a policy where 256 samples solve it less often than not.
ROLLOUTS, THRESHOLD = 256, 0.5
#: The smallest difference that matters: of pass@k that of the verdict, of the others about a
#: hundredth of the base's own value (1.12 completions, 1.10 tokens).
MARGINS = {"pass@1": 0.005, "pass@256": 0.005, "diversity": 0.01, "branching": 0.01}
STATEMENTS = [
    *("statement", "method", "against", "metric", "expects"),
    *("difference", "low", "high", "low over seeds", "high over seeds", "seeds", "outcome"),
]
#: What the report says in 2.4, as (statement, arm, against, metric, expects).
SAID = (
    *(("SFT widens pass@k", arm, BASE, "pass@256", "above") for arm in SFT_ARMS),
    ("RL sharpens pass@1", "grpo_no_kl", BASE, "pass@1", "above"),
    ("RL does not raise pass@k", "grpo_no_kl", BASE, "pass@256", "not above"),
    *(("SFT lowers diversity", arm, BASE, "diversity", "below") for arm in SFT_ARMS),
    ("RL lowers diversity", "grpo_no_kl", BASE, "diversity", "below"),
    *(("RL lowers diversity by more", "grpo_no_kl", arm, "diversity", "below") for arm in SFT_ARMS),
    *(("SFT raises branching", arm, BASE, "branching", "above") for arm in SFT_ARMS),
    ("RL does not raise branching", "grpo_no_kl", BASE, "branching", "not above"),
)


def narrowed(profile: Profile) -> Profile:
    """The profile with the arms of this comparison alone, as many of them as it evaluates."""
    chosen = {key: profile.methods[key] for key in ARMS if key in profile.evaluated}
    evaluation = dataclasses.replace(profile.evaluation, methods=None)
    return dataclasses.replace(profile, methods=chosen, evaluation=evaluation)


def arms(profile: Profile) -> list[str]:
    """Keys of the arms that the profile evaluates, the base first."""
    return [key for key in ARMS if key == BASE or key in profile.evaluated]


def absent(profile: Profile) -> str:
    """A sentence that names the arms without results; "" where all are there."""
    lacking = [key for key in ARMS if key not in arms(profile)]
    if not lacking:
        return ""
    where = "published" if profile.published else f"in the profile {profile.name}"
    known = measured.declared(profile)
    names = "; ".join(known.label(key) if key in known.methods else key for key in lacking)
    return f"Not {where}: {names}. sage-companion grid countdown makes them."


def diversity(profile: Profile) -> pd.DataFrame:
    """How many valid completions a policy chooses among, of every problem: exp of their entropy.

    Exact, from the probabilities of all valid completions, normalised to those; 1 where one has
    everything. Columns method, seed, dataset, problem, diversity.
    """
    frames = []
    for method, seed, run, _ in runs.evaluations(narrowed(profile)):
        table = of_sets(table_of(profile, run, "support.csv"), profile, ood=False)
        groups = table.groupby(["dataset", "problem"], sort=False)["logp"]
        found = groups.apply(effective_number).rename("diversity").reset_index()
        frames.append(found.assign(method=method, seed=seed))
    return pd.concat(frames, ignore_index=True)


def effective_number(logps: Sequence[float] | pd.Series) -> float:
    """exp of the entropy of log-probabilities (nats, not normalised): from 1 to their number."""
    shifted = np.asarray(logps, dtype=np.float64)
    weights = np.exp(shifted - shifted.max())
    shares = weights / weights.sum()
    kept = shares[shares > 0]
    return float(np.exp(-(kept * np.log(kept)).sum()))


def measures(profile: Profile) -> dict[str, pd.DataFrame]:
    """By metric a table with the columns method, seed, dataset, problem and the metric."""
    chosen = narrowed(profile)
    exact = exact_tables.probabilities(chosen)
    values = exact_tables.pass_at_k(exact["valid"], (1, ROLLOUTS))
    exact = exact.assign(**{"pass@1": values[:, 0], "pass@256": values[:, 1]})
    return {
        "pass@1": exact,
        "pass@256": exact,
        "diversity": diversity(profile),
        "branching": measured.scores(chosen).dropna(subset=["branching"]),
    }


def table(profile: Profile, found: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Every metric of :func:`measures` by arm: mean over data sets, 95 % interval over seeds and
    problems.

    Columns method, metric, mean, low, high, seeds, problems.
    """
    rows = []
    for method in arms(profile):
        for name, frame in found.items():
            values, sets, seeds = by_seed(frame, method, [name])
            values = values[:, ~np.isnan(values).any(axis=(0, 2))]
            known = _known(frame, method, name, sets)
            mean, low, high = metrics.paired_difference(values, np.zeros_like(values), known)
            row = {"method": method, "metric": name, "mean": mean[0], "low": low[0]}
            row |= {"high": high[0], "seeds": len(seeds), "problems": values.shape[1]}
            rows.append(row)
    return pd.DataFrame(rows)


def _known(frame: pd.DataFrame, method: str, name: str, sets: list[str]) -> list[str]:
    """The data set of each problem that a method has a value of, for every seed."""
    values, _, _ = by_seed(frame, method, [name])
    there = ~np.isnan(values).any(axis=(0, 2))
    return [one for one, kept in zip(sets, there, strict=True) if kept]


def statements(
    profile: Profile, found: dict[str, pd.DataFrame], also: Sequence[Profile] = ()
) -> pd.DataFrame:
    """What the report says, comparison by comparison: columns :data:`STATEMENTS`.

    Differences are paired by seed and problem, with 95 % intervals over both; the outcome is that
    of :func:`verdict.outcome` at :data:`MARGINS`, where the interval over seeds alone says the
    same. Fewer than three seeds decide nothing. ``also``: profiles of other bases, whose seeds
    count with the others; with them columns :data:`arm_tables.BASES`, the difference in each.
    """
    rows: list[dict[str, Any]] = []
    bases = [(profile, found), *((one, measures(one)) for one in also)]
    for statement, method, against, name, expects in SAID:
        row: dict[str, Any] = dict(
            zip(STATEMENTS, (statement, method, against, name, expects), strict=False)
        )
        there = [frames for one, frames in bases if {method, against} <= set(arms(one))]
        if not there:
            rows.append({**row, "seeds": 0, "outcome": MISSING})
            continue
        by_base = [_apart(frames[name], method, against, name) for frames in there]
        if len(by_base) > 1:
            means = (float(_means(one).mean()) for one in by_base)
            row |= dict(zip(BASES, means, strict=True))
        apart = pd.concat(by_base, axis=1).dropna()
        values, sets = apart.to_numpy().T[..., None], list(apart.index.get_level_values("dataset"))
        difference = next(difference_rows(values, np.zeros_like(values), [name], sets))
        row |= {key: difference[key] for key in ("difference", "low", "high", "seeds")}
        judged = outcome(expects, row["low"], row["high"], MARGINS[name])
        low, high = front_tables.over_seeds([*_means(apart)])
        row |= {"low over seeds": low, "high over seeds": high}
        of_seeds = outcome(expects, low, high, MARGINS[name])
        tells = row["seeds"] >= FEWEST_SEEDS and of_seeds == judged
        rows.append({**row, "outcome": judged if tells else OPEN})
    return pd.DataFrame(rows, columns=[*STATEMENTS, *(BASES if also else ())])


def _apart(frame: pd.DataFrame, method: str, against: str, name: str) -> pd.DataFrame:
    """``method`` minus ``against``, a row for each data set and problem that all have, a column for
    each seed that both have."""
    parts = [by_seed(frame, key, [name]) for key in (method, against)]
    (ours, theirs), _ = common_seeds([(values, seeds) for values, _, seeds in parts])
    problems = pd.MultiIndex.from_frame(frame[["dataset", "problem"]].drop_duplicates())
    return pd.DataFrame((ours - theirs)[..., 0].T, index=problems).dropna()


def _means(apart: pd.DataFrame) -> np.ndarray:
    """The mean over data sets of each seed."""
    return apart.groupby(level="dataset").mean().mean().to_numpy()


def unsolvable(profile: Profile, found: dict[str, pd.DataFrame]) -> dict[str, set[str]]:
    """The unsolvable problems of each arm: exact pass@256, the mean over seeds, below THRESHOLD.

    Nothing is sampled, so no set is small by luck.
    """
    sets = {}
    for method in arms(profile):
        frame = found["pass@256"]
        means = frame[frame["method"] == method].groupby(["dataset", "problem"])["pass@256"].mean()
        below = means[means < THRESHOLD].index
        sets[method] = {f"{dataset}/{problem}" for dataset, problem in below}
    return sets


def shifts(
    profile: Profile, sets: dict[str, set[str]], found: dict[str, pd.DataFrame]
) -> pd.DataFrame:
    """Against the base: how many problems an arm lost, and how many it won.

    Columns method, unsolvable, lost (solvable for the base), won (unsolvable for the base), each
    also "clearly": the 95 % t interval over seeds of the arm's pass@256 leaves out THRESHOLD; then
    seeds, and "neither within": the report finds no set within another one, which agrees where
    problems are lost clearly and won clearly, and disagrees where none is lost or none won at all.
    Fewer than three seeds decide nothing. ``found`` as :func:`measures` gives it.
    """
    rows = []
    for method, of_arm in sets.items():
        if method == BASE:
            continue
        lost, won = of_arm - sets[BASE], sets[BASE] - of_arm
        below, above, seeds = _clearly(found["pass@256"], method)
        clearly = len(lost & below), len(won & above)
        said = AGREES if all(clearly) else OPEN if lost and won else DISAGREES
        rows.append(
            {
                "method": method,
                "unsolvable": len(of_arm),
                "lost": len(lost),
                "won": len(won),
                "lost clearly": clearly[0],
                "won clearly": clearly[1],
                "seeds": seeds,
                "neither within": said if seeds >= FEWEST_SEEDS else OPEN,
            }
        )
    columns = ["method", "unsolvable", "lost", "won", "lost clearly", "won clearly"]
    return pd.DataFrame(rows, columns=[*columns, "seeds", "neither within"])


def _clearly(frame: pd.DataFrame, method: str) -> tuple[set[str], set[str], int]:
    """The problems whose pass@256 lies below, and above, THRESHOLD by the t interval over seeds of
    a method; how many seeds these are."""
    of_method = frame[frame["method"] == method]
    wide = of_method.pivot_table(
        index=["dataset", "problem"], columns="seed", values="pass@256", sort=False
    )
    names = [f"{dataset}/{problem}" for dataset, problem in wide.index]
    seeds = wide.shape[1]
    if seeds < FEWEST_SEEDS:
        return set(), set(), seeds
    half = t.ppf(0.975, seeds - 1) * wide.std(axis=1, ddof=1) / np.sqrt(seeds)
    means = wide.mean(axis=1)
    below, above = means + half < THRESHOLD, means - half > THRESHOLD
    return (
        {name for name, one in zip(names, below, strict=True) if one},
        {name for name, one in zip(names, above, strict=True) if one},
        seeds,
    )


def takeaways(
    profile: Profile, means: pd.DataFrame, moved: pd.DataFrame, said: pd.DataFrame
) -> list[str]:
    """What the tables say, in sentences filled in from them."""
    wide = means.pivot(index="method", columns="metric", values="mean").loc[arms(profile)]
    lines = []
    for name in ("pass@1", "pass@256", "diversity", "branching"):
        order = wide[name].sort_values(ascending=False)
        listed = "; ".join(f"{profile.label(key)} {value:.3f}" for key, value in order.items())
        lines.append(f"{name}, from most to least: {listed}")
    for row in moved.to_dict("records"):
        label = profile.label(row["method"])
        lost = count(row["lost"], "problem")
        clearly = f"{row['lost clearly']} and {row['won clearly']} of them clearly"
        lines.append(f"{label} lost {lost} of the base's and won {row['won']}, {clearly}")
    known = measured.labelled(profile, said)
    twice = said.groupby("statement")["method"].transform("size") > 1
    both = known["statement"] + " (" + known["method"] + " against " + known["against"] + ")"
    for result, group in (
        known["statement"].where(~twice, both).groupby(said["outcome"], sort=False)
    ):
        lines.append(f"{result}: {'; '.join(group)}")
    return lines
