"""Side inputs: gradients flow to the tensors among them, and what made them is run backward once."""

from functools import partial

import pytest
import torch
from support import POLICIES, WIDTH, Attend, assert_same, draw, gradients, loss_of, mlp, mlps, parameters, rg
from torch import nn

DEPTH = 3
CONTEXT = (2, 4, WIDTH)
X = (2, 3, WIDTH)


class Counted(torch.autograd.Function):
    """The identity; counts its backwards."""

    @staticmethod
    def forward(ctx, x, counts):
        ctx.counts = counts
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.counts.append(1)
        return grad, None


class Encoder(nn.Module):
    """Makes a context; counts its own forwards and backwards."""

    def __init__(self):
        super().__init__()
        self.net, self.forwards, self.backwards = mlp(), 0, []

    def forward(self, x):
        self.forwards += 1
        return Counted.apply(self.net(x), self.backwards)


def by_hand(blocks, x, **side):
    """The equations of a ReversibleSequence that hands its side inputs to f and g both."""
    x1, x2 = x, x
    for f, g in blocks:
        x1 = x1 + f(x2, **side)
        x2 = x2 + g(x1, **side)
    return (x1 + x2) / 2


def sequence(blocks, memory):
    return rg.ReversibleSequence(blocks, route=(True, True), memory=memory)


def forwards(blocks, memory):
    """The same net three ways: under the policy, as store, by hand."""
    return sequence(blocks, memory), sequence(blocks, "store"), lambda x, **side: by_hand(blocks, x, **side)


def attentions():
    return [(Attend(), Attend()) for _ in range(DEPTH)]


def compare(ways, wanted):
    found, *true = (gradients(way, wanted) for way in ways)
    for one in true:
        assert_same(found, one)


def modules(blocks):
    return [fn for block in blocks for fn in block]


@pytest.mark.parametrize("memory", POLICIES)
def test_encoder(memory):
    """A context that every f and g use: right gradients into the encoder, which runs forward once and backward once."""
    blocks, encoder = attentions(), Encoder()
    x, words = draw(*X), draw(*CONTEXT)
    wanted = [x, words, *parameters([*modules(blocks), encoder])]
    results = []
    for net in forwards(blocks, memory):
        encoder.forwards = 0
        encoder.backwards.clear()
        hooked = []

        def out():
            context = encoder(words)
            context.register_hook(lambda grad: hooked.append(1))
            return net(x, context=context)

        results.append(gradients(out, wanted))
        assert (encoder.forwards, len(encoder.backwards), len(hooked)) == (1, 1, 1)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
    assert all(g.abs().max() > 0 for g in results[0][-4:])  # into the encoder


@pytest.mark.parametrize("memory", POLICIES)
@pytest.mark.parametrize("wanted_of", [["words"], ["encoder"], ["x"], ["x", "encoder"]])
def test_encoder_asked_alone(memory, wanted_of):
    """`autograd.grad` for part of the leaves still runs the encoder's backward once, or not at all for the input alone."""
    blocks, encoder = attentions(), Encoder()
    x, words = draw(*X), draw(*CONTEXT)
    wanted = [t for name in wanted_of for t in {"words": [words], "x": [x], "encoder": parameters([encoder])}[name]]
    results = []
    for net in forwards(blocks, memory):
        encoder.backwards.clear()
        results.append(gradients(lambda: net(x, context=encoder(words)), wanted))
        assert len(encoder.backwards) == (wanted_of != ["x"])
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("memory", POLICIES)
def test_one_encoder_two_nets(memory):
    """One context for two programs and for both pairs of a dual wiring: one backward of the encoder for all of them."""
    blocks, encoder, fns = attentions(), Encoder(), [Attend() for _ in range(8)]
    x, words = draw(*X), draw(*CONTEXT)
    dual = [u for i in (0, 4) for u in rg.wirings.dual(*fns[i : i + 4], takes=["context"] * 4)]

    def pairs(context):
        out = {}
        for names, order in ((("x1", "x2"), (0, 1, 4, 5)), (("m1", "m2"), (2, 3, 6, 7))):
            s, t = x, x
            for i, j in (order[:2], order[2:]):
                s = s + fns[i](t, context)
                t = t + fns[j](s, context)
            out |= dict(zip(names, (s, t), strict=True))
        return out

    def out(how):
        context = encoder(words)
        if how == "hand":
            return [by_hand(blocks, x, context=context), pairs(context)]
        streams = dict.fromkeys(("x1", "x2", "m1", "m2"), x)
        return [sequence(blocks, how)(x, context=context), rg.run(dual, streams, {"context": context}, memory=how)]

    compare([partial(out, how) for how in (memory, "store", "hand")], [x, words, *parameters([*fns, encoder])])
    assert len(encoder.backwards) == 3


