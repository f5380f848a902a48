"""A quick look at fns that hold nothing but parameters in modules, as most do; others are seen as a whole (sight.py).

What is looked at for every update is kept in flat lists, which builtins make and compare: a loop over the parameters costs three
times as much, and it is felt where tensors are small.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain, islice, zip_longest
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .around import code_of, content, globals_around, is_torchs_own
from .held import Held, tells_something
from .sight import NOTHING, Sight, Swap

_flat: Any = chain.from_iterable
_values: Any = dict.values
_version, _requires_grad, _training = attrgetter("_version"), attrgetter("requires_grad"), attrgetter("training")
_dtype = attrgetter("dtype")
_dicts = itemgetter("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")  # among the attributes
_storage = Tensor.untyped_storage
_LOCK = threading.Lock()  # of threads that run one program


class Outline:
    """The modules of a fn and the dicts in which they keep what they have: found once, and looked at again in every pass."""

    __slots__ = (
        "around", "born", "empty", "full", "held", "keys", "kinds", "modules", "names", "none", "own", "parameters",
        "places", "rule", "things", "values",
    )  # fmt: skip

    def __init__(self, held: Held, rule: Any, born: int):
        self.held, self.rule, self.born = held, rule, born
        self.modules = held.modules
        slots = [(m._parameters, name, p) for m in held.modules for name, p in m._parameters.items()]
        self.names = [(place, name) for place, name, p in slots if p is not None]
        self.none = [(place, name) for place, name, p in slots if p is None]
        self.parameters = [p for _, _, p in slots if p is not None]
        self.places = list(_flat(map(_dicts, map(vars, held.modules))))
        self.full = [d for m in held.modules for d in (m._modules, m._parameters) if d]
        self.empty = [d for d in (*self.places, rule.__dict__) if not d]
        self.keys, self.things = list(_flat(self.full)), list(_flat(map(_values, self.full)))
        own = [m for m in held.modules if not is_torchs_own(type(m))]
        self.own = [vars(m) for m in own]
        self.values = list(_flat(map(_values, self.own)))
        self.kinds = list(map(type, held.modules))
        self.around: dict[Any, Any] = {}  # of a class: its forward, and what its code finds around it
        for kind in map(type, own):
            code = code_of(kind)
            named = [found for function in code for found in globals_around(function)]
            cells = [cell for function in code for cell in function.__closure__ or ()]
            self.around[kind] = kind.forward, named, cells, list(map(content, cells))

    def look(self) -> list[Any]:
        """What may change of parameters and modules while these stay the same objects."""
        return [*map(_version, self.parameters), *map(_requires_grad, self.parameters), *map(_training, self.modules)]


def outline_of(fn: Any, rule: Any, born: int) -> Outline | None:
    """None of a fn that holds more than parameters in modules, or might without any of its attributes changing."""
    if not isinstance(fn, nn.Module) or rule.__dict__:
        return None
    held = Held(fn, rule)
    if held.wide or held.tensors or held.generators:
        return None
    for m in held.modules:
        if m._buffers or m._forward_hooks or m._forward_pre_hooks or hasattr(type(m), "_get_fsdp_state"):
            return None
        if type(m._modules) is not dict or type(m._parameters) is not dict:
            return None
        if not all(p is None or _usual(p) for p in m._parameters.values()):
            return None
        if not is_torchs_own(type(m)) and any(tells_something(name, value) for name, value in vars(m).items()):
            return None
    return Outline(held, rule, born)


def _usual(p: Any) -> bool:
    return type(p) is Parameter and p.layout is torch.strided and not p.is_inference()


class Outlines:
    """Those of all fns of a program, looked at together before a pass."""

    def __init__(self) -> None:
        self.ones: list[Outline | None] = []
        self.broken: list[Outline] = []  # those that did not stand any more when their fn was called
        self.passes = 0

    def look(self, updates: Sequence[Any]) -> list[Glance | None]:
        """What is seen of each fn before the pass; None of one that must be seen as a whole."""
        with _LOCK:
            return self._look(updates)

    def _look(self, updates: Sequence[Any]) -> list[Glance | None]:
        self.passes += 1
        anew = self.passes & (self.passes - 1) == 0  # 1, 2, 4, 8, …: lazy modules are made now, and hooks may be gone
        if anew or self.broken or not _known(self):
            self.ones = [self._renewed(one, update, anew) for one, update in zip_longest(self.ones, updates)]
            self._gather()
            self.broken.clear()
        versions = map(_version, self.parameters)
        pairs = zip(self.ones, updates, strict=True)
        return [one and Glance(update.fn, one, list(islice(versions, len(one.parameters)))) for one, update in pairs]

    def _renewed(self, one: Outline | None, update: Any, anew: bool) -> Outline | None:
        """One that is new in every pass is better seen as a whole."""
        if one is not None and _known(one) and stand(one):
            return one
        if not anew and (one is None or one.born >= self.passes - 2):  # one pass may go by before it is noticed
            return None
        return outline_of(update.fn, update.rule, self.passes)

    def _gather(self) -> None:
        """One list of all, for each that is looked at: a few long loops inside of builtins, and not many short ones."""
        ones = [one for one in self.ones if one is not None]

        def all_of(name: str) -> list[Any]:
            return [thing for one in ones for thing in getattr(one, name)]

        self.full, self.empty, self.things, self.keys = all_of("full"), all_of("empty"), all_of("things"), all_of("keys")
        self.modules, self.places, self.parameters = all_of("modules"), all_of("places"), all_of("parameters")
        self.own, self.values, self.kinds = all_of("own"), all_of("values"), all_of("kinds")
        self.around = {kind: found for one in ones for kind, found in one.around.items()}


def dtypes_of(glances: Sequence[Glance | None]) -> set[torch.dtype]:
    """Of all parameters that are seen."""
    return set(map(_dtype, _flat(glance.outline.parameters for glance in glances if glance is not None)))


def _known(known: Outline | Outlines) -> bool:
    """Whether the modules are of the same classes, with the same children and parameters, and have them in the same dicts."""
    return _fit(known) and list(map(type, known.modules)) == known.kinds and _in_place(known)


def _in_place(known: Outline | Outlines) -> bool:
    """Whether modules have what they have in the same dicts."""
    return all(map(is_, _flat(map(_dicts, map(vars, known.modules))), known.places))


def stand(known: Outline | Outlines) -> bool:
    """Whether modules have the same attributes, children and parameters, and their code finds the same around it."""
    return (
        _fit(known)
        and sum(map(len, known.own)) == len(known.values)
        and all(map(is_, _flat(map(_values, known.own)), known.values))
        and (not known.around or _around(known))
    )


def _around(known: Outline | Outlines) -> bool:
    for kind, (forward, named, cells, contents) in known.around.items():
        if kind.forward is not forward or any(place.get(name) is not thing for place, name, thing in named):
            return False
        if cells and not all(map(is_, map(content, cells), contents)):
            return False
    return True


def _fit(known: Outline | Outlines) -> bool:
    """Whether modules have the same children and parameters under the same names, no buffers and no hooks."""
    return (
        list(_flat(known.full)) == known.keys
        and all(map(is_, _flat(map(_values, known.full)), known.things))
        and not any(known.empty)
    )


class Glance:
    """What one call of fn saw, in the place of a `Sight`: made before the pass, and completed after the call."""

    __slots__ = ("fn", "outline", "pins", "seen", "versions")
    repeatable, loose = True, False
    told = True  # `same` tells all

    def __init__(self, fn: Any, outline: Outline, versions: list[int]):
        self.fn, self.outline = fn, outline
        self.versions = versions  # of the parameters before the pass

    @property
    def held(self) -> Held:
        return self.outline.held

    def after(self, called: set[nn.Module] | None, saved: list[Tensor]) -> Glance | Sight:
        """As `Sight.after`; a `Sight`, if fn itself has changed something."""
        outline = self.outline
        self.seen = outline.look()
        if self.seen[: len(self.versions)] != self.versions or not _fit(outline):
            sight = Sight(self.fn, outline.rule, outline.held)
            sight.versions = self.versions
            return sight.after(called, saved)
        self.pins = list(map(_storage, outline.parameters))  # held, so that no other one gets their addresses
        return self

    def put_back(self) -> None:
        """After an exception: there were no buffers."""
        for m in self.outline.modules:
            m._buffers.clear()

    def same(self) -> bool:
        """Whether all is as it was before the call and after."""
        outline = self.outline
        if outline.look() != self.seen:
            return False
        if not all(map(is_, map(_storage, outline.parameters), self.pins)):
            return False
        return _fit(outline) and _in_place(outline)

    def difference(self, same: bool = False) -> str | None:
        return None if same else self.whole().difference()

    def again(self, same: bool) -> Swap:
        return NOTHING if same else self.whole().again(False)

    def whole(self) -> Sight:
        """The same at length, to tell what is different."""
        outline, count = self.outline, len(self.versions)
        sight = Sight(self.fn, outline.rule, outline.held)
        sight.versions, grads, sight.training = self.versions, self.seen[count : 2 * count], self.seen[2 * count :]
        sight.hooks, sight.places = [()] * len(outline.modules), outline.places[1::5]  # see _dicts
        sight.names = [tuple(name for at, name in (*outline.names, *outline.none) if at is place) for place in sight.places]
        sight.pins, sight.empty, sight.plain = self.pins, outline.none, True
        seen = zip(outline.names, outline.parameters, self.versions, grads, self.pins, strict=True)
        sight.parameters = [(place, name, p, version, grad, pin._cdata) for (place, name), p, version, grad, pin in seen]
        return sight
