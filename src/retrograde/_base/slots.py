"""Where modules keep parameters and buffers: what stands there, what was changed, and other tensors put in for a while."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .torch_private import version_of

_MISSING = object()  # no such slot
_flat: Any = chain.from_iterable
_values: Any = dict.values
_untyped = Tensor.untyped_storage
_version, _requires_grad, _training = attrgetter("_version"), attrgetter("requires_grad"), attrgetter("training")


class Slots:
    """Where modules keep parameters and buffers, and what stands there. Flat tuples: builtins make and compare them fast, and
    the garbage collector has little to do with them."""

    __slots__ = ("counts", "dicts", "names", "parameters", "pins", "requires_grad", "training", "values", "versions")

    def __init__(self, modules: Sequence[nn.Module]):
        self.dicts = [m._parameters for m in modules if m._parameters]
        count = sum(map(len, self.dicts))
        self.dicts += [m._buffers for m in modules if m._buffers]
        self.counts = tuple(map(len, self.dicts))
        self.names: tuple[str, ...] = tuple(_flat(self.dicts))
        self.values: tuple[Tensor | None, ...] = tuple(_flat(map(_values, self.dicts)))
        self.parameters = tuple([p for p in self.values[:count] if p is not None])
        self.versions = _each(_version, version_of, self.parameters)

    def complete(self, modules: Sequence[nn.Module]) -> Slots:
        """With all that a recomputation must find again."""
        self.pins = _each(_untyped, _storage, self.parameters)  # held, so that no other storage gets the address of one
        self.requires_grad, self.training = tuple(map(_requires_grad, self.parameters)), tuple(map(_training, modules))
        return self

    def hold(self, other: Slots) -> bool:
        """Whether the same tensors stand in the same slots."""
        return self.names == other.names and all(map(is_, self.values, other.values)) and all(map(is_, self.dicts, other.dicts))

    def untouched(self, now: Slots) -> bool:
        """Whether nothing was replaced or edited."""
        return self.versions == now.versions and self.hold(now)

    def equal(self, now: Slots) -> bool:
        """Whether nothing at all differs; of complete ones."""
        return (
            self.untouched(now)
            and self.requires_grad == now.requires_grad
            and self.training == now.training
            and all(map(is_, self.pins, now.pins))
        )

    def edited(self, now: Slots | None = None) -> list[tuple[str, Tensor]]:
        """Parameters that have another version, or of complete ones other memory, wherever they stand."""
        seen = zip(self.parameters, self.versions, self.pins if now else self.parameters, strict=True)
        found = {
            id(p)
            for p, version, pin in seen
            if (version_of(p) != version or (now is not None and _storage(p) is not pin)) and not sharded(p)
        }
        return [(name, p) for name, p in zip(self.names, self.values, strict=True) if p is not None and id(p) in found]

    def items(self) -> list[tuple[dict[str, Any], str, Any]]:
        places = [slots for slots, count in zip(self.dicts, self.counts, strict=True) for _ in range(count)]
        return list(zip(places, self.names, self.values, strict=True))

    def replaced_in(self, other: Slots) -> list[tuple[dict[str, Any], str, Any]]:
        """Slots that hold another tensor in the other one, or are not in both, with what they hold here."""
        if self.hold(other):
            return []
        now = {(id(slots), name): value for slots, name, value in other.items()}
        then = {(id(slots), name) for slots, name, _ in self.items()}
        found = [(s, n, v) for s, n, v in self.items() if not _alike(v, now.get((id(s), n), _MISSING))]
        return found + [(s, n, _MISSING) for s, n, v in other.items() if (id(s), n) not in then and not sharded(v)]


class Swap:
    """Tensors put into modules for the time of a recomputation."""

    __slots__ = ("out", "put_in")

    def __init__(self) -> None:
        self.out: list[tuple[dict[str, Any], str, Any]] = []
        self.put_in: list[Any] = []

    def put(self, slots: dict[str, Any], name: str, t: Any) -> None:
        self.out.append((slots, name, slots.get(name, _MISSING)))
        self.put_in.append(t)
        place(slots, name, t)

    def apart(self) -> Swap:
        """Copies in the same slots, for somebody whose changes of them are his own."""
        copies = Swap()
        for slots, name, _ in self.out:
            t = slots.get(name, _MISSING)
            copies.put(slots, name, t.clone() if isinstance(t, Tensor) else t)
        return copies

    def undo(self) -> None:
        """What was there before; but what fn itself has replaced stays, as its plain attributes may go with it."""
        for (slots, name, t), put in zip(reversed(self.out), reversed(self.put_in), strict=True):
            if slots.get(name, _MISSING) is put:
                place(slots, name, t)


NOTHING = Swap()  # there is nothing to put in, as a rule


def place(slots: dict[str, Any], name: str, t: Any) -> None:
    if t is _MISSING:
        slots.pop(name, None)
    else:
        slots[name] = t


def _storage(p: Tensor) -> Any:
    """The same object as long as the parameter is in the same memory."""
    return p.untyped_storage() if p.layout is torch.strided and there(p) else None


def there(p: Any) -> TypeGuard[Tensor]:
    """Not None, and not one that a lazy module has yet to make."""
    return p is not None and (type(p) is nn.Parameter or not nn.parameter.is_lazy(p))


def _each(fast: Any, careful: Any, found: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """`fast` of all; `careful` where some are of a kind that raises an error: inference tensors, sparse or lazy ones."""
    try:
        return tuple(map(fast, found))
    except (RuntimeError, NotImplementedError, ValueError):
        return tuple(map(careful, found))


def sharded(t: Any) -> bool:
    """FSDP2 exchanges sharded and full parameters in the same slots: they are its own to move."""
    return type(t) is not nn.Parameter and type(t) is not Tensor and hasattr(t, "_local_tensor")


def _alike(a: Any, b: Any) -> bool:
    return a is b or sharded(a) or sharded(b)
