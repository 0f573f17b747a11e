"""Profiles: every setting of a run, read from YAML, with the source that stands beside each value.

A profile names what it builds on (``extends``) and says only what differs: sections merge key by
key, local keys win, lists are replaced. ``smoke+rl.beta=0.2`` is a variant without a file: one
setting changed, results in a folder of its own.
"""

import copy
import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent

from sage_lib.algorithm.advantage_choices import build_advantage
from sage_lib.algorithm.guide_choices import check_choice, needs_entropies
from sage_lib.algorithm.guides import GUIDES
from sage_lib.algorithm.kl_forms import build_kl_form
from sage_lib.errors import SageError
from sage_lib.experiment import settings as kinds
from sage_lib.experiment.checked import digest
from sage_lib.experiment.settings import BASE, ROLLOUTS, Data, Method, Model, Profile
from sage_lib.paths import PROFILES, SHARED
from sage_lib.tasks.table import TASKS, make_task
from sage_lib.validation import below, default_of, make, rename_key, unknown

#: How a changed setting begins, as in "rl.beta=0.2".
CHANGE = r"[A-Za-z_][\w.-]*="
#: How the path of a user's own profile or grid ends.
YAML_ENDINGS = (".yaml", ".yml")
#: Letters of a change, and of all changes, in a folder's name; most disks take 255 in a file's.
LONGEST, LONGEST_NAME = 60, 160
#: Uses of anchors in a text, and methods of a ``vary``: a few lines could ask for billions.
MOST_ALIASES, MOST_VARIED = 30, 1000


def split_spec(spec: str | Path) -> list[str]:
    """Split a spec: "smoke+rl.beta=0.2" into its name and changes, ["smoke", "rl.beta=0.2"]."""
    return re.split(rf"\+(?={CHANGE})", str(spec))


def load_profile(spec: str | Path) -> Profile:
    """Read a profile by its name, or by the path of a user's own .yaml file; each may be followed
    by changed settings, as in "smoke+rl.beta=0.2+seeds=[1, 2]".

    Raises SageError for what is unknown, missing, of the wrong type or not YAML.
    """
    base, *changes = split_spec(spec)
    path = find(base, Path.cwd())
    raw, sources = read(path)
    shipped = path.parent == PROFILES
    if raw.get("name") != path.stem or (not shipped and path.stem in profile_names()):
        raise SageError(
            f"{path.name}: a profile is called as its file, and not as one that comes with the "
            f"companion: its name is {raw.get('name')!r}; rename the file, or set name"
        )
    if not re.fullmatch(r"\w[\w.-]*", path.stem) or path.stem in SHARED:
        raise SageError(
            f"{path.name}: a profile's name is of letters, digits, -, _ and ., begins with none of "
            f"- and ., and is not one of {', '.join(SHARED)}: rename the file"
        )
    for assignment in changes:
        change(raw, sources, assignment, path.stem)
    name = _variant_name(path.stem, changes)
    again = "+".join([base if shipped else str(path), *changes])
    profile = build_profile(raw, path)
    return dataclasses.replace(profile, name=name, sources=sources, raw=raw, spec=again)


def names_below(profile: Profile) -> Iterator[str]:
    """Yield the names of the profiles that a variant changes or that a file extends."""
    base, *changes = split_spec(profile.spec)
    path: Path | None = find(base, Path.cwd())
    while path is not None:
        for number in reversed(range(len(changes) + 1)):
            name = _variant_name(path.stem, changes[:number])
            if name != profile.name:
                yield name
        path = extended(path)


def _variant_name(stem: str, changes: Sequence[str]) -> str:
    """Return the folder's name of a profile with changes; a hash stands for what is left out."""
    parts = [stem]
    for change in changes:
        plain = change.replace(" ", "")
        file_name = re.sub(r"[^\w.=,-]", "_", plain)[:LONGEST]
        parts.append(file_name if file_name == plain else f"{file_name}~{digest(plain)[:4]}")
    name = "+".join(parts)
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}~{digest(name)[:4]}"


