"""The site's pages of results: the gallery, the map of claims, and the browser of runs."""

import json
from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import Any

import pandas as pd
from matplotlib.markers import MarkerStyle
from matplotlib.transforms import Affine2D

from sage_lib import paths
from sage_lib.experiment.results import Results, load_results
from sage_lib.report import outcomes, style

#: The figures that matter, best first, each with the notebook that draws it. Ten are shown: the
#: last ones stand in for those that are not drawn yet.
FIGURES = {
    "study/tradeoff": (
        "verdict",
        "GRPO over beta, and the methods beside it. Further right, more first answers are right. "
        "Further up, more problems are solved in 256 tries.",
    ),
    "study/rivals": (
        "rivals",
        "Other ways to explore, against GRPO's line over beta.",
    ),
    "study/exact_training": (
        "exact_evaluation",
        "Exact pass@1, exact pass@256 and the probability of the rare way along training. "
        "A thin line is one seed.",
    ),
    "study/training": (
        "every_method",
        "Reward, token entropy and KL along training. The band is the range of GRPO's seeds.",
    ),
    "study/figure3": (
        "main_results",
        "Exact pass@k over k, on three kinds of problems.",
    ),
    "study/entropy_law": (
        "entropy_and_tokens",
        "Reward against entropy, and the slopes of the exploration report's law minus the slope at "
        "fixed weights.",
    ),
    "study/token_impact": (
        "entropy_and_tokens",
        "What one replaced token changes, and how many of the replaced tokens are choices.",
    ),
    "study/log_rho": (
        "the_optimum",
        "What a guide adds to the log odds of a right answer, problem by problem. "
        "Above 0 the guide helps.",
    ),
    "theory/two_path": (
        "toy_two_path",
        "The paper's two-path example, computed exactly. The bars are the probability of the rare "
        "solution.",
    ),
    "theory/fixed_points": (
        "what_the_trainer_optimises",
        "Where each loss comes to rest, over the ratio of the branch guide: the rare completion "
        "and success.",
    ),
    "study/exploration": (
        "entropy_and_tokens",
        "The exploration report's metrics of our policies, minus the base: distinct answers, "
        "entropy, branching factor and unsolved problems.",
    ),
    "study/figure1": (
        "guides_on_real_completions",
        "The guides on one completion. From the top: entropy, the guide's q, the probabilities.",
    ),
    "study/figure2": (
        "main_results",
        "Training reward, and exact pass@1 on other problems, along training.",
    ),
}
SHOWN = 10

#: Files of claims: the paper, and the notebook of each question in the file.
CLAIMS = {
    "claims": ("SAGE", {"": "verdict"}),
    "exploration_claims": (
        "Exploration report",
        {
            "shaping": "advantage_shaping",
            "rft": "rejection_sampling_sft_rl",
            "sft": "rejection_sampling_sft_rl",
            "rivals": "rivals",
        },
    ),
}
CLAIMS_PAGE = """\
# Claims map

Claims on SAGE were written down before the first run, with the exceptions that
[notebook 11](notebooks/11_verdict.ipynb) lists. Those of the exploration report were written down
before the first run of its methods.

A number is a difference between two methods, with the interval by which it is judged. A claim has
the worst outcome of its comparisons. Notebook 11 explains the rule. Notebook 15 judge the
claims on entropies and tokens, which are not in the tables.

"""
#: Whose the claims of a table are: the heading above it.
WHOSE = {"paper": "What the papers claim", "ours": "What we claimed"}

