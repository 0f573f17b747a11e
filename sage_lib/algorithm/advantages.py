"""Advantages: the weights of completions, or of their tokens, in TRL's loss.

A :class:`CompletionShaper` works on whole groups of scored completions, a :class:`TokenShaper` on
the tokens of a batch after the loss's own forward pass. Either composes with any guide and KL form,
and holds no state. This module loads without torch.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import comb
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib.algorithm.guides import FORBID_EXTRA, Number
from sage_lib.algorithm.kl_forms import REDUCTIONS
from sage_lib.errors import SageError

if TYPE_CHECKING:
    import torch

    from sage_lib.algorithm.guided_trainer import GuidedTrainer

#: Parameters that are 0 or more; that lie between 0 and 1.
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]


# -- inputs and outputs of a shaper ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Completions:
    """Whole groups of scored completions; the rows of a group are neighbours."""

    advantages: torch.Tensor  # TRL's, shape (rows,)
    rewards: torch.Tensor  # sum of the weighted rewards, shape (rows,)
    generations: int  # rows of a group
    #: Mean surprisal of the tokens under the policy that drew them, nats, shape (rows,). It is NaN
    #: without a counted token, and None unless the shaper ``reads_perplexity``.
    log_perplexity: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class BatchTokens:
    """A batch after the forward pass, shape (batch, time). Only ``live_logps`` has a gradient."""

    advantages: torch.Tensor
    live_logps: torch.Tensor  # log pi of the sampled tokens
    old_logps: torch.Tensor  # the same under the policy that drew them
    entropies: torch.Tensor  # before each token, nats, at the sampling temperature
    mask: torch.Tensor  # 1 on counted tokens, else 0
    progress: float  # how far the run is, in [0, 1)
    generator: torch.Generator  # the only source of noise, on the CPU


@dataclasses.dataclass(frozen=True)
class ShapedTokens:
    """The result of a shaper for a batch; shape (batch, time)."""

    advantages: torch.Tensor
    touched: torch.Tensor  # bool: where the shaper acts
    extra_loss: torch.Tensor | None = None  # added to TRL's loss, per token, with its gradient


class AdvantageShaper(ABC):
    """Base of the two kinds."""

    @abstractmethod
    def requires(self, trainer: GuidedTrainer) -> Iterator[str]:
        """Yield a sentence for each reason why this shaper cannot work in a trainer."""


class CompletionShaper(AdvantageShaper):
    """Base of the shapers that give each completion an advantage, from its group."""

    reads_perplexity: ClassVar[bool] = False

    def requires(self, trainer: GuidedTrainer) -> Iterator[str]:
        yield from need_whole_groups(trainer, "this advantage")

    @abstractmethod
    def shape(self, completions: Completions) -> torch.Tensor:
        """Return the advantages, shape (rows,)."""


class TokenShaper(AdvantageShaper):
    """Base of the shapers that give each token an advantage."""

    def requires(self, trainer: GuidedTrainer) -> Iterator[str]:
        if trainer.shaped_at_scoring:
            yield "Unsloth's GPU trainer takes no advantages of tokens: use plain TRL for them"
        masked = trainer.off_policy_mask_threshold is not None  # by the sign of whole completions
        by_token = trainer.importance_sampling_level == "token" and trainer.loss_type in REDUCTIONS
        if masked or not by_token:
            yield (
                f"advantages of tokens need loss_type {', '.join(REDUCTIONS)}, "
                "importance_sampling_level token and no off_policy_mask_threshold"
            )

    @abstractmethod
    def shape(self, tokens: BatchTokens) -> ShapedTokens:
        """Return the advantages of the tokens."""


def need_whole_groups(trainer: GuidedTrainer, what: str) -> Iterator[str]:
    """Yield why ``what`` cannot work, where a process scores only a part of some group."""
    rows: int = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    if rows % trainer.num_generations:
        yield (
            f"{what} needs whole groups on every process: make "
            "per_device_train_batch_size x steps_per_generation a multiple of num_generations"
        )


# -- of completions --------------------------------------------------------------------------------


@dataclass(frozen=True, config=FORBID_EXTRA)
class PerplexityAdvantage(CompletionShaper):
    """The exploration report's eq. 7 and 11: A·(1 - alpha·w), with w the log-perplexity of the
    completion, standardised within its group (deviation of the whole group; 0 where it is 0).

    A negative alpha favours high perplexity (Figure 5c). The report has 0.01.
    """

    alpha: Number = 0.01

    reads_perplexity = True

    def shape(self, completions: Completions) -> torch.Tensor:
        assert completions.log_perplexity is not None
        surprisal = completions.log_perplexity.view(-1, completions.generations)
        centred = surprisal - surprisal.nanmean(1, keepdim=True)
        spread = (centred**2).nanmean(1, keepdim=True).sqrt()
        w = (centred / spread.clamp(min=1e-6)).nan_to_num(nan=0.0)
        return completions.advantages * (1 - self.alpha * w.flatten())


@dataclass(frozen=True, config=FORBID_EXTRA)
class NegativeSamples(CompletionShaper):
    """Negative-sample reinforcement: correct completions weigh ``positive``, wrong ones 1.

    Zhu et al. 2025 (arXiv 2506.01347), without a baseline: ``positive`` 0 is NSR, 0.1 the paper's
    W-REINFORCE.
    """

    positive: NotNegative = 0.1

    def shape(self, completions: Completions) -> torch.Tensor:
        correct = _binary_rewards(completions)
        return (self.positive * correct - (1 - correct)).nan_to_num(nan=0.0)


@dataclass(frozen=True, config=FORBID_EXTRA)
class BetaNormalised(CompletionShaper):
    """BNPO as SAGE cites it (Xiao et al. 2025, arXiv 2506.02864): (R - p)/f(p) of binary rewards.

    p is a group's mean reward, f the density of Beta(1 + a/3, 1 + b/3). a and b give the Beta
    distribution with the mean and variance of p over the batch's groups. As in its code both
    parameters are at least 1, and 1/f at most ``limit``. Without a spread of p, f is 1. It trains
    in one process, which sees all groups of a batch.
    """

    limit: NotNegative = 1e6

    def requires(self, trainer: GuidedTrainer) -> Iterator[str]:
        yield from super().requires(trainer)
        if trainer.resampling or trainer.accelerator.num_processes > 1:
            yield "beta_normalised reads all groups: one process, and no dynamic_sampling"

    def shape(self, completions: Completions) -> torch.Tensor:
        import torch

        correct = _binary_rewards(completions, require_all=True)
        correct = correct.view(-1, completions.generations).double()
        p = correct.mean(1, keepdim=True)
        mean, variance = p.mean(), p.var() if len(p) > 1 else torch.zeros(())
        third = (mean * (1 - mean) / variance - 1) / 3 if variance > 0 else mean * 0  # (a + b)/3
        alpha, beta = ((1 + third * share).clamp(min=1) for share in (mean, 1 - mean))
        density = torch.distributions.Beta(alpha, beta).log_prob(p)
        weight: torch.Tensor = density.neg().exp().clamp(max=self.limit)
        return (weight * (correct - p)).flatten().to(completions.advantages)


@dataclass(frozen=True, config=FORBID_EXTRA)
class PassAtK(CompletionShaper):
    """Pass@k training (Chen et al. 2025, arXiv 2508.10751), its analytical derivation.

    A subset of k of a group's N completions earns the reward of its best: with c correct ones on
    average R = 1 - C(N - c, k)/C(N, k), with deviation s = sqrt(R(1 - R)). A completion's
    advantage is the mean over the subsets that hold it: (1 - R)/s for a correct one,
    (1 - R - C(N - c - 1, k - 1)/C(N - 1, k - 1))/s for a wrong one. ``k`` 1 is TRL's GRPO.
    """

    k: Annotated[int, Field(strict=True, ge=1)] = 4

    def requires(self, trainer: GuidedTrainer) -> Iterator[str]:
        yield from super().requires(trainer)
        if self.k >= max(2, trainer.num_generations):
            yield (
                f"pass@{self.k} needs num_generations above {self.k}, not "
                f"{trainer.num_generations}: all advantages would be 0"
            )

    def shape(self, completions: Completions) -> torch.Tensor:
        if self.k == 1:
            return completions.advantages
        correct = _binary_rewards(completions, require_all=True)
        correct = correct.view(-1, completions.generations)
        n, k = completions.generations, self.k
        right, wrong = [], []
        for c in correct.sum(1).int().tolist():
            mean = 1 - comb(n - c, k) / comb(n, k)
            spread = (mean * (1 - mean)) ** 0.5
            all_wrong = comb(n - c - 1, k - 1) / comb(n - 1, k - 1) if c < n else 0.0
            right.append((1 - mean) / spread if spread else 0.0)
            wrong.append((1 - mean - all_wrong) / spread if spread else 0.0)
        of_right, of_wrong = (correct.new_tensor(x).unsqueeze(1) for x in (right, wrong))
        return of_right.where(correct == 1, of_wrong).flatten().to(completions.advantages)


@dataclass(frozen=True, config=FORBID_EXTRA)
class MaxRL(CompletionShaper):
    """Maximum-likelihood RL (Tajwar et al. 2026, arXiv 2602.02710): (r - m)/m with m the group's
    mean reward; 0 where no completion is right."""

    def shape(self, completions: Completions) -> torch.Tensor:
        correct = _binary_rewards(completions).view(-1, completions.generations)
        mean = correct.nanmean(1, keepdim=True)
        return ((correct - mean) / mean).nan_to_num(nan=0.0).flatten().to(completions.advantages)


def _binary_rewards(completions: Completions, require_all: bool = False) -> torch.Tensor:
    """Return the rewards. SageError unless each is 0, 1 or, if not ``require_all``, NaN."""
    rewards = completions.rewards
    if require_all and rewards.isnan().any():
        raise SageError("this advantage needs a reward for every completion: give 0 for none")
    if not ((rewards == 0) | (rewards == 1) | rewards.isnan()).all():
        raise SageError("this advantage needs one reward function of weight 1 that gives 0 or 1")
    return rewards


# -- of tokens -------------------------------------------------------------------------------------


@dataclass(frozen=True, config=FORBID_EXTRA)
class PositionBonus(TokenShaper):
    """The exploration report's eq. 8 and 12: A + sign(A)·gamma·sigmoid(d·m·(l - n)), with l the
    token's place in its completion, from 0 to 1, while the run's progress is in [start, end).

    ``direction`` d is 1 for late tokens and -1 for early ones. As printed n is -0.5, which makes
    the bonus constant; 0.5 gives the ramp that the text describes. gamma is 0.1 in the report's
    runs and 1 in its comparison of both directions (Figure 6).
    """

    gamma: Number = 0.1
    direction: Literal[1, -1] = 1
    slope: Number = 15.0  # m
    shift: Number = 0.5  # n
    start: Number = 0.0
    end: Number = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= 1:
            raise SageError(
                f"the bonus acts from start to end, 0 <= start < end <= 1, not {self.start} to "
                f"{self.end}"
            )

    def shape(self, tokens: BatchTokens) -> ShapedTokens:
        counted = tokens.mask.bool()
        if not self.start <= tokens.progress < self.end:
            return ShapedTokens(tokens.advantages, touched=counted & False)
        last = (tokens.mask.sum(1, keepdim=True) - 1).clamp(min=1)
        position = (tokens.mask.cumsum(1) - 1) / last
        bonus = self.gamma * (self.direction * self.slope * (position - self.shift)).sigmoid()
        added = tokens.advantages.sign() * bonus.to(tokens.advantages) * counted
        return ShapedTokens(tokens.advantages + added, touched=added != 0)


def covariance(tokens: BatchTokens) -> torch.Tensor:
    """Return each token's part of the covariance of log-probability and advantage, (batch, time):
    (log pi - mean log pi)·(A - mean A), means over the counted tokens of a forward pass."""

    def centred(values: torch.Tensor) -> torch.Tensor:
        count = tokens.mask.sum().clamp(min=1)
        return values - (values * tokens.mask).sum() / count

    return centred(tokens.live_logps.detach()) * centred(tokens.advantages)


@dataclass(frozen=True, config=FORBID_EXTRA)
class ClipCov(TokenShaper):
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617): tokens drawn at random among those whose
    covariance lies in [low, high] have an advantage of 0, which leaves their KL term.

    The paper has these values. Its code leaves out what PPO's clip took, and draws at least one.
    Here a forward pass of fewer than 1/share counted tokens draws none.
    """

    share: Share = 0.0002
    low: Number = 1.0
    high: Number = 5.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise SageError(f"covariances lie in [low, high], not [{self.low}, {self.high}]")

    def shape(self, tokens: BatchTokens) -> ShapedTokens:
        import torch

        covariances = covariance(tokens)
        within = (covariances >= self.low) & (covariances <= self.high) & tokens.mask.bool()
        indices = within.flatten().nonzero().flatten()
        order = torch.randperm(len(indices), generator=tokens.generator)
        touched = torch.zeros_like(within).flatten()
        count = int(self.share * tokens.mask.sum().item())
        touched[indices[order[:count].to(indices.device)]] = True
        touched = touched.view_as(within)
        return ShapedTokens(tokens.advantages.masked_fill(touched, 0.0), touched)