def build_profile(raw: dict[str, Any], path: Path) -> Profile:
    """Check merged settings and make the dataclasses. ``path``: of the profile's file."""
    name, folder = path.stem, path.parent
    fields = dataclasses.fields(Profile)
    options = ["extends", "train", *(f.name for f in fields if f.repr)]
    for key in map(str, raw):
        if key not in options:
            raise unknown(name, key, options, raw)
    if not isinstance(raw.get("train", []), list | None):
        raise SageError(f"{name}: train is a list of methods, not {raw['train']!r}")
    optional = {f.name for f in fields if default_of(f) is not dataclasses.MISSING}
    values = {k: v for k, v in raw.items() if v is not None or k not in optional}
    tasks = _sections(values.get("task_defaults", {}), f"{name}: task_defaults", TASKS)
    guides = _sections(values.get("guide_defaults", {}), f"{name}: guide_defaults", GUIDES)
    for key in values.keys() & {"sft_data", "rl_data"}:
        values[key] = _data(values[key], tasks, f"{name}: {key}", folder)
    evaluation = values.get("evaluation")
    if isinstance(evaluation, dict) and isinstance(evaluation.get("data"), list):
        where = f"{name}: evaluation.data"
        data = [_data(row, tasks, where, folder) for row in evaluation["data"]]
        values["evaluation"] = {**evaluation, "data": data}
    for key in values.keys() & _KINDS.keys():
        values[key] = make(_KINDS[key], values[key], f"{name}: {key}")
    methods = _methods(values.get("methods", {}), guides, f"{name}: methods")
    train = values.pop("train", None)
    values |= {"task_defaults": tasks, "guide_defaults": guides}
    values["methods"] = {k: m for k, m in methods.items() if train is None or k in train}
    profile = make(Profile, values, name)
    lists = {"train": train, "evaluation.methods": profile.evaluation.methods}
    for setting, keys in {**lists, "exploration.methods": profile.exploration.methods}.items():
        for key in (keys or ()) if methods else ():
            if not isinstance(key, str) or key not in methods:
                raise unknown(f"{name}: {setting}", str(key), methods)
    for fault in _faults(profile):
        raise SageError(f"{name}: {fault}")
    return profile


#: Sections that are dataclasses.
_KINDS: dict[str, type] = {
    "model": Model,
    "evaluation": kinds.Evaluation,
    "exploration": kinds.Exploration,
    "compute": kinds.Compute,
}


