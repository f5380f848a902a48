"""Hugging Face's own activation checkpointing, run by `rg.Checkpoint`: `checkpoint_(model)`."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any, TypeVar

from torch import nn

from .._engine.verify import Verify
from ..errors import ProgramError
from ..memory import Memory
from ..ordinary.checkpoint import Checkpoint, refuse

__all__ = ["checkpoint_"]

Model = TypeVar("Model", bound=nn.Module)
_SET = "_set_gradient_checkpointing"  # whatever switches checkpointing on or off calls this method of the model …
_FUNCTION = "_gradient_checkpointing_func"  # … which gives this to all layers


def checkpoint_(model: Model, memory: Memory | None = "offload", *, verify: Verify = "error") -> Model:
    """Checkpoint the layers of a model of Hugging Face with `rg.Checkpoint(memory)`, in place, and return the model.

    It plugs into Hugging Face's own activation checkpointing, so it works for every architecture that supports that. Weights,
    config and outputs stay as they are. What a layer computes is not kept for backward, which runs the layer again. `memory` says
    where the inputs of layers wait: "offload" (or `rg.Offload(…)`) moves them to host memory, "checkpoint" keeps them on the
    device.

    Call it before or after `peft`, Accelerate or a `Trainer` get the model. Where these switch checkpointing on as well, layers
    still run with this function, and their `use_reentrant` and `offload` have no effect; `every_n_layers` has.
    `checkpoint_(model, None)` takes the function out and switches checkpointing off.
    """
    models = [module for module in model.modules() if hasattr(type(module), _SET)]
    inside = {part for one in models for part in one.modules() if part is not one}
    outer = [one for one in models if one not in inside]
    if not models:
        raise ProgramError(
            f"{type(model).__name__} is no model of Hugging Face, and has none in it. For layers of your own use rg.Sequential, "
            "or give rg.Checkpoint(…) to code that takes a checkpoint function"
        )
    if memory is None:
        for one in models:
            vars(one).pop(_SET, None)
        for one in outer:
            getattr(one, _SET)(enable=False)
        return model
    Checkpoint(memory, verify=verify)  # an error comes before anything is changed
    for one in outer:
        _refuse(one)
    for one in models:
        setattr(one, _SET, partial(_set, one, memory, verify))
    for one in outer:
        getattr(one, _SET)(enable=True)
    return model


def _refuse(model: Any) -> None:
    layer = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", nn.Module)
    if (
        not getattr(model, "supports_gradient_checkpointing", False)
        or "value" in inspect.signature(getattr(type(model), _SET)).parameters  # the old way, without a function
        or not any(isinstance(module, layer) for module in model.modules())
    ):
        raise ProgramError(
            f"no layer of {type(model).__name__} runs under Hugging Face's activation checkpointing, so there is nothing to plug "
            "into. Call its layers with rg.Checkpoint(…) yourself"
        )


def _set(
    model: Any, memory: Memory, verify: Verify, enable: bool = True, gradient_checkpointing_func: Any = None, **how: Any
) -> None:
    """The model's own method, with our function in the place of any other."""
    refuse(**getattr(gradient_checkpointing_func, "keywords", {}))
    ours = Checkpoint(memory, verify=verify)
    getattr(type(model), _SET)(model, enable=enable, gradient_checkpointing_func=ours, **how)
    for name, module in model.named_modules():
        if vars(module).get(_FUNCTION) is ours:
            own = Checkpoint(memory, verify=verify)
            own.name = name or type(module).__name__  # errors say which layer it was
            setattr(module, _FUNCTION, own)
