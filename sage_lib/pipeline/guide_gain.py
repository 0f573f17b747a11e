"""Tell what a guide would do to the optimum of a model. Samples of the model suffice.

Draws completions of the base, or reads those of a file, and prints for each guide by how much it
moves the log-odds of a right completion at the optimum of eq. 4. What was drawn is kept: the same
command goes on where it was ended.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import pandas as pd
from ruamel.yaml import YAML

from sage_lib import consent
from sage_lib.algorithm import guide_choices
from sage_lib.errors import SageError
from sage_lib.evaluation import sample_files, sampled_gain
from sage_lib.experiment import problems, runs
from sage_lib.experiment.checked import digest
from sage_lib.experiment.profile import BASE, NOT_YAML, Profile, parse_yaml
from sage_lib.pipeline import arguments, jobs, stages
from sage_lib.policy import loading
from sage_lib.tasks.local_file import LocalFile
from sage_lib.tasks.problem import Problem
from sage_lib.text import count, visible
from sage_lib.theory.optimum import check_beta

#: Tokens of a prompt for which a profile of ``--model`` has room.
PROMPT = 2048
#: What stands below the table: the outcome of the grid law.
FORECAST = (
    "log rho predicted training on ten bases with kl_form sequence, and not with k3 "
    "(notebook 13; six seeds each)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_profile(parser)
    parser.add_argument("--model", help="in a profile's place: a model's folder, or its hub name")
    parser.add_argument("--data", help="with --model: a .jsonl or .csv file of problems")
    parser.add_argument("--question", default="question", help="its column of questions")
    parser.add_argument("--gold", default="answer", help="its column of right answers")
    parser.add_argument("--problems", type=int, help="of each data set")
    about = "how many to draw of each problem; or, with --model, files that pass-at-k reads"
    parser.add_argument("--samples", nargs="+", metavar="N or FILE", help=about)
    parser.add_argument("--metric", help="of FILE, where it has several verdicts")
    parser.add_argument("--filter", help="of FILE, where lm-evaluation-harness has several")
    parser.add_argument("--threshold", type=float, help="of FILE: a score from here on is right")
    about = "module:function, called with gold answer and completion; returns True or False"
    parser.add_argument("--judge", help=about)
    about = "a text file with {question}, or: model, for the model's own chat template"
    parser.add_argument("--template", metavar="FILE", help=about)
    about = "a further guide: module:Guide, or a mapping as in a profile; may be repeated"
    parser.add_argument("--guide", action="append", default=[], help=about)
    parser.add_argument("--tokens", type=int, default=1024, help="--model: most of a completion")
    parser.add_argument("--engine", choices=("transformers", "vllm"), help="what draws")
    parser.add_argument("--beta", type=float, help="of the objective; the profile's, or 0.05")
    parser.add_argument("--precision", type=float, default=0.05, help="half an interval of log rho")
    parser.add_argument("--out", type=Path, default=Path("guide_gain"), help="folder of the result")


def of_model(options: argparse.Namespace) -> Path:
    """Write a profile for a model and a data file of the user's, and return its path."""
    if not options.data:
        raise SageError("--model needs problems, too: give --data FILE")
    if not Path(options.data).is_file():
        raise SageError(f"--data {options.data}: there is no such file")
    data: dict[str, Any] = {"name": "file", "path": str(Path(options.data).resolve())}
    data |= {"rows": 100 if options.problems is None else options.problems}
    data |= {"question": options.question, "gold": options.gold}
    model = {"name": model_name(options.model), "seed": 0}
    model["prompt"] = template(options.template) or "paper"
    model["max_seq_length"] = PROMPT + options.tokens
    sampling = {"samples": 32, "ks": [1], "temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    settings: dict[str, Any] = {
        **{"extends": "paper_all", "description": "a question to one base"},
        **{"model": model, "sft": None, "sft_data": None, "rl": None, "rl_data": None, "train": []},
        "evaluation": {**sampling, "data": [data], "max_new_tokens": options.tokens},
        "compute": {"requires_gpu": False, "disk_gb": None},
    }
    # A folder for each model and data: two commands may be at work at a time.
    settings["name"] = f"guide_gain_{digest(settings)[:8]}"
    path: Path = options.out / f"{settings['name']}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        YAML().dump(settings, file)
    return path


