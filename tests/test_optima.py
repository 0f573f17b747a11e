"""The stage optimum: log rho, its bounds and a refreshed q, against trees and planted answers."""

import numpy as np
import pytest
import torch

from sage_lib.algorithm.guides import BranchGuide, GuideInputs, TokenGuide
from sage_lib.evaluation import optima
from sage_lib.experiment.profile import load_profile
from sage_lib.policy import loading, tiny_qwen
from sage_lib.policy.enumeration import Enumeration
from sage_lib.tasks.countdown import Countdown
from sage_lib.tasks.prompts import answer_turn
from sage_lib.theory.solutions import tilted
from sage_lib.theory.tree import random_tree


@pytest.fixture(scope="module")
def planted():
    """A problem, and a random tree of completions of which some are the problem's valid ones."""
    rng = np.random.default_rng(1)
    problem = Countdown().problems(1, 5)[0]
    valid = [answer_turn(*worked) for _, *worked in Countdown.completions(problem)]
    tree = random_tree(rng, depth=4, branches=3)
    log_policy = tree.log_policy(torch.tensor(rng.normal(size=len(tree.edges))))
    longest, number = max(map(len, tree.completions)), len(tree.completions)
    ids = torch.zeros(number, longest, dtype=torch.long)
    logps, entropies = torch.zeros(2, number, longest, dtype=torch.float64)
    mask = torch.zeros(number, longest, dtype=torch.bool)
    of_edge = dict(zip(tree.edges, log_policy.tolist(), strict=True))
    of_state = dict(zip(tree.states, tree.entropies(log_policy).tolist(), strict=True))
    for row, tokens in enumerate(tree.completions):
        for place, token in enumerate(tokens):
            ids[row, place], mask[row, place] = int(token), True
            logps[row, place] = of_edge[tokens[:place], token]
            entropies[row, place] = of_state[tokens[:place]]
    right = np.zeros(number)
    right[rng.permutation(number)[:3]] = 1
    texts = [valid[0] if one else "no answer" for one in right]
    measures = [Countdown.measures(problem, text, True) for text in texts]
    return problem, tree, log_policy, Enumeration(ids, logps, entropies, mask), measures, right


def rows_of(planted, guide, p):
    problem, _, _, found, measures, _ = planted
    rows = optima.problem_rows(problem, found, measures, p, {"guide": guide}, seed=0)
    return [dict(zip(optima.COLUMNS, row, strict=True)) for row in rows]


def test_log_rho_is_that_of_the_tree_and_q_is_refreshed_to_a_fixed_point(planted):
    _, tree, log_policy, _, _, right = planted
    reference, reward = tree.completion_probabilities(log_policy), torch.tensor(right)
    guide = BranchGuide(threshold=0.5, ratio=0.6)
    p = float(reference @ reward)

    def q_of(log_pi):
        q_t = 1 + 0.6 * (tree.entropies(log_pi) - 0.5).clamp(min=0)
        return tree.along_paths(q_t.clamp(max=1.4)[tree.state_of].log()).exp()

    def log_rho(q):
        wrong = 1 - reward
        return float(
            ((reference * q) @ reward / p).log() - ((reference * q) @ wrong / (1 - p)).log()
        )

    base, *refreshed = rows_of(planted, guide, p)
    assert base["log_rho"] == pytest.approx(log_rho(q_of(log_policy)), abs=1e-9)
    assert base["covered"] == pytest.approx(1) and base["p"] == p and base["listed"] == len(right)
    assert base["low"] == pytest.approx(base["log_rho"]) == base["high"], "all is listed"
    assert [one["beta"] for one in refreshed] == list(optima.BETAS)
    for one in refreshed:
        q = torch.ones_like(reference)
        for _ in range(200):  # eq. 4, whose own entropies make the next q
            policy = tilted(reference, reward, one["beta"], q)
            visits = tree.paths.T @ policy
            of_state = tree.sum_by_state(visits)[tree.state_of]
            q = q_of((visits / of_state).log())
        assert one["log_rho"] == pytest.approx(log_rho(q), abs=1e-4)
    assert abs(refreshed[0]["log_rho"] - base["log_rho"]) > 0.01, "it is not the base's q"


