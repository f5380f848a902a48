"""The main job in about two minutes: a deep reversible language model learns, and what its depth would have cost otherwise.

`retrograde train` on its defaults, then the memory of a step of the same model under each policy. Everything printed is measured
here and now. Run it with `make demo`.
"""

from __future__ import annotations

import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from retrograde.bench.report import size
from retrograde.cli.app import main as retrograde
from retrograde.training.loop import build
from retrograde.training.memory import kept_by
from retrograde.training.settings import settle

OUT = Path("demo-output")


def kept(console: Console, options: list[str]) -> None:
    """A step of the model that was trained, and of shallower and deeper ones."""
    given = {name: int(value) for name, value in pairwise(options) if name in ("--depth", "--dim", "--width")}
    depth, width = given.get("--depth"), given.get("--dim", given.get("--width"))
    settings = settle(device="cpu", depth=depth, width=width)
    policies = ("store", "checkpoint", "reverse")
    table = Table("depth", *policies)
    for blocks in (settings.depth // 2 or 1, settings.depth, 2 * settings.depth):
        model = build(settle(device="cpu", depth=blocks, width=width))
        found = kept_by(model, policies, settings.batch)
        table.add_row(f"{blocks} blocks", *(size(found[policy]) for policy in policies))
    console.print("activations of a step of the same model at the peak, measured under each policy:")
    console.print(table)


def main() -> int:
    start, options = time.perf_counter(), sys.argv[1:]
    shutil.rmtree(OUT, ignore_errors=True)
    code = retrograde(["train", "--device", "cpu", "--out", str(OUT), *options])
    if code == 0:
        console = Console()
        kept(console, options)
        console.print(f"{time.perf_counter() - start:.0f} seconds in all; more of its writing: retrograde sample {OUT}")
    return code


if __name__ == "__main__":
    sys.exit(main())
