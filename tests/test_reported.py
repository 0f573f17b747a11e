"""Reported numbers: averages recomputed, and every table read again from the papers' text; what
fidelity.csv says, as far as it can be checked here.

The second needs SAGE_PAPERS: a folder with text copies of the papers (*.txt, the title first).
"""

import os
import re
import shutil
from fractions import Fraction
from pathlib import Path

import pytest

from sage_lib.errors import SageError
from sage_lib.paths import ROOT
from sage_lib.report import reported

CELLS = {
    "sage_table1": 56,
    "sage_table2": 9,
    "sage_table3": 40,
    "sage_table4": 24,
    "sage_table5": 9,
    "sage_table6": 18,
    "sage_table9": 6,
    "report_table3": 34,
    "report_table4": 80,
    "report_table5": 12,
    "report_table6": 56,
}
HALF_UNIT = {
    "sage_table1": 0.0005,
    "sage_table3": 0.0005,
    "sage_table4": 0.0005,
    "report_table4": 0.005,
    "report_table6": 0.005,
}


def printed(table):
    """{(row, dataset, metric): (mean, std)} as text, so that decimals count."""
    return {
        tuple(line[1:4]): tuple(line[4:6])
        for line in reported._as_printed(table).itertuples(index=False)
    }


# --- what the files hold --------------------------------------------------------------------------


def test_every_table_is_whole():
    assert {t: len(reported.load(t)) for t in reported.tables()} == CELLS


def test_numbers_come_as_floats_and_a_missing_std_as_nan():
    frame = reported.load("sage_table1")
    assert list(frame.columns) == reported.COLUMNS
    assert (frame["mean"].dtype, frame["std"].dtype) == (float, float)
    assert (frame["std"].isna() == (frame["dataset"] == "Avg")).all()
    line = frame[
        (frame["row"] == "GRPO + Branch")
        & (frame["dataset"] == "AMC23")
        & (frame["metric"] == "pass@1")
    ]
    assert line[["mean", "std"]].values.tolist() == [[0.465, 0.063]]


def test_shares_lie_between_0_and_1_and_percents_between_0_and_100():
    for table in set(CELLS) - {"sage_table5", "report_table5"}:
        assert (
            reported.load(table)["mean"].between(0, 1 if table.startswith("sage") else 100).all()
        ), table


def test_the_base_row_of_table_3_repeats_table_1():
    one, three = (
        {k: v for k, v in printed(t).items() if k[0] == "Base Model"}
        for t in ("sage_table1", "sage_table3")
    )
    assert len(one) == 8 and one == three


def test_reported_and_measured_share_no_file():
    names = {p.name for p in reported.REPORTED.glob("*.csv")}
    assert not names & {p.name for p in (ROOT / "data" / "published").rglob("*")}


# --- averages -------------------------------------------------------------------------------------


def test_rounding_explains_every_printed_average():
    for table in reported.tables():
        assert reported.printed_average_mismatches(table).empty, table


def test_averages_that_are_not_the_rounded_mean_of_their_row_as_printed():
    found = {
        (t, m.row, m.metric): (m.printed, round(m.recomputed, 4))
        for t, half in HALF_UNIT.items()
        for m in reported.printed_average_mismatches(t, half).itertuples()
    }
    assert found == {
        ("sage_table1", "GRPO w/o KL", "pass@1"): (0.258, 0.2573),
        ("sage_table1", "GRPO + Token", "pass@256"): (0.718, 0.7187),
        ("sage_table1", "GRPO + Branch", "pass@1"): (0.284, 0.2833),
        ("sage_table3", "DAPO (no KL)", "pass@1"): (0.264, 0.2633),
    }


def counts(mean, total):
    """The whole numbers n for which n / total prints as ``mean`` with three decimals.

    An exact half may have been rounded either way.
    """
    return [
        n for n in range(total + 1) if abs(Fraction(n, total) - Fraction(mean)) <= Fraction(1, 2000)
    ]


@pytest.mark.parametrize(
    ("table", "seeds"),
    [("sage_table1", 5), ("sage_table3", 5), ("sage_table4", 5), ("sage_table6", 3)],
)
def test_printed_shares_are_counts_of_problems_over_the_seeds(table, seeds):
    problems = {"AIME": 60, "AMC23": 40, "MATH-500": 134}
    exact = {}
    for (row, dataset, metric), (mean, _) in printed(table).items():
        if dataset == "Avg":
            # The average of the exact shares, rounded, is the average printed: the four above
            # were averaged before rounding.
            assert abs(sum(exact[row, metric]) / 3 - Fraction(mean)) <= Fraction(1, 2000), (
                row,
                metric,
            )
        else:
            [n] = counts(mean, seeds * problems[dataset])
            exact.setdefault((row, metric), []).append(Fraction(n, seeds * problems[dataset]))


