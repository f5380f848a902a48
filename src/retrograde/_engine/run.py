"""run and invert: a list of updates over named streams, stretch by stretch as the memory policy says."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import errors
from .. import memory as policies
from .._base import tracing
from .._base.function_modules import Held
from .._base.pytrees import S, dense, each, tensors
from .._base.torch_private import in_forward_mode, in_transform, outside_traces
from .._base.tracing import at_trace_time, exporting, named, whole_graph
from .._exact.choose import Arithmetic, check_arithmetic, exact_streams
from .._exact.range import Ledger
from .._exact.streams import carried, read
from ..update import Program, Update
from .call import Streams
from .context import Context
from .stretches import STRETCHES
from .verify import Verify, check_verify, settle

before_each_run: list[Callable[[Iterable[Any]], None]] = []  # called with the modules of a program: who adds one may refuse it


def run(
    updates: Iterable[Update] | Program,
    streams: Mapping[str, S],
    side: Mapping[str, Any] | None = None,
    *,
    memory: policies.Memory = "reverse",
    arithmetic: Arithmetic = "auto",
    verify: Verify = "error",
) -> dict[str, S]:
    """Run the updates over the streams and return the final streams.

    - `updates`: a list of `rg.Update`. `streams`: the first streams by name, tensors or trees of tensors.
    - `side`: the side inputs (masks, context) by name.
    - `memory`: what is kept for backward. `arithmetic`: how outputs are added to streams.
    - `verify`: "error", "warn" or "off". What to do if a function returns something else when backward recomputes it.

    >>> import torch, retrograde as rg
    >>> f, g = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    >>> x = torch.randn(2, 4)
    >>> out = rg.run([rg.Update("a", f, "b"), rg.Update("b", g, "a")], {"a": x, "b": x})
    >>> out["a"].sum().backward()
    """
    if exporting():
        memory = "store"  # there is no backward pass
    if torch.compiler.is_dynamo_compiling():
        if whole_graph():
            return tracing.fullgraph.run(updates, streams, side, memory, arithmetic)
        return _outside_trace(updates, streams, side, memory, arithmetic, verify)
    return _run(updates, streams, side, memory, arithmetic, verify)


def invert(
    updates: Iterable[Update] | Program,
    streams: Mapping[str, S],
    side: Mapping[str, Any] | None = None,
    *,
    memory: policies.Memory = "reverse",
    arithmetic: Arithmetic = "auto",
    verify: Verify = "error",
) -> dict[str, S]:
    """From the final streams back to the first: `run` on the reversed list with apply and undo swapped. Arguments as for `run`.

    It calls each fn again, so it returns the inputs if fn depends on its arguments alone: not with active dropout.
    """
    program = updates if isinstance(updates, Program) else Program(updates)
    if torch.compiler.is_dynamo_compiling():
        _inverse_at_trace_time(program.key)
    return run(program.inverse(), streams, side, memory=memory, arithmetic=arithmetic, verify=verify)


@at_trace_time
def _inverse_at_trace_time(program: str) -> bool:
    named(program).inverse()
    return True


@outside_traces
def _outside_trace(*args: Any) -> Streams:
    return _run(*args)


class _Instead(threading.local):
    ways: tuple[Any, str | None, str | None] = (None, None, None)  # memory, verify, arithmetic


_INSTEAD = _Instead()


@contextlib.contextmanager
def instead(memory: Any = None, verify: str | None = None, arithmetic: str | None = None) -> Iterator[None]:
    """In this thread, what all programs run with in place of what they are given: to compare one policy with another.

    None leaves it as it is.
    """
    before = _INSTEAD.ways
    memory, verify, arithmetic = (b if a is None else a for a, b in zip((memory, verify, arithmetic), before, strict=True))
    _INSTEAD.ways = memory, verify, arithmetic
    try:
        yield
    finally:
        _INSTEAD.ways = before


def _run(updates: Any, streams: Mapping[str, Any], side: Any, memory: Any, arithmetic: str, verify: str) -> Streams:
    program = updates if isinstance(updates, Program) else Program(updates)
    other, how, carried_as = _INSTEAD.ways
    arithmetic = carried_as or check_arithmetic(arithmetic)
    verify = how or check_verify(verify)
    memory = memory if other is None else other
    settle(program)
    if side is not None and not isinstance(side, Mapping):
        raise errors.ProgramError(f"side must be a dict of side inputs by name, got a {type(side).__name__}")
    side = dict(side or {})
    program.check(streams, side)
    stretches = policies.plan(memory, program, streams)
    state = _distinct({name: dense(value) if name in program.names else value for name, value in streams.items()}, side)
    if not torch.is_grad_enabled():
        stretches = [("store", len(program.updates), None)]
    elif in_transform() or in_forward_mode():
        if any(kind != "store" for kind, _, _ in stretches):
            warnings.warn(
                "saved-tensor hooks are not allowed under torch.func transforms and forward-mode AD: "
                "this program runs as memory='store'",
                stacklevel=3,
            )
        stretches = [("store", len(program.updates), None)]
    needed = any(kind != "store" for kind, _, _ in stretches)
    held = [Held(update.fn, update.rule) for update in program.updates] if needed or arithmetic == "auto" else []
    for refuse in before_each_run:
        refuse(module for one in held for module in one.modules)
    exact = exact_streams(arithmetic, program, state, held)
    ledger = Ledger(program.updates, list(exact))
    for number, name in enumerate(exact, len(program.updates)):
        ledger.index = number
        state[name] = carried(state[name], ledger, exact[name])
    context = Context(program, held, state, side, verify) if needed else None
    if context is not None:
        side = context.side  # with copies of what callers edit
    with _no_cast_cache(), _all_or_nothing(context):
        start, plain = 0, False
        for kind, count, limit in stretches:
            plain = STRETCHES[kind](program, range(start, start + count), state, side, context, limit)
            start += count
            if context is not None:
                context.draws.since()  # a stretch that is stored may have drawn as well
        if context is not None:
            context.check_side()
    for name in exact:
        state[name] = read(state[name])
    if plain:  # views: the caller may edit what it gets, and autograd has saved these as sources
        for name in dict.fromkeys(update.target for update in program.updates):
            state[name] = each(lambda t: t.view_as(t) if isinstance(t, Tensor) and t.requires_grad else t, state[name])
    ledger.close(t for name in exact for t in tensors(state[name]))
    return state


def _distinct(state: Streams, side: Streams) -> Streams:
    """No two streams or side inputs are the same tensor: recovered ones are not, and some fns look (`q is k`)."""
    seen = {id(t) for value in side.values() for t in tensors(value)}

    def fresh(t: Tensor) -> Tensor:
        if id(t) in seen:
            return t.view_as(t)
        seen.add(id(t))
        return t

    return {name: each(fresh, value) for name, value in state.items()}


@contextlib.contextmanager
def _no_cast_cache() -> Iterator[None]:
    """Autocast keeps its casts of all weights until its block ends: memory that grows with depth, for weights used twice.

    Under every policy, as with the cache the gradients of such weights are added up in 16 bits.
    """
    cached = torch.is_autocast_cache_enabled()
    if not cached or not torch.is_grad_enabled():
        yield
        return
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)


@contextlib.contextmanager
def _all_or_nothing(context: Context | None) -> Iterator[None]:
    """If fn fails, random generators and buffers are as they were before the run; ordinary autograd promises no such thing."""
    if context is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        context.draws.put_back()
        for modules in reversed(context.modules):
            try:
                modules.put_back()
            except Exception as other:
                error.add_note(f"and buffers could not be put back as they were: {other}")
        raise
    finally:
        context.forget()
