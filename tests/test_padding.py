"""Rows that are scored in groups of about a length, against all rows scored at once."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from sage_lib.algorithm import padding
from sage_lib.algorithm.padding import by_length

PROMPT, KEEP = 3, 12


class Score:
    """A scoring pass as TRL's: what it gives a token depends on all before it, and on a weight."""

    def __init__(self):
        self.weight = torch.tensor(0.5, requires_grad=True)
        self.shapes = []

    def __call__(self, model, ids, attention_mask, keep, compute_entropy=False, **asked):
        assert asked.get("batch_size", 64) == 64 and model == "model"
        self.shapes.append(tuple(ids.shape))
        states = (ids * attention_mask).float().cumsum(1) * self.weight
        logps = -states[:, -keep:]
        return logps, logps.detach().square() if compute_entropy else None, None


def batch(lengths):
    lengths = torch.tensor(lengths)
    completion = (torch.arange(KEEP) < lengths[:, None]).long()
    prompt = torch.ones(len(lengths), PROMPT, dtype=torch.long)
    prompt[::2, 0] = 0  # some prompts are shorter
    mask = torch.cat([prompt, completion], 1)
    ids = torch.arange(mask.numel()).reshape(mask.shape) % 7 + 1
    return ids, mask, completion


@pytest.mark.parametrize(
    ("lengths", "passes"),
    [
        ([12, 2, 12, 2, 7, 7], 3),
        ([12] * 6, 1),
        ([5, 5, 5], 1),
        ([0, 12, 0, 3], 2),
        ([0, 0], 1),
    ],
)
def test_what_counts_is_the_same_and_fewer_columns_are_scored(lengths, passes):
    ids, mask, counts = batch(lengths)
    whole, parts = Score(), Score()
    asked = {"compute_entropy": True, "batch_size": 64, "pixel_values": None}
    expected = whole("model", ids, mask, KEEP, **asked)
    found = by_length(parts, "model", ids, mask, KEEP, **asked)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert ours.shape == theirs.shape == counts.shape
        assert torch.equal(ours * counts, theirs * counts)
    assert found[2] is None and len(parts.shapes) == passes
    scored = sum(rows * columns for rows, columns in parts.shapes)
    assert sum(rows for rows, _ in parts.shapes) == len(lengths)
    assert (scored < ids.numel()) == (passes > 1 or max(lengths) < KEEP)
    for logps, *_ in (expected, found):
        (logps * counts).sum().backward()
    assert parts.weight.grad == pytest.approx(whole.weight.grad.item())


@pytest.mark.parametrize("asked", [{"compute_aux_loss": True}, {"num_images": [1, 0]}])
def test_what_is_not_of_single_rows_is_scored_at_once(asked):
    ids, mask, _ = batch([12, 2, 2, 2])
    score = Score()
    by_length(score, "model", ids, mask, KEEP, **asked)
    assert score.shapes == [tuple(ids.shape)]


@pytest.mark.parametrize("worth", [0.0, 0.1])
def test_a_cut_saves_what_it_must_and_no_cut_that_would_is_left(monkeypatch, worth):
    monkeypatch.setattr(padding, "WORTH", worth)
    for lengths in itertools.combinations_with_replacement(range(0, 9, 2), 6):
        least = worth * 6 * (2 + lengths[-1])
        sizes = padding._sizes(list(lengths), 2)
        assert sum(sizes) == 6 and min(sizes) > 0
        ends = list(itertools.accumulate(sizes))
        groups = [lengths[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        for group in groups:
            left = [n * (group[-1] - group[n - 1]) for n in range(1, len(group))]
            assert max(left, default=0) <= least
        saved = 6 * lengths[-1] - sum(len(group) * group[-1] for group in groups)
        assert saved >= least * (len(groups) - 1)


def test_positions_that_follow_the_longest_row_are_known():
    layers = {"full": {"rope_type": "yarn"}, "sliding": {"rope_type": "longrope"}}
    for rope, depends in ((None, False), ({"rope_type": "default"}, False), (layers, True)):
        assert padding.depends_on_width(SimpleNamespace(rope_parameters=rope)) == depends
