"""In place of `nuwa_pytorch.reversible_video_audio`: video (x1, x2) and audio (m1, m2), which may look at each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .. import wirings
from .._base.function_modules import refuse_hooks
from .._base.splitting import halves, joined
from .._engine.run import run
from .._engine.verify import Verify
from .._exact.choose import Arithmetic
from ..errors import ProgramError, unknown
from ..memory import Memory
from ..modules import Net
from ..update import Update
from ._shared import BOTH_HALVES, Deterministic, functions

__all__ = [
    "Deterministic",
    "DualModalityReversibleSequence",
    "ReversibleCrossAttnBlock",
    "ReversibleCrossModalityAttnBlock",
    "ReversibleSelfAttnBlock",
]

STREAMS = ("x1", "x2", "m1", "m2")


class ReversibleSelfAttnBlock(nn.Module):
    """x1 += f(x2), x2 += g(x1), m1 += j(m2), m2 += k(m1). By itself on tensors that hold both halves along dim 2."""

    wiring = staticmethod(wirings.dual)
    takes: Any = ((), (), (), ())  # of f, g, j, k: {its keyword: side input}

    def __init__(self, f: Any, g: Any, j: Any, k: Any):
        super().__init__()
        self.f, self.g, self.j, self.k = map(Deterministic, (f, g, j, k))

    def forward(self, x: Tensor, m: Tensor, _reverse: bool = True, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Video and audio after the block; with `_reverse=False` by ordinary autograd."""
        side = {"context": None, "context_mask": None, "video_mask": None, "audio_mask": None, **kwargs}
        first = (*halves(x, 2, BOTH_HALVES), *halves(m, 2, BOTH_HALVES))
        x1, x2, m1, m2 = _run([self], first, side, "reverse" if _reverse else "store")
        return joined(x1, x2, dim=2), joined(m1, m2, dim=2)


class ReversibleCrossAttnBlock(ReversibleSelfAttnBlock):
    """The same, where f and j look at the context."""

    takes = (
        {"context": "context", "context_mask": "context_mask", "mask": "video_mask"},
        (),
        {"context": "context", "context_mask": "context_mask", "mask": "audio_mask"},
        (),
    )


class ReversibleCrossModalityAttnBlock(ReversibleSelfAttnBlock):
    """x1 += f(x2, m2), x2 += k(x1), m1 += j(m2, x2), m2 += g(m1): f and j look at the other modality."""

    wiring = staticmethod(wirings.cross)
    takes = (
        {"mask": "video_mask", "context_mask": "audio_mask"},
        (),
        {"mask": "audio_mask", "context_mask": "video_mask"},
        (),
    )


BLOCKS = {
    "intra_modality_self_attn": ReversibleSelfAttnBlock,
    "intra_modality_cross_attn": ReversibleCrossAttnBlock,
    "inter_modality_cross_attn": ReversibleCrossModalityAttnBlock,
}


class DualModalityReversibleSequence(Net):
    """Blocks of four functions, each of a type in `BLOCKS`. Returns [video, audio], the means of their two streams."""

    def __init__(
        self,
        input_blocks: Iterable[Any],
        block_types: Iterable[str],
        *,
        memory: Memory = "reverse",
        arithmetic: Arithmetic = "auto",
    ):
        super().__init__(memory, arithmetic)
        fns = functions(input_blocks, "f, g, j, k")
        block_types = list(block_types)
        for kind in block_types:
            if kind not in BLOCKS:
                raise unknown("block type", kind, BLOCKS)
        if len(fns) != len(block_types):
            raise ProgramError(f"each block needs its type: got {len(fns)} blocks and {len(block_types)} types")
        self.block_types = block_types
        self.blocks = nn.ModuleList(BLOCKS[kind](*four) for kind, four in zip(block_types, fns, strict=True))

    def forward(
        self,
        video: Tensor,
        audio: Tensor,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        video_mask: Tensor | None = None,
        audio_mask: Tensor | None = None,
        reverse: bool = True,
    ) -> list[Tensor]:
        """[video, audio] after all blocks; with `reverse=False` by ordinary autograd."""
        side = {"context": context, "context_mask": context_mask, "video_mask": video_mask, "audio_mask": audio_mask}
        memory = self.memory if reverse else "store"
        x1, x2, m1, m2 = _run(self.blocks, (video, video, audio, audio), side, memory, self.arithmetic, self.verify)
        return [(x1 + x2) / 2, (m1 + m2) / 2]


def _run(
    blocks: Any,
    first: Sequence[Tensor],
    side: dict[str, Any],
    memory: Memory,
    arithmetic: Arithmetic = "auto",
    verify: Verify = "error",
) -> list[Tensor]:
    video, audio = tuple(first[0].shape), tuple(first[2].shape)
    if len(video) != 3 or len(audio) != 3 or (video[0], video[2]) != (audio[0], audio[2]):
        raise ProgramError(
            f"video and audio must be (batch, length, width), with the same batch and width, got {video} and {audio}"
        )
    updates: list[Update] = []
    for i, block in enumerate(blocks):
        refuse_hooks(i, block)
        if side["context"] is None and "context" in block.takes[0]:
            raise ProgramError(f"block {i}, a {type(block).__name__}, needs a context. Pass context=…")
        updates += block.wiring(block.f, block.g, block.j, block.k, takes=block.takes)
    streams: dict[str, Any] = dict(zip(STREAMS, first, strict=True))
    out = run(updates, streams, side, memory=memory, arithmetic=arithmetic, verify=verify)
    return [out[name] for name in STREAMS]
