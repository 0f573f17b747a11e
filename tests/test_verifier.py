"""The verifier on answers whose verdict is known, and on answers that try to hang or crash it."""

import multiprocessing
import os
import random
import signal
import threading
import time

import hostile
import psutil
import pytest
import slow_machine

from sage_lib.errors import SageError
from sage_lib.tasks import verifier as judging
from sage_lib.tasks import worker
from sage_lib.tasks.verifier import Verdict, Verifier, accuracy_reward, last_answer


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        (54, "( ( 3 + 5 ) * 7 ) - 2", True),
        ("54", "( ( 3 + 5 ) * 7 ) - 3", False),
        ("7", "3 4", False),
        ("235", "1 234", False),
        ("12", r"x = (6) \, (6)", False),
        ("1.5", r"1 \frac{1}{2}", True),
        ("90", "90\N{DEGREE SIGN}", True),
        (r"90^\circ", "80\N{DEGREE SIGN}", False),
        ("5", "5 \N{EURO SIGN}", True),
    ],
)
def test_numbers_with_a_blank_between_are_not_added_as_math_verify_does(
    verifier, gold, answer, correct
):
    assert verifier.verify_answers([gold], [answer])[0].correct is correct


def test_the_last_complete_answer_counts():
    assert last_answer("<SOLUTION> 1 </SOLUTION> no: <SOLUTION> 2 </SOLUTION>") == "2"
    assert last_answer("<SOLUTION> 1 </SOLUTION> then <SOLUTION> 2") == "1"
    assert last_answer("<SOLUTION>2<SOLUTION> 1. </SOLUTION></SOLUTION>") == "1"
    assert last_answer("<SOLUTION> 1") is None
    assert last_answer("1 </SOLUTION>") is None
    assert last_answer("<SOLUTION>(1,\n  2).</SOLUTION>") == "(1, 2)"
    boxes = r"\boxed{1} so \boxed{\frac{1}{2}} <SOLUTION>3</SOLUTION>"
    assert last_answer(boxes, boxed=True) == r"\frac{1}{2}"
    assert last_answer(r"\boxed{1", boxed=True) is None and last_answer("none", boxed=True) is None
    assert last_answer("") is None


