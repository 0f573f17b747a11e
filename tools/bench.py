"""What docs/benchmarks.md says of speed: a step of SageTrainer against TRL's, and the verifier.

    python tools/bench.py trainer verifier      (make bench)

Each writes data/published/benchmarks/NAME.csv, and beside it the machine, revision and versions.
Compare ratios, never seconds of two runs: what is compared takes turns in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd

from sage_lib import paths
from sage_lib.algorithm.guides import BranchGuide, RandomGuide, TokenGuide
from sage_lib.errors import SageError
from sage_lib.experiment import records
from sage_lib.experiment.profile import load_profile
from sage_lib.files import write_json, write_text

# --- trainers that take turns ---------------------------------------------------------------------


class Turns:
    """Trainers in threads of one process, a step each in turn; notes each step's processor time.

    The order is drawn anew for each round: what a step leaves in the machine's caches would
    otherwise always be the same trainer's gain.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.random = random.Random(0)
        self.waiting = self._drawn()
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.condition = threading.Condition()
        self.error: Exception | None = None

    def run(self, trainers: Sequence[Any]) -> None:
        """Train them all. What the first one raises ends the others, and is raised."""
        with ThreadPoolExecutor(len(trainers)) as pool:
            for trainer in trainers:
                pool.submit(self._train, trainer)
        if self.error is not None:
            raise self.error

    def _train(self, trainer: Any) -> None:
        try:
            trainer.train()
        except Exception as error:
            with self.condition:
                self.error = self.error or error
                self.condition.notify_all()

    def callback(self, name: str) -> Any:
        """What makes the trainer `name` wait for its turn, and pass it on after its step."""
        import torch
        from transformers import TrainerCallback

        turns = self

        class Turn(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                def may() -> bool:
                    return turns.waiting[0] == name or turns.error is not None

                with turns.condition:
                    turns.condition.wait_for(may)
                    if turns.error is not None:
                        raise turns.error
                torch.manual_seed(state.global_step)  # every trainer draws the same rollouts
                self.started = time.process_time()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                turns.seconds[name].append(time.process_time() - self.started)
                turns.pass_on()

        return Turn()

    def pass_on(self) -> None:
        with self.condition:
            self.waiting = self.waiting[1:] or self._drawn()
            self.condition.notify_all()

    def _drawn(self) -> list[str]:
        return self.random.sample(self.names, len(self.names))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """The median ratio of paired steps with its 95 % interval (binomial, so of no assumed shape;
    NaN for fewer than six steps), and the bounds between which 80 % of the steps lie."""
    from scipy.stats import quantile_test

    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, high = quantile_test(ratios, q=1, p=0.5).confidence_interval(0.95)
    return {
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "ratio 10 %": ratios[len(ratios) // 10],
        "ratio 90 %": ratios[-1 - len(ratios) // 10],
        "steps": len(ratios),
    }


# --- trainer --------------------------------------------------------------------------------------

#: Steps that count, and before them steps that warm up.
STEPS, WARM_UP = 60, 2
STOCK = "stock GRPOTrainer"
CASES: dict[str, dict[str, Any]] = {
    STOCK: {},
    "SageTrainer, no guide": {},
    "adapter merged": {"merge_adapter": True},
    "adapter merged, padding trimmed": {"merge_adapter": True, "trim_padding": True},
    "Branch": {"guide": BranchGuide(0.3, 0.14)},
    "Random": {"guide": RandomGuide()},
    "Token": {"guide": TokenGuide()},
    "Branch, sequence": {"guide": BranchGuide(0.3, 0.14), "kl_form": "sequence"},
    "exact forward KL": {"kl_form": "forward_kl"},
    "perplexity advantage": {"advantage": {"name": "perplexity", "alpha": 0.01}},
    "position advantage": {"advantage": {"name": "position", "shift": 0.5}},
    "W-REINFORCE": {"advantage": {"name": "negative_samples", "positive": 0.1}},
    "pass@4 training": {"advantage": {"name": "pass_at_k", "k": 4}},
    "Clip-Cov": {"advantage": {"name": "clip_cov", "share": 0.02}},
}


def trainer() -> pd.DataFrame:
    """A step of 64 rollouts (LoRA, the model of the profile smoke) of each case against stock.

    Processor time: other work on the machine stretches the clock, not this. The learning rate is
    0, so that all cases draw the same completions in the same step.
    """
    import torch

    torch.set_num_threads(1)  # threads that wait for one another spend processor time, too
    turns = Turns(list(CASES))
    turns.run([_make_trainer(name, extra, turns) for name, extra in CASES.items()])
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
    """A trainer with a model of its own; all models have the same weights."""
    from sage_lib.algorithm.backend import GRPOConfig, GRPOTrainer  # first

    # isort: split

    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from sage_lib.algorithm.trainer import SageTrainer
    from sage_lib.experiment.problems import rl_problems
    from sage_lib.policy import loading, tiny_qwen
    from sage_lib.training import rl

    profile = load_profile("smoke")
    folder = paths.build("benchmarks") / "model"
    tiny_qwen.create(folder, dataclasses.replace(profile.model, seed=0))
    model = AutoModelForCausalLM.from_pretrained(folder, **loading.SAFE)
    modules = list((profile.rl_lora or {})["target_modules"])
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=modules, task_type="CAUSAL_LM")
    settings = {
        **profile.rl,
        "max_steps": STEPS + WARM_UP,
        "learning_rate": 0.0,
        "save_strategy": "no",
        "seed": 0,
        "output_dir": str(folder.parent / name),
        "report_to": "none",
        "disable_tqdm": True,
    }
    made = GRPOTrainer if name == STOCK else SageTrainer
    return made(
        model=get_peft_model(model, lora),
        processing_class=tiny_qwen.load_tokenizer(folder),
        reward_funcs=any_reward,
        train_dataset=Dataset.from_list(rl.rows(rl_problems(profile))),
        args=GRPOConfig(**settings),
        callbacks=[turns.callback(name)],
        **extra,
    )


def any_reward(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """0 or 1, as every advantage takes it; costs nothing and differs within a group."""
    return [float(len(turns[0]["content"]) % 7 > 2) for turns in completions]


# --- verifier -------------------------------------------------------------------------------------

PROBLEMS, SAMPLES = 60, 256
#: A gold answer and what somebody answered, or None.
Pair = tuple[str, str | None]


def verifier() -> pd.DataFrame:
    """The verifier with two workers against Math-Verify called for each of 60 x 256 samples.

    Answers are drawn with probability proportional to 1/rank^2 from each problem's candidates;
    "measured" are the published samples of smoke's base. SageError where a verdict differs.
    """
    from sage_lib.tasks.verifier import Verifier

    rng = np.random.default_rng(0)
    cases = {
        "whole numbers": list(_drawn(_numbers, rng)),
        "formulas": list(_drawn(_formulas, rng)),
        "measured": _measured(),
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
        for pair, a, b in zip(pairs, ours, theirs, strict=True):
            if a != b:
                raise SageError(f"verdicts differ for (gold, answer) = {pair}: report this pair")
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
    """The verdict as a script would ask for it, without processes and without memory."""
    from math_verify import verify

    from sage_lib.tasks.mathematics import parse

    if answer is None:
        return False
    return bool(verify(parse(gold), parse(answer), timeout_seconds=None))


def _drawn(
    candidates: Callable[[int], tuple[str, list[str | None]]], rng: np.random.Generator
) -> Iterator[Pair]:
    for _ in range(PROBLEMS):
        gold, options = candidates(int(rng.integers(2, 900)))
        rng.shuffle(options)
        weights = 1 / np.arange(1, len(options) + 1) ** 2
        for index in rng.choice(len(options), SAMPLES, p=weights / weights.sum()):
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


def _measured() -> list[Pair]:
    """The gold of a countdown problem is the target, with which its name begins."""
    from sage_lib.experiment.results import load_results
    from sage_lib.tasks.verifier import last_answer

    samples = load_results("smoke").samples
    of_base = samples[samples["method"] == "base"]
    golds = of_base["problem"].str.partition("<")[0]
    return list(zip(golds, of_base["completion"].map(last_answer), strict=True))


# --- the command ----------------------------------------------------------------------------------

BENCHMARKS = {"trainer": trainer, "verifier": verifier}


def main() -> None:
    parser = argparse.ArgumentParser(description="measure again what docs/benchmarks.md quotes")
    parser.add_argument("names", nargs="+", choices=BENCHMARKS)
    for name in parser.parse_args().names:
        table = BENCHMARKS[name]()
        made = {"revision": records.revision(), "versions": records.versions()}
        record = {"benchmark": name, **made, "machine": records.machine()}
        write_text(paths.BENCHMARKS / f"{name}.csv", table.to_csv(index=False))
        write_json(paths.BENCHMARKS / f"{name}.json", record)
        print(table.to_string(index=False))


if __name__ == "__main__":
    main()
