"""The code of functions and of classes: what it names, and what it finds around it."""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

LOOSE = (Tensor, torch.Generator)


def is_torchs_own(kind: Any) -> bool:
    """Whether it is a class of torch's, or a function: such modules hold nothing that they do not register."""
    return str(kind.__module__).startswith("torch.")


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


def loose_around(kind: type) -> Iterable[Any]:
    """The tensors and generators around the code of a class, and those of the class that are named in it, each once.

    Modules and containers are not meant: a helper that names the whole model uses a part of it.
    """
    code = code_of(kind)
    things = [thing for function in code for thing in closure_of(function)]
    things += [g for function in code for _, _, g in globals_around(function)]
    for base in _own_classes(kind):
        own = [(name, thing) for name, thing in vars(base).items() if issubclass(type(thing), LOOSE)]
        things += [thing for name, thing in own if any(name in _names_in(f.__code__) for f in code) and not _made(thing)]
    return {id(thing): thing for thing in things if issubclass(type(thing), LOOSE)}.values()


def _made(thing: Any) -> bool:
    """Whether a tensor of a class was computed, by a function that leaves something there; or is not there yet."""
    return isinstance(thing, Tensor) and (is_lazy(thing) or thing.grad_fn is not None)


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """All names in a piece of code, of attributes and of globals."""
    return frozenset(code.co_names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def may_name(things: Iterable[Any], wanted: set[str]) -> bool:
    """Whether functions and classes, or what they call as far as it can be followed, have one of these names in their code."""
    todo = [*things]
    seen: set[int] = set()
    for thing in todo:  # grows while it is read
        if issubclass(type(thing), types.MethodType):
            todo.append(type(thing.__self__))
        thing = _bare_function(thing)
        if not issubclass(type(thing), (types.FunctionType, type, functools.partial)):
            thing = type(thing) if callable(thing) else None  # an object of that class is called, perhaps
        if thing is None or id(thing) in seen or is_torchs_own(thing):
            continue
        seen.add(id(thing))
        if len(seen) > 10 * _MANY:
            return True  # who knows
        if isinstance(thing, type):
            todo += [*vars(thing).values(), *thing.__bases__]
        elif isinstance(thing, functools.partial):
            todo += [thing.func, *thing.args, *thing.keywords.values()]
        else:
            names = _names_in(thing.__code__)
            if not wanted.isdisjoint(names) or not wanted.isdisjoint(c for c in thing.__code__.co_consts if isinstance(c, str)):
                return True
            near = [*(g for _, _, g in globals_around(thing)), *closure_of(thing), *(thing.__defaults__ or ())]
            files = [vars(g) for g in near if type(g) is types.ModuleType and g is not torch]
            todo += [*near, *(file[name] for file in files for name in names if name in file), _wrapped(thing)]
    return False


def _own_classes(kind: type) -> list[type]:
    """A class and its bases, without torch's."""
    return [base for base in kind.__mro__ if base is not object and not is_torchs_own(base)]


def content(cell: Any) -> Any:
    """What is in a cell of a closure; None in one that is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
