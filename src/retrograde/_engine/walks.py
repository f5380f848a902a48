"""Walks: where each backward pass stands in each run."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._base.pytrees import tensors
from .._base.torch_private import version_of


class Walk:
    """Where one backward pass stands in a run: `state` is the one after the first `at` updates."""

    __slots__ = (
        "__weakref__", "asked", "at", "filled", "finished", "given", "lowest", "records", "side", "state", "thread", "versions",
    )  # fmt: skip

    def __init__(self, state: dict[str, Any], side: dict[str, Any], at: int, thread: int, records: list[Any]):
        self.state, self.side, self.at, self.records = state, side, at, records
        self.given = {
            id(value): [version_of(t) for t in tensors(value)] for value in side.values()
        }  # versions of the side inputs
        self.thread = thread  # of the forward pass: the order of nodes is promised only among those of one thread
        self.finished = False  # the lowest update that saved anything has been asked for
        self.asked = 0  # when an update was last asked for
        self.versions: list[int] | None = None  # of the streams, when an update was last asked for
        self.filled: Any = None  # the record of the update whose saved tensors are ready
        self.lowest: dict[int, int] | None = None  # by the id of a parameter, the lowest update that has it

    def edited(self, side: Mapping[str, Any]) -> bool:
        """Whether one of these side inputs was edited since the walk began."""
        return any([version_of(t) for t in tensors(value)] != self.given[id(value)] for value in side.values())

    def needs(self, p: Tensor) -> bool:
        """Whether an update that has this parameter is still to be recomputed."""
        if self.lowest is None:
            found = ((id(p), record.number) for record in reversed(self.records) for p in record.modules.slots.parameters)
            self.lowest = dict(found)
        return self.lowest.get(id(p), self.at) < self.at or (not self.finished and not self.at and id(p) in self.lowest)

    def clear(self) -> None:
        if self.filled is not None:
            self.filled.ready = self.filled = None

    def leave(self) -> None:
        """Nothing more will be asked for."""
        self.state = {}
        self.clear()


# Walks of one thread in the order of their beginning, so that what is done with can go before the task ends: otherwise a
# program inside a program would not be flat. Autograd executes nodes in the reverse order of their making, so
# - a walk that has given away all of its lowest update is done with when another begins (but not before: a Function may read its
#   saved tensors twice), and
# - when a walk goes on to another update, the walks that began since the last one were inside of that one, and are done with.
class _Local(threading.local):
    begun: list[tuple[int, weakref.ref[Walk]]] = []  # of no thread: each makes its own  # noqa: RUF012


_LOCAL = _Local()
_COUNT = itertools.count(1)


def enrol(walk: Walk) -> None:
    begun = [(number, ref) for number, ref in _LOCAL.begun if not _done_with(ref())]
    _LOCAL.begun = [*begun, (next(_COUNT), weakref.ref(walk))]


def needed(p: Tensor) -> bool:
    """Whether a backward pass of this thread has yet to recompute a function that has this parameter."""
    return any(walk.needs(p) for _, ref in _LOCAL.begun if (walk := ref()) is not None and walk.state)


def _done_with(walk: Walk | None) -> bool:
    if walk is not None and walk.finished and walk.filled is not None and not any(t is not None for t in walk.filled.ready or ()):
        walk.leave()
    return walk is None or not walk.state


def retire(walk: Walk) -> None:
    begun, asked = _LOCAL.begun, walk.asked
    while asked and begun and begun[-1][0] > asked:
        inner = begun.pop()[1]()
        if inner is not None and inner.thread == walk.thread:
            inner.leave()
    walk.asked = next(_COUNT)
