"""The settings of a profile as dataclasses: pydantic checks their keys, types and bounds.

Sections ``sft``, ``rl``, ``sft_lora`` and ``rl_lora`` go to SFTConfig, GRPOConfig and LoraConfig as
they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, Strict
from pydantic.dataclasses import dataclass

from sage_lib.algorithm.guide_choices import nested
from sage_lib.errors import SageError
from sage_lib.experiment.checked import flatten
from sage_lib.tasks import prompts
from sage_lib.tasks.filters import REDUNDANCY_LIMIT
from sage_lib.tasks.task import ExactTask, Task
from sage_lib.validation import STRICT, make

#: The method key of the SFT model in every table, and its name in the paper.
BASE, BASE_LABEL = "base", "Base Model"
#: Settings by which rollouts are drawn.
ROLLOUTS = ("temperature", "top_p", "top_k", "min_p", "max_completion_length")
#: For sections that go to a library, of which the companion reads a part.
PART = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
Seed = Annotated[int, Field(ge=0, lt=2**32)]
# YAML has lists: these are not strict about the tuple, but about what it holds.
Seeds = Annotated[tuple[Seed, ...], Strict(False)]
Sections = dict[str, dict[str, Any]]
Names = Annotated[tuple[str, ...], Strict(False)]
#: A commit, a tag or a branch: part of a folder's name, which must not leave its place.
Revision = Annotated[str, Field(pattern=r"^\w+([./-]\w+)*$")]
Temperature = Annotated[float, Field(gt=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, config=STRICT)
class Model:
    """The model before supervised fine-tuning."""

    name: str  # a hub name, a local folder, or the NAME of policy.tiny_qwen or policy.smollm
    max_seq_length: PositiveInt
    seed: Seed  # of random initial weights
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    revision: Revision | None = None
    #: Qwen2Config keywords: what tiny_qwen is made from; of another model, to estimate memory.
    architecture: dict[str, Any] | None = None
    largest_number: PositiveInt | None = None  # tiny_qwen: its vocabulary has 0 to this
    load_in_4bit: bool = False
    #: How a question is asked. "paper": by system prompt and chat template of Appendix E.4.
    #: "system": by that system prompt in the model's own chat template. "model": by the question
    #: alone in the model's own. Or a text with {question}.
    prompt: str = "paper"

    @property
    def boxed(self) -> bool:
        r"""Whether an answer in \boxed{...} counts where no solution markers are."""
        return self.prompt != "paper"

    @property
    def asks_for_markers(self) -> bool:
        """Whether the prompt asks for the paper's markers: demonstrations have what it asks for."""
        return self.prompt in ("paper", "system") or prompts.SOLUTION_START in self.prompt


@dataclass(frozen=True, config=STRICT)
class Data:
    """Where problems come from: a task with its settings, how many, and which."""

    name: str  # a name of tasks.table.TASKS
    rows: PositiveInt  # training rows, or held-out problems
    task: Task
    seed: Seed = 0
    revision: Revision | None = None
    ood: bool = False  # evaluation: outside Table 1 and its average, as in Figure 4 and Table 9
    #: Problems that come before, of the same seed: those of a calibration judge nothing later.
    skipped: PositiveInt | None = None

    @property
    def label(self) -> str:
        """The data set's name in tables and figures."""
        return self.task.display_label


