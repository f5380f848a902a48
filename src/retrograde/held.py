"""What fn holds on to, as far as it can be seen from outside."""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Iterable
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
        """What a module holds without registering it: in its attributes, and what its code takes from around it."""
        for name, value in module.__dict__.items():
            if tells_something(name, value):
                self._look_into(value, 3)
        kind = type(module)
        if isinstance(forward := kind.forward, types.FunctionType):
            for name in globals_of(forward):
                if isinstance(thing := forward.__globals__.get(name), nn.Module):
                    self._look_into(thing)
        for thing in _around_code(kind):
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


_LOOSE = (Tensor, torch.Generator)
_HOLDS = (nn.Module, *_LOOSE)
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


_CODE: weakref.WeakKeyDictionary[type, list[weakref.ref[types.FunctionType]]] = weakref.WeakKeyDictionary()
_MANY = 100  # functions: nobody's forward is in so many


def methods_of(kind: Any) -> list[types.FunctionType]:
    """The forward of a class, the methods of its own that are named in there or in those, and what is below decorators."""
    found: list[Any] = [ref() for ref in _CODE.get(kind, ())]
    if not found or None in found or found[0] is not kind.forward:
        found = list(_methods_in(kind))
        _CODE[kind] = list(map(weakref.ref, found))
    return found


def _methods_in(kind: Any) -> Iterable[types.FunctionType]:
    found: dict[types.FunctionType, None] = {}
    names = ["forward"]
    for name in names:  # grows while it is read
        things = [vars(base).get(name) for base in _own_classes(kind)]
        for thing in [kind.forward, *things] if name == "forward" else things:
            while thing is not None and len(found) < _MANY:
                thing = _bare_function(thing)
                if type(thing) is types.FunctionType:
                    if thing in found:
                        break
                    found[thing] = None
                    names += [name for name in _names_in(thing.__code__) if name not in names]
                thing = _wrapped(thing)
    return found


def _bare_function(thing: Any) -> Any:
    """What a class keeps a method in: a property, a static method … Asked by type, as a stranger may answer to `isinstance`."""
    if issubclass(type(thing), property):
        return thing.fget
    if issubclass(type(thing), functools.cached_property):
        return thing.func
    return thing.__func__ if issubclass(type(thing), (staticmethod, classmethod, types.MethodType)) else thing


def _wrapped(thing: Any) -> Any:
    """What a decorator has been put around, by functools.wraps."""
    try:
        return vars(thing).get("__wrapped__")
    except Exception:  # it has no attributes, or does not tell them
        return None


def code_of(kind: type) -> list[types.FunctionType]:
    """Those methods, functions of the same file that they name, and functions in their closures."""
    found = dict.fromkeys(methods_of(kind))
    todo = list(found)
    for function in todo:  # grows while it is read
        named = [
            g for _, _, g in globals_around(function) if type(g) is types.FunctionType and g.__globals__ is function.__globals__
        ]
        for thing in (*named, *closure_of(function)):
            if type(thing) is types.FunctionType and thing not in found and len(found) < _MANY:
                found[thing] = None
                todo.append(thing)
    return todo


def globals_around(function: types.FunctionType) -> list[tuple[dict[str, Any], str, Any]]:
    """The globals that a function names; torch's own have nothing that matters."""
    place = function.__globals__
    if place.get("__name__", "").startswith("torch."):
        return []
    return [(place, name, place.get(name)) for name in globals_of(function)]


def closure_of(function: types.FunctionType) -> list[Any]:
    return [content(cell) for cell in function.__closure__ or ()]


def _around_code(kind: type) -> Iterable[Any]:
    """The tensors and generators around the code of a class, and those of the class that are named in it, each once.

    Modules and containers are not meant: a helper that names the whole model uses a part of it.
    """
    code = code_of(kind)
    things = [thing for function in code for thing in closure_of(function)]
    things += [g for function in code for _, _, g in globals_around(function)]
    for base in _own_classes(kind):
        own = [(name, thing) for name, thing in vars(base).items() if issubclass(type(thing), _LOOSE)]
        things += [thing for name, thing in own if any(name in _names_in(f.__code__) for f in code) and not _made(thing)]
    return {id(thing): thing for thing in things if issubclass(type(thing), _LOOSE)}.values()


def _made(thing: Any) -> bool:
    """Whether a tensor of a class was computed, by a function that leaves something there; or is not there yet."""
    return isinstance(thing, Tensor) and (is_lazy(thing) or thing.grad_fn is not None)


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """All names in a piece of code, of attributes and of globals."""
    return frozenset(code.co_names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def names_in(fn: Any, modules: Iterable[nn.Module]) -> frozenset[str]:
    """All names in the code of a function and its modules, and all strings, which may be names for `getattr`."""
    code: dict[int, Any] = {id(f): f for module in modules if not is_torchs_own(type(module)) for f in code_of(type(module))}
    fn = bare(fn)
    todo = [fn if isinstance(fn, (types.FunctionType, types.MethodType, functools.partial)) else type(fn).__call__]
    for thing in todo:  # grows while it is read
        if type(thing) is types.FunctionType and id(thing) not in code:
            code[id(thing)] = thing
        elif not isinstance(thing, (types.MethodType, functools.partial)):
            continue
        if len(todo) < _MANY:
            todo += _inside(thing)
    strings = [text for f in code.values() for text in f.__code__.co_consts if isinstance(text, str)]
    return frozenset(strings).union(*(_names_in(f.__code__) for f in code.values()))


def _own_classes(kind: type) -> list[type]:
    """A class and its bases, without torch's."""
    return [base for base in kind.__mro__ if base is not object and not is_torchs_own(base)]


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


def content(cell: Any) -> Any:
    """What is in a cell of a closure; None in one that is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
