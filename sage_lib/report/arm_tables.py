"""Arms of one family beside GRPO: each against its twin, which has all but what the arm adds.

An arm is trained at some beta and with some number of updates a batch; a difference to GRPO at
other ones would tell of those. So each arm has its own twin, and the front over beta is asked
besides (:mod:`front_tables`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sage_lib.experiment.profile import BASE, Method, Profile
from sage_lib.report import exact_tables, front_tables, verdict
from sage_lib.report.claims import Claim, Comparison
from sage_lib.report.front_tables import FEWEST_SEEDS
from sage_lib.report.measured import declared, named
from sage_lib.report.style import count

#: Settings of RL that are what an arm adds to GRPO: its twin has the profile's.
ADDED = ("epsilon_high", "entropy_coef", "top_entropy_quantile")
#: What an arm is compared in: columns of :func:`table` and metrics of a comparison.
METRICS = ("pass@1", "pass@256", "entropy", "length")
#: Columns of differences by base, where there is a second one.
BASES = ("first base", "second base")
TABLE = [
    *("method", "setting", "against", "seeds", "interval over"),
    *("pass@1", "pass@1 low", "pass@1 high", "pass@256", "pass@256 low", "pass@256 high"),
    *("entropy", "length"),
]


def names(profile: Profile, family: str) -> list[str]:
    """Keys of all methods of a family, run or not."""
    return [key for key, one in declared(profile).methods.items() if one.family == family]


def arms(profile: Profile, family: str) -> list[str]:
    """Keys of the methods of a family that are evaluated."""
    return [key for key in profile.evaluated if profile.methods[key].family == family]


def missing(profile: Profile, family: str) -> str:
    """A sentence that names what of a family was not run; "" where nothing is missing."""
    whole, there = declared(profile), arms(profile, family)
    every = names(profile, family)
    if not every:
        return f"The profile {profile.name} has no methods of the family {family}."
    lacking = [key for key in every if key not in there]
    if not lacking:
        return ""
    where = "published" if profile.published else "evaluated"
    rest = f" Not yet: {named(whole, lacking)}." if there else ""
    return (
        f"{len(there)} of the {count(len(every), 'method')} of the family {family} are {where}: "
        f"sage-companion grid countdown --only {family} makes the others.{rest}"
    )


def narrowed(profile: Profile, family: str) -> Profile:
    """The profile with GRPO at every beta, the arms of a family and their twins alone."""
    kept = {*front_tables.front_methods(profile), *arms(profile, family)}
    kept |= {one for key in list(kept) if (one := twin(profile, key)) is not None}
    chosen = {key: profile.methods[key] for key in profile.evaluated if key in kept}
    evaluation = dataclasses.replace(profile.evaluation, methods=None)
    return dataclasses.replace(profile, methods=chosen, evaluation=evaluation)


def at_common_seeds(profile: Profile, methods: Sequence[str]) -> Profile:
    """The profile with the seeds that all of ``methods`` have, so that curves of the same prompts
    are drawn beside each other; as it is where there is none."""
    common = set.intersection(*(set(profile.seeds_of(key)) for key in methods))
    if not common:
        return profile
    kept = {
        key: dataclasses.replace(profile.methods[key], seeds=tuple(sorted(common)))
        for key in methods
    }
    seeds = tuple(seed for seed in profile.seeds if seed in common) or tuple(sorted(common))
    return dataclasses.replace(profile, methods=kept, seeds=seeds)


# --- twins ----------------------------------------------------------------------------------------


def twin(profile: Profile, method: str) -> str | None:
    """The key of GRPO with a method's beta and updates, and nothing added; None where the method is
    that itself, or the profile has no such method."""
    own = {key: profile.rl[key] for key in ADDED if key in profile.rl}
    rl = {k: v for k, v in profile.methods[method].rl.items() if k not in ADDED} | own
    return _same_but(profile, method, rl=rl, guide=None, advantage=None, reference_reset=0)


def unguided(profile: Profile, method: str) -> str | None:
    """The key of the method that has no guide and is the same otherwise; None without either."""
    guided = profile.methods[method].guide is not None
    return _same_but(profile, method, guide=None) if guided else None


def _same_but(profile: Profile, method: str, **changes: Any) -> str | None:
    own = profile.methods[method]
    wanted = _settings(profile, dataclasses.replace(own, **changes))
    if wanted == _settings(profile, own):
        return None
    found = (key for key, one in profile.methods.items() if _settings(profile, one) == wanted)
    return next(found, None)


def _settings(profile: Profile, method: Method) -> Method:
    """A method with all its RL settings, and without how it is shown; without KL, any anchor."""
    rl = {**profile.rl, **method.rl}
    anchor = method.anchor if rl.get("beta") else ""
    return dataclasses.replace(method, label="", family="", seeds=None, rl=rl, anchor=anchor)


def setting(profile: Profile, method: str) -> str:
    """What sets a method apart from the profile's GRPO: "beta 0; clip_cov, share 0.02"."""
    chosen = profile.methods[method]
    rl = {**profile.rl, **chosen.rl}
    parts = [f"beta {rl['beta']:g}"]
    if rl["steps_per_generation"] != profile.rl["steps_per_generation"]:
        parts.append(count(rl["steps_per_generation"], "update") + " a batch")
    parts += [f"{key} {rl[key]:g}" for key in ADDED if rl.get(key) != profile.rl.get(key)]
    parts += [_choice(one) for one in (chosen.advantage, chosen.guide) if one is not None]
    if chosen.reference_reset:
        parts.append(f"reset each {chosen.reference_reset} steps")
    return "; ".join(parts)


