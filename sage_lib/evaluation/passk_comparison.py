"""pass@k of policies with intervals; their paired differences with a band over all k at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sage_lib.errors import SageError
from sage_lib.evaluation import bands, metrics
from sage_lib.evaluation.policy_counts import Counts, PolicyCounts, counted, read_policy
from sage_lib.text import count

#: Of the structure of a result.
FORMAT = 1
#: Fewer problems than this make intervals that are wide, whatever is compared.
FEW_PROBLEMS = 30
#: Values of k, which nobody chose, at most: what is drawn for the intervals has to fit in memory.
MOST_KS = 10_000
#: Numbers of two results that differ by less than this are the same.
SAME = 1e-9
Source = str | Path | Counts | Sequence[Counts]


def pass_at_k(
    policy: Source,
    against: Source | None = None,
    ks: Sequence[int] | None = None,
    metric: str | None = None,
    filter: str | None = None,
    threshold: float | None = None,
) -> dict[str, Any]:
    """Return unbiased pass@k of a policy, and its difference to another with a band over all k.

    The command ``sage-companion pass-at-k --json`` prints the same.

    Args:
        policy: A file, as the command takes it (``[LABEL=]FILE``, ``a.jsonl,b.jsonl`` for two
            training seeds); or right samples and samples by problem, as in ``{"p1": (3, 8)}``, in a
            list with one such mapping for each training seed.
        against: What it is compared with.
        ks: Values of k; without them 1, 2, ... up to the fewest samples of a problem.
        metric: The verdict, where a file has several.
        filter: One of the filters of lm-evaluation-harness.
        threshold: A score of at least this is right.

    Returns:
        ``ks``; ``policies``, each with its curve; ``differences``, at most one (see
        :func:`compare`); ``notes``.

    SageError for files that cannot be read, for a k above the samples, and where two policies share
    fewer than two problems.
    """
    sides = []
    for name, source in {"policy": policy, "against": against}.items():
        if isinstance(source, str | Path):
            sides.append(read_policy(str(source), metric, filter, threshold))
        elif source is not None:
            sides.append(counted(name, source))
    return report(sides, ks, compared=against is not None)


def report(
    policies: Sequence[PolicyCounts], ks: Sequence[int] | None, compared: bool
) -> dict[str, Any]:
    """Return the curves of policies and, if `compared`, the difference of each to the last."""
    labels = [side.label for side in policies]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise SageError(f"two policies are called {twice}: write LABEL=FILE for one of them")
    fewest = min(side.fewest for side in policies)
    if not ks and fewest > MOST_KS:
        raise SageError(f"of {fewest:,} samples not every k can be shown: give some by --ks")
    sizes = sorted(set(ks)) if ks else list(range(1, fewest + 1))
    described = [_described(side, sizes) for side in policies]
    pairs = [(ours, policies[-1]) for ours in policies[:-1]] if compared else []
    notes = [note for side in policies for note in _notes(side)]
    if len(policies) > 2 and not compared:
        notes.append("nothing is compared: --against FILE gives each policy's difference to one")
    return {
        **{"format": FORMAT, "level": 0.95, "ks": sizes},
        "policies": described,
        "differences": [compare(*pair, sizes) for pair in pairs],
        "notes": notes,
    }


def _described(side: PolicyCounts, ks: Sequence[int]) -> dict[str, Any]:
    mean, low, high = curve(side, ks)
    size = {"seeds": len(side.seeds), "problems": len(side.problems), "samples": side.fewest}
    bounds = {"pass_at_k": mean, "low": low, "high": high}
    lost = [{"file": file, "line": line, "reason": why} for file, line, why in side.unreadable]
    files = {"files": side.files, "unreadable": lost}
    return {"policy": side.label, **size, **{k: _plain(v) for k, v in bounds.items()}, **files}


def _plain(numbers: NDArray[np.float64]) -> list[Any]:
    """Numbers as JSON has them. What is not known is None; no number is enough: "never"."""
    plain = [None if np.isnan(number) else float(number) for number in numbers]
    return ["never" if number == np.inf else number for number in plain]


def _notes(side: PolicyCounts) -> list[str]:
    notes, problems = list(side.notes), count(len(side.problems), "problem")
    if len(side.seeds) == 2:
        notes.append(f"{side.label}: two seeds give no interval of pass@k; three or more do")
    if len(side.problems) < FEW_PROBLEMS:
        notes.append(f"{side.label}: {problems}, so intervals are wide; more samples do not help")
    return notes


def curve(side: PolicyCounts, ks: Sequence[int]) -> tuple[NDArray[np.float64], ...]:
    """Return mean, low and high of pass@k, each of shape (ks,): 95 % intervals over problems, and
    with three or more seeds over seeds, too. With one seed the interval is a bootstrap; two seeds
    have none, for it would be wider than a pass@k can be."""
    values = side.curves(ks)
    if len(side.seeds) == 1:
        alike, repeats = np.unique(values[0], axis=0, return_counts=True)
        low, high = metrics.bootstrap_interval(alike, 10_000, seed=0, repeats=repeats)
        return values[0].mean(axis=0), low, high
    return metrics.interval_of_shares(values)


def compare(ours: PolicyCounts, theirs: PolicyCounts, ks: Sequence[int]) -> dict[str, Any]:
    """Compare two policies on the problems that both have.

    Args:
        ours: A policy.
        theirs: The policy it is compared with. Where both name seeds, the common ones are used; one
            without seeds goes with each.
        ks: Values of k, in rising order.

    Returns:
        A list over k of each: ``difference`` (`ours` less `theirs`), ``low`` and ``high``, its 95 %
        interval; ``band_low`` and ``band_high``, a band that holds all k at once
        (:func:`bands.simultaneous_band`); ``detectable``, ``problems_to_tell``,
        ``seeds_to_tell``, ``samples_to_tell`` (:func:`metrics.times_as_much`). ``gain`` and
        ``loss``: each k at which the band is above, or below, 0. ``first_loss``: a 95 % confidence
        set for the first k at which `ours` is worse, [from, to], ``to`` None where no end is known;
        None unless `ks` are 1, 2, 3, ... ``crossing``: where the curves cross, of the mean, and its
        interval (:func:`bands.crossing_interval`). ``only_ours``, ``only_theirs``: problems left
        out.

    SageError for fewer than two common problems, and for no common seed.
    """
    theirs_have = set(theirs.problems)
    both = [problem for problem in ours.problems if problem in theirs_have]
    pair = f"{ours.label} and {theirs.label}"
    if len(both) < 2:
        raise SageError(f"{pair} share {count(len(both), 'problem')}: a difference needs two")
    seeds = _common_seeds(ours, theirs)
    x, y = ours.at(both, seeds), theirs.at(both, seeds)
    a, b = np.broadcast_arrays(x.curves(ks), y.curves(ks))  # one without seeds goes with each
    mean, low, high = metrics.paired_difference(a, b)
    band_low, band_high, level = bands.simultaneous_band(a, b)
    noise = x.sampling_variance(ks) + y.sampling_variance(ks)
    data, samples = metrics.times_as_much(a - b, noise)
    drawn = min(x.fewest, y.fewest)
    numbers = {
        **{"difference": mean, "low": low, "high": high},
        **{"band_low": band_low, "band_high": band_high},
        "detectable": metrics.minimum_detectable_effect(a - b),
        "problems_to_tell": np.maximum(np.ceil(data * len(both)), 2),
        "seeds_to_tell": np.ceil(data * len(seeds)) if len(seeds) > 1 else np.ones(len(ks)),
        "samples_to_tell": np.maximum(np.ceil(samples * drawn), ks),  # pass@k needs k
    }
    size = {"seeds": len(seeds), "problems": len(both), "samples": drawn}
    return {
        **{"policy": ours.label, "against": theirs.label, **size},
        **{name: _plain(values) for name, values in numbers.items()},
        **{"band_pointwise_level": level},
        "gain": [k for k, bound in zip(ks, band_low, strict=True) if bound > 0],
        "loss": [k for k, bound in zip(ks, band_high, strict=True) if bound < 0],
        "first_loss": _first_loss(ks, band_low, band_high),
        "crossing": _crossing(ours.label, theirs.label, a, b, ks),
        "only_ours": len(ours.problems) - len(both),
        "only_theirs": len(theirs.problems) - len(both),
    }


def _common_seeds(ours: PolicyCounts, theirs: PolicyCounts) -> list[int | None]:
    named = [side for side in (ours, theirs) if side.seeds != [None]]
    if not named:
        return [None]
    seeds = [seed for seed in named[0].seeds if all(seed in side.seeds for side in named)]
    if not seeds:
        pair = f"{ours.label} and {theirs.label}"
        raise SageError(f"{pair} share no seed: train them with the same ones")
    return seeds


def _first_loss(
    ks: Sequence[int], low: NDArray[np.float64], high: NDArray[np.float64]
) -> list[int | None] | None:
    if list(ks) != list(range(1, len(ks) + 1)):
        return None
    gained = low > 0
    before = len(ks) if gained.all() else int(np.argmin(gained))  # ks of a gain from 1 on
    lost = [k for k, bound in zip(ks, high, strict=True) if bound < 0]
    return [before + 1, lost[0] if lost else None]


def _crossing(
    ours: str, theirs: str, a: NDArray[np.float64], b: NDArray[np.float64], ks: Sequence[int]
) -> dict[str, Any]:
    """Which curve comes from below first, and at which k."""
    options = [(ours, theirs, a, b), (theirs, ours, b, a)]
    crossings = [(bands.crossing_interval(y, x, ks), up, down) for up, down, x, y in options]
    crossing, up, down = min(
        crossings, key=lambda candidate: (np.isnan(candidate[0]["k"]), candidate[0]["k"])
    )
    if np.isnan(crossing["k"]):
        return {"up": None, "down": None, "k": None, "low": None, "high": None, "crosses": False}
    k, low, high = _plain(np.array([crossing[name] for name in ("k", "low", "high")]))
    ends = {"k": k, "low": low, "high": high}
    return {"up": up, "down": down, **ends, "crosses": bool(crossing["crosses"])}


def differing(result: Any, expected: Any, place: str = "") -> list[str]:
    """Return where two results differ, each as "place: found, not expected". Names and hashes of
    files may differ, and numbers by a rounding."""
    if place.split(".")[-1] in ("file", "sha256", "sage_companion"):
        return []
    if isinstance(result, Mapping) and isinstance(expected, Mapping):
        names = list(dict.fromkeys([*result, *expected]))
        nested = [(str(name), result.get(name), expected.get(name)) for name in names]
    elif isinstance(result, list) and isinstance(expected, list) and len(result) == len(expected):
        pairs = zip(result, expected, strict=True)
        nested = [(str(number), a, b) for number, (a, b) in enumerate(pairs)]
    else:
        numbers = all(type(value) in (int, float) for value in (result, expected))
        if result == expected or (numbers and abs(result - expected) <= SAME):
            return []
        return [f"{place}: {result!r:.60}, not {expected!r:.60}"]
    before = f"{place}." if place else ""
    return [value for name, a, b in nested for value in differing(a, b, f"{before}{name}")]
