"""The benchmark's trainers take turns, and one that fails ends the others."""

import threading
import types

import pytest

from sage_lib.errors import SageError
from sage_lib.pipeline import bench

NAMES = ["first", "second", "third"]


class Fake:
    """Trains three steps between the callback's calls, or fails in its second one."""

    def __init__(self, name, turns, seen, fails=False):
        self.name, self.seen, self.fails = name, seen, fails
        self.callback = turns.callback(name)

    def train(self):
        for step in range(3):
            self.callback.on_step_begin(None, types.SimpleNamespace(global_step=step), None)
            if self.fails and step == 1:
                raise SageError("a reward of 0.3 is neither 0 nor 1")
            self.seen.append(self.name)
            self.callback.on_step_end(None, None, None)


def train(fails=""):
    turns, seen, raised = bench._Turns(NAMES), [], []
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


def test_trainers_take_turns_step_by_step():
    turns, seen, raised = train()
    assert seen == 3 * NAMES and not raised
    assert {name: len(times) for name, times in turns.seconds.items()} == dict.fromkeys(NAMES, 3)


@pytest.mark.parametrize("fails", NAMES)
def test_one_that_fails_ends_the_others_and_is_what_is_raised(fails):
    _, seen, raised = train(fails)
    assert raised == ["a reward of 0.3 is neither 0 nor 1"]
    assert seen == NAMES + NAMES[: NAMES.index(fails)]


def test_the_benchmarks_reward_is_one_that_every_advantage_knows():
    answers = [[{"content": "x" * length}] for length in range(14)]
    assert set(bench._any_reward(answers)) == {0.0, 1.0}
