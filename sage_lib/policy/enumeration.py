"""Every completion that a policy is likely to draw, each with its exact probability."""

import copy
import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from sage_lib.algorithm.token_probabilities import entropies_of, log_probabilities
from sage_lib.errors import SageError

#: Prefixes that are carried on in one forward pass.
AT_A_TIME = 1024


class Enumeration(NamedTuple):
    """Completions of one prompt by falling probability: tensors of shape (completions, time)."""

    ids: torch.Tensor  # tokens, the end token included, 0 behind it
    logps: torch.Tensor  # log pi of each token, nats, 0 behind the end
    entropies: torch.Tensor  # of pi before each token, nats, 0 behind the end
    mask: torch.Tensor  # True on tokens

    @property
    def probabilities(self) -> torch.Tensor:
        """pi of each completion, shape (completions,). Their sum is the mass that is covered."""
        return self.logps.double().sum(dim=1).exp()


@torch.no_grad()
def enumerate_completions(
    model: PreTrainedModel, prompt: list[int], end: int, floor: float, longest: int
) -> Enumeration:
    """Every completion of at least the probability ``floor``, at temperature 1.

    No prefix is more likely than its continuations together, so a prefix below the floor is left
    with all that would follow it. One that has ``longest`` tokens and no ``end`` is left as well.
    """
    if not 0 < floor < 1:
        raise SageError(f"the floor is a probability between 0 and 1, not {floor}")
    device, bound = model.device, math.log(floor)
    start = torch.tensor([prompt], device=device)
    found: list[tuple[torch.Tensor, ...]] = []
    # Depth first over groups of prefixes of one length: what waits is bounded by the depth.
    none = torch.zeros(1, 0, device=device)
    waiting = [(start, DynamicCache(), none.long(), none, none)]
    while waiting:
        read, cache, ids, logps, entropies = waiting.pop()
        output = model(input_ids=read, past_key_values=cache, use_cache=True)
        log_pi = log_probabilities(output.logits[:, -1])
        entropy = entropies_of(log_pi)
        kept = log_pi + logps.sum(dim=1, keepdim=True) >= bound
        parents, tokens = kept.nonzero(as_tuple=True)
        grown = (
            torch.cat([ids[parents], tokens[:, None]], dim=1),
            torch.cat([logps[parents], log_pi[parents, tokens, None]], dim=1),
            torch.cat([entropies[parents], entropy[parents, None]], dim=1),
        )
        ended = tokens == end
        found.append(tuple(one[ended].cpu() for one in grown))
        goes_on = (~ended).nonzero()[:, 0]
        if len(goes_on) == 0 or ids.shape[1] + 1 == longest:
            continue
        for part in goes_on.split(AT_A_TIME):
            own = copy.deepcopy(cache) if len(goes_on) > AT_A_TIME else cache
            own.batch_select_indices(parents[part])
            waiting.append((tokens[part, None], own, *(one[part] for one in grown)))
    return _by_probability(found)


def _by_probability(found: list[tuple[torch.Tensor, ...]]) -> Enumeration:
    """Completions of all lengths in one block, the most likely ones first."""
    lengths = torch.cat([torch.full((len(ids),), ids.shape[1]) for ids, *_ in found])
    time = int(lengths.max()) if len(lengths) else 0
    padded = [[pad(x[:, :time], (0, max(0, time - x.shape[1]))) for x in one] for one in found]
    ids, logps, entropies = (torch.cat(parts) for parts in zip(*padded, strict=True))
    order = logps.sum(dim=1).argsort(descending=True, stable=True)
    ids, logps, entropies = ids[order], logps[order], entropies[order]
    mask = torch.arange(time) < lengths[order, None]
    return Enumeration(ids, logps, entropies, mask)
