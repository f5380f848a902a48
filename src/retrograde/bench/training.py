"""Does arithmetic change what a net learns? Held-out bits per byte of a real run: ordinary training, exact and float reversal.

python -m retrograde.bench.training --json training.json
python -m retrograde.bench.training --from training.json --plot training.png
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._base.report import counted, origin, save
from ..models.language import Language
from ..training.data import Text, open_data

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LR, ROWS = 2e-3, 8
VARIANTS: dict[str, tuple[Any, Any]] = {"store": ("store", "float"), "exact": ("reverse", "exact"), "float": ("reverse", "float")}
LOOKS: dict[str, dict[str, Any]] = {  # they lie on top of each other
    "store": {"color": "#c4c8ce", "linewidth": 5},
    "exact": {"color": "#1d4ed8", "linewidth": 1.6},
    "float": {"color": "#d97706", "linewidth": 1.6, "linestyle": (0, (2, 3))},
}


def curve(dtype: str, variant: str, seed: int, sizes: dict[str, int], text: Text, probe: Tensor) -> list[tuple[int, float]]:
    """(step, held-out bits per byte) along one run: AdamW with warm-up and linear decay, in the model's own dtype."""
    torch.manual_seed(seed)
    memory, arithmetic = VARIANTS[variant]
    model = Language(sizes["depth"], sizes["width"], 4, sizes["length"], memory=memory, arithmetic=arithmetic).to(DTYPES[dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    found: list[tuple[int, float]] = []
    for step in range(sizes["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / 20) * (1 - step / sizes["steps"])
        optimizer.zero_grad()
        bits(model, text.batch(seed, step, ROWS, sizes["length"])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % sizes["every"] == 0 or step == 0:
            with torch.no_grad():
                found.append((step + 1, bits(model, probe).item()))
    return found


def bits(model: Language, tokens_BL: Tensor) -> Tensor:
    return model(tokens_BL[:, :-1], tokens_BL[:, 1:]) / math.log(2)


def measure(sizes: dict[str, int]) -> list[dict[str, Any]]:
    data = open_data((), sizes["length"])
    probe = data.held_out.batch(0, 0, 64, sizes["length"])
    rows = []
    for dtype in DTYPES:
        for seed in range(sizes["seeds"]):
            for variant in VARIANTS:
                points = curve(dtype, variant, seed, sizes, data.train, probe)
                rows.append({"dtype": dtype, "variant": variant, "seed": seed, "curve": points})
                print(f"{dtype:<9} {variant:<6} seed {seed}: {points[-1][1]:.4f} bits per byte")
    return rows


def summary(rows: list[dict[str, Any]]) -> str:
    """For each dtype the spread of seeds under store, and how far exact and float end from it, seed by seed."""
    lines = []
    for dtype in DTYPES:
        last = {(row["variant"], row["seed"]): row["curve"][-1][1] for row in rows if row["dtype"] == dtype}
        seeds = sorted({seed for _, seed in last})
        store = [last["store", seed] for seed in seeds]
        apart = {v: max(abs(last[v, seed] - last["store", seed]) for seed in seeds) for v in ("exact", "float")}
        lines.append(
            f"{dtype}: store {min(store):.4f} to {max(store):.4f}, spread {max(store) - min(store):.4f}; furthest from store at "
            f"the same seed: exact {apart['exact']:.4f}, float {apart['float']:.4f}"
        )
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    from .._base.picture import FAINT, INK, save_png

    figure = Figure(figsize=(7, 4), dpi=200, facecolor="white")
    for i, dtype in enumerate(DTYPES):
        axes = figure.add_axes((0.085 + 0.48 * i, 0.22, 0.41, 0.58))
        for row in (row for row in report["rows"] if row["dtype"] == dtype):
            label = row["variant"] if row["seed"] == 0 else None
            axes.plot(*zip(*row["curve"][1:], strict=True), label=label, **LOOKS[row["variant"]])
        axes.set_title(f"{dtype} model", fontsize=9.5, color=INK)
        axes.set_xlabel("step", fontsize=9, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, colors=INK)
        axes.legend(frameon=False, fontsize=8.5)
    figure.text(
        0.02, 0.93, "Held-out bits per byte: ordinary training, exact and float reversal", color=INK, fontsize=11.5, weight="bold"
    )
    s, m = report["setting"], report["machine"]
    what = f"{counted(s['depth'], 'block')} of width {s['width']}, {counted(s['seeds'], 'seed')} each"
    figure.text(
        0.02, 0.02, f"{what}\n{m['device']}, torch {m['torch']}, {report['date']}", color=FAINT, fontsize=7, linespacing=1.4
    )
    save_png(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser("python -m retrograde.bench.training", description=__doc__)
    for name, default in {"depth": 8, "width": 64, "length": 64, "steps": 300, "every": 20, "seeds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--json", type=Path, metavar="PATH", help="measure, and write the report here")
    given.add_argument("--from", type=Path, metavar="PATH", dest="source", help="measure nothing, read this report")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the curves; needs matplotlib")
    args = parser.parse_args()
    if args.json:
        sizes = {name: getattr(args, name) for name in ("depth", "width", "length", "steps", "every", "seeds")}
        report = {**origin("cpu", parser.prog, sys.argv[1:]), "setting": sizes, "rows": measure(sizes)}
        save(args.json, report)
    else:
        report = json.loads(args.source.read_text(encoding="utf-8"))
    print(summary(report["rows"]))
    if args.plot:
        draw(report, args.plot)


if __name__ == "__main__":
    main()
