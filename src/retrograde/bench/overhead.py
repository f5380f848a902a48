"""What the engine itself costs: a step on tensors so small that only the work around them counts.

python -m retrograde.bench.overhead [depth] [rounds]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import retrograde as rg

from .measure import Timing, in_turns


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def overhead(depth: int = 12, rounds: int = 40, width: int = 16) -> dict[str, Timing]:
    """Seconds of forward + backward under store, torch's checkpoint per fn, and reverse."""
    torch.manual_seed(0)
    net = rg.ReversibleSequence([(Attention(width), mlp(width)) for _ in range(depth)])
    x = torch.randn(2, 8, width)

    def checkpointed() -> Tensor:
        x1 = x2 = x
        for block in net.blocks:
            x1 = x1 + checkpoint(block.f, x2, use_reentrant=False)
            x2 = x2 + checkpoint(block.g, x1, use_reentrant=False)
        return (x1 + x2) / 2

    def under(memory: str) -> Tensor:
        net.memory = memory
        return net(x)

    def step(forward: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: forward().square().sum().backward()

    return in_turns(
        {"store": step(lambda: under("store")), "checkpoint": step(checkpointed), "reverse": step(lambda: under("reverse"))},
        rounds,
    )


def main() -> None:
    depth, rounds = [*map(int, sys.argv[1:]), *(12, 40)[len(sys.argv) - 1 :]][:2]
    times = overhead(depth, rounds)
    reverse = times["reverse"].median
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, depth {depth}, {rounds} rounds, medians of a step")
    for name, timing in times.items():
        per_update = timing.median / (2 * depth) * 1e6
        spread = f"quartiles {timing.low / timing.median:.2f} to {timing.high / timing.median:.2f}"
        print(f"  {name:<10} {per_update:7.0f} us per update ({spread})")
    print(f"  reverse / checkpoint {reverse / times['checkpoint'].median:.2f}")
    print(f"  reverse / store      {reverse / times['store'].median:.2f}")


if __name__ == "__main__":
    main()
