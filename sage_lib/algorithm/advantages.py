"""Advantages: what a completion, or each of its tokens, counts for in TRL's loss.

TRL gives every completion one advantage. A shaper changes it, and composes with any guide and
anchor: those shape the KL term. There are two kinds. A :class:`CompletionShaper` works on whole
groups when they have been scored, before TRL shuffles and splits them; a :class:`TokenShaper` on
the tokens of a batch, after the loss's own forward pass. Shapers hold no state; their noise comes
from the generator they are handed, which the trainer saves with its checkpoints.

Profiles choose a shaper by a mapping, ``{name: position, direction: -1}``: a name of
:data:`ADVANTAGES` and parameters of that class. This module loads without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Any, ClassVar

from sage_lib.algorithm.anchors import REDUCTIONS, Setting
from sage_lib.algorithm.guides import read_parameters
from sage_lib.errors import SageError

if TYPE_CHECKING:
    import torch


# -- what a shaper sees and gives ------------------------------------------------------------------


@dataclass(frozen=True)
class Completions:
    """Whole groups of scored completions, the rows of a group beside each other."""

    advantages: torch.Tensor  # TRL's, shape (rows,)
    rewards: torch.Tensor  # sum of the weighted rewards, shape (rows,)
    generations: int  # rows of a group
    #: Mean surprisal of the completion's tokens under the policy that drew them, nats, shape
    #: (rows,): the log of its perplexity. Not a number for a completion without a counted token;
    #: None unless the shaper ``reads_perplexity``.
    log_perplexity: torch.Tensor | None = None


@dataclass(frozen=True)
class BatchTokens:
    """A batch after the forward pass of the loss; shape (batch, time). Only ``live_logps`` has a
    gradient."""

    advantages: torch.Tensor
    live_logps: torch.Tensor  # log pi of the sampled tokens
    old_logps: torch.Tensor  # the same of the policy that drew them
    entropies: torch.Tensor  # before each token, nats, at the sampling temperature
    mask: torch.Tensor  # 1 on counted tokens, else 0
    progress: float  # how far the run is, in [0, 1)
    generator: torch.Generator  # the only source of noise, on the CPU


@dataclass(frozen=True)
class ShapedTokens:
    """What a shaper made of a batch; shape (batch, time)."""

    advantages: torch.Tensor
    touched: torch.Tensor  # bool: where the shaper acts
    beside: torch.Tensor | None = None  # added to TRL's loss, per token, with its gradient


class AdvantageShaper(ABC):  # noqa: B024  (each kind has its own abstract method)
    """Base of the two kinds."""

    def requires(self, setting: Setting) -> Iterator[str]:
        """Why this shaper cannot work in that setting, a sentence for each reason."""
        yield from ()


class CompletionShaper(AdvantageShaper):
    """One advantage for each completion, from its group."""

    reads_perplexity: ClassVar[bool] = False

    def requires(self, setting: Setting) -> Iterator[str]:
        if not setting.whole_groups:
            yield (
                "this advantage is made of whole groups on every process: make the completions of "
                "a process, per_device_train_batch_size x steps_per_generation, a multiple of "
                "num_generations"
            )

    @abstractmethod
    def shape(self, completions: Completions) -> torch.Tensor:
        """The advantages, shape (rows,)."""


class TokenShaper(AdvantageShaper):
    """An advantage for each token."""

    def requires(self, setting: Setting) -> Iterator[str]:
        if setting.use_liger_kernel:
            yield (
                "advantages of tokens cannot be shaped inside Liger's kernel: "
                "set use_liger_kernel to False"
            )
        if setting.at_scoring:
            yield "Unsloth's GPU trainer takes no advantages of tokens: use plain TRL for them"
        if setting.importance_sampling_level != "token":
            yield "advantages of tokens need importance_sampling_level token"
        if setting.loss_type not in REDUCTIONS:
            yield (
                f"advantages of tokens work with loss_type {', '.join(REDUCTIONS)}, "
                f"not {setting.loss_type!r}"
            )
        if setting.masks_off_policy:
            yield (
                "TRL's off-policy mask takes whole completions by the sign of their advantage: set "
                "off_policy_mask_threshold to None, or leave the advantages of tokens alone"
            )

    @abstractmethod
    def shape(self, tokens: BatchTokens) -> ShapedTokens:
        """The advantages of the tokens."""


# -- of completions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerplexityAdvantage(CompletionShaper):
    """The exploration report's eq. 7 and 11: A·(1 - alpha·w), with w the log-perplexity of the
    completion, standardised within its group.

    A positive alpha favours completions of low perplexity, a negative one those of high (the
    report's counter-experiment, Figure 5c). The report has 0.01. It does not say whose standard
    deviation: here the group's own, divided by its size. Where the perplexities of a group are all
    equal, w is 0.
    """

    alpha: float = 0.01

    reads_perplexity = True

    def shape(self, completions: Completions) -> torch.Tensor:
        assert completions.log_perplexity is not None
        surprisal = completions.log_perplexity.view(-1, completions.generations)
        centred = surprisal - surprisal.nanmean(1, keepdim=True)
        spread = (centred**2).nanmean(1, keepdim=True).sqrt()
        w = (centred / spread.clamp(min=1e-6)).nan_to_num(nan=0.0)
        return completions.advantages * (1 - self.alpha * w.flatten())


@dataclass(frozen=True)
class NegativeSamples(CompletionShaper):
    """Negative-sample reinforcement: correct completions weigh ``positive``, wrong ones 1.

    Zhu et al. 2025 (arXiv 2506.01347): A = positive for a reward of 1 and -1 for 0, without a
    baseline, so that a group that is all wrong teaches as well. ``positive`` 0 is NSR, 0.1 the
    paper's W-REINFORCE. ``of: advantages`` weighs GRPO's own positive advantages instead.
    """

    positive: float = 0.1
    of: str = "rewards"

    def __post_init__(self) -> None:
        if self.positive < 0:
            raise SageError(
                f"positive is the weight of correct samples, 0 or more, not {self.positive}"
            )
        if self.of not in ("rewards", "advantages"):
            raise SageError(f"negative samples are of rewards or advantages, not {self.of!r}")

    def shape(self, completions: Completions) -> torch.Tensor:
        advantages = completions.advantages
        if self.of == "advantages":
            return (self.positive * advantages).where(advantages > 0, advantages)
        correct = _correct(completions)
        return (self.positive * correct - (1 - correct)).nan_to_num(nan=0.0)


@dataclass(frozen=True)
class PassAtK(CompletionShaper):
    """Pass@k training (Chen et al. 2025, arXiv 2508.10751), its analytical derivation.

    All k of the N completions of a group make a subset, whose reward is that of its best. With c
    correct ones, the mean reward of a subset is R = 1 - C(N - c, k)/C(N, k) and its standard
    deviation s = sqrt(R(1 - R)). A completion's advantage is the mean of those of the subsets that
    hold it: (1 - R)/s for a correct one, (1 - R - C(N - c - 1, k - 1)/C(N - 1, k - 1))/s for a
    wrong one, and 0 where every subset earns the same. ``k`` 1 is pass@1: GRPO, left as TRL has it
    (whose standard deviation is that of a sample, and larger by sqrt(N/(N - 1))).
    """

    k: int = 4

    def __post_init__(self) -> None:
        if self.k < 1:
            raise SageError(f"k counts completions, 1 or more, not {self.k}")

    def requires(self, setting: Setting) -> Iterator[str]:
        yield from super().requires(setting)
        if self.k > setting.generations:
            yield (
                f"pass@{self.k} needs groups of at least as many completions: lower k, or raise "
                f"num_generations above {setting.generations}"
            )

    def shape(self, completions: Completions) -> torch.Tensor:
        if self.k == 1:
            return completions.advantages
        correct = _correct(completions).view(-1, completions.generations)
        if correct.isnan().any():
            raise SageError(
                "pass@k advantages need a reward for every completion, and some have none: "
                "let the reward function give 0"
            )
        n, k = completions.generations, self.k
        right, wrong = [], []
        for c in correct.sum(1).int().tolist():
            mean = 1 - comb(n - c, k) / comb(n, k)
            spread = (mean * (1 - mean)) ** 0.5
            lone = comb(n - c - 1, k - 1) / comb(n - 1, k - 1) if c < n else 0.0
            right.append((1 - mean) / spread if spread else 0.0)
            wrong.append((1 - mean - lone) / spread if spread else 0.0)
        of_right, of_wrong = (correct.new_tensor(x).unsqueeze(1) for x in (right, wrong))
        return of_right.where(correct == 1, of_wrong).flatten().to(completions.advantages)


def _correct(completions: Completions) -> torch.Tensor:
    """The rewards, if each is 0, 1 or not a number; otherwise a SageError."""
    rewards = completions.rewards
    if not ((rewards == 0) | (rewards == 1) | rewards.isnan()).all():
        raise SageError(
            "this advantage tells correct completions from wrong ones: "
            "train with one reward function of weight 1 that gives 0 or 1"
        )
    return rewards


# -- of tokens -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PositionBonus(TokenShaper):
    """The exploration report's eq. 8 and 12: A + sign(A)·gamma·sigmoid(d·m·(l - n)), with l the
    token's place in its completion, from 0 to 1.

    ``direction`` d is 1 for late tokens and -1 for early ones. As printed n is -0.5, and with m 15
    the sigmoid of every token is above 0.999, a constant bonus; 0.5 gives the ramp that the text
    describes. gamma is 0.1 in the report's runs and 1 in its comparison of both directions (Figure
    6). The bonus acts while the run's progress is in [start, end): the report has it in 100 steps
    of the plateau.
    """

    gamma: float = 0.1
    direction: int = 1
    slope: float = 15.0  # m
    shift: float = 0.5  # n
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if self.direction not in (1, -1):
            raise SageError(f"the direction is 1 or -1, not {self.direction}")
        if not 0 <= self.start < self.end <= 1:
            raise SageError(
                f"the bonus acts on a part of the run, 0 <= start < end <= 1, "
                f"not from {self.start} to {self.end}"
            )

    def shape(self, tokens: BatchTokens) -> ShapedTokens:
        counted = tokens.mask.bool()
        if not self.start <= tokens.progress < self.end:
            return ShapedTokens(tokens.advantages, touched=counted & False)
        last = (tokens.mask.sum(1, keepdim=True) - 1).clamp(min=1)
        place = (tokens.mask.cumsum(1) - 1) / last
        bonus = self.gamma * (self.direction * self.slope * (place - self.shift)).sigmoid()
        added = tokens.advantages.sign() * bonus.to(tokens.advantages) * counted
        return ShapedTokens(tokens.advantages + added, touched=added != 0)


@dataclass(frozen=True)
class EntropyAdvantage(TokenShaper):
    """Entropy-shaped advantage (Cheng et al. 2025, arXiv 2506.14758): A + min(alpha·H, |A|/kappa),
    with H the entropy before the token as a constant.

    The paper has alpha 0.4 and kappa 2 with GRPO; what it does about a KL term was not verified.
    kappa above 1 keeps the sign of A.
    """

    alpha: float = 0.4
    kappa: float = 2.0

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.kappa <= 1:
            raise SageError(
                f"the entropy term needs alpha of 0 or more and kappa above 1, "
                f"not {self.alpha} and {self.kappa}"
            )

    def shape(self, tokens: BatchTokens) -> ShapedTokens:
        bound = tokens.advantages.abs() / self.kappa
        added = (self.alpha * tokens.entropies).minimum(bound) * tokens.mask
        return ShapedTokens(tokens.advantages + added, touched=added != 0)


def covariance(tokens: BatchTokens) -> torch.Tensor:
    """Each token's part of the covariance of log-probability and advantage, shape (batch, time):
    (log pi - mean log pi)·(A - mean A), means over the counted tokens of the batch at hand.

    Source: Cui et al. 2025 (arXiv 2505.22617), the term that both of its methods select tokens by;
    its code trains both without a KL term (recipe/dapo/7b_kl_cov.sh and 7b_clip_cov.sh of
    PRIME-RL/Entropy-Mechanism-of-RL, read in a fork: use_kl_loss=False, kl_coef=0.0).
    The batch is what one forward pass of one process sees.
    """

    def centred(values: torch.Tensor) -> torch.Tensor:
        count = tokens.mask.sum().clamp(min=1)
        return values - (values * tokens.mask).sum() / count

    return centred(tokens.live_logps.detach()) * centred(tokens.advantages)


@dataclass(frozen=True)
class _Share:
    """A share of the batch's tokens, rounded down."""

    share: float = 0.0002

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise SageError(f"a share of tokens lies between 0 and 1, not {self.share}")

    def _count(self, tokens: BatchTokens) -> int:
        return int(self.share * tokens.mask.sum().item())


