"""Write what follows from published files: the README's result, a table of docs/one_gpu.md, and
data/SHA256SUMS.

    python tools/readme.py      (after publishing results or changing a profile)
"""

import hashlib
import re

import pandas as pd

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile, profile_names
from sage_lib.experiment.results import load_results
from sage_lib.files import write_text
from sage_lib.pipeline import plan
from sage_lib.report import outcomes

#: As `sha256sum --check` reads it in the folder of the project.
SUMS = paths.ROOT / "data" / "SHA256SUMS"
#: The rows of the README's table: profile, file of claims, claim, and the claim in plain words.
SHOWN = [
    (
        *("operating_point", "operating_point_claims", "both rise"),
        "the paper, at its reward, beta and guide: Branch raises both",
    ),
    (
        *("study", "claims", "both rise"),
        "the paper, at beta 0.2, lower threshold, work checked: both rise",
    ),
    (
        *("study", "claims", "P1, a schedule of beta"),
        "ours: a stronger Branch equals GRPO at beta 0.25",
    ),
    (
        *("study", "claims", "overfits without KL, answer rewarded"),
        "the paper: no KL, answer rewarded: less valid work",
    ),
]


def markdown(frame: pd.DataFrame) -> str:
    rows = [list(frame.columns), ["---"] * len(frame.columns), *frame.astype(str).to_numpy()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def asked_for() -> pd.DataFrame:
    """What every profile that needs a GPU asks for; policies count the base."""
    rows = []
    for profile in map(load_profile, profile_names()):
        if not profile.compute.requires_gpu:
            continue
        planned = plan.planned_runs(profile, None, plan.assumed(profile))
        trained = planned["stage"].isin(["sft", "rl", "replay"])
        hours = planned[["value", "fast", "slow"]].sum()
        value, fast, slow = (f"{h:,.0f}" if h >= 10 else f"{h:.1f}" for h in hours)
        gigabytes = plan.needs(profile).groupby("what")["GB"].sum()
        rows.append(
            {
                "profile": f"`{profile.name}`",
                "what": profile.description.split(",")[0],
                "policies": planned.loc[trained, "runs"].sum(),
                "GPU hours": value,
                "range": f"{fast} to {slow}",
                "GPU GB": f"{gigabytes['memory']:.0f}",
                "disk GB": f"{plan.disk_gb(profile):.0f}",
            }
        )
    return pd.DataFrame(rows)


def result() -> str:
    """The table of the README: the claims of SHOWN, the differences with the intervals by which
    they are judged, and the outcomes."""
    compared, judged, rows = {}, {}, []
    for profile, file in dict.fromkeys(row[:2] for row in SHOWN):
        claims = outcomes.load_claims(file)
        table = outcomes.comparisons(claims, load_results(profile))
        judged[file] = outcomes.claim_outcomes(claims, table).set_index("claim")
        table["metric"] = table["metric"].str.removeprefix("right ")
        compared[file] = table.set_index(["claim", "metric"])
    for _, file, claim, words in SHOWN:
        cells = [
            f"{row.difference:+.4f} [{row.judged_low:+.4f}, {row.judged_high:+.4f}]"
            for row in compared[file].loc[claim].loc[["pass@1", "pass@256"]].itertuples()
        ]
        rows.append((words, *cells, judged[file].loc[claim, "outcome"]))
    return markdown(pd.DataFrame(rows, columns=["claim", "pass@1", "pass@256", "outcome"]))


def filled(text: str, name: str, part: str) -> str:
    """A page's text with a generated part between its two comments."""
    pattern = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SageError(f"the page lacks the comments of its generated part {name}")
    return pattern.sub(lambda match: f"{match[1]}{part}\n{match[2]}", text)


def sums() -> str:
    """The SHA-256 of every file of `data`, a line each."""
    data = sorted((paths.ROOT / "data").rglob("*"))
    names = [path.relative_to(paths.ROOT).as_posix() for path in data if path.is_file()]
    # Folders that begin with a dot hold the lock and the half-made tables of `publish`.
    names = [name for name in names if "/." not in name and not name.endswith(SUMS.name)]
    hashes = [hashlib.sha256((paths.ROOT / name).read_bytes()).hexdigest() for name in names]
    return "".join(f"{hash_}  {name}\n" for hash_, name in zip(hashes, names, strict=True))


def main() -> None:
    made = {
        "README.md": ("result", result()),
        "docs/one_gpu.md": ("hours", markdown(asked_for())),
    }
    for name, (part, text) in made.items():
        page = paths.ROOT / name
        write_text(page, filled(page.read_text(), part, text))
    write_text(SUMS, sums())


if __name__ == "__main__":
    main()
