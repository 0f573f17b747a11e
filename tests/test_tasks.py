"""The table of tasks: the same members everywhere, settings that are checked, streams that stay
what they were, and one function that judges."""

import hashlib
import itertools
import json
from functools import partial
from typing import Literal

import numpy as np
import pytest
from pydantic.dataclasses import dataclass
from transformers import AutoModelForCausalLM

from sage_lib.errors import SageError
from sage_lib.evaluation.evaluate import count_correct, first
from sage_lib.experiment import problems
from sage_lib.experiment.profile import load_profile
from sage_lib.policy import loading, scoring, tiny_qwen
from sage_lib.policy.exact import exact_summary
from sage_lib.tasks import judging, table
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.prompts import answer_turn
from sage_lib.tasks.table import make_task
from sage_lib.tasks.task import STRICT, ExactTask

ANY_LENGTH = {"count_tokens": len, "max_seq_length": 8}
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
    "85d8310f5ba4b045": ("knights_knaves", {"people": 2}, 1001),
    "b84c08b675991d85": ("knights_knaves", {"people": 5}, 1001),
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
    task = make_task(name, given, SHARED.get(name))
    made = task.problems(200, seed)
    assert sha256([p.id, p.dataset, p.question, p.gold] for p in made) == digest
    assert {p.task for p in made} == {name}


@pytest.mark.parametrize(
    ("name", "given"), [("countdown", {"rare_share": 0.03}), ("gsm_symbolic", {"longest": 100})]
)
def test_demonstrations_are_what_they_were(name, given):
    task = make_task(name, given, SHARED.get(name))
    made = task.demonstrations(200, 1, **ANY_LENGTH)
    assert sha256([d.question, d.working, d.answer] for d in made) == WORKED[name]


GYM = ("basic_arithmetic", "chain_sum", "mini_sudoku", "quantum_lock", "spell_backward")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("countdown", {}),
        ("gsm_symbolic", {"longest": 100}),
        ("knights_knaves", {"people": 3}),
        ("graph_color", {"fewest": 3}),
        *(("reasoning_gym", {"dataset": dataset}) for dataset in GYM),
    ],
)
def test_questions_that_are_excluded_are_not_drawn_and_could_have_been(name, given):
    task = make_task(name, given)
    first = task.problems(20, 7)
    questions = {p.question for p in first}
    assert first == task.problems(20, 7)
    assert len(questions) == len({p.id for p in first}) == 20
    rest = task.problems(20, 7, frozenset(questions))
    assert len(rest) == 20 and not questions & {p.question for p in rest}
    assert all(task.could_draw(p) for p in first)
    plain = [Problem(p.id, "questions", p.question, "", "file", "math") for p in first]
    assert all(task.could_draw(p) for p in plain)
    other = Problem("1", "aime", "How many?", "7", "aime")
    assert not task.could_draw(other)
    neighbour = {p.question for p in task.problems(20, 8)} & questions
    # The package makes entry 1 of seed 7 as entry 0 of 8: reasoning_gym.generator spreads seeds.
    assert len(neighbour) < (15 if name in ("graph_color", "reasoning_gym") else 20)
    for draw in (task.problems, partial(task.demonstrations, **ANY_LENGTH)):
        with pytest.raises(SageError, match=f"{name} has no revisions"):
            draw(1, 7, revision="main")


def gym(dataset, words, **raw):
    return "reasoning_gym", {"dataset": dataset, **raw}, words


