"""Published results: read like one's own, never written by a stage, put there by one command, drawn
again to the same files, and compared with what a user measured."""

import dataclasses
import json
import os
import shutil
from concurrent.futures import Future

import nbformat
import numpy as np
import pandas as pd
import pytest

from sage_lib import files, paths
from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.profile import load_profile, published_specs
from sage_lib.experiment.records import Record
from sage_lib.pipeline import cli, compare, draw, notebooks, publish, stages
from sage_lib.report import measured, page, training_figures, training_tables

#: Published profiles that are known to be older than their settings, until they are measured again.
#: Must be empty before a release.
OLD = {
    name: reason
    for name, spec in published_specs().items()
    if (reason := runs.known_stale(load_profile(spec, "published")))
}
SPEC = "smoke+train=[grpo]+sft_data.rows=9"
STEPS = 405  # of a long log, whose last block is not a whole one


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A user's own folders and the published ones, all of them new."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path / "own"))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(paths, "PUBLISHED", tmp_path / "published")
    monkeypatch.setattr(paths, "FIGURES", tmp_path / "figures")
    return tmp_path


@pytest.fixture
def own(places):
    """A profile of which every run is finished."""
    profile = load_profile(SPEC)
    for number in range(len(runs.every_run(profile))):
        finish(profile, number)
    return profile


def long_log():
    """Every value tells its step, so that means over blocks can be worked out by hand."""
    times = dict.fromkeys(training_tables.TIMES, 1.0)
    extra = {"loss": 0.1, "learning_rate": 0.001}
    return [
        {"step": n, "reward": n / 1000, "kl_ref": n / 7, "grad_norm": float(n), **times, **extra}
        for n in range(1, STEPS + 1)
    ]


def finish(profile, number, weights="aa"):
    """What a stage leaves behind of one run; runs depend on those before them."""
    run = runs.every_run(profile)[number]
    run.prepare()
    for name in run.makes:
        made = run.model / "model.safetensors" if name == "model" else run.build / name
        files.write_text(made, weights)
    if run.stage == "entropies":
        quantiles = {"0.9": 0.3, "0.999": 2.0}
        files.write_json(run.measured / "entropy.json", {"quantiles": quantiles})
    if run.stage == "rl":
        files.rewrite_lines(run.measured / "steps.jsonl", long_log())
    if run.stage == "evaluate":
        table = "dataset,problem,way,completion,logp\nboth,p0,L,0,-1.5\n"
        files.write_text(run.measured / "support.csv", table)
        files.write_text(
            run.measured / "counts.csv", "dataset,problem,n,c,truncated\nboth,p0,8,3,0\n"
        )
    record = Record(run.stage, profile.name, run.fingerprint, 0, {})
    run.finish(record, weights=weights)


def tree(folder):
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


# --- what is published with the companion ---------------------------------------------------------


@pytest.mark.parametrize("name", published_specs())
def test_published_results_are_those_of_todays_settings(name):
    profile = load_profile(published_specs()[name], "published")
    if name in OLD:
        with pytest.raises(SageError, match="not those of its settings"):
            runs.require_current(profile)
    else:
        runs.require_current(profile)
        assert draw.missing(profile) == []


def test_what_is_published_is_small_and_holds_no_weights():
    published = [path for path in paths.PUBLISHED.rglob("*") if path.is_file()]
    assert published and sum(path.stat().st_size for path in published) < 30e6
    assert not {".safetensors", ".bin", ".pt"} & {path.suffix for path in published}


# --- reading it -----------------------------------------------------------------------------------


def test_published_results_are_read_without_the_models_that_made_them(own, monkeypatch, capsys):
    publish.publish(own)
    monkeypatch.setenv("SAGE_BUILD", str(paths.PUBLISHED.parent / "elsewhere"))
    monkeypatch.setattr(stages, "start", lambda *_: pytest.fail("something is trained"))
    profile = load_profile(SPEC, "published")
    before = tree(paths.PUBLISHED)
    stages.check_machine(dataclasses.replace(profile, compute=load_profile("paper").compute))
    found = stages.run(profile, "sft", "rl", "evaluate")
    assert list(found) == ["sft", "grpo-s3407", "eval-sft", "eval-grpo-s3407"]
    assert found["sft"]["weights"] == "aa"
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("sft, rl, evaluate: published results, made at revision")
    assert line.endswith(f"again: sage-companion reproduce --profile '{SPEC}'")
    assert tree(paths.PUBLISHED) == before and not (paths.build(profile.name)).exists()
    page.Page(profile)


