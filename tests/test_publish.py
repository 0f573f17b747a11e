"""Own results become the published ones by one command, and are compared with them."""

import itertools
import shutil
import threading
from pathlib import Path

import forks
import numpy as np
import pandas as pd
import pytest

from sage_lib import files, paths
from sage_lib.errors import SageError
from sage_lib.experiment import results, runs
from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.results import load_results
from sage_lib.pipeline import compare, publish

SPEC = "smoke+train=[grpo]+sft_data.rows=9+exploration.seeds=0"


@pytest.fixture
def own(work_folder, monkeypatch):
    """A profile of which every run is finished, in folders of its own."""
    monkeypatch.setattr(paths, "PUBLISHED", work_folder / "published")
    profile = load_profile(SPEC)
    for number in range(len(runs.every_run(profile))):
        finish(profile, number)
    return profile


def finish(profile, number, weights="aa", correct=3):
    """What a stage leaves behind of one run; runs depend on those before them."""
    run = runs.every_run(profile)[number]
    run.prepare()
    if run.makes:
        name = "model/model.safetensors" if run.makes == "model" else run.makes
        files.write_text(run.build / name, weights)
    if run.stage == "entropies":
        files.write_json(run.measured / "entropy.json", {"quantiles": {"0.9": 0.3, "0.999": 2.0}})
    if run.stage == "rl":
        files.rewrite_lines(run.measured / "steps.jsonl", [{"step": 1, "reward": 0.5}])
    if run.stage == "evaluation":
        rows = "".join(f"both,p{n},64,{correct + n},0\n" for n in range(9))
        files.write_text(run.measured / "counts.csv", f"dataset,problem,n,c,truncated\n{rows}")
    run.finish(run.begin(0, {}), weights=weights)


def tree(folder):
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_publishing_again_changes_nothing_and_weights_stay_behind(own):
    sizes = publish.publish(own)
    before = tree(paths.PUBLISHED)
    assert {"runs.parquet", "counts.parquet", "profile.json"} <= set(sizes)
    files.write_json(paths.measured(own.name, published=True) / "signals.json", {})
    assert publish.publish(own) == sizes and tree(paths.PUBLISHED) == before
    assert not any("safetensors" in name for name in before)
    theirs, mine = load_results(SPEC), load_results(SPEC, own=True)
    assert theirs.counts["c"].tolist() == mine.counts["c"].tolist() == 2 * [*range(3, 12)]


def test_unfinished_runs_and_those_of_other_settings_are_refused(own):
    last = runs.every_run(own)[-1]
    (last.build / "done").unlink()
    with pytest.raises(SageError, match=r"1 of \d+ runs of .* not finished, eval-grpo-s3407 first"):
        publish.publish(own)
    other = load_profile(f"{SPEC}+rl.beta=0.7")
    with pytest.raises(SageError, match="are not finished"):
        publish.publish(other)
    with pytest.raises(SageError, match=r"no run of .* is done: there is nothing to publish"):
        publish.publish(other, finished=True)
    assert not paths.measured(own.name, published=True).exists()


class Killed(BaseException):
    """In the place of a kill: nothing catches it."""


@pytest.mark.parametrize("point", [2, 3, 4])
def test_a_kill_between_two_renames_loses_nothing(own, monkeypatch, point):
    """At the first rename, the second, or the removal after them; and where a run began anew
    afterwards, so that nothing can be published."""
    publish.publish(own)
    target, calls = paths.measured(own.name, published=True), itertools.count()
    before = tree(target)

    def killed(call):
        def until(*args, **more):
            if next(calls) == point:
                raise Killed
            return call(*args, **more)

        return until

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed(Path.rename))
        patched.setattr(shutil, "rmtree", killed(shutil.rmtree))
        with pytest.raises(Killed):
            publish.publish(own)
    assert results.published() == ([] if point == 3 else [own.name])
    (runs.every_run(own)[-1].build / "done").unlink()
    with pytest.raises(SageError, match="are not finished"):
        publish.publish(own)
    assert tree(target) == before and results.published() == [own.name]


def test_a_second_publish_waits_for_the_first(own):
    publish.publish(own)
    before = tree(paths.PUBLISHED)
    [lock] = paths.PUBLISHED.glob(".*/lock")
    second = threading.Thread(target=publish.publish, args=(own,))
    with forks.held(lock):
        (lock.parent / "new").mkdir()  # which the first is filling
        second.start()
        second.join(0.5)
        assert second.is_alive() and (lock.parent / "new").is_dir()
    second.join(300)
    assert not second.is_alive() and tree(paths.PUBLISHED) == before


def test_a_run_that_begins_anew_while_results_are_read_is_not_published(own, monkeypatch):
    publish.publish(own)
    target, write = paths.measured(own.name, published=True), results.write
    before = tree(target)

    def and_begin(*args):
        write(*args)
        (runs.every_run(own)[-1].build / "done").unlink()

    monkeypatch.setattr(results, "write", and_begin)
    with pytest.raises(SageError, match="are not finished"):
        publish.publish(own)
    assert tree(target) == before


