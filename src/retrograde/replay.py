"""What a second run of fn must see again: the modules' tensors and flags, the random numbers, the modes.

Three independent parts. `Sight` is what one call of fn saw of its modules, `Draws` follows the random generators, `Modes` holds
autocast and the attention backends of one forward pass.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_LOCAL = threading.local()
_SMALL = 1 << 20  # bytes of a buffer that is kept on mere suspicion


def replaying() -> bool:
    """True inside a second run: fn is being run again in backward, to recompute what its gradient needs."""
    return getattr(_LOCAL, "depth", 0) > 0


@contextlib.contextmanager
def second_run() -> Iterator[None]:
    _LOCAL.depth = getattr(_LOCAL, "depth", 0) + 1
    try:
        yield
    finally:
        _LOCAL.depth -= 1


# -- modules -----------------------------------------------------------------------------------------------------------


def modules_of(fn: Any) -> list[nn.Module]:
    """The modules that fn runs, as far as they can be seen: its own, or those that a callable holds on to."""
    found = [fn] if isinstance(fn, nn.Module) else _held(fn)
    seen = set(found)
    for module in found:  # grows while it is read
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def _held(fn: Any) -> list[nn.Module]:
    """Modules that a function, method, partial or callable object refers to."""
    modules: list[nn.Module] = []
    todo, done = [fn], set()
    while todo:
        thing = todo.pop()
        if id(thing) in done:
            continue
        done.add(id(thing))
        if isinstance(thing, nn.Module):
            modules.append(thing)
        elif isinstance(thing, types.MethodType):
            todo += [thing.__self__, thing.__func__]
        elif isinstance(thing, functools.partial):
            todo += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, types.FunctionType):
            todo += [cell.cell_contents for cell in thing.__closure__ or () if _filled(cell)]
            todo += thing.__defaults__ or ()
            todo += (thing.__kwdefaults__ or {}).values()
            for name in thing.__code__.co_names:
                used = thing.__globals__.get(name)
                same_file = isinstance(used, types.FunctionType) and used.__globals__ is thing.__globals__
                todo += [used] if isinstance(used, nn.Module) or same_file else []
        elif isinstance(thing, (list, tuple)):
            todo += thing
        elif isinstance(thing, dict):
            todo += thing.values()
        elif callable(thing) and not isinstance(thing, (type, types.BuiltinFunctionType, Tensor)):
            todo += getattr(thing, "__dict__", {}).values()
    return modules


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _sharded(t: Tensor) -> bool:
    """FSDP2 exchanges sharded and full parameters in the same slots: they are its own to move."""
    return type(t) is not nn.Parameter and type(t) is not Tensor and hasattr(t, "_local_tensor")


def copy_of(t: Tensor) -> Tensor:
    """A copy that costs nothing until one of the two is written to."""
    t = t.detach()
    try:
        return t._lazy_clone()  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):  # storage in shared memory, some subclasses
        return t.clone()


class Sight:
    """What one call of fn saw of its modules. Made before the call; `after` completes it."""

    __slots__ = ("before", "buffers", "modules", "parameters", "training")

    def __init__(self, fn: Any):
        self.modules = modules_of(fn)
        self.training: list[bool] = []
        self.parameters: list[tuple[dict[str, Any], str, Tensor, int, bool]] = []
        self.buffers: list[tuple[dict[str, Any], str, Tensor, int]] = []  # unchanged by fn
        # changed by fn: the values that it saw
        self.before: list[tuple[dict[str, Any], str, Tensor, int, Tensor]] = [
            (m._buffers, name, b, b._version, copy_of(b))
            for m in self.modules
            if m._buffers
            for name, b in m._buffers.items()
            if b is not None
        ]

    def after(self) -> None:
        """Look at parameters after the call: lazy ones exist now, and what fn itself clamps is no later edit."""
        for m in self.modules:
            self.training.append(m.training)
            slots = m._parameters
            for name, p in slots.items():
                if p is not None and not _sharded(p):
                    self.parameters.append((slots, name, p, p._version, p.requires_grad))
        if self.before:
            snapshots, self.before = self.before, []
            for entry in snapshots:
                slots, name, b, version, snapshot = entry
                now = slots.get(name)
                if now is not b or b._version != version:
                    self.before.append(entry)
                elif not _shares(b) and snapshot.nbytes <= _SMALL:
                    self.before.append(entry)  # BatchNorm writes its statistics without moving the version
                else:
                    self.buffers.append((slots, name, b, version))

    def put_back(self) -> None:
        """After an exception: the values of the buffers as they were before the call."""
        with torch.no_grad():
            for slots, name, b, version, snapshot in reversed(self.before):
                if b._version != version or not _shares(b):
                    b.copy_(snapshot)
                slots[name] = b

    def difference(self) -> str | None:
        """What has been changed since, so that the call cannot be repeated; or None."""
        for module, training in zip(self.modules, self.training, strict=True):
            if module.training is not training:
                then, now = ("train", "eval") if training else ("eval", "train")
                return f"the mode of {type(module).__name__} ({then}() in the forward pass, {now}() in backward)"
        for _, name, p, version, _ in self.parameters:
            if p._version != version:
                return f"the parameter {name!r} of shape {tuple(p.shape)}"
        for slots, name, b, version in self.buffers:
            if b._version != version or slots.get(name) is not b:
                return f"the buffer {name!r} of shape {tuple(b.shape)}"
        return None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same tensors in the same slots: those of functional_call, old values of buffers, parameters frozen since."""
        swapped: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for slots, name, p, _, requires_grad in self.parameters:
                now = slots.get(name)
                if now is not p:
                    if now is not None and _sharded(now):
                        continue
                    swapped.append((slots, name, now))
                    slots[name] = p
                if p.requires_grad is not requires_grad:
                    swapped.append((slots, name, slots[name]))
                    slots[name] = p.detach().requires_grad_(requires_grad)
            for slots, name, _, _, snapshot in self.before:
                swapped.append((slots, name, slots.get(name)))
                slots[name] = copy_of(snapshot)
            yield
        finally:
            for slots, name, t in reversed(swapped):
                slots[name] = t


def _shares(t: Tensor) -> bool:
    """Whether t still shares its memory with the lazy copy: it was not written to."""
    return torch._C._is_cow_tensor(t)  # type: ignore[attr-defined]


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
    """Follows the generators through a run, so that their states are kept only where fn drew from them."""

    def __init__(self, found: list[torch.Generator]):
        self.generators = found
        self.marks = self.start = [_mark(g) for g in found]

    def since(self) -> list[tuple[torch.Generator, Any]]:
        """The generators that moved since the last call, with their states before that."""
        marks, self.marks = self.marks, [_mark(g) for g in self.generators]
        return [(g, old) for g, old, new in zip(self.generators, marks, self.marks, strict=True) if _moved(old, new)]

    def put_back(self) -> None:
        """After an exception: the states from before the run."""
        for generator, mark in zip(self.generators, self.start, strict=True):
            _set(generator, mark)

    def again(self, drawn: list[tuple[torch.Generator, Any]]) -> Callable[[], str | None]:
        """Have fn draw the same numbers. Call what is returned afterwards: it puts the present states back."""
        present = [_mark(g) for g in self.generators]
        for generator, mark in drawn:
            _set(generator, mark)

        def done() -> str | None:
            expected = [generator for generator, _ in drawn]
            surplus = None
            for generator, mark in zip(self.generators, present, strict=True):
                if _moved(mark, _mark(generator)):
                    _set(generator, mark)
                    if all(generator is not one for one in expected):
                        surplus = f"it drew random numbers on {generator.device}, none before"
            return surplus

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
