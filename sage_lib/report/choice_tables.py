"""How the learning rates were chosen: on GRPO alone, before the methods they are used for.

A family of :data:`front_tables.TRIED` holds GRPO at other learning rates; the method that has the
same settings at the rate that was chosen stands elsewhere in the profile.
"""

import dataclasses
from typing import Any

import pandas as pd

from sage_lib.experiment.profile import Profile
from sage_lib.report import arm_tables, front_tables, verdict
from sage_lib.report.measured import declared
from sage_lib.report.style import count

RATE = "learning_rate"
TABLE = [
    *("family", "learning rate", "chosen", "method", "seeds", "interval over"),
    *("reward", "pass@1", "pass@1 low", "pass@1 high"),
    *("pass@256", "pass@256 low", "pass@256 high", "excess"),
]


def candidates(profile: Profile, family: str) -> dict[float, str]:
    """The methods that a learning rate was chosen among, by rising rate: those of a family of
    :data:`front_tables.TRIED`, and the one that has the same settings outside such families."""
    tried = [key for key, one in profile.methods.items() if one.family == family]
    wanted = [front_tables.without(profile, key, RATE) for key in tried]
    chosen = [
        key
        for key, one in profile.methods.items()
        if one.family not in front_tables.TRIED
        and front_tables.without(profile, key, RATE) in wanted
    ]
    return dict(sorted((_rate(profile, key), key) for key in (*tried, *chosen)))


def _rate(profile: Profile, key: str) -> float:
    return float({**profile.rl, **profile.methods[key].rl}[RATE])


def table(profile: Profile, family: str) -> pd.DataFrame:
    """The candidates of a family that were run, at the seeds that all of them have: columns
    :data:`TABLE`.

    ``reward`` is the mean over the last fifth of the steps, what a user without exact pass@k would
    choose by; pass@k is exact, of valid work, with 95 % intervals over what "interval over" says.
    ``excess``: of a rate that was not taken, over the front (:func:`front_tables.outside`).
    """
    found = candidates(declared(profile), family)
    there = {rate: key for rate, key in found.items() if key in profile.evaluated}
    if not there:
        return pd.DataFrame(columns=TABLE)
    kept = {key: profile.methods[key] for key in there.values()}
    evaluation = dataclasses.replace(profile.evaluation, methods=None)
    alone = dataclasses.replace(profile, methods=kept, evaluation=evaluation)
    alone = arm_tables.at_common_seeds(alone, list(kept))
    at, reward = front_tables.points(alone).set_index("method"), verdict.logged(alone, "reward")
    rows = []
    for rate, key in there.items():
        row: dict[str, Any] = {"family": family, "learning rate": rate, "method": key}
        row |= {"chosen": "" if profile.methods[key].family in front_tables.TRIED else "chosen"}
        row |= {name: at.loc[key, name] for name in TABLE if name in at}
        row |= {"reward": reward[key].mean(), "interval over": arm_tables.covers(row["seeds"])}
        if profile.methods[key].family in front_tables.TRIED:
            row["excess"] = front_tables.excess_of(profile, key)
        rows.append(row)
    return pd.DataFrame(rows, columns=TABLE)


def takeaway(table: pd.DataFrame) -> str:
    """Which rate ends with the largest reward and exact pass@1, and which was taken; in words."""
    if len(table) < 2:
        return "The learning rates that were tried are not run."
    taken = table.loc[table["chosen"] != "", RATE.replace("_", " ")]
    best = {
        name: f"{table.loc[table[name].idxmax(), 'learning rate']:g}"
        for name in ("reward", "pass@1", "pass@256")
    }
    named = ", ".join(f"{name} at {rate}" for name, rate in best.items())
    which = f"{taken.iloc[0]:g} was taken" if len(taken) else "none of them was taken"
    return (
        f"Of {count(len(table), 'learning rate')} with {count(int(table['seeds'].min()), 'seed')} "
        f"each, the largest: {named}; {which}."
    )
