"""What gold answers mean, kind by kind and benchmark by benchmark: each is what an independent
reading says, equivalent right answers are accepted, near misses refused.

The first half is on made-up golds of every kind. The second reads the published files where
SAGE_DATA names them, prints its counts (pytest -s), and knows by name what Math-Verify gets wrong.
"""

import pytest

from sage_lib.tasks.verifier import Verifier

#: Kind -> gold, equivalent right answers, near misses. Made up.
KINDS = {
    "integer": (
        "84",
        [
            r"84.0",
            "+84",
            "168/2",
            "85 - 1",
            "84.",
            "x = 84",
            r"\boxed{84}",
            r"84 \text{ m}",
            "84 s",
        ],
        ["85", "83", "-84", "840", "8.4", "48", "84.5", "84, 85", "84^2", "84e1", ""],
    ),
    "negative integer": (
        "-6",
        ["-6.0", "-12/2", r"-\sqrt{36}", "2 - 8"],
        ["6", "-5", "-7", "-60", "-6, 6", r"\pm 6"],
    ),
    "thousands": (
        r"\$12,\!450",
        ["12450", "12,450", r"\$12450", "12450.00"],
        ["12", "450", "12451"],
    ),
    "decimal": (
        "0.0375",
        ["0.03750", r"\frac{3}{80}", "3/80", r"3.75 \times 10^{-2}", "3.75e-2", ".0375"],
        ["0.0374", "0.0376", "-0.0375", "0.375", "0.00375", "375", r"\frac{80}{3}"],
    ),
    "decimal with a bare point": ("-5./2", ["-2.5", r"-\frac{5}{2}", "-5/2"], ["-5", "5/2", "-2"]),
    "fraction": (
        r"\frac{14}{33}",
        ["14/33", r"\dfrac{28}{66}", "0.424242", r"\frac{14}{3 \cdot 11}", r"\tfrac{14}{33}"],
        [r"\frac{33}{14}", r"-\frac{14}{33}", r"\frac{15}{33}", r"\frac{14}{34}", "0.42", "14"],
    ),
    "mixed number": (r"3\frac{1}{7}", [r"\frac{22}{7}", "22/7"], [r"\frac{3}{7}", "3", "3.14"]),
    "radical": (
        r"6\sqrt{35}",
        [r"\sqrt{1260}", r"\sqrt{36 \cdot 35}", r"2 \cdot 3\sqrt{35}", r"\frac{210}{\sqrt{35}}"],
        [r"6\sqrt{34}", r"5\sqrt{35}", r"-6\sqrt{35}", r"6 \cdot 35", r"\sqrt{35}", "35.4"],
    ),
    "multiple of pi": (
        r"9\pi",
        [r"9 \cdot \pi", r"\frac{18\pi}{2}", r"4\pi + 5\pi"],
        [r"8\pi", r"\frac{9}{\pi}", "9", "28", r"-9\pi", r"9\pi^2"],
    ),
    "angle": (r"65^\circ", ["65", r"65^{\circ}", r"65 \text{ degrees}"], ["66", "56", "-65"]),
    "e-notation": (
        "6.25e14",
        [r"6.25 \times 10^{14}", r"6.25 \cdot 10^{14}", "6.25*10^14", "6.25E14", "6.25e+14"]
        + ["625000000000000", "625,000,000,000,000", "62.5e13", "6.25*10**14", r"x = 6.25e14"]
        + [r"6.25\times10^{14}\text{ Hz}", r"\frac{5}{8} \times 10^{15}", "0.625e15", "6.250e14"],
        ["6.25e15", "6.25e13", "6.26e14", "-6.25e14", "6.25e-14", "6.25", "87.5 e", "6.25 e 14"]
        + [r"6.25 \times e^{14}", "6.25^14", "625000000000001", r"6.25 \times 10 + 14"],
    ),
    "small e-notation": (
        "7.5e-13",
        [r"7.5 \times 10^{-13}", "7.5E-13", "7.50e-13", "0.00000000000075", r"\frac{75}{10^{14}}"]
        + ["7.5*10^-13", r"7.5 \times 10^-13", "x = 7.5e-13", r"7.5\cdot10^{-13}\text{ m}"],
        ["7.4e-13", "7.6e-13", "7.5e-12", "7.5e-14", "-7.5e-13", "0", "7.5e13", "x = 7.4e-13"],
    ),
    "tuple": (
        "(4,-1,9)",
        ["(4, -1, 9)", r"\left(4,-1,9\right)", r"(\frac{8}{2}, -1, 9.0)"],
        ["(4,9,-1)", "(-1,4,9)", "(4,-1,8)", "(4,-1)", "(4,-1,9,9)", "(-4,1,-9)", "4"],
    ),
    "pair": (
        r"\left(\frac{2}{7}, 5\right)",
        [r"(\frac{2}{7},5)", "(2/7, 5)", r"\left(\frac{4}{14},5\right)"],
        [r"(5, \frac{2}{7})", r"(\frac{2}{7}, 6)", r"(\frac{3}{7}, 5)", r"[\frac{2}{7}, 5]"],
    ),
    "interval": (
        "(1,6]",
        ["(1, 6]", r"\left(1,6\right]", r"(\frac{2}{2}, 6]"],
        ["[1,6)", "(1,6)", "[1,6]", "(1,7]", "(2,6]", "(-1,6]", "6"],
    ),
    "unbounded interval": (
        r"(-\infty, 4) \cup (7, \infty)",
        [r"(-\infty,4)\cup(7,\infty)", r"(7, \infty) \cup (-\infty, 4)"],
        [
            r"(-\infty, 4] \cup [7, \infty)",
            r"(-\infty, 4)",
            "(4, 7)",
            r"(-\infty, 5) \cup (7, \infty)",
        ],
    ),
    "set": (
        r"\{2 \pm \sqrt{3}, 5\}",
        [r"\{5, 2 + \sqrt{3}, 2 - \sqrt{3}\}", r"\{2 - \sqrt{3}, 5, 2 + \sqrt{3}\}"],
        [r"\{2 \pm \sqrt{3}\}", r"\{2 \pm \sqrt{5}, 3\}", r"\{2 \pm \sqrt{3}, -5\}", "5"],
    ),
    "list": ("3,-8", ["-8, 3", "3, -8", r"\{3,-8\}"], ["-3, 8", "3", "3, 8", "3, -8, 0", "3, -7"]),
    "two roots": (
        r"2 \pm 3\sqrt{7}",
        [r"2 + 3\sqrt{7}, 2 - 3\sqrt{7}", r"2 \pm \sqrt{63}"],
        [r"2 + 3\sqrt{7}", r"3 \pm 2\sqrt{7}", r"-2 \pm 3\sqrt{7}", "2"],
    ),
    "matrix": (
        r"\begin{pmatrix} 2/3 \\ -7 \end{pmatrix}",
        [
            r"\begin{pmatrix} \frac{2}{3} \\ -7 \end{pmatrix}",
            r"\begin{bmatrix} 2/3 \\ -7 \end{bmatrix}",
        ],
        [r"\begin{pmatrix} -7 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} 2/3 \\ 7 \end{pmatrix}"],
    ),
    "complex number": (
        "3 - 4i",
        ["3-4i", "-4i + 3", "3 - 4 i", r"\frac{25}{3+4i}"],
        ["3 + 4i", "4 - 3i", "-3 + 4i", "3 - 4", "5", "3 - 5i"],
    ),
    "polynomial": (
        "5n^2 - 3n + 2",
        ["2 - 3n + 5n^2", "5n^{2}-3n+2", "n(5n-3)+2", "5*n**2 - 3*n + 2"],
        ["5n^2 + 3n + 2", "5n^2 - 3n + 1", "5n^3 - 3n + 2", "5m^2 - 3m + 2", "5n - 3n + 2", "4"],
    ),
    "variable at the end": (
        r"\frac{1}{k} t",
        [r"\frac{t}{k}", "t/k", r"t \cdot k^{-1}", r"\frac{2t}{2k}"],
        [r"\frac{1}{k}", r"\frac{k}{t}", "t k", r"\frac{t}{k} + 1", r"-\frac{t}{k}"],
    ),
    "exponential": (
        r"\frac{e^{3 t}}{7}+C_{1} e^{-t}",
        [r"C_1 e^{-t} + \frac{1}{7} e^{3t}", r"\frac{1}{7}\exp(3t) + C_{1} \exp(-t)"],
        [
            r"\frac{e^{3 t}}{7}",
            r"\frac{e^{-3 t}}{7}+C_{1} e^{-t}",
            r"\frac{e^{3 t}}{8}+C_{1} e^{-t}",
        ],
    ),
    "Euler's number": (
        "11 e",
        ["11e", r"11 \cdot e", r"\frac{22e}{2}", "e + 10e"],
        ["11e1", "110", "11", "12e", "1e11", "11e^2", "-11e"],
    ),
    "energies": (
        r"\frac{2}{5} E_{1}+\frac{3}{5} E_{2}",
        [r"\frac{2E_1 + 3E_2}{5}", r"0.4 E_{1} + 0.6 E_{2}"],
        [r"\frac{3}{5} E_{1}+\frac{2}{5} E_{2}", r"\frac{2}{5} E_{1}", r"E_{1}+E_{2}", "1", "E_2"],
    ),
    "Lorentz factor": (
        r"m c^{2}(\gamma-1)",
        [r"(\gamma - 1) m c^2", r"\gamma m c^2 - m c^2"],
        [r"m c^{2}(\gamma+1)", r"m c^{2} \gamma", r"m c^{2}(\gamma^2-1)", r"m c^2"],
    ),
    "equation": (
        "y = 3x - 4",
        ["y=3x-4", "y = -4 + 3x", "3x - 4 = y", "3x - 4"],
        ["y = 3x + 4", "y = 4x - 3", "y = -3x - 4", "x = 3y - 4", "3", "y"],
    ),
    "assignment": ("k=13", ["13", "k = 13", "k = 26/2"], ["12", "k = 14", "k = -13", "k"]),
    "differential equation": (
        r"\frac{d u}{d s}=3 u-b",
        [r"\frac{du}{ds} = 3u - b", r"3u - b = \frac{du}{ds}", r"\frac{du}{ds} - 3u = -b"],
        [r"\frac{d u}{d s}=3 u+b", r"\frac{d u}{d s}=u-3b", r"\frac{d s}{d u}=3 u-b", "3"],
    ),
    "text": (
        r"\text{Priya}",
        [r"\text{Priya}", r"\text{ Priya }", r"\mathrm{Priya}"],
        [r"\text{Ravi}", r"\text{Priy}", "7", r"\text{Priya and Ravi}", ""],
    ),
    "choice": (r"\text{(C)}", ["C", r"\text{C}", "(C)"], ["B", r"\text{(D)}", "CC", "3"]),
}


@pytest.fixture(scope="module")
def verifier():
    made = Verifier()
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_of_every_kind_are_accepted_and_near_misses_refused(verifier, kind):
    gold, right, wrong = KINDS[kind]
    assert disagreements(verifier, [(gold, [gold, *right], wrong)]) == []


def disagreements(verifier, families):
    """(gold, answer, what it should be) of every answer that got another verdict."""
    asked = [
        (gold, answer, expected)
        for gold, right, wrong in families
        for answers, expected in ((right, True), (wrong, False))
        for answer in answers
    ]
    verdicts = verifier.verify_answers([g for g, *_ in asked], [a for _, a, _ in asked])
    pairs = zip(asked, verdicts, strict=True)
    return [case for case, verdict in pairs if verdict.correct is not case[2]]
