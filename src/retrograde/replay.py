"""The world that a second run must find as the first did: random numbers, autocast, attention backends, no transform around."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .generator import both_ends, state_of
from .held import Around

_autocast_cache, _set_autocast_cache = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_grad, _set_grad = torch.is_grad_enabled, torch._C._set_grad_enabled
_thread, _any_autocast = threading.get_ident, torch._C._is_any_autocast_enabled
_has_key, _transformed = torch._C._dispatch_tls_is_dispatch_key_included, torch._C._are_functorch_transforms_active


class _Local(threading.local):
    depth = 0  # of second runs inside of second runs


_LOCAL = _Local()


def replaying() -> bool:
    """True inside a second run: fn is being run again in backward, to recompute what its gradient needs."""
    return _LOCAL.depth > 0


def begin_again(then: list[Any], walk: Any) -> tuple[Any, ...]:
    """From here on fn is run again: `replaying()` is true, grad is on, modes are as then, and no transform is around.

    To ask for all modes costs more than the rest of this. If they are as then, and without autocast, the next second runs of a
    walk look for autocast alone, in which a backward may read what it saved; another attention backend would save other tensors.
    """
    stack, now = None, then
    if walk.settled != _thread() or _transformed() or _any_autocast():
        if _has_key(_VMAP) or _transformed():
            stack = contextlib.ExitStack()
            stack.enter_context(_outside_vmap())
        now = modes()
        if now != then:
            _switch(now, then)
        elif stack is None and not _any_autocast():
            walk.settled = _thread()
    around = now, _autocast_cache(), _grad(), stack
    _set_autocast_cache(False)  # as in the forward pass
    _set_grad(True)
    _LOCAL.depth += 1
    return around


def end_again(then: list[Any], around: tuple[Any, ...]) -> None:
    """All that as it was before."""
    now, caching, grad, stack = around
    _LOCAL.depth -= 1
    _set_grad(grad)
    _set_autocast_cache(caching)
    if now != then:
        _switch(then, now)
    if stack is not None:
        stack.close()


@contextlib.contextmanager
def modules_called() -> Iterator[set[nn.Module]]:
    """The modules of the user's that run inside."""
    called: set[nn.Module] = set()
    handle = register_module_forward_pre_hook(lambda module, _: None if isinstance(module, Around) else called.add(module))
    try:
        yield called
    finally:
        handle.remove()


def untraced(make: Callable[..., Any]) -> Callable[..., Any]:
    """For a function that makes hooks: torch.compile leaves them alone, though they are called from inside compiled functions."""
    compiler: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
    for code in make.__code__.co_consts:
        if isinstance(code, types.CodeType):
            compiler.set_code_exec_strategy(code, skip)
    return make


# -- random numbers ----------------------------------------------------------------------------------------------------


_ends = both_ends()


class _State(bytes):
    """The state of the default generator."""

    ends: tuple[bytes, bytes]  # how it was seen in memory


_last: list[_State] = []  # the last one that was read


def _mark(generator: torch.Generator) -> Any:
    """The state of a generator, as something that is quickly compared."""
    if generator is not torch.default_generator:
        seeded = generator.device.type == "cuda"
        return (generator.initial_seed(), generator.get_offset()) if seeded else state_of(generator)
    if _ends is None:
        return state_of(generator)
    ends, known = _ends(), _last[:]
    if known and known[0].ends == ends:
        return known[0]
    mark = _State(state_of(generator))
    mark.ends = ends
    if _ends() == ends:  # no other thread has drawn
        _last[:] = [mark]
    return mark


def _moved(found: list[torch.Generator], marks: list[Any]) -> bool:
    """Whether one of the generators is in another state than that."""
    for generator, mark in zip(found, marks, strict=False):
        if _ends is None or type(mark) is not _State:
            if _mark(generator) != mark:
                return True
        elif mark.ends != _ends():
            now = _mark(generator)
            if now != mark:
                return True
            mark.ends = now.ends
    return False


def _set(generator: torch.Generator, mark: Any) -> None:
    if isinstance(mark, tuple):
        generator.manual_seed(mark[0]).set_offset(mark[1])
    else:
        generator.set_state(torch.frombuffer(bytearray(mark), dtype=torch.uint8))


@functools.cache
def _has_mps() -> bool:
    return torch.backends.mps.is_available()


def generators(side: list[Any]) -> list[torch.Generator]:
    """Those of the CPU and of every device in use, and those given as side inputs."""
    found = [torch.default_generator]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_initialized():
            found += module.default_generators
    if _has_mps():
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
        if len(before) == 1 and type(before[0]) is _State and before[0].ends == _ends():  # type: ignore[misc]  # as a rule
            return before, before
        if self.moved(before):
            now = [_mark(g) for g in self.generators]
            self.marks = [old if old == new else new for old, new in zip(before, now, strict=True)]
        return before, self.marks

    def moved(self, marks: list[Any]) -> bool:
        """Whether a generator is in another state than that."""
        if len(marks) == 1 and type(marks[0]) is _State and _ends is not None and marks[0].ends == _ends():  # as a rule
            return False
        return _moved(self.generators, marks)

    def put_back(self, marks: list[Any] | None = None) -> None:
        """After an exception: the states from before the run, or those."""
        for generator, mark in zip(self.generators, self.start if marks is None else marks, strict=False):
            _set(generator, mark)

    def now(self, like: list[Any]) -> list[Any]:
        """The present states of the generators that those are states of."""
        return [_mark(g) for g in self.generators[: len(like)]]

    def again(self, before: list[Any]) -> list[Any]:
        """Have fn draw the same numbers; returns the present states, for `settle`."""
        present = self.now(before)
        _move(self.generators, present, before)
        return present

    def settle(self, after: list[Any], present: list[Any]) -> str | None:
        """After fn: the states as they were before `again`. What was drawn otherwise than in the first run, or None."""
        now = self.now(after)
        _move(self.generators, now, present)
        if now == after:
            return None
        other = next(g for g, a, b in zip(self.generators, after, now, strict=False) if a != b)
        return f"it drew other random numbers on {other.device}"


def _move(found: list[torch.Generator], now: list[Any], to: list[Any]) -> None:
    if now != to:
        for generator, old, new in zip(found, now, to, strict=False):
            if old != new:
                _set(generator, new)


# -- modes -------------------------------------------------------------------------------------------------------------


@functools.cache
def _modes() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to read and how to set the attention backends, and autocast of every device type."""
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
        (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
        (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
        (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    ]
    accelerator = torch.accelerator.current_accelerator()
    for kind in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
        found.append((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)))
        found.append((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)))
    return found


@functools.cache
def _getters() -> list[Callable[[], Any]]:
    return [get for get, _ in _modes()]


def modes() -> list[Any]:
    """All of them as they are now."""
    return [get() for get in _getters()]


def _switch(now: list[Any], to: list[Any]) -> None:
    for (_, put), old, new in zip(_modes(), now, to, strict=True):
        if old != new:
            put(new)


# -- transforms --------------------------------------------------------------------------------------------------------

_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")
_FUNC_VMAP: Any = torch._C._parse_dispatch_key("FuncTorchVmapMode")


@contextlib.contextmanager
def _outside_vmap() -> Iterator[None]:
    """`is_grads_batched` runs backward under vmap, and fn must not notice."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    keys = torch._C.DispatchKeySet(_VMAP) | torch._C.DispatchKeySet(_FUNC_VMAP)
    with temporarily_clear_interpreter_stack(), torch._C._ExcludeDispatchKeyGuard(keys):
        yield
