"""In place of `axial_attention.reversible`: channels first, both streams start as the input, the output is their mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .. import sequence
from .._exact.choose import Arithmetic
from ..memory import Memory
from ._shared import Deterministic, PairBlock, functions, pairs

__all__ = ["IrreversibleBlock", "ReversibleBlock", "ReversibleSequence"]


class ReversibleBlock(PairBlock):
    """One reversible block by itself, on a tensor that holds both halves along dim 1."""

    dim = 1

    def __init__(self, f: Any, g: Any):
        super().__init__(Deterministic(f), Deterministic(g))


class IrreversibleBlock(PairBlock):
    """The same by ordinary autograd."""

    dim = 1
    memory: Memory = "store"


class ReversibleSequence(sequence.ReversibleSequence):
    """Pair blocks; `arg_route` says for each call whether f and g get its keyword arguments."""

    def __init__(self, blocks: Iterable[Any], *, memory: Memory = "reverse", arithmetic: Arithmetic = "auto"):
        made = [ReversibleBlock(f, g) for f, g in functions(blocks)]
        super().__init__(made, dim=1, route=(True, True), memory=memory, arithmetic=arithmetic)

    def forward(self, x: Tensor, arg_route: Any = (True, True), **kwargs: Any) -> Tensor:
        """The mean of both streams. f and g get the keyword arguments as `arg_route`, (to_f, to_g), says."""
        return self._through(pairs(self.blocks, range(len(self.blocks)), arg_route), x, kwargs, self.memory)
