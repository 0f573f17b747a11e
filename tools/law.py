"""What the grids law and guides made, as tables of data/published.

    python tools/law.py           law_bases.csv and law_runs.csv; some minutes of one core a base
    python tools/law.py guides    guides_log_rho.csv and guides_runs.csv; some minutes as well

The first prints the slopes of report/law_claims.yaml once each base has a seed of all methods, the
second each method's position against GRPO's curves. log rho is exact, of a base's listed
completions. Bases without a run of GRPO and runs without an evaluation are left out, and what
stands in the first table is not measured again.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from scipy.stats import linregress, t
from tqdm import tqdm

from sage_lib import paths
from sage_lib.algorithm import token_probabilities as probs
from sage_lib.algorithm.guides import Guide, GuideInputs
from sage_lib.errors import SageError
from sage_lib.evaluation import groups, optima
from sage_lib.experiment import problems, runs
from sage_lib.experiment.blocks import load_grid
from sage_lib.experiment.profile import Profile, load_profile
from sage_lib.experiment.results import load_results
from sage_lib.files import write_bytes
from sage_lib.policy import loading
from sage_lib.policy.enumeration import Enumeration, enumerate_completions
from sage_lib.policy.scoring import valid_probabilities
from sage_lib.report import inference, tradeoff
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of

METHODS = ("grpo", "branch_strong", "sequence", "strong_sequence")
#: Of each KL form: the guided method and its baseline; what is expected of the slope.
PAIRS = {"sequence": ("strong_sequence", "sequence"), "k3": ("branch_strong", "grpo")}
EXPECTED = {"sequence": "above", "k3": "not above"}
MARGIN = 0.1
BASES, RUNS = (paths.PUBLISHED / f"law_{name}.csv" for name in ("bases", "runs"))
#: Methods of the profile guides whose guide is measured, and listed problems of each data set.
GUIDED, LISTED = ("branch_strong", "reverse", "hard", "likeliest", "success"), 8
OF_GUIDES = [paths.PUBLISHED / f"guides_{name}.csv" for name in ("log_rho", "runs")]
COLUMNS = ["dataset", "problem", "guide", "p", "covered", "acted", "log_rho", "low", "high"]


def listed(
    profile: Profile, number: int
) -> Iterator[tuple[Problem, Enumeration, list[int], np.ndarray, float]]:
    """Yield the first held-out problems of each data set: the base's listed completions, the
    prompt, which of the completions are valid, and the probability of all valid ones."""
    model, tokenizer = loading.load(profile.model, runs.sft_run(profile).model)
    asked = problems.evaluation_problems(profile, ood=False, limit=number)
    longest = profile.evaluation.max_new_tokens
    for problem in tqdm(asked, desc=profile.name):
        prompt = loading.encode(tokenizer, problem.question)
        enumeration = enumerate_completions(
            model, prompt, tokenizer.eos_token_id, optima.FLOOR, longest
        )
        bodies = [ids[mask] for ids, mask in zip(enumeration.ids, enumeration.mask, strict=True)]
        texts = tokenizer.batch_decode(bodies, skip_special_tokens=True)
        measures = [task_of(problem.task).measures(problem, text, True) for text in texts]
        valid = np.array([row["valid"] for row in measures], bool)
        p = float(np.exp(valid_probabilities(model, tokenizer, [problem])["logp"]).sum())
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


def log_rho(profile: Profile, methods: tuple[str, ...], number: int) -> pd.DataFrame:
    """Measure log rho of the guides of some methods: a row for each listed problem and guide."""
    guides = {key: runs.guide_of(profile, profile.methods[key].guide) for key in methods}
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


@torch.no_grad()
def weighted_q(profile: Profile) -> float:
    """Measure strong Branch's mean q on GRPO's completions, each token weighted by its k3.

    The completions are 8 of each of the 256 first problems of RL, by GRPO's first seed.
    """
    grpo = runs.rl_run(profile, "grpo", profile.seeds[0])
    drawer = groups.Drawer(profile, runs.evaluation_run(profile, grpo))
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


def of_run(spec: str, profile: Profile, method: str, seed: int) -> dict[str, object] | None:
    """Return the row of a run, or None where its evaluation is missing."""
    policy = runs.sft_run(profile) if method == "base" else runs.rl_run(profile, method, seed)
    evaluation = runs.evaluation_run(profile, policy)
    if not evaluation.done():
        return None
    support = pd.read_csv(evaluation.measured / "support.csv")
    support = support[support["dataset"].isin([data.label for data in profile.data_sets(False)])]
    of_problem = np.exp(support["logp"]).groupby([support["dataset"], support["problem"]]).sum()
    p = of_problem.to_numpy()
    logit = np.log(p) - np.log1p(-p)
    more = {"pass@1": p.mean(), "pass@256": (1 - (1 - p) ** 256).mean(), "logit": logit.mean()}
    return {"base": spec, "method": method, "seed": seed, "problems": len(p), **more}


def of_guides() -> None:
    """Write and print what the grid guides made."""
    profile, (path, of_runs) = load_profile("guides"), OF_GUIDES
    if not path.exists():
        table = log_rho(profile, GUIDED, LISTED)
        write_bytes(path, table.to_csv(index=False, float_format="%.6g").encode())
    table = pd.read_csv(path)
    table["above 0"] = table["log_rho"] > 0
    means = table.groupby(["guide", "dataset"], sort=False)[[*COLUMNS[3:], "above 0"]].mean()
    print(means.round(3).to_string())
    named = [("base", 0)] + [(m, seed) for seed in profile.seeds for m in profile.methods]
    rows = [of_run("guides", profile, *name) for name in named]
    done = pd.DataFrame([row for row in rows if row is not None])
    write_bytes(of_runs, done.to_csv(index=False, float_format="%.6g").encode())
    print(done.groupby("method", sort=False).mean(numeric_only=True).round(4).to_string())
    for form in ("k3", "sequence"):
        try:
            positions = tradeoff.positions(load_results("guides", own=True), anchor=form)
        except SageError as error:
            print(error)
            continue
        print(f"against GRPO's curve under {form}")
        print(positions.iloc[:, :9].round(3).to_string())


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
            write_bytes(
                BASES, pd.DataFrame(bases).to_csv(index=False, float_format="%.6g").encode()
            )
        named = [("base", 0)] + [(m, seed) for seed in profile.seeds for m in METHODS]
        rows += [of_run(spec, profile, method, seed) for method, seed in named]
    table = pd.DataFrame([row for row in rows if row is not None])
    write_bytes(RUNS, table.to_csv(index=False, float_format="%.6g").encode())
    told = judged()
    print("bases lack a seed of all methods: no outcome" if told is None else told.to_string())


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
    whole = names == set(gaps.index.get_level_values("base")) <= set(bases.index)
    return slopes(gaps, bases["log_rho"]) if whole else None


def slopes(gaps: pd.DataFrame, log_rho: pd.Series) -> pd.DataFrame:
    """Judge the slope of the trained gain on log rho over bases by the rule of law_claims.yaml.

    Args:
        gaps: the gain in log-odds by base and seed (index) and KL form (columns).
        log_rho: of each base.

    Returns:
        A row for each KL form: slope, its interval at Holm's level, and the outcome.
    """
    gains = gaps.groupby("base").mean()
    x = log_rho.reindex(gains.index)
    fits = {form: linregress(x, gains[form]) for form in gains}
    rows = []
    strongest_first = sorted(fits, key=lambda form: -abs(fits[form].slope / fits[form].stderr))
    for error, form in zip((0.025, 0.05), strongest_first, strict=True):  # Holm's rule
        half = t.ppf(1 - error / 2, len(x) - 2) * fits[form].stderr
        low, high = fits[form].slope - half, fits[form].slope + half
        outcome = inference.outcome(EXPECTED[form], low, high, MARGIN)
        rows.append((form, fits[form].slope, low, high, EXPECTED[form], outcome))
    return pd.DataFrame(rows, columns=["KL form", "slope", "low", "high", "expected", "outcome"])


if __name__ == "__main__":
    main()
