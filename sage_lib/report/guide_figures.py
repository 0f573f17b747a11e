"""Figures of the guides on real completions (notebook 22): measured traces in, a Figure out."""

from collections.abc import Mapping
from textwrap import shorten
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_lib.algorithm.guides import HIGH, LOW, CosineSchedule, RandomGuide, TokenGuide
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import TRACED
from sage_lib.report import measured, sliders
from sage_lib.report.style import COLOURS, STYLE, WIDE, count, describe, line, look, points, series

#: The guides of Figure 1, and the method whose look each has.
GUIDES = {guide: f"grpo_{guide}" for guide in TRACED}
#: What the guides are made from, of every traced token (nats).
SIGNALS = ("entropy", "surprisal")
#: A token whose q differs from 1 by less is not counted as moved.
MOVED = 0.01
#: Tokens of a long completion that Figure 1 shows, around its most uncertain state.
SHOWN = 48


def figure1(profile: Profile) -> Figure:
    """Figure 1 from a real trace: the signals, q, and the shaped anchor q·pi_ref, by token."""
    traced, threshold = measured.trace(profile), measured.signals(profile)["branch"]["threshold"]
    tokens = _around_the_most_uncertain(traced["tokens"])
    values = {key: np.array([token[key] for token in tokens]) for key in tokens[0] if key != "text"}
    x = np.arange(len(tokens))
    with plt.rc_context(STYLE):
        figure, (top, middle, bottom) = plt.subplots(
            3, 1, figsize=(WIDE, 4.6), sharex=True, height_ratios=[1, 1.2, 1.2]
        )
        _draw_signals(top, x, values, threshold)
        _draw_guides(middle, x, values)
        _draw_anchors(bottom, x, values)
        bottom.set_xlabel("token")
        bottom.set_xticks(x, [_short(token["text"]) for token in tokens], rotation=90, fontsize=6)
        for axis in (top, middle, bottom):
            axis.grid(axis="x", visible=False)
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        problem = shorten(traced["problem"], 44, placeholder=" …")
        verdict = "correct" if traced["correct"] else "not correct"
        if "valid" in traced:
            verdict += ", sound work" if traced["valid"] else ", work not sound"
        moved = [token for token in traced["tokens"] if abs(token["branch"] - 1) > MOVED]
        describe(
            figure,
            f"The branch guide moves {len(moved)} of {count(len(traced['tokens']), 'token')} by "
            f"more than {100 * MOVED:.0f} %",
            f"{profile.name}. One completion of “{problem}”, {verdict}",
            "guides at the start of a run",
        )
    return figure


