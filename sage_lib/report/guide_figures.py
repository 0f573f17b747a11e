"""Figures of the guides on real completions (notebook 04): measured traces in, a matplotlib Figure out."""

import html
from textwrap import shorten

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from sage_lib.algorithm.guides import HIGH, LOW, CosineSchedule, RandomGuide, TokenGuide
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import trace_run
from sage_lib.files import read_json
from sage_lib.report.figures import STYLE, WIDE, series

GUIDES = ("random", "token", "branch")
#: Tokens of a long completion that Figure 1 shows, around its most uncertain state.
SHOWN = 48


def trace(profile: Profile) -> dict:
    """The traced completion that is shown, as traces.measure wrote it."""
    return read_json(trace_run(profile).measured / "traces.json")


def signals(profile: Profile) -> dict:
    """Distributions of entropy and surprisal over all traced completions, and the branch guide's threshold and ratio."""
    return read_json(trace_run(profile).measured / "signals.json")


def figure1(profile: Profile) -> Figure:
    """Figure 1 from a real trace: the signals, q of each guide, and the shaped anchor q·pi_ref, token by token."""
    traced, branch = trace(profile), signals(profile)["branch"]
    tokens = traced["tokens"]
    centre = int(np.argmax([t["entropy"] for t in tokens]))
    start = max(0, min(centre - SHOWN // 2, len(tokens) - SHOWN))
    tokens = tokens[start : start + SHOWN]
    x = np.arange(len(tokens))

    def of(key: str) -> np.ndarray:
        return np.array([t[key] for t in tokens])

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            3, 1, figsize=(WIDE, 4.6), sharex=True, height_ratios=[1, 1.2, 1.2]
        )
        axes[0].bar(x, of("entropy"), color="0.7", width=0.8, label="entropy $H_t$")
        axes[0].plot(
            x,
            of("surprisal"),
            **{**series(1), "linestyle": "none"},
            label="surprisal of the sampled token",
        )
        axes[0].axhline(
            branch["threshold"],
            color="0.2",
            linestyle="--",
            linewidth=0.9,
            label=f"threshold {branch['threshold']:.2f}",
        )
        axes[0].set(ylabel="nats")
        for i, guide in enumerate(GUIDES):
            axes[1].plot(
                x,
                of(guide),
                drawstyle="steps-mid",
                **{**series(i + 1), "linewidth": 1},
                label=f"{guide} guide",
            )
        axes[1].set(ylabel="$q_t$", ylim=(LOW - 0.05, HIGH + 0.05))
        axes[2].bar(x, of("pi_ref"), color="0.8", width=0.8, label="$\\pi_{ref}$")
        axes[2].plot(
            x, of("pi"), color="black", marker="_", linestyle="none", markersize=6, label="$\\pi$"
        )
        for i, guide in enumerate(GUIDES):
            axes[2].plot(
                x,
                of(guide) * of("pi_ref"),
                **{**series(i + 1), "linestyle": "none"},
                label=f"$q\\,\\pi_{{ref}}$, {guide}",
            )
        axes[2].set(
            ylabel="probability of the sampled\ntoken ($q\\,\\pi_{ref}$ unnormalised)",
            xlabel="token",
        )
        axes[2].set_xticks(x, [_short(t["text"]) for t in tokens], rotation=90, fontsize=6)
        for axis in axes:
            axis.grid(axis="x", visible=False)
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.suptitle(
            f"{profile.name}: one completion of “{shorten(traced['problem'], 44, placeholder=' …')}”, {'correct' if traced['correct'] else 'not correct'}; guides at the start of a run",
            fontsize=8,
        )
    return figure


def _short(text: str) -> str:
    text = text.strip() or "·"
    return text if len(text) <= 12 else f"{text[:11]}…"


def schedules() -> Figure:
    """The cosine schedules of eq. 9 and 10 over a run."""
    progress = np.linspace(0, 1, 801)
    random, token = RandomGuide(), TokenGuide()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(WIDE, 2.1), sharex=True)
        _schedules(
            axes[0],
            progress,
            {"e: probability": random.probability, "s: scale of the noise": random.scale},
            "random guide (eq. 9)",
        )
        _schedules(
            axes[1],
            progress,
            {"a: amplitude": token.amplitude, "s: scale of the noise": token.scale},
            "token guide (eq. 10)",
        )
    return figure


def _schedules(
    axis: plt.Axes, progress: np.ndarray, lines: dict[str, CosineSchedule], title: str
) -> None:
    for i, (name, schedule) in enumerate(lines.items()):
        axis.plot(
            progress,
            [schedule(p) for p in progress],
            markevery=100,
            **series(i + 1),
            label=f"{name}, {schedule.high} to {schedule.low}",
        )
    axis.set(xlabel="share of the run", ylabel="value", title=title, ylim=(0, None))
    axis.legend(loc="upper right", framealpha=0.9, frameon=True)


def distributions(profile: Profile, thresholds: tuple[float, ...] = (0.8, 1.2, 2.0)) -> Figure:
    """Entropy and surprisal over all traced tokens, with the paper's thresholds (Table 6) and this profile's."""
    measured = signals(profile)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(WIDE, 2.4), sharey=True)
        for axis, key, name in (
            (axes[0], "entropy", "token entropy $H_t$ (nats)"),
            (axes[1], "surprisal", "surprisal of the sampled token (nats)"),
        ):
            counts, edges = (np.array(measured[key]["histogram"][k]) for k in ("counts", "edges"))
            axis.stairs(counts / counts.sum(), edges, fill=True, color="0.75")
            axis.set(xlabel=name, yscale="log", title=f"{measured[key]['tokens']:,} tokens")
        axes[0].set_ylabel("share of tokens")
        axes[0].axvline(
            measured["branch"]["threshold"],
            color="black",
            linewidth=1.2,
            label=f"this profile: {measured['branch']['threshold']:.2f}",
        )
        for i, value in enumerate(thresholds):
            axes[0].axvline(value, **{**series(i + 1), "marker": ""}, label=f"Table 6: {value}")
        figure.legend(loc="outside lower center", ncols=4)
    return figure


def coloured(profile: Profile, guide: str) -> str:
    """The traced completion as HTML, each token on a background by q: orange above 1, blue below, the number on hover."""
    parts = []
    for t in trace(profile)["tokens"]:
        q = t[guide]
        strength = (q - 1) / (HIGH - 1) if q > 1 else (1 - q) / (1 - LOW)
        colour = f"rgba({'222,143,5' if q > 1 else '1,115,178'},{0.75 * strength:.2f})"
        parts.append(
            f'<span title="q = {q:.3f}, H = {t["entropy"]:.2f} nats, pi_ref = {t["pi_ref"]:.3f}" style="background:{colour};padding:1px 2px;margin:1px;font-family:monospace">{html.escape(t["text"].strip() or "·")}</span>'
        )
    return f'<div style="line-height:1.9"><b>{guide}</b>: {" ".join(parts)}</div>'
