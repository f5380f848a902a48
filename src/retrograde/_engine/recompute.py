"""The recomputation of an update: fn once more, on recovered sources, for what it saves; and then the update is undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from .. import errors
from .._base.cuda_graph import DrawnAgain
from .._base.lean import use_lean
from .._base.pytrees import each, flatten, tensors, unflatten, with_strides
from .._base.torch_private import home_of, keeps_graph, pop_hooks, push_hooks, set_grad
from .._exact.sketch import take
from .._exact.streams import read
from .call import Streams, apply, call, observe, observed, put_on
from .context import Context
from .nodes import AllSaved, Place, dead, packer, source
from .records import Record, Walk
from .replay import recomputing

_described = attrgetter("shape", "dtype", "device", "_version")


def recompute(walk: Walk, record: Record, whole: bool = False) -> list[Tensor | None]:
    """What fn saves; the update is undone, unless that was done before.

    Where nothing is undone, fn stops when it has saved everything; unless the `whole` of it has to run, as hooks after modules
    must (those of FSDP2 free parameters).
    """
    context = walk.context
    if record.values is not None:
        return _stored(walk, record)
    if walk.side and walk.edited(record.update.side_inputs(walk.side)):
        raise errors.edited_side_input(record.where)
    swap = record.modules.put_in(record)
    store: list[Any] = []
    places: list[Place] = []
    form = use_lean(record.lean)
    drawn_before, drawn_after = record.drawn
    whole = whole or not record.early or observed() or any(m._forward_hooks for m in record.modules.modules)
    pack, stopped = packer(store, places, enough=None if whole else len(record.meta)), False
    with recomputing(context.modes):
        present = context.draws.again(drawn_before)
        try:
            sources = _sources_again(record, walk.state)
            push_hooks(pack, _reader(store, record))
            try:
                *seen, applied = _run(walk, record, context, sources, swap)
            except AllSaved:
                stopped, seen, applied = True, [], None
            finally:
                pop_hooks()
        finally:
            difference = context.draws.settle(drawn_after, present)
            swap.undo()
            values = list(store)
            store.clear()  # the graph holds on to the hooks, they to the list, these tensors to the graph
            use_lean(form)
    same = list(map(_described, values)) == record.meta
    if stopped and not same:  # somebody who only looks on may have saved tensors as well
        return recompute(walk, record, whole=True)
    if difference and not stopped:
        raise errors.other_path(record.where, difference)
    if record.dead or not same:
        values = [t.detach() for t in values]  # they would keep the graph
        values = _by_number(record, values, dead(places))
        _check_captured(record, [sources, walk.side, swap.put_in], values)
    del applied  # until here its graph had to be there
    if context.verification is not None:  # at last, as what was said so far says more
        if record.early:
            context.verification.compare_saved(record, values)
        else:
            context.verification.compare(record, *seen)
    for j in record.stale:
        values[j] = None  # asked for, it is an error
    return values


def _run(walk: Walk, record: Record, context: Context, sources: list[Any], swap: Any) -> tuple[Any, ...]:
    """fn, then the rule: undone, and applied again if it saves tensors of its own.

    Returns the sketch of what fn returned, that itself, the target before the update and after it, and what apply made of it.
    """
    state, index, update, rule = walk.state, record.index, record.update, record.update.rule
    table = None if context.verification is None or record.early else context.verification.second
    given = None if record.given is None else DrawnAgain(record.given, record.where)
    out = call(index, update, state, sources, walk.side, given)
    changed = target = state.get(update.target)
    if walk.at > record.number:
        if why := rule.mismatch(target, out):
            raise errors.other_path(record.where, why)
        apart = swap.apart() if rule.saves and swap.out else None  # what undo does to buffers, apply must not see
        set_grad(False)
        target, row = put_on(index, update, target, out, table, back=True, known=record.kept)
        set_grad(True)  # after an error, `recomputing` sees to it
        if apart is not None:
            apart.undo()
        state[update.target] = target
        walk.at, walk.versions = record.number, None
    else:
        row = None if table is None else take(index, out, table)
    applied = None
    if rule.saves:
        observe(index, update, [*sources, target], out)
        applied = apply(index, update, _target_again(record, target), out)
    return row, out, target, changed, applied


def _stored(walk: Walk, record: Record) -> list[Tensor | None]:
    """An update that keeps its activations."""
    values: list[Any] = list(record.values or ())
    for j, (t, (shape, _, _, then)) in enumerate(zip(values, record.meta, strict=True)):
        if t._version != then and j not in record.stale:
            raise errors.changed_since(record.where, record.modules.name_of(t) or errors.held_tensor(shape))
        if j in record.stale:
            values[j] = None  # asked for, it is an error
    if walk.at > record.number:
        walk.state[record.update.target] = record.before
    walk.at, walk.versions = record.number, None
    if record.modules.repeatable and not keeps_graph():
        record.values = record.before = None  # the walk has them now; asked for again, fn runs again
    return values


# -- what fn is given ---------------------------------------------------------------------------------------------------


def _sources_again(record: Record, state: Streams) -> list[Any]:
    """The recovered sources in the layout and with the flags that fn saw."""
    if len(record.leaves) == len(record.update.sources) == 1 and isinstance(t := state[record.update.sources[0]], Tensor):
        strides, grad = record.leaves[0]
        t = with_strides(t, strides)
        return [source(t) if grad else t]
    rest, again = iter(record.leaves), {}

    def leaf(t: Tensor) -> Tensor:
        strides, grad = next(rest)
        t = with_strides(t, strides)
        return source(t) if grad else t

    for name in record.update.sources:
        value = each(leaf, read(state[name]))
        again.setdefault(name, value)  # twice the same: so it was for fn
    return [again[name] for name in record.update.sources]


def _target_again(record: Record, target: Any) -> Any:
    flat, spec = flatten(target)
    pairs = zip(flat, record.target_leaves, strict=True)
    dense = [(with_strides(t, strides), grad) for t, (strides, grad) in pairs]
    return unflatten([source(t) if grad else t.detach() for t, grad in dense], spec)


# -- what it saved -----------------------------------------------------------------------------------------------------


def _reader(store: list[Any], record: Record) -> Callable[[Place], Tensor]:
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


def _by_number(record: Record, values: list[Any], gone: Sequence[int]) -> list[Any]:
    """What was saved, at the numbers of the first run, or an error. Graphs that are gone need not be the same."""
    then = [j for j in range(len(record.meta)) if j not in record.dead]
    kept = [t for j, t in enumerate(values) if j not in gone]
    if _difference_of([record.meta[j] for j in then], list(map(_described, kept))) is None:
        found = dict(zip(then, kept, strict=True))
        return [found.get(j) for j in range(len(record.meta))]
    if difference := _difference_of(record.meta, list(map(_described, values))):
        raise errors.other_path(record.where, difference)
    return values


def _difference_of(old: Sequence[Any], new: Sequence[Any]) -> str | None:
    """What differs besides versions, or None."""
    if len(old) != len(new):
        return f"it saved {len(new)} tensors for its gradient, {len(old)} before"
    other = ((a, b) for a, b in zip(old, new, strict=True) if a[:3] != b[:3])
    return next((f"it saved a tensor of {_words(b)}, {_words(a)} before" for a, b in other), None)


def _words(key: Any) -> str:
    shape, dtype, device, _ = key
    return f"shape {tuple(shape)}, {dtype}, on {device}"


def _check_captured(record: Record, own: Any, values: list[Any]) -> None:
    """A saved tensor with another version than in the first run, which is none of our own, was edited from outside."""
    homes = {home_of(t) for t in tensors(own)}
    for old, t in zip(record.meta, values, strict=True):
        if t is not None and old != _described(t) and home_of(t) not in homes:
            raise errors.changed_since(record.where, record.modules.name_of(t) or errors.held_tensor(t.shape))
