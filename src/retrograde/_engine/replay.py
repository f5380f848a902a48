"""What a recomputation must find as in the first run: autocast, attention backends, random numbers, no transform around."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from .._base.torch_private import ATTENTION, in_dispatch_mode, mps_generator, no_dispatch, outside_transforms, set_grad

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


# -- random numbers ----------------------------------------------------------------------------------------------------


def _mark(generator: torch.Generator) -> Any:
    """The state of a generator."""
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def _equal(a: Any, b: Any) -> bool:
    if a is b or isinstance(a, tuple):
        return a is b or a == b
    if not in_dispatch_mode():
        return torch.equal(a, b)
    with no_dispatch():  # they have values, also where a mode makes tensors that have none
        return torch.equal(a, b)


def _set(generator: torch.Generator, mark: Any) -> None:
    if isinstance(mark, tuple):
        generator.manual_seed(mark[0]).set_offset(mark[1])
    else:
        generator.set_state(mark)


@functools.cache
def _has_mps() -> bool:
    return torch.backends.mps.is_available()


def generators(side: list[Any]) -> list[torch.Generator]:
    """Those of the CPU and of every device in use, and those given as side inputs."""
    found = [torch.default_generator]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_initialized():
            found += module.default_generators
    if _has_mps():
        found.append(mps_generator())
    return found + [g for g in side if isinstance(g, torch.Generator)]


class Draws:
    """Follows the generators through a run. Between fns that draw nothing, one and the same list of states is kept for all."""

    def __init__(self, found: list[torch.Generator]):
        self.generators = found
        self.start = self.marks = [_mark(g) for g in found]

    def follow(self, found: list[torch.Generator]) -> None:
        """Further generators, which fn turns out to hold. Lists of states from before are shorter."""
        new = [g for g in found if all(g is not one for one in self.generators)]
        if new:
            marks = [_mark(g) for g in new]
            self.generators, self.start, self.marks = self.generators + new, self.start + marks, self.marks + marks

    def since(self) -> tuple[list[Any], list[Any]]:
        """The states before and after what ran since the last call."""
        before = self.marks
        self.marks = self._now(before)
        return before, self.marks

    def _now(self, like: list[Any]) -> list[Any]:
        """The present states; the same list if they are those."""
        now = [_mark(g) for g, _ in zip(self.generators, like, strict=False)]
        return like if all(map(_equal, now, like)) else now

    def put_back(self, marks: list[Any] | None = None) -> None:
        """After an exception: the states from before the run, or those."""
        for generator, mark in zip(self.generators, self.start if marks is None else marks, strict=False):
            _set(generator, mark)

    def again(self, before: list[Any]) -> list[Any]:
        """Have fn draw the same numbers as from these states on; returns the present states, for `settle`."""
        present = self._now(before)
        if present is not before:
            self.put_back(before)
        return present

    def settle(self, after: list[Any], present: list[Any]) -> str | None:
        """After fn: the states as they were before `again`. What was drawn otherwise than in the first run, or None."""
        now = self._now(after)
        if now is not present and not all(map(_equal, now, present)):
            self.put_back(present)
        if now is after:
            return None
        other = next(g for g, a, b in zip(self.generators, after, now, strict=False) if not _equal(a, b))
        return f"it drew other random numbers on {other.device}"
