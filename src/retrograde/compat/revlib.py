"""In place of `revlib`: modules that change the two halves of the input in turn."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._base.function_modules import refuse_hooks
from .._base.splitting import halves
from .._engine.run import invert, run
from .._exact.choose import Arithmetic
from ..errors import ProgramError
from ..memory import Memory
from ..modules import Net
from ..rules import Add, Rule
from ..update import Update

__all__ = [
    "MemoryModes",
    "ReversibleModule",
    "ReversibleSequential",
    "ReversibleWrapper",
    "additive_coupling_forward",
    "additive_coupling_inverse",
    "offload_tensor",
]

Coupling = Callable[[Any, Any], Any]


class MemoryModes(enum.IntEnum):
    """How much is kept, as the package calls it; `memory=` is the same question."""

    no_savings = 0
    checkpoint = 1
    autograd_graph = 2
    autograd_function = 3


_MEMORY: dict[int, Memory] = {0: "store", 1: "checkpoint", 2: "reverse", 3: "reverse"}


def additive_coupling_forward(other_stream: Any, fn_out: Any) -> Any:
    """What a module does to the other stream where nothing else is given."""
    return other_stream + fn_out


def additive_coupling_inverse(output: Any, fn_out: Any) -> Any:
    return output - fn_out


def offload_tensor(inp: Tensor, reference: Tensor) -> Tensor:
    """The tensor on the device of the other one; its gradient comes back to where it is."""
    return inp.to(reference.device, non_blocking=True)


class Coupled(Rule):
    """A coupling of the user's: `target = forward(target, out)`, undone by `target = inverse(target, out)`."""

    def __init__(self, forward: Coupling, inverse: Coupling):
        self.forward, self.inverse = forward, inverse

    def apply(self, target: Any, out: Any) -> Any:
        return self.forward(target, out)

    def undo(self, target: Any, out: Any) -> Any:
        return self.inverse(target, out)


class ReversibleWrapper(nn.Module):
    """A function and its rule, under the keys of the package."""

    def __init__(self, wrapped_module: nn.Module):
        super().__init__()
        self.wrapped_module = wrapped_module

    @property
    def __name__(self) -> str:  # what error messages call it
        return type(self.wrapped_module).__name__

    def forward(self, x: Any, /, **side: Any) -> Any:
        """What the function returns."""
        args = side.pop("*args", ())
        return self.wrapped_module(x, *args, **side)


