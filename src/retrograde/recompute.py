"""The recomputation of an update: fn once more, on recovered sources, for what it saves; and then the update is undone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import errors
from .call import Streams, apply, call, observe, put_on
from .capture import DrawnAgain
from .context import Context
from .forms import use_lean
from .parts import version_of
from .record import Place, Record, by_number, check_captured, dead, look, packer, reader, version
from .replay import recomputing
from .sketch import take
from .streams import tensors
from .walks import Walk

_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks  # type: ignore[attr-defined]
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks  # type: ignore[attr-defined]
_set_grad = torch._C._set_grad_enabled


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
    places: list[Place] = []
    difference: str | None = None
    form = use_lean(record.lean)
    drawn_before, drawn_after = record.drawn
    with recomputing(context.modes):
        present = context.draws.again(drawn_before)
        try:
            sources = record.sources_again(walk.state)
            _push_hooks(packer(store, places), reader(store, record))
            try:
                row, out, target, applied = _run(walk, record, context, sources, swap)
            finally:
                _pop_hooks()
        finally:
            difference = context.draws.settle(drawn_after, present)
            swap.undo()
            values = list(store)
            store.clear()  # the graph holds on to the hooks, they to the list, these tensors to the graph
            use_lean(form)
    if difference:
        raise errors.other_path(record.where, difference)
    if record.dead or list(map(look, values)) != record.meta:
        values = [t.detach() for t in values]  # they would keep the graph
        values = by_number(record, values, dead(places))
        check_captured(record, [sources, walk.side, swap.put_in], values)
    del applied  # until here its graph had to be there
    if context.verification is not None:  # at last, as what was said so far says more
        context.verification.compare(record, row, out, target)
    for j in record.stale:
        values[j] = None  # asked for, it is an error
    return values


def _run(walk: Walk, record: Record, context: Context, sources: list[Any], swap: Any) -> tuple[Any, Any, Any, Any]:
    """fn, then the rule: undone, and applied again if it saves tensors of its own.

    Returns the sketch of what fn returned, that itself, the target as it was before the update, and what apply made of it.
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
        _set_grad(False)
        target, row = put_on(index, update, target, out, table, back=True, known=record.kept)
        _set_grad(True)  # after an error, `recomputing` sees to it
        if apart is not None:
            apart.undo()
        state[update.target] = target
        walk.at, walk.versions = record.number, None
    else:
        row = None if table is None else take(index, out, table)
    applied = None
    if rule.saves:
        observe(index, update, [*sources, target], out)
        applied = apply(index, update, record.target_again(target), out)
    return row, out, target, applied


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
    if record.modules.repeatable and not _keep_graph():
        record.values = record.before = None  # the walk has them now; asked for again, fn runs again
    return values
