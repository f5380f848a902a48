"""What these tests share."""

import torch
from support import WIDTH, assert_same, gradients, rg
from torch import nn

KINDS = ["reverse", "checkpoint", "store", rg.StoreLast(2), rg.Anchor(3), rg.ReverseAbove(0, dim=0)]


def mlp():
    """A branch of three modules: each one more is traced for each run of it, which is what takes time here."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).double()


def mlps(count):
    return [mlp() for _ in range(count)]


def compiled(call, backend="eager", **options):
    return torch.compile(call, backend=backend, fullgraph=True, **options)


def same(net, args, wanted, tolerance=1e-9, backend="eager", **side):
    """Traced under the net's own policy, and not compiled under store: outputs and gradients."""
    wanted = [*wanted, *net.parameters()]
    found = gradients(lambda: compiled(net, backend)(*args, **side), wanted)
    memory, net.memory = net.memory, "store"
    assert_same(found, gradients(lambda: net(*args, **side), wanted), tolerance)
    net.memory = memory


def pairs(count=3, **options):
    fns = mlps(2 * count)
    return rg.ReversibleSequence(list(zip(fns[::2], fns[1::2], strict=True)), **options)
