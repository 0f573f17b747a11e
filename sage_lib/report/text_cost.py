"""What natural language would take: the cost of a finding, from the records of a run too short for
one.

The profile ``smollm`` takes the whole pipeline through text in a few RL steps and finds nothing.
Its records say what a step and a sample cost, and its counts how far problems lie apart: from both
follow the problems and hours that a difference of a given size needs.
"""

import math

import numpy as np
import pandas as pd
from scipy.stats import norm

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.evaluation import counts
from sage_lib.evaluation.metrics import pass_at_k
from sage_lib.experiment import records
from sage_lib.experiment.profile import Profile

COST = ["quantity", "value", "unit", "from"]


def problems_needed(
    spread: float, difference: float, power: float = 0.8, level: float = 0.95
) -> int:
    """Problems at which a paired difference of two checkpoints is found with ``power``.

    ``spread`` is the standard deviation over problems of the paired differences, ``difference`` the
    one to be found, in the same unit: n = ((z_(1-(1-level)/2) + z_power) * spread / difference)^2,
    of the normal distribution. Training seeds add to it: this is the least.
    """
    if difference <= 0:
        raise SageError(f"a difference to be found is above 0, not {difference}")
    z = norm.ppf(0.5 + level / 2) + norm.ppf(power)
    return math.ceil((z * spread / difference) ** 2)


def what_it_takes(
    profile: Profile,
    steps: int,
    seeds: int,
    difference: float,
    samples: int,
) -> pd.DataFrame:
    """What separates the profile's methods from its reference: columns :data:`COST`.

    Args:
        profile: whose published records and counts are read, whatever their settings were: a cost
            is a cost.
        steps: RL steps of a run, such as the paper's 1,000.
        seeds: training runs of a method.
        difference: of pass@1, to be found.
        samples: of a problem, such as the paper's 256.

    Hours are of one process and thread of the machine in the records. Without rows where nothing of
    the profile is published. Raises SageError where counts are missing or damaged.
    """
    folder = paths.measured(profile.name, published=True)
    trained = {path.parent.name: records.load(path) for path in folder.glob("rl/*/record.json")}
    drawn = {path.parent.name: path.parent for path in folder.glob("evaluation/*/record.json")}
    if not trained or "sft" not in drawn:
        return pd.DataFrame(columns=COST)
    of_step = [r["seconds"] / r["settings"]["rl"]["max_steps"] for r in trained.values()]
    tables = {name: counts.read(place / "counts.csv") for name, place in drawn.items()}
    of_sample = [
        records.load(place / "record.json")["seconds"] / tables[name]["n"].sum()
        for name, place in drawn.items()
    ]
    base = pass_at_k(tables["sft"]["n"].to_numpy(), tables["sft"]["c"].to_numpy(), 1)
    # A few steps leave the policies alike. After many, their differences spread at most as far as
    # those of two policies that have nothing in common: twice the variance of one.
    spread = float(np.sqrt(2) * base.std(ddof=1))
    step, sample = float(np.mean(of_step)), float(np.mean(of_sample))
    needed = problems_needed(spread, difference)
    training, evaluation = steps * step / 3600, needed * samples * sample / 3600
    runs = len(profile.train or profile.methods) * seeds
    here = f"{len(trained)} runs of {trained[min(trained)]['settings']['rl']['max_steps']} steps"
    read = f"{len(base)} problems, {int(tables['sft']['n'].iloc[0])} samples each"
    rows = [
        ("pass@1 of the base", float(base.mean()), "", read),
        ("seconds of an RL step", step, "s", here),
        ("seconds of a sample", sample, "s", read),
        ("spread of differences in pass@1 over problems, at most", spread, "", read),
        (f"problems that show a difference of {difference:g}", needed, "problems", "the spread"),
        (f"training: {steps:,} steps", training, "hours a run", "the step"),
        (f"evaluation: {samples} samples a problem", evaluation, "hours a run", "the sample"),
        (f"{runs} runs and the base", runs * training + (runs + 1) * evaluation, "hours", "both"),
    ]
    return pd.DataFrame(rows, columns=COST)
