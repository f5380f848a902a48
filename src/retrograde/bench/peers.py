"""The same pair blocks under other packages for reversible nets. Each takes the functions as they are, with their parameters.

All of them split one tensor into the two streams, so they get the input twice, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Pairs = Sequence[tuple[Any, Any]]


def revtorch(pairs: Pairs) -> Any:
    from revtorch import ReversibleBlock, ReversibleSequence  # pyright: ignore[reportMissingImports]

    return ReversibleSequence(nn.ModuleList(ReversibleBlock(f, g, split_along_dim=-1) for f, g in pairs))


def memcnn(pairs: Pairs) -> Any:
    from memcnn import AdditiveCoupling, InvertibleModuleWrapper  # pyright: ignore[reportMissingImports]

    blocks = [AdditiveCoupling(Fm=f, Gm=g, split_dim=-1) for f, g in pairs]
    return nn.Sequential(*(InvertibleModuleWrapper(block, keep_input=False) for block in blocks))


def revlib(pairs: Pairs) -> Any:
    from revlib import ReversibleSequential  # pyright: ignore[reportMissingImports]

    return ReversibleSequential(*(fn for pair in pairs for fn in pair), split_dim=-1)


def reformer(pairs: Pairs) -> Any:
    from reformer_pytorch.reversible import ReversibleSequence  # pyright: ignore[reportMissingImports]

    net = ReversibleSequence(nn.ModuleList(nn.ModuleList(pair) for pair in pairs))

    def forward(both: Tensor) -> Tensor:
        if both.dim() != 3:
            raise ValueError(f"reformer-pytorch takes inputs of 3 dims, not {both.dim()}")
        return net(both, arg_route=(False, False))

    return forward


NETS: dict[str, Callable[[Pairs], Any]] = {"revtorch": revtorch, "memcnn": memcnn, "revlib": revlib, "reformer": reformer}


def forward_of(peer: str, pairs: Pairs) -> Callable[[Tensor], Tensor]:
    """x → the mean of both streams, as all other ways compute it."""
    net = NETS[peer](pairs)

    def forward(x: Tensor) -> Tensor:
        y1, y2 = net(torch.cat((x, x), -1)).chunk(2, -1)
        return (y1 + y2) / 2

    return forward
