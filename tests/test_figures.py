"""Every figure that compares methods, drawn from measured files written by hand."""

import dataclasses
import gzip
import itertools
import json
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.profile import Method, load_profile, profile_names
from sage_lib.files import write_json, write_text
from sage_lib.report import (
    countdown_tables,
    exact_figures,
    exploration_figures,
    guide_figures,
    measured,
    result_figures,
    result_tables,
    style,
    training_figures,
)
from sage_lib.report.measured import families
from sage_lib.tasks.prompts import answer_turn

MAIN = (
    "base",
    "grpo",
    "grpo_no_kl",
    "grpo_forward_kl",
    "grpo_random",
    "grpo_token",
    "grpo_branch",
)
SAMPLES, STEPS = 4, 5
SHIPPED = load_profile("laptop").methods
#: Methods of each case: none, one, few, all 16, and a user's own without "grpo".
CASES = {
    "base only": {},
    "one": {"grpo": SHIPPED["grpo"]},
    "two": {key: SHIPPED[key] for key in ("grpo", "grpo_branch")},
    "five": {key: SHIPPED[key] for key in MAIN[1:6]},
    "sixteen": SHIPPED,
    "own": {
        "mine": Method("Mine", family="new"),
        "yours": Method("Yours", guide={"name": "identity"}),
        "grpo_branch": SHIPPED["grpo_branch"],
        "theirs": Method("A method with a rather long name", family="new"),
    },
}


