"""How time and memory grow: with vocabulary, completion length, batch, model, problems, k, the runs
of a grid and the verifier's processes.

    sage-companion bench vocabulary      a step of SageTrainer against stock GRPO's, up to 152,064
    sage-companion bench growth          curves, and the power of their last step

Seconds are of the processor, of one thread: other work on the machine stretches the clock and not
these, though it takes a share of caches and memory bandwidth. Peaks are above what the process held
before the first step of that size. Linux only, where a process can be asked for its peak anew.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.pipeline.turns import Turns, ratios

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback

#: Steps that are measured, after one that warms up; the fastest counts.
STEPS = 2
#: Seconds that something short is done for, again and again: the fastest of two would be chance.
ENOUGH = 1.0
#: The model of a step, where a curve does not say otherwise.
WIDTH, LAYERS = 64, 2
PROMPT = "reach 24 from 1 2 3 4"
STOCK, BRANCH, FORWARD = ARMS = "stock GRPOTrainer", "Branch", "exact forward KL"
#: How a line of a measuring process begins.
_FOUND = "found: "


# --- what is measured, each in a process of its own ----------------------------------------------


def _step(
    arm: str,
    tokens: int,
    vocabulary: int,
    batch: int,
    width: int = WIDTH,
    layers: int = LAYERS,
    generates: bool = False,
) -> dict[str, Any]:
    """One RL step of a random model with LoRA adapters on q and v, beta 0.05, in float32.

    Completions are ``tokens`` long. With ``generates`` the model draws them, within the step;
    without they are random ids, and of stock one generation is timed besides.
    """
    import torch

    drawing: list[float] = []
    clock = _clock()
    model = {"tokens": tokens, "vocabulary": vocabulary, "width": width, "layers": layers}
    trainer = _trainer(arm, model, batch, STEPS + 1, clock, drawing, generates)
    before = _memory_anew()
    trainer.train()
    peak = _peak() - before
    seconds, fastest = min(zip(clock.seconds[1:], range(1, STEPS + 1), strict=True))
    found = {
        "parameters": sum(p.numel() for p in trainer.model.get_base_model().parameters()),
        "CPU seconds": seconds - drawing[fastest],
        "peak MB": peak,
        "generation": drawing[fastest],
    }
    if not generates and arm == STOCK:
        started = time.process_time()
        asked = torch.tensor([trainer.processing_class(PROMPT)["input_ids"]] * batch)
        _generated(trainer.model, asked, tokens)
        found["generation"] = time.process_time() - started
    return found


def _paired(tokens: int, vocabulary: int, batch: int, steps: int) -> dict[str, Any]:
    """Seconds of so many steps of each of ARMS, which take turns, after one that warms up."""
    turns = Turns(ARMS)
    model = {"tokens": tokens, "vocabulary": vocabulary, "width": WIDTH, "layers": LAYERS}
    trainers = [_trainer(arm, model, batch, steps + 1, turns.callback(arm), []) for arm in ARMS]
    turns.run(trainers)
    return {arm: seconds[1:] for arm, seconds in turns.seconds.items()}


def _trainer(
    arm: str,
    size: dict[str, int],
    batch: int,
    steps: int,
    callback: TrainerCallback,
    drawing: list[float],
    generates: bool = False,
) -> Any:
    """A trainer of random weights; the seconds of each of its draws are added to ``drawing``."""
    from sage_lib.algorithm.backend import GRPOConfig, GRPOTrainer  # first

    # isort: split

    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model

    from sage_lib.algorithm.guides import BranchGuide
    from sage_lib.algorithm.trainer import SageTrainer
    from sage_lib.policy import tiny_qwen

    _one_thread()
    torch.manual_seed(0)
    tokens = size["tokens"]
    tokenizer = tiny_qwen.tokenizer(99, tokens + 64)
    model = _random_model(size["vocabulary"], size["width"], size["layers"], tokens + 64)

    def drawn(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's rollout_func."""
        started = time.process_time()
        asked = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        if generates:
            ids = _generated(trainer.model, torch.tensor(asked), tokens).tolist()
        else:
            ids = torch.randint(3, len(tokenizer), (len(asked), tokens)).tolist()
        drawing.append(time.process_time() - started)
        logps = [[0.0] * tokens for _ in ids]
        return {"prompt_ids": asked, "completion_ids": ids, "logprobs": logps}

    added: dict[str, dict[str, Any]] = {
        STOCK: {},
        BRANCH: {"guide": BranchGuide()},
        FORWARD: {"anchor": "forward_kl"},
    }
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return (GRPOTrainer if arm == STOCK else SageTrainer)(
        model=get_peft_model(model, lora),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * steps),
        args=GRPOConfig(
            output_dir=str(paths.build("benchmarks") / "growth"),
            per_device_train_batch_size=batch,
            num_generations=batch,
            max_completion_length=tokens,
            max_steps=steps,
            beta=0.05,
            loss_type="grpo",
            use_bias_correction_kl=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            seed=0,
        ),
        callbacks=[callback],
        rollout_func=drawn,
        **added[arm],
    )


