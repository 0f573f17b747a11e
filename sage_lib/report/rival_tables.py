"""What both papers compare with: each rival's equation and source, and where it stands.

A rival is asked twice. Against its twin (:mod:`arm_tables`): does it raise what its source says?
And against GRPO's front over beta: does it reach what no beta reaches? SAGE says that it is
orthogonal to such methods, so those that were trained with a guide as well stand beside themselves
without it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sage_lib.experiment import records, runs
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.report import arm_tables, exact_tables
from sage_lib.report.claims import Claim, Comparison
from sage_lib.report.front_tables import FEWEST_SEEDS, beta_of
from sage_lib.report.measured import declared, named
from sage_lib.report.style import count
from sage_lib.report.verdict import MISSING

FAMILY = "rivals"
#: How many of the best are to be trained with a guide as well.
BEST = 2
REPORT = "exploration report, Table 2"
BOTH_PASS = ("pass@1", "pass@256")
#: Where a run ended, beside its base, at both of :data:`BOTH_PASS`.
BELOW, ABOVE = "below", "above"


@dataclass(frozen=True)
class Rival:
    """A method that both papers compare with, whatever its beta."""

    changes: str  # what it changes of GRPO's loss
    source: str
    raises: str = ""  # the metric that is to rise over its twin; "" where nothing is said
    said_in: str = REPORT


#: By the key of the method, without the beta that a variant is trained at.
RIVALS = {
    "grpo_updates": Rival(
        "nothing; 16 of the 64 completions of a batch to an update, r_t = pi/pi_old",
        "a control of this companion",
    ),
    "clip_higher": Rival(
        "clip(r_t, 1 - 0.2, 1 + 0.28)", "Yu et al. 2025, DAPO, arXiv 2503.14476", "entropy"
    ),
    "clip_cov": Rival(
        "no policy gradient at tokens drawn from those with cov_t = (log pi - mean)(A - mean) in "
        "[1, 5]",
        "Cui et al. 2025, arXiv 2505.22617",
        "entropy",
    ),
    "kl_cov": Rival(
        "+ |log pi - log pi_old| at the tokens of the largest cov_t",
        "Cui et al. 2025, arXiv 2505.22617",
        "entropy",
    ),
    "entropy_bonus": Rival(
        "- 0.01 H(pi) in the loss", "SAGE, Appendix A.2", "entropy", "SAGE, Appendix A.2"
    ),
    "top_entropy_tokens": Rival(
        "policy gradient at the fifth of the tokens with the largest H_t alone",
        "Wang et al. 2025, arXiv 2506.01939",
        "entropy",
    ),
    "reference_reset": Rival(
        "pi_ref := pi every 100 steps", "Liu et al. 2025, ProRL, arXiv 2505.24864", "pass@256"
    ),
    "entropy_advantage": Rival(
        "A_t + min(0.4 H_t, |A_t|/2)", "Cheng et al. 2025, arXiv 2506.14758", "pass@256"
    ),
    "negative_samples": Rival(
        "A = 0.1 for a correct completion, -1 for a wrong one",
        "Zhu et al. 2025, W-REINFORCE, arXiv 2506.01347",
        "pass@256",
    ),
    "negative_only": Rival(
        "A = 0 for a correct completion, -1 for a wrong one",
        "Zhu et al. 2025, NSR, arXiv 2506.01347",
        "pass@256",
    ),
    "pass_at_k": Rival(
        "A = mean advantage of the groups of 4 that hold the completion, the reward of a group "
        "being its best",
        "Chen et al. 2025, arXiv 2508.10751",
        "pass@256",
    ),
}
TABLE = ["method", "equation", "source", *arm_tables.TABLE[1:]]


def rival(method: str) -> Rival | None:
    """The rival behind a method's key: without its beta, and without its guide; None for none."""
    return RIVALS.get(re.sub(r"_(branch|beta[\d.]+)$", "", method))


