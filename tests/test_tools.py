"""The tools: benchmarks in turns, links of notebooks, pages of the site, checksums."""

import copy
import json
import os
import re
import subprocess
import sys
import threading
import types
from collections import Counter

import bench
import build_site
import links
import lock
import nbformat
import numpy as np
import pytest

from sage_lib import paths
from sage_lib.errors import SageError

NAMES, STEPS = ["first", "second", "third"], 6


class Fake:
    """Trains some steps between the callback's calls, or fails in its second one."""

    def __init__(self, name, turns, seen, fails=False):
        self.name, self.seen, self.fails = name, seen, fails
        self.callback = turns.callback(name)

    def train(self):
        for step in range(STEPS):
            self.callback.on_step_begin(None, types.SimpleNamespace(global_step=step), None)
            if self.fails and step == 1:
                raise SageError("planted")
            self.seen.append(self.name)
            self.callback.on_step_end(None, None, None)


def train(fails=""):
    """The order of steps, and what was raised."""
    turns, seen, raised = bench.Turns(NAMES), [], []

    def work():
        try:
            turns.run([Fake(name, turns, seen, name == fails) for name in NAMES])
        except SageError as error:
            raised.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "they wait for one another without end"
    return seen, raised


def test_trainers_take_turns_in_an_order_of_each_round():
    seen, raised = train()
    rounds = [tuple(seen[start : start + 3]) for start in range(0, len(seen), 3)]
    assert [sorted(one) for one in rounds] == [NAMES] * STEPS and not raised
    assert len(set(rounds)) > 1 and train()[0] == seen
    turns, places = bench.Turns(NAMES), Counter()
    for _ in range(600 * len(NAMES)):
        places[turns.waiting[0], len(turns.waiting)] += 1
        turns.pass_on()
    assert len(places) == 9 and min(places.values()) > 150, "each in each place"


@pytest.mark.parametrize("fails", NAMES)
def test_one_that_fails_ends_the_others_and_is_what_is_raised(fails):
    whole, (seen, raised) = train()[0], train(fails)
    assert raised == ["planted"] and seen == whole[: 3 + whole[3:6].index(fails)]


def test_ratios_are_those_of_paired_steps():
    theirs = np.linspace(1, 2, 21)
    found = bench.ratios(theirs * np.linspace(0.9, 1.1, 21), theirs)
    assert found["ratio"] == pytest.approx(1) and found["steps"] == 21
    assert (found["ratio 10 %"], found["ratio 90 %"]) == pytest.approx((0.92, 1.08))
    # The sixth and the sixteenth of 21: of the binomial's 1/2, 97.3 % between them.
    assert (found["low"], found["high"]) == pytest.approx((0.95, 1.05))
    assert np.isnan(bench.ratios([1.0] * 5, [1.0] * 5)["low"])
    answers = [[{"content": "x" * length}] for length in range(14)]
    assert set(bench.any_reward(answers)) == {0.0, 1.0}


# --- links ----------------------------------------------------------------------------------------

WHERE = "some-one/sage.companion"
PATHS = sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))
STEMS = [path.stem for path in PATHS]


@pytest.mark.parametrize("path", PATHS[::7], ids=lambda path: path.stem)
def test_a_notebook_gets_its_badges_and_loses_them(path):
    before = json.loads(path.read_text())
    after = links.with_links(copy.deepcopy(before), path.stem, STEMS, WHERE)
    nbformat.validate(nbformat.from_dict(after))
    heading, _, parts, _, shown, *_ = after["cells"][0]["source"].split("\n")
    assert heading.startswith(f"# {path.stem[:2]} ")
    assert parts.startswith("Parts: " if path is PATHS[0] else "Part: [")
    assert f"{WHERE}/blob/main/notebooks/{path.name}" in shown
    assert links.with_links(copy.deepcopy(after), path.stem, STEMS, WHERE) == after
    again = links.with_links(after, path.stem, STEMS, None)
    assert links.notebook_text(again) == path.read_text() == links.notebook_text(before)


def test_colab_is_set_up_below_the_parameters_and_on_colab_alone(tmp_path, monkeypatch):
    notebook = links.with_links(json.loads(PATHS[0].read_text()), STEMS[0], STEMS, WHERE)
    first, setup, *_ = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "parameters" in first["metadata"]["tags"] and "colab" in setup["metadata"]["tags"]
    called = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(subprocess, "run", lambda command, check: called.append(command))
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    exec(setup["source"], {})
    assert called == []
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    exec(setup["source"], {})
    assert [command[-1] for command in called] == [f"https://github.com/{WHERE}", "gpu"]
    assert sys.path[0] == str(tmp_path / "sage.companion")


# --- site, locks ----------------------------------------------------------------------------------


def test_links_of_a_page_lead_to_the_sites_pages():
    text = (
        "[a](running.md#set-up) [b](../README.md) [c](../sage_lib/theory) [d](../LICENSE) "
        "![e](../figures/x/y.png) [f](https://h.org) [![g](https://h.org/b.svg)](https://h.org)"
    )
    assert build_site.on_site(text, "docs") == (
        "[a](running.md#set-up) [b](index.md) [c](api/sage_lib/theory/index) d (`LICENSE`) "
        "![e](/figures/x/y.png) [f](https://h.org) [g](https://h.org)"
    )


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("Eq. 4 of both.", {("SAGE", 4)}),
        ("As eq. 19-21 say, and eq. 3, 6 and 8.", {("SAGE", n) for n in (19, 20, 21, 3, 6, 8)}),
        ("The exploration report's eq. 6. Eq. 2 here.", {("exploration report", 6), ("SAGE", 2)}),
        ("Table 4 and freq. 3", set()),
    ],
)
def test_equations_that_a_docstring_names(docstring, found):
    assert set(build_site.equations(docstring)) == found


