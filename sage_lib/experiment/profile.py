"""Profiles: every setting of a run, read from YAML, with the source that stands beside each value.

A profile names what it builds on (``extends``), and says only what differs: sections merge key by
key, local keys win, lists are replaced. ``smoke+rl.beta=0.2`` is a variant of a profile without a
file: one setting changed, results in a folder of its own.

Sections ``sft``, ``rl``, ``sft_lora`` and ``rl_lora`` go to SFTConfig, GRPOConfig and PEFT as they
are; the other sections are the dataclasses below. An unknown or a missing key raises, in every
section."""

import copy
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_lib import paths
from sage_lib.algorithm.advantages import check_advantage
from sage_lib.algorithm.anchors import check_anchor
from sage_lib.algorithm.guides import GUIDES, check_choice
from sage_lib.errors import SageError
from sage_lib.experiment import profile_checks, profile_files
from sage_lib.experiment.profile_files import profile_names
from sage_lib.experiment.typed_fields import default_of, fields_of
from sage_lib.files import read_json
from sage_lib.paths import PROFILES
from sage_lib.tasks.filters import REDUNDANCY_LIMIT
from sage_lib.tasks.table import TASKS, check_settings, task_of

#: The method key of the SFT model in every table, and its name in the paper.
BASE, BASE_LABEL = "base", "Base Model"
#: Whose results a profile reads: those of one's own runs, or those that come with the companion.
RESULTS = ("own", "published")
#: Settings that change when something is written, never what is learned.
BOOKKEEPING = frozenset({"save_steps", "save_total_limit", "report_to"})


@dataclass(frozen=True)
class Model:
    """The model before supervised fine-tuning."""

    #: A hub name, a local folder, or a name of ``policy.loading.MADE_HERE`` (tiny_qwen,
    #: smollm2-135m).
    name: str
    max_seq_length: int
    seed: int  # of random initial weights
    dtype: str | None = None
    revision: str | None = None
    #: Qwen2Config keywords: what tiny_qwen is made from; of another model, to estimate memory.
    architecture: dict[str, Any] | None = None
    largest_number: int | None = None  # tiny_qwen: numbers of its vocabulary, 0 to this
    load_in_4bit: bool = False


@dataclass(frozen=True)
class Data:
    """Where problems come from: a task, its settings, how many, and which."""

    name: str  # a name of tasks.table.TASKS
    rows: int  # training rows, or held-out problems
    seed: int = 0
    revision: str | None = None
    optional: bool = False  # evaluation: leave the data set out where it cannot be loaded
    #: Evaluation: outside Table 1 and its average, as Figure 4 and Table 9 are.
    ood: bool = False
    settings: Any = None  # the task's own Settings

    @property
    def label(self) -> str:
        """The data set's name in tables and figures."""
        return task_of(self.name).label(self.settings)


@dataclass(frozen=True)
class Method:
    """A row of the tables: what sets a method apart from GRPO with the profile's ``rl`` section."""

    label: str  # the paper's name, where the paper has it
    family: str = "main"  # methods of a family are drawn together
    rl: dict[str, Any] = field(default_factory=dict)  # changes of the ``rl`` section
    guide: dict[str, Any] | None = None  # a choice for algorithm.guides.build_guide
    anchor: str = "k3"  # a name of algorithm.anchors.ANCHORS; without meaning where beta is 0
    advantage: dict[str, Any] | None = None  # a choice of algorithm.advantages.ADVANTAGES
    reward: str = "accuracy"  # or "random": a coin, as a control
    dynamic_sampling: int = 0  # DAPO: fresh batches at most, to replace groups without a spread
    #: The anchor's policy, where it is not the one that training starts from: the base of the
    #: profile with this change, such as "sft.max_steps=750".
    reference: str | None = None
    reference_reset: int = 0  # ProRL: steps between two resets of the reference; 0 is none
    lora: bool = True  # False: all weights are trained, also where the profile has an rl_lora
    seeds: tuple[int, ...] | None = None  # of its runs; None is the profile's
    #: Changes of the section ``rft``: rounds of rejection sampling in the place of GRPO.
    rft: dict[str, Any] | None = None


