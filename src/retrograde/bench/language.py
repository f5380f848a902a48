"""A small real job: a byte-level language model of reversible blocks, on the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .model import transformer


class Bytes(nn.Module):
    """Predicts the next byte."""

    def __init__(self, depth: int, width: int = 96, length: int = 128, heads: int = 4):
        super().__init__()
        self.length = length
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.net = transformer(depth, width, heads)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """The mean loss, in bits per byte."""
        x_BLD = self.byte(tokens_BL[:, :-1]) + self.place.weight[: tokens_BL.shape[1] - 1]
        logits = self.head(self.norm(self.net(x_BLD))).float()
        return cross_entropy(logits.flatten(0, 1), tokens_BL[:, 1:].flatten()) / torch.tensor(2.0).log()


def standard_library() -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes held out, split by file."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [torch.frombuffer(bytearray(f.read_bytes()), dtype=torch.uint8) for f in files if f.stat().st_size]
    return torch.cat([t for i, t in enumerate(texts) if i % 10]), torch.cat(texts[::10])


def batch(text: Tensor, count: int, length: int = 128) -> Tensor:
    starts = torch.randint(len(text) - length - 1, (count,))
    return torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()


def train(model: Bytes, text: Tensor, steps: Iterable[int], total: int, seen: Callable[[int], object] | None = None) -> None:
    """AdamW with warm-up and linear decay; `seen` hears of every step that is done."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for i in steps:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (i + 1) / 20) * (1 - i / total)
        optimizer.zero_grad(set_to_none=False)
        model(batch(text, 8, model.length)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if seen is not None:
            seen(i)
