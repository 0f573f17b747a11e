"""What guides would do, from samples: against the exact log rho of random trees, and bad input."""

import argparse
import functools
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import ttest_1samp
from test_sample_files import write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from sage_lib.algorithm import guide_choices
from sage_lib.algorithm.guides import BranchGuide, IdentityGuide
from sage_lib.errors import SageError
from sage_lib.evaluation import sample_files, sampled_gain
from sage_lib.evaluation.sample_texts import Sample
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import load_profile
from sage_lib.files import read_json, write_json
from sage_lib.pipeline import cli, guide_gain
from sage_lib.policy import loading
from sage_lib.tasks import prompts
from sage_lib.theory import optimum
from sage_lib.theory.tree import random_tree

GUIDE = BranchGuide(threshold=0.4, ratio=0.5)


def drawn_from(seed, number):
    """Samples of a random tree, as :func:`scored_samples` gives them, and its exact log rho."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, depth=4, branches=3)
    log_policy = tree.log_policy(torch.tensor(rng.normal(size=len(tree.edges))))
    reference = tree.completion_probabilities(log_policy)
    right = torch.tensor(rng.permutation(np.arange(len(reference)) % 2), dtype=torch.float64)
    of_edge = dict(zip(tree.edges, log_policy.tolist(), strict=True))
    of_state = dict(zip(tree.states, tree.entropies(log_policy).tolist(), strict=True))
    q_t = (1 + 0.5 * (tree.entropies(log_policy) - 0.4).clamp(min=0)).clamp(max=1.4)
    exact = optimum.log_rho(reference, right, tree.along_paths(q_t[tree.state_of].log()).exp())
    rows = []
    for place in rng.choice(len(reference), size=number, p=(reference / reference.sum()).numpy()):
        tokens = tree.completions[place]
        states = [tokens[:t] for t in range(len(tokens))]
        pairs = zip(states, tokens, strict=True)
        logps = np.array([of_edge[pair] for pair in pairs])
        entropies = np.array([of_state[s] for s in states])
        rows.append((str(seed), float(right[place]), entropies, logps, range(len(tokens))))
    return pd.DataFrame(rows, columns=["problem", "right", "entropies", "logps", "ids"]), exact


def test_shifted_data_sets_are_left_out(monkeypatch):
    """What draws, judges and loads is stubbed: which problems are scored is asked."""
    profile = load_profile("smoke")
    asked = problems.sampled_problems(profile)
    shifted = {p.dataset for p in problems.sampled_problems(profile, ood=True)}
    kept = [f"{p.dataset}/{p.id}" for p in asked if p.dataset not in shifted]
    assert shifted and kept and len(kept) < len(asked)

    def count_correct(sampled, rows, verifier, boxed):
        for row in rows:
            row["correct"] = [True]

    def signals(model, base, prompt, bodies, pad, branching):
        ones = [np.ones(len(body)) for body in bodies]
        return [SimpleNamespace(entropy=one, base_log_pi=-one) for one in ones]

    tokenizer = SimpleNamespace(eos_token_id=0, pad_token_id=0)
    rows = [{"ids": [[5, 6]], "finished": [True], "completions": ["text"]} for _ in asked]
    monkeypatch.setattr(sampled_gain, "collect", lambda *_: rows)
    monkeypatch.setattr(sampled_gain, "count_correct", count_correct)
    monkeypatch.setattr(sampled_gain, "signals", signals)
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=0))
    monkeypatch.setattr(sampled_gain.loading, "load", lambda *_: (model, tokenizer))
    monkeypatch.setattr(sampled_gain.loading, "encode", lambda *_: [1])
    evaluation = runs.evaluation_run(runs.sft_run(profile))
    found = sampled_gain.scored_samples(profile, evaluation)
    assert list(found["problem"]) == kept and set(found["right"]) == {1.0}
    assert all(len(one) == 3 for one in found["entropies"]), "the end token is scored as well"


def test_log_rho_from_samples_is_that_of_the_trees():
    parts, exact = zip(*(drawn_from(seed, 1500) for seed in range(12)), strict=True)
    never = parts[0].assign(problem="never solved", right=0.0)
    drawn = pd.concat([never, *parts], ignore_index=True)
    found = sampled_gain.apply_guides(drawn, {"branch": GUIDE, "one": IdentityGuide()})
    by_hand = [np.log(np.clip(1 + 0.5 * (H - 0.4), 1, 1.4)) for H in drawn["entropies"]]
    assert np.allclose(found["branch"], [logs.sum() for logs in by_hand])
    assert list(found["branch acted"]) == [(logs > 0).sum() for logs in by_hand]
    branch, one = sampled_gain.gain_table(found, beta=0.5, precision=0.1).to_dict("records")
    assert branch["acted"] == pytest.approx((np.concatenate(by_hand) > 0).mean()), "of all tokens"
    assert branch["log rho"] == pytest.approx(np.mean(exact), abs=0.02)
    assert branch["low"] < np.mean(exact) < branch["high"] and branch["problems"] == 12
    assert branch["helps"] == pytest.approx(np.mean(np.array(exact) > 0), abs=0.1)
    assert branch["of the reward"] == pytest.approx(0.5 * branch["log rho"])
    p = drawn.groupby("problem", sort=False)["right"].mean().to_numpy()
    rho = optimum.guide_gain(drawn["right"], found["branch"], list(drawn["problem"]))["log_rho"]
    added = optimum.success(p, 0.5, rho) - optimum.success(p, 0.5)
    assert branch["pass@1"] == pytest.approx(np.nanmean(added))
    half = (branch["high"] - branch["low"]) / 2
    assert branch["needed"] == pytest.approx(len(drawn) * (half / 0.1) ** 2, abs=1)
    assert one["log rho"] == one["acted"] == one["pass@1"] == 0


def test_the_bias_of_few_right_samples_is_that_of_shuffled_labels():
    rng = np.random.default_rng(0)
    problem = np.repeat(np.arange(400), 16)
    right = (np.tile(np.arange(16), 400) == 0).astype(float)  # one of 16, whatever its q
    found = pd.DataFrame({"problem": problem, "right": right, "tokens": 9, "noise acted": 9})
    found["noise"] = rng.normal(scale=0.8, size=len(found))
    [row] = sampled_gain.gain_table(found, beta=0.2).to_dict("records")
    assert row["high"] < 0  # log rho is truly 0
    # E log q of one sample less log E q: the mean of a lognormal is exp(0.8^2 / 2).
    assert row["if shuffled"] == pytest.approx(-(0.8**2) / 2, abs=0.05)
    assert row["low"] < row["if shuffled"] < row["high"]
    few = sampled_gain.gain_table(found[: 5 * 16], beta=0.2).iloc[0]
    gains = optimum.guide_gain(found["right"][:80], found["noise"][:80], list(problem[:80]))
    interval = ttest_1samp(gains["log_rho"], 0.0).confidence_interval()
    assert [few["low"], few["high"]] == pytest.approx(list(interval))


def test_problems_that_are_always_or_never_solved_tell_nothing():
    drawn, _ = drawn_from(0, 50)
    with pytest.raises(SageError, match="1 problems have right and wrong samples"):
        sampled_gain.gain_table(sampled_gain.apply_guides(drawn, {"branch": GUIDE}), beta=1.0)
    with pytest.raises(SageError, match="beta must be positive"):
        sampled_gain.gain_table(sampled_gain.apply_guides(drawn, {"branch": GUIDE}), beta=0.0)


def test_guides_take_their_thresholds_from_the_samples():
    drawn, _ = drawn_from(1, 400)
    found = sampled_gain.candidate_guides(drawn)
    tokens = np.concatenate(drawn["entropies"].tolist())
    for name, shares in sampled_gain.QUANTILES.items():
        if name in found:
            low, high = np.quantile(tokens, shares)
            q = sampled_gain.q_of(found[name], [low, high], [-1.0, -1.0], torch.Generator(), [0, 0])
            assert q == pytest.approx([1.0, 1.4])


def options_of(*words):
    """What the command reads of its words."""
    parser = argparse.ArgumentParser()
    guide_gain.add_arguments(parser)
    return parser.parse_args(words)


def test_a_model_and_a_file_of_ones_own_make_a_profile(tmp_path):
    (tmp_path / "asked.csv").write_text("problem,gold\n1+1?,2\n")
    columns = ("--question", "problem", "--gold", "gold", "--out", str(tmp_path / "out"))

    def profile_of(model="some/model", data=str(tmp_path / "asked.csv")):
        words = ["--model", model, *(["--data", data] if data else []), *columns]
        return load_profile(guide_gain.of_model(options_of(*words)))

    profile = profile_of()
    assert profile.model.name == "some/model" and not profile.methods and not profile.rl
    assert [run.name for run in runs.every_run(profile)] == ["sft", "eval-sft"]
    assert profile.evaluation.data[0].task.gold == "gold"
    assert profile_of(model="b/c").name != profile.name, "two commands would share a folder"
    for data, reason in ((None, "give --data FILE"), ("nowhere.csv", "there is no such file")):
        with pytest.raises(SageError, match=reason):
            profile_of(data=data)
    for model in ("./nothere", "nothere"):
        with pytest.raises(SageError, match=f"no folder '{re.escape(model)}' with a model"):
            profile_of(model=model)


def test_samples_of_other_weights_are_not_kept(tiny_model, tmp_path):
    """What a reader found: after a model's folder had changed, its old samples were taken."""
    model, base, adapter = (tmp_path / name for name in ("model", "base", "adapter"))
    for folder in (model, base):
        shutil.copytree(tiny_model, folder)
    adapter.mkdir()
    write_json(adapter / "adapter_config.json", {"base_model_name_or_path": str(base)})
    save_file({"lora_A": torch.zeros(2)}, adapter / "adapter_model.safetensors")
    data = tmp_path / "asked.csv"
    data.write_text("question,answer\n1+1?,2\n")

    def fingerprints(folder):
        words = ("--model", str(folder), "--data", str(data), "--out", str(tmp_path / "out"))
        profile = load_profile(guide_gain.of_model(options_of(*words)))
        return [run.fingerprint for run in runs.every_run(profile)]

    def change(file):
        tensors = load_file(file)
        name = min(tensors)
        save_file(tensors | {name: tensors[name] + 1}, file, {"format": "pt"})

    for folder, changed in (
        (model, model / "model.safetensors"),
        (adapter, adapter / "adapter_model.safetensors"),
        (adapter, base / "model.safetensors"),
    ):
        before = fingerprints(folder)
        (folder / "README.md").write_text("other words")
        changed.touch()
        assert fingerprints(folder) == before, "made from the same"
        change(changed)
        after = fingerprints(folder)
        assert len(after) == 2 and not set(before) & set(after)
    settings = read_json(model / "config.json")
    before = fingerprints(model)
    write_json(model / "config.json", {**settings, "rms_norm_eps": 0.5})
    assert not set(before) & set(fingerprints(model))


