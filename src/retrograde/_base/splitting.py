"""Streams from the parts of an input, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ProgramError
from .pytrees import each, flatten, unflatten


def halves(x: Any, dim: int, way_out: str) -> tuple[Any, Any]:
    """The two halves along `dim` of a tensor, or of every tensor in a tree."""
    first, second = parts_of(x, 2, dim, way_out)
    return first, second


def parts_of(x: Any, count: int, dim: int, way_out: str) -> tuple[Any, ...]:
    """Equal parts along `dim` of a tensor, or of every tensor in a tree."""
    flat, spec = flatten(x)
    for t in flat:
        if not isinstance(t, Tensor) or not -t.dim() <= dim < t.dim():
            got = f"shape {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            raise ProgramError(f"the input needs a dim {dim} to split along, got {got}")
        if t.shape[dim] % count:
            odd, what = ("odd size", "two halves") if count == 2 else ("size", f"{count_word(count)} equal parts")
            raise ProgramError(
                f"the input has {odd} {t.shape[dim]} along dim {dim} (shape {tuple(t.shape)}), so it cannot be split into "
                f"{what}. {way_out}"
            )
    split = [t.chunk(count, dim) for t in flat]
    return tuple(unflatten([parts[i] for parts in split], spec) for i in range(count))


def count_word(count: int) -> str:
    return {2: "two", 3: "three", 4: "four"}.get(count, str(count))


def joined(*parts: Any, dim: int) -> Any:
    """What `parts_of` took apart."""
    return each(lambda *ts: torch.cat(ts, dim), *parts)
