"""A reversible net in a plain training loop: accumulation, mixed precision, clipping.

A small decoder learns this very file, byte by byte. `lightning_loop.py` and `accelerate_loop.py` train the same net.

    python examples/plain_loop.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import retrograde as rg

LENGTH, WIDTH, ACCUMULATE = 64, 64, 2


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out. The layers are torch's own."""

    def __init__(self, depth: int = 6):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = rg.from_transformer(nn.TransformerEncoder(layer, depth, nn.LayerNorm(WIDTH), enable_nested_tensor=False))
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight
        return self.head(self.layers(x, mask=self.mask, is_causal=True))

    def loss(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batches(count: int, size: int = 8) -> Iterator[Tensor]:
    data = torch.tensor(list(Path(__file__).read_bytes()))
    for _ in range(count):
        starts = torch.randint(len(data) - LENGTH, (size,))
        yield torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])


def train(steps: int = 100) -> list[float]:
    """The losses of each step; `ACCUMULATE` batches make one."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = Decoder().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses, data = [], batches(steps * ACCUMULATE)
    for _ in range(steps):
        total = 0.0
        for _ in range(ACCUMULATE):
            ids = next(data).to(device)
            with torch.autocast(device, torch.bfloat16):  # streams are exact then: gradients are those of ordinary autograd
                loss = net.loss(ids) / ACCUMULATE
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


if __name__ == "__main__":
    found = train()
    print(f"loss {found[0]:.2f} at the first step, {found[-1]:.2f} at the last")