def test_bounds_hold_the_truth_where_completions_are_missing():
    rng = np.random.default_rng(2)
    valid = np.arange(12) < 4
    for _ in range(20):
        reference, q = rng.dirichlet(np.ones(12)), rng.uniform(0.8, 1.6, 12)
        q[:2], q[10:] = (0.8, 1.6), (0.8, 1.6)  # what is missing lies between what is listed
        p = reference[valid].sum()
        truth, low, high = optima.log_rho_bounds(reference, valid, q, p)
        assert low == pytest.approx(truth) == high
        kept = ~np.isin(np.arange(12), [2, 4, 5])
        _, low, high = optima.log_rho_bounds(reference[kept], valid[kept], q[kept], p)
        assert low < truth < high
        ends = []
        for of_right, of_wrong in ((0.8, 1.6), (1.6, 0.8)):  # each end is that of some q
            worst = np.where(kept, q, np.where(valid, of_right, of_wrong))
            ends.append(optima.log_rho_bounds(reference, valid, worst, p)[0])
        assert (low, high) == pytest.approx(tuple(ends))


def test_noise_is_averaged_and_one_kind_of_answer_has_no_ratio(planted):
    """The mean of q(y) over draws of seeds 0, 1, ... One of the right completions is rare."""
    problem, _, _, found, measures, right = planted
    first = int(right.argmax())
    rare = [{**of, "valid_rare": place == first} for place, of in enumerate(measures)]
    weights, drawn, acted = found.probabilities.numpy(), [], []
    [row] = rows_of((*planted[:4], rare, right), TokenGuide(), float(weights @ right))
    for seed in range(optima.DRAWS):
        noise, ids = torch.Generator().manual_seed(seed), torch.zeros_like(found.ids)
        q = TokenGuide()(
            GuideInputs(found.entropies, found.logps, found.mask, 0.0, noise, ids)
        ).numpy()
        drawn.append(q.prod(1))
        acted.append((q[found.mask] != 1).mean())
    q = np.mean(drawn, axis=0)
    of_right, of_wrong = (np.average(q, weights=weights * (right == side)) for side in (1, 0))
    assert row["log_rho"] == pytest.approx(np.log(of_right / of_wrong), abs=1e-9)
    assert row["rare"] == pytest.approx(np.log(q[first] / of_right), abs=1e-9)
    assert row["acted"] == pytest.approx(np.mean(acted)) and row["acted"] > 0.3
    none = [dict.fromkeys(of, False) for of in measures]
    [row] = optima.problem_rows(problem, found, none, 0.0, {"t": TokenGuide()}, 0)
    assert np.isnan(row[optima.COLUMNS.index("log_rho")])


def test_completions_are_listed_after_the_prompt_and_their_work_is_measured(tmp_path, monkeypatch):
    profile, problem = load_profile("smoke"), Countdown().problems(1, 5)[0]
    tiny_qwen.create(tmp_path, profile.model)
    model, tokenizer = loading.load(profile.model, tmp_path)
    _, *worked = Countdown.completions(problem)[0]
    bodies = [tokenizer(text)["input_ids"] for text in (answer_turn(*worked), "no answer")]
    ids, mask = loading.padded(bodies, 0, "right")
    known = Enumeration(ids, torch.zeros(ids.shape), torch.zeros(ids.shape), mask.bool())
    asked = []
    monkeypatch.setattr(optima, "enumerate_completions", lambda *a: asked.append(a) or known)
    found, measures = optima.completions_with_measures(model, tokenizer, problem, 1e-3, 40)
    prompt = loading.encode(tokenizer, problem.question)
    assert asked == [(model, prompt, tokenizer.eos_token_id, 1e-3, 40)] and found is known
    assert [row["valid"] for row in measures] == [True, False]


def test_each_guide_of_the_study_is_asked_once(monkeypatch):
    profile = load_profile("study")
    quantiles = {"0.8": 0.02, "0.9": 0.6, "0.999": 1.1}
    monkeypatch.setattr(optima.runs, "entropies", lambda _: {"quantiles": quantiles})
    found = optima.guides_of(profile)
    assert list(found) == [
        *("grpo_random", "grpo_token", "grpo_branch", "branch_strong"),
        *("dose_high2.0", "dose_high4.0", "branch, 1.2 nats"),
    ]
