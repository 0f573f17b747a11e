"""SageTrainer against stock TRL and a recomputation in float64."""

import numpy as np
import pytest
import torch
from trainer_cases import (
    DEFAULTS,
    both,
    gradient,
    larger,
    losses,
    make,
    one_batch,
    saved,
    trained,
    weights,
)

from sage_lib import paths
from sage_lib.algorithm.guides import (
    BranchGuide,
    CosineSchedule,
    GuideInputs,
    IdentityGuide,
    RandomGuide,
    TokenGuide,
)
from sage_lib.algorithm.kl_forms import SeparateKl, Shaped

__all__ = ["make", "saved"]  # the fixture; for test_safe_loading

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
)
@pytest.mark.parametrize("guide", [None, IdentityGuide()])
def test_no_guide_and_the_identity_guide_are_stock_trl_bit_for_bit(make, guide, loss_type):
    stock = trained(make(loss_type=loss_type))
    ours = trained(make(guide, loss_type=loss_type))
    assert losses(stock) == losses(ours)
    assert torch.equal(weights(stock), weights(ours))


@pytest.mark.parametrize("kl_form", ["default", "k3", "k3_corrected", "sequence", None])
@pytest.mark.parametrize("corrected", ["default", False])
def test_a_baseline_trains_the_kl_of_its_guided_run(make, kl_form, corrected):
    """With q = 1, whatever TRL's own setting: else a comparison is one of two estimators."""
    settings = {"beta": 0.5, "max_steps": 4, "use_bias_correction_kl": corrected, "change": larger}
    if kl_form != "default":
        settings["kl_form"] = kl_form
    baseline = trained(make(None, **settings))
    guided = trained(make(IdentityGuide(), **settings))
    assert losses(baseline) == losses(guided)
    assert torch.equal(weights(baseline), weights(guided))


def test_on_trls_defaults_its_own_form_is_stock_and_the_papers_is_not(make, caplog):
    stock = trained(make(**DEFAULTS))
    assert stock.args.use_bias_correction_kl, "TRL's default is the corrected KL"
    for guide in (None, IdentityGuide()):
        for kl_form in (None, "k3_corrected"):
            ours = trained(make(guide, kl_form=kl_form, **DEFAULTS))
            assert losses(stock) == losses(ours)
            assert torch.equal(weights(stock), weights(ours))
    assert not caplog.text
    for guide in (None, IdentityGuide()):
        ours = trained(make(guide, **DEFAULTS))
        assert "use_bias_correction_kl is set to False" in caplog.text
        assert not torch.equal(weights(stock), weights(ours)), "the paper's KL is not TRL's default"
        caplog.clear()


def test_arguments_of_the_caller_serve_a_second_trainer(make):
    """The first one trains k3; ``kl_form=None`` is the KL that they ask for all the same."""
    args = make(**DEFAULTS).args
    assert not make(None, args=args).args.use_bias_correction_kl
    assert make(None, args=args, kl_form=None).args.use_bias_correction_kl


@pytest.mark.parametrize(
    "given",
    [
        {"kl_form": "k3", "use_bias_correction_kl": True},
        {"kl_form": None},
        {"kl_form": "k3_corrected", "beta": 0.0},
    ],
)
def test_ratios_of_sequences_take_the_plain_kl(make, given):
    trained(make(None, importance_sampling_level="sequence", max_steps=1, **given))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_trl_makes_of_the_corrected_kl_at_each_level_of_ratios(make, level):
    """Why the pair is refused: with ratios of sequences its KL is that of no divergence. On-policy
    every ratio is 1, and carries a gradient: of its own token, or of the whole completion."""
    given = {"lora": False, "beta": 0.5, "use_bias_correction_kl": True}
    trainer, batch = one_batch(make(importance_sampling_level=level, **given))
    trainer._compute_loss(trainer.model, batch).backward()
    theirs, mask = gradient(trainer.model).clone(), batch["completion_mask"]
    trainer.model.zero_grad()
    logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, *both(batch))
    d, log_ratio = batch["ref_per_token_logps"] - logps, logps - logps.detach()
    whole = ((log_ratio * mask).sum(1) / mask.sum(1)).exp()[:, None]
    ratio = {"token": log_ratio.exp(), "sequence": whole.expand_as(mask)}
    expected = {}
    for name, of_kl in ratio.items():
        loss = -ratio[level] * batch["advantages"][:, None] + 0.5 * of_kl * (d.exp() - d - 1)
        trainer.model.zero_grad()
        ((loss * mask).sum(1) / mask.sum(1)).mean().backward(retain_graph=True)
        expected[name] = gradient(trainer.model).clone()
    other = {"token": "sequence", "sequence": "token"}[level]
    assert torch.allclose(theirs, expected[level], atol=1e-6)
    assert (theirs - expected[other]).abs().max() > 1e-4


