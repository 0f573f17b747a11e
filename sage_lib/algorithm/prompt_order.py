"""The order in which prompts come, epoch by epoch, the same after a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler


class EpochOrder(Sampler[int]):
    """TRL's shuffled order of prompts as the epoch has it that training is in.

    TRL's sampler shuffles anew each time it is asked, from a stream of random numbers of its own
    that no checkpoint keeps: a run resumed in its second epoch would be given the order of its
    first. Here the stream starts anew and the epochs that are over are drawn first; without a
    resume, the order is TRL's to the last prompt.

    Args:
        sampler: TRL's RepeatSampler.
        epoch: tells, when the first prompt of an epoch is asked for, how many are over.
    """

    def __init__(self, sampler: Any, epoch: Callable[[], int]):
        self.sampler, self.epoch = sampler, epoch

    def __iter__(self) -> Iterator[int]:
        stream = self.sampler.generator
        stream.manual_seed(self.sampler.seed)
        for _ in range(self.epoch()):
            torch.randperm(self.sampler.num_samples, generator=stream)
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)
