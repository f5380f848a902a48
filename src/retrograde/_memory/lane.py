"""What is kept for backward moves to host memory while the net runs on, and is back before backward needs it.

The life of what an update keeps (`Moved`):
1. The update keeps it (`Lane.keep`). It stays on the device while its block runs.
2. The next block begins (`Lane.begin`): the copy to the host starts. So the last block's never moves.
3. One block later the device memory is let go (`Lane._retire`); what is computed next waits for the copy, if it must.
4. Backward asks for it (`Lane.fetch`): it is there already, as the copy back started when backward asked for the one after it.
5. The graph is freed: the buffer goes back to the pool. So does that of a loss that was dropped.

Autograd owns what is kept (`Kept`); a lane knows it weakly. The rules of the copies stand in link.py.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._base.torch_private import at_end_of_backward, graph_task, home_of, version_of
from ..errors import edited_output
from .link import Link
from .pinned import Buffer, Pool

_FAR = 8  # links of the chain that a prefetch follows


class Moved:
    """A storage that some updates keep: on the device, on its way to the host, there, or back."""

    __slots__ = (
        "__weakref__", "asked", "back", "buffer", "count", "edited", "given", "lane", "made", "owner", "previous", "size",
        "stream", "tensor", "version",
    )  # fmt: skip

    def __init__(self, lane: Lane, t: Tensor, owner: object):
        self.lane, self.owner = lane, owner
        self.tensor: Tensor | None = t.detach()  # while it is on the device
        self.version, self.edited = version_of(t), False
        self.size = t.untyped_storage().nbytes()
        self.stream, self.made = lane.link.here(), lane.link.mark()
        self.buffer: Buffer | None = None
        self.back: tuple[Tensor, Any, Any] | None = None  # on the device again: the bytes, the event of the copy, the stream
        self.count = self.asked = 0  # how many hold it, and how many of them have asked since it came back
        self.given = -1  # the backward pass in which all had asked: it is not brought again unasked
        self.previous = lane.latest  # what was kept before: backward asks for it next

    def drop(self) -> None:
        """Let go of what came back. Its memory may be used again when the copy is done."""
        if self.back is not None:
            self.lane.link.wait(self.back[1], {self.back[2]})
        self.back, self.asked = None, 0

    def __del__(self) -> None:
        self.drop()
        if self.buffer is not None:
            self.lane.pool.give(self.buffer)


class Kept(NamedTuple):
    """What autograd keeps in place of a tensor: a view of a storage that moves."""

    moved: Moved
    what: str  # for errors
    dtype: torch.dtype
    shape: Any
    strides: Any
    offset: Any

    def view(self, storage: Any) -> Tensor:
        """The tensor, with a version of its own."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.strides).data


class _Leaving(NamedTuple):
    """A device tensor whose copy to the host is under way."""

    block: int
    tensor: Tensor
    version: int
    event: Any
    streams: set[Any]
    moved: weakref.ref[Moved]


