"""A meter of live tensor bytes that works on every device, the CPU included."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .torch_private import TorchDispatchMode, home_of, tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensor storages that operations make while it is active, and their peak.

    Storages that existed before do not count, nor does memory that an operation uses inside. Buffers of random states are not
    made by operations and do not count either.

    >>> import torch
    >>> with LiveBytes() as meter:
    ...     a = torch.ones(1000)
    ...     b = a + 1
    ...     del a
    ...     c = b * 2
    >>> meter.live, meter.peak
    (8000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {home_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                key = home_of(t)
                if key not in before:
                    self._count(key, t.untyped_storage())
        return out

    def _count(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        known = self._known.get(key)
        if known is not None and known() is not None:
            return

        def freed(_: Any) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def peak_on_cuda(step: Callable[[], object]) -> tuple[int, int]:
    """Peak bytes of a step over what is there before it, and the peak of everything, by the allocator."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return peak - before, peak


def peak_on_cpu(step: Callable[[], object]) -> int:
    """Peak bytes that a step allocates on the CPU, by torch's profiler: it sees the buffers of compiled functions too.

    (Under a dispatch mode as above, torch.compile does not run what it compiled.)

    >>> import torch
    >>> peak_on_cpu(lambda: torch.ones(1000).exp())
    8000
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    results: Any = profiler.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    live = accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    return max(0, *live)