def _around_the_most_uncertain(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    centre = int(np.argmax([token["entropy"] for token in tokens]))
    start = max(0, min(centre - SHOWN // 2, len(tokens) - SHOWN))
    return tokens[start : start + SHOWN]


def _draw_signals(
    axis: Axes, x: np.ndarray, values: Mapping[str, np.ndarray], threshold: float
) -> None:
    axis.bar(x, values["entropy"], color="0.7", width=0.8, label="entropy $H_t$")
    surprisal = {**points(series(1)), "color": COLOURS["blue"]}
    axis.plot(x, values["surprisal"], label="surprisal of the sampled token", **surprisal)
    name = f"threshold {threshold:.2f}"
    axis.axhline(threshold, color="0.2", linestyle="--", linewidth=0.9, label=name)
    axis.set(ylabel="nats")


def _draw_guides(axis: Axes, x: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
    for guide, method in GUIDES.items():
        chosen = {**look(method), "linewidth": 1}
        axis.plot(x, values[guide], drawstyle="steps-mid", label=f"{guide} guide", **chosen)
    axis.set(ylabel="$q_t$", ylim=(LOW - 0.05, HIGH + 0.05))


def _draw_anchors(axis: Axes, x: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
    axis.bar(x, values["pi_ref"], color="0.8", width=0.8, label="$\\pi_{ref}$")
    axis.plot(x, values["pi"], "_", color="black", markersize=6, label="$\\pi$")
    for guide, method in GUIDES.items():
        shaped = values[guide] * values["pi_ref"]
        axis.plot(x, shaped, label=f"$q\\,\\pi_{{ref}}$, {guide}", **points(look(method)))
    axis.set(ylabel="probability\n($q\\,\\pi_{ref}$ unnormalised)")


def _short(text: str) -> str:
    text = text.strip() or "·"
    return text if len(text) <= 12 else f"{text[:11]}…"


def schedules() -> Figure:
    """The cosine schedules of eq. 9 and 10 over a run, the same for every profile."""
    random, token = RandomGuide(), TokenGuide()
    noise = {"e: probability": random.probability, "s: scale of the noise": random.scale}
    weighted = {"a: amplitude": token.amplitude, "s: scale of the noise": token.scale}
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 2.4), sharex=True)
        _draw_schedules(left, noise)
        left.set_title("random guide (eq. 9)")
        _draw_schedules(right, weighted)
        right.set_title("token guide (eq. 10)")
    return figure


def _draw_schedules(axis: Axes, lines: Mapping[str, CosineSchedule]) -> None:
    progress = np.linspace(0, 1, 801)
    for i, (name, schedule) in enumerate(lines.items()):
        values = [schedule(share) for share in progress]
        label = f"{name}, {schedule.high} to {schedule.low}"
        axis.plot(progress, values, markevery=100, label=label, **series(i + 1))
    axis.set(xlabel="share of the run", ylabel="value", ylim=(0, None))
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28))


def distributions(profile: Profile, thresholds: tuple[float, ...] = (0.8, 1.2, 2.0)) -> Figure:
    """Entropy and surprisal of all traced tokens; the thresholds of Table 6 and of the profile."""
    traced = measured.signals(profile)
    own = traced["branch"]["threshold"]
    panels = {
        "entropy": "token entropy $H_t$ (nats)",
        "surprisal": "surprisal of the sampled token (nats)",
    }
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(WIDE, 2.4), sharey=True)
        for axis, (key, name) in zip(axes, panels.items(), strict=True):
            counts = np.array(traced[key]["histogram"]["counts"])
            edges = traced[key]["histogram"]["edges"]
            axis.stairs(counts / counts.sum(), edges, fill=True, color="0.75")
            axis.set(xlabel=name, yscale="log")
        axes[0].set_ylabel("share of tokens")
        axes[0].axvline(own, color="black", linewidth=1.2, label=f"this profile: {own:.2f}")
        for i, value in enumerate(thresholds):
            axes[0].axvline(value, label=f"Table 6: {value}", **line(series(i + 1)))
        figure.legend(loc="outside lower center", ncols=4)
        means = [f"{traced[key]['mean']:.3f} nats of {key}" for key in panels]
        describe(
            figure,
            f"A token has {' and '.join(means)} on average",
            f"{profile.name}. {traced['entropy']['tokens']:,} traced tokens, 1 seed",
            "8 completions a problem",
        )
    return figure


def coloured(profile: Profile) -> str:
    """The traced completion as HTML, a line for each signal and for each guide's q, and a slider
    over its tokens.

    Each token has a background: by :data:`SIGNALS` grey, the darker the larger, by :data:`GUIDES`
    orange above 1 and blue below. The numbers of the token that the slider, or a pointer, stands on
    are below; the slider starts at the most uncertain state.
    """
    tokens = measured.trace(profile)["tokens"]
    lines = {}
    for name in (*SIGNALS, *GUIDES):
        largest = max(token[name] for token in tokens)
        lines[name] = [(_word(token), _background(name, token[name], largest)) for token in tokens]
    numbers = [
        f"token {place} of {len(tokens)}, {_word(token)}: {_numbers(token)}"
        for place, token in enumerate(tokens, 1)
    ]
    start = int(np.argmax([token["entropy"] for token in tokens]))
    return sliders.text(lines, numbers, "token", start)


def _background(name: str, value: float, largest: float) -> str:
    """A colour: the further q is from 1 towards its clamp, or the nearer a signal is to its largest
    value, the stronger."""
    if name in SIGNALS:
        colour, strength = "110,110,110", value / largest if largest else 0.0
    elif value > 1:
        colour, strength = "222,143,5", (value - 1) / (HIGH - 1)
    else:
        colour, strength = "1,115,178", (1 - value) / (1 - LOW)
    return f"rgba({colour},{0.75 * strength:.2f})"


def _numbers(token: Mapping[str, Any]) -> str:
    q = ", ".join(f"q {guide} {token[guide]:.3f}" for guide in GUIDES)
    return (
        f"H = {token['entropy']:.2f} nats, surprisal = {token['surprisal']:.2f} nats, "
        f"pi_ref = {token['pi_ref']:.3f}, {q}"
    )


def _word(token: Mapping[str, Any]) -> str:
    return str(token["text"]).strip() or "·"
