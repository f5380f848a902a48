"""torch.compile(fullgraph=True): a program is traced as a part of the model, and its gradients are those of ordinary autograd."""

import pytest
import torch
from fullgraph_support import compiled, mlp, mlps, pairs, same
from support import WIDTH, Attend, assert_same, draw, gradients, parameters, rg
from torch import nn

from retrograde._exact import cuda as fused
from retrograde._exact.range import GRID, LIMIT

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- what is computed --------------------------------------------------------------------------------------------------


def test_graphs_of_operations():
    """Traced again by the compiler's second stage, which makes forward and backward of it."""
    net = pairs(1, split="chunk", merge="cat")
    x = draw(3, 4, 2 * WIDTH)
    same(net, [x], [x], backend="aot_eager")


def wired():
    """Each wiring and each policy, which share no code: together, as each trace takes a second."""
    w, store_last, anchor, above = rg.wirings, rg.StoreLast(2), rg.Anchor(3), rg.ReverseAbove(0, dim=0)
    yield "dual", w.dual(*mlps(4)), "x1 x2 m1 m2", "reverse"
    yield "cross", w.cross(OfTwo(), mlp(), OfTwo(), mlp()), "x1 x2 m1 m2", "checkpoint"
    yield "leapfrog", w.leapfrog(mlps(3)), "a b", "store"
    yield "three in turn", w.leapfrog(mlps(4), streams=("a", "b", "c")), "a b c", anchor
    yield "groups", w.groups(mlps(3)), "s0 s1 s2", store_last
    yield "two apart", [*w.pair(*mlps(2)), *w.pair(*mlps(2), streams=("y1", "y2"))], "x1 x2 y1 y2", above
    yield "a stream that never changes", [rg.Update("a", OfTwo(), ("b", "c")), rg.Update("b", mlp(), "a")], "a b c", "reverse"


class OfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = mlps(2)

    def forward(self, x, y):
        return self.f(x) * self.g(y).tanh()


@pytest.mark.parametrize(("updates", "names", "memory"), [pytest.param(*case, id=f"{i}, {case[-1]}") for i, *case in wired()])
def test_wirings_and_policies(updates, names, memory):
    streams = {name: draw() for name in names.split()}
    net = rg.Reversible(updates, memory=memory)
    same(net, [streams], streams.values())


@pytest.mark.parametrize("split", ["copy", "chunk"])
def test_three_streams(split):
    net = pairs(2, streams=3, split=split)
    x = draw(3, WIDTH * (3 if split == "chunk" else 1))
    same(net, [x], [x])


def test_a_stream_beside():
    """One that no update names passes through."""
    streams = {"a": draw(), "b": draw(), "other": draw()}
    same(rg.Reversible(rg.wirings.leapfrog(mlps(2))), [streams], streams.values())


class Scaled(nn.Module):
    """Of one of the side inputs, which may be missing."""

    def __init__(self):
        super().__init__()
        self.f = mlp()

    def forward(self, x, mask=None):
        return self.f(x) if mask is None else self.f(x) * mask[..., :1]


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_side_inputs(memory):
    """A context that needs a gradient, a mask that does not, None, and routing that differs by depth."""
    route = {"context": [(True, False), (False, True)], "mask": [(True, True), (False, True)]}
    net = rg.ReversibleSequence([(Attend(), Scaled()), (mlp(), Attend())], route=route, memory=memory)
    x, context = draw(2, 3, WIDTH), draw(2, 3, WIDTH)
    same(net, [x], [x, context], context=context, mask=torch.rand(2, 3, 3) > 0.2)
    same(net, [x], [x], context=None, mask=None)


def test_side_inputs_that_are_computed():
    """In the same graph: an encoder before the net, trained through it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.memory = mlp(), "reverse"
            self.net = rg.ReversibleSequence([(Attend(), mlp())])

        def forward(self, x):
            self.net.memory = self.memory
            return self.net(x, context=self.encoder(x)) + self.encoder(x).sum()

    x = draw(2, 3, WIDTH)
    same(Model(), [x], [x])


class OnTrees(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = mlps(2)

    def forward(self, tree, scale=None):
        scale = 1.0 if scale is None else scale["by"]
        return {"p": self.f(tree["p"]) * scale, "q": [self.g(tree["q"][0]) + tree["p"].sin()]}


def test_trees():
    """Streams and side inputs may be any pytree."""
    x1, x2 = ({"p": draw(), "q": [draw()]} for _ in range(2))
    by = draw(1)
    net = rg.Reversible(rg.wirings.pair(OnTrees(), OnTrees(), takes=(["scale"], ())))
    wanted = [x1["p"], x1["q"][0], x2["p"], x2["q"][0], by]
    same(net, [{"x1": x1, "x2": x2}], wanted, scale={"by": by, "name": "a constant"})


def test_other_rules():
    """Affine couplings, which keep tensors themselves, and the inverse of a program."""
    fns = [nn.ModuleList(mlps(2)) for _ in range(2)]

    def affine(f):
        return lambda x: (f[0](x).tanh() * 0.3, f[1](x))

    updates = [rg.Update("ab"[i % 2], affine(f), "ba"[i % 2], rule=rg.Affine()) for i, f in enumerate(fns)]
    net = rg.Reversible([*updates, rg.Update("a", mlp(), "b")])
    streams = {"a": draw(), "b": draw()}
    same(net, [streams], [*streams.values(), *parameters(fns)])
    back = lambda: compiled(lambda streams: net.inverse(streams))(streams)  # noqa: E731
    wanted = [*streams.values(), *parameters(fns)]
    assert_same(gradients(back, wanted), gradients(lambda: net.inverse(streams), wanted))


class Turn(nn.Module):
    """An invertible function with parameters, of its target and another stream."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64) + 0.1 * torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.mix = mlp()

    def forward(self, x, other, gain):
        return x @ self.weight + gain * self.mix(other)

    def inverse(self, y, other, gain):
        return (y - gain * self.mix(other)) @ self.weight.inverse()


