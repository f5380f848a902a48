"""How far each way to train goes in a given memory: the deepest net, the longest sequence, the largest batch."""

from __future__ import annotations

import math
from collections.abc import Callable

from .predict import Between, Planner, Sizes

MOST = 1_000_000  # blocks; what goes deeper is not limited by memory
CAP = 1 << 12  # times the size that was given
TRIES = 12
ABOVE, BELOW = 0.05, 0.02  # how near is next to a step that fits, and to one that does not


def deepest(planner: Planner, way: str, sizes: Sizes) -> int:
    """The largest depth that fits, 0 where none does."""
    most = deepest(planner, "reverse", sizes) if _what_is_left(planner, way) else MOST
    return _bisected(lambda depth: _fits(planner, way, (depth, *sizes[1:])), most)


def longest(planner: Planner, way: str, sizes: Sizes) -> int:
    """The longest sequence that fits, to about two percent."""
    depth, seq, batch = sizes
    return _largest(planner, way, lambda n: (depth, n, batch), seq, 1 << max(0, seq.bit_length() - 7))


def widest(planner: Planner, way: str, sizes: Sizes) -> int:
    """The largest batch that fits."""
    depth, seq, batch = sizes
    return _largest(planner, way, lambda n: (depth, seq, n), batch, 1 << max(0, batch.bit_length() - 7))


def _fits(planner: Planner, way: str, sizes: Sizes) -> bool:
    return _cost(planner, way, sizes) <= planner.setting["room"]


def _what_is_left(planner: Planner, way: str) -> bool:
    """Whether it is a budget that is not given: it goes no further than reverse."""
    return way == "budget" and not planner.setting["budget"]


def _cost(planner: Planner, way: str, sizes: Sizes) -> int:
    """The peak. A budget needs what it wants to keep free; one that is given goes no further than where it is too small, which
    is a part of the room here as well, so that both rise on lines."""
    if way != "budget":
        return planner.at(way, sizes).peak
    least, given, room = planner.least_budget(sizes), planner.setting["budget"], planner.setting["room"]
    if not given:
        return least + planner.beside_budget(sizes)
    part = math.ceil(least / given * room)
    if least > given:
        return part
    if isinstance(planner, Between):  # under a budget the steps of two sizes store other blocks: it is used up, or all are stored
        most = given + planner.beside_budget(sizes)
        return max(part, planner.at("reverse", sizes).peak, min(planner.at("store", sizes).peak, most))
    return max(part, planner.at(way, sizes).peak)


def _bisected(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits; the smaller ones then fit too."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _largest(planner: Planner, way: str, sizes: Callable[[int], Sizes], start: int, unit: int) -> int:
    """The largest multiple of the unit that fits, give or take two percent.

    Traced steps say where the limit should be, and a step is traced there, until the limit is next to one that was traced.
    """
    room = planner.setting["room"]
    most = _largest(planner, "reverse", sizes, start, unit) if _what_is_left(planner, way) else CAP * max(unit, start)
    if not most:
        return 0
    tried = [min(most, max(unit, start // unit * unit))]
    low, high = 0, most + unit  # fits, does not
    for _ in range(TRIES):
        at = tried[-1]
        fits = _cost(planner, way, sizes(at)) <= room
        low, high = (at, high) if fits else (low, at)
        ahead = _foretold(Between(planner, [sizes(n) for n in tried[-2:]]), way, sizes, room, high, unit)
        if high - low <= max(unit, low // 64):
            return low
        if ahead == at or (len(tried) > 1 and low <= ahead and abs(ahead - at) <= (ABOVE if fits else BELOW) * at):
            return ahead
        tried.append(ahead if ahead > low else max(unit, (low + high) // 2 // unit * unit) if low else unit)
    return low


def _foretold(planner: Between, way: str, sizes: Callable[[int], Sizes], room: int, high: int, unit: int) -> int:
    return unit * _bisected(lambda n: _cost(planner, way, sizes(unit * n)) <= room, (high - 1) // unit)
