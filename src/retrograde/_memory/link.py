"""The link between a device and the host: copies that run beside the net, on streams of their own.

Four rules keep copies right. Tests forget one, and see that gradients or their verification tell (tests/memory/test_offload.py).
1. A copy to the host begins when what made the tensor is done: an event on the stream that it was made on.
2. The device tensor stays until its copy is done: the streams that use its memory wait for the event before it is let go.
   (`record_stream` would do as well, and memory would grow, as the allocator learns late that a copy is done.)
3. A copy back begins when the copy out is done, and its user's stream waits for it.
4. A buffer on the host serves again when its last copy is done.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .pinned import pin, unpin


class Link(Protocol):
    """What offloading needs of a device. A test has one for the CPU, which copies as late as it may."""

    def mark(self) -> Any:
        """An event: all that the device has been given to do so far."""

    def out(self, source: Tensor, buffer: Tensor, after: tuple[Any, ...]) -> Any:
        """Begin to copy to the host, after these events; returns the event of the copy."""

    def back(self, buffer: Tensor, target: Tensor, after: tuple[Any, ...]) -> Any:
        """Begin to copy to the device, after these events; returns the event of the copy."""

    def here(self) -> Any:
        """The stream that work is given to now."""

    def wait(self, event: Any, streams: set[Any]) -> None:
        """What is given to these streams from here on waits for the event."""

    def pin(self, size: int) -> Any:
        """So many bytes of host memory that it copies to and from."""

    def unpin(self, pinned: Tensor) -> None:
        """Give them back."""


class CudaLink:
    """Two copy engines, one for each direction."""

    pin, unpin = staticmethod(pin), staticmethod(unpin)

    def __init__(self, device: torch.device):
        self.device = device
        self.leaving, self.coming = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def mark(self) -> Any:
        return self.here().record_event()

    def here(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def out(self, source: Tensor, buffer: Tensor, after: tuple[Any, ...]) -> Any:
        return _copy(self.leaving, source, buffer, after)

    def back(self, buffer: Tensor, target: Tensor, after: tuple[Any, ...]) -> Any:
        return _copy(self.coming, buffer, target, after)

    def wait(self, event: torch.cuda.Event, streams: set[torch.cuda.Stream]) -> None:
        for stream in streams:
            stream.wait_event(event)


def _copy(stream: torch.cuda.Stream, source: Tensor, target: Tensor, after: tuple[Any, ...]) -> Any:
    for event in after:
        if event is not None:
            stream.wait_event(event)
    with torch.cuda.stream(stream), torch.no_grad():
        target.copy_(source, non_blocking=True)
    return stream.record_event()


MAKE: dict[str, Any] = {"cuda": CudaLink}  # by type of device; where there is none, nothing is moved
