"""Write what follows from published files: the README's result, a table of docs/one_gpu.md, and
data/SHA256SUMS.

    python tools/readme.py      (after publishing results or changing a profile)
"""

import hashlib
import re
import textwrap
from pathlib import Path

import pandas as pd

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import results
from sage_lib.experiment.profile import BASE, load_profile, profile_names
from sage_lib.files import write_text
from sage_lib.pipeline import plan
from sage_lib.report import front, verdict

#: As `sha256sum --check` reads it in the folder of the project.
SUMS = paths.ROOT / "data" / "SHA256SUMS"
#: The profile whose published results the README opens with.
EVIDENCE = "countdown"


def markdown(frame: pd.DataFrame) -> str:
    rows = [list(frame.columns), ["---"] * len(frame.columns), *frame.astype(str).to_numpy()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def asked_for() -> pd.DataFrame:
    """What every profile that needs a GPU asks for; runs are those that train."""
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
                "runs": planned.loc[trained, "runs"].sum(),
                "GPU hours": value,
                "range": f"{fast} to {slow}",
                "GPU GB": f"{gigabytes['memory']:.0f}",
                "disk GB": f"{plan.disk_gb(profile):.0f}",
            }
        )
    return pd.DataFrame(rows)


def result(study: results.Study, claims: verdict.Claims, compared: pd.DataFrame) -> str:
    """Three sentences on the published result. SageError where the first is no longer true."""
    if verdict.judge(claims, compared).set_index("claim")["outcome"]["both rise"] != "disagrees":
        raise SageError("the README says that we found no gain: write its sentence anew")
    rows, strong = (
        compared[compared["claim"] == claim].set_index("metric")
        for claim in ("both rise", "both rise, strong guide")
    )
    of, trade = (
        {
            name: f"{row.difference:+.3f}, 95 % [{row.low:+.3f}, {row.high:+.3f}]"
            for name, row in found.iterrows()
        }
        for found in (rows, strong)
    )
    known = compared.dropna(subset="detectable")
    least = known["metric"].str.removesuffix(", ood").map(claims.margins)
    weak = (known["detectable"] > least).sum()
    levels = front.points(study).set_index("method")["pass@1"]
    line = front.front_methods(study.settings, levels.index)
    best = levels[line].idxmax()
    betas = {method: front.beta_of(study.settings, method) for method in line}
    said = (
        f"We found no gain: at beta {rows['beta'].iloc[0]:g} SAGE minus GRPO is {of['pass@1']}, in "
        f"pass@1 and {of['pass@256']}, in pass@256 ({rows['seeds'].min()} seeds). There was little "
        f"room: at {betas[best]:g}, its best beta for pass@1, GRPO moves it from "
        f"{levels[BASE]:.3f} to {levels[best]:.3f}. A stronger guide trades one for the other: "
        f"{trade['pass@1']}, in pass@1 and {trade['pass@256']}, in pass@256. Of the {len(known)} "
        f"comparisons whose precision is known, {weak} may have missed a difference that matters."
    )
    return textwrap.fill(said, 120, break_on_hyphens=False)


def filled(text: str, name: str, part: str) -> str:
    """A page's text with a generated part between its two comments."""
    pattern = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SageError(f"the page lacks the comments of its generated part {name}")
    return pattern.sub(lambda found: f"{found[1]}{part}\n{found[2]}", text)


def sums(root: Path = paths.ROOT) -> str:
    """The SHA-256 of every file of `data`, a line each."""
    files = [path for path in sorted((root / "data").rglob("[!.]*")) if path.is_file()]
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root).as_posix()}\n"
        for path in files
        if path.name != SUMS.name
    )


def main() -> None:
    study, claims = results.load(EVIDENCE), verdict.load()
    made = {
        "README.md": ("result", result(study, claims, verdict.comparisons(claims, study))),
        "docs/one_gpu.md": ("hours", markdown(asked_for())),
    }
    for name, (part, text) in made.items():
        page = paths.ROOT / name
        write_text(page, filled(page.read_text(), part, text))
    write_text(SUMS, sums())


if __name__ == "__main__":
    main()
