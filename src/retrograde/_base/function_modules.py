"""Modules of ours around functions, and the modules of a function: itself, or those behind a method, a partial or a closure."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ProgramError
from .pytrees import each

_DEEP = 6  # attributes and entries away from a function
_MANY = 64  # entries of a list that are looked at
_SMALL = 1 << 16  # bytes of a tensor that a function names by itself: statistics are no larger
_PLAIN = (int, float, complex, str, bytes, type(None), type, types.ModuleType, Tensor, torch.dtype, torch.device)
_PLAINLY = frozenset({int, float, bool, str, type(None), Tensor, types.BuiltinFunctionType})  # of just these types: as most are
STANDARD = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}  # attributes of every module


class Around(nn.Module):
    """A module of ours around a function of the user's."""

    def __init__(self, fn: Any):
        super().__init__()
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)  # what errors call it

    @property
    def to_compile(self) -> tuple[Any, ...]:
        """By rg.compile_fns."""
        return (self.fn,)


class OfSum(Around):
    """fn of the sum of its inputs."""

    def forward(self, first: Any, *others: Any, **side: Any) -> Any:
        total = first
        for other in others:
            total = each(Tensor.add, total, other)
        return self.fn(total, **side)


class Twice(Around):
    """Two times fn."""

    def forward(self, *sources: Any, **side: Any) -> Any:
        return each(lambda t: 2 * t if isinstance(t, Tensor) else t, self.fn(*sources, **side))


class Noised(Around):
    """A layer that hands over what reversible noise needs besides: its input, and the seed of the signs."""

    def forward(self, x: Any, seed: Tensor, **side: Any) -> tuple[Any, Any, Tensor]:
        return self.fn(x, **side), x, seed


class Arguments(nn.Module):
    """What stands for fn in an update by an invertible function: it hands over its arguments, and has the function's modules."""

    def __init__(self, forward: Any, inverse: Any):
        super().__init__()
        self.called = getattr(forward, "__name__", type(forward).__name__)
        self.whole = isinstance(forward, nn.Module)
        owners = (getattr(one, "__self__", one) for one in (forward, inverse))
        self.parts = nn.ModuleList(dict.fromkeys(owner for owner in owners if isinstance(owner, nn.Module)))

    @property
    def to_compile(self) -> list[nn.Module]:
        """What `rg.compile_fns` is to compile: the module that is called, and not the methods of others."""
        return list(self.parts)[:1] if self.whole else []

    @property
    def __name__(self) -> str:
        return self.called

    def forward(self, *sources: Any, **side: Any) -> tuple[Any, Any]:
        return sources, side


class OneCall:
    """A function with the arguments of one call. `also`: what may have modules or generators among these."""

    __slots__ = ("also", "fn")

    def __init__(self, fn: Any, also: Sequence[Any] = ()):
        self.fn, self.also = fn, also


def has_hooks(block: nn.Module) -> bool:
    return bool(block._forward_pre_hooks or block._forward_hooks or block._backward_pre_hooks or block._backward_hooks)


def refuse_hooks(depth: int, block: nn.Module) -> None:
    if has_hooks(block):
        raise ProgramError(
            f"block {depth}, a {type(block).__name__}, has hooks that would never run, as its f and g are called one by one. "
            "Give the pair (block.f, block.g) instead, or put the hooks there: fully_shard([block.f, block.g])"
        )


def parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules and all that they are made of, each once."""
    found = list(dict.fromkeys(modules))
    seen = set(found)
    for module in found:  # grows while it is read
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


class _Contents(dict[str, Any]):
    """Buffers that nobody can replace, as a closure or a partial names the tensors themselves: another one lends its elements."""

    def __init__(self, found: Iterable[Tensor]):
        super().__init__((str(i), t) for i, t in enumerate(found))
        self.own, self.kept = dict(self), dict[str, Tensor]()

    def __setitem__(self, name: str, t: Tensor) -> None:
        own = self.own[name]
        if self[name] is own:
            self.kept[name] = own.detach().clone()
        own.data.copy_(self.kept[name] if t is own else t)
        super().__setitem__(name, t)


class Loose(nn.Module):
    """Small tensors that a function holds without their module: `F.batch_norm` may move them, which is to happen once."""

    def __init__(self, found: Iterable[Tensor]):
        super().__init__()
        self._buffers = _Contents(found)


def called_by(fn: Any) -> Any:
    """The module, where fn does nothing but call it, or run its forward; else fn."""
    if isinstance(fn, types.MethodType) and isinstance(fn.__self__, nn.Module):
        kind = type(fn.__self__)
        return fn.__self__ if fn.__func__ in (nn.Module.__call__, kind.__call__, kind.forward) else fn
    return fn


class Held:
    """What a function and its rule use besides their arguments: itself, or what is behind a method, a partial or a closure.

    A module may also hold others without registering them, as `self.shared = [module]`.
    """

    __slots__ = ("generators", "loose", "modules", "registered", "roots")

    def __init__(self, fn: Any, rule: Any = None):
        self.roots: list[nn.Module] = []  # without what they are made of
        self.generators: list[torch.Generator] = []
        self.loose: dict[int, Tensor] = {}
        if isinstance(fn, OneCall):
            if fn.also:
                _look_behind(fn.also, 2, self)
            fn = called_by(fn.fn)
        if isinstance(fn, nn.Module) and not (isinstance(fn, Around) and not isinstance(fn.fn, nn.Module)):
            self.roots.append(fn)
        else:
            _look_behind(fn.fn if isinstance(fn, Around) else fn, _DEEP, self, self.loose)
        if rule is not None and rule.__dict__:
            _look_behind(list(rule.__dict__.values()), _DEEP, self)
        self.modules, known = parts(self.roots), len(self.roots)
        attributes: dict[int, Any] = {}  # each once: modules of a net share their settings
        for module in self.modules:
            if not type(module).__module__.startswith("torch."):
                for name, value in vars(module).items():
                    if name not in STANDARD and type(value) not in _PLAINLY:
                        attributes[id(value)] = value
        for value in attributes.values():
            _look_behind(value, 2, self)
        if len(self.roots) > known:
            self.modules = parts(self.roots)
        if self.loose:
            self.modules = [*self.modules, Loose(self.loose.values())]
        # whether all of them are registered in fn: then it uses them, as far as anybody can tell
        self.registered = self.roots == [fn] or (isinstance(fn, nn.Module) and set(self.modules) == set(parts([fn])))


def named_modules(given: tuple[Any, ...], of: str) -> list[tuple[str, nn.Module]]:
    """Modules one by one, in a list or in a dict, each with its name in a container. `of`: the container, for errors."""
    if len(given) == 1 and isinstance(given[0], Mapping):
        found = list(given[0].items())
    else:
        alone = len(given) == 1 and (not isinstance(given[0], nn.Module) or isinstance(given[0], nn.ModuleList))
        try:
            several: Any = given[0] if alone else given
            found = [(str(i), module) for i, module in enumerate(several)]
        except TypeError as error:
            raise ProgramError(f"{of} takes a list of modules, got a {type(given[0]).__name__}") from error
    for name, module in found:
        if not isinstance(module, nn.Module):
            what = f"the class {module.__name__}, not an instance" if isinstance(module, type) else f"a {type(module).__name__}"
            raise ProgramError(f"layer {name} of {of} is {what}. Give modules (torch.nn.Module)")
    return found


def modules_of(fn: Any) -> list[nn.Module]:
    """The modules that a function uses, with all that they are made of."""
    return Held(fn).modules


def _look_behind(thing: Any, depth: int, found: Held, loose: dict[int, Tensor] | None = None) -> None:
    todo, seen = deque([(thing, depth)]), set()
    while todo:
        thing, depth = todo.popleft()
        kind = type(thing)  # `isinstance` asks settings of Hugging Face for `__class__`, which takes them long
        if isinstance(thing, nn.Module):
            found.roots.append(thing)
        elif issubclass(kind, torch.Generator):
            found.generators.append(thing)
        elif loose is not None and kind is Tensor and _may_move(thing):
            loose[id(thing)] = thing
        elif depth and id(thing) not in seen and not issubclass(kind, _PLAIN):
            seen.add(id(thing))
            todo += [(inner, depth - 1) for inner in _inside(thing, kind) if loose is not None or type(inner) not in _PLAINLY]


def _may_move(t: Tensor) -> bool:
    plain = t.is_floating_point() and not t.requires_grad and t.layout is torch.strided and not t.is_inference()
    return plain and t.nbytes <= _SMALL


def _inside(thing: Any, kind: type) -> Iterable[Any]:
    if kind is types.MethodType:
        return (thing.__self__, thing.__func__)
    if issubclass(kind, functools.partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    if kind is types.FunctionType:
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != types.CellType()]
        return (*cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
    if issubclass(kind, (list, tuple)):
        return islice(thing, _MANY)
    if issubclass(kind, dict):
        return islice(thing.values(), _MANY)
    return getattr(thing, "__dict__", {}).values()
