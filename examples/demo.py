"""The main job in about two minutes: what does depth cost under each memory policy, and does the net learn?

A byte-level language model of reversible blocks, on text that every machine has: the sources of Python's standard library.
Everything printed is measured here and now. Run it with `make demo`.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import retrograde as rg
from retrograde.bench.language import Bytes, batch, standard_library
from retrograde.bench.language import train as fit
from retrograde.bench.measure import in_turns
from retrograde.bench.meter import LiveBytes

POLICIES = ("store", "checkpoint", "reverse")


def compare(console: Console, text: Tensor, depths: list[int], rounds: int) -> None:
    """Peak bytes of activations and time of one step, under each policy and depth."""
    table = Table("depth", "memory=", "activations, peak", "time of a step, against store")
    for depth in depths:
        torch.manual_seed(0)
        model, tokens = Bytes(depth), batch(text, 8)

        def step(memory: str, model: Bytes = model, tokens: Tensor = tokens) -> None:
            model.net.memory = memory
            model(tokens).backward()

        step("reverse")  # gradients exist from here on, so they do not count as activations
        peaks = {}
        for memory in POLICIES:
            with LiveBytes() as meter:
                step(memory)
            peaks[memory] = meter.peak / 2**20
        times = in_turns({memory: lambda memory=memory: step(memory) for memory in POLICIES}, rounds, burn_in=1)
        for memory in POLICIES:
            ratio = times[memory].median / times["store"].median
            last = memory == POLICIES[-1]
            table.add_row(str(depth), memory, f"{peaks[memory]:.1f} MiB", f"{ratio:.2f}", end_section=last)
    console.print(table)
    console.print("Under reverse the activations of a step take the same memory at every depth.", soft_wrap=True)


def train(console: Console, text: Tensor, held_out: Tensor, depth: int, steps: int) -> None:
    """Train under reverse; held-out bits per byte before and after."""
    torch.manual_seed(0)
    model = Bytes(depth)
    probe = batch(held_out, 32)

    def bits() -> float:
        with torch.no_grad():
            return model(probe).item()

    first, start = bits(), time.perf_counter()
    steps_shown = track(range(steps), f"training {depth} reversible blocks", console=console)
    fit(model, text, steps_shown, steps)
    seconds = time.perf_counter() - start
    console.print(f"held-out bits per byte: {first:.2f} at the start, {bits():.2f} after {steps} steps ({seconds:.0f} s)")
    report = rg.check.gradients(model.net, torch.randn(2, 16, 96))
    console.print(f"the trained net, checked: {report}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24], help="numbers of blocks to compare")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps for each policy and depth")
    parser.add_argument("--depth", type=int, default=12, help="number of blocks to train")
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    args = parser.parse_args()
    console = Console()
    text, held_out = standard_library()
    console.print(f"data: {len(text) / 1e6:.1f} MB of Python's own sources, {len(held_out) / 1e6:.1f} MB held out")
    console.print("measuring memory and time of one step under each policy ...")
    compare(console, text, args.depths, args.rounds)
    train(console, text, held_out, args.depth, args.steps)


if __name__ == "__main__":
    main()