def test_a_guide_changes_training(make):
    stock = trained(make())
    guided = trained(make(BranchGuide(threshold=0.5, ratio=0.3)))
    assert not torch.equal(weights(stock), weights(guided))
    first = guided.state.log_history[0]
    assert first["kl_ref"] < 1e-6 < first["kl"]
    assert first["guide/max"] <= 1.4 and 0 < first["guide/acting"] <= 1


class Noted(BranchGuide):
    """Branch, which notes what it was given and what it gave."""

    def __call__(self, inputs):
        q = super().__call__(inputs)
        self.calls = [*getattr(self, "calls", []), (inputs, q)]
        return q


def test_the_kl_weighted_by_q_is_that_of_a_recomputation_in_float64(make):
    """Also of a step with two batches, whose KL and q differ."""
    guide = Noted(threshold=0.5, ratio=0.3)
    settings = {"max_steps": 3, "change": larger, "gradient_accumulation_steps": 2}
    log = trained(make(guide, **settings)).state.log_history
    of_batches = []
    for inputs, q in guide.calls:
        mask = inputs.mask.bool()
        d = (inputs.ref_logps - inputs.logps)[mask].double().numpy()
        k3 = np.exp(d) - 1 - d
        of_batches.append([(q[mask].double().numpy() * k3).mean(), k3.mean()])
    of_steps = np.reshape(of_batches, (3, 2, 2)).mean(axis=1)
    for row, (weighted, plain) in zip(log[1:3], of_steps[1:], strict=True):
        assert row["guide/kl"] == pytest.approx(weighted, rel=1e-3)
        assert row["kl_ref"] == pytest.approx(plain, rel=1e-3)
        assert abs(weighted / plain - row["guide/mean"]) > 1e-3, "the weights matter"


def test_the_logged_metrics_of_a_guide_and_of_entropies_follow_from_what_it_was_given(make):
    guide = Noted(threshold=0.5, ratio=0.3)
    trainer = make(guide, max_steps=1)
    seen, log_entropies = [], trainer._log_entropies
    trainer._log_entropies = lambda *given: (seen.append(given), log_entropies(*given))
    row = trained(trainer).state.log_history[0]
    [(inputs, q)], [(batch, entropies)] = guide.calls, seen
    values = q[inputs.mask.bool()]
    ends = ((values <= 0.6) | (values >= 1.4)).double().mean().item()
    expected = {"mean": values.mean(), "min": values.min(), "max": values.max(), "clamped": ends}
    expected["acting"] = (values != 1).double().mean()
    for name, value in expected.items():
        assert row[f"guide/{name}"] == pytest.approx(float(value), rel=1e-5), name
    mask, signs = inputs.mask.bool(), batch["advantages"][:, None].expand_as(entropies)
    for name, side in (("positive", signs > 1e-3), ("negative", signs < -1e-3)):
        assert row[f"entropy/{name}"] == pytest.approx(entropies[mask & side].mean().item())
    assert row["entropy/positive"] != row["entropy/negative"]


def test_every_key_that_the_trainer_adds_to_the_log_is_explained(make):
    """The table of docs/own_code.md has it: by its name, or as `guide/mean`, `min`, `max`."""
    table = (paths.ROOT / "docs" / "own_code.md").read_text().partition("| key | meaning |")[2]
    advantage = {"name": "position", "gamma": 1.0}
    trained_one = trained(make(BranchGuide(threshold=0.5), advantage=advantage, max_steps=1))
    own = ("guide/", "entropy/", "advantage/", "sampling/", "kl")
    keys = [key for key in trained_one.state.log_history[0] if key.startswith(own)]
    assert {"kl", "kl_ref", "guide/mean", "advantage/size"} <= set(keys)
    for key in keys:
        room, _, name = key.rpartition("/")
        lines = [line for line in table.splitlines() if f"`{room}/" in line or not room]
        assert any(f"`{key}`" in line or f"`{name}`" in line for line in lines), key


