"""A grammar of wrong answers, and a second verifier that reads what it can with sympy alone."""

import math
import random
import re

import sympy
from sympy.parsing.sympy_parser import (
    implicit_multiplication,
    parse_expr,
    standard_transformations,
)

#: Golds of the kinds that benchmarks have.
INTEGERS = ["0", "1", "-3", "7", "12", "25", "64", "100", "243", "1024", "2016", "-17", "36", "81"]
FRACTIONS = [r"\frac{1}{2}", r"\frac{3}{4}", r"-\frac{7}{3}", r"\frac{22}{7}", r"\frac{5}{12}"]
ROOTS = [r"\sqrt{2}", r"3\sqrt{5}", r"\frac{\sqrt{3}}{2}", r"2\pi", r"\frac{\pi}{6}", r"1+\sqrt{7}"]
DECIMALS = ["0.5", "2.75", "3.14", "0.125", "6.25e14", "1.6e-19"]
FORMULAS = ["x^2+1", "3x-4", r"\frac{1}{x+2}", "2e^{x}", r"\sin(x)", "a+b", "n(n+1)"]
TUPLES = ["(3,2)", r"(1,\frac{1}{2})", "(0,0,1)", r"\{1,2\}", r"\{-1,0,5\}", "1,2"]
INTERVALS = ["[0,1)", "(2,5]", r"(-\infty,3)", r"[1,\infty)"]
GOLDS = [*INTEGERS, *FRACTIONS, *ROOTS, *DECIMALS, *FORMULAS, *TUPLES, *INTERVALS][:50]


def other_value(gold, rng):
    """A wrong value of the same form as the gold."""
    offset = rng.choice([1, 2, 3, 10, -1, -2])
    number = re.search(r"[0-9]+", gold)
    if number is None or rng.random() < 0.2:
        return f"{gold}+{abs(offset)}" if "," not in gold else str(offset)
    changed = int(number[0]) + (offset if int(number[0]) + offset >= 0 else 11)
    return gold[: number.start()] + str(changed) + gold[number.end() :]


#: Rules: name -> a wrong answer from a gold g, a wrong value w of its form, and a number n.
RULES = {
    # Equations whose left side is no name, and equations that are false.
    "coefficient": lambda g, w, n: f"{n} x = {g}",
    "nought": lambda g, w, n: f"0 x = {g}",
    "sum": lambda g, w, n: f"a + {n} = {g}",
    "square": lambda g, w, n: f"x^{n} + 1 = {g}",
    "sine": lambda g, w, n: rf"\sin(x) + {n} = {g}",
    "false": lambda g, w, n: f"{n}{n}7 = {g}",
    "unread": lambda g, w, n: f"{n} = ( = {g}",
    "chain": lambda g, w, n: f"x = {w} = {w}",
    "wrong side": lambda g, w, n: f"{g} = {w}",
    "assigned": lambda g, w, n: f"x = {w}",
    "not equal": lambda g, w, n: rf"x \neq {g}",
    "less": lambda g, w, n: rf"x < {g}",
    # Lists that hold the gold.
    "list": lambda g, w, n: f"{g}, {w}",
    "or": lambda g, w, n: rf"{w} \text{{ or }} {g}",
    "set": lambda g, w, n: rf"\{{{g}, {w}, {n}\}}",
    "plus or minus": lambda g, w, n: rf"{w} \pm {g}",
    "semicolons": lambda g, w, n: f"{g}; {w}; {n}",
    # Intervals and tuples around it.
    "interval": lambda g, w, n: f"[{g}, {w}]",
    "pair": lambda g, w, n: f"({g}, {w})",
    "union": lambda g, w, n: rf"[{g}, {w}] \cup [{n}, {n}1]",
    # Units and words.
    "unit": lambda g, w, n: rf"{w} \text{{ cm}}",
    "squared unit": lambda g, w, n: rf"{w} \text{{ cm}}^{n}",
    "degrees": lambda g, w, n: rf"{w}^\circ",
    "words": lambda g, w, n: rf"\text{{not }} {w}",
    "dollars": lambda g, w, n: rf"\${w}",
    # Scripts and spaces.
    "minus of another script": lambda g, w, n: f"\u2212{w}1",
    "zero-width": lambda g, w, n: f"{w}\u200b",
    "full-width": lambda g, w, n: w.translate({ord(d): ord(d) + 0xFEE0 for d in "0123456789"}),
    "superscript": lambda g, w, n: f"{w}\u00b2",
    # Boxes.
    "nested boxes": lambda g, w, n: rf"\boxed{{\boxed{{{w}}}}}",
    "two boxes": lambda g, w, n: rf"\boxed{{{g}}} \boxed{{{w}}}",
    "box in a list": lambda g, w, n: rf"\boxed{{{w}}}, {g}",
    "a box and an equation": lambda g, w, n: rf"{n} y = \boxed{{{g}}}",
    # Values.
    "other": lambda g, w, n: w,
    "more": lambda g, w, n: f"({g}) + {n}",
    "times": lambda g, w, n: f"({w}) \\cdot {n}7",
    "power": lambda g, w, n: f"({w})^{{{n}}}",
    "fraction": lambda g, w, n: rf"\frac{{{w}}}{{{n}3}}",
    "prefix": lambda g, w, n: f"{n}{g}",
    "suffix": lambda g, w, n: f"{g}{n}",
}