#: Task, its settings, and what the one sentence says.
REFUSED = [
    ("aime24", {}, "^data: there is no task 'aime24'; did you mean aime\\?$"),
    ("sums", {}, "no task 'sums'; choose one of countdown, .*, aime, amc23"),
    ("countdown", {"usual_most": 3}, "usual_most is unknown; choose .*, rows, .*verb$"),
    ("countdown", {"mots": 3}, "^data: mots is unknown; did you mean most\\?$"),
    ("aime", {"people": 2}, "people is unknown; choose one of only, rows, seed"),
    ("knights_knaves", {}, "^data: people: field required$"),
    ("knights_knaves", {"people": 9}, "people: input .* 8, not 9$"),
    ("knights_knaves", {"people": True}, "people: .* valid integer, not True"),
    ("countdown", {"rare_share": 3}, "rare_share: .* 1, not 3"),
    ("countdown", {"fewest": 5, "most": 4}, "fewest digits, 5, are more than most, 4"),
    ("countdown", {"kinds": {"both": 0.5}}, "of both, forward, reverse and sum to 1"),
    ("countdown", {"kinds": {"other": 1}}, "of both, forward, reverse and sum to 1"),
    ("countdown", {"most": 7, "kinds": {"both": 0.5, "reverse": 0.5}}, "at most 6 digits, not 7"),
    ("file", {"path": "my.parquet"}, "path: .*, not 'my.parquet'"),
    ("graph_color", {"fewest": 7, "most": 6}, "fewest edges, 7, are more"),
    ("graph_color", {"vertices": 4, "fewest": 6}, "fewest edges, 6, are more .* 4 vertices"),
    ("graph_color", {"colors": 2, "fewest": 10}, "fewest edges, 10, are more .* 2 colors"),
    ("reasoning_gym", {}, "^data: dataset: field required$"),
    gym("chain_sums", "^data: reasoning-gym: .*'chain_sums'; did you mean chain_sum\\?"),
    gym("xyz", "no data set 'xyz'; choose one of .*chain_sum"),
    gym("puzzle24", "puzzle24 is refused: its scorer runs answers as Python code"),
    gym("coin_flip", "coin_flip is refused: a short answer can keep"),
    gym("complex_arithmetic", "gives wrong answers the full score"),
    gym("word_ladder", "its problems differ from one process to the next"),
    gym("knights_knaves", "a task of its own: write name: knights_knaves"),
    gym("chain_sum", "refuses its config: .* keyword argument 'terms'", config={"terms": 3}),
    gym("chain_sum", "refuses its config: .* keyword argument 'seed'", config={"seed": 3}),
    gym("chain_sum", "refuses its config: min_terms", config={"min_terms": 0}),
    gym("chain_sum", "refuses its config: ", config={"min_terms": "2"}),
    gym("chain_sum", "min_terms: input was not a valid JSON value", config={"min_terms": {2}}),
    gym("chain_sum", "threshold: .*, not 0.0", threshold=0.0),
]


@pytest.mark.parametrize(("name", "raw", "words"), REFUSED)
def test_settings_that_mean_nothing_are_refused(name, raw, words):
    with pytest.raises(SageError, match=words) as caught:
        make_task(name, raw)
    assert "\n" not in str(caught.value)


def test_settings_shared_by_a_profile_fill_what_a_line_leaves_out():
    assert make_task("countdown", {}, {"most": 3, "limit": 9}).limit == 9
    assert make_task("countdown", {"limit": 7}, {"limit": 9}).limit == 7


def test_what_is_written_differently_and_means_the_same_is_the_same():
    one = make_task("countdown", {"kinds": {"reverse": 0.5, "both": 0.5, "forward": 0}})
    two = make_task("countdown", {"kinds": {"forward": 0.0, "both": 0.5, "reverse": 0.5}})
    assert json.dumps(one.identity()) == json.dumps(two.identity())
    assert one.problems(9, 1) == two.problems(9, 1)
    written = make_task("countdown", {"most": 5, "kinds": {"both": 1}})
    assert written.identity() == {"name": "countdown"}


