"""What the first runs of updates leave behind, and where each backward pass stands: plain data for `forward` and `backward`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor

from .. import errors
from .._base.pytrees import tensors
from .._base.torch_private import version_of
from .._memory.budget import Purse
from .._memory.offload import Mover
from ..update import Update
from .call import Streams
from .context import Context
from .module_state import ModuleState

_meta = attrgetter("meta")
Layout = tuple[tuple[int, ...], bool]  # strides and requires_grad


@dataclass(slots=True, eq=False)
class Record:
    """The first run of an update: everything its recomputation needs but tensors of the forward pass."""

    index: int
    number: int  # in the run
    update: Update
    modules: ModuleState
    leaves: list[Layout]  # of the sources
    target_leaves: list[Layout]  # of the target, for rules that save
    drifts: bool  # its sources are recovered with roundings
    lean: bool  # fn ran in its lean form (lean.py)
    drawn: tuple[list[Any], list[Any]] = ([], [])  # the states of the random generators before and after
    given: Any = None  # what was drawn itself, where generators cannot be read: inside a CUDA graph (cuda_graph.py)
    meta: Sequence[Any] = ()  # (shape, dtype, device, version at the end) of each tensor that fn saved
    dead: Sequence[int] = ()  # numbers of those whose graph was gone when fn returned
    stale: Sequence[int] = ()  # numbers of those that fn edited afterwards
    early: bool = False  # nothing is undone, so the recomputation may stop when everything is saved
    own: Sequence[int] = ()  # then: numbers of the saved tensors that fn has made, which are sketched in place of what it returns
    row: list[float] | None = None  # the sketch of what fn returned, as far as it is on a CPU (sketch.py) …
    target_row: list[float] | None = None  # … and of the target before the update, for rules of users
    values: list[Tensor] | None = None  # of an update that is stored: the saved tensors themselves …
    before: Any = None  # … and the target before it
    kept: Any = None  # the target before an update that made NaN or inf of it, which cannot be undone
    ready: list[Tensor | None] | None = None  # what the recomputation saved, until it is asked for

    @property
    def where(self) -> str:
        return errors.at(self.index, self.update)


class Run:
    """Some connected updates in one forward pass. Autograd's graph owns it; it owns nothing of the graph."""

    def __init__(
        self,
        context: Context,
        keeps_sources: bool = False,
        purse: Purse | None = None,
        lean: bool = False,
        mover: Mover | None = None,
    ):
        self.context = context
        self.keeps_sources = keeps_sources  # checkpoint: there is nothing to undo
        self.purse = purse
        self.mover = mover
        self.lean = lean
        self.records: list[Record] = []
        self.live: list[Tensor] | None = None  # saved by the update that is in its first run
        self.vault: Callable[[], Tensor | None] = lambda: None  # weak: a strong one would be a cycle that gc cannot see
        self.stash: list[tuple[Tensor, int]] | None = None  # of what the vault has, where later backward passes may bypass it
        self.layout: list[tuple[str, int, Any]] = []  # of the streams in the vault: name, number of tensors, tree
        self.watched: list[tuple[str, weakref.ref[Tensor], int]] = []  # the vault's tensors, to name one that was edited
        self.walks: dict[int, Walk] = {}  # by graph task
        self.thread = threading.get_ident()
        self.lowest: int | None = None  # the first update that saved anything
        self.scattered = False  # over several devices, where the order of backward is not promised

    def metas(self) -> Iterable[Sequence[Any]]:
        """What updates have saved; most saved the same, and share one list."""
        metas = list(map(_meta, self.records))
        return dict(zip(map(id, metas), metas, strict=True)).values()


class Walk:
    """Where one backward pass stands in a run: `state` is the one after the first `at` updates."""

    __slots__ = (
        "__weakref__", "asked", "at", "context", "filled", "finished", "given", "lowest", "records", "side", "state", "thread",
        "versions",
    )  # fmt: skip

    def __init__(self, run: Run, state: Streams, side: Streams, at: int):
        self.records, self.context, self.thread = run.records, run.context, run.thread  # not the run: that would be a cycle
        self.state, self.side, self.at = state, side, at
        self.given = {id(value): [version_of(t) for t in tensors(value)] for value in side.values()}
        self.finished = False  # the lowest update that saved anything has been asked for
        self.asked = 0  # when an update was last asked for
        self.versions: list[int] | None = None  # of the streams, when an update was last asked for
        self.filled: Record | None = None  # the update whose saved tensors are ready
        self.lowest: dict[int, int] | None = None  # by the id of a parameter, the lowest update that has it

    def edited(self, side: Mapping[str, Any]) -> bool:
        """Whether one of these side inputs was edited since the walk began."""
        return any([version_of(t) for t in tensors(value)] != self.given[id(value)] for value in side.values())

    def needs(self, p: Tensor) -> bool:
        """Whether an update that has this parameter is still to be recomputed."""
        if self.lowest is None:
            records = reversed(self.records)
            self.lowest = {id(p): record.number for record in records for p in record.modules.slots.parameters}
        return self.lowest.get(id(p), self.at) < self.at or (not self.finished and not self.at and id(p) in self.lowest)

    def clear(self) -> None:
        if self.filled is not None:
            self.filled.ready = self.filled = None

    def leave(self) -> None:
        """Nothing more will be asked for."""
        self.state = {}
        self.clear()

    def done(self) -> bool:
        """Whether all of its lowest update was given away; then it leaves."""
        if self.finished and self.filled is not None and not any(t is not None for t in self.filled.ready or ()):
            self.leave()
        return not self.state