@dataclass(frozen=True)
class ClipCov(_Share, TokenShaper):
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617): tokens drawn at random among those whose
    covariance lies in [low, high] lose their policy gradient.

    Their advantage becomes 0, which takes them out of the surrogate and leaves their KL term. The
    paper draws a share of 0.0002 of all tokens between 1 and 5; its code leaves out what PPO's
    clip has taken already, which has no gradient to lose, and draws one token at least.
    """

    low: float = 1.0
    high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise SageError(f"Clip-Cov's low lies below its high: not {self.low}, {self.high}")

    def shape(self, tokens: BatchTokens) -> ShapedTokens:
        import torch

        found = covariance(tokens)
        within = (found >= self.low) & (found <= self.high) & tokens.mask.bool()
        places = within.flatten().nonzero().flatten()
        order = torch.randperm(len(places), generator=tokens.generator)
        chosen = torch.zeros_like(within).flatten()
        chosen[places[order[: self._count(tokens)].to(places.device)]] = True
        chosen = chosen.view_as(within)
        return ShapedTokens(tokens.advantages.masked_fill(chosen, 0.0), touched=chosen)


@dataclass(frozen=True)
class KLCov(_Share, TokenShaper):
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617): the tokens of the largest covariance have
    coef·|log pi - log pi_old| added to their loss.

    pi_old drew the batch: in the only update of a batch the term and its gradient are 0, and such
    a setting is refused. The paper has a share of 0.002 (7B) or 0.0002 (32B), and coef 1; the
    absolute value is its code's estimate of the KL.
    """

    coef: float = 1.0

    def requires(self, setting: Setting) -> Iterator[str]:
        yield from super().requires(setting)
        if setting.on_policy:
            yield (
                "KL-Cov holds the policy to the one that drew the batch, and with one update a "
                "batch they are the same: raise steps_per_generation or num_iterations"
            )

    def shape(self, tokens: BatchTokens) -> ShapedTokens:
        import torch

        found = covariance(tokens).masked_fill(~tokens.mask.bool(), -torch.inf).flatten()
        chosen = torch.zeros_like(found, dtype=torch.bool)
        chosen[found.topk(self._count(tokens)).indices] = True
        chosen = chosen.view_as(tokens.mask)
        distance = (tokens.live_logps - tokens.old_logps).abs()
        beside = self.coef * distance.where(chosen, 0.0) if chosen.any() else None
        return ShapedTokens(tokens.advantages, touched=chosen, beside=beside)


