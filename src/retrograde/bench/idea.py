"""The idea as a drawing: two blocks forward with +=, and back with -=. Needs matplotlib.

python -m retrograde.bench.idea docs/idea.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .._base.picture import COLORS, FAINT, INK, save_png

PROG = "python -m retrograde.bench.idea"
UPDATES = ("f", "g", "f′", "g′")  # f and f′ change x1, the others x2
FORWARD, BACKWARD = COLORS["reverse"], COLORS["checkpoint"]
LEFT, STEP, X1, X2 = 0.8, 1.5, 1.0, 0.0
RIGHT = LEFT + STEP * (len(UPDATES) + 0.25)


def draw(path: Path) -> None:
    """A PNG of 1400 × 780 pixels."""
    figure = Figure(figsize=(7, 3.9), dpi=200, facecolor="white")
    for bottom, back in ((0.53, False), (0.03, True)):
        axes = figure.add_axes((0.02, bottom, 0.96, 0.44))
        axes.set_xlim(-0.3, RIGHT + 1.75)
        axes.set_ylim(-0.6, 1.85)
        axes.axis("off")
        _half(axes, back)
    save_png(figure, path)


def _half(axes: Axes, back: bool) -> None:
    color = BACKWARD if back else FORWARD
    title = "backward: the same list from the end, each function run once more" if back else "forward: nothing in between is kept"
    axes.text(-0.25, 1.62, title, color=INK, fontsize=10.5, weight="bold", va="center")
    for name, y in (("x1", X1), ("x2", X2)):
        start, end = (RIGHT, LEFT - 0.35) if back else (LEFT - 0.35, RIGHT)
        axes.annotate("", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": FAINT, "linewidth": 1.4})
        axes.text(LEFT - 0.5, y, name, color=INK, fontsize=10, ha="right", va="center")
        axes.text(RIGHT + 0.3, y, name, color="white", fontsize=10, weight="bold", ha="center", va="center", bbox=_box(FORWARD))
    kept = "kept: the\nfinal streams" if not back else "start here"
    axes.text(RIGHT + 0.68, 0.5, kept, color=FORWARD, fontsize=9, va="center", linespacing=1.3)
    for i, name in enumerate(UPDATES):
        _update(axes, LEFT + STEP * (i + 0.25), i % 2 == 0, name, "−" if back else "+", color)


def _update(axes: Axes, x: float, upward: bool, name: str, sign: str, color: str) -> None:
    """One function between the lines, and the sign at the stream that it changes."""
    source, target = (X2, X1) if upward else (X1, X2)
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 7}
    axes.annotate("", (x, target), (x, source), arrowprops=style)
    axes.plot([x], [source], marker="o", markersize=4, color=color, zorder=4)
    axes.text(x, 0.5, name, color=color, fontsize=10, ha="center", va="center", zorder=5, bbox=_box("white", color))
    axes.plot([x], [target], marker="o", markersize=13, markerfacecolor="white", markeredgecolor=color, zorder=4)
    axes.text(x, target - 0.015, sign, color=color, fontsize=12, ha="center", va="center", zorder=5)
    streams = ("x1", "x2") if upward else ("x2", "x1")
    text = f"{streams[0]} {'+' if sign == '+' else '-'}= {name}({streams[1]})"
    axes.text(x, -0.42, text, color=FAINT, fontsize=8.5, ha="center", va="center")


def _box(inside: str, edge: str | None = None) -> dict[str, object]:
    return {"boxstyle": "round,pad=0.35", "facecolor": inside, "edgecolor": edge or inside, "linewidth": 1.4}


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if len(given) != 1 or not Path(given[0]).parent.is_dir():
        print(f"{PROG} PATH: the picture to write, in a folder that exists", file=sys.stderr)
        return 2
    draw(Path(given[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
