"""The layer stack of a model of Hugging Face as one reversible program.

The model's own forward goes on calling its layers one after the other. In that loop a layer only notes what it was given (its
mask, its position embeddings, the cache) and hands the hidden states on; the last one runs the program of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .._engine.run import run
from .._exact.choose import Arithmetic
from ..errors import ProgramError
from ..memory import Memory
from ..modules import Chosen
from ..update import Program, Update
from ._families import family_of
from ._sides import Calls, argument_names, takes_of


class Through(nn.Module):
    """A part, called through a layer that has hooks: so `fully_shard(layer)` gathers its parameters."""

    def __init__(self, layer: nn.Module, part: nn.Module):
        super().__init__()
        self.layer, self.part = layer, part

    def forward(self, x: Tensor, **side: Any) -> Tensor:
        return self.layer(self.part, x, **side)


class Stack(Chosen):
    """The reversible net inside a model. `memory`, `arithmetic` and `verify` may be set between forward passes."""

    def __init__(self, owner: nn.Module, layers: nn.ModuleList, memory: Memory, arithmetic: Arithmetic):
        self.owner, self.layers = owner, list(layers)
        self.families: list[Any] = [family_of(layer) for layer in layers]
        self.names = argument_names(layers)
        self.memory, self.arithmetic = memory, arithmetic
        self._made_of: list[Any] = []
        self._parts: list[Any] = []
        self._programs: dict[Any, Program] = {}

    def __repr__(self) -> str:
        return f"{len(self.layers)} layers, memory={self.memory!r}, arithmetic={self.arithmetic!r}"

    def parts(self) -> list[tuple[Any, Any]]:
        """f and g of each layer, rebuilt when a child of a layer was replaced."""
        made_of = [
            child
            for layer, family in zip(self.layers, self.families, strict=True)
            for child in (*(getattr(layer, name) for name in family.names), _has_hooks(layer))
        ]
        if made_of != self._made_of:
            self._made_of, self._programs = made_of, {}
            self._parts = [self._part(layer, family) for layer, family in zip(self.layers, self.families, strict=True)]
        return self._parts

    def _part(self, layer: nn.Module, family: Any) -> tuple[nn.Module, nn.Module]:
        f, g = family.parts(layer)
        return (Through(layer, f), Through(layer, g)) if _has_hooks(layer) else (f, g)

    def program(self, takes: tuple[Mapping[str, str], ...]) -> Program:
        parts, key = self.parts(), tuple(tuple(take.items()) for take in takes)
        if key not in self._programs:
            if len(self._programs) >= 16:
                self._programs.clear()
            self._programs[key] = Program(
                update
                for (f, g), take in zip(parts, takes, strict=True)
                for update in (Update("x1", f, "x2", take), Update("x2", g, "x1"))
            )
        return self._programs[key]

    def run(self, x: Tensor, sides: list[dict[str, Any]]) -> Tensor:
        """The hidden states after all layers, each with its own side inputs."""
        side, takes = takes_of(sides)
        streams = {"x1": x, "x2": x}
        program = self.program(takes)
        out = run(program, streams, side, memory=self.memory, arithmetic=self.arithmetic, verify=self.verify)
        return (out["x1"] + out["x2"]) / 2


class StackCalls(Calls):
    def __init__(self, stack: Stack):
        super().__init__(stack.layers, stack.names)
        self.stack = stack

    def take(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        hidden, given = self.note(layer, args, kwargs)
        if given.pop("encoder_hidden_states", None) is not None:
            raise ProgramError("encoder_hidden_states: cross-attention is not supported in a reversible stack")
        given.pop("encoder_attention_mask", None)
        return self.stack.run(hidden, self.sides) if len(self.sides) == len(self.layers) else hidden


def _has_hooks(layer: nn.Module) -> bool:
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return any(hooks) or "forward" in layer.__dict__