@dataclass(frozen=True)
class Rft:
    """Rounds of rejection-sampling fine-tuning (exploration report, 4.4.1).

    In each the policy draws completions as RL draws its rollouts, rules refuse some, and SFTTrainer
    learns from a selection of the correct ones.
    """

    rounds: int
    prompts: int  # of a round
    samples: int  # completions of a prompt
    selected: int  # completions that a round learns from, or fewer where fewer are correct
    sft: dict[str, Any]  # changes of the section ``sft``; its max_steps are those of a round
    select: str = "random"  # a name of profile_checks.SELECTIONS or DEMONSTRATIONS
    noise: float = 0.0  # share of wrong completions among the selected
    redundancy: float = REDUNDANCY_LIMIT  # above which a completion's 3-grams repeat too often

    @property
    def drawn(self) -> int:
        """Completions drawn in all rounds."""
        return (
            0
            if self.select in profile_checks.DEMONSTRATIONS
            else self.rounds * self.prompts * self.samples
        )

    @property
    def steps(self) -> int:
        """Gradient steps in all rounds."""
        return self.rounds * int(self.sft["max_steps"])


@dataclass(frozen=True)
class Evaluation:
    """Sampling for pass@k, and how its results are read."""

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
    scored: int = 16  # samples a problem whose tokens are scored
    engine: str = "transformers"  # what samples: a name of profile_checks.ENGINES
    vllm: dict[str, Any] | None = None  # keywords of vllm.LLM, for the engine vllm
    traced: int = 32  # problems of which a few completions are read token by token
    #: Problems of each data set that are sampled; None is all. Where valid completions can be
    #: listed, their exact probabilities are taken of all problems.
    sampled: int | None = None
    every: int = 0  # RL steps between two exact evaluations of a policy in training; 0 is none
    methods: tuple[str, ...] | None = None  # which methods are evaluated; None is all of them

    @property
    def asked(self) -> int:
        """How many problems are sampled, over all data sets."""
        limit = self.sampled
        return sum(data.rows if limit is None else min(data.rows, limit) for data in self.data)


@dataclass(frozen=True)
class Exploration:
    """What of the exploration report's token-level measurements is done (notebooks 14 and 15), and
    on how much: the budget of the stages dynamics, replay and impact."""

    #: Whose policies are read token by token; None is the reference method alone.
    methods: tuple[str, ...] | None = None
    seeds: int = 3  # of each of these methods, the first ones
    prompts: int = 64  # of RL, whose completions are read
    completions: int = 8  # of each prompt
    replaced: int = 24  # completions of either group (low, high perplexity) with tokens replaced
    continuations: int = 32  # of a token, and of its runner-up


@dataclass(frozen=True)
class Compute:
    """How the work is laid on the machine. ``requires_gpu`` stops a run early where there is
    none."""

    requires_gpu: bool = False
    threads: int = 1  # of one process
    parallel: int = 1  # processes at a time
    disk_gb: float | None = 0.2  # that its build may take; None is what pipeline.needs works out
    #: A run of RL keeps its adapter alone, and what reads its policy merges that into the base in
    #: memory; None: where a GPU is required.
    keep_adapter: bool | None = None
    #: Of pipeline.gpu_hours, for this profile's card, model and task: assumption -> a number, or a
    #: list of the value and both ends of its range (fast, slow).
    assume: dict[str, Any] = field(default_factory=dict)
    #: What RL trains with: plain TRL and PEFT, or Unsloth (profile_checks.BACKENDS).
    backend: str = "trl"
    #: RL, of SageTrainer: completions are drawn and scored with the adapter merged,
    merge_adapter: bool = False
    #: and scored with others of about their length.
    trim_padding: bool = False

    @property
    def keeps_adapter(self) -> bool:
        return self.requires_gpu if self.keep_adapter is None else self.keep_adapter


