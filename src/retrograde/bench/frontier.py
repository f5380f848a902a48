"""A comparison as pictures: time against memory, memory against depth. Needs matplotlib."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

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
    _clean(axes, rows, unit)
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


def _clean(axes: Axes, rows: list[Found], unit: int) -> None:
    """Memory on a scale of ratios, as it differs by factors; room for names at the right."""
    memory, ms = zip(*map(place, rows), strict=True)
    axes.set_xscale("log")
    axes.set_xlim(min(memory) / unit / 1.15, max(memory) / unit * (max(memory) / min(memory)) ** 0.25 * 1.5)
    axes.set_ylim(min(ms) * 0.92, max(ms) * 1.06)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter("")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.grid(color="#eef0f2", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, labelsize=9, length=0, pad=6)


def _label(axes: Axes, rows: list[Found], unit: int) -> None:
    """The name beside each point, or as near as there is room, with a line to the point."""
    to_axes = axes.transData + axes.transAxes.inverted()
    points = {row.variant: tuple(to_axes.transform((place(row)[0] / unit, place(row)[1]))) for row in rows}
    taken = [(x - 0.008, x + 0.008, y) for x, y in points.values()]
    for name, (x, y) in sorted(points.items(), key=lambda point: point[1]):
        width = 0.0105 * len(name)
        near = [(dx, sign * i * 0.012) for i in range(60) for sign in (1, -1) for dx in (0.014, 0.05, -0.014 - width)]
        places = [(x + dx, y + dy) for dx, dy in near if 0.02 < y + dy < 1 and 0 < x + dx < 1 - width]
        free = (at for at in places if all(at[0] + width < a or at[0] > b or abs(at[1] - c) > 0.034 for a, b, c in taken))
        at = next(free, (x, y))
        taken.append((at[0], at[0] + width, at[1]))
        color = color_of(name)
        if abs(at[1] - y) > 0.01 or abs(at[0] - x) > 0.02:
            end = at[0] if at[0] > x else at[0] + width
            axes.plot((x, end), (y, at[1]), color=color, linewidth=0.5, alpha=0.5, transform=axes.transAxes, zorder=1)
        axes.text(*at, name, color=color, fontsize=7.5, va="center", transform=axes.transAxes)
