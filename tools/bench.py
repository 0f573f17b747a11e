"""Benchmarks whose results are kept: python tools/bench.py guides, trainer, or verifier

Each writes data/measured/benchmarks/<name>.csv and a record of machine, revision and versions beside it. Compare ratios,
never seconds of two runs: what is compared alternates within one process.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import torch

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
from sage_lib.experiment import records
from sage_lib.experiment.profile import load_profile
from sage_lib.files import write_json, write_text
from sage_lib.policy import tiny_qwen


def interleaved(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every case in each round; the cases take turns, so that a slow moment of the machine hits them all."""
    seconds = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, run in cases.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: times[1:] for name, times in seconds.items()}  # the first round warms up


def guides() -> pd.DataFrame:
    """Every guide on a (64, 2048) batch, against one forward pass of the embedded model at that shape."""
    batch, time_steps = 64, 2048
    profile = load_profile("smoke")
    folder = paths.build("benchmarks") / "model"
    tiny_qwen.create(
        folder,
        {**profile.model.architecture, "max_position_embeddings": time_steps},
        profile.task.limit,
        time_steps,
        seed=0,
    )
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        len(tiny_qwen.load_tokenizer(folder)), (batch, time_steps), generator=generator
    )
    inputs = GuideInputs(
        entropies=torch.rand(batch, time_steps, generator=generator) * 3,
        logps=-torch.rand(batch, time_steps, generator=generator) * 5,
        mask=(torch.rand(batch, time_steps, generator=generator) < 0.9).long(),
        progress=0.3,
        generator=generator,
    )
    cases = {
        "identity": IdentityGuide(),
        "branch": BranchGuide(),
        "random": RandomGuide(),
        "token (min-max)": TokenGuide(),
        "token (rank)": TokenGuide("rank"),
        "token (z-score)": TokenGuide("zscore"),
        "shuffled branch": ShuffledGuide(BranchGuide()),
        "branch x random": compose(BranchGuide(), RandomGuide()),
    }
    with torch.no_grad():
        times = interleaved(
            {
                "forward pass": lambda: model(ids),
                **{name: (lambda g=g: g(inputs)) for name, g in cases.items()},
            },
            rounds=5,
        )
    forward = times.pop("forward pass")
    return pd.DataFrame(
        [
            {
                "guide": name,
                "seconds": statistics.median(t),
                "forward pass seconds": statistics.median(forward),
                "share": statistics.median(t) / statistics.median(forward),
                "largest share": max(a / b for a, b in zip(t, forward, strict=True)),
                "rounds": len(t),
            }
            for name, t in times.items()
        ]
    )


