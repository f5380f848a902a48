"""Streams that are trees of tensors, and functions between them."""

from typing import NamedTuple

import torch
from support import draw
from torch import nn
from torch.utils._pytree import tree_leaves


class State(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


class Tree(nn.Module):
    """From any tree to one like `like`, each leaf a function of all leaves of the source; dicts come out in reversed order."""

    def __init__(self, like):
        super().__init__()
        self.like = like
        self.weights = nn.ParameterList(torch.randn_like(t) for t in tree_leaves(like))

    def forward(self, source):
        mixed = sum((i + t.sin()).mean() * (i + 1) for i, t in enumerate(tree_leaves(source)))
        leaves = iter([(w * mixed).tanh() + w for w in self.weights])
        return self.rebuilt(self.like, leaves)

    def rebuilt(self, like, leaves):
        if isinstance(like, dict):
            made = {key: self.rebuilt(value, leaves) for key, value in like.items()}
            return dict(reversed(made.items()))
        if isinstance(like, State):
            return State(*(self.rebuilt(value, leaves) for value in like))
        return type(like)(self.rebuilt(value, leaves) for value in like) if isinstance(like, (list, tuple)) else next(leaves)


def plus(value, other):
    """`value + other`, leaf by leaf, written without pytrees; dicts by key."""
    if isinstance(value, dict):
        return {key: plus(value[key], other[key]) for key in value}
    if isinstance(value, State):
        return State(plus(value.h, other.h), plus(value.c, other.c))
    if isinstance(value, (list, tuple)):
        return type(value)(plus(a, b) for a, b in zip(value, other, strict=True))
    return value + other


TREES = {
    "dicts in other key orders": lambda: ({"q": draw(2, 3), "k": draw(4)}, {"k": draw(4), "q": draw(2, 3)}),
    "same shapes, other key orders": lambda: ({"0": draw(3), "1": draw(3)}, {"1": draw(3), "0": draw(3)}),
    "se3": lambda: ({0: draw(2, 5, 1), 1: draw(2, 4, 3)}, {0: draw(2, 5, 1), 1: draw(2, 4, 3)}),
    "tuple and tensor": lambda: ((draw(2), draw(3, 1)), draw(5)),
    "namedtuple and nested": lambda: (State(draw(3), draw(2, 2)), {"x": [draw(1), (draw(2, 2), draw())]}),
    "some leaves without grad": lambda: ({"b": draw(3, grad=False), "a": draw(2)}, (draw(4), draw(3, grad=False))),
}