def _random_model(vocabulary: int, width: int, layers: int, positions: int) -> PreTrainedModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    heads = max(2, width // 64)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def _generated(model: Any, asked: Any, tokens: int) -> Any:
    """Ids that the model draws after equally long prompts, none of them ending early."""
    length = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    import torch

    with torch.no_grad():
        ids = model.generate(input_ids=asked, do_sample=True, top_k=0, **length)
    return ids[:, asked.shape[1] :]


def _clock() -> Any:
    """A callback with the processor time of each step in ``seconds``."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds.append(time.process_time() - self.started)

    return Clock()


def _exact(problems: int) -> dict[str, float]:
    """Exact pass@k of so many countdown problems by the profile smoke's model."""
    from transformers import AutoModelForCausalLM

    from sage_lib.experiment.profile import load_profile
    from sage_lib.policy import loading, scoring, tiny_qwen
    from sage_lib.tasks import countdown

    _one_thread()
    profile = load_profile("smoke")
    folder = paths.build("benchmarks") / "growth_model"
    tiny_qwen.create(folder, profile.model)
    model = AutoModelForCausalLM.from_pretrained(folder, **loading.SAFE).eval()
    tokenizer = tiny_qwen.load_tokenizer(folder)
    asked = countdown.problems(countdown.Settings(name="countdown"), problems, seed=1)

    def evaluate() -> object:
        found = scoring.valid_probabilities(model, tokenizer, asked)
        return scoring.exact_summary(found, [2**i for i in range(9)])

    return _timed(evaluate)


def _metrics(problems: int, k: int) -> dict[str, float]:
    """pass@1 to pass@k from 2k samples of each problem, and an interval of 1,000 resamples."""
    from sage_lib.evaluation import metrics

    rng = np.random.default_rng(0)
    n = np.full(problems, 2 * k)
    c = rng.binomial(2 * k, rng.random(problems) ** 3)
    ks = [2**i for i in range(int(math.log2(k)) + 1)]

    def evaluate() -> object:
        curve = metrics.pass_at_k_curve(n, c, ks)
        return metrics.bootstrap_interval(curve, resamples=1000, seed=0)

    return _timed(evaluate)


def _grid(runs: int) -> dict[str, float]:
    """What a grid's command does before it starts anything, where so many runs are done: it asks of
    each run, its base and its evaluation whether it is published, done, or running."""
    from sage_lib.experiment import profile, records
    from sage_lib.experiment.grid import Block, Grid
    from sage_lib.pipeline import grid

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"SAGE_BUILD": f"{folder}/build", "SAGE_RESULTS": f"{folder}/results"}
        one = profile.load_profile("smoke+train=[grpo]+evaluation.methods=[grpo]")
        many = dataclasses.replace(one, seeds=tuple(range(runs)))
        whole = Grid("growth", "", (Block("all", "", many, ("grpo",)),))
        for task in grid.tasks(whole, [], []):  # each run is known by the weights before it
            run = task.run()
            run.prepare()
            for name in run.makes:
                (run.build / name).mkdir(parents=True, exist_ok=True)
            record = records.Record(run.stage, many.name, run.fingerprint, 0, {})
            run.finish(record, weights="none")

        def evaluate() -> object:
            tasks = grid.tasks(whole, [], [])
            listed = grid.listed(tasks, grid.published_seconds(tasks))
            assert (listed["state"] == "done").all()
            return listed

        return _timed(evaluate)


