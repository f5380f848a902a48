"""What a budget buys: the saved tensors of the last updates, counted by their storages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .errors import ProgramError
from .held import home_of
from .replay import untraced


class Purse:
    """Holds the records of stored updates, and empties the oldest when there is no room.

    Within the limit at all times: the streams and their gradients, what is stored, and as much again as the largest fn saves, for
    one fn at work in either direction.
    """

    def __init__(self, limit: int, streams: Iterable[Tensor], room: int = 0):
        self.limit = limit
        self.base = 2 * sum(t.nbytes for t in streams) + room
        self.total = 0  # bytes that are stored
        self.largest = 0  # bytes that one fn saves
        self.stored: deque[tuple[Any, dict[int, int]]] = deque()
        self.holders: dict[int, int] = {}  # how many stored updates share a storage
        self.growing: dict[int, int] = {}  # storages of the fn that is running
        self.foreign: set[int] = set()  # storages that exist anyway

    @untraced
    def watching(self, pack: Callable[[Tensor], int], foreign: Iterable[Tensor]) -> Callable[[Tensor], int]:
        """The pack hook of a fn, which now makes room as it goes."""
        self.growing, self.foreign = {}, {home_of(t) for t in foreign}

        def watched(t: Tensor) -> int:
            self._grow(t)
            self.largest = max(self.largest, sum(self.growing.values()))
            self._make_room(0)
            return pack(t)

        return watched

    def buys(self, record: Any, where: str, before: list[Tensor]) -> bool:
        """Whether the update that has just run is stored; older ones may have to go for it."""
        for t in before:
            self._grow(t)
        if self.base + self.largest > self.limit:
            raise ProgramError(
                f"rg.Budget({self.limit}) is too small: with nothing stored this takes {self.base + self.largest} bytes, for the "
                f"streams, their gradients and what fn saves. Give at least that, or use smaller inputs",
                where,
            )
        if not self._make_room(sum(size for key, size in self.growing.items() if key not in self.holders)):
            return False
        self.stored.append((record, self.growing))
        for key, size in self.growing.items():
            self.holders[key] = self.holders.get(key, 0) + 1
            self.total += size if self.holders[key] == 1 else 0
        return True

    def _grow(self, t: Tensor) -> None:
        if home_of(t) not in self.foreign:
            self.growing[home_of(t)] = t.untyped_storage().nbytes() if t.layout is torch.strided else t.numel() * t.element_size()

    def _make_room(self, extra: int) -> bool:
        while self.stored and self.base + self.total + self.largest + extra > self.limit:
            record, storages = self.stored.popleft()
            record.values = record.before = None
            for key, size in storages.items():
                self.holders[key] -= 1
                if not self.holders[key]:
                    del self.holders[key]
                    self.total -= size
        return self.base + self.total + self.largest + extra <= self.limit
