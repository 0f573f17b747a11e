"""pass@k of samples in the files of this project and of three others: against enumeration, closed
forms and counts by hand; broken lines are named, and nothing is filled in."""

import gzip
import itertools
import json
import math
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.evaluation import metrics, policy_counts, sample_files
from sage_lib.pipeline import cli

#: Right and wrong samples of three problems.
RIGHT = {"a": [1, 0, 0, 1], "b": [0, 0, 0, 0], "c": [1, 1, 1, 1]}
HAND = [(4, 2), (4, 0), (4, 4)]


def own_line(problem, right):
    texts = ["text"] * len(right)
    row = {"dataset": "d", "problem": problem, "completions": texts, "tokens": [3] * len(right)}
    return {**row, "finished": [True] * len(right), "correct": [bool(one) for one in right]}


def rlvr_line(problem, right):
    row = {"idx": ord(problem), "question": problem, "gt_cot": "", "gt": "1", "answer": "1"}
    lists = {"code": ["text"] * len(right), "pred": ["1"] * len(right)}
    return {**row, **lists, "report": [None] * len(right), "score": [bool(one) for one in right]}


def harness_line(problem, right, filter="none", **changes):
    """cruxeval's layout: repeats, a filter that keeps them all, and the metric pass@1."""
    texts = [["text"] * len(right)]
    row = {"doc_id": ord(problem), "doc": {"q": problem}, "target": "1", "arguments": {}}
    row |= {"resps": texts, "filtered_resps": texts, "filter": filter, "metrics": ["pass@1"]}
    row |= {"doc_hash": f"{problem}123456789", "prompt_hash": "", "target_hash": ""}
    return {**row, "pass@1": sum(right) / len(right), **changes}


def lighteval_row(problem, right, **metric):
    doc = {"query": problem, "choices": ["1"], "id": str(ord(problem)), "task_name": "aime24|0"}
    texts = {"text": ["text"] * len(right), "input_tokens": [1, 2]}
    found = metric or {f"avg@n:n={len(right)}": sum(right) / len(right)}
    return {"doc": doc, "metric": found, "model_response": texts}


