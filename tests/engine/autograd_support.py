"""What these tests share."""

from functools import partial

import pytest
import torch
from support import POLICIES, WIDTH, Attend, assert_same, draw, loss_of, parameters, rg
from torch import nn

DEPTH = 3  # blocks of two updates


class World:
    """A net with a context, its leaves, and three ways to run it."""

    def __init__(self, make=Attend):
        self.fns = [make() for _ in range(2 * DEPTH)]
        self.a, self.b, self.context = draw(2, 3, WIDTH), draw(2, 3, WIDTH), draw(2, 4, WIDTH)
        self.updates = rg.wirings.leapfrog(self.fns, takes="context")

    @property
    def leaves(self):
        return [self.a, self.b, self.context, *parameters(self.fns)]

    def out(self, how):
        if how != "hand":
            return rg.run(self.updates, {"a": self.a, "b": self.b}, {"context": self.context}, memory=how)
        a, b = self.a, self.b
        for f, g in zip(self.fns[::2], self.fns[1::2], strict=True):
            a = a + f(b, context=self.context)
            b = b + g(a, context=self.context)
        return {"a": a, "b": b}

    def clear(self):
        for t in self.leaves:
            t.grad = None

    def grads(self):
        """The .grad of every leaf, zeros for None; and which are None."""
        missing = [t.grad is None for t in self.leaves]
        return [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in self.leaves], missing


def agree(world, memory, act):
    """`act` on the function that makes the outputs returns tensors and anything else: both as under store and by hand."""
    results = []
    for how in (memory, "store", "hand"):
        world.clear()
        torch.manual_seed(0)
        results.append(act(partial(world.out, how)))
    found, *true = results
    for one in true:
        noise = 1e-12 * max(t.norm() for t in one[0])  # for a gradient that is zero up to rounding
        assert_same(*([t * (t.norm() > noise) for t in tensors] for tensors in (found[0], one[0])))
        assert found[1:] == one[1:]
    return found


def backward(world, out):
    loss_of(out()).backward()
    return world.grads()


memories = pytest.mark.parametrize("memory", POLICIES)


class Dropped(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.fn, self.dropout = Attend(), nn.Dropout(dropout)

    def forward(self, x, context):
        return self.dropout(self.fn(x, context))


# -- second derivatives ------------------------------------------------------------------------------------------------


def penalty_of(grads):
    return sum(((g + 1) ** 2).sum() for g in grads if g is not None)
