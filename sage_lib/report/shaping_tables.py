"""The exploration report's shaped advantages (its eq. 7, 8, 11, 12) beside GRPO at the same beta.

The report trains models of 7B parameters on mathematics and counts samples; here pass@k is exact,
on countdown. Statements are claims of :mod:`verdict`, by its rule.
"""

import pandas as pd

from sage_lib.experiment import problems
from sage_lib.experiment.profile import Profile
from sage_lib.report import arm_tables, front_tables, reported, verdict
from sage_lib.report.claims import Claim, Comparison
from sage_lib.report.style import count
from sage_lib.tasks.countdown import Puzzle
from sage_lib.tasks.prompts import answer_turn
from sage_lib.tasks.table import task_of

FAMILY = "shapers"
#: What the report calls GRPO+POSITION: on its plateau, with n as printed, and with what the text
#: describes.
PLATEAU = {
    "n = -0.5 as printed": "position_plateau_shift-0.5",
    "n = +0.5": "position_plateau_shift0.5",
}
#: What the report's methods are called in its Table 4, and in its Table 6.
ROWS = {"GRPO+PPL": "GRPO+PPL", "GRPO+POSITION": "GRPO+LOCATION"}
LENGTHS = ["digits", "problems", "completions", "shortest", "longest"]
SEEDS = "more seeds"
#: Why nothing is said of lengths; :func:`lengths` shows it.
NO_ROOM = (
    "a task whose answers can be long or short: here a valid completion's length follows from the "
    "number of digits"
)


def _raised(metric: str, *methods: str, against: str = "grpo") -> tuple[Comparison, ...]:
    return tuple(Comparison(method, against, metric, "above") for method in methods)


#: What the report says of shaped advantages.
CLAIMS = (
    Claim(
        "PPL shaping beats GRPO",
        "4.4.2, Table 4",
        "favouring completions of low perplexity raises accuracy over GRPO",
        _raised("pass@1", "ppl_positive"),
        SEEDS,
    ),
    Claim(
        "PPL shaping, pass@k",
        "A.2, Table 6",
        "it raises pass@k over GRPO, too",
        _raised("pass@256", "ppl_positive"),
        SEEDS,
    ),
    *(
        Claim(
            f"position shaping beats GRPO, {n}",
            "4.4.2, Table 4",
            "a bonus for late tokens on the plateau raises accuracy over GRPO",
            _raised("pass@1", key),
            SEEDS,
        )
        for n, key in PLATEAU.items()
    ),
    *(
        Claim(
            f"position shaping, pass@k, {n}",
            "A.2, Table 6",
            "it raises pass@k over GRPO, too",
            _raised("pass@256", key),
            SEEDS,
        )
        for n, key in PLATEAU.items()
    ),
    Claim(
        "low PPL beats high PPL",
        "3.2.3, Figure 5c",
        "favouring low perplexity gains more accuracy than favouring high perplexity",
        _raised("pass@1", "ppl_positive", against="ppl_negative"),
        SEEDS,
    ),
    Claim(
        "high PPL raises entropy",
        "3.2.3, Figure 5d",
        "favouring high perplexity leads to the higher entropy",
        _raised("entropy", "ppl_negative", against="ppl_positive"),
        SEEDS,
    ),
    Claim(
        "late beats early and GRPO",
        "3.2.4, Figure 6c",
        "a bonus for late tokens gains more accuracy than one for early tokens, and than none",
        (
            *_raised("pass@1", "position_plus", against="position_minus"),
            *_raised("pass@1", "position_plus"),
        ),
        SEEDS,
    ),
    Claim(
        "either bonus raises entropy",
        "3.2.4, Figure 6d",
        "a positional bonus in either direction increases the policy's entropy",
        _raised("entropy", "position_plus", "position_minus"),
        SEEDS,
    ),
    *(
        Claim(
            f"entropy stays higher, {name}",
            "4.4.2, Figure 8",
            "the method keeps a higher entropy than GRPO late in training",
            _raised("entropy", key),
            SEEDS,
        )
        for name, key in {"PPL": "ppl_positive", **PLATEAU}.items()
    ),
    Claim(
        "longer responses",
        "4.4.2, Table 5",
        "both methods lead to longer responses than GRPO",
        (),
        NO_ROOM,
    ),
    Claim(
        "early bonus shortens",
        "3.2.4",
        "a bonus for early tokens leads to shorter responses than one for late tokens",
        (),
        NO_ROOM,
    ),
)


