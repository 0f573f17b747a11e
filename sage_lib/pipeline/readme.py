"""What follows from the published files and is written by this command alone:

    python -m sage_lib.pipeline.readme       writes it anew

The README's generated parts (badges, the published result, the table of notebooks), the tables of
four pages in docs (:func:`tables`), and data/SHA256SUMS. The badges are those of
:mod:`sage_lib.pipeline.online`.
"""

import hashlib
import textwrap
from pathlib import Path

import pandas as pd

from sage_lib import paths
from sage_lib.experiment.profile import Profile, load_profile, profile_names, published_specs
from sage_lib.files import write_text
from sage_lib.pipeline import gpu_hours, needs, notebooks, online, plan
from sage_lib.report import fire_tables, growth_figures, licences, measured, verdict
from sage_lib.report.fire_tables import markdown

DOCS = paths.ROOT / "docs"
#: Letters of a line of the README.
WIDTH = 120
#: As ``sha256sum --check`` reads it in the folder of the project.
SUMS = paths.ROOT / "data" / "SHA256SUMS"
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
    """What came out so far, in two sentences."""
    said = " ".join(verdict.summary(load_profile(EVIDENCE, "published")))
    return textwrap.fill(said, WIDTH, break_on_hyphens=False)


def with_parts(text: str) -> str:
    """A README's text with its generated parts as they should be.

    Raises SageError where a part's two lines are missing.
    """
    made = {"badges": online.badges(notebooks.found()[0].name), "notebooks": table()}
    if EVIDENCE in published_specs():  # a copy without data keeps what it has
        made["result"] = result()
    return online.filled(text, made, online.README)


def asked_for() -> pd.DataFrame:
    """What every profile that needs a GPU asks for: columns profile, what, runs (of SFT and RL),
    GPU hours and their range, GB of a GPU's memory, GB of disk."""
    rows = []
    for profile in map(load_profile, profile_names()):
        if not profile.compute.requires_gpu:
            continue
        assumed = gpu_hours.assumed((), profile.compute.assume)
        hours = gpu_hours.table(profile, assumed)
        value, fast, slow = (gpu_hours.rounded(hours[c].sum()) for c in ("in all", "fast", "slow"))
        memory, disk = needs.in_all(needs.memory(profile)), needs.disk_gb(profile)
        spent = (hours["runs"].sum(), value, f"{fast} to {slow}", f"{memory:.0f}", f"{disk:.0f}")
        rows.append((f"`{profile.name}`", profile.description.split(",")[0], *spent))
    columns = ["profile", "what", "runs", "GPU hours", "range", "GPU GB", "disk GB"]
    return pd.DataFrame(rows, columns=columns)


def tables() -> dict[str, dict[str, str]]:
    """Name of a page in docs -> its generated tables by name."""
    return {
        "reliability.md": {part: fire_tables.shown(part) for part in fire_tables.COLUMNS},
        "licences.md": {"licences": licences.shown()},
        "scaling.md": {"growth": markdown(growth_figures.shown(measured.benchmark("growth")))},
        "one_gpu.md": {"hours": markdown(asked_for())},
    }


def sums(root: Path = paths.ROOT) -> str:
    """The SHA-256 of every file of ``data``, a line each: reported, published, benchmarks."""
    found = sorted(
        path.relative_to(root).as_posix()
        for path in (root / "data").rglob("*")
        if path.is_file() and path.name != SUMS.name and not path.name.startswith(".")
    )
    lines = (
        f"{hashlib.sha256((root / name).read_bytes()).hexdigest()}  {name}\n" for name in found
    )
    return "".join(lines)


if __name__ == "__main__":
    write_text(online.README, with_parts(online.README.read_text()))
    if EVIDENCE in published_specs():  # a copy without data keeps what it has
        for name, made in tables().items():
            write_text(DOCS / name, online.filled((DOCS / name).read_text(), made, DOCS / name))
        write_text(SUMS, sums())
