"""Samples: their distribution, and that batch, process and interruption change none of them."""

import copy
import dataclasses
import json
import os
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, GenerationConfig

from sage_lib.errors import SageError
from sage_lib.policy import loading, sampling, tiny_qwen
from sage_lib.policy.prefixes import prefix_engine
from sage_lib.policy.vllm_engine import vllm_engine
from sage_lib.tasks.problem import Problem

PROBLEMS = [
    Problem("a", "both", "reach 9 from 1 2 3 4", "9", "countdown"),
    Problem("b", "both", "reach 17 from 1 2", "17", "countdown"),
    Problem("c", "forward", "reach 5 from 4 4 4 1 2 9 9", "5", "countdown"),
]
WHOLE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
SETTINGS = WHOLE | {"max_new_tokens": 12, "samples": 10, "batch_size": 7, "seed": 11}


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model), tiny_qwen.load_tokenizer(tiny_model)


def settings(**changes):
    return SimpleNamespace(**(SETTINGS | changes))


def draw(model, path, chosen, problems=PROBLEMS, **more):
    engine = sampling.transformers_engine(*model, problems, chosen)
    sampling.sample(engine, model[1], problems, chosen, path, **more)


def drawn(model, path, chosen, problems=PROBLEMS, **more):
    draw(model, path, chosen, problems, **more)
    return sampling.collect([path], problems, chosen.samples)


def test_the_batch_changes_no_sample(model, tmp_path):
    """Prompts of different lengths, padded left, alone and together, in fp32."""
    together = drawn(model, tmp_path / "a", settings(batch_size=64))
    for size in (1, 7):
        assert drawn(model, tmp_path / f"by {size}", settings(batch_size=size)) == together
    texts = {text for row in together for text in row["completions"]}
    assert len(texts) > 20, "and they are samples, not one text"
    assert together != drawn(model, tmp_path / "d", settings(batch_size=64, seed=12))


def test_processes_share_the_work_and_draw_the_same(model, tmp_path):
    whole = drawn(model, tmp_path / "whole", settings())
    paths = [tmp_path / f"part{p}" for p in range(3)]
    for p, path in enumerate(paths):
        draw(model, path, settings(), process=p, processes=3)
    assert sampling.collect(paths, PROBLEMS, 10) == whole
    assert sum(len(path.read_text().splitlines()) for path in paths) == 30, "no sample twice"


def test_what_a_kill_left_is_kept_and_the_rest_is_drawn(model, tmp_path):
    whole = drawn(model, tmp_path / "whole", settings())
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    rest = random.Random(0).sample(lines, 11)
    (tmp_path / "part").write_text("".join(rest) + lines[0][:30])
    seen = []
    watch = {"progress": lambda done, total, rate: seen.append((done, total))}
    assert drawn(model, tmp_path / "part", settings(), **watch) == whole
    assert seen[0][0] > 11 and seen[-1] == (30, 30)
    assert len((tmp_path / "part").read_text().splitlines()) == 30


def test_a_sample_keeps_the_ids_that_were_drawn(model, tmp_path):
    """Also where its text hides one: decoding leaves special tokens out."""
    _, tokenizer = model
    pad, end, seven = tokenizer.pad_token_id, tokenizer.eos_token_id, 20
    three = [([seven, pad, seven], True), ([], True), ([seven], False)]
    engine = sampling.Engine(lambda batch: three, ("by hand",))
    sampling.sample(engine, tokenizer, PROBLEMS[:1], settings(samples=3), tmp_path / "s")
    (row,) = sampling.collect([tmp_path / "s"], PROBLEMS[:1], 3)
    assert row["ids"] == [[seven, pad, seven], [], [seven]] and row["tokens"] == [4, 1, 1]
    word = tokenizer.decode([seven])
    assert row["completions"] == [f"{word} {word}", "", word]
    assert row["finished"] == [True, True, False]
    new = torch.tensor([[seven, end, end, seven], [end] * 4, [seven] * 4])
    expected = [([seven], True), ([], True), ([seven] * 4, False)]
    assert sampling.until_end(new, [end, 1000]) == expected


