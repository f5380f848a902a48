"""What a second run in a trace could not repeat, or would leave without a gradient: looked up in the compiler's own graph.

Everything here runs while the compiler traces the program, before there is any value.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._base.cuda_graph import draws
from .._base.torch_private import TorchDispatchMode, tree_leaves, tree_map
from .._base.tracing import at_trace_time
from ..errors import ReplayError

_REGIONAL = "Compile without fullgraph=True, or compile the functions one by one: rg.compile_fns(net)"
# Parts of the names of torch's functions that may draw random numbers; whether one does is then seen by calling it.
_SUSPECTS = (
    "attention", "bernoulli", "binomial", "cauchy", "dirichlet", "drop", "exponential", "fractional", "gamma", "geometric", "gru",
    "gumbel", "lowrank", "lstm", "multinomial", "normal", "poisson", "rand", "rnn", "rrelu", "sample", "uniform",
)  # fmt: skip


_GIVEN: dict[Any, bool] = {}  # the nodes of the arguments of the Function that is traced, and whether its backward needs them
_LOOKED_AT: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how many nodes, by the tracer of a Function
_WATCHED: weakref.WeakKeyDictionary[Any, list[tuple[Tensor, int]]] = weakref.WeakKeyDictionary()  # and versions, by trace
_INSIDE: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how many second runs a trace is in


def _output() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


@at_trace_time
def note_given(kept: tuple[bool, ...]) -> bool:
    """The last nodes are the arguments of a Function that follows, each a view; whether its backward needs them."""
    _GIVEN.clear()
    _GIVEN.update(zip(_last("view_as", len(kept)), kept, strict=True))
    _watch(node for node, keeps in _GIVEN.items() if keeps)
    return True


@at_trace_time
def note_made(count: int) -> bool:
    """The last so many nodes are aliases of what a Function returned, and backward needs it."""
    _watch(_last("detach", count))
    return True


def _last(method: str, count: int) -> list[Any]:
    return [node for node in _output().current_tracer.graph.nodes if node.target == method][-count:]


def _watch(nodes: Iterable[Any]) -> None:
    """What backward needs must not be edited in what follows: a Function in a trace does not see it."""
    output = _output()
    trace = output.root_tracer
    if trace not in _WATCHED:
        watched = _WATCHED[trace] = []
        hooks = output.cleanup_hooks  # called when the trace is complete, or has failed, the first one at last
        around = sys.exc_info()[1]  # in whose handling the trace may be

        def check() -> None:
            edited = any(value._version != version for value, version in watched)
            watched.clear()
            inside = any(node.target is torch.autograd.grad for node in output.graph.nodes)  # then backward came before
            failed = sys.exc_info()[1] not in (None, around)
            if edited and not inside and not failed:
                hooks.clear()  # all others were called
                raise ReplayError(
                    "a stream, a side input, a parameter or a buffer is edited in place after a reversible net used or returned "
                    "it, and backward needs it as it was. Edit a copy (`out = out.relu()`, not `out.relu_()`)"
                )

        hooks.insert(0, check)
    values = [node.meta.get("example_value") for node in nodes]
    _WATCHED[trace] += [(value, value._version) for value in values if isinstance(value, Tensor)]


@at_trace_time
def second_run(step: int = 0) -> bool:
    """Whether the trace is in a second run now; 1 begins one, -1 ends it."""
    trace = _output().root_tracer
    _INSIDE[trace] = _INSIDE.get(trace, 0) + step
    return _INSIDE[trace] > 0


@at_trace_time
def transformed() -> bool:
    """Whether the trace is inside a transform of torch.func, which knows no Functions of a trace."""
    return torch._C._are_functorch_transforms_active()


@at_trace_time
def check_update(where: str) -> bool:
    """An update, fn and rule, has just been traced in the forward of a Function."""
    output = _output()
    tracer = output.current_tracer
    for proxy in tracer.lifted_freevars:
        value = proxy.node.meta.get("example_value")
        if isinstance(value, Tensor) and value.requires_grad and proxy.node not in _GIVEN:
            raise ReplayError(
                f"fn uses a tensor of shape {tuple(value.shape)} that needs a gradient and is neither argument nor parameter "
                "of a module that fn holds, so in a trace it would get no gradient. Give it as a side input, or register it as a "
                f"parameter. {_REGIONAL}",
                where,
            )
    _watch(proxy.node for proxy in tracer.lifted_freevars if proxy.node not in _GIVEN)
    nodes = list(tracer.graph.nodes)
    drawn = [name for node in nodes[_LOOKED_AT.get(tracer, 0) :] if (name := _random(output, node))]
    _LOOKED_AT[tracer] = len(nodes)
    if drawn:
        raise ReplayError(
            f"fn draws random numbers ({drawn[0]}), and a trace cannot draw the same again in backward. {_REGIONAL}", where
        )
    changed = tracer.has_input_mutation()
    if changed.has_mutation or any(map(_edits, nodes)):
        refuse_edit(where)
    return True


@at_trace_time
def refuse_edit(where: str) -> None:
    raise ReplayError(f"fn edits a buffer or an argument in place, which in a trace would happen twice. {_REGIONAL}", where)


def _random(output: Any, node: Any) -> str | None:
    """The name of the operation in this node that draws random numbers, or None."""
    if node.op not in ("call_function", "call_method"):
        return None
    for arg in tree_leaves((node.args, node.kwargs)):
        if isinstance(arg, torch.fx.Node) and arg.op == "get_attr":  # the body of a checkpoint, or the like
            body = output.nn_modules.get(arg.target)
            inner = body.graph.nodes if isinstance(body, torch.fx.GraphModule) else ()
            found = next((name for n in inner if (name := _random(output, n))), None)
            if found:
                return found
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    packet = isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    if not packet and not any(part in name.lower() for part in _SUSPECTS):
        return None
    args, kwargs = tree_map(_example, (node.args, node.kwargs))
    try:
        with output.fake_mode, _Draws() as watch:
            if node.op == "call_method":
                getattr(args[0], name)(*args[1:], **kwargs)
            else:
                node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return None if packet else name  # it cannot be seen: a name that speaks of it is enough
    return watch.found


def _example(arg: Any) -> Any:
    return arg.meta.get("example_value") if isinstance(arg, torch.fx.Node) else arg


class _Draws(TorchDispatchMode):
    """Whether an operation draws from a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            self.found = self.found or func.__name__
        return func(*args, **(kwargs or {}))


def _edits(node: Any) -> bool:
    """Operations that edit without touching a version counter: running statistics of norms, and lists of tensors."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op != "call_function":
        return False
    if name.startswith("_foreach_"):
        return name.partition(".")[0].endswith("_")
    if "batch_norm" not in name and "instance_norm" not in name:
        return False
    first = 1 if node.target in (torch.nn.functional.batch_norm, torch.nn.functional.instance_norm) else 3
    given = [*node.args[first : first + 2], node.kwargs.get("running_mean"), node.kwargs.get("running_var")]
    training = node.kwargs.get("training", node.kwargs.get("use_input_stats", node.args[5] if len(node.args) > 5 else False))
    return bool(training) and any(a is not None for a in given)
