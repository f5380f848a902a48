"""The first run of each update: fn runs with grad, and of each tensor that autograd wants to save the graph gets its number."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from .. import errors
from .._base.cuda_graph import Drawn
from .._base.lean import use_lean
from .._base.pytrees import detached, each, tensors
from .._base.torch_private import pop_hooks, push_hooks, version_of
from .._base.vaults import vault
from .._exact.sketch import strange, take, usable
from .._exact.streams import Exact, noting, whole
from ..update import Update
from .backward import start, unpacker
from .call import Streams, apply, call, fitting, observe, put_on, sources_of
from .module_state import ModuleState
from .nodes import Place, dead, keep, packer
from .records import Record, Run

_at_end = itemgetter(3)
_target, _sources = attrgetter("update.target"), attrgetter("update.sources")
_described = attrgetter("shape", "dtype", "device", "_version")


def forward(run: Run, index: int, update: Update, state: Streams) -> None:
    """The first run of an update; `state` has the streams, and the changed target afterwards."""
    context, rule, target = run.context, update.rule, state[update.target]
    verification = context.verification
    sources = sources_of(update, state)
    record = _new_record(run, index, update, sources, state)
    modules = record.modules
    live: list[Tensor] = []
    versions: list[int] = []
    places: list[Place] = []
    saved: list[Tensor] = []
    pack = packer(live, places, versions)
    drawn = Drawn() if context.capturing else None
    if run.purse is not None:
        if run.keeps_sources:
            run.purse.keep(t for value in sources for t in tensors(value))
        pack = run.purse.watching(pack, [*modules.tensors(), *context.tensors, *(tensors(sources) if run.keeps_sources else ())])
    run.live = live
    form = use_lean(run.lean)  # a program may be inside of a fn in the other form
    try:
        push_hooks(pack, unpacker(run, record))
        try:
            with modules.watching():
                out, applied = _call(run, record, state, sources, target, drawn)
        finally:
            pop_hooks()
        modules.after(live)
        if live and run.lowest is None:
            run.lowest = record.number
            if not run.keeps_sources:  # backward comes down to here: from here on streams note what updates lose
                state.update({name: noting(value, True) for name, value in state.items()})
                target = state[update.target]
        before = () if run.keeps_sources else target
        bought = run.purse is not None and run.purse.buys(record, record.where, tensors(before))
        if bought or not modules.repeatable:
            record.values, record.before = [t.detach() for t in live], detached(before)
        record.meta = _shared(list(map(_described, live)), context.known)
        if versions != list(map(_at_end, record.meta)):
            record.stale = [j for j, version in enumerate(versions) if version != record.meta[j][3]]
        early = run.keeps_sources and bool(live) and not record.stale and record.values is None
        if early and verification is not None:
            saved = [t.detach() for t in live]  # or they would keep graphs alive that are gone otherwise
    finally:
        live.clear()  # the graph holds on to the hook, and these hold on to the graph
        run.live = None
        use_lean(form)
    record.dead = dead(places)
    record.given = drawn if drawn is not None and drawn.kept else None
    record.early = early and not record.dead and record.given is None
    run.records.append(record)
    if run.keeps_sources:
        kept = dict(zip(update.sources, sources, strict=True))
        if rule.saves:
            applied = each(_keep(run, {**kept, update.target: target}), applied)
        else:
            out = each(_keep(run, kept), out)
    if record.early and verification is not None:
        verification.note_saved(record, saved, [*modules.tensors(), *context.tensors, *tensors(sources)])
        verification = None
    del saved
    table = None if verification is None else verification.first
    if rule.saves:
        state[update.target], row = applied, table and take(index, out, table)
    else:
        state[update.target], row = put_on(index, update, target, out, table)
    if verification is not None:
        verification.note(record, row, target, state[update.target])
    if not run.keeps_sources and _spoilt(run, record, target, out, state[update.target]):
        record.kept = detached(target)


def _new_record(run: Run, index: int, update: Update, sources: list[Any], state: Streams) -> Record:
    context, held = run.context, run.context.held[index]
    modules = ModuleState(held, lambda: errors.at(index, update))
    context.modules.append(modules)
    if held.generators:
        context.draws.follow(held.generators)
    target = tensors(state[update.target]) if update.rule.saves else []
    return Record(
        index, len(run.records), update, modules,
        leaves=[(t.stride(), t.requires_grad) for value in sources for t in tensors(value)],
        target_leaves=[(t.stride(), t.requires_grad) for t in target],
        drifts=not run.keeps_sources and not context.drifting.isdisjoint(update.sources),
        lean=run.lean,
    )  # fmt: skip


def _call(run: Run, record: Record, state: Streams, sources: list[Any], target: Any, drawn: Any) -> tuple[Any, Any]:
    """What fn returns, and what a rule that saves makes of the target."""
    index, update, draws = record.index, record.update, run.context.draws
    out = call(index, update, state, sources, run.context.side, drawn)
    fitting(index, update, target, out)
    before, after = record.drawn = draws.since()
    if not update.rule.saves:
        return out, None
    with Drawn() if run.context.capturing else contextlib.nullcontext() as listening:
        applied = apply(index, update, target, out)
    observe(index, update, [*sources, target], out)
    record.drawn = before, draws.since()[1]
    if (listening is not None and listening.kept) or (record.drawn[1] is not after and not run.keeps_sources):
        raise errors.random_rule(record.where)
    return out, applied


def _shared(meta: list[Any], known: list[list[Any]]) -> list[Any]:
    """Equal lists are the same object, as many objects would keep the garbage collector busy."""
    for other in known:
        if other == meta:
            return other
    known.insert(0, meta)
    del known[8:]
    return meta


def _spoilt(run: Run, record: Record, target: Any, out: Any, changed: Any) -> bool:
    """Whether NaN or inf came up, which undoing does not take away, as far as that is known without waiting for a device."""
    if isinstance(target, Exact):
        return target.spoilt_in(changed)
    if record.row is not None:
        return strange(record.row)
    sums = (t.detach().sum().item() for t in tensors(out) if t.is_cpu and t.is_floating_point() and usable(t))
    return run.context.verification is None and not all(map(math.isfinite, sums))


# -- what autograd keeps -----------------------------------------------------------------------------------------------


def keep_finals(run: Run, state: Streams) -> None:
    """Have autograd keep the final streams, and start the walk back in their gradients."""
    targets = dict.fromkeys(map(_target, run.records))
    touched = {**targets, **dict.fromkeys(chain.from_iterable(map(_sources, run.records)))}
    behind = _keep(run, {name: state[name] for name in touched})
    for name in targets:
        state[name] = each(behind, noting(state[name], False))


def _keep(run: Run, saved: Streams) -> Callable[[Any], Any]:
    """Give `saved` and the side inputs to autograd; returns what puts a leaf behind the node that keeps them."""
    devices = {device for meta in run.metas() for shape, _, device, _ in meta if len(shape)}
    devices |= {t.device for value in saved.values() for t in tensors(value)}
    run.scattered = len(devices) > 1
    kept: list[Tensor] = []
    for name, value in saved.items():
        flat, spec = whole(value)
        run.layout.append((name, len(flat), spec))
        run.watched += [(f"the stream {name!r}", weakref.ref(t), version_of(t)) for t in flat]
        kept += flat
    for name, value in run.context.side.items():
        own = [t for t in tensors(value) if not t.is_inference()]
        run.watched += [(f"the side input {name!r}", weakref.ref(t), t._version) for t in own]
    moving = contextlib.nullcontext() if run.mover is None else run.mover.keeping(kept, f"what {run.records[-1].where} reads")
    with moving:
        kept_by = vault(kept + run.context.tensors)
    run.vault = weakref.ref(kept_by)
    # a node for each leaf: a loss on one of them does not reach into the others
    return lambda t: keep(start, run, (kept_by,), t) if isinstance(t, torch.Tensor) and t.requires_grad else t
