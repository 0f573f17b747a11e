"""What guides would do, from samples: against the exact log rho of random trees, and bad input."""

import argparse
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_lib.algorithm.guides import BranchGuide, IdentityGuide
from sage_lib.errors import SageError
from sage_lib.evaluation import sampled_gain
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import load_profile
from sage_lib.files import read_json, write_json
from sage_lib.pipeline import guide_gain
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
        rows.append(
            (str(seed), float(right[place]), np.array([of_state[s] for s in states]), logps)
        )
    return pd.DataFrame(rows, columns=["problem", "right", "entropies", "logps"]), exact


def test_shifted_data_sets_are_left_out(monkeypatch):
    """What draws, judges and loads is stubbed: which problems are scored is asked."""
    profile = load_profile("smoke")
    asked = problems.sampled_problems(profile)
    shifted = {p.dataset for p in problems.sampled_problems(profile, ood=True)}
    kept = [f"{p.dataset}/{p.id}" for p in asked if p.dataset not in shifted]
    assert shifted and kept and len(kept) < len(asked)

    def count_correct(sampled, rows, verifier):
        for row in rows:
            row["correct"] = [True]

    def signals(model, base, prompt, bodies, pad, branching):
        return [
            SimpleNamespace(entropy=np.ones(len(one)), base_log_pi=-np.ones(len(one)))
            for one in bodies
        ]

    tokenizer = SimpleNamespace(eos_token_id=0, pad_token_id=0)
    rows = [{"ids": [[5, 6]], "finished": [True]} for _ in asked]
    monkeypatch.setattr(sampled_gain, "collect", lambda *_: rows)
    monkeypatch.setattr(sampled_gain, "count_correct", count_correct)
    monkeypatch.setattr(sampled_gain, "signals", signals)
    monkeypatch.setattr(sampled_gain.loading, "load", lambda *_: (None, tokenizer))
    monkeypatch.setattr(sampled_gain.loading, "encode", lambda *_: [1])
    found = sampled_gain.scored_samples(
        profile, runs.evaluation_run(profile, runs.sft_run(profile))
    )
    assert list(found["problem"]) == kept and set(found["right"]) == {1.0}
    assert all(len(one) == 3 for one in found["entropies"]), "the end token is scored as well"


def test_log_rho_from_samples_is_that_of_the_trees():
    parts, exact = zip(*(drawn_from(seed, 1500) for seed in range(12)), strict=True)
    drawn = pd.concat(parts, ignore_index=True)
    found = sampled_gain.apply_guides(drawn, {"branch": GUIDE, "one": IdentityGuide()})
    by_hand = [
        np.log(np.clip(1 + 0.5 * np.clip(H - 0.4, 0, None), 0.6, 1.4)) for H in drawn["entropies"]
    ]
    assert np.allclose(found["branch"], [logs.sum() for logs in by_hand])
    assert list(found["branch acted"]) == [(logs > 0).sum() for logs in by_hand]
    table = sampled_gain.gain_table(found, beta=0.5, precision=0.1)
    branch, one = table.to_dict("records")
    assert branch["log rho"] == pytest.approx(np.mean(exact), abs=0.02)
    assert branch["low"] < np.mean(exact) < branch["high"] and branch["problems"] == 12
    assert branch["helps"] == pytest.approx(np.mean(np.array(exact) > 0), abs=0.1)
    assert branch["of the reward"] == pytest.approx(0.5 * branch["log rho"])
    p = drawn.groupby("problem", sort=False)["right"].mean().to_numpy()
    added = optimum.success(p, 0.5, np.array(exact)) - optimum.success(p, 0.5)
    assert branch["pass@1"] == pytest.approx(added.mean(), abs=0.01)
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
            q = sampled_gain.q_of(found[name], [low, high], [-1.0, -1.0], torch.Generator())
            assert q == pytest.approx([1.0, 1.4])


def test_a_model_and_a_file_of_ones_own_make_a_profile(tmp_path):
    (tmp_path / "asked.csv").write_text("problem,gold\n1+1?,2\n")
    given = {"model": "some/model", "data": str(tmp_path / "asked.csv"), "out": tmp_path / "out"}
    given |= {"question": "problem", "gold": "gold", "problems": None, "tokens": 64}
    profile = load_profile(guide_gain.of_model(argparse.Namespace(**given)))
    assert profile.model.name == "some/model" and not profile.methods and not profile.rl
    assert [run.name for run in runs.every_run(profile)] == ["sft", "eval-sft"]
    assert profile.evaluation.data[0].task.gold == "gold"
    with pytest.raises(SageError, match="is no file"):
        guide_gain.of_model(argparse.Namespace(**{**given, "data": "nowhere.csv"}))
    with pytest.raises(SageError, match=r"no folder '\./nothere' with a model"):
        guide_gain.of_model(argparse.Namespace(**{**given, "model": "./nothere"}))
    with pytest.raises(SageError, match="no folder 'nothere' with a model"):
        guide_gain.of_model(argparse.Namespace(**{**given, "model": "nothere"}))


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
    given = {"data": str(data), "question": "question", "gold": "answer", "problems": None}

    def fingerprints(folder):
        options = argparse.Namespace(**given, model=str(folder), tokens=64, out=tmp_path / "out")
        profile = load_profile(guide_gain.of_model(options))
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


def test_options_that_cannot_work_are_refused_before_anything_is_drawn():
    for given, words in (
        ({"beta": 0.0, "data": None, "model": None}, "beta must be positive"),
        ({"beta": None, "data": "mine.jsonl", "model": None}, "--data goes with --model"),
    ):
        with pytest.raises(SageError, match=words):
            guide_gain.run_guide_gain(argparse.Namespace(**given))