def table(profile: Profile) -> pd.DataFrame:
    """Every rival, run or not: columns :data:`TABLE`, those of :func:`arm_tables.table` with what
    it changes and who says so."""
    found = arm_tables.table(profile, FAMILY)
    known = [rival(key) for key in found["method"]]
    found["equation"] = [one.changes if one else "" for one in known]
    found["source"] = [one.source if one else "" for one in known]
    return found[TABLE]


def origins(profile: Profile) -> pd.DataFrame:
    """What each rival changes, who says so, and whose its values are: columns method, equation,
    source, setting (but for beta), values. A row for each key of the profile, whatever the betas it
    is trained at; values are what stands beside the key in the profile's file."""
    whole = declared(profile)
    rows: dict[str, tuple[str, ...]] = {}
    for key in arm_tables.names(profile, FAMILY):
        own, known = re.sub(r"_beta[\d.]+$", "", key), rival(key)
        if known is None or whole.methods[key].guide is not None:
            continue
        said = whole.sources.get(f"methods.{own}", "")
        setting = re.sub(r"^beta [\d.]+(; )?", "", arm_tables.setting(whole, key))
        rows.setdefault(own, (key, known.changes, known.source, setting, said))
    columns = ["method", "equation", "source", "setting", "values"]
    return pd.DataFrame(rows.values(), columns=columns)


def claims(profile: Profile) -> list[Claim]:
    """What each rival's source says that it raises, over its twin; a claim for each of its
    settings."""
    whole = declared(profile)
    found = []
    for key in arm_tables.names(profile, FAMILY):
        known, against = rival(key), arm_tables.twin(whole, key)
        if known is None or not known.raises or against is None or whole.methods[key].guide:
            continue
        statement = f"raises {known.raises} over {whole.label(against)}"
        asked = (Comparison(key, against, known.raises, "above"),)
        found.append(Claim(whole.label(key), known.said_in, statement, asked, "more seeds"))
    return found


def guided(profile: Profile) -> list[tuple[str, str]]:
    """(with a guide, without) of the rivals that the profile trains both ways."""
    pairs = [
        (key, arm_tables.unguided(profile, key))
        for key, method in profile.methods.items()
        if method.family == FAMILY
    ]
    return [(key, without) for key, without in pairs if without is not None]


def orthogonality(profile: Profile) -> list[Claim]:
    """SAGE's Section 2: a guide adds to such methods; both of exact pass@1 and pass@256 rise."""
    whole = declared(profile)
    return [
        Claim(
            whole.label(key),
            "SAGE, Section 2",
            f"raises both over {whole.label(without)}",
            tuple(Comparison(key, without, metric, "above") for metric in BOTH_PASS),
            "more seeds",
        )
        for key, without in guided(whole)
    ]


def best(profile: Profile, outside: pd.DataFrame, number: int = BEST) -> list[str]:
    """The rivals to be trained with a guide: those of the largest excess over GRPO's front.

    Among rivals without a guide at the profile's own beta, since without a KL term no guide acts,
    and with :data:`front_tables.FEWEST_SEEDS` seeds; fewer where there are not so many. ``outside``
    as :func:`front_tables.outside` gives it.
    """
    beta = beta_of(profile, profile.reference)
    able = [
        key
        for key in arm_tables.arms(profile, FAMILY)
        if profile.methods[key].guide is None and beta_of(profile, key) == beta
    ]
    chosen = outside[outside["method"].isin(able) & (outside["seeds"] >= FEWEST_SEEDS)]
    return list(chosen.sort_values("excess", ascending=False, kind="stable")["method"][:number])


def combined(profile: Profile, outside: pd.DataFrame) -> list[str]:
    """Whether the best rivals are those that were trained with a guide, in sentences."""
    whole = declared(profile)
    with_guide = {without: key for key, without in guided(whole)}
    lines = [f"with a guide in the profile: {named(whole, with_guide.values())}"]
    found = best(profile, outside)
    if len(found) < BEST:
        lines.append(
            f"the {BEST} best by excess over the front: to be chosen when {FEWEST_SEEDS} seeds of "
            f"{BEST} rivals at beta {beta_of(whole, whole.reference):g} are there"
        )
        return lines
    for key in found:
        how = with_guide.get(key)
        lines.append(
            f"among the {BEST} best by excess over the front: {whole.label(key)}; "
            + (
                f"with a guide it is {whole.label(how)}"
                if how
                else "with a guide it is not in the profile yet"
            )
        )
    return lines


