"""How a layer of each architecture of Hugging Face splits into f (attention) and g (MLP), made of the layer's own modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import ProgramError
from ._sides import Opaque


class Attention(nn.Module):
    """Normed attention."""

    def __init__(self, norm: nn.Module, attention: nn.Module, dropout: nn.Module | None = None):
        super().__init__()
        self.norm, self.attention, self.dropout = norm, attention, dropout

    def forward(self, x: Tensor, past_key_values: Opaque | None = None, **side: Any) -> Tensor:
        if past_key_values is not None:
            side["past_key_values"] = past_key_values.value
        out = self.attention(self.norm(x), **side)[0]
        return out if self.dropout is None else self.dropout(out)


class Mlp(nn.Module):
    """Normed MLP."""

    def __init__(self, norm: nn.Module, mlp: nn.Module, dropout: nn.Module | None = None):
        super().__init__()
        self.norm, self.mlp, self.dropout = norm, mlp, dropout

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(self.norm(x))
        return out if self.dropout is None else self.dropout(out)


class AttentionThenNorm(nn.Module):
    """LayerNorm(dense(attention)), of a post-norm layer: the norm is on what is added, no longer on the sum."""

    def __init__(self, attention: Any):
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, past_key_values: Opaque | None = None, **side: Any) -> Tensor:
        if past_key_values is not None:
            side["past_key_values"] = past_key_values.value
        out: Any = self.attention.output
        return out.LayerNorm(out.dropout(out.dense(self.attention.self(x, **side)[0])))


class MlpThenNorm(nn.Module):
    """LayerNorm(dense(intermediate)), the same."""

    def __init__(self, intermediate: Any, output: Any):
        super().__init__()
        self.intermediate, self.output = intermediate, output

    def forward(self, x: Tensor) -> Tensor:
        out: Any = self.output
        return out.LayerNorm(out.dropout(out.dense(self.intermediate(x))))


@dataclass(frozen=True)
class Family:
    """`parts` makes f and g of a layer; `names` are its children that they are made of."""

    parts: Callable[[Any], tuple[nn.Module, nn.Module]]
    names: tuple[str, ...]


def _llama(layer: Any) -> tuple[nn.Module, nn.Module]:
    return Attention(layer.input_layernorm, layer.self_attn), Mlp(layer.post_attention_layernorm, layer.mlp)


def _gpt2(layer: Any) -> tuple[nn.Module, nn.Module]:
    return Attention(layer.ln_1, layer.attn), Mlp(layer.ln_2, layer.mlp)


def _vit(layer: Any) -> tuple[nn.Module, nn.Module]:
    f = Attention(layer.layernorm_before, layer.attention, layer.dropout)
    return f, Mlp(layer.layernorm_after, layer.mlp, layer.dropout)


def _bert(layer: Any) -> tuple[nn.Module, nn.Module]:
    return AttentionThenNorm(layer.attention), MlpThenNorm(layer.intermediate, layer.output)


_LLAMA = Family(_llama, ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"))

FAMILIES = {
    "LlamaDecoderLayer": _LLAMA,
    "MistralDecoderLayer": _LLAMA,
    "Qwen2DecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _LLAMA,
    "GPT2Block": Family(_gpt2, ("ln_1", "attn", "ln_2", "mlp")),
    "ViTLayer": Family(_vit, ("layernorm_before", "attention", "layernorm_after", "mlp", "dropout")),
    "BertLayer": Family(_bert, ("attention", "intermediate", "output")),
}


def family_of(layer: nn.Module) -> Family | None:
    kind = type(layer)
    return FAMILIES.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


def stack_in(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The layers that are known, and the module that calls them one after the other."""
    found = [
        (owner, child)
        for owner in model.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList) and len(child) and all(map(family_of, child))
    ]
    if not found:
        raise ProgramError(
            f"{type(model).__name__} has no layers of a known architecture; known: {', '.join(sorted(FAMILIES))}. For other "
            "layers write f and g and give them to rg.ReversibleSequence"
        )
    if len(found) > 1:
        names = ", ".join(type(owner).__name__ for owner, _ in found)
        raise ProgramError(f"{type(model).__name__} has {len(found)} stacks of layers ({names}): give one part of it at a time")
    owner, layers = found[0]
    for layer in layers:
        if hasattr(layer, "crossattention"):
            raise ProgramError(f"{type(layer).__name__} has cross-attention, which is not supported here")
    if any("forward" in module.__dict__ for module in (owner, *layers)):
        raise ProgramError(
            f"the forward of {type(owner).__name__} or of a layer was replaced on the instance, as hooks of accelerate do. Call "
            "reversible_ before that"
        )
    return owner, layers
