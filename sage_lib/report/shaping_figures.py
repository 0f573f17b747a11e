"""What the exploration report's shaped advantages weigh: its eq. 8 and 11, from the formulas."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from scipy.special import expit

from sage_lib.report.style import STYLE, WIDE, describe, line, look

#: (direction d, shift n) -> whose look: as printed, and what the text describes, either way.
RAMPS = {
    (1, -0.5): "position_plateau_shift-0.5",
    (1, 0.5): "position_plus",
    (-1, 0.5): "position_minus",
}
SLOPE = 15.0  # m
#: Strengths of the shaping by perplexity: the report's, its opposite, and ten times it.
ALPHAS = {0.01: "ppl_positive", -0.01: "ppl_negative"}


def bonus(place: np.ndarray, direction: int, shift: float) -> np.ndarray:
    """Eq. 8 of the exploration report at gamma 1: sigmoid(d·m·(l - n)), ``place`` l from 0 to 1."""
    found: np.ndarray = expit(direction * SLOPE * (place - shift))
    return found


def weights() -> Figure:
    """Left the positional bonus by place in the completion, right the factor by log-perplexity."""
    place, w = np.linspace(0, 1, 201), np.linspace(-2, 2, 3)
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 2.9))
        for (direction, shift), key in RAMPS.items():
            name = f"d = {direction:+}, n = {shift:+}" + (" (as printed)" if shift < 0 else "")
            left.plot(place, bonus(place, direction, shift), label=name, **line(look(key)))
        left.set(xlabel="place $l$ in the completion", ylabel="$b_t/\\gamma$ (eq. 8)")
        for alpha, key in ALPHAS.items():
            name = f"$\\alpha$ = {alpha:g}"
            right.plot(w, 1 - alpha * w, label=name, **line(look(key)))
        right.set(xlabel="$w_{ppl}$, standard deviations in the group", ylabel="factor (eq. 11)")
        right.set_ylim(0.9, 1.1)
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25))
        right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25))
        describe(
            figure,
            "The exploration report's shaped advantages",
            f"From its formulas, slope {SLOPE:g}, gamma 1, nothing measured",
        )
    return figure
