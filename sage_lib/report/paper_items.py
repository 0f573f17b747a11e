"""Every figure and table of the SAGE paper, as report_items has those of the exploration report."""

from sage_lib.report.report_items import HERE, PART, REPORTED, SETTINGS, Item

ITEMS = (
    Item("Figure 1", "how each guide reshapes an anchor", HERE, (("22", ("figure1",)),)),
    Item(
        "Figure 2",
        "training reward against test accuracy, with and without KL",
        HERE,
        (("08", ("figure2",)),),
    ),
    Item(
        "Figure 3",
        "pass@k by k and data set",
        HERE,
        (("08", ("figure3",)), ("23", ("exact_pass_at_k",))),
    ),
    Item(
        "Figure 4",
        "pass@k on Knights and Knaves, out of distribution",
        PART,
        (("09", ("figure4", "ood.csv")),),
        "the profile smollm reads the puzzles; countdown's vocabulary cannot hold them, and it is "
        "asked its own task in another word",
    ),
    Item("Figure 5", "reverse and forward KL on two modes", HERE, (("02", ("figure5",)),)),
    Item(
        "Figure 6",
        "full fine-tuning of smaller models",
        PART,
        (("21", ("training_{family}",)), ("20", ("settings_differences",))),
        "two models of under a million weights, not of 1.5 and 3 billion",
        families=("full",),
    ),
    Item("Figure 7", "perplexity of samples under the base", HERE, (("11", ("figure7",)),)),
    Item(
        "Table 1",
        "pass@1 and pass@256 of the base and six methods",
        HERE,
        (("08", ("table1.csv",)), ("23", ("exact.csv",))),
        families=("main",),
    ),
    Item(
        "Table 2",
        "reasoning patterns among correct solutions",
        PART,
        (("10", ("table2.csv",)),),
        "the profile smollm writes words, in few samples; countdown's work has none",
    ),
    Item(
        "Table 3",
        "BNPO and DAPO, without KL and with Branch",
        HERE,
        (("08", ("table1.csv",)), ("13", ("front.csv",))),
        families=("losses",),
    ),
    Item(
        "Table 4",
        "a distilled model that reasons at length",
        REPORTED,
        why="needs the distilled model of 7 billion parameters and 8,192 tokens an answer",
    ),
    Item("Table 5", "gradient norm early, mid and late", HERE, (("21", ("table5.csv",)),)),
    Item(
        "Table 6",
        "Branch's threshold by its ratio",
        HERE,
        (("13", ("front.csv",)),),
        "thresholds as quantiles of the base's entropies, which are small for a small vocabulary",
        families=("table6",),
    ),
    Item(
        "Tables 7, 8",
        "hyperparameters",
        SETTINGS,
        why="nothing to measure: the profile paper has them, and notebook 00 and the page Fidelity "
        "each with its source",
    ),
    Item(
        "Table 9",
        "Minerva",
        PART,
        (("09", ("ood.csv",)),),
        "the profile's own data outside Table 1 in Minerva's place",
    ),
    Item(
        "Appendix C",
        "the two-path example",
        HERE,
        (("01", ("two_path_tree", "two_path", "two_path_region")),),
    ),
    Item(
        "Appendix H",
        "one problem, three solutions",
        HERE,
        (("10", ("table2.csv",)),),
        "as text in the notebook, not as a file",
    ),
)
