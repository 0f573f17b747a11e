"""Right answers are accepted and near misses refused, gold by gold.

The tables were made by hand: gold_kinds.csv of made-up golds of every kind and of known limits of
Math-Verify, gold_readings.csv of what golds of the published sets mean. The second names a gold by
its number in its set, and needs SAGE_DATA: a folder with the public files.
"""

import os
from pathlib import Path

import pandas as pd
import pytest

from sage_lib.tasks import public_sets

DATA = Path(__file__).parent / "data"
KINDS, READINGS = (
    pd.read_csv(
        DATA / f"gold_{name}.csv", keep_default_na=False, dtype={"gold": str, "answer": str}
    )
    for name in ("kinds", "readings")
)


def disagreements(verifier, frame):
    """(gold, answer) of every row that got another verdict than `correct`."""
    verdicts = verifier.verify_answers(frame["gold"].tolist(), frame["answer"].tolist())
    wrong = [verdict.correct for verdict in verdicts] != frame["correct"].astype(bool)
    return frame.loc[wrong, ["gold", "answer"]].to_numpy().tolist()


def test_every_kind_of_gold(verifier):
    assert KINDS["kind"].nunique() > 45 and disagreements(verifier, KINDS) == []


@pytest.mark.skipif(
    "SAGE_DATA" not in os.environ, reason="SAGE_DATA names no folder of public files"
)
@pytest.mark.parametrize(
    "name", ["aime", "amc23", "math500_level5", "minerva", "gsm8k_train", "gsm8k_test"]
)
def test_published_golds(verifier, name):
    """Hand readings of formulas; of every other gold itself, and more than twice as much."""
    golds = [problem.gold for problem in public_sets.load(name)]
    read = READINGS[READINGS["set"] == name]
    plain = [gold for number, gold in enumerate(golds) if number not in set(read["number"])]
    more = [str(2 * abs(float(gold)) + 1) for gold in plain]
    numbers = pd.concat(
        pd.DataFrame({"gold": plain, "answer": answers, "correct": correct})
        for answers, correct in ((plain, 1), (more, 0))
    )
    assert disagreements(verifier, numbers) == []
    assert disagreements(verifier, read.assign(gold=[golds[n] for n in read["number"]])) == []
