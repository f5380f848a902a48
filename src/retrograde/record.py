"""What the first run of an update leaves behind, and the hooks that collect what fn saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from sys import getrefcount
from typing import Any, TypeAlias

from torch import Tensor

from . import errors
from .call import Streams
from .exact import read
from .keep import source
from .module_state import ModuleState
from .parts import home_of
from .streams import each, flatten, tensors, unflatten, with_strides
from .trace_check import untraced
from .update import Update

Place: TypeAlias = tuple[int]  # what autograd keeps instead of a saved tensor: its number. The graph alone holds on to it


@dataclass(slots=True, eq=False)
class Record:
    """What the first run of an update leaves behind: everything the recomputation needs but tensors of the forward pass."""

    index: int
    number: int  # in the run
    update: Update
    modules: ModuleState
    leaves: list[tuple[tuple[int, ...], bool]]  # strides and requires_grad of the leaves of the sources
    target_leaves: list[tuple[tuple[int, ...], bool]]  # the same of the target, for rules that save
    drifts: bool  # its sources are recovered with roundings
    lean: bool  # fn ran in its lean form (forms.py)
    drawn: tuple[list[Any], list[Any]] = ([], [])  # the states of the random generators before and after
    given: Any = None  # what was drawn itself, where generators cannot be read: inside a CUDA graph (capture.py)
    meta: Sequence[Any] = ()  # (shape, dtype, device, version at the end) of each tensor that fn saved
    dead: Sequence[int] = ()  # numbers of those whose graph was gone when fn returned: nobody asks for them
    stale: Sequence[int] = ()  # numbers of those that fn edited afterwards
    row: list[float] | None = None  # the sketch of what fn returned, as far as it is on a CPU (sketch.py) …
    target_row: list[float] | None = None  # … and of the target before the update, for rules of users
    values: list[Tensor] | None = None  # of an update that is stored: the saved tensors themselves …
    before: Any = None  # … and the target before it
    kept: Any = None  # the target before an update that made NaN or inf of it, which cannot be undone
    ready: list[Tensor | None] | None = None  # what the recomputation saved, until it is asked for

    @property
    def where(self) -> str:
        return errors.at(self.index, self.update)

    def sources_again(self, state: Streams) -> list[Any]:
        """The recovered sources in the layout and with the flags that fn saw."""
        if len(self.leaves) == len(self.update.sources) == 1 and isinstance(t := state[self.update.sources[0]], Tensor):
            strides, grad = self.leaves[0]
            t = with_strides(t, strides)
            return [source(t) if grad else t]
        rest, again = iter(self.leaves), {}

        def leaf(t: Tensor) -> Tensor:
            strides, grad = next(rest)
            t = with_strides(t, strides)
            return source(t) if grad else t

        for name in self.update.sources:
            value = each(leaf, read(state[name]))
            again.setdefault(name, value)  # twice the same: so it was for fn
        return [again[name] for name in self.update.sources]

    def target_again(self, target: Any) -> Any:
        flat, spec = flatten(target)
        pairs = zip(flat, self.target_leaves, strict=True)
        dense = [(with_strides(t, strides), grad) for t, (strides, grad) in pairs]
        return unflatten([source(t) if grad else t.detach() for t, grad in dense], spec)


def check_captured(record: Record, own: Any, values: list[Any]) -> None:
    """A saved tensor with another version than in the first run, which is none of our own, was edited from outside."""
    homes = {home_of(t) for t in tensors(own)}
    for old, t in zip(record.meta, values, strict=True):
        if t is not None and old != look(t) and home_of(t) not in homes:
            raise errors.changed_since(record.where, record.modules.name_of(t) or errors.held_tensor(t.shape))


@untraced
def packer(store: list[Any], places: list[Place], versions: list[int] | None = None) -> Callable[[Tensor], Place]:
    """A pack hook that collects what is saved and leaves its place. The graph holds on to it: empty the lists afterwards."""

    def pack(t: Tensor) -> Place:
        place = (len(store),)
        store.append(t)
        places.append(place)
        return place

    def noting(t: Tensor) -> Place:
        versions.append(t._version)  # type: ignore[union-attr]
        return pack(t)

    return pack if versions is None else noting


def reader(store: list[Any], record: Record) -> Callable[[Place], Tensor]:
    """The unpack hook of a recomputation, for a fn that itself calls autograd.grad. The list is empty when that is over."""

    def read(place: Place) -> Tensor:
        (j,) = place
        if j >= len(store):
            raise errors.ReplayError(
                "a tensor that fn left behind while it was recomputed has no graph. Leave it `if not rg.replaying():`",
                record.where,
            )
        return store[j]

    return read


version = attrgetter("_version")
look = attrgetter("shape", "dtype", "device", "_version")


def describe(store: list[Any], known: list[list[Any]]) -> list[Any]:
    """(shape, dtype, device, version) of each; equal lists are the same object, as many objects would keep gc busy."""
    meta = list(map(look, store))
    for other in known:
        if other == meta:
            return other
    known.insert(0, meta)
    del known[8:]
    return meta


_unused = next(map(getrefcount, [object()]))  # the count of what only a list holds


def dead(places: list[Place]) -> Sequence[int]:
    """Numbers of saved tensors whose graph is gone, as that of a norm which a hook computes and prints."""
    counts = list(map(getrefcount, places))
    places.clear()
    return [j for j, count in enumerate(counts) if count <= _unused] if _unused in counts else ()


def by_number(record: Record, values: list[Any], gone: Sequence[int]) -> list[Any]:
    """What was saved, at the numbers of the first run, or an error. Graphs that are gone need not be the same."""
    then = [j for j in range(len(record.meta)) if j not in record.dead]
    kept = [t for j, t in enumerate(values) if j not in gone]
    if difference_of([record.meta[j] for j in then], list(map(look, kept))) is None:
        found = dict(zip(then, kept, strict=True))
        return [found.get(j) for j in range(len(record.meta))]
    if difference := difference_of(record.meta, list(map(look, values))):
        raise errors.other_path(record.where, difference)
    return values


def difference_of(old: Sequence[Any], new: Sequence[Any]) -> str | None:
    """What differs besides versions, or None."""
    if len(old) != len(new):
        return f"it saved {len(new)} tensors for its gradient, {len(old)} before"
    other = ((a, b) for a, b in zip(old, new, strict=True) if a[:3] != b[:3])
    return next((f"it saved a tensor of {_words(b)}, {_words(a)} before" for a, b in other), None)


def _words(key: Any) -> str:
    shape, dtype, device, _ = key
    return f"shape {tuple(shape)}, {dtype}, on {device}"