def test_three_seeds_do_not_fit_table_1():
    amc = [
        mean for (_, dataset, _), (mean, _) in printed("sage_table1").items() if dataset == "AMC23"
    ]
    assert [bool(counts(mean, 3 * 40)) for mean in amc].count(True) == 2 and len(amc) == 14


# --- planted faults -------------------------------------------------------------------------------


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """The tables in a folder where they may be damaged.

    copies(table, old, new) replaces the one occurrence of old.
    """
    shutil.copytree(reported.REPORTED, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(reported, "REPORTED", tmp_path)

    def damage(table, old, new):
        path = tmp_path / f"{table}.csv"
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1
        path.write_text(text.replace(old, new), encoding="utf-8")

    return damage


@pytest.mark.parametrize(
    ("table", "old", "new", "metric"),
    [
        (
            "sage_table1",
            "GRPO + Branch,AMC23,pass@1,0.465",
            "GRPO + Branch,AMC23,pass@1,0.456",
            "pass@1",
        ),
        ("sage_table4", "GRPO,Avg,pass@64,0.771", "GRPO,Avg,pass@64,0.717", "pass@64"),
        (
            "report_table6",
            "Qwen2.5-7B / GRPO,HumanEval,pass@4,22.10",
            "Qwen2.5-7B / GRPO,HumanEval,pass@4,21.20",
            "pass@k",
        ),
    ],
)
def test_a_mistyped_cell_shows_in_its_average(copies, table, old, new, metric):
    copies(table, old, new)
    found = reported.printed_average_mismatches(table)
    assert [(m.row, m.metric) for m in found.itertuples()] == [(old.split(",")[0], metric)]


def test_fewer_printed_decimals_widen_the_bound(copies):
    # 0.28 stands for 0.275 to 0.285, so it may be further from 0.28333 than 0.280 may.
    copies("sage_table1", "GRPO + Branch,Avg,pass@1,0.284", "GRPO + Branch,Avg,pass@1,0.280")
    assert reported.printed_average_mismatches("sage_table1")["tolerance"].tolist() == [0.001]
    copies("sage_table1", "GRPO + Branch,Avg,pass@1,0.280", "GRPO + Branch,Avg,pass@1,0.28")
    assert reported.printed_average_mismatches("sage_table1").empty


def test_an_average_of_nothing_is_refused(copies):
    copies("sage_table1", "GRPO,Avg,pass@1,", "GRPO,Avg,pass@2,")
    with pytest.raises(SageError, match=r"sage_table1\.csv, line 16: .*pass@2"):
        reported.printed_average_mismatches("sage_table1")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("metric,mean,std", "metric,mean", "line 1: the columns"),
        ("GRPO,Minerva,pass@1,0.170,0.005", "GRPO,Minerva,pass@1,0.170", "line 4: 5 cells"),
    ],
)
def test_a_missing_column_or_cell_is_refused(copies, old, new, message):
    copies("sage_table9", old, new)
    with pytest.raises(SageError, match=f"sage_table9.csv, {message}"):
        reported.load("sage_table9")


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            "sage_table9,Base Model,Minerva,pass@1,0.170,0.005",
            "Base Model / Minerva / pass@1 is on line 2 already",
        ),
        ("sage_table9,GRPO,Minerva,pass@1,high,0.005", "mean is 'high'"),
        ("sage_table9,GRPO,Minerva,pass@1,,0.005", "mean is ''"),
        ("sage_table9,GRPO,Minerva,pass@1,nan,0.005", "mean is 'nan'"),
        ("sage_table9,GRPO,Minerva,pass@1,0.170,/", "std is '/'"),
        ("sage_table9,GRPO,,pass@1,0.170,0.005", "must not be empty"),
        ("sage_table1,GRPO,Minerva,pass@1,0.170,0.005", "the table is called 'sage_table1'"),
    ],
)
def test_a_damaged_line_is_refused_by_file_and_line(copies, new, message):
    copies("sage_table9", "sage_table9,GRPO,Minerva,pass@1,0.170,0.005", new)
    with pytest.raises(SageError, match=f"sage_table9.csv, line 4: .*{re.escape(message)}"):
        reported.load("sage_table9")


def test_an_empty_file_is_refused(copies):
    (reported.REPORTED / "sage_table9.csv").write_text("")
    with pytest.raises(SageError, match="line 1: the columns"):
        reported.load("sage_table9")


