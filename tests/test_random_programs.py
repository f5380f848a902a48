"""Random programs against a loop written by hand and against store."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import POLICIES, WIDTH, assert_same, draw, loss_of, parameters, rg
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


def observed(make, wanted):
    """Outputs, gradients (None stays None) and the random state afterwards."""
    torch.manual_seed(1)
    out = make()
    found = torch.autograd.grad(loss_of(out), wanted, allow_unused=True)
    return [t.detach() for t in out.values()], found, torch.rand(2)


@pytest.mark.parametrize("memory", POLICIES)
@settings(deadline=None, derandomize=True, max_examples=60, database=None)
@given(case=cases())
def test_random_program(memory, case):
    """2 to 5 streams, up to 30 updates: affine, frozen, shared and detached fns, dropout, a context, a loss on some streams."""
    torch.manual_seed(0)
    fns = [Branch(*fn) for fn in case.fns]
    first = {f"s{i}": draw(grad=grad) for i, grad in enumerate(case.grads)}
    context = draw(1, WIDTH, grad=case.context)
    updates = [
        rg.Update(
            f"s{target}",
            fns[fn],
            [f"s{i}" for i in sources],
            takes=["context"] if takes else (),
            rule=rg.Affine() if fns[fn].affine else rg.Add(),
        )
        for target, sources, fn, takes in case.updates
    ]

    def run(memory):
        out = rg.run(updates, first, {"context": context}, memory=memory)
        return {f"s{i}": out[f"s{i}"] for i in case.loss}

    def by_hand():
        s = list(first.values())
        for target, sources, fn, takes in case.updates:
            out = fns[fn](*(s[i] for i in sources), **({"context": context} if takes else {}))
            s[target] = s[target] * out[0].exp() + out[1] if fns[fn].affine else s[target] + out
        return {f"s{i}": s[i] for i in case.loss}

    wanted = [t for t in (*first.values(), context, *parameters(fns)) if t.requires_grad]
    if not isinstance(loss_of(by_hand()), torch.Tensor):
        assert not any(t.requires_grad for t in run(memory).values())
        return
    some = [t for i, t in enumerate(wanted) if case.only[i % len(case.only)]] or wanted
    true_out, true, true_rng = observed(by_hand, some)
    for policy in ("store", memory):
        out, found, rng = observed(lambda: run(policy), some)
        assert torch.equal(rng, true_rng)
        assert [g is None for g in found] == [g is None for g in true]
        pairs = [(a, b) for a, b in zip(found, true, strict=True) if b is not None]
        assert_same([*out, *(a for a, _ in pairs)], [*true_out, *(b for _, b in pairs)])