@dataclass(frozen=True, config=STRICT)
class Method:
    """A row of the tables: what sets a method apart from GRPO with the profile's section ``rl``."""

    label: str  # the paper's name, where the paper has it
    family: str = "main"  # methods of a family are drawn together
    rl: dict[str, Any] = field(default_factory=dict)  # changes of the section ``rl``
    guide: dict[str, Any] | None = None  # a choice for algorithm.guide_choices.build_guide
    kl_form: str = "k3"  # a name of algorithm.kl_forms.KL_FORMS; without meaning where beta is 0
    advantage: dict[str, Any] | None = None  # a choice of algorithm.advantage_choices.ADVANTAGES
    #: accuracy: the answer is right; valid: and so is the work; random: a coin, as a control.
    reward: Literal["accuracy", "valid", "random"] = "accuracy"
    dynamic_sampling: NonNegativeInt = 0  # DAPO: fresh batches at most, for groups without a spread
    reference_reset: NonNegativeInt = 0  # ProRL: steps between resets of the reference; 0: none
    #: A method with rft whose policy, of its first seed, RL starts from and has as its reference.
    start: str | None = None
    lora: bool = True  # False: all weights are trained, also where the profile has an rl_lora
    seeds: Seeds | None = None  # of its runs; None is the profile's
    #: Changes of the section ``rft``: rounds of rejection sampling in the place of GRPO.
    rft: dict[str, Any] | None = None

    @property
    def policies(self) -> list[str]:
        """Return the methods whose policies it starts from, or its guide reads."""
        return [name for name in (self.start, self.guide_policy) if name]

    @property
    def guide_policy(self) -> str | None:
        """Return the method whose policy its guide, or the guide inside it, reads."""
        guides = nested(self.guide) if self.guide else ()
        return next((p["policy"] for _, p in guides if p.get("policy")), None)

    def recorded(self) -> dict[str, Any]:
        """Return the settings for a run record, under the names in published records."""
        settings = asdict(self)
        settings["anchor"] = settings.pop("kl_form")
        return settings


@dataclass(frozen=True, config=STRICT)
class Rft:
    """Rounds of rejection-sampling fine-tuning (exploration report, 4.4.1): the policy draws as in
    RL, rules refuse some, and SFTTrainer learns from a selection of the correct ones."""

    rounds: PositiveInt
    prompts: PositiveInt  # of a round
    samples: PositiveInt  # completions of a prompt
    selected: PositiveInt  # completions that a round learns from, or fewer where fewer are correct
    sft: dict[str, Any]  # changes of the section ``sft``; its max_steps are those of a round
    #: Which correct completions: any, or those of the largest mean entropy or branching factor.
    select: Literal["random", "entropy", "branching"] = "random"
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of wrong completions
    redundancy: float = REDUNDANCY_LIMIT  # above which a completion's 3-grams repeat too often
    #: In their place demonstrations, of the section ``sft_data`` with these changes.
    demonstrations: dict[str, Any] | None = None

    @property
    def drawn(self) -> int:
        """Completions drawn in all rounds."""
        return 0 if self.demonstrations else self.rounds * self.prompts * self.samples

    @property
    def steps(self) -> int:
        """Gradient steps in all rounds."""
        return self.rounds * int(self.sft["max_steps"])


@dataclass(frozen=True)
class Training:
    """One RL run of a profile, resolved by :meth:`Profile.training`."""

    method: Method
    rl: dict[str, Any]  # the section ``rl`` with the changes of the method, and the run's seed
    lora: dict[str, Any] | None  # the section ``rl_lora``; None where all weights are trained


@dataclass(frozen=True, config=STRICT)
class Evaluation:
    """Sampling for pass@k, and how its results are read."""

    data: Annotated[tuple[Data, ...], Strict(False), Field(min_length=1)]
    samples: PositiveInt  # n per problem
    ks: Annotated[tuple[PositiveInt, ...], Strict(False)]
    temperature: Temperature
    top_p: TopP
    top_k: NonNegativeInt
    min_p: MinP
    max_new_tokens: PositiveInt
    batch_size: PositiveInt
    seed: Seed
    scored: NonNegativeInt = 16  # samples a problem whose tokens are scored
    engine: Literal["transformers", "prefixes", "vllm"] = "transformers"  # what samples
    vllm: dict[str, Any] | None = None  # keywords of vllm.LLM
    traced: PositiveInt = 32  # problems of which a few completions are read token by token
    #: Problems of each data set that are sampled; None is all. Exact probabilities are of all.
    sampled: PositiveInt | None = None
    listed: PositiveInt = 8  # problems of each data set whose likely completions are all listed
    every: NonNegativeInt = 0  # RL steps between two exact evaluations in training; 0 is none
    #: Samples of each problem whose text is among the results; None is all. Counts are of all.
    texts: PositiveInt | None = None
    #: Temperatures, besides 1, at which the probabilities of valid completions are kept.
    tempered: Annotated[tuple[Temperature, ...], Strict(False)] = ()
    methods: Names | None = None  # which methods are evaluated; None is all of them

    def __post_init__(self) -> None:
        if not self.ks or self.ks[0] != 1 or list(self.ks) != sorted(set(self.ks)):
            raise ValueError(f"ks start at 1 and grow, not {list(self.ks)}")
        if self.ks[-1] > self.samples:
            raise ValueError(f"pass@{self.ks[-1]} needs as many samples a problem or more")

    @property
    def problems(self) -> int:
        """The number of problems that are sampled, over all data sets."""
        return sum(min(data.rows, self.sampled or data.rows) for data in self.data)


