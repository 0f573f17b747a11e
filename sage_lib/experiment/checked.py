"""Sections for TRL and PEFT, checked; and settings as text and as a hash."""

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sage_lib.validation import below, default_of, refusal, unknown


@functools.cache
def _adapter(hint: Any) -> TypeAdapter | None:
    """Return a checker for values of a type that YAML can write; None for any other type."""
    union = typing.get_origin(hint) in (typing.Union, UnionType)
    options = typing.get_args(hint) if union else (hint,)
    plain = {typing.get_origin(option) or option for option in options}
    return TypeAdapter(hint) if plain <= {int, float, str, bool, dict, list, NoneType} else None


def check_section(cls: type, section: Mapping[str, Any], where: str) -> None:
    """Raise SageError for a setting that ``cls`` (SFTConfig, say) does not have, or of another
    type: TRL and PEFT take any value, and fail at their first use of it."""
    hints, options = typing.get_type_hints(cls), [f.name for f in dataclasses.fields(cls) if f.init]
    for key, value in section.items():
        if key not in options:
            raise unknown(where, key, options, owner=cls.__name__)
        adapter = _adapter(hints[key])
        try:
            if adapter is not None and key != "scale_rewards":  # false is "none" in TRL
                adapter.validate_python(value, strict=True)
        except ValidationError as error:
            raise refusal(error, below(where, key)) from None


def digest(value: Any) -> str:
    """Return a hash (12 hex digits) of settings. Neither the order of keys, nor 0 against 0.0, nor
    a dataclass's field at its default makes a difference."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def canonical(value: Any) -> Any:
    """Return settings as JSON has them, the same for all ways to write them down."""
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


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested sections, in their order."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}{key}.")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}{i}.")
    else:
        yield prefix.rstrip("."), value