def test_one_function_judges_every_task_in_any_order(verifier):
    puzzle = "Emma is a knight, and Liam is a knave."
    asked = [
        Problem("a", "math", "1 + 1?", "2", "aime"),
        Problem("b", "knights", "who?", puzzle, "knights_knaves"),
        Problem("c", "math", "1 + 2?", "3", "gsm_symbolic"),
        Problem("d", "math", "2 + 2?", "4", "aime"),
    ]
    answered = [answer_turn("so", answer) for answer in ("2", puzzle, "4", "2")]
    assert judging.judge(asked, answered, verifier) == [True, True, False, False]
    assert judging.judge(asked[::-1], answered[::-1], verifier) == [False, False, True, True]
    unmarked = ["2", puzzle, answer_turn("so", "3"), "4"]
    assert judging.judge(asked, unmarked, verifier) == [False, False, True, False], "no markers"
    judging.require_golds(asked, verifier)  # the puzzle's gold is no formula, and need not be
    with pytest.raises(ValueError):
        judging.judge(asked, unmarked[:1], verifier)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sums(ExactTask):
    """a + b in two ways: the smaller number first, or the larger one."""

    COUNTED = ("valid_rising", "valid_falling")
    WAYS = {"<": "rising", ">": "falling"}  # noqa: RUF012

    name: Literal["sums"] = "sums"
    most: int = 9

    def stream(self, seed, exclude, revision):
        for a, b in itertools.combinations(range(self.most + 1), 2):
            if f"{a} from {b}" not in exclude:
                gold = str(a + b)
                yield Problem(f"{a}-{b}", "sums", f"{a} from {b}", gold, self.name, (a, b))

    @classmethod
    def completions(cls, problem):
        a, b = problem.detail
        return [("<", f"{a} + {b}", problem.gold), (">", f"{b} + {a}", problem.gold)]

    @classmethod
    def way_of(cls, problem, text):
        texts = {answer_turn(*rest): way for way, *rest in cls.completions(problem)}
        return texts.get(text)

    def demonstrate(self, problem, rng, aimless, early):
        _, work, answer = rng.choice(self.completions(problem))
        return (work, "0") if aimless else (work, answer)


def test_a_new_exact_task_is_a_class_and_a_line_of_the_table(
    tmp_path, monkeypatch, tiny_model, verifier
):
    monkeypatch.setitem(table.TASKS, "sums", Sums)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nextends: smoke\nsft_data: {name: sums, rows: 20, distinct: 5, most: 7}\n"
        "rl_data: {name: sums, rows: 12, most: 7}\n"
        "evaluation: {data: [{name: sums, rows: 4, most: 4}]}\n"
    )
    profile = load_profile(path)
    assert profile.exact and profile.evaluation.data[0].label == "sums"
    shown = problems.sft_rows(profile, len)
    asked, held_out = problems.rl_problems(profile), problems.listed_problems(profile)
    assert len(shown) == 20 and len({row["prompt"][1]["content"] for row in shown}) == 5
    assert len(asked) == 12 and len(held_out) == 4
    assert not {p.question for p in asked} & {p.question for p in held_out}
    judging.require_steps(asked)
    texts = [answer_turn("0 + 1", "1"), answer_turn("1 + 0", "1"), answer_turn("1", "1"), "none"]
    row = {"completions": texts, "finished": [True] * 4}
    counts = count_correct(held_out[:1], [row], verifier).iloc[0]
    assert (counts["n"], counts["c"], *counts[[*Sums.COUNTED]]) == (4, 3, 1, 1)
    assert Sums.measures(held_out[0], texts[2], True)["unsound"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = loading.with_prompt(tiny_qwen.load_tokenizer(tiny_model))
    support = scoring.valid_probabilities(model, tokenizer, held_out)
    [summary] = exact_summary(support, [1])
    assert set(support["way"]) == {"<", ">"}
    assert summary["pass@1"] == pytest.approx(np.exp(support["logp"]).sum() / 4, rel=1e-4)


def test_the_text_of_the_first_samples_alone_is_kept():
    row = {"problem": "a", "completions": ["x", "y", "z"], "correct": [True, False, True]}
    assert first(row, 2) == {"problem": "a", "completions": ["x", "y"], "correct": [True, False]}
    assert first(row, None) == row
