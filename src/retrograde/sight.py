"""What one call of fn saw of its modules, and how a second run is made to see it again."""

from __future__ import annotations

import weakref
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from .held import Held, home_of, parts, version_of

_MISSING = object()  # no such slot
_STRIDED = torch.strided
_SMALL = 1 << 16  # bytes of a buffer that may be kept for each update

# What is known of buffers, by (name, training): "moves" if fn writes to it, "read" if code that took its pointer left it alone.
_HABITS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, bool], str]] = weakref.WeakKeyDictionary()


class Sight:
    """Made by `of` before the call; `after` completes it."""

    __slots__ = (
        "before", "buffers", "children", "empty", "fn", "held", "hooks", "loose", "modules", "names", "parameters", "pins",
        "places", "plain", "repeatable", "rule", "tensors", "training", "versions",
    )  # fmt: skip
    told = False  # `same` does not tell all: there may be buffers, and other tensors

    def __init__(self, fn: Any, rule: Any, held: Held):
        self.fn, self.rule, self.held = fn, rule, held
        self.loose = held.loose
        self.modules = held.modules  # those that must be as they were
        self.tensors: list[tuple[weakref.ref[Tensor], int, str]] = []  # weak: they may be of autograd's graph
        self.children: dict[nn.Module, list[Any]] = {}
        self.empty: list[tuple[dict[str, Any], str]] = []  # slots that hold None
        self.pins: list[Any] = []  # storages of the parameters, so that no other one gets their addresses
        self.places: list[dict[str, Any]] = []  # where each module has its parameters
        self.names: list[tuple[str, ...]] = []  # of its parameters and buffers
        self.training: list[bool] = []
        self.hooks: list[Any] = []
        self.parameters: list[tuple[dict[str, Any], str, Parameter, int, bool, int]] = []
        self.buffers: list[tuple[dict[str, Any], str, Tensor, int]] = []  # those that fn leaves alone
        self.before: list[tuple[nn.Module, str, Any, int, Any]] = []  # those that it changes, replaces or makes: what they were
        self.versions: list[int] = []  # of the parameters before the call
        self.repeatable = True

    @staticmethod
    def of(fn: Any, rule: Any) -> Sight:
        """Before the call."""
        sight = Sight(fn, rule, Held(fn, rule))
        sight.look()
        return sight

    def look(self) -> None:
        if self.held.tensors and getattr(self.fn, "_keeps_a_cache", None) is not True:  # a cache is its own business
            self.tensors = [(weakref.ref(t), version_of(t), _shape(t)) for t in self.held.tensors]
        for m in self.held.modules:
            for p in m._parameters.values():
                if p is not None:
                    if type(p) is not Parameter and is_lazy(p):
                        self.repeatable = False
                    self.versions.append(p._version)
            for name, b in m._buffers.items():
                if b is None:
                    self.before.append((m, name, None, 0, None))
                elif is_lazy(b):
                    self.repeatable = False
                else:
                    self.before.append((m, name, b, version_of(b), _snapshot(m, name, b)))

    def after(self, called: set[nn.Module] | None, saved: list[Tensor]) -> Sight:
        """Parameters are looked at after the call: lazy ones exist now, and what fn itself clamps is no later edit.

        Where fn may hold more than it uses, `called` are the modules that ran; one whose parameters were saved was used as well.
        """
        if self.tensors:
            self._held_tensors_after()
        self.held.tensors = []
        modules = self.held.modules
        if called is not None:
            self.repeatable = self.repeatable and called <= set(modules)  # one that was not found may have changed
            homes = {home_of(t) for t in saved}
            used = {m for m in modules if any(_there(p) and home_of(p) in homes for p in m._parameters.values())}
            used.update(called, self.held.named)  # of these fn may read a parameter, a buffer or a flag by itself
            self.modules = [m for m in modules if m in used]
            self.children = {m: list(m._modules.items()) for m in called}
        made, versions = False, []
        for m in modules:
            slots = m._parameters
            self.places.append(slots)
            for name, p in slots.items():
                if type(p) is Parameter or _there(p):
                    version, home = p._version, id(p)
                    if p.layout is _STRIDED:
                        storage = p.untyped_storage()
                        home = storage._cdata
                        self.pins.append(storage)
                    versions.append(version)
                    self.parameters.append((slots, name, p, version, p.requires_grad, home))
                elif p is None:
                    self.empty.append((slots, name))
            self.names.append((*slots, *m._buffers))
            self.training.append(m.training)
            self.hooks.append(_hooks(m) if m._forward_hooks or m._forward_pre_hooks else ())
            made = made or m._buffers
        if len(self.versions) != len(versions):  # lazy ones have been made
            self.versions = versions
        self.plain = self.versions == versions
        if made or self.before:
            self._buffers_after()
        return self

    def _held_tensors_after(self) -> None:
        """Of the tensors that fn holds, those that it neither exchanges nor edits; an edit cannot be repeated."""
        present = {id(t): t for t in Held(self.fn, self.rule).tensors}
        self.tensors = [kept for kept in self.tensors if id(kept[0]()) in present]
        if any(version_of(present[id(ref())]) != version for ref, version, _ in self.tensors):
            self.repeatable = False

    def _buffers_after(self) -> None:
        found, self.before = self.before, []
        for m, name, b, version, snapshot in found:
            if m._buffers.get(name) is not b:
                self.before.append((m, name, b, version, b if snapshot is None else snapshot))
            elif b is None:
                self.empty.append((m._buffers, name))
            elif snapshot is None and version_of(b) == version:
                self.buffers.append((m._buffers, name, b, version))
            elif snapshot is None:
                self.repeatable = False  # it was only read until now
                _HABITS[m][name, m.training] = "moves"
            elif _written(m, name, b, version, snapshot):
                self.before.append((m, name, b, version, snapshot))
            else:
                self.buffers.append((m._buffers, name, b, version))
        known = {(m, name) for m, name, *_ in found}
        new = [(m, name) for m in self.held.modules for name in m._buffers if (m, name) not in known]
        self.before += [(m, name, _MISSING, 0, _MISSING) for m, name in new]
        moved = {home_of(b): b for _, _, b, _, _ in self.before if isinstance(b, Tensor)}
        others = [b for _, _, b, _ in self.buffers] + [p for _, _, p, *_ in self.parameters]
        others += [b for _, _, b, _, _ in self.before if isinstance(b, Tensor)]
        if any(moved.get(home_of(t), t) is not t for t in others):
            self.repeatable = False  # a view of one that moved

    def put_back(self) -> None:
        """After an exception: the buffers as they were before the call."""
        with torch.no_grad():
            for m, name, b, _, snapshot in reversed(self.before):
                if isinstance(snapshot, Tensor) and snapshot is not b and not _same(b, snapshot):
                    b.copy_(snapshot)
                _place(m._buffers, name, b)

    def same(self) -> bool:
        """Whether modules and their parameters are, at a glance, as they were before the call and after."""
        modules = self.held.modules
        if not self.plain or self._modules_now() != modules:
            return False
        # much is written out here: it is felt
        seen = zip(modules, self.places, self.names, self.training, self.hooks, strict=True)
        for m, place, names, training, hooks in seen:
            if m._parameters is not place or (*place, *m._buffers) != names or m.training is not training:
                return False
            if (m._forward_hooks or m._forward_pre_hooks or hooks) and hooks != _hooks(m):
                return False
        for slots, name, p, version, requires_grad, home in self.parameters:
            if slots.get(name) is not p or p._version != version or p.requires_grad is not requires_grad:
                return False
            if (p.untyped_storage()._cdata if p.layout is _STRIDED else id(p)) != home:
                return False
        return not self.empty or all(slots.get(name) is None for slots, name in self.empty)

    def _modules_now(self) -> list[nn.Module]:
        return Held(self.fn, self.rule).modules if self.held.wide else parts(self.held.roots)

    def difference(self, same: bool = False) -> str | None:
        """What has been changed since, so that the call cannot be repeated; or None."""
        slots = None
        if self.held.loose:
            slots = {id(m._parameters) for m in self.modules} | {id(m._buffers) for m in self.modules}
        if not same and (what := self._module_difference(slots)):
            return what
        for own, name, b, version in self.buffers:
            if version_of(b) != version and (slots is None or id(own) in slots):
                return f"the buffer {name!r} of shape {tuple(b.shape)}"
        if self.tensors:
            there = {id(t): t for t in Held(self.fn, self.rule).tensors}
            for ref, version, shape in self.tensors:
                t = there.get(id(ref()))
                if t is None or version_of(t) != version:
                    return f"a tensor of shape {shape} that fn holds on to"
        return None

    def _module_difference(self, slots: set[int] | None) -> str | None:
        """What has been changed of modules and parameters, if that is one of those slots; or None."""
        present, modules, own = self._modules_now(), self.held.modules, set(self.modules)
        if present != modules:
            gone = [m for m in modules if m in own and m not in present]
            gone += [m for m, children in self.children.items() if list(m._modules.items()) != children]
            if gone or not self.held.loose:
                return f"a part of fn, {type((gone or modules)[0]).__name__},"
        for module, place, training, hooks in zip(modules, self.places, self.training, self.hooks, strict=True):
            if module not in own:
                continue
            if module._parameters is not place and not _same_items(module._parameters, place):
                return f"the parameters of {type(module).__name__}"
            if module.training is not training:
                then, now = ("train", "eval") if training else ("eval", "train")
                return f"the mode of {type(module).__name__} ({then}() in the forward pass, {now}() in backward)"
            if hooks != _hooks(module):
                return f"the forward hooks of {type(module).__name__}"
        for place, name, p, version, _, home in self.parameters:
            if (p._version != version or home_of(p) != home) and not _sharded(p) and (slots is None or id(place) in slots):
                return f"the parameter {name!r} of shape {tuple(p.shape)}"
        return None

    def again(self, same: bool) -> Swap:
        """The same tensors in the same slots: those of functional_call, old values of buffers, parameters frozen since."""
        if same and not self.before and not self.buffers:
            return NOTHING
        swap = Swap()
        if not same:
            self._parameters_again(swap)
            for m, names in zip(self.held.modules, self.names, strict=True):
                for slots in (m._parameters, m._buffers):
                    for name in [name for name in slots if name not in names]:  # made since
                        swap.put(slots, name, _MISSING)
        for slots, name, b, _ in self.buffers:
            if slots.get(name) is not b:
                swap.put(slots, name, b)
        copies: dict[int, Any] = {}  # one tensor under two names stays one
        for m, name, b, _, snapshot in self.before:
            if isinstance(snapshot, Tensor):
                snapshot = copies.setdefault(id(b), snapshot.clone().requires_grad_(b.requires_grad))
            swap.put(m._buffers, name, snapshot)
        return swap

    def _parameters_again(self, swap: Swap) -> None:
        for slots, name in self.empty:
            if slots.get(name) is not None:
                swap.put(slots, name, None)
        for (slots, name, p, version, requires_grad, _), at_first in zip(self.parameters, self.versions, strict=True):
            now = slots.get(name)
            if version != at_first and not _sharded(p):  # fn changed it, and is to find it as it left it
                swap.put(slots, name, p.detach().clone().requires_grad_(requires_grad))
                swap.clamped.append((name, swap.put_in[-1], p))
            elif p.requires_grad is not requires_grad:
                swap.put(slots, name, p.detach().requires_grad_(requires_grad))
            elif now is not p and not _sharded(p) and not (now is not None and _sharded(now)):
                swap.put(slots, name, p)


