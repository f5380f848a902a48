"""In place of `revtorch`: pair blocks on a tensor that holds both halves along a dim, 1 unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .._base.function_modules import refuse_hooks
from .._exact.choose import Arithmetic
from ..errors import ProgramError
from ..memory import Memory
from ..modules import Net
from ..update import Update
from ..wirings import pair
from ._shared import chained

__all__ = ["ReversibleBlock", "ReversibleSequence"]


class ReversibleBlock(nn.Module):
    """x1 += f_block(x2), x2 += g_block(x1). By itself it has gradients too.

    Random numbers are drawn from torch's generators and are the same in backward, whatever `fix_random_seed` says.
    """

    def __init__(self, f_block: Any, g_block: Any, split_along_dim: int = 1, fix_random_seed: bool = False):
        super().__init__()
        self.f_block, self.g_block = f_block, g_block
        self.split_along_dim, self.fix_random_seed = split_along_dim, fix_random_seed

    def part(self) -> tuple[int, list[Update]]:
        return self.split_along_dim, pair(self.f_block, self.g_block)

    def forward(self, x: Tensor) -> Tensor:
        """Both halves after the block."""
        return chained([self.part()], x)


class ReversibleSequence(Net):
    """Such blocks, one after the other. `eagerly_discard_variables` has no effect: `backward(retain_graph=True)` says it."""

    def __init__(
        self,
        reversible_blocks: Iterable[ReversibleBlock],
        eagerly_discard_variables: bool = True,
        *,
        memory: Memory = "reverse",
        arithmetic: Arithmetic = "auto",
    ):
        super().__init__(memory, arithmetic)
        blocks = list(reversible_blocks)
        for i, block in enumerate(blocks):
            if not isinstance(block, ReversibleBlock):
                raise ProgramError(f"block {i} is a {type(block).__name__}, not a ReversibleBlock")
        self.reversible_blocks = reversible_blocks if isinstance(reversible_blocks, nn.ModuleList) else nn.ModuleList(blocks)
        self.eagerly_discard_variables = eagerly_discard_variables

    def functions(self) -> list[Any]:
        """All functions, each once."""
        return list(dict.fromkeys(fn for block in self._blocks() for fn in (block.f_block, block.g_block)))

    def forward(self, x: Tensor) -> Tensor:
        """Both halves after all blocks."""
        return chained(self._parts(), x, memory=self.memory, arithmetic=self.arithmetic, verify=self.verify)

    def inverse(self, y: Tensor) -> Tensor:
        """The input of `forward`, from its output."""
        return chained(self._parts(), y, back=True, memory=self.memory, arithmetic=self.arithmetic, verify=self.verify)

    def _blocks(self) -> list[Any]:
        return list(self.reversible_blocks)

    def _parts(self) -> list[tuple[int, list[Update]]]:
        for i, block in enumerate(self._blocks()):
            refuse_hooks(i, block)
        return [block.part() for block in self._blocks()]
