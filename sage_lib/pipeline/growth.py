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

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Steps that are measured, after one that warms up; the fastest counts.
STEPS = 2
#: Seconds that something short is done for, again and again: the fastest of two would be chance.
ENOUGH = 1.0
#: The model of a step, where a curve does not say otherwise.
WIDTH, LAYERS = 64, 2
PROMPT = "reach 24 from 1 2 3 4"
STOCK, BRANCH, FORWARD = "stock GRPOTrainer", "Branch", "exact forward KL"
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
) -> dict[str, float]:
    """One RL step of a random model with LoRA adapters on q and v, beta 0.05, in float32.

    Completions are ``tokens`` long. With ``generates`` the model draws them, within the step;
    without they are random ids, and of stock one generation is timed besides.
    """
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
    tokenizer = tiny_qwen.tokenizer(99, tokens + 64)
    model = _random_model(vocabulary, width, layers, tokens + 64)
    parameters = sum(p.numel() for p in model.parameters())
    drawing: list[float] = []

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

    clock = _clock()
    added: dict[str, dict[str, Any]] = {
        STOCK: {},
        BRANCH: {"guide": BranchGuide()},
        FORWARD: {"anchor": "forward_kl"},
    }
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = (GRPOTrainer if arm == STOCK else SageTrainer)(
        model=get_peft_model(model, lora),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * (STEPS + 1)),
        args=GRPOConfig(
            output_dir=str(paths.build("benchmarks") / "growth"),
            per_device_train_batch_size=batch,
            num_generations=batch,
            max_completion_length=tokens,
            max_steps=STEPS + 1,
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
        callbacks=[clock],
        rollout_func=drawn,
        **added[arm],
    )
    before = _memory_anew()
    trainer.train()
    peak = _peak() - before
    seconds, fastest = min(zip(clock.seconds[1:], range(1, STEPS + 1), strict=True))
    found = {
        "parameters": parameters,
        "CPU seconds": seconds - drawing[fastest],
        "peak MB": peak,
        "generation": drawing[fastest],
    }
    if not generates and arm == STOCK:
        started = time.process_time()
        asked = torch.tensor([tokenizer(PROMPT)["input_ids"]] * batch)
        _generated(trainer.model, asked, tokens)
        found["generation"] = time.process_time() - started
    return found


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


MEASURED: dict[str, Callable[..., dict[str, float]]] = {
    "step": _step,
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


def measure(what: str, cases: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """What one of MEASURED finds for each of ``cases``, its arguments: all in one process."""
    command = [sys.executable, "-m", __name__, what, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SageError(f"{what} of {cases} could not be measured: {done.stderr[-500:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(_FOUND)]
    return [json.loads(line.removeprefix(_FOUND)) for line in lines]


# --- vocabulary ----------------------------------------------------------------------------------

#: Tokens of a completion, and the vocabulary: the last is Qwen2.5-Math-7B's.
SIZES = [(512, 1_024), (512, 10_240), (512, 50_176), (512, 152_064), (2048, 152_064)]


def vocabulary() -> pd.DataFrame:
    """A step of SageTrainer against stock GRPOTrainer's at growing vocabulary and length: two
    completions, a model of two layers of width 64. A process for each trainer.

    "CPU seconds": scoring, loss, gradient and update, without generation, which is the same in all
    of them; "ratio" of these to stock's, "whole ratio" with the generation that stock was timed at.
    "peak MB": above what the process held before the first step of that size.
    """
    _one_thread()
    cases = [{"tokens": tokens, "vocabulary": words, "batch": 2} for tokens, words in SIZES]
    arms = (STOCK, BRANCH, FORWARD)
    found = {arm: measure("step", [{"arm": arm, **case} for case in cases]) for arm in arms}
    rows = []
    for i, case in enumerate(cases):
        stock = found[STOCK][i]
        generation = stock["generation"]
        for arm in arms:
            one = found[arm][i]
            whole = (one["CPU seconds"] + generation) / (stock["CPU seconds"] + generation)
            rows.append(
                {
                    "trainer": arm,
                    "tokens": case["tokens"],
                    "vocabulary": case["vocabulary"],
                    "CPU seconds": one["CPU seconds"],
                    "ratio": one["CPU seconds"] / stock["CPU seconds"],
                    "generation": generation,
                    "whole ratio": whole,
                    "peak MB": one["peak MB"],
                    "peak ratio": one["peak MB"] / stock["peak MB"],
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
    """What :func:`measure` starts: its measurements, a line each. The first case is done once more
    before them: what a process loads when it does something for the first time is no case's."""
    what, cases = argv[0], json.loads(argv[1])
    MEASURED[what](**cases[0])
    for case in cases:
        print(f"{_FOUND}{json.dumps(MEASURED[what](**case))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
