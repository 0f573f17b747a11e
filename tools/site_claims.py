"""The site's map of claims: every claim and prediction, with what was measured for it."""

from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import Any

import law
import pandas as pd
from site_results import notebook

from sage_lib import paths
from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.results import Results, load_results
from sage_lib.report import inference, ladder, outcomes, trained_guides

#: Files of claims: the results they are about, the paper, and the notebook of each question.
CLAIMS = {
    "operating_point_claims": ("operating_point", "SAGE", {"": "at_the_papers_settings"}),
    "claims": ("study", "SAGE", {"": "verdict"}),
    "exploration_claims": (
        "study",
        "Exploration report",
        {
            "shaping": "what_moves_the_curve",
            "rft": "rejection_sampling_sft_rl",
            "sft": "rejection_sampling_sft_rl",
            "rivals": "what_moves_the_curve",
        },
    ),
    "study_short_claims": (
        "study_short",
        "Exploration report",
        {
            "shaping": "what_moves_the_curve",
            "rft": "rejection_sampling_sft_rl",
            "rivals": "what_moves_the_curve",
            "losses": "losses_sizes_thresholds",
        },
    ),
    "smollm_aimless_claims": ("smollm_aimless", "SAGE", {"": "a_model_that_reads"}),
    "smollm_paper_claims": ("smollm_paper", "SAGE", {"": "a_model_that_reads"}),
}
CLAIMS_PAGE = """\
# Claims map

Claims on SAGE were written down before the first run, with the exceptions that
[notebook 11](notebooks/{verdict}.ipynb) lists. Those of the exploration report were written down
before the first run of its methods.

A number is a difference between two methods, with the interval by which it is judged. A claim has
the worst outcome of its comparisons. Notebook 11 explains the rule. Claims on entropies and tokens
are in [notebook 15](notebooks/{tokens}.ipynb). The predictions of the ladder are decided by few
seeds, and those of the law of rho by a slope over bases.

```{{raw}} html
<div id="filter"></div>
```

"""
CLAIMS_SCRIPT = """\
```{raw} html
<script src="_static/claims.js"></script>
```
"""
#: Whose the claims of a table are: the heading above it.
WHOSE = {"paper": "What the papers claim", "ours": "What we claimed"}


def claims_map() -> str:
    """Every claim with what was measured for it, from the published comparisons: the papers' and
    ours, each with the number of every outcome."""
    names = ("claim", "outcome", "tested here", "source", "notebook")
    # A line each: the search takes lines apart.
    head = "\n".join(f'<th scope="col">{name}</th>' for name in names)
    published = [file for file in CLAIMS if (paths.PUBLISHED / CLAIMS[file][0]).is_dir()]
    rows = [row for file in published for row in _claim_rows(file)]
    rows += [*_ladder_rows(), *_law_rows(), *_guide_rows()]
    endings = {"verdict": "verdict", "tokens": "entropy_and_tokens"}
    parts = [CLAIMS_PAGE.format(**{key: notebook(ending) for key, ending in endings.items()})]
    for by, heading in WHOSE.items():
        counts = Counter(outcome for whose, outcome, _ in rows if whose == by)
        tally = ", ".join(f"{outcome} {number}" for outcome, number in counts.most_common())
        body = "\n".join(row for whose, _, row in rows if whose == by)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
        parts += [f"## {heading}\n\n{counts.total()} claims: {tally}.\n\n"]
        parts += [f'<div class="claims">{table}</div>\n\n']
    return "".join([*parts, CLAIMS_SCRIPT])


def _row(statement: str, outcome: str, tested: list[str], source: str, ending: str) -> str:
    """A row of the claims map; what was tested is HTML, and the notebook is the end of its name."""
    page, statement = notebook(ending), statement[0].upper() + statement[1:]
    cells = [escape(statement), outcome, "\n".join(f"<div>{text}</div>" for text in tested)]
    cells += [escape(source), f'<a href="notebooks/{page}.html">notebook {page[:2]}</a>']
    return "<tr>" + "\n".join(f"<td>{text}</td>" for text in cells) + "</tr>"


