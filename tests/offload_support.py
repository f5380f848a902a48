"""A link for the CPU, so that offloading can be tested without a GPU."""

import torch


class Event:
    """A copy that is made when somebody waits for it, or for a later one of its stream: as late as a device may make it."""

    name = None

    def __init__(self, copy=None, after=()):
        self.copy, self.after = copy, after

    def synchronize(self):
        copy, after, self.copy, self.after = self.copy, self.after, None, ()
        for event in after:
            if event is not None:
                event.synchronize()
        if copy is not None:
            copy()


class LateLink:
    """`forgets` plants a fault: nobody waits for the copy "out", or for the one "back"."""

    forgets = None

    def __init__(self, device):
        self.device = device
        self.streams = {"out": Event(), "back": Event()}

    def mark(self):
        return Event()

    def here(self):
        return "compute"

    def out(self, source, buffer, after):
        return self._late("out", source, buffer, after)

    def back(self, buffer, target, after):
        target.fill_(255)  # NaN, until the copy is made
        return self._late("back", buffer, target, () if self.forgets == "out" else after)

    def _late(self, stream, source, target, after):
        self.streams[stream] = Event(lambda: target.copy_(source), (self.streams[stream], *after))
        self.streams[stream].name = stream
        return self.streams[stream]

    def wait(self, event, streams):
        if self.forgets != event.name:
            event.synchronize()

    def pin(self, size):
        return torch.full((size,), 255, dtype=torch.uint8)

    def unpin(self, pinned):
        pass
