"""What fn holds on to, as far as it can be seen from outside."""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


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
        """What a module holds without registering it: in its attributes, in its class, and around the code of its forward."""
        for name, value in module.__dict__.items():
            if tells_something(name, value):
                self._look_into(value, 3)
        for function in code_of(type(module)):
            self._look_into(function, 2)
        for kind in _own_classes(type(module)):
            self.tensors += [value for value in vars(kind).values() if isinstance(value, Tensor)]

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


_HOLDS = (nn.Module, Tensor, torch.Generator)
_STANDARD = frozenset(nn.Module().__dict__)
TELLING_NOTHING = (int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)


def is_torchs_own(kind: type) -> bool:
    """Whether it is a class of torch's: such modules hold nothing that they do not register."""
    return kind.__module__.startswith("torch.")


def tells_something(name: str, value: Any) -> bool:
    """Whether an attribute of a module may hold a tensor, a module or a generator that it does not register."""
    return name not in _STANDARD and not isinstance(value, TELLING_NOTHING)


_GLOBALS: weakref.WeakKeyDictionary[Any, tuple[Any, frozenset[str]]] = weakref.WeakKeyDictionary()


def globals_of(fn: types.FunctionType) -> frozenset[str]:
    """The global names that a function uses. Known by function: a code object is hashed by all that is in it."""
    code, names = _GLOBALS.get(fn, (None, frozenset()))
    if code is not fn.__code__:
        names = _globals_in(fn.__code__)
        _GLOBALS[fn] = fn.__code__, names
    return names


@functools.cache
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """The same of a piece of code; `co_names` has the names of attributes as well."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(names.union(*(_globals_in(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))))


_CODE: weakref.WeakKeyDictionary[type, tuple[Any, tuple[types.FunctionType, ...]]] = weakref.WeakKeyDictionary()


def code_of(kind: Any) -> tuple[types.FunctionType, ...]:
    """The forward of a class, the methods of its own that are named in there or in those, and what is below decorators."""
    forward, found = _CODE.get(kind, (None, ()))
    if forward is not kind.forward:
        found = tuple(_code_in(kind))
        _CODE[kind] = kind.forward, found
    return found


def _code_in(kind: type) -> Iterable[types.FunctionType]:
    found: dict[types.FunctionType, None] = {}
    names = ["forward"]
    for name in names:  # grows while it is read
        for function in (vars(base).get(name) for base in _own_classes(kind)):
            function = getattr(function, "fget", None) or getattr(function, "__func__", function)  # properties, static methods
            while isinstance(function, types.FunctionType) and function not in found:
                found[function] = None
                names += [name for name in _names_in(function.__code__) if name not in names]
                function = getattr(function, "__wrapped__", None)
    return found


def _names_in(code: types.CodeType) -> Iterable[str]:
    """All names in a piece of code, of attributes and of globals."""
    return chain(code.co_names, *(_names_in(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _own_classes(kind: type) -> list[type]:
    """A class and its bases, without torch's."""
    return [base for base in kind.__mro__ if base is not object and not is_torchs_own(base)]


def closure_of(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]


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


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
