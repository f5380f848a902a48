"""State outside of torch's sight: random generators of Python and numpy, and what fns keep in plain Python."""

from __future__ import annotations

import collections
import functools
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .modules import Net
from .parts import STANDARD, Around, modules_of, version_of

_CONTAINERS = (list, dict, set, collections.deque)
_SMALL = 1 << 16  # bytes of a numpy array that is looked at
_MISSING = object()


def python_states() -> dict[str, Any]:
    """The states of Python's and numpy's global generators, as something that can be compared."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy.random" in sys.modules:
        states["numpy's global generator"] = pickle.dumps(sys.modules["numpy.random"].get_state(legacy=False))
    return states


def put_back_python(states: dict[str, Any]) -> None:
    random.setstate(states["Python's random"])
    if "numpy's global generator" in states:
        sys.modules["numpy.random"].set_state(pickle.loads(states["numpy's global generator"]))


@dataclass
class Place:
    """Where a fn may keep something: the attributes of a module, the variables of a closure, the globals that its code names."""

    key: Any
    kind: str  # "attribute", "variable" or "global"
    prefix: str  # of a module inside of fn
    read: Callable[[], dict[str, Any]]
    put: Callable[[str, Any], None]
    drop: Callable[[str], None]

    def marks(self) -> dict[str, Any]:
        return {name: _mark(value) for name, value in self.read().items()}


class Plain:
    """What fns keep in plain Python, to see what changes and to put it back."""

    def __init__(self, fns: list[Any]):
        self.places: dict[int, list[Place]] = {}
        found = {place.key: place for fn in fns for place in self.places_of(fn)}
        self.copies = [(place, place.read()) for place in found.values()]
        values = {id(value): value for _, copy in self.copies for value in copy.values()}.values()
        self.contents = [(value, content) for value in values if (content := _content(value)) is not None]
        self.look()

    def places_of(self, fn: Any) -> list[Place]:
        if id(fn) not in self.places:
            self.places[id(fn)] = list(_places(fn))
        return self.places[id(fn)]

    def look(self) -> None:
        self.marks = {place.key: place.marks() for places in self.places.values() for place in places}

    def marks_of(self, fn: Any) -> Any:
        return [place.marks() for place in self.places_of(fn)]

    def changed_by(self, fn: Any) -> list[str]:
        """What is another than at the last look."""
        changed = []
        for place in self.places_of(fn):
            now = place.marks()
            then, self.marks[place.key] = self.marks.get(place.key, now), now
            names = [name for name in now if name not in then or then[name] != now[name]]
            values = place.read()
            changed += [f"{place.kind} {place.prefix + name!r}{_drawn_from(values.get(name))}" for name in names]
        return changed

    def put_back(self) -> None:
        for place, copy in self.copies:
            now = place.read()
            for name in now.keys() - copy.keys():
                place.drop(name)
            for name, value in copy.items():
                if now.get(name, _MISSING) is not value:
                    place.put(name, value)
        for value, content in self.contents:
            _restore(value, content)
        self.look()


def _drawn_from(value: Any) -> str:
    """Says so if it is a random generator of Python's or numpy's."""
    numpy = sys.modules.get("numpy.random")
    kinds = (random.Random, *((numpy.Generator, numpy.RandomState, numpy.BitGenerator) if numpy else ()))
    return " (a random generator)" if isinstance(value, kinds) else ""


def _places(fn: Any) -> Iterator[Place]:
    fn = fn.fn if isinstance(fn, Around) and not isinstance(fn.fn, nn.Module) else fn
    held = modules_of(fn)
    names = {id(m): f"{name}." for name, m in fn.named_modules() if name} if isinstance(fn, nn.Module) else {}
    functions: list[types.FunctionType] = []
    for module in held:
        if isinstance(module, Net):
            continue
        yield _attributes(module, names.get(id(module), ""), STANDARD)
        if not type(module).__module__.startswith("torch."):
            functions += _methods(type(module))
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, types.MethodType):
        functions.append(fn.__func__)  # type: ignore[arg-type]
        fn = fn.__self__
    if isinstance(fn, types.FunctionType):
        functions.append(fn)
        yield from _closure(fn)
    elif not isinstance(fn, nn.Module) and hasattr(fn, "__dict__"):
        yield _attributes(fn, "", frozenset())
        functions += _methods(type(fn))
    yield from _globals(functions)


def _attributes(thing: Any, prefix: str, standard: frozenset[str]) -> Place:
    own = thing.__dict__
    return Place(
        id(thing),
        "attribute",
        prefix,
        lambda: {name: value for name, value in own.items() if name not in standard},
        own.__setitem__,
        lambda name: own.pop(name, None),
    )


def _closure(fn: types.FunctionType) -> Iterator[Place]:
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    if cells:
        yield Place(
            id(fn),
            "variable",
            "",
            lambda: {name: cell.cell_contents for name, cell in cells.items() if cell != types.CellType()},
            lambda name, value: setattr(cells[name], "cell_contents", value),
            lambda name: None,
        )


def _methods(kind: type) -> list[types.FunctionType]:
    """The functions that a class of the user's own has."""
    own = [k for k in kind.__mro__ if k.__module__.partition(".")[0] not in ("builtins", "torch")]
    return [value for k in own for value in vars(k).values() if isinstance(value, types.FunctionType)]


