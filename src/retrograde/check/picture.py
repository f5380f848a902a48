"""Drift as a picture, on a logarithmic scale. Needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure() -> Figure:
    """1400 × 800 pixels."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"a plot needs matplotlib: pip install 'retrograde[cli]' ({error})") from error
    return Figure(figsize=(7, 4), dpi=200, facecolor="white")


def clean(axes: Axes, floor: float, top: float) -> None:
    """A logarithmic axis from `floor`, which stands for 0, to `top`."""
    from .._base.picture import FAINT, INK

    axes.set_yscale("log")
    axes.set_ylim(floor / 2, top)
    powers = range(math.ceil(math.log10(floor)) + 1, math.floor(math.log10(top)) + 1)
    powers = [p for p in powers if p % 2 == 0 or len(powers) < 6]
    axes.set_yticks([floor, *(10.0**p for p in powers)], ["0", *(f"$10^{{{p}}}$" for p in powers)])
    axes.minorticks_off()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8.5, length=0, pad=5)


def label_ends(axes: Axes, ends: dict[str, tuple[float, str]], x: float) -> None:
    """A name at the end of each line, moved up where two would touch."""
    low, high = (math.log10(y) for y in axes.get_ylim())
    lowest = -math.inf
    for name, (y, color) in sorted(ends.items(), key=lambda end: end[1][0]):
        lowest = max(math.log10(y), lowest + (high - low) * 0.055)
        axes.annotate(name, (x, 10**lowest), xytext=(7, 0), textcoords="offset points", color=color, fontsize=8, va="center")


def draw_updates(found: Any, path: Path) -> None:
    """Drift update by update: relative error of the recovered sources, and of the gradients of each update's parameters."""
    figure = new_figure()
    from .._base.picture import FAINT, INK, save_png

    lines = {
        "sources": ([row.relative for row in found.rows], "#1d4ed8"),
        "gradients": ([row.gradient for row in found.rows], "#d97706"),
    }
    positive = [y for ys, _ in lines.values() for y in ys if y and math.isfinite(y)]
    floor, top = (min(positive) / 30, max(positive) * 4) if positive else (1e-18, 1.0)
    axes = figure.add_axes((0.085, 0.215, 0.75, 0.65))
    clean(axes, floor, top)
    ends: dict[str, tuple[float, str]] = {}
    for name, (ys, color) in lines.items():
        known = [(x, y or floor) for x, y in enumerate(ys) if y is not None and math.isfinite(y)]
        if known:
            axes.plot(*zip(*known, strict=True), color=color, linewidth=2, marker="o", markersize=3, clip_on=False, zorder=3)
            ends[name] = known[0][1], color
    axes.set_xlim(max(len(found.rows) - 1, 1), 0)
    axes.set_xlabel("update, in the order of backward", color=INK, fontsize=9.5)
    label_ends(axes, ends, 0)
    figure.text(0.02, 0.93, "Relative error of what is recovered, update by update", color=INK, fontsize=11.5, weight="bold")
    said_error = "0" if not found.gradient_error else f"{found.gradient_error:.1e}"
    said = f"relative error of all gradients against memory='store': {said_error}"
    figure.text(0.02, 0.02, said, color=FAINT, fontsize=7)
    save_png(figure, path)