def refused(words):
    """The sentence by which the command refuses its words."""
    with pytest.raises(SystemExit) as error:
        cli.main(["guide-gain", *words])
    return str(error.value)


def test_options_that_cannot_work_are_refused_before_anything_is_drawn(tmp_path):
    (tmp_path / "t.txt").write_text("no place")
    (tmp_path / "config.json").write_text("{}")
    file = str(tmp_path / "t.txt")
    for words, sentence in (
        (["--beta", "0"], "beta must be positive"),
        (["--profile", "smoke+train=[grpo]+rl.beta=0"], "without a KL term"),
        (["--data", "mine.jsonl"], "--data goes with --model"),
        (["--samples", "mine.jsonl"], "--samples FILE go with --model"),
        (["--template", "model"], "go with --model"),
        (["--data", file, "--model", str(tmp_path.parent)], "no config.json, so it holds no model"),
        (["--data", file, "--model", str(tmp_path), "--template", file], "file with {question}"),
        (["--judge", "nowhere:judge"], "is code that it runs"),
        (["--guide", "nowhere:Guide"], "is code that it runs"),
        (["--guide", "{name: random, hihg: 1}"], "hihg"),
        (["--guide", "{name: branch"], "--guide {name: branch: "),
        (["--out", file], "is a file: name a folder"),
        (["--problems", "0"], "evaluation.sampled: input should be greater than 0, not 0"),
    ):
        assert sentence in refused(words)


