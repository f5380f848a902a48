"""memory="offload" over the lanes of all devices: what moves and what stays, how much it will be, and what was counted."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.cuda_graph import capturing
from .._base.pytrees import tensors
from .._base.torch_private import home_of, version_of
from ..errors import edited_while_kept, host_too_small, no_host_memory
from ..memory import Offload
from . import link as links
from .lane import Kept, Lane
from .pinned import available

SMALL = 1 << 16  # bytes: less is not worth a copy
_LANES: dict[torch.device, Lane] = {}


class OffloadStats(NamedTuple):
    """Bytes of pinned host memory: all there is, what holds activations now, the most that did; and copied there, and back."""

    pinned: int = 0
    used: int = 0
    peak: int = 0
    copied_out: int = 0
    copied_back: int = 0


class Mover:
    """What one forward pass moves, by the lanes of its devices."""

    def __init__(self, how: Offload, devices: Iterable[torch.device]):
        self.how = how
        self.lanes = {device: _lane_of(device) for device in devices if device.type in links.MAKE}

    def block(self) -> None:
        for lane in self.lanes.values():
            lane.begin(self.how.keep_last, self.how.host)  # type: ignore[arg-type]

    def refuse_too_much(self, program: Any, streams: dict[str, Any]) -> None:
        """Before anything runs: whether there is host memory for what updates keep."""
        sizes = {name: sum(t.nbytes for t in tensors(streams[name]) if t.nbytes >= SMALL) for name in program.names}
        last = sum(program.blocks) - sum(program.blocks[-self.how.keep_last :])
        seen: set[tuple[str, int]] = set()
        changes = dict.fromkeys(sizes, 0)
        for update in program.updates[:last]:
            seen.update((name, changes[name]) for name in update.sources if name in program.changing)
            changes[update.target] += 1
        most, least = self.how.host, min((sizes[name] for name, _ in seen if sizes[name]), default=0)
        if isinstance(most, int) and most < least:
            raise host_too_small(most, least)
        if most is None:
            more = sum(sizes[name] for name, _ in seen) - sum(lane.pool.room() for lane in self.lanes.values())
            if more > 0 and (left := available()) is not None and more > left:
                raise no_host_memory(more, left)

    def pack(self, t: Tensor, what: str) -> Tensor | Kept:
        """`t`, or what stands for it while it is away: small tensors, parameters and subclasses stay."""
        lane = self.lanes.get(t.device)
        stays = type(t) is not Tensor or t.layout is not torch.strided or t.nbytes < SMALL or t.is_conj() or t.is_neg()
        return t if lane is None or stays else lane.keep(t, what, self.lanes)

    @contextlib.contextmanager
    def keeping(self, kept: Iterable[Tensor], what: str) -> Iterator[None]:
        """Inside, autograd saves these first, and what it keeps of them moves."""
        packed = deque(self.pack(t, what) for t in kept)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.popleft() if packed else t, _unpacked):
            yield

    def saving(self, stay: Collection[int], where: str) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Hooks for a function that is not run again: what it saves moves, but for storages that stay (those of parameters)."""

        def pack(t: Tensor) -> Any:
            kept = t if home_of(t) in stay else self.pack(t, f"a tensor of shape {tuple(t.shape)} that fn saved in {where}")
            return (t.detach(), version_of(t)) if kept is t else kept

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Kept):
                return kept.moved.lane.fetch(kept)
            t, version = kept
            if version_of(t) != version:  # under hooks autograd itself does not look
                raise edited_while_kept(where, t.shape)
            return t

        return pack, unpack


def _unpacked(kept: Any) -> Tensor:
    return kept.moved.lane.fetch(kept) if isinstance(kept, Kept) else kept


def mover(how: Offload | None, program: Any, streams: dict[str, Any], inside: bool) -> Mover | None:
    """For a forward pass; None where nothing can move. `inside`: of hooks of others or a CUDA graph, which keep as they do."""
    devices = {t.device for value in streams.values() for t in tensors(value)}
    if not any(device.type in links.MAKE for device in devices):
        say_once(f"there is no link to host memory from {' and '.join(sorted({device.type for device in devices}))}")
        return None
    if capturing():
        say_once("a CUDA graph is being captured")
    if inside:
        return None
    made = Mover(how or Offload(), devices)
    made.refuse_too_much(program, streams)
    return made


def _lane_of(device: torch.device) -> Lane:
    if device not in _LANES:
        _LANES[device] = Lane(device, links.MAKE[device.type](device))
    return _LANES[device]


_SAID: set[str] = set()


def say_once(why: str) -> None:
    """That nothing moves."""
    if why not in _SAID:
        _SAID.add(why)
        warnings.warn(f"memory='offload' runs as memory='checkpoint': {why}", stacklevel=2)


def offload_stats() -> OffloadStats:
    """What `memory="offload"` holds and has moved, in bytes.

    >>> import retrograde as rg
    >>> rg.offload_stats().used
    0
    """
    counts = [(*lane.pool.counted(), lane.copied_out, lane.copied_back) for lane in _LANES.values()]
    return OffloadStats(*map(sum, zip(*counts, strict=True))) if counts else OffloadStats()


def offload_release() -> int:
    """Give host memory that `memory="offload"` has pinned and nothing uses back to the system. Returns the number of bytes."""
    return sum(lane.pool.release() for lane in _LANES.values())
