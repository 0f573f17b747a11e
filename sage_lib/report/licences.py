"""The licence of every package of the lock, as the metadata of the installed package says it."""

from __future__ import annotations

import re
from collections import defaultdict
from importlib.metadata import PackageMetadata, metadata

import pandas as pd

from sage_lib import paths
from sage_lib.report.fire_tables import markdown

LOCKS = ("requirements.lock", "requirements-torch.lock")
#: A licence's identifier, or several; other metadata says it in words, or has its whole text.
_IDENTIFIER = re.compile(r"[A-Z][\w.+-]*(( AND | OR | WITH )[\w.+-]+)*")
NOT_SAID = "no words but the file LICENSE"


def locked() -> list[str]:
    """The names of the packages of the lock."""
    lines = [line for lock in LOCKS for line in (paths.ROOT / lock).read_text().splitlines()]
    return sorted(line.split("==")[0] for line in lines if re.match(r"[\w.-]+==", line))


def licence(found: PackageMetadata) -> str:
    """What a package's metadata says of its licence, in the order in which it can be relied on: an
    expression, an identifier, a classifier, a few words."""
    [expression, *_], [word, *_] = (
        found.get_all(key) or [""] for key in ("License-Expression", "License")
    )
    classes = [c.split(" :: ")[-1] for c in found.get_all("Classifier") or [] if c[:7] == "License"]
    in_words = word if "\n" not in word and word != "UNKNOWN" else ""
    identifier = word if _IDENTIFIER.fullmatch(in_words) else ""
    return expression or identifier or "; ".join(classes) or in_words or NOT_SAID


def shown() -> str:
    """A table in Markdown: a licence a line, with the packages that have it. PackageNotFoundError
    where one is not installed."""
    by_licence = defaultdict(list)
    for name in locked():
        by_licence[licence(metadata(name))].append(name)
    rows = sorted(by_licence.items(), key=lambda row: (-len(row[1]), row[0]))
    cells = [(said, ", ".join(names)) for said, names in rows]
    return markdown(pd.DataFrame(cells, columns=["licence", "packages"]))
