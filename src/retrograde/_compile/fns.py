"""Functions compiled in two forms: the full one saves all that its gradient needs, the lean one computes cheap operations anew.

Under `rg.Budget` the lean form stores more updates in the same bytes, at a few percent of their time where reversal costs a
third. Everywhere else the full form runs.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._base.cuda_graph import draws
from .._base.lean import Forms, compiled_parts
from .._base.torch_private import TorchDispatchMode
from ..errors import ProgramError


def compile_fns(net: Any, *, lean: float = 0.3, backend: Any = "inductor", dynamic: bool | None = None) -> Any:
    """Compile every function of a net in place, one by one, in the two forms that `rg.Budget` chooses from.

    `lean` is torch's activation_memory_budget for the lean form: which share of what the full form saves. `backend` and `dynamic`
    go to torch.compile. Keys of the state dict stay. Returns the net.

    >>> import torch, retrograde as rg
    >>> net = rg.ReversibleSequence([(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)) for _ in range(2)])
    >>> net = rg.compile_fns(net)
    >>> net.memory = rg.Budget(3 << 30)
    """
    if not isinstance(lean, (int, float)) or not 0 <= lean <= 1:
        raise ProgramError(f"lean is a share of what a function saves, between 0 and 1, got {lean!r}")
    if not hasattr(net, "functions"):
        kind = type(net).__name__
        way_out = "Give the one inside of it" if isinstance(net, nn.Module) else "Make one of your functions"
        raise ProgramError(f"compile_fns takes an rg.Sequential, rg.ReversibleSequence or rg.Reversible, got a {kind}. {way_out}")
    compiled: dict[type, tuple[Any, Any]] = {}
    for fn in compiled_parts(net.functions()):
        if not isinstance(fn, nn.Module):
            raise ProgramError(f"compile_fns compiles modules in place, and {fn!r} is none. Use torch.compile on it")
        kind = type(fn)
        if kind not in compiled:  # functions of one class share what is compiled
            pair = [torch.compile(caller(), backend=saving(backend, share), dynamic=dynamic) for share in (None, lean)]
            compiled[kind] = pair[0], pair[1]
        fn._compiled_call_impl = Forms(fn, *compiled[kind])  # type: ignore[assignment]
    return net


def caller() -> Callable[..., Any]:
    """A function of its own, as torch.compile counts what it has compiled by code object."""
    code = _call.__code__.replace(co_name="call")
    return types.FunctionType(code, _call.__globals__, "call")


def _call(fn: Any, *args: Any, **kwargs: Any) -> Any:
    return fn._call_impl(*args, **kwargs)


def saving(backend: Any, share: float | None) -> Callable[..., Any]:
    """The backend, partitioning into forward and backward so that this share is saved between them."""

    def compile_graph(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend
        from torch._functorch import config

        whole = share is None or _draws(graph, inputs)
        with config.patch(activation_memory_budget=1.0 if whole else share):  # type: ignore[attr-defined]
            return lookup_backend(backend)(graph, inputs)

    return compile_graph


class _Listening(TorchDispatchMode):
    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew = self.drew or draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _draws(graph: Any, inputs: Any) -> bool:
    """Whether a graph draws random numbers, as far as a run without data tells.

    Under a small activation_memory_budget torch computes dropout anew in backward, with other random numbers: wrong gradients.
    """
    from torch._guards import detect_fake_mode

    fake = detect_fake_mode(inputs)
    if fake is None:
        return True
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)  # those of the run that compiles see nothing of it
    with hooks, fake, _Listening() as listening:
        graph(*(fake.from_tensor(t) if isinstance(t, Tensor) and not fake.is_our_fake(t) else t for t in inputs))
    return listening.drew
