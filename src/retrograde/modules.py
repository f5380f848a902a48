"""Net, what all reversible modules have in common; and Reversible, a list of updates as a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ._base.pytrees import S
from ._base.tracing import at_trace_time, key_of, named
from ._engine.run import invert, run
from ._engine.verify import Verify, check_verify
from ._exact.choose import Arithmetic, check_arithmetic
from .memory import Memory, check_memory
from .update import Program, Update

__all__ = ["Net", "Reversible"]


class Chosen:
    """Memory, arithmetic and verify, checked when they are set."""

    _verify: Verify = "error"

    @property
    def memory(self) -> Memory:
        return self._memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._memory: Memory = check_memory(memory)

    @property
    def arithmetic(self) -> Arithmetic:
        return self._arithmetic

    @arithmetic.setter
    def arithmetic(self, arithmetic: Arithmetic) -> None:
        self._arithmetic: Arithmetic = check_arithmetic(arithmetic)

    @property
    def verify(self) -> Verify:
        return self._verify

    @verify.setter
    def verify(self, verify: Verify) -> None:
        self._verify = check_verify(verify)


class Net(Chosen, nn.Module):
    """`memory`, `arithmetic` and `verify` may be set at any time between forward passes; parameters do not depend on them."""

    def __init__(self, memory: Memory, arithmetic: Arithmetic, verify: Verify = "error"):
        super().__init__()
        self.memory, self.arithmetic, self.verify = memory, arithmetic, verify
        self._key = key_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._key = key_of(self)  # a copy is another net


class Reversible(Net):
    """A list of updates as a module. It takes and returns a dict of streams.

    - `updates`: a list of `rg.Update`, for example a sum of wirings (`rg.wirings`). Each distinct module among the functions is
      registered once, in `fns`. Parameters of other callables are yours to register.
    - `memory`: what is kept for backward: "reverse", "checkpoint", "store", or a policy like `rg.Budget("4GiB")`.
    - `arithmetic`: how streams are added to: "auto" (exact where 16 bits are involved), "exact" or "float".
    - `verify`: what happens if a function returns something else when backward runs it again: "error", "warn" or "off".

    >>> import torch, retrograde as rg
    >>> net = rg.Reversible(rg.wirings.leapfrog([torch.nn.Linear(4, 4) for _ in range(3)]))
    >>> out = net({"a": torch.ones(2, 4), "b": torch.ones(2, 4)})
    >>> first = net.inverse(out)
    """

    def __init__(
        self,
        updates: Iterable[Update],
        *,
        memory: Memory = "reverse",
        arithmetic: Arithmetic = "auto",
        verify: Verify = "error",
    ):
        super().__init__(memory, arithmetic, verify)
        self._program = Program(updates)
        distinct = dict.fromkeys(u.fn for u in self._program.updates if isinstance(u.fn, nn.Module))
        self.fns = nn.ModuleList(distinct)
        position = {fn: i for i, fn in enumerate(distinct)}
        self._fn_of = [position.get(u.fn) if isinstance(u.fn, nn.Module) else None for u in self._program.updates]

    def functions(self) -> list[Any]:
        """All functions, each once."""
        return list({id(update.fn): update.fn for update in self.program.updates}.values())

    @property
    def program(self) -> Program:
        """The updates, with the modules that stand in `fns` now (they may have been replaced)."""
        if torch.compiler.is_dynamo_compiling():
            _renew(self._key)  # a trace cannot, and goes on to see that it is done
        return self._current()

    def _current(self) -> Program:
        fns, old = list(self.fns), self._program
        if any(i is not None and fns[i] is not u.fn for i, u in zip(self._fn_of, old.updates, strict=True)):
            updates = (u if i is None else replace(u, fn=fns[i]) for i, u in zip(self._fn_of, old.updates, strict=True))
            self._program = Program(updates, old.blocks)
        return self._program

    def forward(self, streams: Mapping[str, S], /, **side: Any) -> dict[str, S]:
        """The final streams by name, from the first ones. Side inputs are keyword arguments."""
        self.program.refuse_unused(side)
        return run(self.program, streams, side, memory=self.memory, arithmetic=self.arithmetic, verify=self.verify)

    def inverse(self, streams: Mapping[str, S], /, **side: Any) -> dict[str, S]:
        """The streams that `forward` was given, from those that it returned and the same side inputs."""
        self.program.refuse_unused(side)
        return invert(self.program, streams, side, memory=self.memory, arithmetic=self.arithmetic, verify=self.verify)

    def extra_repr(self) -> str:
        return f"{len(self._program.updates)} updates, memory={self.memory!r}, arithmetic={self.arithmetic!r}"


@at_trace_time
def _renew(net: str) -> bool:
    named(net)._current()
    return True


def __getattr__(name: str) -> Any:
    """Classes that have moved to sequence.py: earlier code and pickled nets find them here."""
    if name in ("Block", "ReversibleSequence"):
        return getattr(import_module(".sequence", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
