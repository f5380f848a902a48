"""The recomputation of an update: fn once more, on recovered sources, for what it saves; and then the update is undone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import errors
from .._base.pytrees import tensors
from .._base.torch_private import keeps_graph, pop_hooks, push_hooks, set_grad, version_of
from .call import Streams, apply, call, observe, put_on
from .context import Context
from .cuda_graph import DrawnAgain
from .lean import use_lean
from .record import Record, check_captured, difference_of, look, packer, reader, version
from .replay import recomputing
from .sketch import take
from .walks import Walk


def versions_of(state: Streams) -> list[int]:
    """Tells whether a stream was edited in place."""
    try:
        return list(map(version, state.values()))
    except (AttributeError, RuntimeError):  # trees of tensors have none, nor have inference tensors
        return [version_of(t) for value in state.values() for t in tensors(value)]


def recompute(walk: Walk, record: Record, context: Context) -> list[Tensor | None]:
    """What fn saves; the update is undone, unless that was done before."""
    if record.values is not None:
        return _stored(walk, record)
    if walk.side and walk.edited(record.update.side_inputs(walk.side)):
        raise errors.edited_side_input(record.where)
    swap = record.modules.put_in(record)
    store: list[Any] = []
    difference: str | None = None
    form = use_lean(record.lean)
    drawn_before, drawn_after = record.drawn
    with recomputing(context.modes):
        present = context.draws.again(drawn_before)
        try:
            sources = record.sources_again(walk.state)
            push_hooks(packer(store, []), reader(store, record))
            try:
                row, out, target = _run(walk, record, context, sources, swap)
            finally:
                pop_hooks()
        finally:
            difference = context.draws.settle(drawn_after, present)
            swap.undo()
            values = list(store)
            store.clear()  # the graph holds on to the hooks, they to the list, these tensors to the graph
            use_lean(form)
    now = list(map(look, values))
    if now != record.meta:
        difference = difference or difference_of(record.meta, now)
    if difference:
        raise errors.other_path(record.where, difference)
    if now != record.meta:
        check_captured(record, [sources, walk.side, swap.put_in], values, now)
    if context.verification is not None:  # at last, as what was said so far says more
        context.verification.compare(record, row, out, target)
    for j in record.stale:
        values[j] = None  # asked for, it is an error
    return values


def _run(walk: Walk, record: Record, context: Context, sources: list[Any], swap: Any) -> tuple[Any, Any, Any]:
    """fn, then the rule: undone, and applied again if it saves tensors of its own.

    Returns the sketch of what fn returned, that itself, and the target as it was before the update.
    """
    state, index, update, rule = walk.state, record.index, record.update, record.update.rule
    table = None if context.verification is None else context.verification.second
    given = None if record.given is None else DrawnAgain(record.given, record.where)
    out = call(index, update, state, sources, walk.side, given)
    target = state.get(update.target)
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
    if rule.saves:
        observe(index, update, [*sources, target], out)
        apply(index, update, record.target_again(target), out)
    return row, out, target


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
