"""Hugging Face's own activation checkpointing, run by `rg.Checkpoint`: `checkpoint_(model)`."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, TypeVar

from torch import nn

from .._engine.verify import Verify
from ..errors import ProgramError
from ..memory import Memory
from ..ordinary.checkpoint import Checkpoint

__all__ = ["checkpoint_"]

Model = TypeVar("Model", bound=nn.Module)
_SET = "_set_gradient_checkpointing"  # all of Hugging Face's ways to switch it on and off go through this method
_FUNCTION = "_gradient_checkpointing_func"  # which a layer calls


def checkpoint_(model: Model, memory: Memory | None = "offload", *, verify: Verify = "error") -> Model:
    """Have a model of Hugging Face checkpoint its layers with `rg.Checkpoint(memory)`, in place, and return the model.

    It works for every architecture that supports Hugging Face's activation checkpointing, and leaves weights, config and
    outputs as they are. What a layer computes is not kept for backward, which runs the layer again. `memory` says what happens
    to the inputs of the layers: "offload" (or `rg.Offload(…)`) moves them to host memory, "checkpoint" keeps them on the device.

    Call it before or after `peft`, `accelerate` or a `Trainer` have the model. If these switch checkpointing on again, or with
    other arguments (`every_n_layers`), it stays with this function. `checkpoint_(model, None)` takes it out and switches
    checkpointing off.
    """
    models = [module for module in model.modules() if hasattr(type(module), _SET)]
    if not models:
        raise ProgramError(
            f"{type(model).__name__} is no model of Hugging Face, nor has one in it. Use rg.Sequential for layers of your own, or "
            "give rg.Checkpoint(…) to code that takes a checkpoint function"
        )
    inside = {part for one in models for part in one.modules() if part is not one}
    outer = [one for one in models if one not in inside]
    for one in outer:
        if (
            not getattr(one, "supports_gradient_checkpointing", False)
            or "value" in inspect.signature(getattr(type(one), _SET)).parameters
        ):
            raise ProgramError(
                f"{type(one).__name__} does not support Hugging Face's activation checkpointing. Wrap what it calls in "
                "rg.Checkpoint(…) yourself"
            )
    if memory is None:
        for one in models:
            vars(one).pop(_SET, None)
        for one in outer:
            getattr(one, _SET)(enable=False)
        return model
    Checkpoint(memory, verify=verify)  # says what is wrong before anything is changed
    for one in models:
        setattr(one, _SET, partial(_set, one, memory, verify))
    for one in outer:
        getattr(one, _SET)(enable=True)
    return model


def _set(
    model: Any, memory: Memory, verify: Verify, enable: bool = True, gradient_checkpointing_func: Any = None, **how: Any
) -> None:
    """In the place of the model's own method: whatever function it is given, layers call ours."""
    given = Checkpoint(memory, verify=verify)
    getattr(type(model), _SET)(model, enable=enable, gradient_checkpointing_func=given, **how)
    for name, module in model.named_modules():
        if vars(module).get(_FUNCTION) is given:
            own = Checkpoint(memory, verify=verify)
            own.name = name or type(module).__name__  # errors say which layer
            setattr(module, _FUNCTION, own)
