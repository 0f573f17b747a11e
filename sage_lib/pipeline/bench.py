"""Benchmarks whose results are kept: guides, trainer, verifier, growth, how the base was chosen.

    sage-companion bench guides          (all of them: make bench)

Each writes data/published/benchmarks/NAME.csv and, beside it, a record of machine, revision and
versions. Compare ratios, never seconds of two runs: what is compared takes turns in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sage_lib import paths
from sage_lib.algorithm.guides import (
    BranchGuide,
    GuideInputs,
    IdentityGuide,
    RandomGuide,
    ShuffledGuide,
    TokenGuide,
    compose,
)
from sage_lib.errors import SageError
from sage_lib.experiment import records
from sage_lib.experiment.profile import load_profile
from sage_lib.files import write_json, write_text
from sage_lib.pipeline import draw, growth
from sage_lib.pipeline.turns import Turns, ratios

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

#: Threads of torch in every benchmark.
THREADS = 2

# --- guides -------------------------------------------------------------------------------------

#: Shape of the batch that the guides are timed on: completions, tokens.
BATCH, TIME = 64, 2048
GUIDE_ROUNDS = 5


def guides() -> pd.DataFrame:
    """Every guide on one batch, against one forward pass of the small model at that shape."""
    import torch

    model = _small_model(paths.build("benchmarks") / "model", positions=TIME)
    model.eval()
    inputs = _random_inputs(model.config.vocab_size)
    cases: dict[str, Callable[[GuideInputs], torch.Tensor]] = {
        "identity": IdentityGuide(),
        "branch": BranchGuide(),
        "random": RandomGuide(),
        "token (min-max)": TokenGuide(),
        "token (rank)": TokenGuide("rank"),
        "token (z-score)": TokenGuide("zscore"),
        "shuffled branch": ShuffledGuide(BranchGuide()),
        "branch x random": compose(BranchGuide(), RandomGuide()),
    }
    calls: dict[str, Callable[[], object]] = {"forward pass": lambda: model(inputs.ids)}
    for name, guide in cases.items():
        calls[name] = functools.partial(guide, inputs)
    with torch.no_grad():
        seconds = interleaved(calls, GUIDE_ROUNDS)

    forward = seconds.pop("forward pass")
    rows = []
    for name, times in seconds.items():
        shares = [ours / theirs for ours, theirs in zip(times, forward, strict=True)]
        rows.append(
            {
                "guide": name,
                "seconds": statistics.median(times),
                "forward pass seconds": statistics.median(forward),
                "share": statistics.median(times) / statistics.median(forward),
                "largest share": max(shares),
                "rounds": len(times),
            }
        )
    return pd.DataFrame(rows)


def interleaved(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every case in each round.

    The cases take turns, so that a slow moment of the machine hits them all; one round more warms
    up and is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, run in cases.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: times[1:] for name, times in seconds.items()}


def _random_inputs(vocabulary: int) -> GuideInputs:
    """Signals of BATCH x TIME tokens in the range of a model's, nine tenths of them completion."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, TIME)
    ids = torch.randint(vocabulary, shape, generator=generator)
    entropies = torch.rand(shape, generator=generator) * 3
    logps = -torch.rand(shape, generator=generator) * 5
    mask = (torch.rand(shape, generator=generator) < 0.9).long()
    return GuideInputs(
        entropies=entropies,
        logps=logps,
        mask=mask,
        progress=0.3,
        generator=generator,
        ids=ids,
    )


def _small_model(folder: Path, positions: int | None = None) -> PreTrainedModel:
    """The profile smoke's model with random weights, saved in ``folder``, for ``positions`` tokens
    (as many as the profile says, where it is None)."""
    from transformers import AutoModelForCausalLM

    from sage_lib.policy import loading, tiny_qwen

    model = dataclasses.replace(load_profile("smoke").model, seed=0)
    if positions is not None:
        shape = {**(model.architecture or {}), "max_position_embeddings": positions}
        model = dataclasses.replace(model, architecture=shape, max_seq_length=positions)
    tiny_qwen.create(folder, model)
    return AutoModelForCausalLM.from_pretrained(folder, **loading.SAFE)


