"""Torch's random generators: which there are, what their states are, and how a function draws the same numbers once more."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .torch_private import in_dispatch_mode, mps_generator, no_dispatch


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