#: What of a run is drawn, by the part of its data: the column, and its name above the plot.
PANELS = [
    ("log", "reward", "Training reward"),
    ("log", "entropy", "Token entropy (nats)"),
    ("log", "kl_ref", "KL to the reference (nats)"),
    ("exact", "pass@1", "Exact pass@1"),
    ("exact", "pass@8", "Exact pass@8"),
    ("exact", "pass@256", "Exact pass@256"),
]
#: Families of methods as a reader knows them; another family keeps its own name.
FAMILIES = {
    "main": "The paper's methods",
    "front": "GRPO at other values of beta",
    "matched": "GRPO at the matched beta",
    "paper_beta": "At the beta of the authors' code",
    "control": "Controls",
    "dose": "Guides with a higher bound",
    "anchors": "Other anchors",
    "answer": "Reward for the answer alone",
    "losses": "Other losses",
    "table6": "Threshold and ratio (Table 6)",
    "full": "All weights trained",
    "rivals": "Rivals",
    "shapers": "Shaped advantages",
    "rft": "Rejection sampling",
    "sft": "More SFT",
}
DASHES = {"-": "none", "--": "7 3", ":": "2 3", "-.": "10 3 2 3"}
RUNS_PAGE = """\
# Run browser

Here is what you should see when you train a method of the study. Choose methods, and compare your
own logs with the plots.

A thick line is the mean over the chosen seeds, and a thin line is one seed. Reward, entropy and KL
are those of the completions in training. Exact pass@k is computed on other problems, without
sampling. The KL is the mean k3 to the reference. A method without a KL term has none.

```{raw} html
<div id="runs"><noscript>The plots need JavaScript.</noscript></div>
<script src="_static/runs_data.js"></script>
<script src="_static/runs.js"></script>
```
"""


def notebook(ending: str) -> str:
    """A notebook's name with its number: "13_verdict" of "verdict"."""
    return next(paths.NOTEBOOKS.glob(f"[0-9][0-9]_{ending}.ipynb")).stem


def gallery() -> str:
    """The figures that matter with their captions, and the others behind a fold."""
    drawn = sorted(path.relative_to(paths.FIGURES) for path in paths.FIGURES.glob("*/*.png"))
    names = [str(path.with_suffix("")) for path in drawn]
    chosen = [name for name in FIGURES if name in names][:SHOWN]
    others = [name for name in names if name not in chosen]
    parts = ["# Gallery\n\n`make figures` draws all of these again, from `data/published`.\n"]
    for name in chosen:
        made_in, caption = FIGURES[name]
        page = notebook(made_in)
        parts.append(_figure(name, caption, f" [Notebook {page[:2]}](notebooks/{page}.ipynb)"))
    parts.append(f"<details><summary>The other {len(others)} figures</summary>\n")
    parts += [_figure(name, name.replace("/", ": ").replace("_", " ")) for name in others]
    return "\n".join([*parts, "</details>\n"])


def _figure(name: str, caption: str, link: str = "") -> str:
    """A figure with its caption, so wide that the letters of all have one size."""
    pixels = int.from_bytes((paths.FIGURES / f"{name}.png").read_bytes()[16:20])
    options = f":alt: {caption}\n:width: {0.6 * pixels:.0f}px"
    return f":::{{figure}} /figures/{name}.png\n{options}\n\n{caption}{link}\n:::\n"


def claims_map() -> str:
    """Every claim with what was measured for it, from the published comparisons: the papers' and
    ours, each with the number of every outcome."""
    names = ("source", "statement", "tested here", "difference", "outcome", "notebook")
    head = "\n".join(f"<th>{name}</th>" for name in names)  # the search takes lines apart
    rows = [row for file in CLAIMS for row in _claim_rows(file)]
    parts = [CLAIMS_PAGE]
    for by, heading in WHOSE.items():
        counts = Counter(outcome for whose, outcome, _ in rows if whose == by)
        tally = ", ".join(f"{outcome} {number}" for outcome, number in counts.most_common())
        body = "\n".join(row for whose, _, row in rows if whose == by)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
        parts += [f"## {heading}\n\n{counts.total()} claims: {tally}.\n\n"]
        parts += [f'<div class="wide claims">{table}</div>\n\n']
    return "".join(parts)


