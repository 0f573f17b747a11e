"""The site's pages of results: the gallery and the browser of runs."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.markers import MarkerStyle
from matplotlib.transforms import Affine2D

from sage_lib import paths
from sage_lib.experiment.results import Results, load_results
from sage_lib.experiment.settings import Method
from sage_lib.report import style

#: The figures that matter, best first.
FIGURES = {
    "operating_point/figures_2_and_3": "Figures 2 and 3 of the paper with our policies, at the "
    "paper's settings: reward along training, and pass@k over k.",
    "study/tradeoff": "GRPO over beta, and the methods beside it. Further right, more first "
    "answers are right. Further up, more problems are solved in 256 tries.",
    "theory/two_path": "The paper's two-path example, computed exactly. The bars are the "
    "probability of the rare solution.",
    "theory/fixed_points": "Where each loss comes to rest, over the ratio of the branch guide: the "
    "rare completion and success.",
    "study/forest": "How far every method lies beyond GRPO's line over beta, on two tasks. "
    "Blue are GRPO's own betas, held out.",
    "study/ladder": "From the optimum of the objective to the study, step by step.",
    "guide_gain/law": "What strong Branch gains in training over log rho, on ten bases, under two "
    "forms of the KL.",
    "coloring/both_tasks": "The same comparison on two tasks: countdown and graph coloring.",
    "smollm_aimless/pass_at_k": "pass@k of SmolLM2 on word problems: differences of policies.",
    "study/exploration": "The exploration report's metrics of our policies, minus the base: "
    "distinct answers, entropy, branching factor and unsolved problems.",
}

#: What of a run is drawn, by the part of its data: the column, and its name above the plot.
PANELS = [
    ("log", "reward", "Training reward"),
    ("log", "entropy", "Token entropy (nats)"),
    ("log", "kl_ref", "KL to the reference (nats)"),
    ("exact", "pass@1", "Exact pass@1"),
    ("exact", "pass@8", "Exact pass@8"),
    ("exact", "pass@256", "Exact pass@256"),
]
#: Families of methods as a reader knows them, and the notebook of each. Another family keeps its
#: name, and has the notebook of the verdict.
FAMILIES = {
    "main": ("The paper's methods", "verdict"),
    "front": ("GRPO at other values of beta", "verdict"),
    "matched": ("GRPO at the matched beta", "verdict"),
    "paper_beta": ("At the beta of the authors' code", "verdict"),
    "control": ("Controls", "verdict"),
    "dose": ("Guides with a higher bound", "verdict"),
    "anchors": ("Other anchors", "verdict"),
    "answer": ("Reward for the answer alone", "verdict"),
    "losses": ("Other losses", "losses_sizes_thresholds"),
    "table6": ("Threshold and ratio (Table 6)", "losses_sizes_thresholds"),
    "full": ("All weights trained", "losses_sizes_thresholds"),
    "rivals": ("Rivals", "what_moves_the_curve"),
    "shapers": ("Shaped advantages", "what_moves_the_curve"),
    "rft": ("Rejection sampling", "rejection_sampling_sft_rl"),
    "sft": ("More SFT", "rejection_sampling_sft_rl"),
}
#: Profiles beside the study in the run browser: the family, the word before a label, the notebook.
BESIDE = {
    "operating_point": ("At the paper's settings", "paper's settings", "at_the_papers_settings"),
    "smollm_aimless": ("SmolLM2 on word problems", "SmolLM2", "a_model_that_reads"),
    "smollm_paper": ("SmolLM2, from true demonstrations", "SmolLM2 (true)", "a_model_that_reads"),
    "smoke": ("Smoke: make reproduce, in minutes", "smoke", "grpo_and_sage"),
}
#: Fields of a method that stand elsewhere on the page.
SHOWN_APART = ("label", "family", "seeds")
DASHES = {"-": "none", "--": "7 3", ":": "2 3", "-.": "10 3 2 3"}
RUNS_PAGE = """\
# Run browser

