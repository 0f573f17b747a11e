"""Tell what a guide would do to the optimum of a model. Samples of the model suffice.

Draws completions of the base, judges them, and prints for each guide by how much it moves the
log-odds of a right completion at the optimum of eq. 4. What was drawn is kept: the same command
goes on where it was ended.
"""

import argparse
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from sage_lib import consent
from sage_lib.errors import SageError
from sage_lib.evaluation import sampled_gain
from sage_lib.experiment import runs
from sage_lib.experiment.profile import BASE
from sage_lib.pipeline import arguments, jobs, stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_profile(parser)
    parser.add_argument("--model", help="in a profile's place: a model's folder, or its hub name")
    parser.add_argument("--data", help="with --model: a .jsonl or .csv file of problems")
    parser.add_argument("--question", default="question", help="its column of questions")
    parser.add_argument("--gold", default="answer", help="its column of right answers")
    parser.add_argument("--problems", type=int, help="of each data set")
    parser.add_argument("--samples", type=int, help="of each problem")
    parser.add_argument("--tokens", type=int, default=1024, help="--model: most of a completion")
    parser.add_argument("--engine", choices=("transformers", "vllm"), help="what draws")
    parser.add_argument("--beta", type=float, help="of the objective; the profile's, or 0.05")
    parser.add_argument("--precision", type=float, default=0.05, help="half an interval of log rho")
    parser.add_argument("--out", type=Path, default=Path("guide_gain"), help="folder of the result")


def of_model(options: argparse.Namespace) -> Path:
    """A profile's file for a model and a data file of one's own, in the folder of the result."""
    if not options.data or not Path(options.data).is_file():
        raise SageError(f"--model needs --data FILE with problems; {options.data!r} is no file")
    folder = Path(options.model).expanduser()
    if not folder.is_dir() and (
        options.model.startswith((".", "/", "~")) or "/" not in options.model
    ):
        raise SageError(
            f"there is no folder {options.model!r} with a model: correct --model, or give the "
            "whole hub name, owner/name"
        )
    data = {
        "name": "file",
        "path": str(Path(options.data).resolve()),
        "rows": options.problems or 100,
    }
    data |= {"question": options.question, "gold": options.gold}
    model = {"name": str(folder.resolve()) if folder.is_dir() else options.model, "seed": 0}
    model["max_seq_length"] = 2 * options.tokens
    sampling = {"samples": 32, "ks": [1], "temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    settings: dict[str, Any] = {
        **{"name": "guide_gain", "extends": "paper_all", "description": "a question to one base"},
        **{"model": model, "sft": None, "sft_data": None, "rl": None, "rl_data": None, "train": []},
        "evaluation": {**sampling, "data": [data], "max_new_tokens": options.tokens},
        "compute": {"requires_gpu": False, "disk_gb": None},
    }
    path: Path = options.out / "guide_gain.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        YAML().dump(settings, file)
    return path


def run_guide_gain(options: argparse.Namespace) -> None:
    """Draw what is not drawn, then print and write the table."""
    if options.beta is not None and not options.beta > 0:
        raise SageError(sampled_gain.NO_OPTIMUM.format(options.beta))
    if options.data and not options.model:
        raise SageError("--data goes with --model: a profile names its own data")
    if options.model:
        options.profile = str(of_model(options))
    asked = {"samples": options.samples, "sampled": options.problems, "engine": options.engine}
    options.set += [
        f"evaluation.{key}={value}" for key, value in asked.items() if value is not None
    ]
    if options.samples:
        options.set.append("evaluation.ks=[1]")
    profile = arguments.named_profile(options)
    consent.require_all(profile.raw)
    planned = stages.jobs_of(profile, ("sft", "evaluation"))
    base = [job for job in planned if job.run.method == BASE]  # and no policy of RL
    jobs.require(base, jobs.run(base, 1, profile.compute.threads), "; what was made is kept")
    drawn = sampled_gain.scored_samples(
        profile, runs.evaluation_run(profile, runs.sft_run(profile))
    )
    beta = profile.rl.get("beta") or 0.05 if options.beta is None else options.beta
    found = sampled_gain.apply_guides(drawn, sampled_gain.candidate_guides(drawn))
    table = sampled_gain.gain_table(found, beta, options.precision)
    right = found.groupby("problem")["right"].mean()
    print(f"{len(right)} problems, {len(found)} samples, {right.mean():.3f} right; beta {beta:g}")
    print(table.to_string(index=False, float_format="{:.3f}".format))
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "guide_gain.csv", index=False, float_format="%.6g")
    found.round(6).to_parquet(options.out / "samples.parquet", index=False)
