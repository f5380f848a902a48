"""Ways to train the same stack of ordinary transformer layers. To compare another one, add it to `WAYS`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg

from .._compile.fns import caller, saving
from ..models.blocks import DTYPES, Attention, mlp

PARTITION = 0.3  # torch's activation_memory_budget, and the lean form of rg.compile_fns

Forward = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """An ordinary layer: attention and an MLP, each with a norm in front, added to x."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attention, self.mlp = Attention(dim, heads), mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


@dataclass(frozen=True)
class Size:
    dim: int
    heads: int
    seq: int
    batch: int
    depth: int
    dtype: str
    autocast: str

    def kept_bytes(self) -> int:
        """What a layer keeps under a checkpoint: its input, in the dtype of the parameters."""
        return self.batch * self.seq * self.dim * DTYPES[self.dtype].itemsize


class Subject:
    """The layers, their input and the gradient of their output. All ways share the parameters and their gradient buffers."""

    def __init__(self, size: Size, device: str, host: int | None = None):
        self.size, self.device, self.offload = size, device, rg.Offload(host)
        torch.manual_seed(0)
        with torch.device(device):
            self.layers = [Layer(size.dim, size.heads).to(DTYPES[size.dtype]) for _ in range(size.depth)]
            self.x = torch.randn(size.batch, size.seq, size.dim, dtype=DTYPES[size.dtype], requires_grad=True)
            self.back = torch.randn_like(self.x, requires_grad=False)
        self.wanted = [self.x, *(p for layer in self.layers for p in layer.parameters())]
        for t in self.wanted:
            t.grad = torch.zeros_like(t)  # buffers that stay, so that they do not count as activations

    def autocast(self) -> Any:
        """Without the cache of casts: each weight is used once, so it would only hold memory."""
        chosen = self.size.autocast != "none"
        return torch.autocast(self.device, DTYPES[self.size.autocast] if chosen else None, enabled=chosen, cache_enabled=False)

    def step(self, forward: Forward) -> None:
        """Forward and backward."""
        with self.autocast():
            y = forward(self.x)
        y.backward(self.back.to(y.dtype))

    def loop(self, call: Callable[[Any, Tensor], Tensor]) -> Forward:
        def forward(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = call(layer, x)
            return x

        return forward

    def copies(self) -> list[Layer]:
        """Modules of their own, for what is compiled in place, with the same parameters."""
        return [copy.deepcopy(layer, {id(p): p for p in layer.parameters()}) for layer in self.layers]


@dataclass(frozen=True)
class Way:
    make: Callable[[Subject], Forward]
    link: bool = False  # only where there is a link to host memory
    own: bool = False  # another function than the ordinary layers: its gradients are compared with its own under "store"
    keeps: int | None = None  # so many of the last inputs of layers stay on the device, and all others move


def _checkpoint(s: Subject) -> Forward:
    return s.loop(lambda layer, x: checkpoint(layer, x, use_reentrant=False))  # type: ignore[return-value]


def _save_on_cpu(s: Subject) -> Forward:
    forward = _checkpoint(s)

    def moved(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return forward(x)

    return moved


def _partition(s: Subject) -> Forward:
    run = torch.compile(caller(), backend=saving("inductor", PARTITION))
    return s.loop(run)


def _reverse(s: Subject) -> Forward:
    return rg.ReversibleSequence([(layer.attention, layer.mlp) for layer in s.layers], memory="reverse")


WAYS: dict[str, Way] = {
    "ordinary": Way(lambda s: s.loop(lambda layer, x: layer(x))),
    "checkpoint": Way(_checkpoint),
    "save-on-cpu": Way(_save_on_cpu, link=True),
    "rg-checkpoint": Way(lambda s: rg.Sequential(s.layers, memory="checkpoint")),
    "rg-offload": Way(lambda s: rg.Sequential(s.layers, memory=s.offload), link=True, keeps=1),
    "partition": Way(_partition),
    "rg-offload-compiled": Way(lambda s: rg.compile_fns(rg.Sequential(s.copies(), memory=s.offload), lean=PARTITION), link=True),
    "bits": Way(lambda s: rg.Sequential(s.layers, bits=4, memory="reverse"), own=True),
    "reverse": Way(_reverse, own=True),
}