def lengths(profile: Profile) -> pd.DataFrame:
    """How many words the valid completions of the held-out problems have: columns :data:`LENGTHS`.

    By the number of a problem's digits, over all valid completions of all such problems. A word is
    a token of countdown's vocabulary, as long as it knows the number.
    """
    rows = []
    for problem in problems.listed_problems(profile, ood=False):
        if not isinstance(problem.detail, Puzzle):
            continue
        for _, working, answer in task_of(problem.task).completions(problem):
            text = answer_turn(f" {working} ", f" {answer} ").replace("><", "> <")
            digits = len(problem.detail.digits)
            rows.append((digits, f"{problem.dataset}/{problem.id}", len(text.split())))
    frame = pd.DataFrame(rows, columns=["digits", "problem", "words"])
    found = frame.groupby("digits").agg(
        problems=("problem", "nunique"),
        completions=("words", "size"),
        shortest=("words", "min"),
        longest=("words", "max"),
    )
    return found.reset_index()[LENGTHS]


def as_reported() -> pd.DataFrame:
    """What the report's Tables 4 and 6 print as averages, method minus GRPO, in percentage points.

    Columns row, metric (avg@8, maj@8, pass@k), and one for each of its models.
    """
    parts = []
    for name in ("report_table4", "report_table6"):
        frame = reported.load(name)
        frame = frame[frame["dataset"].isin(["Avg", "Avg."])]
        means = frame.set_index(["row", "metric"])["mean"]
        for (row, metric), mean in means.items():
            model, _, method = str(row).partition(" / ")
            if method in {*ROWS, *ROWS.values()}:
                gain = mean - means[f"{model} / GRPO", metric]
                parts.append((method, metric, model, gain))
    frame = pd.DataFrame(parts, columns=["row", "metric", "model", "gain"])
    wide = frame.pivot(index=["row", "metric"], columns="model", values="gain")
    return wide.loc[list(dict.fromkeys(zip(frame["row"], frame["metric"], strict=True)))]


def takeaways(profile: Profile, table: pd.DataFrame, claims: pd.DataFrame) -> list[str]:
    """What the tables say, in sentences that are filled in from them.

    ``table`` as :func:`arm_tables.table` gives it, ``claims`` as :func:`verdict.claims`.
    """
    lines = [line for line in [arm_tables.missing(profile, FAMILY)] if line]
    there = arm_tables.arms(profile, FAMILY)
    if there:
        same = arm_tables.at_common_seeds(profile, [profile.reference, *there])
        level = front_tables.points(same).set_index("method").loc[profile.reference]
        entropy = verdict.logged(same, "entropy")[profile.reference].mean()
        seeds = count(int(level["seeds"]), "seed")
        lines.append(
            f"{profile.label(profile.reference)} (their {seeds}): pass@1 "
            f"{level['pass@1']:.3f}, pass@256 {level['pass@256']:.3f}, entropy at the end "
            f"{entropy:.4f} nats"
        )
    for row in table[table["seeds"] > 0].to_dict("records"):
        seeds = count(int(row["seeds"]), "seed")
        lines.append(
            f"{profile.label(row['method'])} ({seeds}): pass@1 {row['pass@1']:.3f}, pass@256 "
            f"{row['pass@256']:.3f}, entropy at the end {row['entropy']:.4f} nats"
        )
    if few := arm_tables.few_seeds(profile, there):
        lines.append(few)
    for result, group in claims.groupby("outcome", sort=False):
        lines.append(f"{result}: {'; '.join(group['claim'])}")
    return lines
