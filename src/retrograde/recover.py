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

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
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
        self.grads = [t.requires_grad for t in self.tensors]
        self.others = [_HOLE if isinstance(t, Tensor) else t for t in flat]
        self.modes = Modes()
        self.draws = Draws(generators(flat))
        self.sights: list[Sight] = []
        self.known: dict[Any, Any] = {}  # each (shape, dtype, device) once

    def forget(self) -> None:
        """After the forward pass: what is needed again is in the hands of autograd."""
        self.side, self.tensors, self.sights = {}, [], []

    def side_again(self, saved: Iterable[Tensor]) -> Streams:
        pairs = zip(saved, self.grads, strict=True)
        rest = iter([t if t.requires_grad is grad else t.detach().requires_grad_(grad) for t, grad in pairs])
        return tree_unflatten([next(rest) if other is _HOLE else other for other in self.others], self.side_spec)


_HOLE = object()


class Record:
    """What the first run of an update leaves behind: everything the second run needs but tensors of the forward pass."""

    __slots__ = (
        "before", "drawn", "grads", "index", "meta", "sight", "stale", "strides", "target_grads", "update", "values", "versions",
    )  # fmt: skip
    index: int
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


class Walk:
    """Where one backward pass stands in a run: `state` is the one after the first `at` updates."""

    __slots__ = ("__weakref__", "asked", "at", "filled", "finished", "side", "state")

    def __init__(self, state: Streams, side: Streams, at: int):
        self.state, self.side, self.at = state, side, at
        self.finished = False  # the lowest update that saved anything has been asked for
        self.asked = 0  # when an update was last asked for
        self.filled: tuple[int, list[Tensor | None]] = (-1, [])  # an update, and the tensors that it saved


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
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch._C._current_graph_task_id() not in ctx.run.walks:
            ctx.run.begin(ctx.run.top())
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.vault = None  # as autograd lets go of what a node has saved
        return None, None, grad