Here is what you should see when you train a method of the study. Choose methods: the address keeps
the choice, so you can send it. Drop the `trainer_state.json` of a run of your own to see it beside
ours, in black. It stays in your browser.

A thick line is the mean over the chosen seeds, and a thin line is one seed. Reward, entropy and KL
are those of the completions in training, means of ten steps. Exact pass@k is computed on other
problems, without sampling. The KL is the mean k3 to the reference. A method without a KL term has
none.

```{raw} html
<div id="runs"><noscript>The plots need JavaScript.</noscript></div>
<script src="_static/runs_data.js"></script>
<script src="_static/runs.js"></script>
```
"""
LIVE_PAGE = """\
# pass@k of your counts, live

Paste or drop counts of right samples to see mean pass@k over problems. The text stays in your
browser: nothing is sent.

- Lines `n, c`: samples of a problem, and how many are right. A first line may name the columns,
  such as `id,c,n`.
- JSON lines of counts: `{"id": "p1", "c": 5, "n": 128}`.
- JSON lines of samples: `{"problem": "p1", "correct": true}`, a line each. `id` or `prompt` may
  stand for `problem`.

A line that cannot be read is named, and left out.

```{raw} html
<div id="passk"><noscript>The curve needs JavaScript.</noscript></div>
<script src="_static/passk.js"></script>
```

Each problem has the unbiased estimate 1 - C(n-c, k) / C(n, k), up to the fewest samples of a
problem. The interval holds for the mean over problems, of this policy: 95 %, by the Bayesian
bootstrap of [`pass_at_k`](pass_at_k.md), whose numbers these are. Its random draws are others, so
bounds differ by less than 0.01. For two policies, training seeds, other formats and a test of the
difference use the command `sage-companion pass-at-k`.
"""


def notebook(ending: str) -> str:
    """A notebook's name with its number: "11_verdict" of "verdict"."""
    return next(paths.NOTEBOOKS.glob(f"[0-9][0-9]_{ending}.ipynb")).stem


def drawn_in(figure: str) -> str | None:
    """The first notebook that saves a figure, such as "study/tradeoff"; None where none does."""
    folder, _, name = figure.partition("/")
    for path in sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        shown = any("show(" in source and f'"{name}"' in source for source in sources)
        if shown and any(f'"{folder}"' in source for source in sources):
            return path.stem
    return None


def gallery() -> str:
    """The ten figures that matter, each with its notebook and its data."""
    parts = ["# Gallery\n\n`make figures` draws all figures again, from `data/published`.\n"]
    for name, caption in FIGURES.items():
        page = drawn_in(name)
        if page and (paths.FIGURES / f"{name}.png").is_file():
            parts.append(_figure(name, caption, page))
    return "\n".join(parts)


def _figure(name: str, caption: str, page: str) -> str:
    """A figure with its caption, so wide that the letters of all have one size."""
    pixels = int.from_bytes((paths.FIGURES / f"{name}.png").read_bytes()[16:20])
    options = f":alt: {caption}\n:width: {0.6 * pixels:.0f}px\n:loading: lazy"
    link = f"[Notebook {page[:2]}](notebooks/{page}.ipynb)"
    data = paths.PUBLISHED / name.partition("/")[0]
    from_data = f", from `data/published/{data.name}`" if data.is_dir() else ""
    return f":::{{figure}} /figures/{name}.png\n{options}\n\n{caption} {link}{from_data}.\n:::\n"


def run_data() -> dict[str, Any]:
    """Every published RL run by method: its step log and its exact pass@k along training."""
    methods = [
        method for profile in ("study", *BESIDE) for method in _methods(load_results(profile))
    ]
    panels = [dict(zip(("part", "column", "title"), panel, strict=True)) for panel in PANELS]
    return {"panels": panels, "methods": methods}


