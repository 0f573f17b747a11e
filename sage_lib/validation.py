"""Sections of a profile as objects: pydantic checks them, and every error is one sentence."""

import dataclasses
import difflib
import functools
import inspect
import warnings
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError

from sage_lib.errors import SageError

T = TypeVar("T")

#: Of a section: an unknown key is refused, and so is a value of another type, NaN or infinity.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
#: Names that an error still lists.
MANY = 30


def make(cls: type[T], raw: Any, where: str) -> T:
    """Build a pydantic dataclass.

    Args:
        cls: the dataclass.
        raw: a mapping of its fields, as YAML has it.
        where: the place of ``raw``, such as "smoke: model". An error begins with it.

    Returns:
        ``cls(**raw)``. SageError for the first wrong key or value.
    """
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise SageError(f"{where} must be a section of named settings, not {raw!r}")
    try:
        return cls(**raw)
    except ValidationError as error:
        raise refusal(error, where, inspect.signature(cls).parameters) from None
    except SageError as error:
        raise SageError(f"{where}: {error}") from None


def refusal(error: ValidationError, where: str, options: Iterable[str] = ()) -> SageError:
    """Turn an error of pydantic into one sentence, about an unknown key first.

    Args:
        error: of pydantic.
        where: the place of what was checked.
        options: the keys there, for "did you mean".

    Returns:
        The error to raise.
    """
    unexpected = "unexpected_keyword_argument"
    first = min(error.errors(include_url=False), key=lambda e: e["type"] != unexpected)
    keys, message = list(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    if first["type"] == unexpected:
        section = functools.reduce(below, keys[:-1], where)
        return unknown(section, keys[-1], options if len(keys) == 1 else ())
    value = "" if first["type"] in ("missing", "value_error") else f", not {first['input']!r}"
    setting = functools.reduce(below, keys, where)
    return SageError(f"{setting}: {message[0].lower()}{message[1:]}{value}")


def below(where: str, key: str) -> str:
    """Return the place of a key: "smoke: rl.beta" below "smoke: rl"."""
    return f"{where}.{key}" if ": " in where else f"{where}: {key}"


def unknown(
    where: str,
    key: str,
    options: Iterable[str],
    sections: Mapping[str, Any] | None = None,
    owner: str = "",
) -> SageError:
    """Return the error for a key that is not known.

    Args:
        where: the place of the section that has the key.
        key: the unknown one.
        options: the keys of that section.
        sections: of which one may have the key, where none of ``options`` resembles it.
        owner: the name of what has the options, where they are many.

    Returns:
        An error that asks for the key that is spelt most alike, or lists the known ones.
    """
    options = list(options)
    matches = difflib.get_close_matches(key, options, 1)
    settings = [below(where, name).split(": ")[-1] for name in matches] or [
        f"{name}.{key}"
        for name, section in (sections or {}).items()
        if isinstance(section, dict) and key in section
    ]
    if settings:
        advice = f"did you mean {' or '.join(settings)}?"
    elif owner and len(options) > MANY:
        advice = f"{owner} has no setting of this name"
    else:
        advice = f"choose one of {', '.join(options)}"
    return SageError(f"{below(where, key)} is unknown; {advice}")


def default_of(field: dataclasses.Field) -> Any:
    """Return a field's default, dataclasses.MISSING where it has none."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def rename_key(section: MutableMapping[str, Any], old: str, new: str, where: str) -> None:
    """Rename a key that users typed before, with a FutureWarning; the next release refuses it.

    Args:
        section: keys and values of the user.
        old: the former key.
        new: the key now.
        where: the place of ``section``, for the warning.
    """
    if old in section:
        if new in section:
            raise SageError(f"{where}: {old} and {new} are the same: give {new} alone")
        message = f"{where}: {old} is called {new}; the old name works until the next release"
        warnings.warn(message, FutureWarning, stacklevel=3)
        section[new] = section.pop(old)


def pick(name: Any, table: Mapping[str, T], where: str, kind: str) -> T:
    """Look up a name that a profile chooses.

    Args:
        name: a key of the table.
        table: what may be chosen.
        where: the place of the name, for the error.
        kind: what the table holds, such as "guide".

    Returns:
        The entry. SageError for a name that the table lacks.
    """
    if isinstance(name, str) and name in table:
        return table[name]
    matches = difflib.get_close_matches(str(name), table, 1)
    advice = f"did you mean {matches[0]}?" if matches else f"choose one of {', '.join(table)}"
    raise SageError(f"{where}: there is no {kind} {name!r}; {advice}")