class Run:
    """Some connected updates in one forward pass. Autograd's graph owns it; it owns nothing of the graph."""

    def __init__(self, context: Context, keeps_sources: bool = False):
        self.context = context
        self.keeps_sources = keeps_sources
        self.records: list[Record] = []
        self.live: list[Tensor] | None = None  # saved by the update that is in its first run
        self.vault: Callable[[], Tensor | None] = lambda: None  # weak: a strong one would be a cycle that gc cannot see
        self.stash: list[tuple[Tensor, int]] | None = None
        self.layout: list[tuple[str, int, TreeSpec | None]] = []
        self.watched: list[tuple[str, weakref.ref[Tensor], int]] = []  # the vault's tensors, to name one that was edited
        self.walks: dict[int, Walk] = {}
        self.lowest = 0
        self.scattered = False  # over several devices, where the order of backward is not promised
        self.lock = threading.RLock()

    # forward

    def forward(self, index: int, update: Update, state: Streams) -> None:
        """The first run of an update."""
        context, rule, target = self.context, update.rule, state[update.target]
        sources = [state[name] for name in update.sources]
        record = Record()
        record.index, record.update = index, update
        record.sight = Sight(update.fn, context.draws)
        context.sights.append(record.sight)
        flat = [t for value in sources for t in tensors(value)]
        record.grads = [t.requires_grad for t in flat]
        record.strides = [t.stride() for t in flat]
        record.target_grads = [t.requires_grad for t in tensors(target)] if rule.saves else []
        record.versions = []
        live: list[Tensor] = []
        pack = _packer(live, record.versions)
        self.live = live
        try:
            with saved_tensors_hooks(pack, partial(self.unpack, len(self.records))):
                out = call(index, update, state, sources, context.side)
                fitting(index, update, target, out)
                applied = rule.apply(target, out) if rule.saves and not self.keeps_sources else None
            record.sight.after()
            record.values = record.before = None
            if not record.sight.repeatable:
                record.values, record.before = [t.detach() for t in live], detached(target)
            record.meta = _describe(live, context.known)
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
        kept: list[Tensor] = []
        for name, value in saved.items():
            flat, spec = flatten(value)
            self.layout.append((name, len(flat), spec))
            self.watched += [(f"the stream {name!r}", weakref.ref(t), version_of(t)) for t in flat]
            kept += flat
        for name, value in self.context.side.items():
            self.watched += [(f"the side input {name!r}", weakref.ref(t), version_of(t)) for t in tensors(value)]
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
                return list(vault.grad_fn.saved_tensors)  # type: ignore[union-attr]
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
        walk = Walk(state, self.context.side_again(rest), 0 if self.keeps_sources else len(self.records))
        task = torch._C._current_graph_task_id()
        if task >= 0:
            self.walks[task] = walk
            _enrol(walk)
            self.scattered = len({t.device for value in state.values() for t in tensors(value)}) > 1
            if self.scattered or torch.is_grad_enabled():  # create_graph: later tasks may come without a Keep node
                count = sum(number for _, number, _ in self.layout)
                self.stash = [(t.detach() if i < count else t, version_of(t)) for i, t in enumerate(saved)]
            kept = torch._C._autograd._get_current_graph_task_keep_graph()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self.end, task, kept))  # type: ignore[attr-defined]
        return walk

    def end(self, task: int, kept: bool) -> None:
        self.walks.pop(task, None)
        if not kept:
            self.stash = None

    def unpack(self, number: int, j: int) -> Tensor:
        """What the fn of update `number` saved as its tensor j."""
        walk = self.walks.get(torch._C._current_graph_task_id())
        filled, values = walk.filled if walk is not None else (-1, [])
        if filled != number or values[j] is None:
            if self.live is not None and number == len(self.records):
                return self.live[j]  # fn itself calls autograd.grad
            record = self.records[number]
            if j in record.stale:
                raise errors.edited_inside(errors.at(record.index, record.update), record.meta[j][0])
            if record.values is not None:
                return record.values[j]
            values = None  # what is left of the update above can go
            with self.lock:
                values = self.fill(walk or self.begin(self.top()), number)
        value, values[j] = values[j], None  # asked for once, as a rule: let it go
        return value  # type: ignore[return-value]

    def fill(self, walk: Walk, number: int) -> list[Tensor | None]:
        """Walk down to an update and have its saved tensors ready."""
        if walk.at < number or not walk.state:
            walk = self.begin(self.top())
        walk.filled = (-1, [])
        if not self.scattered:
            _retire(walk)
        try:
            while walk.at > number + 1:
                self.again(walk, walk.at - 1)
            values = self.again(walk, number)
        except BaseException:
            self.walks.pop(torch._C._current_graph_task_id(), None)
            raise
        walk.filled = (number, values)
        walk.finished = number == self.lowest
        return values

    def again(self, walk: Walk, number: int) -> list[Tensor | None]:
        """The second run of an update: collects what fn saves, and undoes the update unless that is done."""
        context, record = self.context, self.records[number]
        index, update, state = record.index, record.update, walk.state
        where = errors.at(index, update)
        if record.values is not None:
            state[update.target], walk.at = record.before, number
            return []
        difference = record.sight.difference()
        if difference:
            raise errors.changed_since(where, difference)
        store: list[Any] = []
        versions: list[int] = []
        pack = _packer(store, versions)
        with second_run(), _untransformed(), context.modes.again(), record.sight.again() as swap, torch.enable_grad():
            grads, strides = iter(record.grads), iter(record.strides)
            sources = []
            for name in update.sources:
                flat, spec = flatten(state[name])
                flat = [_as_before(t, next(grads), next(strides)) for t in flat]
                sources.append(unflatten(flat, spec))
            drawn = context.draws.again(record.drawn)
            try:
                with saved_tensors_hooks(pack, store.__getitem__):
                    out = call(index, update, state, sources, walk.side)
                    before = state.get(update.target)
                    if walk.at > number:
                        if why := update.rule.mismatch(before, out):
                            raise errors.other_path(where, why)
                        with torch.no_grad():
                            before = update.rule.undo(before, detached(out))
                    if update.rule.saves and not self.keeps_sources:
                        flat, spec = flatten(before)
                        flat = [_as_before(t, g, t.stride()) for t, g in zip(flat, record.target_grads, strict=True)]
                        update.rule.apply(unflatten(flat, spec), out)
            finally:
                surplus = drawn()
                values: list[Tensor | None] = list(store)
                store.clear()  # the graph holds on to the hooks, they to the list, these tensors to the graph
        meta = _describe(values, context.known)
        if surplus or meta != record.meta:
            raise errors.other_path(where, surplus or _difference(record.meta, meta))
        if swap.clamped and (difference := swap.difference()):
            raise errors.other_path(where, difference)
        if versions != record.versions:
            _check_captured(record, [sources, walk.side, swap.put_in], values, versions)
        if walk.at > number:
            state[update.target], walk.at = before, number
        return values


