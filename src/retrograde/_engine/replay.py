"""What a recomputation must find as the first run did: autocast, attention backends, no transform around."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

_autocast_cache, _set_autocast_cache = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_grad, _set_grad = torch.is_grad_enabled, torch._C._set_grad_enabled
_has_key, _transformed = torch._C._dispatch_tls_is_dispatch_key_included, torch._C._are_functorch_transforms_active


_NOTHING = contextlib.nullcontext()


class _Local(threading.local):
    depth = 0  # of recomputations inside of recomputations


_LOCAL = _Local()


def replaying() -> bool:
    """True while backward runs fn again, to recompute what its gradient needs."""
    return _LOCAL.depth > 0


@contextlib.contextmanager
def recomputing(then: list[Any]) -> Iterator[None]:
    """Inside, `replaying()` is true, grad is on, modes are as then, and no transform is around."""
    with _outside_vmap() if _has_key(_VMAP) or _transformed() else _NOTHING:
        now, caching, grad = modes(), _autocast_cache(), _grad()
        _switch(now, then)
        _set_autocast_cache(False)  # as in the forward pass
        _set_grad(True)
        _LOCAL.depth += 1
        try:
            yield
        finally:
            _LOCAL.depth -= 1
            _set_grad(grad)
            _set_autocast_cache(caching)
            _switch(then, now)


# -- modes -------------------------------------------------------------------------------------------------------------


@functools.cache
def _modes() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to read and how to set the attention backends, and autocast of every device type."""
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
        (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
        (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
        (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    ]
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


# -- transforms --------------------------------------------------------------------------------------------------------

_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")
_FUNC_VMAP: Any = torch._C._parse_dispatch_key("FuncTorchVmapMode")


@contextlib.contextmanager
def _outside_vmap() -> Iterator[None]:
    """`is_grads_batched` runs backward under vmap, and fn must not notice."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    keys = torch._C.DispatchKeySet(_VMAP) | torch._C.DispatchKeySet(_FUNC_VMAP)
    with temporarily_clear_interpreter_stack(), torch._C._ExcludeDispatchKeyGuard(keys):
        yield
