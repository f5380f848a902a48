"""Random programs, drawn by hypothesis."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from support import WIDTH
from torch import nn


class Branch(nn.Module):
    """A function of any number of sources and a context, of one of the kinds that programs are made of."""

    def __init__(self, kind, affine, frozen, dropout):
        super().__init__()
        self.kind, self.affine = kind, affine
        self.lift, self.out = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 2 * WIDTH if affine else WIDTH).double()
        self.drop = nn.Dropout(0.3 if dropout else 0.0)
        self.requires_grad_(not frozen)

    def forward(self, *sources, context=None):
        x = sum(x * (i + 1) for i, x in enumerate(sources)) / len(sources)
        if self.kind == "saves nothing":
            out = torch.cat((x, x), -1) * 0.25 if self.affine else x * 0.25
        else:
            x = self.lift(x if context is None else x + context.sin())
            out = self.out(self.drop(x.tanh()))
        if self.kind == "without grad":
            out = out.detach()
        if not self.affine:
            return out
        log_scale, shift = out.chunk(2, -1)
        return 0.3 * log_scale.tanh(), shift


@dataclass(frozen=True)
class Case:
    grads: list[bool]  # of the streams
    context: bool  # requires grad
    fns: list[tuple[str, bool, bool, bool]]  # kind, affine, frozen, dropout
    updates: list[tuple[int, list[int], int, bool]]  # target, sources, fn, takes the context
    loss: list[int]
    only: list[bool]  # which gradients are asked for, repeated as needed


@st.composite
def cases(pick):
    n = pick(st.integers(2, 5))
    kinds = st.sampled_from(["plain", "plain", "plain", "saves nothing", "without grad"])
    fns = pick(st.lists(st.tuples(kinds, st.booleans(), st.booleans(), st.booleans()), min_size=2, max_size=8))

    @st.composite
    def update(pick):
        target = pick(st.integers(0, n - 1))
        others = [i for i in range(n) if i != target]
        sources = pick(st.lists(st.sampled_from(others), min_size=1, max_size=3, unique=True))
        return target, sources, pick(st.integers(0, len(fns) - 1)), pick(st.booleans())

    return Case(
        grads=pick(st.lists(st.booleans(), min_size=n, max_size=n)),
        context=pick(st.booleans()),
        fns=fns,
        updates=pick(st.lists(update(), min_size=1, max_size=30)),
        loss=pick(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True)),
        only=pick(st.lists(st.booleans(), min_size=1, max_size=7)),
    )
