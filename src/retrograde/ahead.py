"""The second run of the next update beside the gradients of the present one, on a second stream of the device.

Two streams share memory here, and the allocator knows nothing of it: a block goes back to the stream that it was made on as soon
as its tensor dies, though the other stream may still be at work on it. So what both have touched is held until each has waited
for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .walks import Walk

KINDS = ("cuda",)  # of devices that have streams
_STREAMS: dict[Any, Any] = {}  # the second one, by device and first one: what another first one uses is not waited for


def lane_on(devices: Iterable[torch.device]) -> torch.device | None:
    """The device, if there is one alone and it has streams."""
    only = set(devices)
    device = only.pop() if len(only) == 1 else None
    return device if device is not None and device.type in KINDS else None


class Ahead:
    """What runs on the second stream for a walk: the update below the one that was asked for last."""

    __slots__ = ("device", "done", "lent", "main", "module", "stream", "used", "versions")

    def __init__(self, device: torch.device):
        self.device, self.module = device, getattr(torch, device.type)
        pair = device, self.module.current_stream(device)
        if pair not in _STREAMS:
            _STREAMS[pair] = self.module.Stream(device) if device.type == "cuda" else self.module.Stream()
        self.stream = _STREAMS[pair]
        self.main: Any = None  # the stream of the gradients
        self.done: tuple[Walk, list[Tensor | None]] | None = None  # where it has got to, and what fn saved there
        self.versions: list[int | None] = []  # of what fn saved, when it did
        self.lent: Any = None  # in use on both streams …
        self.used: Any = None  # … and since the last time

    def start(self, walk: Walk, again: Callable[[Walk], list[Tensor | None]]) -> list[Tensor | None]:
        """Run the next update again, from where the walk stands; the walk itself stays there. Returns what fn saves."""
        self.main = self.module.current_stream(self.device)
        self.stream.wait_stream(self.main)
        self.used = None  # all that the gradients did with it comes before what the second stream does now
        further = Walk(dict(walk.state), walk.side, walk.at, walk.thread)
        further.marks = walk.marks
        with self.module.stream(self.stream):
            values = again(further)
        self.done = further, values
        return values

    def join(self, walk: Walk) -> list[Tensor | None]:
        """Move the walk to where the second stream is; returns what fn saved there."""
        assert self.done is not None
        further, values = self.done
        self.main = self.module.current_stream(self.device)
        self.main.wait_stream(self.stream)
        self.done, self.used, self.lent = None, (self.used, self.lent), (walk.state, list(values))
        walk.state, walk.at, walk.marks, walk.versions = further.state, further.at, further.marks, further.versions
        return values

    def leave(self) -> None:
        """Let go of everything; nothing is left on the second stream that the first does not wait for."""
        if self.main is not None:
            self.stream.wait_stream(self.main)
            self.main.wait_stream(self.stream)
        self.done = self.used = self.lent = self.main = None
