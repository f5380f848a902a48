"""The layer stack of a model of Hugging Face as one reversible program.

The model's own forward goes on calling its layers one after the other. In that loop a layer only notes what it was given (its
mask, its position embeddings, the cache) and hands the hidden states on; the last one runs the program of all of them.

With a coefficient β below 1 each stream is a mixture, for the retrofit of a pretrained net:

    x1 = β x1 + (1 - β) x2 + f(x2);    x2 = β x2 + (1 - β) x1 + g(x1);    output: β/2 x1 + (1 - β/2) x2

At β = 0 these are the equations of the original net, at β = 1 those of the two-stream net. In between they can be undone, but
each undoing divides by β: the rounding of n layers comes back about β^-n times as large.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._base.pytrees import each
from .._engine.run import instead, run
from .._exact.choose import Arithmetic
from ..errors import ProgramError
from ..memory import Memory
from ..modules import Chosen
from ..rules import Add, Rule
from ..update import Program, Update
from ._families import Opaque, family_of


class Mix(Rule):
    """`target = beta * target + out`; it keeps no tensor. Not an addition, so exact arithmetic does not know it."""

    saves = False
    symbol = "*+="
    _tested = True

    def __init__(self, beta: float):
        self.beta = beta

    def apply(self, target: Any, out: Any) -> Any:
        return each(lambda t, o: (self.beta * t + o if self.beta else o).to(t.dtype), target, out)

    def undo(self, target: Any, out: Any) -> Any:
        return each(lambda t, o: ((t - o) / self.beta).to(t.dtype), target, out)

    def mismatch(self, target: Any, out: Any) -> str | None:
        return Add().mismatch(target, out)


class Mixed(nn.Module):
    """`share * x + part(x)`."""

    def __init__(self, part: nn.Module, share: float):
        super().__init__()
        self.part, self.share = part, share

    def forward(self, x: Tensor, **side: Any) -> Tensor:
        return (x if self.share == 1 else self.share * x) + self.part(x, **side)


class Through(nn.Module):
    """A part, called through a layer that has hooks: so `fully_shard(layer)` gathers its parameters."""

    def __init__(self, layer: nn.Module, part: nn.Module):
        super().__init__()
        self.layer, self.part = layer, part

    def forward(self, x: Tensor, **side: Any) -> Tensor:
        return self.layer(self.part, x, **side)


class Stack(Chosen):
    """The reversible net inside a model. `memory`, `arithmetic` and `beta` may be set between forward passes."""

    def __init__(self, owner: nn.Module, layers: nn.ModuleList, memory: Memory, arithmetic: Arithmetic, beta: float):
        self.owner, self.layers = owner, list(layers)
        families = [family_of(layer) for layer in layers]
        self.families: list[Any] = families
        self.arguments = [list(inspect.signature(type(layer).forward).parameters)[2:] for layer in layers]
        self.memory, self.arithmetic = memory, arithmetic
        self.reversing = beta == 1  # a retrofit switches it on
        self.due = False  # the next forward pass measures
        self.error: float | None = None
        self._beta = 1.0
        self.beta = beta
        self._made_of: list[Any] = []
        self._parts: list[Any] = []
        self._programs: dict[Any, Program] = {}

    def __repr__(self) -> str:
        return f"{len(self.layers)} layers, memory={self.memory!r}, arithmetic={self.arithmetic!r}, beta={self.beta:.4g}"

    @property
    def beta(self) -> float:
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        if not 0 <= beta <= 1:
            raise ProgramError(f"beta must be between 0 (the original net) and 1 (two streams), got {beta}")
        if beta < 1 and not all(family.pre_norm for family in self.families):
            kind = type(self.layers[0]).__name__
            raise ProgramError(
                f"{kind} is post-norm: its norm acts on the sum of stream and branch, so no mixture of two streams begins as the "
                "original net. Retrofit is for pre-norm nets; reversible_(model) without beta is for training from scratch"
            )
        if beta < self._beta:  # undoing divides by beta: what was right above is not below, until it is measured there
            self.reversing = False
        self._beta = float(beta)
        config: Any = self.owner.config
        config.retrograde = {"beta": self._beta}  # goes into config.json, for who loads the weights

    @property
    def used_memory(self) -> Any:
        """The policy of the next forward pass: checkpoint until a retrofit has switched reversal on."""
        return self.memory if self.reversing or self.memory == "store" else "checkpoint"

    def parts(self) -> list[tuple[Any, Any]]:
        """f and g of each layer, rebuilt when a child of a layer was replaced."""
        made_of = [
            child
            for layer, family in zip(self.layers, self.families, strict=True)
            for child in (*(getattr(layer, name) for name in family.names), _has_hooks(layer))
        ]
        made_of.append(self.beta)
        if made_of != self._made_of:
            self._made_of, self._programs = made_of, {}
            self._parts = [self._part(layer, family) for layer, family in zip(self.layers, self.families, strict=True)]
        return self._parts

    def _part(self, layer: nn.Module, family: Any) -> tuple[nn.Module, nn.Module]:
        f, g = family.parts(layer)
        if _has_hooks(layer):
            f, g = Through(layer, f), Through(layer, g)
        return (f, g) if self.beta == 1 else (Mixed(f, 1 - self.beta), Mixed(g, 1 - self.beta))

    def program(self, takes: tuple[Mapping[str, str], ...]) -> Program:
        parts, key = self.parts(), tuple(tuple(take.items()) for take in takes)
        if key not in self._programs:
            if len(self._programs) >= 16:
                self._programs.clear()
            rule = Add() if self.beta == 1 else Mix(self.beta)
            self._programs[key] = Program(
                update
                for (f, g), take in zip(parts, takes, strict=True)
                for update in (Update("x1", f, "x2", take, rule), Update("x2", g, "x1", (), rule))
            )
        return self._programs[key]

    def through(self, x: Tensor, sides: list[dict[str, Any]], memory: Memory) -> Tensor:
        """The hidden states after all layers, each with its own side inputs. What layers share is one side input."""
        side: dict[str, Any] = {}
        known: dict[tuple[str, int], str] = {}
        takes = []
        for index, given in enumerate(sides):
            take = {}
            for keyword, value in given.items():
                name = known.setdefault((keyword, id(value)), f"{keyword} of layer {index}" if keyword in side else keyword)
                side[name] = value
                take[keyword] = name
            takes.append(take)
        for name, value in side.items():
            if name.partition(" ")[0] == "past_key_values" and value is not None:
                side[name] = Opaque(value)
        arithmetic = self.arithmetic if self.beta == 1 else "float"
        streams = {"x1": x, "x2": x}
        out = run(self.program(tuple(takes)), streams, side, memory=memory, arithmetic=arithmetic, verify=self.verify)
        if self.beta == 1:
            return (out["x1"] + out["x2"]) / 2
        return out["x2"] if self.beta == 0 else self.beta / 2 * out["x1"] + (1 - self.beta / 2) * out["x2"]

    def run(self, x: Tensor, sides: list[dict[str, Any]]) -> Tensor:
        if self.due and self.owner.training and torch.is_grad_enabled():
            self.due, self.error = False, self.gradient_error(x, sides)
        return self.through(x, sides, self.used_memory)

    def gradient_error(self, x: Tensor, sides: list[dict[str, Any]]) -> float:
        """Relative error of all gradients of the layers under memory="reverse" against "checkpoint", for a random gradient of
        the output, as one vector. Nothing is left changed."""
        if self.beta == 0:
            return float("inf")
        wanted = [p for layer in self.layers for p in layer.parameters() if p.requires_grad]
        leaf = x.detach().requires_grad_()
        found = {}
        devices = [x.device] if x.is_cuda else []
        for memory in ("checkpoint", "reverse"):
            with torch.random.fork_rng(devices), instead(verify="off"):  # how far it drifts is what is measured
                out = self.through(leaf, sides, memory)
                found[memory] = torch.autograd.grad(out, [leaf, *wanted], torch.randn_like(out), allow_unused=True)
        pairs = [(a, b) for a, b in zip(*found.values(), strict=True) if a is not None and b is not None]
        wrong = sum((a.double() - b.double()).square().sum() for a, b in pairs)
        error = float((wrong / sum(a.double().square().sum() for a, _ in pairs)).sqrt())  # type: ignore[union-attr]
        return error if error == error else float("inf")


class Calls:
    """What the layers were called with, in one forward pass of the model."""

    def __init__(self, stack: Stack):
        self.stack = stack
        self.sides: list[dict[str, Any]] = []
        self.hidden: Tensor | None = None

    def take(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        index, layers = len(self.sides), self.stack.layers
        if index >= len(layers) or layer is not layers[index]:
            raise ProgramError(f"the model calls its layers in another order than they stand in, at {index}. Was it changed?")
        given = dict(zip(self.stack.arguments[index], args[1:], strict=False)) | kwargs
        hidden = args[0] if args else given.pop("hidden_states")
        if self.hidden is None:
            self.hidden = hidden
        elif self.hidden is not hidden:
            raise ProgramError(f"the model changes the hidden states before layer {index}, between the layers: not supported")
        if given.pop("encoder_hidden_states", None) is not None:
            raise ProgramError("encoder_hidden_states: cross-attention is not supported in a reversible stack")
        given.pop("encoder_attention_mask", None)
        if torch.is_grad_enabled() and given.get("past_key_values") is not None:
            raise ProgramError(
                "a KV cache was given by position while gradients are recorded, where a reversible model uses none. Use "
                "torch.no_grad(), or leave it out"
            )
        self.sides.append(given)
        return self.stack.run(hidden, self.sides) if index + 1 == len(layers) else hidden


def _has_hooks(layer: nn.Module) -> bool:
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return any(hooks) or "forward" in layer.__dict__
