"""reasoning-gym's data sets and their scorers: graph coloring by brute force over all answers, five
other data sets, partial credit, hostile answers, and the code of the scorers that are let in."""

import ast
import contextlib
import inspect
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter

import pytest

from sage_lib.errors import SageError
from sage_lib.tasks import graph_color, judging, prompts, reasoning_gym
from sage_lib.tasks.graph_color import GraphColor
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.reasoning_gym import ReasoningGym
from sage_lib.tasks.table import make_task, task_of

gym = pytest.importorskip("reasoning_gym", reason="the package reasoning-gym is not installed")

WORKED = {"count_tokens": len, "max_seq_length": 10_000}
#: Data set, its parameters, and an answer to the first problem that is wrong but of the same form.
SMOKE = {
    "basic_arithmetic": ({"min_terms": 2, "max_terms": 3}, "123456"),
    "chain_sum": ({"max_terms": 3}, "-1"),
    "mini_sudoku": ({}, "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 2"),
    "quantum_lock": ({"difficulty": 2}, "A → A → A → A → A → A → A → A → A → A → A → A → A"),
    "spell_backward": ({"max_word_len": 6}, "zzz"),
}


def test_a_scorer_that_does_not_end_counts_as_wrong(monkeypatch, caplog):
    class Busy:
        def score_answer(self, answer, entry):
            while answer == "busy":
                with contextlib.suppress(Exception):
                    pass
            return 1.0

    monkeypatch.setattr(reasoning_gym, "LIMIT", 0.2)
    assert reasoning_gym.score(Busy(), "quick", {}) == 1.0
    assert reasoning_gym.score(Busy(), "busy", {}) == 0.0
    assert "the scorer of Busy took more than 0.2 s for the answer 'busy'" in caplog.text
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def line(dataset, **given):
    return make_task("reasoning_gym", {"dataset": dataset, **given})


def colored(**given):
    return make_task("graph_color", given)


@pytest.mark.parametrize("given", [{}, {"fewest": 8, "edge_probability": 0.6}, {"vertices": 4}])
def test_the_listed_answers_are_all_that_the_scorer_gives_its_full_score(given):
    task = colored(**given)
    scorer = gym.create_dataset("graph_color", size=1, seed=0)
    for problem in task.problems(12, 5):
        graph = problem.detail
        every = list(itertools.product(range(1, task.colors + 1), repeat=task.vertices))
        assert len(every) <= 729
        puzzle = {
            "vertices": list(range(task.vertices)),
            "edges": [tuple(map(int, edge.split("-"))) for edge in problem.id.split(".")],
            "color_options": list(range(1, task.colors + 1)),
        }
        entry = {"metadata": {"puzzle": puzzle}}
        answers = {one: json.dumps(dict(enumerate(one))) for one in every}
        right = {one for one in every if scorer.score_answer(answers[one], entry) == 1.0}
        listed = GraphColor.completions(problem)
        assert Counter(way for way, *_ in listed) == {"L": len(right)}
        keys = list(map(str, range(task.vertices)))
        maps = [json.loads(answer) for _, _, answer in listed]
        assert {tuple(one[key] for key in keys) for one in maps} == right
        assert len(set(listed)) == len(listed) and math.factorial(task.colors) <= len(right)
        for one in every:
            work, answer = graph_color.worked(graph, one)
            assert GraphColor.is_correct(problem, answer) == (one in right)
            # A coloring is right where no step gives a vertex a color that it has just listed.
            steps = [step.replace("-", "").split(" = ") for step in work.split(" , ")]
            assert (one in right) == all(color not in before.split()[1:] for before, color in steps)
        assert GraphColor.is_correct(problem, problem.gold)


def test_valid_work_is_what_is_listed_and_nothing_else():
    [problem] = colored(fewest=6, most=6).problems(1, 2)
    right = set()
    for way, *worked in GraphColor.completions(problem):
        text = prompts.answer_turn(*worked).removeprefix(prompts.WORK_START)
        assert GraphColor.way_of(problem, text) == way == "L"
        right.add(worked[1])
    work, answer = worked
    others = [
        (work, "{ }"),
        (work, sorted(right - {answer})[0]),  # right, but not what the work says
        (re.sub(r"- (\d)", lambda m: f"- {4 - int(m[1])}", work), answer),  # neighbours' colors
        (re.sub(r" - \d", "", work), answer),
        (f"{work} , 6 = 1", answer),
        (work, answer.replace("}", ', "6" : 1 }')),  # the scorer takes it
    ]
    for number, other in enumerate(others):
        text = prompts.answer_turn(*other)
        measured = GraphColor.measures(problem, text, True)
        assert not measured["valid"] and measured["unsound"], other
        assert GraphColor.is_correct(problem, other[1]) == (number > 0)
    text = prompts.answer_turn(work, answer)
    for other in (text.removesuffix(prompts.SOLUTION_END), f"{text} so"):
        assert GraphColor.way_of(problem, other) is None


