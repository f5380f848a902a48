"""from_transformer: the layers of `torch.nn.TransformerEncoder` and `TransformerDecoder` as reversible blocks, or as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

from torch import Tensor, nn
from torch.nn import functional as F

from ._base.function_modules import has_hooks
from ._exact.choose import Arithmetic
from .errors import ProgramError
from .memory import Memory
from .ordinary.sequential import Sequential
from .sequence import ReversibleSequence

__all__ = ["AsTheyAre", "FromTransformer", "from_transformer"]

Layer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
Layers = Layer | nn.TransformerEncoder | nn.TransformerDecoder | Iterable[Layer]


@overload
def from_transformer(
    layers: Layers, *, bits: None = None, memory: Memory = "reverse", arithmetic: Arithmetic = "auto"
) -> FromTransformer: ...


@overload
def from_transformer(layers: Layers, *, bits: int, memory: Memory = "reverse", arithmetic: Arithmetic = "auto") -> AsTheyAre: ...


def from_transformer(
    layers: Layers, *, bits: int | None = None, memory: Memory = "reverse", arithmetic: Arithmetic = "auto"
) -> FromTransformer | AsTheyAre:
    """A reversible net of pre-norm transformer layers, made of their own modules: attention is f, the feedforward part is g.

    - `layers`: a `TransformerEncoder`, a `TransformerDecoder`, one of their layers or several of them. What these take beside the
      sequence is a side input under the same name: `mask` (of a layer: `src_mask`), `src_key_padding_mask`, `is_causal`; of a
      decoder `memory`, `tgt_mask`, `memory_mask` and so on. In a decoder layer f is self-attention followed by attention to
      `memory`. A final norm is applied to the mean of the two streams.
    - `bits`: the layers as they are instead, pre-norm or post-norm, in an `rg.Sequential`: reversible by a little noise in
      training, and in `eval()` the function of the stack to the bit. State-dict keys are those of the stack. 4 is a good start.
    - `memory`, `arithmetic`: as in `rg.ReversibleSequence`. With `bits`, arithmetic is always exact.

    Parameters are shared with the given layers, but the two-stream net is another function than theirs: x1 += f(x2) in the place
    of x += f(x). Post-norm layers raise an error there.

    >>> import torch, retrograde as rg
    >>> layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    >>> net = rg.from_transformer(torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    >>> net(torch.randn(2, 5, 16), src_key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)).shape
    torch.Size([2, 5, 16])
    """
    norm = None
    if isinstance(layers, (nn.TransformerEncoder, nn.TransformerDecoder)):
        _refuse_own("forward", layers, (nn.TransformerEncoder, nn.TransformerDecoder))
        layers, norm = layers.layers, layers.norm  # type: ignore[assignment]
    elif isinstance(layers, Layer):
        layers = [layers]
    elif not isinstance(layers, Iterable):
        raise _not_a_layer(layers)
    if bits is not None:
        return AsTheyAre(list(layers), norm, bits=bits, memory=memory)  # type: ignore[arg-type]
    blocks = [_block(index, layer) for index, layer in enumerate(layers)]  # type: ignore[arg-type]
    return FromTransformer(blocks, norm, memory=memory, arithmetic=arithmetic)


class FromTransformer(ReversibleSequence):
    """A `ReversibleSequence` with the final norm of the stack that it was made of."""

    def __init__(self, blocks: Iterable[Any], norm: nn.Module | None, **options: Any):
        super().__init__(blocks, **options)
        self.norm = norm

    def forward(self, x: Any, /, **side: Any) -> Any:
        """The output for the sequences `x`. Side inputs are what the layers take beside them, under the same names."""
        out = super().forward(x, **side)
        return out if self.norm is None else self.norm(out)


class AsTheyAre(nn.Module):
    """The layers of a stack in an `rg.Sequential`, and its final norm, under the names that the stack has for them."""

    def __init__(self, layers: list[nn.Module], norm: nn.Module | None, **options: Any):
        super().__init__()
        for layer in layers:
            if not isinstance(layer, Layer):
                raise _not_a_layer(layer)
        self.layers, self.norm = Sequential(layers, **options), norm

    @property
    def memory(self) -> Memory:
        return self.layers.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self.layers.memory = memory

    def forward(self, x: Tensor, /, **side: Any) -> Tensor:
        """The output for the sequences `x`. Side inputs are what the layers take beside them, under the same names."""
        if "mask" in side:
            side["src_mask"] = _mask(side.pop("mask"), side.get("src_mask"))
        out = self.layers(x, **side)
        return out if self.norm is None else self.norm(out)


class SelfAttention(nn.Module):
    """norm1, self_attn and dropout1 of an encoder layer."""

    def __init__(self, layer: nn.TransformerEncoderLayer):
        super().__init__()
        self.norm, self.attention, self.dropout = layer.norm1, layer.self_attn, layer.dropout1

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = False,
    ) -> Tensor:
        return _attend(self, x, None, _mask(mask, src_mask), src_key_padding_mask, is_causal)


class Attention(nn.Module):
    """One of the two attentions of a decoder layer, with its norm and its dropout."""

    def __init__(self, norm: nn.Module, attention: nn.Module, dropout: nn.Module):
        super().__init__()
        self.norm, self.attention, self.dropout = norm, attention, dropout


class BothAttentions(nn.Module):
    """Self-attention, then attention to `memory`, of a decoder layer: what the two add to x together."""

    def __init__(self, layer: nn.TransformerDecoderLayer):
        super().__init__()
        self.own = Attention(layer.norm1, layer.self_attn, layer.dropout1)
        self.cross = Attention(layer.norm2, layer.multihead_attn, layer.dropout2)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        own = _attend(self.own, x, None, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        return own + _attend(self.cross, x + own, memory, memory_mask, memory_key_padding_mask, memory_is_causal)


class FeedForward(nn.Module):
    """The last norm and the feedforward part of a layer."""

    def __init__(self, layer: Layer):
        super().__init__()
        decoder = isinstance(layer, nn.TransformerDecoderLayer)
        self.norm, self.dropout_out = (layer.norm3, layer.dropout3) if decoder else (layer.norm2, layer.dropout2)
        self.linear1, self.dropout, self.linear2 = layer.linear1, layer.dropout, layer.linear2
        self.activation = layer.activation

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = self.activation(self.linear1(self.norm(x)))
        return self.dropout_out(self.linear2(self.dropout(inner)))


def _attend(part: Any, x: Tensor, memory: Tensor | None, mask: Any, padding: Any, is_causal: bool | None) -> Tensor:
    x = part.norm(x)
    keys = x if memory is None else memory
    masks = {"attn_mask": _additive(mask, x, "mask"), "key_padding_mask": _additive(padding, x, "key_padding_mask")}
    return part.dropout(part.attention(x, keys, keys, **masks, is_causal=bool(is_causal), need_weights=False)[0])


def _mask(mask: Tensor | None, src_mask: Tensor | None) -> Tensor | None:
    if mask is not None and src_mask is not None:
        raise ProgramError("mask and src_mask are two names of the same side input: give one of them")
    return src_mask if mask is None else mask


def _additive(mask: Tensor | None, x: Tensor, name: str) -> Tensor | None:
    """A mask of bools as numbers to add, as the layers of torch do it: two masks of different kinds are a warning there."""
    if mask is None:
        return None
    return F._canonical_mask(mask, name, other_type=None, other_name="", target_type=x.dtype, check_other=False)


def _block(index: int, layer: Any) -> tuple[nn.Module, nn.Module]:
    if not isinstance(layer, Layer):
        raise _not_a_layer(layer)
    for name in ("forward", "_sa_block", "_mha_block", "_ff_block"):
        _refuse_own(name, layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
    if not layer.norm_first:
        raise ProgramError(
            f"layer {index} is post-norm (norm_first=False): its norm acts on the sum of stream and branch, so the stream before "
            "it cannot be recovered by subtraction. Build it with norm_first=True (weights trained post-norm do not carry over), "
            "or take it as it is, with bits=4"
        )
    decoder = isinstance(layer, nn.TransformerDecoderLayer)
    return BothAttentions(layer) if decoder else SelfAttention(layer), FeedForward(layer)


def _refuse_own(name: str, given: nn.Module, kinds: tuple[type, ...]) -> None:
    kind = next(kind for kind in kinds if isinstance(given, kind))
    if has_hooks(given):
        raise ProgramError(
            f"a {type(given).__name__} has hooks, which would never run: its parts are called one by one. Put them on its parts, "
            "or on the net that from_transformer returns"
        )
    if name in given.__dict__ or getattr(type(given), name, None) is not getattr(kind, name, None):
        raise ProgramError(
            f"{type(given).__name__} has a {name} of its own, which the reversible blocks would not run. "
            "Write f and g of it yourself, and give them to rg.ReversibleSequence"
        )


def _not_a_layer(given: Any) -> ProgramError:
    return ProgramError(
        f"from_transformer takes torch's TransformerEncoder, TransformerDecoder or layers of them, got a {type(given).__name__}. "
        "For models of Hugging Face see retrograde.integrations.transformers; for other layers give pairs (f, g) to "
        "rg.ReversibleSequence"
    )
