"""Saved samples: reasoning patterns, defects and solutions."""

from collections import Counter
from collections.abc import Sequence

import pandas as pd

from sage_lib.evaluation import text_patterns
from sage_lib.experiment.results import Results
from sage_lib.report.passk import PROBLEM, of_sets

#: Kinds of `text_patterns.defects`.
DEFECTS = ("format", "repetition", "language", "truncated")


def saved_samples(results: Results, methods: Sequence[str]) -> pd.DataFrame:
    """Return the saved samples of some methods on the data of Table 1."""
    rows = of_sets(results.samples, results.profile, ood=False)
    return rows[rows["method"].isin(methods)]


def pattern_table(results: Results, methods: Sequence[str]) -> pd.DataFrame:
    """Return Table 2 (eq. 13) and response defects (shares of samples): a row for each method.

    ``dropped`` counts problems without a correct sample. Correct samples of several seeds are
    pooled, so that eq. 13 is a mean over problems.
    """
    rows = []
    for method, frame in saved_samples(results, methods).groupby("method", sort=False):
        correct = frame["completion"].where(frame["correct"])
        texts = [list(of.dropna()) for _, of in correct.groupby([frame[c] for c in PROBLEM])]
        frequencies = text_patterns.pattern_frequencies(texts)
        first = next(iter(frequencies.values()))
        defects: Counter[str] = Counter()
        kinds = frame.groupby(["completion", "finished"]).size()
        for (text, finished), times in kinds.items():  # equal texts are read once
            defects.update(dict.fromkeys(text_patterns.defects(text, finished), times))
        row = {"method": method, **{name: of.frequency for name, of in frequencies.items()}}
        row |= {"problems": first.problems, "dropped": first.dropped}
        rows.append(row | {kind: defects[kind] / len(frame) for kind in DEFECTS})
    return pd.DataFrame(rows)


def side_by_side(results: Results, methods: Sequence[str]) -> tuple[pd.DataFrame, dict[int, int]]:
    """Return solutions of one problem (Appendix H): of those that all methods solved the last one
    with the most different solutions.

    The solution is the first correct sample of the method's first seed. The table has a row for
    each method; the mapping says how many problems have how many different solutions. Without such
    a problem both are empty.
    """
    frame = saved_samples(results, methods)
    first = frame[frame["run"] == frame.groupby("method")["run"].transform("first")]
    solved = first[first["correct"]].drop_duplicates(["method", *PROBLEM])
    by_problem = solved.groupby(PROBLEM, sort=False)["completion"]
    common = solved[by_problem.transform("size") == len(methods)]
    if common.empty:
        return pd.DataFrame(columns=["method", *PROBLEM, "solution"]), {}
    common = common.assign(different=by_problem.transform("nunique"))
    most = common[common["different"] == common["different"].max()]
    last = most[most["method"] == most["method"].iloc[0]].iloc[-1]
    rows = common[(common[PROBLEM] == last[PROBLEM]).all(axis=1)]
    rows = rows.set_index("method").loc[list(methods)].reset_index()
    rows = rows.rename(columns={"completion": "solution"})[["method", *PROBLEM, "solution"]]
    numbers = common.drop_duplicates(PROBLEM)["different"].value_counts().sort_index()
    return rows, {int(number): int(times) for number, times in numbers.items()}
