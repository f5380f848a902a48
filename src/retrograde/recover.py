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
5. What the second run saves must match the first in number, shape, dtype and device; anything else is an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from . import errors
from .call import Streams, call, fitting, version_of
from .held import home_of
from .purse import Purse
from .replay import Draws, generators, modes, modules_called, second_run
from .sight import Sight
from .streams import detached, flatten, tensors, unflatten, with_strides
from .update import Update
from .walks import Walk, enrol, retire


class Context:
    """What the runs of one stretch share: the side inputs, the modes, the random generators."""

    def __init__(self, side: Streams):
        flat, self.side_spec = tree_flatten(side)
        # inference tensors cannot be saved by autograd, and cannot change either
        kept = [isinstance(t, Tensor) and not t.is_inference() for t in flat]
        self.side, self.tensors = side, [t for t, is_kept in zip(flat, kept, strict=True) if is_kept]
        self.grads = [t.requires_grad for t in self.tensors]
        self.others = [_HOLE if is_kept else t for t, is_kept in zip(flat, kept, strict=True)]
        self.modes = modes()
        self.draws = Draws(generators(flat))
        self.sights: list[Sight] = []
        self.known: dict[Any, Any] = {}  # each (shape, dtype, device) once

    def check_side(self) -> None:
        """fns may have put something into a list or a dict: no version tells."""
        if self.side_spec.num_nodes > 1 + len(self.others):  # there are such
            now = tree_flatten(self.side)[0]
            rest = iter(self.tensors)
            then = [next(rest) if other is _HOLE else other for other in self.others]
            if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
                raise errors.ProgramError("fn changed a list or a dict among the side inputs. Let it return what it has to tell")

    def forget(self) -> None:
        """After the forward pass: what is needed again is in the hands of autograd."""
        self.side, self.tensors, self.sights = {}, [], []

    def side_again(self, saved: Iterable[Tensor]) -> Streams:
        pairs = zip(saved, self.grads, strict=True)
        rest = iter([t if t.requires_grad is grad else t.detach().requires_grad_(grad) for t, grad in pairs])
        return tree_unflatten([next(rest) if other is _HOLE else other for other in self.others], self.side_spec)


_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
_HOLE = object()
_PATIENCE = 600.0  # seconds
_LOCK = threading.RLock()  # one second run at a time: random states and the slots of modules belong to the whole process


class Record:
    """What the first run of an update leaves behind: everything the second run needs but tensors of the forward pass."""

    __slots__ = (
        "before", "drawn", "grads", "index", "meta", "number", "ready", "sight", "stale", "strides", "target_grads", "update",
        "values", "versions",
    )  # fmt: skip
    index: int
    number: int  # in the run
    update: Update
    sight: Sight
    drawn: tuple[list[Any], list[Any]]  # the states of the random generators before and after
    meta: list[Any]  # (shape, dtype, device) of each tensor that fn saved …
    versions: list[int]  # … and its version then
    stale: list[int]  # numbers of those that fn edited afterwards
    grads: list[bool]  # requires_grad of the leaves of the sources …
    strides: list[tuple[int, ...]]  # … and their layouts
    target_grads: list[bool]  # the same of the target, for rules that save
    values: list[Tensor] | None  # of an update that is stored: the saved tensors themselves …
    before: Any  # … and the target before it
    ready: list[Tensor | None] | None  # what the second run saved, until it is asked for

    def __init__(self, index: int, number: int, update: Update):
        self.index, self.number, self.update = index, number, update
        self.versions, self.stale = [], []
        self.values = self.before = self.ready = None

    @property
    def where(self) -> str:
        return errors.at(self.index, self.update)

    def sources_again(self, state: Streams) -> list[Any]:
        """The recovered sources in the layout and with the flags that fn saw."""
        sources, i, names = [], 0, self.update.sources
        for name in names:
            if name in names[: len(sources)]:  # twice the same: so it was for fn
                sources.append(sources[names.index(name)])
                i += len(flatten(state[name])[0])
                continue
            flat, spec = flatten(state[name])
            again = []
            for t in flat:
                t = with_strides(t, self.strides[i])
                again.append(t.detach().requires_grad_() if self.grads[i] else t)
                i += 1
            sources.append(unflatten(again, spec))
        return sources

    def target_again(self, target: Any) -> Any:
        flat, spec = flatten(target)
        return unflatten([t.detach().requires_grad_(grad) for t, grad in zip(flat, self.target_grads, strict=True)], spec)


class Vault(torch.autograd.Function):
    """A node that does nothing but have autograd keep `saved`; alive as long as what it returns."""

    @staticmethod
    def forward(ctx: Any, anything: Tensor, saved: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*saved)
        return anything.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