#: kl_form, guide, loss_type, what else is set.
ONE_BATCH = [
    (None, None, "grpo", {}),
    ("k3", BranchGuide(threshold=1.0, ratio=0.2), "grpo", {}),
    ("k3", TokenGuide(), "grpo", {}),
    ("k3", RandomGuide(probability=CosineSchedule(0.5, 0.5)), "grpo", {}),
    ("k3_corrected", BranchGuide(threshold=1.0, ratio=0.2), "grpo", {}),
    ("sequence", BranchGuide(threshold=1.0, ratio=0.2), "grpo", {}),
    ("sequence", None, "bnpo", {}),
    ("sequence", BranchGuide(threshold=1.0, ratio=0.2), "dapo", {}),
    ("forward_kl", None, "grpo", {}),
    ("forward_kl", None, "bnpo", {}),
    ("forward_kl", None, "dapo", {}),
    ("forward_kl", None, "dr_grpo", {}),
    ("k3", BranchGuide(threshold=1.0, ratio=0.2), "bnpo", {}),
    ("k3", BranchGuide(threshold=1.0, ratio=0.2), "dapo", {"epsilon_high": 0.28}),
    (None, None, "bnpo", {"beta": 0.0}),
    ("k3", None, "grpo", {"entropy_coef": 0.1}),
    ("forward_kl", None, "grpo", {"temperature": 0.7}),
]


@pytest.mark.parametrize(("kl_form", "guide", "loss_type", "settings"), ONE_BATCH)
def test_loss_and_gradient_equal_a_recomputation_in_float64(
    make, tiny_model, kl_form, guide, loss_type, settings
):
    """One batch of each method, from the logits of another copy of the model, with the policy away
    from its reference."""
    from transformers import AutoModelForCausalLM

    made = make(guide, lora=False, kl_form=kl_form, loss_type=loss_type, **settings)
    trainer, batch = one_batch(made)
    beta, temperature = settings.get("beta", 0.05), settings.get("temperature", 1.0)
    before = {k: v.clone() for k, v in batch.items() if torch.is_tensor(v)}
    noise = trainer.guide_generator.get_state()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert all(torch.equal(before[k], batch[k]) for k in before), "the buffered batch is as it was"

    reference = AutoModelForCausalLM.from_pretrained(tiny_model).double()
    model = AutoModelForCausalLM.from_pretrained(tiny_model).double()
    model.load_state_dict({k: v.double() for k, v in trainer.model.state_dict().items()})
    ids, attention, width = both(batch)
    mask = batch["completion_mask"].double()

    def distributions(m):
        logits = m(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]
        return (logits / temperature).log_softmax(-1)

    log_pi, log_ref = distributions(model), distributions(reference).detach()
    drawn = batch["completion_ids"][..., None]
    logps, refs = log_pi.gather(-1, drawn)[..., 0], log_ref.gather(-1, drawn)[..., 0]
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    log_q = torch.zeros_like(mask)
    if guide is not None:
        generator = torch.Generator()
        generator.set_state(noise)
        inputs = GuideInputs(
            entropies=entropy.detach().float(),
            logps=logps.detach().float(),
            mask=batch["completion_mask"],
            progress=1 / 3,
            generator=generator,
            ids=batch["completion_ids"],
        )
        log_q = guide(inputs).double().log()
        assert (log_q[mask == 1] != 0).any(), "the guide acts"
    ratio = (logps - logps.detach()).exp()
    d = refs + log_q - logps
    advantages = batch["advantages"].double()[:, None]
    k3 = d.exp() - d - 1
    if kl_form == "sequence":  # return to go, by a plain loop
        later = torch.zeros_like(mask)
        for t in range(width):
            later[:, t] = ((-d).detach() * mask)[:, t:].sum(1)
        token = -ratio * (advantages - beta * later)
    else:
        divergence = {
            None: k3,
            "k3": k3,
            "k3_corrected": k3 * ratio,
            "forward_kl": (log_ref.exp() * (log_ref - log_pi)).sum(-1),
        }[kl_form]
        token = -ratio * advantages + beta * divergence
    expected = {
        "grpo": lambda x: ((x * mask).sum(1) / mask.sum(1)).mean(),
        "bnpo": lambda x: (x * mask).sum() / mask.sum(),
        "dapo": lambda x: (x * mask).sum() / mask.sum(),
        "dr_grpo": lambda x: (x * mask).sum() / (8 * 8),
    }[loss_type](token)
    expected = expected - settings.get("entropy_coef", 0.0) * (entropy * mask).sum() / mask.sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=2e-6)
    ours, theirs = gradient(trainer.model).double(), gradient(model)
    assert torch.allclose(ours, theirs, atol=2e-6, rtol=1e-4), (ours - theirs).abs().max()
    assert theirs.abs().max() > 1e-4, "there was something to compare"
    if beta:
        logged = trainer._metrics["train"]["kl"][-1]
        kl = (-d if kl_form == "sequence" else divergence).detach()
        assert logged == pytest.approx(((kl * mask).sum() / mask.sum()).item(), abs=1e-5)


