"""Pair blocks: attention and an MLP, or what a user's factory makes. What `retrograde bench` measures and `plan` predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import retrograde as rg

from .._base.loading import Refused, load, sized
from ..memory import Memory

__all__ = ["BITS", "DTYPES", "Attention", "Residual", "factory_of", "in_layers", "mlp", "net_of"]

BITS = 4  # of reversible noise
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class Attention(nn.Module):
    """Causal self-attention with a norm in front."""

    def __init__(self, width: int, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """What each position takes from itself and those before it."""
        batch, length, width = x_BLD.shape
        q, k, v = self.qkv(self.norm(x_BLD)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Residual(nn.Module):
    """The two functions of a block as one ordinary layer, under the same names."""

    def __init__(self, f: nn.Module, g: nn.Module):
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x: Tensor, **side: Tensor) -> Tensor:
        """x += f(x), x += g(x). Side inputs are those of f."""
        x = x + self.f(x, **side)
        return x + self.g(x)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def factory_of(setting: dict[str, Any]) -> Callable[[], Any]:
    """Makes one block (f, g) per call: attention and an MLP, or what the user's factory returns."""
    spec, dim = setting["block"], setting["dim"]
    if spec is None:
        return lambda: (Attention(dim, setting["heads"]), mlp(dim))
    return sized(spec, "--block", load(spec, "--block"), {"dim": dim, "heads": setting["heads"]})


def net_of(setting: dict[str, Any], depth: int) -> rg.ReversibleSequence:
    make = factory_of(setting)
    try:
        net = rg.ReversibleSequence([make() for _ in range(depth)])
    except rg.ProgramError as error:
        raise Refused(f"--block {setting['block']} must return (f, g), or a module with f and g: {error}") from error
    return net.to(setting["device"], DTYPES[setting["dtype"]])


def in_layers(net: Any, memory: Memory = "reverse") -> rg.Sequential:
    """The functions of a reversible net as ordinary layers, with the noise that makes them reversible."""
    return rg.Sequential([Residual(block.f, block.g) for block in net.blocks], bits=BITS, memory=memory)
