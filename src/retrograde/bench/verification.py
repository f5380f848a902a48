"""What verification costs: all sketches of a training step, timed by themselves, as a share of that step.

python -m retrograde.bench.verification [--device cuda] [--json PATH]
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
from retrograde._exact.range import Ledger
from retrograde._exact.sketch import COLUMNS, Table, take

from .._base.report import origin, save
from .measure import Timing, in_turns
from .model import transformer

SIZES = {
    "cpu": {"width": 512, "heads": 8, "length": 512, "batch": 2, "depth": 8, "rounds": 10},
    "cuda": {"width": 1024, "heads": 16, "length": 4096, "batch": 4, "depth": 24, "rounds": 20},
}
REPEATS = 50  # of one addition, so that launching it does not count


def sketches(device: str, rounds: int, shape: tuple[int, ...]) -> float:
    """Seconds that the sketch of one output adds to an update. On CUDA it is taken by the kernel that adds the output."""
    out = torch.randn(shape, device=device)
    if device == "cpu":
        forms: dict[str, Callable[[], object]] = {"with": lambda: take(0, out, lambda: Table(1))}
    else:
        out, ledger = out.bfloat16(), Ledger([], ["stream"])
        high, low = fused.split(torch.randn(shape, device=device), None)
        row = torch.zeros(COLUMNS, device=device, dtype=torch.float64)
        forms = {
            "with": lambda: fused.plus(high, low, out, 1, ledger, (row, 0)),
            "without": lambda: fused.plus(high, low, out, 1, ledger),
        }

    def repeated(form: Callable[[], object]) -> None:
        for _ in range(REPEATS):
            form()

    with torch.no_grad():
        times = in_turns({name: partial(repeated, form) for name, form in forms.items()}, rounds)
    without = times["without"].median if "without" in times else 0.0
    return (times["with"].median - without) / REPEATS


def steps(device: str, sizes: dict[str, int]) -> dict[str, Timing]:
    """Seconds of forward + backward with verification and without; under bf16 autocast on CUDA."""
    torch.manual_seed(0)
    with torch.device(device):
        net = transformer(sizes["depth"], sizes["width"], sizes["heads"])
        x = torch.randn(sizes["batch"], sizes["length"], sizes["width"])

    def step(verify: Any) -> None:
        net.verify = verify
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            out: Tensor = net(x)
        out.square().mean().backward()

    return in_turns({verify: partial(step, verify) for verify in ("error", "off")}, sizes["rounds"])


def main() -> None:
    parser = argparse.ArgumentParser("python -m retrograde.bench.verification", description=__doc__)
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    args = parser.parse_args()
    sizes = SIZES[args.device]
    shape = (sizes["batch"], sizes["length"], sizes["width"])
    each, times = sketches(args.device, sizes["rounds"], shape), steps(args.device, sizes)
    found = origin(args.device, parser.prog, sys.argv[1:]) | {"setting": sizes, "sketch": each, "steps": times}
    count, step = 4 * sizes["depth"], times["error"].median  # two updates for each block, each in both directions
    print(found["command"], found["machine"], sizes, sep="\n")
    print(f"  one sketch {each * 1e6:.1f} us, {count} of them in a step of {step * 1e3:.1f} ms: {count * each / step:.2%}")
    off = times["off"]
    print(f"  the step without verification {off.median * 1e3:.1f} ms: {step / off.median:.3f}", end=" ")
    print(f"(quartiles {times['error'].low / off.median:.3f} to {times['error'].high / off.median:.3f})")
    if args.json:
        save(args.json, found)


if __name__ == "__main__":
    main()