def _choice(choice: Mapping[str, Any]) -> str:
    """{name: position, shift: 0.5} -> "position, shift 0.5"."""
    rest = [f"{key} {value}" for key, value in choice.items() if key != "name"]
    return ", ".join([str(choice["name"]), *rest])


# --- tables ---------------------------------------------------------------------------------------


def covers(seeds: int, logged: bool = False) -> str:
    """Over what the intervals of exact pass@k range at so many training seeds, or, ``logged``,
    those of a step log."""
    if seeds == 0:
        return "not run"
    if seeds == 2 and not logged:
        return "none: 2 seeds"
    if logged:
        return "none: 1 seed" if seeds == 1 else f"{seeds} seeds"
    return "problems alone: 1 seed" if seeds == 1 else f"{seeds} seeds and problems"


def table(profile: Profile, family: str) -> pd.DataFrame:
    """Every method of a family, run or not: columns :data:`TABLE`.

    pass@k is exact, with 95 % intervals over what "interval over" says. ``against`` is the twin,
    ``entropy`` and ``length`` are those of the last fifth of the steps, mean over seeds.
    """
    whole = declared(profile)
    found = front_tables.points(profile).set_index("method")
    logged = {name: verdict.logged(profile, name) for name in ("entropy", "length")}
    rows = []
    for key in names(profile, family):
        row: dict[str, Any] = {"method": key, "setting": setting(whole, key)}
        row |= {"against": twin(whole, key) or "", "seeds": 0}
        if key in found.index:
            row |= {name: found.loc[key, name] for name in TABLE if name in found}
            row |= {name: values[key].mean() for name, values in logged.items()}
        rows.append({**row, "interval over": covers(row["seeds"])})
    return pd.DataFrame(rows, columns=TABLE)


def comparisons(
    profile: Profile, claims: Sequence[Claim], also: Sequence[Profile] = ()
) -> pd.DataFrame:
    """:func:`verdict.comparisons` with what intervals cover, and without the papers' numbers; with
    ``also``, profiles of other bases, the differences in each of these alone, too."""
    found = verdict.comparisons(profile, claims, also).drop(columns="reported")
    over = [
        covers(seeds, metric in verdict.LOGGED)
        for seeds, metric in zip(found["seeds"], found["metric"], strict=True)
    ]
    found.insert(found.columns.get_loc("seeds") + 1, "interval over", over)
    for which, one in zip(BASES, (profile, *also), strict=False):
        if also:
            found[which] = verdict.comparisons(one, claims)["difference"]
    return found


def differences(
    profile: Profile, pairs: Sequence[tuple[str, str]], also: Sequence[Profile] = ()
) -> pd.DataFrame:
    """Each (method, against) of ``pairs`` in every metric of :data:`METRICS` that is there.

    Columns method, against, metric, difference, low, high, seeds, "interval over"; pairs without a
    common seed are left out. Intervals as :func:`verdict.comparisons` has them, of a step log over
    seeds. ``also`` as in :func:`comparisons`, with its columns.
    """
    there = exact_tables.evaluated(profile)
    wanted = tuple(
        Comparison(*pair, name, "equal")
        for pair in pairs
        if there.issuperset(pair)
        for name in METRICS
    )
    found = comparisons(profile, [Claim("", "", "", wanted, "")], also)
    kept = ["method", "against", "metric", "difference", "low", "high", "seeds", "interval over"]
    kept += [which for which in BASES if which in found]
    return found[found["seeds"] > 0][kept].reset_index(drop=True)


def twins(profile: Profile, family: str) -> list[tuple[str, str]]:
    """(arm, twin) of the arms of a family that have one, both of them evaluated."""
    there = {BASE, *profile.evaluated}
    found = [(key, twin(profile, key)) for key in arms(profile, family)]
    return [(key, other) for key, other in found if other is not None and other in there]


def few_seeds(profile: Profile, methods: Sequence[str]) -> str:
    """A sentence that names the methods with too few seeds to decide anything; "" without any."""
    few = [key for key in methods if len(profile.seeds_of(key)) < FEWEST_SEEDS]
    if not few:
        return ""
    return (
        f"Fewer than {FEWEST_SEEDS} seeds, which decide nothing: {named(profile, few)}. An "
        "interval of one seed is over problems alone and says nothing of another seed."
    )
