"""The curves of a run as a PNG. Needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .._base.picture import COLORS, FAINT, INK, save_png


def draw(records: list[dict[str, Any]], path: Path, what: str) -> None:
    """Bits per byte by step: the loss of each step, and of held-out text."""
    steps = [(r["step"], r["loss"] / math.log(2)) for r in records if "loss" in r]
    held_out = [(r["step"], r["held_out_bits"]) for r in records if "held_out_bits" in r]
    figure = Figure(figsize=(7, 4), dpi=200, facecolor="white")
    axes = figure.add_axes((0.085, 0.19, 0.87, 0.67))
    axes.plot(*_columns(steps), color=COLORS["store"], linewidth=0.8, label="training")
    axes.plot(*_columns(held_out), color=COLORS["reverse"], linewidth=2.2, marker="o", markersize=4, label="held-out")
    axes.set_xlabel("step", color=INK, fontsize=9.5)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.tick_params(labelsize=9, colors=INK)
    axes.legend(frameon=False, fontsize=9)
    figure.text(0.02, 0.93, "Bits per byte", color=INK, fontsize=11.5, weight="bold")
    figure.text(0.02, 0.02, what, color=FAINT, fontsize=7)
    save_png(figure, path)


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
