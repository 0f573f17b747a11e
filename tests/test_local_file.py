"""A data set of one's own: read in both formats, refused with a sentence, judged by a function."""

import json

import pytest

from sage_lib.errors import SageError
from sage_lib.tasks import judging
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.prompts import answer_turn
from sage_lib.tasks.table import make_task

JSONL = (
    '{"key": "a", "problem": "1 + 1?", "answer": 2, "steps": "one and one"}\n'
    "\n"
    '{"key": "b", "problem": "half of 1?", "answer": "1/2", "steps": "a half"}\n'
)
CSV = 'key,problem,answer,steps\na,1 + 1?,2,one and one\nb,half of 1?,1/2,"a ""half"""\n'
JUDGES = """
def same_length(gold, answer):
    return len(gold) == len(answer)

def longer(gold, answer):
    return len(gold) < len(answer)

def score(gold, answer):
    return 0.5

def faulty(gold, answer):
    return int(gold) == int(answer)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my.jsonl").write_text(JSONL)
    (tmp_path / "my.csv").write_text(CSV)
    (tmp_path / "judges_of_one_s_own.py").write_text(JUDGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    named = ("same_length", "longer", "score", "faulty", "other")
    words = [f"judges_of_one_s_own:{name}" for name in named]
    monkeypatch.setenv("SAGE_TRUST", ",".join([*words, "no_such_module_here:same"]))
    return tmp_path


def task(folder, **given):
    return make_task("file", {"path": "my.jsonl", "question": "problem", **given}, {}, folder)


@pytest.mark.parametrize("path", ["my.jsonl", "my.csv"])
def test_both_formats(folder, path):
    chosen = task(folder, path=path, id="key", working="steps")
    made = chosen.problems(9, 0)
    assert [(p.id, p.dataset, p.question, p.gold) for p in made] == [
        ("a", "my", "1 + 1?", "2"),
        ("b", "my", "half of 1?", "1/2"),
    ]
    assert [p.id for p in task(folder, path=path).problems(1, 0)] == ["1"]
    rest = chosen.problems(9, 0, frozenset(["1 + 1?"]))
    assert [p.id for p in rest] == ["b"]
    learned = chosen.demonstrations(9, 0, count_tokens=len, max_seq_length=34)
    assert (learned[0].working, learned[0].answer) == ("one and one", "2")
    assert len(learned) == 1 + (path == "my.jsonl"), "the quotation marks are too long"
    absolute = task("/elsewhere", path=str(folder / path))
    assert len(absolute.problems(9, 0)) == 2


def test_a_function_judges_where_one_is_named(folder, verifier):
    by_length = task(folder, judge="judges_of_one_s_own:same_length")
    made = by_length.problems(9, 0)
    mixed = [*made, Problem("1", "questions", "1 + 1?", "2", "file", "math")]
    completions = [answer_turn("so", answer) for answer in ("7", "12", "2")]
    judging.require_golds(task(folder).problems(9, 0), verifier)
    assert judging.judge(mixed, completions, verifier) == [True, False, True]
    assert judging.judge(made, ["no answer", "none"], verifier) == [False, False]
    # Its golds need not have the form of answers.
    longer = task(folder, judge="judges_of_one_s_own:longer").problems(9, 0)
    judging.require_golds(longer, verifier)


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ("no_such_module_here:same", "cannot be imported .*PYTHONPATH"),
        ("judges_of_one_s_own:other", "cannot be imported .*no attribute 'other'"),
    ],
)
def test_a_judge_that_cannot_be_had_is_named_before_the_work(folder, judge, words):
    with pytest.raises(SageError, match=words):
        task(folder, judge=judge).problems(9, 0)


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ("score", "must return True or False, not 0.5"),
        ("faulty", "raised ValueError.*'1/2'.* let it return False"),
    ],
)
def test_a_faulty_judge_stops_the_run(folder, judge, words, verifier):
    made = task(folder, judge=f"judges_of_one_s_own:{judge}").problems(9, 0)
    completions = [answer_turn("so", answer) for answer in ("2", "1/2")]
    with pytest.raises(SageError, match=words):
        judging.judge(made, completions, verifier)


@pytest.mark.parametrize(
    ("path", "old", "new", "given", "words"),
    [
        ("my.jsonl", "", "", {"path": "other.jsonl"}, "no data file .*other.jsonl: correct"),
        ("my.jsonl", "", "", {"gold": "gold"}, "1: there is no gold answer .*; there are key"),
        ("my.jsonl", '"b"', '"a"', {"id": "key"}, "my.jsonl:3: the id a occurs twice"),
        ("my.jsonl", '"1/2"', '" "', {}, "my.jsonl:3: there is no gold answer"),
        ("my.jsonl", "half of 1?", "1 + 1?", {}, "my.jsonl:3: its question stands above with"),
        ("my.csv", "2,one", "2,more,one", {}, "line 2 is not valid CSV .another number"),
        ("my.csv", '""half"""', '"half', {}, "line 3 is not valid CSV"),
        ("my.jsonl", '"b", ', '"b" ', {}, "my.jsonl, line 3 is not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(folder, path, old, new, given, words):
    if old:
        assert old in (folder / path).read_text()
        (folder / path).write_text((folder / path).read_text().replace(old, new))
    with pytest.raises(SageError, match=words) as caught:
        task(folder, **{"path": path, **given}).problems(9, 0)
    assert "\n" not in str(caught.value)


def test_a_changed_file_is_another_data_set_and_a_moved_one_is_not(folder):
    before = task(folder)
    (folder / "moved").mkdir()
    (folder / "moved" / "my.jsonl").write_text(JSONL)
    assert task(folder / "moved").identity() == before.identity()
    kept = json.dumps(before.identity())
    (folder / "my.jsonl").write_text(JSONL.replace("1/2", "1/3"))
    assert json.dumps(before.identity()) != kept
    assert [p.gold for p in before.problems(9, 0)] == ["2", "1/3"]
    assert before.changes() == {"name": "file", "path": "my.jsonl", "question": "problem"}
    assert task(folder, path="gone.csv").identity()["label"] == "gone"


def test_only_what_the_file_holds_is_held_out_of_it(folder):
    for question, held in (("half of 1?", True), ("half of 2?", False)):
        problem = Problem("1", "questions", question, "", "file", "math")
        assert task(folder).could_draw(problem) == held
