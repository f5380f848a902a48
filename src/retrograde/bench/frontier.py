"""A comparison as pictures: time against memory, memory against depth. Needs matplotlib."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .compare import Comparison, Found
from .picture import FAINT, INK, color_of, draw, save_png
from .report import Row


def draw_depth(report: Comparison, path: Path) -> None:
    """Memory against depth, one line for each variant."""
    draw(
        replace(
            report,
            setting={**report.setting, "grads": "kept"},
            rows=[
                Row(row.depth, row.variant, row.activation_bytes or 0, row.peak_bytes or 0, row.seconds)
                for row in report.rows
                if row.seconds
            ],
        ),
        path,
    )


def draw_frontier(report: Comparison, path: Path) -> None:
    """Time against memory at the largest depth: what is on the line has no other below and to the left of it."""
    depth = max(row.depth for row in report.rows if row.seconds)
    rows = sorted((row for row in report.rows if row.depth == depth and row.seconds), key=place)
    unit, name = (2**30, "GiB") if max(place(row)[0] for row in rows) >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(7, 4.6), dpi=200, facecolor="white")
    axes = figure.add_axes((0.085, 0.2, 0.885, 0.68))
    line = [(memory / unit, ms) for memory, ms in map(place, best(rows))]
    axes.plot(*zip(*line, strict=True), color="#c4c8ce", linewidth=1.4, drawstyle="steps-post", zorder=2)
    for row in rows:
        memory, ms = place(row)
        hollow = row.variant.endswith(("-compiled", "-fullgraph"))
        color = color_of(row.variant)
        axes.plot(memory / unit, ms, "o", color=color, markerfacecolor="white" if hollow else color, markersize=5, zorder=3)
    _clean(axes)
    _label(axes, rows, unit)
    title = f"A training step at depth {depth}: milliseconds against peak activations, {name}"
    figure.text(0.02, 0.94, title, color=INK, fontsize=11.5, weight="bold")
    figure.text(0.02, 0.02, f"{report.what()}\n{report.where()}", color=FAINT, fontsize=7, linespacing=1.4)
    save_png(figure, path)


def place(row: Found) -> tuple[float, float]:
    """Bytes and milliseconds."""
    return float(row.activation_bytes or 0), row.seconds.median * 1e3 if row.seconds else 0.0


def best(rows: list[Found]) -> list[Found]:
    """Those that no other beats in both, by memory."""
    kept: list[Found] = []
    for row in sorted(rows, key=place):
        if not kept or place(row)[1] < place(kept[-1])[1]:
            kept.append(row)
    return kept


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.grid(color="#eef0f2", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9, length=0, pad=6)
    low, high = axes.get_xlim()
    axes.set_xlim(0, high + 0.28 * (high - low))  # room for the names
    axes.set_ylim(0, axes.get_ylim()[1] * 1.06)


def _label(axes: Axes, rows: list[Found], unit: int) -> None:
    """The name beside each point, moved up where it would lie on another."""
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    taken: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: place(row)[1]):
        x, y = place(row)[0] / unit / right, place(row)[1] / top
        while any(abs(x - x0) < 0.24 and abs(y - y0) < 0.034 for x0, y0 in taken):
            y += 0.004
        taken.append((x, y))
        axes.text(x + 0.012, y, row.variant, color=color_of(row.variant), fontsize=7.5, va="center", transform=axes.transAxes)
