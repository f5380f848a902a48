"""invert is the reversed list: it returns the inputs, and is differentiable under every policy."""

import pytest
import torch
from support import POLICIES, WIDTH, assert_same, draw, gradients, loss_of, mlp, mlps, parameters, rg
from torch import nn
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.parametrize("memory", ["store", *POLICIES])


class Branch(nn.Module):
    """A function of any number of sources and a context; a pair where `affine`."""

    def __init__(self, affine=False):
        super().__init__()
        self.inner, self.scale = mlp(dropout=0.3), mlp() if affine else None

    def forward(self, *sources, context):
        x = sum(x * (i + 1) for i, x in enumerate(sources)) + context.sin()
        return self.inner(x) if self.scale is None else (0.5 * self.scale(x).tanh(), self.inner(x))


def branches(count):
    return [Branch() for _ in range(count)]


def _pair(s, side, f, g):
    s["x2"] = s["x2"] - g(s["x1"], **side)
    s["x1"] = s["x1"] - f(s["x2"], **side)


def _cross(s, side, f, g, j, k):
    s["m2"] = s["m2"] - g(s["m1"], **side)
    s["m1"] = s["m1"] - j(s["m2"], s["x2"], **side)
    s["x2"] = s["x2"] - k(s["x1"], **side)
    s["x1"] = s["x1"] - f(s["x2"], s["m2"], **side)


def _dual(s, side, f, g, j, k):
    for a, b, first, second in (("m1", "m2", j, k), ("x1", "x2", f, g)):
        s[b] = s[b] - second(s[a], **side)
        s[a] = s[a] - first(s[b], **side)


def _groups(s, side, f0, f1, f2):
    s["s2"] = s["s2"] - f2(s["s1"], **side)
    s["s1"] = s["s1"] - f1(s["s0"], **side)
    s["s0"] = s["s0"] - f0(s["s1"] + s["s2"], **side)


def _affine(s, side, f, g):
    scale, shift = g(s["x1"], **side)
    s["x2"] = (s["x2"] - shift) * (-scale).exp()
    s["x1"] = s["x1"] - f(s["x2"], **side)


def _updates_affine(f, g):
    return [rg.Update("x1", f, "x2", rg.ALL), rg.Update("x2", g, "x1", rg.ALL, rule=rg.Affine())]


WIRINGS = {  # streams, functions, wiring, its inverse by hand
    "pair": (("x1", "x2"), lambda: branches(2), lambda *fns: rg.wirings.pair(*fns, takes=[rg.ALL] * 2), _pair),
    "dual": (("x1", "x2", "m1", "m2"), lambda: branches(4), lambda *fns: rg.wirings.dual(*fns, takes=[rg.ALL] * 4), _dual),
    "cross": (("x1", "x2", "m1", "m2"), lambda: branches(4), lambda *fns: rg.wirings.cross(*fns, takes=[rg.ALL] * 4), _cross),
    "groups": (("s0", "s1", "s2"), lambda: branches(3), lambda *fns: rg.wirings.groups(fns, takes=rg.ALL), _groups),
    "affine": (("x1", "x2"), lambda: [Branch(), Branch(affine=True)], _updates_affine, _affine),
}
every_wiring = pytest.mark.parametrize("name", WIRINGS)


def program(name, depth=3):
    names, make, wiring, step = WIRINGS[name]
    blocks = [make() for _ in range(depth)]
    updates = [update for fns in blocks for update in wiring(*fns)]
    streams, side = {stream: draw() for stream in names}, {"context": draw(1, WIDTH)}
    fns = nn.ModuleList(fn for block in blocks for fn in block)

    def by_hand():
        s = dict(streams)
        for block in reversed(blocks):
            step(s, side, *block)
        return s

    return updates, streams, side, fns, by_hand


def close(found, true):
    assert_same((t.detach() for t in tree_leaves(found)), (t.detach() for t in tree_leaves(true)))


@every_wiring
def test_returns_the_inputs(name, memory):
    """There and back, and back and there; with and without grad."""
    updates, streams, side, fns, _ = program(name)
    fns.eval()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = rg.run(updates, streams, side, memory=memory)
            assert all((out[s] - streams[s]).abs().max() > 0.1 for s in streams)
            close(rg.invert(updates, out, side, memory=memory), streams)
            close(rg.run(updates, rg.invert(updates, streams, side, memory=memory), side, memory=memory), streams)
    net = rg.Reversible(updates, memory=memory).eval()
    close(net.inverse(net(streams, **side), **side), streams)


@every_wiring
def test_gradients(name, memory):
    """Gradients of the inverse, with dropout, against the inverse equations by hand."""
    updates, streams, side, fns, by_hand = program(name)
    wanted = [*streams.values(), *side.values(), *fns.parameters()]
    true = gradients(by_hand, wanted)
    assert_same(gradients(lambda: rg.invert(updates, streams, side, memory=memory), wanted), true)
    assert_same(gradients(lambda: rg.Reversible(updates, memory=memory).inverse(streams, **side), wanted), true)


