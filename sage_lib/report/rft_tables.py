"""Rejection-sampling fine-tuning beside RL: budgets, rounds, and what the report says of it.

The exploration report's Table 3 trains a model of 32B parameters on mathematics and counts samples;
here pass@k is exact, on countdown. A statement's outcome follows from the intervals by the rule of
:mod:`verdict`; nothing is decided by fewer than three seeds.
"""

from typing import Any

import pandas as pd

from sage_lib.experiment import records, runs
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.report import arm_tables, exact_tables
from sage_lib.report.claims import Claim, Comparison
from sage_lib.report.front_tables import AXES
from sage_lib.report.measured import named, table_of
from sage_lib.report.style import count

#: RL beside which rounds of rejection sampling stand: without an anchor, at the authors' beta, at
#: the profile's, and with the guide.
RL_ARMS = ("grpo_no_kl", "grpo_front_beta0.05", "grpo", "grpo_branch", "branch_strong")
BUDGET = ["method", "seeds", "drawn", "learned", "steps", "seconds"]
#: What a selection goes by, in rounds.csv.
SIGNALS = ("entropy", "branching", "perplexity", "position", "tokens")

#: What the report says of its Table 3, as comparisons of exact pass@k.
CLAIMS = (
    Claim(
        "RFT learns",
        "Table 3",
        "rule-filtered RFT raises pass@1 over its base, and not pass@k",
        (
            Comparison("rft", BASE, "pass@1", "above"),
            Comparison("rft", BASE, "pass@256", "not above"),
        ),
        "more seeds",
    ),
    Claim(
        "noise explores",
        "Table 3, 4.4.1",
        "5 % wrong completions raise pass@k (on AIME24) and leave pass@1 as it is",
        (
            Comparison("rft_noise", "rft", "pass@256", "above"),
            Comparison("rft_noise", "rft", "pass@1", "equal"),
        ),
        "more seeds",
    ),
    Claim(
        "high entropy explores",
        "Table 3, 4.4.1",
        "selecting completions of high entropy raises pass@k",
        (Comparison("rft_entropy", "rft", "pass@256", "above"),),
        "more seeds",
    ),
    Claim(
        "high branching explores",
        "Table 3, 4.4.1",
        "selecting completions of a high branching factor raises pass@k",
        (Comparison("rft_branching", "rft", "pass@256", "above"),),
        "more seeds",
    ),
    Claim(
        "beats RL at pass@k",
        "Table 3, 4.4.1",
        "with noise and high branching it beats RL in pass@k (its pass@1 lies below RL's there)",
        (Comparison("rft_noise_branching", "grpo_no_kl", "pass@256", "above"),),
        "more seeds; another anchor of RL is another baseline, see the front",
    ),
)


def arms(profile: Profile, family: str = "rft") -> list[str]:
    """Keys of the evaluated methods that rounds of rejection sampling train, of one family."""
    return [
        key
        for key in profile.evaluated
        if profile.methods[key].rft is not None and profile.methods[key].family == family
    ]


def rl_arms(profile: Profile) -> list[str]:
    """Those of :data:`RL_ARMS` that the profile evaluates."""
    return [key for key in RL_ARMS if key in profile.evaluated]


def missing(profile: Profile) -> str:
    """A sentence that names what of rejection sampling was not run; "" where nothing is missing."""
    if arms(profile):
        return arm_tables.missing(profile, "rft")
    if profile.published:
        return (
            "No run of rejection-sampling fine-tuning is published yet: "
            f"sage-companion grid {profile.name} --only rft makes them."
        )
    return f"The profile {profile.name} has no method that rejection sampling trains."


def rounds(profile: Profile) -> pd.DataFrame:
    """What each round drew, refused and selected: columns method, seed and those of rounds.csv."""
    frames = [
        table_of(profile, run, "rounds.csv").assign(method=method, seed=seed)
        for method, seed, run in runs.rl_runs(profile)
        if profile.methods[method].rft is not None
    ]
    if not frames:
        return pd.DataFrame(columns=["method", "seed", "round", "step", "drawn"])
    table = pd.concat(frames, ignore_index=True)
    return table[["method", "seed", *(c for c in table if c not in ("method", "seed"))]]


