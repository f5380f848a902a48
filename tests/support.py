"""What the tests share: small nets with non-trivial branches, and one way to compare gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

REPLAYED: list[Any] = ["checkpoint", "reverse"]  # under these every fn runs twice
POLICIES: list[Any] = [*REPLAYED, rg.StoreLast(2), rg.Budget(30_000), rg.Anchor(3), rg.ReverseAbove(0, dim=0)]
WIDTH = 6


def mlp(width: int = WIDTH, dropout: float = 0.0) -> nn.Module:
    """A branch with a nonlinearity, a norm and two weights; its output is of the size of its input."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(2 * width, width)
    ).double()


def mlps(count: int, dropout: float = 0.0) -> list[nn.Module]:
    return [mlp(dropout=dropout) for _ in range(count)]


class Attend(nn.Module):
    """Attention of x over a context (or over itself), with a mask."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm, self.q, self.kv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.double()

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        k, v = self.kv(x if context is None else context).chunk(2, -1)
        scores = self.q(x) @ k.transpose(-1, -2) / x.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        return self.out(scores.softmax(-1) @ v)


def draw(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*(shape or (3, WIDTH)), dtype=torch.float64, requires_grad=grad)


def loss_of(out: Any) -> Tensor:
    """A loss with a different, nonlinear gradient in every element of every output."""
    flat = torch.utils._pytree.tree_leaves(out)
    return sum(((t * (i + 1)).sin() * (t + i)).sum() for i, t in enumerate(flat) if t.requires_grad)  # type: ignore[return-value]


def gradients(make: Callable[[], Any], wanted: Iterable[Tensor], seed: int = 0) -> list[Tensor]:
    """Output leaves, then gradients of `loss_of(make())`, all from the same random state."""
    wanted = list(wanted)
    torch.manual_seed(seed)
    out = make()
    found = torch.autograd.grad(loss_of(out), wanted, allow_unused=True)
    outs = [t.detach() for t in torch.utils._pytree.tree_leaves(out)]
    return outs + [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def assert_same(found: Iterable[Tensor], true: Iterable[Tensor], tolerance: float = 1e-9) -> None:
    """Relative error of every tensor under `tolerance`; at least one of them is not zero."""
    found, true = list(found), list(true)
    assert len(found) == len(true)
    assert any(t.abs().max() > 0 for t in true), "nothing to compare: all gradients are zero"
    for i, (a, b) in enumerate(zip(found, true, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        scale = b.norm()
        error = (a - b).norm() / (scale if scale > 0 else 1)
        assert error <= tolerance, f"tensor {i} of shape {tuple(a.shape)}: relative error {error:.1e}"


def parameters(fns: Iterable[nn.Module]) -> list[nn.Parameter]:
    return list(nn.ModuleList(fns).parameters())


__all__ = [
    "POLICIES",
    "REPLAYED",
    "WIDTH",
    "Attend",
    "assert_same",
    "draw",
    "gradients",
    "loss_of",
    "mlp",
    "mlps",
    "parameters",
    "rg",
]
