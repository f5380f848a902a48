"""Backward: what fn saved is recomputed when autograd asks for it.

The algebra. An update is `t' = apply(t, fn(s))`, where t is not among the streams s; it is undone by `t = undo(t', fn(s))`.
So the inputs of all functions can be recovered from the final streams, last update first.

The rules.
1. Autograd's graph stays in place; only what it keeps is changed. Each fn runs with grad under saved-tensor hooks, and for each
   tensor that autograd wants to save, the pack hook leaves just its number (`forward.py`).
2. The final streams and the tensors among the side inputs are saved *by autograd*, in a node of their own, one for each set of
   connected streams (`nodes.py`). The run holds no tensor of the forward pass, so outer programs, checkpoint and
   save_on_cpu apply.
3. The first unpack inside update k asks for what fn saved there. The engine walks down from where it is: it runs each fn on the
   recovered sources, undoes the update, and hands out what the fn of update k saved this time (`recompute.py`).
4. A walk belongs to one graph task (one call of backward) and ends with it. Autograd executes nodes in the reverse order of
   their making, so a walk goes down once; whatever is asked for out of turn is walked to again from the top.
5. A recomputation must save what the first run saved, in number, shape, dtype and device, and fn must return what it returned
   (`verify.py`); anything else is an error.

Below, in the order in which things happen: a gradient reaches the final streams (`start`), autograd asks for a saved tensor
(`unpacker`, `fetch`, `_down`), the backward pass ends (`_end`).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .. import errors
from .._base.pytrees import tensors, unflatten
from .._base.torch_private import at_end_of_backward, graph_task, keeps_graph, version_of
from .._base.vaults import cut
from .call import Streams
from .nodes import Place
from .recompute import recompute
from .records import Record, Run, Walk

_PATIENCE = 600.0  # seconds
_LOCK = threading.RLock()  # one recomputation at a time: random states and the slots of modules belong to the whole process
_version = attrgetter("_version")


# -- a gradient reaches the final streams ------------------------------------------------------------------------------


def start(run: Run) -> None:
    """Begin the walk of this backward pass, unless it has begun."""
    if graph_task() not in run.walks:
        _begin(run, _top(run))


def _top(run: Run) -> list[Tensor]:
    """What the walk starts from. Double backward may get here without passing a Keep node, and then finds the stash."""
    vault = run.vault()
    try:
        if vault is not None:
            saved = list(vault.grad_fn.saved_tensors)  # type: ignore[union-attr]
            for (name, _, version), t in zip(run.watched, saved, strict=True):
                if version_of(t) > version:  # hooks around the program switch off autograd's own check
                    raise errors.edited_output(name)
            return saved
    except RuntimeError as error:  # autograd's version check
        for name, ref, version in run.watched:
            t = ref()
            if t is not None and version_of(t) != version:
                raise errors.edited_output(name) from error
        raise
    if run.stash is None:
        raise errors.freed()
    for (name, _, _), (t, version) in zip(run.watched, run.stash, strict=True):
        if version_of(t) != version:
            raise errors.edited_output(name)
    return [t for t, _ in run.stash]


def _begin(run: Run, saved: list[Tensor]) -> Walk:
    """A new walk from the kept streams, for the graph task that is running."""
    rest, state = iter(saved), {}
    for name, count, spec in run.layout:
        state[name] = unflatten([cut(next(rest)) for _ in range(count)], spec)
    at = 0 if run.keeps_sources else len(run.records)
    return _entered(run, Walk(run, state, run.context.side_again(rest), at), saved)


def _entered(run: Run, walk: Walk, saved: list[Tensor]) -> Walk:
    """The walk as that of the graph task that is running, if one is."""
    task = graph_task()
    if task >= 0:
        run.walks[task] = walk
        _enrol(walk)
        if saved and (run.scattered or torch.is_grad_enabled()):  # create_graph: later tasks may come without a Keep node
            count = sum(number for _, number, _ in run.layout)
            run.stash = [(cut(t) if i < count else t, version_of(t)) for i, t in enumerate(saved)]
        at_end_of_backward(partial(_end, run, task, keeps_graph()))
    return walk


# -- autograd asks for a saved tensor ----------------------------------------------------------------------------------


def unpacker(run: Run, record: Record) -> Callable[[Place], Tensor]:
    """The unpack hook of an update: what its fn saved there."""

    def unpack(place: Place) -> Tensor:
        ready, (j,) = record.ready, place
        if ready is None or ready[j] is None:
            ready = None  # what is left of it can go
            ready = fetch(run, record, j)
        t, ready[j] = ready[j], None  # asked for once, as a rule: let it go
        return t  # type: ignore[return-value]

    return unpack


def fetch(run: Run, record: Record, j: int) -> list[Any]:
    """Walk down to an update and have its saved tensors ready."""
    number = record.number
    if run.live is not None and number == len(run.records):
        return list(run.live)  # in its first run: fn itself calls autograd.grad
    if j in record.stale:
        raise errors.edited_inside(record.where, record.meta[j][0])
    if not _LOCK.acquire(False) and not _LOCK.acquire(timeout=_PATIENCE):
        raise errors.stuck(record.where)
    try:
        walk = run.walks.get(graph_task())
        if walk is None or walk.at < number or not walk.state:
            walk = _another(run, number)
        elif walk.versions is not None and walk.versions != _versions_of(walk.state):
            raise errors.edited_in_backward((walk.filled or record).where)
        walk.clear()
        if not run.scattered:
            _retire(walk)
        try:
            record.ready = _down(walk, number)
        except BaseException:
            run.walks.pop(graph_task(), None)
            walk.leave()
            raise
        walk.filled = record
        if walk.versions is None:
            walk.versions = _versions_of(walk.state)
        walk.finished = number == run.lowest
        return record.ready
    finally:
        _LOCK.release()


def _down(walk: Walk, number: int) -> list[Tensor | None]:
    """What the fn of an update saves, recomputed; the updates above it are undone on the way."""
    while walk.at > number + 1:
        recompute(walk, walk.records[walk.at - 1])
    return recompute(walk, walk.records[number])


def _another(run: Run, number: int) -> Walk:
    """A new walk from the top; or, where that is gone, from where one of an enclosing backward stands."""
    try:
        return _begin(run, _top(run))
    except errors.Freed:
        for other in list(run.walks.values()):
            if other.state and other.at >= number:
                return _entered(run, Walk(run, dict(other.state), other.side, other.at), [])
        raise


def _versions_of(state: Streams) -> list[int]:
    """Tells whether a stream was edited in place."""
    try:
        return list(map(_version, state.values()))
    except (AttributeError, RuntimeError):  # trees of tensors have none, nor have inference tensors
        return [version_of(t) for value in state.values() for t in tensors(value)]


# -- walks end ---------------------------------------------------------------------------------------------------------


def _end(run: Run, task: int, kept: bool) -> None:
    """The backward pass is over."""
    walk = run.walks.pop(task, None)
    if walk is not None:
        walk.leave()
    if not kept:
        run.stash = None


# Walks of one thread in the order of their beginning, so that what is done with can go before the task ends: otherwise a
# program inside a program would not be flat. Autograd executes nodes in the reverse order of their making, so
# - a walk that has given away all of its lowest update is done with when another begins (but not before: a Function may read its
#   saved tensors twice), and
# - when a walk goes on to another update, the walks that began since the last one were inside of that one, and are done with.
class _Local(threading.local):
    begun: list[tuple[int, weakref.ref[Walk]]] = []  # of no thread: each makes its own  # noqa: RUF012


_LOCAL = _Local()
_COUNT = itertools.count(1)


def _enrol(walk: Walk) -> None:
    begun = [(number, ref) for number, ref in _LOCAL.begun if (other := ref()) is not None and not other.done()]
    _LOCAL.begun = [*begun, (next(_COUNT), weakref.ref(walk))]


def _retire(walk: Walk) -> None:
    begun, asked = _LOCAL.begun, walk.asked
    while asked and begun and begun[-1][0] > asked:
        inner = begun.pop()[1]()
        if inner is not None and inner.thread == walk.thread:  # the order is promised among nodes of one thread
            inner.leave()
    walk.asked = next(_COUNT)


def needed(p: Tensor) -> bool:
    """Whether a backward pass of this thread has yet to recompute a function that has this parameter."""
    return any(walk.needs(p) for _, ref in _LOCAL.begun if (walk := ref()) is not None and walk.state)