@pytest.mark.parametrize(("memory", "arithmetic"), [("reverse", "auto"), ("checkpoint", "float")])
def test_momentum_and_invertible_functions(memory, arithmetic):
    """Rules that multiply, exactly and in float, and rules with parameters of their own."""
    streams, gain = {"x": draw(), "v": draw()}, draw(1)
    updates = [u for f in mlps(2) for u in rg.wirings.momentum(f)] + rg.wirings.invertible(Turn(), sources="v", takes=["gain"])
    net = rg.Reversible([*updates, rg.Update("v", mlp(), "x")], memory=memory, arithmetic=arithmetic)
    same(net, [streams], [*streams.values(), gain], gain=gain)


def test_the_inverse_of_pairs():
    """Also where the net was never run, and after a function was exchanged."""
    net = pairs(1, split="chunk", merge="cat")
    x = draw(3, 2 * WIDTH)
    call = compiled(net.inverse)
    for _ in range(2):
        wanted = [x, *net.parameters()]
        assert_same(gradients(lambda: call(x), wanted), gradients(lambda: net.inverse(x), wanted))
        net.blocks[0].f = mlp()


@pytest.mark.parametrize(("memory", "arithmetic"), [("reverse", "auto"), ("reverse", "float"), (rg.StoreLast(2), "auto")])
def test_autocast(memory, arithmetic):
    """Backward runs outside of autocast, and its second runs are inside."""
    torch.manual_seed(3)
    net = pairs(2, memory=memory, arithmetic=arithmetic).float()
    x = draw(3, 4, WIDTH).float().detach().requires_grad_()

    def call(net):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    wanted = [x, *net.parameters()]
    found = gradients(lambda: compiled(call)(net), wanted)
    net.memory = "store"
    tolerance = 1e-2 if arithmetic == "float" else 4e-3  # the compiler adds gradients in another order
    assert_same(found, gradients(lambda: call(net), wanted), tolerance)
    assert_same(found[:1], gradients(lambda: call(net), wanted)[:1], 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exact(dtype):
    """The grid is the engine's: outputs are equal to the bit, whatever carries the stream."""
    torch.manual_seed(3)
    net = pairs(1, arithmetic="exact").to(dtype)
    x = draw(3, 4, WIDTH).to(dtype).detach().requires_grad_()
    wanted = [x, *net.parameters()]
    found = gradients(lambda: compiled(net)(x), wanted)
    true = gradients(lambda: net(x), wanted)
    assert_same(found[:1], true[:1], 0)
    assert_same(found, true, {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype])


def test_exact_addition_compiled():
    """The compiler rounds where the kernel does: sums are exact, and taking away gives back the very bits."""
    scales = torch.exp2(torch.randint(-30, 13, (2, 5000)).double())
    value, drawn = fused.on_grid(torch.randn(5000) * scales[0]), torch.randn(5000) * scales[1]
    parts = [drawn.to(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    high = value.float()
    low = ((value - high) * 2.0**GRID).to(torch.int16)

    @torch.compile(fullgraph=True)
    def plus(carried, sign):
        return [fused._in_trace(*one, part, sign) for one, part in zip(carried, parts, strict=True)]

    for sign in (1, -1):
        made = plus([(high.clone(), low.clone()) for _ in parts], sign)
        for part, new, again in zip(parts, made, plus(made, -sign), strict=True):
            true = value + sign * fused.on_grid(part)
            inside = true.abs() <= LIMIT
            assert torch.equal((new[0].double() + new[1].double() * 2.0**-GRID)[inside], true[inside])
            assert new[0][~inside].isnan().all()
            assert torch.equal(again[0][inside], high[inside])
            assert torch.equal(again[1][inside], low[inside])


def test_exact_beyond_the_range():
    """A trace cannot raise, so what leaves the range is NaN."""
    net = rg.Reversible([rg.Update("a", nn.Linear(4, 4, bias=False), "b")], arithmetic="exact")
    nn.init.constant_(net.fns[0].weight, 1e4)
    out = compiled(net)({"a": torch.zeros(2, 4), "b": torch.ones(2, 4, requires_grad=True)})
    assert out["a"].isnan().all()