def test_samples_follow_the_models_distribution(model):
    chosen = settings(temperature=2.0, top_p=0.9, min_p=0.2)
    uniform = torch.rand(4000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    scores = logits.expand(4000, -1)
    for warper in sampling.warpers(chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p):
        scores = warper(None, scores)
    picked = sampling.InverseTransform(uniform, 5)(torch.zeros(4000, 5), scores).argmax(-1)
    p = (logits[0].double() / 2).softmax(-1)  # by hand: nucleus, then min-p
    order = p.argsort(descending=True)
    inside = order[: int((p[order].cumsum(0) < 0.9).sum()) + 1]
    kept = torch.zeros_like(p)
    kept[inside] = p[inside]
    kept[kept < 0.2 * kept.max()] = 0
    assert 0 < (kept > 0).sum() < len(inside) < 30, "both cut"
    kept /= kept.sum()
    counts = torch.bincount(picked, minlength=30).double()
    assert (counts[kept == 0] == 0).all()
    assert chisquare(counts[kept > 0].numpy(), (4000 * kept[kept > 0]).numpy()).pvalue > 1e-4


def test_the_ends_of_the_uniform_interval_pick_tokens_that_are_possible():
    scores = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]] * 2)
    ends = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    picked = sampling.InverseTransform(ends, 3)(torch.zeros(2, 3), scores)
    assert picked.argmax(-1).tolist() == [1, 2]


def test_a_models_own_generation_settings_do_not_reach_rollouts(model):
    network, tokenizer = model
    chosen = WHOLE | {"temperature": 0.02, "max_completion_length": 12}
    # cold, since an untrained model hardly prefers any token and a penalty would change none
    plain, start, _ = sampling.rollouts(network, tokenizer, PROBLEMS[0], 8, chosen, seed=1)
    coldest = chosen | {"temperature": 1e-5}
    greedy, _, _ = sampling.rollouts(network, tokenizer, PROBLEMS[0], 8, coldest, seed=1)
    likeliest = network(greedy[:1, :start]).logits[0, -1].argmax()
    assert (greedy[:, start] == likeliest).all(), "at the temperature that is asked for"
    network.generation_config.repetition_penalty = 5.0
    try:
        assert sampling.rollouts(network, tokenizer, PROBLEMS[0], 8, chosen, seed=1)[0].equal(plain)
    finally:
        network.generation_config.repetition_penalty = None


def test_the_mask_of_rollouts_counts_the_end_token_and_nothing_after_it(model):
    network, tokenizer = model
    chosen = WHOLE | {"max_completion_length": 12}
    out, start, mask = sampling.rollouts(network, tokenizer, PROBLEMS[0], 64, chosen, seed=1)
    ended = 0
    for ids, counted in zip(out[:, start:].tolist(), mask.tolist(), strict=True):
        length = len(ids)
        if tokenizer.eos_token_id in ids:
            length = ids.index(tokenizer.eos_token_id) + 1
            ended += length < len(ids)
        assert counted == [1] * length + [0] * (len(ids) - length)
    assert 0 < ended < 64, "some end before the length limit"


def test_rows_of_another_configuration_are_named_and_not_mixed(model, tmp_path):
    row = {"dataset": "both", "problem": "a", "number": 0, "completion": "x", "ids": []}
    row |= {"tokens": 1, "finished": True, "made_from": "x"}
    for change, words in (
        ({"number": 10}, "bad holds sample 10 of both/a, drawn otherwise"),
        ({"problem": "z"}, "both/z, drawn otherwise"),
        ({"ids": None}, "sample 0 of both/a, drawn otherwise"),
        ({"made_from": None}, "sample 0 of both/a, drawn otherwise"),
    ):
        bad = {k: v for k, v in {**row, **change}.items() if v is not None}
        (tmp_path / "bad").write_text(json.dumps(bad) + "\n")
        with pytest.raises(SageError, match=words):
            drawn(model, tmp_path / "bad", settings())
    (tmp_path / "few").write_text(json.dumps(row) + "\n")
    with pytest.raises(SageError, match="1 of 10 samples"):
        sampling.collect([tmp_path / "few"], PROBLEMS, 10)