class _Turns:
    """Several trainers in threads of one process, a step each in turn; notes how long every step took."""

    def __init__(self, names: list[str]):
        self.order, self.turn, self.seconds = names, names[0], {name: [] for name in names}
        self.condition = threading.Condition()

    def callback(self, name: str):
        from transformers import TrainerCallback

        turns = self

        class Turn(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                with turns.condition:
                    turns.condition.wait_for(lambda: turns.turn == name)
                torch.manual_seed(state.global_step)  # every trainer draws the same rollouts
                self.started = time.perf_counter()

            def on_step_end(self, args, state, control, **kwargs):
                turns.seconds[name].append(time.perf_counter() - self.started)
                turns.pass_on(name)

        return Turn()

    def pass_on(self, name: str) -> None:
        with self.condition:
            self.turn = self.order[(self.order.index(name) + 1) % len(self.order)]
            self.condition.notify_all()


def trainer() -> pd.DataFrame:
    """A step of 64 rollouts (LoRA, the smoke profile's model) of SageTrainer against stock GRPOTrainer, taking turns.

    The learning rate is 0, so that all of them draw the very same completions in the same step.
    """
    import datasets
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from sage_lib.algorithm.backend import GRPOConfig, GRPOTrainer  # first
    from sage_lib.algorithm.trainer import SageTrainer
    from sage_lib.experiment import problems
    from sage_lib.tasks import prompts

    steps, profile = 40, load_profile("smoke")
    folder = paths.build("benchmarks") / "rl_model"
    tiny_qwen.create(
        folder, profile.model.architecture, profile.task.limit, profile.model.max_seq_length, seed=0
    )
    rows = datasets.Dataset.from_list(
        [
            {"prompt": prompts.messages(i.question), "answer": i.gold}
            for i in problems.rl_items(profile)
        ]
    )
    cases = {
        "stock GRPOTrainer": None,
        "SageTrainer, no guide": {},
        "Branch": {"guide": BranchGuide(0.3, 0.14)},
        "Random": {"guide": RandomGuide()},
        "Token": {"guide": TokenGuide()},
        "Branch, sequence": {"guide": BranchGuide(0.3, 0.14), "anchor": "sequence"},
        "exact forward KL": {"anchor": "forward_kl"},
    }
    turns = _Turns(list(cases))
    settings = {
        **profile.rl,
        "max_steps": steps,
        "learning_rate": 0.0,
        "save_strategy": "no",
        "seed": 0,
    }

    def make(name: str, extra: dict | None):
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(folder),
            LoraConfig(
                r=8,
                lora_alpha=16,
                target_modules=list(profile.rl_lora["target_modules"]),
                task_type="CAUSAL_LM",
            ),
        )
        return (GRPOTrainer if extra is None else SageTrainer)(
            model=model,
            processing_class=tiny_qwen.load_tokenizer(folder),
            reward_funcs=lambda completions, **_: [
                len(c[0]["content"]) % 7 / 7 for c in completions
            ],
            train_dataset=rows,
            args=GRPOConfig(
                **settings,
                output_dir=str(folder.parent / name),
                report_to="none",
                disable_tqdm=True,
            ),
            callbacks=[turns.callback(name)],
            **(extra or {}),
        )

    trainers = [
        make(*case) for case in cases.items()
    ]  # loading a model is not safe beside another's
    with ThreadPoolExecutor(len(trainers)) as pool:
        for done in [pool.submit(t.train) for t in trainers]:
            done.result()
    stock = turns.seconds["stock GRPOTrainer"]
    rows = []
    for name, times in turns.seconds.items():
        ratios = sorted(
            a / b for a, b in zip(times[2:], stock[2:], strict=True)
        )  # the first two steps warm up
        rows.append(
            {
                "trainer": name,
                "seconds": statistics.median(times[2:]),
                "ratio": statistics.median(ratios),
                "ratio 10 %": ratios[len(ratios) // 10],
                "ratio 90 %": ratios[-len(ratios) // 10],
                "steps": len(ratios),
            }
        )
    return pd.DataFrame(rows)


def verifier() -> pd.DataFrame:
    """The verifier with two workers on 60 problems x 256 samples, against parse and verify of Math-Verify called for every sample in a loop.

    Answers are drawn with probability 1/rank^2 from each problem's candidates: right and wrong ones in several spellings, and
    none at all. "measured": the base policy's own samples of the profile smoke, as they are kept. Raises where a verdict differs.
    """
    from math_verify import verify

    from sage_lib.report import sample_tables
    from sage_lib.tasks.verifier import Verifier, last_answer, parse

    rng = np.random.default_rng(0)

    def drawn(
        candidates: Callable[[int], tuple[str, list[str | None]]],
    ) -> list[tuple[str, str | None]]:
        pairs = []
        for _ in range(60):
            gold, options = candidates(int(rng.integers(2, 900)))
            rng.shuffle(options)
            weights = 1 / np.arange(1, len(options) + 1) ** 2
            pairs += [
                (gold, options[i]) for i in rng.choice(len(options), 256, p=weights / weights.sum())
            ]
        return pairs

    def numbers(n: int) -> tuple[str, list[str | None]]:
        return str(n), [
            str(n),
            f"{n:04d}",
            f"\\boxed{{{n}}}",
            None,
            f"\\frac{{{2 * n}}}{{2}}",
            *(str(n + d) for d in (*range(1, 30), 100, 1000)),
            f"{n}.5",
            f"{n}^2",
            f"{n}\\%",
        ]

    def formulas(n: int) -> tuple[str, list[str | None]]:
        wrong = (
            [f"\\frac{{{n + d}\\sqrt{{3}}}}{{7}}" for d in range(1, 15)]
            + [f"\\frac{{{n}\\sqrt{{{d}}}}}{{7}}" for d in range(5, 15)]
            + [f"{n}x + {d}" for d in range(5)]
        )
        return f"\\frac{{{n}\\sqrt{{3}}}}{{7}}", [
            f"\\frac{{{n}\\sqrt{{3}}}}{{7}}",
            f"\\dfrac{{{n}\\sqrt3}}7",
            f"\\frac{{{n}}}{{7}}\\sqrt{{3}}",
            f"{n}\\sqrt{{3}}/7",
            None,
            *wrong,
        ]

    cases = {"whole numbers": drawn(numbers), "formulas": drawn(formulas)}
    cases["measured"] = [
        (row["problem"].partition("<")[0], last_answer(text))
        for row in sample_tables.samples(load_profile("smoke"), "base")
        for text in row["completions"]
    ]
    rows = []
    for name, pairs in cases.items():
        with_pool = Verifier(workers=2)
        with_pool.verify_answers(["1.5"], ["1.5"])  # start the workers
        started = time.perf_counter()
        ours = [v.correct for v in with_pool.verify_answers(*zip(*pairs, strict=True))]
        middle = time.perf_counter()
        loop = [
            answer is not None
            and bool(verify(parse(gold, trusted=True), parse(answer), timeout_seconds=None))
            for gold, answer in pairs
        ]
        ended = time.perf_counter()
        with_pool.close()
        if ours != loop:
            raise SystemExit(
                f"{name}: verdicts differ, first for {next(p for p, a, b in zip(pairs, ours, loop, strict=True) if a != b)}"
            )
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


BENCHMARKS = {"guides": guides, "trainer": trainer, "verifier": verifier}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=BENCHMARKS)
    name = parser.parse_args().name
    torch.set_num_threads(2)
    table = BENCHMARKS[name]()
    folder = paths.BENCHMARKS
    write_text(folder / f"{name}.csv", table.to_csv(index=False))
    write_json(
        folder / f"{name}.json",
        {
            "benchmark": name,
            "revision": records.revision(),
            "versions": records.versions(),
            "machine": records.machine(),
            "threads": torch.get_num_threads(),
        },
    )
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
