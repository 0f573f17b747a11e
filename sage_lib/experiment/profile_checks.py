"""What a profile's values must be, beyond their types: one sentence for each thing that is not.

Every check stands here, so that :mod:`profile` says what settings there are and this module which
of their values can be run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from sage_lib.algorithm.guides import needs_entropies
from sage_lib.errors import SageError

if TYPE_CHECKING:  # profile imports this module
    from sage_lib.experiment.profile import Method, Profile

Require: TypeAlias = Callable[[bool, str], None]

REWARDS = ("accuracy", "random")
ENGINES = ("transformers", "vllm")
BACKENDS = ("trl", "unsloth")
#: What the companion itself reads of the section ``rl``; TRL checks the rest.
RL_NEEDS = (
    "beta",
    "seed",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "optim",
    "gradient_checkpointing",
    "use_bias_correction_kl",
)
#: Those that are whole numbers, and the least each may be.
WHOLE = {
    "seed": 0,
    "max_steps": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "max_completion_length": 1,
    "top_k": 0,
}
#: What else is read, how it is checked, and in words. (None of ``min_p`` is off.)
DRAWING: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value > 0, "a number above 0"),
    "top_p": (lambda value: 0 < value <= 1, "a share above 0, 1 at most"),
    "top_k": (lambda value: value >= 0, "a number of 0 or more"),
    "min_p": (lambda value: 0 <= value < 1, "a share of 0 or more, below 1"),
}
#: What a model's architecture says in any case: its size.
ARCHITECTURE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
DTYPES = ("float32", "bfloat16", "float16")
#: Those by which rollouts are drawn: entropies are measured on such.
ROLLOUTS = ("temperature", "top_p", "top_k", "min_p", "max_completion_length")
#: Which correct completions a round of rejection sampling learns from: so many at random, or those
#: of the largest mean entropy, mean branching factor, lowest perplexity, latest uncertainty.
SELECTIONS = ("random", "entropy", "branching", "perplexity", "position")
#: Which demonstrations of the SFT data it learns from in their place, none being drawn.
DEMONSTRATIONS = ("last_demonstrations", "first_demonstrations")
SFT_NEEDS = ("seed", "max_steps", "logging_steps", "gradient_checkpointing")
#: How a changed setting begins, as in "rl.beta=0.2".
CHANGE = r"[A-Za-z_][\w.-]*="


def check(profile: Profile, name: str) -> None:
    """Raise SageError, of one sentence, for what no run could do or a library would misread.

    ``name``: what the sentence calls the profile, its file."""

    def require(condition: bool, sentence: str) -> None:
        if not condition:
            raise SageError(f"profile {name}: {sentence}")

    _check_numbers(profile, require)
    sections = {"sft": (profile.sft, SFT_NEEDS), "rl": (profile.rl, RL_NEEDS)}
    for section, (given, needs) in sections.items():
        for key in needs if given else ():
            require(key in given, f"the section {section} lacks the key {key!r}")
        _check_rate(section, given, require)
    of_methods = [seed for method in profile.methods for seed in profile.seeds_of(method)]
    seeds = [*profile.seeds, *of_methods, profile.model.seed, profile.evaluation.seed]
    for seed in [*seeds, *(given["seed"] for given, _ in sections.values() if given)]:
        whole = _is_whole(seed) and 0 <= seed < 2**32
        require(whole, f"seeds are whole numbers of 0 or more, below 2^32, not {seed!r}")
    for chosen in (profile.seeds, *(profile.seeds_of(method) for method in profile.methods)):
        require(len(set(chosen)) == len(chosen) > 0, "seeds must be given, each once")
    _check_evaluation(profile, require)
    for field_ in dataclasses.fields(profile.exploration):
        value = getattr(profile.exploration, field_.name)
        if field_.name != "methods":
            least = 0 if field_.name == "seeds" else 1  # of no seed nothing is read
            require(
                value >= least, f"exploration.{field_.name} must be {least} or more, not {value}"
            )
    for key, least in {"threads": 1, "parallel": 1}.items():
        value = getattr(profile.compute, key)
        require(value >= least, f"compute.{key} must be {least} or more, not {value}")
    backend = profile.compute.backend
    require(
        backend in BACKENDS,
        f"there is no compute.backend {backend!r}; choose one of {', '.join(BACKENDS)}",
    )
    if profile.rl:
        _check_rl("rl", profile.rl, require)
        require(
            backend == "unsloth" or not profile.model.load_in_4bit,
            "RL trains a model in 4 bits with Unsloth alone: set compute.backend to unsloth",
        )
    if profile.sft:
        steps = profile.sft["max_steps"]
        whole = _is_whole(steps) and (steps > 0 or steps == -1)
        require(whole, f"sft.max_steps is a whole number, or -1 for whole epochs, not {steps!r}")
    made_here = profile.model.name == "tiny_qwen"
    complete = bool(profile.model.architecture) and profile.model.largest_number is not None
    require(
        not made_here or complete,
        "tiny_qwen is made from model.architecture and model.largest_number: give both",
    )
    require(not profile.sft or profile.sft_data is not None, "sft needs the section sft_data")
    if profile.methods:
        trained = bool(profile.rl) and profile.rl_data is not None
        require(trained, "its methods need the sections rl and rl_data")
    for key, method in profile.methods.items():
        _check_method(profile, key, method, require)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_rl(where: str, given: dict[str, Any], require: Require) -> None:
    """What the companion itself reads of a section ``rl``, or of a method's changes of it."""
    for key, least in WHOLE.items():
        if key in given:
            value = given[key]
            whole = _is_whole(value) and value >= least
            require(whole, f"{where}.{key} is a whole number of {least} or more, not {value!r}")
    _check_rate(where, given, require)
    optim = given.get("optim", "")
    require(isinstance(optim, str), f"{where}.optim is the name of an optimiser, not {optim!r}")
    _check_drawing(where, given, require)


