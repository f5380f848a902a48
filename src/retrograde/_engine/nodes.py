"""What we put into autograd's graph: nodes that keep the final streams and start the walk back, and numbers of saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._base.torch_private import keeps_graph, quick_apply
from .._base.tracing import untraced


class Vault(torch.autograd.Function):
    """A node that does nothing but have autograd keep `saved`; alive as long as what it returns."""

    @staticmethod
    def forward(ctx: Any, anything: Tensor, saved: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*saved)
        return anything.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


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


# Here no transform is ever around.
_vault = quick_apply(Vault)
keep = quick_apply(Keep)
_NOTHING = torch.empty(0, requires_grad=True)
_source = quick_apply(Source)


def vault(saved: list[Tensor]) -> Tensor:
    """A tensor that keeps these alive, as autograd's saved tensors."""
    return _vault(torch.empty(0, requires_grad=True), saved)


def source(t: Tensor) -> Tensor:
    """The same numbers, behind a node of their own."""
    return _source(_NOTHING, t)


@untraced
def packer(store: list[Any], versions: list[int] | None = None) -> Callable[[Tensor], int]:
    """A pack hook that collects what is saved and leaves its number, and notes versions.

    The graph holds on to it: empty `store` afterwards.
    """

    def pack(t: Tensor) -> int:
        if versions is not None:
            versions.append(t._version)
        store.append(t)
        return len(store) - 1

    return pack
