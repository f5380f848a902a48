"""What a budget buys: the saved tensors of the last updates, counted by their storages."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ProgramError
from .held import home_of
from .replay import untraced


def free_bytes(program: Any, streams: list[Tensor]) -> int:
    """What activations may take on the device of the streams, as far as can be told now."""
    device = streams[0].device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    elif device.type == "cpu" and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        raise ProgramError(f"rg.Budget('auto') does not know how much is free on {device}. Give a number of bytes")
    own = {id(p): p for update in program.updates if isinstance(update.fn, nn.Module) for p in update.fn.parameters()}
    missing = sum(p.nbytes for p in own.values() if p.requires_grad and p.grad is None)
    return max(1, int(0.9 * (free - missing)))


class Learned:
    """What passes at the same sizes have taught: of what is free, and of functions in two forms (forms.py)."""

    def __init__(self) -> None:
        self.free: int | None = None  # the least that was free on the device
        self.full = 0  # so many of the last updates run in the full form, the others in the lean one
        self.growing = True  # more of them may
        self.last: Any = None  # how many were stored in the last pass, and how many in full
        self.stored: int | None = None  # how many are, once two passes were alike: from then on nothing is counted any more

    def look_at(self, purse: Purse, count: int) -> None:
        """After a forward pass of `count` updates: where all are stored and there is room, the last may be stored in full."""
        now = len(purse.stored), self.full
        missing = count - len(purse.stored)
        if self.growing and not missing and not self.full:
            self.full = min(2, count)  # to see what they save
        elif self.growing and self.full:
            sizes: dict[bool, list[int]] = {True: [0], False: [0]}
            for record, storages in purse.stored:
                sizes[record.lean].append(sum(storages.values()))
            lean, full = (sum(found) / max(1, len(found) - 1) for found in (sizes[True], sizes[False]))
            more = max(1.0, full - lean)
            left = purse.limit - purse.base - purse.total - purse.largest
            if missing:  # too many: those that had to go for them ran for nothing
                self.full -= min(self.full, math.ceil(missing * lean / more))
            else:
                self.full = min(count, self.full + int(left / more))
            self.growing = not missing and now[1] < self.full < count
        if now == self.last and self.full == now[1]:
            self.stored = now[0]
        self.last = now


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
