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
from ._stack import Calls, Stack
from .retrofit import Retrofit

__all__ = ["Retrofit", "checkpoint_", "reversible_"]

_log = logging.getLogger("retrograde")
Model = TypeVar("Model", bound=nn.Module)


def reversible_(
    model: Model,
    bits: int | None = None,
    *,
    memory: Memory = "reverse",
    arithmetic: Arithmetic = "auto",
    verify: Verify = "error",
    beta: float | None = None,
) -> Model:
    """Re-wire the layers of a model of Hugging Face into a two-stream reversible net, in place, and return the model.

    x1 += attention(norm(x2)), x2 += mlp(norm(x1)) for each layer, both streams from the embeddings, and their mean to the final
    norm. Llama, Mistral, Qwen 2 and 3, GPT-2, ViT; and BERT, which is post-norm: there LayerNorm moves from the sum to what is
    added, x1 += LayerNorm(dense(attention(x2))), and nothing norms the streams themselves.

    **This is another function than the pretrained one.** Parameters keep their names and shapes, so `save_pretrained` and
    `from_pretrained` work (call `reversible_` after `from_pretrained`), but pretrained weights give other outputs and must be
    trained again. `beta=0` with a `Retrofit` begins as the pretrained function instead, and moves to this one.

    `model.reversible` has `memory`, `arithmetic` and `beta`, which may be set between forward passes; lowering β sets the model
    to "checkpoint" until a `Retrofit` has measured reversal there. The KV cache works without grad, in `generate()`, and is
    dropped while gradients are recorded.
    """
    if any(isinstance(module, Exchanged) for module in model.modules()):
        raise ProgramError(f"this {type(model).__name__} is reversible already; set memory and arithmetic at model.reversible")
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
    start: float = beta if beta is not None else marked["beta"] if marked else 1.0
    stack = Stack(owner, layers, memory, arithmetic, start)
    become(owner, ReversibleModel)
    for layer in layers:
        become(layer, ReversibleLayer)
    for module in {owner, model}:
        module.reversible = stack  # type: ignore[assignment]
    if not marked and start == 1:
        pretrained = getattr(config, "name_or_path", "")
        _log.log(
            logging.WARNING if pretrained else logging.INFO,
            "the two-stream net is another function than %s: its weights must be trained again (or see Retrofit)",
            pretrained or f"the one-stream {type(model).__name__}",
        )
    return model


def _own_config(model: nn.Module) -> None:
    """Give the model a config of its own, as beta is noted in it: other models may be made of the one that it was given."""
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
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name, getattr(config, name, False)):
                raise ProgramError(
                    f"{name} is not there in a reversible model: the layers run as one, and what is between them is not kept. "
                    "Leave it off, or read a module with a forward hook"
                )
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
        calls = Calls(self.reversible)
        out = type(self).forward_of(self, *args, retrograde_calls=calls, **kwargs)
        if len(calls.sides) != len(self.reversible.layers):
            raise ProgramError(
                f"the model called {len(calls.sides)} of its {len(self.reversible.layers)} reversible layers. Take the "
                "others out before reversible_"
            )
        return out

    def extra_repr(self) -> str:
        return f"reversible: {self.reversible}"


class ReversibleLayer(Exchanged):
    """A layer that notes how it is called; or, given one of its own parts, runs that within its hooks."""

    def __call__(self, *args: Any, retrograde_calls: Calls | None = None, **kwargs: Any) -> Any:
        if retrograde_calls is not None:
            return retrograde_calls.take(self, args, kwargs)  # type: ignore[arg-type]
        if args and isinstance(args[0], nn.Module):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        raise ProgramError(f"a reversible {type(self).__name__} is a part of its model, and cannot be called alone")

    def _forward(self, part: nn.Module, x: Any, **side: Any) -> Any:
        return part(x, **side)
