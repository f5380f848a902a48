"""What the drop-in replacements have in common: blocks under the keys of the originals, `blocks.{i}.f.net.…`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from torch import nn

from .._base.generators import Draws, generators
from .._engine.run import invert, run
from ..errors import ProgramError
from ..modules import checked_pair, halves, joined, refuse_hooks
from ..update import ALL, Update
from ..wirings import pair

Args = Mapping[str, Any] | None
BOTH_HALVES = "It is to hold both halves: torch.cat((x, x), dim)"


class Deterministic(nn.Module):
    """A function under the key `net`. Programs replay random numbers without it.

    By itself: with `record_rng` it notes the states of the generators, with `set_rng` it draws from there once more.
    """

    def __init__(self, net: Any):
        super().__init__()
        self.net = net
        self.recorded: Draws | None = None

    @property
    def __name__(self) -> str:  # what error messages call it
        return getattr(self.net, "__name__", type(self.net).__name__)

    def forward(self, *args: Any, record_rng: bool = False, set_rng: bool = False, **kwargs: Any) -> Any:
        if record_rng:
            self.recorded = Draws(generators([]))
        if not set_rng:
            return self.net(*args, **kwargs)
        if self.recorded is None:
            raise ProgramError(f"set_rng=True, and {self.__name__} was never called with record_rng=True")
        present = Draws(generators([]))
        self.recorded.put_back()
        try:
            return self.net(*args, **kwargs)
        finally:
            present.put_back()


def functions(blocks: Iterable[Any], names: str = "f, g") -> list[tuple[Any, ...]]:
    """The functions of each block, as many as there are names."""
    count, found = len(names.split(", ")), []
    for i, block in enumerate(blocks):
        fns = tuple(block) if isinstance(block, Iterable) else (block,)
        if len(fns) != count or not all(callable(fn) and not isinstance(fn, type) for fn in fns):
            raise ProgramError(f"block {i} is a {type(block).__name__} of {len(fns)}, not {count} callables ({names})")
        found.append(fns)
    return found


def pairs(blocks: Any, kept: Iterable[int], arg_route: Any) -> list[Update]:
    """The updates of those pair blocks, where all side inputs go to f and g as `arg_route` says."""
    takes = [ALL if goes else () for goes in checked_pair(arg_route, "arg_route")]
    updates = []
    for i in kept:
        refuse_hooks(i, blocks[i])
        updates += pair(blocks[i].f, blocks[i].g, takes=takes)
    return updates


class PairBlock(nn.Module):
    """x1 += f(x2), x2 += g(x1), by itself: on a tensor that holds both halves along `dim`. Backward is autograd's."""

    dim = -1
    memory = "reverse"

    def __init__(self, f: Any, g: Any):
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x: Any, f_args: Args = None, g_args: Args = None) -> Any:
        given = {"f": f_args or {}, "g": g_args or {}}
        takes = [{key: f"{fn}.{key}" for key in args} for fn, args in given.items()]
        side = {f"{fn}.{key}": value for fn, args in given.items() for key, value in args.items()}
        x1, x2 = halves(x, self.dim, BOTH_HALVES)
        out = run(pair(self.f, self.g, takes=takes), {"x1": x1, "x2": x2}, side, memory=self.memory)
        return joined(out["x1"], out["x2"], dim=self.dim)


def chained(parts: Iterable[tuple[int | None, list[Update]]], x: Any, *, back: bool = False, **options: Any) -> Any:
    """Blocks one after the other, each given by the dim of its halves and its updates of x1 and x2; or back from their output.

    Neighbours along one dim are one program. Where the dim is None the updates are of x, the whole input.
    """
    groups = [(dim, [u for _, updates in group for u in updates]) for dim, group in groupby(parts, key=lambda part: part[0])]
    act = invert if back else run
    for dim, updates in reversed(groups) if back else groups:
        if dim is None:
            x = act(updates, {"x": x}, **options)["x"]
        else:
            x1, x2 = halves(x, dim, "Pad it, or split along another dim")
            out = act(updates, {"x1": x1, "x2": x2}, **options)
            x = joined(out["x1"], out["x2"], dim=dim)
    return x