def write_lines(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def write_table(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def counted(path, **choice):
    """Samples and right ones of each problem."""
    return [*sample_files.read_sample_file(path, **choice).counts.values()]


def run(capsys, *words):
    cli.main(["pass-at-k", *map(str, words)])
    return capsys.readouterr().out


def refused(*words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["pass-at-k", *map(str, words)])
    said = str(stopped.value)
    assert said.startswith("error: ") and "\n" not in said
    return said


# --- formats --------------------------------------------------------------------------------------


def test_each_format_gives_its_counts(tmp_path):
    for name, line in (("own", own_line), ("rlvr", rlvr_line), ("harness", harness_line)):
        path = write_lines(tmp_path / f"{name}.jsonl", [line(*item) for item in RIGHT.items()])
        assert counted(path) == HAND and not sample_files.read_sample_file(path).unreadable
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        assert counted(tmp_path / f"{name}.gz") == HAND
    rows = [lighteval_row(*item) for item in RIGHT.items()]
    assert counted(write_table(tmp_path / "details.parquet", rows)) == HAND


def test_published_samples_are_those_of_the_published_counts():
    folder = paths.PUBLISHED / "smoke"
    found = sample_files.read_sample_file(folder / "samples.parquet", method="grpo").counts
    counts = pd.read_parquet(folder / "counts.parquet").query("method == 'grpo'")
    names = counts["dataset"] + "/" + counts["problem"]
    keys = zip(counts["seed"], names, strict=True)
    assert [list(found[key]) for key in keys] == counts[["n", "c"]].to_numpy().tolist()
    with pytest.raises(SageError, match=r"samples.parquet:base, of base, grpo"):
        sample_files.read_sample_file(folder / "samples.parquet")


def test_one_verdict_for_several_responses_is_no_verdict(tmp_path):
    majority = harness_line("a", [1, 0, 0, 1], metrics=["exact_match"], exact_match=1.0)
    path = write_lines(tmp_path / "a.jsonl", [majority])
    with pytest.raises(SageError, match=r"one exact_match for 4 responses: evaluate with the metr"):
        sample_files.read_sample_file(path)
    for metric in ({"pass@k:k=2&n=4": 0.5}, {"em": 1.0}, {"pass@k:k=1&n=8": 0.5}, {"avg@n": 0.3}):
        table = write_table(tmp_path / "a.parquet", [lighteval_row("a", [1, 0, 0, 1], **metric)])
        with pytest.raises(SageError, match="has no line that can be read: line 1 has"):
            sample_files.read_sample_file(table)
    rows = [lighteval_row("a", [1], em=1.0), lighteval_row("b", [1], em=0.5)]
    single = sample_files.read_sample_file(write_table(tmp_path / "b.parquet", rows))
    assert [*single.counts.values()] == [(1, 1)]
    assert single.unreadable == [(2, "has 0.5 for em, not 0 or 1; for scores, give --threshold")]
    two = write_lines(tmp_path / "c.jsonl", [{**own_line("a", [1, 0]), "correct": [2, True]}])
    with pytest.raises(SageError, match="has 2 for correct, not 0 or 1"):
        sample_files.read_sample_file(two)


#: What no field of a line should be, or what it should only sometimes be.
VALUES = (None, True, -1, 1.5, math.nan, math.inf, "", "a", [], {}, [[]], [{}], [None], {"a": 1})


@pytest.mark.parametrize("line", [own_line, rlvr_line, harness_line, lighteval_row])
def test_a_field_of_any_other_type_makes_no_traceback(tmp_path, line):
    """One line has one other field, at any depth; the other line is still read."""
    whole, odd = line("a", [1, 0]), line("b", [1, 0])
    places = [(name,) for name in odd]
    places += [(name, key) for name in odd if isinstance(odd[name], dict) for key in odd[name]]
    for *above, last in places:
        for value in VALUES:
            changed = json.loads(json.dumps(odd))
            (changed[above[0]] if above else changed)[last] = value
            path = write_lines(tmp_path / "a.jsonl", [whole, changed])
            try:
                assert counted(path)[0] == (2, 1)
            except SageError as error:  # a filter or metric of another name, say
                assert "\n" not in str(error) and "choose a" in str(error)


def test_filters_and_metrics_are_chosen_and_not_guessed(tmp_path):
    both = {"metrics": ["acc", "acc_norm"], "acc": 0.0, "acc_norm": "True"}  # NumPy's bool
    rows = [harness_line(p, [1], name, **both) for name in ("strict", "flexible") for p in "abc"]
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(SageError, match="choose a filter by --filter, one of strict, flexible"):
        sample_files.read_sample_file(path, metric="acc")
    with pytest.raises(SageError, match="choose a metric by --metric, one of acc, acc_norm"):
        sample_files.read_sample_file(path, filter="strict")
    assert counted(path, metric="acc_norm", filter="strict") == [(1, 1)] * 3
    newer = ("metrics", "acc_norm", "pass@1")
    older = [{key: row[key] for key in row if key not in newer} for row in rows[:3]]
    assert counted(write_lines(tmp_path / "b.jsonl", older)) == [(1, 0)] * 3


@pytest.mark.parametrize("line", [own_line, rlvr_line, harness_line])
def test_broken_lines_are_named_and_counted(tmp_path, line, capsys):
    whole = [line(*item) for item in RIGHT.items()]
    key = {"own_line": "correct", "rlvr_line": "score", "harness_line": "resps"}[line.__name__]
    retyped, short = {**line("e", [1, 0]), key: "yes"}, line("f", [1, 0])
    del short[key]
    odd = {**line("g", [1, 0]), "pass@1": 0.7}
    if key != "resps":
        odd = {**line("g", [1, 0]), key: [True]}  # of two samples
    cut = json.dumps(whole[0])[:40]
    rows = [whole[0], cut, retyped, short, odd, whole[0], "[1]", "", *whole[1:]]
    path = write_lines(tmp_path / "a.jsonl", rows)
    found = sample_files.read_sample_file(path)
    assert [*found.counts.values()] == HAND
    places, reasons = zip(*found.unreadable, strict=True)
    assert places == (2, 3, 4, 5, 6, 7)  # and no blank line
    for reason, said in zip(reasons, ("is not JSON", key, f"has no {key}|verdicts"), strict=False):
        assert any(word in reason for word in said.split("|")), reason
    assert "repeats what line 1 has" in reasons[4]
    said = run(capsys, path, "--out", tmp_path / "out")
    assert "3 problems, 12 samples, 6 unreadable lines" in said and "a.jsonl, line 2 is not" in said
    assert pd.read_csv(tmp_path / "out" / "unreadable.csv")["line"].tolist() == list(places)


def test_what_is_no_file_of_samples_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 5000)[:30])
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    other = write_table(tmp_path / "other.parquet", [{"x": 1}])
    write_lines(tmp_path / "unknown.jsonl", [{"number": 1, "correct": True}])
    write_lines(tmp_path / "mixed.jsonl", [own_line("a", [1]), rlvr_line("a", [1])])
    assert "is in no known format (it is empty): known are" in refused(tmp_path / "empty.jsonl")
    assert "no known format (line 1 is not JSON" in refused(tmp_path / "binary")
    assert "is a folder" in refused(tmp_path) and "is not there" in refused(tmp_path / "none")
    assert "cannot be read" in refused(tmp_path / "cut.gz")
    assert "cannot be read" in refused(tmp_path / "cut.parquet")
    assert "no known format" in refused(other)
    said = refused(tmp_path / "unknown.jsonl")
    assert "has the fields of no format: correct, number" in said
    assert "split it in two" in refused(tmp_path / "mixed.jsonl")
    one = write_lines(tmp_path / "one.jsonl", [own_line("a", [1, 0])])
    assert "given twice" in refused(f"{one}+{one}") and "called one" in refused(one, one)
    assert "no methods" in refused(f"{one}:grpo")
    assert "share 1 problem:" in refused(f"x={one}", one)
    assert "ask for a smaller k" in refused(one, "--ks", 3)
    assert "is a file" in refused(one, "--out", one)


