"""What a recomputation must find as in the first run: autocast, attention backends, no transform around."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from .._base.torch_private import ATTENTION, outside_transforms, set_grad

_autocast_cache, _set_autocast_cache = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled


class _Local(threading.local):
    depth = 0  # of recomputations inside of recomputations


_LOCAL = _Local()


def replaying() -> bool:
    """True while backward runs fn again, to recompute what its gradient needs."""
    return _LOCAL.depth > 0


@contextlib.contextmanager
def recomputing(then: list[Any]) -> Iterator[None]:
    """Inside, `replaying()` is true, grad is on, modes are as then, and no transform is around."""
    with outside_transforms():
        now, caching, grad = modes(), _autocast_cache(), torch.is_grad_enabled()
        _switch(now, then)
        _set_autocast_cache(False)  # as in the forward pass
        set_grad(True)
        _LOCAL.depth += 1
        try:
            yield
        finally:
            _LOCAL.depth -= 1
            set_grad(grad)
            _set_autocast_cache(caching)
            _switch(then, now)


# -- modes -------------------------------------------------------------------------------------------------------------


@functools.cache
def _modes() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to read and how to set the attention backends, and autocast of every device type."""
    found = list(ATTENTION)
    accelerator = torch.accelerator.current_accelerator()
    for kind in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
        found.append((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)))
        found.append((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)))
    return found


def modes() -> list[Any]:
    """All of them as they are now."""
    return [get() for get, _ in _modes()]


def _switch(now: list[Any], to: list[Any]) -> None:
    if now != to:
        for (_, put), old, new in zip(_modes(), now, to, strict=True):
            if old != new:
                put(new)