# --- trainer ------------------------------------------------------------------------------------

TRAINER_STEPS = 62
#: Steps that warm up and are not counted.
WARM_UP = 2
STOCK = "stock GRPOTrainer"


def trainer() -> pd.DataFrame:
    """A step of 64 rollouts (LoRA, the profile smoke's model) of SageTrainer against stock
    GRPOTrainer, taking turns.

    Seconds are of the processor: other work on the machine stretches the clock, not these. The
    learning rate is 0, so that all of them draw the very same completions in the same step. The
    columns are those of :func:`turns.ratios`.
    """
    import torch

    torch.set_num_threads(1)  # threads that wait for one another spend processor time, too
    cases: dict[str, dict[str, Any]] = {
        STOCK: {},
        "SageTrainer, no guide": {},
        "adapter merged": {"merge_adapter": True},
        "adapter merged, padding trimmed": {"merge_adapter": True, "trim_padding": True},
        "Branch": {"guide": BranchGuide(0.3, 0.14)},
        "Random": {"guide": RandomGuide()},
        "Token": {"guide": TokenGuide()},
        "Branch, sequence": {"guide": BranchGuide(0.3, 0.14), "anchor": "sequence"},
        "exact forward KL": {"anchor": "forward_kl"},
        "perplexity advantage": {"advantage": {"name": "perplexity", "alpha": 0.01}},
        "position advantage": {"advantage": {"name": "position", "shift": 0.5}},
        "entropy advantage": {"advantage": "entropy"},
        "W-REINFORCE": {"advantage": {"name": "negative_samples", "positive": 0.1}},
        "pass@4 training": {"advantage": {"name": "pass_at_k", "k": 4}},
        "Clip-Cov": {"advantage": {"name": "clip_cov", "share": 0.02}},
    }  # without KL-Cov, which takes several updates a batch and reads the tokens of Clip-Cov
    turns = Turns(list(cases))
    # One after the other: loading a model is not safe beside another's.
    trainers = [_make_trainer(name, extra, turns) for name, extra in cases.items()]
    turns.run(trainers)

    times = {name: seconds[WARM_UP:] for name, seconds in turns.seconds.items()}
    return pd.DataFrame(
        {
            "trainer": name,
            "CPU seconds": statistics.median(seconds),
            **ratios(seconds, times[STOCK]),
        }
        for name, seconds in times.items()
    )


def _make_trainer(name: str, extra: dict[str, Any], turns: Turns) -> Any:
    """One of the trainers, with a model of its own; all models have the same weights."""
    from sage_lib.algorithm.backend import GRPOConfig, GRPOTrainer  # first

    # isort: split

    from datasets import Dataset
    from peft import LoraConfig, get_peft_model

    from sage_lib.algorithm.trainer import SageTrainer
    from sage_lib.experiment.problems import rl_problems
    from sage_lib.policy import tiny_qwen
    from sage_lib.training import rl

    profile = load_profile("smoke")
    folder = paths.build("benchmarks") / "rl_model"
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=list((profile.rl_lora or {})["target_modules"]),
        task_type="CAUSAL_LM",
    )
    settings = {
        **profile.rl,
        "max_steps": TRAINER_STEPS,
        "learning_rate": 0.0,
        "save_strategy": "no",
        "seed": 0,
        "output_dir": str(folder.parent / name),
        "report_to": "none",
        "disable_tqdm": True,
    }
    made = GRPOTrainer if name == STOCK else SageTrainer
    return made(
        model=get_peft_model(_small_model(folder), lora),
        processing_class=tiny_qwen.load_tokenizer(folder),
        reward_funcs=_any_reward,
        train_dataset=Dataset.from_list(rl.rows(rl_problems(profile))),
        args=GRPOConfig(**settings),
        callbacks=[turns.callback(name)],
        **extra,
    )


