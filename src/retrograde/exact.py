"""Addition that loses nothing: streams are carried on a fixed grid, and what is added is rounded to that grid first.

A value on the grid is a multiple of 2^-24, up to ±32766. That is 39 bits: float64 holds them all, and so do a float32 (`high`,
the rounded value) and an int16 (`low`, the rest in units of the grid) together. Sums and differences of such values are exact, so
undoing an update gives back the very bits. fn reads the value rounded to the stream's own dtype.

- "wide", the plain path: one float64 tensor for each leaf. Rounding is two additions, and the gradient of all of it is one.
- "split", on CUDA: `high` and `low`, in a fused kernel that moves no more bytes than it must (fused.py).
Streams of float64 have a finer grid, 2^-35, and take the plain path.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, register_pytree_node

from . import fused
from .ledger import GRID, Ledger
from .replay import replaying
from .streams import flatten, unflatten

FINE = 35  # bits behind the point, for float64


class Exact:
    """A stream on the grid. As a pytree it is the list of the tensors it is made of."""

    __slots__ = ("kinds", "ledger", "made", "spec")

    def __init__(self, made: list[Tensor], kinds: list[tuple[torch.dtype, str]], spec: TreeSpec | None, ledger: Ledger):
        self.made = made  # one tensor for each leaf, or two where it is split
        self.kinds = kinds  # of each leaf: its dtype for fn, and "wide", "split" or, for whole numbers, "plain"
        self.spec, self.ledger = spec, ledger

    def leaves(self) -> list[tuple[torch.dtype, str, list[Tensor]]]:
        rest = iter(self.made)
        return [(dtype, kind, [next(rest) for _ in range(2 if kind == "split" else 1)]) for dtype, kind in self.kinds]

    def read(self) -> Any:
        """The stream as fn sees it."""
        return unflatten([_rounded(made[0], dtype) for dtype, _, made in self.leaves()], self.spec)

    def outline(self) -> Any:
        """A tree of tensors that have the stream's shapes."""
        return unflatten([made[0] for _, _, made in self.leaves()], self.spec)

    def plus(self, out: Any, sign: int) -> Exact:
        """The stream with `out`, rounded to the grid, added or subtracted."""
        ledger = None if replaying() else self.ledger  # a second run meets the values of the first
        parts = [out] if self.spec is None else self.spec.flatten_up_to(out)
        made: list[Tensor] = []
        for (dtype, kind, own), part in zip(self.leaves(), parts, strict=True):
            if kind == "plain":
                made.append((own[0] + sign * part).to(dtype))
            elif kind == "split":
                made += fused.plus(own[0], own[1], part, sign, ledger)
            else:
                step = on_grid(part, _bits(dtype))
                total = own[0] + step if sign > 0 else own[0] - step
                made.append(total if ledger is None else ledger.within(total))
        return Exact(made, self.kinds, self.spec, self.ledger)


register_pytree_node(Exact, lambda e: (e.made, (e.kinds, e.spec, e.ledger)), lambda made, rest: Exact(list(made), *rest))


def carried(value: Any, ledger: Ledger) -> Exact:
    """A stream, put on the grid."""
    flat, spec = flatten(value)
    made: list[Tensor] = []
    kinds: list[tuple[torch.dtype, str]] = []
    for t in flat:
        kind = "plain"
        if t.is_floating_point():
            kind = "split" if t.dtype != torch.float64 and fused.usable(t) else "wide"
            wide = ledger.within(on_grid(t, _bits(t.dtype)))
            made += fused.split(wide) if kind == "split" else (wide,)
        else:
            made.append(t)
        kinds.append((t.dtype, kind))
    return Exact(made, kinds, spec, ledger)


def read(value: Any) -> Any:
    """A stream as fn sees it, however it is carried."""
    return value.read() if isinstance(value, Exact) else value


def on_grid(t: Tensor, bits: int) -> Tensor:
    """`t` in float64, rounded to a multiple of 2^-bits: a large number pushes the rest out of the mantissa. Never -0.0."""
    push = math.ldexp(1.5, 52 - bits)
    return t.to(torch.float64, copy=True).add_(push).sub_(push)


def _bits(dtype: torch.dtype) -> int:
    return FINE if dtype == torch.float64 else GRID


def _rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    if t.dtype == torch.float64 != dtype:
        t = t.to(torch.float32)  # and from there to 16 bits, as where it is split
    return t.to(dtype)
