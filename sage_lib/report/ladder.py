"""The ladder of notebook 12: its rungs, and what came of its predictions (ladder_claims.yaml).

All numbers are exact: of three seeds at rung 4, of one elsewhere. Intervals are over problems.
"""

from pathlib import Path

import pandas as pd
from ruamel.yaml import YAML
from scipy.stats import ttest_ind, ttest_rel

from sage_lib import paths
from sage_lib.policy.exact import exact_pass_at_k
from sage_lib.report.inference import AGREES, DISAGREES, NOT_RUN

ENDS = ["pass@1", "pass@256"]
#: (rung, problems, policy) -> the step's name, from the optimum to the study.
STEPS = {
    (1, "its prompts", "optimum"): "1 optimum, kappa",
    (2, "its prompts", "fixed point"): "2 fixed point of k3",
    (3, "its prompts", "3,000 updates"): "3 table, 3,000 updates",
    (3, "its prompts", "100 updates"): "3 table, 100 updates",
    (3, "its prompts", "one visit"): "3 table, one update",
    (4, "its prompts", "groups of 64"): "4 network, groups of 64",
    (5, "its prompts", "groups of 8"): "5 network, groups of 8",
    (6, "held out", "groups of 64"): "6 rung 4, held out",
    (6, "held out", "groups of 8"): "6 rung 5, held out",
    (7, "held out", "64 prompts"): "7 study, 64 prompts",
    (7, "held out", "256 prompts"): "7 study, 256",
    (7, "held out", "1,000 prompts"): "7 study, 1,000",
    (7, "held out", "2,000 prompts"): "7 study, 2,000",
}
#: The changes between neighbours, of which one is the largest.
NEIGHBOURS = [
    ("1 optimum, kappa", "2 fixed point of k3"),
    ("2 fixed point of k3", "3 table, 3,000 updates"),
    ("3 table, 100 updates", "4 network, groups of 64"),
    ("4 network, groups of 64", "5 network, groups of 8"),
    ("4 network, groups of 64", "6 rung 4, held out"),
    ("6 rung 4, held out", "7 study, 64 prompts"),
    ("7 study, 64 prompts", "7 study, 2,000"),
]
UNSEEN = NEIGHBOURS[4]
#: Seeds of rung 4 of which the last prediction speaks.
SEEDS = 3


def load() -> pd.DataFrame:
    """Return data/published/ladder.csv :func:`with_steps`."""
    return with_steps(pd.read_csv(paths.PUBLISHED / "ladder.csv"))


def with_steps(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table as of ladder.csv with the columns pass@1, pass@256 and step (of STEPS)."""
    keys = zip(table["rung"], table["on"], table["policy"], strict=True)
    of_steps = pd.CategoricalDtype(list(STEPS.values()))
    steps = pd.Series([STEPS.get(key) for key in keys], table.index, dtype=of_steps)
    solved = {"pass@1": table["p"], "pass@256": exact_pass_at_k(table["p"], [256])[:, 0]}
    return table.assign(**solved, step=steps)


def change(table: pd.DataFrame, arm: str, first: str, second: str, end: str) -> list[float]:
    """Return the change of a metric (of ENDS) from a step to another, with its 95 % interval over
    problems: [difference, low, high]; [] where the arm, such as grpo, lacks a step.

    It is paired by problem where both steps have the same problems.
    """
    of_arm = table[table["arm"] == arm]
    by_problem = of_arm.pivot_table(index="step", columns="problem", values=end, observed=True)
    by_problem = by_problem.reindex([first, second])
    before, after = (by_problem.loc[step].dropna() for step in (first, second))
    if before.empty or after.empty:
        return []
    if set(before.index) == set(after.index):
        test = ttest_rel(after, before.reindex(after.index))
    else:
        test = ttest_ind(after, before, equal_var=False)
    return [float(after.mean() - before.mean()), *map(float, test.confidence_interval())]


def outcomes(table: pd.DataFrame) -> pd.DataFrame:
    """Return what came of each prediction of ladder_claims.yaml, in its order: a row each.

    Columns predicted, measured (the numbers in words) and outcome: NOT_RUN where a change between
    neighbours, or one of the three seeds, is missing. No interval is over seeds.
    """
    rows: list[tuple[str, bool | None]] = []  # None: not run
    for end in ENDS:
        by_pair = {pair: change(table, "grpo", *pair, end) for pair in NEIGHBOURS}
        changes = {pair: numbers for pair, numbers in by_pair.items() if numbers}
        largest = min(changes, key=lambda pair: changes[pair][0])
        shown = [
            pair for pair in dict.fromkeys([UNSEEN, largest, NEIGHBOURS[2]]) if pair in changes
        ]
        words = "; ".join(_words(end, pair, changes[pair]) for pair in shown)
        rows.append((words, largest == UNSEEN if len(changes) == len(NEIGHBOURS) else None))
    mean = table.groupby(["step", "arm"], observed=True)[ENDS].mean()
    of_base = table[(table["rung"] == 0) & (table["on"] == "its prompts")].set_index("problem")["p"]
    top = table[table["rung"].isin([1, 2]) & (table["arm"] == "grpo")]
    lower = int((top["p"].to_numpy() < of_base[top["problem"]].to_numpy()).sum())
    least = top.groupby("rung")["pass@256"].mean().min()
    words = f"pass@256 {least:.3f}; {lower} problems are below the base"
    rows.append((words, lower == 0 and least > 0.99))
    p = mean["pass@1"]
    fixed_point, start = p["2 fixed point of k3", "grpo"], of_base.mean()
    once, often = (
        (p[f"3 table, {updates}", "grpo"] - start) / (fixed_point - start)
        for updates in ("one update", "3,000 updates")
    )
    words = f"of the way to rung 2: one update {once:.2f}, 3,000 updates {often:.2f}"
    rows.append((words, once < 0.1 and abs(often - 1) < 0.15))
    free = p["3 table, 3,000 updates", "grpo_no_kl"]
    rows.append((f"pass@1 {free:.3f} without KL, {fixed_point:.3f} at rung 2", free > fixed_point))
    shared = table[table["step"] == "4 network, groups of 64"]
    arms = ["grpo", "grpo_no_kl"]
    of_seed = shared.pivot_table("pass@256", "seed", "arm").reindex(columns=arms)
    losses = (of_seed["grpo_no_kl"] - of_seed["grpo"]).dropna()
    words = "pass@256 without KL minus with: " + ", ".join(f"{loss:+.3f}" for loss in losses)
    rows.append((words, bool((losses < -0.1).all()) if len(losses) >= SEEDS else None))
    of_rows = {True: AGREES, False: DISAGREES, None: NOT_RUN}
    judged = [(words, of_rows[agrees]) for words, agrees in rows]
    table = pd.DataFrame(judged, columns=["measured", "outcome"])
    claims = YAML(typ="safe").load(Path(__file__).with_name("ladder_claims.yaml"))
    table.insert(0, "predicted", claims["predictions"])
    return table


def _words(end: str, pair: tuple[str, str], change: list[float]) -> str:
    difference, low, high = change
    return f"{end}, {pair[0]} to {pair[1]}: {difference:+.3f} [{low:+.3f}, {high:+.3f}]"