@pytest.mark.parametrize("name", ["table99", "../reported/sage_table1", "fidelity", ""])
def test_an_unknown_table_names_the_known_ones(name):
    with pytest.raises(SageError, match=r"report_table3, .*, sage_table9"):
        reported.load(name)


# --- paper, code, here ----------------------------------------------------------------------------


def test_the_fidelity_table_is_no_table_of_numbers():
    frame = reported.fidelity()
    assert list(frame.columns) == ["setting", "paper", "code", "here", "why"]
    assert frame["setting"].is_unique and "fidelity" not in reported.tables()
    asked = [
        "RL: rollouts a step",
        "evaluation: top-p",
        "evaluation: min-p",
        "evaluation: top-k",
        "RL: anchor",
        "RL: schedule of the learning rate",
        "RL: reward",
        "SFT: text that is learned",
        "prompt: question in evaluation",
        "method: BNPO",
        "RL: dynamic sampling",
        "evaluation: pass@1",
        "formulas: Theorem 4.3",
    ]
    assert set(asked) <= set(frame["setting"])


def test_values_are_read_out_of_the_column_here():
    here = "rl.beta = 0.05; seeds = [1, 2]; the rest, as a = b in words; rl.optim = adamw_8bit"
    found = reported.stated_values(here)
    assert found == {"rl.beta": "0.05", "seeds": "[1, 2]", "rl.optim": "adamw_8bit"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("setting,paper,code", "setting,code,paper", "the columns must be"),
        ("SFT: packing,nothing,", "SFT: packing,,", "paper is empty"),
        ("SFT: packing,nothing,", "SFT: packing,", "4 cells"),
        ("RL: top-k,", "SFT: packing,", "SFT: packing is on line [0-9]+ already"),
        ("rl.beta = 0.05", "rl.optim = 0.05", "rl.optim is on line [0-9]+ already"),
        ("train_config.yaml:44,", "its config,", "names no file"),
        ("chosen: a hub name", "ours: a hub name", "why begins with 'ours'"),
        ("chosen: a hub name", "paper: a hub name", "paper and code both say nothing"),
        ("neither: SFT teaches", "chosen: SFT teaches", "paper and code both say nothing"),
        ("sft.packing = false,code", "sft.packing = false,paper", "but paper says nothing"),
    ],
)
def test_a_damaged_line_of_the_fidelity_table_is_refused(copies, old, new, message):
    copies("fidelity", old, new)
    with pytest.raises(SageError, match=rf"fidelity\.csv, line [0-9]+: .*{message}"):
        reported.fidelity()


def test_the_authors_reward_overlooks_a_number_tight_between_the_markers():
    """What the table says of Math-Verify, asked as the authors' rewards.py asks it."""
    math_verify = pytest.importorskip("math_verify")

    def reward(text, gold):
        return int(math_verify.verify(math_verify.parse(gold), math_verify.parse(text)))

    tight = "We get 3. Then 4.<end_working_out><SOLUTION>9</SOLUTION>"
    assert [reward(tight, gold) for gold in ("9", "4")] == [0, 1]
    assert reward(tight.replace("9", " 9 "), "9") == 1
    [line] = [r for r in reported.fidelity().itertuples() if r.setting == "RL: reward"]
    assert "<SOLUTION>9</SOLUTION>" in line.code and "last number of the working" in line.code


# --- every table read again from the papers' text -------------------------------------------------

needs_papers = pytest.mark.skipif(
    "SAGE_PAPERS" not in os.environ,
    reason="SAGE_PAPERS is not set: name a folder with text copies of the two papers",
)


