"""What exact arithmetic and sketches cost: one addition to a stream, and a whole training step, against plain floating point.

python -m retrograde.bench.exact [--device cuda] [--compile] [--json PATH]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrograde._exact import cuda as fused
from retrograde._exact import streams as exact
from retrograde._exact.range import Ledger

from .._base.report import origin, save
from .measure import Timing, in_turns
from .model import transformer

SIZES = {
    "cpu": {"width": 64, "heads": 4, "length": 128, "batch": 4, "depth": 24, "rounds": 10},
    "cuda": {"width": 1024, "heads": 16, "length": 4096, "batch": 4, "depth": 24, "rounds": 20},
}
REPEATS = 50  # of one addition, so that launching it does not count


def additions(device: str, rounds: int, size: int) -> dict[str, Timing]:
    """Seconds of adding a 16-bit increment to a float32 stream of so many numbers, with a sketch of the increment and without."""
    part, stream = torch.randn(size, device=device, dtype=torch.bfloat16), torch.randn(size, device=device)
    ledger = Ledger([], ["stream"])
    wide = fused.on_grid(stream, exact.GRID)
    forms: dict[str, Callable[[], object]] = {"float": lambda: stream + part}
    if fused.usable(stream):
        high, low = fused.split(stream, None)
        row = torch.zeros(8, device=device, dtype=torch.float64)  # of a sketch
        forms["float, fused"] = lambda: fused.add(stream, part, 1)
        forms["float, sketched"] = lambda: fused.add(stream, part, 1, 0, row)
        forms["exact, fused"] = lambda: fused.plus(high, low, part, 1, ledger)
        forms["exact, sketched"] = lambda: fused.plus(high, low, part, 1, ledger, (row, 0))
        forms["sketch alone"] = lambda: fused.sketch(part, 0, row)
    forms["exact, plain"] = lambda: ledger.within(wide + fused.on_grid(part, exact.GRID)).float()

    def repeated(form: Callable[[], object]) -> None:
        for _ in range(REPEATS):
            form()

    with torch.no_grad():
        times = in_turns({name: partial(repeated, form) for name, form in forms.items()}, rounds)
    return {name: Timing(t.median / REPEATS, t.low / REPEATS, t.high / REPEATS) for name, t in times.items()}


def steps(device: str, sizes: dict[str, int], compiled: bool) -> dict[str, Timing]:
    """Seconds of forward + backward under bf16 autocast, float and exact."""
    torch.manual_seed(0)
    with torch.device(device):
        net = transformer(sizes["depth"], sizes["width"], sizes["heads"])
        x = torch.randn(sizes["batch"], sizes["length"], sizes["width"])
    for block in net.blocks if compiled else ():
        for name, fn in list(block.named_children()):
            setattr(block, name, torch.compile(fn))

    def step(arithmetic: Any, memory: Any) -> None:
        net.arithmetic, net.memory = arithmetic, memory
        with torch.autocast(device, torch.bfloat16):
            out: Tensor = net(x)
        out.square().mean().backward()

    variants = {
        f"{name}, {memory}": partial(step, name, memory) for memory in ("reverse", "store") for name in ("float", "exact")
    }
    return in_turns(variants, sizes["rounds"], burn_in=5)


def main() -> None:
    parser = argparse.ArgumentParser("python -m retrograde.bench.exact", description=__doc__)
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the functions")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    args = parser.parse_args()
    sizes = SIZES[args.device]
    numbers = sizes["batch"] * sizes["length"] * sizes["width"]
    found = origin(args.device, parser.prog, sys.argv[1:])
    found |= {"setting": sizes, "additions": additions(args.device, sizes["rounds"], numbers)}
    found["steps"] = steps(args.device, sizes, args.compile)
    print(found["command"], found["machine"], sizes, sep="\n")
    for group, base in (("additions", ("float",)), ("steps", ("float, reverse", "float, store"))):
        for name, timing in found[group].items():
            against = found[group][base[-1] if name.endswith("store") else base[0]].median
            print(f"  {name:<16} {timing.median * 1e6:10.1f} us  {timing.median / against:.3f} of float")
    if args.json:
        save(args.json, found)


if __name__ == "__main__":
    main()