def _sections(sections: Any, where: str, names: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return a section of sections without those that are null. With ``names``, no other name is
    taken."""
    if not isinstance(sections, dict):
        raise SageError(f"{where} must be a section of named sections, not {sections!r}")
    for name, value in sections.items():
        if names and name not in names:
            raise unknown(where, name, names)
        if not isinstance(value, dict | None):
            raise SageError(f"{below(where, name)} must be a section, not {value!r}")
    return {key: value for key, value in sections.items() if value is not None}


def _data(section: Any, tasks: dict[str, dict], where: str, folder: Path) -> Data:
    """Make a data set: the keys of Data, and all others as settings of its task."""
    if not isinstance(section, dict) or not isinstance(section.get("name"), str):
        raise SageError(f"{where}: a data set is a section with a name, not {section!r}")
    common = {f.name for f in dataclasses.fields(Data)} - {"task"}
    of_task, name = {k: v for k, v in section.items() if k not in common}, section["name"]
    task = make_task(name, of_task, tasks.get(name, {}), folder, where)
    of_data = {k: v for k, v in section.items() if k in common}
    return make(Data, {**of_data, "task": task}, where)


def _methods(raw: Any, guides: dict[str, dict], where: str) -> dict[str, Method]:
    """Make the methods. A section ``vary`` (setting -> list of values) makes a method for each
    combination, whose key and label name the values: grpo with ``vary: {rl.beta: [0, 0.2]}``
    becomes grpo_beta0 ("GRPO, beta 0") and grpo_beta0.2."""
    methods: dict[str, Method] = {}
    for key, section in _sections(raw, where).items():
        plain = {name: value for name, value in section.items() if name != "vary"}
        axes = section.get("vary", {})
        if not (isinstance(axes, dict) and all(v and isinstance(v, list) for v in axes.values())):
            raise SageError(f"{below(where, key)}: vary is as {{rl.beta: [0, 0.2]}}, not {axes!r}")
        if (number := math.prod(map(len, axes.values()))) > MOST_VARIED:
            raise SageError(f"{below(where, key)}: vary makes {number:,} methods: make it shorter")
        for values in itertools.product(*axes.values()):
            name, method = key, copy.deepcopy(plain)
            for setting, value in zip(axes, values, strict=True):
                target, (*path, last) = method, setting.split(".")
                for section_name in path:
                    target = target.setdefault(section_name, {})
                    if not isinstance(target, dict):
                        raise SageError(
                            f"{below(where, key)}: vary sets {setting}, and {section_name} is "
                            f"{target!r}: give its settings, such as {{name: branch}}"
                        )
                target[last] = value
                name += f"_{last}{value}"
                method["label"] = f"{method.get('label', key)}, {last.replace('_', ' ')} {value}"
            if name in methods:
                raise SageError(f"{where}: there are two methods {name!r}: rename one")
            methods[name] = _method(method, guides, below(where, name))
    return methods


def _method(fields: dict[str, Any], guides: dict[str, dict], where: str) -> Method:
    rename_key(fields, "anchor", "kl_form", where)
    guide, advantage = fields.get("guide"), fields.get("advantage")
    if guide is not None:
        fields["guide"] = kinds.guide_choice(guide, guides)
        check_choice(fields["guide"], f"{where}.guide")
    if advantage is not None:
        build_advantage(advantage, f"{where}.advantage")  # refuses what is none
        fields["advantage"] = {"name": advantage} if isinstance(advantage, str) else advantage
    method = make(Method, fields, where)
    build_kl_form(method.kl_form, f"{where}.kl_form")
    return method


def _faults(profile: Profile) -> Iterator[str]:
    """Yield a sentence for each thing that no run could do, or a library would misread."""
    model = profile.model
    if profile.sft and profile.sft_data is None:
        yield "sft needs the section sft_data"
    if profile.rl:
        make(kinds.Rl, profile.rl, f"{profile.name}: rl")
    if model.load_in_4bit and profile.rl and profile.compute.backend != "unsloth":
        yield "RL trains a model in 4 bits with Unsloth alone: set compute.backend to unsloth"
    if model.name == "tiny_qwen" and not (model.architecture and model.largest_number):
        yield "tiny_qwen is made from model.architecture and model.largest_number: give both"
    if profile.methods and not (profile.rl and profile.rl_data):
        yield "its methods need the sections rl and rl_data"
    for seeds in (profile.seeds, *map(profile.seeds_of, profile.methods)):
        if not seeds or len(set(seeds)) < len(seeds):
            yield f"seeds must be given, each once, not {list(seeds)}"
    for key, method in profile.methods.items():
        for fault in _method_faults(profile, key, method):
            yield f"method {key}: {fault}"


def _method_faults(profile: Profile, key: str, method: Method) -> Iterator[str]:
    if key == BASE or not all(re.fullmatch(r"[\w.-]{1,100}", w) for w in (key, method.family)):
        yield f"key and family are letters, digits, -._, and no key is {BASE!r}, the SFT model"
    beta = make(kinds.Rl, profile.rl_of(key), f"{profile.name}: methods.{key}.rl").beta
    changed = [setting for setting in ROLLOUTS if setting in method.rl]
    if method.guide is not None and beta == 0:
        yield "it guides the anchor, which needs beta > 0"
    whole, dtype = profile.rl_lora is None or not method.lora, profile.model.dtype
    if whole and method.rft is None and dtype in ("bfloat16", "float16"):
        yield f"{dtype} loses small steps of all weights: set model.dtype to float32, or train LoRA"
    for name in method.policies:
        if name not in profile.methods or profile.methods[name].rft is None:
            yield f"it takes the policy of {name!r}, which is no method with rft of this profile"
    if method.guide is not None and method.kl_form == "forward_kl":
        yield "the KL form forward_kl takes no guide"
    if changed and method.guide is not None and needs_entropies(method.guide):
        yield (
            f"it draws with a {changed[0]} of its own, and its guide's threshold comes from "
            "entropies measured with the profile's: give it threshold and ratio"
        )
    if method.rft is not None:
        rft, shown = profile.rft_of(key), ("label", "family", "lora", "seeds", "reward", "rft")
        if not isinstance(rft.sft.get("max_steps"), int) or rft.steps < 1:
            yield "rft.sft.max_steps are those of a round, 1 or more"
        shows = rft.demonstrations is not None
        if shows and (rft.noise or not rft.demonstrations or profile.sft_data is None):
            yield "demonstrations are changes of sft_data, such as {seed: 9}, and none is wrong"
        if method != Method(**{name: getattr(method, name) for name in shown}):
            yield "trained by rft, it takes no rl, guide, kl_form or sampling of RL"
        if profile.model.boxed:
            yield "rft cuts completions at the solution markers: set model.prompt to paper"
        if method.reward == "random":
            yield "rft learns from right completions: reward is accuracy or valid"


def profile_names() -> list[str]:
    """Return the names of the profiles that come with the companion."""
    return sorted(p.stem for p in PROFILES.glob("*.yaml"))


def find(name: str, folder: Path, shipped: Path = PROFILES, kind: str = "profile") -> Path:
    """Return the file of a profile, or of another ``kind``, by its name among the ``shipped`` files
    or by its path below ``folder``."""
    is_file = name.endswith(YAML_ENDINGS)
    try:
        path = (folder / Path(name).expanduser()).resolve() if is_file else shipped / f"{name}.yaml"
    except (ValueError, RuntimeError) as error:  # no path, no such user, or links in a circle
        raise SageError(f"{name} is not the path of a {kind} ({error}): correct it") from None
    if len(path.name) > 255 or not path.is_file():  # more than a file's name can have
        if is_file:
            raise SageError(f"there is no file {path}: correct the path of the {kind}")
        names = ", ".join(sorted(file.stem for file in shipped.glob("*.yaml")))
        raise SageError(
            f"there is no {kind} {name!r}: choose one of {names}, or give the path of a .yaml file"
        )
    return path


def extended(path: Path) -> Path | None:
    """Return the file that a profile's file extends, or None."""
    parent = _parsed(path.name, path.read_text())[0].get("extends")
    return None if parent is None else find(str(parent), path.parent)


def read(path: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a file and merge it over what it extends. Returns settings, and their sources by dotted
    key. ``above``: the files that extend it."""
    if path in above:
        raise SageError(f"{path.name} extends itself: {' -> '.join(p.stem for p in above)}")
    try:
        raw, sources = copy.deepcopy(_parsed(path.name, path.read_text()))
    except NOT_YAML as error:
        raise SageError(f"{path.name} is not valid YAML: {' '.join(str(error).split())}") from None
    parent = extended(path)
    raw.pop("extends", None)
    if parent is None:
        return raw, sources
    raw.setdefault("description", f"{parent.stem}, with the changes of {path.name}")
    base, base_sources = read(parent, (*above, path))
    evaluation = base.get("evaluation")
    lines = evaluation.get("data") if isinstance(evaluation, dict) else None
    for data in [base.get("sft_data"), base.get("rl_data"), *(lines or [])]:
        file = data.get("path") if isinstance(data, dict) else None
        if isinstance(file, str) and not Path(file).expanduser().is_absolute():
            data["path"] = os.path.relpath(parent.parent / file, path.parent)
    return _merge(base, raw, base_sources, ""), {**base_sources, **sources}


#: Errors of :func:`parse_yaml`: also for numbers, dates and depths that no parser holds.
NOT_YAML = (YAMLError, ValueError, RecursionError)


def parse_yaml(text: str) -> Any:
    """Parse YAML of a stranger, as plain values."""
    uses = sum(isinstance(event, AliasEvent) for event in YAML(typ="safe").parse(text))
    if uses > MOST_ALIASES:
        raise YAMLError(f"anchors are used {uses} times, at most {MOST_ALIASES} are read")
    return YAML(typ="safe").load(text)


@functools.lru_cache(maxsize=64)
def _parsed(name: str, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Parse a file's settings and their sources, once: comments make it slow."""
    plain, commented = parse_yaml(text), YAML(typ="rt").load(text)
    if not isinstance(plain, dict):
        raise SageError(f"{name} must hold named sections, as profiles/smoke.yaml does")
    return plain, dict(_comments(commented))


def _merge(base: dict, over: dict, sources: dict[str, str], prefix: str) -> dict:
    """Merge ``over`` into ``base``, key by key. An empty section empties the section below, and a
    section with another ``name`` replaces it. A replaced value loses its source."""
    merged = dict(base)
    for key, value in over.items():
        full_key, old = f"{prefix}{key}", merged.get(key)
        if (value and isinstance(value, dict) and isinstance(old, dict)) and (
            "name" not in old or value.get("name", old["name"]) == old["name"]
        ):
            merged[key] = _merge(old, value, sources, f"{full_key}.")
        else:
            merged[key] = value
            _replaced(sources, full_key, "")
    return merged


def _replaced(sources: dict[str, str], full_key: str, source: str) -> None:
    for inner in [key for key in sources if key.startswith(f"{full_key}.")]:
        del sources[inner]
    sources[full_key] = source


def change(raw: dict, sources: dict[str, str], assignment: str, where: str) -> None:
    """Put one "dotted.key=value" into the settings of profile ``where``; the value is YAML."""
    key, _, text = assignment.partition("=")
    try:
        value = parse_yaml(text)
    except NOT_YAML:
        raise SageError(f"--set {assignment}: {text!r} is not a value as YAML writes it") from None
    *path, last = key.split(".")
    target = raw
    for section in path:
        if not isinstance(target.get(section), dict):
            raise unknown(where, section, [k for k, v in target.items() if isinstance(v, dict)])
        target[section] = dict(target[section])
        target = target[section]
    target[last] = value
    _replaced(sources, key, "set on the command line")


def _comments(section: CommentedMap, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, comment at the end of its line), in a one-line section for each key."""
    for key, value in section.items():
        full_key, tokens = f"{prefix}{key}", section.ca.items.get(key)
        inner = value if isinstance(value, CommentedMap) else CommentedMap()
        if tokens and tokens[2] and tokens[2].value.startswith("#"):  # below the line: of the next
            one_line = inner and inner.fa.flow_style()
            for commented in [f"{full_key}.{k}" for k in inner] if one_line else [full_key]:
                yield commented, tokens[2].value.splitlines()[0].lstrip("# ").strip()
        yield from _comments(inner, f"{full_key}.")
