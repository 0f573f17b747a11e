"""A user's own results beside the published ones of the same profile."""

import argparse

import numpy as np
import pandas as pd

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.evaluation.metrics import bootstrap_interval, pass_at_k
from sage_lib.experiment import results
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.results import load_results
from sage_lib.files import SAME
from sage_lib.pipeline import arguments, plan
from sage_lib.text import visible

#: Outcome and detail where the two share no run.
NOTHING = "nothing in common", "no run of yours is among the published ones"


def compare(profile: Profile) -> pd.DataFrame:
    """Compare a user's results with the published ones: weights, pass@k, and each table.

    Returns columns result, outcome and detail. Raises SageError where nothing is published, or the
    user has no results.
    """
    if profile.name not in results.published():
        listed = ", ".join(results.published())
        raise SageError(f"nothing is published for {profile.name}, only for {listed}")
    local, published = load_results(profile.spec, own=True), load_results(profile.spec)
    rows = [("weights", *compare_weights(local.runs, published.runs))]
    for k in sorted({min(profile.evaluation.ks), max(profile.evaluation.ks)}):
        rows.append((f"pass@{k}", *compare_counts(local.counts, published.counts, k)))
    folders = (paths.measured(profile.name), paths.measured(profile.name, published=True))
    for theirs in sorted(folders[1].glob("*.csv")):
        if (mine := folders[0] / theirs.name).is_file():
            rows.append((theirs.stem, *compare_tables(pd.read_csv(mine), pd.read_csv(theirs))))
    return pd.DataFrame(rows, columns=["result", "outcome", "detail"])


def compare_weights(local: pd.DataFrame, published: pd.DataFrame) -> tuple[str, str]:
    """Count the trained models whose weights are bit for bit the published ones."""
    trained = [frame[frame["stage"].isin(["sft", "rl"])] for frame in (local, published)]
    pairs = trained[0].merge(trained[1], on="run", suffixes=("", " published"))
    if pairs.empty:
        return NOTHING
    same = int((pairs["weights"] == pairs["weights published"]).sum())
    detail = f"{same} of {len(pairs)} models are the same to the last bit"
    if same < len(pairs) and (pairs["processor"] != pairs["processor published"]).any():
        detail += "; another processor, as here, rounds otherwise"
    return "identical" if same == len(pairs) else "differs", detail


def compare_counts(local: pd.DataFrame, published: pd.DataFrame, k: int) -> tuple[str, str]:
    """Count the values of pass@k, one for each policy and data set, that lie in the published 95 %
    intervals over problems."""
    by = ["run", "dataset"]
    mine, within, same = dict(list(local.groupby(by))), [], True
    for key, theirs in published.groupby(by):
        if key not in mine or theirs["n"].min() < k or mine[key]["n"].min() < k:
            continue
        ours, stored = (pass_at_k(table["n"], table["c"], k) for table in (mine[key], theirs))
        low, high = (float(end[0]) for end in bootstrap_interval(stored, resamples=1000, seed=0))
        within.append(low <= ours.mean() <= high)
        same = same and np.array_equal(ours, stored)
    if not within:
        return NOTHING
    outcome = "identical" if same else "within its interval" if all(within) else "differs"
    return outcome, f"{sum(within)} of {len(within)} values lie in the published intervals"


def compare_tables(local: pd.DataFrame, published: pd.DataFrame) -> tuple[str, str]:
    """Compare two tables, apart from seconds, which depend on the machine. The detail is the first
    difference that pandas sees."""
    both = (table.loc[:, ~table.columns.str.contains("seconds")] for table in (local, published))
    try:
        pd.testing.assert_frame_equal(*both, check_dtype=False, rtol=SAME, atol=1e-12)
    except AssertionError as error:
        said = str(error).splitlines()
        return "differs", f"{said[2]}: {said[-1]}"
    return "identical", ""


def show(profile: Profile) -> None:
    table = plan.text(compare(profile))
    title = f"own results of {profile.name} beside the published ones"
    print(visible(f"\n{title}\n{table}"), flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_profile(parser)


def run_compare(options: argparse.Namespace) -> None:
    show(arguments.named_profile(options))
