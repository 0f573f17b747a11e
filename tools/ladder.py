"""The rungs of the ladder from the optimum of eq. 2 to the study, measured exactly: writes
data/published/ladder.csv.

    python tools/ladder.py    after sage-companion grid ladder; half an hour of one core

Rungs 1 to 3 are computed for a table of each of the 64 prompts; the others are trained networks,
read on these prompts and on held-out problems of the same mix. Rungs 1 to 3 of an earlier call are
kept.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from sage_lib import paths
from sage_lib.algorithm.guides import Guide, GuideInputs
from sage_lib.evaluation import optima
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile, load_profile
from sage_lib.files import write_text
from sage_lib.policy import loading, scoring
from sage_lib.policy.exact import valid_mass
from sage_lib.report import ladder as rungs
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.theory import ladder
from sage_lib.theory.tree import Tree

#: The arms: method of the study, and whether it has the KL and the guide.
ARMS = {"grpo": (True, False), "grpo_no_kl": (False, False), "branch_strong": (True, True)}
#: Rungs 4 and 5: their methods by arm.
FIXED = {4: ("wide", "wide_no_kl", "wide_strong"), 5: ("narrow", "narrow_no_kl", "narrow_strong")}
#: Rung 7: numbers of prompts.
PROMPTS = (64, 256, 1000, 2000)
#: Rung 3: updates and learning rates of a table: as many as a problem has visits in the study, as
#: many samples as a prompt has in rungs 4 and 5, and until it rests.
TABLES = {"one visit": (1, 1.0), "100 updates": (100, 0.3), "3,000 updates": (3000, 0.1)}
#: Held-out problems of each kind, as in the mix of the training prompts.
MIX = {"both": 120, "forward": 50, "reverse": 30}
#: Least probability of a completion that is listed for E[q | wrong].
FLOOR = 1e-4
COLUMNS = ["rung", "policy", "arm", "seed", "on", "dataset", "problem", "p"]


def tree_of(
    model: torch.nn.Module, tokenizer: loading.PreTrainedTokenizerBase, problem: Problem
) -> tuple[Tree, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tree of a problem's valid completions, and what leaves it at each state as one
    wrong leaf; the reward of each completion, log pi_ref and the state's entropy of each edge."""
    prompt = loading.encode(tokenizer, problem.question)
    turns = [
        scoring.conversation_ids(tokenizer, problem.question, *worked)[len(prompt) :]
        for _, *worked in task_of(problem.task).completions(problem)
    ]
    bodies = sorted(set(map(tuple, turns)))
    signals = scoring.signals(model, model, prompt, [*map(list, bodies)], tokenizer.pad_token_id)
    log_pi: dict[tuple, float] = {}
    entropy: dict[tuple, float] = {}
    for body, of_tokens in zip(bodies, signals, strict=True):
        for t, token in enumerate(body):
            state = tuple(map(str, body[:t]))
            log_pi[state, str(token)] = float(of_tokens.base_log_pi[t])
            entropy[state] = float(of_tokens.entropy[t])
    right = [tuple(map(str, body)) for body in bodies]
    listed = dict.fromkeys(entropy, 0.0)
    for (state, _), value in log_pi.items():
        listed[state] += float(np.exp(value))
    wrong = [(*state, "other") for state in entropy]
    for state in entropy:
        log_pi[state, "other"] = float(np.log(max(1 - listed[state], 1e-12)))
    tree = Tree((*right, *wrong))
    reward = torch.tensor([1.0] * len(right) + [0.0] * len(wrong), dtype=torch.float64)
    edges = tree.by_edge(log_pi)
    return tree, reward, tree.log_policy(edges), tree.by_edge({e: entropy[e[0]] for e in log_pi})


def log_q_of(guide: Guide, entropies: torch.Tensor) -> torch.Tensor:
    """Return log q of a guide of the state alone, of the shape of the entropies."""
    rows = entropies.float()[None]
    inputs = GuideInputs(
        entropies=rows,
        logps=torch.zeros_like(rows),
        mask=torch.ones_like(rows, dtype=torch.bool),
        progress=0.0,
        generator=torch.Generator(),
        ids=torch.zeros_like(rows, dtype=torch.long),
    )
    return guide(inputs)[0].double().log()


def tables(profile: Profile, prompts: list[Problem]) -> Iterator[tuple]:
    """Yield the rows of rungs 1 to 3."""
    base = runs.finished(profile, runs.sft_run(profile))
    model, tokenizer = loading.load(profile.model, base.model)
    choice = profile.methods["branch_strong"].guide
    assert choice is not None
    guide = runs.guide_of(profile, choice)
    seed, beta, group = profile.seeds[0], profile.rl["beta"], profile.rl["num_generations"]
    for problem in tqdm(prompts, desc="tables"):
        tree, reward, log_ref, entropies = tree_of(model, tokenizer, problem)
        p = float(tree.completion_probabilities(log_ref) @ reward)
        log_q = log_q_of(guide, entropies)
        right, wrong = guide_means(model, tokenizer, problem, guide)
        name = (seed, "its prompts", problem.dataset, problem.id)
        yield (0, "base", "base", *name, p)
        for arm, (has_kl, guided) in ARMS.items():
            used = log_q if guided else None
            if has_kl:
                rho = float(np.log(right / wrong)) if guided else 0.0
                yield (1, "optimum", arm, *name, ladder.optimum_success(p, beta, group, rho))
                fixed_point = ladder.k3_rest(tree, reward, log_ref, beta, group, used)
                yield (2, "fixed point", arm, *name, success(tree, fixed_point, reward))
            for length, (updates, rate) in TABLES.items():
                arguments = (tree, reward, log_ref, beta * has_kl, group, [updates], rate, seed)
                [ended] = ladder.trained_table(*arguments, used)
                yield (3, length, arm, *name, success(tree, ended, reward))


