"""The impact of a token: rigged judges whose answer is known, and the exact expectation where one
token is left to draw."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sage_lib.evaluation import exploration, groups, guide_traces
from sage_lib.evaluation.exploration import (
    DrawnCompletion,
    impact,
    perplexity_groups,
    replaced_positions,
)
from sage_lib.policy import loading, tiny_qwen
from sage_lib.tasks.problem import Problem

SETTINGS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_completion_length": 6}


@pytest.fixture(scope="module")
def parts(tiny_model):
    """Model, tokenizer, prompt and completion, as ``impact`` takes them."""
    tokenizer = tiny_qwen.load_tokenizer(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    prompt = loading.encode(tokenizer, "reach 9 from 1 2 3 4")
    return model, tokenizer, prompt, tokenizer("L 1 + 2 = 3", add_special_tokens=False)["input_ids"]


def starts_with(start):
    return lambda texts: [text.startswith(start) for text in texts]


def test_a_judge_that_wants_the_original_token_gives_one_and_one_of_the_prefix_nothing(parts):
    _, tokenizer, _, completion = parts
    start = tokenizer.decode(completion[:4])
    assert impact(*parts, 3, 5, SETTINGS, 0, starts_with(start)) == (1.0, 0.0)
    before = tokenizer.decode(completion[:3])
    assert impact(*parts, 3, 5, SETTINGS, 0, starts_with(before)) == (1.0, 1.0)


def test_the_replacement_is_the_most_likely_other_token(parts):
    model, tokenizer, prompt, completion = parts
    texts = []
    impact(*parts, 2, 2, SETTINGS, 0, lambda t: texts.append(t) or [True] * len(t))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion[:2]])).logits[0, -1]
    logits[completion[2]] = -torch.inf
    replaced = tokenizer.decode([*completion[:2], int(logits.argmax())])
    kept = tokenizer.decode(completion[:3])
    assert all(text.startswith(kept) for text in texts[0])
    assert all(text.startswith(replaced) for text in texts[1])


def test_it_estimates_the_exact_probability_where_one_token_is_left(parts):
    model, tokenizer, prompt, completion = parts
    with torch.no_grad():
        after = model(torch.tensor([prompt + completion[:5]])).logits[0, -1].softmax(-1)
    wanted, count = int(after.argmax()), 4000

    def judged(texts):
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return [one[-1:] == [wanted] and len(one) == 6 for one in ids]

    kept, _ = impact(*parts, 4, count, SETTINGS, 1, judged)
    exact = float(after[wanted])
    assert abs(kept - exact) < 4 * (exact * (1 - exact) / count) ** 0.5


def test_the_replaced_tokens_are_the_most_uncertain_ones_of_their_part():
    entropy = [0.1, 0.4, 0.0, 0.9, 0.2, 0.3, 0.0, 0.0, 0.2, 0.1]
    last = SimpleNamespace(randrange=lambda count: count - 1)
    expected = {"most uncertain": 3, "early": 1, "late": 8, "random": 9}
    assert replaced_positions(entropy, last) == expected
    assert set(replaced_positions([0.5], last).values()) == {0}


def test_a_group_has_one_completion_of_a_problem_the_most_extreme():
    def drawn(problem, number, perplexity):
        one = Problem(problem, "d", "q", "1", "countdown")
        return DrawnCompletion(one, number, [], [1], [0.0], perplexity, True)

    every = [drawn(f"p{i}", n, 1 + i + n / 10) for i in range(5) for n in range(4)]
    groups = perplexity_groups(every, 1)
    assert [one.name for one in groups["low"]] == ["p0/0"]
    assert [one.name for one in groups["high"]] == ["p4/3"]
    # a fifth of 20 completions are the four of one problem
    assert [one.name for one in perplexity_groups(every, 9)["high"]] == ["p4/3"]


@pytest.fixture
def group_of_two(parts):
    """What draws, and two completions of which the second ends after three tokens; at the sampling
    temperature 0.7, and with a policy that is another model than the base of ``parts``."""
    base, tokenizer, prompt, completion = parts
    policy = AutoModelForCausalLM.from_pretrained(base.config.name_or_path).eval()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.5)
    out = torch.tensor([[*prompt, *completion]] * 2)
    mask = torch.ones(2, len(completion), dtype=torch.bool)
    mask[1, 3:] = False
    drawn = groups.Group(out, len(prompt), mask, ["", ""], [True, False])
    profile = SimpleNamespace(rl={"temperature": 0.7, "min_p": 0.3})
    return SimpleNamespace(profile=profile, model=policy, tokenizer=tokenizer), drawn


def law(model, drawn):
    """log pi before each token of the first completion, by one pass: (time, vocabulary)."""
    return (model(drawn.out[:1]).logits[0, drawn.start - 1 : -1] / 0.7).log_softmax(-1)


@torch.no_grad()
def test_a_trace_has_both_policies_of_the_drawn_token_and_what_min_p_leaves(parts, group_of_two):
    base, (drawer, drawn) = parts[0], group_of_two
    logps, ref_logps, entropies, masses = guide_traces._signals(drawer, base, drawn)
    pi = law(drawer.model, drawn).exp()
    by_hand = zip((logps, ref_logps), (pi.log(), law(base, drawn)), strict=True)
    for found, log_pi in by_hand:
        expected = log_pi.gather(-1, drawn.drawn[0, :, None])[:, 0]
        torch.testing.assert_close(found, expected.expand(2, -1), rtol=1e-4, atol=1e-5)
    expected = torch.distributions.Categorical(probs=pi).entropy()
    torch.testing.assert_close(entropies, expected.expand(2, -1), rtol=1e-4, atol=1e-5)
    kept = [sum(p for p in row.tolist() if p >= 0.3 * max(row.tolist())) for row in pi]
    assert max(kept) < 0.99, "min-p cuts"
    assert masses.tolist() == pytest.approx(kept + kept[:3], rel=1e-4), "of counted tokens alone"


@torch.no_grad()
def test_entropies_of_the_base_are_those_before_counted_tokens(group_of_two, tmp_path, monkeypatch):
    drawer, drawn = group_of_two
    settings = {"rl": {"temperature": 0.7, "seed": 3}, "evaluation": SimpleNamespace(traced=1)}
    run = SimpleNamespace(policy=None, measured=tmp_path, finish=dict)
    base = SimpleNamespace(model=None, name="sft")
    asked = [Problem("p", "d", "q", "1", "countdown")] * 2
    run.begin = lambda seed, sizes: {}
    monkeypatch.setattr(guide_traces.runs, "finished", lambda *_: base)
    monkeypatch.setattr(guide_traces.loading, "load", lambda *_: (drawer.model, None))
    monkeypatch.setattr(guide_traces.problems, "rl_problems", lambda _: asked)
    drawing = drawn.out, drawn.start, drawn.mask.long()
    monkeypatch.setattr(guide_traces, "rollouts", lambda *_: drawing)
    guide_traces.measure_entropies(SimpleNamespace(model=None, **settings), run)
    found = json.loads((tmp_path / "entropy.json").read_text())
    nats = torch.distributions.Categorical(logits=law(drawer.model, drawn)).entropy().tolist()
    assert found["tokens"] == len(nats) + 3
    assert found["mean"] == pytest.approx(np.mean(nats + nats[:3]), rel=1e-4)


def test_a_replay_reads_a_batch_before_and_after_its_update(parts, group_of_two):
    """The second completion's advantage is rounding; its three tokens are thirds of it."""
    from sage_lib.training import replay

    base, (drawer, drawn) = parts[0], group_of_two
    trainer = replay.Watched.__new__(replay.Watched)
    vars(trainer).update(model=base, temperature=0.7, _tokenizer=drawer.tokenizer)
    prompts, ids = drawn.out[:, : drawn.start], drawn.drawn
    batch = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts)}
    batch |= {"completion_ids": ids, "completion_mask": drawn.mask.long()}
    batch |= {"advantages": torch.tensor([1.0, 5e-4])}
    trainer._batches = [(batch, trainer._signals(batch))]
    trainer.model = drawer.model
    groups = trainer.moves()
    table = groups.set_index(["by", "sign", "group"])
    first = table.loc["all", "positive", "all"]
    with torch.no_grad():
        before, after = law(base, drawn), law(drawer.model, drawn)
    nats = [-(x.exp() * x).sum(-1).mean().item() for x in (before, after)]
    assert first[["before", "after"]].tolist() == pytest.approx(nats, rel=1e-4)
    of_drawn = [x.gather(-1, ids[0, :, None]).exp() for x in (before, after)]
    rise = (of_drawn[1] - of_drawn[0]).mean().item()
    assert first["rise"] == pytest.approx(rise, rel=1e-3)
    assert table.loc["position", "even"]["tokens"].to_dict() == {"1": 1, "4": 1, "7": 1}
    updates = [{"step": n, "groups": groups.to_dict("records")} for n in (1, 10, 11, 12)]
    blocks = replay.in_blocks(updates).query("by == 'all'").groupby("step")["tokens"].sum()
    assert blocks.to_dict() == dict.fromkeys((10, 12), 2 * (len(ids[0]) + 3)), "to the last update"


def test_before_is_what_the_base_reads_and_after_what_the_policy_reads(parts, group_of_two):
    base, _, prompt, completion = parts
    drawer, drawn = group_of_two
    out = drawn.out
    with torch.no_grad():
        table = exploration._tokens(drawer, base, drawn, 4)
        for name, model in (("before", base), ("after", drawer.model)):
            log_pi = law(model, drawn)
            entropies = -(log_pi.exp() * log_pi).sum(-1)
            of_first = table[table["completion"] == 4]
            assert of_first[name].tolist() == pytest.approx(entropies.tolist(), rel=1e-4)
            p = log_pi.gather(-1, out[0, len(prompt) :, None])[:, 0].exp()
            assert of_first[f"p_{name}"].tolist() == pytest.approx(p.tolist(), rel=1e-4)
    assert (table["before"] - table["after"]).abs().max() > 1e-3
    assert table.groupby("completion").size().to_dict() == {4: len(completion), 5: 3}
    assert table.groupby("completion")["sign"].first().to_dict() == {4: "positive", 5: "negative"}