def test_a_stage_never_writes_over_published_results(own):
    publish.publish(own)
    run = runs.rl_run(load_profile(SPEC, "published"), "grpo", 3407)
    with pytest.raises(SageError, match="rl/grpo-s3407 is published with the companion"):
        run.prepare()


def test_of_changed_settings_the_names_are_told(own):
    publish.publish(own)
    profile = load_profile(SPEC, "published")
    other = dataclasses.replace(profile, rl={**profile.rl, "weight_decay": 0.5})
    words = r"\(rl/grpo-s3407: rl.weight_decay was 0.01 and is 0.5\): sage-companion reproduce"
    with pytest.raises(SageError, match=words):
        stages.run(other, "rl")
    with pytest.raises(SageError, match=words):
        page.Page(other)
    record = runs.sft_run(profile).record
    old = json.loads(record.read_text())
    files.write_json(record, {**old, "fingerprint": "0", "made_from": None})
    del old["made_from"], old["recipe"]
    files.write_json(record, {**old, "fingerprint": "0"})
    with pytest.raises(SageError, match="sft: its record is too old to tell what has changed"):
        runs.require_current(profile)


def test_where_nothing_is_published_a_sentence_says_so(own):
    publish.publish(own)
    words = r'nothing is published for smoke\+rl.beta=0.2: set results = "own" to train it'
    with pytest.raises(SageError, match=words):
        load_profile("smoke+rl.beta=0.2", "published")
    with pytest.raises(SageError, match="results are 'own' or 'published', not 'mine'"):
        load_profile("smoke", "mine")
    profile = load_profile(SPEC, "published")
    runs.trace_run(profile).record.unlink()
    with pytest.raises(SageError, match="trace is not among the published results"):
        stages.run(profile, "trace")


def test_a_notebook_of_another_profile_reads_what_there_is_of_a_second_one(own):
    assert measured.complete(SPEC, "published") is None
    publish.publish(own)
    assert measured.complete(SPEC, "published").published
    assert measured.complete(SPEC, "own") is not None
    assert measured.complete("smollm", "own") is None


# --- publishing -----------------------------------------------------------------------------------


def test_publishing_again_changes_nothing_and_weights_stay_behind(own):
    sizes = publish.publish(own)
    once = tree(paths.PUBLISHED)
    assert sizes["record.json"] > 0 and sum(sizes.values()) == sum(map(len, once.values()))
    assert not any("safetensors" in name for name in once)
    files.write_text(paths.measured(own.name, True) / "left" / "over.csv", "a\n")
    assert publish.publish(own) == sizes and tree(paths.PUBLISHED) == once


def test_packed_tables_are_read_as_they_were(own):
    publish.publish(own)
    theirs = load_profile(SPEC, "published")
    one, other = (runs.evaluations(profile)[0][2] for profile in (own, theirs))
    assert not (other.measured / "support.csv").exists()
    table = measured.table_of(own, one, "support.csv")
    assert table.equals(measured.table_of(theirs, other, "support.csv")) and len(table) == 1


def test_unfinished_runs_are_refused_or_follow_later(places):
    profile = load_profile(SPEC)
    with pytest.raises(SageError, match=r"7 of 7 runs of smoke\S+ are not finished, sft first"):
        publish.publish(profile, finished_only=True)
    finish(profile, 0)
    finish(profile, 1)
    with pytest.raises(
        SageError, match=r"5 of 7 runs .* grpo-s3407 first: sage-companion stage rl"
    ):
        publish.publish(profile)
    assert not paths.PUBLISHED.exists(), "nothing was published"
    publish.publish(profile, finished_only=True, command="sage-companion grid front")
    theirs = load_profile(SPEC, "published")
    assert draw.missing(theirs) == ["trace", "effects", "eval-sft"]
    assert not theirs.methods, "those that are published"
    assert runs.published_command(theirs) == "sage-companion grid front"
    finish(profile, 2)
    publish.publish(profile, finished_only=True)
    assert "grpo-s3407" in {path.parent.name for path in paths.PUBLISHED.rglob("record.json")}