def test_samples_of_other_settings_are_refused_and_not_returned(model, tmp_path):
    """What a review found: after the temperature changed, the old samples came back."""
    draw(model, tmp_path / "s", settings())
    before = (tmp_path / "s").read_bytes()
    changes = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 12}
    for name, value in {**changes, "max_new_tokens": 11}.items():
        other = settings(**{name: value})
        with pytest.raises(SageError, match="of both/a, drawn otherwise"):
            draw(model, tmp_path / "s", other)
        with pytest.raises(SageError, match="drawn otherwise"):
            draw(model, tmp_path / "new", other, other_paths=[tmp_path / "s"])
    assert (tmp_path / "s").read_bytes() == before


def test_samples_of_other_weights_or_prompts_are_refused(model, tmp_path):
    network, tokenizer = model
    whole = drawn(model, tmp_path / "s", settings())
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight += 1e-3
    with pytest.raises(SageError, match="drawn otherwise"):
        draw((other, tokenizer), tmp_path / "s", settings())
    reworded = [dataclasses.replace(PROBLEMS[0], question="reach 9 from 1 2 4"), *PROBLEMS[1:]]
    with pytest.raises(SageError, match="of both/a, drawn otherwise"):
        draw(model, tmp_path / "s", settings(), reworded)
    same = copy.deepcopy(network)  # the very weights, another batch size, more samples: goes on
    assert drawn((same, tokenizer), tmp_path / "s", settings(batch_size=3)) == whole
    more = drawn(model, tmp_path / "s", settings(samples=12))
    assert [row["ids"][:10] for row in more] == [row["ids"] for row in whole]


def test_a_file_with_samples_of_two_makings_is_not_read_as_one(model, tmp_path):
    for name, chosen in (("a", settings()), ("b", settings(temperature=0.5))):
        draw(model, tmp_path / name, chosen)
    with pytest.raises(SageError, match="drawn otherwise"):
        sampling.collect([tmp_path / "a", tmp_path / "b"], PROBLEMS, 10)


class StandInForVllm:
    """vLLM itself needs a GPU: keeps what it was asked, answers with what transformers drew."""

    def __init__(self, samples, prompts, end):
        self.samples, self.prompts, self.end, self.asked = samples, prompts, end, []
        self.loaded, self.calls, self.adapters, self.ended = {}, [], [], 0
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.shut_down))

    def modules(self):
        module = SimpleNamespace(LLM=self.load, SamplingParams=lambda **keywords: keywords)
        request = SimpleNamespace(LoRARequest=lambda *given: given)
        return {"vllm": module, "vllm.lora": request, "vllm.lora.request": request}

    def load(self, **keywords):
        self.loaded, self.method = keywords, os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
        return self

    def shut_down(self):
        self.ended += 1

    def generate(self, requests, parameters, use_tqdm, lora_request):
        self.calls.append(len(requests))
        self.adapters.append(lora_request)
        return [self.answer(*pair) for pair in zip(requests, parameters, strict=True)]

    def answer(self, request, wanted):
        place, ids, finished = self.samples[wanted["seed"]]
        assert request == {"prompt_token_ids": self.prompts[place]}
        self.asked.append(wanted)
        reason = "stop" if finished else "length"
        token_ids = (*ids, self.end) if finished else tuple(ids)
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=token_ids, finish_reason=reason)])


