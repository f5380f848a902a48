"""How far each way to train goes in a given memory: the deepest net, the longest sequence, the largest batch."""

from __future__ import annotations

import math
from collections.abc import Callable

from .predict import Planner, Sizes

MOST = 1_000_000  # blocks; what goes deeper is not limited by memory
TRIES = 12


def deepest(planner: Planner, way: str, sizes: Sizes) -> int:
    """The largest depth that fits, 0 where none does."""
    return _bisected(lambda depth: _fits(planner, way, (depth, *sizes[1:])), MOST)


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


def _cost(planner: Planner, way: str, sizes: Sizes) -> int:
    """The peak. A budget goes as far as reverse, or less by what it wants to keep free; one that is given, no further than where
    it is too small, which is a part of the room here as well, so that both rise on lines."""
    if way != "budget":
        return planner.at(way, sizes).peak
    least, given, room = planner.least_budget(sizes), planner.setting["budget"], planner.setting["room"]
    if not given:
        return max(planner.at("reverse", sizes).peak, least + planner.beside_budget(sizes))
    part = math.ceil(least / given * room)
    return part if least > given else max(part, planner.at(way, sizes).peak)


def _bisected(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits; the smaller ones then fit too."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _largest(planner: Planner, way: str, sizes: Callable[[int], Sizes], start: int, unit: int) -> int:
    return _by_lines(lambda n: _cost(planner, way, sizes(n)), planner.setting["room"], start, unit)


def _by_lines(cost: Callable[[int], float], room: float, start: int, unit: int) -> int:
    """The largest multiple of the unit that costs no more than the room, give or take two percent of it.

    Each line through the last two points says where to look next: three looks, where the cost itself rises on a line.

    >>> _by_lines(lambda n: 100 + 3 * n, 1000, 64, 4), _by_lines(lambda n: n * n, 10_000, 7, 1), _by_lines(lambda n: 9.0, 3, 8, 1)
    (300, 100, 0)
    """
    low, high = 0, None  # fits, does not
    at = max(unit, start // unit * unit)
    last = None
    for _ in range(TRIES):
        spent = cost(at)
        low, high = (at, high) if spent <= room else (low, at)
        if last is None:
            ahead = 2 * at if spent <= room else at // 2
        else:
            slope = (spent - last[1]) / (at - last[0])
            ahead = at + (room - spent) / slope if slope > 0 else 2 * at
            if low == at and low <= ahead < low + unit:
                break
        last = at, spent
        at = int(ahead // unit) * unit
        if at <= low or (high is not None and at >= high):
            at = max(unit, (low + (high or 4 * low)) // 2 // unit * unit) if low else unit
        if high is not None and high - low <= max(unit, low // 64):
            break
    return low
