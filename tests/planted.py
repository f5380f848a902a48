"""Blocks with a fault each, as users write them, and sound nets, for `retrograde check`. `# here` marks the line to change."""

import itertools
import random

import numpy as np
import torch
from torch import nn

import retrograde as rg


def mlp(dim):
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


class Branch(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fn = mlp(dim)


def block_of(kind):
    """A factory of blocks (kind, mlp)."""
    return lambda dim: (kind(dim), mlp(dim))


# -- faults ------------------------------------------------------------------------------------------------------------


class PythonRandom(Branch):
    def forward(self, x):
        scale = random.random()  # here
        return self.fn(x) * scale


class NumpyRandom(Branch):
    def forward(self, x):
        y = self.fn(x)
        return y * float(np.random.rand())  # here


class NumpyGenerator(Branch):
    def __init__(self, dim):
        super().__init__(dim)
        self.rng = np.random.default_rng(0)

    def forward(self, x):
        y = self.fn(x)
        return y * float(self.rng.random())  # here


class Counter(Branch):
    def __init__(self, dim):
        super().__init__(dim)
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # here
        return self.fn(x) / self.calls


class ListCache(Branch):
    def __init__(self, dim):
        super().__init__(dim)
        self.past = []

    def forward(self, x):
        y = self.fn(x)
        self.past.append(x.detach())  # here
        return y + torch.stack(self.past).mean(0)


class Remembered(Branch):
    def __init__(self, dim):
        super().__init__(dim)
        self.kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = self.fn(x)  # here
        return self.kept


class EditsInput(Branch):
    def forward(self, x):
        x *= 0.5  # here
        return self.fn(x)


class EditsData(Branch):
    """Out of sight of autograd's version counters."""

    def forward(self, x):
        y = self.fn(x)
        x.data.clamp_(-1, 1)  # here
        return y


STEP = 0


class GlobalStep(Branch):
    def forward(self, x):
        global STEP
        STEP += 1  # here
        return self.fn(x) * (1 + 1 / STEP)


TICKS = itertools.count(1)


class GlobalIterator(Branch):
    def forward(self, x):
        tick = next(TICKS)  # here
        return self.fn(x) / tick


class DropoutSchedule(Branch):
    def __init__(self, dim):
        super().__init__(dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        self.drop.p = min(0.5, self.drop.p + 0.1)  # here
        return self.drop(self.fn(x))


class PlainTensor(Branch):
    def __init__(self, dim):
        super().__init__(dim)
        self.mean = torch.zeros(dim)

    def forward(self, x):
        y = self.fn(x)
        self.mean = 0.5 * self.mean + 0.5 * y.detach().mean((0, 1))  # here
        return y - self.mean


class MovingAverage(Branch):
    """Its first batch is its average, so it shows from the second one on."""

    def __init__(self, dim):
        super().__init__(dim)
        self.mean = None

    def forward(self, x):
        y = self.fn(x)
        mean = y.detach().mean((0, 1))
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean  # here
        return y - self.mean


class WarmUp(Branch):
    """It shows after a thousand calls."""

    def __init__(self, dim):
        super().__init__(dim)
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # here
        return self.fn(x) * (0.1 if self.calls < 1000 else 1.0)


class RunsItself(nn.Module):
    """A model that is no reversible net, and calls rg.run in its forward."""

    def __init__(self, dim, depth, kind=None):
        super().__init__()
        self.fns = nn.ModuleList(mlp(dim) for _ in range(2 * depth))
        if kind is not None:
            self.fns[2] = kind(dim)
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2]) for i, fn in enumerate(self.fns)]
        return self.head(rg.run(updates, {"a": x, "b": x})["a"])


def runs_itself(dim, depth):
    return RunsItself(dim, depth)


def faulty_inside(dim, depth):
    return RunsItself(dim, depth, Counter)


class Shared(nn.Module):
    """A buffer that all branches write to."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("sum", torch.zeros(dim))


class WritesShared(Branch):
    def __init__(self, dim, shared):
        super().__init__(dim)
        self.shared = shared

    def forward(self, x):
        y = self.fn(x)
        self.shared.sum.add_(y.detach().mean((0, 1)))
        return y + self.shared.sum


def shared_buffer(dim, depth):
    shared = Shared(dim)
    return rg.ReversibleSequence([(WritesShared(dim, shared), WritesShared(dim, shared)) for _ in range(depth)])


class Half(rg.Rule):
    saves = False

    def apply(self, target, out):
        return target + 0.5 * out

    def undo(self, target, out):  # here
        return target - out


def wrong_rule(dim):
    return [rg.Update("a", mlp(dim), "b"), rg.Update("b", mlp(dim), "a", rule=Half()), rg.Update("a", mlp(dim), "b")]


def growing(dim):
    """Without a norm, and with large weights."""

    def branch():
        linear = nn.Linear(dim, dim)
        nn.init.normal_(linear.weight, std=2 / dim**0.5)
        return nn.Sequential(linear, nn.Softplus())

    return branch(), branch()


def drifting(dim, depth):
    return rg.ReversibleSequence([growing(dim) for _ in range(depth)], arithmetic="float")


class WrongShape(Branch):
    def forward(self, x):  # here
        return self.fn(x).mean(1)


class Spoiler(torch.autograd.Function):
    """Its backward works in place on what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod  # here
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.mul_(2)


