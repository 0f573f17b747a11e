"""The weights of the token guide (eq. 10): in [0, 1], from the surprisal of the tokens that are
``on``, within each sequence; both of shape (batch, time)."""

import torch


def minmax(surprisal: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """Return the surprisal, cut at its 5 % and 95 % quantiles and scaled."""
    values = surprisal.where(on, torch.nan)
    ends = torch.tensor([0.05, 0.95], dtype=values.dtype, device=values.device)
    low, high = torch.nanquantile(values, ends, dim=1, keepdim=True)
    return _scaled(values.clamp(low, high) - low, high - low, on)


def rank(surprisal: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """Return ranks 0..n-1 over n-1; equal values share their mean rank."""
    values = surprisal.where(on, torch.inf)
    ascending = values.sort(dim=1).values
    first = torch.searchsorted(ascending, values)
    last = torch.searchsorted(ascending, values, right=True)
    ranks = (first + last - 1) / 2 * on
    largest_rank = on.sum(1, keepdim=True) - 1
    highest = surprisal.where(on, -torch.inf).amax(1, keepdim=True)
    varies = on & (ascending[:, :1] < highest)
    return _scaled(ranks.to(surprisal), largest_rank.to(surprisal), varies)


def zscore(surprisal: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid of the z-score."""
    n = on.sum(1, keepdim=True).clamp(min=1)
    values = surprisal.where(on, 0.0)
    centred = values - values.sum(1, keepdim=True) / n
    spread = ((centred**2 * on).sum(1, keepdim=True) / n).sqrt()
    weight = (centred / spread.clamp(min=1e-12)).sigmoid()
    return weight.where(on & (spread > 1e-12), 0.0)


def _scaled(value: torch.Tensor, width: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """Return value / width where the width is not zero and the token counts, else 0."""
    smallest = torch.finfo(value.dtype).tiny
    return (value / width.clamp(min=smallest)).where(on & (width > 0), 0.0)
