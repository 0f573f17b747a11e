"""Tables made from step logs, and from what the guide adds to the expected gradients."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import Profile
from sage_lib.report import measured
from sage_lib.report.front_tables import beta_of

#: What is done, and logged, for every batch that is drawn; and for every step.
_DRAWS = ["time/generation", "time/scoring", "time/reward"]
TIMES = [*_DRAWS, "time/loss", "step_time"]
THIRDS = ("early", "mid", "late")
#: What may set a method apart (fields of experiment.profile.Method).
APART = ("family", "rl", "guide", "anchor", "advantage", "reward", "rft", "seeds")


def methods(profile: Profile) -> pd.DataFrame:
    """What sets each method apart from GRPO with the profile's settings, in words: columns method,
    family, and those of :data:`APART` that any method has. Without a KL term there is no anchor."""
    rows = []
    for key, method in profile.methods.items():
        given = {name: getattr(method, name) for name in APART}
        if not beta_of(profile, key) > 0:
            given["anchor"] = None
        rows.append({"method": key, **{name: _words(value) for name, value in given.items()}})
    return pd.DataFrame(rows, columns=["method", *APART]).replace("", None)


def _words(value: Any) -> str:
    """A setting as it is read: {"name": "branch", "low": 0.6} as "branch, low 0.6"."""
    if isinstance(value, Mapping):
        parts = [_words(value["name"])] if "name" in value else []
        parts += [f"{key} {_words(one)}" for key, one in value.items() if key != "name"]
        return ", ".join(parts)
    if isinstance(value, tuple | list):
        return ", ".join(map(_words, value))
    return "" if value is None else str(value)


def late(log: pd.DataFrame, share: float = 0.2) -> pd.DataFrame:
    """The rows of a step log (measured.training) of the last ``share`` of each run's own steps."""
    lengths = log.groupby(["method", "seed"])["step"].transform("max")
    return log[log["step"] > (1 - share) * lengths]


def time_split(profile: Profile) -> pd.DataFrame:
    """Median seconds of an RL step and of its parts by method, after the first step.

    Columns method, runs and :data:`TIMES`: generation, scoring, reward, loss, the whole step; the
    median over a method's runs of their medians. Several steps share a draw's seconds where they
    learn from the same one, and dynamic sampling's are those of all its draws.
    """
    log = measured.training(profile)
    frame = log.reindex(columns=["method", "seed", "step", "sampling/rounds", *TIMES])
    frame = frame[frame["step"] > 1].dropna(subset="step_time")  # RFT has no such steps
    if frame.empty:
        return pd.DataFrame(columns=["method", "runs", *TIMES])
    draws = frame["sampling/rounds"].fillna(1) / frame["method"].map(profile.updates_of)
    frame[_DRAWS] = frame[_DRAWS].mul(draws, axis=0)
    by_run = frame.groupby(["method", "seed"], sort=False)[TIMES].median()
    by_method = by_run.groupby("method", sort=False)
    table = by_method[TIMES].median()
    table.insert(0, "runs", by_method.size())
    return table.reset_index()


def time_takeaway(times: pd.DataFrame, method: str) -> str:
    """What a step of ``method`` goes into, of :func:`time_split`, in a sentence."""
    if method not in set(times["method"]):
        return f"No step of {method} was timed."
    row = times.set_index("method").loc[method]
    rest = row["step_time"] - row[_DRAWS].sum()
    parts = {
        "sampling": row["time/generation"],
        "scoring": row["time/scoring"],
        "loss, gradient and update": rest,
    }
    shares = ", ".join(f"{name} {part / row['step_time']:.0%}" for name, part in parts.items())
    return f"{shares} of a step of {row['step_time']:.2f} s"


def starts(profile: Profile, records: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Where runs started, a row a seed: columns seed, runs, references, with a KL, kl_ref.

    ``records``: of each run by its name. Of the runs that are not given another reference than the
    policy they start from: how many, how many different references they have, how many log a KL to
    it at the first step, and the largest of these (nats; NaN where none does, or logs were
    thinned).
    """
    own = {key for key, method in profile.methods.items() if method.reference is None}
    frame = pd.DataFrame(
        [(r["settings"]["method"], r["seed"], r["reference"]) for r in records.values()],
        columns=["method", "seed", "reference"],
    )
    frame = frame[frame["method"].isin(own)]
    log = measured.training(profile).reindex(columns=["method", "seed", "step", "kl_ref"])
    first = log[(log["step"] == 1) & log["method"].isin(own)]
    found = frame.groupby("seed")["reference"].agg(runs="size", references="nunique")
    kl = first.groupby("seed")["kl_ref"].agg(**{"with a KL": "count", "kl_ref": "max"})
    return found.join(kl).reset_index()


def table5(profile: Profile) -> pd.DataFrame:
    """Table 5, measured: mean gradient norm of the first, middle and last third of the steps.

    Columns method, early, mid, late (means over seeds), each followed by its standard deviation
    over seeds (early_std, ...; NaN for one), seeds. The norm is that before clipping.
    """
    rows = []
    for method, group in measured.training(profile).groupby("method", sort=False):
        thirds = []
        for _, run in group.groupby("seed"):
            norms = run.sort_values("step")["grad_norm"].to_numpy()
            thirds.append([part.mean() for part in np.array_split(norms, 3)])
        row = {"method": method}
        for name, over_seeds in zip(THIRDS, np.transpose(thirds), strict=True):
            row[name], row[f"{name}_std"] = metrics.mean_std(over_seeds)
        rows.append({**row, "seeds": len(thirds)})
    columns = [column for name in THIRDS for column in (name, f"{name}_std")]
    return pd.DataFrame(rows, columns=["method", *columns, "seeds"])


def effects(profile: Profile) -> pd.DataFrame:
    """What the branch guide adds to each anchor's expected gradient.

    Columns anchor, pull (size of the KL term's gradient), added (by the guide), share, along (the
    change of the pull along itself), each also with its standard error over prompts (pull_se, ...).
    """
    return pd.DataFrame(measured.effects(profile)["anchors"])
