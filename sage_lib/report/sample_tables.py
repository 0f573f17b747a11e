"""Tables made from saved samples and their scores: votes, perplexity, reasoning patterns, token categories, solutions."""

import gzip
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.evaluation import counts, metrics, text_patterns
from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile
from sage_lib.report import tables
from sage_lib.tasks.verifier import last_answer


def scores(profile: Profile) -> pd.DataFrame:
    """Scored samples of every finished evaluation on the data of Table 1: columns method, seed and scoring.COLUMNS."""
    frames = [
        tables.read(run, "scores.csv").assign(method=method, seed=seed)
        for method, seed, run, _ in runs.evaluations(profile)
    ]
    return tables.of_sets(pd.concat(frames, ignore_index=True), profile, ood=False)


def samples(profile: Profile, method: str) -> list[dict]:
    """Every saved sample of a method on the data of Table 1, a row per problem (and seed): dataset, problem, completions,
    tokens, finished, correct."""
    chosen = [run for m, _, run, _ in runs.evaluations(profile) if m == method]
    if not chosen:
        raise SageError(
            f"profile {profile.name} does not evaluate {method!r}: choose one of base, {', '.join(runs.evaluated(profile))}"
        )
    for run in chosen:
        counts.read(run.measured / "counts.csv")  # a sentence for an evaluation that is not there
    rows = [
        json.loads(line)
        for run in chosen
        for line in gzip.decompress((run.measured / "samples.jsonl.gz").read_bytes())
        .decode()
        .split("\n")
        if line
    ]
    return [row for row in rows if row["dataset"] in tables.chosen_sets(profile)]


