"""The README's generated parts: badges, the published result, and the table of notebooks.

    python -m sage_lib.pipeline.readme       writes them anew

What they say comes from the published files, the run records and the notebooks' metadata; the
badges are those of :mod:`sage_lib.pipeline.online`.
"""

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import Profile, load_profile, published_specs
from sage_lib.files import write_text
from sage_lib.pipeline import notebooks, online, plan
from sage_lib.report import verdict

README = paths.ROOT / "README.md"
#: The profile whose published results the README opens with.
EVIDENCE = "countdown"
#: The profiles whose minutes the table of notebooks has.
TIMED = ("smoke", EVIDENCE)


def minutes(profile: Profile) -> dict[str, str]:
    """Name of a notebook -> minutes of the runs that it is the first to ask for, added up.

    The seconds are those of the run records; notebooks that only read have none. Where runs of a
    notebook are not there, it says of how many the minutes are.
    """
    times = plan.measured_times(profile)
    found: dict[str, str] = {}
    counted: set[str] = set()
    for notebook in notebooks.found():
        stages = set(notebooks.stages(notebook.path)) - counted
        counted |= stages
        seconds = times.loc[times["stage"].isin(stages), "seconds"]
        if seconds.notna().any():
            spent = seconds.sum() / 60
            shown = f"{spent:.0f}" if spent >= 1 else "under 1"
            part = f" ({seconds.count()} of {len(seconds)} runs)" if seconds.isna().any() else ""
            found[notebook.name] = shown + part
    return found


def table() -> str:
    """The table of notebooks: a line each, with the minutes of its runs by profile."""
    published = published_specs()
    spent = {
        name: minutes(load_profile(published[name], "published")) if name in published else {}
        for name in TIMED
    }
    lines = [
        f"| | notebook | {' | '.join(f'min, `{name}`' for name in TIMED)} |",
        f"|---|---|{'---:|' * len(TIMED)}",
    ]
    for notebook in notebooks.found():
        link = f"[{notebook.number}](notebooks/{notebook.name}.ipynb)"
        cells = [link, notebooks.title(notebook.path)]
        cells += [spent[name].get(notebook.name, "") for name in TIMED]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def result() -> str:
    """The published front, and what it says."""
    profile = load_profile(EVIDENCE, "published")
    picture = f"![GRPO's front over beta](figures/{EVIDENCE}/front.png)"
    return "\n".join([picture, "", *(f"- {line}" for line in verdict.summary(profile))])


def with_parts(text: str) -> str:
    """A README's text with its generated parts as they should be.

    Raises SageError where a part's two lines are missing.
    """
    made = {"badges": online.badges(notebooks.found()[0].name), "notebooks": table()}
    if EVIDENCE in published_specs():  # a copy without data keeps what it has
        made["result"] = result()
    for name, part in made.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SageError(f"README.md lacks the lines {begin} and {end} around a generated part")
        before, after = text.split(begin)[0], text.split(end)[1]
        inside = f"{part}\n" if part else ""
        text = f"{before}{begin}\n{inside}{end}{after}"
    return text


if __name__ == "__main__":
    write_text(README, with_parts(README.read_text()))