def test_finished_runs_alone_are_taken_though_another_left_its_earlier_results(own):
    publish.publish(own)
    before = load_results(SPEC).counts
    last = runs.every_run(own)[-1]
    rows = "".join(f"both,p{n},64,50,0\n" for n in range(9))
    files.write_text(last.measured / "counts.csv", f"dataset,problem,n,c,truncated\n{rows}")
    (last.build / "done").unlink()  # it is being made again
    publish.publish(own, finished=True)
    pd.testing.assert_frame_equal(load_results(SPEC).counts, before)
    finish(own, len(runs.every_run(own)) - 1, correct=5)
    publish.publish(own, finished=True)
    assert load_results(SPEC).counts["c"].tolist() == [*range(3, 12), *range(5, 14)], "made again"


def test_without_a_common_run_nothing_is_called_identical(own):
    publish.publish(own)
    published = load_results(SPEC)
    others = published.counts.assign(run="grpo-s1"), published.runs.assign(run="grpo-s1")
    assert compare.compare_counts(others[0], published.counts, 1) == compare.NOTHING
    assert compare.compare_weights(others[1], published.runs) == compare.NOTHING


def test_a_profile_of_ones_own_file_is_refused(variant):
    with pytest.raises(SageError, match="is a file of your own"):
        publish.publish(load_profile(variant()))


def test_own_results_beside_the_published_ones(own, capsys):
    publish.publish(own)
    table = pd.DataFrame({"method": ["base"], "mean": [0.5]})
    files.write_text(paths.measured(own.name, published=True) / "t.csv", table.to_csv(index=False))
    files.write_text(paths.measured(own.name) / "t.csv", table.to_csv(index=False))
    compare.show(own)
    printed = capsys.readouterr().out
    assert printed.count("identical") == 4 and "2 of 2 values lie" in printed
    policy = next(n for n, run in enumerate(runs.every_run(own)) if run.stage == "rl")
    last = len(runs.every_run(own)) - 1
    finish(own, policy, weights="bb")
    finish(own, last, correct=50)
    found = compare.compare(own).set_index("result")
    assert found.loc["weights", "detail"].startswith("1 of 2 models are the same")
    assert found.loc["pass@1", "outcome"] == "differs" and "1 of 2" in found.loc["pass@1", "detail"]


def test_nothing_to_compare_says_so(own):
    with pytest.raises(SageError, match="nothing is published"):
        compare.compare(own)


def counts(*of_problem):
    rows = [("r", "both", f"p{n}", 64, c) for n, c in enumerate(of_problem)]
    return pd.DataFrame(rows, columns=["run", "dataset", "problem", "n", "c"])


def test_values_in_published_intervals_are_counted():
    """By hand: the middle of a wide interval is in it, a policy that always answers is not."""
    published = counts(*[0, 64] * 20)  # pass@1 0.5, half of the problems
    for own, verdict, within in (
        (published, "identical", 1),
        (counts(*[16, 48] * 20), "within its interval", 1),
        (counts(*[64] * 40), "differs", 0),
    ):
        found = compare.compare_counts(own, published, 1)
        assert found == (verdict, f"{within} of 1 values lie in the published intervals")


@pytest.mark.parametrize(
    ("change", "verdict", "detail"),
    [
        ({}, "identical", ""),
        ({"mean": [0.30 + 1e-12, 0.40]}, "identical", ""),
        ({"seconds": [9.0, 9.0]}, "identical", ""),
        ({"mean": [0.31, 0.46]}, "differs", 'name="mean"'),
        ({"mean": [0.30, np.nan]}, "differs", "first diff: nan != 0.4"),
        ({"method": ["base", "x"]}, "differs", "first diff: 'x' != 'grpo'"),
    ],
)
def test_a_planted_difference_is_found_and_named(change, verdict, detail):
    rows = {"method": ["base", "grpo"], "mean": [0.30, 0.40], "seconds": [1.0, 2.0]}
    table = pd.DataFrame(rows)
    found = compare.compare_tables(table.assign(**change), table)
    assert found[0] == verdict and detail in found[1]
    assert "shape mismatch" in compare.compare_tables(table[:1], table)[1]


def test_what_is_finished_stands_beside_what_was_published(own):
    publish.publish(own)
    names, published = ("runs", "steps", "counts", "entropy"), load_results(SPEC)
    before = {name: getattr(published, name) for name in names}  # read now, not after publishing
    whole = tree(paths.PUBLISHED)
    base, *_ = runs.every_run(own)
    lost = [run for run in runs.every_run(own) if run.method == "grpo"]
    for run in lost:  # another machine, on which these were never made
        (run.build / "done").unlink()
    entropies = base.measured.parent / "entropies"
    (entropies / "record.json").unlink()
    files.write_json(entropies / "entropy.json", {"quantiles": {"0.9": 9.0}})  # half of a new run
    with pytest.raises(SageError, match="are not finished"):
        publish.publish(own)
    for run in lost:
        for path in run.measured.iterdir():
            path.unlink()
    publish.publish(own, finished=True)
    after = load_results(SPEC)
    for name in ("runs", "steps", "counts"):
        by = ["run", "stage"] if name == "runs" else ["run"]  # stages of a run in any order
        rows = (x.sort_values(by, kind="stable") for x in (getattr(after, name), before[name]))
        pd.testing.assert_frame_equal(*(x.reset_index(drop=True) for x in rows))
    assert tree(paths.PUBLISHED).keys() == whole.keys() and after.entropy == before["entropy"]
