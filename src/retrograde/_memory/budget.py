"""What a budget buys: the saved tensors of the last updates, counted by their storages."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._base.torch_private import home_of
from .._base.tracing import untraced
from ..errors import BudgetTooSmall, ProgramError


class Learned:
    """What passes at the same sizes have taught: of what is free, and of functions in two forms (_base/lean.py).

    The first pass runs all in the full form and the second in the lean one, both counted; from then on it is known what each
    update saves, and nothing is counted any more.
    """

    def __init__(self, free: int | None = None) -> None:
        self.free = free  # the least that was free on the device
        self.sizes: list[list[int]] = []  # bytes that updates save: in the full form, in the lean one
        self.largest = 0
        self.stored = self.full = 0  # so many of the last updates are stored; so many of these in the full form

    def learn(self, purse: Purse) -> None:
        self.sizes.append(purse.sizes)
        self.largest = max(self.largest, purse.largest)
        if len(self.sizes) == 2:
            self._choose(purse.limit - purse.base - self.largest, purse.room)

    def _choose(self, left: int, room: int) -> None:
        """All in the lean form if that is possible, and then the last in full; else the last in the lean form."""
        full, lean = self.sizes
        count = len(lean)
        if sum(lean) <= left + room // 2:  # where nothing is undone, half of the room for sums is enough
            left += room // 2 - sum(lean)
            self.stored = count
            while self.full < count and full[-1 - self.full] - lean[-1 - self.full] <= left:
                left -= full[-1 - self.full] - lean[-1 - self.full]
                self.full += 1
        else:
            while self.stored < count and lean[-1 - self.stored] <= left:
                left -= lean[-1 - self.stored]
                self.stored += 1


class Purse:
    """Holds the records of stored updates, and empties the oldest when there is no room.

    Within the limit at all times: the streams and their gradients, what is stored, and as much again as the largest fn saves, for
    one fn at work in either direction.
    """

    def __init__(self, limit: int, streams: Iterable[Tensor], room: int = 0):
        self.limit, self.room = limit, room
        self.base = 2 * sum(t.nbytes for t in streams) + room
        self.total = 0  # bytes that are stored
        self.largest = 0  # bytes that one fn saves
        self.sizes: list[int] = []  # of each update, what its fn saves
        self.stored: deque[tuple[Any, dict[int, int]]] = deque()
        self.holders: dict[int, int] = {}  # how many stored updates share a storage
        self.growing: dict[int, int] = {}  # storages of the fn that is running
        self.foreign: set[int] = set()  # storages that exist anyway

    def keep(self, kept: Iterable[Tensor]) -> None:
        """These stay until backward, whatever is stored: the sources of a checkpoint."""
        self.base += sum({home_of(t): t.untyped_storage().nbytes() for t in kept}.values())

    @untraced
    def watching(self, pack: Callable[[Tensor], Any], foreign: Iterable[Tensor]) -> Callable[[Tensor], Any]:
        """The pack hook of a fn, which now makes room as it goes."""
        self.growing, self.foreign = {}, {home_of(t) for t in foreign}

        def watched(t: Tensor) -> Any:
            self._grow(t)
            self.largest = max(self.largest, sum(self.growing.values()))
            self._make_room(0)
            return pack(t)

        return watched

    def buys(self, record: Any, where: str, before: list[Tensor]) -> bool:
        """Whether the update that has just run is stored; older ones may have to go for it."""
        self.sizes.append(sum(self.growing.values()))
        for t in before:
            self._grow(t)
        if self.base + self.largest > self.limit:
            raise BudgetTooSmall(self.limit, self.base + self.largest, where)
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
