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

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.pipeline import stages


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
        "tokens/s of a 7B model in batches on one GPU of 80 GB: chosen, between transformers and "
        "vLLM, of which its pull request 11267 has 2,694 (Llama-2-7B, one A100)",
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


def assumed(changes: Sequence[str] = ()) -> dict[str, Assumption]:
    """The assumptions, with those of ``--assume KEY=VALUE`` in place of a value and its range.

    Raises SageError for a name that is none of theirs, and for no number above 0.
    """
    found = dict(ASSUMED)
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


def table(profile: Profile, parameters: int, assumptions: Mapping[str, Assumption]) -> pd.DataFrame:
    """GPU hours of SFT, RL and evaluation by method, for a model of so many parameters.

    Columns method, runs, training and evaluation (of one run), in all, and that at the two ends of
    the ranges: fast, slow. The stages that read a few problems token by token are left out.
    """
    ends = [
        {name: getattr(one, end) for name, one in assumptions.items()}
        for end in ("value", "fast", "slow")
    ]
    evaluated = {run.method for run in stages.STAGES["evaluate"].runs(profile)}
    counted = Counter(
        run.method for stage in ("sft", "rl") for run in stages.STAGES[stage].runs(profile)
    )
    rows = []
    for method, runs in counted.items():
        trained = [_training(profile, method, parameters, numbers) for numbers in ends]
        asked = [
            _evaluation(profile, parameters, numbers) if method in evaluated else 0.0
            for numbers in ends
        ]
        in_all = [runs * (one + other) for one, other in zip(trained, asked, strict=True)]
        rows.append((profile.label(method), runs, trained[0], asked[0], *in_all))
    columns = ["method", "runs", "training", "evaluation", "in all", "fast", "slow"]
    return pd.DataFrame(rows, columns=columns)


def shown(hours: pd.DataFrame) -> pd.DataFrame:
    """The table with the sum of its runs below it, and no more digits than it can have."""
    sums = hours[["in all", "fast", "slow"]].sum()
    text = hours.map(lambda one: f"{one:,.0f}" if isinstance(one, float) else str(one))
    last = ["all of it", str(hours["runs"].sum()), "", "", *(f"{one:,.0f}" for one in sums)]
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
    # Passes without a gradient: of the reference, and of the policy for a guide's entropies.
    operations += 2 * ((section["beta"] > 0) + (chosen.guide is not None))
    return drawn + _passes(whole, operations, parameters, numbers)


def _evaluation(profile: Profile, parameters: int, numbers: Mapping[str, float]) -> float:
    asked = profile.evaluation.asked
    drawn = asked * profile.evaluation.samples * numbers["tokens"] / numbers["generation"] / 3600
    scored = asked * profile.evaluation.scored * (numbers["tokens"] + numbers["prompt"])
    return drawn + _passes(2 * scored, 2, parameters, numbers)  # by the policy and by the base