@dataclass(frozen=True, config=STRICT)
class Exploration:
    """How much the stages dynamics, replay and impact measure (exploration report)."""

    methods: Names | None = None  # None is the reference method alone
    seeds: NonNegativeInt = 3  # of each of these methods, the first ones
    prompts: PositiveInt = 64  # of RL, whose completions are read
    completions: PositiveInt = 8  # of each prompt
    replaced: PositiveInt = 24  # completions of low, and of high perplexity, with tokens replaced
    continuations: PositiveInt = 32  # of a token, and of its runner-up


@dataclass(frozen=True, config=STRICT)
class Compute:
    """How the work is laid on the machine."""

    requires_gpu: bool = False
    threads: Annotated[int, Field(ge=1, le=1024)] = 1  # of one process
    parallel: PositiveInt = 1  # processes at a time
    disk_gb: NonNegativeFloat | None = 0.2  # of its build; None: pipeline.plan's estimate
    keep_adapter: bool | None = None  # RL keeps its adapter alone; None: where a GPU is required
    assume: dict[str, Any] = field(default_factory=dict)  # see pipeline.plan.ASSUMED
    backend: Literal["trl", "unsloth"] = "trl"  # what RL trains with
    merge_adapter: bool = False  # RL draws and scores completions with the adapter merged,
    trim_padding: bool = False  # and scores each with others of about its length,
    share_prompts: bool = False  # and reads each distinct prompt of a batch once

    @property
    def keeps_adapter(self) -> bool:
        return self.requires_gpu if self.keep_adapter is None else self.keep_adapter


@dataclass(frozen=True, config=PART)
class Rl:
    """What the companion itself reads of the section ``rl``; TRL checks the rest."""

    beta: NonNegativeFloat
    seed: Seed
    max_steps: PositiveInt
    per_device_train_batch_size: PositiveInt
    gradient_accumulation_steps: PositiveInt
    steps_per_generation: PositiveInt
    max_completion_length: PositiveInt
    temperature: Temperature
    top_p: TopP
    top_k: NonNegativeInt
    min_p: MinP | None
    optim: str
    gradient_checkpointing: bool
    use_bias_correction_kl: Literal[False]  # the corrected KL is kl_form k3_corrected
    learning_rate: NonNegativeFloat = 0.0


def guide_choice(choice: Any, defaults: Sections) -> Any:
    """Merge the choice of a guide, a name or a section, over the ``defaults`` of its name."""
    section = {"name": choice} if isinstance(choice, str) else choice
    if not isinstance(section, dict):
        return section  # for check_choice to refuse
    merged = {**defaults.get(str(section.get("name")), {}), **section}
    if isinstance(merged.get("inner"), (str, dict)):
        merged["inner"] = guide_choice(merged["inner"], defaults)
    return {key: value for key, value in merged.items() if value is not None}


