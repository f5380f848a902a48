"""Models of Hugging Face transformers, in place: as reversible nets (`reversible_`), or checkpointed (`checkpoint_`)."""

from __future__ import annotations

import copy
import logging
from typing import Any, TypeVar

import torch
from torch import nn

from .._engine.verify import Verify
from .._exact.choose import Arithmetic
from ..errors import ProgramError
from ..memory import Memory
from ._checkpointing import checkpoint_
from ._exchange import Exchanged, become
from ._families import stack_in
from ._noise import noisy_
from ._sides import flags_off
from ._stack import Stack, StackCalls

__all__ = ["checkpoint_", "reversible_"]

_log = logging.getLogger("retrograde")
Model = TypeVar("Model", bound=nn.Module)


def reversible_(
    model: Model,
    bits: int | None = None,
    *,
    memory: Memory = "reverse",
    arithmetic: Arithmetic = "auto",
    verify: Verify = "error",
) -> Model:
    """Make the layers of a model of Hugging Face reversible, in place, and return the model.

    **With `bits`, for a pretrained model**: its own layers, as they are, trained with a little noise that makes them reversible
    (see `rg.Sequential`). `bits=4` is a good choice. So many bits are kept for each element and layer, and the more, the less
    noise. In eval it is the plain model to the bit. Parameters, config and what `save_pretrained` writes stay those of the
    plain model. It takes every architecture that Hugging Face can checkpoint, if its layers hand on hidden states and nothing
    else. Call it before or after `peft`. `model.reversible` has `bits`, `memory` and `verify`, which may be set between forward
    passes.

    **Without, for training from scratch**: a two-stream net that keeps nothing at all, x1 += attention(norm(x2)),
    x2 += mlp(norm(x1)) for each layer, both streams from the embeddings, and their mean to the final norm. Llama, Mistral, Qwen 2
    and 3, GPT-2, ViT; and BERT, which is post-norm: there LayerNorm moves from the sum to what is added, x1 +=
    LayerNorm(dense(attention(x2))), and nothing norms the streams themselves. **This is another function than the pretrained
    one.** Parameters keep their names and shapes, so `save_pretrained` and `from_pretrained` work (call `reversible_` after
    `from_pretrained`), but pretrained weights give other outputs and must be trained again. `model.reversible` has `memory`,
    `arithmetic` and `verify`.

    The KV cache works without grad, in `generate()`. While gradients are recorded in training, no cache is made.
    """
    if any(isinstance(module, Exchanged) for module in model.modules()):
        raise ProgramError(f"this {type(model).__name__} is reversible already; set memory, or bits, at model.reversible")
    if getattr(model, "is_gradient_checkpointing", False):
        raise ProgramError(f"gradient checkpointing is on: call {type(model).__name__}.gradient_checkpointing_disable() first")
    if bits is not None:
        if any(getattr(getattr(module, "config", None), "retrograde", None) for module in model.modules()):
            raise ProgramError("these weights were trained in two streams (config.retrograde): call reversible_ without bits")
        if arithmetic == "float":
            raise ProgramError("reversible noise needs exact arithmetic: leave arithmetic out where you give bits")
        noisy_(model, bits, memory, verify)
        return model
    owner, layers = stack_in(model)
    _own_config(model)
    config: Any = owner.config
    marked = getattr(config, "retrograde", None)  # weights that were trained in two streams
    if marked and marked.get("beta", 1) != 1:
        raise ProgramError(
            f"these weights were trained with beta={marked['beta']}, a mixture of one stream and two that only earlier versions "
            "have. Use one of them"
        )
    config.retrograde = {"streams": 2}  # goes into config.json, for whoever loads the weights
    stack = Stack(owner, layers, memory, arithmetic)
    stack.verify = verify
    become(owner, ReversibleModel)
    for layer in layers:
        become(layer, ReversibleLayer)
    for module in {owner, model}:
        module.reversible = stack  # type: ignore[assignment]
    if not marked:
        pretrained = getattr(config, "name_or_path", "")
        _log.log(
            logging.WARNING if pretrained else logging.INFO,
            "the two-stream net is another function than %s: its weights must be trained again (or see bits=4)",
            pretrained or f"the one-stream {type(model).__name__}",
        )
    return model


def _own_config(model: nn.Module) -> None:
    """Give the model a config of its own, as the streams are noted in it: other models may be made of the one it was given."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        if hasattr(config, "to_dict"):
            module.config = copy.deepcopy(config, copies)


class ReversibleModel(Exchanged):
    """The module that calls the layers."""

    reversible: Stack
    forward_of: Any  # the forward of its own class

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = self.config  # type: ignore[attr-defined]
        flags_off(self, kwargs, ("output_hidden_states", "output_attentions"))
        if torch.is_grad_enabled():
            cache = kwargs.get("past_key_values")
            if cache is not None and cache.get_seq_length():
                raise ProgramError(
                    "a filled KV cache was given while gradients are recorded, where a reversible model uses none. Use "
                    "torch.no_grad(), or give the whole sequence"
                )
            if "past_key_values" in kwargs:
                kwargs["past_key_values"] = None
            if hasattr(config, "use_cache"):
                kwargs["use_cache"] = False
        calls = StackCalls(self.reversible)
        out = type(self).forward_of(self, *args, retrograde_calls=calls, **kwargs)
        calls.end()
        return out

    def extra_repr(self) -> str:
        return f"reversible: {self.reversible}"


class ReversibleLayer(Exchanged):
    """A layer that notes how it is called; or, given one of its own parts, runs that within its hooks."""

    def __call__(self, *args: Any, retrograde_calls: StackCalls | None = None, **kwargs: Any) -> Any:
        if retrograde_calls is not None:
            return retrograde_calls.take(self, args, kwargs)  # type: ignore[arg-type]
        if args and isinstance(args[0], nn.Module):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        raise ProgramError(f"a reversible {type(self).__name__} is a part of its model, and cannot be called alone")

    def _forward(self, part: nn.Module, x: Any, **side: Any) -> Any:
        return part(x, **side)
