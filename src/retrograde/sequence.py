"""ReversibleSequence: blocks (f, g) one after the other, on one input that becomes the streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, nn

from ._base import tracing
from ._base.function_modules import OfSum, has_hooks, refuse_hooks
from ._base.pytrees import each
from ._base.routes import Pair, Route, checked_route, refuse_misrouted
from ._base.splitting import count_word, joined, parts_of
from ._base.tracing import at_trace_time, named, refuse, whole_graph
from ._engine.run import invert, run
from ._engine.verify import Verify
from ._exact.choose import Arithmetic
from .errors import ProgramError, unknown
from .memory import Memory, settled
from .modules import Net
from .update import ALL, Program
from .wirings import turn

__all__ = ["Block", "ReversibleSequence"]

Split: TypeAlias = Literal["copy", "chunk"]
Merge: TypeAlias = Literal["mean", "sum", "cat"] | None


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
    """Blocks one after the other: x1 += f(x2), x2 += g(x1) for each (f, g) in `blocks`.

    It is a container as well: `len(net)`, `net[0]`, `for block in net`; a slice is another net that shares the blocks and has the
    same options.

    - `blocks`: pairs of callables (f, g), or modules with attributes f and g. A function returns the shape of its input.
    - `streams`: 2, or more. Over three, functions change x1, x2 and x3 in turn, and each reads the sum of the other two:
      x1 += f(x2 + x3), x2 += g(x3 + x1), and in the next block x3 += f(x1 + x2), x1 += g(x2 + x3). The more streams, the more
      each function sees of what the others did, as in an ordinary residual net, and the more memory the streams take.
    - `split`: how the input becomes the streams, "copy" (each is the input, or its half of it where functions read sums of two,
      and so on) or "chunk" (equal parts along `dim`).
    - `dim`: along which "chunk" and "cat" work, the last by default.
    - `merge`: how the streams become the output, "mean", "sum", "cat" (along `dim`; with "chunk" the one that keeps the shape),
      or None for the tuple of all.
    - `route`: which functions get which side inputs (keyword arguments of a call). `(to_f, to_g)` is for all side inputs; by
      default they go to f. Or by name, `{"mask": (True, False), …}`, with one `(to_f, to_g)` for all blocks or a list of one for
      each block.
    - `memory`: what is kept for backward: "reverse", "checkpoint", "store", or a policy like `rg.Budget("4GiB")`.
    - `arithmetic`: how streams are added to: "auto" (exact where 16 bits are involved), "exact" or "float".
    - `verify`: what happens if a function returns something else when backward runs it again: "error", "warn" or "off".

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
        split: Split = "copy",
        dim: int = -1,
        merge: Merge = "mean",
        route: Route = (True, False),
        memory: Memory = "reverse",
        arithmetic: Arithmetic = "auto",
        verify: Verify = "error",
    ):
        super().__init__(memory, arithmetic, verify)
        if split not in ("copy", "chunk"):
            raise unknown("split", split, ("copy", "chunk"))
        if merge not in ("mean", "sum", "cat", None):
            raise unknown("merge", merge, ("mean", "sum", "cat", None))
        if not isinstance(streams, int) or isinstance(streams, bool) or streams < 2:
            raise ProgramError(f"streams must be a whole number, 2 or more, got {streams!r}")
        self.split: Split = split
        self.merge: Merge = merge
        self.dim = dim
        self.streams = tuple(f"x{i + 1}" for i in range(streams))
        try:
            given = iter(blocks)
        except TypeError as error:
            raise ProgramError(
                f"the blocks are a {type(blocks).__name__}, not a list of pairs of callables (f, g). Give [(f, g), …]"
            ) from error
        self.blocks = nn.ModuleList(_block(i, block) for i, block in enumerate(given))
        if not self.blocks:
            raise ProgramError("no blocks: ReversibleSequence needs at least one (f, g)")
        if streams > 2 * len(self.blocks):
            raise ProgramError(
                f"{streams} streams for {2 * len(self.blocks)} functions: some would never change. Use fewer streams, or more "
                "blocks"
            )
        self.route = route
        self._made_of: Any = None
        self._programs: dict[tuple[str, ...], Program] = {}

    def functions(self) -> list[Any]:
        """All functions, each once."""
        return list({id(fn): fn for block in self.blocks for fn in (block.f, block.g)}.values())

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.blocks)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> ReversibleSequence: ...

    def __getitem__(self, index: int | slice) -> nn.Module:
        if not isinstance(index, slice):
            return self.blocks[index]
        route = self.route
        part = ReversibleSequence(
            list(self.blocks)[index],
            streams=len(self.streams),
            split=self.split,
            dim=self.dim,
            merge=self.merge,
            route={name: pairs[index] for name, pairs in route.items()} if isinstance(route, Mapping) else route,
            memory=self.memory,
            arithmetic=self.arithmetic,
            verify=self.verify,
        )
        part.training = part.blocks.training = self.training  # of the containers alone: the blocks are shared
        return part

    @property
    def route(self) -> Pair | dict[str, tuple[Pair, ...]]:
        return self._route

    @route.setter
    def route(self, route: Route) -> None:
        self._route = checked_route(route, len(self.blocks))

    def _program_for(self, side: Mapping[str, Any]) -> Program:
        """The updates for these side inputs; rebuilt when a function was replaced."""
        if isinstance(self.route, Mapping):
            routed = {name for name, pairs in self.route.items() if any(map(any, pairs))}
            stray = side.keys() - routed
            if stray:
                names, one = ", ".join(sorted(map(repr, stray))), min(stray)
                raise ProgramError(
                    f"no fn takes the side input {names}; routed: {', '.join(sorted(routed)) or 'none'}. Correct the name, or "
                    f"add it to route: route={{{one!r}: (True, False)}} sends {one} to f of each block"
                )
        elif side and not any(self.route):
            raise ProgramError(
                f"no fn takes side inputs under route={self.route}, got {', '.join(sorted(side))}. Use route=(True, False) to "
                "send them to f, or send them one by one: route={'mask': (True, False)}"
            )
        made_of: list[Any] = [self.route]
        for block in self.blocks:
            f, g = block._modules.get("f"), block._modules.get("g")  # found sooner than as attributes
            made_of += (block.f if f is None else f, block.g if g is None else g, has_hooks(block))
        if made_of != self._made_of:
            self._made_of, self._programs = made_of, {}
        names = self._names(side)
        if names not in self._programs:
            updates = (
                turn(2 * depth + which, fn, self.streams, takes)
                for depth, block in enumerate(self.blocks)
                for which, (fn, takes) in enumerate(zip(_functions(depth, block), self._takes(depth, side), strict=True))
            )
            self._programs[names] = Program(updates, (2,) * len(self.blocks))
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
        """The output for the input `x`, a tensor or a tree of tensors. Side inputs are keyword arguments, see `route`."""
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
        out = self._act(run, updates, streams, side, memory)
        parts = tuple(out[name] for name in self.streams)
        if self.merge is None:
            return parts
        if self.merge == "cat":
            return joined(*parts, dim=self.dim)
        total = parts[0]
        for part in parts[1:]:
            total = each(Tensor.add, total, part)
        return total if self.merge == "sum" else each(lambda t: t / count, total)

    def _act(self, act: Callable[..., Any], updates: Any, streams: dict[str, Any], side: Mapping[str, Any], memory: Any) -> Any:
        """`run` or `invert`; functions that do not fit their side inputs are reported in terms of `route`."""
        options = {"memory": memory, "arithmetic": self.arithmetic, "verify": self.verify}
        if torch.compiler.is_dynamo_compiling():  # which cannot break the graph inside of try
            return act(updates, streams, side, **options)
        try:
            return act(updates, streams, side, **options)
        except TypeError as error:
            if isinstance(updates, Program):
                refuse_misrouted(updates.updates, side, error)
            raise

    def inverse(self, y: Any, /, **side: Any) -> Any:
        """The input of `forward`, from its output and the same side inputs."""
        program = self._either_program(side)
        count = len(self.streams)
        if self.merge in ("mean", "sum"):
            does = {"mean": "averages", "sum": "adds up"}[self.merge]
            way_out = "Use merge='cat' or merge=None"
            raise ProgramError(f"merge={self.merge!r} {does} the streams, so the input cannot be recovered. {way_out}")
        if self.merge is None and not (isinstance(y, (tuple, list)) and len(y) == count):
            what = "pair" if count == 2 else f"{count} streams"
            got = f"a {type(y).__name__}" + (f" of {len(y)}" if isinstance(y, (tuple, list)) else "")
            raise ProgramError(f"under merge=None the inverse takes the {what} that forward returned, got {got}")
        parts: Any = y if self.merge is None else self._parts(y)
        memory = settled(self.memory, y)
        streams = dict(zip(self.streams, parts, strict=True))
        first = self._act(invert, program, streams, side, memory)
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


