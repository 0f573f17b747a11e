"""Rewards of guides, dynamic sampling, merged adapters and trimmed padding in SageTrainer."""

import math

import pytest
import torch
from trainer_cases import (
    LORA,
    completions,
    drawn,
    larger,
    losses,
    make,
    named,
    one_batch,
    row_alone,
    trained,
    weights,
)

from sage_lib.algorithm import padding
from sage_lib.algorithm.guides import BranchGuide, RewardGuide, ShuffledGuide, TokenGuide, compose

__all__ = ["make"]  # the fixture

#: Ways to compute less.
FEWER = ("trim_padding", "share_prompts")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("around", "resampled"), [(lambda guide: guide, 0), (ShuffledGuide, 0), (compose, 2)]
)
def test_a_guide_reads_the_rewards_of_its_own_rows_in_whatever_order(make, around, resampled):
    """Two updates a batch, before which TRL shuffles. The reward follows from the first token: 0,
    half of 1, or none."""

    def told(token):
        return None if token % 3 == 0 else float(token % 2)

    asked, seen = [], []

    def by_first_token(completion_ids, **_):
        asked.extend(completion_ids)
        return [told(ids[0]) for ids in completion_ids]

    def spy(inputs):
        seen.append((inputs, RewardGuide(power=0.9, high=9.0)(inputs)))
        return seen[-1][1]

    settings = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 4}
    settings |= {"reward": [by_first_token], "reward_weights": [0.5]}
    make(around(spy), dynamic_sampling=resampled, **settings).train()
    ids = torch.cat([x.ids for x, _ in seen])
    assert ids[:, 0].tolist() != [row[0] for row in asked[: len(ids)]], "in another order"
    for (x, q), rows in zip(seen, ids.split(4), strict=True):
        rewards = [told(token) for token in rows[:, 0].tolist()]
        expected = [math.nan if one is None else one / 2 for one in rewards]
        assert x.rewards.tolist() == pytest.approx(expected, nan_ok=True)
        for i, reward in enumerate(rewards):
            flat = (x.reference[i] * -0.1).exp() if reward == 0 else torch.ones(8)
            torch.testing.assert_close(q[i], flat.where(x.mask[i] == 1, 1.0))
    (first, _), *_, (last, _) = seen
    torch.testing.assert_close(first.reference, first.logps)
    assert not torch.allclose(last.reference, last.logps), "it is the policy that starts"


def test_a_guide_reads_its_group_s_likeliest_right_completion_and_the_guide_model(make, tiny_model):
    """Two updates a batch, before which TRL shuffles; the guide model is another one."""
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    prompts, seen = {}, []

    def by_first_token(prompts, completion_ids, **_):
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            drawn_for[tuple(ids)] = str(prompt)
        return [float(ids[0] % 2) for ids in completion_ids]

    drawn_for = prompts
    settings = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 2}

    def spy(inputs):
        seen.append(inputs)
        return torch.ones_like(inputs.logps)

    trainer = make(spy, guide_model=other, reward=[by_first_token], **settings)
    trainer.train()
    rows, best = [], {}
    for x in seen:
        for i in range(len(x.ids)):
            n = int(x.mask[i].sum())
            prompt = drawn_for[tuple(x.ids[i, :n].tolist())]
            logp = float(x.ref_logps[i, :n].sum())
            rows.append((prompt, float(x.best_logps[i])))
            if x.rewards[i] > 0:
                best[prompt] = max(best.get(prompt, -math.inf), logp)
    for prompt, value in rows:
        assert value == pytest.approx(best.get(prompt, -math.inf), abs=1e-5)
    assert any(value > -math.inf for _, value in rows)
    x = seen[0]
    assert not torch.allclose(x.guide_logps, x.ref_logps, atol=1e-3)
    batch = drawn(trainer)
    ids, n = row_alone(batch, 0)
    with torch.no_grad():
        log_pi = other(ids[None]).logits[0, -n - 1 : -1].log_softmax(-1)
    expected = log_pi.gather(-1, ids[-n:, None])[:, 0]
    trainer._log_q(batch, batch["ref_per_token_logps"], batch["ref_per_token_logps"])
    torch.testing.assert_close(seen[-1].guide_logps[0, :n], expected, atol=1e-4, rtol=1e-4)


