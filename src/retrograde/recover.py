"""The engine: a list of updates run forward, and run backward inside autograd's own backward pass.

The algebra. An update is `t' = apply(t, fn(s))`, where t is not among the streams s; it is undone by `t = undo(t', fn(s))`.
So all inputs of all fns can be recovered from the final streams, last update first.

The mechanism. Autograd's graph stays in place; only what it keeps is changed.
1. Forward: each fn runs with grad under saved-tensor hooks. For each tensor that autograd wants to save, the pack hook leaves
   just its number.
2. The final streams and the tensors among the side inputs are saved *by autograd*, in a `Vault` node at the end, one for each set
   of connected streams. The run holds no tensor of the forward pass, so outer programs, checkpoint and save_on_cpu apply.
3. Backward: the first unpack inside update k asks for what fn saved there. The engine walks down from where it is: it runs each
   fn on the recovered sources, undoes the update, and hands out what the fn of update k saved this time.
4. A walk belongs to one graph task (one call of backward) and dies with it. Autograd executes nodes in the reverse order of
   their making, so a walk goes down once; whatever is asked for out of turn is walked to again from the top.
5. A recomputation must save what the first run saved, in number, shape, dtype and device, and fn must return what it returned
   (verify.py); anything else is an error.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from . import errors
from .call import Streams, apply, call, fitting, observe, put_on, sources_of
from .capture import Drawn
from .context import Context
from .exact import Exact
from .forms import use_lean
from .keep import keep, vault
from .module_state import ModuleState
from .parts import version_of
from .purse import Purse
from .recompute import recompute, versions_of
from .record import Place, Record, dead, describe, packer
from .sketch import PROJECTIONS, take, usable
from .streams import detached, each, flatten, tensors, unflatten
from .update import Update
from .walks import Walk, enrol, retire

_at_end, _meta = itemgetter(3), attrgetter("meta")
_target, _sources = attrgetter("update.target"), attrgetter("update.sources")
_task = torch._C._current_graph_task_id
_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks  # type: ignore[attr-defined]
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks  # type: ignore[attr-defined]
_PATIENCE = 600.0  # seconds
_LOCK = threading.RLock()  # one recomputation at a time: random states and the slots of modules belong to the whole process


class Run:
    """Some connected updates in one forward pass. Autograd's graph owns it; it owns nothing of the graph."""

    def __init__(self, context: Context, keeps_sources: bool = False, purse: Purse | None = None, lean: bool = False):
        self.context = context
        self.keeps_sources = keeps_sources
        self.purse = purse
        self.lean = lean  # fns in the lean form (forms.py)
        self.records: list[Record] = []
        self.live: list[Tensor] | None = None  # saved by the update that is in its first run
        self.vault: Callable[[], Tensor | None] = lambda: None  # weak: a strong one would be a cycle that gc cannot see
        self.stash: list[tuple[Tensor, int]] | None = None
        self.layout: list[tuple[str, int, Any]] = []
        self.watched: list[tuple[str, weakref.ref[Tensor], int]] = []  # the vault's tensors, to name one that was edited
        self.walks: dict[int, Walk] = {}  # by graph task
        self.thread = threading.get_ident()
        self.lowest = 0
        self.scattered = False  # over several devices, where the order of backward is not promised

    # forward

    def forward(self, index: int, update: Update, state: Streams) -> None:
        """The first run of an update."""
        context, rule, target = self.context, update.rule, state[update.target]
        verification = context.verification
        sources = sources_of(update, state)
        rounded = (name for name in update.sources if name in context.changing and not isinstance(state[name], Exact))
        held = context.held[index]
        modules = ModuleState(update.fn, held, lambda: errors.at(index, update))
        context.modules.append(modules)
        if held.generators:
            context.draws.follow(held.generators)
        record = Record(
            index, len(self.records), update, modules,
            leaves=[(t.stride(), t.requires_grad) for value in sources for t in tensors(value)],
            target_leaves=[(t.stride(), t.requires_grad) for t in tensors(target)] if rule.saves else [],
            drifts=not self.keeps_sources and next(rounded, None) is not None,
            lean=self.lean,
        )  # fmt: skip
        live: list[Tensor] = []
        versions: list[int] = []
        places: list[Place] = []
        pack = packer(live, places, versions)
        drawn = Drawn() if context.capturing else None
        if self.purse is not None:
            pack = self.purse.watching(pack, [*modules.tensors(), *context.tensors])
        self.live = live
        form = use_lean(self.lean)  # a program may be inside of a fn in the other form
        try:
            _push_hooks(pack, self.unpacker(record))
            try:
                with modules.watching():
                    out, applied = self.first(record, state, sources, target, drawn)
            finally:
                _pop_hooks()
            modules.after(live)
            bought = self.purse is not None and self.purse.buys(record, record.where, tensors(target))
            if bought or not modules.repeatable:
                record.values, record.before = [t.detach() for t in live], detached(target)
            record.meta = describe(live, context.known)
            if versions != list(map(_at_end, record.meta)):
                record.stale = [j for j, version in enumerate(versions) if version != record.meta[j][3]]
        finally:
            live.clear()  # the graph holds on to the hook, and these hold on to the graph
            self.live = None
            use_lean(form)
        record.dead = dead(places)
        record.given = drawn if drawn is not None and drawn.kept else None
        self.records.append(record)
        if self.keeps_sources:
            kept = dict(zip(update.sources, sources, strict=True))
            if rule.saves:
                applied = each(self.keep({**kept, update.target: target}), applied)
            else:
                out = each(self.keep(kept), out)
        table = None if verification is None else verification.first
        if rule.saves:
            state[update.target], row = applied, table and take(index, out, table)
        else:
            state[update.target], row = put_on(index, update, target, out, table)
        if verification is not None:
            verification.note(record, row, target)
        if not self.keeps_sources and self.spoilt(record, target, out, state[update.target]):
            record.kept = detached(target)

    def spoilt(self, record: Record, target: Any, out: Any, changed: Any) -> bool:
        """Whether NaN or inf came up, which undoing does not take away, as far as that is known without waiting for a device."""
        if isinstance(target, Exact):
            return target.spoilt_in(changed)
        if record.row is not None:
            return any(record.row[PROJECTIONS:])
        sums = (t.detach().sum().item() for t in tensors(out) if t.is_cpu and t.is_floating_point() and usable(t))
        return self.context.verification is None and not all(map(math.isfinite, sums))

    def first(self, record: Record, state: Streams, sources: list[Any], target: Any, drawn: Any) -> tuple[Any, Any]:
        """What fn returns, and what a rule that saves makes of the target."""
        index, update, draws = record.index, record.update, self.context.draws
        out = call(index, update, state, sources, self.context.side, drawn)
        fitting(index, update, target, out)
        before, after = record.drawn = draws.since()
        if not update.rule.saves:
            return out, None
        with Drawn() if self.context.capturing else contextlib.nullcontext() as listening:
            applied = apply(index, update, target, out)
        observe(index, update, [*sources, target], out)
        record.drawn = before, draws.since()[1]
        if (listening is not None and listening.kept) or (record.drawn[1] is not after and not self.keeps_sources):
            raise errors.random_rule(record.where)
        return out, applied

    def keep_finals(self, state: Streams) -> None:
        targets = dict.fromkeys(map(_target, self.records))
        touched = {**targets, **dict.fromkeys(chain.from_iterable(map(_sources, self.records)))}
        behind = self.keep({name: state[name] for name in touched})
        for name in targets:
            state[name] = each(behind, state[name])

    def metas(self) -> Iterable[list[Any]]:
        """What updates have saved; most saved the same, and share one list."""
        metas = list(map(_meta, self.records))
        return dict(zip(map(id, metas), metas, strict=True)).values()

    def keep(self, saved: Streams) -> Callable[[Any], Any]:
        """Give `saved` and the side inputs to autograd; returns what puts a leaf behind the node that keeps them."""
        self.lowest = next((number for number, record in enumerate(self.records) if record.meta), 0)
        devices = {device for meta in self.metas() for shape, _, device, _ in meta if len(shape)}
        devices |= {t.device for value in saved.values() for t in tensors(value)}
        self.scattered = len(devices) > 1
        kept: list[Tensor] = []
        for name, value in saved.items():
            flat, spec = flatten(value)
            self.layout.append((name, len(flat), spec))
            self.watched += [(f"the stream {name!r}", weakref.ref(t), version_of(t)) for t in flat]
            kept += flat
        for name, value in self.context.side.items():
            own = [t for t in tensors(value) if not t.is_inference()]
            self.watched += [(f"the side input {name!r}", weakref.ref(t), t._version) for t in own]
        kept += self.context.tensors
        kept_by = vault(kept)
        self.vault = weakref.ref(kept_by)
        # a node for each leaf: a loss on one of them does not reach into the others
        return lambda t: keep(self, (kept_by,), t) if isinstance(t, Tensor) and t.requires_grad else t

    # backward

    def top(self) -> list[Tensor]:
        """What the walk starts from. Double backward may get here without passing a Keep node, and then finds the stash."""
        vault = self.vault()
        try:
            if vault is not None:
                saved = list(vault.grad_fn.saved_tensors)  # type: ignore[union-attr]
                for (name, _, version), t in zip(self.watched, saved, strict=True):
                    if version_of(t) > version:  # hooks around the program switch off autograd's own check
                        raise errors.edited_output(name)
                return saved
        except RuntimeError as error:  # autograd's version check
            for name, ref, version in self.watched:
                t = ref()
                if t is not None and version_of(t) != version:
                    raise errors.edited_output(name) from error
            raise
        if self.stash is None:
            raise errors.freed()
        for (name, _, _), (t, version) in zip(self.watched, self.stash, strict=True):
            if version_of(t) != version:
                raise errors.edited_output(name)
        return [t for t, _ in self.stash]

    def begin(self, saved: list[Tensor]) -> Walk:
        """A new walk from the kept streams, for the graph task that is running."""
        rest, state = iter(saved), {}
        for name, count, spec in self.layout:
            state[name] = unflatten([next(rest).detach() for _ in range(count)], spec)
        at = 0 if self.keeps_sources else len(self.records)
        walk = Walk(state, self.context.side_again(rest), at, self.thread, self.records)
        return self.entered(walk, saved)

    def entered(self, walk: Walk, saved: list[Tensor]) -> Walk:
        """The walk as that of the graph task that is running, if one is."""
        task = _task()
        if task >= 0:
            self.walks[task] = walk
            enrol(walk)
            if saved and (self.scattered or torch.is_grad_enabled()):  # create_graph: later tasks may come without a Keep node
                count = sum(number for _, number, _ in self.layout)
                self.stash = [(t.detach() if i < count else t, version_of(t)) for i, t in enumerate(saved)]
            torch.autograd.Variable._execution_engine.queue_callback(partial(self.end, task, _keep_graph()))  # type: ignore[attr-defined]
        return walk

    def end(self, task: int, kept: bool) -> None:
        walk = self.walks.pop(task, None)
        if walk is not None:
            walk.leave()
        if not kept:
            self.stash = None

    def unpacker(self, record: Record) -> Callable[[Place], Tensor]:
        """The unpack hook of an update: what its fn saved there."""

        def unpack(place: Place) -> Tensor:
            ready, (j,) = record.ready, place
            if ready is None or ready[j] is None:
                ready = None  # what is left of it can go
                ready = self.fetch(record, j)
            t, ready[j] = ready[j], None  # asked for once, as a rule: let it go
            return t  # type: ignore[return-value]

        return unpack

    def fetch(self, record: Record, j: int) -> list[Any]:
        """Walk down to an update and have its saved tensors ready."""
        if self.live is not None and record.number == len(self.records):
            return list(self.live)  # in its first run: fn itself calls autograd.grad
        if j in record.stale:
            raise errors.edited_inside(record.where, record.meta[j][0])
        number = record.number
        if not _LOCK.acquire(False) and not _LOCK.acquire(timeout=_PATIENCE):
            raise errors.stuck(record.where)
        try:
            walk = self.walks.get(_task())
            if walk is None or walk.at < number or not walk.state:
                walk = self.another(number)
            elif walk.versions is not None and walk.versions != versions_of(walk.state):
                raise errors.edited_in_backward((walk.filled or record).where)
            if walk.filled is not None:
                walk.clear()
            if not self.scattered:
                retire(walk)
            try:
                record.ready = self.down(walk, number)
            except BaseException:
                self.walks.pop(_task(), None)
                walk.leave()
                raise
            walk.filled = record
            if walk.versions is None:
                walk.versions = versions_of(walk.state)
            walk.finished = number == self.lowest
            return record.ready
        finally:
            _LOCK.release()

    def down(self, walk: Walk, number: int) -> list[Tensor | None]:
        """What the fn of an update saves, recomputed; the updates above it are undone on the way."""
        while walk.at > number + 1:
            recompute(walk, self.records[walk.at - 1], self.context)
        return recompute(walk, self.records[number], self.context)

    def another(self, number: int) -> Walk:
        """A new walk from the top; or, where that is gone, from where one of an enclosing backward stands."""
        try:
            return self.begin(self.top())
        except errors.Freed:
            for other in list(self.walks.values()):
                if other.state and other.at >= number:
                    return self.entered(Walk(dict(other.state), other.side, other.at, self.thread, self.records), [])
            raise