class Keep(torch.autograd.Function):
    """The identity, on each output of a run: keeps the vault alive and starts the walk in backward."""

    @staticmethod
    def forward(ctx: Any, run: Run, vault: tuple[Tensor], t: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.vault = run, vault  # in a tuple, so that the vault is no input: no gradient goes there
        return t.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch._C._current_graph_task_id() not in ctx.run.walks:
            ctx.run.begin(ctx.run.top())
        if not _keep_graph():
            ctx.vault = None  # as autograd lets go of what a node has saved
        return None, None, grad


class Run:
    """Some connected updates in one forward pass. Autograd's graph owns it; it owns nothing of the graph."""

    def __init__(self, context: Context, keeps_sources: bool = False, purse: Purse | None = None):
        self.context = context
        self.keeps_sources = keeps_sources
        self.purse = purse
        self.records: list[Record] = []
        self.live: list[Tensor] | None = None  # saved by the update that is in its first run
        self.vault: Callable[[], Tensor | None] = lambda: None  # weak: a strong one would be a cycle that gc cannot see
        self.stash: list[tuple[Tensor, int]] | None = None
        self.layout: list[tuple[str, int, TreeSpec | None]] = []
        self.watched: list[tuple[str, weakref.ref[Tensor], int]] = []  # the vault's tensors, to name one that was edited
        self.walks: dict[int, Walk] = {}  # by graph task
        self.thread = threading.get_ident()
        self.lowest = 0
        self.scattered = False  # over several devices, where the order of backward is not promised

    # forward

    def forward(self, index: int, update: Update, state: Streams) -> None:
        """The first run of an update."""
        context, rule, target = self.context, update.rule, state[update.target]
        sources = [state[name] for name in update.sources]
        record = Record(index, len(self.records), update)
        record.sight = sight = Sight(update.fn, rule)
        context.draws.follow(sight.held.generators)
        context.sights.append(sight)
        flat = [t for value in sources for t in tensors(value)]
        record.grads = [t.requires_grad for t in flat]
        record.strides = [t.stride() for t in flat]
        record.target_grads = [t.requires_grad for t in tensors(target)] if rule.saves else []
        live: list[Tensor] = []
        pack = _packer(live, record.versions)
        if self.purse is not None:
            pack = self.purse.watching(pack, [*sight.held.own_tensors(), *context.tensors])
        self.live = live
        try:
            with saved_tensors_hooks(pack, self.unpacker(record)):
                called = None
                if sight.held.loose:
                    with modules_called() as called:
                        out = call(index, update, state, sources, context.side)
                else:
                    out = call(index, update, state, sources, context.side)
                fitting(index, update, target, out)
                applied = rule.apply(target, out) if rule.saves and not self.keeps_sources else None
            sight.after(called)
            bought = self.purse is not None and self.purse.buys(record, record.where, tensors(target))
            if bought or not sight.repeatable:
                record.values, record.before = [t.detach() for t in live], detached(target)
            record.meta = _describe(live, context.known)
            if [t._version for t in live] != record.versions:
                record.stale = [j for j, t in enumerate(live) if t._version != record.versions[j]]
        finally:
            live.clear()  # the graph holds on to the hook, and these hold on to the graph
            self.live = None
        record.drawn = context.draws.since()
        self.records.append(record)
        if self.keeps_sources:
            out = self.keep({name: state[name] for name in update.sources}, out)
        state[update.target] = rule.apply(target, out) if applied is None else applied

    def keep_finals(self, state: Streams) -> None:
        touched = dict.fromkeys(name for r in self.records for name in (*r.update.sources, r.update.target))
        targets = dict.fromkeys(r.update.target for r in self.records)
        state.update(self.keep({name: state[name] for name in touched}, {name: state[name] for name in targets}))

    def keep(self, saved: Streams, passed: Any) -> Any:
        """Give `saved` and the side inputs to autograd; returns `passed`, behind the node that keeps them."""
        self.lowest = next((number for number, record in enumerate(self.records) if record.meta), 0)
        devices = {device for record in self.records for shape, _, device in record.meta if len(shape)}
        self.scattered = len(devices | {t.device for value in saved.values() for t in tensors(value)}) > 1
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
        vault = Vault.apply(torch.empty(0, requires_grad=True), kept)
        self.vault = weakref.ref(vault)
        flat, spec = flatten(passed)  # a node for each leaf: a loss on one of them does not reach into the others
        return unflatten([Keep.apply(self, (vault,), t) if isinstance(t, Tensor) and t.requires_grad else t for t in flat], spec)

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
        walk = Walk(state, self.context.side_again(rest), 0 if self.keeps_sources else len(self.records), self.thread)
        return self.entered(walk, saved)

    def entered(self, walk: Walk, saved: list[Tensor]) -> Walk:
        """The walk as that of the graph task that is running, if one is."""
        task = torch._C._current_graph_task_id()
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
            walk.clear()
        if not kept:
            self.stash = None

    def unpacker(self, record: Record) -> Callable[[int], Tensor]:
        """The unpack hook of an update: what its fn saved as tensor j."""

        def unpack(j: int) -> Tensor:
            ready = record.ready
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
        if not _LOCK.acquire(timeout=_PATIENCE):
            raise errors.stuck(record.where)
        try:
            walk = self.walks.get(torch._C._current_graph_task_id())
            if walk is None or walk.at < number or not walk.state:
                walk = self.another(number)
            walk.clear()
            if not self.scattered:
                retire(walk)
            try:
                while walk.at > number + 1:
                    self.again(walk, walk.at - 1)
                record.ready = self.again(walk, number)
            except BaseException:
                self.walks.pop(torch._C._current_graph_task_id(), None)
                raise
            walk.filled = record
            walk.finished = number == self.lowest
            return record.ready
        finally:
            _LOCK.release()

    def another(self, number: int) -> Walk:
        """A new walk from the top; or, where that is gone, from where one of an enclosing backward stands."""
        try:
            return self.begin(self.top())
        except errors.Freed:
            for other in list(self.walks.values()):
                if other.state and other.at >= number:
                    return self.entered(Walk(dict(other.state), other.side, other.at, self.thread), [])
            raise

    def stored(self, walk: Walk, record: Record) -> list[Tensor | None]:
        """An update that needs no second run."""
        values: list[Any] = record.values or []
        for j, (t, version, (shape, _, _)) in enumerate(zip(values, record.versions, record.meta, strict=True)):
            if t._version != version and j not in record.stale:
                what = record.sight.difference() or f"a tensor of shape {tuple(shape)} that fn holds on to"
                raise errors.changed_since(record.where, what)
        if not self.keeps_sources:
            walk.state[record.update.target] = record.before
        walk.at = record.number
        if record.sight.repeatable and not _keep_graph():
            record.values = record.before = None  # the walk has them now; asked for again, fn runs again
        return [None if j in record.stale else t for j, t in enumerate(values)]

    def again(self, walk: Walk, number: int) -> list[Tensor | None]:
        """The second run of an update: collects what fn saves, and undoes the update unless that is done."""
        context, record, state = self.context, self.records[number], walk.state
        update, rule = record.update, record.update.rule
        if record.values is not None:
            return self.stored(walk, record)
        difference = record.sight.difference()
        if difference:
            raise errors.changed_since(record.where, difference)
        before = state.get(update.target)
        store: list[Any] = []
        versions: list[int] = []
        with second_run(context.modes):
            swap = record.sight.again()
            drawn = context.draws.again(record.drawn)
            try:
                sources = record.sources_again(state)
                with saved_tensors_hooks(_packer(store, versions), _reader(store, record)):
                    out = call(record.index, update, state, sources, walk.side)
                    if walk.at > number:
                        if why := rule.mismatch(before, out):
                            raise errors.other_path(record.where, why)
                        with torch.no_grad():
                            before = state[update.target] = rule.undo(before, out)
                        walk.at = number
                    if rule.saves and not self.keeps_sources:
                        rule.apply(record.target_again(before), out)
            finally:
                difference = drawn()
                swap.undo()
                values = list(store)
                store.clear()  # the graph holds on to the hooks, they to the list, these tensors to the graph
        if [(t.shape, t.dtype, t.device) for t in values] != record.meta:
            difference = difference or _difference(record.meta, _describe(values, context.known))
        if swap.clamped:
            difference = difference or swap.difference()
        if difference:
            raise errors.other_path(record.where, difference)
        if versions != record.versions:
            _check_captured(record, [sources, walk.side, swap.put_in], values, versions)
        for j in record.stale:
            values[j] = None  # asked for, it is an error
        return values


def _check_captured(record: Record, own: Any, values: list[Any], versions: list[int]) -> None:
    """A saved tensor with another version than in the first run, which is none of our own, was edited from outside."""
    homes = {home_of(t) for t in tensors(own)}
    for old, new, t in zip(record.versions, versions, values, strict=True):
        if old != new and home_of(t) not in homes:
            what = f"a tensor of shape {tuple(t.shape)} that fn holds on to"
            raise errors.changed_since(record.where, what)


def _packer(store: list[Any], versions: list[int]) -> Callable[[Tensor], int]:
    """A pack hook that collects what is saved and leaves its number. The graph holds on to it: empty `store` afterwards."""

    def pack(t: Tensor) -> int:
        versions.append(t._version)
        store.append(t)
        return len(store) - 1

    return pack


def _reader(store: list[Any], record: Record) -> Callable[[int], Tensor]:
    """The unpack hook of a second run, for a fn that itself calls autograd.grad. The list is empty when that run is over."""

    def read(j: int) -> Tensor:
        if j >= len(store):
            raise errors.ReplayError(
                "a tensor that fn left behind in its second run has no graph. Use `not rg.replaying()`", record.where
            )
        return store[j]

    return read


def _describe(store: list[Any], known: dict[Any, Any]) -> list[Any]:
    """(shape, dtype, device) of each; equal ones are the same object, as many objects would keep gc busy."""
    return [known.setdefault(key, key) for key in [(t.shape, t.dtype, t.device) for t in store]]


def _difference(old: list[Any], new: list[Any]) -> str:
    if len(old) != len(new):
        return f"it saved {len(new)} tensors for its gradient, {len(old)} before"
    a, b = next((a, b) for a, b in zip(old, new, strict=True) if a != b)
    return f"it saved a tensor of {_words(b)}, {_words(a)} before"


def _words(key: Any) -> str:
    shape, dtype, device = key
    return f"shape {tuple(shape)}, {dtype}, on {device}"
