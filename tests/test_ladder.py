"""The rungs of the ladder against independent solutions, and the tools of ladder and law."""

import itertools
import sys

import ladder as tool  # of tools
import law
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import linregress, t

from sage_lib.algorithm.guides import BranchGuide, LikeliestGuide, SuccessGuide
from sage_lib.errors import SageError
from sage_lib.evaluation import optima
from sage_lib.experiment.problems import rl_problems
from sage_lib.experiment.profile import load_profile
from sage_lib.policy import loading, tiny_qwen
from sage_lib.policy.enumeration import enumerate_completions
from sage_lib.report import ladder as rungs
from sage_lib.theory import estimators, ladder, losses, objectives, optimum, solutions


def instance(seed):
    """A full tree, log pi_ref (E,) and a reward (L,) with right and wrong completions."""
    return objectives.full_tree_instance(seed, 2, 3, 1.0)


def guide_of(tree):
    """log q of each edge, (E,), from log 0.6 to log 1.4."""
    return torch.as_tensor(np.random.default_rng(1).uniform(0.6, 1.4, len(tree.edges))).log()


GUIDED = pytest.mark.parametrize("guided", [False, True])


@GUIDED
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_the_optimum_is_where_a_gradient_of_the_sequence_loss_rests(beta, guided):
    tree, log_reference, right = instance(0)
    loss, q = losses.Loss(group=8, batch=8), guided * guide_of(tree)
    rest = estimators.fixed_point(tree, "sequence", right, log_reference, beta, q, loss)
    reference = tree.completion_probabilities(log_reference)
    log_rho = optimum.log_rho(reference, right, solutions.product_guide(tree, q))
    assert (abs(log_rho) > 0.05) == guided
    expected = float(tree.completion_probabilities(rest) @ right)
    found = ladder.optimum_success(float(reference @ right), beta, 8, log_rho)
    assert np.isclose(found, expected, atol=1e-6)


@GUIDED
def test_the_fixed_point_of_k3_is_where_the_expected_gradient_rests(guided):
    tree, log_reference, right = instance(1)
    loss, q = losses.Loss(group=8, batch=8), guided * guide_of(tree)
    rest = estimators.fixed_point(tree, "k3", right, log_reference, 1.0, q, loss)
    ours = ladder.k3_rest(tree, right, log_reference, 1.0, 8, q if guided else None)
    assert torch.allclose(ours.exp(), rest.exp(), atol=1e-5)


def test_of_several_optima_the_one_with_the_largest_success_is_taken():
    """Success has three solutions here, by signs on a fine grid of log odds."""
    reference, beta, group = 1e-9, 0.09, 8
    odds = np.linspace(-25, 25, 2001)
    kappas = np.array([losses.kappa(p, group) for p in 1 / (1 + np.exp(-odds))])
    gap = np.log(reference / (1 - reference)) + kappas / beta - odds
    crossings = odds[:-1][np.diff(np.sign(gap)) != 0]
    found = ladder.optimum_success(reference, beta, group)
    assert len(crossings) == 3
    assert np.log(found / (1 - found)) == pytest.approx(crossings[-1], abs=0.025)


def test_the_first_updates_of_a_table_are_gradients_of_the_loss_of_drawn_groups():
    """By automatic differentiation of GRPO's loss with k3, from the same draws."""
    tree, log_reference, right = instance(2)
    rng, logits, expected = np.random.default_rng(5), log_reference.clone(), []
    for _ in range(4):
        logits.requires_grad_()
        log_pi = tree.log_policy(logits)
        expected.append(log_pi.detach())
        p = tree.completion_probabilities(log_pi).detach().numpy()
        drawn = rng.choice(len(p), 4, p=p / p.sum())
        rewards = right[torch.as_tensor(drawn)].numpy()
        d, loss = log_reference - log_pi, 0.0
        for y, advantage in zip(drawn, rewards - rewards.mean(), strict=True):
            scaled = advantage / (rewards.std(ddof=1) + 1e-4)
            loss -= (tree.paths[y] * (scaled * log_pi - 0.5 * (d.exp() - d - 1))).sum() / 4
        logits = (logits - 2.0 * torch.autograd.grad(loss, logits)[0]).detach()
    found = ladder.trained_table(tree, right, log_reference, 0.5, 4, [1, 3], 2.0, 5)
    assert torch.allclose(torch.stack(found), torch.stack(expected)[[1, 3]], atol=1e-12)
    guide = torch.full_like(log_reference, 2.0).log()
    guided = ladder.trained_table(tree, right, log_reference, 0.25, 4, [1, 3], 2.0, 5, guide)
    assert torch.allclose(torch.stack(guided), torch.stack(found)), "a q of 2 doubles beta"