#: Answers that are verified, whatever the number of processes.
ANSWERS = 500


def _verifier(workers: int, answers: int = ANSWERS) -> dict[str, float]:
    """The verifier's processes, from their start to their end: seconds and peaks of all of them,
    added up."""
    from sage_lib.tasks.verifier import Verifier

    golds = [rf"\frac{{{n}\sqrt{{3}}}}{{7}}" for n in range(1, answers + 1)]
    given = [rf"\frac{{{n}}}{{7}}\sqrt{{3}}" for n in range(1, answers + 1)]
    verifier = Verifier(workers=workers)
    started = _seconds_of_all()
    assert all(verdict.correct for verdict in verifier.verify_answers(golds, given))
    peak = sum(_status("VmHWM", child) for child in _children())
    verifier.close()
    return {"CPU seconds": _seconds_of_all() - started, "peak MB": peak}


def _seconds_of_all() -> float:
    """Of the processor: this process and those of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _children() -> list[str]:
    """Process numbers of this process's children, whichever of its threads started them."""
    found = Path("/proc/self/task").glob("*/children")
    return [number for path in found for number in path.read_text().split()]


def _timed(evaluate: Callable[[], object]) -> dict[str, float]:
    """The fastest of STEPS calls or more after one that warms up, and the peak of them all."""
    evaluate()
    before, seconds = _memory_anew(), list[float]()
    while len(seconds) < STEPS or sum(seconds) < ENOUGH:
        started = time.process_time()
        evaluate()
        seconds.append(time.process_time() - started)
    return {"CPU seconds": min(seconds), "peak MB": _peak() - before}


MEASURED: dict[str, Callable[..., dict[str, Any]]] = {
    "step": _step,
    "paired": _paired,
    "exact": _exact,
    "metrics": _metrics,
    "grid": _grid,
    "verifier": _verifier,
}


