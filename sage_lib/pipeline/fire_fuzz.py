"""Broken input: profiles, files and answers as they should not be, made by rules from whole ones.

What is tried must be taken as a whole, or refused by a SageError of one sentence. Every other
exception is what a user would see as a traceback; it is kept, with what led to it.
"""

from __future__ import annotations

import copy
import functools
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from sage_lib.errors import SageError
from sage_lib.evaluation import counts
from sage_lib.experiment import records
from sage_lib.experiment.profile import Profile, build_profile, load_profile
from sage_lib.files import read_lines
from sage_lib.pipeline import needs, plan
from sage_lib.tasks import local_file
from sage_lib.tasks.problem import plain
from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START

#: What a value is replaced by. Not large numbers: they ask for much, and mean it.
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, float("nan"), float("inf"), "word", ""),
    *([], {}, [1, "a", None], {"a": 1}, [[]], [{}]),
)
#: Sections whose keys are a user's own names: of methods.
OWN_NAMES = (("methods",),)

Outcome = tuple[str, str]  # "taken", "refused" or "traceback", and the sentence
Check = Callable[[Any], object]


def outcome(check: Callable[[], object]) -> Outcome:
    """What a user gets: the thing, one sentence, or a traceback."""
    try:
        check()
    except SageError as error:
        return ("refused" if "\n" not in str(error) else "traceback"), str(error)
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"
    return "taken", ""


# --- profiles -------------------------------------------------------------------------------------


