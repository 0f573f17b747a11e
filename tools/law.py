"""What the grids law and guides made, as tables of data/published.

    python tools/law.py           law_bases.csv and law_runs.csv; some minutes of one core a base
    python tools/law.py guides    guides_log_rho.csv and guides_runs.parquet; some minutes as well

The first prints the slopes of report/law_claims.yaml once each base has a seed of all methods, the
second each method's position against GRPO's curves, and the outcomes of guides_claims.yaml. log rho
is exact, of a base's listed completions. Bases without a run of GRPO and runs without an evaluation
are left out, and what stands in the tables of log rho is not measured again.
"""

import argparse
import io
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from ladder import log_q_of, tree_of
from scipy.special import logit
from scipy.stats import linregress, t
from tqdm import tqdm

from sage_lib import paths
from sage_lib.algorithm import token_probabilities as probs
from sage_lib.algorithm.guides import Guide, GuideInputs
from sage_lib.evaluation import groups, optima
from sage_lib.experiment import problems, runs
from sage_lib.experiment.blocks import load_grid
from sage_lib.experiment.profile import BASE, Profile, load_profile
from sage_lib.files import write_bytes, write_text
from sage_lib.policy import loading
from sage_lib.policy.enumeration import Enumeration
from sage_lib.policy.exact import exact_pass_at_k, valid_mass
from sage_lib.policy.scoring import valid_probabilities
from sage_lib.report import inference, trained_guides
from sage_lib.tasks.problem import Problem
from sage_lib.theory.solutions import k3_fixed_point

#: Of each KL form: the guided method and its baseline; what is expected of the slope.
PAIRS = {"sequence": ("strong_sequence", "sequence"), "k3": ("branch_strong", "grpo")}
EXPECTED = {"sequence": "above", "k3": "not above"}
MARGIN = 0.1
BASES, RUNS = (paths.PUBLISHED / f"law_{name}.csv" for name in ("bases", "runs"))
#: Methods of the profile guides whose guide is measured, and listed problems of each data set.
GUIDED, LISTED = ("branch_strong", "reverse", "hard", "likeliest", "success"), 8
STATE = ("branch_strong", "reverse", "hard")  # q of the state alone
LOG_RHO = paths.PUBLISHED / "guides_log_rho.csv"
COLUMNS = ["dataset", "problem", "guide", "p", "covered", "acted", "log_rho", "low", "high"]


def listed(
    profile: Profile, number: int
) -> Iterator[tuple[Problem, Enumeration, list[int], np.ndarray, float]]:
    """Yield the first held-out problems of each data set: the base's listed completions, the
    prompt, which of the completions are valid, and the probability of all valid ones."""
    model, tokenizer = loading.load(profile.model, runs.sft_run(profile).model)
    evaluated = problems.evaluation_problems(profile, ood=False, limit=number)
    longest = profile.evaluation.max_new_tokens
    for problem in tqdm(evaluated, desc=profile.name):
        sizes = optima.FLOOR, longest
        enumeration, measures = optima.completions_with_measures(model, tokenizer, problem, *sizes)
        prompt = loading.encode(tokenizer, problem.question)
        valid = np.array([row["valid"] for row in measures], bool)
        p = float(valid_mass(valid_probabilities(model, tokenizer, [problem])).sum())
        yield problem, enumeration, prompt, valid, p


def q_of(
    guide: Guide,
    enumeration: Enumeration,
    prompt: list[int],
    valid: np.ndarray,
    policy: torch.nn.Module | None,
) -> torch.Tensor:
    """Return q of each token of listed completions, shape (completions, time): the whole list is
    the group of a guide that reads rewards, and ``policy`` is the guide model, if there is one."""
    logps, right = enumeration.logps.double(), torch.as_tensor(valid)
    guide_logps = None
    if policy is not None:
        start = torch.tensor([prompt]).expand(len(enumeration.ids), -1)
        parts = torch.cat([start, enumeration.ids], dim=1).split(512)
        with torch.no_grad():
            read = [probs.completion_signals(policy, x, len(prompt)).logps for x in parts]
        guide_logps = torch.cat(read).double()
    inputs = GuideInputs(
        entropies=enumeration.entropies.double(),
        logps=logps,
        mask=enumeration.mask,
        progress=0.0,
        generator=torch.Generator(),
        ids=enumeration.ids,
        ref_logps=logps,
        rewards=right.double(),
        best_logps=logps.sum(1)[right].max().expand(len(right)),
        guide_logps=guide_logps,
    )
    return guide(inputs)


def guides_of(profile: Profile, methods: tuple[str, ...]) -> dict[str, Any]:
    choices = {key: profile.methods[key].guide for key in methods}
    return {key: runs.guide_of(profile, guide) for key, guide in choices.items() if guide}