def _memory_anew() -> float:
    """Let the peak begin at what this process holds now, which is returned, MB."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise SageError(
            "the peak of a process can be asked for anew on Linux alone: run this benchmark there"
        ) from error
    return _status("VmRSS")


def _peak() -> float:
    return _status("VmHWM")


def _status(name: str, process: str = "self") -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(found) / 1000


def _one_thread() -> None:
    """Here, where the record asks, as in the processes that measure."""
    import torch

    torch.set_num_threads(1)


def measure(
    what: str, cases: Sequence[dict[str, Any]], before: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """What one of MEASURED finds for each of ``cases``, its arguments: all in one process, which
    does ``before`` first (None: the first case)."""
    command = [sys.executable, "-m", __name__, what, json.dumps([before or cases[0], *cases])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SageError(f"{what} of {cases} could not be measured: {done.stderr[-500:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(_FOUND)]
    return [json.loads(line.removeprefix(_FOUND)) for line in lines]


# --- vocabulary ----------------------------------------------------------------------------------

#: Tokens of a completion, the vocabulary (the last is Qwen2.5-Math-7B's), and how many steps.
SIZES = [
    *((512, 1_024, 60), (512, 10_240, 60), (512, 50_176, 30)),
    *((512, 152_064, 11), (2048, 152_064, 7)),
]
#: What a process does before a peak is measured in it, which is that of the first step of a size.
_TINY = {"tokens": 8, "vocabulary": 128, "batch": 2}


def vocabulary() -> pd.DataFrame:
    """A step of SageTrainer against stock GRPOTrainer's at growing vocabulary and length: two
    completions, a model of two layers of width 64.

    "CPU seconds": scoring, loss, gradient and update, without generation, which is the same in all
    of them, the median of steps in which the trainers take turns in one process; "ratio", "low",
    "high" and the others as :func:`turns.ratios` has them. "whole ratio", with its bounds, counts
    the generation that stock was timed at once. "peak MB": above what a process held before it
    trained two steps and one more of that size, a process for each size and trainer.
    """
    _one_thread()
    rows = []
    for tokens, words, steps in SIZES:
        case = {"tokens": tokens, "vocabulary": words, "batch": 2}
        [seconds] = measure("paired", [{**case, "steps": steps}], _TINY | {"steps": 1})
        alone = {
            arm: measure("step", [{"arm": arm, **case}], {"arm": arm, **_TINY}) for arm in ARMS
        }
        generation = alone[STOCK][0]["generation"]
        for arm in ARMS:
            whole = ratios(*([one + generation for one in seconds[of]] for of in (arm, STOCK)))
            peak = alone[arm][0]["peak MB"]
            rows.append(
                {
                    "trainer": arm,
                    "tokens": tokens,
                    "vocabulary": words,
                    "CPU seconds": statistics.median(seconds[arm]),
                    **ratios(seconds[arm], seconds[STOCK]),
                    "generation": generation,
                    **{f"whole {name}": whole[name] for name in ("ratio", "low", "high")},
                    "peak MB": peak,
                    "peak ratio": peak / alone[STOCK][0]["peak MB"],
                }
            )
    return pd.DataFrame(rows)


# --- growth --------------------------------------------------------------------------------------

_SMALL = {"arm": BRANCH, "tokens": 64, "vocabulary": 1_024, "batch": 4, "generates": True}
#: Curve -> what is measured, what grows, its sizes, the rest.
CURVES: dict[str, tuple[str, str, Sequence[int], dict[str, Any]]] = {
    "completion length": ("step", "tokens", (128, 256, 512, 1024, 2048, 4096), _SMALL),
    "vocabulary": ("step", "vocabulary", (9_504, 19_008, 38_016, 76_032, 152_064), _SMALL),
    "batch": ("step", "batch", (8, 16, 32, 64, 128, 256), _SMALL),
    "parameters": ("step", "width", (64, 128, 256, 512, 1024), _SMALL),
    "problems, exact": ("exact", "problems", (50, 100, 200, 400, 800, 1600), {}),
    "problems, metrics": ("metrics", "problems", (2000, 4000, 8000, 16000, 32000), {"k": 256}),
    "k, metrics": ("metrics", "k", (256, 1024, 4096, 16384, 65536), {"problems": 500}),
    "runs in a grid": ("grid", "runs", (50, 100, 200, 400, 800), {}),
    "processes, verifier": ("verifier", "workers", (1, 2, 4, 8), {}),
}


def growth() -> pd.DataFrame:
    """Seconds and memory by one size at a time: an RL step of SageTrainer with the Branch guide,
    generation within it, evaluation, a grid's list of runs, and the verifier's processes. A process
    for each curve.

    "power" is that of the seconds since the size before: 1 where twice the size takes twice as
    long. "memory power" is that of the peak, none where it is below a megabyte.
    """
    _one_thread()
    rows = []
    for curve, (what, grows, sizes, rest) in CURVES.items():
        found = measure(what, [{**rest, grows: size} for size in sizes])
        for size, one in zip(sizes, found, strict=True):
            generation = one.get("generation", math.nan)
            rows.append(
                {
                    "curve": curve,
                    "size": size if grows != "width" else one["parameters"],
                    "CPU seconds": np.nansum([one["CPU seconds"], generation]),
                    "generation": generation,
                    "peak MB": one["peak MB"],
                }
            )
    table = pd.DataFrame(rows)
    return with_powers(table)


def with_powers(table: pd.DataFrame) -> pd.DataFrame:
    """Columns curve, size, CPU seconds, peak MB, and the power of both since the size before."""

    def growths(column: pd.Series) -> pd.Series:
        return np.log(column).groupby(table["curve"], sort=False).diff()

    sizes, held = growths(table["size"]), table["peak MB"].where(table["peak MB"] > 1)
    powers = {"power": growths(table["CPU seconds"]), "memory power": growths(held)}
    return table.assign(**{name: grown / sizes for name, grown in powers.items()})


def main(argv: Sequence[str]) -> None:
    """What :func:`measure` starts: its measurements, a line each, but of the first case: what a
    process loads when it does something for the first time is no case's."""
    what, (before, *cases) = argv[0], json.loads(argv[1])
    MEASURED[what](**before)
    for case in cases:
        print(f"{_FOUND}{json.dumps(MEASURED[what](**case))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