def places(value: Any, above: tuple = ()) -> Iterator[tuple]:
    """The way to every value of nested sections and lists: keys and numbers."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in inner:
        yield (*above, key)
        if isinstance(below, (dict, list)):
            yield from places(below, (*above, key))


def changed(settings: dict, place: tuple, change: str, value: Any = None) -> dict:
    """A copy of settings with one place "removed", "misspelt", or "retyped" as ``value``."""
    new = copy.deepcopy(settings)
    section = new
    for key in place[:-1]:
        section = section[key]
    last = place[-1]
    if change == "removed":
        del section[last]
    elif change == "misspelt":
        section[f"{last}z"] = section.pop(last)
    else:
        section[last] = value
    return new


def profile_cases(settings: dict, each: int | None, rng: random.Random) -> Iterator[tuple]:
    """(place, change, value): every key removed, misspelt, and retyped as ``each`` of
    :data:`VALUES` drawn at random, or as all of them."""
    for place in places(settings):
        yield place, "removed", None
        if isinstance(place[-1], str):
            yield place, "misspelt", None
        values = VALUES if each is None else rng.sample(VALUES, each)
        for value in values:
            yield place, "retyped", value


def profiles(names: Sequence[str], each: int | None, seed: int, sections: Check) -> pd.DataFrame:
    """Broken variants of shipped profiles, through all that looks at one before anything runs.

    ``sections`` checks what goes to TRL and PEFT, which takes them a while to import. A misspelt
    name that is taken is a fault, too: its setting would be left at a default without a word.
    Columns profile, change, tried, taken, refused, traceback, silent, example.
    """
    rng, rows = random.Random(seed), []
    for name in names:
        settings, path = load_profile(name).settings, Path(f"{name}.yaml")
        found: dict[str, Counter] = {}
        examples: dict[str, str] = {}
        cases = list(profile_cases(settings, each, rng))
        for place, change, value in tqdm(cases, name, leave=False, disable=None):
            new = changed(settings, place, change, value)
            kind, said = outcome(functools.partial(_look, new, path, sections))
            own = place[:-1] in OWN_NAMES
            if kind == "taken" and change == "misspelt" and not own:
                kind, said = "silent", "taken, and means nothing"
            found.setdefault(change, Counter())[kind] += 1
            if kind in ("traceback", "silent"):
                where = ".".join(map(str, place))
                examples.setdefault(change, f"{where} {change} {value!r}: {said}")
        for change, counted in found.items():
            rows.append(_row({"profile": name, "change": change}, counted, examples.get(change)))
    return pd.DataFrame(rows)


def _look(settings: dict, path: Path, sections: Check) -> Profile:
    profile = build_profile(settings, path)
    plan.settings_table(profile)
    if profile.methods and profile.model.architecture:
        needs.memory(profile)
    sections(profile)
    return profile


def _row(first: dict[str, str], counted: Counter, example: str | None) -> dict[str, Any]:
    kinds = {kind: counted[kind] for kind in ("taken", "refused", "traceback", "silent")}
    return {**first, "tried": counted.total(), **kinds, "example": (example or "")[:160]}


# --- files ----------------------------------------------------------------------------------------

_PROBLEMS = [
    {"question": f"What is {n} + 1?", "answer": str(n + 1), "id": f"p{n}"} for n in range(4)
]
_RECORD = {
    **dict.fromkeys(sorted(records.KEYS), "x"),
    **{"seconds": 1.5, "peak_memory_gb": 0.1, "settings": {"a": 1}, "versions": {"b": "1"}},
    **{"machine": {"cores": 2}, "seed": 1, "collapsed": {"step": 3, "reason": "told to"}},
}


def broken(whole: bytes, rng: random.Random, number: int) -> Iterator[bytes]:
    """So many broken copies of a file: cut, with bytes changed, doubled, in another encoding, with
    pieces that parsers stumble over."""
    pieces = (
        *(b"\x00", b"\xff\xfe", b'"', b"{", b"[" * 100_000, b"\n\n", b"\r", b",,,", b"NaN"),
        *(b"9" * 5000, b"\xed\xa0\x80", b'{"a": 1}', b"[]\n", b"null\n", b"\\ud800", b"1e999"),
    )
    yield from (b"", b"\n", b"\xef\xbb\xbf", whole.decode().encode("utf-16"), b"\x1f\x8b" + whole)
    for _ in range(number):
        place, kind = rng.randrange(len(whole)), rng.randrange(4)
        if kind == 0:
            yield whole[:place]
        elif kind == 1:
            yield whole[:place] + bytes([rng.randrange(256)]) + whole[place + 1 :]
        elif kind == 2:
            yield whole[:place] + rng.choice(pieces) + whole[place:]
        else:
            end = rng.randrange(place, len(whole))
            yield whole[:place] + whole[end:]


def files(folder: Path, number: int, seed: int) -> pd.DataFrame:
    """Broken files of every kind that is read, each kind through its own reader.

    Columns file, tried, taken, refused, traceback, silent, example.
    """
    from sage_lib.policy import sampling

    lines = "".join(json.dumps(problem) + "\n" for problem in _PROBLEMS)
    table = "question,answer,id\n" + "".join(
        f"{p['question']},{p['answer']},{p['id']}\n" for p in _PROBLEMS
    )
    asked = plain(["one", "two"])
    sample = {"number": 0, "completion": "c", "ids": [1], "tokens": 2, "finished": True}
    drawn = [
        {**sample, "dataset": one.dataset, "problem": one.id, "made_from": "m"} for one in asked
    ]
    counted = ",".join(counts.COLUMNS) + "\na,1,8,3,0\na,2,8,0,1\n"
    steps = "".join(json.dumps({"step": n, "loss": 0.5}) + "\n" for n in (1, 2, 3))

    def data_file(path: Path) -> None:
        settings = local_file.Settings(path=str(path), id="id")
        for problem in local_file.problems(settings, 10, 0):
            if not (problem.question and problem.gold and problem.id):
                raise ValueError("an empty problem was taken")

    def record(path: Path) -> None:
        records.done(path, "x")
        records.collapse(path)

    def samples(path: Path) -> None:
        sampling.collect([path], asked, 1)

    kinds: dict[str, tuple[str, str, Callable[[Path], object]]] = {
        "data file, JSONL": ("d.jsonl", lines, data_file),
        "data file, CSV": ("d.csv", table, data_file),
        "run record": ("record.json", json.dumps(_RECORD), record),
        "samples": ("samples.jsonl", "".join(json.dumps(row) + "\n" for row in drawn), samples),
        "counts": ("counts.csv", counted, counts.read),
        "step log": ("steps.jsonl", steps, read_lines),
        "table of a stage": ("scores.csv", counted, _read_table),
        "packed samples": ("samples.jsonl.gz", lines, _read_packed),
        "profile": ("mine.yaml", "name: mine\nextends: smoke\nrl: {beta: 0.2}\n", load_profile),
    }
    rows = []
    for kind, (name, text, read) in kinds.items():
        rng = random.Random(f"{seed} {kind}")
        path = folder / kind / name  # in a folder of its own: a record says what lies beside it
        path.parent.mkdir()
        found: Counter[str] = Counter()
        whole = gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode()
        example = None
        path.write_bytes(whole)
        read(path)  # the whole one is taken
        tried = (
            broken(whole, rng, number) if not name.endswith(".gz") else _cuts(whole, rng, number)
        )
        for data in tried:
            path.write_bytes(data)
            what, said = outcome(functools.partial(read, path))
            found[what] += 1
            if what == "traceback":
                example = example or f"{data[:60]!r}: {said}"
        if kind == "run record":
            for place, change, value in profile_cases(_RECORD, None, rng):
                path.write_text(json.dumps(changed(_RECORD, place, change, value)))
                what, said = outcome(functools.partial(read, path))
                found[what] += 1
                if what == "traceback":
                    example = example or f"{place} {change} {value!r}: {said}"
        rows.append(_row({"file": kind}, found, example))
    return pd.DataFrame(rows)


def _cuts(whole: bytes, rng: random.Random, number: int) -> Iterator[bytes]:
    for _ in range(number):
        place = rng.randrange(len(whole))
        yield rng.choice([whole[:place], whole[:place] + b"\x00" + whole[place + 1 :]])


def _read_table(path: Path) -> pd.DataFrame:
    from sage_lib.report import measured

    return measured.read_table(path)


def _read_packed(path: Path) -> list[dict[str, Any]]:
    from sage_lib.report import measured

    return measured.read_packed(path)


# --- answers --------------------------------------------------------------------------------------

#: Golds of many kinds. None is the value of an answer that :func:`answers` makes, which holds
#: numbers of three digits at most that are none of theirs, and other letters.
GOLDS = ("7919", r"\frac{7919}{13}", r"7919\sqrt{3}", "7919 w + 1", r"\{7919, 17389\}", "0.07919")


def answers(number: int, seed: int) -> Iterator[str]:
    """So many hostile answers, each wrong for all of :data:`GOLDS`.

    Nested braces and functions, towers of powers, sums without an end, long texts, other scripts,
    markers inside markers, code, and mixtures of these.
    """
    rng = random.Random(seed)

    def leaf() -> str:
        return rng.choice((str(rng.randint(2, 999)), "x", "y_{1}", "i", r"\pi", "e", "", "0"))

    def grown(depth: int) -> str:
        if depth == 0:
            return leaf()
        a, b = grown(depth - 1), grown(depth - 1) if rng.random() < 0.3 else leaf()
        rules = (
            *(f"{{{a}}}", f"({a})", f"[{a}", f"{a}]", rf"\left({a}\right)", f"{a}^{{{b}}}"),
            *(f"{a}**{b}", f"{a}!", rf"\frac{{{a}}}{{{b}}}", rf"\sqrt[{b}]{{{a}}}", f"{a}+{b}"),
            *(rf"\sum_{{n=1}}^{{\infty}} {a}^n", rf"\sum_{{n=1}}^{{{a}}} n^{{{b}}}"),
            *(rf"\prod_{{k=1}}^{{\infty}} {a}", rf"\int_0^{{\infty}} {a} x^{{x}} dx"),
            *(rf"\lim_{{x \to \infty}} {a}^{{x}}", rf"\binom{{{a}}}{{{b}}}", rf"\log_{{{a}}} {b}"),
            *(rf"\boxed{{{a}}}", f"{a} = {b}", f"{a}, {b}", rf"{a} \cup {b}", f"|{a}|", f"-{a}"),
            *(rf"\text{{{a}}}", f"{a}e{b}", f"{a}%", f"{a} \\mod {b}", rf"\begin{{pmatrix}}{a}"),
            *(rf"\sin^{{{b}}}({a})", rf"{a} \pm {b}", f"{SOLUTION_START}{a}", f"{a}{SOLUTION_END}"),
        )
        return rng.choice(rules)

    def tower() -> str:
        base, depth = rng.randint(2, 99), rng.randint(2, 30)
        return "^{".join([str(base)] * depth) + "}" * (depth - 1)

    def script() -> str:
        codes = (0x0660, 0x0966, 0xFF10, 0x1D7CE, 0x2160, 0x2460, 0x200B, 0x202E, 0x0301, 0x1F600)
        start = rng.choice(codes)
        return "".join(chr(start + rng.randrange(10)) for _ in range(rng.randint(1, 40)))

    def long() -> str:
        return rng.choice(
            (leaf() + "+", "x^2 ", "{", "(", r"\sqrt{", "1/", "-", ",3")
        ) * rng.randint(20, 2000)

    def noise() -> str:
        signs = "0123456789+-*/^(){}[]\\_,.=<>!|&%$#~'\" xyei\t\n"
        return "".join(rng.choice(signs) for _ in range(rng.randint(1, 300)))

    def code() -> str:
        return rng.choice(
            (
                "__import__('os').system('touch fire')",
                "(lambda: 6)()",
                "[0 for _ in range(10**9)]",
                "exec('while 1: pass')",
                r"\input{/etc/hostname}",
                r"\def\a{\a\a}\a",
            )
        )

    makers = (lambda: grown(rng.randint(1, 9)), tower, script, long, noise, code)
    for _ in range(number):
        made = rng.choice(makers)()
        yield made if rng.random() < 0.8 else made + rng.choice(makers)()


def hostile(number: int, seed: int, time_limit: float = 1) -> pd.DataFrame:
    """So many hostile answers against :data:`GOLDS`, through the verifier with two workers.

    Columns reason (why the verifier said what it said), answers, credited (which is never right),
    seconds (of all together, in the first row), example.
    """
    from sage_lib.tasks.verifier import Verifier, last_answer

    golds = [GOLDS[n % len(GOLDS)] for n in range(number)]
    given = [
        last_answer(f"{SOLUTION_START} {answer} {SOLUTION_END}") for answer in answers(number, seed)
    ]
    verifier = Verifier(workers=2, time_limit=time_limit)
    started = time.perf_counter()
    verdicts = verifier.verify_answers(golds, given)
    seconds = time.perf_counter() - started
    after = verifier.verify_answers(["7919"], ["7918 + 1"])[0]
    verifier.close()
    if not after.correct:
        raise SageError("the verifier refused a right answer after the hostile ones")
    rows = []
    for reason, _ in Counter(verdict.reason for verdict in verdicts).most_common():
        chosen = [n for n, verdict in enumerate(verdicts) if verdict.reason == reason]
        credited = [n for n in chosen if verdicts[n].correct]
        example = f"{golds[credited[0]]} credited to {given[credited[0]]!r}" if credited else ""
        rows.append((reason, len(chosen), len(credited), round(seconds, 1), example))
    return pd.DataFrame(rows, columns=["reason", "answers", "credited", "seconds", "example"])