@dataclass(frozen=True, config=STRICT)
class Profile:
    """The settings of one profile, resolved."""

    name: str
    description: str
    model: Model
    evaluation: Evaluation
    seeds: Seeds
    sft_data: Data | None = None
    sft: dict[str, Any] = field(default_factory=dict)  # empty: the model as it comes
    sft_lora: dict[str, Any] | None = None
    rl_data: Data | None = None
    rl: dict[str, Any] = field(default_factory=dict)
    rl_lora: dict[str, Any] | None = None
    rft: dict[str, Any] = field(default_factory=dict)  # the settings of Rft
    guide_defaults: Sections = field(default_factory=dict)  # parameters by name
    task_defaults: Sections = field(default_factory=dict)
    methods: dict[str, Method] = field(default_factory=dict)  # those that are trained
    exploration: Exploration = Exploration()
    #: Profiles of the same methods from other bases: load_results reads them together.
    beside: Names = ()
    #: The paper's table that has these methods with this model: a file of data/reported.
    reported: str | None = None
    compute: Compute = Compute()
    #: Dotted key ("rl.beta") -> the comment beside its value.
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    #: What load_profile reads it from again.
    spec: str = field(default="", compare=False, repr=False)

    @property
    def evaluated(self) -> tuple[str, ...]:
        """Keys of the trained methods that are evaluated, the base apart."""
        limited = self.evaluation.methods
        return tuple(m for m in self.methods if limited is None or m in limited)

    @property
    def baseline(self) -> str:
        """The method that the others are compared with: the first one, or the base."""
        return next(iter(self.methods), BASE)

    def data_sets(self, ood: bool | None = None) -> list[Data]:
        """Return the data sets that are evaluated: with `ood` those marked so, with False the
        others (or all, where every one is marked), with None all."""
        all_sets = list(self.evaluation.data)
        selected = [data for data in all_sets if ood is None or data.ood == ood]
        return selected or (all_sets if ood is False else [])

    @property
    def exact(self) -> bool:
        """Whether it evaluates a task whose valid completions can be listed."""
        return any(isinstance(data.task, ExactTask) for data in self.evaluation.data)

    def seeds_of(self, method: str) -> tuple[int, ...]:
        """Return the training seeds of a method."""
        seeds = self.methods[method].seeds
        return self.seeds if seeds is None else seeds

    def label(self, method: str) -> str:
        """Return the paper's name for a method key; "base" is the SFT model."""
        return BASE_LABEL if method == BASE else self.methods[method].label

    def rl_of(self, method: str) -> dict[str, Any]:
        """Return the section ``rl`` with a method's changes."""
        return {**self.rl, **self.methods[method].rl}

    def training(self, method: str, seed: int | None) -> Training:
        """Resolve an RL run: its method, and the sections that the method changes."""
        resolved = self.methods[method]
        rl = {**self.rl_of(method), "seed": seed}
        return Training(resolved, rl, self.rl_lora if resolved.lora else None)

    def steps_of(self, method: str) -> int:
        """Return how many updates train a method, in RL or in all its rounds."""
        if self.methods[method].rft is not None:
            return self.rft_of(method).steps
        return int(self.rl_of(method)["max_steps"])

    def rft_of(self, method: str) -> Rft:
        """Merge a method's rounds over the profile's section ``rft``."""
        changes, where = self.methods[method].rft or {}, f"{self.name}: methods.{method}.rft"
        sections = [self.sft, self.rft.get("sft", {}), changes.get("sft", {})]
        if not all(isinstance(section, dict) for section in sections):
            raise SageError(f"{where}.sft must be a section of named settings")
        sft = {key: value for section in sections for key, value in section.items()}
        return make(Rft, {**self.rft, **changes, "sft": sft}, where)

    def configured(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield (configuration, place, settings) of all sections that TRL and PEFT read."""
        yield "SFTConfig", "sft", self.sft
        for place, section in (("sft_lora", self.sft_lora), ("rl_lora", self.rl_lora)):
            yield "LoraConfig", place, section or {}
        for key, method in self.methods.items():
            yield "GRPOConfig", "rl", self.rl_of(key)
            if method.rft:
                yield "SFTConfig", "rft.sft", self.rft_of(key).sft

    def guide_choice(self, choice: Any) -> Any:
        """Merge the choice of a guide over the profile's parameters for its name."""
        return guide_choice(choice, self.guide_defaults)

    def flat(self, methods: bool = True) -> dict[str, Any]:
        """Return every setting in the profile's files by dotted key, in their order."""
        shown = {key: value for key, value in self.raw.items() if methods or key != "methods"}
        return dict(flatten(shown))
