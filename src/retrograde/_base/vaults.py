"""Tensors that autograd keeps, in a node of their own: hooks on saved tensors, freeing and version checks apply to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .torch_private import quick_apply


class Vault(torch.autograd.Function):
    """A node that does nothing but have autograd keep `saved`; alive as long as what it returns."""

    @staticmethod
    def forward(ctx: Any, anything: Tensor, saved: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.keeps = True
        return anything.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


_vault = quick_apply(Vault)  # here no transform is ever around


def vault(saved: list[Tensor]) -> Tensor:
    """A tensor that keeps these alive, as autograd's saved tensors."""
    return _vault(torch.empty(0, requires_grad=True), saved)


def opened(t: Tensor) -> list[Tensor]:
    """What a vault keeps."""
    return list(t.grad_fn.saved_tensors)  # type: ignore[union-attr]


def cut(t: Tensor) -> Tensor:
    """The tensor without its graph; a vault stays one."""
    return t if getattr(t.grad_fn, "keeps", False) else t.detach()