@dataclass(frozen=True)
class Profile:
    """One resolved profile. ``sources``: dotted key ("rl.beta") -> what stands beside its value."""

    name: str
    description: str
    model: Model
    evaluation: Evaluation
    seeds: tuple[int, ...]
    sft_data: Data | None = None
    sft: dict[str, Any] = field(default_factory=dict)  # empty: the model is taken as it comes
    sft_lora: dict[str, Any] | None = None
    rl_data: Data | None = None
    rl: dict[str, Any] = field(default_factory=dict)
    rl_lora: dict[str, Any] | None = None
    rft: dict[str, Any] = field(default_factory=dict)  # the settings of Rft, see there
    guide_defaults: dict[str, dict[str, Any]] = field(default_factory=dict)  # by guide name
    task_defaults: dict[str, dict[str, Any]] = field(default_factory=dict)  # by task name
    methods: dict[str, Method] = field(default_factory=dict)
    train: tuple[str, ...] | None = None  # which of the methods are trained; None is all of them
    exploration: Exploration = Exploration()
    compute: Compute = Compute()
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    settings: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    spec: str = field(
        default="", compare=False, repr=False
    )  # what load_profile reads it from again
    published: bool = False  # reads the results that come with the companion, and writes none

    @property
    def evaluated(self) -> tuple[str, ...]:
        """Keys of the trained methods that are evaluated, the base apart."""
        chosen = self.evaluation.methods
        return tuple(m for m in self.methods if chosen is None or m in chosen)

    @property
    def reference(self) -> str:
        """The method that the others are compared with: the first one, or the base."""
        return next(iter(self.methods), BASE)

    def seeds_of(self, method: str) -> tuple[int, ...]:
        """The training seeds of a method."""
        own = self.methods[method].seeds
        return self.seeds if own is None else own

    def label(self, method: str) -> str:
        """The paper's name for a method key; "base" is the SFT model."""
        return BASE_LABEL if method == BASE else self.methods[method].label

    def steps_of(self, method: str) -> int:
        """How many updates train a method: RL steps, or those of all its rounds."""
        own = self.methods[method]
        if own.rft is not None:
            return self.rft_of(method).steps
        return int({**self.rl, **own.rl}["max_steps"])

    def updates_of(self, method: str) -> float:
        """How many of a method's RL steps learn from the completions of one draw, in TRL's terms:
        steps_per_generation (gradient_accumulation_steps unless given) and num_iterations."""
        own = {**self.rl, **self.methods[method].rl}
        batches = own.get("gradient_accumulation_steps") or 1
        draws = own.get("steps_per_generation") or batches
        return draws * (own.get("num_iterations") or 1) / batches

    def prompt_limit(self, settings: Mapping[str, Any] | None = None) -> int:
        """Tokens that a prompt of RL may have: the model's length less that of a completion, by the
        section ``rl`` or by ``settings``, which are a method's own."""
        return self.model.max_seq_length - int((settings or self.rl)["max_completion_length"])

    def rft_of(self, method: str) -> Rft:
        """The rounds of a method that is trained by them: its changes over the profile's."""
        own = self.methods[method].rft or {}
        for where, given in (("rft", self.rft), (f"methods.{method}.rft", own)):
            if not isinstance(given.get("sft", {}), dict):
                raise SageError(f"{self.name}: {where}.sft must be a section, not {given['sft']!r}")
        merged = {**self.rft, **own}
        merged["sft"] = {**self.sft, **self.rft.get("sft", {}), **own.get("sft", {})}
        return Rft(**fields_of(Rft, merged, f"{self.name}: methods.{method}.rft"))

    def configured(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """What TRL's and PEFT's configurations are made from: the configuration's name, the place
        in the profile, and the settings, those of each method with its changes."""
        yield "SFTConfig", "sft", self.sft
        for place, section in (("sft_lora", self.sft_lora), ("rl_lora", self.rl_lora)):
            yield "LoraConfig", place, section or {}
        for key, method in self.methods.items():
            yield "GRPOConfig", "rl", {**self.rl, **method.rl}
            if method.rft:
                yield "SFTConfig", "rft.sft", self.rft_of(key).sft

    @property
    def tasks(self) -> frozenset[str]:
        """Names of the tasks that are evaluated."""
        return frozenset(data.name for data in self.evaluation.data)

    def guide_choice(self, name: str) -> dict[str, Any]:
        """The choice of a guide by its name, with the profile's parameters for it."""
        return _choice(name, self.guide_defaults)

    def flat(self, methods: bool = True) -> dict[str, Any]:
        """Every setting that the profile's files give as dotted key -> value, in their order; those
        of the methods may be left out: the record of each method's run has its own."""
        kept = {key: value for key, value in self.settings.items() if methods or key != "methods"}
        return dict(flatten(kept))


def digest(value: Any) -> str:
    """Hash (12 hex digits) of settings: canonical JSON, so that neither the order of keys, nor 0
    against 0.0, nor a dataclass's field at its default makes a difference."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def canonical(value: Any) -> Any:
    """Settings as JSON has them, the same for all ways to write them down."""
    if type(value) in (str, int, bool, type(None)):  # most of them, by the million in a grid
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: canonical(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if getattr(value, f.name) != default_of(f)
        }
    if isinstance(value, Mapping):
        return {str(key): canonical(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def published_specs() -> dict[str, str]:
    """Name -> what :func:`load_profile` reads it from, of every profile with published results."""
    folders = sorted(path.parent for path in paths.PUBLISHED.glob("*/profile.json"))
    return {folder.name: str(read_json(folder / "profile.json")["spec"]) for folder in folders}


def split_spec(spec: str | Path) -> list[str]:
    """What a spec names, and its changes: ["smoke", "rl.beta=0.2"] of "smoke+rl.beta=0.2"."""
    return re.split(rf"\+(?={profile_checks.CHANGE})", str(spec))


def load_profile(spec: str | Path, results: str = "own") -> Profile:
    """Read a profile.

    Args:
        spec: its name, or the path of a user's own file (ending in .yaml); each may be followed by
            changed settings, as in "smoke+rl.beta=0.2+seeds=[1, 2]".
        results: whose results its runs stand for: "own", which stages make, or "published", which
            come with the companion and are only read.

    Raises:
        SageError: for an unknown profile, unreadable YAML, an unknown or missing key, a value of
            the wrong type, an unknown name or parameter of a guide, an anchor or a task, or where
            nothing is published.
    """
    if results not in RESULTS:
        raise SageError(f"results are {' or '.join(map(repr, RESULTS))}, not {results!r}")
    base, *changes = split_spec(spec)
    path = profile_files.find(base, Path.cwd())
    settings, sources = profile_files.read(path)
    given_name = settings.get("name")
    if given_name != path.stem:
        raise SageError(
            f"profile {path.name}: its name is {given_name!r}, but its file is {path.name}: "
            f"set name: {path.stem}, or rename the file"
        )
    if path.parent != PROFILES and path.stem in profile_names():
        raise SageError(
            f"profile {path.name} has the name of a profile that comes with the companion, whose "
            "results it would overwrite: give file and name another one"
        )
    for one in changes:
        profile_files.change(settings, sources, one, path.name)
    name = "+".join([path.stem, *(_folder_name(change) for change in changes)])
    published = results == "published"
    if published and name not in (names := published_specs()):
        raise SageError(
            f'nothing is published for {name}: set results = "own" to train it, which is read '
            f"then, or choose one of {', '.join(names)}"
        )
    profile = build_profile(settings, path)
    if published:
        profile = _published_part(profile, paths.measured(name, published=True))
    again = "+".join([base if path.parent == PROFILES else str(path), *changes])
    return dataclasses.replace(
        profile, name=name, sources=sources, settings=settings, spec=again, published=published
    )


def _published_part(profile: Profile, folder: Path) -> Profile:
    """The profile with the methods and seeds of which something is published: a grid's runs are
    published as they finish."""

    def is_there(method: str, seed: int) -> bool:
        parts = ("rl", "evaluation") if method in profile.evaluated else ("rl",)
        return all((folder / part / f"{method}-s{seed}/record.json").is_file() for part in parts)

    there = {
        key: tuple(seed for seed in profile.seeds_of(key) if is_there(key, seed))
        for key in profile.methods
    }
    if all(there[key] == profile.seeds_of(key) for key in there):
        return profile
    methods = {
        key: dataclasses.replace(method, seeds=there[key])
        for key, method in profile.methods.items()
        if there[key]
    }
    some = {seed for seeds in there.values() for seed in seeds}
    seeds = tuple(seed for seed in profile.seeds if seed in some) or profile.seeds
    return dataclasses.replace(profile, methods=methods, seeds=seeds)


#: Letters of a change in a folder's name; a file's name may have 255 on most disks.
LONGEST = 60


def _folder_name(change: str) -> str:
    """A change as a part of a folder's name; what has to be replaced is told apart by a hash."""
    plain = change.replace(" ", "")
    name = re.sub(r"[^\w.=,-]", "_", plain)[:LONGEST]
    return name if name == plain else f"{name}~{digest(plain)[:4]}"


def build_profile(settings: dict[str, Any], path: Path) -> Profile:
    """The dataclasses of merged settings, checked."""
    name = path.name
    given = {
        k: v
        for k, v in settings.items()
        if v is not None or k not in ("sft", "rl", "exploration", "compute")
    }
    data = fields_of(Profile, given, name, skip={"sources", "settings", "spec", "published"})
    tasks = _defaults(data.get("task_defaults"), f"{name}: task_defaults", TASKS)
    guides = _defaults(data.get("guide_defaults"), f"{name}: guide_defaults", GUIDES)
    data["model"] = Model(**fields_of(Model, data["model"], f"{name}: model"))
    if "exploration" in data:
        where = f"{name}: exploration"
        data["exploration"] = Exploration(**fields_of(Exploration, data["exploration"], where))
    if "compute" in data:
        data["compute"] = Compute(**fields_of(Compute, data["compute"], f"{name}: compute"))
    for key in ("sft_data", "rl_data"):
        if data.get(key) is not None:
            data[key] = _data(data[key], tasks, f"{name}: {key}", path.parent)
    evaluation = fields_of(Evaluation, data["evaluation"], f"{name}: evaluation")
    evaluation["data"] = tuple(
        _data(one, tasks, f"{name}: evaluation.data", path.parent) for one in evaluation["data"]
    )
    data["evaluation"] = Evaluation(**evaluation)
    given_methods = _section_of_sections(data.get("methods"), f"{name}: methods")
    methods = {
        key: _method(value, guides, f"{name}: methods.{key}")
        for key, value in _varied(given_methods, f"{name}: methods").items()
    }
    chosen = data.get("train")
    lists = {
        "train": chosen,
        "evaluation.methods": data["evaluation"].methods,
        "exploration.methods": data.get("exploration", Exploration()).methods,
    }
    for setting, keys in lists.items():
        for key in (keys or ()) if methods else ():
            if not isinstance(key, str) or key not in methods:
                known = ", ".join(methods)
                raise SageError(
                    f"{name}: {setting} names {key!r}, which is not among its methods: {known}"
                )
    data["methods"] = {k: m for k, m in methods.items() if chosen is None or k in chosen}
    data["task_defaults"], data["guide_defaults"] = tasks, guides
    profile = Profile(**data)
    if BASE in profile.methods:
        raise SageError(f"profile {name}: no method may be called {BASE!r}: that is the SFT model")
    profile_checks.check(profile, name)
    return profile


def _section_of_sections(given: Any, where: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise SageError(f"{where} must be a section of named entries, not {given!r}")
    return {str(key): value for key, value in given.items() if value is not None}


def _defaults(given: Any, where: str, known: Collection[str]) -> dict[str, dict[str, Any]]:
    """Parameters by name, of names that there are."""
    found = _section_of_sections(given, where)
    for name, value in found.items():
        if name not in known:
            raise SageError(f"{where} names {name!r}: choose among {', '.join(known)}")
        if not isinstance(value, dict):
            raise SageError(f"{where}.{name} must be a section of named settings, not {value!r}")
    return found


def _data(given: Any, tasks: dict[str, dict], where: str, folder: Path) -> Data:
    """One data set: the keys of Data, and all others as settings of its task."""
    if not isinstance(given, dict) or "name" not in given:
        raise SageError(f"{where}: a data set is a section with a name, not {given!r}")
    known = {f.name for f in dataclasses.fields(Data)} - {"settings"}
    common = {k: v for k, v in given.items() if k in known}
    own = {k: v for k, v in given.items() if k not in known}
    fields = fields_of(Data, common, where, skip={"settings"})
    shared = tasks.get(fields["name"], {})
    try:
        settings = check_settings(fields["name"], own, shared, folder)
    except SageError as error:
        raise SageError(f"{where}: {error}") from None
    return Data(**fields, settings=settings)


def _varied(methods: dict[str, Any], where: str) -> dict[str, Any]:
    """A method with a section ``vary`` (setting -> list of values) becomes one for each
    combination, whose key and label name the values: grpo with ``vary: {rl.beta: [0, 0.2]}``
    becomes grpo_beta0 ("GRPO, beta 0") and grpo_beta0.2."""
    found: dict[str, Any] = {}
    for key, given in methods.items():
        if not isinstance(given, dict) or "vary" not in given:
            variants = {key: given}
        else:
            variants = dict(_variants(key, given, f"{where}.{key}"))
        for name, variant in variants.items():
            if name in found:
                raise SageError(f"{where}: there are two methods {name!r}: rename one")
            found[name] = variant
    return found


def _variants(key: str, given: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """(key, method) of every combination of what its section ``vary`` lists."""
    plain = {name: value for name, value in given.items() if name != "vary"}
    lists = given["vary"]
    if not isinstance(lists, dict) or not all(isinstance(v, list) and v for v in lists.values()):
        raise SageError(
            f"{where}: vary lists values of settings, as in {{rl.beta: [0, 0.2]}}, not {lists!r}"
        )
    for values in itertools.product(*lists.values()):
        method, names = copy.deepcopy(plain), [key]
        label = [str(plain.get("label", key))]
        for setting, value in zip(lists, values, strict=True):
            *sections, last = setting.split(".")
            place = method
            for section in sections:
                place = place.setdefault(section, {})
                if not isinstance(place, dict):
                    raise SageError(f"{where}: vary names {setting}, whose {section} is no section")
            place[last] = value
            names.append(f"{last}{value}")
            label.append(f"{last.replace('_', ' ')} {value}")
        yield "_".join(names), {**method, "label": ", ".join(label)}


def _method(given: Any, guides: dict[str, dict], where: str) -> Method:
    fields = fields_of(Method, given, where)
    if fields.get("guide") is not None:
        try:
            fields["guide"] = _choice(fields["guide"], guides)
        except SageError as error:
            raise SageError(f"{where}.guide: {error}") from None
        check_choice(fields["guide"], f"{where}.guide")
    if fields.get("advantage") is not None:
        given_advantage = fields["advantage"]
        named = isinstance(given_advantage, str)
        fields["advantage"] = {"name": given_advantage} if named else given_advantage
        check_advantage(fields["advantage"], f"{where}.advantage")
    if "anchor" in fields:
        try:
            check_anchor(fields["anchor"])
        except SageError as error:
            raise SageError(f"{where}: {error}") from None
    return Method(**fields)


def _choice(given: Any, guides: dict[str, dict]) -> dict[str, Any]:
    """A guide's choice with the profile's parameters for its name below its own; null is not
    given."""
    chosen = {"name": given} if isinstance(given, str) else dict(given)
    merged = {**guides.get(str(chosen.get("name")), {}), **chosen}
    guide = GUIDES.get(str(merged.get("name")))
    known = [f.name for f in dataclasses.fields(guide)] if guide else list(merged)
    known += ["name", *getattr(guide, "measured", ())]
    for key in merged:  # one of null, too, which is not given and left out below
        if key not in known:
            raise SageError(
                f"the guide {merged['name']} has no parameter {key!r}; known ones are "
                f"{', '.join(name for name in known if name != 'name') or 'none'}"
            )
    if isinstance(merged.get("inner"), (str, dict)):
        merged["inner"] = _choice(merged["inner"], guides)
    return {key: value for key, value in merged.items() if value is not None}


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested sections, in their order."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}{key}.")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}{i}.")
    else:
        yield prefix.rstrip("."), value
