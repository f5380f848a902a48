"""Predicted memory against depth, a line for each way. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .._base.picture import FAINT, INK, color_of, save_png
from .._base.report import size
from ..errors import BudgetTooSmall
from .plan import Plan
from .predict import Planner, ways_of

NEAR = 0.06  # of the height: labels that are nearer would touch
FAR = 2.5  # times the memory


def draw(plan: Plan, planner: Planner, path: Path) -> None:
    """A PNG of 1400 × 800 pixels that reads well at half of that."""
    s = plan.setting
    depths = sorted({max(1, round(s["depth"] * part / 8)) for part in range(1, 13)})
    lines: dict[str, list[tuple[int, int]]] = {}
    for way in ways_of(s):
        for depth in depths:
            try:
                lines.setdefault(way, []).append((depth, planner.at(way, (depth, s["seq"], s["batch"])).peak))
            except BudgetTooSmall:
                break
    highest = max(peak for line in lines.values() for _, peak in line)
    top = min(highest, FAR * s["memory"]) if s["memory"] else highest  # what is far beyond the memory need not be seen
    unit, name = (2**30, "GiB") if top >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(7, 4), dpi=200, facecolor="white")
    axes = figure.add_axes((0.085, 0.19, 0.68, 0.66))
    axes.set_xlim(0, depths[-1])
    axes.set_ylim(0, max(top, 1.2 * (s["memory"] or 0)) / unit * 1.05)
    for way, line in lines.items():
        xs, ys = [depth for depth, _ in line], [peak / unit for _, peak in line]
        axes.plot(xs, ys, color=color_of(way), linewidth=2.2)
    if s["memory"]:
        axes.axhline(s["memory"] / unit, color=FAINT, linewidth=1, linestyle=":")
        at = {"xytext": (2, 3), "textcoords": "offset points"}
        axes.annotate(f"{size(s['memory'])} of memory", (0, s["memory"] / unit), color=FAINT, fontsize=8, **at)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.tick_params(colors=INK, labelsize=9, length=0, pad=6)
    axes.set_xlabel("depth, in blocks", color=INK, fontsize=9.5)
    _label(axes, lines, unit)
    figure.text(0.02, 0.94, f"Predicted peak memory of training, all included, {name}", color=INK, fontsize=11.5, weight="bold")
    figure.text(0.02, 0.02, f"{plan.what()}\n{plan.held()}, at depth {s['depth']}", color=FAINT, fontsize=7, linespacing=1.4)
    save_png(figure, path)


def _label(axes: Axes, lines: dict[str, list[tuple[int, int]]], unit: int) -> None:
    """At the end of each line, or where it leaves the picture."""
    top = axes.get_ylim()[1]
    beside = 0.0
    for way, line in sorted(lines.items(), key=lambda pair: pair[1][-1][1]):
        style = {
            "color": color_of(way),
            "fontsize": 8.5,
            "weight": "bold",
            "annotation_clip": False,
            "textcoords": "offset points",
        }
        depth, peak = line[-1]
        if peak / unit <= top:
            y = max(peak / unit, beside)
            beside = y + NEAR * top
            axes.annotate(f"{way} {size(peak)}", (depth, y), xytext=(8, 0), va="center", **style)
        else:
            x = next(depth for depth, peak in line if peak / unit > top)
            axes.annotate(way, (x, top), xytext=(0, 3), ha="center", va="bottom", **style)
