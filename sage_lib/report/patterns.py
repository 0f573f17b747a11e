"""What saved samples show: reasoning patterns and defects, answers and votes."""

from collections import Counter
from collections.abc import Sequence

import pandas as pd

from sage_lib.evaluation import metrics, text_patterns
from sage_lib.experiment.results import Results
from sage_lib.report.passk import of_sets
from sage_lib.tasks.verifier import last_answer

#: Kinds of `text_patterns.defects`.
DEFECTS = ("format", "repetition", "language", "truncated")
PROBLEM = ["dataset", "problem"]
#: How often a vote of k samples is drawn.
DRAWS = 100


def saved_samples(results: Results, methods: Sequence[str]) -> pd.DataFrame:
    """The saved samples of some methods on the data of Table 1."""
    found = of_sets(results.samples, results.profile, ood=False)
    return found[found["method"].isin(methods)]


def pattern_table(results: Results, methods: Sequence[str]) -> pd.DataFrame:
    """Table 2 (eq. 13) and response defects: a row for each method.

    Columns method, each pattern, problems, dropped (those without a correct sample), each of
    DEFECTS (shares of samples). Correct samples of several seeds are taken together, so that
    eq. 13 ranges over problems.
    """
    rows = []
    for method, frame in saved_samples(results, methods).groupby("method", sort=False):
        correct = frame["completion"].where(frame["correct"])
        texts = [list(one.dropna()) for _, one in correct.groupby([frame[c] for c in PROBLEM])]
        found = text_patterns.pattern_frequencies(texts)
        one = next(iter(found.values()))
        defects: Counter[str] = Counter()
        kinds = frame.groupby(["completion", "finished"]).size()
        for (text, finished), times in kinds.items():  # equal texts are read once
            defects.update(dict.fromkeys(text_patterns.defects(text, finished), times))
        row = {"method": method, **{name: of.frequency for name, of in found.items()}}
        row |= {"problems": one.problems, "dropped": one.dropped}
        rows.append(row | {kind: defects[kind] / len(frame) for kind in DEFECTS})
    return pd.DataFrame(rows)


def side_by_side(results: Results, methods: Sequence[str]) -> pd.DataFrame:
    """Appendix H: the last problem that every method solved, and the first correct solution of
    each in its first seed. Columns method, dataset, problem, solution; no rows without one."""
    frame = saved_samples(results, methods)
    first = frame[frame["run"] == frame.groupby("method")["run"].transform("first")]
    solved = first[first["correct"]].drop_duplicates(["method", *PROBLEM])
    by_all = solved.groupby(PROBLEM, sort=False)["method"].transform("size") == len(methods)
    common = solved[by_all]
    if common.empty:
        return pd.DataFrame(columns=["method", *PROBLEM, "solution"])
    last = common[common["method"] == common["method"].iloc[0]].iloc[-1]
    chosen = common[(common[PROBLEM] == last[PROBLEM]).all(axis=1)]
    chosen = chosen.set_index("method").loc[list(methods)].reset_index()
    return chosen.rename(columns={"completion": "solution"})[["method", *PROBLEM, "solution"]]


def votes(results: Results, methods: Sequence[str]) -> pd.DataFrame:
    """avg@n, maj@k and the number of different answers, of each run and problem.

    Columns method, seed, dataset, problem, avg, maj, distinct, n, k. k is a quarter of the
    samples, and at least 3: a vote of all would have no spread. Equal answers are equal texts.
    """
    n, seed = results.profile.evaluation.samples, results.profile.evaluation.seed
    k = max(min(3, n), n // 4)
    rows = []
    groups = saved_samples(results, methods).groupby(
        ["method", "seed", *PROBLEM], sort=False, dropna=False
    )
    for names, one in groups:
        answers = [last_answer(text) or None for text in one["completion"]]
        correct = list(one["correct"])
        maj = metrics.majority_at_k(answers, correct, k, DRAWS, seed)
        distinct = metrics.distinct_answers(answers)
        rows.append((*names, one["correct"].mean(), maj, distinct, n, k))
    columns = ["method", "seed", *PROBLEM, "avg", "maj", "distinct", "n", "k"]
    return pd.DataFrame(rows, columns=columns)
