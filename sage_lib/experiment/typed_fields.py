"""Sections of a profile as the fields of a dataclass: every key known, every value of its type."""

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

from sage_lib.errors import SageError


def fields_of(
    cls: type, given: Any, where: str, skip: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    """``given`` as keywords of the dataclass ``cls``; unknown and missing keys, and values of
    another type, raise with the place and the choices. Lists become tuples."""
    if not isinstance(given, dict):
        raise SageError(f"{where} must be a section of named settings, not {given!r}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in skip}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise SageError(f"{where}: unknown key {unknown[0]!r}; known keys are {', '.join(fields)}")
    for name, f in fields.items():
        if name not in given and default_of(f) is dataclasses.MISSING:
            raise SageError(f"{where}: the key {name!r} is missing")
    hints = _hints(cls)
    return {name: typed(value, hints[name], name, where) for name, value in given.items()}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Worked out once: a profile has a class of settings for each of its methods and data sets."""
    return typing.get_type_hints(cls)


def refuse_unknown(section: str, given: Iterable[str], known: Iterable[str], cls: str) -> None:
    """SageError for a key of a profile's ``section`` that is none of ``known``, the settings of
    ``cls``, a configuration of a pinned library; it names the setting that is spelt most alike."""
    settings = set(known)
    unknown = sorted(set(given) - settings)
    if unknown:
        alike = difflib.get_close_matches(unknown[0], sorted(settings), 1)
        meant = f" (did you mean {section}.{alike[0]}?)" if alike else ""
        raise SageError(
            f"{section}.{unknown[0]}: {cls} of the pinned version has no such setting{meant}; "
            "correct the profile, or the --set that names it"
        )


#: How a type is called in an error.
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a word",
    bool: "true or false",
    dict: "a section",
    tuple: "a list",
    types.NoneType: "null",
}


def kinds_of(hint: Any) -> list[Any]:
    """The classes that an annotation allows: of ``list[str] | None`` list and NoneType."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    return [typing.get_origin(option) or option for option in options]


def typed(value: Any, hint: Any, name: str, where: str) -> Any:
    """``value`` when its type fits the annotation ``hint``, otherwise SageError; lists as tuples.
    Sections are checked elsewhere."""
    kinds = kinds_of(hint)
    if isinstance(value, list):
        fits, value = tuple in kinds or list in kinds, tuple(value)
    elif isinstance(value, float) and not math.isfinite(value):
        fits = False
    elif isinstance(value, bool):
        fits = bool in kinds
    elif isinstance(value, int):
        fits = int in kinds or float in kinds
    else:
        fits = any(isinstance(kind, type) and isinstance(value, kind) for kind in kinds)
    # Sections of dataclasses come as mappings; a guide or an advantage may be its name alone.
    nested = any(dataclasses.is_dataclass(kind) or kind is typing.Any for kind in kinds)
    shorthand = isinstance(value, str) and name in ("guide", "advantage")
    if fits or nested or shorthand:
        return value
    expected = " or ".join(_WORDS.get(kind, str(kind)) for kind in kinds)
    shown = list(value) if isinstance(value, tuple) else value
    raise SageError(f"{where}: {name} must be {expected}, not {shown!r}")


def default_of(f: dataclasses.Field) -> Any:
    """A field's default, dataclasses.MISSING where it has none."""
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return f.default
