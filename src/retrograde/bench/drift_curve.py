"""How drift grows with depth: gradients under memory="reverse" against memory="store", float arithmetic against exact.

python -m retrograde.bench.drift_curve --json drift.json
python -m retrograde.bench.drift_curve --from drift.json --plot drift.png
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import retrograde as rg
from retrograde._engine.run import instead
from retrograde.check.gradients import short
from retrograde.check.picture import clean, label_ends, new_figure

from .._base.report import counted, origin, save
from ..models.blocks import mlp
from .depth import Parser, counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROG = "python -m retrograde.bench.drift_curve"
WIDTH, BATCH, GAINS = 64, 32, (1, 2)
DEPTHS = [4, 8, 16, 32, 64, 128, 256]
SETTINGS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {  # dtype of the model and the input, dtype of autocast
    "float32": (torch.float32, None),
    "float32, bf16 autocast": (torch.float32, torch.bfloat16),
    "float32, fp16 autocast": (torch.float32, torch.float16),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
}
COLORS = dict(zip(SETTINGS, ("#8a8f98", "#1d4ed8", "#0f766e", "#7c3aed", "#d97706"), strict=True))


@dataclass
class Point:
    dtype: str
    gain: int
    depth: int  # blocks, of two functions each
    arithmetic: str
    error: float | None  # relative, of all gradients as one vector, against memory="store"; None where it is not finite
    streams: float | None = None  # the largest relative error of the recovered sources of an update, where it was measured


@dataclass
class Curve:
    machine: dict[str, Any]
    date: str
    command: str
    setting: dict[str, Any]
    rows: list[Point]

    @classmethod
    def load(cls, path: Path) -> Curve:
        """Raises OSError, or ValueError where the file holds something else."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(**found | {"rows": [Point(**row) for row in found["rows"]]})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not a report of this command ({type(error).__name__}: {error})") from error

    def where(self) -> str:
        return (
            f"{self.machine['device']}, {counted(self.machine['threads'], 'thread')}, torch {self.machine['torch']}, {self.date}"
        )

    def what(self) -> str:
        """The net, in a line."""
        s = self.setting
        if "function" in s:
            return f"MLP blocks of width {s['width']}, batch {s['batch']}"
        return f"{s['block'] or 'attention and an MLP'}, input {' × '.join(map(str, s['shape']))}"

    def lines(self, streams: bool = False) -> dict[tuple[str, int, str], dict[int, float | None]]:
        """{(dtype, gain, arithmetic): {depth: error}}, of the gradients or of the streams."""
        found: dict[tuple[str, int, str], dict[int, float | None]] = {}
        for row in self.rows:
            error = row.streams if streams else row.error
            found.setdefault((row.dtype, row.gain, row.arithmetic), {})[row.depth] = error
        return found

    def table(self) -> str:
        """In markdown, a line for each curve."""
        depths = sorted({row.depth for row in self.rows})
        texts = [["model", "gain", "arithmetic", *map(str, depths)], ["---"] * (3 + len(depths))]
        for (dtype, gain, arithmetic), errors in self.lines().items():
            texts.append([dtype, str(gain), arithmetic, *(short(errors.get(depth)) for depth in depths)])
        return "\n".join(f"| {' | '.join(line)} |" for line in texts)


def net_of(depth: int, gain: float) -> rg.ReversibleSequence:
    """Blocks of two MLPs, each with a norm in front; the last layer of each is scaled."""
    torch.manual_seed(0)
    net = rg.ReversibleSequence([(mlp(WIDTH), mlp(WIDTH)) for _ in range(depth)], merge="cat")
    with torch.no_grad():
        for block in net.blocks:
            for branch in (block.f, block.g):
                last: nn.Linear = branch[-1]  # type: ignore[index]
                last.weight.mul_(gain)
                last.bias.mul_(gain)
    return net


def error_of(net: rg.ReversibleSequence, autocast: torch.dtype | None, arithmetic: Any) -> float | None:
    """The relative error of all gradients under reverse, against store on the same arithmetic."""
    generator = torch.Generator().manual_seed(1)
    x, cotangent = (torch.randn(BATCH, n * WIDTH, generator=generator).to(next(net.parameters())) for n in (1, 2))
    net.arithmetic = arithmetic
    found: dict[str, list[torch.Tensor]] = {}
    for memory in ("store", "reverse"):
        net.memory = memory
        with instead(verify="off"), torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            y = net(x)
        found[memory] = [g.double() for g in torch.autograd.grad(y, list(net.parameters()), cotangent.to(y.dtype))]
    scale = math.hypot(*(float(g.norm()) for g in found["store"]))
    far = math.hypot(*(float((a - b).norm()) for a, b in zip(found["reverse"], found["store"], strict=True)))
    return far / scale if math.isfinite(far / scale) else None


