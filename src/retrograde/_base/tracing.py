"""Is somebody tracing? All that the engine and the modules know of torch.compile. `_compile/` has the rest and registers here."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..errors import ProgramError
from . import torch_private
from .torch_private import skip_in_traces

F = TypeVar("F", bound=Callable[..., Any])

fullgraph: Any = None  # the module that runs a program inside a trace and plans for it: `_compile` sets it


def at_trace_time(fn: F) -> F:
    """The function runs as it is while its caller is traced; its arguments and its result are constants there."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch._dynamo.assume_constant_result does
    return fn


def untraced(make: Callable[..., Any]) -> Callable[..., Any]:
    """For a function that makes hooks: torch.compile leaves them alone, though they are called from inside compiled functions."""
    for code in make.__code__.co_consts:
        if isinstance(code, types.CodeType):
            skip_in_traces(code)
    return make


whole_graph = at_trace_time(torch_private.whole_graph)


@at_trace_time
def exporting() -> bool:
    """Inside torch.export. It is asked outside of the trace, as torch 2.11 says yes in all of them."""
    return torch.compiler.is_exporting()


_NAMED: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_COUNT = itertools.count()


def key_of(thing: Any) -> str:
    """A new name for an object, by which functions at trace time find it with `named`: all they are handed is constants."""
    key = f"{type(thing).__name__} {next(_COUNT)}"
    _NAMED[key] = thing
    return key


def named(key: str) -> Any:
    return _NAMED[key]


@at_trace_time
def refuse(message: str, where: str | None = None) -> None:
    raise ProgramError(message, where)