def test_a_table_trained_with_samples_ends_near_the_fixed_point():
    tree, log_reference, right = instance(2)
    rest = ladder.k3_rest(tree, right, log_reference, 1.0, 8)
    start, end = ladder.trained_table(tree, right, log_reference, 1.0, 8, [0, 6000], 0.02, 0)
    assert torch.allclose(start, log_reference)
    p, expected = (float(tree.completion_probabilities(x) @ right) for x in (end, rest))
    before = float(tree.completion_probabilities(log_reference) @ right)
    assert abs(p - expected) < 0.15 * abs(expected - before)


def test_a_group_of_one_completion_trains_no_table():
    tree, log_reference, right = instance(2)
    with pytest.raises(SageError, match="a group needs at least 2 completions, not 1"):
        ladder.trained_table(tree, right, log_reference, 1.0, 1, [5], 0.1, 0)


def test_without_kl_a_table_is_right_in_the_end():
    tree, log_reference, right = instance(2)
    [end] = ladder.trained_table(tree, right, log_reference, 0.0, 8, [3000], 0.2, 0)
    assert float(tree.completion_probabilities(end) @ right) > 0.95


def test_nothing_to_learn_where_no_completion_is_right():
    assert ladder.optimum_success(0.0, 0.2, 8) == 0.0
    tree, log_reference, right = instance(2)
    [end] = ladder.trained_table(tree, 0 * right, log_reference, 0.2, 8, [50], 0.1, 0)
    same = solutions.k3_fixed_point(tree, 0 * right, log_reference, 0.2)[0]
    assert torch.allclose(end.exp(), same.exp(), atol=1e-9)


def test_the_tools_tree_has_the_exact_success_and_its_guide_reads_entropies(tmp_path):
    profile = load_profile("smoke")
    tiny_qwen.create(tmp_path, profile.model)
    model, tokenizer = loading.load(profile.model, tmp_path)
    problem = rl_problems(profile)[0]
    tree, reward, log_ref, entropies = tool.tree_of(model, tokenizer, problem)
    p = float(tree.completion_probabilities(log_ref) @ reward)
    assert np.isclose(p, tool.exact(model, tokenizer, [problem])[0], rtol=1e-3)
    q = tool.log_q_of(BranchGuide(threshold=1.0, ratio=0.1), entropies).exp()
    assert torch.allclose(q, (1 + 0.1 * (entropies - 1).clamp(min=0)).clamp(max=1.4), atol=1e-6)


