"""What the runs of one forward pass share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import errors
from .around import may_name
from .call import Streams
from .capture import capturing
from .held import TELLING_NOTHING, Held, bare, version_of
from .outline import Glance, Outline
from .replay import Draws, generators, modes
from .sight import Sight

_HOLE = object()


class Context:
    """What the runs of one stretch share: the side inputs, the modes, the random generators."""

    def __init__(self, side: Streams, wary: bool = False):
        self.wary = wary  # of functions that turn out to compute in 16 bits
        flat, self.side_spec = tree_flatten(side) if side else ([], None)
        # inference tensors cannot be saved by autograd, and cannot change either
        kept = [isinstance(t, Tensor) and not t.is_inference() for t in flat]
        self.side, self.tensors = side, [t for t, is_kept in zip(flat, kept, strict=True) if is_kept]
        self.grads = [t.requires_grad for t in self.tensors]
        self.others = [_HOLE if is_kept else t for t, is_kept in zip(flat, kept, strict=True)]
        self.opaque = [o for o in self.others if o is not _HOLE and not isinstance(o, (*TELLING_NOTHING, torch.Generator))]
        self.inside, self.computed = self._inside(), self._computed()
        self.beside: list[tuple[weakref.ref[Tensor], int]] = []
        self.attributes: list[tuple[dict[str, Any], str, weakref.ref[Tensor], int]] = []
        self.modes = modes()
        self.capturing = capturing()
        self.draws = Draws([g for g in generators(flat) if not (self.capturing and g.device.type == "cuda")])
        self.glances: list[Glance | None] = []  # one for each update of the program …
        self.broken: list[Outline] = []  # … and outlines that turn out not to stand any more
        self.sights: list[Glance | Sight] = []  # of the updates that have run
        self.known: list[list[Any]] = []  # what fns have saved, the last kinds: most are like one that came before

    def check_side(self) -> None:
        """fns may have put something into a list or a dict: no version tells."""
        if self.side_spec is not None and self.side_spec.num_nodes > 1 + len(self.others):  # there are such
            now = tree_flatten(self.side)[0]
            rest = iter(self.tensors)
            then = [next(rest) if other is _HOLE else other for other in self.others]
            if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
                raise errors.ProgramError("fn changed a list or a dict among the side inputs. Let it return what it has to tell")

    def looks(self, streams: Iterable[Tensor]) -> Iterable[Any]:
        """What decides what fns save, as far as it is known before they run: shapes and flags, but no numbers."""
        yield from ((t.shape, t.dtype, t.device, t.requires_grad) for t in (*streams, *self.tensors))
        yield from (o if isinstance(o, (bool, str)) else type(o) for o in self.others)
        yield from self.modes

    def _inside(self) -> list[Tensor]:
        """The tensors inside of side inputs that are objects of some class. What fns compute and leave there is not meant."""
        return [t for thing in self.opaque for t in Held(thing).own_tensors() if t.grad_fn is None]

    def _computed(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Their attributes that are tensors with a graph, and where they are: a loop may take out what fns have left there."""
        places = [getattr(thing, "__dict__", {}) for thing in self.opaque]
        found = [(place, name, t) for place in places for name, t in place.items() if isinstance(t, Tensor)]
        return [(place, name, t) for place, name, t in found if t.grad_fn is not None]

    def inside_changed(self, fn: Any, modules: list[nn.Module]) -> bool:
        """Whether one that was there before the forward pass and after it has been edited or exchanged since.

        Of those with a graph, one that fn names: a loop may also keep what it computes there, for itself.
        """
        there = {id(t) for t in self._inside()} if self.beside else ()
        then = [(ref(), version) for ref, version in self.beside]
        if any(t is None or id(t) not in there or version_of(t) != version for t, version in then):
            return True
        now = [(name, place[name], ref(), version) for place, name, ref, version in self.attributes if name in place]
        others = {name for name, t, old, version in now if t is None or t is not old or version_of(t) != version}
        return bool(others) and may_name([bare(fn), *map(type, modules)], others)

    def forget(self) -> None:
        """After the forward pass: what is needed again is in the hands of autograd."""
        there = {id(t) for t in self._inside()}
        self.beside = [(weakref.ref(t), version_of(t)) for t in self.inside if id(t) in there]
        left = [(place, name, t) for place, name, t in self.computed if place.get(name) is t]
        self.attributes = [(place, name, weakref.ref(t), version_of(t)) for place, name, t in left]
        self.inside, self.computed = [], []
        self.side, self.tensors, self.glances, self.broken, self.sights = {}, [], [], [], []

    def side_again(self, saved: Iterable[Tensor]) -> Streams:
        if self.side_spec is None:
            return {}
        pairs = zip(saved, self.grads, strict=True)
        rest = iter([t if t.requires_grad is grad else t.detach().requires_grad_(grad) for t, grad in pairs])
        return tree_unflatten([next(rest) if other is _HOLE else other for other in self.others], self.side_spec)
