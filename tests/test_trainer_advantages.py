"""Advantages in SageTrainer's loss."""

import math

import pytest
import torch
from trainer_cases import (
    binary,
    both,
    completions,
    drawn,
    gradient,
    losses,
    make,
    one_batch,
    resumed,
    row_alone,
    saved,
    trained,
    weights,
)

from sage_lib.algorithm.guides import BranchGuide, CosineSchedule, RandomGuide, TokenGuide

__all__ = ["make"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore")


#: Of each advantage parameters that leave all as it is, where there are, and parameters that act.
CASES = {
    "perplexity": ({"alpha": 0.0}, {"alpha": 0.5}),
    "position": ({"gamma": 0.0}, {"gamma": 1.0}),
    "negative_samples": (None, {}),
    "pass_at_k": ({"k": 1}, {"k": 2}),
    "clip_cov": ({"share": 0.0}, {"share": 0.5, "low": 0.0}),
    "kl_cov": ({"share": 0.0}, {"share": 0.3}),
    "beta_normalised": (None, {}),
    "entropy": ({"alpha": 0.0}, {}),
}


@pytest.mark.parametrize("beta", [0.05, 0.0])
@pytest.mark.parametrize("name", [name for name, (identity, _) in CASES.items() if identity])
def test_an_advantage_at_its_identity_is_stock_trl_bit_for_bit(make, name, beta):
    settings = {"beta": beta, "num_iterations": 2 if name == "kl_cov" else 1}
    stock = trained(make(**settings))
    ours = trained(make(None, advantage={"name": name, **CASES[name][0]}, **settings))
    assert losses(stock) == losses(ours)
    assert torch.equal(weights(stock), weights(ours))
    assert ours.state.log_history[0]["advantage/touched"] == 0


@pytest.mark.parametrize("name", CASES)
def test_an_advantage_changes_training_and_is_resumed_bit_for_bit(make, tmp_path, name):
    settings = saved(tmp_path, max_steps=4, save_steps=2, reward=binary)
    settings["num_iterations"] = 2 if name == "kl_cov" else 1
    plain = trained(make(None, **settings | {"save_strategy": "no"}))
    chosen = {"name": name, **CASES[name][1]}
    whole, _, same = resumed(make, tmp_path, 2, None, advantage=chosen, **settings)
    assert same and not torch.equal(weights(plain), weights(whole))
    log = [row for row in whole.state.log_history if "loss" in row]
    assert any(0 < row["advantage/touched"] <= 1 for row in log)
    assert any(row["advantage/size"] > 0 for row in log)


def shaped_by_loop(advantage, batch, logps):
    """The advantages of tokens, one by one, and what is added to the loss beside them."""
    mask = batch["completion_mask"]
    shaped = batch["advantages"].unsqueeze(1).repeat(1, mask.shape[1])
    beside = torch.zeros(mask.shape)
    counted = [(i, t) for i in range(len(mask)) for t in range(mask.shape[1]) if mask[i, t]]
    if advantage["name"] == "kl_cov":
        mean_logp = sum(float(logps[p]) for p in counted) / len(counted)
        mean_a = sum(float(shaped[p]) for p in counted) / len(counted)
        cov = {p: float((logps[p] - mean_logp) * (shaped[p] - mean_a)) for p in counted}
        for p in sorted(counted, key=cov.get)[-int(0.3 * len(counted)) :]:
            beside[p] = (logps[p] - batch["old_per_token_logps"][p]).abs()
        return shaped, beside
    for i, t in counted:
        a, last = float(shaped[i, t]), max(int(mask[i].sum()) - 1, 1)
        bonus = 1 / (1 + math.exp(-15 * (t / last - 0.5)))
        shaped[i, t] = a + math.copysign(bonus, a) * (a != 0)
    return shaped, beside


@pytest.mark.parametrize(
    ("guide", "kl_form", "settings"),
    [
        (None, None, {"beta": 0.0}),
        (None, None, {"top_entropy_quantile": 0.5}),
        (BranchGuide(threshold=1.0, ratio=0.2), "k3", {}),
        (TokenGuide(), "k3_corrected", {"loss_type": "dapo"}),
        (RandomGuide(probability=CosineSchedule(0.5, 0.5)), "sequence", {"loss_type": "bnpo"}),
        (None, "forward_kl", {"loss_type": "dr_grpo"}),
    ],
)
def test_advantages_of_tokens_compose_with_every_guide_and_anchor(make, guide, kl_form, settings):
    """The loss is that of the same guide and anchor without a shaper, on a batch whose advantages
    were shaped by a loop."""
    require_composition(make, {"name": "position", "gamma": 1.0}, guide, kl_form, settings)


def test_kl_cov_composes_with_a_guide_and_adds_its_term_beside_the_loss(make):
    guide = BranchGuide(threshold=1.0, ratio=0.2)
    advantage = {"name": "kl_cov", "share": 0.3}
    for loss_type in ("grpo", "bnpo"):
        settings = {"num_iterations": 2, "loss_type": loss_type}
        require_composition(make, advantage, guide, "k3", settings)


def require_composition(make, advantage, guide, kl_form, settings):
    ours, batch = one_batch(
        make(guide, kl_form=kl_form, advantage=advantage, lora=False, **settings)
    )
    before = batch["advantages"].clone()
    loss = ours._compute_loss(ours.model, batch)
    loss.backward()
    assert torch.equal(before, batch["advantages"]), "the buffered batch is as it was"
    plain, same = one_batch(make(guide, kl_form=kl_form, lora=False, **settings))
    assert torch.equal(same["completion_ids"], batch["completion_ids"])
    score = plain._get_per_token_logps_and_entropies
    logps, *_ = score(plain.model, *both(same))
    shaped, beside = shaped_by_loop(advantage, same, logps)
    mask = same["completion_mask"]
    reduced = {
        "grpo": lambda x: ((x * mask).sum(1) / mask.sum(1)).mean(),
        "bnpo": lambda x: (x * mask).sum() / mask.sum(),
    }
    expected = plain._compute_loss(plain.model, same | {"advantages": shaped})
    if advantage["name"] == "kl_cov":
        added = reduced[settings["loss_type"]](beside)
        assert added > 1e-4, "there was something to add"
        expected = expected + added
    else:
        assert (shaped != before[:, None]).any(), "there was something to shape"
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient(ours.model), gradient(plain.model), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["perplexity", "negative_samples", "pass_at_k"])
@pytest.mark.parametrize("kl_form", ["k3", "sequence", "forward_kl"])
def test_advantages_of_completions_are_those_of_their_groups(make, name, kl_form):
    """From the texts of the completions, their rewards and the model's own log-probabilities, row
    by row; the anchor leaves them alone until the loss."""
    choice = {"perplexity": {"alpha": 0.5}, "pass_at_k": {"k": 2}}.get(name, {})
    guide = None if kl_form == "forward_kl" else BranchGuide(threshold=0.5)
    trainer = make(
        guide, kl_form=kl_form, advantage={"name": name, **choice}, reward=binary, lora=False
    )
    batch = drawn(trainer, seed=4)
    rewards = torch.tensor(binary([[{"content": text}] for text in completions(trainer, batch)]))
    groups = rewards.view(2, 4)
    assert groups.std(1).max() > 0, "there was something to learn"
    stock = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(8)
    if name == "perplexity":
        surprisal = []
        for i in range(8):
            ids, n = row_alone(batch, i)
            with torch.no_grad():
                log_pi = trainer.model(ids[None]).logits[0, -n - 1 : -1].log_softmax(-1)
            surprisal.append(-log_pi.gather(-1, ids[-n:, None]).mean())
        by_group = torch.stack(surprisal).view(2, 4)
        w = (by_group - by_group.mean(1, keepdim=True)) / by_group.std(1, False, keepdim=True)
        expected = stock * (1 - 0.5 * w.view(8))
    elif name == "negative_samples":
        expected = torch.where(rewards == 1, 0.1, -1.0)
    else:  # of 6 pairs of 4 completions, by the number of correct ones: right, wrong
        table = {0: (0, 0), 1: (1, -(1 / 3)), 2: (5**-0.5, -(5**-0.5)), 3: (0, 0), 4: (0, 0)}
        pairs = [table[int(g.sum())] for g in groups]
        expected = torch.tensor([pairs[i // 4][int(rewards[i] == 0)] for i in range(8)])
    torch.testing.assert_close(batch["advantages"], expected.float(), atol=1e-4, rtol=1e-4)


def test_the_surprisal_of_a_completion_that_ends_early_is_the_mean_of_its_own_tokens(make):
    """Standardised within a group, a common divisor shows only where lengths differ."""
    trainer = make(None, advantage={"name": "perplexity", "alpha": 0.5}, lora=False)
    lengths = torch.tensor([[1], [2], [3], [4]]).repeat(2, 1)
    batch = {
        "completion_mask": (torch.arange(4) < lengths).long(),
        "old_per_token_logps": -torch.arange(1.0, 9.0).unsqueeze(1).expand(8, 4),
        "advantages": torch.ones(8),
    }
    trainer._shape_completions(trainer.advantage, batch, torch.zeros(8))
    w = torch.tensor([-1.5, -0.5, 0.5, 1.5]) / math.sqrt(1.25)  # of 1, 2, 3, 4 and of 5, 6, 7, 8
    torch.testing.assert_close(batch["advantages"], (1 - 0.5 * w).repeat(2))


KEPT = ("completion_ids", "advantages")


def test_advantages_of_completions_reach_every_update_of_a_split_batch(make):
    """Two updates a batch: the groups are apart by then, and each row still has what its own group
    gave it. A mean of four advantages of a standardised weight is no longer 0 in each half."""
    settings = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "beta": 0.0}
    ours = make(None, advantage={"name": "perplexity", "alpha": 0.5}, **settings)
    scored = drawn(ours)
    rows = [ours.train_dataset[i // 4] for i in range(8)]
    kept = {tuple(r): a for r, a in zip(*(scored[k].tolist() for k in KEPT), strict=True)}
    torch.manual_seed(3)
    ours._step = 0
    halves = []
    for _ in range(2):
        halves.append(ours._prepare_inputs(rows))
        ours._step += 1
    for half in halves:
        for ids, advantage in zip(*(half[k].tolist() for k in KEPT), strict=True):
            assert kept[tuple(ids)] == advantage
