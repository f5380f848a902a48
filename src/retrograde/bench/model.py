"""The net that is measured: causal attention and an MLP in pair blocks, under retrograde or torch's checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import retrograde as rg


class Attention(nn.Module):
    """Causal self-attention with a norm in front."""

    def __init__(self, width: int, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        batch, length, width = x_BLD.shape
        q, k, v = self.qkv(self.norm(x_BLD)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def transformer(depth: int, width: int, heads: int = 2) -> rg.ReversibleSequence:
    return rg.ReversibleSequence([(Attention(width, heads), mlp(width)) for _ in range(depth)])


def under(net: rg.ReversibleSequence, memory: Any, x: Tensor) -> Tensor:
    """The output, with a policy of retrograde."""
    net.memory = memory
    return net(x)


def checkpointed(net: rg.ReversibleSequence, x: Tensor) -> Tensor:
    """The output, without retrograde: torch.utils.checkpoint around each function."""
    x1 = x2 = x
    for block in net.blocks:
        x1 = x1 + checkpoint(block.f, x2, use_reentrant=False)
        x2 = x2 + checkpoint(block.g, x1, use_reentrant=False)
    return (x1 + x2) / 2
