"""What fn holds on to, as far as it can be seen from outside."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .around import LOOSE, closure_of, globals_of, is_torchs_own, loose_around


def home_of(t: Tensor) -> int:
    """What tensors that share memory have in common."""
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


def version_of(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def parts(modules: list[nn.Module]) -> list[nn.Module]:
    """The modules and all that they are made of, each once."""
    found = list(dict.fromkeys(modules))
    seen = set(found)
    for module in found:  # grows while it is read
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


class Around(nn.Module):
    """A module of ours around a function of the user's."""

    def __init__(self, fn: Any):
        super().__init__()
        self.fn = fn


def bare(fn: Any) -> Any:
    """A function that is no module, without ours around it: it is seen as it would be by itself."""
    return fn.fn if isinstance(fn, Around) and not isinstance(fn.fn, nn.Module) else fn


class Held:
    """Modules with all their parts, and tensors and random generators outside of them."""

    __slots__ = ("generators", "loose", "modules", "named", "roots", "tensors", "wide")

    def __init__(self, fn: Any, rule: Any = None):
        self.tensors: list[Tensor] = []
        self.generators: list[torch.Generator] = []
        self.roots: list[nn.Module] = []
        self.named: list[nn.Module] = []  # those that the code of a function names, and not a list that it has
        fn = bare(fn)
        self.loose = not isinstance(fn, nn.Module)  # it may hold more than it uses: a method of the whole model, say
        if self.loose:
            self._look_into(fn)
        else:
            self.roots.append(fn)
        if rule is not None and rule.__dict__:
            self._look_into(rule)
        self.modules = parts(self.roots)
        looked, known = 0, 0
        while known < len(self.roots):  # what is found beside a module may hold more
            known = len(self.roots)
            for module in self.modules[looked:]:
                if not is_torchs_own(type(module)):
                    self._look_beside(module)
            looked = len(self.modules)
            if known < len(self.roots):
                self.modules = [*self.modules, *(m for m in parts(self.roots) if m not in set(self.modules))]
        self.wide = self.loose or known > 1

    def own_tensors(self) -> Iterable[Tensor]:
        """Parameters and buffers, and what fn holds besides."""
        yield from self.tensors
        for module in self.modules:
            for t in (*module._parameters.values(), *module._buffers.values()):
                if t is not None and not is_lazy(t):
                    yield t

    def _look_beside(self, module: nn.Module) -> None:
        """What a module holds without registering it: in its attributes, and what its code takes from around it."""
        for name, value in module.__dict__.items():
            if tells_something(name, value):
                self._look_into(value, 3)
        kind = type(module)
        if isinstance(forward := kind.forward, types.FunctionType):
            for name in globals_of(forward):
                if isinstance(thing := forward.__globals__.get(name), nn.Module):
                    self._look_into(thing)
        for thing in loose_around(kind):
            (self.tensors if issubclass(type(thing), Tensor) else self.generators).append(thing)

    def _look_into(self, fn: Any, depth: int = 0) -> None:
        """A function, a method, a partial or any object: through closures, defaults, attributes and containers."""
        todo: list[tuple[Any, int, bool]] = [(fn, depth, False)]
        done: set[int] = set()
        while todo:
            thing, depth, named = todo.pop()
            if id(thing) in done or depth > 5:
                continue
            done.add(id(thing))
            if isinstance(thing, nn.Module):
                self.roots.append(thing)
                if named:
                    self.named.append(thing)
            elif isinstance(thing, Tensor):
                self.tensors.append(thing)
            elif isinstance(thing, torch.Generator):
                self.generators.append(thing)
            else:
                names = isinstance(thing, (types.FunctionType, types.MethodType, functools.partial))
                todo += [(inner, depth + 1, names) for inner in _inside(thing)]


_HOLDS = (nn.Module, *LOOSE)
_STANDARD = frozenset(nn.Module().__dict__)
TELLING_NOTHING = (int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)


def tells_something(name: str, value: Any) -> bool:
    """Whether an attribute of a module may hold a tensor, a module or a generator that it does not register."""
    return name not in _STANDARD and not isinstance(value, TELLING_NOTHING)


def _inside(thing: Any) -> Iterable[Any]:
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.FunctionType):
        used = [thing.__globals__.get(name) for name in globals_of(thing)]
        used = [g for g in used if isinstance(g, _HOLDS) or getattr(g, "__globals__", None) is thing.__globals__]
        return [*used, *closure_of(thing), *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
    if isinstance(thing, (list, tuple)):
        return thing
    if isinstance(thing, dict):
        return thing.values()
    if isinstance(thing, (type, types.ModuleType)) or type(thing).__module__.partition(".")[0] in ("builtins", "torch"):
        return ()
    slots = [getattr(thing, name, None) for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(thing, "__dict__", {}).values(), *slots]
