"""The split form of a value on the grid, on CUDA: a float32 and an int16, added to in one kernel."""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from .ledger import GRID, LIMIT, Ledger
from .pretence import pretended


@functools.cache
def _kernels() -> Any:
    """The module with the kernels, or None where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from . import kernels

    return kernels


def usable(t: Tensor) -> bool:
    if torch.compiler.is_dynamo_compiling() or pretended(t) == "cuda":
        return True
    return (
        t.device.type == "cuda"
        and type(t) in (Tensor, torch.nn.Parameter)
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
        and _kernels() is not None
    )


def on_grid(t: Tensor, bits: int = GRID) -> Tensor:
    """`t` in float64, rounded to a multiple of 2^-bits: a large number pushes the rest out of the mantissa. Never -0.0."""
    push = math.ldexp(1.5, 52 - bits)
    return t.to(torch.float64, copy=True).add_(push).sub_(push)


def split(t: Tensor, ledger: Ledger | None) -> tuple[Tensor, Tensor]:
    """`t`, rounded to the grid, as `high`, which carries the gradient, and `low`."""
    zero = torch.zeros_like(t, dtype=torch.float32, requires_grad=False)
    return plus(zero, zero.to(torch.int16), t, 1, ledger)


def plus(high: Tensor, low: Tensor, part: Tensor, sign: int, ledger: Ledger | None) -> tuple[Tensor, Tensor]:
    """`part`, rounded to the grid, added or subtracted; with a ledger, what leaves the range is written down there."""
    if torch.compiler.is_dynamo_compiling():
        return _in_trace(high, low, part, sign)
    if torch.is_grad_enabled() and (high.requires_grad or part.requires_grad):
        return _Plus.apply(high, low, part, sign, ledger)  # type: ignore[return-value]
    return _sum(high, low, part, sign, ledger)


def _in_trace(high: Tensor, low: Tensor, part: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """The kernel in plain operations, which the compiler fuses; beyond the range there is NaN."""
    unit = 2.0**-GRID
    if part.dtype == torch.float64:  # an increment with more than float32 holds
        total = high.double() + low.double() * unit + sign * on_grid(part)
        new = total.to(torch.float32)
        rest = total - new
    else:
        given = part.to(torch.float32)
        step = torch.where(given.abs() < 1, (given / unit).round() * unit, given)  # from 1 on all are on the grid
        step = given + (step - given).detach()  # the same number, and the gradient passes
        new, lost = _two_sum(high, sign * step)
        new, rest = _two_sum(new, lost + low.to(torch.float32) * unit)
    new = torch.where(new.isfinite() & (new.abs() > LIMIT), torch.nan, new)
    return new, torch.where(new.isfinite(), (rest / unit).detach(), 0.0).to(torch.int16)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and what the rounding lost, exactly."""
    total = a + b
    of_b = (total - a).detach()
    return total, ((a - (total - of_b)) + (b - of_b)).detach()


def _sum(high: Tensor, low: Tensor, part: Tensor, sign: int, ledger: Ledger | None) -> tuple[Tensor, Tensor]:
    if part.stride() != high.stride():
        part = torch.empty_like(high, dtype=part.dtype).copy_(part)
    new_high, new_low = torch.empty_like(high), torch.empty_like(low)
    if pretended(high):
        return new_high, new_low
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
