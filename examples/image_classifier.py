"""An image classifier of reversible convolution blocks with BatchNorm, which tells circles, squares, triangles and crosses apart.

A block splits the channels into two halves: x1 += f(x2), x2 += g(x1), where f and g are convolutions with BatchNorm. Running
statistics move once per step although f and g run twice. Between stages an ordinary layer halves the picture.

    python examples/image_classifier.py                     # about half a minute on two CPU cores
    python examples/image_classifier.py --depth 16 --memory store
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import retrograde as rg
from retrograde.bench.meter import LiveBytes
from retrograde.bench.report import size
from retrograde.memory import Memory

SHAPES = ("circle", "square", "triangle", "cross")


def drawn(count: int, side: int = 24) -> tuple[Tensor, Tensor]:
    """Pictures of one shape each, of random place, size and brightness, with noise; and which shape it is."""
    label = torch.randint(len(SHAPES), (count,))
    middle, radius = (torch.rand(2, count, 1, 1) * 0.4 + 0.3) * side, (torch.rand(count, 1, 1) * 0.12 + 0.14) * side
    line = torch.arange(side).float()
    y, x = (line[:, None] - middle[0]) / radius, (line - middle[1]) / radius
    inside = torch.stack(
        (
            x.square() + y.square() < 1,
            (x.abs() < 0.85) & (y.abs() < 0.85),
            (y < 0.85) & (y > 2 * x.abs() - 1),
            ((x.abs() < 0.3) | (y.abs() < 0.3)) & (x.abs() < 1) & (y.abs() < 1),
        )
    )
    picture = inside[label, torch.arange(count)] * (torch.rand(count, 1, 1) + 0.5)
    return (picture + 0.3 * torch.randn(count, side, side)).unsqueeze(1), label


def branch(channels: int) -> nn.Module:
    """f or g: convolution, BatchNorm, ReLU, convolution, BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
    )


def stage(channels: int, depth: int) -> rg.ReversibleSequence:
    blocks = [(branch(channels // 2), branch(channels // 2)) for _ in range(depth)]
    return rg.ReversibleSequence(blocks, split="chunk", merge="cat", dim=1)


def classifier(depth: int, channels: int) -> nn.Sequential:
    """Two stages of `depth` blocks, the second on half the side with twice the channels."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        stage(channels, depth),
        nn.Conv2d(channels, 2 * channels, 2, stride=2),
        stage(2 * channels, depth),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, len(SHAPES)),
    )


def use(model: nn.Module, memory: Memory) -> None:
    for part in model.modules():
        if isinstance(part, rg.ReversibleSequence):
            part.memory = memory


def activations(model: nn.Module, batch: int, memory: Memory) -> int:
    """Bytes at the peak of a training step, over parameters and gradients."""
    use(model, memory)
    model.zero_grad(set_to_none=False)  # gradients are there already, so they do not count
    pictures, labels = drawn(batch)
    with LiveBytes() as meter:
        cross_entropy(model(pictures), labels).backward()
    return meter.peak


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=6, help="blocks in each of the two stages")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--memory", choices=("reverse", "checkpoint", "store"), default="reverse")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    model = classifier(options.depth, options.channels)
    use(model, options.memory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(1, options.steps + 1):
        pictures, labels = drawn(options.batch)
        loss = cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(options.steps // 6, 1) == 0:
            print(f"step {step:>4}  loss {losses[-1]:.3f}")
    model.eval()
    pictures, labels = drawn(512)
    with torch.no_grad():
        right = (model(pictures).argmax(1) == labels).float().mean()
    print(f"right on 512 new pictures: {right:.0%}")
    model.train()
    for memory in ("store", "checkpoint", "reverse"):
        print(f"activations of a step under {memory:<10} {size(activations(model, options.batch, memory)):>10}")
    return losses


if __name__ == "__main__":
    main()
