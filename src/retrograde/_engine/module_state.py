"""What one call of fn saw of its modules, so that its recomputation sees the same: parameters, and buffers that fn moves.

A `ModuleState` is made before the first run, and completed after it. A recomputation then finds one of three things:
1. nothing was touched since: it runs on the modules as they are;
2. slots hold other tensors (functional_call is over, buffers have moved, a parameter was frozen): the old ones are put in for the
   time of the recomputation;
3. a parameter was edited, or a module is in another mode: that is an error.
Where fn itself replaces, registers or resizes what its modules hold, or edits its parameters, it cannot be run again as it was:
this update then keeps its activations (`repeatable` is false).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import parametrize

from .. import errors
from .._base.function_modules import Around, Held, parts
from .._base.slots import NOTHING, Slots, Swap, place, there
from .._base.torch_private import home_of, version_of

_NOBODY = contextlib.nullcontext()
_SMALL = 1 << 16  # bytes of a buffer on a device that is kept where it may have been written


class ModuleState:
    """Made before the first run of fn; `after` completes it."""

    __slots__ = (
        "_before", "_snapshots", "_whole", "cached", "called", "changed", "modules", "moved", "repeatable", "slots",
    )  # fmt: skip

    def __init__(self, held: Held, where: Callable[[], str]):
        self._whole: Sequence[nn.Module] = held.modules
        self.modules = modules = held.modules
        if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
            raise errors.scripted(where())
        self._before = Slots(modules)
        self.cached = _cached_weights(modules) if parametrize._cache_enabled else None
        self._snapshots: Any = [one for m in modules if m._buffers for one in _snapshots(m)]
        # of a function that may hold more than it uses, the whole model for instance: the modules that it calls
        self.called: set[nn.Module] | None = None if held.registered else set()
        self.repeatable = True
        self.moved: Sequence[tuple[dict[str, Any], str, Tensor, Tensor]] = ()  # buffers that fn writes: slot, tensor, old value
        self.changed: Sequence[tuple[dict[str, Any], str, Any]] = ()  # slots that it replaces or makes, and what they held

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Around the first run of a function that is no module: it may call modules that nothing else shows."""
        return _NOBODY if self.called is None else self._watching(self.called)

    @contextlib.contextmanager
    def _watching(self, called: set[nn.Module]) -> Iterator[None]:
        known = set(self.modules)

        def enter(m: nn.Module, _: Any) -> None:
            if not isinstance(m, Around):
                called.add(m)
                if m not in known and not torch.compiler.is_compiling():
                    new = [one for one in parts([m]) if one not in known]
                    known.update(new)
                    self._snapshots += [one for module in new for one in _snapshots(module)]

        handle = register_module_forward_pre_hook(enter)
        try:
            yield
        finally:
            handle.remove()

    def after(self, saved: list[Tensor]) -> None:
        """Look at the modules again. A function that is no module has used what it has called and what it has saved."""
        now = Slots(self._whole)
        self._compare(now)
        if self.called is not None:
            homes = {home_of(t) for t in saved}
            saving = [m for m in self._whole if any(home_of(p) in homes for p in m._parameters.values() if there(p))]
            self.modules = parts([*self.called, *saving])
            now = Slots(self.modules)
        self.slots = now.complete(self.modules)
        self._whole, self._before, self._snapshots, self.called = (), now, (), None

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers that are there, whoever runs, and those that fn has moved."""
        found = [t for t in self._before.values if t is not None and not nn.parameter.is_lazy(t)]
        return [*found, *(b for _, _, b, _ in self.moved)]

    def _compare(self, now: Slots) -> None:
        """What fn itself has changed."""
        if not self._before.untouched(now):
            self.changed = self._before.replaced_in(now)
            self.repeatable = not self.changed and not self._before.edited()
        moved = []
        for m, name, b, version, old in self._snapshots:
            if b.shape != old.shape or b.dtype != old.dtype:
                self.repeatable = False
            if _written(m, b, version, old):
                moved.append((m._buffers, name, b, old))
        if moved:
            self.moved, homes = moved, {home_of(b): b for _, _, b, _ in moved}
            views = any(homes.get(home_of(t), t) is not t for t in now.values if isinstance(t, Tensor))
            self.repeatable = self.repeatable and not views  # of another that moved

    def name_of(self, t: Tensor) -> str | None:
        """What a tensor that fn saved is among them, in words."""
        named: Any = zip(self.slots.names, self.slots.values, strict=True)
        found = ((name, value) for name, value in named if there(value) and home_of(value) == home_of(t))
        for name, value in found:
            return f"the {'parameter' if isinstance(value, nn.Parameter) else 'buffer'} {name!r} of shape {tuple(value.shape)}"
        return None

    def put_back(self) -> None:
        """After an exception: slots and buffers as they were before the call."""
        if self._whole:  # fn did not come to its end
            self._compare(Slots(self._whole))
        with torch.no_grad():
            for slots, name, value in reversed(self.changed):
                place(slots, name, value)
            for _, _, b, old in reversed(self.moved):
                b.resize_(old.shape).copy_(old) if b.shape != old.shape else b.copy_(old)

    def put_in(self, record: Any) -> Swap:
        """The same tensors in the same slots, for a recomputation: those of functional_call, old values of buffers.

        What was changed since so that the call cannot be repeated is an error.
        """
        now = Slots(self.modules).complete(self.modules)
        same, caching = self.slots.equal(now), self.cached is not None or parametrize._cache_enabled
        if same and not self.moved and not caching:
            return NOTHING
        swap = Swap()
        if caching:
            own: Any = vars(parametrize)
            swap.put(own, "_cache", {} if self.cached is None else dict(self.cached))
            swap.put(own, "_cache_enabled", 0 if self.cached is None else 1)
        if not same:
            self._refuse_changes(now, record.where)
            for slots, name, value in self.slots.replaced_in(now):
                swap.put(slots, name, value)
            self._thaw(swap)
        copies: dict[int, Tensor] = {}  # one tensor under two names stays one
        for slots, name, b, old in self.moved:
            swap.put(slots, name, copies.setdefault(id(b), old.clone().requires_grad_(b.requires_grad)))
        return swap

    def _refuse_changes(self, now: Slots, where: str) -> None:
        for module, then, training in zip(self.modules, self.slots.training, now.training, strict=True):
            if then is not training:
                first, second = ("train", "eval") if then else ("eval", "train")
                what = f"the mode of {type(module).__name__} ({first}() in the forward pass, {second}() in backward)"
                raise errors.changed_since(where, what)
        for name, p in self.slots.edited(now):
            raise errors.changed_since(where, f"the parameter {name!r} of shape {tuple(p.shape)}")

    def _thaw(self, swap: Swap) -> None:
        """Parameters that were frozen or unfrozen since, as they were."""
        flags = {id(p): grad for p, grad in zip(self.slots.parameters, self.slots.requires_grad, strict=True)}
        for slots, name, p in self.slots.items():
            if p is not None and flags.get(id(p), p.requires_grad) is not p.requires_grad:
                swap.put(slots, name, p.detach().requires_grad_(flags[id(p)]))


def _cached_weights(modules: list[nn.Module]) -> dict[Any, Tensor | None]:
    """Of these modules, what `parametrize.cached()` has from calls before; without their graphs, which own what keeps this."""
    own = set(map(id, modules))
    found = {key: t for key, t in parametrize._cache.items() if key[0] in own}
    return {key: t if t is None else t.detach().requires_grad_(t.requires_grad) for key, t in found.items()}


# -- buffers -----------------------------------------------------------------------------------------------------------


def _snapshots(m: nn.Module) -> list[tuple[nn.Module, str, Tensor, int, Tensor]]:
    there = [(name, b) for name, b in m._buffers.items() if b is not None and not nn.parameter.is_lazy(b)]
    return [(m, name, b, version_of(b), b.detach().clone()) for name, b in there]


def _written(m: nn.Module, b: Tensor, version: int, old: Tensor) -> bool:
    """Whether fn changed the buffer. BatchNorm and `.data` do so without moving its version."""
    if version_of(b) != version or (isinstance(m, nn.modules.batchnorm._NormBase) and m.training):
        return True
    if b.device.type != "cpu":  # a look at the values would make the device wait
        return b.nbytes <= _SMALL
    return not _same(b, old)


def _same(a: Tensor, b: Tensor) -> bool:
    try:
        return torch.equal(a, b)
    except (RuntimeError, AssertionError):  # fake tensors have no values
        return False