def _check_rate(where: str, given: Mapping[str, Any] | None, require: Require) -> None:
    rate = (given or {}).get("learning_rate", 0)
    if _is_number(rate):  # other values are the trainers' own to refuse
        require(rate >= 0, f"{where}.learning_rate must be 0 or more, not {rate}")


def _check_drawing(where: str, given: Mapping[str, Any], require: Require) -> None:
    """How completions are drawn."""
    for key, (fits, words) in DRAWING.items():
        if key in given:
            value = given[key]
            off = value is None and key == "min_p"
            require(
                off or (_is_number(value) and fits(value)),
                f"{where}.{key} is {words}, not {value!r}",
            )


def _check_numbers(profile: Profile, require: Require) -> None:
    """Sizes that a library would refuse late and in its own words, or take for something else."""
    sets = {"sft_data": profile.sft_data, "rl_data": profile.rl_data}
    sets |= {f"evaluation.data.{n}": data for n, data in enumerate(profile.evaluation.data)}
    for where, data in sets.items():
        if data is not None:
            require(data.rows > 0, f"{where}: rows must be 1 or more, not {data.rows}")
            fits = 0 <= data.seed < 2**32
            require(fits, f"{where}: a seed is 0 or more and below 2^32, not {data.seed}")
    model = profile.model
    longest, largest = model.max_seq_length, model.largest_number
    require(longest > 0, f"model.max_seq_length must be 1 or more, not {longest}")
    require(
        largest is None or largest > 0, f"model.largest_number must be 1 or more, not {largest}"
    )
    require(
        model.dtype is None or model.dtype in DTYPES,
        f"there is no model.dtype {model.dtype!r}; choose one of {', '.join(DTYPES)}",
    )
    shape = model.architecture or {}
    words = ["vocab_size"] if shape.get("vocab_size") is not None else []
    for key in (*ARCHITECTURE, *words) if shape else ():
        size: Any = shape.get(key)
        whole = _is_whole(size) and size > 0
        require(whole, f"model.architecture.{key} is a whole number of 1 or more, not {size!r}")
    for where, lora in {"sft_lora": profile.sft_lora, "rl_lora": profile.rl_lora}.items():
        rank: Any = None if lora is None else lora.get("r")
        require(
            lora is None or (_is_whole(rank) and rank > 0),
            f"{where}.r is a whole number of 1 or more, not {rank!r}",
        )
    disk = profile.compute.disk_gb
    require(disk is None or disk >= 0, f"compute.disk_gb must be 0 or more, not {disk}")


