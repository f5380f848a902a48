"""Additions on CUDA, each in one kernel, which takes the sketch of what is added as well (sketch.py).

Beside plain floating point there is the split form of a value on the grid, a float32 and an int16 (exact.py).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from .._base.torch_private import in_forward_mode, in_transform
from .fake import pretended
from .range import GRID, LIMIT, Ledger

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SKETCHED = (*_FLOATS, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


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
    return _untransformed(t)


def _untransformed(t: Tensor) -> bool:
    return _on_cuda(t) and not in_transform() and not in_forward_mode()


def _on_cuda(t: Tensor) -> bool:
    return t.is_cuda and type(t) in (Tensor, torch.nn.Parameter) and _kernels() is not None


# -- floating point, and sketches --------------------------------------------------------------------------------------


def sketch(t: Tensor, number: int, row: Tensor) -> bool:
    """Add the sketch of a leaf to `row`, or return False where no kernel can. The weights depend on its number."""
    if torch.compiler.is_dynamo_compiling() or not _on_cuda(t) or t.dtype not in _SKETCHED:
        return False
    _kernels().sketch(t.contiguous(), number, row)
    return True


def add(target: Tensor, part: Tensor, sign: int, number: int = 0, row: Tensor | None = None) -> Tensor | None:
    """`target + part`, or minus, in the target's dtype; and into `row` the sketch of `part` and the size of `target`.

    None where no kernel can: nothing is done then.
    """
    if not addable(target, part):
        return None
    if torch.is_grad_enabled() and (target.requires_grad or part.requires_grad):
        return _Add.apply(target, part, sign, number, row)  # type: ignore[return-value]
    return _added(target, part, sign, number, row)


def addable(target: Tensor, part: Tensor) -> bool:
    """Whether there is a kernel for this addition."""
    if torch.compiler.is_dynamo_compiling() or not (_plain(target) and _plain(part)):
        return False
    if target.dtype is torch.float16 and part.dtype is torch.bfloat16:  # Triton 3.6 rounds the part to float16 before it adds
        return False
    return target.shape == part.shape and target.device == part.device


def _plain(t: Tensor) -> bool:
    return _untransformed(t) and t.dtype in _FLOATS and t.is_contiguous() and not t.is_neg()


def _added(target: Tensor, part: Tensor, sign: int, number: int, row: Tensor | None) -> Tensor:
    new = torch.empty_like(target)
    _kernels().add(target, part, new, sign, number, row)
    return new


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: Tensor, part: Tensor, sign: int, number: int, row: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sign, ctx.dtype = sign, part.dtype
        return _added(target, part, sign, number, row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        return grad, _part_grad(ctx, grad, ctx.needs_input_grad[1]), None, None, None


def _part_grad(ctx: Any, grad: Tensor | None, needed: bool) -> Tensor | None:
    """Of what was added or subtracted."""
    return None if grad is None or not needed else (grad if ctx.sign > 0 else -grad).to(ctx.dtype)


# -- exact -------------------------------------------------------------------------------------------------------------


def on_grid(t: Tensor, bits: int = GRID) -> Tensor:
    """`t` in float64, rounded to a multiple of 2^-bits: a large number pushes the rest out of the mantissa. Never -0.0."""
    push = math.ldexp(1.5, 52 - bits)
    return t.to(torch.float64, copy=True).add_(push).sub_(push)


def splits(own: list[Tensor]) -> bool:
    """Whether there are kernels for a leaf in two parts."""
    return len(own) == 2 and not torch.compiler.is_dynamo_compiling() and all(map(_untransformed, own))


@functools.cache
def noise_kernels() -> Any:
    """The module with those of reversible noise (noise.py)."""
    from . import noise_kernels

    return noise_kernels


def split(t: Tensor, ledger: Ledger | None) -> tuple[Tensor, Tensor]:
    """`t`, rounded to the grid, as `high`, which carries the gradient, and `low`."""
    zero = torch.zeros_like(t, dtype=torch.float32, requires_grad=False)
    return plus(zero, zero.to(torch.int16), t, 1, ledger)


def plus(
    high: Tensor, low: Tensor, part: Tensor, sign: int, ledger: Ledger | None, sketch: tuple[Tensor, int] | None = None
) -> tuple[Tensor, Tensor]:
    """`part`, rounded to the grid, added or subtracted; with a ledger, what leaves the range is written down there.

    With `sketch`, a row and the number of the leaf, the sketch of `part` is added to the row; not in a trace.
    """
    if torch.compiler.is_dynamo_compiling():
        return _in_trace(high, low, part, sign)
    if torch.is_grad_enabled() and (high.requires_grad or part.requires_grad):
        return _Plus.apply(high, low, part, sign, ledger, sketch)  # type: ignore[return-value]
    return _sum(high, low, part, sign, ledger, sketch)


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


def _sum(
    high: Tensor, low: Tensor, part: Tensor, sign: int, ledger: Ledger | None, mark: tuple[Tensor, int] | None
) -> tuple[Tensor, Tensor]:
    if part.stride() != high.stride() or part.is_neg():
        part = torch.empty_like(high, dtype=part.dtype).copy_(part)
    new_high, new_low = torch.empty_like(high), torch.empty_like(low)
    if pretended(high):
        return new_high, new_low
    row, number = (None, 0) if mark is None else mark
    if row is not None and not high.is_contiguous() and sketch(part, number, row):  # a sketch goes by positions in the shape
        row = None
    flags, slot = (None, 0) if ledger is None else (ledger.flags_on(high.device), ledger.index)
    _kernels().plus(high, low, part, new_high, new_low, sign, flags, slot, number, row)
    return new_high, new_low


class _Plus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, high: Tensor, low: Tensor, part: Tensor, sign: int, ledger: Any, mark: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.sign, ctx.dtype = sign, part.dtype
        made = _sum(high, low, part, sign, ledger, mark)
        ctx.mark_non_differentiable(made[1])
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        return grad, None, _part_grad(ctx, grad, ctx.needs_input_grad[2]), None, None, None