def finish_named(profile, *names, weights="aa"):
    for name in names:
        numbers = {run.name: number for number, run in enumerate(runs.every_run(profile))}
        finish(profile, numbers[name], weights)


def test_runs_of_another_base_join_with_seeds_of_their_own_alone(places):
    """Machines round differently; what is compared, a seed's runs, starts from one base."""
    profile = load_profile(f"{SPEC.replace('[grpo]', '[grpo, grpo_no_kl]')}+seeds=[3407, 3408]")
    finish_named(profile, "sft", "entropies", "grpo-s3407")
    publish.publish(profile, finished_only=True)
    kept = tree(paths.PUBLISHED)
    finish_named(profile, "sft", "entropies", "grpo_no_kl-s3407", weights="bb")
    with pytest.raises(SageError, match="starts from another base than grpo-s3407"):
        publish.publish(profile, finished_only=True)
    [other] = [run for run in runs.every_run(profile) if run.name == "grpo_no_kl-s3407"]
    other.record.unlink()
    finish_named(profile, "grpo_no_kl-s3408", weights="bb")
    publish.publish(profile, finished_only=True)
    now = tree(paths.PUBLISHED)
    assert {name: now[name] for name in kept} == kept, "the base that was there stays"
    assert any("grpo_no_kl-s3408" in name for name in now)


def test_a_profile_of_which_a_part_is_published_has_that_part(places):
    profile = load_profile(f"{SPEC}+seeds=[3407, 3408]")
    finish_named(profile, "sft", "entropies", "grpo-s3408", "eval-sft", "eval-grpo-s3408")
    publish.publish(profile, finished_only=True)
    theirs = load_profile(profile.spec, "published")
    assert [(method, seed) for method, seed, _ in runs.rl_runs(theirs)] == [("grpo", 3408)]
    assert [seed for _, seed, _ in runs.rl_runs(profile)] == [3407, 3408]
    runs.require_current(theirs)


def test_a_kill_between_two_renames_loses_nothing(own):
    publish.publish(own)
    once, target = tree(paths.PUBLISHED), paths.measured(own.name, published=True)
    target.rename(target.with_name(f".{target.name}.old"))
    runs.trace_run(own).record.unlink()
    publish.publish(own, finished_only=True)
    assert tree(paths.PUBLISHED) == once, "what was published before is still there"


def test_a_profile_of_ones_own_file_is_refused(tmp_path):
    files.write_json(tmp_path / "mine.yaml", {"name": "mine", "extends": "smoke"})
    with pytest.raises(SageError, match="mine is a file of your own"):
        publish.publish(load_profile(tmp_path / "mine.yaml"))


# --- thinned step logs ----------------------------------------------------------------------------


def test_a_thinned_log_has_the_first_step_and_means_over_blocks_of_ten():
    rows = measured.thinned(long_log())
    assert [row["step"] for row in rows[:4]] == [1, 10, 20, 30] and rows[-1]["step"] == STEPS
    assert [row["steps"] for row in rows[:3]] == [1, 9, 10] and rows[-1]["steps"] == 5
    assert sum(row["steps"] for row in rows) == STEPS
    assert rows[2]["grad_norm"] == np.mean(range(11, 21))
    assert rows[2]["kl_ref"] == float(f"{np.mean(range(11, 21)) / 7:.6g}")
    assert "loss" not in rows[0], "no table or figure reads it"
    short = long_log()[: measured.WHOLE_LOG]
    assert measured.thinned(short) == short
    assert len(measured.thinned(long_log()[: measured.WHOLE_LOG + 1])) == 12


