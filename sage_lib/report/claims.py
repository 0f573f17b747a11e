"""What is claimed: by the paper, and by ourselves before the runs; the comparisons that ask it.

No result stands here. :mod:`verdict` computes from the measured files what comes of each claim.
"""

from dataclasses import dataclass

from sage_lib.experiment.profile import BASE
from sage_lib.report.front_tables import AXES

#: The share of a method's samples beyond the base's upper twentieth of perplexity.
TAIL = "perplexity tail"
#: Parts of the steps of a run.
THIRDS = ("first", "middle", "last")


@dataclass(frozen=True)
class Comparison:
    """``method`` minus ``against``; ``expects``: above, below, equal, not above or not below 0."""

    method: str
    against: str
    metric: str
    expects: str
    ood: bool = False


@dataclass(frozen=True)
class Claim:
    """What a source says, and the comparisons that would all have to come out so."""

    name: str
    source: str
    statement: str
    comparisons: tuple[Comparison, ...]
    settles: str  # what would settle it, where it cannot be told here
    table: str | None = None  # reported table with the same comparison, by labels


def _both(method: str, against: str, expects: str) -> tuple[Comparison, ...]:
    return tuple(Comparison(method, against, f"pass@{k}", expects) for k in AXES)


def _of_table6(threshold: float, clamp: float) -> str:
    """A method of Table 6 by its quantiles: where the guide starts, and where it reaches 1.4, the
    sooner the larger its ratio."""
    return f"grid_threshold_quantile{threshold}_clamp_quantile{clamp}"


#: What stands behind a claim's name where it is asked at the beta of the authors' code.
AT_THEIRS = ", beta 0.05"


def _of_table1(
    grpo: str, forward_kl: str, random: str, token: str, branch: str, suffix: str = ""
) -> tuple[Claim, ...]:
    """What the paper says of its Table 1, asked at one beta; the keys of the methods there."""
    return (
        Claim(
            f"both rise{suffix}",
            "Table 1",
            "GRPO + Branch raises pass@1 and pass@k together, over GRPO",
            _both(branch, grpo, "above"),
            "more seeds, or an anchor at which the guide changes more",
            "sage_table1",
        ),
        Claim(
            f"loses pass@k without KL{suffix}",
            "Table 1",
            "without KL, GRPO loses at pass@k",
            (Comparison("grpo_no_kl", grpo, "pass@256", "below"),),
            "more seeds, or more steps",
            "sage_table1",
        ),
        Claim(
            f"overfits without KL{suffix}",
            "Figure 2",
            "without KL the training reward rises and held-out pass@1 falls",
            (
                Comparison("grpo_no_kl", grpo, "reward", "above"),
                Comparison("grpo_no_kl", grpo, "pass@1", "below"),
            ),
            "more seeds, or more steps",
            "sage_table1",
        ),
        Claim(
            f"forward KL at high k only{suffix}",
            "Table 1, Appendix A.4",
            "GRPO + Forward KL gains at pass@k and not at pass@1",
            (
                Comparison(forward_kl, grpo, "pass@256", "above"),
                Comparison(forward_kl, grpo, "pass@1", "not above"),
            ),
            "more seeds",
            "sage_table1",
        ),
        Claim(
            f"Branch beats Random and Token{suffix}",
            "Table 1",
            "the structure of the guide matters",
            (*_both(branch, random, "above"), *_both(branch, token, "above")),
            "a task on which the three guides differ by more",
            "sage_table1",
        ),
        Claim(
            f"smaller gradients without KL{suffix}",
            "Table 5",
            "gradient norms are smaller without KL, all along",
            tuple(
                Comparison("grpo_no_kl", grpo, f"gradient norm, {third} third", "below")
                for third in THIRDS
            ),
            "more seeds",
        ),
    )


