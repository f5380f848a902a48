"""Triton kernels: additions to streams, and sketches (sketch.py). Imported only where a tensor is on CUDA.

The kernel that adds takes the sketch, since it has the numbers anyway. The weights are signs: four bits for each element, from a
hash of its position and the number of the leaf. A block of elements is summed in float32. Where that overflows or underflows, or
meets NaN or inf, the block is done again, with care, in float64. Each block then adds what it found to the row.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .range import GRID, LIMIT

BLOCK = {"sketch": 4096, "add": 4096, "plus": 2048}  # the fastest on an H200; `_plus` runs out of registers with more
_WARPS = 4
_ROW = tl.constexpr(
    4
)  # elements next to each other that a thread takes: as wide as it can store float32, so no layout is converted
_WORD = tl.constexpr(8)  # elements that share a hash
_CARE = tl.constexpr(512)  # elements at a time that are done again: few, so as to take few registers from the others
_UNIT = tl.constexpr(2.0**-GRID)
_PUSH = tl.constexpr(1.5 * 2.0 ** (52 - GRID))
_LIMIT = tl.constexpr(LIMIT)
_INF = tl.constexpr(float("inf"))
_LEAST = tl.constexpr(1e-30)  # a sum of squares below may have lost some of them


@triton.jit
def _start(BLOCK: tl.constexpr):
    """The position of the first element of this block."""
    return tl.program_id(0).to(tl.int64) * BLOCK


@triton.jit
def _places(start, count, BLOCK: tl.constexpr):
    """The positions in a block, in rows, and which of them there are."""
    at = start + (tl.arange(0, BLOCK // _ROW)[:, None] * _ROW + tl.arange(0, _ROW)[None, :])
    return at, at < count


# -- sketches ----------------------------------------------------------------------------------------------------------


@triton.jit
def _mixed(h):
    """A hash of 32 bits (the end of MurmurHash3)."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _bits(start, number, BLOCK: tl.constexpr):
    """Four random bits for each position in a block, at the upper end of a word."""
    first = start // _WORD
    key = _mixed(number.to(tl.uint32) * 0x9E3779B1 + (first >> 32).to(tl.uint32) + 1)
    within = tl.arange(0, BLOCK // _ROW) * _ROW
    words = _mixed((within // _WORD).to(tl.uint32) + (first.to(tl.uint32) + key))
    place = (within % _WORD)[:, None] + tl.arange(0, _ROW)[None, :]
    return words[:, None] << (28 - 4 * place).to(tl.uint32)


@triton.jit
def _signed(x, bits):
    """A float32, negated where the upper bit is set."""
    return (x.to(tl.uint32, bitcast=True) ^ (bits & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _five(a, b, c, d, e, a2, b2, c2, d2, e2):
    return a + a2, b + b2, c + c2, d + d2, e + e2


@triton.jit
def _eight(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7]


@triton.jit
def _careful(part, target, start, count, number, TARGET: tl.constexpr):
    """All columns of some elements, row by row, without those that are NaN or inf."""
    at, inside = _places(start, count, _CARE)
    x = tl.load(part + at, inside, 0).to(tl.float64)
    bits = _bits(start, number, _CARE)
    infinite, nan = tl.abs(x) == _INF, x != x
    x = tl.where(infinite | nan, 0.0, x)
    a = tl.sum(tl.where(bits & 0x80000000 != 0, -x, x), 1)
    b = tl.sum(tl.where(bits & 0x40000000 != 0, -x, x), 1)
    c = tl.sum(tl.where(bits & 0x20000000 != 0, -x, x), 1)
    d = tl.sum(tl.where(bits & 0x10000000 != 0, -x, x), 1)
    size = tl.zeros_like(a)
    if TARGET:
        t = tl.load(target + at, inside, 0).to(tl.float64)
        t = tl.where(tl.abs(t) < _INF, t, 0.0)
        size = tl.sum(t * t, 1)
    return a, b, c, d, tl.sum(x * x, 1), size, tl.sum(infinite.to(tl.int32), 1), tl.sum(nan.to(tl.int32), 1)


@triton.jit
def _note(
    row, part, x, target, t, start, count, number,
    WIDE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the sketch of a block to the row. `x` and `t` are its values in float32, unless they are wide."""
    zero = tl.zeros([], tl.float64)
    a, b, c, d, squares, size, infinite, nan = zero, zero, zero, zero, zero, zero, zero, zero
    fine = zero > 0
    if not WIDE:
        bits = _bits(start, number, BLOCK)
        a, b, c, d, squares = tl.reduce(
            (
                tl.sum(_signed(x, bits), 1),
                tl.sum(_signed(x, bits << 1), 1),
                tl.sum(_signed(x, bits << 2), 1),
                tl.sum(_signed(x, bits << 3), 1),
                tl.sum(x * x, 1),
            ),
            0,
            _five,
        )
        zeros = squares + tl.abs(a) + tl.abs(b) + tl.abs(c) + tl.abs(d) == 0
        fine = zeros | ((squares > _LEAST) & (squares < _INF))
        a, b, c, d, squares = a.to(tl.float64), b.to(tl.float64), c.to(tl.float64), d.to(tl.float64), squares.to(tl.float64)
        if TARGET:
            size = tl.sum(tl.sum(t * t, 1), 0)
            fine = fine & (size < _INF)
            size = size.to(tl.float64)
    if not fine:
        sums = _careful(part, target, start, count, number, TARGET)
        for step in range(1, BLOCK // _CARE):
            more = _careful(part, target, start + step * _CARE, count, number, TARGET)
            sums = _eight(sums, more)
        a, b, c, d = tl.sum(sums[0], 0), tl.sum(sums[1], 0), tl.sum(sums[2], 0), tl.sum(sums[3], 0)
        squares, size = tl.sum(sums[4], 0), tl.sum(sums[5], 0)
        infinite, nan = tl.sum(sums[6], 0).to(tl.float64), tl.sum(sums[7], 0).to(tl.float64)
    k = tl.arange(0, 8)
    first = tl.where(k == 0, a, tl.where(k == 1, b, tl.where(k == 2, c, d)))
    last = tl.where(k == 4, squares, tl.where(k == 5, size, tl.where(k == 6, infinite, nan)))
    found = tl.where(k < 4, first, last)
    tl.atomic_add(row + k, found, found != 0, sem="relaxed")


@triton.jit(do_not_specialize=["number"])
def _sketch(part, row, number, count, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    start = _start(BLOCK)
    at, inside = _places(start, count, BLOCK)
    x = at if WIDE else tl.load(part + at, inside, 0).to(tl.float32)
    _note(row, part, x, part, x, start, count, number, WIDE, False, BLOCK)


# -- additions ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["number"])
def _add(
    target, part, new, row, number, count,
    SUBTRACT: tl.constexpr, SKETCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = _start(BLOCK)
    at, inside = _places(start, count, BLOCK)
    t = tl.load(target + at, inside, 0).to(tl.float32)
    x = tl.load(part + at, inside, 0).to(tl.float32)
    tl.store(new + at, (t - x if SUBTRACT else t + x).to(new.dtype.element_ty), inside)
    if SKETCH:
        _note(row, part, x, target, t, start, count, number, False, True, BLOCK)


@triton.jit
def _two_sum(a, b):
    """The rounded sum and what the rounding lost, exactly."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


@triton.jit(do_not_specialize=["slot", "number"])
def _plus(
    high, low, part, new_high, new_low, flags, row, slot, number, count,
    SUBTRACT: tl.constexpr, CHECK: tl.constexpr, WIDE: tl.constexpr, SKETCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = _start(BLOCK)
    at, inside = _places(start, count, BLOCK)
    h = tl.load(high + at, inside, 0)
    l = tl.load(low + at, inside, 0).to(tl.float32) * _UNIT
    p = tl.load(part + at, inside, 0)
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
        some = tl.max(beyond.to(tl.int32), 1)  # in each row
        tl.store(flags + slot + tl.zeros_like(some), 1, some > 0)
    rest = tl.where(tl.abs(new) < float("inf"), rest, 0.0)  # of NaN and inf there is none
    tl.store(new_high + at, new, inside)
    tl.store(new_low + at, (rest / _UNIT).to(tl.int16), inside)
    if SKETCH:
        _note(row, part, p, part, p, start, count, number, WIDE, False, BLOCK)


# -- launches ----------------------------------------------------------------------------------------------------------

KERNELS: dict[str, Any] = {"sketch": _sketch, "add": _add, "plus": _plus}
_MADE: dict[Any, Any] = {}  # compiled kernels: Triton's own search for them takes longer than the launch
_SHORT = (torch.float32, torch.bfloat16, torch.float16)


def launch(name: str, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], *choices: int) -> None:
    """Over the elements of the first tensor."""
    count, device, block = tensors[0].numel(), tensors[0].get_device(), BLOCK[name]
    if not count:
        return
    with contextlib.nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device):
        pointers = [t.data_ptr() for t in tensors]
        grid, key = (-(-count // block), 1, 1), (name, device, *choices, *(t.dtype for t in tensors))
        common = count % 16 == 0 and count < 2**31 and not any(pointer % 16 for pointer in pointers)  # others are compiled apart
        if common and key in _MADE:
            _MADE[key][grid](*pointers, *numbers, count, *choices, block)
        else:
            made = KERNELS[name][grid](*tensors, *numbers, count, *choices, block, num_warps=_WARPS)
            if common:
                _MADE[key] = made


def sketch(part: Tensor, number: int, row: Tensor) -> None:
    """Add the sketch of `part`, which is contiguous, to the row."""
    launch("sketch", (part, row), (number,), part.dtype not in _SHORT)


def add(target: Tensor, part: Tensor, new: Tensor, sign: int, number: int, row: Tensor | None) -> None:
    """All contiguous. With a row, the sketch of `part` and the squares of `target` are added to it."""
    launch("add", (target, part, new, target if row is None else row), (number,), sign < 0, row is not None)


def plus(
    high: Tensor, low: Tensor, part: Tensor, new_high: Tensor, new_low: Tensor,
    sign: int, flags: Tensor | None, slot: int, number: int, row: Tensor | None,
) -> None:  # fmt: skip
    """All of the same dense layout. With flags, a value beyond the limit becomes NaN and `flags[slot]` becomes 1.

    With a row, the sketch of `part` is added to it; then the layout is contiguous.
    """
    tensors = (high, low, part, new_high, new_low, high if flags is None else flags, high if row is None else row)
    launch("plus", tensors, (slot, number), sign < 0, flags is not None, part.dtype not in _SHORT, row is not None)