class Lane:
    """What moves between one device and the host."""

    def __init__(self, device: torch.device, link: Link):
        self.device, self.link, self.pool = device, link, Pool(link.pin, link.unpin)
        self.lock = threading.RLock()
        self.blocks: deque[list[weakref.ref[Moved]]] = deque([[]])  # what the latest blocks keep
        self.begun = 0  # so many blocks
        self.leaving: deque[_Leaving] = deque()
        self.latest: weakref.ref[Moved] | None = None
        self.known: Any = WeakIdKeyDictionary()  # by tensor and version: what many updates read moves once
        self.homes: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()  # by storage, while it is here
        self.came: list[weakref.ref[Moved]] = []  # back, in the backward pass that is running
        self.task = -1  # this
        self.copied_out = self.copied_back = 0

    # -- forward -------------------------------------------------------------------------------------------------------

    def begin(self, keep_last: int, most: int | None) -> None:
        """A block begins. What blocks before it keep moves, but for the last `keep_last` of all."""
        with self.lock:
            while len(self.blocks) >= keep_last:
                for moved in (ref() for ref in self.blocks.popleft()):
                    if moved is not None:
                        self._send(moved, most)
            self.blocks.append([])
            self.begun += 1
            self._retire(self.begun - 1)

    def keep(self, t: Tensor, what: str, owner: object) -> Kept:
        """What autograd is to keep in place of `t`. `owner`: of the forward pass."""
        whole = t.untyped_storage().nbytes() <= 2 * t.nbytes or 0 in t.stride()
        with self.lock:
            moved = self._known(t, whole, owner)
            if moved is None:
                moved = Moved(self, t if whole else t.detach().clone(), owner)  # a small part of a storage moves alone
                self.latest = weakref.ref(moved)
                self.blocks[-1].append(self.latest)
                if whole:
                    self.homes[home_of(t)] = moved
            self.known[t] = weakref.ref(moved), version_of(t)
            moved.count += 1
        strides, offset = (t.stride(), t.storage_offset()) if whole else (torch.empty_like(t, device="meta").stride(), 0)
        return Kept(moved, what, t.dtype, t.shape, strides, offset)

    def _known(self, t: Tensor, whole: bool, owner: object) -> Moved | None:
        """What many updates read moves once, however many views of it there are."""
        ref, version = self.known.get(t, (None, 0))
        moved = None if ref is None else ref()
        if moved is None and whole and (moved := self.homes.get(home_of(t))) is not None:
            version = moved.version
        if moved is None or version != version_of(t):
            return None
        return moved if moved.owner is owner or t.grad_fn is not None else None  # inputs are edited between passes, as `x.data`

    def _send(self, moved: Moved, most: int | None) -> None:
        """Start the copy to the host, if there is room for it."""
        if moved.tensor is None or (buffer := self.pool.take(moved.size, most)) is None:
            return
        event = self.link.out(_bytes_of(moved.tensor), buffer.bytes[: moved.size], (moved.made, buffer.last))
        moved.buffer, buffer.last = buffer, event
        self.copied_out += moved.size
        streams = {moved.stream, self.link.here()}
        self.leaving.append(_Leaving(self.begun, moved.tensor, moved.version, event, streams, weakref.ref(moved)))

    def _retire(self, before: int) -> None:
        """Let go of device tensors whose copies were started some blocks ago: what is computed next waits for the copies."""
        while self.leaving and self.leaving[0].block < before:
            one = self.leaving.popleft()
            self.link.wait(one.event, {*one.streams, self.link.here()})
            self.homes.pop(home_of(one.tensor), None)
            moved = one.moved()
            if moved is not None:
                moved.edited = version_of(one.tensor) != one.version  # while the copy was under way: nobody knows what was copied
                moved.tensor = None

    # -- backward ------------------------------------------------------------------------------------------------------

    def fetch(self, kept: Kept) -> Tensor:
        """The tensor on the device; and what backward asks for next is on its way."""
        moved = kept.moved
        with self.lock:
            if graph_task() not in (-1, self.task):
                self.task = graph_task()
                at_end_of_backward(self._end)
            if moved.edited or (moved.tensor is not None and version_of(moved.tensor) != moved.version):
                raise edited_output(kept.what)
            if moved.tensor is not None:
                found = kept.view(moved.tensor.untyped_storage())
            else:
                if moved.back is not None and moved.back[2] != self.link.here():
                    moved.drop()  # memory of another stream, which may use it again before this one is done
                target, event, _ = moved.back or self._load(moved)
                self.link.wait(event, {self.link.here()})
                found = kept.view(target.untyped_storage())
                moved.asked += 1
                if moved.asked >= moved.count:
                    moved.back, moved.asked, moved.given = None, 0, graph_task()
            if graph_task() >= 0:
                self._prefetch(moved)
            return found

    def _prefetch(self, moved: Moved) -> None:
        far = 0
        while far < _FAR and (before := moved.previous and moved.previous()) is not None:
            moved = before
            if moved.given == graph_task():
                continue  # kept by the same node, which asks in the order of the forward pass
            if moved.tensor is None and moved.back is None:
                self._load(moved)
                return
            far += 1

    def _load(self, moved: Moved) -> tuple[Tensor, Any, Any]:
        """Start the copy back, into memory of the stream that asks."""
        buffer: Any = moved.buffer
        target = torch.empty(moved.size, dtype=torch.uint8, device=self.device)
        event = self.link.back(buffer.bytes[: moved.size], target, (buffer.last, self.link.mark()))
        buffer.last, moved.back = event, (target, event, self.link.here())
        self.came.append(weakref.ref(moved))
        self.copied_back += moved.size
        return moved.back

    def _end(self) -> None:
        """A backward pass is over: what came back and was not asked for goes, and so does what was leaving."""
        with self.lock:
            self._retire(self.begun + 1)
            for moved in (ref() for ref in self.came):
                if moved is not None:
                    moved.drop()
            self.came.clear()


def _bytes_of(t: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
