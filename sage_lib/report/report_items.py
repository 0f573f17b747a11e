"""Every figure and table of the exploration report: where this companion measures the same, or why
it does not.

``shows`` is what the item shows in the report. An artefact is a figure or a measured table by its
name in the metadata of the notebook that makes it. "In part" and "reported only" say what is left
out, and why. An item that needs the methods of a family is measured as far as these are evaluated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from sage_lib.experiment.profile import Profile
from sage_lib.report.exact_tables import evaluated

HERE, PART, REPORTED = "measured here", "measured in part", "reported only"
#: Of hyperparameters, which are set and not measured.
SETTINGS = "set in the profiles"
COLUMNS = ["item", "shows", "state", "notebook", "artefacts", "why"]


@dataclass(frozen=True)
class Item:
    """A figure, a panel or a table of the exploration report."""

    item: str  # "Figure 1a", "Table 3"
    shows: str
    state: str
    made: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (notebook's number, artefacts)
    why: str = ""
    families: tuple[str, ...] = ()  # of methods, without which there is nothing of it

    def state_of(self, profile: Profile) -> str:
        """Its state with what a profile has evaluated: "not run yet" where that is no method of its
        families, and how many where it is a part of them."""
        needed = {key for key, one in profile.methods.items() if one.family in self.families}
        there = needed & evaluated(profile)
        if not self.families or (needed and there == needed):
            return self.state
        if not there:
            return "not run yet"
        return f"{self.state}: {len(there)} of {len(needed)} methods run"


ITEMS = (
    Item(
        "Figure 1a",
        "pass@k of base, SFT and RL",
        HERE,
        (("17", ("sft_rl_figure1", "sft_rl_arms.csv", "sft_rl_statements.csv")),),
    ),
    Item(
        "Figure 1b",
        "answer diversity of base, SFT and RL",
        HERE,
        (("17", ("sft_rl_figure1",)), ("12", ("exploration",))),
    ),
    Item(
        "Figure 1c",
        "Venn diagram of unsolvable problems",
        HERE,
        (
            ("17", ("sft_rl_unsolvable", "sft_rl_unsolvable.csv")),
            ("12", ("unsolvable_venn", "unsolvable_upset")),
        ),
    ),
    Item(
        "Figure 1d",
        "rollout branching factor",
        HERE,
        (("17", ("sft_rl_figure1",)), ("12", ("exploration",))),
    ),
    Item(
        "Figure 2",
        "pass@k with a code interpreter",
        REPORTED,
        why="needs an interpreter in the loop; the small models here call no tools, and the report "
        "prints no numbers",
    ),
    Item(
        "Figure 3a",
        "entropy and accuracy along training, two stages",
        HERE,
        (("14", ("entropy_stages", "entropy_stages.csv", "entropy_law", "entropy_law.csv")),),
    ),
    Item(
        "Figure 3b",
        "tokens that lose entropy or become frequent",
        PART,
        (("14", ("entropy_tokens", "entropy_statements.csv")),),
        "by kind of token: a vocabulary of 120 words has no rare words to list",
    ),
    Item(
        "Figure 3c",
        "entropy of positive and negative samples, where it falls fastest",
        HERE,
        (("14", ("entropy_stages", "entropy_tokens", "entropy_statements.csv")),),
    ),
    Item(
        "Figure 3d",
        "responses with quality issues along training",
        PART,
        (("10", ("table2.csv",)),),
        "of final policies: the defects need saved text, which runs do not keep of every step",
    ),
    Item(
        "Figure 4a",
        "changes of token probability by an update, positive and negative samples",
        HERE,
        (("14", ("entropy_tokens", "entropy_statements.csv")),),
    ),
    Item(
        "Figure 4b",
        "entropy of the tokens that an update moves",
        HERE,
        (("14", ("entropy_tokens", "entropy_statements.csv")), ("12", ("token_updates",))),
    ),
    Item(
        "Figure 5a",
        "perplexity of the samples of the largest updates",
        PART,
        (("14", ("entropy_statements.csv",)),),
        "the statement, not the histogram",
    ),
    Item(
        "Figure 5b",
        "accuracy after replacing a token, low and high perplexity",
        HERE,
        (("15", ("token_impact", "token_impact.csv", "token_impact_statements.csv")),),
    ),
    Item(
        "Figure 5c",
        "accuracy where low or high perplexity is favoured",
        HERE,
        (("18", ("shaping_training", "shaping_differences", "shaping_claims.csv")),),
        families=("shapers",),
    ),
    Item(
        "Figure 5d",
        "entropy where low or high perplexity is favoured",
        HERE,
        (("18", ("shaping_training", "shaping_differences", "shaping_claims.csv")),),
        families=("shapers",),
    ),
    Item(
        "Figure 6a",
        "entropy by position in the response",
        HERE,
        (("14", ("entropy_tokens", "entropy_statements.csv")),),
    ),
    Item(
        "Figure 6b",
        "accuracy after replacing a token, early and late",
        HERE,
        (("15", ("token_impact", "token_impact.csv", "token_impact_statements.csv")),),
    ),
    Item(
        "Figure 6c",
        "accuracy under positional bonuses at gamma 1",
        HERE,
        (("18", ("shaping_training", "shaping_differences", "shaping_claims.csv")),),
        families=("shapers",),
    ),
    Item(
        "Figure 6d",
        "entropy under positional bonuses at gamma 1",
        HERE,
        (("18", ("shaping_training", "shaping_differences", "shaping_claims.csv")),),
        families=("shapers",),
    ),
    Item(
        "Figure 7",
        "accuracy along training, GRPO and both methods",
        HERE,
        (("18", ("shaping_training",)),),
        families=("shapers",),
    ),
    Item(
        "Figure 8",
        "entropy along training, GRPO and both methods",
        HERE,
        (("18", ("shaping_training", "shaping_claims.csv")),),
        families=("shapers",),
    ),
    Item(
        "Table 1",
        "examples of token categories",
        PART,
        (("14", ("entropy_tokens", "entropy_statements.csv")),),
        "countdown has formal tokens and markers, no words; notebook 10 counts the categories",
    ),
    Item(
        "Table 2",
        "methods that enhance exploration, and their metrics",
        PART,
        (("19", ("rivals.csv", "rivals_claims.csv", "rivals_front")),),
        "trained and measured but for tool augmentation, which needs an interpreter in the loop",
        families=("rivals",),
    ),
    Item(
        "Table 3",
        "rejection-sampling fine-tuning, by selection",
        HERE,
        (("16", ("rft_by_samples", "rft_front", "rft_comparisons.csv", "rft_claims.csv")),),
        families=("rft",),
    ),
    Item(
        "Table 4",
        "avg@8 and maj@8 of GRPO and both methods",
        PART,
        (("18", ("shaping.csv", "shaping_differences")), ("12", ("votes.csv",))),
        "exact pass@1 in the place of avg@8; maj@k of 32 samples of a part of the problems",
        families=("shapers",),
    ),
    Item(
        "Table 5",
        "response length and token counts of GRPO and both methods",
        PART,
        (("18", ("shaping.csv", "shaping_lengths.csv")),),
        "a valid completion's length follows from the number of digits, and so do its tokens",
        families=("shapers",),
    ),
    Item(
        "Table 6",
        "pass@8 of GRPO and both methods",
        HERE,
        (("18", ("shaping.csv", "shaping_claims.csv", "shaping_differences")),),
        "exact pass@256 of the held-out problems, not of GPQA and HumanEval",
        families=("shapers",),
    ),
    Item(
        "Tables 7-9",
        "one question, an answer of each method",
        REPORTED,
        why="a worked countdown answer has one form; notebook 10 shows answers side by side",
    ),
)


def page(profile: Profile, items: Sequence[Item] = ITEMS) -> pd.DataFrame:
    """The items as a table, with their state in a profile's results: columns :data:`COLUMNS`."""
    rows = []
    for one in items:
        numbers = ", ".join(number for number, _ in one.made)
        names = "; ".join(", ".join(artefacts) for _, artefacts in one.made)
        rows.append((one.item, one.shows, one.state_of(profile), numbers, names, one.why))
    return pd.DataFrame(rows, columns=COLUMNS)
