"""The trainer's pass@k of groups against enumeration of all subsets; loss types cispo and sapo."""

import itertools

import numpy as np
import pytest
import torch
from datasets import Dataset
from trainer_cases import binary, larger, make, one_batch, spread, trained

from sage_lib.algorithm.guides import BranchGuide

__all__ = ["make"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore")


def enumerated(groups, k):
    """Mean over groups of the best of k, over all subsets of k."""
    return np.mean([max(chosen) for group in groups for chosen in itertools.combinations(group, k)])


def test_pass_at_k_of_training_is_that_of_all_subsets(make):
    seen = []

    def right(completions, **kwargs):
        seen.append(binary(completions))
        return seen[-1]

    trainer = trained(make(None, reward=[right, spread], num_generations=4, max_steps=3))
    rows = [row for row in trainer.state.log_history if "rewards/right/pass@1" in row]
    assert len(rows) == 3
    for row, rewards in zip(rows, seen, strict=True):
        groups = np.reshape(rewards, (-1, 4))
        for k in (1, 2, 4):
            assert row[f"rewards/right/pass@{k}"] == pytest.approx(enumerated(groups, k))
        assert "rewards/right/pass@8" not in row and "rewards/spread/pass@1" not in row
        assert row["rewards/right/pass@1"] == pytest.approx(row["rewards/right/mean"])


def test_pass_at_k_of_an_evaluation_set_is_that_of_all_subsets(make):
    seen = []

    def right(completions, **kwargs):
        seen.append(binary(completions))
        return seen[-1]

    trainer = make(None, reward=right, num_generations_eval=3, per_device_eval_batch_size=6)
    seen.clear()
    # 5 prompts in batches of 2: every prompt counts as much
    data = Dataset.from_list([trainer.train_dataset[i] for i in range(5)])
    found = trainer.evaluate(data)
    groups = np.concatenate([np.reshape(rewards, (-1, 3)) for rewards in seen])
    for k in (1, 2, 3):
        mean = enumerated(groups, k)
        assert found[f"eval_rewards/right/pass@{k}"] == pytest.approx(mean)
    assert "eval_rewards/right/pass@4" not in found


@pytest.mark.parametrize("loss_type", ["cispo", "sapo"])
def test_a_guide_adds_its_kl_to_the_loss_of_cispo_and_sapo(make, loss_type):
    """The loss with a guide less the one without is beta times the difference of the two KLs."""
    settings = {"loss_type": loss_type, "beta": 0.5, "change": larger, "lora": False}
    guide = BranchGuide(threshold=0.5, ratio=0.2)
    guided, batch = one_batch(make(guide, **settings))
    plain, same = one_batch(make(None, **settings))
    assert torch.equal(batch["completion_ids"], same["completion_ids"])
    with_guide, without = (t.compute_loss(t.model, b) for t, b in ((guided, batch), (plain, same)))
    logps, entropies = guided._policy_signals(batch)
    logps, entropies = logps.detach().double(), entropies.detach().double()
    mask, reference = batch["completion_mask"].double(), batch["ref_per_token_logps"].double()
    q = (1 + 0.2 * (entropies - 0.5).clamp(min=0)).clamp(0.6, 1.4)
    assert (q != 1).any()

    def k3(d):
        return d.exp() - d - 1

    extra = (k3(reference + q.log() - logps) - k3(reference - logps)) * mask
    if loss_type == "sapo":
        expected = 0.5 * (extra.sum(1) / mask.sum(1)).mean()
    else:
        of_window = batch["num_items_in_batch"] / guided.args.steps_per_generation
        expected = 0.5 * extra.sum() / of_window
    assert (with_guide - without).item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)
    with_guide.backward()
    without.backward()
    grads = [
        torch.cat([p.grad.flatten() for p in t.model.parameters() if p.grad is not None])
        for t in (guided, plain)
    ]
    assert not torch.allclose(*grads)