def test_a_trial_of_few_prompts_does_not_overwrite_the_published_table(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--prompts", "8"])
    monkeypatch.setattr(tool, "load_profile", lambda name: pytest.fail("it began"))
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    assert "published table is of 64 prompts: name another file by --out" in capsys.readouterr().err


def test_the_law_is_judged_by_its_committed_rule():
    rho = pd.Series(np.linspace(-0.4, 0.4, 10), index=[f"base {n}" for n in range(10)])
    noise = np.random.default_rng(0).normal(0, 0.01, 10)
    gaps = pd.DataFrame({"sequence": 0.5 * rho + noise, "k3": noise})
    gaps.index = pd.MultiIndex.from_product([rho.index, [1]], names=["base", "seed"])
    table = law.slopes(gaps, rho).set_index("KL form")
    assert table["outcome"].tolist() == ["agrees", "agrees"]
    assert abs(table.loc["sequence", "slope"] - 0.5) < 0.05
    swapped = gaps.rename(columns={"sequence": "k3", "k3": "sequence"})
    assert law.slopes(swapped, rho)["outcome"].tolist() == ["disagrees", "disagrees"]
    noise = np.random.default_rng(2).normal(0, 5, gaps.shape)  # then nothing can be told
    unknown = law.slopes(gaps + noise, rho).set_index("KL form")
    assert set(unknown["outcome"]) == {"cannot tell"}
    for form, row in unknown.iterrows():
        fit = linregress(rho, (gaps + noise)[form].groupby("base").mean().reindex(rho.index))
        half = t.ppf(1 - 0.025 / 2, len(rho) - 2) * fit.stderr
        assert row["high"] - row["low"] == pytest.approx(2 * half), "Holm: both at 0.025"


def test_the_tables_of_the_law_are_judged_once_each_base_has_all_methods(tmp_path, monkeypatch):
    monkeypatch.setattr(law, "BASES", tmp_path / "bases.csv")
    monkeypatch.setattr(law, "RUNS", tmp_path / "runs.csv")
    assert law.judged() is None
    names = list(dict.fromkeys(block.profile for block in law.load_grid("law")))
    rho = np.linspace(-0.4, 0.4, len(names)) + 0.01 * np.sin(np.arange(len(names)))
    pd.DataFrame({"base": names, "log_rho": rho}).to_csv(law.BASES, index=False)
    rows = [
        (
            name,
            method,
            1,
            2 * x if method == "strong_sequence" else 0.001 * np.sin(place * len(method)),
        )
        for place, (name, x) in enumerate(zip(names, rho, strict=True))
        for method in itertools.chain(*law.PAIRS.values())
    ]
    runs = pd.DataFrame(rows, columns=["base", "method", "seed", "logit"])
    runs.to_csv(law.RUNS, index=False)
    table = law.judged().set_index("KL form")
    assert abs(table.loc["sequence", "slope"] - 2) < 0.01
    assert table["outcome"].tolist() == ["agrees", "agrees"]
    runs[:-1].to_csv(law.RUNS, index=False)
    assert law.judged() is None


def test_a_change_is_paired_where_both_steps_have_the_same_problems():
    rows = [(rung, on, policy, "grpo", 1, f"{on} {n}", p) for rung, on, policy, p, n in (
        (4, "its prompts", "groups of 64", 0.2, 0), (4, "its prompts", "groups of 64", 0.6, 1),
        (5, "its prompts", "groups of 8", 0.3, 0), (5, "its prompts", "groups of 8", 0.8, 1),
        (6, "held out", "groups of 64", 0.1, 0), (6, "held out", "groups of 64", 0.3, 1),
    )]  # fmt: skip
    columns = ["rung", "on", "policy", "arm", "seed", "problem", "p"]
    table = rungs.with_steps(pd.DataFrame(rows, columns=columns))
    steps = ["4 network, groups of 64", "5 network, groups of 8", "6 rung 4, held out"]
    paired = rungs.change(table, "grpo", *steps[:2], "pass@1")
    # By hand: differences 0.1 and 0.2, standard error 0.05, t of one degree of freedom 12.706.
    np.testing.assert_allclose(paired, [0.15, 0.15 - 0.6353, 0.15 + 0.6353], atol=1e-3)
    unpaired = rungs.change(table, "grpo", steps[0], steps[2], "pass@1")
    assert unpaired[0] == pytest.approx(-0.2) and unpaired[2] - unpaired[1] > 1.5
    assert rungs.change(table, "branch_strong", *steps[:2], "pass@1") == []


def test_a_prediction_about_runs_that_are_missing_has_no_outcome():
    table = rungs.load()
    whole = rungs.outcomes(table)
    network = table["step"] == "4 network, groups of 64"
    of_two = rungs.outcomes(table[~network | (table["seed"] != 3409)])
    assert whole["outcome"].iloc[-1] == "agrees" and of_two["outcome"].iloc[-1] == "not run"
    assert of_two["measured"].iloc[-1].count(",") == 1, "what there is, is shown"
    for gone in (network & (table["arm"] == "grpo_no_kl"), network):
        assert rungs.outcomes(table[~gone])["outcome"].iloc[-1] == "not run", "no common seed"
    without = rungs.outcomes(table[table["step"] != "6 rung 4, held out"])
    assert without["outcome"].tolist() == ["not run"] * 2 + whole["outcome"].tolist()[2:]
    assert not without["measured"].str.contains("6 rung 4").any()


def test_a_prediction_of_two_numbers_needs_both():
    """A problem of the optimum that is below its base; tables that stay where they start, after one
    update as predicted, and after 3,000."""
    table = rungs.load()
    below = table.copy()
    optimum = (table["step"] == "1 optimum, kappa") & (table["arm"] == "grpo")
    below.loc[optimum.idxmax(), "p"] = 0.0
    assert [rungs.outcomes(t)["outcome"][2] for t in (table, below)] == ["agrees", "disagrees"]
    slow = table.copy()
    slow.loc[table["step"] == "3 table, one update", "pass@1"] = 0.0
    still = slow.copy()
    still.loc[table["step"] == "3 table, 3,000 updates", "pass@1"] = 0.0
    assert [rungs.outcomes(t)["outcome"][3] for t in (slow, still)] == ["agrees", "disagrees"]


def test_log_rho_of_listed_completions_is_that_of_the_optimum_in_closed_form(tmp_path):
    """The likeliest guide has log(n·best/p) over what is listed; pi_s = the base gives q = 1."""
    profile = load_profile("smoke")
    tiny_qwen.create(tmp_path, profile.model)
    model, tokenizer = loading.load(profile.model, tmp_path)
    prompt = loading.encode(tokenizer, rl_problems(profile)[0].question)
    end = int(model(torch.tensor([prompt])).logits[0, -1].argmax())  # so that some end at once
    found = enumerate_completions(model, prompt, end, 1e-4, 2)
    weights, valid = found.probabilities, np.arange(len(found.ids)) % 3 == 0
    q = law.q_of(LikeliestGuide(low=1e-9, high=1e9), found, prompt, valid, model).prod(1)
    rho = optima.log_rho_bounds(weights.numpy(), valid, q.numpy(), float(weights[valid].sum()))[0]
    best, p = float(weights[valid].max()), float(weights[valid].sum())
    assert np.isclose(rho, np.log(valid.sum() * best / p), atol=1e-6) and rho > 0
    same = law.q_of(SuccessGuide(), found, prompt, valid, model)
    assert torch.allclose(same, torch.ones_like(same), atol=1e-4)
