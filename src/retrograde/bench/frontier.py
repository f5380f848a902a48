"""A comparison as pictures: time against memory, memory against depth. Needs matplotlib.

python -m retrograde.bench.frontier a.json b.json frontier.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from .._base.picture import FAINT, INK, color_of, save_png
from .compare import Comparison, Found
from .measure import Timing
from .picture import draw
from .report import Row

PROG = "python -m retrograde.bench.frontier"
RUN = ("depth", "rounds", "seed", "timeout", "variants", "profile")  # of a setting: what may differ from run to run


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
    line = [(memory / unit, ms) for memory, ms in map(place, best(rows))]  # goes right, then down
    axes.plot(*zip(*line, strict=True), color="#c4c8ce", linewidth=1.4, drawstyle="steps-post", zorder=2)
    for row in rows:
        memory, ms = place(row)
        hollow = row.variant.endswith(("-compiled", "-fullgraph")) or row.variant.startswith("partition")
        color = color_of(row.variant)
        axes.plot(memory / unit, ms, "o", color=color, markerfacecolor="white" if hollow else color, markersize=5, zorder=3)
    _clean(axes, rows, unit)
    _label(axes, rows, unit, line)
    title = f"A training step at depth {depth}: milliseconds against peak activations, {name}"
    figure.text(0.02, 0.94, title, color=INK, fontsize=11.5, weight="bold")
    figure.text(0.02, 0.02, f"{report.what()}\n{report.where()}", color=FAINT, fontsize=7, linespacing=1.4)
    save_png(figure, path)


def joined(reports: Sequence[Comparison]) -> Comparison:
    """Runs of one net on one machine as one run, of the depths that all of them have. Times are compared within a run: those of
    the others are scaled so that the ordinary net takes what it took in the first. What is in two of them is the first's."""
    first = reports[0]
    for other in reports[1:]:
        if differs := _differs(first, other):
            raise ValueError(f"{differs} differs: these are no runs of one net on one machine")
    paces = [_pace(report) for report in reports]
    depths = set.intersection(*map(set, paces))
    if not depths:
        raise ValueError("there is no depth at which all have the ordinary net, against which times are compared")
    rows: dict[tuple[int, str], Found] = {}
    for report, pace in zip(reports, paces, strict=True):
        for row in report.rows:
            if row.depth in depths and row.seconds:
                scale = paces[0][row.depth] / pace[row.depth]
                seconds = Timing(*(scale * t for t in vars(row.seconds).values()))
                rows.setdefault((row.depth, row.variant), replace(row, seconds=seconds))
    return replace(first, rows=list(rows.values()))


def _differs(a: Comparison, b: Comparison) -> str | None:
    """What two runs should share and do not."""
    kinds = [({**r.machine} | {k: v for k, v in r.setting.items() if k not in RUN}) for r in (a, b)]
    return next((name for name in kinds[0] | kinds[1] if kinds[0].get(name) != kinds[1].get(name)), None)


def _pace(report: Comparison) -> dict[int, float]:
    return {row.depth: row.seconds.median for row in report.rows if row.variant == "ordinary" and row.seconds}


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


def _label(axes: Axes, rows: list[Found], unit: int, line: Sequence[tuple[float, float]]) -> None:
    """The name beside each point, or as near as there is room, clear of the line; from afar with a thin line to the point."""
    to_axes = axes.transData + axes.transAxes.inverted()
    points = {row.variant: tuple(to_axes.transform((place(row)[0] / unit, place(row)[1]))) for row in rows}
    corners = [tuple(to_axes.transform(at)) for at in line]
    taken = [(x - 0.008, x + 0.008, y) for x, y in points.values()]
    taken += [(x, end, y) for (x, y), (end, _) in pairwise(corners)]
    taken += [(x, x, y + i * (top - y) / 20) for (_, top), (x, y) in pairwise(corners) for i in range(20)]
    for name, (x, y) in sorted(points.items(), key=lambda point: point[1]):
        width = 0.0105 * len(name)
        near = [(dx, sign * i * 0.012) for i in range(60) for sign in (1, -1) for dx in (0.014, 0.05, -0.014 - width)]
        places = [(x + dx, y + dy) for dx, dy in near if 0.02 < y + dy < 1 and 0 < x + dx < 1 - width]
        free = (at for at in places if all(at[0] + width < a or at[0] > b or abs(at[1] - c) > 0.034 for a, b, c in taken))
        at = next(free, (x, y))
        taken.append((at[0], at[0] + width, at[1]))
        color = color_of(name)
        if abs(at[1] - y) > 0.05 or abs(at[0] - x) > width + 0.02:
            end = at[0] if at[0] > x else at[0] + width
            axes.plot((x, end), (y, at[1]), color=color, linewidth=0.5, alpha=0.5, transform=axes.transAxes, zorder=1)
        axes.text(*at, name, color=color, fontsize=7.5, va="center", transform=axes.transAxes)


def main(argv: Sequence[str] | None = None) -> int:
    given = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    if len(given) < 2 or not given[-1].parent.is_dir():
        print(f"{PROG} REPORT... PICTURE: files of `retrograde bench --json`, and the picture to write", file=sys.stderr)
        return 2
    try:
        draw_frontier(joined([Comparison.load(path) for path in given[:-1]]), given[-1])
    except (OSError, ValueError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
