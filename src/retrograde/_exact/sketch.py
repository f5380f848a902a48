"""Sketches: a tensor as a few numbers, such that another tensor, or the same elements in another order, have other numbers.

A sketch is four random projections. Each element has a weight that depends on its position, so the expected square of a
projection is the sum of squares of the tensor, and the difference of two sketches measures the difference of the tensors.
Infinite elements and NaN are counted and left out of the sums.

- On a CPU a sketch is a list of numbers, taken with one or two small products.
- On other devices it is a row in one table for the whole pass. On CUDA the kernel that adds the output of fn to its stream
  writes it (cuda.py). Nobody waits for the device (verify.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._base.pytrees import tensors
from .._base.torch_private import any_autocast, in_transform, no_dispatch
from . import cuda as fused

PROJECTIONS = 4
# On a CPU a row has for each leaf the projections and how many elements are infinite and how many NaN. In a table there stand
# between them the squares of what was sketched, and those of the stream that it was added to.
WIDTH = PROJECTIONS + 2
SQUARES, TARGET = PROJECTIONS, PROJECTIONS + 1
COLUMNS = PROJECTIONS + 4
_BLOCK = 1024  # weights are made so many at a time: more of them never change the first ones
_FLAT = 4096  # up to so many elements each has its own weight; more are a matrix, with a weight per row and one per column


def usable(t: Tensor) -> bool:
    """Whether the tensor has values that can be read: it is not fake, not meta, not batched and no other subclass."""
    return (
        type(t) in (Tensor, torch.nn.Parameter)
        and t.layout is torch.strided
        and not t.is_meta
        and not t.is_quantized
        and not in_transform()
    )


class Table:
    """The rows of one pass, for tensors that are not on a CPU: on each device one tensor with a row per update and leaf.

    So a small leaf is compared on its own. The last leaves share a row where there are more than rows.
    """

    def __init__(self, count: int, leaves: int = 1):
        self.count, self.leaves = count, leaves
        self.on: dict[torch.device, Tensor] = {}
        self._used: set[tuple[torch.device, int]] = set()

    def row(self, index: int, device: torch.device, number: int = 0) -> Tensor:
        if device not in self.on:
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self.on[device] = torch.zeros(self.count * self.leaves, COLUMNS, dtype=dtype, device=device)
        self._used.add((device, index))
        return self.on[device][min(number, self.leaves - 1) * self.count + index]

    def start(self, index: int) -> None:
        """Empty the rows: an update may be recomputed twice in one backward pass."""
        for device, table in self.on.items():
            if (device, index) in self._used:
                table[index :: self.count].zero_()

    def leaf(self, index: int, number: int, t: Tensor) -> None:
        """Add a leaf to its row."""
        if t.numel() and usable(t) and not fused.sketch(t, number, self.row(index, t.device, number)):
            self.row(index, t.device, number).add_(_masked(t, number))

    def stream(self, index: int, value: Any) -> None:
        """Note the squares of a stream that a rule has made."""
        for number, t in enumerate(tensors(value)):
            if not t.is_cpu and t.numel() and usable(t):
                self.row(index, t.device, number)[TARGET] += _masked(t.detach(), number)[SQUARES]


def take(index: int, value: Any, table: Callable[[], Table]) -> list[float] | None:
    """The row of all leaves of `value` that are on a CPU; what is on other devices goes into the table."""
    if any_autocast():  # it would take the products in 16 bits
        with contextlib.ExitStack() as stack:
            for kind in {t.device.type for t in tensors(value)}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return _take(index, value, table)
    return _take(index, value, table)


def _take(index: int, value: Any, table: Callable[[], Table]) -> list[float] | None:
    if type(value) is Tensor and value.is_cpu:  # as a rule
        return _on_cpu(value.detach(), 0) if value.numel() and usable(value) else None
    row: list[float] = []
    others = []
    for number, t in enumerate(tensors(value)):
        if not t.is_cpu:
            others.append((number, t))
        elif t.numel() and usable(t):
            row += _on_cpu(t.detach(), number)
    if others:
        table().start(index)
        for number, t in others:
            table().leaf(index, number, t.detach())
    return row or None


def strange(row: list[float]) -> bool:
    """Whether there are NaN or infinite elements."""
    return any(row[PROJECTIONS::WIDTH]) or any(row[PROJECTIONS + 1 :: WIDTH])


def squares(value: Any) -> list[float]:
    """Of each leaf that is in a row of a CPU the sum of squares of its finite elements."""
    return [_squares(_real(t.detach()).view(-1)) for t in tensors(value) if t.is_cpu and t.numel() and usable(t)]


def _squares(flat: Tensor) -> float:
    found = torch.dot(flat, flat).item()
    if math.isfinite(found):
        return found
    wide = flat.double()
    return torch.where(wide.isfinite(), wide, 0.0).square().sum().item()


# -- of one tensor -----------------------------------------------------------------------------------------------------


def _on_cpu(t: Tensor, number: int) -> list[float]:
    found = _project(_real(t), number).tolist()
    if math.isfinite(sum(found)):
        return [*found, 0.0, 0.0]
    row = _masked(t, number).tolist()
    return [*row[:PROJECTIONS], *row[-2:]]


def _masked(t: Tensor, number: int) -> Tensor:
    """All columns of a table, with infinite elements and NaN counted and left out, without a look at them."""
    wide = _real(t)
    if wide.device.type != "mps":
        wide = wide.double()  # what overflows in float32 is no infinite element
    finite, nans = wide.isfinite(), wide.isnan().sum()
    wide = torch.where(finite, wide, 0.0)
    rest = [wide.square().sum(), torch.zeros_like(wide.sum()), (~finite).sum() - nans, nans]
    return torch.cat([_project(wide, number), torch.stack([one.to(wide.dtype) for one in rest])])


def _real(t: Tensor) -> Tensor:
    """As real numbers, in float32 or wider, in the order of their positions."""
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    if t.dtype is not torch.float32 and t.dtype is not torch.float64:
        t = t.float() if t.is_floating_point() or t.device.type == "mps" else t.double()
    return t.contiguous()


def _project(wide: Tensor, number: int) -> Tensor:
    flat, count = wide.view(-1), wide.numel()
    if count <= _FLAT:
        return torch.mv(_weights(flat, 3 * number, count), flat)
    rows = count // _BLOCK
    body, rest = flat[: rows * _BLOCK].view(rows, _BLOCK), flat[rows * _BLOCK :]
    left = _weights(flat, 3 * number + 1, rows) @ body
    found = (left * _weights(flat, 3 * number + 2, _BLOCK)).sum(1)
    return found if rows * _BLOCK == count else found + torch.mv(_weights(flat, 3 * number, count - rows * _BLOCK), rest)


_WEIGHTS: dict[Any, Tensor] = {}
_SLICES: dict[Any, Tensor] = {}  # of them, as making one costs as much as a product
_MANY = 64


def _weights(like: Tensor, kind: int, count: int) -> Tensor:
    """The first weights of a kind, `PROJECTIONS` rows of them. They are Gaussian, so no two positions have the same."""
    key = like.device, like.dtype, kind, count
    found = _SLICES.get(key)
    if found is None:
        made = _WEIGHTS.get(key[:3])
        if made is None or made.shape[1] < count:
            blocks = -(-count // _BLOCK)
            blocks = 1 << (blocks - 1).bit_length()  # twice as many as before, at least
            with torch.inference_mode(False), no_dispatch():  # they have values, whatever mode is around
                parts = [_block(kind, number) for number in range(blocks)]
                _WEIGHTS[key[:3]] = made = torch.cat(parts, 1).to(like.device, like.dtype)
        if len(_SLICES) >= _MANY:
            _SLICES.clear()
        with torch.inference_mode(False):
            _SLICES[key] = found = made[:, :count]
    return found


def _block(kind: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * number + kind)
    return torch.randn(PROJECTIONS, _BLOCK, generator=generator, dtype=torch.float64, device="cpu")