@pytest.fixture(params=CASES)
def profile(request, tmp_path, monkeypatch):
    """A profile of each case, two seeds and small data, with everything measured."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    made = _profile(CASES[request.param])
    _measure(made)
    for name in ("sft_run", "rl_runs", "evaluations"):  # worked out once, as of published results
        find = getattr(runs, name)
        kept = find(made)
        monkeypatch.setattr(runs, name, lambda p, f=find, k=kept: k if p is made else f(p))
    yield made
    plt.close("all")


def _profile(methods):
    laptop = load_profile("laptop")
    data = [dataclasses.replace(one, rows=3) for one in laptop.evaluation.data]
    evaluation = dataclasses.replace(
        laptop.evaluation,
        samples=SAMPLES,
        ks=(1, 2, 4),
        methods=None,
        resamples=50,
        scored=2,
        data=tuple(data),
    )
    return dataclasses.replace(laptop, seeds=(1, 2), methods=methods, evaluation=evaluation)


def _measure(profile, equal=False):
    """Write what the stages measure; with ``equal``, every value is the same for all problems."""
    rng = np.random.default_rng(0)
    numbers = itertools.count()

    def value():
        return 0.1 if equal else float(rng.uniform(0.01, 1))

    for _, _, run, _ in runs.evaluations(profile):
        counts, scores, support, samples = [], [], [], []
        for data in profile.evaluation.data:
            for number in range(data.rows):
                place = {"dataset": data.label, "problem": f"p{number}"}
                right = 0 if equal else next(numbers) % (SAMPLES + 1)
                texts = [answer_turn("work", str(k)) for k in range(SAMPLES)]
                counts.append({**place, "n": SAMPLES, "c": right, "truncated": 0})
                counts[-1] |= {"rare": right // 2, "valid_common": 0, "valid_rare": right // 2}
                score = {"number": 0, "correct": True, "tokens": 9, "perplexity": 1 + value()}
                scores.append({**place, **score, "entropy": value(), "branching": 1 + value()})
                for way in "LR":
                    support.append({**place, "way": way, "completion": way, "logp": -10 * value()})
                sample = {"completions": texts, "tokens": [9] * SAMPLES}
                sample |= {"finished": [True] * SAMPLES}
                sample |= {"correct": [k < right for k in range(SAMPLES)]}
                samples.append({**place, **sample, "ids": [[1]] * SAMPLES})
        for name, rows in {"counts": counts, "scores": scores, "support": support}.items():
            write_text(run.measured / f"{name}.csv", pd.DataFrame(rows).to_csv(index=False))
        lines = "".join(json.dumps(row) + "\n" for row in samples)
        (run.measured / "samples.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for method, _, run in runs.rl_runs(profile):
        columns = ["reward", "entropy", "grad_norm", "task/rare", "frac_reward_zero_std"]
        if method != "grpo_no_kl":
            columns.append("kl_ref")
        steps = [{"step": step + 1, **{c: value() for c in columns}} for step in range(STEPS)]
        write_text(run.measured / "steps.jsonl", "".join(json.dumps(s) + "\n" for s in steps))
        exact = [
            {"step": step, "dataset": name, "problems": 3}
            | {name: value() for name in ("pass@1", "pass@256", "common", "rare")}
            for step in (0, 2, 4)
            for name in ("both", "forward")
        ]
        write_text(run.measured / "exact.jsonl", "".join(json.dumps(s) + "\n" for s in exact))
    histogram = {"counts": [8, 1, 0, 1], "edges": [0.0, 0.5, 1.0, 1.5, 2.0]}
    distribution = {
        "tokens": 10,
        "mean": 0.2,
        "quantiles": {"0.9": 0.5, "0.999": 1.4},
        "histogram": histogram,
    }
    write_json(runs.entropy_run(profile).measured / "entropy.json", distribution)
    write_text(
        runs.sft_run(profile).measured / "steps.jsonl",
        '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n',
    )
    _measure_traces(runs.trace_run(profile).measured, distribution)
    anchors = ("k3", "k3_corrected", "sequence")
    effects = [{"anchor": anchor, "along": 0.1, "along_se": 0.0} for anchor in anchors]
    size = {"prompts": 4, "batches": 3, "completions": 64}
    write_json(runs.effects_run(profile).measured / "effects.json", {"anchors": effects, **size})


def _measure_traces(folder, distribution):
    token = {"pi": 0.5, "pi_ref": 0.4, "entropy": 0.7, "surprisal": 0.7, "branch": 1.2}
    texts = ["<b>", "a much longer token than that", " "] * 20
    tokens = [{"text": text, **token, "random": 0.9, "token": 1.0} for text in texts]
    trace = {"problem": "What is 1 + 1?", "correct": True, "tokens": tokens}
    write_json(folder / "traces.json", trace)
    branch = {"threshold": 0.5, "ratio": 0.3}
    both = {"entropy": distribution, "surprisal": distribution}
    write_json(folder / "signals.json", {**both, "branch": branch})
    groups = [{"group": g, "tokens": 5, "entropy": g / 10, "share": 0.1} for g in range(1, 11)]
    write_text(folder / "updates.csv", pd.DataFrame(groups).to_csv(index=False))
    impact = [
        {"token": kind, "kept": 0.5, "replaced": 0.25, "continuations": 16}
        for kind in ("most uncertain", "random")
        for _ in range(3)
    ]
    write_text(folder / "impact.csv", pd.DataFrame(impact).to_csv(index=False))


def words(figure: Figure) -> set[str]:
    """Every text of a drawn figure, those of its parts, legends and ticks as well."""
    figure.draw_without_rendering()  # all but its pixels
    shown = [text for text in figure.findobj(plt.Text) if text.get_visible()]
    return {text.get_text() for text in shown}


def compared(profile, family=None):
    """Every figure that compares the evaluated methods, of one of their families."""
    methods, of = ["base", *profile.evaluated], {"family": family}
    yield "figure2", result_figures.figure2(profile, **of)
    yield "figure3", result_figures.figure3(profile, **of)
    yield "figure4", result_figures.figure3(profile, ood=True, **of)
    yield "exact_pass_at_k", exact_figures.exact_pass_at_k(profile, **of)
    yield "mode_shares", result_figures.mode_shares(profile, **of)
    yield "figure7", exploration_figures.figure7(profile, methods, **of)
    yield "exploration", exploration_figures.exploration(profile, methods, **of)
    yield "support", exploration_figures.support(profile, methods, **of)
    yield "unsolvable_upset", exploration_figures.unsolvable_upset(profile, methods, **of)


def test_figures_that_compare_methods_show_a_family_and_say_what_they_leave_out(profile):
    every = ("base", *profile.evaluated)
    for family in families(profile, every):
        own = {key for key in profile.evaluated if profile.methods[key].family == family}
        left = len(every) - len(families(profile, every)[family])
        for name, figure in compared(profile, family):
            shown = {re.sub(r" \(\d+\)$", "", text) for text in words(figure)}
            labels = {profile.label(method) for method in ("base", *own)}
            assert labels <= shown, f"{name} lacks {labels - shown}"
            said = " ".join(" ".join(shown).split())
            assert (f"not shown: {left} methods of other families" in said) == (left > 0), name
        plt.close("all")


def test_the_main_family_is_drawn_unless_another_one_is_named():
    profile = load_profile("laptop")
    every = ["base", *profile.evaluated]
    assert measured.drawn(profile, every)[0] == MAIN
    controls, words_ = measured.drawn(profile, every, "controls")
    assert "shuffled_branch" in controls and "bnpo_branch" not in controls
    assert words_.endswith("methods of other families (losses, main)")
    assert measured.drawn(profile, MAIN) == (MAIN, "")
    with pytest.raises(SageError, match="no method of the family 'x' is drawn here: choose one of"):
        measured.drawn(profile, every, "x")


def test_training_curves_show_every_method_of_their_family(profile):
    found = families(profile, profile.methods) if profile.methods else {}
    assert {method for group in found.values() for method in group} == set(profile.methods)
    for family, methods in found.items():
        assert profile.reference in methods
        own = {key for key, method in profile.methods.items() if method.family == family}
        assert own <= set(methods)
        shown = words(training_figures.training_curves(profile, methods))
        assert {profile.label(method) for method in methods} <= shown


def test_exact_training_shows_every_trained_method(profile):
    shown = words(exact_figures.exact_training(profile))
    for family in families(profile) if profile.methods else ():
        shown |= words(exact_figures.exact_training(profile, family))
    assert {profile.label(method) for method in profile.methods} <= shown
    if not profile.methods:
        assert any("no exact evaluation" in text for text in shown)


def test_figure_2_shows_every_seed_as_a_dot(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    several = _profile(CASES["two"])
    _measure(several)
    one = dataclasses.replace(several, seeds=(1,))
    for profile, dots in ((several, 2), (one, 0)):
        figure = result_figures.figure2(profile)
        right = figure.axes[1]
        drawn = [line for line in right.lines if line.get_gid() == "seeds"]
        assert [len(line.get_xdata()) for line in drawn] == [dots] * 2 * bool(dots)
        table = result_tables.table1(profile)
        means = table[(table["dataset"] == "Avg") & (table["metric"] == "pass@1")]
        for line, mean in zip(drawn, means["mean"].iloc[1:], strict=False):
            assert np.mean(line.get_xdata()) == pytest.approx(mean)
        assert ("one seed" in style.described(figure)) == (dots == 0)
    plt.close("all")


def test_figures_of_stages_are_drawn(profile):
    training_figures.sft_loss(profile)
    drawn = words(training_figures.entropy_thresholds(profile))
    assert any(text.endswith("(right axis)") for text in drawn) or not any(
        method.guide and method.guide["name"] == "branch" for method in profile.methods.values()
    )
    words(training_figures.guide_effects(profile))
    words(exploration_figures.token_updates(profile))
    assert "branch guide" in words(guide_figures.figure1(profile))
    words(guide_figures.distributions(profile))
    text = guide_figures.coloured(profile)
    assert "&lt;b&gt;" in text and "q branch 1.200" in text
    assert all(f"<b>{name}</b>" in text for name in ("entropy", "surprisal", "branch"))


def test_equal_values_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    profile = _profile(CASES["two"])
    _measure(profile, equal=True)
    for _, figure in compared(profile):
        words(figure)
    plt.close("all")


def test_an_error_bar_never_has_a_negative_length():
    axis = plt.figure().subplots()
    style.error_bar(axis, 0, 0.1, 0.1 + 1e-17, 0.1 - 1e-12, **style.look("base"))
    style.error_bar(axis, 1, np.nan, np.nan, np.nan, horizontal=True, **style.look("base"))
    plt.close("all")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("solved", [True, False])
def test_a_venn_diagram_of_any_number_of_sets(count, solved, tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    profile, methods = _profile(CASES["five"]), MAIN[:count]
    found = {method: set() if solved else {"both/p0", f"both/{method}"} for method in methods}
    monkeypatch.setattr(exploration_figures.result_tables, "unsolvable", lambda *_: found)
    shown = " ".join(words(exploration_figures.unsolvable_venn(profile, methods)))
    size = 0 if solved else 2
    for method in methods:
        assert f"{profile.label(method)} ({size})" in shown
    plt.close("all")


def test_a_method_looks_the_same_in_every_profile():
    # A grid has more methods than there are looks: those that come with the paper differ.
    grids = {"countdown", "countdown_rebased"}
    names = [name for name in profile_names() if name not in grids]
    keys = {key for name in names for key in load_profile(name).methods}
    looks = {key: style.look(key) for key in ("base", *sorted(keys))}
    assert len({(chosen["color"], chosen["marker"]) for chosen in looks.values()}) == len(looks)
    for column in ("color", "marker"):
        assert len({looks[key][column] for key in MAIN}) == len(MAIN)
    # Another method's look follows from its key alone, and is none of theirs.
    other = style.look("mine")
    assert other == style.look("mine") and other != style.look("yours")
    assert other["color"] not in {looks[key]["color"] for key in ("base", "grpo", "grpo_branch")}
    taken = {(chosen["color"], chosen["marker"]) for chosen in looks.values()}
    assert (other["color"], other["marker"]) not in taken


def test_a_family_is_drawn_with_what_it_is_compared_with():
    profile = load_profile("laptop")
    found = families(profile, ["base", *profile.evaluated])
    assert set(found) == {"main", "losses", "controls"}
    assert all(group[:2] == ("base", "grpo") for group in found.values())
    assert "grpo_branch" in found["controls"], "the branch guide beside the shuffled one"
    assert families(dataclasses.replace(profile, methods={}), ["base"]) == {"base": ("base",)}


def test_saving_leaves_a_record(tmp_path):
    figure = guide_figures.schedules()
    made = style.save_figure(figure, "schedules", tmp_path / "theory")
    folder = tmp_path / "theory"
    assert made == [folder / f"schedules.{ending}" for ending in ("pdf", "png", "svg")]
    assert all(path.stat().st_size > 1000 for path in made)
    record = json.loads((folder / "schedules.json").read_text())
    assert record["figure"] == "schedules" and record["revision"]
    assert record["alt"] == style.described(figure)
    assert record["alt"].startswith("random guide (eq. 9); token guide (eq. 10)")
    plt.close(figure)


def test_the_last_digit_of_a_layout_is_not_in_an_svg(tmp_path):
    """Matplotlib hashes it into the names of clip paths, which no picture shows."""
    drawn = []
    for shift in (0.0, 1e-9):
        figure, axis = plt.subplots()
        axis.plot([0, 1], marker="o")
        axis.set_position([0.1 + shift, 0.1, 0.8, 0.8])
        axis.set_title("pabcdef0123")
        style.save_figure(figure, "shifted", tmp_path / str(shift))
        plt.close(figure)
        drawn.append((tmp_path / str(shift) / "shifted.svg").read_text())
    assert drawn[0] == drawn[1] and "pabcdef0123" in drawn[0]
    ids, used = (set(re.findall(p, drawn[0])) for p in ('id="([pm]\\d+)"', r"#([pm]\d+)[\")]"))
    assert used and used <= ids


def test_a_large_svg_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "LARGEST_SVG", 10)
    (tmp_path / "schedules.svg").write_text("of an earlier drawing")
    made = style.save_figure(guide_figures.schedules(), "schedules", tmp_path)
    assert [path.suffix for path in made] == [".pdf", ".png"]
    assert not (tmp_path / "schedules.svg").exists()
    plt.close("all")


def test_a_caption_stands_below_the_legend_and_breaks_to_the_figures_width(tmp_path):
    with plt.rc_context(style.STYLE):
        figure, axis = plt.subplots(figsize=(style.NARROW, 2))
        axis.plot([1, 2], label="a line")
        legend = figure.legend(loc="outside lower center")
        style.describe(figure, "A title of " + "many words " * 9, "one. part", "", "word " * 40)
    style.save_figure(figure, "trial", tmp_path)
    [caption] = [t for t in figure.texts if t.get_gid() == style.CAPTION]
    boxes = [one.get_window_extent() for one in (caption, legend, axis, figure._suptitle)]
    assert boxes[0].y1 < boxes[1].y0 < boxes[1].y1 < boxes[2].y0 < boxes[2].y1 < boxes[3].y0
    assert all(box.width <= figure.bbox.width for box in boxes)
    assert style.described(figure).startswith("A title of many words")
    assert "one. part; word word" in style.described(figure)
    plt.close(figure)


def test_steps_are_whole_numbers_however_short_a_run_is():
    figure, axis = plt.subplots()
    axis.plot([1, 2, 3], [0, 1, 2])
    style.steps(axis)
    figure.canvas.draw()
    ticks = [text.get_text() for text in axis.get_xticklabels()]
    assert ticks and all(
        tick.replace("\N{MINUS SIGN}", "-").lstrip("-").isdigit() for tick in ticks
    )
    plt.close(figure)


def test_every_panel_of_the_training_figures_has_its_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    profile = _profile(CASES["two"])
    _measure(profile)
    figure = training_figures.training_curves(profile, list(profile.methods))
    figure.canvas.draw()
    shown = [axis for axis in figure.axes if axis.axison]
    logged = set(training_figures.PANELS) & set(measured.training(profile).columns)
    assert len(shown) == min(6, len(logged)) > 3, "as many as its runs log"
    for axis in shown:
        for labels in (axis.get_xticklabels(), axis.get_yticklabels()):
            assert any(label.get_text() and label.get_visible() for label in labels)
    plt.close("all")


def test_a_run_that_collapsed_is_in_the_curve_up_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    profile = _profile(CASES["two"])
    frame = pd.DataFrame(
        [("grpo", seed, step, float(seed)) for seed in (1, 2) for step in range(1, 41 - 20 * seed)],
        columns=["method", "seed", "step", "reward"],
    )
    frame = pd.concat([frame, frame.assign(seed=2, reward=2.0).head(10)], ignore_index=True)
    figure, axis = plt.subplots()
    training_figures._curves(axis, profile, frame, ["grpo"], "reward")
    values = axis.lines[0].get_ydata()
    assert values[:9].tolist() == [1.5] * 9 and values[-1] == 1.0
    plt.close(figure)


def test_curves_of_the_support_are_those_of_its_table(tmp_path, monkeypatch):
    """From arrays as from sets."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    profile = _profile(CASES["two"])
    _measure(profile)
    limits = (0.5, 0.05, 0.001)
    table = countdown_tables.support(profile, limits)
    curves = countdown_tables.support_curves(profile, ["base", "grpo_branch"], limits)
    columns = ["method", "epsilon", "size", "entered", "left", "of"]
    expected = table.loc[table["method"].isin(["base", "grpo_branch"]), columns]
    pd.testing.assert_frame_equal(
        curves[columns], expected.reset_index(drop=True), check_dtype=False
    )
    assert expected["entered"].sum() > 0 and expected["left"].sum() > 0


def test_a_figure_that_is_drawn_again_leaves_its_files_as_they_are(tmp_path):
    figure = guide_figures.schedules()
    made = style.save_figure(figure, "schedules", tmp_path)
    about = tmp_path / "schedules.json"
    about.write_text("{}")  # of the revision that drew it first
    before = [path.read_bytes() for path in made]
    assert style.save_figure(guide_figures.schedules(), "schedules", tmp_path) == made
    assert [path.read_bytes() for path in made] == before and about.read_text() == "{}"
    figure.axes[0].set_title("another")
    style.save_figure(figure, "schedules", tmp_path)
    assert json.loads(about.read_text())["figure"] == "schedules"
    plt.close("all")
