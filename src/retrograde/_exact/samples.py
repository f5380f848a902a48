"""Of what fn saved, the part that is sketched where a recomputation stops before fn returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
    made = [saved[j].detach() for j in own]
    if not made:
        return []
    last = made.pop()
    rows = last.reshape(-1, last.shape[-1]) if last.numel() > _MOST else last
    samples = [[_sample(t) for t in made if t.is_floating_point() is floats] for floats in (True, False)]
    return [rows[:: -(-last.numel() // _MOST)] if rows is not last else last, *(torch.cat(some) for some in samples if some)]


def _sample(t: Tensor) -> Tensor:
    """Some of its elements, along a diagonal of its longer dimensions."""
    long = [(size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size >= _SOME]
    if not long:
        return t.flatten()[:_SOME]
    step = sum(size // _SOME * stride for size, stride in long)
    return t.as_strided((_SOME,), (step,), t.storage_offset())
