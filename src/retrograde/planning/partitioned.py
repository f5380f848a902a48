"""Functions as torch.compile would split them into forward and backward at an activation memory budget, without a compiler."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from .._base.torch_private import partitioner
from ..modules import Net, Reversible
from ..ordinary.sequential import Sequential
from ..sequence import ReversibleSequence


class Partitioned(nn.Module):
    """A function with the split of another one that looks the same."""

    def __init__(self, fn: nn.Module, split: Any):
        super().__init__()
        self.fn, self.split = fn, split

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = {**dict(self.fn.named_parameters()), **dict(self.fn.named_buffers())}
        return self.split(held, args, kwargs)


def partition(net: Net, splits: dict[str, Any]) -> None:
    """Replaces the functions that are modules; those that print the same share one split, so the first block stands for all."""
    if isinstance(net, ReversibleSequence):
        for block in net.blocks:
            held: Any = block
            held.f, held.g = _partitioned(held.f, splits), _partitioned(held.g, splits)
    elif isinstance(net, Reversible):
        for i, fn in enumerate(net.fns):
            net.fns[i] = _partitioned(fn, splits)
    elif isinstance(net, Sequential):
        for i, layer in enumerate(net):
            net[i] = _partitioned(layer, splits)
        net.bits = None
    net.memory, net.arithmetic = "store", "float"


def _partitioned(fn: Any, splits: dict[str, Any]) -> Any:
    if not isinstance(fn, nn.Module):
        return fn
    _without_statistics(fn)
    key = f"{fn!r} {[(name, tuple(p.shape)) for name, p in fn.named_parameters()]}"
    if key not in splits:
        splits[key] = _split_of(fn)
    return Partitioned(fn, splits[key])


def _without_statistics(fn: nn.Module) -> None:
    """Running statistics are not updated in training: the split would hand them to backward, which has no use for them and
    refuses them changed. In torch.compile they are not handed on either."""
    for module in fn.modules():
        if isinstance(module, _BatchNorm) and module.training:
            module.track_running_stats = False


def _split_of(fn: nn.Module) -> Any:
    aot_function, min_cut_rematerialization_partition = partitioner()

    def flat(held: Any, args: Any, kwargs: Any) -> Any:
        return functional_call(fn, held, args, kwargs)

    as_is: Any = _as_is
    return aot_function(flat, fw_compiler=as_is, bw_compiler=as_is, partition_fn=min_cut_rematerialization_partition)


def _as_is(graph: Any, _: Any) -> Any:
    """Runs the graph operation by operation, and lets go of each tensor after its last use."""
    boxed = getattr(import_module("torch.fx.graph"), "_BoxedCodeGen", None)  # lets go of arguments too, where torch has it
    if boxed is not None:
        graph.graph.set_codegen(boxed())
        graph.recompile()

    def call(args: list[Any]) -> Any:
        return graph(*args) if boxed is None else graph(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
