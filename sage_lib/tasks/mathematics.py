"""Whether two mathematical answers are equal, by Math-Verify. Texts are first rewritten in a
spelling that it reads. Only the verifier's workers load this module.

Known faults of Math-Verify remain. It takes as the same: upper and lower case, a number and its
percentage, numbers of different bases or units, a set of two and a pair. It reads names of several
letters, primes and second derivatives as products and powers of letters, and log with base 10. It
does not understand bare words, x for times, units such as m/s, "about", and the signs of infinity,
roots, halves and squares.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import math_verify
import sympy
from math_verify.parser import equation_split_regex
from sympy.core.function import AppliedUndef

#: 4.5e33, 4.5E+33. Not e^{2}, 24 e, 3e, 2e^x, 3e2t or 3e8.5, where e is Euler's number.
_SCIENTIFIC = re.compile(
    r"(?<![\w.\\^])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([+-]?)0*([0-9]+)(?![\w^]|\.[0-9])", re.ASCII
)
#: 2**3, 10^-5: of these Math-Verify would read the base alone.
_POWER = re.compile(r" ?\*\* ?([+-]?[0-9]+)?|\^ ?([+-][0-9]+)(?![\w.])", re.ASCII)
#: What it would misread: -3./2; the letters gamma and E_0; the sun's index; the signs of
#: degrees and euros; P(X = 2) = 7.
_SPELLINGS = (
    (re.compile(r"(?<=[0-9])\.(?=\s*[-+*/^)])"), ""),
    (re.compile(r"\\gamma(?![A-Za-z(])"), r"\\mathcal{g}"),
    (re.compile(r"(?<![A-Za-z\\])([Ee])(?=_)"), r"\\mathcal{\1}"),
    (re.compile(r"_(?:\{\\odot\}|\\odot\b)"), "_{sun}"),
    (re.compile("\N{DEGREE SIGN}"), r"^\\circ "),
    (re.compile("(?<=[0-9]) ?\N{EURO SIGN}\\s*$"), ""),
    (re.compile(r"^\s*P ?(?:\\left)?\([^()=]*=[^()=]*\)(?=\s*=)"), "P"),
)
#: Two numbers with a blank between, which Math-Verify adds: 3 4 would be 7, and 1 234 be 235.
_TWO_NUMBERS = re.compile(r"[0-9][)$]*(?:\s|\\[,;:! ]|\\q?quad)+[($]*[0-9]", re.ASCII)
#: What names a value, besides symbols.
_NAMING = (AppliedUndef, sympy.Derivative, sympy.Integral, sympy.Limit, sympy.Product, sympy.Sum)
#: Decimals up to which Math-Verify compares, and digits that it computes: its defaults.
_DECIMALS, _PRECISION = 6, 15


def equal(gold: str, answer: str) -> bool | None:
    """Return whether Math-Verify finds gold and answer equal; None if the gold is no formula."""
    expected, has_variables = parse_gold(gold)
    if not expected:
        return None
    if _TWO_NUMBERS.search(answer) and not _TWO_NUMBERS.search(gold):
        return False
    parsed = parse(answer)
    if has_variables:
        parsed = _plain_symbols(parse(answer, units=False) + parsed)
    if any(map(_contradicts_itself, parsed)):
        return False
    if not isinstance(expected[0], sympy.Eq) and any(map(_says_more, parsed)):
        return False
    if _is_last_side(_rewritten(answer) or "", parsed):
        return False
    a, b = _number(gold, expected), _number(answer, parsed)
    if a is not None and b is not None:
        # No rounding makes them equal; Math-Verify would take long to say so.
        if abs(a - b) > 0.001 * max(1.0, abs(a), abs(b)):
            return False
        if _same_fraction(expected[0], parsed[0]):
            return True
    # Math-Verify's six decimals, and more for numbers such as 7.4e-12: six would make them 0.
    sizes = (size for formula in expected + parsed for size in _sizes(formula))
    smallest = min(sizes, default=1.0)
    added = 0 if smallest >= 1e-3 else min(math.ceil(-math.log10(smallest)), 400)
    decimals, digits = _DECIMALS + added, _PRECISION + added
    return bool(math_verify.verify(expected, parsed, decimals, digits, timeout_seconds=None))


def parse(text: str, units: bool = True) -> list:
    """Parse a text that is one formula.

    Math-Verify alone would pick a number out of any text, such as ( 9. With ``units`` a last letter
    is a unit and is dropped, as in 5 m; without, it is a variable.

    Returns:
        What Math-Verify reads, [] where the text is no formula.
    """
    readable = _rewritten(text)
    if readable is None:
        return []
    formula = f"${readable}$"
    parsed = math_verify.parse(formula, extraction_config=[_latex(units)], parsing_timeout=None)
    if not _understood(parsed) and _is_arithmetic(text):
        parsed = math_verify.parse(formula, parsing_timeout=None)
    return parsed


@lru_cache(maxsize=4096)
def parse_gold(gold: str) -> tuple[list, bool]:
    """Parse a gold, as :func:`parse` does, and return whether it has variables, too."""
    parsed = parse(gold)
    if not _understood(parsed):
        return [], False
    value = getattr(parsed[0], "rhs", parsed[0])  # of an equation the right side
    if value.free_symbols:
        return _plain_symbols(parse(gold, units=False)), True
    return parsed, False


@lru_cache(maxsize=2)
def _latex(units: bool) -> Any:
    usual = math_verify.LatexExtractionConfig()
    normal = dataclasses.replace(usual.normalization_config, units=False)
    return usual if units else dataclasses.replace(usual, normalization_config=normal)


def _rewritten(text: str) -> str | None:
    """Return the text in a spelling that Math-Verify reads; None if an exponent is too long."""
    if any(len(match[3]) > 3 for match in _SCIENTIFIC.finditer(text)):
        return None
    if text.count(r"\boxed{") == 1:  # of 8 x = \boxed{7} Math-Verify would read the box alone
        text = text.replace(r"\boxed{", "{")
    readable = _POWER.sub(_braced_power, _SCIENTIFIC.sub(_power_of_ten, text))
    for written, read in _SPELLINGS:
        readable = written.sub(read, readable)
    return readable


def _braced_power(match: re.Match[str]) -> str:
    exponent = match[1] or match[2]
    return f"^{{{exponent}}}" if exponent else "^"


def _power_of_ten(match: re.Match[str]) -> str:
    mantissa, sign, exponent = match.groups()
    return rf"({mantissa.removesuffix('.')} \cdot 10^{{{sign.removeprefix('+')}{exponent}}})"


def _understood(parsed: list) -> bool:
    return not all(isinstance(formula, str) for formula in parsed)


def _is_arithmetic(text: str) -> bool:
    if not re.fullmatch(r"[-+*/^(). 0-9]+", text):
        return False
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _plain_symbols(parsed: list) -> list:
    """Return formulas with i for the imaginary unit, one kind of variable, a variable in place of
    dx/dt, and fractions for decimals."""
    formulas = []
    for formula in parsed:
        if not isinstance(formula, str):
            plain = {s: sympy.Symbol(s.name, real=True) for s in formula.free_symbols}
            plain.update({s: sympy.I for s in plain if s.name == "i"})
            rates = {d: sympy.Symbol(str(d), real=True) for d in formula.atoms(sympy.Derivative)}
            plain.update({d: rate for d, rate in rates.items() if d.expr.is_Symbol})
            formula = formula.xreplace({**plain, **_written_decimals(formula)})
        formulas.append(formula)
    return formulas


def _contradicts_itself(formula: Any) -> bool:
    """Return whether a formula equates different numbers, as 4 = 5 does and 1/3 = 0.33 does not."""
    if not isinstance(formula, sympy.logic.boolalg.Boolean):
        return False
    for equation in formula.atoms(sympy.Eq):
        if all(_is_number(side) for side in equation.args):
            a, b = (complex(side.doit()) for side in equation.args)
            rounding = 0.1 if equation.has(sympy.Float) else 10**-_DECIMALS
            if abs(a - b) > rounding * max(abs(a), abs(b)):
                return True
    return False


def _says_more(formula: Any) -> bool:
    """Return whether an answer equates something other than a name or a number with a value.

    Math-Verify reads the right side alone, so that 8 x = 7 would be right for the gold 7.
    """
    if isinstance(formula, (sympy.FiniteSet, sympy.Tuple)):
        return any(map(_says_more, formula.args))
    # Of a chain a = b = c the equations in this order.
    chain = formula._unsorted_args if isinstance(formula, sympy.And) else [formula]
    if not all(isinstance(equation, sympy.Eq) for equation in chain):
        return False
    before = None
    for equation in chain:
        left, right = equation.lhs, equation.rhs
        equal_numbers = _is_number(left) and _is_number(right)  # or else it contradicts itself
        if left != before and not (_is_name(left) or equal_numbers):
            return True
        before = right
    return False


def _is_last_side(text: str, parsed: list) -> bool:
    """Return whether Math-Verify read the last side alone of what it could not parse, as of 8 = ( =
    7."""
    # Of several boxes it reads all of them, and nothing else.
    several = len(equation_split_regex.split(text)) > 2 and r"\boxed{" not in text
    return several and not any(
        isinstance(formula, sympy.Basic) and formula.has(sympy.Eq) for formula in parsed
    )


def _is_name(side: Any) -> bool:
    """Return whether a side of an equation is a name: x, AB, f(x), dy/dx, |z|, a ratio or a tuple.

    Math-Verify reads a name of several letters as a product of different letters.
    """
    if isinstance(side, (sympy.Tuple, sympy.Abs, tuple)):
        return all(_is_name(inner) for inner in getattr(side, "args", side))
    if isinstance(side, _NAMING):
        return True
    factors = sympy.Mul.make_args(side)
    bases = [factor.base if factor.is_Pow and factor.exp == -1 else factor for factor in factors]
    inner = [base for base in bases if base.is_Mul]  # of 1/(a b), which is not evaluated
    symbols = [base for base in bases if not base.is_Mul]
    return all(symbol.is_Symbol for symbol in symbols) and all(map(_is_name, inner))


def _is_number(side: Any) -> bool:
    return isinstance(side, sympy.Expr) and bool(side.is_number)


def _number(text: str, parsed: list) -> float | None:
    """Return the value of a text that is one real number; None for others, and for 28%."""
    if len(parsed) != 2 or "%" in text or not _is_number(parsed[0]):
        return None
    value = parsed[0].evalf(15)
    return float(value) if value.is_Float or value.is_Rational else None


def _same_fraction(a: Any, b: Any) -> bool:
    """Return whether both are products and powers of numbers, with one value as fractions.

    As doubles, 2.19 times 10^6 and 21.9 times 10^5 may differ.
    """
    if not (_is_product(a) and _is_product(b)):
        return False
    first, second = (f.xreplace(_written_decimals(f)).doit() for f in (a, b))
    return bool(first.is_Rational and first == second)


def _is_product(formula: Any) -> bool:
    parts = sympy.preorder_traversal(formula)
    return all(isinstance(part, (sympy.Number, sympy.Mul, sympy.Pow)) for part in parts)


def _written_decimals(formula: Any) -> dict:
    return {number: sympy.Rational(str(number)) for number in formula.atoms(sympy.Float)}


def _sizes(formula: Any) -> Iterator[float]:
    if isinstance(formula, str):
        return
    parts = sympy.preorder_traversal(formula)
    for part in parts:
        if _is_product(part):
            parts.skip()
            size = float(abs(part.evalf(_DECIMALS)))
            if size > 0:
                yield size