def _claim_rows(file: str) -> Iterator[tuple[str, str, str]]:
    """Whose each claim of a file is, its outcome, and its rows: one for each comparison."""
    results, claims = load_results("study"), outcomes.load_claims(file)
    stored = paths.PUBLISHED / "study" / "comparisons.csv"
    compared = pd.read_csv(stored) if file == "claims" else outcomes.comparisons(claims, results)
    by_claim = outcomes.claim_outcomes(claims, compared).set_index("claim")["outcome"]
    numbers = outcomes.readable(compared, results)["difference"]
    paper, notebooks = CLAIMS[file]
    for claim in claims.claims:
        place = claim.source
        if place.startswith(("Table", "Figure", "Appendix")):
            place = f"{paper}, {place}"
        page = notebook(notebooks[claim.question])
        link = f'<a href="notebooks/{page}.html">{page[:2]}</a>'
        tested = [
            f'<td>{escape(_words(results, row))}</td>\n<td class="number">{numbers[row.Index]}</td>'
            for row in compared[compared["claim"] == claim.claim].itertuples()
        ] or ["<td>nothing</td>\n<td></td>"]
        span = f'<td rowspan="{len(tested)}">'
        cells = [text[0].upper() + text[1:] for text in (escape(place), escape(claim.statement))]
        outcome = str(by_claim[claim.claim])
        cells = [f"{span}{text}</td>" for text in (*cells, outcome, link)]
        cells.insert(2, tested[0])
        first, *rest = ["\n".join(cells), *tested[1:]]
        yield claim.by, outcome, "".join(f"<tr>{row}</tr>" for row in (first, *rest))


def _words(results: Results, row: Any) -> str:
    """A comparison in words: "pass@1: GRPO + Branch above GRPO"."""
    metric = row.metric.replace("ood", "out of distribution")
    expects = row.expects.replace("equal", "equal to")
    return f"{metric}: {results.label(row.method)} {expects} {results.label(row.against)}"


def run_data() -> dict[str, Any]:
    """Every published RL run by method: its step log and its exact pass@k along training."""
    results = load_results("study")
    runs = results.frame("runs").query("stage == 'rl'")
    parts = {"log": results.frame("steps"), "exact": results.frame("exact")}
    parts["exact"] = parts["exact"].groupby(["run", "step"], as_index=False).mean(numeric_only=True)
    columns = {part: ["step", *(c for p, c, _ in PANELS if p == part)] for part in parts}
    methods = []
    for key, group in runs.groupby("method", sort=False):
        look, family = style.look(str(key)), results.profile.methods[str(key)].family
        dash = look["linestyle"]
        found = {
            "key": key,
            "label": results.label(str(key)),
            "family": FAMILIES.get(family, family),
            "colour": look["color"],
            "marker": _outline(look["marker"]),
            "dash": DASHES.get(dash) or " ".join(str(2 * length) for length in dash[1]),
            "runs": [],
        }
        for run in group.itertuples():
            data = {
                part: _lists(frame[frame["run"] == run.run].reindex(columns=columns[part]))
                for part, frame in parts.items()
            }
            profile = run.run.rpartition("/")[0] or results.name
            found["runs"].append({"seed": int(run.seed), "profile": profile, **data})
        methods.append(found)
    panels = [dict(zip(("part", "column", "title"), panel, strict=True)) for panel in PANELS]
    return {"panels": panels, "methods": methods}


def _outline(marker: str) -> str:
    """The outline of one of Matplotlib's markers as a path of SVG, seven units wide."""
    drawn = MarkerStyle(marker)
    path = drawn.get_path().transformed(drawn.get_transform() + Affine2D().scale(7, -7))
    polygons: list[Any] = path.to_polygons()
    corners = ("L".join(f"{x:.1f},{y:.1f}" for x, y in one) for one in polygons)
    return "".join(f"M{one}Z" for one in corners)


def _lists(frame: pd.DataFrame) -> dict[str, list[float | None]]:
    """The columns of a frame with four digits of each number, and None where there is none."""
    return {
        name: [None if pd.isna(value) else float(f"{value:.4g}") for value in column]
        for name, column in frame.items()
    }


def run_script() -> str:
    """The runs as JSON behind a name, since a page that is opened as a file may fetch nothing."""
    return f"const RUNS = {json.dumps(run_data(), separators=(',', ':'))};\n"
