"""Broken profiles and files are taken as a whole, or refused in one sentence: no tracebacks.

Hypothesis breaks whole ones: keys removed, misspelt or retyped, files cut, with other bytes or with
pieces that parsers stumble over.
"""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import records
from sage_lib.experiment.profile import load_profile
from sage_lib.files import read_lines
from sage_lib.tasks import local_file

FEW = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def refused(check):
    """Whether a user gets one sentence; whatever else is raised is a traceback, and fails."""
    try:
        check()
    except SageError as error:
        assert str(error) and "\n" not in str(error)
        return True
    return False


# --- profiles -------------------------------------------------------------------------------------

WHOLE = YAML(typ="safe").load((paths.PROFILES / "smoke.yaml").read_text()) | {"name": "mine"}
#: Not large numbers: they ask for much, and mean it.
VALUES = (
    *(None, True, -1, 0, 1.5, float("nan"), float("inf"), "word", ""),
    *([], {}, [1, "a", None], {"a": 1}, [[]], [{}]),
)


def places(value, above=()):
    """The way to every value of nested sections and lists: keys and numbers."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*above, key)
        if isinstance(below, dict | list):
            yield from places(below, (*above, key))


PLACES = list(places(WHOLE))
#: Names that a user gives, and keys that TRL and PEFT know: these are asked before a run starts.
FREE = ("methods", "rl", "sft", "rl_lora", "sft_lora")
MISSPELT = [p for p in PLACES if isinstance(p[-1], str) and p[0] not in FREE]


def section_of(profile, place):
    for key in place[:-1]:
        profile = profile[key]
    return profile


def load(folder, profile):
    path = Path(folder) / "mine.yaml"
    with path.open("w") as file:
        YAML(typ="safe").dump(profile, file)
    return load_profile(path)


def test_the_whole_profile_is_taken(tmp_path):
    assert load(tmp_path, WHOLE).seeds == load_profile("smoke").seeds


@FEW
@given(st.sampled_from(PLACES), st.sampled_from(["removed", *VALUES]))
def test_a_key_removed_or_retyped(tmp_path, place, value):
    profile = copy.deepcopy(WHOLE)
    if value == "removed":
        del section_of(profile, place)[place[-1]]
    else:
        section_of(profile, place)[place[-1]] = value
    refused(lambda: load(tmp_path, profile))


@pytest.mark.parametrize("place", MISSPELT, ids=lambda place: ".".join(map(str, place)))
def test_a_misspelt_key_is_refused(tmp_path, place):
    profile = copy.deepcopy(WHOLE)
    section = section_of(profile, place)
    section[f"{place[-1]}z"] = section.pop(place[-1])
    assert refused(lambda: load(tmp_path, profile))


# --- files ----------------------------------------------------------------------------------------

PROBLEMS = [{"question": f"{n} + 1?", "answer": str(n + 1), "id": f"p{n}"} for n in range(4)]
RECORD = {
    **dict.fromkeys(sorted(records.KEYS), "x"),
    **{"seconds": 1.5, "peak_memory_gb": 0.1, "settings": {"a": 1}, "versions": {"b": "1"}},
    **{"machine": {"cores": 2}, "seed": 1, "collapsed": {"step": 3, "reason": "told to"}},
}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def read_problems(path):
    chosen = local_file.LocalFile(path=str(path), id="id")
    for problem in chosen.problems(10, 0):
        assert problem.question and problem.gold and problem.id, "an empty problem was taken"


def read_record(path):
    records.done(path, "x")
    records.collapse(path)


KINDS = {
    "profile": ("mine.yaml", "name: mine\nextends: smoke\nrl: {beta: 0.2}\n", load_profile),
    "JSONL": ("d.jsonl", lines(PROBLEMS), read_problems),
    "CSV": ("d.csv", "question,answer,id\n1 + 1?,2,a\n2 + 1?,3,b\n", read_problems),
    "record": ("record.json", json.dumps(RECORD), read_record),
    "steps": ("steps.jsonl", lines({"step": n, "loss": 0.5} for n in (1, 2, 3)), read_lines),
}
PIECES = (
    *(b"\x00", b"\xff\xfe", b'"', b"{", b"[" * 100_000, b"\n\n", b"\r", b",,,", b"NaN"),
    *(b"9" * 5000, b"\xed\xa0\x80", b'{"a": 1}', b"[]\n", b"null\n", b"\\ud800", b"1e999"),
)


@st.composite
def broken(draw, whole):
    """A broken copy of a file."""
    start = draw(st.integers(0, len(whole) - 1))
    end = draw(st.integers(start, len(whole)))
    piece = draw(st.sampled_from([b"", *PIECES]) | st.binary(max_size=2))
    return draw(
        st.sampled_from([whole[:start] + piece + whole[end:], whole[:start], b"\x1f\x8b" + whole])
        | st.just(whole.decode().encode("utf-16"))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file(tmp_path, kind):
    name, text, read = KINDS[kind]
    path = tmp_path / name
    path.write_text(text)
    read(path)  # the whole one is taken

    @FEW
    @given(broken(text.encode()))
    def check(data):
        path.write_bytes(data)
        refused(lambda: read(path))

    check()