def _claim_rows(file: str) -> Iterator[tuple[str, str, str]]:
    """Whose each claim of a file is, its outcome, and its row."""
    name, paper, notebooks = CLAIMS[file]
    results, claims = load_results(name), outcomes.load_claims(file)
    stored = paths.PUBLISHED / name / "comparisons.csv"
    is_stored = stored.is_file() and file != "exploration_claims"  # study's are of claims.yaml
    compared = pd.read_csv(stored) if is_stored else outcomes.comparisons(claims, results)
    by_claim = outcomes.claim_outcomes(claims, compared).set_index("claim")["outcome"]
    numbers = outcomes.readable(compared, results)["difference"]
    for claim in claims.claims:
        source = claim.source
        if source.startswith(("Table", "Figure", "Appendix")):
            source = f"{paper}, {source}"
        tested = [
            f'{escape(_words(results, row))}: <span class="number">{numbers[row.Index]}</span>'
            for row in compared[compared["claim"] == claim.claim].itertuples()
        ] or ["nothing"]
        outcome = str(by_claim[claim.claim])
        row = _row(claim.statement, outcome, tested, source, notebooks[claim.question])
        yield claim.by, outcome, row


def _ladder_rows() -> Iterator[tuple[str, str, str]]:
    """The predictions of the ladder, as _claim_rows has claims."""
    table = ladder.load()
    seeds = table[table["rung"] >= 4].groupby(["step", "arm"], observed=True)["seed"].nunique()
    source = f"ours: predicted before its runs; seeds: {seeds.min()} to {seeds.max()}"
    for row in ladder.outcomes(table).itertuples():
        tested = [escape(part) for part in row.measured.split("; ")]
        html = _row(row.predicted, row.outcome, tested, source, "why_training_loses")
        yield "ours", row.outcome, html


def _law_rows() -> Iterator[tuple[str, str, str]]:
    """The claims of the law of rho, as _claim_rows has claims."""
    judged = law.judged()
    for form, expected in law.EXPECTED.items():
        statement = f"under {form} the slope of strong Branch's gain in log-odds on log rho is "
        outcome, tested = inference.NOT_RUN, "nothing"
        if judged is not None:
            row = judged.set_index("KL form").loc[form]
            outcome = str(row["outcome"])
            tested = f"slope {row['slope']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"
        source = "ours: predicted before its runs"
        columns = (f"{statement}{expected} 0", outcome, [tested], source)
        yield "ours", outcome, _row(*columns, "which_guide_would_help")


def _guide_rows() -> Iterator[tuple[str, str, str]]:
    """The predictions of the guides on each task, as _claim_rows has claims."""
    for task in trained_guides.TASKS:
        labels = load_profile(task)
        for name, rows in trained_guides.outcomes(task).groupby("prediction", sort=False):
            tested = [
                f'{escape(labels.label(row.method))}: <span class="number">{row.measured}</span>'
                for row in rows.itertuples()
            ]
            outcome = inference.worst_outcome(rows["outcome"])
            measure, expected = rows["measured"].iloc[0].split()[0], rows["expected"].iloc[0]
            statement = f"{task}, {name}: the {measure} is {expected}"
            source = f"ours: predicted before its runs; {rows['seeds'].min()} seeds"
            columns = (statement, outcome, tested, source, "which_guide_would_help")
            yield "ours", outcome, _row(*columns)


def _words(results: Results, row: Any) -> str:
    """A comparison in words: "pass@1: GRPO + Branch above GRPO"."""
    metric = row.metric.replace("ood", "out of distribution")
    expects = row.expects.replace("equal", "equal to")
    return f"{metric}: {results.label(row.method)} {expects} {results.label(row.against)}"
