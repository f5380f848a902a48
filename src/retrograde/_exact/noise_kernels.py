"""Triton kernels of reversible noise (noise.py): the same numbers in one pass. Imported only where a tensor is on CUDA.

A thread takes eight elements, an eighth of all apart: a byte of the hash has their signs, and one int64 has their kept bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from .kernels import _INF, _LIMIT, _PUSH, _UNIT, BLOCK, KERNELS, launch

_ODD = tl.constexpr(0x9E3779B97F4A7C15)
_UNITS = tl.constexpr(1 / _UNIT.value)


@triton.jit
def _mixed(h):
    """A hash of 64 bits (the end of SplitMix64)."""
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    return h ^ (h >> 31)


@triton.jit
def _octets(seed, number, at):
    """A byte of the hash for each place: the signs of the element there, and of those 1, 2, … eighths further on."""
    key = _mixed(tl.load(seed).to(tl.uint64) + number.to(tl.uint64) * _ODD)
    word = _mixed((at // 8 + 1).to(tl.uint64) * _ODD + key)
    return ((word >> (at % 8 * 8).to(tl.uint64)) & 255).to(tl.int32)


@triton.jit
def _places(count, EVEN: tl.constexpr, SIZE: tl.constexpr):
    """How many elements an eighth is, the places of this block in it, and which of them there are."""
    run = (count + 7) // 8
    if EVEN:
        run = tl.multiple_of(run, 16)
    at = tl.program_id(0).to(tl.int64) * (SIZE // 8) + tl.arange(0, SIZE // 8)
    return run, at, at < run


@triton.jit
def _value(high, low, place, inside):
    return tl.load(high + place, inside, 0).to(tl.float64) + tl.load(low + place, inside, 0).to(tl.float64) * _UNIT


@triton.jit
def _on_grid(part, place, inside):
    return (tl.load(part + place, inside, 0).to(tl.float64) + _PUSH) - _PUSH


@triton.jit
def _store(high, low, place, inside, wide, rounded):
    """A value in two parts; of NaN and inf there is no rest."""
    rest = tl.where(tl.abs(rounded) < _INF, (wide - rounded.to(tl.float64)) * _UNITS, 0.0)
    tl.store(high + place, rounded, inside)
    tl.store(low + place, rest.to(tl.int16), inside)


@triton.jit
def _pack(kept, word, at, run, there, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Store a field of all numbers, as `packed` does."""
    for t in tl.static_range(WIDTH):
        byte = word & 0
        for row in tl.static_range(8 // WIDTH):
            digit = word >> ((row * WIDTH + t) * BITS + (BITS & (WIDTH - 1)))
            byte = byte | ((digit & ((1 << WIDTH) - 1)) << (row * WIDTH))
        tl.store(kept + (BITS // (2 * WIDTH) * (2 * WIDTH) + t) * run + at, byte.to(tl.uint8), there)


@triton.jit
def _unpack(kept, word, at, run, there, WIDTH: tl.constexpr, BITS: tl.constexpr):
    for t in tl.static_range(WIDTH):
        byte = tl.load(kept + (BITS // (2 * WIDTH) * (2 * WIDTH) + t) * run + at, there, 0).to(tl.int64)
        for row in tl.static_range(8 // WIDTH):
            digit = (byte >> (row * WIDTH)) & ((1 << WIDTH) - 1)
            word = word | (digit << ((row * WIDTH + t) * BITS + (BITS & (WIDTH - 1))))
    return word


@triton.jit(do_not_specialize=["slot", "number"])
def _noisy(
    high, low, layer, source, seed, new_high, new_low, kept, flags, slot, number, count,
    BITS: tl.constexpr, KEEP: tl.constexpr, CHECK: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    run, at, there = _places(count, EVEN, SIZE)
    octets = _octets(seed, number, at)
    word, strayed = at & 0, octets & 0
    for i in tl.static_range(8):
        place = i * run + at
        inside = there & (place < count)
        wide = _on_grid(layer, place, inside)
        c = tl.load(source + place, inside, 0).to(tl.float64)
        d = (_value(high, low, place, inside) - 2.0 * c + wide) * _UNITS
        share = tl.floor(d * (1.0 / (1 << BITS)))
        new = wide + tl.where((octets >> i) & 1 != 0, -share, share) * _UNIT
        finite = tl.abs(new) < _INF
        rounded = new.to(tl.float32)
        if CHECK:
            beyond = finite & (tl.abs(rounded) > _LIMIT)
            rounded = tl.where(beyond, float("nan"), rounded)
            strayed = strayed | beyond.to(tl.int32)
        _store(new_high, new_low, place, inside, new, rounded)
        if KEEP:
            word = word | (tl.where(finite, d - share * (1 << BITS), 0.0).to(tl.int64) << (i * BITS))
    if CHECK:
        tl.store(flags + slot, 1, tl.max(strayed, 0) > 0)
    if KEEP:
        if BITS & 8:
            _pack(kept, word, at, run, there, 8, BITS)
        if BITS & 4:
            _pack(kept, word, at, run, there, 4, BITS)
        if BITS & 2:
            _pack(kept, word, at, run, there, 2, BITS)
        if BITS & 1:
            _pack(kept, word, at, run, there, 1, BITS)


@triton.jit(do_not_specialize=["number"])
def _back(
    high, low, layer, source, seed, kept, old_high, old_low, number, count,
    BITS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    run, at, there = _places(count, EVEN, SIZE)
    octets = _octets(seed, number, at)
    word = at & 0
    if BITS & 8:
        word = _unpack(kept, word, at, run, there, 8, BITS)
    if BITS & 4:
        word = _unpack(kept, word, at, run, there, 4, BITS)
    if BITS & 2:
        word = _unpack(kept, word, at, run, there, 2, BITS)
    if BITS & 1:
        word = _unpack(kept, word, at, run, there, 1, BITS)
    for i in tl.static_range(8):
        place = i * run + at
        inside = there & (place < count)
        wide = _on_grid(layer, place, inside)
        c = tl.load(source + place, inside, 0).to(tl.float64)
        share = _value(high, low, place, inside) - wide
        digit = (word >> (i * BITS)) & ((1 << BITS) - 1)
        d = tl.where((octets >> i) & 1 != 0, -share, share) * (1 << BITS) + digit.to(tl.float64) * _UNIT
        old = d + 2.0 * c - wide
        _store(old_high, old_low, place, inside, old, old.to(tl.float32))


@triton.jit(do_not_specialize=["number"])
def _shares(
    grad, seed, to_layer, to_source, to_own, number, count,
    BITS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    run, at, there = _places(count, EVEN, SIZE)
    octets = _octets(seed, number, at)
    for i in tl.static_range(8):
        place = i * run + at
        inside = there & (place < count)
        g = tl.load(grad + place, inside, 0)
        step = tl.where((octets >> i) & 1 != 0, -g, g) * (1.0 / (1 << BITS))
        tl.store(to_layer + place, (g + step).to(to_layer.dtype.element_ty), inside)
        tl.store(to_source + place, (step * -2.0).to(to_source.dtype.element_ty), inside)
        tl.store(to_own + place, step, inside)


# -- launches ----------------------------------------------------------------------------------------------------------

KERNELS |= {"noisy": _noisy, "back": _back, "shares": _shares}
BLOCK |= {"noisy": 4096, "back": 4096, "shares": 8192}


def noisy(own: list[Tensor], layer: Tensor, source: Tensor, noise: Any, note: list[Tensor] | None) -> list[Tensor]:
    """With a ledger, what leaves the range becomes NaN and is written down there. Kept bits go to `note`."""
    high, low, layer, source = map(_dense, (*own, layer, source))
    made, count = [torch.empty_like(high), torch.empty_like(low)], high.numel()
    kept = low if note is None else torch.empty(-(-count // 8) * noise.bits, dtype=torch.uint8, device=high.device)
    flags, slot = (low, 0) if noise.ledger is None else (noise.ledger.flags_on(high.device), noise.ledger.index)
    choices = noise.bits, note is not None, noise.ledger is not None, count % 128 == 0
    launch("noisy", (high, low, layer, source, noise.seed, *made, kept, flags), (slot, noise.number), *choices)
    if note is not None:
        note.append(kept)
    return made


def back(own: list[Tensor], layer: Tensor, source: Tensor, noise: Any, kept: Tensor) -> list[Tensor]:
    high, low, layer, source = map(_dense, (*own, layer, source))
    made = [torch.empty_like(high), torch.empty_like(low)]
    launch("back", (high, low, layer, source, noise.seed, kept, *made), (noise.number,), noise.bits, high.numel() % 128 == 0)
    return made


def shares(grad: Tensor, seed: Tensor, number: int, bits: int, made: list[Tensor]) -> None:
    """The gradients of L, c and p, in `made`."""
    launch("shares", (_dense(grad), seed, *made), (number,), bits, grad.numel() % 128 == 0)


def _dense(t: Tensor) -> Tensor:
    return t.resolve_neg().contiguous()
