"""What we put into autograd's graph: nodes that keep the final streams and start the walk back, and numbers of saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from .._base.torch_private import keeps_graph, quick_apply
from .._base.tracing import untraced


class Keep(torch.autograd.Function):
    """The identity, on each output of a run: keeps the vault alive and starts the walk in backward."""

    @staticmethod
    def forward(ctx: Any, start: Callable[[Any], object], run: Any, vault: tuple[Tensor], t: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.start, ctx.run, ctx.vault = start, run, vault  # in a tuple, so that the vault is no input: no gradient goes there
        return t.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.start(ctx.run)
        if not keeps_graph():
            ctx.vault = None  # as autograd lets go of what a node has saved
        return None, None, None, grad


class Source(torch.autograd.Function):
    """A recovered stream as fn reads it: no leaf, as the graph would keep a leaf alive with all of its numbers.

    So a tensor of its graph that fn leaves in an attribute keeps nodes alive, and no stream.
    """

    @staticmethod
    def forward(ctx: Any, anything: Tensor, t: Tensor) -> Tensor:
        return t.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


keep = quick_apply(Keep)  # here no transform is ever around
_NOTHING = torch.empty(0, requires_grad=True)
_source = quick_apply(Source)


def source(t: Tensor) -> Tensor:
    """The same numbers, behind a node of their own."""
    return _source(_NOTHING, t)


Place = tuple[int]  # what autograd keeps instead of a saved tensor: its number. Autograd alone holds on to it


class AllSaved(BaseException):
    """Everything that backward asks for is there: the rest of fn need not run. Nobody but the engine is to catch it."""


@untraced
def packer(
    store: list[Any], places: list[Place], versions: list[int] | None = None, enough: int | None = None
) -> Callable[[Tensor], Place]:
    """A pack hook that collects what is saved and leaves its place. The graph holds on to it: empty the lists afterwards.

    It raises `AllSaved` when there is `enough`.
    """

    def pack(t: Tensor) -> Place:
        place = (len(store),)
        store.append(t)
        places.append(place)
        if len(store) == enough:
            raise AllSaved
        return place

    def noting(t: Tensor) -> Place:
        versions.append(t._version)  # type: ignore[union-attr]
        return pack(t)

    return pack if versions is None else noting


_unused = next(map(getrefcount, [object()]))  # the count of what a list alone holds


def dead(places: list[Place]) -> Sequence[int]:
    """Numbers of saved tensors whose graph is gone, as that of a norm which a hook computes and prints: nobody asks for them."""
    counts = list(map(getrefcount, places))
    places.clear()
    return [j for j, count in enumerate(counts) if count <= _unused] if _unused in counts else ()
