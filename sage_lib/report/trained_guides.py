"""What training gave with the guides of notebook 13, and what came of its predictions.

The runs are those of the profiles guides and guides_coloring; the predictions and the rule stand in
guides_claims.yaml.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ruamel.yaml import YAML
from scipy.special import logit

from sage_lib import paths
from sage_lib.experiment.profile import load_profile
from sage_lib.policy.exact import exact_pass_at_k
from sage_lib.report import inference, tradeoff
from sage_lib.report.inference import Values

#: profile -> where guides_claims.yaml has its predictions.
TASKS = {"guides": "predictions", "guides_coloring": "coloring"}
RUNS = paths.PUBLISHED / "guides_runs.parquet"
MARGIN = 0.05  # of the logit


def load(profile: str) -> dict[str, Values]:
    """Return pass@1, pass@256 and the logit of success of each method of one of TASKS."""
    table = pd.read_parquet(RUNS)
    table = table[table["profile"] == profile].reset_index(drop=True)
    p = table["p"].astype(float)
    columns = {"pass@1": p, "pass@256": exact_pass_at_k(p, [256])[:, 0], "logit": logit(p)}
    return Values.by_method(table.assign(**columns), list(columns))


def positions(profile: str, values: dict[str, Values]) -> pd.DataFrame:
    """Return :func:`tradeoff.positions_of` the methods of a task, each relative to GRPO's curve of
    its KL form, indexed by method."""
    loaded, tables = load_profile(profile), []
    for form in ("k3", "sequence"):
        methods = [key for key in values if key in loaded.methods]
        of_form = [key for key in methods if loaded.methods[key].kl_form == form]
        if len(tradeoff.curve_methods(loaded, values, form)) > 1:
            tables.append(tradeoff.positions_of(loaded, values, of_form, form))
    return pd.concat(tables).set_index("method")


def outcomes(profile: str) -> pd.DataFrame:
    """Return what came of each prediction for a task: a row for each prediction and method.

    Columns prediction, method, against (a method, or GRPO's curve), seeds, measured (with its 95 %
    interval), expected and outcome. Predictions about methods without a run are left out.
    """
    values, claims = load(profile), Path(__file__).with_name("guides_claims.yaml")
    places = positions(profile, values)
    rows = []
    for claim in YAML(typ="safe").load(claims)[TASKS[profile]]:
        expected = claim["expected"]
        for method in claim.get("methods", [claim.get("method")]):
            if method not in values or claim.get("against", method) not in values:
                continue
            if claim["measure"] == "logit":
                row = _logit(values, method, claim["against"])
            elif "outside" in expected:
                row = {"difference": places.loc[method, "excess"], **places.loc[method]}
            else:
                row = _excess(profile, values, method, claim["against"])
            low, high = inference.deciding_interval(row)
            words = f"{row['difference']:+.3f}"
            words += "" if np.isnan(low) else f" [{low:+.3f}, {high:+.3f}]"
            against = "GRPO's curve" if "outside" in expected else claim["against"]
            name = claim["name"], method, against, int(row["seeds"])
            rows.append((*name, f"{claim['measure']} {words}", expected, _outcome(claim, row)))
    columns = ["prediction", "method", "against", "seeds", "measured", "expected", "outcome"]
    return pd.DataFrame(rows, columns=columns)


def _logit(values: dict[str, Values], method: str, against: str) -> dict[str, Any]:
    rows = inference.difference(values[method], values[against]).set_index("metric")
    return rows.loc["logit"].drop(["ours", "theirs"]).to_dict()  # they are no shares


def _excess(profile: str, values: dict[str, Values], method: str, against: str) -> dict[str, Any]:
    """Return the excess of a method minus its control's, by seed."""
    _, seeds = inference.at_common_seeds(values[method], values[against])
    gaps = []
    for seed in seeds:
        alone = {key: of.at_seeds([seed]) for key, of in values.items()}
        table = positions(profile, {key: of for key, of in alone.items() if len(of.seeds)})
        gaps.append(float(table.loc[method, "excess"] - table.loc[against, "excess"]))
    low, high = inference.over_seeds(gaps)
    return {"difference": np.mean(gaps), "low": low, "high": high, "seeds": len(seeds)}


def _outcome(claim: dict[str, Any], row: dict[str, Any]) -> str:
    if row["seeds"] < inference.FEWEST_SEEDS:
        return inference.CANNOT_TELL
    if "outside" in claim["expected"]:
        outside = row["verdict"] == tradeoff.OUTSIDE
        agrees = outside == (claim["expected"] == "outside")
        return inference.AGREES if agrees else inference.DISAGREES
    sign = claim["expected"].removesuffix(" 0.05").removesuffix(" 0")
    margin = MARGIN if claim["measure"] == "logit" else 0.0
    return inference.row_outcome(sign, row, margin)
