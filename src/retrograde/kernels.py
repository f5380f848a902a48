"""Triton kernels. Imported only where a tensor is on CUDA."""

from __future__ import annotations

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


@triton.jit(do_not_specialize=["slot"])
def _plus(
    high, low, part, new_high, new_low, flags, slot, count,
    SUBTRACT: tl.constexpr, CHECK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(high + at, inside).to(tl.float64) + tl.load(low + at, inside).to(tl.float64) * _UNIT
    step = (tl.load(part + at, inside).to(tl.float64) + _PUSH) - _PUSH  # rounded to the grid
    value = value - step if SUBTRACT else value + step
    if CHECK:
        beyond = (tl.abs(value) > _LIMIT) & (tl.abs(value) < float("inf"))
        value = tl.where(beyond, float("nan"), value)
        tl.store(flags + slot + tl.zeros_like(at), 1, inside & beyond)
    rounded = value.to(tl.float32)
    rest = (value - rounded.to(tl.float64)) / _UNIT
    rest = tl.where(rest == rest, rest, 0.0)  # of NaN and inf there is none
    tl.store(new_high + at, rounded, inside)
    tl.store(new_low + at, rest.to(tl.int16), inside)


_kernel: Any = _plus


def plus(
    high: Tensor, low: Tensor, part: Tensor, new_high: Tensor, new_low: Tensor, sign: int, flags: Tensor | None, slot: int
) -> None:
    """All of the same dense layout. With flags, a value beyond the limit becomes NaN and `flags[slot]` becomes 1."""
    count = high.numel()
    if not count:
        return
    with torch.cuda.device_of(high):
        given: list[Any] = [high, low, part, new_high, new_low, high if flags is None else flags, slot, count]
        _kernel[(triton.cdiv(count, _BLOCK),)](*given, SUBTRACT=sign < 0, CHECK=flags is not None, BLOCK=_BLOCK)
