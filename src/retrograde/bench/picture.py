"""Memory against depth as a picture, a line for each policy. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .._base.picture import FAINT, INK, color_of, save_png
from .._base.report import size
from .report import Report, Row

FEW = 6  # lines that have room for large labels


def draw(report: Report, path: Path) -> None:
    """A PNG of 1400 × 800 pixels that reads well at half of that."""
    if not report.rows:
        raise ValueError("nothing to draw: the report has no rows")
    figure = Figure(figsize=(7, 4), dpi=200, facecolor="white")
    lines = _lines(report)
    axes = figure.add_axes((0.085, 0.215, 0.70 if len(lines) <= FEW else 0.62, 0.65))
    peak = max(row.activation_bytes for row in report.rows)
    unit, name = (2**30, "GiB") if peak >= 2**30 else (2**20, "MiB")
    for policy, rows in lines.items():
        xs, ys = [row.depth for row in rows], [row.activation_bytes / unit for row in rows]
        dashes = "--" if policy.endswith(("-compiled", "-fullgraph")) else "-"
        style = {"color": color_of(policy), "linewidth": 2.4 if len(lines) <= FEW else 1.4, "linestyle": dashes}
        axes.plot(xs, ys, **style, marker="o", markersize=5, clip_on=False, zorder=3)
    _clean(axes, sorted({row.depth for row in report.rows}), peak / unit)
    _label(axes, {policy: rows[-1] for policy, rows in lines.items()}, unit)
    what = "activations" if report.setting["grads"] == "kept" else "activations and gradients"
    figure.text(0.02, 0.93, f"Peak memory of a training step: {what}, {name}", color=INK, fontsize=11.5, weight="bold")
    of_what = report.setting.get("block") or "attention and MLP"
    axes.set_xlabel(f"depth, in blocks of {of_what}", color=INK, fontsize=9.5)
    figure.text(0.02, 0.02, f"{report.what()}\n{report.where()}", color=FAINT, fontsize=7, linespacing=1.4)
    save_png(figure, path)


def _lines(report: Report) -> dict[str, list[Row]]:
    policies = dict.fromkeys(row.policy for row in report.rows)
    return {name: sorted((row for row in report.rows if row.policy == name), key=lambda row: row.depth) for name in policies}


def _clean(axes: Axes, depths: list[int], top: float) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9.5, length=0, pad=6)
    axes.set_xticks(depths)
    axes.set_xlim(0, depths[-1])
    axes.set_ylim(0, top * 1.05)


def _label(axes: Axes, ends: dict[str, Row], unit: int) -> None:
    """The policy and its last figure at the end of each line, moved up where two would touch."""
    many = len(ends) > FEW
    lowest, gap = 0.0, axes.get_ylim()[1] * (0.047 if many else 0.135)
    for policy, row in sorted(ends.items(), key=lambda end: end[1].activation_bytes):
        y = max(row.activation_bytes / unit, lowest)
        lowest = y + gap
        text = f"{policy}{' ' if many else chr(10)}{size(row.activation_bytes)}"
        style = {"color": color_of(policy), "fontsize": 6.5 if many else 10, "weight": "bold", "va": "center"}
        axes.annotate(text, (row.depth, y), xytext=(9, 0), textcoords="offset points", annotation_clip=False, **style)
