"""Policies: what runs how often, what is kept, and what is refused. Gradients under each are in all the other files."""

import re

import pytest
import torch
from support import WIDTH, Logged, assert_same, draw, gradients, loss_of, mlp, mlps, parameters, rg
from torch import nn

from retrograde.bench.meter import LiveBytes
from retrograde.memory import Policy


def order(memory, count=6):
    """Names of the fns as they run in forward, and as they run in backward."""
    log = []
    fns = [Logged(str(i), log) for i in range(count)]
    loss = loss_of(rg.run(rg.wirings.leapfrog(fns), {"a": draw(), "b": draw()}, memory=memory))
    assert log == [str(i) for i in range(count)]
    log.clear()
    loss.backward()
    return log


@pytest.mark.parametrize(
    ("memory", "again"),
    [
        (rg.StoreLast(1), [4, 3, 2, 1, 0]),
        (rg.StoreLast(4), [1, 0]),
        (rg.StoreLast(6), []),
        (rg.StoreLast(100), []),
        (rg.Anchor(4), [5, 4, 3, 2, 1, 0]),
        (rg.Anchor(100), [5, 4, 3, 2, 1, 0]),
        (rg.Budget(1 << 30), []),
        (rg.Budget(4000), [1, 0]),
    ],
    ids=str,
)
def test_order(memory, again):
    """The last k fns run once in all, the others twice, in reverse."""
    assert order(memory) == [f"{i} again" for i in again]


@pytest.mark.parametrize(("length", "kind"), [(2, "reverse"), (3, "store"), (0, "reverse"), (100, "store")])
def test_reverse_above(length, kind):
    """Up to the length ordinary autograd, above it reversal; in a module measured on its input, not on its halves."""
    again = order(rg.ReverseAbove(length, dim=0), 2)  # streams of length 3
    assert again == ([] if kind == "store" else ["1 again", "0 again"])
    log = []
    net = rg.ReversibleSequence([(Logged("f", log), Logged("g", log))], split="chunk", dim=0, merge="cat")
    net.memory = rg.ReverseAbove(length + 3, dim=0)
    loss_of(net(draw(6, WIDTH))).backward()
    assert ("f again" in log) == (length + 3 < 6)
    net = rg.Reversible(rg.wirings.pair(mlp(), mlp()), memory=rg.ReverseAbove(length, dim=0))
    net({"x1": draw(), "x2": draw()})


REFUSED = {
    "StoreLast(0)": lambda: rg.StoreLast(0),
    "StoreLast(-1)": lambda: rg.StoreLast(-1),
    "StoreLast(half)": lambda: rg.StoreLast(0.5),
    "StoreLast(True)": lambda: rg.StoreLast(True),
    "Anchor(0)": lambda: rg.Anchor(every=0),
    "Anchor(text)": lambda: rg.Anchor(every="all"),
    "Budget(0)": lambda: rg.Budget(0),
    "Budget(-5)": lambda: rg.Budget(-5),
    "Budget(nan)": lambda: rg.Budget(float("nan")),
    "ReverseAbove(-1)": lambda: rg.ReverseAbove(-1),
    "ReverseAbove(None)": lambda: rg.ReverseAbove(None),
    "ReverseAbove(dim)": lambda: rg.ReverseAbove(3, dim="width"),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_refused(make):
    with pytest.raises(rg.ProgramError, match="must be a whole number"):
        make()


@pytest.mark.parametrize("memory", [rg.StoreLast, rg.Budget, "all", None, 3], ids=str)
def test_not_a_policy(memory):
    with pytest.raises(rg.ProgramError, match=r"unknown memory policy .*; known: store, checkpoint, offload, reverse, rg"):
        rg.ReversibleSequence([(mlp(), mlp())], memory=memory)


def test_nothing_to_measure():
    with pytest.raises(rg.ProgramError, match=r"ReverseAbove\(length=5, dim=2\): the input has no dim 2 .* shape \(3, 6\)"):
        rg.ReversibleSequence([(mlp(), mlp())], memory=rg.ReverseAbove(5, dim=2))(draw())


# -- the budget --------------------------------------------------------------------------------------------------------

ROWS = 512


def wide(count):
    """Functions that save unequal amounts."""
    return [
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16 * (1 + i % 3)), nn.GELU(), nn.Linear(16 * (1 + i % 3), 16))
        for i in range(count)
    ]


def peak(fns, memory, rows=ROWS):
    """Bytes of activations at their peak in one step; gradients exist before."""
    streams = {name: torch.randn(rows, 16, requires_grad=True) for name in "ab"}
    for t in (*streams.values(), *parameters(fns)):
        t.grad = torch.zeros_like(t)
    with LiveBytes() as meter:
        out = rg.run(rg.wirings.leapfrog(fns), streams, memory=memory)
        (out["a"].sin().sum() + out["b"].cos().sum()).backward()
        del out
    return meter.peak


