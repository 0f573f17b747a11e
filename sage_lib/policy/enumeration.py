"""All completions that a policy is likely to draw, with their exact probabilities."""

import copy
import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.algorithm.token_probabilities import entropies_of, log_probabilities

#: Prefixes that are carried on in one forward pass.
AT_A_TIME = 1024


class Enumeration(NamedTuple):
    """Completions of a prompt by falling probability: tensors of shape (completions, time)."""

    ids: torch.Tensor  # tokens, the end token included, 0 behind it
    logps: torch.Tensor  # log pi of each token, nats, 0 behind the end
    entropies: torch.Tensor  # of pi before each token, nats, 0 behind the end
    mask: torch.Tensor  # True on tokens

    @property
    def probabilities(self) -> torch.Tensor:
        """pi of each completion, shape (completions,). Their sum is the mass that they cover."""
        return self.logps.double().sum(dim=1).exp()

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the completions as texts, without special tokens."""
        bodies = [ids[mask] for ids, mask in zip(self.ids, self.mask, strict=True)]
        return tokenizer.batch_decode(bodies, skip_special_tokens=True)


@torch.no_grad()
def enumerate_completions(
    model: PreTrainedModel, prompt: list[int], end: int, floor: float, longest: int
) -> Enumeration:
    """List the completions of a prompt whose probability is not below a floor, at temperature 1.

    No continuation is more likely than its prefix, so a prefix below the floor is left out with all
    that would follow it.

    Args:
        model: the policy.
        prompt: its token ids.
        end: id of the end token.
        floor: the least probability, above 0.
        longest: completions with this many tokens and no end token are left out.
    """
    device, bound = model.device, math.log(floor)
    start = torch.tensor([prompt], device=device)
    complete: list[tuple[torch.Tensor, ...]] = []
    # Depth first over groups of prefixes of one length: what waits is bounded by the depth.
    none = torch.zeros(1, 0, device=device)
    waiting = [(start, DynamicCache(), none.long(), none, none)]
    while waiting:
        next_ids, cache, ids, logps, entropies = waiting.pop()
        output = model(input_ids=next_ids, past_key_values=cache, use_cache=True)
        log_pi = log_probabilities(output.logits[:, -1])
        entropy = entropies_of(log_pi)
        likely = log_pi + logps.sum(dim=1, keepdim=True) >= bound
        parents, tokens = likely.nonzero(as_tuple=True)
        extended = (
            torch.cat([ids[parents], tokens[:, None]], dim=1),
            torch.cat([logps[parents], log_pi[parents, tokens, None]], dim=1),
            torch.cat([entropies[parents], entropy[parents, None]], dim=1),
        )
        ended = tokens == end
        complete.append(tuple(x[ended].cpu() for x in extended))
        goes_on = (~ended).nonzero()[:, 0]
        if len(goes_on) == 0 or ids.shape[1] + 1 == longest:
            continue
        for rows in goes_on.split(AT_A_TIME):
            rows_cache = copy.deepcopy(cache) if len(goes_on) > AT_A_TIME else cache
            rows_cache.batch_select_indices(parents[rows])
            waiting.append((tokens[rows, None], rows_cache, *(x[rows] for x in extended)))
    return _by_probability(complete)


def _by_probability(groups: list[tuple[torch.Tensor, ...]]) -> Enumeration:
    """Join ids, log-probabilities and entropies of completions, the most likely ones first."""
    lengths = torch.cat([torch.full((len(ids),), ids.shape[1]) for ids, *_ in groups])
    time = int(lengths.max()) if len(lengths) else 0
    padded = [[pad(x[:, :time], (0, max(0, time - x.shape[1]))) for x in group] for group in groups]
    ids, logps, entropies = (torch.cat(tensors) for tensors in zip(*padded, strict=True))
    order = logps.sum(dim=1).argsort(descending=True, stable=True)
    ids, logps, entropies = ids[order], logps[order], entropies[order]
    mask = torch.arange(time) < lengths[order, None]
    return Enumeration(ids, logps, entropies, mask)