def zipped(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {"header": "{}", **members}.items():
            archive.writestr(f"{name}.json", text)
    return path


def test_what_is_damaged_or_hostile_in_a_file_is_a_sentence(tmp_path):
    for number, text in enumerate(["no JSON", "[" * 100_000]):
        assert "cannot be read" in refused(zipped(tmp_path / f"{number}.eval", summaries=text))
    assert "is a int, not" in refused(zipped(tmp_path / "int.eval", summaries="5"))
    whole = zipped(tmp_path / "a.eval", summaries="[]").read_bytes()
    place = whole.rindex(b"PK\x01\x02")
    for number, offset in enumerate((8, 10)):  # has a password, or another kind of compression
        changed = bytearray(whole)
        changed[place + offset] |= 65
        (tmp_path / f"odd{number}.eval").write_bytes(changed)
        assert "cannot be read" in refused(tmp_path / f"odd{number}.eval")
    deep = '{"version": 2, "eval": {}, "samples": ' + "[" * 100_000
    assert "cannot be read" in refused(write_lines(tmp_path / "deep.json", [deep]))
    lists = write_table(tmp_path / "a.parquet", [{"method": [1], "problem": "a", "correct": 1}])
    assert "cannot be read" in refused(lists)
    large = write_lines(tmp_path / "large.jsonl", ['{"id": 1, "correct": 1' + "0" * 400 + "}"])
    assert "line 1 int too large" in refused(large)
    many = write_lines(tmp_path / "many.jsonl", [{"id": "a", "c": 1, "n": 10**9}])
    assert "of 1,000,000,000 samples not every k can be shown" in refused(many)
    more = write_lines(tmp_path / "more.jsonl", [{"id": "a", "c": 1, "n": 10**30}])
    assert "1 <= n <= 10^9 are needed" in refused(more)


def test_a_small_file_that_is_large_once_unpacked_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_files, "LARGEST", 10**6)
    monkeypatch.setattr(sample_files, "MOST_ROWS", 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b" " * (10**6 + 1)))
    table = write_table(tmp_path / "a.parquet", [{"problem": "a", "correct": 1}] * 1001)
    archive = zipped(tmp_path / "a.eval", summaries=" " * 10**6)
    for path in (tmp_path / "a.jsonl.gz", archive, table):
        assert path.stat().st_size < 10_000
        assert "once it is unpacked: split it" in refused(path)