def _any_reward(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """A reward of 0 or 1 (some advantages know no other) that costs nothing and differs within a
    group."""
    return [float(len(turns[0]["content"]) % 7 > 2) for turns in completions]


# --- verifier -----------------------------------------------------------------------------------

PROBLEMS, SAMPLES = 60, 256
#: A gold answer and what somebody answered, or None.
Pair = tuple[str, str | None]


def verifier() -> pd.DataFrame:
    """The verifier with two workers on 60 problems x 256 samples, against Math-Verify's parse and
    verify called for every sample in a loop.

    Answers are drawn with probability proportional to 1/rank^2 from each problem's candidates:
    right and wrong ones in several spellings, and none at all. "measured": the base policy's own
    samples of the profile smoke, as they are kept. SageError where a verdict differs.
    """
    from sage_lib.tasks.verifier import Verifier

    rng = np.random.default_rng(0)
    cases = {
        "whole numbers": list(_drawn(_numbers, rng)),
        "formulas": list(_drawn(_formulas, rng)),
        "measured": list(_measured()),
    }
    rows = []
    for name, pairs in cases.items():
        golds, answers = [gold for gold, _ in pairs], [answer for _, answer in pairs]
        with_pool = Verifier(workers=2)
        with_pool.verify_answers(["1.5"], ["1.5"])  # start the workers
        started = time.perf_counter()
        ours = [verdict.correct for verdict in with_pool.verify_answers(golds, answers)]
        middle = time.perf_counter()
        theirs = [_by_math_verify(*pair) for pair in pairs]
        ended = time.perf_counter()
        with_pool.close()
        _require_equal(name, pairs, ours, theirs)
        rows.append(
            {
                "answers": name,
                "pairs": len(pairs),
                "distinct pairs": len(set(pairs)),
                "correct": sum(ours),
                "seconds": middle - started,
                "loop seconds": ended - middle,
                "times faster": (ended - middle) / (middle - started),
            }
        )
    return pd.DataFrame(rows)


def _by_math_verify(gold: str, answer: str | None) -> bool:
    """The verdict of one pair as a script would ask for it, without processes and without
    memory."""
    from math_verify import verify

    from sage_lib.tasks.verifier import parse

    if answer is None:
        return False
    return bool(verify(parse(gold), parse(answer), timeout_seconds=None))


def _require_equal(name: str, pairs: list[Pair], ours: list[bool], theirs: list[bool]) -> None:
    for pair, one, other in zip(pairs, ours, theirs, strict=True):
        if one != other:
            raise SageError(
                f"{name}: verdicts differ for (gold, answer) = {pair}; the verifier says {one}, "
                f"Math-Verify alone {other}: report this pair"
            )


def _drawn(
    candidates: Callable[[int], tuple[str, list[str | None]]], rng: np.random.Generator
) -> Iterator[Pair]:
    """PROBLEMS x SAMPLES pairs; ``candidates`` gives a problem's gold and answers for a number."""
    for _ in range(PROBLEMS):
        gold, options = candidates(int(rng.integers(2, 900)))
        rng.shuffle(options)
        weights = 1 / np.arange(1, len(options) + 1) ** 2
        chosen = rng.choice(len(options), SAMPLES, p=weights / weights.sum())
        for index in chosen:
            yield gold, options[index]


def _numbers(n: int) -> tuple[str, list[str | None]]:
    right = [str(n), f"{n:04d}", f"\\boxed{{{n}}}", None, f"\\frac{{{2 * n}}}{{2}}"]
    near = [str(n + distance) for distance in (*range(1, 30), 100, 1000)]
    return str(n), [*right, *near, f"{n}.5", f"{n}^2", f"{n}\\%"]


def _formulas(n: int) -> tuple[str, list[str | None]]:
    gold = f"\\frac{{{n}\\sqrt{{3}}}}{{7}}"
    right = [gold, f"\\dfrac{{{n}\\sqrt3}}7", f"\\frac{{{n}}}{{7}}\\sqrt{{3}}", f"{n}\\sqrt{{3}}/7"]
    other_factors = [f"\\frac{{{n + d}\\sqrt{{3}}}}{{7}}" for d in range(1, 15)]
    other_roots = [f"\\frac{{{n}\\sqrt{{{d}}}}}{{7}}" for d in range(5, 15)]
    others = [f"{n}x + {d}" for d in range(5)]
    return gold, [*right, None, *other_factors, *other_roots, *others]


def _measured() -> Iterator[Pair]:
    """The gold of a countdown problem is the target, with which its id begins."""
    from sage_lib.report import measured
    from sage_lib.tasks.verifier import last_answer

    for row in measured.samples(load_profile("smoke", "published"), "base"):
        gold, _, _ = row["problem"].partition("<")
        for text in row["completions"]:
            yield gold, last_answer(text)


# --- the command --------------------------------------------------------------------------------

# --- base ---------------------------------------------------------------------------------------

#: What was tried for the base of the countdown task: changes of the profile laptop.
BASES = {
    "as it is": (),
    "width 64": (
        "model.architecture.hidden_size=64",
        "model.architecture.intermediate_size=192",
    ),
    "rare throughout": ("sft_data.early_rare_share=null",),
}
#: Nothing but the base, and enough samples to count unsound work.
BASE_ALONE = ("train=[]", "evaluation.sampled=20", "evaluation.samples=32", "evaluation.ks=[1]")


def base() -> pd.DataFrame:
    """How the base of countdown was chosen: each trial's exact pass@k on the held-out problems.

    Columns trial, parameters, exact pass@1 and pass@256 (means over data sets), rare_share (of
    samples that take the rare way), unsound (of rewarded samples). A finished trial is kept.
    """
    from sage_lib.pipeline import needs, stages
    from sage_lib.policy import tiny_qwen
    from sage_lib.report import countdown_tables, exact_tables

    rows = []
    for trial, changes in BASES.items():
        profile = load_profile("+".join(["laptop", *BASE_ALONE, *changes]))
        stages.run(profile, "sft", "evaluate")
        exact = exact_tables.exact(profile).set_index("dataset").loc["Avg"]
        modes = countdown_tables.modes(profile).iloc[0]
        words = len(tiny_qwen.tokenizer(profile.model.largest_number or 0, 1))
        shape = {"vocab_size": words, **(profile.model.architecture or {})}
        parameters, _ = needs.parameters(shape, None)
        found = (exact["pass@1"], exact["pass@256"], modes["rare_share"], modes["unsound"])
        rows.append((trial, parameters, *found))
    columns = ["pass@1", "pass@256", "rare_share", "unsound"]
    return pd.DataFrame(rows, columns=["trial", "parameters", *columns])


BENCHMARKS = {
    "guides": guides,
    "trainer": trainer,
    "verifier": verifier,
    "vocabulary": growth.vocabulary,
    "growth": growth.growth,
    "base": base,
}


def keep(name: str, table: pd.DataFrame, **more: Any) -> None:
    """Write a benchmark's table, and its record, which ``more`` joins."""
    record = {
        "benchmark": name,
        "revision": records.revision(),
        "versions": records.versions(),
        "machine": records.machine(),
        **more,
    }
    write_text(paths.BENCHMARKS / f"{name}.csv", table.to_csv(index=False))
    write_json(paths.BENCHMARKS / f"{name}.json", record)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=BENCHMARKS, help="what to measure again")


def do(options: argparse.Namespace) -> None:
    """Measure, keep the table and its record, and print the table."""
    import torch

    torch.set_num_threads(THREADS)
    table = BENCHMARKS[options.name]()
    keep(options.name, table, threads=torch.get_num_threads())
    if options.name == "growth":
        draw.benchmarks()
    print(table.to_string(index=False))


def main(argv: Sequence[str] | None = None) -> None:
    first, *_ = (__doc__ or "").split("\n")
    parser = argparse.ArgumentParser(prog="python -m sage_lib.pipeline.bench", description=first)
    add_arguments(parser)
    try:
        do(parser.parse_args(argv))
    except SageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
