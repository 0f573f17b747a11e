"""What the grid law made, as the two tables of data/published: law_bases.csv and law_runs.csv.

    python tools/law.py    after sage-companion grid law; some five minutes of one core a base

It prints the slopes of report/law_claims.yaml once each base has a seed of all methods. log rho is
that of the stage optimum, of strong Branch alone. Bases without a finished SFT and runs without an
evaluation are left out, and a base that stands in the table is not measured again.
"""

import numpy as np
import pandas as pd
from scipy.stats import linregress, t
from tqdm import tqdm

from sage_lib import paths
from sage_lib.evaluation import optima
from sage_lib.experiment import problems, runs
from sage_lib.experiment.blocks import load_grid
from sage_lib.experiment.profile import Profile
from sage_lib.files import write_bytes
from sage_lib.policy import loading
from sage_lib.policy.enumeration import enumerate_completions
from sage_lib.policy.scoring import valid_probabilities
from sage_lib.report import inference

METHODS = ("grpo", "branch_strong", "sequence", "strong_sequence")
#: Of each KL form: the guided method and its baseline; what is expected of the slope.
PAIRS = {"sequence": ("strong_sequence", "sequence"), "k3": ("branch_strong", "grpo")}
EXPECTED = {"sequence": "above", "k3": "not above"}
MARGIN = 0.1
BASES, RUNS = (paths.PUBLISHED / f"law_{name}.csv" for name in ("bases", "runs"))


def log_rho(profile: Profile) -> pd.DataFrame:
    """Measure log rho of strong Branch on each of the base's listed problems."""
    model, tokenizer = loading.load(profile.model, runs.sft_run(profile).model)
    guides = {"branch_strong": optima.guides_of(profile)["branch_strong"]}
    asked = problems.evaluation_problems(profile, limit=profile.evaluation.listed)
    rows = []
    for problem in tqdm(asked, desc=profile.name):
        prompt = loading.encode(tokenizer, problem.question)
        longest = profile.evaluation.max_new_tokens
        listed = enumerate_completions(model, prompt, tokenizer.eos_token_id, optima.FLOOR, longest)
        bodies = [ids[mask] for ids, mask in zip(listed.ids, listed.mask, strict=True)]
        texts = tokenizer.batch_decode(bodies, skip_special_tokens=True)
        p = float(np.exp(valid_probabilities(model, tokenizer, [problem])["logp"]).sum())
        rows += optima.problem_rows(problem, listed, texts, p, guides, profile.seeds[0])[:1]
    return pd.DataFrame(rows, columns=optima.COLUMNS)


def of_base(spec: str, profile: Profile) -> dict[str, object]:
    """Return the row of a base: means over problems."""
    table = log_rho(profile)
    means = table[["p", "covered", "acted", "log_rho", "low", "high"]].mean()
    return {"base": spec, "problems": len(table), **means}


def of_run(spec: str, profile: Profile, method: str, seed: int) -> dict[str, object] | None:
    """Return the row of a run, or None where its evaluation is missing."""
    policy = runs.sft_run(profile) if method == "base" else runs.rl_run(profile, method, seed)
    evaluation = runs.evaluation_run(profile, policy)
    if not evaluation.done():
        return None
    support = pd.read_csv(evaluation.measured / "support.csv")
    p = np.exp(support["logp"]).groupby(support["problem"]).sum().to_numpy()
    logit = np.log(p) - np.log1p(-p)
    more = {"pass@1": p.mean(), "pass@256": (1 - (1 - p) ** 256).mean(), "logit": logit.mean()}
    return {"base": spec, "method": method, "seed": seed, "problems": len(p), **more}


def main() -> None:
    blocks = {block.profile: block.loaded for block in load_grid("law")}
    bases = pd.read_csv(BASES).to_dict("records") if BASES.exists() else []
    rows = []
    for spec, profile in blocks.items():
        if not runs.sft_run(profile).done():
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