class Swap:
    """Tensors put into modules for the time of a second run."""

    __slots__ = ("clamped", "out", "put_in")

    def __init__(self) -> None:
        self.clamped: list[tuple[str, Tensor, Tensor]] = []
        self.out: list[tuple[dict[str, Any], str, Any]] = []
        self.put_in: list[Any] = []

    def put(self, slots: dict[str, Any], name: str, t: Any) -> None:
        self.out.append((slots, name, slots.get(name, _MISSING)))
        self.put_in.append(t)
        _place(slots, name, t)

    def apart(self) -> Swap:
        """Copies in the same slots, for somebody whose changes of them are his own."""
        copies = Swap()
        for slots, name, _ in self.out:
            t = slots.get(name, _MISSING)
            copies.put(slots, name, t.clone() if isinstance(t, Tensor) else t)
        return copies

    def difference(self) -> str | None:
        """A parameter that fn changes, and not to the same values the second time; or None."""
        for name, copy, p in self.clamped:
            near = torch.finfo(p.dtype).eps ** 0.5
            if not torch.allclose(copy, p, near, near):
                return f"it changed its parameter {name!r} to other values"
        return None

    def undo(self) -> None:
        for slots, name, t in reversed(self.out):
            _place(slots, name, t)


NOTHING = Swap()  # there is nothing to put in, as a rule


