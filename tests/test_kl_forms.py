"""Anchors and their pieces against loops and closed forms; what the guide adds against notebook
03's exact trees."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sage_lib.algorithm import forward_kl, kl_forms
from sage_lib.algorithm.dynamic_sampling import groups_without_spread, replace_rows
from sage_lib.algorithm.guides import BranchGuide
from sage_lib.algorithm.kl_forms import KL_FORMS, Vocabulary
from sage_lib.errors import SageError
from sage_lib.evaluation import expected_gradients
from sage_lib.theory import estimators
from sage_lib.theory.tree import Tree

#: The attributes that forms of the KL read of a trainer, with values for which all forms work.
USABLE = {
    "beta": 0.05,
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "guide": None,
    "is_fsdp_enabled": False,
    "is_deepspeed_enabled": False,
    "shaped_at_scoring": False,
}
#: Those whose refusals are asserted one by one; another one brings a test of its own.
SHIPPED = ("k3", "k3_corrected", "sequence", "forward_kl")


def test_every_form_has_its_name_in_the_table_and_works_in_a_plain_setting():
    assert list(KL_FORMS)[:4] == list(SHIPPED)
    for name, form in KL_FORMS.items():
        assert form.name == name and list(form().requires(SimpleNamespace(**USABLE))) == []
        assert isinstance(kl_forms.build_kl_form(name), form)


@pytest.mark.parametrize(
    ("change", "refused", "reason"),
    [
        ({"shaped_at_scoring": True}, {"sequence", "forward_kl"}, "use plain TRL"),
        ({"beta": 0.0}, {"sequence", "forward_kl"}, "needs beta > 0"),
        ({"loss_type": "cispo"}, {"sequence", "forward_kl"}, "loss_type grpo, bnpo, dr_grpo, dapo"),
        ({"importance_sampling_level": "sequence"}, {"sequence"}, "to token"),
        ({"top_entropy_quantile": 0.5}, {"sequence"}, "quantile to 1"),
        ({"off_policy_mask_threshold": 0.5}, {"sequence"}, "threshold to None"),
        ({"guide": lambda inputs: inputs}, {"forward_kl"}, "no sampled token for a guide"),
        ({"is_fsdp_enabled": True}, {"forward_kl"}, "FSDP or ZeRO"),
    ],
)
def test_a_form_says_why_it_cannot_work(change, refused, reason):
    trainer = SimpleNamespace(**USABLE | change)
    reasons = {name: list(KL_FORMS[name]().requires(trainer)) for name in SHIPPED}
    assert {name for name, found in reasons.items() if found} == refused
    assert all(reason in reasons[name][0] for name in refused)


@pytest.mark.parametrize("name", ["k5", None, ["k3"]])
def test_an_unknown_form_is_refused_with_the_names_there_are(name):
    with pytest.raises(SageError, match="choose one of k3, k3_corrected, sequence, forward_kl"):
        kl_forms.build_kl_form(name)


def test_return_credit_is_minus_the_log_ratio_of_this_and_later_tokens():
    rng = torch.Generator().manual_seed(0)
    logps, reference, log_q = (torch.randn(3, 5, generator=rng) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    credit = kl_forms.return_credit(logps, reference, log_q, mask)
    ratio = (logps - reference - log_q) * mask
    for b in range(3):
        for t in range(5):
            later = sum(ratio[b, s].item() for s in range(t, 5))
            assert credit[b, t].item() == pytest.approx(-later, abs=1e-5)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("tokens_at_a_time", [1, 8, 100])
def test_exact_forward_kl_in_chunks_is_that_of_torch_distributions(
    monkeypatch, trained, tokens_at_a_time
):
    """With its gradients, where each token weighs something else."""
    monkeypatch.setattr(forward_kl, "PROCESSOR_CHUNK_LOGITS", 11 * tokens_at_a_time)
    head, reference_head = torch.nn.Linear(6, 11), torch.nn.Linear(6, 11)
    head.requires_grad_(trained)
    hidden, reference_hidden, weights = (
        torch.randn(5, 4, width, generator=torch.Generator().manual_seed(i))
        for i, width in enumerate((6, 6, 1))
    )
    hidden.requires_grad_()
    made = []
    heads = lambda h: made.append(h.shape[1]) or head(h), reference_head
    found = forward_kl.exact_forward_kl(Vocabulary(hidden, reference_hidden, *heads, 0.5, trained))
    pi = torch.distributions.Categorical(logits=head(hidden) / 0.5)
    ref = torch.distributions.Categorical(logits=reference_head(reference_hidden).detach() / 0.5)
    expected = torch.distributions.kl_divergence(ref, pi)
    torch.testing.assert_close(found, expected)
    wanted = [hidden, *head.parameters()] if trained else [hidden]
    theirs = torch.autograd.grad((expected * weights[..., 0]).sum(), wanted)
    ours = torch.autograd.grad((found * weights[..., 0]).sum(), wanted)
    torch.testing.assert_close(ours, theirs)
    assert max(made) == min(tokens_at_a_time, 20), "logits of a chunk at a time"
    assert sum(made) == 1 + 20 * (2 if trained else 1), "twice where the head is trained"


def identity_heads(logits, reference, temperature=1.0):
    v = Vocabulary(logits, reference, lambda h: h, torch.clone, temperature, False)
    return forward_kl.exact_forward_kl(v)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("scale", "apart", "moved"),
    [(1, 1e-3, 0), (1, 1, 0), (5, 0.1, 0), (10, 3, 0), (1, 0.1, 20), (1, 0, -20)],
)
def test_the_exact_forward_kl_and_its_gradient_are_those_of_double_precision(
    scale, apart, moved, temperature
):
    """Policies close and far, flat and peaked, and one whose logits all lie elsewhere: "moved"
    alone would cost 4e-5, and the sums of softmax over so many words 5e-6."""
    generator = torch.Generator().manual_seed(0)
    logits, noise = (torch.randn(1, 4, 150_000, generator=generator) for _ in range(2))
    reference = scale * logits + apart * noise
    logits = (scale * logits + moved).requires_grad_()
    found = identity_heads(logits, reference, temperature)
    double = logits.detach().double().requires_grad_()
    log_pi = (double / temperature).log_softmax(-1)
    log_ref = (reference.double() / temperature).log_softmax(-1)
    expected = (log_ref.exp() * (log_ref - log_pi)).sum(-1)
    assert found.min() > -1.1e-6, "a divergence"
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1.5e-6)
    (slopes,) = torch.autograd.grad(found.sum(), logits)
    (exact_slopes,) = torch.autograd.grad(expected.sum(), double)
    torch.testing.assert_close(slopes.double(), exact_slopes, rtol=1e-5, atol=2e-6)


def test_the_exact_forward_kl_of_half_precision_is_that_of_its_own_logits():
    """States and head in bfloat16, and the gradient with them."""
    head = torch.nn.Linear(6, 11, dtype=torch.bfloat16).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    hidden, reference = (
        torch.randn(2, 3, 6, generator=generator, dtype=torch.bfloat16) for _ in range(2)
    )
    hidden.requires_grad_()
    found = forward_kl.exact_forward_kl(Vocabulary(hidden, reference, head, head, 0.7, False))
    made = head(hidden)
    pi, ref = (
        torch.distributions.Categorical(logits=x.float() / 0.7) for x in (made, head(reference))
    )
    expected = torch.distributions.kl_divergence(ref, pi)
    torch.testing.assert_close(found, expected)
    (slopes,) = torch.autograd.grad(found.sum(), hidden)
    (theirs,) = torch.autograd.grad(expected.sum(), hidden)
    assert slopes.dtype == torch.bfloat16
    torch.testing.assert_close(slopes, theirs, rtol=2e-2, atol=1e-2)


def test_the_exact_forward_kl_to_a_policy_without_a_chance_of_a_word_is_infinite():
    logits, reference = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)
    logits[..., 2] = -torch.inf
    found = identity_heads(logits, reference)
    assert found.item() == torch.inf


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        ([[0.7]] * 8, True),  # their mean in float32 is not 0.7
        ([[0.1, 0.7], [0.7, 0.1], [0.3, 0.5], [0.8, 0.0]], True),  # sums that round apart
        ([[1e-4], [1e-4], [2e-4], [1e-4]], False),  # small, and spread
        ([[float("nan")]] * 4, True),  # no function scored any of them
        ([[float("nan")], [0.5], [float("nan")], [0.5]], True),
    ],
)
def test_a_group_is_flat_where_its_rewards_are_equal_up_to_rounding(rewards, flat):
    terms = torch.tensor(
        [*rewards, *[[1.0] * len(rewards[0])] * (len(rewards) - 1), [0.0] * len(rewards[0])]
    )
    assert groups_without_spread(terms, len(rewards)).tolist() == [flat, False]


def test_replaced_rows_come_whole_and_padded_on_their_side():
    batch = {
        "prompt_ids": torch.tensor([[0, 1], [2, 3]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[4, 5], [6, 0]]),
        "advantages": torch.tensor([0.0, 1.0]),
        "num_items_in_batch": torch.tensor(3),
    }
    fresh = {
        "prompt_ids": torch.tensor([[7, 8, 9]]),
        "prompt_mask": torch.ones(1, 3, dtype=torch.long),
        "completion_ids": torch.tensor([[7]]),
        "advantages": torch.tensor([2.0]),
    }
    merged = replace_rows(batch, [0], fresh, [0], pad_token=0)
    assert merged["prompt_ids"].tolist() == [[7, 8, 9], [0, 2, 3]]
    assert merged["prompt_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert merged["completion_ids"].tolist() == [[7, 0], [6, 0]]
    assert merged["advantages"].tolist() == [2.0, 1.0]
    assert batch["advantages"].tolist() == [0.0, 1.0], "the batch itself stays"
    # A shorter prompt, and a longer completion.
    merged = replace_rows(fresh, [0], batch, [1], pad_token=0)
    assert merged["prompt_ids"].tolist() == [[0, 2, 3]]
    assert merged["prompt_mask"].tolist() == [[0, 1, 1]]
    assert merged["completion_ids"].tolist() == [[6, 0]]


@pytest.mark.parametrize("kl_form", expected_gradients.WEIGHTS)
def test_token_weights_give_the_enumerated_gradients_of_the_trees(kl_form):
    """Every completion of a tree as a batch, weighted by its probability: the weights' gradient is
    estimators.kl_gradient."""
    tree = Tree.full(2, 3)
    rng = np.random.default_rng(3)
    logits, reference = (torch.as_tensor(rng.normal(size=len(tree.edges))) for _ in range(2))
    state_q = torch.as_tensor(rng.uniform(1, 1.4, len(tree.states)))
    log_pi, log_ref, log_q = (
        tree.log_policy(logits),
        tree.log_policy(reference),
        state_q.log()[tree.state_of],
    )
    expected = estimators.kl_gradient(tree, kl_form, logits, log_ref, log_q)
    free = logits.clone().requires_grad_()
    live, edges = tree.log_policy(free), {edge: i for i, edge in enumerate(tree.edges)}
    probability, total = tree.completion_probabilities(log_pi), 0.0
    for y, completion in enumerate(tree.completions):
        index = torch.tensor([[[edges[completion[:t], b] for b in "012"] for t in range(2)]])
        drawn = torch.tensor([[int(token) for token in completion]])
        state = log_q[index[..., 0]]
        taken = [x[index].gather(-1, drawn[..., None])[..., 0] for x in (log_pi, log_ref)]
        ratio = taken[0] - taken[1] - state
        later = ratio.flip(1).cumsum(1).flip(1) - ratio
        w = expected_gradients.weights(kl_form, log_pi[index], log_ref[index], state, later, drawn)
        total = total + probability[y] * (w * live[index]).sum()
    assert torch.allclose(torch.autograd.grad(total, free)[0], expected, atol=1e-10)


def test_pair_means_of_noise_are_zero_and_of_a_constant_its_square():
    rng = np.random.default_rng(0)
    noise = [expected_gradients.pair_mean(x, x) for x in rng.normal(size=(400, 6, 50))]
    assert abs(np.mean(noise)) < 4 * np.std(noise) / 20
    constant = np.tile(np.arange(3.0), (4, 1))
    assert expected_gradients.pair_mean(constant, constant) == pytest.approx(5.0)


def test_the_gradients_of_a_batch_on_a_network_are_those_of_the_kl_written_out(tiny_model):
    """What the guide adds, and what pulls without it, from autograd of each form's own formula."""
    ref_model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    expected_gradients._move(model, 3)
    out, start = torch.randint(0, 40, (5, 9), generator=torch.Generator().manual_seed(0)), 3
    mask = (torch.arange(6) < torch.tensor([[6], [4], [6], [2], [5]])).long()
    guide = BranchGuide(threshold=0.5, ratio=0.3)
    found, kl, acting = expected_gradients._batch(model, ref_model, guide, out, start, mask)
    log_pi = model(out).logits[:, start - 1 : -1].log_softmax(-1)
    log_ref = ref_model(out).logits[:, start - 1 : -1].log_softmax(-1).detach()
    pi, d = log_pi.detach().exp(), log_pi.detach() - log_ref
    q = (1 + 0.3 * (-(pi * log_pi.detach()).sum(-1) - 0.5).clamp(min=0)).clamp(max=1.4)
    assert kl == pytest.approx(((pi * d).sum(-1) * mask).sum().item() / mask.sum().item(), rel=1e-4)
    assert acting == pytest.approx((q[mask == 1] != 1).float().mean().item())
    at = out[:, start:, None]
    drawn, ratio = log_pi.gather(-1, at)[..., 0], d.gather(-1, at)[..., 0]

    def value(kl_form, q):
        """Of which the gradient is the form's, summed over the tokens."""
        if kl_form == "k3":  # a forward KL to q·pi_ref
            return -(q * (log_ref.exp() * log_pi).sum(-1) * mask).sum()
        reverse = ((log_pi.exp() * (log_pi - log_ref)).sum(-1) * mask).sum()
        if kl_form == "k3_corrected":
            return reverse
        whole = (ratio - q.log()) * mask
        later = whole.flip(1).cumsum(1).flip(1) - whole  # without the token's own
        return reverse + (later * drawn * mask).sum()

    parameters = list(model.parameters())
    for kl_form in expected_gradients.WEIGHTS:
        pull, guided = (
            torch.cat(
                [
                    part.flatten()
                    for part in torch.autograd.grad(
                        value(kl_form, x), parameters, retain_graph=True
                    )
                ]
            )
            / expected_gradients.COMPLETIONS
            for x in (torch.ones_like(q), q)
        )
        for part, expected in (("pull", pull), ("added", guided - pull)):
            np.testing.assert_allclose(found[kl_form, part], expected, atol=2e-6)
        assert (abs(found[kl_form, "added"]).max() > 1e-5) == (kl_form != "k3_corrected")