def test_names_in_a_file_are_no_commands_to_a_terminal_and_no_formulas(tmp_path, capsys):
    row = {"step": 1, "prompt": "x", "completion": "y", "advantage": 0, "\x1b[2J\ud800": 1}
    said = run(capsys, write_lines(tmp_path / "a.jsonl", [row]))
    assert r"by \x1b[2J\ud800, 1 problem" in said and "\x1b" not in said
    odd = write_lines(tmp_path / "$\\none$.jsonl", [own_line(*item) for item in RIGHT.items()])
    run(capsys, odd, "--out", tmp_path / "out")


# --- numbers --------------------------------------------------------------------------------------


def enumerated(right, k):
    """pass@k over all subsets of k samples."""
    return np.mean([max(chosen) for chosen in itertools.combinations(right, k)])


def test_curves_are_those_of_all_subsets(tmp_path, capsys):
    path = write_lines(tmp_path / "a.jsonl", [own_line(*item) for item in RIGHT.items()])
    run(capsys, path, "--ks", 1, 2, 3, 4, "--out", tmp_path)
    table = pd.read_csv(tmp_path / "pass_at_k.csv").set_index("k")
    for k in (1, 2, 3, 4):
        by_hand = np.mean([enumerated(right, k) for right in RIGHT.values()])
        assert table.loc[k, "value"] == pytest.approx(by_hand)
        assert table.loc[k, "low"] < by_hand < table.loc[k, "high"]
    assert (tmp_path / "pass_at_k.png").read_bytes()[:4] == b"\x89PNG"


def test_more_files_are_more_samples_or_more_seeds(tmp_path, capsys):
    names = [
        write_lines(tmp_path / f"{i}.jsonl", [own_line(p, r[i : i + 2]) for p, r in RIGHT.items()])
        for i in (0, 2)
    ]
    whole = write_lines(tmp_path / "whole.jsonl", [own_line(*item) for item in RIGHT.items()])
    run(capsys, f"joined={names[0]}+{names[1]}", whole, "--out", tmp_path)
    table = pd.read_csv(tmp_path / "pass_at_k.csv")
    table = table[table["what"] == "pass@k"]
    joined, alone = (table[table["policy"] == name] for name in ("joined", "whole"))
    assert joined["value"].tolist() == alone["value"].tolist() and set(joined["samples"]) == {4}
    run(capsys, f"seeds={names[0]},{names[1]}", "--out", tmp_path)
    table = pd.read_csv(tmp_path / "pass_at_k.csv")
    assert set(table["seeds"]) == {2} and table["value"][0] == pytest.approx(6 / 12)


def test_a_problem_of_one_file_is_left_out_and_said(tmp_path, capsys):
    more = {**RIGHT, "e": [1, 1, 1, 1]}
    a = write_lines(tmp_path / "a.jsonl", [rlvr_line(*item) for item in more.items()])
    b = write_lines(tmp_path / "b.jsonl", [rlvr_line(p, [0, 1, 0, 0]) for p in RIGHT])
    said = run(capsys, a, b, "--out", tmp_path)
    assert "1 problem only in a, left out" in said
    table = pd.read_csv(tmp_path / "pass_at_k.csv").query("what == 'difference'").set_index("k")
    apart = np.array([0.5, 0.0, 1.0]) - 0.25
    low, high = stats.t.interval(0.95, 2, apart.mean(), stats.sem(apart))
    assert table.loc[1, ["value", "low", "high"]].tolist() == pytest.approx([0.25, low, high])