def test_graphs_have_the_edges_that_are_asked_for_and_a_coloring():
    made = colored(fewest=7, most=9, edge_probability=0.5).problems(100, 3)
    assert {len(p.detail.edges) for p in made} == {7, 8, 9}
    assert len({p.id for p in made}) == 100
    assert {p.dataset for p in made} == {"graph_color_7_to_9_edges"}
    assert all(6 <= len(graph_color.colorings(p.detail)) < 729 for p in made)


def test_demonstrations_are_right_but_for_the_aimless_ones():
    shown = colored(distinct=150).demonstrations(600, 1, **WORKED)
    found = [graph_of(one.question) for one in shown]
    assert len(set(found)) == 150
    for graph, one in zip(found, shown, strict=True):
        problem = Problem("1", "graphs", one.question, "", "graph_color", graph)
        text = prompts.answer_turn(one.working, one.answer)
        assert GraphColor.way_of(problem, text) == "L"
    aimless = colored(distinct=150, aimless_share=1.0).demonstrations(600, 1, **WORKED)
    right = 0
    for one in aimless:
        graph, coloring = graph_of(one.question), list(json.loads(one.answer).values())
        steps = [step.split(" = ") for step in one.working.split(" , ")]
        for vertex, (before, color) in enumerate(steps):
            near = [str(coloring[a]) for a, b in graph.edges if b == vertex]
            assert before.split() == [str(vertex), *(["-", *near] if near else [])]
            assert int(color) == coloring[vertex]
        problem = Problem("1", "graphs", one.question, "", "graph_color", graph)
        right += GraphColor.is_correct(problem, one.answer)
    expected = sum(len(graph_color.colorings(graph_of(one.question))) / 729 for one in aimless)
    assert abs(right - expected) < 5 * expected**0.5


def graph_of(question):
    """Read back from its words."""
    head, _, edges = question.partition(" : ")
    _, vertices, _, colors = head.split()
    pairs = [tuple(map(int, edge.split(" - ")))[::-1] for edge in edges.split(" , ")]
    return graph_color.Graph(int(vertices), int(colors), tuple(sorted(pairs)))


def test_problems_are_the_same_in_another_process():
    code = f"""
from sage_lib.tasks.table import make_task
lines = [("graph_color", {{}}), *(("reasoning_gym", {{"dataset": name}}) for name in {list(SMOKE)})]
print([(p.question, p.gold) for line in lines for p in make_task(*line).problems(5, 1)])
"""
    printed = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        printed.add(done.stdout)
    assert len(printed) == 1 and "" not in printed


@pytest.mark.parametrize("dataset", SMOKE)
def test_another_data_set_is_made_judged_and_demonstrated(dataset, verifier):
    config, wrong = SMOKE[dataset]
    task = line(dataset, config=config)
    made = task.problems(5, 1)
    assert {p.task for p in made} == {"reasoning_gym"} and ReasoningGym.completions(made[0]) == []
    assert {p.dataset for p in made} == {task.display_label}
    ReasoningGym.require_golds(made, verifier)
    own = [prompts.answer_turn("so", p.gold) for p in made]
    assert judging.judge(made, own, verifier) == [True] * 5
    others = [prompts.answer_turn("so", wrong)] * 4 + [made[-1].gold]  # the last has no markers
    assert judging.judge(made, others, verifier) == [False] * 5
    shown = task.demonstrations(5, 1, **WORKED)
    expected = [(p.question, "", p.gold) for p in made]
    assert [(d.question, d.working, d.answer) for d in shown] == expected


def test_work_from_the_metadata_leads_to_the_answer():
    steps = {
        "double": lambda value, one, before: 2 * value,
        "halve": lambda value, one, before: value // 2,
        "square": lambda value, one, before: value**2,
        "add previous": lambda value, one, before: value + before,
        "add": lambda value, one, before: value + int(one),
        "multiply by": lambda value, one, before: value * int(one),
    }
    settings = line("number_sequence", work="rule")
    for shown in settings.demonstrations(300, 1, **WORKED):
        *_, before, value = map(int, shown.question.removesuffix(", ?").split(", "))
        for step in shown.working.split(" then "):
            name, number = re.fullmatch(r"([a-z ]+?) ?(-?\d+)?", step).groups()
            value = steps[name](value, number, before)
        assert str(value) == shown.answer
    with pytest.raises(SageError, match=r"no text 'complexity': take one of .*'rule'"):
        line("number_sequence", work="complexity").problems(1, 1)