def _check_captured(record: Record, own: Any, values: list[Any], versions: list[int]) -> None:
    """A saved tensor with another version than in the first run, which is none of our own, was edited from outside."""
    homes = {t.untyped_storage()._cdata for t in tensors(own)}
    for old, new, t in zip(record.versions, versions, values, strict=True):
        if old != new and t.untyped_storage()._cdata not in homes:
            what = f"a tensor of shape {tuple(t.shape)} that fn holds on to"
            raise errors.changed_since(errors.at(record.index, record.update), what)


def _packer(store: list[Any], versions: list[int]) -> Callable[[Tensor], int]:
    """A pack hook that collects what is saved and leaves its number. The graph holds on to it: empty `store` afterwards."""

    def pack(t: Tensor) -> int:
        versions.append(t._version)
        store.append(t)
        return len(store) - 1

    return pack


def _describe(store: list[Tensor], known: dict[Any, Any]) -> list[Any]:
    """(shape, dtype, device) of each; equal ones are the same object, as many objects would keep gc busy."""
    return [known.setdefault(key, key) for key in [(t.shape, t.dtype, t.device) for t in store]]


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


@contextlib.contextmanager
def _outside_vmap() -> Iterator[None]:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack(), torch._C._ExcludeDispatchKeyGuard(_VMAP_MODES):
        yield


_VMAP_MODE = torch._C._parse_dispatch_key("VmapMode")
_VMAP_MODES = torch._C.DispatchKeySet(_VMAP_MODE) | torch._C.DispatchKeySet(torch._C._parse_dispatch_key("FuncTorchVmapMode"))


def _untransformed() -> contextlib.AbstractContextManager[Any]:
    """Outside of vmap: `is_grads_batched` runs backward under it, and fn must not notice."""
    batched = torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)
    if batched or torch._C._are_functorch_transforms_active():
        return _outside_vmap()
    return contextlib.nullcontext()


# Walks of one thread in the order of their beginning, so that what is done with can go before the task ends: otherwise a
# program inside a program would not be flat. Autograd executes nodes in the reverse order of their making, so
# - a walk that has given away all of its lowest update is done with when another begins (but not before: a Function may read its
#   saved tensors twice), and
# - when a walk goes on to another update, the walks that began since the last one were inside of that one, and are done with.
_LOCAL = threading.local()
_COUNT = itertools.count(1)


def _enrol(walk: Walk) -> None:
    begun = [(number, ref) for number, ref in getattr(_LOCAL, "begun", ()) if not _done_with(ref())]
    _LOCAL.begun = [*begun, (next(_COUNT), weakref.ref(walk))]


def _done_with(walk: Walk | None) -> bool:
    if walk is not None and walk.finished and all(t is None for t in walk.filled[1]):
        walk.state = {}
    return walk is None or not walk.state


def _retire(walk: Walk) -> None:
    begun: list[tuple[int, weakref.ref[Walk]]] = getattr(_LOCAL, "begun", [])
    while walk.asked and begun and begun[-1][0] > walk.asked:
        inner = begun.pop()[1]()
        if inner is not None:
            inner.state, inner.filled = {}, (-1, [])
    walk.asked = next(_COUNT)