def test_the_sites_sources_are_whole(tmp_path):
    build_site.assemble(tmp_path)
    for page in ("index", "api", "gallery", "reported", "equations", "running"):
        assert len((tmp_path / f"{page}.md").read_text()) > 500
    assert len(list((tmp_path / "notebooks").glob("*.ipynb"))) == len(PATHS)
    parts = [page.read_text() for page in (tmp_path / "notebooks").glob("*.md")]
    assert len(parts) == len(links.PARTS)
    for stem in STEMS[1:]:
        assert sum(f"\n{stem}\n" in part for part in parts) == 1
    assert "0.465 ± 0.063" in (tmp_path / "reported.md").read_text()


def test_the_first_page_is_the_readmes_first_screen():
    commands = "In a clone:\n\n```\nmake test\n```\n"
    page = build_site.home(f"# Title\n\nWords.\n\n{commands}{build_site.FIRST_SCREEN}\n\nMore.\n")
    assert page.index("Words.") < page.index("data-tilt") < page.index(commands)
    linked = re.findall(r"^- .*?\]\((\S+?)\)", page, re.MULTILINE)
    assert "More." not in page
    assert linked[:3] == ["claims.md", "runs.md", "gallery.md"] and len(linked) == 6
    with pytest.raises(SageError, match="has no line <!-- first screen: end -->"):
        build_site.home("# Title\n\nWords.\n")


@pytest.mark.parametrize(
    ("source", "tags", "folded"),
    [
        ("import numpy\nx = 1", [], True),
        ("import numpy\nx = 1", ["equation"], False),
        ("figure, axes = plt.subplots(1)" + "\naxes.plot()" * 12, [], True),
        ("figure, axes = plt.subplots(1)", [], False),
        ("axes.plot()\n" * 7 + 'page.show(figure, "name")', [], True),
        ('page.show(figure, "name")', [], False),
        ("rows = []" + "\nrows.append(1)" * 20, [], False),
    ],
)
def test_cells_that_load_or_draw_are_folded(source, tags, folded):
    cells = [{"cell_type": "markdown", "source": "# 01 Title", "metadata": {}}]
    cells += [{"cell_type": "code", "source": source, "metadata": {"tags": tags}, "outputs": []}]
    [_, cell] = build_site.notebook_page({"cells": cells})["cells"]
    assert ("hide-input" in cell["metadata"]["tags"]) == folded


def test_a_picture_without_words_gets_those_of_its_heading():
    output = {"data": {"image/png": ""}, "metadata": {}}
    cells = [{"cell_type": "markdown", "source": "# 01 Title\n\n## A part", "metadata": {}}]
    cells += [{"cell_type": "code", "source": "x", "metadata": {}, "outputs": [output]}]
    [_, cell] = build_site.notebook_page({"cells": cells})["cells"]
    assert cell["metadata"]["mystnb"] == {"image": {"alt": "Figure: A part"}}


def test_the_glossary_is_a_directive_on_the_site():
    rows = "| right, correct | of *it* |\n| q | a guide |\n"
    text = f"# Glossary\n\n| term | meaning |\n|---|---|\n{rows}"
    shown = "# Glossary\n\n```{glossary}\nright\ncorrect\n  of *it*\n\nq\n  a guide\n\n```\n"
    assert build_site.glossary(text) == shown


def test_a_lock_has_what_a_package_needs():
    found = lock.walk(["scipy"])
    assert {"scipy", "numpy"} <= set(found) and "torch" not in found
    assert lock.licence("numpy").startswith("BSD-3-Clause") and lock.licence("certifi") == "MPL-2.0"


def test_the_ten_minutes_of_a_gpu_fail_with_the_steps_that_never_passed(tmp_path):
    log = tmp_path / "steps.jsonl"

    def ended(statuses):
        rows = [json.dumps({"step": step, "status": status}) for step, status in statuses]
        log.write_text("".join(f"{row}\n" for row in rows))
        command = ["bash", str(paths.ROOT / "tools" / "gpu_ten_minutes.sh"), str(tmp_path)]
        env = os.environ | {"TOTAL": "0", "PYTHON": sys.executable}  # no step is started
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.returncode, done.stderr.splitlines()

    status, said = ended([])
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert {"card", "guide_gain", "smollm_branch_strong-s3412"} <= set(steps) and len(steps) == 18
    assert (status, said) == (1, [f"{step}: not started" for step in steps])
    good = dict.fromkeys(steps, "passed") | {"card": "skipped"}
    assert ended([("sft", "failed"), *good.items()]) == (0, []), "a step's last call counts"
    bad = good | {"card": "cut", "guide_gain": "failed"}
    assert ended(bad.items()) == (1, ["card: cut", "guide_gain: failed"])
    del bad["sft"]
    assert ended(bad.items()) == (1, ["card: cut", "guide_gain: failed", "sft: not started"])
