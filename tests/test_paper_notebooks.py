"""What notebooks 09 and 10 show of the paper's profiles, on planted counts: before anybody pays."""

import re

import nbformat
import pandas as pd
import pytest

from sage_lib import paths
from sage_lib.experiment import results as results_module
from sage_lib.experiment.profile import load_profile
from sage_lib.report import page


@pytest.fixture
def cells(monkeypatch, tmp_path):
    """Runs a notebook's code cells on planted counts: (number, profile, how many) -> its tables."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    shown = []
    monkeypatch.setattr(page, "_display", shown.append)

    def run(number, profile, how_many=None):
        results = results_module.Results(load_profile(profile), own=True)
        results.counts = planted(results.profile)
        results.runs = results.counts.drop_duplicates(["method", "seed"]).assign(stage="evaluation")
        monkeypatch.setattr(results_module, "load_results", lambda *named, **options: results)
        [path] = paths.NOTEBOOKS.glob(f"{number}_*.ipynb")
        code = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
        space = {}
        for source in code[:how_many]:
            exec(source, space)
        return space, [
            re.sub("<[^>]+>|&nbsp;", " ", s.to_html()) for s in shown if hasattr(s, "to_html")
        ]

    return run


def planted(profile):
    """Counts of six problems of each data set, in which no two sets are alike."""
    rows = []
    for method in ("base", *profile.methods):
        for seed in [None] if method == "base" else profile.seeds:
            for place, data in enumerate(profile.evaluation.data):
                for problem in range(6):
                    c = (place + problem) % 7 * profile.evaluation.samples // 16
                    row = (f"{method}-{seed}", method, seed, data.label, problem)
                    rows.append((*row, profile.evaluation.samples, c))
    columns = ["run", "method", "seed", "dataset", "problem", "n", "c"]
    return pd.DataFrame(rows, columns=columns).astype({"seed": "Int64"})


def test_notebook_9_shows_the_table_of_the_profiles_own_model(cells):
    """Table 4 beside the distilled model, and none beside those of Figure 6."""
    _, tables = cells("09", "paper_distilled", 4)
    text = "\n".join(tables)
    assert "0.429" in text and "0.708" not in text and "0.230 ± 0.036" in text
    before = len(tables)
    _, tables = cells("09", "paper_full", 4)
    assert "paper's" not in "\n".join(tables[before:])


def test_notebook_10_averages_no_two_data_sets(cells):
    space, tables = cells("10", "paper_ood")
    names = ["minerva", *(f"knights_knaves_{n}" for n in range(2, 9))]
    assert list(space["levels"]) == names
    counts = planted(load_profile("paper_ood"))
    for name, levels in space["levels"].items():
        of_base = counts[(counts["dataset"] == name) & (counts["method"] == "base")]
        of_pass_1 = levels[(levels["method"] == "base") & (levels["metric"] == "pass@1")]
        assert of_pass_1["mean"].item() == pytest.approx((of_base["c"] / of_base["n"]).mean())
    assert any("0.135" in table and "0.477" in table for table in tables), "Table 9"
