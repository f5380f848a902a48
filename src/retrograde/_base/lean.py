"""Functions in two forms: the full one saves all that its gradient needs, the lean one recomputes cheap operations.

`rg.compile_fns` makes them (`_compile/fns.py`). Under `rg.Budget` the engine chooses; everywhere else the full form runs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

_LOCAL = threading.local()
_COUNT = itertools.count()


def use_lean(lean: bool) -> bool:
    """Which form functions run in from here on, in this thread; returns which it was."""
    if not Forms.made:  # it would be asked for twice for each update
        return False
    before = getattr(_LOCAL, "lean", False)
    _LOCAL.lean = lean
    return before


class Forms:
    """What a module runs in place of its forward. Copies of the module have none of it, as with `module.compile()`."""

    made = False  # whether there are any

    def __init__(self, fn: nn.Module, full: Callable[..., Any], lean: Callable[..., Any]):
        self.fn, self.full, self.lean = fn, full, lean
        self.number = next(_COUNT)
        Forms.made = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        form = self.lean if getattr(_LOCAL, "lean", False) else self.full
        return form(self.fn, *args, **kwargs)


def compiled_parts(fns: Iterable[Any]) -> list[Any]:
    """Of each function what compile_fns compiles: the function itself, unless it says otherwise."""
    return [part for fn in fns for part in getattr(fn, "to_compile", (fn,))]


def two_forms(fns: Iterable[Any]) -> bool:
    return any(isinstance(getattr(fn, "_compiled_call_impl", None), Forms) for fn in compiled_parts(fns))


def signature(program: Any) -> Iterable[Any]:
    """What decides, besides the inputs, what the functions of a program save: how they are compiled, and their flags."""
    fns = compiled_parts(update.fn for update in program.updates)
    for fn in dict.fromkeys(fn for fn in fns if isinstance(fn, nn.Module)):
        yield getattr(fn._compiled_call_impl, "number", None)
        yield from (part.training for part in fn.modules())
        yield from (p.requires_grad for p in fn.parameters())