MODULE = """
import torch

def judge(gold, text):
    return gold in text.split()

class Pairs:
    def __init__(self, share=0.5):
        self.share = share

    def __call__(self, inputs):
        return torch.where(inputs.ids % 2 == 0, 1 + self.share, 1.0)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mine_of_gain.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SAGE_TRUST", "mine_of_gain:judge,mine_of_gain:Pairs")


def trl_file(folder, verdicts):
    """TRL's completions of two prompts, four of each."""
    prompts = ["3 + 4 =", "5 - 2 ="] * 4
    table = {"step": [1] * 8, "prompt": prompts, "completion": [f"{n} , 1" for n in range(8)]}
    table |= {"accuracy": verdicts, "advantage": [0.0] * 8}
    pd.DataFrame(table).to_parquet(folder / "completions_1.parquet")
    return str(folder / "completions_1.parquet")


def test_samples_of_a_file_are_scored_by_the_model(tiny_model, tmp_path, module, capsys):
    """log q of a guide of the ids against the ids of a second tokenisation, and log rho by hand."""
    file = trl_file(tmp_path, [1.0, 0, 0, 1, 0, 1, 1, 0])
    words = ["--model", str(tiny_model), "--samples", file, "--out", str(tmp_path / "out")]
    words += ["--guide", "{name: mine_of_gain:Pairs, share: 1.0}"]
    cli.main(["guide-gain", *words])
    printed = capsys.readouterr().out
    assert "TRL's completions, 8 samples, 0 unreadable lines" in printed
    assert "predicted training on ten bases with kl_form sequence, and not with k3" in printed
    assert "six seeds each" in printed
    table = pd.read_csv(tmp_path / "out" / "guide_gain.csv").set_index("guide")
    assert table.loc["Branch, 1.2 nats", ["threshold", "ratio"]].tolist() == [1.2, 0.3]
    assert table.loc["Random", ["threshold", "ratio"]].isna().all()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = [tokenizer(f"{n} , 1")["input_ids"] for n in range(8)]
    q = np.array([2.0 ** sum(token % 2 == 0 for token in of) for of in ids])
    right = np.array([1, 0, 0, 1, 0, 1, 1, 0])
    rho = [
        np.log(q[p::2][right[p::2] == 1].mean() / q[p::2][right[p::2] == 0].mean()) for p in (0, 1)
    ]
    assert len(set(q)) > 1
    mine = table.loc["{name: mine_of_gain:Pairs, share: 1.0}"]
    assert mine["log rho"] == pytest.approx(np.mean(rho), abs=1e-5)
    acted = np.mean([token % 2 == 0 for of in ids for token in of])
    assert mine["acted"] == pytest.approx(acted, abs=1e-5)


