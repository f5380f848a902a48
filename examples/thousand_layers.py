"""A network of 1000 layers on a laptop: it learns to tell three spirals apart, in the activation memory of one layer.

500 reversible blocks of two layers each. Backward recovers the input of every layer from its output, so nothing in between is
kept. The last layer of each function starts small, so that a thousand of them together start as a gentle function.

    python examples/thousand_layers.py                      # about a minute on one CPU core
    python examples/thousand_layers.py --layers 4000 --steps 5
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import retrograde as rg
from retrograde.bench.meter import LiveBytes
from retrograde.bench.report import size

ARMS = 3


def spirals(count: int) -> tuple[Tensor, Tensor]:
    """Points in the plane on three arms of a spiral, and which arm it is."""
    arm, along = torch.randint(ARMS, (count,)), torch.rand(count)
    angle = 2 * math.pi * (arm / ARMS + along) + 0.1 * torch.randn(count)
    radius = 0.2 + along
    return 3 * torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), arm


def layer(width: int, layers: int) -> nn.Module:
    linear = nn.Linear(width, width)
    nn.init.normal_(linear.weight, std=(width * layers) ** -0.5)
    return nn.Sequential(nn.LayerNorm(width), nn.SiLU(), linear)


def network(layers: int, width: int) -> tuple[nn.Module, rg.ReversibleSequence]:
    """The whole, and the reversible part of it."""
    deep = rg.ReversibleSequence([(layer(width, layers), layer(width, layers)) for _ in range(layers // 2)])
    return nn.Sequential(nn.Linear(2, width), deep, nn.LayerNorm(width), nn.Linear(width, ARMS)), deep


def activations(model: nn.Module, batch: int) -> int:
    """Bytes at the peak of a training step, over parameters and gradients."""
    model.zero_grad(set_to_none=False)  # gradients are there already, so they do not count
    points, arm = spirals(batch)
    with LiveBytes() as meter:
        cross_entropy(model(points), arm).backward()
    return meter.peak


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the tensors are small: a second thread would wait for the first
    model, deep = network(options.layers, options.width)
    print(f"{len(deep.functions())} layers, {sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3 / options.layers)  # a thousand small steps add up
    losses: list[float] = []
    for step in range(1, options.steps + 1):
        points, arm = spirals(options.batch)
        loss = cross_entropy(model(points), arm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(options.steps // 6, 1) == 0:
            print(f"step {step:>4}  loss {losses[-1]:.3f}")
    points, arm = spirals(2000)
    with torch.no_grad():
        print(f"right on 2000 new points: {(model(points).argmax(1) == arm).float().mean():.0%}")
    for deep.memory in ("store", "checkpoint", "reverse"):
        print(f"activations of a step under {deep.memory:<10} {size(activations(model, options.batch)):>10}")
    return losses


if __name__ == "__main__":
    main()