def test_no_forward_pass_is_added(make):
    passes = []
    for guide, kl_form in (
        ("stock", None),
        (BranchGuide(threshold=0.5), "k3"),
        (TokenGuide(), "sequence"),
        (None, "forward_kl"),
    ):
        trainer, count = make(guide, kl_form=kl_form), []
        trainer.model.register_forward_hook(lambda *_, count=count: count.append(1))
        trainer.train()
        passes.append(len(count))
    assert len(set(passes)) == 1 and passes[0] > 0


def test_q_stays_fixed_while_a_batch_is_optimised_and_is_refreshed_after(make):
    seen = []

    def guide(inputs):
        seen.append(inputs.progress)
        return IdentityGuide()(inputs)

    make(guide, num_iterations=2, max_steps=4).train()
    assert seen == [0.0, 0.5], "4 updates over 2 batches: one q each"


def test_a_form_of_ones_own_reaches_the_loss(make):
    class K2(SeparateKl):
        """Half the squared log-ratio, differentiated as a loss."""

        name = "k2"

        def shape(self, tokens):
            half_square = (tokens.ref_logps - tokens.live_logps) ** 2 / 2
            return Shaped(tokens.logps, kl=half_square.detach(), extra_loss=half_square)

    trainer, batch = one_batch(make(None, lora=False, kl_form=K2(), loss_type="bnpo"))
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    mask = batch["completion_mask"]
    plain, same = one_batch(make("stock", lora=False, loss_type="bnpo", beta=0.0))
    logps, *_ = plain._get_per_token_logps_and_entropies(plain.model, *both(batch))
    assert torch.equal(same["completion_ids"], batch["completion_ids"])
    square = (batch["ref_per_token_logps"] - logps) ** 2 / 2
    kl = (square * mask).sum() / mask.sum()
    expected = plain._compute_loss(plain.model, same) + 0.05 * kl
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(gradient(trainer.model), gradient(plain.model), atol=1e-6)
    assert trainer._metrics["train"]["kl"][-1] == pytest.approx(kl.item(), abs=1e-6)


def test_metrics_of_a_batch_without_a_counted_token_are_left_out(make):
    """TRL masks completions that ended at the length limit."""
    settings = {"max_completion_length": 1, "mask_truncated_completions": True, "max_steps": 1}
    log = trained(make(BranchGuide(threshold=0.5), **settings)).state.log_history[0]
    assert not {"guide/min", "guide/max", "guide/mean", "kl_ref"} & log.keys()
    assert log["loss"] == 0


def test_a_guide_that_acts_on_nothing_is_told_of(make, caplog):
    trained(make(BranchGuide(threshold=50.0, ratio=0.3), max_steps=1))
    assert "the guide is 1 at every token of the first batch" in caplog.text
    assert "nats (50 %, 90 %, 99 %)" in caplog.text
    caplog.clear()
    for guide in (BranchGuide(threshold=0.5, ratio=0.3), IdentityGuide(), None):
        trained(make(guide, max_steps=1))
    assert "first batch" not in caplog.text


def test_a_reference_may_be_a_folder(make, tiny_model):
    from transformers import AutoModelForCausalLM

    settings = {"lora": False, "other_reference": True, "change": larger}
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    named, given = (trained(make(None, reference=r, **settings)) for r in (str(tiny_model), model))
    assert losses(named) == losses(given) and torch.equal(weights(named), weights(given))
