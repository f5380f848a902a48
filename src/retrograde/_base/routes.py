"""Which functions of which blocks get which side inputs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from ..errors import ProgramError, at
from .function_modules import Around

Pair: TypeAlias = tuple[bool, bool]  # (to_f, to_g)
Route: TypeAlias = Pair | Mapping[str, Pair | Sequence[Pair]]


_EXAMPLE = "route={{{0!r}: (True, False)}} sends {0} to f of each block, not to g"


def refuse_misrouted(updates: Sequence[Any], side: Mapping[str, Any], error: TypeError, example: str = _EXAMPLE) -> None:
    """If some function cannot be called with the side inputs that it gets, that is what went wrong."""
    for index, update in enumerate(updates):
        fn, kwargs = update.fn, update.side_inputs(side)
        fn = fn.fn if isinstance(fn, Around) else fn
        try:
            inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).bind(None, **kwargs)
        except TypeError as why:
            named = re.search(r"'(\w+)'", str(why))
            name = named[1] if named else "mask"
            got = f"the side inputs {', '.join(sorted(kwargs))}" if kwargs else "no side inputs"
            raise ProgramError(
                f"fn was given {got}, and its arguments do not match: {why}. Pass what is missing to the net, and say with "
                f"route= which functions get what: {example.format(name)}",
                at(index, update),
            ) from error
        except ValueError:  # it does not say what it takes
            continue


def checked_route(route: Any, depth: int) -> Pair | dict[str, tuple[Pair, ...]]:
    """The route with one pair for each block, where it is given by name."""
    if not isinstance(route, Mapping):
        return checked_pair(route, "route")
    return {name: _in_blocks(name, pairs, depth) for name, pairs in route.items()}


def _in_blocks(name: str, given: Any, depth: int) -> tuple[Pair, ...]:
    if isinstance(given, (tuple, list)) and given and all(isinstance(goes, bool) for goes in given):
        return (checked_pair(given, f"route[{name!r}]"),) * depth
    if not isinstance(given, (tuple, list)) or len(given) != depth:
        got = len(given) if isinstance(given, (tuple, list)) else repr(given)
        raise ProgramError(f"route[{name!r}] needs one (to_f, to_g), or one (to_f, to_g) for each of {depth} blocks, got {got}")
    return tuple(checked_pair(one, f"route[{name!r}][{i}]") for i, one in enumerate(given))


def checked_pair(one: Any, name: str) -> Pair:
    if not isinstance(one, (tuple, list)) or len(one) != 2 or not all(isinstance(goes, bool) for goes in one):
        raise ProgramError(f"{name} must be a pair of bools (to_f, to_g), got {one!r}")
    return one[0], one[1]