def test_budget_is_kept_and_used():
    """Never more than the budget, at the first call and at a new shape; at least 80 % of it where more could be stored."""
    fns = wide(24)
    peaks = {rows: [peak(fns, "reverse" if k == 0 else rg.StoreLast(k), rows) for k in range(25)] for rows in (ROWS, 2 * ROWS)}
    for rows, possible in peaks.items():
        for budget in range(int(possible[0] * 1.3), int(possible[-1] * 1.2), possible[-1] // 12):
            found = peak(fns, rg.Budget(budget), rows)
            assert found <= budget
            assert found >= 0.8 * budget or found >= 0.99 * max(p for p in possible if p <= budget)


def test_budget_too_small():
    """An error names the update and says what is needed; with that much it runs, and leaves nothing changed."""
    fns = wide(6)
    state = torch.get_rng_state()
    with pytest.raises(
        rg.ProgramError, match=r"update 0: a \+= Sequential\(b\): rg.Budget\(1000\) is too small: .* takes \d+ bytes"
    ):
        rg.run(rg.wirings.leapfrog(fns), {"a": torch.ones(ROWS, 16), "b": torch.ones(ROWS, 16)}, memory=rg.Budget(1000))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("retain", [False, True])
def test_budget_twice_through_the_graph(retain):
    """What was stored serves every backward of a graph that is kept."""
    log = []
    fns = [Logged(str(i), log) for i in range(6)]
    a, b = draw(), draw()
    wanted = [a, b, *parameters(fns)]

    def make(memory):
        return rg.run(rg.wirings.leapfrog(fns), {"a": a, "b": b}, memory=memory)

    true = gradients(lambda: make("store"), wanted)[2:]
    loss = loss_of(make(rg.Budget(4000)))
    log.clear()
    assert_same(torch.autograd.grad(loss, wanted, retain_graph=True), true)
    first = list(log)
    log.clear()
    assert_same(torch.autograd.grad(loss, wanted, retain_graph=retain), true)
    assert log == first == ["1 again", "0 again"]


def test_stored_by_budget_and_changed():
    """A parameter that a stored fn saved is changed before backward: an error, as in ordinary autograd."""
    fns = mlps(4)
    loss = loss_of(rg.run(rg.wirings.leapfrog(fns), {"a": draw(), "b": draw()}, memory=rg.Budget(1 << 30)))
    with torch.no_grad():
        fns[3][1].weight.mul_(2)
    with pytest.raises(
        rg.ReplayError, match=r"update 3: b \+= Sequential\(a\): the parameter 'weight' of shape \(12, 6\) was changed"
    ):
        loss.backward()


class Planned(Policy):
    """A policy whose plan is given."""

    def __init__(self, *stretches):
        self.stretches = list(stretches)

    def __repr__(self):
        return "Planned"

    def plan(self, blocks):
        return self.stretches


@pytest.mark.parametrize("kind", ["reverse", "checkpoint"])
def test_functions_may_draw_before_and_after_a_stored_stretch(kind):
    fns = mlps(6, dropout=0.3)
    updates, streams = rg.wirings.leapfrog(fns), {"a": draw(), "b": draw()}
    wanted = [*streams.values(), *parameters(fns)]
    mixed = Planned(("store", 2, None), (kind, 2, None), ("store", 1, None), (kind, 1, None))
    found = [gradients(lambda: rg.run(updates, streams, memory=memory), wanted) for memory in (mixed, "store")]
    assert_same(*found)


@pytest.mark.parametrize(
    ("stretches", "message"),
    [
        ([("reverse", 3, None)], "covers 3 updates, and the program has 6"),
        ([("reverse", 7, None)], "covers 7 updates, and the program has 6"),
        (
            [("chekpoint", 6, None)],
            "unknown kind of stretch in the plan of Planned: 'chekpoint'; known: store, checkpoint, offload, reverse",
        ),
        ([("reverse", 7, None), ("store", -1, None)], "covers 7 + -1 updates"),
        ([("reverse", 6, "4GiB")], "the limit '4GiB' for 'reverse'. Only \"reverse\" may have one"),
        ([("store", 6, 100)], "the limit 100 for 'store'"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(stretches, message):
    net = rg.Reversible(rg.wirings.leapfrog(mlps(6)), memory=Planned(*stretches))
    with pytest.raises(rg.ProgramError, match=re.escape(message)):
        net({"a": draw(), "b": draw()})