def _block(index: int, block: Any) -> nn.Module:
    if isinstance(block, nn.Module) and not isinstance(block, nn.ModuleList):
        if callable(getattr(block, "f", None)) and callable(getattr(block, "g", None)):
            return block
    elif isinstance(block, Iterable):
        fns = list(block)
        if len(fns) == 2 and all(callable(fn) and not isinstance(fn, type) for fn in fns):
            return Block(*fns)
        if classes := [fn.__name__ for fn in fns if isinstance(fn, type)]:
            raise ProgramError(f"block {index} has the class {classes[0]}, not an instance. Write {classes[0]}(…)")
        if len(fns) > 2 and all(map(callable, fns)):
            count = len(fns)
            raise ProgramError(
                f"block {index} is a {type(block).__name__} of {count_word(count)} functions, not a pair of callables (f, g). "
                f"Give the functions of all blocks in turn, as pairs, with streams={count}; or write the updates yourself for "
                "rg.run or rg.Reversible"
            )
    size = f" of {len(block)}" if isinstance(block, (tuple, list)) else ""
    raise ProgramError(
        f"block {index} is a {type(block).__name__}{size}, not a pair of callables (f, g). Give a tuple (f, g), or a module with "
        "attributes f and g. Ordinary layers, x = layer(x), go to rg.Sequential"
    )


def _functions(depth: int, block: Any) -> tuple[Any, Any]:
    if isinstance(block, Block) and has_hooks(block):
        return _Through(block, "f"), _Through(block, "g")
    refuse_hooks(depth, block)
    return block.f, block.g