def success(tree: Tree, log_pi: torch.Tensor, reward: torch.Tensor) -> float:
    """Return the probability of a right completion."""
    return float(tree.completion_probabilities(log_pi) @ reward)


def guide_means(
    model: torch.nn.Module,
    tokenizer: loading.PreTrainedTokenizerBase,
    problem: Problem,
    guide: Guide,
) -> tuple[float, float]:
    """Return E[q | right] and E[q | wrong] under the base, from its listed completions."""
    listed, measures = optima.completions_with_measures(model, tokenizer, problem, FLOOR, 56)
    valid = np.array([row["valid"] for row in measures], bool)
    log_q = log_q_of(guide, listed.entropies.flatten()).view(listed.mask.shape)
    q = (log_q * listed.mask).sum(1).exp().numpy()
    weights = listed.probabilities.numpy()
    right, wrong = (float((weights * q)[s].sum() / weights[s].sum()) for s in (valid, ~valid))
    return right, wrong


def networks(profile: Profile, prompts: list[Problem], held_out: list[Problem]) -> Iterator[tuple]:
    """Yield the rows of rungs 4 to 7, of each run that has ended."""
    named = [
        (profile, rung, arm, key)
        for rung, keys in FIXED.items()
        for arm, key in zip(ARMS, keys, strict=True)
    ]
    for rows in PROMPTS:
        variant = profile if rows == 64 else load_profile(f"ladder+rl_data.rows={rows}")
        named += [(variant, 7, arm, arm) for arm in ARMS]
    for variant, rung, arm, key in tqdm(named, desc="networks"):
        rows = getattr(variant.rl_data, "rows", 0)
        policy = {4: "groups of 64", 5: "groups of 8"}.get(rung, f"{rows:,} prompts")
        for seed in variant.seeds_of(key):
            run = runs.rl_run(variant, key, seed)
            if not run.done():
                continue
            model, tokenizer = loading.load(variant.model, run.model)
            for on, evaluated in (("its prompts", prompts), ("held out", held_out)):
                if on == "its prompts" and rung == 7 and rows != 64:
                    continue
                for problem, p in zip(evaluated, exact(model, tokenizer, evaluated), strict=True):
                    row_rung = 6 if rung < 7 and on == "held out" else rung
                    yield (row_rung, policy, arm, seed, on, problem.dataset, problem.id, p)


def exact(
    model: torch.nn.Module, tokenizer: loading.PreTrainedTokenizerBase, evaluated: list[Problem]
) -> list[float]:
    """Return the probability of valid work on each problem."""
    p = valid_mass(scoring.valid_probabilities(model, tokenizer, evaluated))
    return [float(p[problem.dataset, problem.id]) for problem in evaluated]


def mixed(profile: Profile) -> list[Problem]:
    """Return held-out problems in the mix of the training prompts."""
    evaluated = problems.evaluation_problems(profile, ood=False)
    return [
        problem
        for kind, number in MIX.items()
        for problem in [p for p in evaluated if p.dataset == kind][:number]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="default: data/published/ladder.csv")
    parser.add_argument("--prompts", type=int, default=64, help="of the 64, for a trial with --out")
    options = parser.parse_args()
    if options.out is None and options.prompts != 64:
        parser.error("the published table is of 64 prompts: name another file by --out")
    options.out = options.out or paths.PUBLISHED / "ladder.csv"
    profile = load_profile("ladder")
    prompts, held_out = problems.rl_problems(profile)[: options.prompts], mixed(profile)
    base = runs.finished(profile, runs.sft_run(profile))
    model, tokenizer = loading.load(profile.model, base.model)
    stored = pd.read_csv(options.out) if options.out.exists() else pd.DataFrame(columns=COLUMNS)
    stored = stored[(stored["rung"] <= 3) & (stored["on"] == "its prompts")]
    if stored["problem"].nunique() == len(prompts):
        rows = list(stored.itertuples(index=False, name=None))
    else:
        rows = list(tables(profile, prompts))
        made = pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False, float_format="%.6g")
        write_text(options.out, made)
    rows += networks(profile, prompts, held_out)
    for problem, p in zip(held_out, exact(model, tokenizer, held_out), strict=True):
        name = (profile.seeds[0], "held out", problem.dataset, problem.id)
        rows.append((0, "base", "base", *name, p))
    table = pd.DataFrame(rows, columns=COLUMNS)
    write_text(options.out, table.to_csv(index=False, float_format="%.6g"))
    print(summary(table).to_string())


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return pass@1 and pass@256 of each rung, policy and arm, means over problems and seeds."""
    by = ["rung", "policy", "arm", "on"]
    return rungs.with_steps(table).groupby(by, sort=False)[rungs.ENDS].mean().round(3)


if __name__ == "__main__":
    main()