def log_rho(profile: Profile, methods: tuple[str, ...], number: int) -> pd.DataFrame:
    """Measure log rho of the guides of some methods: a row for each listed problem and guide."""
    guides = guides_of(profile, methods)
    reads = {key: profile.methods[key].policies for key in methods}
    models = {
        key: loading.load(profile.model, runs.first_run(profile, names[0]).model)[0]
        for key, names in reads.items()
        if names
    }
    rows = []
    for problem, enumeration, prompt, valid, p in listed(profile, number):
        if not valid.any() or valid.all():
            continue
        weights, mask = enumeration.probabilities.numpy(), enumeration.mask
        for key, guide in guides.items():
            q = q_of(guide, enumeration, prompt, valid, models.get(key))
            bounds = optima.log_rho_bounds(weights, valid, q.prod(1).numpy(), p)
            acted = float((q[mask] != 1).double().mean())
            rows.append((problem.dataset, problem.id, key, p, weights.sum(), acted, *bounds))
    return pd.DataFrame(rows, columns=COLUMNS)


def k3_gains(profile: Profile, methods: tuple[str, ...], number: int) -> pd.DataFrame:
    """Compute what guides add to the log-odds of success at the fixed point of per-token k3.

    A table of each listed problem, rewards without a group's normalisation, the beta of the profile
    (theory.solutions.k3_fixed_point). What leaves the valid completions of a state is one wrong
    leaf, whose success ratio is that of its whole mass. The guide ``likeliest`` has no q of an
    edge. "beta 0.15" and "beta 0.05" are no guides.
    """
    base, beta, rows = runs.sft_run(profile).model, profile.rl["beta"], []
    guides = guides_of(profile, methods)
    model, tokenizer = loading.load(profile.model, base)
    reads = runs.first_run(profile, "rft").model
    policy, _ = loading.load(profile.model, reads)
    for problem in problems.evaluation_problems(profile, ood=False, limit=number):
        tree, reward, log_ref, entropies = tree_of(model, tokenizer, problem)
        ratio = tree_of(policy, tokenizer, problem)[2] - log_ref
        log_qs = {key: log_q_of(guide, entropies) for key, guide in guides.items() if key in STATE}
        limits = np.log([guides["success"].low, guides["success"].high])
        log_qs["success"] = (guides["success"].alpha * ratio).clamp(*limits.tolist())
        settings: dict[str, Any] = {f"beta {other}": (other, None) for other in (0.15, 0.05)}
        settings |= {key: (beta, log_q) for key, log_q in log_qs.items()}
        start, *ends = (
            float(k3_fixed_point(tree, reward, log_ref, *setting)[1][0].logit())
            for setting in [(beta, None), *settings.values()]
        )
        of_guides = zip(settings, ends, strict=True)
        rows += [(problem.dataset, problem.id, key, end - start) for key, end in of_guides]
    return pd.DataFrame(rows, columns=[*COLUMNS[:3], "k3"])


@torch.no_grad()
def weighted_q(profile: Profile) -> float:
    """Measure strong Branch's mean q on GRPO's completions, each token weighted by its k3.

    The completions are 8 of each of the 256 first problems of RL, by GRPO's first seed.
    """
    grpo = runs.rl_run(profile, "grpo", profile.seeds[0])
    drawer = groups.Drawer(profile, runs.evaluation_run(grpo))
    base, _ = loading.load(profile.model, runs.sft_run(profile).model)
    guide, totals = optima.guides_of(profile)["branch_strong"], np.zeros(2)
    for problem in problems.rl_problems(profile)[:256]:
        group = drawer.draw(problem, 8, profile.seeds[0])
        entropies, logps = groups.signals(drawer.model, group, profile.rl["temperature"])
        _, ref_logps = groups.signals(base, group, profile.rl["temperature"])
        k3 = torch.expm1(ref_logps - logps) - (ref_logps - logps)
        inputs = GuideInputs(entropies, logps, group.mask, 1.0, torch.Generator(), group.drawn)
        totals += [(x * k3)[group.mask].sum().item() for x in (guide(inputs), torch.ones(()))]
    return totals[0] / totals[1]


def of_base(spec: str, profile: Profile) -> dict[str, object]:
    """Return the row of a base: means over problems."""
    table = log_rho(profile, ("branch_strong",), profile.evaluation.listed)
    means = table[["p", "covered", "acted", "log_rho", "low", "high"]].mean()
    return {"base": spec, "problems": len(table), **means, "weighted_q": weighted_q(profile)}


def success(profile: Profile, method: str, seed: float) -> pd.DataFrame | None:
    """Return p, the probability of a valid sample, of each held-out problem after a run.

    None where its evaluation is missing.
    """
    policy = runs.sft_run(profile) if method == BASE else runs.rl_run(profile, method, int(seed))
    evaluation = runs.evaluation_run(policy)
    if not evaluation.done():
        return None
    support = pd.read_csv(evaluation.measured / "support.csv")
    support = support[support["dataset"].isin([data.label for data in profile.data_sets(False)])]
    return valid_mass(support).sort_index().rename("p").reset_index()