def test_a_crossing_that_is_known_lies_in_its_interval(tmp_path, capsys):
    """Narrow solves 40 % of problems always, wide each with p: they cross at 1 - (1-p)^k = 0.4."""
    rng, p, n = np.random.default_rng(0), 0.1, 64
    names = [chr(0x4E00 + i) for i in range(300)]
    narrow = [rlvr_line(name, [i % 5 < 2] * n) for i, name in enumerate(names)]
    wide = [rlvr_line(name, rng.random(n) < p) for name in names]
    files = (write_lines(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate([narrow, wide]))
    said = run(capsys, *files, "--ks", *range(1, 11), "--out", tmp_path)
    assert "1 passes 0 at k = " in said and "no crossing" not in said
    row = pd.read_csv(tmp_path / "pass_at_k.csv").query("what == 'crossing'").iloc[0]
    true = math.log(0.6) / math.log(1 - p)
    assert row["policy"] == 1 and row["low"] < true < row["high"] < 2 * row["low"]
    assert row["value"] == pytest.approx(true, rel=0.05)


def test_the_variance_of_pass_at_k_is_unbiased():
    n, p, k = 9, 0.3, 3
    chances = stats.binom.pmf(range(n + 1), n, p)
    found = metrics.pass_at_k(n, np.arange(n + 1), k)
    true = chances @ found**2 - (chances @ found) ** 2
    said = [policy_counts.counted("", {0: (c, n)}).sampling_variance([k, 5]) for c in range(n + 1)]
    assert chances @ np.array(said)[:, 0] == pytest.approx(true)
    assert np.isnan(said)[:, 1].all(), "no ten draws"
    [both] = policy_counts.counted("", {0: (2, n), 1: (5, n)}).sampling_variance([k])
    assert both == pytest.approx((said[2][0] + said[5][0]) / 4), "of a mean over two problems"


def test_as_much_data_as_is_said_finds_the_difference():
    """By the power of a t test with so many problems, and by drawing so many samples."""
    rng = np.random.default_rng(1)
    apart = rng.normal(0.02, 0.1, size=(50, 1))
    data, _ = metrics.times_as_much(apart, [0.0])
    size = 50 * data[0]
    shift = apart.mean() / (apart.std(ddof=1) / np.sqrt(size))
    power = stats.nct.sf(stats.t.ppf(0.975, size - 1), size - 1, shift)
    assert power == pytest.approx(0.8, abs=0.02)

    chances, n = rng.uniform(0.2, 0.7, size=60), 8
    sides = [rng.binomial(n, chance) for chance in (chances + 0.05, chances)]
    apart = (sides[0] - sides[1])[:, None] / n
    counts = [{place: (c, n) for place, c in enumerate(side)} for side in sides]
    noise = sum(policy_counts.counted("", of).sampling_variance([1])[0] for of in counts)
    _, times = metrics.times_as_much(apart + 0.05 - apart.mean(), [noise])
    more = int(np.ceil(n * times[0]))
    found = 0
    for _ in range(400):
        drawn = [rng.binomial(more, chance) / more for chance in (chances + 0.05, chances)]
        found += stats.ttest_rel(*drawn).pvalue < 0.05
    assert 0.7 < found / 400 < 0.95
    still = np.tile([[0.3], [-0.2]], (30, 1))  # differences that no sampling makes
    assert metrics.times_as_much(still, [1e-5])[1][0] == np.inf
    data, times = metrics.times_as_much(apart, [9.0])  # more noise than these differences have
    assert times == pytest.approx(data), "all of the error falls with more samples"
