"""GPU hours of a profile on paper: from assumptions that are all said, and that can be changed.

Nothing here was measured. A token costs 2 floating-point operations a parameter forward, as many
for the gradient of its activations, and as many again for that of weights, where they are trained
and no adapter is (Kaplan et al. 2020, arXiv 2001.08361, Section 2.1); recomputed activations are
one more forward pass. Tokens are generated at a rate of their own, which memory limits.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.pipeline import needs, stages


@dataclasses.dataclass(frozen=True)
class Assumption:
    """A number that the plan rests on, the range that it may lie in, and where it is from."""

    value: float
    fast: float  # the end of the range with which a run is short
    slow: float
    source: str


ASSUMED = {
    "generation": Assumption(
        *(1500, 2700, 500),
        "tokens/s of a 7B model in batches on one GPU of 80 GB, between updates: chosen; vLLM's "
        "pull request 11267 has 2,694 (Llama-2-7B, one A100)",
    ),
    "vllm": Assumption(
        *(4000, 10000, 2000),
        "the same where vLLM has a GPU and thousands of requests for itself: chosen",
    ),
    "teraflops": Assumption(
        *(312, 989, 312), "a second at most, bfloat16, by NVIDIA's data sheets: A100, or H100 SXM"
    ),
    "utilisation": Assumption(0.35, 0.45, 0.2, "share of that in training: chosen"),
    "tokens": Assumption(800, 500, 1200, "of a completion, on average: chosen"),
    "prompt": Assumption(200, 100, 400, "tokens of a prompt, on average: chosen"),
    "rounds": Assumption(
        2, 1, 4, "of generation a step, where dynamic sampling allows more than one: chosen"
    ),
}


def assumed(
    changes: Sequence[str] = (), own: Mapping[str, Any] | None = None
) -> dict[str, Assumption]:
    """The assumptions: of a profile those of its ``compute.assume`` (``own``) in their place, and
    those of ``--assume KEY=VALUE`` before all.

    Raises SageError for a name that is none of theirs, and for no number above 0.
    """
    found = dict(ASSUMED)
    for name, given in (own or {}).items():
        ends = list(given) if isinstance(given, (list, tuple)) else [given] * 3
        good = len(ends) == 3 and all(isinstance(n, (int, float)) and n > 0 for n in ends)
        if name not in ASSUMED or not good:
            raise SageError(
                f"compute.assume.{name}: {given!r}: a number above 0, or value, fast and slow end "
                f"of one of {', '.join(ASSUMED)}"
            )
        value, fast, slow = map(float, ends)
        found[name] = Assumption(value, fast, slow, "the profile's, for its card, model or task")
    for change in changes:
        name, _, text = change.partition("=")
        if name not in ASSUMED:
            raise SageError(f"--assume {change}: choose one of {', '.join(ASSUMED)}")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise SageError(f"--assume {change}: a number above 0 is needed, as in {name}=2")
        found[name] = Assumption(value, value, value, "set on the command line")
    return found


def listed(assumptions: Mapping[str, Assumption]) -> pd.DataFrame:
    """Columns assumption, value, range, source."""
    rows = []
    for name, one in assumptions.items():
        low, high = sorted((one.fast, one.slow))
        rows.append((name, f"{one.value:g}", f"{low:g} to {high:g}", one.source))
    return pd.DataFrame(rows, columns=["assumption", "value", "range", "source"])


def of_run(
    profile: Profile, stage: str, method: str, assumptions: Mapping[str, Assumption]
) -> list[float]:
    """GPU hours of one run of a stage: value, and those at both ends of the ranges, fast and slow.
    The stages that read a few problems token by token count as nothing."""
    parameters, _ = needs.parameters(profile.model.architecture or {}, None)
    found = []
    for end in ("value", "fast", "slow"):
        numbers = {name: getattr(one, end) for name, one in assumptions.items()}
        if stage in ("sft", "rl", "replay"):
            found.append(_training(profile, method, parameters, numbers))
        else:
            asked = stage == "evaluate"
            found.append(_evaluation(profile, parameters, numbers) if asked else 0.0)
    return found


def table(profile: Profile, assumptions: Mapping[str, Assumption]) -> pd.DataFrame:
    """GPU hours of SFT, RL and evaluation by method, and of the runs that the stage replay trains
    once more.

    Columns method, runs, training and evaluation (of one run), in all, and that at the two ends of
    the ranges: fast, slow.
    """
    evaluated = {run.method for run in stages.STAGES["evaluate"].runs(profile)}
    counted = Counter(
        (stage, run.method)
        for stage in ("sft", "rl", "replay")
        for run in stages.STAGES[stage].runs(profile)
    )
    rows = []
    for (stage, method), runs in counted.items():
        trained = of_run(profile, stage, method, assumptions)
        asked, label = [0.0] * 3, profile.label(method)
        if stage == "replay":
            label += ", replayed"
        elif method in evaluated:
            asked = of_run(profile, "evaluate", method, assumptions)
        in_all = [runs * (one + other) for one, other in zip(trained, asked, strict=True)]
        rows.append((label, runs, trained[0], asked[0], *in_all))
    columns = ["method", "runs", "training", "evaluation", "in all", "fast", "slow"]
    return pd.DataFrame(rows, columns=columns)


def rounded(hours: float) -> str:
    """Hours as text, with a decimal where there are few."""
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}"


def shown(hours: pd.DataFrame) -> pd.DataFrame:
    """The table with the sum of its runs below it, and no more digits than it can have."""
    sums = hours[["in all", "fast", "slow"]].sum()
    text = hours.map(lambda one: rounded(one) if isinstance(one, float) else str(one))
    last = ["all of it", str(hours["runs"].sum()), "", "", *map(rounded, sums)]
    return pd.concat([text, pd.DataFrame([last], columns=hours.columns)], ignore_index=True)


def _passes(tokens: float, operations: int, parameters: int, numbers: Mapping[str, float]) -> float:
    """Hours of passes over so many tokens, at so many operations a token and parameter."""
    rate = numbers["teraflops"] * 1e12 * numbers["utilisation"]
    return tokens * operations * parameters / rate / 3600


def _operations(adapter: bool, again: bool) -> int:
    """Of a step of training, a token and parameter; ``again``: activations are recomputed."""
    return 2 + 2 + (0 if adapter else 2) + (2 if again else 0)


def _training(
    profile: Profile, method: str, parameters: int, numbers: Mapping[str, float]
) -> float:
    if method == BASE:
        if not profile.sft or profile.sft_data is None:
            return 0.0
        section = profile.sft
        rows = section["per_device_train_batch_size"] * section["gradient_accumulation_steps"]
        seen = rows * section["max_steps"]
        if section["max_steps"] < 0:
            seen = profile.sft_data.rows * section["num_train_epochs"]
        longest = profile.model.max_seq_length / 2  # Appendix E.2 lets in no longer row
        adapter, again = profile.sft_lora is not None, section["gradient_checkpointing"]
        return _passes(seen * longest, _operations(adapter, again), parameters, numbers)
    chosen = profile.methods[method]
    section = {**profile.rl, **chosen.rl}
    batch = section["per_device_train_batch_size"] * section["gradient_accumulation_steps"]
    completions = batch * section["max_steps"]
    rounds = min(numbers["rounds"], 1 + chosen.dynamic_sampling)
    whole = completions * (numbers["tokens"] + numbers["prompt"])
    drawn = completions * numbers["tokens"] * rounds / numbers["generation"] / 3600
    adapter = profile.rl_lora is not None and chosen.lora
    operations = _operations(adapter, section["gradient_checkpointing"])
    # Passes without a gradient: of the reference, and under Unsloth one for a guide's entropies.
    apart = profile.compute.backend == "unsloth" and chosen.guide is not None
    operations += 2 * ((section["beta"] > 0) + apart)
    return drawn + _passes(whole, operations, parameters, numbers)


def _evaluation(profile: Profile, parameters: int, numbers: Mapping[str, float]) -> float:
    asked = profile.evaluation.asked
    rate = numbers["vllm" if profile.evaluation.engine == "vllm" else "generation"]
    drawn = asked * profile.evaluation.samples * numbers["tokens"] / rate / 3600
    scored = asked * profile.evaluation.scored * (numbers["tokens"] + numbers["prompt"])
    return drawn + _passes(2 * scored, 2, parameters, numbers)  # by the policy and by the base
