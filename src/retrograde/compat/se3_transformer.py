"""In place of `se3_transformer_pytorch.reversible`: dicts of tensors, one for each type of feature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .. import sequence
from .._exact.choose import Arithmetic
from ..memory import Memory
from ._shared import Deterministic as _Deterministic
from ._shared import PairBlock, functions

__all__ = ["Deterministic", "ReversibleBlock", "ReversibleSequence", "SequentialSequence"]


class Deterministic(_Deterministic):
    """A function of a dict, of whose output the keys of the input are used."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """What `net` returns for the arguments; of a dict, the keys of `x`."""
        out = super().forward(x, *args, **kwargs)
        if isinstance(x, Mapping) and isinstance(out, Mapping):
            return {key: out[key] for key in x if key in out}
        return out


class ReversibleBlock(PairBlock):
    """One reversible block by itself, on a dict of tensors that hold both halves along the last dim; f gets the arguments."""

    def __init__(self, f: Any, g: Any):
        super().__init__(Deterministic(f), Deterministic(g))

    def forward(self, x: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Both halves after the block; f gets the keyword arguments."""
        return super().forward(x, kwargs)


class SequentialSequence(nn.Module):
    """The same list without reversal, and with one stream: x = attn(x, **kwargs), x = ff(x)."""

    def __init__(self, blocks: Any):
        super().__init__()
        functions(blocks, "attn, ff")
        self.blocks = blocks

    def forward(self, x: Any, **kwargs: Any) -> Any:
        """`x` after all blocks; each attn gets the keyword arguments."""
        for attn, ff in self.blocks:
            x = ff(attn(x, **kwargs))
        return x


class ReversibleSequence(sequence.ReversibleSequence):
    """Pair blocks on dicts: both streams start as the input, the output is their mean, f gets the keyword arguments."""

    def __init__(self, blocks: Iterable[Any], *, memory: Memory = "reverse", arithmetic: Arithmetic = "auto"):
        super().__init__([ReversibleBlock(f, g) for f, g in functions(blocks)], memory=memory, arithmetic=arithmetic)

    def forward(self, x: Any, **kwargs: Any) -> Any:
        """The mean of both streams; each f gets the keyword arguments."""
        return super().forward(x, **kwargs)
