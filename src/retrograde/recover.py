"""The engine: a list of updates run forward, and run backward inside autograd's own backward pass.

The algebra. An update is `t' = apply(t, fn(s))`, where t is not among the streams s; it is undone by `t = undo(t', fn(s))`.
So all inputs of all fns can be recovered from the final streams, last update first.

The mechanism. Autograd's graph stays in place; only what it keeps is changed.
1. Forward: each fn runs with grad under saved-tensor hooks. For each tensor that autograd wants to save, the pack hook leaves
   just its number.
2. The final streams and the tensors among the side inputs are saved *by autograd*, in a `Keep` node at the end (one for each set
   of connected streams). The run holds no tensor of the forward pass, so outer programs, checkpoint and save_on_cpu apply.
3. Backward: the first unpack inside update k asks for what fn saved there. The engine walks down from where it is: it runs each fn
   on the recovered sources, undoes the update, and hands out what the fn of update k saved this time.
4. A walk belongs to one graph task (one call of backward) and dies with it. Autograd executes nodes in the reverse order of
   their making, so a walk goes down once; whatever is asked for out of turn is walked to again from the top.
5. What the second run saves must match the first in number, shape, dtype and device; anything else is an error.
"""

from __future__ import annotations

import contextlib
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
from .replay import Draws, Modes, Sight, generators, second_run
from .streams import detached, flatten, tensors, unflatten, with_strides
from .update import Update


class Context:
    """What the runs of one stretch share: the side inputs, the modes, the random generators."""

    def __init__(self, side: Streams):
        flat, self.side_spec = tree_flatten(side)
        self.side, self.tensors = side, [t for t in flat if isinstance(t, Tensor)]
        self.others = [_HOLE if isinstance(t, Tensor) else t for t in flat]
        self.modes = Modes()
        self.draws = Draws(generators(flat))
        self.sights: list[Sight] = []
        self.known: dict[Any, Any] = {}  # each (shape, dtype, device) once

    def forget(self) -> None:
        """After the forward pass: what is needed again is in the hands of autograd."""
        self.side, self.tensors, self.sights = {}, [], []

    def side_again(self, saved: Iterable[Tensor]) -> Streams:
        rest = iter(saved)
        return tree_unflatten([next(rest) if other is _HOLE else other for other in self.others], self.side_spec)


_HOLE = object()


class Record:
    """What the first run of an update leaves behind: everything the second run needs but tensors of the forward pass."""

    __slots__ = ("drawn", "grads", "index", "meta", "sight", "stale", "strides", "target_grads", "update", "versions")
    index: int
    update: Update
    sight: Sight
    drawn: list[Any]  # generators that fn drew from, with their states before
    meta: list[Any]  # (shape, dtype, device) of each tensor that fn saved …
    versions: list[int]  # … and its version then
    stale: list[int]  # numbers of those that fn edited afterwards
    grads: list[bool]  # requires_grad of the leaves of the sources …
    strides: list[tuple[int, ...]]  # … and their layouts
    target_grads: list[bool]  # the same of the target, for rules that save


class Walk:
    """Where one backward pass stands in a run: `state` is the one after the first `at` updates."""

    __slots__ = ("__weakref__", "at", "number", "side", "state", "values")

    def __init__(self, state: Streams, side: Streams, at: int):
        self.state, self.side, self.at = state, side, at
        self.number = -1  # the update whose saved tensors are in `values`
        self.values: list[Tensor | None] = []