def test_partial_credit_below_the_threshold_earns_nothing():
    [lock] = line("quantum_lock", config={"difficulty": 1}).problems(1, 4)
    made, entry = lock.detail.dataset, lock.detail.entry
    longer = next(
        " → ".join(keys)
        for length in range(1, 9)
        for keys in itertools.product("ABC", repeat=length)
        if made.score_answer(" → ".join(keys), entry) == 0.5
    )
    assert not ReasoningGym.is_correct(lock, longer) and ReasoningGym.is_correct(lock, lock.gold)
    lower = line("quantum_lock", config={"difficulty": 1}, threshold=0.5)
    [lock] = lower.problems(1, 4)
    assert ReasoningGym.is_correct(lock, longer)
    [graph] = colored(fewest=3).problems(1, 1)
    _, same = graph_color.worked(graph.detail, [1] * 6)
    scorer = reasoning_gym.generator("graph_color", "{}", 0, 1)
    assert scorer.score_answer(same, graph.detail.entry) == 0.01
    assert not GraphColor.is_correct(graph, same)


#: Nothing here is right, takes long, or runs.
HOSTILE = [
    "", "{", "[" * 400, "[" * 100_000, '{"0": ' * 60, "9" * 10_000_000, "1e999999999", "nan",
    "9**9**9**9", "__import__('os').system('touch hostile')", "(lambda: 1)()", "\x00" * 50,
    "null", '{"0": 1e999999999}', "0" * 399 + "1", "\n" * 399, "A" * 399,
]  # fmt: skip


def test_hostile_answers_are_refused_at_once(tmp_path, monkeypatch, verifier):
    monkeypatch.chdir(tmp_path)
    [graph] = colored(fewest=3).problems(1, 1)
    asked = [graph, *(line(one).problems(1, 1)[0] for one in SMOKE)]
    started = time.process_time()
    for problem in asked:
        # The last one is right by the scorer, and refused unread.
        given = [*HOSTILE, None, f"{problem.gold} " * 200, problem.gold + " " * 100_000]
        verdicts = task_of(problem.task).are_correct([problem] * len(given), given, verifier)
        assert verdicts == [False] * len(given), problem.dataset
    assert time.process_time() - started < 5
    assert not list(tmp_path.iterdir())


def test_no_scorer_that_is_let_in_runs_an_answer_as_code():
    """What score_answer and the functions of the package that it calls mention by name. The two
    that evaluate their own question, and no answer, are let in."""
    code = {"eval", "exec", "parse_expr", "sympify"}
    runs_code = {name for name, (cls, _) in gym.factory.DATASETS.items() if code & called(cls)}
    refused = {name for name, why in reasoning_gym.REFUSED.items() if why == reasoning_gym._CODE}
    assert runs_code == refused | {"bitwise_arithmetic", "number_sorting"}
    assert set(reasoning_gym.REFUSED) <= set(gym.factory.DATASETS)


@pytest.mark.slow
def test_every_data_set_that_is_taken_judges_its_own_answer_right_and_no_other():
    names = sorted(set(gym.factory.DATASETS) - set(reasoning_gym.REFUSED))
    assert len(names) > 80
    for name in names:
        for problem in line(name).problems(4, 1):
            answer = ReasoningGym.last_answer(prompts.answer_turn("so", problem.gold))
            before = repr(problem.detail.entry)
            others = [*HOSTILE, "inf", "-inf", "NaN", "[]", "{}", "[[]]", "...", "(0,0)"]
            right = [other for other in others if ReasoningGym.is_correct(problem, other)]
            assert not right or right == [answer], (name, right)
            assert repr(problem.detail.entry) == before, f"the scorer of {name} changes its entry"
            if answer:
                assert ReasoningGym.is_correct(problem, answer), name


def called(cls):
    """Names of all that a data set's scorer calls, in its own module and class."""
    waiting, seen, names = [cls.score_answer], set(), set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                names.add(name)
                called = getattr(cls, name, None) or function.__globals__.get(name)
                if inspect.isfunction(called) and "reasoning_gym" in called.__module__:
                    waiting.append(called)
    return names


def test_a_graph_that_exists_once_is_drawn_once():
    assert len(colored(vertices=3, fewest=3).problems(1, 1)) == 1
    with pytest.raises(SageError, match="only 1 different problems were found: ask for fewer"):
        colored(vertices=3, fewest=3).problems(2, 1)


def test_a_data_set_without_listed_answers_can_be_judged_and_not_be_learned_from(verifier):
    task = line("propositional_logic")
    [problem] = task.problems(1, 1)
    assert problem.gold == ""
    ReasoningGym.require_golds([problem], verifier)
    with pytest.raises(SageError, match="lists no answers to learn from"):
        task.demonstrations(1, 1, **WORKED)


def test_an_answer_that_its_own_scorer_does_not_accept_is_found_before_training(verifier):
    [problem] = line("chain_sum").problems(1, 1)
    broken = Problem("7", "chain_sum", "?", "none", "reasoning_gym", problem.detail)
    with pytest.raises(SageError, match="chain_sum refuses its own answer of problem 7"):
        ReasoningGym.require_golds([broken], verifier)


def test_without_the_package_one_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SageError, match="pip install reasoning-gym") as caught:
        line("chain_sum")
    assert "\n" not in str(caught.value)
