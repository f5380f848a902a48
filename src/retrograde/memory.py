"""How much is kept between the forward pass and backward: a policy turns a program into stretches of one kind each."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._base.pytrees import tensors
from .errors import ProgramError, unknown

KINDS = ("store", "checkpoint", "reverse")

Stretch = tuple[str, int, int | str | None]  # kind, number of updates, limit in bytes


@dataclass(frozen=True)
class StoreLast:
    """Ordinary autograd for the last k updates (a pair block is two), reversal below them: time for memory."""

    k: int

    def __post_init__(self) -> None:
        _positive(self, "k", self.k)

    def plan(self, count: int) -> list[Stretch]:
        stored = min(self.k, count)
        below: list[Stretch] = [("reverse", count - stored, None)] if stored < count else []
        return [*below, ("store", stored, None)]


@dataclass(frozen=True)
class Anchor:
    """Reversal, with the streams kept every n updates: the drift of recovered streams starts anew there."""

    every: int

    def __post_init__(self) -> None:
        _positive(self, "every", self.every)

    def plan(self, count: int) -> list[Stretch]:
        return [("reverse", min(self.every, count - start), None) for start in range(0, count, self.every)]


@dataclass(frozen=True)
class Budget:
    """Store as many of the last updates as fit into so many bytes of activations, and reverse the rest.

    Counted are the streams, their gradients, what is stored, and room for one function at work. `Budget("auto")` takes what is
    free on the device of the streams, less a tenth, and less the gradients that parameters do not have yet. An optimizer that
    makes its states in its first step needs more: run one step before, or give a number.

    With functions that `rg.compile_fns` has compiled, updates are stored in the lean form, and the last ones in full where there
    is room.
    """

    bytes: int | str

    def __post_init__(self) -> None:
        if self.bytes != "auto":
            _positive(self, "bytes", self.bytes)

    def plan(self, count: int) -> list[Stretch]:
        return [("reverse", count, self.bytes)]


@dataclass(frozen=True)
class ReverseAbove:
    """Ordinary autograd for inputs of at most `length` along `dim`, reversal for longer ones."""

    length: int
    dim: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or isinstance(self.length, bool) or self.length < 0:
            raise ProgramError(f"{self}: length must be a whole number, 0 or more")
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise ProgramError(f"{self}: dim must be a whole number")

    def measured(self, value: Any) -> str:
        """The kind for this input: a tensor, or the first tensor in it."""
        first = next(iter(tensors(value)), None)
        if first is None or not -first.dim() <= self.dim < first.dim():
            got = "no tensor" if first is None else f"shape {tuple(first.shape)}"
            raise ProgramError(f"{self}: the input has no dim {self.dim} to measure, got {got}")
        return "reverse" if first.shape[self.dim] > self.length else "store"


def _positive(policy: Any, name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        auto = ', or "auto"' if isinstance(policy, Budget) else ""
        raise ProgramError(f"{policy}: {name} must be a whole number (an int), 1 or more{auto}")


POLICIES = (StoreLast, Anchor, Budget, ReverseAbove)


def check_memory(memory: Any) -> Any:
    if memory == "overlap":
        warnings.warn("memory='overlap' does not exist any more: it runs as memory='reverse'", stacklevel=3)
        return "reverse"
    if isinstance(memory, POLICIES) or (isinstance(memory, str) and memory in KINDS):
        return memory
    raise unknown("memory policy", memory, [*KINDS, *(f"rg.{policy.__name__}(…)" for policy in POLICIES)])


def settled(memory: Any, value: Any) -> Any:
    """The policy for this input: `ReverseAbove` becomes a kind."""
    return memory.measured(value) if isinstance(memory, ReverseAbove) else memory


def plan(memory: Any, count: int, streams: Mapping[str, Any]) -> list[Stretch]:
    """The stretches of a program of `count` updates."""
    memory = settled(check_memory(memory), list(streams.values()))
    return [(memory, count, None)] if isinstance(memory, str) else memory.plan(count)