def _globals(functions: list[types.FunctionType]) -> Iterator[Place]:
    """The globals with something changeable in them, by name, that the functions and those that they name use."""
    todo, seen = list(functions), set()
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    while todo:
        fn = todo.pop()
        if fn in seen:
            continue
        seen.add(fn)
        around, names = found.setdefault(id(fn.__globals__), (fn.__globals__, set()))
        for name in [name for name in around if not name.startswith("__")]:  # `__builtins__` is a dict that all code needs
            value = around.get(name, _MISSING)
            if isinstance(value, types.FunctionType):
                if value.__globals__ is around:
                    todo.append(value)
            elif value is not _MISSING and not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
                names.add(name)
    for key, (around, names) in found.items():
        if names:
            yield Place((key, *sorted(names)), "global", "", *_named(around, names))


def _named(around: dict[str, Any], names: set[str]) -> tuple[Any, Any, Any]:
    return lambda: {name: around[name] for name in names if name in around}, around.__setitem__, lambda name: None


# -- values ------------------------------------------------------------------------------------------------------------


def _mark(value: Any, deep: bool = True) -> Any:
    """Something that tells later whether the value is another one."""
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if _is_numpy(value, "Generator"):
        return repr(value.bit_generator.state)
    if _is_numpy(value, "ndarray") and value.nbytes <= _SMALL:
        return id(value), value.tobytes()
    if deep and isinstance(value, _CONTAINERS):
        parts = value.values() if isinstance(value, dict) else value
        inside = [_mark(part, False) for part in list(parts)[:32]]
        return id(value), len(value), inside
    return id(value)


def _content(value: Any) -> Any:
    """What is needed to put a value back that is changed in place, or None."""
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor):
        return (value.detach().clone(), version_of(value)) if value.is_leaf and not value.is_inference() else None
    if type(value) in _CONTAINERS:
        return value.copy()
    if isinstance(value, random.Random):
        return value.getstate()
    if _is_numpy(value, "Generator"):
        return value.bit_generator.state
    return value.copy() if _is_numpy(value, "ndarray") and value.nbytes <= _SMALL else None


def _restore(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        copy, version = content
        if version_of(value) != version:
            with torch.no_grad():
                value.copy_(copy)
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif _is_numpy(value, "Generator"):
        value.bit_generator.state = content
    elif _is_numpy(value, "ndarray"):
        value[...] = content
    else:
        value.clear()
        (value.extend if isinstance(value, (list, collections.deque)) else value.update)(content)


def _is_numpy(value: Any, name: str) -> bool:
    return type(value).__name__ == name and type(value).__module__.partition(".")[0] == "numpy"
