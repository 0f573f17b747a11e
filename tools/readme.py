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
from sage_lib.experiment.profile import load_profile, profile_names
from sage_lib.files import write_text
from sage_lib.pipeline import plan
from sage_lib.report import front, verdict

#: As `sha256sum --check` reads it in the folder of the project.
SUMS = paths.ROOT / "data" / "SHA256SUMS"
#: The profile whose published results the README opens with.
EVIDENCE = "study"
#: The claims of its table.
SHOWN = {
    "both rise": "GRPO + Branch raises both, over GRPO",
    "both rise, strong guide": "a stronger Branch raises both, over GRPO",
    "P1, a schedule of beta": "the stronger Branch equals GRPO at beta 0.25, within our margin",
    "loses pass@k without KL": "without KL, GRPO loses pass@256",
}


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


def result(study: results.Study, claims: verdict.Claims, compared: pd.DataFrame) -> str:
    """Sentences and a table on the published result. SageError where the first sentence is no
    longer true."""
    judged = verdict.judge(claims, compared).set_index("claim")
    if set(judged.loc[list(SHOWN)[:2], "outcome"]) != {"disagrees"}:
        raise SageError("the README says that no guide raised both: write its sentence anew")
    points = front.points(study).set_index("method")
    line = front.front_methods(study.settings, points.index)
    anchored = [method for method in line if front.beta_of(study.settings, method) > 0]
    best = points.loc[anchored, "pass@1"].idxmax()
    own, reference = points.loc["base"], front.beta_of(study.settings, study.settings.reference)
    grpo = points.loc[study.settings.reference]
    seeds = compared.loc[compared["claim"] == "both rise", "seeds"].min()
    waiting = int((judged["outcome"] == "not run").sum())
    said = (
        f"GRPO learns here: at beta {front.beta_of(study.settings, best):g} "
        f"({points.loc[best, 'seeds']} seeds) pass@1 rises from {own['pass@1']:.3f} to "
        f"{points.loc[best, 'pass@1']:.3f}, and pass@256 falls from {own['pass@256']:.3f} to "
        f"{points.loc[best, 'pass@256']:.3f}. At beta {reference:g} it ends at "
        f"{grpo['pass@1']:.3f} and {grpo['pass@256']:.3f}. At that beta neither Branch guide "
        f"raised both metrics over GRPO ({seeds} seeds, two base models; 95 % intervals over "
        "seeds and problems). The optimum of GRPO's objective raises pass@k on every problem "
        "(notebook 19). So the objective is not the cause: training misses its optimum, or "
        "generalises badly to held-out problems. "
    )
    margin = compared[compared["claim"] == "both rise"].set_index("metric")["margin"]
    said += (
        f"Our margin, the smallest gain that matters, is {margin['pass@1']:.3f} in pass@1 and "
        f"{margin['pass@256']:.3f} in pass@256. "
    )
    said += f"Of {len(judged)} claims {waiting} wait for their runs." if waiting else ""
    rows = []
    for claim in SHOWN:
        of = compared[compared["claim"] == claim].set_index("metric")
        cells = [
            f"{row.difference:+.4f} [{row.low:+.4f}, {row.high:+.4f}]"
            for row in (of.loc[k] if k in of.index else None for k in ("pass@1", "pass@256"))
            if row is not None
        ]
        cells = [""] * (2 - len(cells)) + cells
        rows.append((SHOWN[claim], *cells, judged.loc[claim, "outcome"]))
    table = pd.DataFrame(rows, columns=["claim", "pass@1", "pass@256", "outcome"])
    return f"{textwrap.fill(said, 120, break_on_hyphens=False)}\n\n{markdown(table)}"


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
