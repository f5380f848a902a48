"""The net that is measured: causal attention and an MLP in pair blocks, under retrograde or torch's checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

import retrograde as rg

from ..models.blocks import Attention, mlp


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
