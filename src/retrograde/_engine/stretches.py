"""The kinds of stretches: what the updates of one leave for backward. A memory policy cuts a program into stretches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from .. import errors
from .._base.lean import signature, two_forms, use_lean
from .._base.pytrees import tensors
from .._base.torch_private import home_of, pop_hooks, push_hooks, under_hooks
from .._exact.choose import refuse_growth
from .._exact.streams import Exact
from .._memory import budget, offload
from .._memory.budget import Learned, Purse
from ..update import Program
from .call import Streams, apply, call, fitting, observe, sources_of
from .context import Context
from .forward import forward, keep_finals
from .records import Run

_SIZES = 256  # so many inputs of different sizes are remembered


def _store(program: Program, indices: range, state: Streams, side: Streams, _: Any, __: Any) -> bool:
    """Ordinary autograd."""
    for index in indices:
        update = program.updates[index]
        target = state[update.target]
        sources = sources_of(update, state)
        out = call(index, update, state, sources, side)
        fitting(index, update, target, out)
        if update.rule.saves:
            state[update.target] = apply(index, update, target, out)
            observe(index, update, [*sources, target], out)
        else:
            state[update.target] = update.rule.apply(target, out)
    return True


def _reverse(program: Program, indices: range, state: Streams, side: Streams, context: Context, limit: Any) -> bool:
    """Keep the final streams alone; with a limit, also what the last updates saved."""
    refuse_growth(program, indices, state)
    if limit is not None:
        return _within(limit, program, indices, state, side, context, _walkable)
    _walkable(program, indices, state, context)
    return False


def _checkpoint(program: Program, indices: range, state: Streams, side: Streams, context: Context, limit: Any) -> bool:
    """Keep the sources of each update; with a limit, also what the last updates saved."""
    if limit is not None:
        _within(limit, program, indices, state, side, context, _separate)
    else:
        _separate(program, indices, state, context)
    return True


def _offload(program: Program, indices: range, state: Streams, side: Streams, context: Context, how: Any) -> bool:
    """As `_checkpoint`, and what is kept moves to the host. Functions in two forms keep what they save in the lean one."""
    mover = offload.mover(how, program, {name: state[name] for name in program.names}, context.capturing or under_hooks())
    starts = set(accumulate(program.blocks, initial=0))
    for index in indices:
        if mover is not None and index in starts:
            mover.block()
        update = program.updates[index]
        if mover is None or not two_forms([update.fn]):
            forward(Run(context, keeps_sources=True, mover=mover), index, update, state)
            continue
        own = [t for m in context.held[index].modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        before = use_lean(True)
        push_hooks(*mover.saving({home_of(t) for t in (*own, *context.tensors)}, errors.at(index, update)))
        try:
            _store(program, range(index, index + 1), state, side, None, None)
        finally:
            pop_hooks()
            use_lean(before)
    return True


def _walkable(program: Program, indices: range, state: Streams, context: Context, **how: Any) -> None:
    """Under hooks: a run for each set of connected streams."""
    runs: dict[str, Run] = {}
    for index in indices:
        name = program.components[index]
        if name not in runs:
            runs[name] = Run(context, **how)
        forward(runs[name], index, program.updates[index], state)
    for made in runs.values():
        keep_finals(made, state)


def _separate(program: Program, indices: range, state: Streams, context: Context, **how: Any) -> None:
    """Under hooks: a run of its own for each update, and nothing to undo."""
    for index in indices:
        forward(Run(context, keeps_sources=True, **how), index, program.updates[index], state)


def _within(
    limit: int | str,
    program: Program,
    indices: range,
    state: Streams,
    side: Streams,
    context: Context,
    hooked: Callable[..., None],
) -> bool:
    """What fits into a budget is stored, and the rest runs as `hooked` does.

    For functions in two forms, two passes measure what they save, and later ones plan by that.
    Returns whether the last updates run as ordinary autograd.
    """
    wide = [sum(t.nbytes for t in value.made) for value in state.values() if isinstance(value, Exact)]
    room = 2 * max(wide, default=0)  # sums at work, of a stream that is carried exactly
    room += sum(u.rule.loses * t.numel() // 8 for u in program.updates if u.rule.loses for t in tensors(state[u.target]))
    streams = [t for name in program.names for t in tensors(state[name])]
    forms = two_forms(update.fn for update in program.updates)
    if not forms and not isinstance(limit, str):  # nothing to learn
        hooked(program, indices, state, context, purse=Purse(limit, streams, room))
        return False
    key = (limit, room, len(indices), *context.signature(streams), *(signature(program) if forms else ()))
    known: dict[Any, Learned] = program.notes.setdefault("learned", {})
    learned = known.setdefault(key, Learned())
    while len(known) > _SIZES:
        known.pop(next(iter(known)), None)
    if isinstance(limit, str):  # "auto"
        free = budget.free_bytes(program, streams)
        if learned.free is None or free < learned.free:  # what fitted may not fit now
            known[key] = learned = Learned(free)
        limit = learned.free or free
    learns = forms and not under_hooks()  # an outer checkpoint may run this again, and needs the same plan
    if not learns or len(learned.sizes) < 2:
        purse = Purse(limit, streams, room)
        try:
            hooked(program, indices, state, context, purse=purse, lean=learns and len(learned.sizes) == 1)
        except BaseException:
            known.pop(key, None)
            raise
        if learns:
            learned.learn(purse)
        return False
    first = indices.stop - learned.stored
    middle = indices.stop - learned.full
    if first > indices.start:
        hooked(program, range(indices.start, first), state, context)
    for part, lean in ((range(first, middle), True), (range(middle, indices.stop), False)):
        before = use_lean(lean)
        try:
            _store(program, part, state, side, None, None)
        finally:
            use_lean(before)
    return learned.stored > 0


STRETCHES: dict[str, Any] = {"store": _store, "reverse": _reverse, "checkpoint": _checkpoint, "offload": _offload}
