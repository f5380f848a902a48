"""The layers of a model of Hugging Face as they are, reversible in training by a little noise: `reversible_(model, bits=4)`.

The model's own forward goes on calling its layers one after the other. In training a layer only notes what it was given and hands
the hidden states on; the last one runs the program of all of them, which is that of `rg.Sequential(bits=…)`. In eval the layers
run as they are.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._base.function_modules import Around
from .._base.torch_private import outside_traces
from .._base.tracing import refuse, whole_graph
from .._engine.run import run
from .._engine.verify import Verify
from .._exact.noise import new_seed
from ..errors import ProgramError
from ..memory import Memory
from ..modules import Chosen
from ..ordinary.sequential import SEED, STREAMS, check_bits, ordinary_update
from ..update import Program
from ._exchange import Exchanged, become
from ._sides import NOT_KEPT, Calls, Opaque, argument_names, flags_off, takes_of

_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")


def layers_in(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that calls the layers, and the name of their list in it. Whatever Hugging Face checkpoints is a layer."""
    kind = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", ())
    whole: set[str] = set()
    for module in model.modules():
        whole |= set(getattr(module, "_no_split_modules", None) or ())
    found: list[tuple[nn.Module, str, nn.ModuleList]] = []
    inside: set[nn.Module] = set()
    for owner in model.modules():  # from the outside to the inside
        for name, child in owner.named_children():
            layers = isinstance(child, nn.ModuleList) and child not in inside and len(child)
            if layers and all(isinstance(layer, kind) or type(layer).__name__ in whole for layer in child.children()):
                found.append((owner, name, child))  # type: ignore[arg-type]
                inside.update(child.modules())
    if not found:
        raise ProgramError(
            f"{type(model).__name__} has no list of layers that Hugging Face could checkpoint. Give the layers to "
            "rg.Sequential(layers, bits=4) yourself"
        )
    if len(found) > 1:
        names = ", ".join(f"{name} of {type(owner).__name__}" for owner, name, _ in found)
        raise ProgramError(f"{type(model).__name__} has {len(found)} lists of layers ({names}): give one part of it at a time")
    owner, name, layers = found[0]
    if len(set(layers)) < len(layers):
        raise ProgramError(f"{type(owner).__name__} has the same layer twice in {name}, which is not supported here")
    return owner, name


class Layer(Around):
    """A layer as the program calls it."""

    def forward(self, x: Tensor, **side: Any) -> Tensor:
        out = self.fn(x, **{name: value.value if isinstance(value, Opaque) else value for name, value in side.items()})
        if not isinstance(out, tuple):
            return out
        if any(other is not None for other in out[1:]):
            raise ProgramError(
                f"{self.__name__} returns more than the hidden states, and what else it returns would get no gradient. "
                "Checkpoint it instead: checkpoint_(model)"
            )
        return out[0]


