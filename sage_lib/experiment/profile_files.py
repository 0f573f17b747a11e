"""The YAML files of profiles: what a file extends merged below it, and the source of every value.

Sections merge key by key, local keys win, lists are replaced. A value's source is the comment at
the end of its line; what replaces it has one of its own, or none.
"""

import copy
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from sage_lib.errors import SageError
from sage_lib.paths import PROFILES


def profile_names() -> list[str]:
    """The profiles that come with the companion."""
    return sorted(p.stem for p in PROFILES.glob("*.yaml"))


def find(name: str, folder: Path) -> Path:
    """The file of a profile by its name, or by its path below ``folder``; SageError where there is
    none."""
    own = name.endswith((".yaml", ".yml"))
    path = (folder / Path(name).expanduser()).resolve() if own else PROFILES / f"{name}.yaml"
    if len(path.name) > 255 or not path.is_file():  # more than a file's name can have
        raise SageError(
            f"there is no profile {name!r}: choose one of {', '.join(profile_names())}, "
            "or give the path of a .yaml file"
        )
    return path


def extended(path: Path) -> Path | None:
    """The file that a profile's file extends, None where it extends none."""
    below = _parsed(path.name, path.read_text())[0].get("extends")
    return None if below is None else find(below, path.parent)


def read(path: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """A file merged over what it extends: settings, and source by dotted key. ``above``: the files
    that extend it. SageError for a file that is no YAML, or extends itself."""
    if path in above:
        raise SageError(f"profile {path.name} extends itself: {' -> '.join(p.stem for p in above)}")
    try:
        settings, sources = copy.deepcopy(_parsed(path.name, path.read_text()))
    except (YAMLError, UnicodeDecodeError, RecursionError) as error:  # too deep for a parser, too
        sentence = " ".join(str(error).split())
        raise SageError(f"profile {path.name} is not valid YAML: {sentence}") from None
    below = settings.pop("extends", None)
    if below is None:
        return settings, sources
    if not isinstance(below, str):
        raise SageError(f"profile {path.name}: extends names one profile, not {below!r}")
    found = find(below, path.parent)
    base, base_sources = read(found, (*above, path))
    _move_paths(base, found.parent, path.parent)
    return _merge(base, settings, base_sources, ""), {**base_sources, **sources}


@functools.lru_cache(maxsize=64)
def _parsed(name: str, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A file's own settings and their sources, read once: a grid asks for the same files hundreds
    of times, and the comments make them slow to read."""
    raw = YAML(typ="rt").load(text)
    if not isinstance(raw, CommentedMap):
        raise SageError(f"profile {name} must hold named sections, see {PROFILES.name}/smoke.yaml")
    return _unwrap(raw), dict(_comments(raw))


def _move_paths(settings: dict[str, Any], before: Path, now: Path) -> None:
    """Paths of data files are below the folder of the profile that names them: written anew for a
    profile in another folder that inherits them."""
    evaluation = settings.get("evaluation")
    lines = evaluation.get("data") if isinstance(evaluation, dict) else None
    places = [settings.get("sft_data"), settings.get("rl_data")]
    for place in [*places, *(lines if isinstance(lines, list) else [])]:
        path = place.get("path") if isinstance(place, dict) else None
        if isinstance(path, str) and not Path(path).is_absolute():
            place["path"] = os.path.relpath(before / path, now)


def _merge(base: Any, over: Any, sources: dict[str, str], prefix: str) -> dict:
    """``over`` on top of ``base``, key by key; an empty section empties the one below. A replaced
    value loses the source it had."""
    merged = dict(base)
    for key, value in over.items():
        place, below = f"{prefix}{key}", merged.get(key)
        both = isinstance(value, dict) and isinstance(below, dict)
        if both and value and not _renamed(below, value):
            merged[key] = _merge(below, value, sources, f"{place}.")
            continue
        _forget_sources(sources, place)
        merged[key] = value
    return merged


def _forget_sources(sources: dict[str, str], place: str) -> None:
    """A replaced value has not the source of the old one, nor that of the section around it."""
    for known in [k for k in sources if k.startswith(f"{place}.")]:
        del sources[known]
    sources[place] = ""


def _renamed(below: Any, over: Any) -> bool:
    """A section that changes its ``name`` is another thing: it replaces what is below it."""
    return bool("name" in over and "name" in below and over["name"] != below["name"])


def change(settings: dict, sources: dict[str, str], given: str, where: str) -> None:
    """Put one "dotted.key=value" into the settings; the value is read as YAML. SageError for a
    section that is not there; ``where`` names the profile."""
    key, _, text = given.partition("=")
    try:
        value = _unwrap(YAML(typ="rt").load(text)) if text.strip() else None
    except (YAMLError, RecursionError):
        raise SageError(f"--set {given}: {text!r} is not a value as YAML writes it") from None
    *sections, last = key.split(".")
    place = settings
    for section in sections:
        if not isinstance(place.get(section), dict):
            known = ", ".join(k for k, v in place.items() if isinstance(v, dict))
            raise SageError(f"{where} has no section {section!r} for --set {given}: it has {known}")
        place[section] = dict(place[section])
        place = place[section]
    place[last] = value
    _forget_sources(sources, key)
    sources[key] = "set on the command line"


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


def _comments(section: CommentedMap, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, comment at the end of its line) for every commented value."""
    for key, value in section.items():
        tokens = section.ca.items.get(key)
        if tokens and tokens[2] and tokens[2].value.startswith("#"):  # below the line: of the next
            comment = tokens[2].value.splitlines()[0]
            yield f"{prefix}{key}", comment.lstrip("# ").strip()
        if isinstance(value, CommentedMap):
            yield from _comments(value, f"{prefix}{key}.")
