"""What these tests share."""

import random
import types

import numpy as np
import torch
from support import WIDTH, mlp
from torch import nn


def snapshot(net, inputs):
    state = {name: t.clone() for name, t in net.state_dict().items()} | {"rng": torch.get_rng_state()}
    grads = [p.grad for p in net.parameters()] + [t.grad for t in torch.utils._pytree.tree_leaves(inputs)]
    flags = [(m.training, getattr(m, "memory", None)) for m in net.modules()]
    plain = [{name: repr(value) for name, value in m.__dict__.items() if name in PLAIN} for m in net.modules()]
    drawn = random.getstate(), repr(np.random.get_state())
    return state, (grads, flags, drawn, plain, torch.is_grad_enabled())


PLAIN = ("calls", "cache", "steps", "drawn", "seen", "last", "shapes")


class Fault(nn.Module):
    """A branch that is recomputed as something else."""

    def __init__(self, kind):
        super().__init__()
        self.fn, self.kind, self.calls, self.cache, self.rng = mlp(), kind, 0, None, random.Random(0)
        self.by_shape, self.history = {}, []

    def forward(self, x):
        if self.kind in ("a call counter", "a constant that moves", "another path"):
            self.calls += 1
        if self.kind == "a cache":
            self.cache = self.fn(x) if self.cache is None else self.cache
            return self.cache
        if self.kind == "a cache by shape":
            if x.shape not in self.by_shape:
                self.by_shape[x.shape] = self.fn(x)
            return self.by_shape[x.shape]
        y = self.fn(x)
        match self.kind:
            case "python random":
                return y * random.random()
            case "a branch by python random":
                return y if random.random() < 2 else x
            case "numpy's random":
                return y * np.random.rand()
            case "a generator of its own":
                return y * self.rng.random()
            case "the time":
                return y * tick()
            case "noise":  # another in every call, as the order of atomic additions is
                return y * (1 + 1e-7 * torch.linspace(-1, 1, WIDTH).roll(tick()).to(y))
            case "a call counter":
                return y * self.calls
            case "a history":
                self.history.append(y.detach())
                return y * len(self.history)
            case "a constant that moves":
                return y.detach() * self.calls + y
            case "another path":
                return y.tanh() if self.calls % 2 else y
            case "an edited source":
                x.detach().add_(1)
            case "edited data":
                x.data.clamp_(-0.5, 0.5)
            case "an edit of what it saved":
                return y.sigmoid().mul_(2)
        return y


TICKS = types.SimpleNamespace(number=0)


def tick():
    """Another number in every call, out of anybody's sight."""
    TICKS.number += 1
    return TICKS.number


class Counting(nn.Module):
    """Does something else after many calls, or in every hundredth; in `log`, nothing that matters."""

    def __init__(self, kind):
        super().__init__()
        self.fn, self.kind, self.calls, self.flag = mlp(), kind, 0, False

    def forward(self, x):
        late = self.calls % 100 == 0 and self.calls > 0
        self.calls += 1  # here
        y = self.fn(x)
        match self.kind:
            case "a warm-up":
                return y * min(1.0, self.calls**0 if self.calls < 500 else 0.5)
            case "every hundredth":
                return y if self.calls % 100 else 2 * y
            case "every hundredth, before it is counted":
                return 2 * y if late else y
        return y
