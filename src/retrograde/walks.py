"""Walks: where each backward pass stands in each run."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from .module_state import version_of
from .streams import tensors


class Walk:
    """Where one backward pass stands in a run: `state` is the one after the first `at` updates."""

    __slots__ = (
        "__weakref__", "asked", "at", "filled", "finished", "given", "side", "sketches", "state", "thread", "versions",
    )  # fmt: skip

    def __init__(self, state: dict[str, Any], side: dict[str, Any], at: int, thread: int):
        self.state, self.side, self.at = state, side, at
        self.given = {
            id(value): [version_of(t) for t in tensors(value)] for value in side.values()
        }  # versions of the side inputs
        self.thread = thread  # of the forward pass: the order of nodes is promised only among those of one thread
        self.finished = False  # the lowest update that saved anything has been asked for
        self.asked = 0  # when an update was last asked for
        self.versions: list[int] | None = None  # of the streams, when an update was last asked for
        self.filled: Any = None  # the record of the update whose saved tensors are ready
        self.sketches: Any = None  # of what was recomputed

    def edited(self, side: Mapping[str, Any]) -> bool:
        """Whether one of these side inputs was edited since the walk began."""
        return any([version_of(t) for t in tensors(value)] != self.given[id(value)] for value in side.values())

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