def answers(number, seed=0):
    """(rule, gold, answer): so many different ones, over all golds and rules in turn."""
    rng, seen = random.Random(seed), set()
    while len(seen) < number:
        for gold in GOLDS:
            for rule, make in RULES.items():
                pair = gold, make(gold, other_value(gold, rng), rng.randint(2, 99))
                if pair not in seen and len(seen) < number:
                    seen.add(pair)
                    yield rule, *pair


def read(text):
    """What a text means by this module's own rule: (kind, values), or None where it cannot say.

    Boxes, a unit in words and the name of one letter in x = ... mean nothing. A list says which
    values there are, and not how often; several boxes are one. Values are sympy's; nothing of
    Math-Verify is used.
    """
    text = re.sub(r" \\text\{ or \} |(?<=\}) (?=\\boxed\{)", ", ", text)
    if text.count(r"\boxed{") > 1 and ", " in text:
        text = re.sub(r"\\boxed\{([^{}]*)\}", r"\1", text)
    text = text.replace("\u200b", "").replace("\u2212", "-").strip()
    text = text.translate({ord(d) + 0xFEE0: d for d in "0123456789"})
    while found := re.fullmatch(r"\\boxed\{(.*)\}", text):
        text = found[1].strip()
    text = re.sub(r"\\text\{[^{}]*\}(\^\{?[0-9]+\}?)?|\\\$|\^\\circ", "", text).strip()
    if named := re.fullmatch(r"[a-z] = ([^=]*)", text):
        text = named[1]
    if any(sign in text for sign in ("=", "<", ">", "\\neq", "\\pm", "\\cup", ";", "\\infty")):
        return None
    kind, inner = "value", text
    if brackets := re.fullmatch(r"([(\[]|\\\{)([^()\[\]]*,[^()\[\]]*?)([)\]]|\\\})", text):
        kind, inner = brackets[1] + brackets[3], brackets[2]
    elif "," in text:
        kind = "list"
    try:
        return kind, [value(part) for part in inner.split(",")]
    except Exception:  # whatever Python's parser or sympy trips over
        return None


def value(text):
    """A formula by sympy's parser of Python, after a rewriting of LaTeX."""
    for _ in range(4):
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text)
    text = text.replace(r"\pi", " pi ").replace(r"\sin", "sin").replace(r"\cdot", "*")
    text = re.sub(r"(?<![0-9.])([0-9.]+)e(-?[0-9]+)", r"(\1*10**(\2))", text)
    text = re.sub(r"\^\{([^{}]*)\}", r"**(\1)", text).replace("^", "**")
    text = re.sub(r"(?<![a-z])e(?![a-z])", "E", text)
    if "\\" in text or "{" in text or not text.strip():
        raise ValueError(text)
    steps = (*standard_transformations, implicit_multiplication)
    letters = {name: sympy.Symbol(name) for name in "abcnxyz"}
    return sympy.nsimplify(parse_expr(text, letters, steps), rational=True)


def same(gold, answer):
    """Whether two texts mean the same by :func:`read`; None where it cannot say."""
    first, second = read(gold), read(answer)
    if first is None or second is None:
        return None
    sets = {first[0], second[0]} <= {r"\{\}", "list"}
    if first[0] != second[0] and not sets and "value" not in (first[0], second[0]):
        return False
    if sets:
        return {*map(sympy.simplify, first[1])} == {*map(sympy.simplify, second[1])}
    if len(first[1]) != len(second[1]):
        return False
    return all(equal(*pair) for pair in zip(first[1], second[1], strict=True))


def equal(a, b):
    difference = sympy.simplify(a - b)
    if difference.free_symbols:
        return False
    if a.free_symbols:
        return bool(difference == 0)
    size = abs(complex(difference))
    return size <= 1e-6 * max(1.0, abs(complex(a))) if math.isfinite(size) else False
