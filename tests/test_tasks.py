"""The table of tasks: the same members everywhere, settings that are checked, streams that stay
what they were, and one function that judges."""

import hashlib
import json

import pytest

from sage_lib.errors import SageError
from sage_lib.tasks import judging
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.prompts import answer_turn
from sage_lib.tasks.table import check_settings, task_of
from sage_lib.tasks.verifier import Verifier

#: SHA-256 of the first 200 problems: a stream that changes changes what is trained and held out.
COUNTDOWN = {"fewest": 3, "most": 5, "limit": 50}
SHARED = {"countdown": COUNTDOWN}
MIXED = {"both": 0.6, "forward": 0.25, "reverse": 0.15}
STREAMS = {
    "fde20c1708d52204": ("countdown", {"kinds": {"both": 1.0}}, 5),
    "5a86fe3facf6630c": ("countdown", {"kinds": {"forward": 1.0}}, 5),
    "d3be3679acf12848": ("countdown", {"kinds": {"reverse": 1.0}}, 5),
    "5cc9052c2038cf35": ("countdown", {"kinds": MIXED}, 2),
    "c8676e1d19da1ddf": ("countdown", {"kinds": {"both": 1.0}, "fewest": 6, "most": 6}, 1004),
    "2363fe04021db188": ("gsm_symbolic", {}, 1),
    "6a3ea032dc1cbf95": ("gsm_symbolic", {"longest": 100}, 1),
    "4e35308c27448634": ("knights_knaves", {"people": 2}, 1001),
    "3e54876fd2dca9ae": ("knights_knaves", {"people": 5}, 1001),
}
WORKED = {
    "countdown": "f16b0f1cf4a581f6",
    "gsm_symbolic": "aff2ceb288e75b97",
}


def sha256(rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("digest", STREAMS)
def test_streams_are_what_they_were(digest):
    name, given, seed = STREAMS[digest]
    settings = check_settings(name, given, SHARED.get(name))
    made = task_of(name).problems(settings, 200, seed)
    assert sha256([p.id, p.dataset, p.question, p.gold] for p in made) == digest
    assert {p.task for p in made} == {name}


@pytest.mark.parametrize(
    ("name", "given"), [("countdown", {"rare_share": 0.03}), ("gsm_symbolic", {"longest": 100})]
)
def test_demonstrations_are_what_they_were(name, given):
    settings = check_settings(name, given, SHARED.get(name))
    made = task_of(name).demonstrations(settings, 200, 1, count_tokens=len, max_seq_length=8)
    assert sha256([d.question, d.working, d.answer] for d in made) == WORKED[name]


@pytest.mark.parametrize(
    ("name", "given"),
    [("countdown", {}), ("gsm_symbolic", {"longest": 100}), ("knights_knaves", {"people": 3})],
)
def test_questions_that_are_excluded_are_not_drawn_and_could_have_been(name, given):
    task, settings = task_of(name), check_settings(name, given)
    first = task.problems(settings, 20, 7)
    questions = {p.question for p in first}
    assert first == task.problems(settings, 20, 7) and len(questions) == 20
    rest = task.problems(settings, 20, 7, frozenset(questions))
    assert len(rest) == 20 and not questions & {p.question for p in rest}
    assert all(task.could_draw(settings, p) for p in first)
    plain = [Problem(p.id, "questions", p.question, "", "file", "math") for p in first]
    assert all(task.could_draw(settings, p) for p in plain)
    other = Problem("1", "aime", "How many?", "7", "aime")
    assert not task.could_draw(settings, other)
    with pytest.raises(SageError, match=f"{name} has no revisions"):
        task.problems(settings, 1, 7, revision="main")


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("aime24", {}, "no data set 'aime24': choose one of countdown, .*, aime, amc23"),
        ("countdown", {"usual_most": 3}, "no setting 'usual_most'; .* rare_share, rows, .*verb$"),
        ("aime", {"people": 2}, "aime has no setting 'people'; its settings are: only"),
        ("knights_knaves", {}, "knights_knaves needs the setting people"),
        ("knights_knaves", {"people": 9}, "people of the task knights_knaves is 9: .* 8"),
        ("knights_knaves", {"people": True}, "people .* is True: .* valid integer"),
        ("countdown", {"rare_share": 3}, "rare_share of the task countdown is 3: .* 1"),
        ("countdown", {"fewest": 5, "most": 4}, "fewest digits, 5, are more than 4"),
        ("countdown", {"kinds": {"both": 0.5}}, "of both, forward, reverse and sum to 1"),
        ("countdown", {"kinds": {"other": 1}}, "of both, forward, reverse and sum to 1"),
        ("file", {"path": "my.parquet"}, "path of the task file is 'my.parquet'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(name, given, words):
    with pytest.raises(SageError, match=words) as caught:
        check_settings(name, given)
    assert "\n" not in str(caught.value)


def test_settings_shared_by_a_profile_fill_what_a_line_leaves_out():
    assert check_settings("countdown", {}, {"most": 3, "limit": 9}).limit == 9
    assert check_settings("countdown", {"limit": 7}, {"limit": 9}).limit == 7


def test_what_is_written_differently_and_means_the_same_is_the_same():
    one = check_settings("countdown", {"kinds": {"reverse": 0.5, "both": 0.5, "forward": 0}})
    two = check_settings("countdown", {"kinds": {"forward": 0.0, "both": 0.5, "reverse": 0.5}})
    assert json.dumps(one.identity()) == json.dumps(two.identity())
    assert task_of("countdown").problems(one, 9, 1) == task_of("countdown").problems(two, 9, 1)
    written = check_settings("countdown", {"most": 5, "kinds": {"both": 1}})
    assert written.identity() == {"name": "countdown"}


def test_one_function_judges_every_task_in_any_order():
    puzzle = "Emma is a knight, and Liam is a knave."
    asked = [
        Problem("a", "math", "1 + 1?", "2", "aime"),
        Problem("b", "knights", "who?", puzzle, "knights_knaves"),
        Problem("c", "math", "1 + 2?", "3", "gsm_symbolic"),
    ]
    verifier = Verifier()
    answered = [answer_turn("so", answer) for answer in ("2", puzzle, "4")]
    assert judging.judge(asked, answered, verifier) == [True, True, False]
    assert judging.judge(asked[::-1], answered[::-1], verifier) == [False, True, True]
    unmarked = ["2", puzzle, answer_turn("so", "3")]
    assert judging.judge(asked, unmarked, verifier) == [False, False, True], "no markers, no answer"
    judging.require_golds(asked, verifier)  # the puzzle's gold is no formula, and need not be
    with pytest.raises(ValueError):
        judging.judge(asked, unmarked[:1], verifier)
    verifier.close()
