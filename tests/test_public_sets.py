"""Loaders of the public data sets: on fixtures of the project's own in every public format, and
on damaged files."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from sage_lib.errors import SageError
from sage_lib.tasks import public_sets

FIXTURES = Path(__file__).parent / "data"
COUNTS = {
    "aime": 4,
    "amc23": 2,
    "math500_level5": 2,
    "minerva": 2,
    "gsm8k_train": 2,
    "gsm8k_test": 1,
    "dapo_math_17k": 2,
    "open_math_reasoning_mini": 4,
}


@pytest.fixture
def folder(offline, tmp_path, monkeypatch):
    """A copy of the fixtures, pinned by their own counts and checksums; nothing can be fetched."""
    shutil.copytree(FIXTURES, tmp_path / "data")
    monkeypatch.setenv("SAGE_DATA", str(tmp_path / "data"))
    for name, source in public_sets.SOURCES.items():
        parts = tuple(
            dataclasses.replace(p, sha256=digest(FIXTURES / p.local))
            if isinstance(p, public_sets.File)
            else p
            for p in source.parts
        )
        monkeypatch.setitem(
            public_sets.SOURCES, name, dataclasses.replace(source, parts=parts, rows=COUNTS[name])
        )
    return tmp_path / "data"


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "golds"),
    [
        ("aime", ["009", "401", "17", "496"]),  # text and number
        ("amc23", ["27", "0.125"]),  # 27.0 in the file
        ("math500_level5", [r"\frac{5}{6}", "(-2,2)"]),  # the level is a number or a text
        ("minerva", ["6", r"\frac{x^{2}}{3}"]),  # there is no answer: the last box of the solution
        ("gsm8k_train", ["12", "1200"]),
        ("gsm8k_test", ["7"]),  # after ####, without the comma
        ("dapo_math_17k", ["32", "4"]),
        ("open_math_reasoning_mini", ["7", "x+1", "7", "-2.5"]),
    ],
)
def test_every_format(folder, name, golds):
    made = public_sets.load(name)
    assert [p.gold for p in made] == golds
    assert all(p.question and p.dataset == p.task == name for p in made)
    assert len({p.id for p in made}) == len(golds)


def test_problems_are_what_they_were(folder):
    every = (p for name in COUNTS for p in problems(name))
    rows = [json.dumps([p.id, p.dataset, p.question, p.gold]) for p in every]
    text = "".join(f"{row}\n" for row in rows)
    found = hashlib.sha256(text.encode()).hexdigest()
    assert found == "7ae7bbc2f3a43b2b10c8c90f6b7cf619c9be5995622efdb5dbf53307c8a79b7e"


def problems(name, rows=9999, **given):
    return public_sets.PublicSet(name=name).problems(rows, 0, **given)


def test_the_first_rows_are_taken_of_those_that_are_not_excluded(folder):
    made = problems("aime")
    assert problems("aime", 2) == made[:2]
    assert problems("aime", 2, exclude=frozenset([made[0].question])) == made[1:3]


def demonstrations(name, rows=9999, max_seq_length=1000):
    made = public_sets.PublicSet(name=name).demonstrations(
        rows, 0, count_tokens=len, max_seq_length=max_seq_length
    )
    return [(worked.working, worked.answer) for worked in made]


def test_worked_answers_are_numeric_fit_half_the_context_and_carry_no_annotations(folder):
    assert demonstrations("open_math_reasoning_mini", max_seq_length=200) == [
        ("3+4=7\n\nIt is 7.", "7"),
        ("3+4=7\n\nIt is 7.", "-2.5"),
    ]
    first, second = demonstrations("gsm8k_train")
    assert first == ("Ann has 3*4=12 nuts.", "12")
    assert second == ("There are 40*30=1,200 seats.", "1200")
    assert demonstrations("gsm8k_train", rows=1) == [first]
    with pytest.raises(SageError, match="amc23 has no worked answers"):
        demonstrations("amc23")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text.replace('"question"', '"query"'), "amc23.jsonl:1: .*'question' is miss"),
        (lambda text: text.replace('"id": 1', '"id": 0'), "amc23.jsonl:2: the id .* occurs twice"),
        (lambda text: text.splitlines()[0], "should have 2 problems and has 1"),
        (lambda text: text[:-9], "line 2 is not valid JSON"),
    ],
)
def test_damaged_files_are_refused(folder, monkeypatch, damage, words):
    path = folder / "benchmarks/amc23.jsonl"
    path.write_text(damage(path.read_text()))
    with pytest.raises(SageError, match="does not have the checksum"):
        public_sets.load("amc23")
    # Damaged before it was pinned: what is in the file is looked at too.
    source = public_sets.SOURCES["amc23"]
    part = dataclasses.replace(source.parts[0], sha256=digest(path))
    damaged = dataclasses.replace(source, parts=(part,))
    monkeypatch.setitem(public_sets.SOURCES, "amc23", damaged)
    with pytest.raises(SageError, match=words):
        public_sets.load("amc23")


def test_what_the_folder_lacks_is_fetched_once_and_checked(folder, monkeypatch, tmp_path):
    content = (folder / "benchmarks/amc23.jsonl").read_bytes()
    (folder / "benchmarks/amc23.jsonl").unlink()
    with pytest.raises(SageError, match=r"amc23\.jsonl could not be fetched from .*no network"):
        public_sets.load("amc23")
    served = tmp_path / "served"
    served.write_bytes(content + b"\n{}")
    urls = []

    def serve(url, timeout):
        urls.append(url)
        return served.open("rb")

    monkeypatch.setattr(public_sets, "urlopen", serve)
    with pytest.raises(SageError, match="changed at its source"):  # and nothing of it is kept
        public_sets.load("amc23")
    served.write_bytes(content)
    assert len(public_sets.load("amc23")) == len(public_sets.load("amc23")) == 2
    assert len(urls) == 2 and "QwenLM/Qwen2.5-Math/main/evaluation/data/amc23" in urls[0]
    served.write_bytes(content.splitlines()[0])  # another revision, as it is there
    assert len(public_sets.load("amc23", revision="another")) == 1 and "/another/" in urls[-1]