def selected(profile: Profile) -> pd.DataFrame:
    """By how much the selected completions differ from the eligible ones, and the rest of a round.

    Means over rounds and seeds by method: shares of the drawn that are correct and that the rules
    refuse, eligible and selected completions, wrong and different ones among these, and for each of
    :data:`SIGNALS` the mean over the selected minus that over the eligible.
    """
    table = rounds(profile)
    table = table[table["drawn"] > 0]
    if table.empty:
        return pd.DataFrame(columns=["method", "correct"])
    refused = table[["no answer", "no digit", "redundant"]].sum(axis=1)
    shown = table[["method", "eligible", "selected", "wrong", "distinct"]].assign(
        correct=table["correct"] / table["drawn"], refused=refused / table["drawn"]
    )
    for name in SIGNALS:
        shown[f"{name} gained"] = table[f"selected {name}"] - table[f"eligible {name}"]
    return shown.groupby("method", sort=False).mean().reset_index()


def budgets(profile: Profile) -> pd.DataFrame:
    """What each arm drew and learned from, of one run: columns :data:`BUDGET`.

    ``learned`` counts gradient samples, one as often as it is used; ``drawn`` of rejection sampling
    is counted in its rounds, of RL it follows from its settings. Seconds are the mean over seeds.
    """
    counted = rounds(profile).groupby(["method", "seed"])["drawn"].sum()
    chosen = [*rl_arms(profile), *arms(profile), *arms(profile, "more_sft")]
    rows: list[dict[str, Any]] = []
    for method in chosen:
        own = [run for key, _, run in runs.rl_runs(profile) if key == method]
        made = [records.load(run.record) for run in own if run.record.is_file()]
        steps = profile.steps_of(method)
        if profile.methods[method].rft is None:
            batch = completions_a_step(profile)
            drawn = steps * batch
        else:
            rft = profile.rft_of(method)
            accumulated = int(rft.sft.get("gradient_accumulation_steps", 1))
            batch = int(rft.sft["per_device_train_batch_size"]) * accumulated
            drawn = round(counted.loc[method].mean())
        seconds = sum(record["seconds"] for record in made) / max(1, len(made))
        row = {"method": method, "seeds": len(made), "drawn": drawn, "learned": steps * batch}
        rows.append({**row, "steps": steps, "seconds": seconds})
    return pd.DataFrame(rows, columns=BUDGET)


def completions_a_step(profile: Profile) -> int:
    """Completions that an RL step draws and learns from."""
    return int(
        profile.rl["per_device_train_batch_size"] * profile.rl["gradient_accumulation_steps"]
    )


def by_samples(profile: Profile) -> pd.DataFrame:
    """Exact pass@k in training by completions drawn, of RL and of rejection sampling.

    Columns method, seed, drawn and those of :func:`exact_tables.along_training`. A gradient step of
    either is one of RL's in completions, see the section ``rft`` of the profile; the methods that
    draw nothing are left out.
    """
    found = exact_tables.along_training(profile)
    chosen = [*rl_arms(profile), *arms(profile)]
    found = found[found["method"].isin(chosen)]
    a_step = {
        method: completions_a_step(profile)
        if profile.methods[method].rft is None
        else profile.rft_of(method).drawn / profile.rft_of(method).steps
        for method in chosen
    }
    return found.assign(drawn=found["step"] * found["method"].map(a_step))


def takeaways(profile: Profile, outside: pd.DataFrame, claims: pd.DataFrame) -> list[str]:
    """What the data say, in sentences that are filled in from them.

    ``outside`` as :func:`front_tables.outside` gives it, ``claims`` as :func:`verdict.claims`.
    """
    lacking = missing(profile)
    lines = [lacking] if lacking else []
    if not arms(profile):
        return lines
    found = exact_tables.by_method(profile, AXES)
    base = found[BASE].values.mean(axis=(0, 1))
    for key in arms(profile):
        now = found[key].values.mean(axis=(0, 1))
        seeds = count(len(found[key].seeds), "seed")
        lines.append(
            f"{profile.label(key)} ({seeds}): pass@1 {base[0]:.3f} -> "
            f"{now[0]:.3f}, pass@256 {base[1]:.3f} -> {now[1]:.3f}"
        )
    of_rft = outside[outside["method"].isin(arms(profile))]
    for verdict, group in of_rft.groupby("verdict", sort=False):
        lines.append(
            f"against GRPO's front over beta, {verdict}: {named(profile, group['method'])}"
        )
    for result, group in claims.groupby("outcome", sort=False):
        lines.append(f"{result}: {'; '.join(group['claim'])}")
    return lines