def test_a_value_that_some_steps_do_not_log_is_the_mean_of_those_that_do():
    log = [{"step": n, **({"sampling/rounds": 2.0 * n} if n % 2 else {})} for n in range(1, 201)]
    assert measured.thinned(log)[2]["sampling/rounds"] == 2 * np.mean([11, 13, 15, 17, 19])


def test_tables_and_curves_of_a_thinned_log_are_those_of_the_whole_one(own):
    publish.publish(own)
    theirs = load_profile(SPEC, "published")
    whole, thin = measured.training(own), measured.training(theirs)
    assert list(thin["step"]) == list(whole["step"])
    assert np.allclose(thin["reward"].mean(), whole["reward"].mean(), rtol=1e-5)
    window = 40
    drawn = [training_figures._smooth(log["grad_norm"].to_numpy(), window) for log in (whole, thin)]
    at = np.arange(1, STEPS + 1) % 10 == 0
    assert np.allclose(drawn[0][at], drawn[1][at], rtol=1e-6)
    thirds = list(training_tables.THIRDS)
    one, other = (training_tables.table5(profile)[thirds] for profile in (own, theirs))
    assert np.allclose(one, other, rtol=0.01), "a third may cut a block in two"


def test_whatever_a_table_or_a_figure_reads_is_kept():
    read = {*training_figures.PANELS, *training_tables.TIMES, "grad_norm"}
    kept = {name for name in read if name in measured.LOGGED or name.startswith(measured.LOGGED_OF)}
    assert kept == read
    source = (paths.NOTEBOOKS / "21_every_method.ipynb").read_text()
    for name in ("kl", "completions/clipped_ratio", "sampling/rounds"):
        assert f'\\"{name}\\"' in source and name in measured.LOGGED


# --- comparing ------------------------------------------------------------------------------------