class SpoilsSaved(Branch):
    def forward(self, x):
        return self.fn(Spoiler.apply(x))


class Stale(torch.autograd.Function):
    """Keeps its input on the class, where the next call writes over it."""

    x = None

    @staticmethod
    def forward(ctx, x):
        Stale.x = x.detach()
        return x * x

    @staticmethod  # here
    def backward(ctx, grad):
        return 2 * grad * Stale.x


class StaleFunction(Branch):
    def forward(self, x):
        return self.fn(Stale.apply(x))


class ByReplaying(Branch):
    def forward(self, x):
        y = self.fn(x)
        return 2 * y if rg.replaying() else y  # here


python_random, numpy_random, numpy_generator = map(block_of, (PythonRandom, NumpyRandom, NumpyGenerator))
counter, list_cache, remembered = map(block_of, (Counter, ListCache, Remembered))
edits_input, edits_data, global_step, global_iterator = map(block_of, (EditsInput, EditsData, GlobalStep, GlobalIterator))
dropout_schedule, plain_tensor, wrong_shape = map(block_of, (DropoutSchedule, PlainTensor, WrongShape))
moving_average, warm_up = map(block_of, (MovingAverage, WarmUp))
spoils_saved, stale_function, replaying = map(block_of, (SpoilsSaved, StaleFunction, ByReplaying))
FAULTS = {  # factory: kind of the finding
    "python_random": "non-deterministic",
    "numpy_random": "non-deterministic",
    "numpy_generator": "stateful",
    "counter": "stateful",
    "list_cache": "stateful",
    "remembered": "stateful",
    "edits_input": "editing",
    "edits_data": "editing",
    "global_step": "stateful",
    "global_iterator": "non-deterministic",
    "dropout_schedule": "stateful",
    "plain_tensor": "stateful",
    "moving_average": "stateful",
    "warm_up": "stateful",
    "faulty_inside": "stateful",
    "wrong_rule": "wrong rule",
    "drifting": "drifting",
    "wrong_shape": "refused",
    "spoils_saved": "wrong backward",
    "stale_function": "wrong backward",
    "replaying": "non-deterministic",
}


# -- sound -------------------------------------------------------------------------------------------------------------


class Dropped(Branch):
    def __init__(self, dim):
        super().__init__(dim)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.fn(x))


class Normed(Branch):
    def __init__(self, dim):
        super().__init__(dim)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x):
        return self.norm(self.fn(x).transpose(1, 2)).transpose(1, 2)


class Attend(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True, dropout=0.1)

    def forward(self, x, context, mask):
        return self.attention(x, context, context, key_padding_mask=mask, need_weights=False)[0]


class Logged(Branch):
    """Keeps what does not matter, in plain Python and in a tensor."""

    def __init__(self, dim):
        super().__init__(dim)
        self.calls, self.largest = 0, torch.zeros(())

    def forward(self, x):
        self.calls += 1
        torch.maximum(self.largest, x.detach().abs().max(), out=self.largest)
        return self.fn(x)


def attention(dim, depth):
    net = rg.ReversibleSequence([(Attend(dim), mlp(dim)) for _ in range(depth)])
    return net, torch.randn(2, 5, dim), {"context": torch.randn(2, 7, dim), "mask": torch.arange(7).expand(2, 7) > 4}


def sixteen_bits(dim, depth):
    return rg.ReversibleSequence([(mlp(dim), Dropped(dim)) for _ in range(depth)]).bfloat16()


def noisy(dim, depth):
    """Ordinary layers, which need not be residual ones."""
    return rg.Sequential(*(Dropped(dim) for _ in range(depth)), bits=4, memory="reverse")


def shared_weights(dim, depth):
    return nn.Sequential(nn.Linear(dim, dim), rg.ReversibleSequence([(mlp(dim), mlp(dim))] * depth), nn.Linear(dim, 1))


dropout, batch_norm, logged = map(block_of, (Dropped, Normed, Logged))
SOUND = [
    "dropout",
    "batch_norm",
    "attention",
    "sixteen_bits",
    "shared_weights",
    "shared_buffer",
    "logged",
    "runs_itself",
    "noisy",
]