def model_name(name: str) -> str:
    """Return a folder as a whole path, or a hub name as it is; SageError where it is neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise SageError(f"--model {name}: the folder has no config.json, so it holds no model")
        return str(folder.resolve())
    if name.startswith((".", "/", "~")) or "/" not in name:
        raise SageError(
            f"there is no folder {name!r} with a model: correct --model, or give the whole hub "
            "name, owner/name"
        )
    return name


def template(file: str | None) -> str | None:
    """Return the text of a template's file; None and "model" as they are."""
    if file in (None, "model"):
        return file
    path = Path(str(file)).expanduser()
    text = path.read_text(errors="replace") if path.is_file() else ""
    if "{question}" not in text or "\N{REPLACEMENT CHARACTER}" in text:
        raise SageError(f"--template {file}: give model, or a text file with {{question}}")
    return text


def run_guide_gain(options: argparse.Namespace) -> None:
    """Draw what is not drawn, or read it, then print and write the table."""
    if not options.precision > 0:
        raise SageError(f"--precision must be positive, not {options.precision}")
    if options.data and not options.model:
        raise SageError("--data goes with --model: a profile names its own data")
    number = options.samples[0] if options.samples else None
    files = [] if number is None or number.isdecimal() else options.samples
    if number is not None and not files and len(options.samples) > 1:
        raise SageError("--samples is a number, or files: give one of them")
    if (options.template or files) and not options.model:
        raise SageError("--template and --samples FILE go with --model: give the one that scores")
    consent.agree(options.yes)
    if options.out.exists() and not options.out.is_dir():
        raise SageError(f"--out {options.out} is a file: name a folder")
    choices = {text: _parsed(text) for text in options.guide}
    sections = [{"guide": choice} for choice in choices.values()]
    consent.require_all({"judge": options.judge, "guides": sections})
    guides = {text: build_guide(choice) for text, choice in choices.items()}
    if options.judge:
        consent.imported(options.judge, "judge")  # now, and not after hours of sampling
    judge = functools.partial(_judged, options.judge) if options.judge else None
    profile = None if files else profile_of(options, number)
    beta = options.beta
    if beta is None:
        beta = profile.rl.get("beta", 0.05) if profile else 0.05
    check_beta(beta)
    if profile:
        scored = draw_samples(profile, judge)
    else:
        samples = read_files(files, options, judge)
        name, prompts = model_name(options.model), template(options.template)
        scored = sampled_gain.score_texts(name, samples, prompts)
    guides = {**sampled_gain.candidate_guides(scored), **guides}
    q_table = sampled_gain.apply_guides(scored, guides)
    options.out.mkdir(parents=True, exist_ok=True)
    q_table.round(6).to_parquet(options.out / "samples.parquet", index=False)
    right = q_table.groupby("problem")["right"].mean()
    print(f"{len(right)} problems, {len(q_table)} samples, {right.mean():.3f} right; beta {beta:g}")
    if not right.any():
        print("No sample is right. The first one:")
        for name in ("prompt", "gold", "completion"):
            print(visible(f"  {name}: {str(scored[name].iloc[0])[:1000]}"))
    table = sampled_gain.gain_table(q_table, beta, options.precision)
    for position, setting in enumerate(("threshold", "ratio"), 1):  # in nats, and per nat
        column = [getattr(guides[name], setting, None) for name in table["guide"]]
        table.insert(position, setting, column)
    print(table.to_string(index=False, float_format="{:.3f}".format, na_rep="-"))
    print(FORECAST)
    table.to_csv(options.out / "guide_gain.csv", index=False, float_format="%.6g")


