"""The second run of an update: fn once more, on recovered sources, for what it saves; and then the update is undone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import errors
from .call import Streams, apply, call, observe, undo
from .capture import DrawnAgain
from .context import Context
from .forms import Forms, use_lean
from .held import version_of
from .record import Record, check_captured, difference_of, look, no_reader, packer, reader, version
from .replay import begin_again, end_again
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


def again(walk: Walk, record: Record, context: Context) -> list[Tensor | None]:
    """What fn saves; the update is undone, unless that was done before."""
    if record.values is not None:
        return _stored(walk, record)
    before, after = record.drawn
    calm = before is after and before is walk.marks  # most fns draw nothing, and find the generators as the last one left them
    values = _quickly(walk, record, context) if calm else None
    if values is None:
        try:
            values = _at_length(walk, record, context)
        except errors.ReplayError:
            if calm:
                context.draws.put_back(before)  # it was fn that drew
            raise
    for j in record.stale:
        values[j] = None  # asked for, it is an error
    return values


def unchanged(walk: Walk, record: Record, context: Context, same: bool) -> None:
    """What fn saw of its modules and side inputs is as it was, or it is an error; `same` if that is plain of modules."""
    if not (same and record.sight.told) and (difference := record.sight.difference(same)):
        raise errors.changed_since(record.where, difference)
    if walk.side and (side := record.update.side_inputs(walk.side)):
        if context.inside_changed(record.update.fn, record.sight.held.modules):
            raise errors.changed_since(record.where, "a tensor inside of a side input")
        if walk.edited(side):
            raise errors.edited_side_input(record.where)


def _stored(walk: Walk, record: Record) -> list[Tensor | None]:
    """An update that needs no second run."""
    values: list[Any] = list(record.values or ())
    for j, (t, (shape, _, _, then)) in enumerate(zip(values, record.meta, strict=True)):
        if t._version != then and j not in record.stale:
            what = record.sight.difference() or f"a tensor of shape {tuple(shape)} that fn holds on to"
            raise errors.changed_since(record.where, what)
        if j in record.stale:
            values[j] = None  # asked for, it is an error
    if walk.at > record.number:
        walk.state[record.update.target] = record.before
    walk.at, walk.versions = record.number, None
    if record.sight.repeatable and not _keep_graph():
        record.values = record.before = None  # the walk has them now; asked for again, fn runs again
    return values


def _quickly(walk: Walk, record: Record, context: Context) -> list[Any] | None:
    """The second run as it is in most nets: fn has nothing but parameters, and draws nothing. None if it is not that.

    It looks at all that `_at_length` looks at, in fewer steps: that is felt where tensors are small.
    """
    state, update, sight = walk.state, record.update, record.sight
    rule, target, drawn = update.rule, state.get(update.target), record.drawn[0]
    if not sight.told or rule.saves or record.numbered or record.given is not None or record.kept is not None:
        return None
    if not sight.same():
        return None
    unchanged(walk, record, context, True)
    store: list[Any] = []
    around = begin_again(context.modes, walk)
    form = Forms.made and use_lean(record.lean)
    try:
        sources = record.sources_again(state)
        record.running = True
        _push_hooks(store.append, no_reader(record))
        try:
            out = call(record.index, update, state, sources, walk.side)
        finally:
            _pop_hooks()
        if record.numbered or context.draws.moved(drawn):
            return None
        values = list(store)
        now = list(map(look, values))
        if now != record.meta:
            if difference := difference_of(record.meta, now):
                raise errors.other_path(record.where, difference)
            check_captured(record, [sources, walk.side], values, now)
        if walk.at > record.number:
            if why := rule.mismatch(target, out):
                raise errors.other_path(record.where, why)
            _set_grad(False)
            state[update.target] = rule.undo(target, out)
            walk.at, walk.versions = record.number, versions_of(state)
        return values
    except BaseException as error:
        context.draws.settle(drawn, drawn)
        if record.numbered and isinstance(error, errors.ReplayError):
            return None  # it asked for what it had saved: once more, with numbers
        raise
    finally:
        record.running = False
        store.clear()  # the graph holds on to the hooks, they to the list, these tensors to the graph
        if Forms.made:
            use_lean(form)
        end_again(context.modes, around)


def _at_length(walk: Walk, record: Record, context: Context) -> list[Any]:
    """The second run in every case; once more where fn turns out to call autograd itself."""
    numbered, at, target = record.numbered, walk.at, walk.state.get(record.update.target)
    try:
        values = _in_full(walk, record, context)
    except errors.ReplayError:
        if record.numbered is numbered:
            raise
    else:
        if record.numbered is numbered:
            return values
    walk.at, walk.state[record.update.target] = at, target
    return _in_full(walk, record, context)


def _in_full(walk: Walk, record: Record, context: Context) -> list[Any]:
    """One run of fn: modules as they were, random numbers drawn again, rules that save applied again."""
    state, number, update, rule = walk.state, record.number, record.update, record.update.rule
    same = record.sight.same()
    unchanged(walk, record, context, same)
    before = state.get(update.target)
    store: list[Any] = []
    around = begin_again(context.modes, walk)
    try:
        swap = record.sight.again(same)
        drawn_before, drawn_after = record.drawn
        present = context.draws.again(drawn_before)
        record.running = True
        form = use_lean(record.lean)
        try:
            sources = record.sources_again(state)
            if record.numbered:
                _push_hooks(packer(store, []), reader(store, record))
            else:
                _push_hooks(store.append, no_reader(record))
            try:
                given = None if record.given is None else DrawnAgain(record.given, record.where)
                out = call(record.index, update, state, sources, walk.side, given)
                if walk.at > number:
                    if why := rule.mismatch(before, out):
                        raise errors.other_path(record.where, why)
                    apart = swap.apart() if rule.saves and swap.out else None  # what undo does to buffers, apply must not see
                    _set_grad(False)
                    before = undo(record.index, update, before, out) if record.kept is None else record.kept
                    _set_grad(True)  # after an error, `end_again` sees to it
                    if apart is not None:
                        apart.undo()
                    state[update.target] = before
                    walk.at, walk.versions = number, None
                if rule.saves:
                    observe(record.index, update, [*sources, before], out)
                    apply(record.index, update, record.target_again(before), out)
            finally:
                _pop_hooks()
        finally:
            difference = context.draws.settle(drawn_after, present)
            record.running = False
            use_lean(form)
            if swap.out:
                swap.undo()
            values = list(store)
            store.clear()  # the graph holds on to the hooks, they to the list, these tensors to the graph
        walk.marks = drawn_before if present == drawn_before else None
    finally:
        end_again(context.modes, around)
    now = list(map(look, values))
    if now != record.meta:
        difference = difference or difference_of(record.meta, now)
    if swap.clamped:
        difference = difference or swap.difference()
    if difference:
        raise errors.other_path(record.where, difference)
    if now != record.meta:
        check_captured(record, [sources, walk.side, swap.put_in], values, now)
    return values
