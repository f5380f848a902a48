"""Exact arithmetic on fake tensors, as it would be on a device that is not here: for planning, which counts what it allocates."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor

from .._base.torch_private import is_fake


class _Here(threading.local):
    device: str | None = None


_here = _Here()


@contextlib.contextmanager
def as_on(device: str) -> Iterator[None]:
    """In this thread, streams of fake tensors are carried as those on "cuda" or "cpu" are."""
    before, _here.device = _here.device, device
    try:
        yield
    finally:
        _here.device = before


def pretended(t: Tensor) -> str | None:
    """The device that `t` stands for, if it has no values and a plan is being made."""
    if _here.device is None or type(t) is Tensor:
        return None
    return _here.device if is_fake(t) else None