class Noise(Chosen):
    """The program of a model's layers. `bits`, `memory` and `verify` may be set between forward passes."""

    def __init__(self, owner: nn.Module, name: str, bits: int, memory: Memory, verify: Verify):
        self.owner, self.name, self.bits = owner, name, bits
        self.memory, self.verify = memory, verify
        self.returns: dict[type, int] = {}  # by the class of a layer: the length of the tuple that it returns, 0 for a tensor
        self._programs: dict[Any, Program] = {}

    @property
    def bits(self) -> int | None:
        return self._bits

    @bits.setter
    def bits(self, bits: int | None) -> None:
        self._bits = check_bits(bits)

    def __repr__(self) -> str:
        return f"{len(self.layers)} layers, bits={self.bits}, memory={self.memory!r}"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_programs": {}, "returns": {}}

    @property
    def plain(self) -> bool:
        """Whether the layers run as they are: without noise nothing can be undone."""
        return not self.owner.training or (self.bits is None and self.memory in ("reverse", "store"))

    @property
    def layers(self) -> list[nn.Module]:
        return list(getattr(self.owner, self.name))

    def program(self, layers: list[nn.Module], takes: tuple[Mapping[str, str], ...]) -> Program:
        key = (tuple(map(id, layers)), self.bits, tuple(tuple(take.items()) for take in takes))
        if key not in self._programs:
            if len(self._programs) >= 16:
                self._programs.clear()
            updates = [
                ordinary_update(depth, Layer(layer), take, self.bits)
                for depth, (layer, take) in enumerate(zip(layers, takes, strict=True))
            ]
            self._programs[key] = Program(updates, (1,) * len(updates))
        return self._programs[key]

    def handed_on(self, layer: nn.Module, x: Tensor, given: Mapping[str, Any]) -> Any:
        """x, in the form that the layer returns it in. The layer runs once in eval mode to find out."""
        if type(layer) not in self.returns:
            modes = [(module, module.training) for module in layer.modules()]
            cacheless = {name: None if isinstance(value, Opaque) else value for name, value in given.items()}
            try:
                with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
                    out = layer.eval()(x, **cacheless)
            finally:
                for module, mode in modes:
                    module.training = mode
            self.returns[type(layer)] = len(out) if isinstance(out, tuple) else 0
        more = self.returns[type(layer)] - 1
        return x if more < 0 else (x, *(None for _ in range(more)))

    def run(self, layers: list[nn.Module], x: Tensor, sides: list[dict[str, Any]]) -> Tensor:
        side, takes = takes_of(sides)
        streams: dict[str, Any] = dict.fromkeys(STREAMS, x)
        if self.bits is not None:
            streams[SEED] = new_seed(x.device)
        arithmetic = "float" if self.bits is None else "exact"
        program = self.program(layers, takes)
        out = run(program, streams, side, memory=self.memory, arithmetic=arithmetic, verify=self.verify)
        return out[STREAMS[len(layers) % 2]]


_NO_TRACE = (
    "reversible_(model, bits=…) in training is not supported under torch.compile(fullgraph=True). Compile without fullgraph, or "
    "compile the layers one by one: for layer in …: layer.compile()"
)


class _Now(threading.local):
    calls: Any = None


_NOW = _Now()  # the forward pass that layers note their calls for


class NoisyModel(Exchanged):
    """The module that calls the layers."""

    reversible: Noise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reversible.plain:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if torch.compiler.is_dynamo_compiling() and whole_graph():
            refuse(_NO_TRACE)
        return self._noted(args, kwargs)

    @outside_traces
    def _noted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flags_off(self, kwargs, _FLAGS)
        if torch.is_grad_enabled():
            parameters = inspect.signature(type(self).forward).parameters  # type: ignore[attr-defined]
            if "use_cache" in parameters or (hasattr(self.config, "use_cache") and "kwargs" in parameters):  # type: ignore[attr-defined]
                kwargs["use_cache"] = False
        calls = NoisyCalls(self.reversible)
        before, _NOW.calls = _NOW.calls, calls
        try:
            out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            _NOW.calls = before
        calls.end()
        return out

    def extra_repr(self) -> str:
        return f"reversible: {self.reversible}"


class NoisyCalls(Calls):
    def __init__(self, noise: Noise):
        super().__init__(noise.layers, argument_names(noise.layers))
        self.noise = noise

    def take(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
        if collector is not None and collector.get():  # hooks would catch what the layers return inside the program
            raise ProgramError(f"{', '.join(collector.get())} {NOT_KEPT}")
        hidden, given = self.note(layer, args, kwargs)
        _NOW.calls = None  # from here on layers run as they are
        try:
            out = self.noise.run(self.layers, hidden, self.sides) if len(self.sides) == len(self.layers) else hidden
            return self.noise.handed_on(layer, out, given)
        finally:
            _NOW.calls = self


class NoisyLayer(Exchanged):
    """A layer that notes how it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = _NOW.calls
        if calls is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return calls.take(self, args, kwargs)


def noisy_(model: nn.Module, bits: int, memory: Memory, verify: Verify) -> None:
    owner, name = layers_in(model)
    noise = Noise(owner, name, bits, memory, verify)
    for layer in noise.layers:
        become(layer, NoisyLayer)
    become(owner, NoisyModel)
    for module in {owner, model}:
        module.reversible = noise  # type: ignore[assignment]