#: How samples of the base itself are drawn: log rho is over its own distribution.
UNCHANGED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def profile_of(options: argparse.Namespace, number: str | None) -> Profile:
    """Return the profile that draws ``number`` samples of each problem from the base."""
    if options.model:
        options.profile = str(of_model(options))
    changes = {"samples": number, "sampled": options.problems, "engine": options.engine}
    options.set += [f"evaluation.{key}={v}" for key, v in changes.items() if v is not None]
    if number:
        options.set.append("evaluation.ks=[1]")
    profile = arguments.named_profile(options)
    others = {k: v for k, v in UNCHANGED.items() if getattr(profile.evaluation, k) != v}
    if others:
        options.set += [f"evaluation.{key}={value}" for key, value in others.items()]
        profile = arguments.named_profile(options)
    consent.require_all(profile.raw)
    if options.model:
        require_room(profile)
    return profile


def draw_samples(profile: Profile, judge: sampled_gain.Judge | None) -> pd.DataFrame:
    """Draw the samples of a profile's base that are not drawn. Return them scored."""
    planned = stages.jobs_of(profile, ("sft", "evaluation"))
    base = [job for job in planned if job.run.method == BASE]  # and no policy of RL
    jobs.require(base, jobs.run(base, 1, profile.compute.threads), "; what was made is kept")
    run = runs.evaluation_run(runs.sft_run(profile))
    return sampled_gain.scored_samples(profile, run, judge)


def require_room(profile: Profile) -> None:
    """Raise SageError where the longest prompt leaves no room for a completion."""
    import transformers

    section, tokens = profile.model, profile.evaluation.max_new_tokens
    tokenizer = loading.load_tokenizer(section, section.name)
    config = transformers.AutoConfig.from_pretrained(section.name, trust_remote_code=False)
    room = min(section.max_seq_length, getattr(config, "max_position_embeddings", 10**9))
    posed = problems.sampled_problems(profile)
    longest = max(len(loading.encode(tokenizer, problem.question)) for problem in posed)
    if longest + tokens > room:
        raise SageError(
            f"--tokens {tokens} leaves no room: the longest prompt has {longest} tokens, and both "
            f"have {room}: give --tokens {max(room - longest, 0)} or fewer, or shorter problems"
        )


def _parsed(text: str) -> Any:
    """Return the choice that ``--guide`` gives as YAML."""
    try:
        return parse_yaml(text)
    except NOT_YAML as error:
        reason = " ".join(str(error).split())
        raise SageError(f"--guide {text}: {reason}; give it as '{{name: branch, ...}}'") from None


def build_guide(choice: Any) -> Any:
    """Return the guide of a choice; SageError for one that reads rewards, which are not there."""
    guide = guide_choices.build_guide(choice)
    if guide_choices.reads_rewards(choice):
        raise SageError(f"the guide {choice} reads the rewards of training: leave it out")
    return guide


def read_files(
    files: list[str], options: argparse.Namespace, judge: sampled_gain.Judge | None
) -> list[Any]:
    """Return the samples of files. Lines that cannot be read are named and counted."""
    samples = []
    for file in files:
        choice = options.metric, options.filter, options.threshold, options.gold, judge
        read = sample_files.read_sample_file(Path(file), None, *choice)
        samples += read.samples
        lost = count(len(read.unreadable), "unreadable line")
        print(visible(f"{file}: {read.format}, {count(len(read.samples), 'sample')}, {lost}"))
        for line, reason in read.unreadable[:5]:
            print(visible(f"  line {line} {reason}"))
    return samples


def _judged(judge: str, gold: str, text: str) -> bool:
    problem = Problem("", "", "", gold, "file", judge)
    return bool(LocalFile.is_correct(problem, text))
