"""Samples: their distribution, and that batch, process and interruption change none of them."""

import dataclasses
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from sage_lib.errors import SageError
from sage_lib.experiment.problems import Item
from sage_lib.experiment.profile import load_profile
from sage_lib.policy import loading, sampling, tiny_qwen

ITEMS = [
    Item("a", "both", "reach 9 from 1 2 3 4", "9"),
    Item("b", "both", "reach 17 from 1 2", "17"),
    Item("c", "forward", "reach 5 from 4 4 4 1 2 9 9", "5"),
]


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model), tiny_qwen.load_tokenizer(tiny_model)


def settings(**changes):
    return dataclasses.replace(
        load_profile("smoke").evaluation,
        **{"samples": 10, "max_new_tokens": 12, "batch_size": 7} | changes,
    )


def draw(model, path, chosen, **more):
    sampling.sample(
        sampling.transformers_engine(*model, ITEMS, chosen), model[1], ITEMS, chosen, path, **more
    )


def drawn(model, path, chosen, **more):
    draw(model, path, chosen, **more)
    return sampling.collect([path], ITEMS, chosen.samples)


def test_the_batch_changes_no_sample(model, tmp_path):
    """Prompts of different lengths, padded left, alone and together, in fp32."""
    together = drawn(model, tmp_path / "a", settings(batch_size=64))
    assert (
        together
        == drawn(model, tmp_path / "b", settings(batch_size=1))
        == drawn(model, tmp_path / "c", settings(batch_size=7))
    )
    assert len({text for row in together for text in row["completions"]}) > 20, (
        "and they are samples, not one text"
    )
    assert together != drawn(model, tmp_path / "d", settings(batch_size=64, seed=12))


def test_processes_share_the_work_and_draw_the_same(model, tmp_path):
    whole = drawn(model, tmp_path / "whole", settings())
    paths = [tmp_path / f"part{p}" for p in range(3)]
    for p, path in enumerate(paths):
        draw(model, path, settings(), process=p, processes=3)
    assert sampling.collect(paths, ITEMS, 10) == whole
    assert sum(len(path.read_text().splitlines()) for path in paths) == 30, "no sample twice"


def test_what_a_kill_left_is_kept_and_the_rest_is_drawn(model, tmp_path):
    whole = drawn(model, tmp_path / "whole", settings())
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    rest = random.Random(0).sample(lines, 11)
    (tmp_path / "part").write_text("".join(rest) + lines[0][:30])
    seen = []
    assert (
        drawn(
            model,
            tmp_path / "part",
            settings(),
            progress=lambda done, total, rate: seen.append((done, total)),
        )
        == whole
    )
    assert seen[0][0] > 11 and seen[-1] == (30, 30)
    assert len((tmp_path / "part").read_text().splitlines()) == 30


def test_samples_follow_the_models_distribution(model, tmp_path):
    network, tokenizer = model
    chosen = settings(
        samples=4000, max_new_tokens=1, batch_size=4000, temperature=0.7, top_p=0.9, min_p=0.05
    )
    uniform = torch.rand(4000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = 3 * torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    scores = logits.expand(4000, -1)
    for warper in sampling.warpers(chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p):
        scores = warper(None, scores)
    picked = sampling.InverseTransform(uniform, 5)(torch.zeros(4000, 5), scores).argmax(-1)
    p = (logits[0].double() / 0.7).softmax(-1)  # by hand: nucleus, then min-p
    order = p.argsort(descending=True)
    inside = order[: int((p[order].cumsum(0) < 0.9).sum()) + 1]
    kept = torch.zeros_like(p)
    kept[inside] = p[inside]
    kept[kept < 0.05 * kept.max()] = 0
    kept /= kept.sum()
    counts = torch.bincount(picked, minlength=30).double()
    assert (counts[kept == 0] == 0).all()
    assert chisquare(counts[kept > 0].numpy(), (4000 * kept[kept > 0]).numpy()).pvalue > 1e-4


def test_the_ends_of_the_uniform_interval_pick_tokens_that_are_possible():
    scores = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]] * 2)
    picked = sampling.InverseTransform(torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64), 3)(
        torch.zeros(2, 3), scores
    ).argmax(-1)
    assert picked.tolist() == [1, 2]


