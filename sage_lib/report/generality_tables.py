"""Does the verdict hold where something else is changed as well? One setting, one pair of arms.

The verdict (:mod:`verdict`) rests on one base, one anchor and one size. Each :class:`Setting`
changes one of these and asks the same two questions there: what does the strong guide add to GRPO,
and what does leaving KL out take from it? Settings of other bases and sizes are profiles of their
own, so this is the one table that reads several.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sage_lib.experiment.profile import BASE, Profile, profile_names
from sage_lib.report import arm_tables, bases, exact_tables, front_tables, verdict
from sage_lib.report.claims import Claim, Comparison
from sage_lib.report.style import count
from sage_lib.report.verdict import MISSING


@dataclass(frozen=True)
class Setting:
    """Arms that are the same but for the guide, or for KL, where something else was changed."""

    name: str
    source: str  # what of the paper has it
    guided: str
    plain: str
    no_kl: str | None = None  # the same without KL; None where it is asked elsewhere
    suffix: str = ""  # of the name of the profile that has it: "_larger" of countdown_larger


SETTINGS = (
    Setting("beta 1 (strong Branch)", "Table 1", "branch_strong", "grpo", "grpo_no_kl"),
    Setting("beta 1 (Branch)", "Table 1", "grpo_branch", "grpo"),
    Setting(
        "a second base (strong Branch)",
        "other first weights",
        "branch_strong",
        "grpo",
        "grpo_no_kl",
        bases.SECOND,
    ),
    Setting(
        "beta 0.05 (Branch)",
        "Table 1; the authors' code",
        "branch_paper",
        "grpo_front_beta0.05",
        "grpo_no_kl",
    ),
    Setting(
        "an earlier reference",
        "the authors' code: its reference is the model before SFT",
        "early_branch",
        "early",
        "grpo_no_kl",
    ),
    Setting(
        "k3, corrected",
        "TRL's default estimator; P2 of notebook 13 expects no change",
        "branch_corrected",
        "corrected_beta1.0",
    ),
    Setting("sequence-level anchor, beta 0.2", "eq. 4", "branch_sequence", "sequence_beta0.2"),
    Setting("all weights trained", "Figure 6", "full_branch", "full_grpo", "full_no_kl"),
    Setting(
        "a larger model",
        "another size",
        "branch_strong",
        "grpo",
        "grpo_no_kl",
        "_larger",
    ),
    Setting(
        "a larger model, all weights trained",
        "Figure 6",
        "full_branch",
        "full_grpo",
        "full_no_kl",
        "_larger",
    ),
    Setting(
        "the rare way rarer, 0.3 %",
        "Theorem 4.2",
        "branch_strong",
        "grpo",
        "grpo_no_kl",
        "_rarer",
    ),
    Setting(
        "the rare way more frequent, 30 %",
        "a base of higher entropy",
        "branch_strong",
        "grpo",
        "grpo_no_kl",
        "_broader",
    ),
)
GUIDE, NO_KL = "guide", "no KL"
METRICS = ("pass@1", "pass@256", "rare mass")
INTERVAL = ("low", "high", "detectable")
TABLE = [
    *("setting", "profile", "asked", "method", "against", "metric"),
    *("difference", *INTERVAL, "seeds", "interval over", "problems"),
]
LEVELS = ["setting", "profile", "arm", "method", "seeds", "pass@1", "pass@256", "rare"]
OUTCOMES = [
    *("setting", "source", "guide raises both", "pass@256 falls without KL"),
    *("seeds, guide", "seeds, no KL"),
]


def read_beside(name: str) -> str | None:
    """The profile whose notebook 20 reads this one: that of the verdict, from which it differs in
    the setting of its suffix; None for a profile that speaks for itself."""
    mains = [name.removesuffix(one.suffix) for one in SETTINGS if one.suffix]
    return next((main for main in mains if main != name and main in profile_names()), None)


def profiles(main: Profile) -> dict[str, Profile]:
    """By suffix the profile of the verdict and those beside it (:data:`SETTINGS`) that have results
    of the same kind, its own or published."""
    suffixes = dict.fromkeys(one.suffix for one in SETTINGS)
    found = {suffix: bases.beside(main, suffix) for suffix in suffixes}
    return {suffix: profile for suffix, profile in found.items() if profile is not None}


def _pairs(one: Setting) -> Iterator[tuple[str, str]]:
    """(what is asked, the arm that has or lacks it), each to be held against the plain arm."""
    yield GUIDE, one.guided
    if one.no_kl is not None:
        yield NO_KL, one.no_kl


def table(found: dict[str, Profile]) -> pd.DataFrame:
    """Each setting's arms minus its plain one, paired over seeds: columns :data:`TABLE`.

    ``found`` as :func:`profiles` gives it. Settings without a finished pair are left out, intervals
    of two seeds, too.
    """
    frames = []
    for one in SETTINGS:
        profile = found.get(one.suffix)
        there = set() if profile is None else exact_tables.evaluated(profile)
        for asked, arm in _pairs(one):
            if profile is None or not {arm, one.plain} <= there:
                continue
            problems = int(front_tables.points(profile)["problems"].iloc[0])
            wanted = tuple(Comparison(arm, one.plain, name, "equal") for name in METRICS)
            rows = arm_tables.comparisons(profile, [Claim("", "", "", wanted, "")])
            rows = rows[rows["seeds"] > 0].assign(
                setting=one.name, profile=profile.name, asked=asked, problems=problems
            )
            rows.loc[rows["interval over"].str.startswith("none"), list(INTERVAL)] = np.nan
            frames.append(rows)
    if not frames:
        return pd.DataFrame(columns=TABLE)
    return pd.concat(frames, ignore_index=True)[TABLE]


def levels(found: dict[str, Profile]) -> pd.DataFrame:
    """Exact pass@1, pass@256 and the rare way's mass of each setting's base and arms: columns
    :data:`LEVELS`, means over seeds and data sets. Settings whose plain arm was not run are
    left out."""
    rows = []
    points = {suffix: front_tables.points(one).set_index("method") for suffix, one in found.items()}
    for one in SETTINGS:
        arms = {"base": BASE, "GRPO": one.plain}
        arms |= {"no KL" if asked == NO_KL else asked: arm for asked, arm in _pairs(one)}
        there = points[one.suffix].index if one.suffix in points else ()
        for name, key in arms.items():
            if key in there and one.plain in there:
                at, profile = points[one.suffix].loc[key], found[one.suffix].name
                row = {"setting": one.name, "profile": profile, "arm": name, "method": key}
                rows.append(row | {column: at[column] for column in LEVELS[4:]})
    return pd.DataFrame(rows, columns=LEVELS)


def outcomes(found: dict[str, Profile]) -> pd.DataFrame:
    """Per setting whether the guide raises pass@1 and pass@256, and whether pass@256 falls without
    KL, as :func:`verdict.claims` judges: columns :data:`OUTCOMES`."""
    rows = []
    for one in SETTINGS:
        row: dict[str, object] = {"setting": one.name, "source": one.source}
        both = tuple(
            Comparison(one.guided, one.plain, name, "above") for name in ("pass@1", "pass@256")
        )
        asked = {"guide raises both": both}
        if one.no_kl is not None:
            falls = Comparison(one.no_kl, one.plain, "pass@256", "below")
            asked["pass@256 falls without KL"] = (falls,)
        profile = found.get(one.suffix)
        for (column, wanted), seeds in zip(asked.items(), OUTCOMES[4:], strict=False):
            claim = Claim(column, one.source, column, wanted, "more seeds")
            if profile is None:
                row[column] = MISSING
                continue
            row[column] = verdict.claims(profile, [claim])["outcome"].iloc[0]
            row[seeds] = int(verdict.comparisons(profile, [claim])["seeds"].min())
        rows.append(row)
    return pd.DataFrame(rows, columns=OUTCOMES)


def shared(compared: pd.DataFrame) -> list[str]:
    """Which settings of :func:`table` rest on the very same runs, in one arm or in the plain one:
    sentences. They are no repetitions of each other."""
    lines = []
    for arm, words in (("method", "the same runs"), ("against", "the same GRPO")):
        for asked, rows in compared.groupby("asked", sort=False):
            of_runs = rows.groupby(["profile", arm], sort=False)["setting"].unique()
            lines += [f"{asked}, {words}: {'; '.join(one)}" for one in of_runs if len(one) > 1]
    return lines


def takeaways(judged: pd.DataFrame, compared: pd.DataFrame) -> list[str]:
    """What :func:`outcomes` says, in sentences, and which settings share runs (:func:`table`)."""
    lines = []
    for column in OUTCOMES[2:4]:
        of_column = judged.dropna(subset=column)
        for outcome in verdict.OUTCOMES:
            names = of_column.loc[of_column[column] == outcome, "setting"]
            if len(names):
                lines.append(
                    f"{column}: {outcome} in {count(len(names), 'setting')} ({'; '.join(names)})"
                )
    return lines + shared(compared)
