"""The split form of a value on the grid, on CUDA: a float32 and an int16, added to in one kernel."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from .ledger import Ledger


@functools.cache
def _kernels() -> Any:
    """The module with the kernels, or None where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from . import kernels

    return kernels


def usable(t: Tensor) -> bool:
    return (
        t.device.type == "cuda"
        and type(t) in (Tensor, torch.nn.Parameter)
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
        and _kernels() is not None
    )


def split(t: Tensor, ledger: Ledger | None) -> tuple[Tensor, Tensor]:
    """`t`, rounded to the grid, as `high`, which carries the gradient, and `low`."""
    zero = torch.zeros_like(t, dtype=torch.float32, requires_grad=False)
    return plus(zero, zero.to(torch.int16), t, 1, ledger)


def plus(high: Tensor, low: Tensor, part: Tensor, sign: int, ledger: Ledger | None) -> tuple[Tensor, Tensor]:
    """`part`, rounded to the grid, added or subtracted; with a ledger, what leaves the range is written down there."""
    if torch.is_grad_enabled() and (high.requires_grad or part.requires_grad):
        return _Plus.apply(high, low, part, sign, ledger)  # type: ignore[return-value]
    return _sum(high, low, part, sign, ledger)


def _sum(high: Tensor, low: Tensor, part: Tensor, sign: int, ledger: Ledger | None) -> tuple[Tensor, Tensor]:
    if part.stride() != high.stride():
        part = torch.empty_like(high, dtype=part.dtype).copy_(part)
    new_high, new_low = torch.empty_like(high), torch.empty_like(low)
    flags, slot = (None, 0) if ledger is None else (ledger.flags_on(high.device), ledger.index)
    _kernels().plus(high, low, part, new_high, new_low, sign, flags, slot)
    return new_high, new_low


class _Plus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, high: Tensor, low: Tensor, part: Tensor, sign: int, ledger: Ledger | None) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.sign, ctx.dtype = sign, part.dtype
        made = _sum(high, low, part, sign, ledger)
        ctx.mark_non_differentiable(made[1])
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return None, None, None, None, None
        return grad, None, (grad if ctx.sign > 0 else -grad).to(ctx.dtype), None, None
