"""The loss in the docstring of the trainer's module, against the trainer."""

import inspect
import textwrap

import pytest
import torch
from trainer_cases import make, one_batch, spread

from sage_lib.algorithm import token_probabilities as probs
from sage_lib.algorithm import trainer as trainer_module
from sage_lib.algorithm.guides import BranchGuide, GuideInputs, TokenGuide

__all__ = ["make"]
GROUP, OLD = 4, "old_per_token_logps"


def shown_lines():
    """The code in the module's docstring."""
    lines = inspect.getdoc(trainer_module).splitlines()
    start = next(n for n, line in enumerate(lines) if line.endswith("::")) + 1
    rest = lines[start:]
    end = next(n for n, line in enumerate(rest) if line and not line.startswith(" "))
    return textwrap.dedent("\n".join(rest[:end])).strip().splitlines()


def test_the_loss_is_shown_in_forty_lines():
    assert 20 <= len(shown_lines()) <= 40


GUIDES = {
    "branch": BranchGuide(threshold=0.5, ratio=0.4),
    "token": TokenGuide(scale={"high": 0.0, "low": 0.0}),  # its noise would need the same stream
}


@pytest.mark.parametrize("kl_form", ["k3", "sequence"])
@pytest.mark.parametrize("name", GUIDES)
def test_the_loss_that_is_shown_is_the_trainers(make, name, kl_form):
    """Value and gradient, at a policy that has left both its reference and the one that drew."""
    guide, scope = GUIDES[name], {"torch": torch}
    exec("\n".join(shown_lines()), scope)
    settings = {"lora": False, "num_iterations": 2, "beta": 0.3}
    trainer = make(guide, kl_form=kl_form, **settings)
    # Groups are together until TRL shuffles the batch for its steps.
    trainer, batch = one_batch(trainer, trainer._generate_and_score_completions)
    trainer.reached_loss = True  # the check of a run's first batch supposes ratios of 1
    ids, start = batch["completion_ids"], batch["prompt_ids"].shape[1]
    texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    whole = torch.cat([batch["prompt_ids"], ids], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    weights = list(trainer.model.parameters())
    logits = probs.completion_logits(trainer.model, whole, start, attention)
    ratio = probs.drawn_log_probabilities(logits.log_softmax(-1), ids) - batch[OLD]
    assert (ratio.exp() - 1).abs().max() > 0.2, "some ratios are clipped"

    def q(entropies, logps):
        inputs = GuideInputs(
            entropies=entropies,
            logps=logps,
            mask=batch["completion_mask"],
            progress=trainer.state.global_step / trainer.state.max_steps,
            generator=torch.Generator(),
            ids=ids,
        )
        return guide(inputs)

    shown = scope["sage_loss"](
        logits,
        {
            "ids": ids,
            "mask": batch["completion_mask"],
            "old_logps": batch[OLD],
            "ref_logps": batch["ref_per_token_logps"],
            "rewards": torch.tensor(spread([[{"content": t}] for t in texts])).view(-1, GROUP),
        },
        q,
        beta=trainer.beta,
        kl_form=kl_form,
    )
    expected = trainer._compute_loss(trainer.model, batch)
    torch.testing.assert_close(shown, expected, rtol=1e-4, atol=1e-6)
    gradients = (torch.autograd.grad(loss, weights) for loss in (shown, expected))
    ours, theirs = (torch.cat([g.flatten() for g in gradient]) for gradient in gradients)
    assert theirs.norm() > 0
    assert (ours - theirs).norm() < 1e-3 * theirs.norm()