def test_no_hostile_completion_hangs_crashes_or_scores_and_what_is_right_stays_right(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where the workers start
    cases = list(hostile.cases())
    assert len(cases) >= 480 and len({name for name, *_ in cases}) == len(cases)
    strict = Verifier(workers=2, limit=20)
    answers = [last_answer(text) for _, _, text, _ in cases]
    verdicts = strict.verify_answers([gold for _, gold, _, _ in cases], answers)
    wrong = [c[0] for c, v in zip(cases, verdicts, strict=True) if v.correct is not c[3]]
    assert not wrong
    counts = dict(strict.counts)
    assert min(counts["timeout"], counts["too long"]) > 20 and counts["no answer"] > 5
    del counts["distinct"]
    assert counts.pop("pairs") == len(cases) == sum(counts.values())
    assert strict.verify_answers(["7"], ["8 - 1"])[0].correct, "the pool works on"
    assert not list(tmp_path.iterdir()), "nothing in an answer is run"
    strict.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_short_cut_for_integers_agrees_with_math_verify(seed):
    from math_verify import parse, verify

    rng = random.Random(seed)
    shapes = ["{}".format, "{:+d}".format, "{:05d}".format, "{}000000000".format]
    for _ in range(60):
        a = rng.randint(-50, 50)
        gold, answer = rng.choice(shapes)(a), rng.choice(shapes)(rng.choice([a, a + 1, -a]))
        theirs = verify(parse(f"${gold}$"), parse(f"${answer}$"))
        assert Verifier().verify_answers([gold], [answer])[0].correct == theirs


def test_the_short_cut_for_numbers_that_are_far_apart_agrees_with_math_verify():
    from math_verify import verify

    from sage_lib.tasks.mathematics import equal, parse

    rng = random.Random(0)
    shapes = [
        lambda n, d: rf"\frac{{{n}}}{{{d}}}",
        lambda n, d: f"{n / d:.3f}",
        lambda n, d: f"{100 * n / d:.2f}\\%",
        lambda n, d: rf"{n}\pi/{d}",
        lambda n, d: rf"\frac{{{n}\sqrt{{2}}}}{{{d}}}",
        lambda n, d: rf"\{{{n}, {d}\}}",
        lambda n, d: f"x = {n}",
        lambda n, d: f"{n}.0",
        lambda n, d: rf"{n} \text{{ cm}}",
    ]
    said = set()
    for _ in range(200):
        n, d = rng.randint(1, 9), rng.randint(2, 9)
        gold, answer = rng.choice(shapes)(n, d), rng.choice(shapes)(n + rng.choice([0, 0, 0, 1]), d)
        expected = bool(verify(parse(gold), parse(answer), timeout_seconds=None))
        assert equal(gold, answer) is expected, (gold, answer)
        said.add(expected)
    assert said == {True, False}


def test_a_busy_machine_changes_no_verdict():
    """The limit is processor time: workers that get none for longer than the limit still finish."""
    slow = Verifier(limit=10)
    slow.verify_answers(["1"], ["2 - 1"])  # the worker has started
    workers = [child.pid for child in multiprocessing.active_children()]
    found = []
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    asking = threading.Thread(
        target=lambda: found.extend(
            slow.verify_answers(["7"] * 3, [f"{n} - {n - 7}" for n in range(100, 103)])
        )
    )
    asking.start()
    time.sleep(1.2)
    assert workers and not found, "they stood still, three times the limit"
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    asking.join()
    assert found == [Verdict(True, "verified")] * 3
    slow.close()


@pytest.mark.parametrize(
    ("gold", "words"),
    [
        *((gold, "cannot be parsed") for gold in ("", "which of these?", r"\frac{1}{", "1e99999")),
        ("((999999)!)!", r"'\(\(999999\)!\)!' cannot be verified \(timeout\): correct or drop"),
        ("[" * 10**6 + "]" * 10**6, r"has 2,000,000 characters, and at most 400 are read"),
    ],
)
def test_a_gold_that_no_answer_could_equal_is_refused_by_name(verifier, gold, words):
    verifier.require_golds([7, "7", r"\frac{1}{2}"])
    with pytest.raises(SageError, match=words) as caught:
        verifier.require_golds(["7", gold])
    assert len(str(caught.value)) < 300


def test_a_machine_ten_times_slower_changes_no_verdict(monkeypatch):
    """The limit is a multiple of what a known formula takes on the same machine."""
    monkeypatch.setattr(worker, "start", slow_machine.start_worker)
    slow = Verifier(limit=4)
    gold, answer = (side.format(99) for side in worker.UNIT)
    assert slow.verify_answers([gold, "7"], [answer, "((9999999)!)!"]) == [
        Verdict(True, "verified"),
        Verdict(False, "timeout"),
    ]
    slow.close()


def test_what_is_cut_off_is_counted_and_said_once_where_it_looks_honest(caplog):
    strict = Verifier(limit=3)
    long = [f"((999999{n})!)! + {' + '.join('1' * 9)}" for n in range(4)]
    verdicts = strict.verify_answers(["7"] * 5, [*long, "8 - 1"])
    assert [verdict.correct for verdict in verdicts] == [False] * 4 + [True]
    assert strict.cut() == 4 and not caplog.records
    for n in range(2):
        strict.verify_answers(["7"], [f"((99999{n})!)!"])
    (said,) = [record.getMessage() for record in caplog.records]
    assert "cut off the answer '((999990)!)!' to the gold '7' (timeout)" in said
    strict.close()


def test_a_slow_answer_has_a_second_try_and_a_batch_has_few(monkeypatch):
    """Of three answers that take longer than the first limit, the first alone is tried again."""
    monkeypatch.setattr(worker, "verify_chunk", slow_machine.verify_chunk)
    monkeypatch.setattr(judging, "max", lambda *numbers: 1, raising=False)
    several = Verifier()
    golds, answers = ([side.format(n) for n in (77, 78, 79)] for side in worker.UNIT)
    first = several.verify_answers(golds, answers)
    assert first == [Verdict(True, "verified"), *[Verdict(False, "timeout")] * 2]
    assert several.cut() == 2
    second = several.verify_answers(golds, answers)
    assert [verdict.correct for verdict in second] == [True, True, False], "and is not forgotten"
    several.close()


@pytest.mark.slow
def test_a_batch_of_hostile_answers_ends_within_its_budget(capsys):
    """64 answers that would take for ever: 20 units each, 150 for ten of them, and one second for
    a worker that has to be started again."""
    strict = Verifier()
    strict.verify_answers(["7"], ["8 - 1"])
    pid = multiprocessing.active_children()[0].pid
    begun, before = time.monotonic(), psutil.Process(pid).cpu_times().user
    verdicts = strict.verify_answers(["7"] * 64, [f"((999999{n})!)!" for n in range(64)])
    seconds, used = time.monotonic() - begun, psutil.Process(pid).cpu_times().user - before
    gold, answer = (side.format(99) for side in worker.UNIT)
    before = psutil.Process(pid).cpu_times().user
    for n in range(20):
        strict.verify_answers([gold.replace("99", f"{n}7")], [answer.replace("99", f"{n}7")])
    unit = (psutil.Process(pid).cpu_times().user - before) / 20
    with capsys.disabled():
        print(f"\n{strict.cut()} of 64 cut in {used:.1f} s of processor time, {seconds:.0f} s")
    assert not any(verdict.correct for verdict in verdicts) and strict.cut() == 64
    assert used < 2 * unit * (64 * 20 + 10 * 150)
    strict.close()


def test_long_answers_are_not_kept(verifier):
    for n in range(3):
        (verdict,) = verifier.verify_answers(["7"], [str(n) * 500_000])
        assert verdict == Verdict(False, "too long")
    assert max(len(answer or "") for _, answer in verifier._known) <= judging.LENGTH_LIMIT + 1


def test_no_profile_starts_more_processes_than_a_machine_bears():
    assert Verifier(workers=10**6).workers <= max(8, os.cpu_count())
    with pytest.raises(SageError, match="at least one worker, not 0"):
        Verifier(workers=0)


def test_threads_share_it(verifier):
    found = []

    def ask(i):
        found.append(verifier.verify_answers([str(i)], [f"{i} + 0"])[0].correct)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6


def test_a_first_batch_of_which_nothing_is_read_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(judging, "_FIRST_SEEN", set())
    for _ in range(2):
        assert accuracy_reward([r"it is \boxed{3}", "3"], ["3"] * 2) == [0.0, 0.0]
    (said,) = [record.getMessage() for record in caplog.records]
    assert r"it is \\boxed{3}" in said and "with boxed=True" in said


def test_reward_takes_texts_and_conversations():
    texts = ["work <SOLUTION> 2 + 2 </SOLUTION>", "<SOLUTION> 5 </SOLUTION>", "no answer"]
    assert accuracy_reward(texts, ["4"] * 3) == accuracy_reward(texts, [4] * 3) == [1.0, 0.0, 0.0]
    assert accuracy_reward([r"so \boxed{2+2}", "4"], ["4"] * 2, boxed=True) == [1.0, 0.0]
    turns = [[{"role": "assistant", "content": text}] for text in texts]
    assert accuracy_reward(turns, ["4"] * 3) == [1.0, 0.0, 0.0]
    parts = [[{"content": None}], [{"content": [{"type": "text", "text": texts[0]}]}]]
    assert accuracy_reward(parts, ["4"] * 2) == [0.0, 1.0]
    with pytest.raises(SageError, match="a column 'answer'"):
        accuracy_reward(turns)
    with pytest.raises(SageError, match="3 completions and 2 gold answers"):
        accuracy_reward(turns, ["4"] * 2)
    for missing in (None, float("nan")):
        with pytest.raises(SageError, match=f"gold answer {missing}: fill it in"):
            accuracy_reward(texts, ["4", missing, "4"])


def test_equal_pairs_are_verified_once():
    fresh = Verifier()
    fresh.verify_answers(["6"] * 50, ["2 * 3"] * 49 + [None])
    assert {"pairs": 50, "distinct": 2, "no answer": 1}.items() <= fresh.counts.items()
    fresh.close()


def test_a_batch_after_which_all_is_forgotten_repeats_an_earlier_pair(monkeypatch):
    monkeypatch.setattr(judging, "MOST_KNOWN", 2)
    fresh = Verifier()
    fresh.verify_answers(["1", "2", "3"], ["1", "0", "3"])
    verdicts = fresh.verify_answers(["3", "4"], ["3", "4"])
    assert [verdict.correct for verdict in verdicts] == [True, True]
