"""Tables made from saved samples and their scores: votes, tails, patterns, categories, solutions.

Every table names methods by their key in the column method.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from sage_lib import paths
from sage_lib.evaluation import metrics, text_patterns
from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile
from sage_lib.report import result_tables
from sage_lib.report.measured import by_seed, is_there, samples, scores
from sage_lib.report.result_tables import common_seeds
from sage_lib.tasks.verifier import last_answer

TAILS = ["method", "tail", "difference", "low", "high", "problems", "seeds", "holds_for"]
DEFECTS = ("format", "repetition", "language", "truncated")


def votes(profile: Profile) -> pd.DataFrame:
    """Per method and problem: method, dataset, problem, avg (avg@n), maj (maj@k), distinct, n, k.

    distinct is the number of different answers. k of maj@k is a quarter of the samples, and at
    least 3 where there are as many: a vote of all would have no spread. Equal answers are equal
    texts.
    """
    n, seed = profile.evaluation.samples, profile.evaluation.seed
    k = max(min(3, n), n // 4)
    rows = []
    for method in ("base", *profile.evaluated):
        for row in samples(profile, method):
            answers = [last_answer(text) or None for text in row["completions"]]
            rows.append(
                {
                    "method": method,
                    "dataset": row["dataset"],
                    "problem": row["problem"],
                    "avg": float(np.mean(row["correct"])),
                    "maj": metrics.majority_at_k(answers, row["correct"], k, 100, seed),
                    "distinct": metrics.distinct_answers(answers),
                    "n": len(answers),
                    "k": k,
                }
            )
    return pd.DataFrame(rows)


def is_scored(profile: Profile) -> bool:
    """Whether samples of every evaluated policy were scored under the base."""
    return all(is_there(run, "scores.csv") for _, _, run, _ in runs.evaluations(profile))


def tails(profile: Profile, quantile: float = 0.95, against: str = "base") -> pd.DataFrame:
    """How much of each method's perplexity under the base lies above the base's own ``quantile``.

    Columns :data:`TAILS`: the share above, and by how much more than ``against``'s it is, paired
    over seeds and problems, with its 95 % interval over both (NaN for that itself). A problem's
    share is a mean over its scored samples; means over problems are taken within data sets first.
    """
    frame = scores(profile)
    of_base = frame[frame["method"] == "base"]["perplexity"]
    above = frame["perplexity"] > of_base.quantile(quantile)
    frame["tail"] = above.astype(float)
    theirs, sets, of_theirs = by_seed(frame, against, ["tail"])
    rows = []
    for method in dict.fromkeys(frame["method"]):
        ours, _, of_ours = by_seed(frame, method, ["tail"])
        tail = metrics.mean_over_sets(ours.mean(axis=0), sets)
        (one, other), _ = common_seeds([(ours, of_ours), (theirs, of_theirs)])
        [row] = result_tables.difference_rows(one, other, ["tail"], sets)
        rows.append({"method": method, **row, "tail": float(tail[0])})
    return pd.DataFrame(rows, columns=TAILS)


def patterns(profile: Profile) -> pd.DataFrame:
    """Table 2 (eq. 13) and response defects by method.

    Columns method, each pattern, problems, dropped, each of :data:`DEFECTS` (shares of samples),
    samples. Of several seeds the correct samples of a problem are taken together, so that eq. 13
    ranges over problems.
    """
    rows = []
    for method in ("base", *profile.evaluated):
        saved = samples(profile, method)
        correct: dict[tuple[str, str], list[str]] = {}
        defects: Counter[str] = Counter()
        for row in saved:
            solutions = correct.setdefault((row["dataset"], row["problem"]), [])
            solutions += _correct_texts(row)
            for text, done in zip(row["completions"], row["finished"], strict=True):
                defects.update(set(text_patterns.defects(text, done)))
        frequencies = text_patterns.pattern_frequencies(list(correct.values()))
        one = next(iter(frequencies.values()))
        count = sum(len(row["completions"]) for row in saved)
        rows.append(
            {
                "method": method,
                **{name: found.frequency for name, found in frequencies.items()},
                "problems": one.problems,
                "dropped": one.dropped,
                **{kind: defects[kind] / count for kind in DEFECTS},
                "samples": count,
            }
        )
    return pd.DataFrame(rows)


def _correct_texts(row: dict[str, Any]) -> list[str]:
    """The correct completions of one row of samples, in the order in which they were drawn."""
    pairs = zip(row["completions"], row["correct"], strict=True)
    return [text for text, correct in pairs if correct]


def pattern_hits(profile: Profile, pattern: str) -> list[str]:
    """The correct samples of all evaluated methods in which a detector finds its pattern."""
    hits = []
    for method in ("base", *profile.evaluated):
        for row in samples(profile, method):
            texts = _correct_texts(row)
            hits += [text for text in texts if pattern in text_patterns.patterns(text)]
    return hits


def detector_precision() -> pd.DataFrame:
    """How often a pattern's keyword stood for the pattern.

    Columns pattern, hits, read, genuine, low, high (95 %, Clopper-Pearson). One reader judged up to
    20 hits a pattern (seed 0), among the worked solutions of MATH-500, AIME 2024 and Minerva, from
    90 characters on either side; data/published/detectors/precision.csv names them.
    """
    rows = []
    for pattern, group in pd.read_csv(paths.DETECTORS).groupby("pattern", sort=False):
        hits, read, genuine = group["hits"].iloc[0], len(group), group["genuine"].sum()
        interval = binomtest(int(genuine), read).proportion_ci(method="exact")
        rows.append((pattern, hits, read, genuine, interval.low, interval.high))
    return pd.DataFrame(rows, columns=["pattern", "hits", "read", "genuine", "low", "high"])


def token_categories(profile: Profile) -> pd.DataFrame:
    """Share of each token category (exploration report, Table 1) among all samples of a method.

    Columns method, each of text_patterns.CATEGORIES, tokens a sample (mean).
    """
    rows = []
    for method in ("base", *profile.evaluated):
        saved = samples(profile, method)
        texts = Counter(text for row in saved for text in row["completions"])
        found: Counter[str] = Counter()
        for text, times in texts.items():  # equal texts are read once
            for category, count in text_patterns.categories(text).items():
                found[category] += count * times
        total = max(found.total(), 1)
        lengths = [tokens for row in saved for tokens in row["tokens"]]
        rows.append(
            {
                "method": method,
                **{category: found[category] / total for category in text_patterns.CATEGORIES},
                "tokens a sample": float(np.mean(lengths)),
            }
        )
    return pd.DataFrame(rows)


def side_by_side(profile: Profile, methods: Sequence[str]) -> pd.DataFrame:
    """Appendix H: one problem that every method solved, and the first correct solution of each.

    The last such problem in the order of the data. Columns method, problem (data set/id), solution;
    no rows where no problem was solved by all. Of several seeds the first is read.
    """
    saved: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for method in methods:
        by_problem = saved.setdefault(method, {})
        for row in samples(profile, method):
            by_problem.setdefault((row["dataset"], row["problem"]), row)
    rows: list[tuple[str, str, str]] = []
    for place in reversed(saved[methods[0]]):
        if all(any(saved[method][place]["correct"]) for method in methods):
            for method in methods:
                solution = _correct_texts(saved[method][place])[0]
                rows.append((method, "/".join(place), solution))
            break
    return pd.DataFrame(rows, columns=["method", "problem", "solution"])