@pytest.mark.parametrize("memory", POLICIES)
@pytest.mark.parametrize("held_by", ["closure", "attribute"])
def test_captured_context(memory, held_by):
    """A context that fn holds on to and was not passed, made by an encoder: gradients flow to it all the same."""
    blocks, encoder = attentions(), Encoder()
    x, words = draw(*X), draw(*CONTEXT)

    class Holder(nn.Module):
        def __init__(self, fn, context):
            super().__init__()
            self.fn, self.context = fn, context

        def forward(self, t):
            return self.fn(t, self.context)

    def bound(fn, context):
        return Holder(fn, context) if held_by == "attribute" else (lambda t: fn(t, context=context))

    def out(how):
        context = encoder(words)
        if how == "hand":
            return by_hand(blocks, x, context=context)
        return rg.ReversibleSequence([[bound(fn, context) for fn in block] for block in blocks], memory=how)(x)

    wanted = [x, words, *parameters([*modules(blocks), encoder])]
    compare([partial(out, how) for how in (memory, "store", "hand")], wanted)
    assert len(encoder.backwards) == 3


@pytest.mark.parametrize("memory", POLICIES)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("made", ["leaf", "encoder", "view"])
def test_only_the_context_requires_grad(memory, captured, made):
    """Frozen fns and inputs without gradients: the gradient of the context is right."""
    blocks = attentions()
    encoder = Encoder()
    x, words = draw(*X, grad=False), draw(*CONTEXT)
    for p in parameters(modules(blocks)):
        p.requires_grad_(False)
    make = {"leaf": lambda: words, "encoder": lambda: encoder(words), "view": lambda: words.flip(1)[:, 1:]}[made]

    def out(how):
        context = make()
        if how == "hand":
            return by_hand(blocks, x, context=context)
        if not captured:
            return sequence(blocks, how)(x, context=context)
        return rg.ReversibleSequence([[partial(fn, context=context) for fn in block] for block in blocks], memory=how)(x)

    ways = [partial(out, how) for how in (memory, "store", "hand")]
    compare(ways, [words, *(parameters([encoder]) if made == "encoder" else [])])


class Takes(nn.Module):
    """A branch that uses side inputs of every kind."""

    def __init__(self):
        super().__init__()
        self.fn, self.attend, self.scale = mlp(), Attend(), nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x, context, mask, extra, causal, name, positions):
        keys = sum(context["parts"]) * context["gain"][0]
        if name == "second":
            keys = keys.tanh()
        if causal:
            keys = keys.cumsum(1)
        if extra is not None:
            x = x + extra
        x = x * self.scale + torch.nn.functional.one_hot(positions, WIDTH)
        return self.fn(x) + self.attend(x, keys, mask)


@pytest.mark.parametrize("memory", POLICIES)
@pytest.mark.parametrize(("causal", "extra", "name"), [(True, False, "first"), (False, True, "second")])
def test_kinds(memory, causal, extra, name):
    """Pytrees of tensors, a mask of bools, integers, None, a bool and a string, in one call."""
    blocks = [(Takes(), Takes()) for _ in range(DEPTH)]
    x, a, b, gain, more = draw(*X), draw(*CONTEXT), draw(*CONTEXT), draw(1), draw(*X)
    mask = torch.rand(2, 3, 4) > 0.3
    mask[..., 0] = True
    side = {
        "name": name,
        "context": {"parts": [a, (b * b).sin()], "gain": (gain, None, 3)},
        "mask": mask,
        "extra": more if extra else None,
        "causal": causal,
        "positions": torch.arange(3),
    }
    wanted = [x, a, b, gain, *([more] if extra else []), *parameters(modules(blocks))]

    def fresh():
        return {**side, "context": {"parts": [a, (b * b).sin()], "gain": (gain, None, 3)}}

    compare([lambda net=net: net(x, **fresh()) for net in forwards(blocks, memory)], wanted)
    found = gradients(lambda: sequence(blocks, memory)(x, **side), wanted)
    assert all(g.abs().max() > 0 for g in found)


