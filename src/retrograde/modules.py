"""Reversible and ReversibleSequence: thin modules over run and invert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ._base import tracing
from ._base.pytrees import each, flatten, unflatten
from ._base.tracing import at_trace_time, key_of, named, refuse, whole_graph
from ._engine.run import invert, run
from ._engine.verify import check_verify
from ._exact.choose import check_arithmetic
from .errors import ProgramError, unknown
from .memory import check_memory, settled
from .update import ALL, Program, Update
from .wirings import OfSum, turn


class Chosen:
    """Memory, arithmetic and verify, checked when they are set."""

    _verify = "error"

    @property
    def memory(self) -> Any:
        return self._memory

    @memory.setter
    def memory(self, memory: Any) -> None:
        self._memory = check_memory(memory)

    @property
    def arithmetic(self) -> str:
        return self._arithmetic

    @arithmetic.setter
    def arithmetic(self, arithmetic: str) -> None:
        self._arithmetic = check_arithmetic(arithmetic)

    @property
    def verify(self) -> str:
        return self._verify

    @verify.setter
    def verify(self, verify: str) -> None:
        self._verify = check_verify(verify)


class Net(Chosen, nn.Module):
    """`memory`, `arithmetic` and `verify` may be set at any time between forward passes; parameters do not depend on them."""

    def __init__(self, memory: Any, arithmetic: str, verify: str = "error"):
        super().__init__()
        self.memory, self.arithmetic, self.verify = memory, arithmetic, verify
        self._key = key_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._key = key_of(self)  # a copy is another net


class Reversible(Net):
    """A list of updates as a module. Takes and returns a dict of streams; side inputs are keyword arguments.

    Each distinct module among the functions is registered once, in `fns`. Parameters of other callables are the caller's to
    register.

    >>> import torch, retrograde as rg
    >>> net = rg.Reversible(rg.wirings.leapfrog([torch.nn.Linear(4, 4) for _ in range(3)]))
    >>> out = net({"a": torch.ones(2, 4), "b": torch.ones(2, 4)})
    >>> first = net.inverse(out)
    """

    def __init__(self, updates: Iterable[Update], *, memory: Any = "reverse", arithmetic: str = "auto", verify: str = "error"):
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
        """The updates, with the modules that stand in `fns` now (they may have been exchanged)."""
        if torch.compiler.is_dynamo_compiling():
            _renew(self._key)  # a trace cannot, and goes on to see that it is done
        return self._current()

    def _current(self) -> Program:
        fns, updates = list(self.fns), self._program.updates
        if any(i is not None and fns[i] is not u.fn for i, u in zip(self._fn_of, updates, strict=True)):
            self._program = Program(u if i is None else replace(u, fn=fns[i]) for i, u in zip(self._fn_of, updates, strict=True))
        return self._program

    def forward(self, streams: Mapping[str, Any], /, **side: Any) -> dict[str, Any]:
        self.program.refuse_unused(side)
        return run(self.program, streams, side, memory=self.memory, arithmetic=self.arithmetic, verify=self.verify)

    def inverse(self, streams: Mapping[str, Any], /, **side: Any) -> dict[str, Any]:
        """The streams that `forward` was given, from those that it returned."""
        self.program.refuse_unused(side)
        return invert(self.program, streams, side, memory=self.memory, arithmetic=self.arithmetic, verify=self.verify)

    def extra_repr(self) -> str:
        return f"{len(self._program.updates)} updates, memory={self.memory!r}, arithmetic={self.arithmetic!r}"


class Block(nn.Module):
    """The two functions of a block, under the names that the state dict shows."""

    def __init__(self, f: Any, g: Any):
        super().__init__()
        self.f, self.g = f, g

    def forward(self, name: str, /, *args: Any, **side: Any) -> Any:
        """f or g, with the hooks of the block around it: this is how `fully_shard(block)` comes to gather its parameters."""
        return getattr(self, name)(*args, **side)


class _Through:
    """f or g, called through a block that has hooks."""

    def __init__(self, block: nn.Module, name: str):
        self.block, self.name = block, name
        self.__name__ = type(getattr(block, name)).__name__

    def __call__(self, *args: Any, **side: Any) -> Any:
        return self.block(self.name, *args, **side)


class ReversibleSequence(Net):
    """Pair blocks one after the other: x1 += f(x2), x2 += g(x1) for each (f, g) in `blocks`.

    - `streams`: 2, or more. Over three, functions change x1, x2 and x3 in turn, and each reads the sum of the other two:
      x1 += f(x2 + x3), x2 += g(x3 + x1), and in the next block x3 += f(x1 + x2), x1 += g(x2 + x3). The more streams, the more
      each function sees of what the others did, as in an ordinary residual net, and the more memory the streams take.
    - `split`: how the input becomes the streams, "copy" (each is the input, or its half of it where functions read sums of two,
      and so on) or "chunk" (equal parts along `dim`).
    - `merge`: how the streams become the output, "mean", "sum", "cat" (along `dim`; with "chunk" the one that keeps the shape),
      or None for the tuple of all.
    - `route`: where side inputs go. `(to_f, to_g)` for all of them, or {name: one (to_f, to_g) per block}.

    >>> import torch, retrograde as rg
    >>> net = rg.ReversibleSequence([(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(4)])
    >>> net(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        blocks: Iterable[Any],
        *,
        streams: int = 2,
        split: str = "copy",
        dim: int = -1,
        merge: str | None = "mean",
        route: Any = (True, False),
        memory: Any = "reverse",
        arithmetic: str = "auto",
        verify: str = "error",
    ):
        super().__init__(memory, arithmetic, verify)
        if split not in ("copy", "chunk"):
            raise unknown("split", split, ("copy", "chunk"))
        if merge not in ("mean", "sum", "cat", None):
            raise unknown("merge", merge, ("mean", "sum", "cat", None))
        if not isinstance(streams, int) or isinstance(streams, bool) or streams < 2:
            raise ProgramError(f"streams must be a whole number, 2 or more, got {streams!r}")
        self.split, self.dim, self.merge = split, dim, merge
        self.streams = tuple(f"x{i + 1}" for i in range(streams))
        try:
            given = iter(blocks)
        except TypeError as error:
            raise ProgramError(f"the blocks are a {type(blocks).__name__}, not a list of pairs of callables (f, g)") from error
        self.blocks = nn.ModuleList(_block(i, block) for i, block in enumerate(given))
        if not self.blocks:
            raise ProgramError("no blocks: ReversibleSequence needs at least one (f, g)")
        if streams > 2 * len(self.blocks):
            raise ProgramError(
                f"{streams} streams for {2 * len(self.blocks)} functions: some would never change. Use fewer streams"
            )
        self.route = route
        self._made_of: Any = None
        self._programs: dict[tuple[str, ...], Program] = {}

    def functions(self) -> list[Any]:
        """All functions, each once."""
        return list({id(fn): fn for block in self.blocks for fn in (block.f, block.g)}.values())

    @property
    def route(self) -> Any:
        return self._route

    @route.setter
    def route(self, route: Any) -> None:
        self._route = checked_route(route, len(self.blocks))

    def _program_for(self, side: Mapping[str, Any]) -> Program:
        """The updates for these side inputs; made anew when a function was exchanged."""
        if isinstance(self.route, Mapping):
            routed = {name for name, pairs in self.route.items() if any(map(any, pairs))}
            stray = side.keys() - routed
            if stray:
                names = ", ".join(sorted(map(repr, stray)))
                raise ProgramError(f"no fn takes the side input {names}; routed: {', '.join(sorted(routed)) or 'none'}")
        elif side and not any(self.route):
            raise ProgramError(f"no fn takes side inputs under route={self.route}, got {', '.join(sorted(side))}")
        made_of = [self.route]
        for block in self.blocks:
            f, g = block._modules.get("f"), block._modules.get("g")  # found sooner than as attributes
            made_of += (block.f if f is None else f, block.g if g is None else g, has_hooks(block))
        if made_of != self._made_of:
            self._made_of, self._programs = made_of, {}
        names = self._names(side)
        if names not in self._programs:
            self._programs[names] = Program(
                turn(2 * depth + which, fn, self.streams, takes)
                for depth, block in enumerate(self.blocks)
                for which, (fn, takes) in enumerate(zip(_functions(depth, block), self._takes(depth, side), strict=True))
            )
        self._program = self._programs[names]  # the last one
        return self._program

    def _names(self, side: Mapping[str, Any]) -> tuple[str, ...]:
        """The side inputs that the updates depend on."""
        return tuple(side) if isinstance(self.route, Mapping) else ()

    def _takes(self, depth: int, side: Mapping[str, Any]) -> list[Any]:
        if isinstance(self.route, Mapping):
            return [[name for name in side if self.route[name][depth][which]] for which in (0, 1)]
        return [ALL if goes else () for goes in self.route]

    def forward(self, x: Any, /, **side: Any) -> Any:
        return self._through(self._either_program(side), x, side, self.memory)

    def _either_program(self, side: Mapping[str, Any]) -> Program:
        traced = torch.compiler.is_dynamo_compiling() and whole_graph()
        return self._traced_program(side) if traced else self._program_for(side)

    def _traced_program(self, side: Mapping[str, Any]) -> Program:
        """The same in a trace, which depends on the route and on the functions that stand in the blocks now."""
        route = self.route
        pairs = [one for ones in route.values() for one in ones] if isinstance(route, Mapping) else [route]
        _prepare(self._key, tuple(side), (*route, *(goes for one in pairs for goes in one)))
        program = self._programs[self._names(side)]
        for depth, block in enumerate(self.blocks):
            f, g = (update.fn for update in program.updates[2 * depth : 2 * depth + 2])
            if isinstance(f, OfSum) and isinstance(g, OfSum):
                f, g = f.fn, g.fn
            if f is not block.f or g is not block.g:
                refuse(f"block {depth} has hooks, which a trace does not call: compile without fullgraph=True")
        return program

    def _through(self, updates: Any, x: Any, side: Mapping[str, Any], memory: Any) -> Any:
        """The output for `x` by these updates of the streams."""
        count = len(self.streams)
        parts = self._copies(x) if self.split == "copy" else self._parts(x)
        memory = settled(memory, x)  # measured on the input, not on its parts
        streams = dict(zip(self.streams, parts, strict=True))
        out = run(updates, streams, side, memory=memory, arithmetic=self.arithmetic, verify=self.verify)
        parts = tuple(out[name] for name in self.streams)
        if self.merge is None:
            return parts
        if self.merge == "cat":
            return joined(*parts, dim=self.dim)
        total = parts[0]
        for part in parts[1:]:
            total = each(Tensor.add, total, part)
        return total if self.merge == "sum" else each(lambda t: t / count, total)

    def inverse(self, y: Any, /, **side: Any) -> Any:
        """The input of `forward`, from its output."""
        program = self._either_program(side)
        count = len(self.streams)
        if self.merge in ("mean", "sum"):
            raise ProgramError(
                f"merge={self.merge!r} keeps one number of {_word(count)}, so it cannot be undone. Use merge='cat' or None"
            )
        if self.merge is None and not (isinstance(y, (tuple, list)) and len(y) == count):
            what = "pair" if count == 2 else f"{count} streams"
            got = f"a {type(y).__name__}" + (f" of {len(y)}" if isinstance(y, (tuple, list)) else "")
            raise ProgramError(f"under merge=None the inverse takes the {what} that forward returned, got {got}")
        parts = y if self.merge is None else self._parts(y)
        memory = settled(self.memory, y)
        streams = dict(zip(self.streams, parts, strict=True))
        first = invert(program, streams, side, memory=memory, arithmetic=self.arithmetic, verify=self.verify)
        if self.split == "copy":
            return first["x1"] if count == 2 else each(lambda t: t * (count - 1), first["x1"])
        return joined(*(first[name] for name in self.streams), dim=self.dim)

    def _copies(self, x: Any) -> tuple[Any, ...]:
        """Such that all but one of them add up to the input."""
        count = len(self.streams)
        return (x if count == 2 else each(lambda t: t / (count - 1), x),) * count

    def _parts(self, x: Any) -> tuple[Any, ...]:
        return parts_of(x, len(self.streams), self.dim, "Pad it, choose another dim, or use split='copy'")

    def extra_repr(self) -> str:
        return (
            f"streams={len(self.streams)}, split={self.split!r}, dim={self.dim}, merge={self.merge!r}, memory={self.memory!r}, "
            f"arithmetic={self.arithmetic!r}"
        )


@at_trace_time
def _prepare(net: str, names: tuple[str, ...], _: tuple[Any, ...]) -> bool:
    tracing.fullgraph.make_plan(named(net)._program_for(dict.fromkeys(names)))
    return True


@at_trace_time
def _renew(net: str) -> bool:
    named(net)._current()
    return True


def halves(x: Any, dim: int, way_out: str) -> tuple[Any, Any]:
    """The two halves along `dim` of a tensor, or of every tensor in a tree."""
    first, second = parts_of(x, 2, dim, way_out)
    return first, second


def parts_of(x: Any, count: int, dim: int, way_out: str) -> tuple[Any, ...]:
    """Equal parts along `dim` of a tensor, or of every tensor in a tree."""
    flat, spec = flatten(x)
    for t in flat:
        if not isinstance(t, Tensor) or not -t.dim() <= dim < t.dim():
            got = f"shape {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            raise ProgramError(f"an input with a dim {dim} to split along is needed, got {got}")
        if t.shape[dim] % count:
            odd, what = ("odd size", "two halves") if count == 2 else ("size", f"{_word(count)} equal parts")
            raise ProgramError(
                f"the input has {odd} {t.shape[dim]} along dim {dim} (shape {tuple(t.shape)}), so it has no {what}. {way_out}"
            )
    split = [t.chunk(count, dim) for t in flat]
    return tuple(unflatten([parts[i] for parts in split], spec) for i in range(count))


def _word(count: int) -> str:
    return {2: "two", 3: "three", 4: "four"}.get(count, str(count))


def joined(*parts: Any, dim: int) -> Any:
    """What `parts_of` took apart."""
    return each(lambda *ts: torch.cat(ts, dim), *parts)


def _block(index: int, block: Any) -> nn.Module:
    if isinstance(block, nn.Module) and not isinstance(block, nn.ModuleList):
        if callable(getattr(block, "f", None)) and callable(getattr(block, "g", None)):
            return block
    elif isinstance(block, Iterable):
        fns = list(block)
        if len(fns) == 2 and all(callable(fn) and not isinstance(fn, type) for fn in fns):
            return Block(*fns)
        if classes := [fn.__name__ for fn in fns if isinstance(fn, type)]:
            raise ProgramError(f"block {index} has the class {classes[0]}, not an instance")
    size = f" of {len(block)}" if isinstance(block, (tuple, list)) else ""
    raise ProgramError(f"block {index} is a {type(block).__name__}{size}, not a pair of callables (f, g)")


def has_hooks(block: nn.Module) -> bool:
    return bool(block._forward_pre_hooks or block._forward_hooks or block._backward_pre_hooks or block._backward_hooks)


def _functions(depth: int, block: Any) -> tuple[Any, Any]:
    if isinstance(block, Block) and has_hooks(block):
        return _Through(block, "f"), _Through(block, "g")
    refuse_hooks(depth, block)
    return block.f, block.g


def refuse_hooks(depth: int, block: nn.Module) -> None:
    if has_hooks(block):
        raise ProgramError(
            f"block {depth}, a {type(block).__name__}, has hooks that would never run, as its f and g are called one by one. "
            "Give the pair (block.f, block.g) instead, or put the hooks there: fully_shard([block.f, block.g])"
        )


def checked_route(route: Any, depth: int) -> Any:
    if not isinstance(route, Mapping):
        return checked_pair(route, "route")
    for name, pairs in route.items():
        if not isinstance(pairs, (tuple, list)) or len(pairs) != depth:
            got = len(pairs) if isinstance(pairs, (tuple, list)) else repr(pairs)
            raise ProgramError(f"route[{name!r}] needs one (to_f, to_g) for each of {depth} blocks, got {got}")
        for i, one in enumerate(pairs):
            checked_pair(one, f"route[{name!r}][{i}]")
    return dict(route)


def checked_pair(one: Any, name: str) -> Any:
    if not isinstance(one, (tuple, list)) or len(one) != 2 or not all(isinstance(goes, bool) for goes in one):
        raise ProgramError(f"{name} must be a pair of bools (to_f, to_g), got {one!r}")
    return tuple(one)
