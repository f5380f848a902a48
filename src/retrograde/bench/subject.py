"""What is measured: pair blocks of the user's own or ours, their input, and the forward pass of a variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg

from .._base.torch_private import compiler_config
from ..models.blocks import DTYPES

Forward = Callable[[Tensor], Tensor]


def input_of(setting: dict[str, Any]) -> Tensor:
    """Requires a gradient, as what an embedding returns does."""
    generator = torch.Generator().manual_seed(setting["seed"])
    x = torch.randn(setting["shape"], generator=generator).to(setting["device"], DTYPES[setting["dtype"]])
    return x.requires_grad_()


def forward_of(variant: dict[str, Any], net: rg.ReversibleSequence) -> Forward:
    """The forward pass of this variant; the parameters are those of the net."""
    if variant["partition"] is not None:
        compiler_config().activation_memory_budget = variant["partition"]
    if variant["compiled"] == "functions":
        _compile(variant, net)
    forward = _uncompiled(variant, net)
    return torch.compile(forward, fullgraph=True) if variant["compiled"] == "whole" else forward


def _compile(variant: dict[str, Any], net: rg.ReversibleSequence) -> None:
    """Each function by itself; for retrograde in the two forms that budgets choose from, if functions are modules."""
    if variant["way"] == "retrograde" and all(isinstance(fn, nn.Module) for fn in net.functions()):
        rg.compile_fns(net)
        return
    blocks: Any = net.blocks
    for block in blocks:
        block.f, block.g = torch.compile(block.f), torch.compile(block.g)


def _uncompiled(variant: dict[str, Any], net: rg.ReversibleSequence) -> Forward:
    pairs = [(block.f, block.g) for block in net.blocks]
    if variant["way"] == "ordinary":
        return lambda x: _loop(pairs, x, lambda fn, x: fn(x))
    if variant["way"] == "checkpoint":
        return lambda x: _loop(pairs, x, lambda fn, x: checkpoint(fn, x, use_reentrant=False))
    if variant["way"] == "retrograde":
        net.memory, net.verify = _policy(variant["memory"], 2 * len(pairs)), "warn"  # the gradient error is a figure here
        return net
    from .peers import forward_of as forward_of_peer

    return forward_of_peer(variant["way"], pairs)


def _loop(pairs: list[tuple[Any, Any]], x: Tensor, call: Callable[[Any, Tensor], Tensor]) -> Tensor:
    x1 = x2 = x
    for f, g in pairs:
        x1 = x1 + call(f, x2)
        x2 = x2 + call(g, x1)
    return (x1 + x2) / 2


def _policy(memory: Any, updates: int) -> Any:
    if isinstance(memory, str):
        return memory
    return rg.Budget(memory["budget"]) if "budget" in memory else rg.StoreLast(max(1, round(memory["store_share"] * updates)))


def preallocate(net: nn.Module, x: Tensor) -> None:
    """Gradient buffers that stay, so that they do not count as activations."""
    for t in (x, *net.parameters()):
        if t.requires_grad:
            t.grad = torch.zeros_like(t)
