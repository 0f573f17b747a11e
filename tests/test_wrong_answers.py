"""Ten thousand wrong answers of a grammar earn nothing, and what earned something is read again."""

import os

import pytest
import wrong_answers

from sage_lib.tasks.verifier import Verifier

#: Answers of the grammar; the variable has fewer, for a first look.
NUMBER = int(os.environ.get("SAGE_WRONG_ANSWERS", "10000"))


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("7", "x = 14/2", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\{1,2\}", r"\{2, 1\}", True),
        ("(3,2)", "(2,3)", False),
        ("x^2+1", "1+x^2", True),
        ("7", r"\boxed{\boxed{8}}", False),
        ("7", "8 x = 7", None),
        ("[0,1)", "(0,1)", False),
    ],
)
def test_the_second_verifier_by_hand(gold, answer, verdict):
    assert wrong_answers.same(gold, answer) is verdict


@pytest.mark.slow
def test_no_wrong_answer_earns_anything(capsys):
    """The second verifier confirms what is credited: then the grammar made a right answer."""
    assert len(set(wrong_answers.GOLDS)) >= 48
    cases = list(wrong_answers.answers(NUMBER))
    verifier = Verifier(workers=os.cpu_count())
    verdicts = verifier.verify_answers([gold for _, gold, _ in cases], [c[2] for c in cases])
    credited = [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct]
    wrong = [case for case in credited if wrong_answers.same(*case[1:]) is not True]
    verifier.close()
    lines = [f"{len(cases)} answers, {len(credited)} credited, {len(wrong)} not confirmed"]
    lines += [str(dict(verifier.counts)), *map(str, credited[:50]), "not confirmed:"]
    with capsys.disabled():
        print(*lines, *wrong, sep="\n")
    assert not wrong
