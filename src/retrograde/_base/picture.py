"""What all pictures share: colors, and how they are written. Needs matplotlib, and is imported where one is drawn."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from .report import beside

COLORS = {"store": "#8a8f98", "checkpoint": "#d97706", "reverse": "#1d4ed8", "budget": "#0f766e"}
FAMILIES = {"ordinary": COLORS["store"], "partition": "#7c3aed", "checkpoint": COLORS["checkpoint"], "reverse": COLORS["reverse"]}
FAMILIES |= {
    "overlap": "#60a5fa",
    "store-half": "#0891b2",
    "budget": COLORS["budget"],
    "compile": FAMILIES["partition"],
    "bits": "#be185d",
}
INK, FAINT = "#1f2328", "#6b7280"


def color_of(policy: str) -> str:
    """By name, or by what the name begins with."""
    return COLORS.get(policy) or next((color for start, color in FAMILIES.items() if policy.startswith(start)), INK)


def save_png(figure: Figure, path: Path) -> None:
    """As a PNG, or as an SVG or a PDF if the path says so."""
    kind = path.suffix.lower().removeprefix(".")
    if kind in ("svg", "pdf"):
        with beside(path) as part:
            figure.savefig(part, format=kind)
        return
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    with beside(path) as part:
        picture.quantize(64).save(part, format="png", optimize=True)  # few colors make a small file
