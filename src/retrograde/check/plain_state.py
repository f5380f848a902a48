"""The state of a net, for `rg.check`: what fns keep in plain Python, random generators, parameters and buffers."""

from __future__ import annotations

import collections
import functools
import math
import operator
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._base.function_modules import STANDARD, Around, modules_of
from .._base.generators import Draws, generators
from .._base.torch_private import tree_leaves, version_of
from ..modules import Net

_CONTAINERS = (list, dict, set, collections.deque)
_SMALL = 1 << 16  # bytes of a numpy array that is looked at
_LARGE = 1 << 26  # bytes of a tensor in a plain attribute or a global that is not copied: a dataset, as a rule
_FIXED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_MISSING = object()


def python_states() -> dict[str, Any]:
    """The states of Python's and numpy's global generators, as something that can be compared."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    if numpy := sys.modules.get("numpy"):  # its random module is loaded by the first use, which may come in a fn
        states["numpy's global generator"] = pickle.dumps(numpy.random.get_state(legacy=False))
    return states


def put_back_python(states: dict[str, Any]) -> None:
    random.setstate(states["Python's random"])
    if "numpy's global generator" in states:
        sys.modules["numpy"].random.set_state(pickle.loads(states["numpy's global generator"]))


@dataclass
class Place:
    """Where a fn may keep something: the attributes of a module, the variables of a closure, the globals of its file."""

    key: Any
    kind: str  # "attribute", "variable" or "global"
    prefix: str  # of a module inside of fn
    read: Callable[[], dict[str, Any]]
    put: Callable[[str, Any], None]
    drop: Callable[[str], None]

    def marks(self) -> dict[str, Any]:
        return {name: _mark(value) for name, value in self.read().items()}


class Change(NamedTuple):
    """What a fn has changed."""

    place: Place
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.place.kind} {self.place.prefix + self.name!r}{_drawn_from(self.value)}"

    @property
    def key(self) -> Any:
        return self.place.key, self.name


class Plain:
    """What fns keep in plain Python, to see what changes."""

    def __init__(self) -> None:
        self.places: dict[int, list[Place]] = {}  # by the id of a function
        self.fns: list[Any] = []  # held, so that no other one gets the id of one
        self.marks: dict[Any, Any] = {}

    def places_of(self, fn: Any) -> list[Place]:
        if id(fn) not in self.places:
            self.fns.append(fn)
            self.places[id(fn)] = found = list(_places(fn))
            self.marks |= {place.key: place.marks() for place in found if place.key not in self.marks}
        return self.places[id(fn)]

    def look(self) -> None:
        self.marks = {place.key: place.marks() for places in self.places.values() for place in places}

    def marks_of(self, fn: Any) -> Any:
        return [place.marks() for place in self.places_of(fn)]

    def changed_by(self, fn: Any) -> list[Change]:
        """What differs from the last look."""
        changed = []
        for place in self.places_of(fn):
            now = place.marks()
            then, self.marks[place.key] = self.marks.get(place.key, now), now
            names = [name for name in now if name not in then or then[name] != now[name]]
            values = place.read()
            changed += [Change(place, name, values.get(name)) for name in names]
        return changed


class Snapshot:
    """A state of a net: parameters, buffers, random generators and what is kept in plain Python. `put_back` goes back to it."""

    def __init__(self, given: Any, modules: Iterable[nn.Module], plain: Plain):
        self.draws, self.python = Draws(generators(tree_leaves(given))), python_states()
        self.slots: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # of modules, and what stood there
        self.copies: dict[Any, tuple[Place, dict[str, Any]]] = {}
        self.contents: dict[int, tuple[Any, Any]] = {}
        self.plain = plain
        self.add(modules, (place for places in plain.places.values() for place in places))

    def add(self, modules: Iterable[nn.Module], places: Iterable[Place]) -> None:
        """What turns out to belong to the net as well, as it is now."""
        for slots in (slots for m in modules for slots in (m._parameters, m._buffers)):
            if id(slots) not in self.slots and isinstance(slots, dict):  # TorchScript's are none, and are refused later
                self.slots[id(slots)] = slots, dict(slots)
                self._keep(slots.values())
        for place in places:
            if place.key not in self.copies:
                self.copies[place.key] = place, place.read()
                self._keep(self.copies[place.key][1].values(), _LARGE)

    def keep_made(self, module: nn.Module) -> None:
        """What a lazy module has made by now."""
        for slots in (module._parameters, module._buffers):
            self._keep(slots.values())

    def _keep(self, values: Iterable[Any], limit: float = math.inf) -> None:
        for value in values:
            if isinstance(value, Tensor) and (is_lazy(value) or value.nbytes > limit):
                continue
            if id(value) not in self.contents and (content := _content(value)) is not None:
                self.contents[id(value)] = value, content

    def put_back(self) -> None:
        self.draws.put_back()
        put_back_python(self.python)
        for slots, then in self.slots.values():
            for name in slots.keys() - then.keys():
                del slots[name]
            slots.update(then)
        for place, copy in self.copies.values():
            now = place.read()
            for name in now.keys() - copy.keys():
                place.drop(name)
            for name, value in copy.items():
                if now.get(name, _MISSING) is not value:
                    place.put(name, value)
        for value, content in self.contents.values():
            _restore(value, content)
        self.plain.look()


def unmade(module: nn.Module) -> bool:
    """Whether it is lazy, and has yet to make its parameters or buffers."""
    return any(t is not None and is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values()))


def _drawn_from(value: Any) -> str:
    """Says so if it is a random generator of Python's or numpy's."""
    numpy = sys.modules.get("numpy.random")
    kinds = (random.Random, *((numpy.Generator, numpy.RandomState, numpy.BitGenerator) if numpy else ()))
    return " (a random generator)" if isinstance(value, kinds) else ""


def _places(fn: Any) -> Iterator[Place]:
    fn = fn.fn if isinstance(fn, Around) and not isinstance(fn.fn, nn.Module) else fn
    held = [m for m in modules_of(fn) if not unmade(m)]
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
    """What stands in the files of the functions and may change: neither functions nor classes nor modules."""
    for around in {id(fn.__globals__): fn.__globals__ for fn in functions}.values():
        names = {name for name, value in around.items() if not name.startswith("__") and not isinstance(value, _FIXED)}
        if names:
            yield Place(id(around), "global", "", *_named(around, names))


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
    if isinstance(value, Tensor):
        plain = type(value) in (Tensor, nn.Parameter) and value.is_leaf and not value.is_inference()
        return value.detach().clone() if plain else None
    if type(value) in _CONTAINERS:
        return value.copy()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if _is_numpy(value, "Generator"):
        return value.bit_generator.state
    return value.copy() if _is_numpy(value, "ndarray") and value.nbytes <= _SMALL else None


def _restore(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        if not torch.equal(value, content):
            with torch.no_grad():
                (value if value.shape == content.shape else value.resize_(content.shape)).copy_(content)
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif _is_numpy(value, "Generator"):
        value.bit_generator.state = content
    elif _is_numpy(value, "ndarray"):
        value[...] = content
    elif not _same(value, content):
        value.clear()
        (value.extend if isinstance(value, (list, collections.deque)) else value.update)(content)


def _same(value: Any, content: Any) -> bool:
    """Whether a container holds the same objects, in the same order where it has one."""
    if isinstance(value, set):
        return value == content
    if isinstance(value, dict) and not all(map(operator.is_, value, content)):
        return False
    parts = (one.values() if isinstance(one, dict) else one for one in (value, content))
    return len(value) == len(content) and all(map(operator.is_, *parts))


def _is_numpy(value: Any, name: str) -> bool:
    return type(value).__name__ == name and type(value).__module__.partition(".")[0] == "numpy"
