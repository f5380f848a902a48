"""Triton kernels. Imported only where a tensor is on CUDA."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .ledger import GRID, LIMIT

_BLOCK = 1024
_UNIT = tl.constexpr(2.0**-GRID)
_PUSH = tl.constexpr(1.5 * 2.0 ** (52 - GRID))
_LIMIT = tl.constexpr(LIMIT)


@triton.jit
def _two_sum(a, b):
    """The rounded sum and what the rounding lost, exactly."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


@triton.jit(do_not_specialize=["slot"])
def _plus(
    high, low, part, new_high, new_low, flags, slot, count,
    SUBTRACT: tl.constexpr, CHECK: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    h = tl.load(high + at, inside)
    l = tl.load(low + at, inside).to(tl.float32) * _UNIT
    p = tl.load(part + at, inside)
    if WIDE:  # an increment with more than float32 holds
        step = (p.to(tl.float64) + _PUSH) - _PUSH
        step = -step if SUBTRACT else step
        total = h.to(tl.float64) + l.to(tl.float64) + step
        new = total.to(tl.float32)
        rest = (total - new.to(tl.float64)).to(tl.float32)
    else:
        p = p.to(tl.float32)
        step = tl.where(tl.abs(p) < 1.0, tl.extra.cuda.libdevice.rint(p / _UNIT) * _UNIT, p)  # from 1 on all are on the grid
        step = -step if SUBTRACT else step
        total, lost = _two_sum(h, step)
        new, rest = _two_sum(total, lost + l)  # both are short multiples of the grid: no rounding
    finite = tl.abs(total) < float("inf")
    new = tl.where(finite, new, total.to(tl.float32))
    if CHECK:
        beyond = finite & (tl.abs(new) > _LIMIT)
        new = tl.where(beyond, float("nan"), new)
        tl.store(flags + slot + tl.zeros_like(at), 1, inside & beyond)
    rest = tl.where(tl.abs(new) < float("inf"), rest, 0.0)  # of NaN and inf there is none
    tl.store(new_high + at, new, inside)
    tl.store(new_low + at, (rest / _UNIT).to(tl.int16), inside)


_kernel: Any = _plus
_MADE: dict[Any, Any] = {}  # compiled kernels: Triton's own search for them takes longer than the launch


def plus(
    high: Tensor, low: Tensor, part: Tensor, new_high: Tensor, new_low: Tensor, sign: int, flags: Tensor | None, slot: int
) -> None:
    """All of the same dense layout. With flags, a value beyond the limit becomes NaN and `flags[slot]` becomes 1."""
    device = high.get_device()
    with contextlib.nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device):
        count = high.numel()
        wide = part.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        tensors = (high, low, part, new_high, new_low, high if flags is None else flags)
        given = (*tensors, slot, count, sign < 0, flags is not None, wide, _BLOCK)
        grid, key = (triton.cdiv(count, _BLOCK), 1, 1), (device, part.dtype, sign, flags is None)
        common = count % 16 == 0 and count < 2**31 and all(t.data_ptr() % 16 == 0 for t in tensors)  # others are compiled apart
        if common and key in _MADE:
            _MADE[key][grid](*given)
        elif count:
            made = _kernel[grid](*given)
            if common:
                _MADE[key] = made