def _there(p: Any) -> TypeGuard[Parameter]:
    """A parameter that exists: neither None nor one that a lazy module has yet to make."""
    return p is not None and (type(p) is Parameter or not is_lazy(p))


def _shape(t: Tensor) -> str:
    try:
        return str(tuple(t.shape))
    except RuntimeError:  # nested tensors have none
        return "unknown"


def _same_items(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def _place(slots: dict[str, Any], name: str, t: Any) -> None:
    if t is _MISSING:
        slots.pop(name, None)
    else:
        slots[name] = t


def _sharded(t: Tensor) -> bool:
    """FSDP2 exchanges sharded and full parameters in the same slots: they are its own to move."""
    return type(t) is not Parameter and type(t) is not Tensor and hasattr(t, "_local_tensor")


def _snapshot(module: nn.Module, name: str, b: Tensor) -> Tensor | None:
    """The value of a buffer before fn runs: a copy that costs nothing until somebody writes, where torch can do that."""
    habit = _HABITS.get(module, {}).get((name, module.training))
    if habit == "read":
        return None
    b = b.detach()
    strided = b.layout is torch.strided
    if habit is None and strided and b.untyped_storage().resizable():  # others have no allocator to make the copy with
        try:
            return b._lazy_clone()  # type: ignore[attr-defined]
        except (RuntimeError, NotImplementedError):  # shared memory, some subclasses
            pass
    return b.clone()


def _written(module: nn.Module, name: str, b: Tensor, version: int, snapshot: Tensor) -> bool:
    """Whether fn changed the buffer. BatchNorm and `.data` do so without moving its version."""
    habits = _HABITS.setdefault(module, {})
    key = (name, module.training)
    if version_of(b) != version:
        habits[key] = "moves"
    elif key not in habits:
        if b.layout is not torch.strided or _untouched(b):
            return False  # nobody so much as took its pointer
        if snapshot.nbytes <= _SMALL and b.device.type != "cpu":
            return True  # kept on suspicion: a look at the values would make the device wait
        if _same(b, snapshot):
            if snapshot.nbytes > _SMALL:
                habits[key] = "read"
            return False
        habits[key] = "moves"
    return habits[key] == "moves"


def _untouched(b: Tensor) -> bool:
    try:
        return torch._C._is_cow_tensor(b)  # type: ignore[attr-defined]
    except RuntimeError:  # subclasses, from torch 2.15 on
        return False


def _hooks(m: nn.Module) -> Any:
    return (*m._forward_pre_hooks, *m._forward_hooks)


def _same(a: Tensor, b: Tensor) -> bool:
    try:
        return torch.equal(a, b)
    except (RuntimeError, AssertionError):  # fake tensors have no values
        return False