#: The paper's claims, those of its Table 1 at both betas, then what we expected ourselves.
CLAIMS = (
    *_of_table1("grpo", "grpo_forward_kl", "grpo_random", "grpo_token", "grpo_branch"),
    *_of_table1(
        *("grpo_front_beta0.05", "forward_kl_paper", "random_paper", "token_paper"),
        "branch_paper",
        AT_THEIRS,
    ),
    Claim(
        "repairs BNPO",
        "Table 3",
        "with Branch, and with the KL term that it needs, BNPO gains at pass@1 and pass@k",
        _both("bnpo_branch", "bnpo_no_kl", "above"),
        "more seeds",
        "sage_table3",
    ),
    Claim(
        "repairs DAPO",
        "Table 3",
        "with Branch, and with the KL term that it needs, DAPO gains at pass@1 and pass@k",
        _both("dapo_branch", "dapo_no_kl", "above"),
        "more seeds",
        "sage_table3",
    ),
    Claim(
        "larger ratio, lower pass@1",
        "Table 6, Appendix D",
        "at a fixed threshold a larger ratio lowers pass@1",
        tuple(
            Comparison(_of_table6(threshold, 0.98), _of_table6(threshold, 0.999), "pass@1", "below")
            for threshold in (0.8, 0.9, 0.95)
        ),
        "more seeds, or guides that differ by more",
    ),
    Claim(
        "higher threshold, higher pass@256",
        "Table 6, Appendix D",
        "with a large ratio a higher threshold raises pass@256 (here the ratio differs, too)",
        (Comparison(_of_table6(0.95, 0.98), _of_table6(0.8, 0.98), "pass@256", "above"),),
        "more seeds, or guides that differ by more",
    ),
    Claim(
        "out of distribution",
        "Figure 4",
        "GRPO + Branch keeps its gain out of distribution (here: a prompt's word is new)",
        tuple(Comparison("grpo_branch", "grpo", f"pass@{k}", "above", ood=True) for k in AXES),
        "more seeds, or another task",
    ),
    Claim(
        "contradiction patterns",
        "Table 2",
        "GRPO + Branch reasons by contradiction more often",
        (),
        "a policy that writes text: this task's work has no words",
    ),
    Claim(
        "perplexity tails",
        "Figure 7, Appendix J",
        "GRPO + Branch's samples have a heavier tail of perplexity under the base than GRPO's",
        (Comparison("grpo_branch", "grpo", TAIL, "above"),),
        "more samples of longer text",
    ),
    Claim(
        "both rise, strong guide",
        "ours: a guide that acts on more tokens than the paper's, and is at its bound on more",
        "strong Branch raises pass@1 and pass@k together, over GRPO",
        _both("branch_strong", "grpo", "above"),
        "more seeds",
    ),
    Claim(
        "P1",
        "prediction, from notebook 03",
        "under k3 strong Branch's pass@256 lies between GRPO's at beta and at 1.4 beta",
        (
            Comparison("branch_strong", "grpo", "pass@256", "not below"),
            Comparison("branch_strong", "grpo_front_beta1.4", "pass@256", "not above"),
        ),
        "more seeds",
    ),
    Claim(
        "P2",
        "prediction, from notebook 03",
        "under the corrected k3 strong Branch changes nothing that matters",
        _both("branch_corrected", "corrected_beta1.0", "equal"),
        "more seeds",
    ),
    Claim(
        "P3",
        "prediction",
        "a shuffled strong Branch equals strong Branch",
        _both("shuffled_branch", "branch_strong", "equal"),
        "more seeds",
    ),
    Claim(
        "P4",
        "prediction, from notebook 03",
        "GRPO (k3) and GRPO + exact forward KL are the same",
        _both("grpo_forward_kl", "grpo", "equal"),
        "more seeds",
    ),
    Claim(
        "P5",
        "prediction, from eq. 4",
        "under the sequence-level anchor strong Branch moves mass to rare correct completions",
        (Comparison("branch_sequence", "sequence_beta0.2", "rare mass", "above"),),
        "more seeds",
    ),
    Claim(
        "P6",
        "prediction",
        "a random reward brings nothing at pass@1",
        (Comparison("random_reward", BASE, "pass@1", "not above"),),
        "more seeds",
    ),
    Claim(
        "P7",
        "prediction, once Table 3's own arms were seen",
        "what Table 3's arms with Branch gain is the anchor's: without the guide they gain as much",
        (*_both("bnpo_branch", "bnpo", "equal"), *_both("dapo_branch", "dapo", "equal")),
        "more seeds",
    ),
)
