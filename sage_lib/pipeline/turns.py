"""Trainers that are timed against each other: a step each in turn, in one process."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainerCallback


class Turns:
    """Several trainers in threads of one process, a step each in turn; notes the processor time of
    each step, in which the others wait.

    Who comes before whom is drawn anew for each round: what a step leaves behind in the machine's
    caches would otherwise be one trainer's gain, and always the same one's.
    """

    def __init__(self, names: Sequence[str], seed: int = 0) -> None:
        self.names = list(names)
        self.random = random.Random(seed)
        self.waiting = self._drawn()
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.condition = threading.Condition()
        self.error: Exception | None = None

    def run(self, trainers: Sequence[Any]) -> None:
        """Train them all, a step each in turn. What the first one raises ends the others, who would
        wait for its turn to pass without end."""
        with ThreadPoolExecutor(len(trainers)) as pool:
            for one in trainers:
                pool.submit(self._train, one)
        if self.error is not None:
            raise self.error

    def _train(self, one: Any) -> None:
        try:
            one.train()
        except Exception as error:
            with self.condition:
                self.error = self.error or error
                self.condition.notify_all()

    def callback(self, name: str) -> TrainerCallback:
        """What makes the trainer ``name`` wait for its turn, and pass it on after its step."""
        import torch
        from transformers import TrainerCallback

        turns = self

        class Turn(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                def may() -> bool:
                    return turns.waiting[0] == name or turns.error is not None

                with turns.condition:
                    turns.condition.wait_for(may)
                    if turns.error is not None:
                        raise turns.error
                torch.manual_seed(state.global_step)  # every trainer draws the same rollouts
                self.started = time.process_time()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                turns.seconds[name].append(time.process_time() - self.started)
                turns.pass_on()

        return Turn()

    def pass_on(self) -> None:
        with self.condition:
            self.waiting = self.waiting[1:] or self._drawn()
            self.condition.notify_all()

    def _drawn(self) -> list[str]:
        return self.random.sample(self.names, len(self.names))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """What the paired steps of two trainers say: "ratio", the median of ours to theirs, "low" and
    "high", its 95 % interval (by the binomial distribution: no shape is taken for granted, steps
    are taken as independent; none of fewer than six), "ratio 10 %" and "ratio 90 %", between which
    80 % of the steps lie, and "steps"."""
    from scipy.stats import quantile_test

    found = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    low, high = quantile_test(found, q=1, p=0.5).confidence_interval(0.95)
    return {
        "ratio": statistics.median(found),
        "low": low,
        "high": high,
        "ratio 10 %": found[len(found) // 10],
        "ratio 90 %": found[-1 - len(found) // 10],
        "steps": len(found),
    }