def lines_of(title):
    for path in Path(os.environ["SAGE_PAPERS"]).glob("*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines and lines[0].startswith(title):
            return lines
    raise AssertionError(f"no text in SAGE_PAPERS starts with {title!r}")


def sage_rows(header, nth=0):
    """Cells of the nth table whose first line starts with ``header``, without separators."""
    lines = lines_of("SAGE: Shaping Anchors")
    start = [i for i, line in enumerate(lines) if line.startswith(header)][nth]
    rows = []
    for i in range(start, len(lines)):
        next_table = i > start and i + 1 < len(lines) and lines[i + 1].startswith("|---")
        if not lines[i].startswith("|") or next_table:
            return rows
        if not lines[i].startswith("|---"):
            rows.append([cell.strip() for cell in lines[i].strip("|").split("|")])


def mean_and_std(cell):
    """ "0.0330.024" and "0.057 0.035" hold two numbers of three decimals, "0.227" one."""
    mean, std = [*re.findall(r"\d\.\d{3}", cell), ""][:2]
    assert mean + std == cell.replace(" ", ""), cell
    return mean, std


def sage_wide(nth):
    """Tables 1, 3 and 4: two metrics under each data set."""
    header, metrics, *rows = sage_rows("| Algorithm | AIME |", nth)
    columns = [(header[1 + i // 2], metric.lower()) for i, metric in enumerate(metrics[:8])]
    return {
        (row[0], *column): mean_and_std(cell)
        for row in rows
        if row[1]
        for column, cell in zip(columns, row[1:], strict=True)
    }


def sage_table2():
    header, *rows = sage_rows("| Reasoning Pattern |")
    return {
        (model, "AIME", f"pattern frequency: {row[0].lower()}"): (cell, "")
        for row in rows
        for model, cell in zip(header[1:], row[1:], strict=True)
    }


def sage_table5():
    header, *rows = sage_rows("| Algorithm | Early |")
    return {
        (row[0], "DAPO-Math-17K", f"gradient norm, {stage.lower()}"): (cell, "")
        for row in rows
        for stage, cell in zip(header[1:], row[1:], strict=True)
    }


def sage_table6():
    rows = sage_rows("| Hyperparameters | AMC23 |")[2:]
    return {
        (f"threshold={threshold}, ratio={ratio}", "AMC23", metric): (cell, "")
        for threshold, ratio, *cells in rows
        for metric, cell in zip(("pass@1", "pass@256"), cells, strict=True)
    }


def sage_table9():
    header, *rows = sage_rows("| Algorithm | Pass@1 |")
    return {
        (row[0], "Minerva", metric.lower()): mean_and_std(cell)
        for row in rows
        for metric, cell in zip(header[1:], row[1:], strict=True)
    }


def report_table(number, columns):
    """Tab-separated lines after the caption; a line with a label alone opens a model's block."""
    lines = lines_of("From Trial-and-Error")
    start = next(i for i, line in enumerate(lines) if line.startswith(f"Table {number}:")) + 2
    block, found = "", {}
    for line in lines[start:]:
        if "\t" not in line:
            return found
        label, *cells = re.sub("</?u>", "", line).split("\t")
        if not any(cells):
            block = f"{label} / " if label.startswith("Qwen") else ""
        elif re.fullmatch(r"[\d./\t]+", "\t".join(cells)) and len(cells) == len(columns):
            found |= {
                (block + label, *column): (cell, "")
                for column, cell in zip(columns, cells, strict=True)
                if cell != "/"
            }


def pairs(datasets, metrics):
    return [(dataset, metric) for dataset in datasets for metric in metrics]


IN_THE_TEXT = {
    "sage_table1": lambda: sage_wide(0),
    "sage_table2": sage_table2,
    "sage_table3": lambda: sage_wide(1),
    "sage_table4": lambda: sage_wide(2),
    "sage_table5": sage_table5,
    "sage_table6": sage_table6,
    "sage_table9": sage_table9,
    "report_table3": lambda: report_table(
        3, pairs(["AIME24", "AMC23", "Minerva"], ["pass@1", "pass@k"])
    ),
    "report_table4": lambda: report_table(
        4, pairs(["AIME24", "AIME25", "AMC23", "MATH500", "Avg"], ["avg@8", "maj@8"])
    ),
    "report_table5": lambda: report_table(
        5,
        pairs(
            ["all test sets"],
            [
                "mean length (tokens)",
                "formal reasoning tokens",
                "logical structuring tokens",
                "metacognitive reasoning tokens",
            ],
        ),
    ),
    "report_table6": lambda: report_table(
        6,
        [
            ("GPQA", "pass@8"),
            ("HumanEval", "pass@4"),
            *pairs(["AIME24", "AIME25", "AMC23", "MATH500"], ["pass@8"]),
            ("Avg", "pass@k"),
        ],
    ),
}


@needs_papers
@pytest.mark.parametrize("table", CELLS)
def test_every_cell_is_what_the_text_prints(table):
    assert printed(table) == IN_THE_TEXT[table]()


@needs_papers
@pytest.mark.parametrize(
    ("old", "new"),
    [("0.172,0.002", "0.127,0.002"), ("0.172,0.002", "0.172,0.020"), ("0.170,0.005", "0.17,0.005")],
)
def test_a_mistyped_cell_differs_from_the_text(copies, old, new):
    copies("sage_table9", old, new)
    assert printed("sage_table9") != sage_table9()


@needs_papers
def test_every_quotation_of_the_fidelity_table_is_in_the_text():
    text = " ".join(" ".join(lines_of("SAGE: Shaping Anchors")).split())
    quoted = [q for cell in reported.fidelity()["paper"] for q in re.findall(r'"([^"]+)"', cell)]
    assert len(quoted) > 50 and [q for q in quoted if q not in text] == []
