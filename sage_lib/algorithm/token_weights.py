"""The weights of the token guide (eq. 10), in [0, 1].

Each function reads the surprisal (nats) and ``counted``, which is True on tokens that
count. They and the weights have shape (batch, time). Each sequence is weighed alone.
"""

import torch


def minmax(surprisal: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the surprisal, cut at its 5 % and 95 % quantiles and scaled."""
    values = surprisal.where(counted, torch.nan)
    shares = torch.tensor([0.05, 0.95], dtype=values.dtype, device=values.device)
    low, high = torch.nanquantile(values, shares, dim=1, keepdim=True)
    return _scaled(values.clamp(low, high) - low, high - low, counted)


def rank(surprisal: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return ranks 0..n-1 over n-1; equal values share their mean rank."""
    values = surprisal.where(counted, torch.inf)
    ascending = values.sort(dim=1).values
    first = torch.searchsorted(ascending, values)
    last = torch.searchsorted(ascending, values, right=True)
    ranks = (first + last - 1) / 2 * counted
    largest_rank = counted.sum(1, keepdim=True) - 1
    highest = surprisal.where(counted, -torch.inf).amax(1, keepdim=True)
    varies = counted & (ascending[:, :1] < highest)
    return _scaled(ranks.to(surprisal), largest_rank.to(surprisal), varies)


def zscore(surprisal: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid of the z-score."""
    n = counted.sum(1, keepdim=True).clamp(min=1)
    values = surprisal.where(counted, 0.0)
    centred = values - values.sum(1, keepdim=True) / n
    spread = ((centred**2 * counted).sum(1, keepdim=True) / n).sqrt()
    weight = (centred / spread.clamp(min=1e-12)).sigmoid()
    return weight.where(counted & (spread > 1e-12), 0.0)


def _scaled(value: torch.Tensor, width: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return value / width where the width is not zero and the token counts, else 0."""
    smallest = torch.finfo(value.dtype).tiny
    return (value / width.clamp(min=smallest)).where(counted & (width > 0), 0.0)