@every_wiring
def test_gradients_there_and_back(name, memory):
    """Both directions in one graph are the identity: so is the gradient, and that of parameters and context vanishes."""
    updates, streams, side, fns, _ = program(name)
    fns.eval()
    back = rg.invert(updates, rg.run(updates, streams, side, memory=memory), side, memory=memory)
    inputs = list(streams.values())
    found = torch.autograd.grad(loss_of(back), [*inputs, *side.values(), *fns.parameters()])
    assert_same(found[: len(inputs)], torch.autograd.grad(loss_of(streams), inputs))
    assert all(g.abs().max() < 1e-9 for g in found[len(inputs) :])


def test_inverse_of_the_inverse(memory):
    """The inverse of an inverted update is the update; it prints as what it does."""
    updates, streams, side, fns, _ = program("affine", depth=1)
    twice = [update.inverse().inverse() for update in updates]
    wanted = [*streams.values(), *side.values(), *fns.parameters()]
    found = gradients(lambda: rg.run(twice, streams, side, memory=memory), wanted)
    assert_same(found, gradients(lambda: rg.run(updates, streams, side, memory="store"), wanted))
    assert [str(update) for update in twice] == [str(update) for update in updates]
    assert str(updates[0].inverse()) == "x1 -= Branch(x2)"


def test_trees(memory):
    """Streams of other structures and key orders come back as they were."""
    f, g = mlp(3), mlp(2)
    a, b = {"q": draw(4, 3), "k": draw(4, 2)}, (draw(4, 2), draw(4, 3))
    to_a, to_b = (lambda t: {"k": g(t[0]), "q": f(t[1])}), (lambda d: (g(d["k"]), f(d["q"])))
    updates = rg.wirings.leapfrog([to_a, to_b] * 2)

    def by_hand():
        s, (t0, t1) = a, b
        for _ in range(2):
            t0, t1 = t0 - g(s["k"]), t1 - f(s["q"])
            s = {"q": s["q"] - f(t1), "k": s["k"] - g(t0)}
        return {"a": s, "b": (t0, t1)}

    streams = {"a": a, "b": b}
    back = rg.invert(updates, rg.run(updates, streams, memory=memory), memory=memory)
    assert list(back["a"]) == ["q", "k"]
    close(back, streams)
    wanted = [*tree_leaves(streams), *parameters([f, g])]
    assert_same(gradients(lambda: rg.invert(updates, streams, memory=memory), wanted), gradients(by_hand, wanted))


@pytest.mark.parametrize("merge", ["cat", None])
@pytest.mark.parametrize(("split", "dim"), [("copy", -1), ("chunk", -1), ("chunk", 1)])
def test_sequence(split, dim, merge, memory):
    """ReversibleSequence.inverse: the input of forward, with gradients, side inputs included."""
    blocks = [branches(2) for _ in range(3)]
    net = rg.ReversibleSequence(blocks, split=split, dim=dim, merge=merge, route=(True, True), memory=memory)
    x, context = draw(3, 2, WIDTH) if split == "copy" else draw(3, *((2, 2 * WIDTH) if dim == -1 else (4, WIDTH))), draw(1, WIDTH)
    net.eval()
    close(net.inverse(net(x, context=context), context=context), x)

    y1, y2 = draw(3, 2, WIDTH), draw(3, 2, WIDTH)

    def by_hand():
        s = {"x1": y1, "x2": y2}
        for block in reversed(blocks):
            _pair(s, {"context": context}, *block)
        return s["x1"] if split == "copy" else torch.cat((s["x1"], s["x2"]), dim)

    net.train()
    wanted = [y1, y2, context, *net.parameters()]
    found = gradients(lambda: net.inverse((y1, y2) if merge is None else torch.cat((y1, y2), dim), context=context), wanted)
    assert_same(found, gradients(by_hand, wanted))


@pytest.mark.parametrize("merge", ["cat", None])
@pytest.mark.parametrize("split", ["copy", "chunk"])
def test_sequence_of_three_streams(split, merge, memory):
    blocks = [branches(2) for _ in range(2)]
    net = rg.ReversibleSequence(blocks, streams=3, split=split, merge=merge, route=(True, True), memory=memory)
    x, context = draw(3, 2, WIDTH * (3 if split == "chunk" else 1)), draw(1, WIDTH)
    net.eval()
    close(net.inverse(net(x, context=context), context=context), x)


@pytest.mark.parametrize("split", ["copy", "chunk"])
@pytest.mark.parametrize("merge", ["mean", "sum"])
def test_sequence_that_cannot_be_inverted(split, merge, memory):
    """The mean or the sum of two streams does not tell them apart; the message says which merges do."""
    net = rg.ReversibleSequence([mlps(2)], split=split, merge=merge, memory=memory)
    y = net(draw(3, WIDTH * (2 if split == "chunk" else 1)))
    with pytest.raises(rg.ProgramError, match=f"merge='{merge}'.*cannot be recovered.*'cat' or merge=None"):
        net.inverse(y)


def test_bad_side_inputs(memory):
    """inverse checks them as forward does."""
    net = rg.Reversible(rg.wirings.pair(*mlps(2)), memory=memory)
    with pytest.raises(rg.ProgramError, match="no update takes the side input 'mask'"):
        net.inverse({"x1": draw(), "x2": draw()}, mask=None)
    with pytest.raises(rg.ProgramError, match=r"update \d: x2 -= Branch\(x1\): unknown side input 'context'"):
        rg.invert(rg.wirings.pair(Branch(), Branch(), takes=[(), "context"]), {"x1": draw(), "x2": draw()}, memory=memory)
