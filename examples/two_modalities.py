"""Sight and sound in one reversible network: the sound says where to look, and the answer is what is to be seen there.

Each modality has a pair of streams, and `rg.wirings.cross` lets the pairs look at each other by cross attention:
x1 += f(x2, m2), x2 += k(x1) for sight, m1 += j(m2, x2), m2 += g(m1) for sound. A picture is a row of patches of different
kinds; a sound is a tone whose pitch names a place in it. Neither alone tells the answer.

    python examples/two_modalities.py                       # about half a minute on two CPU cores
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import retrograde as rg
from retrograde.bench.meter import LiveBytes
from retrograde.bench.report import size
from retrograde.memory import Memory

PLACES, KINDS, FRAMES, SAMPLES = 6, 4, 8, 16


def scenes(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Patches (count, PLACES, KINDS), sounds (count, FRAMES, SAMPLES), and the kind of the patch that is asked for."""
    kind, place = torch.randint(KINDS, (count, PLACES)), torch.randint(PLACES, (count,))
    patches = nn.functional.one_hot(kind, KINDS) + 0.1 * torch.randn(count, PLACES, KINDS)
    time = torch.arange(FRAMES * SAMPLES) / SAMPLES
    pitch, phase = 1.0 + place[:, None], torch.rand(count, 1)
    sound = torch.sin(2 * math.pi * (pitch * time + phase)) + 0.1 * torch.randn(count, len(time))
    return patches, sound.view(count, FRAMES, SAMPLES), kind[torch.arange(count), place]


class Look(nn.Module):
    """Attention from one modality to itself and to the other, with norms in front."""

    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads, self.norm, self.other_norm = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, mine: Tensor, other: Tensor) -> Tensor:
        mine = self.norm(mine)
        seen = torch.cat((mine, self.other_norm(other)), dim=1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(mine), *self.kv(seen).chunk(2, dim=-1)))
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class SightAndSound(nn.Module):
    def __init__(self, depth: int, width: int):
        super().__init__()
        self.see, self.hear = (
            nn.Linear(KINDS, width),
            nn.Sequential(nn.Linear(SAMPLES, width), nn.GELU(), nn.Linear(width, width)),
        )
        self.places = nn.Parameter(torch.randn(PLACES, width))
        self.answer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, KINDS))
        self.net = rg.Reversible(
            [u for _ in range(depth) for u in rg.wirings.cross(f=Look(width), g=mlp(width), j=Look(width), k=mlp(width))]
        )

    def forward(self, patches: Tensor, sound: Tensor) -> Tensor:
        x, m = self.see(patches) + self.places, self.hear(sound)
        out = self.net({"x1": x, "x2": x, "m1": m, "m2": m})
        return self.answer((out["m1"] + out["m2"]).mean(1))


def activations(model: SightAndSound, batch: int, memory: Memory) -> int:
    """Bytes at the peak of a training step, over parameters and gradients."""
    model.net.memory = memory
    model.zero_grad(set_to_none=False)  # gradients are there already, so they do not count
    patches, sound, kind = scenes(batch)
    with LiveBytes() as meter:
        cross_entropy(model(patches, sound), kind).backward()
    return meter.peak


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=8, help="blocks of four updates")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    model = SightAndSound(options.depth, options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(1, options.steps + 1):
        patches, sound, kind = scenes(options.batch)
        loss = cross_entropy(model(patches, sound), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(options.steps // 8, 1) == 0:
            print(f"step {step:>4}  loss {losses[-1]:.3f}")
    patches, sound, kind = scenes(1000)
    with torch.no_grad():
        right = (model(patches, sound).argmax(1) == kind).float().mean()
        silent = (model(patches, sound.roll(1, 0)).argmax(1) == kind).float().mean()
    print(f"right on 1000 new scenes: {right:.0%}; with the sound of another scene: {silent:.0%}")
    for memory in ("store", "checkpoint", "reverse"):
        print(f"activations of a step under {memory:<10} {size(activations(model, options.batch, memory)):>10}")
    return losses


if __name__ == "__main__":
    main()
