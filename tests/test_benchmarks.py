"""Benchmark loaders on small files in the public formats, on damaged ones, and on the real files where they are at hand."""

import hashlib
import json
import os

import pytest

from sage_lib import benchmarks
from sage_lib.errors import SageError


def write(folder, file, rows):
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_last_boxed_takes_the_last_and_balances_braces():
    assert benchmarks.last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert benchmarks.last_boxed("none") is None and benchmarks.last_boxed(r"\boxed{1") is None


def test_odd_formats(tmp_path):
    write(tmp_path, "benchmarks/amc23.jsonl", [{"id": i, "question": f"q{i}", "answer": 27.0} for i in range(40)])
    assert benchmarks.load("amc23", folder=tmp_path)[0] == benchmarks.Item("benchmarks/amc23.jsonl/0", "q0", "27")
    for file, n in (("aime2024", 30), ("aime2025_I", 15), ("aime2025_II", 15)):
        write(tmp_path, f"benchmarks/{file}.jsonl", [{"id": str(i), "problem": "p", "answer": i} for i in range(n)])
    assert len(benchmarks.load("aime", folder=tmp_path)) == 60
    write(tmp_path, "benchmarks/math500.jsonl", [{"unique_id": i, "problem": "p", "answer": "x", "level": 5 if i < 134 else 1} for i in range(500)])
    assert len(benchmarks.load("math500_level5", folder=tmp_path)) == 134
    write(tmp_path, "benchmarks/minerva_math.jsonl", [{"idx": i, "problem": "p", "solution": r"so \boxed{3}"} for i in range(272)])
    assert benchmarks.load("minerva", folder=tmp_path)[0].gold == "3"
    write(tmp_path, "gsm8k/test.jsonl", [{"question": f"q{i}", "answer": "6 + 1\n#### 1,007"} for i in range(1319)])
    assert benchmarks.load("gsm8k_test", folder=tmp_path)[5].gold == "1007"


def test_sft_rows_are_numeric_and_fit_half_the_context(tmp_path, monkeypatch):
    row = {"problem": "p", "generated_solution": "<think>abc</think>", "expected_answer": "7"}
    write(tmp_path, "open_math_reasoning_mini.jsonl", [row, row | {"expected_answer": "x+1"}, row | {"generated_solution": "y" * 50}])
    monkeypatch.setenv("SAGE_DATA", str(tmp_path))
    assert benchmarks.load_sft("open_math_reasoning_mini", None, 20, len) == [("p", "abc", "7")]


@pytest.mark.parametrize(("rows", "words"), [
    ([{"id": 1, "answer": 1}] * 40, "column 'question' is missing"),
    ([{"id": 1, "question": "q", "answer": 1}] * 40, "occurs twice"),
    ([{"id": i, "question": "q", "answer": ""} for i in range(40)], "no gold answer"),
    ([{"id": i, "question": "q", "answer": 1} for i in range(39)], "should have 40 problems and has 39"),
])
def test_damaged_files_are_refused(tmp_path, rows, words):
    write(tmp_path, "benchmarks/amc23.jsonl", rows)
    with pytest.raises(SageError, match=words):
        benchmarks.load("amc23", folder=tmp_path)


def test_half_written_missing_and_changed_files(tmp_path):
    with pytest.raises(SageError, match="is missing from the folder"):
        benchmarks.load("amc23", folder=tmp_path)
    path = write(tmp_path, "benchmarks/amc23.jsonl", [{"id": i, "question": "q", "answer": 1} for i in range(40)])
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  benchmarks/amc23.jsonl\n")
    assert len(benchmarks.load("amc23", folder=tmp_path)) == 40
    path.write_text(path.read_text().replace("1}", "2}", 1))
    with pytest.raises(SageError, match="checksum"):
        benchmarks.load("amc23", folder=tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    path.write_text(path.read_text()[:-9])
    with pytest.raises(SageError, match="line 40 is not valid JSON"):
        benchmarks.load("amc23", folder=tmp_path)


def test_unknown_set():
    with pytest.raises(SageError, match="choose one of"):
        benchmarks.load("amc24")


@pytest.mark.skipif("SAGE_DATA" not in os.environ, reason="set SAGE_DATA to a folder with the public benchmark files to check their counts and golds")
def test_the_real_files_and_that_every_gold_parses():
    from sage_lib.verifier import Verifier

    verifier, unparseable = Verifier(), set()
    for name in ("aime", "amc23", "math500_level5", "minerva"):
        for item in benchmarks.load(name):
            try:
                verifier.verify_answers([item.gold], ["1"])
            except SageError:
                unparseable.add((name, item.gold))
    verifier.close()
    assert unparseable == {("minerva", gold) for gold in (
        "np.arcsin(10/13)", "E_{1},E_{2}", r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}",
        r"\frac{dM}{dt}=\frac{10^{5} L_{\odot}}{0.007 c^{2} M_{\odot}^{6}} M^{6}",
    )}
