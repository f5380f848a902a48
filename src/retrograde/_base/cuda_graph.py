"""Random numbers inside a CUDA graph: a generator cannot be read or set while a graph is captured, so what was drawn is kept.

In the first run of a fn, the results of operations that draw are kept (a dropout's mask and output, not what leads to them or
follows from them); in the recomputation those operations return them. So each replay of the graph draws new numbers, and
within one replay both runs see the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import errors
from .torch_private import TorchDispatchMode, home_of, schema_of, tree_leaves


def capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def draws(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws from a generator; attention without dropout, or dropout in evaluation, does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {a.name: a.default_value for a in schema_of(func).arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in schema_of(func).arguments), args, strict=False)) | kwargs
    if any(given.get(key) == 0 for key in ("dropout_p", "dropout", "p") if key in given):
        return False
    return all(given.get(key) is not False for key in ("train", "training", "is_training"))


class Drawn(TorchDispatchMode):
    """Around the first run of a fn: keeps what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[Tensor]] = []
        self.copied: set[int] = set()  # numbers of those that fn edits, as dropout does on some devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if written and self.kept:
            self._copy_before_it_is_edited({home_of(t) for t in written})
        out = func(*args, **kwargs)
        if draws(func, args, kwargs):
            new = [] if _returns_what_it_writes(func) else tree_leaves(out)
            self.kept.append([t.detach() for t in (*written, *new) if isinstance(t, Tensor)])
        return out

    def _copy_before_it_is_edited(self, homes: set[int]) -> None:
        for number, made in enumerate(self.kept):
            if number not in self.copied and any(home_of(t) in homes for t in made):
                self.kept[number] = [t.clone() for t in made]
                self.copied.add(number)


class DrawnAgain(TorchDispatchMode):
    """Around the recomputation: operations that draw return what was kept."""

    def __init__(self, drawn: Drawn, where: str):
        super().__init__()
        self.drawn, self.where, self.at = drawn, where, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        if self.at == len(self.drawn.kept):
            raise errors.other_path(self.where, "it drew more random numbers")
        made, edited = self.drawn.kept[self.at], self.at in self.drawn.copied
        self.at += 1
        written = _written(func, args, kwargs)
        for t, value in zip(written, made, strict=False):
            t.copy_(value)
        found = written if _returns_what_it_writes(func) else [t.clone() if edited else t.detach() for t in made[len(written) :]]
        return found[0] if len(schema_of(func).returns) == 1 else tuple(found)


def _returns_what_it_writes(func: Any) -> bool:
    return any(r.alias_info is not None and r.alias_info.is_write for r in schema_of(func).returns)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    given = dict(zip((a.name for a in schema_of(func).arguments), args, strict=False)) | kwargs
    names = [a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write]
    return [given[name] for name in names if isinstance(given.get(name), Tensor)]
