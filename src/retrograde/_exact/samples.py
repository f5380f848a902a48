"""Of what fn saved, the part that is sketched where a recomputation stops before fn returns."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .._base.torch_private import set_grad
from .sketch import usable

_MOST = 1 << 22  # elements of the last tensor
_SOME = 16  # elements of each other one


def sketchable(t: Tensor) -> bool:
    """Not the seeds of attention without dropout, which nobody sets, workspaces of RNNs, or parameters that FSDP has freed."""
    counts = not t.is_floating_point() and t.dtype is not torch.bool
    if t.numel() <= (2 if counts and not t.is_cpu else 0) or t.dtype is torch.uint8 or t.is_complex() or not usable(t):
        return False
    return t.untyped_storage().nbytes() > 0


def seen(saved: Sequence[Tensor], own: Sequence[int]) -> list[Tensor]:
    """The last tensor that fn has made and saved, of a large one every k-th row; and samples of the others, floats and integers.

    All that fn computed in a chain is in the last one; the samples are for what runs beside it.
    """
    if not own:
        return []
    grad = torch.is_grad_enabled()
    set_grad(False)  # quicker than to detach all of them
    try:
        last = saved[own[-1]].detach()
        rows = last.reshape(-1, last.shape[-1]) if last.numel() > _MOST else last
        kinds: tuple[list[Tensor], list[Tensor]] = [], []
        for j in own[:-1]:
            kinds[not saved[j].is_floating_point()].append(_sample(saved[j]))
        return [rows[:: -(-last.numel() // _MOST)] if rows is not last else last, *(torch.cat(some) for some in kinds if some)]
    finally:
        set_grad(grad)


def _sample(t: Tensor) -> Tensor:
    """Some of its elements, along a diagonal of its longer dimensions."""
    found = _diagonal(t.shape, t.stride())
    return t.flatten()[:_SOME] if found is None else t.as_strided(*found, t.storage_offset())


@functools.lru_cache(1024)
def _diagonal(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int], tuple[int]] | None:
    """Size and stride of that; None where no dimension is long, and elements are not dense."""
    long = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size >= _SOME]
    if long:
        return (_SOME,), (sum(size // _SOME * stride for size, stride in long),)
    count, dense = 1, True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        dense = dense and (size == 1 or stride == count)
        count *= size
    return ((min(_SOME, count),), (max(1, count // _SOME),)) if dense else None