def of_run(spec: str, profile: Profile, method: str, seed: int) -> dict[str, object] | None:
    """Return the row of a run, or None where its evaluation is missing."""
    of_problems = success(profile, method, seed)
    if of_problems is None:
        return None
    p = of_problems["p"].to_numpy()
    at_256 = exact_pass_at_k(p, [256]).mean()
    means = {"pass@1": p.mean(), "pass@256": at_256, "logit": logit(p).mean()}
    return {"base": spec, "method": method, "seed": seed, "problems": len(p), **means}


def of_guides() -> None:
    """Write and print what the grid guides made."""
    tables = []
    for name in trained_guides.TASKS:
        profile = load_profile(name)
        named = [(BASE, np.nan)] + [(m, seed) for seed in profile.seeds for m in profile.methods]
        for method, seed in named:
            table = success(profile, method, seed)
            if table is not None:
                tables.append(table.assign(profile=name, method=method, seed=seed))
    if not tables:
        sys.exit("no run of the grid guides has been evaluated: sage-companion grid guides")
    table = pd.concat(tables, ignore_index=True).astype({"p": "float32"})
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False, compression="zstd")
    write_bytes(trained_guides.RUNS, buffer.getvalue())
    measured = pd.read_csv(LOG_RHO) if LOG_RHO.exists() else pd.DataFrame(columns=["profile"])
    for name in table["profile"].unique():
        if name not in measured["profile"].unique():
            profile, on = load_profile(name), COLUMNS[:3]
            gains = k3_gains(profile, GUIDED, LISTED)
            rows = log_rho(profile, GUIDED, LISTED).merge(gains, how="outer", on=on)
            rows.insert(0, "profile", name)
            measured = pd.concat([measured, rows], ignore_index=True)
            write_text(LOG_RHO, measured.to_csv(index=False, float_format="%.6g"))
        values = trained_guides.load(name)
        print(trained_guides.positions(name, values).iloc[:, :9].round(3).to_string())
        print(trained_guides.outcomes(name).to_string())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("grid", choices=("law", "guides"), nargs="?", default="law")
    if parser.parse_args().grid == "guides":
        of_guides()
        return
    blocks = {block.profile: block.loaded for block in load_grid("law")}
    bases = pd.read_csv(BASES).to_dict("records") if BASES.exists() else []
    rows = []
    for spec, profile in blocks.items():
        if not runs.rl_run(profile, "grpo", profile.seeds[0]).done():
            continue
        if spec not in [row["base"] for row in bases]:
            bases.append(of_base(spec, profile))
            write_text(BASES, pd.DataFrame(bases).to_csv(index=False, float_format="%.6g"))
        named = [("base", 0)] + [(m, seed) for seed in profile.seeds for m in profile.methods]
        rows += [of_run(spec, profile, method, seed) for method, seed in named]
    table = pd.DataFrame([row for row in rows if row is not None])
    write_text(RUNS, table.to_csv(index=False, float_format="%.6g"))
    result = judged()
    print("bases lack a seed of all methods: no outcome" if result is None else result.to_string())


def judged() -> pd.DataFrame | None:
    """Return the :func:`slopes` of the published tables; None until each base has all methods."""
    if not RUNS.exists() or not BASES.exists():
        return None
    table, bases = pd.read_csv(RUNS), pd.read_csv(BASES).set_index("base")
    logits = table.pivot_table(index=["base", "seed"], columns="method", values="logit")
    if not {method for pair in PAIRS.values() for method in pair} <= set(logits):
        return None
    gaps = pd.DataFrame({form: logits[a] - logits[b] for form, (a, b) in PAIRS.items()}).dropna()
    names = {block.profile for block in load_grid("law")}
    is_whole = names == set(gaps.index.get_level_values("base")) <= set(bases.index)
    return slopes(gaps, bases["log_rho"]) if is_whole else None


def slopes(gaps: pd.DataFrame, log_rho: pd.Series) -> pd.DataFrame:
    """Judge the slope of the trained gain on log rho over bases by the rule of law_claims.yaml.

    Args:
        gaps: the gain in log-odds by base and seed (index) and KL form (columns).
        log_rho: of each base.

    Returns:
        A row for each KL form: slope, its interval, and the outcome. By Holm's rule the stronger
        slope has the level 0.025. The other one has 0.05 if the outcome of the first is known.
    """
    gains = gaps.groupby("base").mean()
    x = log_rho.reindex(gains.index)
    fits = {form: linregress(x, gains[form]) for form in gains}
    rows, error = [], 0.025
    strongest_first = sorted(fits, key=lambda form: -abs(fits[form].slope / fits[form].stderr))
    for form in strongest_first:
        half = t.ppf(1 - error / 2, len(x) - 2) * fits[form].stderr
        low, high = fits[form].slope - half, fits[form].slope + half
        outcome = inference.outcome(EXPECTED[form], low, high, MARGIN)
        rows.append((form, fits[form].slope, low, high, EXPECTED[form], outcome))
        error = 0.025 if outcome == inference.CANNOT_TELL else 0.05
    return pd.DataFrame(rows, columns=["KL form", "slope", "low", "high", "expected", "outcome"])


if __name__ == "__main__":
    main()
