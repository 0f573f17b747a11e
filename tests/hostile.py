"""Completions that try to hang, crash or cheat the verifier, each with the verdict it must get.

A case is (name, gold, completion, correct). Cases are made by rules: a new trick is one line.
"""

from collections.abc import Iterator

from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START, SYSTEM_PROMPT, WORK_END, WORK_START


def listed(text: str) -> list[str]:
    return text.split(" ~ ")


def answered(answer: str) -> str:
    return f"{WORK_START} work {WORK_END} {SOLUTION_START} {answer} {SOLUTION_END}"


def cases() -> Iterator[tuple[str, str, str, bool]]:
    def wrong(name: str, answer: str, gold: str = "7") -> tuple[str, str, str, bool]:
        return name, gold, answered(answer), False

    def right(name: str, answer: str, gold: str = "7") -> tuple[str, str, str, bool]:
        return name, gold, answered(answer), True

    # Numbers too large to hold.
    for base in (2, 9, 99):
        for depth in (3, 5, 9, 15):
            tower = "^{".join([str(base)] * depth) + "}" * (depth - 1)
            yield wrong(f"tower {base}^ x{depth}", tower)
            yield wrong(f"tower ** {base} x{depth}", "**".join([str(base)] * depth))
    for n in ("1000", "100000", "10000000", "999999999"):
        for name, text in {
            "factorial": "N!",
            "double factorial": "N!!",
            "nested factorial": "((N!)!)!",
            "binomial": r"\binom{N0}{N}",
            "power": "N^{N}",
            "root": r"\sqrt[N]{N}",
            "sum to": r"\sum_{i=1}^{N} i^{i}",
            "product to": r"\prod_{i=1}^{N} i",
            "integral": r"\int_0^{N} x^x dx",
            "limit": r"\lim_{x \to N} x^{x^x}",
            "log": r"\log_{N}(N!)",
            "modulus": r"3^{N^{N}} \mod 10",
            "huge denominator": r"\frac{1}{N!}",
            "exponent notation": "1eN",
            "derivative": r"\frac{d^{N}}{dx^{N}} x^{N}",
        }.items():
            yield wrong(f"{name} {n}", text.replace("N", n))
    # Broken pieces of arithmetic that hold the answer.
    for piece in listed("( 7 ~ 7 ) ~ 7 + ~ * 7 ~ 7 7 ~ ( 7 ) ) ~ 7 + +  ~ / 7 ~ 7 ^ ~ ( ( 3 + 4 )"):
        yield wrong(f"piece {piece}", piece)
    # Depth and length.
    for depth in (10, 40, 90, 150, 1000, 20000):
        yield wrong(f"parentheses {depth}", "(" * depth + "8" + ")" * depth)
        yield wrong(f"open parentheses {depth}", "(" * depth)
        yield wrong(f"brackets {depth}", "[" * depth + "]" * depth)
        yield wrong(f"braces {depth}", "{" * depth + "8" + "}" * depth)
        yield wrong(f"roots {depth}", r"\sqrt{" * depth + "2" + "}" * depth)
        yield wrong(f"fractions {depth}", r"\frac{1}{1+" * depth + "2" + "}" * depth)
        yield wrong(f"left right {depth}", r"\left(" * depth + "8" + r"\right)" * depth)
        yield wrong(f"minus signs {depth}", "-" * depth + "8")
        yield wrong(f"powers {depth}", "x" + "^2" * depth)
        yield wrong(f"sum of symbols {depth}", "+".join(f"x_{i}" for i in range(depth)))
        yield wrong(f"product of sums {depth}", "".join(f"(x+{i})" for i in range(depth)))
    for size in (401, 10_000, 1_000_000, 3_000_000):
        yield wrong(f"digits {size}", "7" * size)
        yield wrong(f"spaces then a number {size}", "8" + " " * size + "9")
        yield wrong(f"words {size}", "seven " * (size // 6))
        yield ("long work, right answer " + str(size), "7", "x" * size + answered("7"), True)
        yield ("long tail after the answer " + str(size), "7", answered("7") + "y" * size, True)
        yield (f"opening tags only {size}", "7", SOLUTION_START * (size // 10), False)
        yield (f"closing tags only {size}", "7", SOLUTION_END * (size // 11), False)
    # Many candidates: listing answers must not score.
    for count in (2, 3, 10, 50, 100, 1000, 5000):
        numbers = list(map(str, range(1, count + 7)))
        for glue in (", ", " or ", " and ", "; ", " ", "\n", " = ", r" \pm ", r" \text{ or } "):
            yield wrong(f"{count} integers by {glue!r}", glue.join(numbers))
        yield wrong(f"{count} boxes", " ".join(rf"\boxed{{{n}}}" for n in numbers))
        yield wrong(f"{count} in braces", r"\{" + ", ".join(numbers) + r"\}")
        yield wrong(f"interval to {count}", f"[1, {count + 6}]")
    # Tags.
    start, end = SOLUTION_START, SOLUTION_END
    for name, text in {
        "repeated tags, the last counts": answered("1") + answered("7"),
        "nested tags": f"{start}{start}7{end}{end}",
        "the prompt echoed, then an answer": SYSTEM_PROMPT + answered("7"),
        "half a tag at the end": answered("7") + "<SOLU",
        "an unfinished second answer": answered("7") + f"{start} 8",
    }.items():
        yield name, "7", text, True
    for name, text in {
        "repeated tags, the last is wrong": answered("7") + answered("1"),
        "nested tags around two numbers": f"{start}7{start}8{end}{end}",
        "tags the wrong way round": f"{end}7{start}",
        "no closing tag": f"{start} 7",
        "no opening tag": f"7 {end}",
        "lower-case tags": "<solution>7</solution>",
        "tags with spaces inside": "< SOLUTION >7</ SOLUTION >",
        "empty answer": answered(""),
        "only the work": f"{WORK_START} 7 {WORK_END}",
        "the prompt echoed": SYSTEM_PROMPT,
        "an answer, then the prompt echoed": answered("7") + SYSTEM_PROMPT,
    }.items():
        yield name, "7", text, False
    # Bytes and scripts.
    for code in (0, 1, 7, 8, 27, 127, 0x200B, 0x202E, 0xFEFF, 0xFFFD, 0xD7FF, 0x10FFFF):
        yield wrong(f"U+{code:04X} alone", chr(code))
        yield wrong(f"U+{code:04X} many", chr(code) * 300)
        yield wrong(f"U+{code:04X} around a wrong number", f"{chr(code)}8{chr(code)}")
        yield (f"U+{code:04X} in the work", "7", f"{chr(code) * 50}{answered('7')}", True)
    for zero in (0x0660, 0x06F0, 0x0966, 0x09E6, 0x0E50, 0xFF10, 0x1D7CE):
        yield wrong(f"digits from U+{zero:04X}, another number", chr(zero + 8))
        every = ", ".join(chr(zero + i) for i in range(10))
        yield wrong(f"digits from U+{zero:04X}, a list", every)
    for symbol in ("∞", "½", "⑦", "七", "Ⅷ", "🙂", "é̸̢", "\u0301" * 100):
        yield wrong(f"symbol {symbol[:2]}", symbol)
    # Code, and words that a careless parser would run.
    for code in listed(
        r"__import__('os').system('touch sage_hostile') ~ exec('1') ~ eval('7') ~ (lambda: 7)() ~ "
        r"open('secret.txt').read() ~ 7 if True else 8 ~ [7 for _ in range(10**9)] ~ "
        r"while True: pass ~ True ~ None ~ nan ~ inf ~ -inf ~ \infty ~ \text{seven} ~ "
        r"\def\a{\a\a}\a ~ \input{secret.txt} ~ \newcommand{\x}{7}\x ~ 7; drop table ~ "
        r"<script>7</script> ~ %s%s%s%n ~ x ~ x = x ~ gold ~ answer ~ the answer ~ 0 = 0 ~ 7 = 8 ~ "
        r"8 = 9 ~ 7 < x ~ x > 6 ~ x \neq 8 ~ 7, 7, 7, 8 ~ (7, 8) ~ [7, 8] ~ 7 \ldots 9 ~ ? ~ 7?8 ~ "
        r"7/0 ~ 0/0 ~ \frac{7}{0} ~ \sqrt{-1} ~ i ~ 7i ~ e^{i\pi} ~ -7 ~ 0.7 ~ 70 ~ 7.5"
    ):
        yield wrong(f"text {code[:24]}", code)
    # Powers of which Math-Verify reads the base or the exponent alone.
    for power in ("7**2", "7 ** 2", "7^-1", "2 ** 7", "x**7", "7e^-2t", "7e1000", "7e99999999999"):
        yield wrong(f"power {power}", power)
    # e-notation against Euler's number, and numbers of which six decimals are 0.
    for gold, answers in (
        ("3e8", ("24 e", "24e", "24 \\cdot e", "3 e 8", "3e 8", "3 e8", "3e^8", "3e^{8}", "3e8t")),
        ("3e8", ("3e9", "3.1e8", "-3e8", "3e-8", "3e8, 3e8, 1", "3^8", "3 \\times 10 + 8")),
        ("24 e", ("3e8", "24e1", "24", "1e24")),
        ("2e-12", ("0", "3e-12", "-2e-12", "x = 3e-12", "2e-13", "\\{2e-12, 0\\}")),
        ("0", ("2e-12", "10^{-9}", "10^-9", "\\frac{1}{10^{20}}", "x = 2e-12")),
        (r"\{2e-12, 5\}", (r"\{3e-12, 5\}", r"\{0, 5\}")),
        ("(2e-12, 5)", ("(3e-12, 5)", "(0, 5)", "(5, 2e-12)")),
    ):
        for answer in answers:
            yield wrong(f"gold {gold}: {answer}", answer, gold)
    # What is right must stay right beside all that.
    for gold, answers in (
        ("3e8", ("3e8", "3E8", "3.e8", "3e+8", "3e08", "0.3e9", "300,000,000", "3*10**8")),
        ("3e8", (r"3 \times 10^8", r"3\cdot10^{8}", "3*10^8", r"x = 3e8", r"3e8\text{ m/s}")),
        ("2e-12", ("2e-12", "0.000000000002", r"2 \times 10^-12", r"\frac{2}{10^{12}}", ".2e-11")),
        ("24 e", ("24e", r"24 \cdot e", r"\frac{48e}{2}", "3e \\cdot 8")),
        ("2e^x", ("2e^{x}", "2 e^x", r"\frac{4e^{x}}{2}")),
        ("3e", ("3 e", r"3 \cdot e^{1}")),
    ):
        for answer in answers:
            yield right(f"gold {gold}: {answer}", answer, gold)
    for answer in listed(
        r" 7  ~ 7 ~ 7.0 ~ 7. ~ +7 ~ 14/2 ~ \frac{14}{2} ~ (7) ~ 3+4 ~ 10 - 3 ~ 7 \cdot 1 ~ x = 7 ~ "
        r"\boxed{7} ~ $7$ ~ \sqrt{49} ~ 2^3 - 1 ~ 700\% ~ {{7*1}}"
    ):
        yield right(f"right: {answer}", answer)