def _methods(results: Results) -> Iterator[dict[str, Any]]:
    """The methods of a profile with their runs; keys beside the study begin with the profile's."""
    runs = results.frame("runs").query("stage == 'rl'")
    parts = {"log": results.frame("steps"), "exact": results.frame("exact")}
    if results.name in BESIDE:  # means of ten steps, as the study's log has them
        log = parts["log"].assign(step=-(-parts["log"]["step"] // 10) * 10)
        parts["log"] = log.groupby(["run", "step"], as_index=False).mean(numeric_only=True)
    if len(parts["exact"]):  # means over data sets
        by_step = parts["exact"].groupby(["run", "step"], as_index=False)
        parts["exact"] = by_step.mean(numeric_only=True)
    columns = {part: ["step", *(c for p, c, _ in PANELS if p == part)] for part in parts}
    for name, group in runs.groupby("method", sort=False):
        method, label = results.profile.methods[str(name)], results.label(str(name))
        family, made_in = FAMILIES.get(method.family, (method.family, "verdict"))
        key = str(name)
        if results.name in BESIDE:
            family, word, made_in = BESIDE[results.name]
            key, label = f"{results.name}/{name}", f"{word}: {label}"
        look = style.look(key)
        dash = look["linestyle"]
        entry = {
            "key": key,
            "label": label,
            "family": family,
            "settings": _settings(method, group.iloc[0]),
            "notebook": notebook(made_in),
            "colour": look["color"],
            "marker": _outline(look["marker"]),
            "dash": DASHES.get(dash) or " ".join(str(2 * length) for length in dash[1]),
            "runs": [],
        }
        for run, row in zip(group["run"], group.itertuples(), strict=True):
            data = {
                part: _lists(
                    (frame[frame["run"] == run] if len(frame) else frame).reindex(
                        columns=columns[part]
                    )
                )
                for part, frame in parts.items()
            }
            profile = run.rpartition("/")[0] or results.name
            entry["runs"].append({"seed": int(row.seed), "profile": profile, **data})
        yield entry


def _settings(method: Method, run: pd.Series) -> str:
    """What a method was trained with: "beta 0.2, learning rate 0.001, 200 steps; reward: valid"."""
    common = {"loss": "loss_type", "beta": "beta", "learning rate": "learning_rate"}
    settings = [f"{name} {run[key]}" for name, key in common.items() if not pd.isna(run[key])]
    if not pd.isna(run["max_steps"]):
        settings.append(f"{run['max_steps']:.0f} steps")
    named = {*common.values(), "max_steps"}
    fields = {field.name: field for field in dataclasses.fields(Method)}
    values = {key: getattr(method, key) for key in fields if key not in SHOWN_APART}
    values["rl"] = {key: value for key, value in method.rl.items() if key not in named}
    changed = {key: v for key, v in values.items() if v not in (fields[key].default, {})}
    words = [f"{key.replace('_', ' ')}: {_plain(value)}" for key, value in changed.items()]
    return "; ".join([", ".join(settings), *words])


def _plain(value: Any) -> str:
    """A setting without the signs of Python."""
    if not isinstance(value, dict):
        return str(value)
    words = [str(value["name"])] if "name" in value else []
    words += [f"{key} {_plain(inner)}" for key, inner in value.items() if key != "name"]
    return ", ".join(word.replace("_", " ") for word in words)


def _outline(marker: str) -> str:
    """The outline of one of Matplotlib's markers as a path of SVG, seven units wide."""
    drawn = MarkerStyle(marker)
    path = drawn.get_path().transformed(drawn.get_transform() + Affine2D().scale(7, -7))
    polygons: list[Any] = path.to_polygons()
    corners = ("L".join(f"{x:.1f},{y:.1f}" for x, y in polygon) for polygon in polygons)
    return "".join(f"M{polygon}Z" for polygon in corners)


def _lists(frame: pd.DataFrame) -> dict[str, list[float | None]]:
    """The columns of a frame with four digits of each number, and None where there is none."""
    return {
        name: [None if pd.isna(value) else float(f"{value:.4g}") for value in column]
        for name, column in frame.items()
    }
