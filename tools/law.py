"""What the grid law made, as the two tables of data/published: law_bases.csv and law_runs.csv.

    python tools/law.py    after sage-companion grid law; some five minutes of one core a base

log rho is that of the stage optimum, of strong Branch alone. Bases without a finished SFT and runs
without an evaluation are left out, and a base that stands in the table is not measured again.
"""

import numpy as np
import pandas as pd
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

METHODS = ("grpo", "branch_strong", "sequence", "strong_sequence")
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
    print(table.groupby(["base", "method"])[["pass@1", "pass@256", "logit"]].mean().round(4))


if __name__ == "__main__":
    main()