@pytest.mark.parametrize("memory", POLICIES)
def test_routes_and_names(memory):
    """Side inputs by depth and by function, under other names than fn's: each gets its own, and a context that some fns
    alone use gets the gradient of those."""
    fns = [Attend() for _ in range(4)]
    x, one, two = draw(*X), draw(*CONTEXT), draw(*CONTEXT)
    updates = [
        rg.Update("a", fns[0], "b", {"context": "one"}),
        rg.Update("b", fns[1], "a", {"context": "two"}),
        rg.Update("a", fns[2], "b"),
        rg.Update("b", fns[3], "a", {"context": "one"}),
    ]

    def hand():
        a = x + fns[0](x, one)
        b = x + fns[1](a, two)
        a = a + fns[2](b)
        b = b + fns[3](a, one)
        return {"a": a, "b": b}

    def out(how):
        return rg.run(updates, {"a": x, "b": x}, {"one": one, "two": two}, memory=how)

    compare([lambda: out(memory), lambda: out("store"), hand], [x, one, two, *parameters(fns)])


@pytest.mark.parametrize("memory", POLICIES)
@pytest.mark.parametrize("case", ["the input", "an output of another program", "a parameter"])
def test_context_from_anywhere(memory, case):
    """The context may be the input itself, a parameter of an fn, or come out of another program that is reversed as well."""
    blocks, before = attentions(), mlps(4)
    x = draw(*X)

    def out(how):
        context = {"the input": lambda: x, "an output of another program": lambda: earlier(how), "a parameter": weight}[case]()
        return by_hand(blocks, x, context=context) if how == "hand" else sequence(blocks, how)(x, context=context)

    def earlier(how):
        pairs = [before[:2], before[2:]]
        return by_hand(pairs, x) if how == "hand" else rg.ReversibleSequence(pairs, memory=how)(x)

    def weight():
        return blocks[0][0].out.weight.expand(2, -1, -1)

    wanted = [x, *parameters(modules(blocks) + (before if "program" in case else []))]
    compare([partial(out, how) for how in (memory, "store", "hand")], wanted)


@pytest.mark.parametrize("memory", POLICIES)
def test_two_backwards_into_one_encoder(memory):
    """Two losses over one context, each with its own backward, then again with the graph kept: sums of the same gradients."""
    blocks, encoder = attentions(), Encoder()
    x, words = draw(*X), draw(*CONTEXT)
    wanted = [x, words, *parameters([*modules(blocks), encoder])]
    results = []
    for net in forwards(blocks, memory):
        encoder.backwards.clear()
        context = encoder(words)
        losses = [loss_of(net(x, context=context)), loss_of(net(2 * x, context=context.sin()))]
        for t in wanted:
            t.grad = None
        for loss in losses:
            loss.backward(retain_graph=True)
        sum(losses).backward()
        assert len(encoder.backwards) == 3
        results.append([t.grad for t in wanted])
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("memory", ["reverse"])
def test_edited_in_backward(memory):
    """By a hook, after the updates above have been run again with what it was: those below would see another one."""
    blocks = [(Attend(), mlp()) for _ in range(3)]
    net = rg.ReversibleSequence(blocks, memory=memory)
    context = draw(*CONTEXT, grad=False)
    blocks[2][0].out.weight.register_hook(lambda grad: 0 * context.mul_(2).sum() + grad)
    with pytest.raises(rg.ReplayError, match=r"update [0-3]: .*side input of fn was edited in place during backward"):
        loss_of(net(draw(*X), context=context)).backward()


def test_edited_in_backward_where_nobody_below_takes_it():
    """As an optimizer does that steps inside backward."""
    fns = [Attend(), *mlps(3)]
    route = {"context": [(False, False), (True, False)]}
    net = rg.ReversibleSequence([(fns[1], fns[2]), (fns[0], fns[3])], route=route)
    x, context = draw(*X), draw(*CONTEXT)
    wanted = [x, *net.parameters()]
    net.memory = "store"
    true = gradients(lambda: net(x, context=context), wanted)
    net.memory = "reverse"

    def step(t):
        with torch.no_grad():
            t.add_(1)

    context.register_post_accumulate_grad_hook(step)
    loss_of(net(x, context=context)).backward()
    assert_same([t.grad for t in wanted], true[1:])
