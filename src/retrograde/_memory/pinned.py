"""Pinned host memory, which a device copies to and from while the net runs on: buffers of exact size, kept for the next pass.

Pinning takes milliseconds, so buffers are reused, across passes and shapes. torch's own pinned allocator rounds sizes up to
powers of two; here a buffer has the size that was asked for, up to whole pages.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import no_host_memory, no_pinned_memory

PAGE = mmap.PAGESIZE
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")  # where Linux says what the machine has, and what this process may take
_LIMITS = {  # by controllers: where they are, the most that may be taken, and what is
    "": ("", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
_size = attrgetter("size")


class Buffer:
    """Some pinned bytes. `last`: the event of the copy that used them last."""

    __slots__ = ("bytes", "last", "size")

    def __init__(self, pinned: Tensor):
        self.bytes, self.size, self.last = pinned, pinned.nbytes, None


class Pool:
    """The buffers of this process. The smallest free one that is large enough serves; smaller ones make room for a new one.

    So it holds no more than what was in use at once, with each buffer as large as the largest tensor that it has held.
    """

    def __init__(self, pin: Callable[[int], Tensor], unpin: Callable[[Tensor], None]):
        self.pin, self.unpin = pin, unpin
        self.free: list[Buffer] = []  # by size
        self.returned: deque[Buffer] = deque()  # by whoever the collector runs in: appending needs no lock
        self.lock = threading.RLock()
        self.pinned = self.used = self.peak = 0

    def take(self, size: int, most: int | None) -> Buffer | None:
        """A buffer of at least so many bytes, or None where the pool would come to hold more than `most`."""
        size = -(-size // PAGE) * PAGE
        with self.lock:
            self._drain()
            found = next((b for b in self.free if b.size >= size), None)
            if found is not None:
                self.free.remove(found)
            else:
                if most is not None and self.pinned + size - sum(b.size for b in self.free) > most:
                    return None
                room = 0
                while self.free and (room < size or (most is not None and self.pinned + size > most)):
                    room += self._unpin(self.free.pop(0))
                if (left := available()) is not None and size > left:
                    raise no_host_memory(size, left)
                found = Buffer(self.pin(size))
                self.pinned += found.size
            self.used += found.size
            self.peak = max(self.peak, self.used)
            return found

    def give(self, buffer: Buffer) -> None:
        """Take it back; its next user waits for its last copy."""
        self.returned.append(buffer)

    def _drain(self) -> None:
        while self.returned:
            buffer = self.returned.popleft()
            self.used -= buffer.size
            insort(self.free, buffer, key=_size)

    def _unpin(self, buffer: Buffer) -> int:
        if buffer.last is not None:
            buffer.last.synchronize()
        self.unpin(buffer.bytes)
        self.pinned -= buffer.size
        return buffer.size

    def release(self) -> int:
        """Give what nobody uses back to the system; returns the number of bytes."""
        with self.lock:
            self._drain()
            freed = sum(map(self._unpin, self.free))
            self.free.clear()
            return freed

    def room(self) -> int:
        """Bytes that are pinned, and free."""
        with self.lock:
            self._drain()
            return self.pinned - self.used

    def counted(self) -> tuple[int, int, int]:
        with self.lock:
            self._drain()
            return self.pinned, self.used, self.peak


def available() -> int | None:
    """How much host memory new buffers may take, as far as the system says. What holds files that were read can be freed."""
    found = []
    with contextlib.suppress(OSError, StopIteration), open(_PROC / "meminfo", encoding="ascii") as lines:
        found.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")))
    for folder, most, used in _groups():
        with contextlib.suppress(OSError, ValueError, KeyError):  # there is none, or it has no limit
            limit, taken = (int((folder / name).read_text()) for name in (most, used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            found.append(limit - taken + int(stat["active_file"]) + int(stat["inactive_file"]))
    return min(found, default=None)


def _groups() -> Iterator[tuple[Path, str, str]]:
    """The groups of processes that this one is in, a container or a job, from the inside out: their folders and files."""
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in _LIMITS:
                under, *names = _LIMITS[controllers]
                own = _GROUPS / under / path.strip("/")
                yield from ((folder, *names) for folder in (own, *own.parents) if folder.is_relative_to(_GROUPS / under))  # type: ignore[misc]


def pin(size: int) -> Tensor:
    """Pages that CUDA has pinned: a shared mapping of their own, so that a process that forks copies none of them."""
    try:
        pages = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    except OSError as error:
        raise no_pinned_memory(size) from error
    if int(_runtime().cudaHostRegister(pages.data_ptr(), size, 1)):
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.zeros(1, device="cuda")  # CUDA remembers the error, and would report it here
        raise no_pinned_memory(size)
    return pages


def unpin(pages: Tensor) -> None:
    _runtime().cudaHostUnregister(pages.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()