class ReversibleModule(nn.Module):
    """One of the modules of a ReversibleSequential. By itself it takes and returns the pair of both halves."""

    def __init__(
        self, wrapped_module: nn.Module, coupling_forward: Coupling | None = None, coupling_inverse: Coupling | None = None
    ):
        super().__init__()
        forward, inverse = coupling_forward or additive_coupling_forward, coupling_inverse or additive_coupling_inverse
        adds = forward is additive_coupling_forward
        if adds is not (inverse is additive_coupling_inverse):
            raise ProgramError("a coupling needs both coupling_forward and coupling_inverse, or no input could be recovered")
        self.wrapped_module = ReversibleWrapper(wrapped_module)
        self.rule = Add() if adds else Coupled(forward, inverse)

    def forward(self, inp: Sequence[Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The halves after this module, the one that changed last. Further arguments go to the module."""
        updates, side = _program([self], [(args, kwargs)])
        out = run(updates, {"x0": inp[0], "x1": inp[1]}, side)
        return out["x1"], out["x0"]


class ReversibleSequential(Net, nn.Sequential):
    """x0 += m0(x1), x1 += m1(x0), x0 += m2(x1), … on the halves of the input along `split_dim`, or on two copies of it for None.

    All modules get the further arguments of a call, and `layerwise_args_kwargs` has (args, kwargs) for each module besides.
    """

    def __init__(
        self,
        *modules: nn.Module,
        split_dim: int | None = 1,
        coupling_forward: Sequence[Coupling | None] | None = None,
        coupling_inverse: Sequence[Coupling | None] | None = None,
        memory_mode: int = MemoryModes.autograd_function,
        target_device: str = "",
        fused_optimizer: Any = None,
        memory: Memory | None = None,
        arithmetic: Arithmetic = "auto",
    ):
        super().__init__(_MEMORY[memory_mode] if memory is None else memory, arithmetic)
        if target_device:
            raise ProgramError(
                "target_device is not supported: parameters stay where they are. Use fully_shard(net, offload_policy=…)"
            )
        if fused_optimizer is not None:
            raise ProgramError("fused_optimizer is not supported. Make an optimizer, and call rg.step_in_backward(optimizer)")
        if not modules:
            raise ProgramError("no modules: ReversibleSequential needs at least one")
        forward, inverse = list(coupling_forward or [None]), list(coupling_inverse or [None])
        for i, m in enumerate(modules):
            if not isinstance(m, ReversibleModule):
                m = ReversibleModule(m, forward[i % len(forward)], inverse[i % len(inverse)])
            self.add_module(f"{i // 2}-{i % 2}", m)
        self.split_dim = split_dim

    def functions(self) -> list[Any]:
        """All functions, each once."""
        return list(dict.fromkeys(m.wrapped_module for m in self._modules.values() if isinstance(m, ReversibleModule)))

    def forward(self, inp: Tensor, *args: Any, layerwise_args_kwargs: Any = None, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Both halves after all modules."""
        return self._through(run, inp, args, layerwise_args_kwargs, kwargs)

    def inverse(self, out: Tensor, *args: Any, layerwise_args_kwargs: Any = None, **kwargs: Any) -> Tensor:
        """The input of `forward`, from its output."""
        return self._through(invert, out, args, layerwise_args_kwargs, kwargs)

    def _through(self, act: Any, given: Tensor, args: tuple[Any, ...], layerwise: Any, kwargs: dict[str, Any]) -> Tensor:
        modules = list(self)
        if layerwise is not None and len(layerwise) != len(modules):
            raise ProgramError(f"layerwise_args_kwargs has {len(layerwise)} pairs (args, kwargs) for {len(modules)} modules")
        own = [(args, kwargs)] * len(modules)
        if layerwise is not None:
            own = [((*args, *more), {**kwargs, **named}) for more, named in layerwise]
        updates, side = _program(modules, own)
        dim = -1 if self.split_dim is None else self.split_dim
        odd, back = len(modules) % 2, act is invert
        if self.split_dim is None and not back:
            x0 = x1 = given
        else:
            x0, x1 = halves(given, dim, "Pad it, or choose another split_dim")
        if odd and back:  # the half that was changed last comes last
            x0, x1 = x1, x0
        out = act(updates, {"x0": x0, "x1": x1}, side, memory=self.memory, arithmetic=self.arithmetic, verify=self.verify)
        if back and self.split_dim is None:
            return out["x0"]
        return torch.cat((out["x1"], out["x0"]) if odd and not back else (out["x0"], out["x1"]), dim)


def _program(
    modules: Sequence[Any], given: Sequence[tuple[Sequence[Any], dict[str, Any]]]
) -> tuple[list[Update], dict[str, Any]]:
    """The updates, and all side inputs by name; modules that get the same thing share it."""
    updates: list[Update] = []
    side: dict[str, Any] = {}
    names: dict[int, str] = {}
    for i, (module, (args, kwargs)) in enumerate(zip(modules, given, strict=True)):
        refuse_hooks(i, module)
        takes = {}
        for key, value in {"*args": tuple(args), **kwargs}.items():
            if key != "*args" or value:
                takes[key] = names.setdefault(id(value), f"{i}.{key}")
                side[takes[key]] = value
        target, source = ("x0", "x1") if i % 2 == 0 else ("x1", "x0")
        updates.append(Update(target, module.wrapped_module, source, takes, module.rule))
    return updates, side