class Keep(torch.autograd.Function):
    """The identity on `passed`; has autograd keep `saved`, and starts the walk in backward."""

    @staticmethod
    def forward(ctx: Any, run: Run, saved: list[Tensor], *passed: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.run = run
        run.kept = weakref.ref(ctx)  # a strong one would be a cycle through C++, which gc cannot see
        return tuple(t.detach() for t in passed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.run.begin(ctx.run.read(ctx))
        return None, None, *grads


class Run:
    """Some connected updates in one forward pass. Autograd's graph owns it; it owns nothing of the graph."""

    def __init__(self, context: Context, keeps_sources: bool = False):
        self.context = context
        self.keeps_sources = keeps_sources
        self.records: list[Record] = []
        self.live: list[Tensor] | None = None  # saved by the update that is in its first run
        self.kept: Callable[[], Any] = lambda: None
        self.stash: list[Tensor] | None = None
        self.layout: list[tuple[str, int, TreeSpec | None]] = []
        self.watched: list[tuple[str, weakref.ref[Tensor], int]] = []
        self.walks: dict[int, Walk] = {}
        self.lowest = 0
        self.lock = threading.RLock()

    # forward

    def forward(self, index: int, update: Update, state: Streams) -> None:
        """The first run of an update."""
        context, rule, target = self.context, update.rule, state[update.target]
        sources = [state[name] for name in update.sources]
        record = Record()
        record.index, record.update = index, update
        record.sight = Sight(update.fn)
        context.sights.append(record.sight)
        flat = [t for value in sources for t in tensors(value)]
        record.grads = [t.requires_grad for t in flat]
        record.strides = [t.stride() for t in flat]
        record.target_grads = [t.requires_grad for t in tensors(target)] if rule.saves else []
        record.meta, record.versions = [], []
        live: list[Tensor] = []
        pack = _packer(live, record.meta, record.versions, context.known, lambda t: t)
        self.live = live
        try:
            with saved_tensors_hooks(pack, partial(self.unpack, len(self.records))):
                out = call(index, update, state, sources, context.side)
                fitting(index, update, target, out)
                applied = rule.apply(target, out) if rule.saves and not self.keeps_sources else None
            record.stale = [j for j, t in enumerate(live) if t._version != record.versions[j]]
        finally:
            live.clear()  # the graph holds on to the hook, and these hold on to the graph
            self.live = None
        record.sight.after()
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
        flat, spec = flatten(passed)
        through = [t for t in flat if isinstance(t, Tensor) and t.requires_grad]
        self.lowest = next((number for number, record in enumerate(self.records) if record.meta), 0)
        if not through:
            return passed
        kept: list[Tensor] = []
        for name, value in saved.items():
            parts, its_spec = flatten(value)
            self.layout.append((name, len(parts), its_spec))
            self.watched += [(f"the stream {name!r}", weakref.ref(t), version_of(t)) for t in parts]
            kept += parts
        for name, value in self.context.side.items():
            self.watched += [(f"the side input {name!r}", weakref.ref(t), version_of(t)) for t in tensors(value)]
        outs = iter(Keep.apply(self, kept + self.context.tensors, *through))  # type: ignore[arg-type]
        return unflatten([next(outs) if isinstance(t, Tensor) and t.requires_grad else t for t in flat], spec)

    # backward

    def read(self, ctx: Any) -> list[Tensor]:
        """What autograd kept; its version check put in words."""
        try:
            return list(ctx.saved_tensors)
        except RuntimeError as error:
            for name, ref, version in self.watched:
                t = ref()
                if t is not None and version_of(t) != version:
                    raise errors.edited_output(name) from error
            raise

    def top(self) -> list[Tensor]:
        """What the walk starts from. Double backward may get here without passing the Keep node."""
        if self.stash is not None:
            return self.stash
        ctx = self.kept()
        if ctx is None:
            raise errors.ReplayError("the activations of this program are gone: its graph was freed. Use retain_graph=True")
        return self.read(ctx)

    def begin(self, saved: list[Tensor]) -> Walk:
        """A new walk from the kept streams, for the graph task that is running."""
        rest, state = iter(saved), {}
        for name, count, spec in self.layout:
            state[name] = unflatten([next(rest).detach() for _ in range(count)], spec)
        walk = Walk(state, self.context.side_again(rest), 0 if self.keeps_sources else len(self.records))
        _unpark()
        task = torch._C._current_graph_task_id()
        if task >= 0:
            self.walks[task] = walk
            differentiable = torch.is_grad_enabled()  # create_graph: later tasks may come without the Keep node
            devices = {t.device for value in state.values() for t in tensors(value)}
            if differentiable or len(devices) > 1:  # with several devices the order is not promised
                count = sum(number for _, number, _ in self.layout)
                self.stash = [t.detach() for t in saved[:count]] + saved[count:]
            torch.autograd.Variable._execution_engine.queue_callback(partial(self.end, task, differentiable))  # type: ignore[attr-defined]
        return walk

    def end(self, task: int, differentiable: bool) -> None:
        self.walks.pop(task, None)
        if not differentiable:
            self.stash = None

    def unpack(self, number: int, j: int) -> Tensor:
        """What the fn of update `number` saved as its tensor j."""
        if self.live is not None and number == len(self.records):
            return self.live[j]  # fn itself calls autograd.grad
        with self.lock:
            record = self.records[number]
            if j in record.stale:
                raise errors.edited_inside(record.index, record.update, record.meta[j][0])
            walk = self.walks.get(torch._C._current_graph_task_id()) or self.begin(self.top())
            if walk.number != number or walk.values[j] is None:
                walk = self.fill(walk, number)
            value, walk.values[j] = walk.values[j], None  # asked for once as a rule: let it go
            assert value is not None
            return value

    def fill(self, walk: Walk, number: int) -> Walk:
        """Walk down to an update and have its saved tensors ready."""
        if walk.at < number or not walk.state:
            walk = self.begin(self.top())
        walk.number, walk.values = -1, []
        try:
            while walk.at > number + 1:
                self.again(walk, walk.at - 1)
            walk.values = self.again(walk, number)
        except BaseException:
            self.walks.pop(torch._C._current_graph_task_id(), None)
            raise
        walk.number = number
        if number == self.lowest:
            _park(walk)
        return walk

    def again(self, walk: Walk, number: int) -> list[Tensor | None]:
        """The second run of an update: collects what fn saves, and undoes the update unless that is done."""
        context, record = self.context, self.records[number]
        index, update, state = record.index, record.update, walk.state
        difference = record.sight.difference()
        if difference:
            raise errors.edited_since(index, update, difference)
        grads, strides = iter(record.grads), iter(record.strides)
        sources = []
        for name in update.sources:
            flat, spec = flatten(state[name])
            flat = [_as_before(t, next(grads), next(strides)) for t in flat]
            sources.append(unflatten(flat, spec))
        values: list[Tensor | None] = []
        meta: list[Any] = []
        versions: list[int] = []
        pack = _packer(values, meta, versions, context.known, Tensor.detach)
        with second_run(), _untransformed(), context.modes.again(), record.sight.again(), torch.enable_grad():
            drawn = context.draws.again(record.drawn)
            try:
                with saved_tensors_hooks(pack, values.__getitem__):
                    out = call(index, update, state, sources, walk.side)
                    before = state.get(update.target)
                    if walk.at > number:
                        fitting(index, update, before, out)
                        with torch.no_grad():
                            before = update.rule.undo(before, detached(out))
                    if update.rule.saves and not self.keeps_sources:
                        flat, spec = flatten(before)
                        flat = [_as_before(t, g, t.stride()) for t, g in zip(flat, record.target_grads, strict=True)]
                        update.rule.apply(unflatten(flat, spec), out)
            finally:
                surplus = drawn()
        if surplus or meta != record.meta:
            raise errors.other_path(index, update, surplus or _difference(record.meta, meta))
        if versions != record.versions:
            self.check_captured(record, walk, sources, values, versions)
        if walk.at > number:
            state[update.target], walk.at = before, number
        return values

    def check_captured(self, record: Record, walk: Walk, sources: list[Any], values: list[Any], versions: list[int]) -> None:
        """A saved tensor with another version than before, which is no stream or side input, was edited from outside."""
        mine = [*sources, walk.side, [snapshot for *_, snapshot in record.sight.before]]
        homes = {t.untyped_storage()._cdata for value in mine for t in tensors(value)}
        for j, (old, new) in enumerate(zip(record.versions, versions, strict=True)):
            if old != new and values[j].untyped_storage()._cdata not in homes:
                what = f"a tensor of shape {tuple(values[j].shape)} that fn holds on to"
                raise errors.edited_since(record.index, record.update, what)


def _packer(store: list[Any], meta: list[Any], versions: list[int], known: dict[Any, Any], take: Any) -> Callable[..., int]:
    def pack(t: Tensor) -> int:
        key = (t.shape, t.dtype, t.device)
        meta.append(known.setdefault(key, key))
        versions.append(t._version)
        store.append(take(t))
        return len(store) - 1

    return pack


def _as_before(t: Tensor, requires_grad: bool, strides: tuple[int, ...]) -> Tensor:
    t = with_strides(t, strides)
    return t.detach().requires_grad_() if requires_grad else t


def _difference(old: list[Any], new: list[Any]) -> str:
    if len(old) != len(new):
        return f"it saved {len(new)} tensors for its gradient, {len(old)} before"
    a, b = next((a, b) for a, b in zip(old, new, strict=True) if a != b)
    return f"it saved a tensor of {_words(b)}, {_words(a)} before"


def _words(key: Any) -> str:
    shape, dtype, device = key
    return f"shape {tuple(shape)}, {dtype}, on {device}"


def _untransformed() -> contextlib.AbstractContextManager[Any]:
    """Outside of vmap: `is_grads_batched` runs backward under it, and fn must not notice."""
    if not torch._C._are_functorch_transforms_active():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


# A walk that has reached its lowest update needs its streams only if something there is asked for twice, and that happens before
# another walk begins. Letting them go then keeps a program inside a program flat.
_LOCAL = threading.local()


def _park(walk: Walk) -> None:
    _LOCAL.parked = weakref.ref(walk)


def _unpark() -> None:
    walk = getattr(_LOCAL, "parked", lambda: None)()
    if walk is not None:
        walk.state = {}