def test_dynamic_sampling_leaves_no_group_without_a_spread_and_keeps_rows_whole(make):
    trainer = make(
        None,
        dynamic_sampling=8,
        reward=lambda completions, **_: [float("L" in c[0]["content"]) for c in completions],
        beta=0.05,
    )
    plain = make(None, reward=trainer.reward_funcs[0], beta=0.05)
    first, batch = drawn(plain), drawn(trainer)
    flat = first["advantages"].view(2, 4).abs().amax(1) < 1e-6
    assert flat.any(), "there was something to replace"
    assert (batch["advantages"].view(2, 4).abs().amax(1) > 0).all()
    assert trainer._metrics["train"]["sampling/flat"] == [0.0]
    texts, before = completions(trainer, batch), completions(trainer, first)
    for i in range(8):
        assert flat[i // 4] or texts[i] == before[i], "groups with a spread stay"
    # Every row is still one prompt with its completion: the reference scores it the same alone.
    for i in range(8):
        ids, n = row_alone(batch, i)
        with torch.no_grad():
            log_pi = trainer.model(ids[None]).logits[0, -n - 1 : -1].log_softmax(-1)
        logps = log_pi.gather(-1, ids[-n:, None])[:, 0]
        assert torch.allclose(logps, batch["ref_per_token_logps"][i, :n], atol=1e-4)


def test_dynamic_sampling_takes_the_fresh_groups_that_have_a_spread_and_counts_their_tokens(make):
    """One fresh batch replaces the first group by its second one: in either batch the first has
    equal rewards. The number of tokens is what loss_type dapo divides by."""
    asked, posed = [], []

    def second_group_alone(prompts, completion_ids, **_):
        asked.append(completion_ids)
        posed.append(prompts[::4])
        return [float(i >= 4 and i % 2 == 0) for i in range(8)]

    trainer = make(None, dynamic_sampling=1, reward=second_group_alone, max_completion_length=32)
    stream = torch.Generator()
    stream.set_state(trainer.prompt_generator.get_state())
    batch = drawn(trainer)
    first, fresh = asked
    places = torch.randint(8, (2,), generator=stream).tolist()
    assert posed[1] == [trainer.train_dataset[i]["prompt"] for i in places], "of its own stream"
    rows = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    assert [ids[counted == 1].tolist() for ids, counted in rows] == fresh[4:] + first[4:]
    assert trainer._metrics["train"]["sampling/flat"] == [0.0]
    tokens = int(batch["completion_mask"].sum())
    assert tokens != sum(map(len, first)), "the count has changed"
    assert batch["num_items_in_batch"] == tokens


def test_dynamic_sampling_replaces_groups_of_equal_rewards_that_float32_cannot_average(make):
    """Eight rewards of 0.7: TRL's advantages are 6e-4 and not 0."""
    trainer = make(
        None,
        dynamic_sampling=2,
        num_generations=8,
        reward=lambda completions, **_: [0.7 for _ in completions],
    )
    batch = drawn(trainer)
    assert batch["advantages"].abs().max() > 1e-5, "what TRL makes of such a group"
    logged = trainer._metrics["train"]
    assert logged["sampling/rounds"] == [3.0] and logged["sampling/flat"] == [1.0]
    assert "reward_terms" not in batch, "TRL's batch is handed on as it was"


@pytest.mark.parametrize("settings", [{"beta": 0.0}, {"beta": 1.0}])
def test_a_merged_adapter_learns_the_same(make, settings):
    guide = BranchGuide(threshold=0.5, ratio=0.3) if settings["beta"] else None
    plain = trained(make(guide, lora=LORA, **settings))
    merged = trained(make(guide, lora=LORA, merge_adapter=True, **settings))
    assert losses(merged) == pytest.approx(losses(plain), rel=1e-4, abs=1e-6)
    assert torch.allclose(weights(merged), weights(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("again", "half", "in_loss"),
    [(None, False, False), ("the settings", False, True), (None, True, True)],
)
def test_a_merged_adapter_is_in_place_in_every_pass_that_allows_it(
    make, monkeypatch, again, half, in_loss
):
    """While completions are drawn, while the reference is scored, and in the loss: not where layers
    would run again without it, nor where half precision would round most of it away."""
    settings = {"max_steps": 2, "gradient_checkpointing": again == "the settings"}
    trainer = make(None, lora=LORA, merge_adapter=True, **settings)
    if half:  # which Unsloth takes back on a processor that does not have it
        kind = type(trainer.accelerator)
        monkeypatch.setattr(kind, "mixed_precision", property(lambda self: "bf16"))
    seen = set()
    model = trainer.model
    model.get_base_model().get_decoder().register_forward_hook(
        lambda *_: seen.add((torch.is_grad_enabled(), any("lora_A" in n for n in named(model))))
    )
    trainer.train()
    assert {adapted for graded, adapted in seen if graded} == {in_loss}
    assert (False, False) in seen, "none is left while completions are drawn"
    assert ((False, True) in seen) == half, "the reference is scored likewise"


@pytest.mark.parametrize(
    "settings",
    [
        {"guide": BranchGuide(threshold=0.5, ratio=0.3), "beta": 1.0},
        {"guide": None, "beta": 0.0, "num_iterations": 2},
        {"guide": None, "advantage": {"name": "perplexity", "alpha": 0.01}},
        # Adam would divide a gradient of nearly 0 by itself, rounding and all.
        {
            **{"guide": TokenGuide(), "lora": False, "loss_type": "dapo", "temperature": 0.7},
            **{"optim": "sgd", "learning_rate": 0.1},
        },
    ],
)
@pytest.mark.parametrize("fewer", [("trim_padding",), ("share_prompts",), FEWER])
def test_the_same_is_learnt_from_fewer_columns(make, monkeypatch, settings, fewer):
    guide, others = settings["guide"], {k: v for k, v in settings.items() if k != "guide"}
    # Rows of this size are worth a pass each, and end where their end token is drawn.
    monkeypatch.setattr(padding, "WORTH", 0.0)
    columns, runs = {False: 0, True: 0}, []
    for chosen in (False, True):
        asked = dict.fromkeys(fewer, chosen)
        trainer = make(guide, max_completion_length=24, **asked, **others)

        def count(module, inputs, output, chosen=chosen):
            columns[chosen] += inputs[0].numel() * torch.is_grad_enabled()

        trainer.model.get_input_embeddings().register_forward_hook(count)
        runs.append(trained(trainer))
    plain, short = runs
    assert columns[True] < 0.95 * columns[False]
    assert losses(short) == pytest.approx(losses(plain), rel=1e-4, abs=1e-6)
    assert torch.allclose(weights(short), weights(plain), rtol=1e-4, atol=1e-6)


def test_the_policys_own_signals_are_those_at_the_sampling_temperature(make):
    trainer, batch = one_batch(make(None, lora=False, temperature=0.7, change=larger))
    logps, entropies = trainer._policy_signals(batch)
    with torch.no_grad():
        for i in range(8):
            ids, n = row_alone(batch, i)
            logits = trainer.model(ids[None]).logits[0, -n - 1 : -1]
            law = torch.distributions.Categorical(logits=logits / 0.7)
            torch.testing.assert_close(logps[i, :n], law.log_prob(ids[-n:]), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(entropies[i, :n], law.entropy(), atol=1e-4, rtol=1e-4)
