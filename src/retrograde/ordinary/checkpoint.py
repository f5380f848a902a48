"""Checkpoint: a function in the place of `torch.utils.checkpoint.checkpoint`, for code that takes such a function."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from .._base.function_modules import OneCall, called_by
from .._base.torch_private import tree_flatten, tree_leaves, tree_unflatten
from .._base.tracing import at_trace_time
from .._engine.replay import replaying
from .._engine.run import run
from .._engine.verify import Verify
from ..errors import ProgramError
from ..memory import Memory, Offload, check_memory
from ..modules import Chosen
from ..rules import Result
from ..update import Program, Update

__all__ = ["Checkpoint"]

_RESULT = Result()
_NOTHING = torch.empty(0, dtype=torch.bool)
_PLAIN = frozenset({type(None), bool, int, float, str})


class Checkpoint(Chosen):
    """`torch.utils.checkpoint.checkpoint` with a memory argument: `rg.Checkpoint("offload")(fn, *args, **kwargs)`.

    It calls fn and returns what fn returns. Of what fn computes nothing is kept for backward, which runs fn again; the arguments
    are kept.

    - `memory`: "checkpoint" keeps the arguments where they are. "offload", or `rg.Offload(…)`, moves activations to host memory
      and back: the first floating-point tensor among the arguments, and all that require grad. "store" is ordinary autograd.
    - `verify`: what happens if fn computes something else when backward runs it again: "error", "warn" or "off".

    fn is anything callable: a module, a method, a closure, a `functools.partial`. It may return any tree of tensors and other
    objects. It must not depend on what it changed itself, as with a KV cache.

    >>> import torch, retrograde as rg
    >>> layer, x = torch.nn.Linear(8, 8), torch.ones(2, 8)
    >>> rg.Checkpoint("checkpoint")(layer, x).sum().backward()
    """

    name: str | None = None  # of fn, in errors

    def __init__(self, memory: Memory = "checkpoint", *, verify: Verify = "error"):
        self.memory, self.verify = memory, verify

    @property
    def memory(self) -> Memory:
        return self._memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        if check_memory(memory) not in ("store", "checkpoint", "offload") and not isinstance(memory, Offload):
            raise ProgramError(
                f"rg.Checkpoint takes 'checkpoint', 'offload', rg.Offload(…) or 'store' as memory, got {memory!r}. It sees one "
                "call at a time, which it cannot undo; for other policies use rg.Sequential or rg.ReversibleSequence"
            )
        self._memory = memory

    def __repr__(self) -> str:
        return f"Checkpoint({self.memory!r})"

    def __call__(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        use_reentrant: bool | None = None,
        preserve_rng_state: bool = True,
        context_fn: Callable[..., Any] = checkpoint.noop_context_fn,
        determinism_check: str = "default",
        debug: bool = False,
        early_stop: bool = True,
        **kwargs: Any,
    ) -> Any:
        """`fn(*args, **kwargs)`.

        What torch's function takes besides is accepted where it makes no difference here: `use_reentrant`, `debug`, and
        `preserve_rng_state` (backward always sees the random numbers of the forward pass). The others are refused.
        """
        if context_fn is not checkpoint.noop_context_fn or determinism_check != "default" or not early_stop:
            refuse(context_fn, determinism_check, early_stop)
        if self._memory == "store" or not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return fn(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():  # the compiler knows torch's own
            if self._memory != "checkpoint":
                _nothing_moves()
            return checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)
        call = _Call(fn, args, kwargs, self.name)
        moved, kept = call.split()
        if not call.may_train([*moved, *kept]):
            return fn(*args, **kwargs)
        program = Program([Update("out", call, "args", {"rest": "other args"} if kept else (), _RESULT)], (1,), copies=False)
        streams = {"args": moved[0] if len(moved) == 1 else moved, "out": _NOTHING}
        side = {"other args": kept} if kept else None
        out = run(program, streams, side, memory=self._memory, arithmetic="float", verify=self._verify)["out"]
        if not isinstance(out, Tensor):
            _refuse_hidden(out)
        return out


@at_trace_time
def _nothing_moves() -> bool:
    warnings.warn(
        "inside a function that torch.compile compiles, rg.Checkpoint('offload') runs as 'checkpoint'. Compile what it calls "
        "instead, for example each layer: `layer.compile()`",
        stacklevel=2,
    )
    return True


def refuse(
    context_fn: Any = checkpoint.noop_context_fn, determinism_check: str = "default", early_stop: bool = True, **_: Any
) -> None:
    """What torch's function does, and this one does not."""
    why = None
    if context_fn is not checkpoint.noop_context_fn:
        why = "context_fn is not supported. Enter the context inside fn; rg.replaying() tells the two runs apart"
    elif determinism_check != "default":
        why = f"determinism_check={determinism_check!r} is not supported. What is checked is an argument of the object: verify=…"
    elif not early_stop:
        why = "early_stop=False is not supported. Backward runs fn until it has all that it needs"
    if why is not None:
        raise ProgramError(f"rg.Checkpoint: {why}")