def _check_evaluation(profile: Profile, require: Require) -> None:
    evaluation = profile.evaluation
    ks = list(evaluation.ks)
    for k in ks:
        require(
            isinstance(k, int) and not isinstance(k, bool), f"evaluation.ks are whole, not {k!r}"
        )
    require(
        bool(ks) and ks == sorted(set(ks)) and ks[0] == 1,
        f"evaluation.ks start at 1 and grow, not {ks}",
    )
    require(
        ks[-1] <= evaluation.samples,
        f"pass@{ks[-1]} needs at least as many samples per problem, not {evaluation.samples}",
    )
    require(bool(evaluation.data), "evaluation.data names no data set")
    least_of = {"samples": 1, "resamples": 1, "scored": 0, "traced": 1, "every": 0}
    for key, least in {**least_of, "max_new_tokens": 1, "batch_size": 1}.items():
        value = getattr(evaluation, key)
        require(value >= least, f"evaluation.{key} must be {least} or more, not {value}")
    _check_drawing("evaluation", vars(evaluation), require)
    sampled = evaluation.sampled
    require(sampled is None or sampled > 0, f"evaluation.sampled is null or above 0, not {sampled}")
    require(
        evaluation.engine in ENGINES,
        f"there is no evaluation.engine {evaluation.engine!r}; choose one of {', '.join(ENGINES)}",
    )


def _check_method(profile: Profile, key: str, method: Method, require: Require) -> None:
    for named in (key, method.family):  # names of folders and files
        require(
            re.fullmatch(r"[\w.-]+", named) is not None,
            f"method {key}: a key and a family are letters, digits, - and _, not {named!r}",
        )
    merged = {**profile.rl, **method.rl}
    require(
        method.reward in REWARDS,
        f"method {key}: there is no reward {method.reward!r}; choose one of {', '.join(REWARDS)}",
    )
    if method.rft is not None:
        _check_rft(profile, key, method, require)
    _check_rl(f"methods.{key}.rl", method.rl, require)
    beta = merged["beta"]
    require(_is_number(beta), f"method {key}: beta is a number, not {beta!r}")
    require(beta >= 0, f"method {key}: beta is 0 or more, not {beta}")
    fresh = method.dynamic_sampling
    require(fresh >= 0, f"method {key}: dynamic_sampling is 0 or more, not {fresh}")
    require(
        method.guide is None or beta > 0,
        f"method {key} guides the anchor, which needs beta > 0, not {beta}",
    )
    steps = method.reference_reset
    require(steps >= 0, f"method {key}: reference_reset counts steps, 0 or more, not {steps}")
    require(
        steps == 0 or (beta > 0 and method.lora and profile.rl_lora is not None),
        f"method {key} resets its reference, an adapter under a KL term: give it beta > 0 and an "
        "adapter, or rl.sync_ref_model where all weights are trained",
    )
    require(
        method.reference is None or (beta > 0 and re.match(CHANGE, method.reference) is not None),
        f"method {key}: reference is a change of the profile's base under a beta > 0, such as "
        f"sft.max_steps=750, not {method.reference!r}",
    )
    own = [key for key in ROLLOUTS if key in method.rl]
    measured = method.guide is not None and needs_entropies(method.guide)
    require(
        not (own and measured),
        f"method {key} draws with a {own[0] if own else ''} of its own, and its guide's threshold "
        "comes from entropies measured with the profile's: give it threshold and ratio",
    )
    require(
        merged["use_bias_correction_kl"] is False,
        f"method {key}: choose the bias-corrected KL with anchor: k3_corrected, "
        "and leave use_bias_correction_kl at false",
    )


def _check_rft(profile: Profile, key: str, method: Method, require: Require) -> None:
    rft = profile.rft_of(key)
    for name in ("rounds", "prompts", "samples", "selected"):
        value = getattr(rft, name)
        require(value > 0, f"method {key}: rft.{name} must be 1 or more, not {value}")
    known = (*SELECTIONS, *DEMONSTRATIONS)
    require(
        rft.select in known,
        f"method {key}: there is no rft.select {rft.select!r}; choose one of {', '.join(known)}",
    )
    require(0 <= rft.noise < 1, f"method {key}: rft.noise is a share below 1, not {rft.noise}")
    require(
        rft.select in SELECTIONS or (not rft.noise and profile.sft_data is not None),
        f"method {key}: demonstrations come from sft_data, and none of them is wrong",
    )
    steps = rft.sft.get("max_steps", -1)
    require(
        _is_whole(steps) and steps > 0,
        f"method {key}: rft.sft.max_steps are those of a round, not {steps}",
    )
    plain = type(method)(
        method.label, method.family, lora=method.lora, seeds=method.seeds, rft=method.rft
    )
    require(
        method == plain,
        f"method {key} is trained by rft: it takes no rl, guide, anchor, reward or sampling of RL",
    )
