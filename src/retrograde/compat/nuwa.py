"""In place of `nuwa_pytorch.reversible`: both streams start as the input, the output is their sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from .. import sequence
from .._base.routes import checked_route
from .._exact.choose import Arithmetic
from ..memory import Memory
from ._shared import Deterministic, PairBlock, functions

__all__ = ["Deterministic", "ReversibleBlock", "ReversibleSequence", "route_args"]


def route_args(router: Mapping[str, Any], args: Mapping[str, Any], depth: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each depth the arguments of f and those of g. What the router does not name goes nowhere."""
    route: Any = checked_route(router, depth)
    routed = [(name, value, route[name]) for name, value in args.items() if name in route]

    def going(i: int, which: int) -> dict[str, Any]:
        return {name: value for name, value, to in routed if to[i][which]}

    return [(going(i, 0), going(i, 1)) for i in range(depth)]


class ReversibleBlock(PairBlock):
    """One reversible block by itself, on a tensor that holds both halves along dim 2."""

    dim = 2

    def __init__(self, f: Any, g: Any):
        super().__init__(Deterministic(f), Deterministic(g))


class ReversibleSequence(sequence.ReversibleSequence):
    """Pair blocks; `args_route` is {name: one (to_f, to_g) per block}, and other keyword arguments are dropped."""

    args_route = sequence.ReversibleSequence.route

    def __init__(
        self,
        blocks: Iterable[Any],
        args_route: Mapping[str, Any] | None = None,
        *,
        memory: Memory = "reverse",
        arithmetic: Arithmetic = "auto",
    ):
        made = [ReversibleBlock(f, g) for f, g in functions(blocks)]
        super().__init__(made, merge="sum", route=args_route or {}, memory=memory, arithmetic=arithmetic)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The sum of both streams. f and g get the keyword arguments as `args_route` says."""
        route: Any = self.args_route
        return super().forward(x, **{name: value for name, value in kwargs.items() if any(map(any, route.get(name, ())))})