def measure(depths: list[int], argv: Sequence[str], say: Callable[[str], object] = print) -> Curve:
    """All dtypes, gains, arithmetics and depths; `say` hears of each curve when it is done."""
    rows: list[Point] = []
    for name, (dtype, autocast) in SETTINGS.items():
        for gain in GAINS:
            nets = {depth: net_of(depth, gain).to(dtype) for depth in depths}
            for arithmetic in ("float", "exact"):
                made = [Point(name, gain, depth, arithmetic, error_of(net, autocast, arithmetic)) for depth, net in nets.items()]
                say(f"{name}, gain {gain}, {arithmetic}: " + "  ".join(f"{p.depth}: {short(p.error)}" for p in made))
                rows += made
    setting = {"width": WIDTH, "batch": BATCH, "function": "LayerNorm, Linear to 4 times the width, GELU, Linear"}
    return Curve(**origin("cpu", PROG, argv), setting=setting, rows=rows)


# -- pictures ----------------------------------------------------------------------------------------------------------


def draw_curve(curve: Curve, path: Path) -> None:
    """Gradient error against depth: a panel for each gain, a line for each dtype, and exact at the bottom."""
    figure = new_figure()
    from .._base.picture import FAINT, INK, save_png

    errors = [row.error for row in curve.rows if row.error]
    floor, top = min(errors, default=1e-9) / 30, max(*errors, 0.25, 0) * 4
    gains = sorted({row.gain for row in curve.rows})
    for i, gain in enumerate(gains):
        axes = figure.add_axes((0.075 + 0.47 * i, 0.2, 0.32 if len(gains) > 1 else 0.72, 0.62))
        clean(axes, floor, top)
        if len(gains) > 1:
            axes.set_title("usual gain" if gain == 1 else f"{gain} times that gain", color=INK, fontsize=9.5, loc="left")
        if i:
            axes.tick_params(labelleft=False)
        _panel(axes, {key: points for key, points in curve.lines().items() if key[1] == gain}, floor)
    figure.text(0.02, 0.93, "Relative error of the gradients, reverse against store", color=INK, fontsize=11.5, weight="bold")
    said = f"arithmetic='float', and in black arithmetic='exact'; {curve.what()}\n{curve.where()}"
    figure.text(0.02, 0.02, said, color=FAINT, fontsize=7, linespacing=1.4)
    save_png(figure, path)


def _panel(axes: Axes, lines: dict[tuple[str, int, str], dict[int, float | None]], floor: float) -> None:
    from .._base.picture import INK

    depths = sorted({depth for points in lines.values() for depth in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.minorticks_off()
    axes.set_xlim(depths[0], max(depths[-1], depths[0] + 1))
    axes.set_xlabel("depth, in blocks", color=INK, fontsize=8.5)
    ends: dict[str, tuple[float, str]] = {}
    for (dtype, _, arithmetic), points in lines.items():
        known = {depth: error or floor for depth, error in points.items() if error is not None}
        name, color = ("exact", INK) if arithmetic == "exact" else (dtype.removeprefix("float32, "), COLORS.get(dtype, INK))
        axes.plot(
            list(known), list(known.values()), color=color, linewidth=2, marker="o", markersize=3.5, clip_on=False, zorder=3
        )
        if known:
            ends[name] = known[max(known)], color
    label_ends(axes, ends, depths[-1])


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(PROG, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--depths", type=counts, help="numbers of blocks, as 4,8,16")
    report = parser.add_mutually_exclusive_group()
    report.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    report.add_argument("--from", type=Path, metavar="PATH", dest="source", help="measure nothing, read this report")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw it, as a PNG; needs matplotlib")
    args = parser.parse_args(argv)
    for path in (args.json, args.plot):  # before the measuring, not after it
        if path and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"cannot write a file at {path}")
    if args.source and args.depths:
        parser.error("--from measures nothing, so it does not go with --depths")
    try:
        curve = Curve.load(args.source) if args.source else measure(args.depths or DEPTHS, argv)
        if args.json:
            save(args.json, curve)
        print(curve.where(), curve.table(), sep="\n")
        if args.plot:
            draw_curve(curve, args.plot)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
