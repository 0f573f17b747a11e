"""The table of tasks: the same members everywhere, settings that are checked, streams that stay
what they were, and one function that judges."""

import hashlib
import inspect
import json
import subprocess
import sys

import pytest

from sage_lib.errors import SageError
from sage_lib.tasks import judging, table
from sage_lib.tasks.problem import Problem, plain
from sage_lib.tasks.prompts import answer_turn
from sage_lib.tasks.table import TASKS, check_settings, task_of
from sage_lib.tasks.verifier import Verifier

MEMBERS = [name for name in vars(table.Task) if not name.startswith("_")]
FUNCTIONS = [name for name in MEMBERS if inspect.isfunction(vars(table.Task)[name])]
#: SHA-256 of the first 200 problems: a stream that changes changes what is trained and held out.
COUNTDOWN = {"fewest": 3, "most": 5, "limit": 50}
SHARED = {"countdown": COUNTDOWN}
MIXED = {"both": 0.6, "forward": 0.25, "reverse": 0.15}
STREAMS = [
    (
        "countdown",
        {"kinds": {"both": 1.0}},
        5,
        "fde20c1708d52204ec2bc062b424d258ff5c69161c35ef23b35f14f3b434ee97",
    ),
    (
        "countdown",
        {"kinds": {"forward": 1.0}},
        5,
        "5a86fe3facf6630c48f69857d389f83b0013af377b402fd6ab86932ade6d206d",
    ),
    (
        "countdown",
        {"kinds": {"reverse": 1.0}},
        5,
        "d3be3679acf128484882671dc8b8a4418b058d963aa6322c67339a51f7caeb94",
    ),
    (
        "countdown",
        {"kinds": MIXED},
        2,
        "5cc9052c2038cf352fd90ce6fb53efc8b8cb30d8059c6c52f6570449099647df",
    ),
    (
        "countdown",
        {"kinds": {"both": 1.0}, "fewest": 6, "most": 6},
        1004,
        "c8676e1d19da1ddf7bcb9e15382351a1e419ec52de89cb0fd99f92c3035236e4",
    ),
    (
        "gsm_symbolic",
        {},
        1,
        "2363fe04021db188cb95d4c5ab3d943edb27322c60010b83f6acb0a5a03e14e7",
    ),
    (
        "gsm_symbolic",
        {"longest": 100},
        1,
        "6a3ea032dc1cbf95c4ca168c8a3d2f86e159666e281cb20269780948dcd8e927",
    ),
    (
        "knights_knaves",
        {"people": 2},
        1001,
        "4e35308c274486348c2d0923f50d597a57439268673e5b1e585b2088e55b43de",
    ),
    (
        "knights_knaves",
        {"people": 5},
        1001,
        "3e54876fd2dca9aeef1ebdf3d752d8b97f96db9c9e200c7411972f5f9b9a2c9a",
    ),
]
DEMONSTRATIONS = [
    (
        "countdown",
        {"rare_share": 0.03},
        "f16b0f1cf4a581f63156a8adc49828ae2ac4e30fe4fdc7cc81d185be269d2c60",
    ),
    (
        "gsm_symbolic",
        {"longest": 100},
        "aff2ceb288e75b975f1c38f1c6669c5518f2b444beecd047fc4a6295f1a72cae",
    ),
]