# -- choices ---------------------------------------------------------------------------------------

#: What a profile's ``advantage: {name: ...}`` may name.
ADVANTAGES: dict[str, type[Any]] = {
    "perplexity": PerplexityAdvantage,
    "position": PositionBonus,
    "entropy": EntropyAdvantage,
    "negative_samples": NegativeSamples,
    "pass_at_k": PassAtK,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
}


def check_advantage(choice: str | Mapping[str, Any], where: str = "advantage") -> None:
    """Raise a SageError for an unknown name or parameter, or a value that the shaper cannot have.

    Args:
        choice: ``{name: position, direction: -1}``: a name of ADVANTAGES and parameters of its
            class; the name alone leaves all at their defaults.
        where: what the sentence begins with, such as "profile laptop: methods.a.advantage".
    """
    _make(choice, where)


def build_advantage(choice: str | Mapping[str, Any] | AdvantageShaper) -> AdvantageShaper:
    """The shaper of a choice, see :func:`check_advantage`; one of one's own is returned as it
    is."""
    if isinstance(choice, CompletionShaper | TokenShaper):
        return choice
    if isinstance(choice, type) and issubclass(choice, AdvantageShaper):
        raise SageError(
            f"the advantage is the class {choice.__name__}, not an instance: "
            f"write {choice.__name__}()"
        )
    return _make(choice, "advantage")


def _make(choice: object, where: str) -> AdvantageShaper:
    given = {"name": choice} if isinstance(choice, str) else choice
    if not isinstance(given, Mapping) or "name" not in given:
        raise SageError(
            f"{where}: an advantage is chosen by its name and parameters, such as "
            f"{{name: pass_at_k, k: 4}}, not by {choice!r}"
        )
    name = given["name"]
    if not isinstance(name, str) or name not in ADVANTAGES:
        raise SageError(
            f"{where}: there is no advantage {name!r}: choose one of {', '.join(ADVANTAGES)}"
        )
    parameters = {key: value for key, value in given.items() if key != "name"}
    arguments = read_parameters(ADVANTAGES[name], parameters, where)
    try:
        shaper: AdvantageShaper = ADVANTAGES[name](**arguments)
    except SageError as error:
        raise SageError(f"{where}: {error}") from None
    return shaper