def votes(profile: Profile) -> pd.DataFrame:
    """Per method and problem: columns method, dataset, problem, avg (avg@n), maj (maj@k), distinct (answer diversity), n, k.

    k of maj@k is a quarter of the samples, and at least 3 where there are as many: a vote of all would have no spread. Equal
    answers are equal texts.
    """
    k, rows = max(min(3, profile.evaluation.samples), profile.evaluation.samples // 4), []
    for method in ("base", *runs.evaluated(profile)):
        for row in samples(profile, method):
            answers = [last_answer(text) or None for text in row["completions"]]
            rows.append(
                {
                    "method": method,
                    "dataset": row["dataset"],
                    "problem": row["problem"],
                    "avg": float(np.mean(row["correct"])),
                    "maj": metrics.majority_at_k(
                        answers, row["correct"], k, 100, profile.evaluation.seed
                    ),
                    "distinct": metrics.distinct_answers(answers),
                    "n": len(answers),
                    "k": k,
                }
            )
    return pd.DataFrame(rows)


def tails(profile: Profile, quantile: float = 0.95) -> pd.DataFrame:
    """How much of each method's perplexity under the base lies above the base's own ``quantile``, and paired over problems by how
    much more than the base's: columns row, tail, difference, low, high (95 % over problems), problems, seeds.

    A problem's share is a mean over its scored samples (and seeds); means over problems are taken within data sets first.
    """
    frame = scores(profile)
    frame["tail"] = (
        frame["perplexity"] > frame[frame["method"] == "base"]["perplexity"].quantile(quantile)
    ).astype(float)
    shares = frame.groupby(["method", "dataset", "problem"], sort=False)["tail"].mean()
    base, rows = shares["base"], []
    for method in dict.fromkeys(frame["method"]):
        ours, sets = (
            shares[method].loc[base.index].to_numpy(),
            base.index.get_level_values("dataset"),
        )
        difference, low, high = (
            float(x[0])
            for x in metrics.paired_difference(
                ours[:, None],
                base.to_numpy()[:, None],
                profile.evaluation.resamples,
                profile.evaluation.seed,
                sets,
            )
        )
        rows.append(
            (
                tables.label(profile, method),
                float(metrics.mean_over_sets(ours[:, None], sets)[0]),
                difference,
                low,
                high,
                len(ours),
                frame[frame["method"] == method]["seed"].nunique(dropna=False),
            )
        )
    return pd.DataFrame(
        rows, columns=["row", "tail", "difference", "low", "high", "problems", "seeds"]
    )


def patterns(profile: Profile) -> pd.DataFrame:
    """Table 2 (eq. 13) and response defects by method: columns row, each pattern, problems, dropped, each defect, samples.

    Of several seeds the correct samples of a problem are taken together, so that eq. 13 ranges over problems.
    """
    rows = []
    for method in ("base", *runs.evaluated(profile)):
        saved = samples(profile, method)
        correct: dict[tuple[str, str], list[str]] = {}
        for r in saved:
            correct.setdefault((r["dataset"], r["problem"]), []).extend(
                t for t, ok in zip(r["completions"], r["correct"], strict=True) if ok
            )
        frequencies = text_patterns.pattern_frequencies(list(correct.values()))
        found = [
            text_patterns.defects(t, done)
            for r in saved
            for t, done in zip(r["completions"], r["finished"], strict=True)
        ]
        one = next(iter(frequencies.values()))
        rows.append(
            {
                "row": tables.label(profile, method),
                **{name: f.frequency for name, f in frequencies.items()},
                "problems": one.problems,
                "dropped": one.dropped,
                **{
                    kind: sum(kind in f for f in found) / len(found)
                    for kind in ("format", "repetition", "language", "truncated")
                },
                "samples": len(found),
            }
        )
    return pd.DataFrame(rows)


def detector_precision() -> pd.DataFrame:
    """How often a pattern's keyword stood for the pattern: columns pattern, hits, read, genuine, low, high (95 %, Clopper-Pearson).

    One reader judged up to 20 hits a pattern (seed 0), among the worked solutions of MATH-500, AIME 2024 and Minerva, from 90
    characters on either side; data/measured/detectors/precision.csv names them.
    """
    rows = []
    for pattern, group in pd.read_csv(paths.DETECTORS).groupby("pattern", sort=False):
        interval = binomtest(int(group["genuine"].sum()), len(group)).proportion_ci(method="exact")
        rows.append(
            (
                pattern,
                group["hits"].iloc[0],
                len(group),
                group["genuine"].sum(),
                interval.low,
                interval.high,
            )
        )
    return pd.DataFrame(rows, columns=["pattern", "hits", "read", "genuine", "low", "high"])


def token_categories(profile: Profile) -> pd.DataFrame:
    """Share of each token category (exploration report, Table 1) among all samples of a method, and mean tokens a sample."""
    rows = []
    for method in ("base", *runs.evaluated(profile)):
        saved, counts = samples(profile, method), Counter()
        for text, times in Counter(t for r in saved for t in r["completions"]).items():
            counts.update({k: v * times for k, v in text_patterns.categories(text).items()})
        rows.append(
            {
                "row": tables.label(profile, method),
                **{k: counts[k] / max(counts.total(), 1) for k in text_patterns.CATEGORIES},
                "tokens a sample": float(np.mean([n for r in saved for n in r["tokens"]])),
            }
        )
    return pd.DataFrame(rows)


def side_by_side(profile: Profile, methods: Sequence[str]) -> pd.DataFrame:
    """Appendix H: one problem that every method solved, and the first correct solution of each; columns row, problem, solution."""
    saved = {
        m: {(r["dataset"], r["problem"]): r for r in reversed(samples(profile, m))} for m in methods
    }
    for place in saved[methods[0]]:
        if all(any(saved[m][place]["correct"]) for m in methods):
            return pd.DataFrame(
                [
                    {
                        "row": tables.label(profile, m),
                        "problem": "/".join(place),
                        "solution": next(
                            t
                            for t, ok in zip(
                                saved[m][place]["completions"],
                                saved[m][place]["correct"],
                                strict=True,
                            )
                            if ok
                        ),
                    }
                    for m in methods
                ]
            )
    return pd.DataFrame(columns=["row", "problem", "solution"])