@dataclass(frozen=True, config=FORBID_EXTRA)
class KLCov(TokenShaper):
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617): the tokens of the largest covariance have
    coef·|log pi - log pi_old| added to their loss.

    pi_old drew the batch: with one update a batch the term is 0, which is refused. The paper has a
    share of 0.002 (7B) or 0.0002 (32B), and coef 1; the absolute value is its code's. A forward
    pass of fewer than 1/share counted tokens has none of these tokens.
    """

    share: Share = 0.0002
    coef: Number = 1.0

    def requires(self, trainer: GuidedTrainer) -> Iterator[str]:
        yield from super().requires(trainer)
        updates = (trainer.args.steps_per_generation or 1) * trainer.num_iterations
        if trainer.args.gradient_accumulation_steps % updates == 0:
            yield "KL-Cov needs more updates a batch: raise steps_per_generation or num_iterations"

    def shape(self, tokens: BatchTokens) -> ShapedTokens:
        import torch

        covariances = covariance(tokens).masked_fill(~tokens.mask.bool(), -torch.inf).flatten()
        touched = torch.zeros_like(covariances, dtype=torch.bool)
        touched[covariances.topk(int(self.share * tokens.mask.sum().item())).indices] = True
        touched = touched.view_as(tokens.mask)
        distance = (tokens.live_logps - tokens.old_logps).abs()
        extra_loss = self.coef * distance.where(touched, 0.0) if touched.any() else None
        return ShapedTokens(tokens.advantages, touched, extra_loss)


@dataclass(frozen=True, config=FORBID_EXTRA)
class EntropyBonus(TokenShaper):
    """Entropy-based advantage shaping (Cheng et al. 2025, arXiv 2506.14758): A + min(alpha·H_t,
    |A|/kappa) with the entropy H_t (nats) of the policy, which has no gradient here.

    The sign of A stays, because kappa is above 1. The paper has alpha 0.4 for GRPO and kappa 2.
    """

    alpha: NotNegative = 0.4
    kappa: Annotated[float, Field(strict=True, gt=1)] = 2.0

    def shape(self, tokens: BatchTokens) -> ShapedTokens:
        bonus = self.alpha * tokens.entropies * tokens.mask
        bonus = bonus.minimum(tokens.advantages.abs() / self.kappa)
        return ShapedTokens(tokens.advantages + bonus, touched=bonus != 0)


@dataclass(frozen=True, config=FORBID_EXTRA)
class RepoR(TokenShaper):
    """REPO-R (Petrenko et al. 2026, arXiv 2603.11682, Appendix D.2): A·(1 - zeta·sign(A)·log pi).

    A keeps its sign. There zeta moves from 1e-4 to 0.05 to hold the entropy; here it is fixed."""

    zeta: NotNegative = 0.05

    def shape(self, tokens: BatchTokens) -> ShapedTokens:
        factor = 1 - self.zeta * tokens.advantages.sign() * tokens.live_logps.detach()
        advantages = tokens.advantages * factor.clamp(min=0).where(tokens.mask.bool(), 1.0)
        return ShapedTokens(advantages, touched=advantages != tokens.advantages)