@pytest.mark.parametrize("kept", ["whole", "adapter"])
def test_vllm_is_asked_for_the_same_prompts_and_settings_and_read_the_same_way(
    model, tmp_path, monkeypatch, kept
):
    """Everything at once, of a whole model, or of a base and the adapter that a run keeps."""
    _, tokenizer = model
    folder, base = tmp_path / "rl" / "model", tmp_path / "sft"
    folder.mkdir(parents=True)
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"a base")
    if kept == "adapter":
        config = {"r": 12, "base_model_name_or_path": "../../sft"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    end = tokenizer.eos_token_id
    whole = drawn(model, tmp_path / "whole", settings())
    samples = {}
    for place, (problem, row) in enumerate(zip(PROBLEMS, whole, strict=True)):
        for number in range(10):
            seed = sampling.sample_seed(11, problem, number)
            samples[seed] = place, row["ids"][number], row["finished"][number]
    prompts = [loading.encode(tokenizer, problem.question) for problem in PROBLEMS]
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "")  # what is set from here on is undone
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    stand_in = StandInForVllm(samples, prompts, end)
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    keywords = {"gpu_memory_utilization": 0.5}
    if kept == "whole":  # a setting that is ours, too; and a second end, at which it stops
        keywords["max_model_len"], stand_in.end = 99, 10_000
        GenerationConfig(eos_token_id=[end, 10_000]).save_pretrained(folder)
    chosen, path = settings(vllm=keywords), tmp_path / "vllm"
    engine = vllm_engine(folder, tokenizer, PROBLEMS, chosen)
    sampling.sample(engine, tokenizer, PROBLEMS, chosen, path)
    assert sampling.collect([path], PROBLEMS, 10) == whole
    assert stand_in.calls == [30], "all requests are in flight, not batches of 7"
    longest = max(map(len, prompts)) + 12
    loaded = {"model": str(folder), "max_model_len": longest, **keywords}
    adapter = None
    if kept == "adapter":  # rank 12, in the kernels of 16
        loaded |= {"model": str(base), "enable_lora": True, "max_lora_rank": 16}
        adapter = ("policy", 1, str(folder))
        before = engine.made_from
        (base / "model.safetensors").write_bytes(b"another base")
        assert vllm_engine(folder, tokenizer, PROBLEMS, chosen).made_from != before
    assert stand_in.loaded == loaded and stand_in.adapters == [adapter]
    assert stand_in.method == "spawn", "an engine forked from this process would have no GPU"
    engine.close()
    assert stand_in.ended == 1
    assert len({wanted["seed"] for wanted in stand_in.asked}) == 30
    wanted = {"temperature": 1.0, "top_k": -1, "max_tokens": 12, "stop_token_ids": [end]}
    assert wanted.items() <= stand_in.asked[0].items()


def test_prefixes_read_once_draw_the_same(model, tmp_path):
    """Also with truncations, and with prompts and samples that end at different lengths."""
    for more in ({}, {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1}):
        chosen = settings(batch_size=64, samples=40, **more)
        engine = prefix_engine(*model, PROBLEMS, chosen)
        path = tmp_path / f"prefixes{len(more)}"
        sampling.sample(engine, model[1], PROBLEMS, chosen, path)
        found = sampling.collect([path], PROBLEMS, chosen.samples)
        assert found == drawn(model, tmp_path / f"each{len(more)}", chosen)


def test_a_tokenizer_without_padding_draws_and_ends_the_same(model, tmp_path):
    policy, tokenizer = model
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    assert bare.pad_token_id is None and loading.pad_id(bare) == bare.eos_token_id
    rows = [
        drawn(one, tmp_path / name, settings())
        for one, name in ((model, "a"), ((policy, bare), "b"))
    ]
    for key in ("completions", "ids", "finished"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]]


def test_the_end_that_was_drawn_is_appended_where_it_is_known(model):
    policy, tokenizer = model
    row = {"ids": [[5, 6], [7]], "finished": [True, False]}
    end = tokenizer.eos_token_id
    assert sampling.with_end(row, policy, tokenizer) == [[5, 6, end], [7]]
    several = copy.deepcopy(policy)
    several.generation_config.eos_token_id = [end, 9]
    assert sampling.with_end(row, several, tokenizer) == [[5, 6], [7]]


@pytest.mark.parametrize("engine", [sampling.transformers_engine, prefix_engine])
def test_logits_that_are_not_finite_are_said(model, engine):
    policy, tokenizer = model
    damaged = copy.deepcopy(policy)
    damaged.get_output_embeddings().weight.data[0, 0] = float("inf")
    with pytest.raises(SageError, match="logits that are not finite"):
        engine(damaged, tokenizer, PROBLEMS, settings()).draw([(0, 0)])
