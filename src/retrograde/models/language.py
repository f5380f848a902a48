"""A decoder over bytes: rotary positions, RMSNorm, attention and a gated MLP as reversible blocks, tied embeddings.

Shapes: B batch, L length, D width, H heads, K width of a head, V vocabulary, N all positions of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention, silu

from .._exact.choose import Arithmetic
from ..errors import ProgramError
from ..memory import Memory
from ..ordinary.sequential import Sequential
from ..sequence import ReversibleSequence
from .blocks import Residual
from .loss import language_loss

__all__ = ["Attention", "GatedMLP", "Language", "OneStream"]

BASE = 10_000.0  # of the rotary wavelengths


class Attention(nn.Module):
    """Causal self-attention with a norm in front; positions come as the cosines and sines of their angles."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BLD: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
        """What attention adds to a stream."""
        batch, length, width = x_BLD.shape
        q_BHLK, k_BHLK, v_BHLK = self.qkv(self.norm(x_BLD)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q_BHLK, k_BHLK = (rotated(t, cos_LK, sin_LK) for t in (q_BHLK, k_BHLK))
        mixed_BHLK = scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True)
        out_BLD = self.out(mixed_BHLK.transpose(1, 2).reshape(batch, length, width))
        return dropout(out_BLD, self.dropout, self.training)


class GatedMLP(nn.Module):
    """SwiGLU with a norm in front. The hidden width is 8/3 of the width, so that it has the parameters of an ordinary MLP."""

    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        hidden = -(-8 * width // 3 // 16) * 16
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """What the MLP adds to a stream."""
        gate, value = self.up(self.norm(x_BLD)).chunk(2, dim=-1)
        return dropout(self.out(silu(gate) * value), self.dropout, self.training)


class OneStream(nn.Module):
    """The same functions in an ordinary residual net, x += f(x), x += g(x): the layers of an `rg.Sequential`."""

    def __init__(self, blocks: Iterable[tuple[nn.Module, nn.Module]], memory: Memory = "store", bits: int | None = None):
        super().__init__()
        if bits is None and memory == "reverse":
            raise ProgramError(
                "a net of one stream cannot be reversed. Give it bits, 4 say, for a little noise in training that makes it "
                "reversible, or memory 'store', 'checkpoint' or 'offload'"
            )
        self.blocks = Sequential([Residual(f, g) for f, g in blocks], bits=bits, memory=memory)

    @property
    def memory(self) -> Memory:
        return self.blocks.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self.blocks.memory = memory

    def forward(self, x: Tensor, **side: Tensor) -> Tensor:
        """`x` after all blocks; each f gets the side inputs."""
        return self.blocks(x, **side)


class Language(nn.Module):
    """Predicts the next byte. Returns the mean loss in nats where the next bytes are given, logits where they are not.

    `streams` are those of `rg.ReversibleSequence`; 1 is the ordinary residual net of the same functions, which `bits` makes
    reversible (`rg.Sequential`).

    `dropout` is the share of what attention and MLPs add to the streams that is dropped in training mode; in `eval()` none is.

    >>> model = Language(depth=3, width=32, heads=2, context=16)
    >>> tokens = torch.randint(256, (2, 17))
    >>> model(tokens[:, :-1], tokens[:, 1:]).backward()
    >>> model(tokens[:, :16]).shape
    torch.Size([2, 16, 256])
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        depth: int,
        width: int,
        heads: int,
        context: int,
        *,
        vocabulary: int = 256,
        memory: Memory = "reverse",
        arithmetic: Arithmetic = "auto",
        streams: int = 2,
        bits: int | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        for name, value in {"depth": depth, "width": width, "heads": heads, "context": context, "streams": streams}.items():
            if value < 1:
                raise ProgramError(f"{name} must be 1 or more, got {value}")
        if width % (2 * heads):
            raise ProgramError(f"width {width} is not a multiple of twice the heads, {heads}: each head needs an even width")
        if bits is not None and streams != 1:
            raise ProgramError(
                f"bits are for a net of one stream, and {streams} streams are reversible without. Give one of the two"
            )
        if not 0 <= dropout < 1:
            raise ProgramError(f"dropout must be 0 or more and less than 1, got {dropout}")
        self.context = context
        self.embed = nn.Embedding(vocabulary, width)
        blocks = [(Attention(width, heads, dropout), GatedMLP(width, dropout)) for _ in range(depth)]
        self.net = (
            OneStream(blocks, memory, bits)
            if streams == 1
            else ReversibleSequence(blocks, streams=streams, memory=memory, arithmetic=arithmetic)
        )
        self.norm = nn.RMSNorm(width)
        cos, sin = angles(context, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.start(depth)

    def start(self, depth: int) -> None:
        """Small normal weights; what is added to the streams is smaller, the more is added."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * depth) ** 0.5 if name.endswith("out.weight") else 0.02)

    def forward(self, tokens_BL: Tensor, next_BL: Tensor | None = None) -> Tensor:
        """The mean loss in nats, or logits of every next byte where `next_BL` is not given."""
        length = tokens_BL.shape[1]
        if length > self.context:
            raise ProgramError(f"{length} bytes are longer than the context, {self.context}")
        side = {"cos_LK": self.cos[:length], "sin_LK": self.sin[:length]}
        x_BLD = self.norm(self.net(self.embed(tokens_BL), **side))
        if next_BL is None:
            return nn.functional.linear(x_BLD, self.embed.weight)
        return language_loss(x_BLD.flatten(0, 1), self.embed.weight, next_BL.flatten())

    @torch.no_grad()
    def extend(self, prompt: bytes, count: int, temperature: float = 0.8, generator: torch.Generator | None = None) -> bytes:
        """`count` bytes that follow the prompt, drawn one by one; at temperature 0 the likeliest."""
        if not prompt:
            raise ProgramError("an empty prompt: give it one byte or more")
        tokens, device = list(prompt), self.embed.weight.device
        for _ in range(count):
            logits_V = self(torch.tensor([tokens[-self.context :]], device=device))[0, -1].float().cpu()
            if temperature == 0:
                tokens.append(int(logits_V.argmax()))
            else:
                tokens.append(int(torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator)))
        return bytes(tokens[len(prompt) :])


def angles(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles by which each pair of a head's channels is turned at each position."""
    turns_K = BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles_LK = torch.outer(torch.arange(length, dtype=torch.float64), turns_K)
    return angles_LK.cos().float(), angles_LK.sin().float()


def rotated(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    a, b = x_BHLK.float().chunk(2, dim=-1)
    return torch.cat((a * cos_LK - b * sin_LK, b * cos_LK + a * sin_LK), dim=-1).to(x_BHLK.dtype)
