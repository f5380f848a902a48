"""Sequential: ordinary layers `x = layer(x)`, one after the other, with a memory argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, overload

import torch
from torch import nn

from .._base.function_modules import Noised, named_modules
from .._base.pytrees import S, tensors
from .._base.routes import refuse_misrouted
from .._base.torch_private import outside_traces
from .._base.tracing import refuse, whole_graph
from .._engine.run import run
from .._engine.verify import Verify
from .._exact.noise import new_seed
from ..errors import ProgramError
from ..memory import Checkpointed, Memory, settled
from ..modules import Net
from ..rules import Noisy, Replace
from ..update import ALL, Program, Update

__all__ = ["Sequential"]

STREAMS = ("x", "x'")  # each layer reads one and replaces the other
SEED = "seed"
LayerRoute: TypeAlias = Mapping[str, bool | Sequence[bool]]


class Sequential(Net, nn.Sequential):
    """`torch.nn.Sequential` with a memory argument: ordinary layers `x = layer(x)` that keep the shape of x.

    The layers are what you have: residual blocks, transformer layers, anything. Nothing about them changes, and state-dict
    keys are those of `nn.Sequential`. It is a container as well: `len(net)`, `net[0]`, `for layer in net`; a slice is another
    net that shares the layers and has the same options.

    - `layers`: modules, as a list, an `OrderedDict`, or one by one. x is a tensor or a tree of tensors.
    - `memory`: what is kept for backward. "checkpoint" keeps the input of each layer and computes the rest again in backward,
      "offload" moves these inputs to host memory as well, "store" is ordinary autograd. Or a policy: `rg.Offload(…)`,
      `rg.StoreLast(blocks=k)`, `rg.Budget("4GiB")`. "reverse" needs `bits`.
    - `bits`: 1 to 8 adds a little noise in training, which makes the layers reversible: instead of its input each layer keeps so
      many bits of each element. The noise is about 2^-bits of what a layer changes; 4 is a good start. It follows `training` of
      this container, as dropout does. In `eval()` there is none, so the net is the layers exactly, and what "reverse" would undo
      is checkpointed instead. None, the default, is no noise.
    - `route`: which layers get which side inputs (keyword arguments of a call). By default all layers get all of them.
      `{"mask": True, "positions": [True, False, …]}` names them: for all layers, or one bool for each.
    - `verify`: what happens if a layer returns something else when backward runs it again: "error", "warn" or "off".

    >>> import torch, retrograde as rg
    >>> net = rg.Sequential([torch.nn.Linear(8, 8) for _ in range(4)], memory="checkpoint")
    >>> net(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    >>> reversed_net = rg.Sequential(list(net), bits=4, memory="reverse")
    >>> reversed_net(torch.ones(2, 8)).sum().backward()
    """

    def __init__(
        self,
        *layers: Any,
        bits: int | None = None,
        memory: Memory = "checkpoint",
        route: LayerRoute | None = None,
        verify: Verify = "error",
    ):
        super().__init__(memory, "float", verify)
        self.bits = bits
        for name, layer in named_modules(layers, "rg.Sequential"):
            self.add_module(name, layer)
        self.route = route
        self._made_of: Any = None
        self._programs: dict[tuple[tuple[str, ...], int | None], Program] = {}

    @property
    def bits(self) -> int | None:
        return self._bits

    @bits.setter
    def bits(self, bits: int | None) -> None:
        self._bits = check_bits(bits)

    @property
    def _noisy(self) -> bool:
        """Whether the next forward pass has noise."""
        return self._bits is not None and self.training

    @property
    def route(self) -> dict[str, bool | tuple[bool, ...]] | None:
        return self._route

    @route.setter
    def route(self, route: LayerRoute | None) -> None:
        self._route = None if route is None else {name: _goes(name, given, len(self)) for name, given in route.items()}

    def functions(self) -> list[nn.Module]:
        """All layers, each once."""
        return list(dict.fromkeys(self))

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> Sequential: ...

    def __getitem__(self, index: int | slice) -> nn.Module:  # type: ignore[override]
        if not isinstance(index, slice):
            return super().__getitem__(index)
        route = self.route and {name: goes if isinstance(goes, bool) else goes[index] for name, goes in self.route.items()}
        layers = dict(list(self._modules.items())[index])
        part = Sequential(layers, bits=self.bits, memory=self.memory, route=route, verify=self.verify)
        part.training = self.training  # of the container alone: the layers are shared
        return part

    def _takes(self, depth: int, side: Mapping[str, Any]) -> Any:
        if self.route is None:
            return ALL
        every = {name: goes if isinstance(goes, bool) else goes[depth] for name, goes in self.route.items()}
        return [name for name in side if every[name]]

    def _program_for(self, side: Mapping[str, Any]) -> Program:
        """The updates for these side inputs; rebuilt when a layer was replaced."""
        if stray := side.keys() - (side.keys() if self.route is None else self.route.keys()):
            names, one = ", ".join(sorted(map(repr, stray))), min(stray)
            raise ProgramError(f"no layer takes the side input {names}. Correct the name, or add it: route={{{one!r}: True}}")
        made_of = (list(self), self.route)
        if made_of != self._made_of:
            self._made_of, self._programs = made_of, {}
        key = (() if self.route is None else tuple(side), self.bits if self._noisy else None)
        if key not in self._programs:
            updates = [ordinary_update(depth, layer, self._takes(depth, side), key[1]) for depth, layer in enumerate(self)]
            self._programs[key] = Program(updates, (1,) * len(updates))
        return self._programs[key]

    def forward(self, x: S, /, **side: Any) -> S:  # type: ignore[override]
        """The output for the input `x`, a tensor or a tree of tensors. Side inputs are keyword arguments, see `route`."""
        if torch.compiler.is_dynamo_compiling():
            return self._in_trace(x, side) if whole_graph() else self._outside(x, side)
        return self._forward(x, side)

    def _in_trace(self, x: Any, side: Mapping[str, Any]) -> Any:
        """`torch.compile(fullgraph=True)` decides itself what is kept (its `activation_memory_budget`)."""
        if self._noisy:
            refuse(_NO_TRACE)
        for depth, layer in enumerate(self):
            takes = self._takes(depth, side)
            x = layer(x, **(side if takes is ALL else {name: side[name] for name in takes}))
        return x

    @outside_traces
    def _outside(self, x: Any, side: Mapping[str, Any]) -> Any:
        return self._forward(x, side)

    def _forward(self, x: Any, side: Mapping[str, Any]) -> Any:
        if not len(self):
            return x
        program, memory = self._program_for(side), self.memory
        streams: dict[str, Any] = dict.fromkeys(STREAMS, x)
        if self._noisy:
            streams[SEED] = new_seed(next((t.device for t in tensors(x)), None))
        elif self.bits is not None:  # without noise nothing can be undone
            memory = Checkpointed(settled(memory, x))
        arithmetic = "exact" if self._noisy else "float"
        try:
            out = run(program, streams, side, memory=memory, arithmetic=arithmetic, verify=self.verify)
        except TypeError as error:
            refuse_misrouted(
                program.updates, side, error, "route={{{0!r}: [True, False, …]}} sends {0} to the first layer, and so on"
            )
            raise
        return out[STREAMS[len(self) % 2]]

    def extra_repr(self) -> str:
        return f"memory={self.memory!r}" if self.bits is None else f"bits={self.bits}, memory={self.memory!r}"


_NO_TRACE = (
    "rg.Sequential(bits=…) in training is not supported under torch.compile(fullgraph=True). Compile without fullgraph, compile "
    "the layers one by one (rg.compile_fns), or use bits=None"
)


def check_bits(bits: int | None) -> int | None:
    if bits is not None and (not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 8):
        raise ProgramError(f"bits must be a whole number from 1 to 8, or None for layers without noise, got {bits!r}")
    return bits


def ordinary_update(depth: int, layer: nn.Module, takes: Any, bits: int | None) -> Update:
    """The layer at this depth, with noise or without. `bits`: what is kept to undo it."""
    source, target = STREAMS[depth % 2], STREAMS[(depth + 1) % 2]
    if bits is None:
        return Update(target, layer, source, takes, Replace())
    return Update(target, Noised(layer), (source, SEED), takes, Noisy(bits, depth))


def _goes(name: str, given: Any, depth: int) -> bool | tuple[bool, ...]:
    if isinstance(given, bool):
        return given
    if not isinstance(given, (tuple, list)) or len(given) != depth or not all(isinstance(goes, bool) for goes in given):
        got = f"{len(given)} entries" if isinstance(given, (tuple, list)) else repr(given)
        raise ProgramError(f"route[{name!r}] must be True, False or one bool for each of {depth} layers, got {got}")
    return tuple(given)