def test_entropies_of_texts_are_those_of_the_whole_conversation(tiny_model, tmp_path):
    """One forward pass of transformers over prompt and completion is the second source."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    texts = [Sample("a", "3 + 4 =", text, "", True) for text in ("7", "7 , 1 , 2")]
    scored = sampled_gain.score_texts(str(tiny_model), texts)
    turns = [{"role": "user", "content": "3 + 4 ="}]
    told = sampled_gain.score_texts(str(tiny_model), [texts[0]._replace(prompt=turns)])
    start = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    alone = tokenizer("3 + 4 =")["input_ids"]
    for prompt, row in ((alone, scored.iloc[1]), (start, told.iloc[0])):
        ids = tokenizer(row["completion"])["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        log_p = logits.double().log_softmax(-1)
        assert row["ids"] == ids
        assert np.allclose(row["entropies"], -(log_p.exp() * log_p).sum(-1), atol=1e-5)
        assert np.allclose(row["logps"], log_p[range(len(ids)), ids], atol=1e-5)
    short = short_model(tiny_model, tmp_path)
    with pytest.raises(SageError, match="the model reads 64: leave this problem out"):
        sampled_gain.score_texts(short, [texts[0]._replace(completion="1 " * 200)])


def short_model(model, folder, room=64):
    shutil.copytree(model, folder / "short")
    settings = read_json(folder / "short" / "config.json")
    write_json(folder / "short" / "config.json", {**settings, "max_position_embeddings": room})
    return str(folder / "short")


def test_an_empty_completion_has_no_token_to_guide():
    guide = guide_choices.build_guide("token")
    assert sampled_gain.q_of(guide, [], [], torch.Generator(), []).shape == (0,)


def test_what_would_fail_after_sampling_is_refused_before_it(tiny_model, tmp_path):
    words = ["--model", str(tiny_model), "--samples", trl_file(tmp_path, [1.0, 0] * 4)]
    for inner in ("{name: reward}", "likeliest"):
        guide = f"{{name: shuffled, inner: {inner}}}"
        assert "reads the rewards of training" in refused([*words, "--guide", guide])
    assert "--precision must be positive, not 0.0" in refused([*words, "--precision", "0"])
    assert "a number, or files" in refused([*words[:2], "--samples", "8", words[3]])


def test_the_base_is_sampled_as_it_is_whatever_the_profile_evaluates():
    colder = "smoke+evaluation.temperature=0.3+evaluation.min_p=0.01"
    evaluation = guide_gain.profile_of(options_of("--profile", colder), None).evaluation
    read = {name: getattr(evaluation, name) for name in guide_gain.UNCHANGED}
    assert read == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert guide_gain.profile_of(options_of(), None).spec == "smoke", "its samples are kept"


def test_where_nothing_is_right_a_sample_is_shown_and_all_are_kept(tiny_model, tmp_path, capsys):
    file = trl_file(tmp_path, [0.0] * 8)
    out = tmp_path / "out"
    words = ["--model", str(tiny_model), "--samples", file, "--out", str(out)]
    assert "0 problems have right and wrong samples" in refused(words)
    assert len(pd.read_parquet(out / "samples.parquet")) == 8
    printed = capsys.readouterr().out
    assert "No sample is right. The first one:" in printed
    assert "prompt: 3 + 4 =" in printed and "completion: 0 , 1" in printed


def test_a_judge_reads_gold_and_text_in_the_place_of_the_files_verdicts(tmp_path, module):
    rows = [{"prompt": "q", "completion": text, "answer": 7} for text in ("so 7", "17")]
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(SageError, match="line 1 has no correct"):
        sample_files.read_sample_file(path, gold="answer")
    judge = functools.partial(guide_gain._judged, "mine_of_gain:judge")
    samples = sample_files.read_sample_file(path, gold="answer", judge=judge).samples
    assert [sample.is_correct for sample in samples] == [True, False]
    assert samples[0][1:4] == ("q", "so 7", "7")


def test_tokens_that_leave_no_room_are_refused(tiny_model, tmp_path):
    (tmp_path / "asked.csv").write_text("question,answer\n3 + 4,7\n")
    (tmp_path / "template.txt").write_text("Q: {question}")
    words = ["--model", short_model(tiny_model, tmp_path), "--data", str(tmp_path / "asked.csv")]
    words += ["--tokens", "62", "--out", str(tmp_path / "out")]
    sentence = refused([*words, "--template", str(tmp_path / "template.txt")])
    assert "--tokens 62 leaves no room: the longest prompt has" in sentence
    assert "both have 64" in sentence


def test_a_template_takes_the_place_of_the_papers_prompt(tiny_model):
    def prompt(template):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.chat_template = (
            "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        )
        loading.with_prompt(tokenizer, template)
        turns = prompts.messages("3 + 4")
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    assert prompt("paper").startswith(prompts.SYSTEM_PROMPT)
    assert prompt("system") == f"[system]{prompts.SYSTEM_PROMPT}[user]3 + 4"
    assert prompt("model") == "[user]3 + 4"
    assert prompt('Say "x"\n{question}\nA: ') == 'Say "x"\n3 + 4\nA: '
    assert prompt("\U0001f600 }} {question}") == "\U0001f600 }} 3 + 4"
    with pytest.raises(SageError, match=r"has no \{question\}"):
        prompt("nothing")
