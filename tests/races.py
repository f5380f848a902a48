"""Streams of the CPU that keep time, and a watch for what would go wrong if they were those of a GPU.

Every stream has a vector clock. A fault is a kernel that reads what another stream may not have written yet, one that writes
what another may still be reading, and memory that its stream gives out again while another may still be using it: the allocator
gives a freed block back at once, and only the stream that it was made on comes after.
"""

import contextlib

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrograde import ahead


class Stream:
    def __init__(self, name="side"):
        self.name, self.clock = name, {self: 0}

    def wait_stream(self, other):
        for stream, time in other.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def behind(self, stream, time):
        """Whether this stream may run before that."""
        return stream is not self and self.clock.get(stream, 0) < time


class Block:
    def __init__(self, home):
        self.home, self.uses, self.written = home, {}, (home, 0)


def strided(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def key_of(t):
    return t.untyped_storage()._cdata


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.main = self.current = Stream("main")
        self.live, self.freed, self.faults = {}, [], []

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = strided((args, kwargs or {}))
        for t in given:
            self.live.setdefault(key_of(t), (StorageWeakRef(t.untyped_storage()), Block(self.main)))
        for key, (ref, block) in list(self.live.items()):
            if ref.expired():
                self.freed.append(block)
                del self.live[key]
        out = func(*args, **(kwargs or {}))
        pairs = zip(func._schema.arguments, args, strict=False)
        edited = {key_of(t) for a, value in pairs if a.alias_info is not None and a.alias_info.is_write for t in strided(value)}
        new = {key_of(t): t for t in strided(out) if key_of(t) not in self.live}
        if edited or new:  # no mere view
            self.launched(str(func), {key_of(t) for t in given}, edited, new)
        return out

    def launched(self, name, read, edited, new):
        now = self.current
        now.clock[now] += 1
        for block in [block for block in self.freed if block.home is now] if new else ():
            self.freed.remove(block)
            if any(now.behind(*use) for use in block.uses.items()):
                self.faults.append(f"{name} on {now.name} takes memory that is in use elsewhere")
        for key, t in new.items():
            self.live[key] = StorageWeakRef(t.untyped_storage()), Block(now)
        for key in {*read, *new}:
            block = self.live[key][1]
            if now.behind(*block.written):
                self.faults.append(f"{name} on {now.name} reads what {block.written[0].name} may not have written")
            if key in edited and any(now.behind(*use) for use in block.uses.items()):
                self.faults.append(f"{name} on {now.name} writes what is in use elsewhere")
            block.uses[now] = now.clock[now]
            if key in edited or key in new:
                block.written = now, now.clock[now]


@contextlib.contextmanager
def watched(monkeypatch):
    """What runs inside is watched; no faults at the end, or it is an error."""
    watch = Watch()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cpu, "Stream", Stream)
        patch.setattr(torch.cpu, "stream", watch.on)
        patch.setattr(torch.cpu, "current_stream", lambda _: watch.current)
        patch.setattr(ahead, "_STREAMS", {})
        with watch:
            yield watch
    assert not watch.faults, watch.faults[:3]
