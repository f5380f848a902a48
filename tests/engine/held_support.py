"""What these tests share."""

import re

import torch
from support import WIDTH, assert_same, linear, rg
from torch import nn


def ones(size=WIDTH):
    return torch.ones(size, dtype=torch.float64)


SHIFT, UNUSED = ones(), ones()


class Above(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return torch.tanh(self.linear(x)) + SHIFT


def by(kind, way=""):
    def make():
        fns = [kind(way) for _ in range(3)]
        return fns, fns

    return make


MODEL = nn.Module()


def gradients(make, change, memory, side=None):
    torch.manual_seed(0)
    fns, held = make()
    updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2], rg.ALL) for i, fn in enumerate(fns)]
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    out = rg.run(updates, {"a": x, "b": x * 0.5}, side, memory=memory)
    with torch.no_grad():
        change(held)
    return torch.autograd.grad(out["a"].square().sum() + out["b"].sin().sum(), x)


def reported_or_harmless(make, change, memory, words, side=lambda: None):
    """An error; or under "checkpoint", where fn stops when everything is saved, what comes after that has no effect."""
    true = gradients(make, lambda _: None, "store", side())  # first, as a change may last
    try:
        found = gradients(make, change, memory, side())
    except rg.ReplayError as error:
        seen = re.search(words, str(error))
    else:
        seen = memory == "checkpoint"
        assert_same(found, true)
    assert seen


OTHER = "returned something else|that fn holds on to was changed"
