"""In place of `reformer_pytorch.reversible`: the input holds both halves along dim 2, and so does the output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import sequence
from .._base.splitting import halves
from .._engine.replay import replaying
from .._exact.choose import Arithmetic
from ..memory import Memory, ReverseAbove
from ._shared import BOTH_HALVES, Deterministic, PairBlock, functions, pairs

__all__ = ["Deterministic", "IrreversibleBlock", "ReversibleBlock", "ReversibleSequence"]


class _Depth(int):
    """The number of a block, with another name each time it is asked for: attention caches what it does in chunks under these."""

    asked = 0

    def __str__(self) -> str:
        self.asked += 1
        return int.__repr__(self) if self.asked == 1 else f"{int.__repr__(self)}, chunk {self.asked}"


class _Signalled(Deterministic):
    """Passes `_depth` to its net, and in training `_reverse`, true in a recomputation: LSH attention then reads cached buckets.

    With `attn_chunks` above 1, attention caches the buckets of all chunks under one name, and would read those of the last one.
    """

    def __init__(self, net: Any, depth: int | None):
        super().__init__(net)
        self.depth = depth

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `net` returns for the arguments and the signals."""
        depth = _Depth(self.depth or 0) if self._in_chunks() else self.depth
        return super().forward(*args, **{**kwargs, "_reverse": replaying() and self.training, "_depth": depth})

    def _in_chunks(self) -> bool:
        return any((getattr(module, "attn_chunks", None) or 1) > 1 for module in self.modules())


class ReversibleBlock(PairBlock):
    """One reversible block by itself; with `send_signal`, f and g get `_depth` and `_reverse`."""

    dim = 2

    def __init__(self, f: Any, g: Any, depth: int | None = None, send_signal: bool = False):
        super().__init__(*(_Signalled(fn, depth) if send_signal else Deterministic(fn) for fn in (f, g)))
        self.depth, self.send_signal = depth, send_signal


class IrreversibleBlock(PairBlock):
    """The same by ordinary autograd, without signals."""

    dim = 2
    memory: Memory = "store"


class ReversibleSequence(sequence.ReversibleSequence):
    """Pair blocks on a tensor (batch, length, both halves).

    - `layer_dropout`: in training each block is left out with this probability; one stays.
    - `reverse_thres`: inputs of at most this length run by ordinary autograd, without signals.
    - `send_signal`: every f and g is called with `_depth`, and `_reverse` true when it is run again in training.
    """

    def __init__(
        self,
        blocks: Iterable[Any],
        layer_dropout: float = 0.0,
        reverse_thres: int = 0,
        send_signal: bool = False,
        *,
        memory: Memory = "reverse",
        arithmetic: Arithmetic = "auto",
    ):
        fns = functions(blocks)
        made = [ReversibleBlock(f, g, depth, send_signal) for depth, (f, g) in enumerate(fns)]
        super().__init__(made, split="chunk", dim=2, merge="cat", memory=memory, arithmetic=arithmetic)
        self.irrev_blocks = nn.ModuleList(IrreversibleBlock(f, g) for f, g in fns)
        self.layer_dropout, self.reverse_thres = layer_dropout, ReverseAbove(reverse_thres).length

    def forward(self, x: Tensor, arg_route: Any = (True, False), **kwargs: Any) -> Tensor:
        """Both halves after all blocks. f and g get the keyword arguments as `arg_route`, (to_f, to_g), says."""
        short = ReverseAbove(self.reverse_thres).measured(x) == "store"
        blocks = self.irrev_blocks if short else self.blocks
        updates = pairs(blocks, self._kept(), arg_route)
        return self._through(updates, x, kwargs, "store" if short else self.memory)

    def _kept(self) -> Iterable[int]:
        count = len(self.blocks)
        if not self.training or self.layer_dropout <= 0:
            return range(count)
        dropped = torch.empty(count).uniform_(0, 1) < self.layer_dropout
        return [i for i, drop in enumerate(dropped.tolist()) if not drop] or [0]

    def _parts(self, x: Any) -> tuple[Any, ...]:
        return halves(x, self.dim, BOTH_HALVES)
