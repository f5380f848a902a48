"""The main job in about two minutes: what does depth cost under each memory policy, and does the net learn?

A byte-level language model of reversible blocks, on text that every machine has: the sources of Python's standard library.
Everything printed is measured here and now. Run it with `make demo`.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import retrograde as rg
from retrograde.bench.measure import in_turns
from retrograde.bench.meter import LiveBytes

POLICIES = ("store", "checkpoint", "reverse")


class Attention(nn.Module):
    """Causal self-attention with a norm in front."""

    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        batch, length, width = x_BLD.shape
        q, k, v = self.qkv(self.norm(x_BLD)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Bytes(nn.Module):
    """Predicts the next byte."""

    def __init__(self, depth: int, width: int = 96, length: int = 128):
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.net = rg.ReversibleSequence([(Attention(width), self.mlp(width)) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    @staticmethod
    def mlp(width: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """The mean loss, in bits per byte."""
        x_BLD = self.byte(tokens_BL[:, :-1]) + self.place.weight[: tokens_BL.shape[1] - 1]
        logits = self.head(self.norm(self.net(x_BLD)))
        return cross_entropy(logits.flatten(0, 1), tokens_BL[:, 1:].flatten()) / torch.tensor(2.0).log()


def standard_library() -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes held out, split by file."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [torch.frombuffer(bytearray(f.read_bytes()), dtype=torch.uint8) for f in files if f.stat().st_size]
    return torch.cat([t for i, t in enumerate(texts) if i % 10]), torch.cat(texts[::10])


def batch(text: Tensor, count: int, length: int = 128) -> Tensor:
    starts = torch.randint(len(text) - length - 1, (count,))
    return torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    probe = batch(held_out, 32)

    def bits() -> float:
        with torch.no_grad():
            return model(probe).item()

    first, start = bits(), time.perf_counter()
    for i in track(range(steps), f"training {depth} reversible blocks", console=console):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (i + 1) / 20) * (1 - i / steps)
        optimizer.zero_grad(set_to_none=False)
        model(batch(text, 8)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
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
