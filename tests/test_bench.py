"""The benchmark's trainers take turns, and one that fails ends the others."""

import threading
import types
from collections import Counter

import numpy as np
import pytest

from sage_lib.errors import SageError
from sage_lib.pipeline import bench
from sage_lib.pipeline.turns import Turns, ratios

NAMES, STEPS = ["first", "second", "third"], 6


class Fake:
    """Trains some steps between the callback's calls, or fails in its second one."""

    def __init__(self, name, turns, seen, fails=False):
        self.name, self.seen, self.fails = name, seen, fails
        self.callback = turns.callback(name)

    def train(self):
        for step in range(STEPS):
            self.callback.on_step_begin(None, types.SimpleNamespace(global_step=step), None)
            if self.fails and step == 1:
                raise SageError("a reward of 0.3 is neither 0 nor 1")
            self.seen.append(self.name)
            self.callback.on_step_end(None, None, None)


def train(fails=""):
    turns, seen, raised = Turns(NAMES), [], []
    trainers = [Fake(name, turns, seen, name == fails) for name in NAMES]

    def work():
        try:
            turns.run(trainers)
        except SageError as error:
            raised.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "they wait for one another without end"
    return turns, seen, raised


def rounds(seen):
    return [seen[start : start + len(NAMES)] for start in range(0, len(seen), len(NAMES))]


def test_trainers_take_turns_step_by_step_in_an_order_of_each_round():
    turns, seen, raised = train()
    assert [sorted(one) for one in rounds(seen)] == [sorted(NAMES)] * STEPS and not raised
    assert len({tuple(one) for one in rounds(seen)}) > 1
    assert train()[1] == seen, "the same orders each time"
    drawn = Turns(NAMES)
    places = Counter()
    for _ in range(600 * len(NAMES)):
        places[drawn.waiting[0], len(drawn.waiting)] += 1
        drawn.pass_on()
    assert len(places) == len(NAMES) ** 2 and min(places.values()) > 150, "each in each place"
    assert {name: len(times) for name, times in turns.seconds.items()} == dict.fromkeys(
        NAMES, STEPS
    )


@pytest.mark.parametrize("fails", NAMES)
def test_one_that_fails_ends_the_others_and_is_what_is_raised(fails):
    _, whole, _ = train()
    _, seen, raised = train(fails)
    assert raised == ["a reward of 0.3 is neither 0 nor 1"]
    second = rounds(whole)[1]
    assert seen == rounds(whole)[0] + second[: second.index(fails)]


def test_ratios_are_those_of_paired_steps():
    theirs = np.linspace(1, 2, 21)
    found = ratios(theirs * np.linspace(0.9, 1.1, 21), theirs)
    assert found["ratio"] == pytest.approx(1) and found["steps"] == 21
    assert (found["ratio 10 %"], found["ratio 90 %"]) == pytest.approx((0.92, 1.08))
    # The sixth and the sixteenth of 21: of the binomial's 1/2, 97.3 % between them.
    assert (found["low"], found["high"]) == pytest.approx((0.95, 1.05))
    assert np.isnan(ratios([1.0] * 5, [1.0] * 5)["low"])


def test_the_benchmarks_reward_is_one_that_every_advantage_knows():
    answers = [[{"content": "x" * length}] for length in range(14)]
    assert set(bench._any_reward(answers)) == {0.0, 1.0}