def _refuse_hidden(out: Any) -> None:
    """What is kept lives as long as what is returned. A tensor in an object that is no tree keeps nothing alive."""
    leaves = tree_leaves(out)
    if not any(isinstance(t, Tensor) and t.requires_grad for t in leaves):
        for other in leaves:
            inside = () if type(other) in _PLAIN else getattr(other, "__dict__", {}).values()
            if any(isinstance(t, Tensor) and t.requires_grad for t in inside):
                kind = type(other).__name__
                raise ProgramError(
                    f"fn returned a {kind}, and rg.Checkpoint does not see the tensors in it. Return them in a tuple or a dict, "
                    "or make the class a pytree of torch (register_pytree_node)"
                )


class _Tree(NamedTuple):
    """An argument that has tensors in it."""

    at: int  # where it stands among the arguments
    leaves: list[Any]  # with None in the place of tensors
    spec: Any
    found: list[tuple[int, int]]  # where in the leaves tensors stand, and their ids
    fixed: bool  # a tuple: nobody can change it

    def filled(self, given: Mapping[int, Tensor]) -> Any:
        leaves = list(self.leaves)
        for at, key in self.found:
            leaves[at] = given[key]
        return tree_unflatten(leaves, self.spec)

    def refuse_changes(self, now: Any, given: Mapping[int, Tensor]) -> None:
        """fn may have put something into a list or a dict, which is ours: the caller would not see it."""
        if self.fixed:
            return
        leaves, spec = tree_flatten(now)
        same = spec == self.spec and all(leaves[at] is given[key] for at, key in self.found)
        if not same:
            raise ProgramError(
                "fn changed a list or a dict among its arguments, and backward would run it on the changed one. Let it return "
                "what it has to tell"
            )


class _Call(OneCall):
    """A function with all of its arguments but the tensors, which it gets when it runs."""

    def __init__(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None):
        while isinstance(fn, functools.partial):
            fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
        self.name, self.count, self.keywords = name, len(args), tuple(kwargs)
        self.values = [*args, *kwargs.values()]
        self.tensors: dict[int, Tensor] = {}  # by id, each once
        self.alone: list[tuple[int, int]] = []  # where a tensor stands among the values, and its id
        self.trees: list[_Tree] = []
        others = []
        for at, value in enumerate(self.values):
            if isinstance(value, Tensor):
                self.tensors[id(value)] = value
                self.alone.append((at, id(value)))
                self.values[at] = None
            elif type(value) not in _PLAIN:
                leaves, spec = tree_flatten(value)
                found = [(j, id(t)) for j, t in enumerate(leaves) if isinstance(t, Tensor)]
                if found:
                    self.tensors.update((id(t), t) for t in leaves if isinstance(t, Tensor))
                    rest = [None if isinstance(t, Tensor) else t for t in leaves]
                    fixed = type(value) is tuple and len(value) == len(leaves) and all(map(is_, value, leaves))
                    self.trees.append(_Tree(at, rest, spec, found, fixed))
                    self.values[at] = None
                others += [other for other in leaves if not isinstance(other, Tensor) and type(other) not in _PLAIN]
        super().__init__(fn, others)

    @property
    def __name__(self) -> str:
        """What errors call it."""
        fn = called_by(self.fn)
        return self.name or getattr(fn, "__qualname__", type(fn).__name__)

    def split(self) -> tuple[list[Tensor], list[Tensor]]:
        """The activations among the tensors, and the others."""
        found, self.tensors = self.tensors, {}
        moved: dict[int, Tensor] = {}
        for key, t in found.items():
            if (t.requires_grad or not moved) and (t.is_floating_point() or t.is_complex()):
                moved[key] = t
        kept = {key: t for key, t in found.items() if key not in moved}
        self.order = (*moved, *kept)
        return list(moved.values()), list(kept.values())

    def may_train(self, given: Sequence[Tensor]) -> bool:
        """Whether there may be something that a gradient goes to."""
        fn = called_by(self.fn)
        if self.also or not isinstance(fn, nn.Module) or any(t.requires_grad for t in given):
            return True
        return any(p.requires_grad for p in fn.parameters())

    def __call__(self, moved: Tensor | list[Tensor], rest: Sequence[Tensor] = ()) -> Any:
        given = dict(zip(self.order, (moved, *rest) if isinstance(moved, Tensor) else (*moved, *rest), strict=True))
        values = list(self.values)
        for at, key in self.alone:
            values[at] = given[key]
        for tree in self.trees:
            values[tree.at] = tree.filled(given)
        out = self.fn(*values[: self.count], **dict(zip(self.keywords, values[self.count :], strict=True)))
        if not replaying():
            for tree in self.trees:
                tree.refuse_changes(values[tree.at], given)
        return out