def fallen(profile: Profile, also: Sequence[Profile] = ()) -> pd.DataFrame:
    """The bases, and seed by seed the rivals of which a run fell below the base that it started
    from at each of :data:`BOTH_PASS`, with their twins, GRPO with their beta and updates.

    Columns base (the first, or that of ``also``, profiles of other bases), method, run, pass@1,
    pass@256, ended (:data:`BELOW` or :data:`ABOVE` its base at both, "" where neither), collapsed
    (what its record says of an end before the last step, "" of others).
    """
    parts = []
    for which, one in zip(arm_tables.BASES, (profile, *also), strict=False):
        table = exact_tables.exact(one)
        table = table[table["dataset"] == "Avg"].assign(base=which)
        values = table[list(BOTH_PASS)]
        base = values[table["method"] == BASE].iloc[0]
        below, above = (values < base).all(axis=1), (values > base).all(axis=1)
        table["ended"] = np.select([below, above], [BELOW, ABOVE], "")
        records_of = {run.name: run.record for _, _, run in runs.rl_runs(one)}
        table["collapsed"] = [
            records.collapse(records_of[run]) if run in records_of else "" for run in table["run"]
        ]
        parts.append(table)
    found = pd.concat(parts, ignore_index=True)
    order = [BASE, *declared(profile).methods]
    rank = {"base": arm_tables.BASES.index, "method": order.index}
    found = found.sort_values([*rank], key=lambda one: one.map(rank[one.name]), kind="stable")
    below = set(found.loc[found["ended"] == BELOW, "method"])
    fell = below & set(arm_tables.arms(profile, FAMILY))
    shown = {BASE, *fell, *(arm_tables.twin(profile, key) for key in fell)}
    columns = ["base", "method", "run", *BOTH_PASS, "ended", "collapsed"]
    return found.loc[found["method"].isin(shown), columns].reset_index(drop=True)


def fallen_takeaway(profile: Profile, found: pd.DataFrame) -> str:
    """How many runs of whom :func:`fallen` lists as below their base, and how many above it."""
    lines = []
    for method, ended in found[found["method"] != BASE].groupby("method", sort=False)["ended"]:
        below, above = (ended == BELOW).sum(), (ended == ABOVE).sum()
        lines.append(
            f"{profile.label(method)}: of {count(len(ended), 'run')} {below} below and {above} "
            f"above their base at {' and '.join(BOTH_PASS)}"
        )
    return "\n".join(lines) or "no rival fell below the base"


def takeaways(
    profile: Profile, outside: pd.DataFrame, said: pd.DataFrame, guide: pd.DataFrame
) -> list[str]:
    """What the tables say, in sentences that are filled in from them.

    ``outside`` as :func:`front_tables.outside` gives it, ``said`` and ``guide`` as
    :func:`verdict.claims` of :func:`claims` and of :func:`orthogonality`.
    """
    lines = [line for line in [arm_tables.missing(profile, FAMILY)] if line]
    there = arm_tables.arms(profile, FAMILY)
    told = outside[outside["method"].isin(there) & (outside["seeds"] >= FEWEST_SEEDS)]
    for verdict, group in told.groupby("verdict", sort=False):
        lines.append(
            f"against GRPO's front over beta, {verdict}: {named(profile, group['method'])}"
        )
    if few := arm_tables.few_seeds(profile, there):
        lines.append(few)
    for words, table in (("what its source says", said), ("orthogonal to SAGE", guide)):
        for result, group in table.groupby("outcome", sort=False):
            which = "" if result == MISSING else f": {'; '.join(group['claim'])}"
            lines.append(f"{words}, {result}, {count(len(group), 'method')}{which}")
    return lines