def test_a_models_own_generation_settings_do_not_reach_rollouts(model):
    network, tokenizer = model
    chosen = {
        "temperature": 0.02,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "max_completion_length": 12,
    }
    # cold, since an untrained model hardly prefers any token and a penalty would change none
    plain, _, _ = sampling.rollouts(network, tokenizer, ITEMS[0], 8, chosen, seed=1)
    network.generation_config.repetition_penalty = 5.0
    try:
        assert sampling.rollouts(network, tokenizer, ITEMS[0], 8, chosen, seed=1)[0].equal(plain)
    finally:
        network.generation_config.repetition_penalty = None


def test_rows_of_another_configuration_are_named_and_not_mixed(model, tmp_path):
    row = {
        "dataset": "both",
        "problem": "a",
        "number": 0,
        "completion": "x",
        "tokens": 1,
        "finished": True,
    }
    for change, words in (
        ({"number": 10}, "sample 10 of both/a, which these settings do not ask for"),
        ({"problem": "z"}, "both/z, which these settings"),
        ({"number": None}, "without 'number'"),
    ):
        bad = {k: v for k, v in {**row, **change}.items() if v is not None}
        (tmp_path / "bad").write_text(json.dumps(bad) + "\n")
        with pytest.raises(SageError, match=words):
            drawn(model, tmp_path / "bad", settings())
    (tmp_path / "few").write_text(json.dumps(row) + "\n")
    with pytest.raises(SageError, match="1 of 10 samples"):
        sampling.collect([tmp_path / "few"], ITEMS, 10)


def test_vllm_is_asked_for_the_same_prompts_and_settings_and_read_the_same_way(
    model, tmp_path, monkeypatch
):
    """vLLM itself needs a GPU: a stand-in keeps what it was asked and answers with what transformers draws."""
    network, tokenizer = model
    chosen = settings(engine="vllm", vllm={"gpu_memory_utilization": 0.5}, top_k=0)
    whole, asked = drawn(model, tmp_path / "whole", settings()), []
    by_seed = {
        sampling.sample_seed(chosen.seed, item, n): (
            item,
            row["completions"][n],
            row["finished"][n],
        )
        for item, row in zip(ITEMS, whole, strict=True)
        for n in range(10)
    }

    class LLM:
        def __init__(self, **keywords):
            assert keywords == {"model": "folder", "gpu_memory_utilization": 0.5}

        def generate(self, requests, parameters, use_tqdm):
            outputs = []
            for request, wanted in zip(requests, parameters, strict=True):
                item, text, finished = by_seed[wanted["seed"]]
                assert request == {"prompt_token_ids": loading.encode(tokenizer, item.question)}
                asked.append(wanted)
                ids = (
                    tokenizer(text, add_special_tokens=False)["input_ids"]
                    + [tokenizer.eos_token_id] * finished
                )
                outputs.append(
                    SimpleNamespace(
                        outputs=[
                            SimpleNamespace(
                                token_ids=ids, finish_reason="stop" if finished else "length"
                            )
                        ]
                    )
                )
            return outputs

    monkeypatch.setitem(
        sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=lambda **keywords: keywords)
    )
    sampling.sample(
        sampling.vllm_engine(Path("folder"), tokenizer, ITEMS, chosen),
        tokenizer,
        ITEMS,
        chosen,
        tmp_path / "vllm",
    )
    found = sampling.collect([tmp_path / "vllm"], ITEMS, 10)
    assert [(r["completions"], r["finished"]) for r in found] == [
        (r["completions"], r["finished"]) for r in whole
    ]
    one = asked[0]
    assert (one["temperature"], one["top_k"], one["max_tokens"], one["stop_token_ids"]) == (
        chosen.temperature,
        -1,
        12,
        [tokenizer.eos_token_id],
    ) and len({a["seed"] for a in asked}) == 30


def test_without_vllm_its_engine_says_so(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SageError, match="the package vllm is missing"):
        sampling.vllm_engine(Path("folder"), model[1], ITEMS, settings(engine="vllm"))