def sha256(rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_the_same_members_with_the_same_parameters(name):
    task = task_of(name)
    assert {"Settings", "LOGGED", "COUNTED", "problems", "judge", "measures"} <= set(MEMBERS)
    for member in MEMBERS:
        assert hasattr(task, member)
    for function in FUNCTIONS:
        wanted = list(inspect.signature(vars(table.Task)[function]).parameters.values())[1:]
        given = list(inspect.signature(getattr(task, function)).parameters.values())
        assert [(p.name, p.kind, p.default) for p in given] == [
            (p.name, p.kind, p.default) for p in wanted
        ], function


@pytest.mark.parametrize(("name", "given", "seed", "expected"), STREAMS)
def test_streams_are_what_they_were(name, given, seed, expected):
    settings = check_settings(name, given, SHARED.get(name))
    made = task_of(name).problems(settings, 200, seed)
    assert sha256([p.id, p.dataset, p.question, p.gold] for p in made) == expected
    assert {p.task for p in made} == {name}


@pytest.mark.parametrize(("name", "given", "expected"), DEMONSTRATIONS)
def test_demonstrations_are_what_they_were(name, given, expected):
    settings = check_settings(name, given, SHARED.get(name))
    made = task_of(name).demonstrations(settings, 200, 1, count_tokens=len, max_seq_length=8)
    assert sha256([d.question, d.working, d.answer] for d in made) == expected


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
    assert all(task.could_draw(settings, p) for p in plain([p.question for p in first]))
    other = Problem("1", "aime", "How many?", "7", "aime")
    assert not task.could_draw(settings, other)
    with pytest.raises(SageError, match=f"{name} has no revisions"):
        task.problems(settings, 1, 7, revision="main")


def test_labels():
    def label(name, given, shared=None):
        return task_of(name).label(check_settings(name, given, shared, "/somewhere"))

    assert label("countdown", {}) == label("countdown", {"fewest": 2}) == "both"
    assert label("countdown", {"kinds": {"reverse": 1}}, COUNTDOWN) == "reverse"
    assert label("countdown", {"kinds": MIXED}, COUNTDOWN) == "mixed"
    assert label("countdown", {"fewest": 6, "most": 6}, COUNTDOWN) == "both_6_digits"
    assert label("countdown", {"verb": "find"}, COUNTDOWN) == "both_other_words"
    assert label("countdown", {"most": 4}, COUNTDOWN) == "both_3_to_4_digits"
    assert label("countdown", {"fewest": 3}, COUNTDOWN) == "both"
    assert label("knights_knaves", {"people": 2}) == "knights_knaves_2"
    assert label("aime", {}) == "aime" and label("gsm_symbolic", {}) == "gsm_symbolic"
    assert label("file", {"path": "sums/my.csv"}) == "my"
    assert label("file", {"path": "my.csv", "label": "Sums"}) == "Sums"


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("aime24", {}, "no data set 'aime24': choose one of countdown, .*, aime, amc23"),
        ("embedded", {}, "no data set 'embedded'"),
        (
            "countdown",
            {"digits": 3},
            "no setting 'digits'; .* rare_share, early_rare_share, aimless_share, distinct$",
        ),
        ("countdown", {"usual_most": 3}, "no setting 'usual_most'"),
        ("countdown", {"name": "x"}, "no setting 'name'"),
        ("aime", {"people": 2}, "aime has no setting 'people'; its settings are: only"),
        ("knights_knaves", {}, "needs the setting 'people'; its settings are: people"),
        ("knights_knaves", {"people": 9}, "2 to 8 people, not 9"),
        ("knights_knaves", {"people": True}, "people .* a whole number, not True"),
        ("knights_knaves", {"people": "2"}, "must be a whole number, not '2'"),
        ("countdown", {"rare_share": "x"}, "must be a number or null, not 'x'"),
        ("countdown", {"rare_share": 3}, "must be in 0..1, not 3.0"),
        ("countdown", {"most": 4.5}, "must be a whole number, not 4.5"),
        ("countdown", {"fewest": 1}, "2 to 6 digits, from fewest to most, not 1 to 5"),
        ("countdown", {"fewest": 5, "most": 4}, "not 5 to 4"),
        ("countdown", {"limit": 0}, "a limit of 1 or more"),
        ("countdown", {"verb": "find it"}, "verb is one word of small letters, not 'find it'"),
        ("countdown", {"kinds": "both"}, "must be a section of numbers, not 'both'"),
        ("countdown", {"kinds": {"both": "1"}}, "kinds.both .* must be a number, not '1'"),
        ("countdown", {"kinds": {"both": 0.5}}, "of both, forward, reverse and sum to 1"),
        ("countdown", {"kinds": {"other": 1}}, "of both, forward, reverse and sum to 1"),
        ("countdown", {"kinds": {}}, "sum to 1"),
        ("countdown", {"kinds": {"both": 2, "forward": -1}}, "sum to 1"),
        ("gsm_symbolic", {"longest": 0}, "must be 1 or more"),
        ("file", {}, "needs the setting 'path'; .* question, gold"),
        ("file", {"path": "my.parquet"}, "must end in .jsonl or .csv"),
        ("file", {"path": "my.csv", "judge": "same"}, "math or package.module:function"),
    ],
)
def test_settings_that_mean_nothing_are_refused(name, given, words):
    with pytest.raises(SageError, match=words):
        check_settings(name, given)


def test_settings_shared_by_a_profile_fill_what_a_line_leaves_out():
    assert check_settings("countdown", {}, {"most": 3, "limit": 9}).limit == 9
    assert check_settings("countdown", {"limit": 7}, {"limit": 9}).limit == 7
    assert check_settings("knights_knaves", {}, {"people": 3}).people == 3
    with pytest.raises(SageError, match="the task countdown has no setting 'digts'"):
        check_settings("countdown", {}, {"digts": 3})


def test_what_is_written_differently_and_means_the_same_is_the_same():
    one = check_settings("countdown", {"kinds": {"reverse": 0.5, "both": 0.5, "forward": 0}})
    two = check_settings("countdown", {"kinds": {"forward": 0.0, "both": 0.5, "reverse": 0.5}})
    assert json.dumps(one.identity()) == json.dumps(two.identity())
    assert task_of("countdown").problems(one, 9, 1) == task_of("countdown").problems(two, 9, 1)
    plain_line = check_settings("countdown", {}, COUNTDOWN)
    written = check_settings("countdown", {"most": 5, "kinds": {"both": 1}})
    assert plain_line.identity() == written.identity() == {"name": "countdown"}


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
    with pytest.raises(ValueError, match="3 problems with 1 completions"):
        judging.judge(asked, unmarked[:1], verifier)
    verifier.close()


def test_plain_questions_become_problems():
    verifier = Verifier()
    asked = plain(["1 + 1?", "2 + 2?"], [2, 4])
    assert [p.id for p in asked] == ["1", "2"] and asked[1].question == "2 + 2?"
    answers = [answer_turn("so", "2"), answer_turn("so", "5")]
    assert judging.judge(asked, answers, verifier) == [True, False]
    assert plain([asked[0], "3 + 3?"])[0] is asked[0], "problems stay as they are"
    with pytest.raises(SageError, match="2 questions need as many gold answers, not 1"):
        plain(["1 + 1?", "2 + 2?"], [2])
    with pytest.raises(SageError, match="gold answer '' cannot be parsed"):
        judging.judge(plain(["1 + 1?"]), answers[:1], verifier)
    verifier.close()


def test_digests_depend_on_content_and_order():
    one, two = plain(["1 + 1?", "2 + 2?"], [2, 4])
    digests = {
        judging.digest([one, two]),
        judging.digest([two, one]),
        judging.digest([one]),
        judging.digest(plain(["1 + 1?"], [3])),
    }
    assert len(digests) == 4 and all(len(digest) == 16 for digest in digests)
    assert judging.digest([{"a": 1, "b": 2}]) == judging.digest([{"b": 2, "a": 1}])


def test_the_room_needs_no_torch():
    code = (
        "import sys, sage_lib.tasks.judging, sage_lib.tasks.table; "
        "print(*{'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
