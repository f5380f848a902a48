"""What the layers of a model were called with in one forward pass, and how it reaches the program of all of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ProgramError

NOT_KEPT = (
    "is not there in a reversible model: the layers run as one, and what is between them is not kept. Leave it off, or read a "
    "module with a forward hook"
)


class Opaque:
    """A KV cache on its way to a layer: not a tree of tensors, as the layer changes it."""

    def __init__(self, value: Any):
        self.value = value


class Calls:
    """One forward pass of the model: each layer notes what it was given."""

    def __init__(self, layers: list[nn.Module], names: list[list[str]]):
        self.layers, self.names = layers, names
        self.sides: list[dict[str, Any]] = []
        self.hidden: Tensor | None = None

    def note(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The hidden states, and the other arguments by name."""
        index, layers = len(self.sides), self.layers
        if index >= len(layers) or layer is not layers[index]:
            raise ProgramError(f"the model calls its layers in another order than they stand in, at {index}. Was it changed?")
        names = self.names[index]
        given = dict(zip(names, args, strict=False)) | kwargs
        hidden = given.pop(names[0])
        if self.hidden is None:
            self.hidden = hidden
        elif self.hidden is not hidden:
            raise ProgramError(f"the model changes the hidden states before layer {index}, between the layers: not supported")
        for name, value in given.items():
            if _is_cache(value):
                if torch.is_grad_enabled():
                    raise ProgramError(
                        "a KV cache was given while gradients are recorded, where a reversible model uses none. Use "
                        "torch.no_grad(), or leave it out"
                    )
                given[name] = Opaque(value)
        self.sides.append(given)
        return hidden, given

    def end(self) -> None:
        if len(self.sides) != len(self.layers):
            raise ProgramError(
                f"the model called {len(self.sides)} of its {len(self.layers)} reversible layers. Take the "
                "others out before reversible_"
            )


def argument_names(layers: Iterable[Any]) -> list[list[str]]:
    return [list(inspect.signature(type(layer).forward).parameters)[1:] for layer in layers]


def _is_cache(value: Any) -> bool:
    """An object of transformers that is no tree of tensors."""
    if value is None or isinstance(value, (Tensor, Mapping, tuple, list, str, bool, int, float)):
        return False
    return type(value).__module__.startswith("transformers.")


def takes_of(sides: list[dict[str, Any]]) -> tuple[dict[str, Any], tuple[dict[str, str], ...]]:
    """The side inputs of the program, and what each layer takes of them. What layers share is one side input."""
    side: dict[str, Any] = {}
    known: dict[tuple[str, int], str] = {}
    takes = []
    for index, given in enumerate(sides):
        take = {}
        for keyword, value in given.items():
            shared = value.value if isinstance(value, Opaque) else value
            name = known.setdefault((keyword, id(shared)), f"{keyword} of layer {index}" if keyword in side else keyword)
            side[name] = value
            take[keyword] = name
        takes.append(take)
    return side, tuple(takes)


def flags_off(model: Any, kwargs: Mapping[str, Any], flags: Iterable[str]) -> None:
    for name in flags:
        if kwargs.get(name, getattr(getattr(model, "config", None), name, False)):
            raise ProgramError(f"{name} {NOT_KEPT}")
