"""Does arithmetic change what a net learns? Held-out bits per byte of a real run: ordinary training, exact and float reversal.

python -m retrograde.bench.training --json training.json
python -m retrograde.bench.training --from training.json --plot training.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .language import Bytes, batch, standard_library, train
from .report import beside, origin, save

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VARIANTS = {"store": ("store", "float"), "exact": ("reverse", "exact"), "float": ("reverse", "float")}


def curve(dtype: str, variant: str, seed: int, sizes: dict[str, int], text: Tensor, probe: Tensor) -> list[tuple[int, float]]:
    """(step, held-out bits per byte) along one run."""
    torch.manual_seed(seed)
    model = Bytes(sizes["depth"], sizes["width"], sizes["length"]).to(DTYPES[dtype])
    model.net.memory, model.net.arithmetic = VARIANTS[variant]
    found: list[tuple[int, float]] = []

    def look(step: int) -> None:
        if (step + 1) % sizes["every"] == 0 or step == 0:
            with torch.no_grad():
                found.append((step + 1, model(probe).item()))

    train(model, text, range(sizes["steps"]), sizes["steps"], look)
    return found


def measure(sizes: dict[str, int]) -> list[dict[str, Any]]:
    text, held_out = standard_library()
    torch.manual_seed(0)
    probe = batch(held_out, 64, sizes["length"])
    rows = []
    for dtype in DTYPES:
        for seed in range(sizes["seeds"]):
            for variant in VARIANTS:
                points = curve(dtype, variant, seed, sizes, text, probe)
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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"store": "#8b8f9a", "exact": "#1d4ed8", "float": "#d97706"}
    fig, axes = plt.subplots(1, 2, figsize=(14, 6), dpi=100, sharey=True)
    for ax, dtype in zip(axes, DTYPES, strict=True):
        for row in report["rows"]:
            if row["dtype"] == dtype:
                label = row["variant"] if row["seed"] == 0 else None
                ax.plot(*zip(*row["curve"], strict=True), color=colours[row["variant"]], linewidth=1.5, alpha=0.7, label=label)
        ax.set_title(f"{dtype} model", fontsize=15)
        ax.set_xlabel("step")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out bits per byte")
    axes[1].legend(frameon=False, fontsize=13)
    seeds = report["setting"]["seeds"]
    fig.suptitle(f"Ordinary training, exact and float reversal, {seeds} seeds each", fontsize=17, fontweight="bold")
    fig.text(0.01, 0.01, f"{report['machine']['device']}, torch {report['machine']['torch']}, {report['date']}", fontsize=10)
    fig.tight_layout(rect=(0, 0.03, 1, 1))
    with beside(path) as part:
        fig.savefig(part, format="png")
    plt.close(fig)


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