TABLE = pd.DataFrame(
    {
        "method": ["base", "grpo"],
        "metric": ["pass@1", "pass@1"],
        "mean": [0.30, 0.40],
        "std": [0.01, 0.02],
        "low": [0.25, 0.35],
        "high": [0.35, 0.45],
        "problems": [24, 24],
    }
)
#: What is changed in a user's table -> verdict, largest difference, a part of where.
PLANTED = {
    "nothing": ({}, "identical", 0.0, ""),
    "below the 10th digit": ({"mean": [0.30 + 1e-12, 0.40]}, "identical", 0.0, ""),
    "inside": ({"mean": [0.31, 0.38]}, "within its interval", -0.02, "mean of grpo, pass@1"),
    "outside": ({"mean": [0.31, 0.46]}, "differs", 0.06, "mean of grpo, pass@1"),
    "just inside": ({"mean": [0.25, 0.40]}, "within its interval", -0.05, "mean of base"),
    "missing": ({"mean": [0.30, np.nan]}, "differs", np.nan, "mean of grpo"),
    "spread": ({"std": [0.9, 0.9]}, "within its interval", 0.0, "only the intervals"),
    "interval": ({"low": [0.1, 0.35]}, "within its interval", 0.0, "only the intervals"),
    "a count": ({"problems": [24, 23]}, "differs", -1.0, "problems of grpo"),
    "a word": ({"metric": ["pass@1", "pass@8"]}, "differs", np.nan, "metric of row 2: 'pass@8'"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_difference_is_found_and_measured(planted):
    changes, verdict, difference, where = PLANTED[planted]
    found = compare.compare_tables(TABLE.assign(**changes), TABLE)
    assert found[0] == verdict and where in found[2]
    assert found[1] == pytest.approx(difference, nan_ok=True)


def test_other_rows_and_columns_are_a_difference():
    for other in (TABLE.head(1), TABLE.drop(columns="std"), TABLE.rename(columns={"low": "lo"})):
        verdict, _, where = compare.compare_tables(other, TABLE)
        assert verdict == "differs" and "other rows or columns" in where


def test_an_interval_belongs_to_the_value_before_it():
    names = ["method", "rare_share", "rare_low", "rare_high", "both", "both_low", "both_high", "n"]
    bounds, inner = compare.intervals(names)
    assert bounds == {"rare_share": ("rare_low", "rare_high"), "both": ("both_low", "both_high")}
    assert inner == {"rare_low", "rare_high", "both_low", "both_high"}
    assert compare.intervals(["early", "early_std", "mid", "mid_std"]) == ({}, set())
    names = ["method", "pass@1", "pass@1 low", "pass@1 high", "rare", "low over seeds"]
    bounds, inner = compare.intervals([*names, "high over seeds", "seconds"])
    assert bounds == {"pass@1": ("pass@1 low", "pass@1 high")}
    assert inner == {"pass@1 low", "pass@1 high", "low over seeds", "high over seeds"}
    empty = TABLE.assign(low=np.nan, high=np.nan)  # all differences agree: there is no interval
    assert compare.compare_tables(empty.assign(mean=[0.3, 0.5]), empty)[0] == "differs"


def test_values_in_their_published_intervals_are_counted_and_seconds_are_a_machines_own():
    assert compare.inside(TABLE.assign(mean=[0.31, 0.46]), TABLE) == (1, 2)
    assert compare.inside(TABLE.assign(mean=[0.31, np.nan], low=9.0), TABLE) == (1, 2)
    assert compare.inside(TABLE.head(1), TABLE) == (0, 0)
    timed = TABLE.assign(seconds=[1.0, 2.0])
    assert compare.compare_tables(timed.assign(seconds=7.0), timed)[0] == "identical"


def test_a_run_is_compared_table_by_table_and_the_comparison_kept(own, capsys):
    publish.publish(own)
    for name in ("same", "other", "left_out"):
        files.write_text(paths.measured(own.name, True) / f"{name}.csv", TABLE.to_csv(index=False))
    mine = {"same": TABLE, "other": TABLE.assign(mean=[0.1, 0.4])}
    for name, table in mine.items():
        files.write_text(paths.measured(own.name) / f"{name}.csv", table.to_csv(index=False))
    found = compare.compare(own).set_index("table")["verdict"]
    assert dict(found) == {
        "weights": "identical",
        "same": "identical",
        "other": "differs",
        "left_out": "not made",
    }
    cli.main(["compare", "--profile", SPEC])
    printed = capsys.readouterr().out
    assert "-0.2" in printed and "mean of base, pass@1" in printed
    assert "of 4 values with a published interval 3 lie within it" in printed
    assert "your models were trained on" in printed and "identical: weights, same" in printed
    kept = pd.read_csv(paths.results() / "compared" / f"{own.name}.csv")
    assert list(kept["table"]) == list(found.index)


def test_other_weights_are_told(own):
    publish.publish(own)
    for number in range(7):
        finish(own, number, weights="bb")
    row = compare.compare(own).iloc[0]
    assert row["verdict"] == "differs" and row["where"] == "2 of 2 models, sft first"


def test_without_anything_of_ones_own_the_comparison_says_how_to_make_it(own, capsys):
    publish.publish(own)
    for run in runs.policy_runs(own):
        run.record.unlink(missing_ok=True)
    with pytest.raises(SystemExit, match=r"nothing of your own of smoke.*reproduce"):
        cli.main(["compare", "--profile", SPEC])


def test_without_anything_to_compare_with_the_comparison_says_so(own):
    words = "nothing is published for smoke to compare with: there is nothing yet"
    with pytest.raises(SystemExit, match=words):
        cli.main(["compare", "--profile", "smoke"])
    publish.publish(own)
    record = runs.sft_run(load_profile(SPEC, "published")).record
    changed = {"fingerprint": "0", "recipe": "0"}
    files.write_json(record, json.loads(record.read_text()) | changed)
    with pytest.raises(SageError, match="are not those of its settings"):
        compare.compare(own)


# --- drawing --------------------------------------------------------------------------------------


def notebook(folder, *cells):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nb.cells[0].metadata["tags"] = ["parameters"]
    nb.metadata["sage"] = {"about": "a trial", "measured": ["trial.csv"]}
    folder.mkdir(exist_ok=True)
    nbformat.write(nb, folder / "00_trial.ipynb")
    return folder / "00_trial.ipynb"


def test_cells_run_with_their_parameters_in_their_folder_and_say_nothing(tmp_path, capsys):
    path = notebook(tmp_path, "results = 'own'", "print(1)", "open('made', 'w').write(results)")
    draw.run_cells(path, {"results": "published"})
    assert (tmp_path / "made").read_text() == "published" and capsys.readouterr().out == ""
    with pytest.raises(SageError, match="notebook 00_trial, cell 1: ZeroDivisionError"):
        draw.run_cells(notebook(tmp_path, "a = 1", "1 / 0"), {})


def test_published_tables_are_drawn_again_to_the_same_files(own, places, monkeypatch, capsys):
    monkeypatch.setattr(paths, "NOTEBOOKS", places / "notebooks")
    opening = """import pandas as pd
from sage_lib.experiment.profile import load_profile
from sage_lib.report.page import Page
Page(load_profile(profile, results)).keep(pd.DataFrame({"a": [1 / 3]}), "trial")"""
    notebook(places / "notebooks", "profile = 'x'\nresults = 'own'", opening)
    publish.publish(own)
    theirs = load_profile(SPEC, "published")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    assert draw.redraw([theirs])
    assert "MPLBACKEND" not in os.environ, "a setting of the processes that draw alone"
    printed = capsys.readouterr().out
    assert "00_trial, smoke+train" in printed and "changed: published/smoke" in printed
    table = paths.measured(own.name, published=True) / "trial.csv"
    assert table.read_text() == "a\n0.3333333333\n"
    assert draw.redraw([theirs]) and "changed:" not in capsys.readouterr().out
    runs.trace_run(theirs).record.unlink()
    assert draw.redraw([theirs], theory=False)
    assert "trace is not published" in capsys.readouterr().out
    old = dataclasses.replace(theirs, rl={**theirs.rl, "weight_decay": 0.5})
    assert not draw.redraw([old], theory=False)
    assert "rl.weight_decay was 0.01 and is 0.5" in capsys.readouterr().out


class Here:
    """A pool of processes that is this process: a new one loads Unsloth, which test_notebooks.py
    has one do."""

    def __init__(self, *given, **named):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *given):
        done = Future()
        done.set_result(function(*given))
        return done


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The published results of smoke in a place of their own, as if made from today's settings."""
    from sage_lib.training import one_batch

    folder = tmp_path_factory.mktemp("smoke")
    shutil.copytree(paths.PUBLISHED / "smoke", folder / "published" / "smoke")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAGE_RESULTS", str(folder / "own"))
        patch.setenv("SAGE_BUILD", str(folder / "build"))
        patch.setattr(paths, "PUBLISHED", folder / "published")
        patch.setattr(paths, "FIGURES", folder / "figures")
        patch.setattr(one_batch, "ProcessPoolExecutor", Here)
        profile = load_profile("smoke", "published")
        for number in range(len(runs.every_run(profile))):
            run = runs.every_run(profile)[number]
            record = json.loads(run.record.read_text())
            files.write_json(run.record, record | {"fingerprint": run.fingerprint})
        yield profile


@pytest.mark.parametrize("entry", notebooks.found(), ids=lambda entry: entry.name)
def test_a_notebook_draws_what_it_makes_from_published_results(entry, smoke):
    """As it opens, without training; those of the theory draw nothing that is published."""
    parameters = notebooks.parameters(entry.path)
    if "profile" not in parameters:  # the theory's, and those of the walk, which keep no figure
        own = 'results = "own"' in entry.path.read_text().replace("\\", "")
        assert own or not entry.artefacts(smoke)
        return
    assert 'results = "published"' in entry.path.read_text().replace("\\", "")
    draw.run_cells(entry.path, {"profile": "smoke"})
    assert [file for file in entry.artefacts(smoke) if not file.is_file()] == []
    assert not paths.build("smoke").exists() and not paths.results().exists()
