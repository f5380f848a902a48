"""What a second run of fn must see again: the modules' tensors and flags, the random numbers, the modes.

Three independent parts. `Sight` is what one call of fn saw of its modules, `Draws` follows the random generators, `Modes` holds
autocast and the attention backends of one forward pass.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_LOCAL = threading.local()


def replaying() -> bool:
    """True inside a second run: fn is being run again in backward, to recompute what its gradient needs."""
    return getattr(_LOCAL, "depth", 0) > 0


class second_run:
    def __enter__(self) -> None:
        _LOCAL.depth = getattr(_LOCAL, "depth", 0) + 1

    def __exit__(self, *_: Any) -> None:
        _LOCAL.depth -= 1


# -- modules -----------------------------------------------------------------------------------------------------------


class Held:
    """What fn holds on to: modules with all their parts, and tensors and random generators outside of them."""

    __slots__ = ("generators", "modules", "tensors")

    def __init__(self, fn: Any):
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self.generators: list[torch.Generator] = []
        if isinstance(fn, nn.Module):
            self.modules.append(fn)
        else:
            self._look_into(fn)
        seen = set(self.modules)
        for module in self.modules:  # grows while it is read
            for child in module._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    self.modules.append(child)
            for value in module.__dict__.values():
                if type(value) is torch.Generator:
                    self.generators.append(value)

    def _look_into(self, fn: Any) -> None:
        """A function, a method, a partial or any object: through closures, defaults, attributes and containers."""
        todo: list[tuple[Any, int]] = [(fn, 0)]
        done: set[int] = set()
        while todo:
            thing, depth = todo.pop()
            if id(thing) in done or depth > 5:
                continue
            done.add(id(thing))
            if isinstance(thing, nn.Module):
                self.modules.append(thing)
            elif isinstance(thing, Tensor):
                self.tensors.append(thing)
            elif isinstance(thing, torch.Generator):
                self.generators.append(thing)
            else:
                todo += [(inner, depth + 1) for inner in _inside(thing)]


def _inside(thing: Any) -> Iterable[Any]:
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.FunctionType):
        used = [thing.__globals__.get(name) for name in thing.__code__.co_names]
        used = [g for g in used if isinstance(g, (nn.Module, Tensor)) or getattr(g, "__globals__", None) is thing.__globals__]
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _filled(cell)]
        return [*used, *cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
    if isinstance(thing, (list, tuple)):
        return thing
    if isinstance(thing, dict):
        return thing.values()
    if isinstance(thing, (type, types.ModuleType)) or type(thing).__module__.partition(".")[0] in ("builtins", "torch"):
        return ()
    return getattr(thing, "__dict__", {}).values()


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _sharded(t: Tensor) -> bool:
    """FSDP2 exchanges sharded and full parameters in the same slots: they are its own to move."""
    return type(t) is not nn.Parameter and type(t) is not Tensor and hasattr(t, "_local_tensor")


_MISSING = object()  # no such slot

# What is known of buffers, by (name, training): "moves" if fn writes to it, "read" if code that took its pointer left it alone.
_HABITS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, bool], str]] = weakref.WeakKeyDictionary()


def _snapshot(module: nn.Module, name: str, b: Tensor) -> Tensor | None:
    """The value of a buffer before fn runs: a copy that costs nothing until somebody writes, where torch can do that."""
    habit = _HABITS.get(module, {}).get((name, module.training)) if module in _HABITS else None
    if habit == "read":
        return None
    b = b.detach()
    if habit is None and b.untyped_storage().resizable():  # others have no allocator to make the copy with
        try:
            return b._lazy_clone()  # type: ignore[attr-defined]
        except (RuntimeError, NotImplementedError):  # shared memory, some subclasses
            pass
    return b.clone()


def _written(module: nn.Module, name: str, b: Tensor, version: int, snapshot: Tensor) -> bool:
    """Whether fn changed the buffer. BatchNorm and `.data` do so without moving its version."""
    habits = _HABITS.setdefault(module, {})
    key = (name, module.training)
    if b._version == version and key not in habits:
        if torch._C._is_cow_tensor(b):  # type: ignore[attr-defined]
            return False  # nobody so much as took its pointer
        habits[key] = "read" if _same(b, snapshot) else "moves"
    else:
        habits[key] = "moves"
    return habits[key] == "moves"


def _same(a: Tensor, b: Tensor) -> bool:
    try:
        return torch.equal(a, b)
    except (RuntimeError, AssertionError):  # fake tensors have no values
        return False


class Sight:
    """What one call of fn saw of its modules. Made before the call; `after` completes it."""

    __slots__ = ("before", "buffers", "clamped", "fn", "modules", "parameters", "repeatable", "tensors", "training")

    def __init__(self, fn: Any, draws: Draws):
        self.fn = fn
        held = Held(fn)
        self.modules = held.modules
        self.tensors = [(t, t._version) for t in held.tensors]
        draws.follow(held.generators)
        self.training: list[bool] = []
        self.parameters: list[tuple[dict[str, Any], str, Tensor, int, bool]] = []
        # by id, the versions before the call; after it only of those that fn itself changed
        self.clamped = {id(p): p._version for m in self.modules for p in m._parameters.values() if p is not None}
        self.buffers: list[tuple[dict[str, Any], str, Tensor, int]] = []  # unchanged by fn
        # as they were before fn; then only of those that it changed, replaced or made
        self.before: list[tuple[nn.Module, str, Any, int, Any]] = []
        self.repeatable = not any(p is not None and is_lazy(p) for m in self.modules for p in m._parameters.values())
        for m in self.modules:
            for name, b in m._buffers.items():
                if b is None:
                    self.before.append((m, name, None, 0, None))
                elif is_lazy(b):
                    self.repeatable = False
                else:
                    self.before.append((m, name, b, b._version, _snapshot(m, name, b)))

    def after(self) -> None:
        """Parameters are looked at after the call: lazy ones exist now, and what fn itself clamps is no later edit."""
        for m in self.modules:
            self.training.append(m.training)
            slots = m._parameters
            for name, p in slots.items():
                if p is not None and not _sharded(p):
                    version = p._version
                    self.parameters.append((slots, name, p, version, p.requires_grad))
                    if self.clamped.get(id(p), version) == version:
                        self.clamped.pop(id(p), None)
        found, self.before = self.before, []
        for m, name, b, version, snapshot in found:
            if m._buffers.get(name) is not b:
                self.before.append((m, name, b, version, b if snapshot is None else snapshot))
            elif b is None:
                continue
            elif snapshot is None and b._version == version:
                self.buffers.append((m._buffers, name, b, version))
            elif snapshot is None:
                self.repeatable = False  # it was only read until now
                _HABITS[m][name, m.training] = "moves"
            elif _written(m, name, b, version, snapshot):
                self.before.append((m, name, b, version, snapshot))
            else:
                self.buffers.append((m._buffers, name, b, version))
        if len(found) != sum(len(m._buffers) for m in self.modules):
            known = {(m, name) for m, name, *_ in found}
            new = [(m, name) for m in self.modules for name in m._buffers if (m, name) not in known]
            self.before += [(m, name, _MISSING, 0, _MISSING) for m, name in new]

    def put_back(self) -> None:
        """After an exception: the buffers as they were before the call."""
        with torch.no_grad():
            for m, name, b, _, snapshot in reversed(self.before):
                if isinstance(snapshot, Tensor) and snapshot is not b and not _same(b, snapshot):
                    b.copy_(snapshot)
                _place(m._buffers, name, b)

    def difference(self) -> str | None:
        """What has been changed since, so that the call cannot be repeated; or None."""
        present = Held(self.fn).modules
        if present != self.modules:
            gone = next((m for m in self.modules if m not in present), self.modules[-1])
            return f"a part of fn, {type(gone).__name__},"
        for t, version in self.tensors:
            if t._version != version:
                return f"a tensor of shape {tuple(t.shape)} that fn holds on to"
        for module, training in zip(self.modules, self.training, strict=True):
            if module.training is not training:
                then, now = ("train", "eval") if training else ("eval", "train")
                return f"the mode of {type(module).__name__} ({then}() in the forward pass, {now}() in backward)"
        for _, name, p, version, _ in self.parameters:
            if p._version != version:
                return f"the parameter {name!r} of shape {tuple(p.shape)}"
        for _, name, b, version in self.buffers:
            if b._version != version:
                return f"the buffer {name!r} of shape {tuple(b.shape)}"
        return None

    def again(self) -> Swap:
        """The same tensors in the same slots: those of functional_call, old values of buffers, parameters frozen since."""
        swap = Swap()
        for slots, name, p, _, requires_grad in self.parameters:
            now = slots.get(name)
            if self.clamped and id(p) in self.clamped:
                swap.put(slots, name, p.detach().clone().requires_grad_(requires_grad))
                swap.clamped.append((name, swap.put_in[-1], p))
            elif p.requires_grad is not requires_grad:
                swap.put(slots, name, p.detach().requires_grad_(requires_grad))
            elif now is not p and not (now is not None and _sharded(now)):
                swap.put(slots, name, p)
        for slots, name, b, _ in self.buffers:
            if slots.get(name) is not b:
                swap.put(slots, name, b)
        copies: dict[int, Any] = {}  # one tensor under two names stays one
        for m, name, b, _, snapshot in self.before:
            if isinstance(snapshot, Tensor):
                snapshot = copies.setdefault(id(b), snapshot.clone())
            swap.put(m._buffers, name, snapshot)
        return swap


class Swap:
    """Tensors put into modules for the time of a second run."""

    __slots__ = ("clamped", "out", "put_in")

    def __init__(self) -> None:
        self.clamped: list[tuple[str, Tensor, Tensor]] = []
        self.out: list[tuple[dict[str, Any], str, Any]] = []
        self.put_in: list[Tensor] = []

    def put(self, slots: dict[str, Any], name: str, t: Any) -> None:
        self.out.append((slots, name, slots.get(name, _MISSING)))
        self.put_in.append(t)
        _place(slots, name, t)

    def difference(self) -> str | None:
        """A parameter that fn changes, and not to the same values the second time; or None."""
        found = (name for name, copy, p in self.clamped if not torch.allclose(copy, p, *[torch.finfo(p.dtype).eps ** 0.5] * 2))
        return next((f"it changed its parameter {name!r} to other values" for name in found), None)

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *_: Any) -> None:
        for slots, name, t in reversed(self.out):
            _place(slots, name, t)


def _place(slots: dict[str, Any], name: str, t: Any) -> None:
    if t is _MISSING:
        slots.pop(name, None)
    else:
        slots[name] = t


# -- random numbers ----------------------------------------------------------------------------------------------------


def _mark(generator: torch.Generator) -> Any:
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def _set(generator: torch.Generator, mark: Any) -> None:
    if generator.device.type == "cuda":
        generator.manual_seed(mark[0]).set_offset(mark[1])
    else:
        generator.set_state(mark)


def _moved(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor):
        with torch._C._DisableTorchDispatch():  # a state is data of the engine, whatever mode is on
            return not torch.equal(old, new)
    return old != new


def generators(side: list[Any]) -> list[torch.Generator]:
    """Those of the CPU and of every device in use, and those given as side inputs."""
    found = [torch.default_generator]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_initialized():
            found += module.default_generators
    if torch.backends.mps.is_available():
        found.append(torch.mps._get_default_mps_generator())
    return found + [g for g in side if isinstance(g, torch.Generator)]


class Draws:
    """Follows the generators through a run. Between fns that draw nothing, one and the same state is kept for all."""

    def __init__(self, found: list[torch.Generator]):
        self.generators = found
        self.start = [_mark(g) for g in found]
        self.marks = self.start

    def follow(self, found: list[torch.Generator]) -> None:
        """Further generators, which fn turns out to hold."""
        new = [g for g in found if all(g is not one for one in self.generators)]
        if new:
            self.generators = self.generators + new
            self.start = self.start + [_mark(g) for g in new]
            self.marks = self.marks + [_mark(g) for g in new]

    def since(self) -> tuple[list[Any], list[Any]]:
        """The states before and after what ran since the last call."""
        before = self.marks
        now = [_mark(g) for g in self.generators]
        if any(map(_moved, before, now)):
            self.marks = [new if _moved(old, new) else old for old, new in zip(before, now, strict=True)]
        return before, self.marks

    def put_back(self) -> None:
        """After an exception: the states from before the run."""
        for generator, mark in zip(self.generators, self.start, strict=True):
            _set(generator, mark)

    def again(self, drawn: tuple[list[Any], list[Any]]) -> Callable[[], str | None]:
        """Have fn draw the same numbers. Call what is returned afterwards: it puts the present states back."""
        present = [_mark(g) for g in self.generators]
        before, after = drawn
        for generator, mark, now in zip(self.generators, before, present, strict=False):
            if _moved(mark, now):
                _set(generator, mark)

        def done() -> str | None:
            now = [_mark(g) for g in self.generators]
            other = [g for g, a, b in zip(self.generators, after, now, strict=False) if _moved(a, b)]
            for generator, mark, moved in zip(self.generators, present, now, strict=True):
                if _moved(mark, moved):
                    _set(generator, mark)
            return f"it drew other random numbers on {other[0].device}" if other else None

        return done


# -- modes -------------------------------------------------------------------------------------------------------------

_SDPA: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
]


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class Modes:
    """Autocast of every device type and the attention backends, as they were in the forward pass."""

    __slots__ = ("autocast", "cache", "sdpa")

    def __init__(self) -> None:
        self.autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _device_types()]
        self.cache = torch.is_autocast_cache_enabled()
        self.sdpa = [get() for get, _ in _SDPA]

    def again(self) -> contextlib.AbstractContextManager[Any]:
        now = Modes()
        if now.autocast == self.autocast and now.cache == self.cache and now.sdpa == self.sdpa:
            return contextlib.nullcontext()
        return self._enter(now)

    @contextlib.contextmanager
    def _enter(self, now: Modes) -> Iterator[None]:
        try:
            for (_, put), value in zip(_SDPA, self.sdpa, strict=True):
                put(value)
            with contextlib.ExitStack() as stack:
                for device, enabled, dtype in self.autocast:
                    stack.enter_context(torch.autocast(device, dtype, enabled, self.cache))
                yield
        finally:
            for (_, put), value in zip(_SDPA, now.sdpa, strict=True):
                put(value)
