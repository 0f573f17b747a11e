"""The verifier on answers whose verdict is known, and on answers that try to hang or crash it."""

import threading
import time

import pytest

from sage_lib.errors import SageError
from sage_lib.verifier import LENGTH_LIMIT, Verifier, accuracy_reward, last_answer


@pytest.fixture(scope="module")
def verifier():
    made = Verifier(time_limit=3)
    yield made
    made.close()


@pytest.mark.parametrize(("gold", "answer", "correct"), [
    ("54", "54", True),
    ("54", "( ( 3 + 5 ) * 7 ) - 2", True),
    ("54", "( ( 3 + 5 ) * 7 ) - 3", False),
    ("0.5", r"\frac{1}{2}", True),
    ("27", "27.0", True),
    ("12", "", False),
    ("12", "the answer is obvious", False),
    ("12", "11, 12", False),
    # Known disagreements of Math-Verify 0.9.0: a percentage equals both its number and its share.
    ("28", "28%", True),
    ("28%", "0.28", True),
])
def test_verdicts(verifier, gold, answer, correct):
    assert verifier.verify_answers([gold], [answer])[0].correct is correct


def test_the_last_complete_answer_counts():
    assert last_answer("<SOLUTION> 1 </SOLUTION> no: <SOLUTION> 2 </SOLUTION>") == "2"
    assert last_answer("<SOLUTION> 1 </SOLUTION> then <SOLUTION> 2") == "1"
    assert last_answer("<SOLUTION> 1") is None
    assert last_answer("1 </SOLUTION>") is None
    assert last_answer("") is None


def test_hostile_answers_neither_hang_nor_crash_nor_score(verifier):
    hostile = ["9^{9^{9^{9^{9}}}}", "(" * 150 + "1" + ")" * 150, r"\sqrt{" * 60 + "2" + "}" * 60, "1" * (LENGTH_LIMIT + 1), "\x00", "10000000!"]
    started = time.perf_counter()
    verdicts = verifier.verify_answers(["7"] * len(hostile), hostile)
    assert not any(v.correct for v in verdicts)
    assert verdicts[3].reason == "too long"
    assert time.perf_counter() - started < 3 * len(hostile) + 10
    assert verifier.verify_answers(["7"], ["8 - 1"])[0].correct, "the pool works on after a killed worker"


def test_equal_pairs_are_verified_once():
    fresh = Verifier()
    fresh.verify_answers(["6"] * 50, ["2 * 3"] * 49 + [None])
    assert (fresh.counts["asked"], fresh.counts["distinct"], fresh.counts["no answer"]) == (50, 2, 1)
    fresh.close()


def test_unparseable_gold_is_refused(verifier):
    with pytest.raises(SageError, match="cannot be parsed"):
        verifier.verify_answers([""], ["5"])


def test_threads_share_it(verifier):
    found = []
    threads = [threading.Thread(target=lambda i=i: found.append(verifier.verify_answers([str(i)], [f"{i} + 0"])[0].correct)) for i in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == [True] * 6


def test_reward_takes_texts_and_conversations():
    texts = ["work <SOLUTION> 2 + 2 </SOLUTION>", "<SOLUTION> 5 </SOLUTION>", "no answer"]
    assert accuracy_reward(texts, ["4"] * 3) == [1.0, 0.0, 0.0]
    assert accuracy_reward([[{"role": "assistant", "content": t}] for t in texts], ["4"] * 3) == [1.0, 0.0, 0.0]
