"""The second base: runs that differ from the grid's in the base alone, as further seeds.

All runs of a profile start from one base, so that its seeds say nothing of another one. Where the
same arms were trained from a second base as well, in a profile of its own, a difference of two
arms can be taken within each base and averaged over the seeds of both.
"""

from collections import Counter
from collections.abc import Sequence

from sage_lib.experiment.profile import Profile, load_profile, profile_names, published_specs
from sage_lib.report import exact_tables, verdict
from sage_lib.report.claims import Claim
from sage_lib.report.style import count

#: What the name of the profile of a second base ends with: "countdown_rebased" of "countdown".
SECOND = "_rebased"


def beside(main: Profile, suffix: str) -> Profile | None:
    """The profile named as ``main`` with a suffix, published or a user's own as ``main`` is; None
    where there is none, or none of its policies is evaluated."""
    name = main.name + suffix
    if not suffix:
        profile = main
    elif main.published and name in published_specs():
        profile = load_profile(name, "published")
    elif not main.published and name in profile_names():
        profile = load_profile(name)
    else:
        return None
    return profile if exact_tables.evaluated(profile) else None


def others(main: Profile) -> list[Profile]:
    """The profiles of other bases, whose seeds count as further ones: none, or one."""
    found = beside(main, SECOND)
    return [] if found is None else [found]


def changed(main: Profile, chosen: Sequence[Claim]) -> list[str]:
    """Which claims come out otherwise with the seeds of the second base than by those of the first
    alone, a line for each change; one that says so where none does."""
    also = others(main)
    if not also:
        return []
    both = verdict.claims(main, chosen, also)
    alone = verdict.claims(main, chosen)["outcome"]
    moved = both[both["outcome"] != alone].assign(alone=alone)
    lines = [
        f"by the first base's seeds alone {before}, over the seeds of both {after}: "
        f"{'; '.join(group['claim'])}"
        for (before, after), group in moved.groupby(["alone", "outcome"], sort=False)
    ]
    return lines or ["no outcome changes with the seeds of the second base"]


def sentence(main: Profile, arms: Sequence[str]) -> str:
    """How many of ``arms`` start from which base, by their seeds, in a sentence for a notebook."""
    parts = []
    for profile, which in zip(
        (main, *others(main)), ("the first base", "the second base"), strict=False
    ):
        seeds = Counter(tuple(profile.seeds_of(key)) for key in arms if key in profile.evaluated)
        found = [
            f"{count(number, 'arm')} of seeds {', '.join(map(str, those))}"
            for those, number in sorted(seeds.items(), key=lambda one: len(one[0]))
        ]
        parts.append(f"from {which} ({profile.name}) {', '.join(found)}")
    return "; ".join(parts)
