"""torch.compile(fullgraph=True): a program is traced as a part of the model, and its gradients are those of ordinary autograd."""

import copy
import functools

import pytest
import torch
from support import WIDTH, Attend, assert_same, draw, gradients, mlp, mlps, parameters, rg
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from retrograde._exact import cuda as fused
from retrograde._exact.range import GRID, LIMIT

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own
KINDS = ["reverse", "checkpoint", "store", rg.StoreLast(2), rg.Anchor(3), rg.ReverseAbove(0, dim=0)]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", KINDS, ids=str)
def test_policies(memory):
    net = pairs(2, split="chunk", merge="cat", memory=memory)
    x = draw(3, 4, 2 * WIDTH)
    same(net, [x], [x])


def test_graphs_of_operations():
    """Traced again by the compiler's second stage, which makes forward and backward of it."""
    net = pairs(2)
    x = draw()
    same(net, [x], [x], backend="aot_eager")


def wired():
    w = rg.wirings
    yield "dual", w.dual(*mlps(4)), "x1 x2 m1 m2"
    yield "cross", w.cross(OfTwo(), mlp(), OfTwo(), mlp()), "x1 x2 m1 m2"
    yield "leapfrog", w.leapfrog(mlps(3)), "a b"
    yield "three in turn", w.leapfrog(mlps(4), streams=("a", "b", "c")), "a b c"
    yield "groups", w.groups(mlps(3)), "s0 s1 s2"
    yield "two apart", [*w.pair(*mlps(2)), *w.pair(*mlps(2), streams=("y1", "y2"))], "x1 x2 y1 y2"
    yield "a stream that never changes", [rg.Update("a", OfTwo(), ("b", "c")), rg.Update("b", mlp(), "a")], "a b c"


class OfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = mlps(2)

    def forward(self, x, y):
        return self.f(x) * self.g(y).tanh()


@pytest.mark.parametrize(("updates", "names"), [pytest.param(u, n, id=i) for i, u, n in wired()])
def test_wirings(updates, names):
    streams = {name: draw() for name in names.split()}
    net = rg.Reversible(updates)
    same(net, [streams], streams.values())


@pytest.mark.parametrize("split", ["copy", "chunk"])
def test_three_streams(split):
    net = rg.ReversibleSequence([(Attend(), mlp()) for _ in range(2)], streams=3, split=split)
    x, context = draw(2, 3, WIDTH * (3 if split == "chunk" else 1)), draw(2, 3, WIDTH)
    same(net, [x], [x, context], context=context)


def test_a_stream_beside():
    """One that no update names passes through."""
    streams = {"a": draw(), "b": draw(), "other": draw()}
    same(rg.Reversible(rg.wirings.leapfrog(mlps(2))), [streams], streams.values())


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_side_inputs(memory):
    """A context that needs a gradient, a mask that does not, None, and routing that differs by depth."""
    route = {"context": [(True, False), (True, True)], "mask": [(True, True), (False, True)]}
    net = rg.ReversibleSequence([(Attend(), Attend()) for _ in range(2)], route=route, memory=memory)
    x, context = draw(2, 3, WIDTH), draw(2, 3, WIDTH)
    same(net, [x], [x, context], context=context, mask=torch.rand(2, 3, 3) > 0.2)
    same(net, [x], [x], context=None, mask=None)


def test_side_inputs_that_are_computed():
    """In the same graph: an encoder before the net, trained through it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.memory = mlp(), "reverse"
            self.net = rg.ReversibleSequence([(Attend(), mlp()) for _ in range(2)])

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
    net = rg.Reversible([u for _ in range(2) for u in rg.wirings.pair(OnTrees(), OnTrees(), takes=(["scale"], ()))])
    wanted = [x1["p"], x1["q"][0], x2["p"], x2["q"][0], by]
    same(net, [{"x1": x1, "x2": x2}], wanted, scale={"by": by, "name": "a constant"})


def test_other_rules():
    """Affine couplings, which keep tensors themselves, and the inverse of a program."""
    fns = [nn.ModuleList(mlps(2)) for _ in range(3)]

    def affine(f):
        return lambda x: (f[0](x).tanh() * 0.3, f[1](x))

    updates = [rg.Update("ab"[i % 2], affine(f), "ba"[i % 2], rule=rg.Affine()) for i, f in enumerate(fns)]
    net = rg.Reversible([*updates, *rg.wirings.leapfrog(mlps(2))])
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
    net = pairs(2, split="chunk", merge="cat")
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
    net = pairs(2, arithmetic="exact").to(dtype)
    x = draw(3, 4, WIDTH).to(dtype).detach().requires_grad_()
    wanted = [x, *net.parameters()]
    found = gradients(lambda: compiled(net)(x), wanted)
    true = gradients(lambda: net(x), wanted)
    assert_same(found[:1], true[:1], 0)
    assert_same(found, true, {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exact_addition_compiled(dtype):
    """The compiler rounds where the kernel does: sums are exact, and taking away gives back the very bits."""
    torch.manual_seed(0)
    scales = torch.exp2(torch.randint(-30, 13, (2, 5000)).double())
    value, part = fused.on_grid(torch.randn(5000) * scales[0]), (torch.randn(5000) * scales[1]).to(dtype)
    high = value.float()
    low = ((value - high) * 2.0**GRID).to(torch.int16)
    plus = torch.compile(fused._in_trace, fullgraph=True)
    for sign in (1, -1):
        new = plus(high, low, part, sign)
        true = value + sign * fused.on_grid(part)
        inside = true.abs() <= LIMIT
        assert torch.equal((new[0].double() + new[1].double() * 2.0**-GRID)[inside], true[inside])
        assert new[0][~inside].isnan().all()
        again = plus(*new, part, -sign)
        assert torch.equal(again[0][inside], high[inside])
        assert torch.equal(again[1][inside], low[inside])


def test_exact_beyond_the_range():
    """A trace cannot raise, so what leaves the range is NaN."""
    net = rg.Reversible([rg.Update("a", nn.Linear(4, 4, bias=False), "b")], arithmetic="exact")
    nn.init.constant_(net.fns[0].weight, 1e4)
    out = compiled(net)({"a": torch.zeros(2, 4), "b": torch.ones(2, 4, requires_grad=True)})
    assert out["a"].isnan().all()


# -- functions of all kinds --------------------------------------------------------------------------------------------


def test_shared_and_frozen():
    """One function twice, two that share a weight, one that is frozen, one without parameters."""
    f, g, h, k = mlps(4)
    g[1].weight = f[1].weight
    h.requires_grad_(False)
    net = rg.Reversible(rg.wirings.leapfrog([f, g, f, h, torch.sin, k]))
    streams = {"a": draw(), "b": draw()}
    wanted = [*streams.values(), *(p for p in net.parameters() if p.requires_grad)]
    found = gradients(lambda: compiled(net)(streams), wanted)
    net.memory = "store"
    assert_same(found, gradients(lambda: net(streams), wanted))


def test_tied_outside():
    """A weight that the model uses elsewhere as well."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.memory = pairs(2), "reverse"

        def forward(self, x):
            self.net.memory = self.memory
            return self.net(self.net.blocks[0].f(x)) @ self.net.blocks[1].g[1].weight.T

    x = draw()
    same(Model(), [x], [x])


class Holder:
    def __init__(self):
        self.inner = mlp()

    def method(self, x):
        return self.inner(x)


def test_plain_callables():
    """A closure, a bound method, a partial: their modules are found, and their gradients come."""
    f, holder, h = mlp(), Holder(), mlp()
    fns = [lambda x: f(x), holder.method, functools.partial(lambda m, x: m(x), h)]
    net = rg.Reversible(rg.wirings.leapfrog(fns))
    streams = {"a": draw(), "b": draw()}
    same(net, [streams], [*streams.values(), *parameters([f, holder.inner, h])])


def test_a_program_inside():
    """The inner one runs as store in the second run of the outer one."""
    inner = pairs(2)
    net = rg.ReversibleSequence([(inner, mlp()), (mlp(), pairs(1))])
    x = draw()
    same(net, [x], [x])


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = mlp()
        self.steps = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8), requires_grad=False)

    def forward(self, x, count=1):
        return self.f(x) * self.steps.to(x.dtype) * count


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_whole_numbers(arithmetic):
    """Weights, streams and outputs that have no gradients."""
    updates = [
        rg.Update("k", lambda k: k["n"] * 2, "j"),
        rg.Update("a", Quantized(), ("b", "k")),
        rg.Update("b", lambda a: (a * 3).long(), "a"),
        rg.Update("j", lambda a, k: {"x": a.sin(), "n": k // 2}, ("a", "k")),  # keys in another order than the stream has
    ]
    ones = torch.ones(3, WIDTH, dtype=torch.long)
    streams = {"a": draw(), "b": draw(), "k": ones, "j": {"n": ones + 1, "x": draw()}}
    net = rg.Reversible(updates, arithmetic=arithmetic)
    wanted = [streams["a"], streams["b"], streams["j"]["x"], *(p for p in net.parameters() if p.requires_grad)]
    found = gradients(lambda: compiled(net)(streams), wanted)
    net.memory = "store"
    true = gradients(lambda: net(streams), wanted)
    assert [t.dtype for t in found] == [t.dtype for t in true]
    assert_same([t.double() for t in found], [t.double() for t in true])


def test_a_module_with_two_names():
    """What is put in place of its parameters is taken back once."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = mlp()
            self.same, self.beside = self.f, [self.f]

        def forward(self, x):
            return self.f(self.same(x)) + self.beside[0](x)

    net = rg.ReversibleSequence([(Both(), Both())])
    same(net, [x := draw()], [x])


def test_transforms():
    """Inside torch.func it runs as store."""
    net = pairs(2)
    x = draw(2, 3, WIDTH, grad=False)

    def model(x):
        return torch.vmap(lambda t: net(t))(x), torch.func.grad(lambda t: net(t).sin().sum())(x)

    assert_same(compiled(model)(x), model(x))


def test_no_gradient():
    net = pairs(2)
    x = draw(grad=False)
    call = compiled(net)
    with torch.no_grad():
        assert_same([call(x)], [net(x)])
    net.requires_grad_(False)
    assert_same([call(x)], [net(x)])


# -- the compiler's work -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_no_compiling_after_the_first_step(dynamic):
    net = pairs(2)
    counter = CompileCounterWithBackend("eager")
    call = torch.compile(net, backend=counter, fullgraph=True, dynamic=dynamic)
    for rows in (4, 6):
        for turn in range(3):
            x = draw(rows, WIDTH)
            wanted = [x, *net.parameters()]
            assert_same(gradients(lambda x=x: call(x), wanted), gradients(lambda x=x: net(x), wanted))
            if turn == 0 and not (dynamic and rows == 6):
                seen = counter.frame_count
        assert counter.frame_count == seen


def test_what_is_exchanged_is_seen():
    """Functions, parameters and requires_grad may change between steps."""
    net = pairs(2)
    x = draw()
    call = compiled(net)

    def check():
        wanted = [x, *(p for p in net.parameters() if p.requires_grad)]
        assert_same(gradients(lambda: call(x), wanted), gradients(lambda: net(x), wanted))

    check()
    net.blocks[0].f = mlp()
    check()
    net.blocks[1].g[1].weight = nn.Parameter(draw(2 * WIDTH, WIDTH).detach())
    check()
    net.blocks[0].g.requires_grad_(False)
    check()
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.blocks[0].f[1].weight.mul_(2)
    wanted = [x, *(p for p in twin.parameters() if p.requires_grad)]
    assert_same(gradients(lambda: compiled(twin)(x), wanted), gradients(lambda: twin(x), wanted))


def test_what_is_exchanged_in_a_list_is_seen():
    net = rg.Reversible(rg.wirings.leapfrog(mlps(2)))
    streams = {"a": draw(), "b": draw()}
    call = compiled(net)
    for i in range(2):
        wanted = [*streams.values(), *net.parameters()]
        assert_same(gradients(lambda: call(streams), wanted), gradients(lambda: net(streams), wanted))
        net.fns[i] = mlp()


@pytest.mark.parametrize("by_name", [False, True])
def test_other_routes_and_names(by_name):
    """A new route is seen. Side inputs that come and go need one trace each, and no more."""
    net = rg.ReversibleSequence([(Attend(), Attend())])
    x, context = draw(2, 3, WIDTH), draw(2, 3, WIDTH)
    counter = CompileCounterWithBackend("eager")
    call = torch.compile(net, backend=counter, fullgraph=True)
    for route in [(True, False), (False, True)]:
        net.route = {"context": [route]} if by_name else route
        found = call(x, context=context)
        assert_same([found], [net(x, context=context)])
    for turn in range(4):
        call(x)
        call(x, context=context)
        if turn == 1:
            seen = counter.frame_count
    assert counter.frame_count == seen


def test_keeps_the_final_streams_alone():
    """Of a deeper net backward needs more weights, and nothing else; under store it does."""

    def kept(depth, memory):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        found = []

        def forward(graph, _):
            made = [n for n in graph.graph.find_nodes(op="output")[0].args[0] if isinstance(n, torch.fx.Node)]
            found.append(sum(n.meta["val"].nbytes for n in made if n.op != "placeholder"))
            return graph

        partition = min_cut_rematerialization_partition
        backend = aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, _: graph, partition_fn=partition)
        torch._dynamo.reset()
        call = torch.compile(pairs(depth, memory=memory), backend=backend, fullgraph=True)
        call(draw(5, WIDTH)).sum().backward()
        return found[0]

    assert kept(2, "reverse") == kept(6, "reverse")
    assert kept(2, "store") < kept(6, "store")


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_inductor(arithmetic):
    """The small twin of the matrix below."""
    net = pairs(2, arithmetic=arithmetic)
    x = draw()
    same(net, [x], [x], 1e-6, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["float", "exact"])
@pytest.mark.parametrize("memory", KINDS, ids=str)
@pytest.mark.parametrize("split", ["copy", "chunk"])
def test_inductor_matrix(memory, split, arithmetic):
    net = pairs(split=split, merge="mean" if split == "copy" else "cat", memory=memory, arithmetic=arithmetic)
    x = draw(3, 4, WIDTH if split == "copy" else 2 * WIDTH)
    same(net, [x], [x], 1e-6, "inductor")


# -- what is refused ---------------------------------------------------------------------------------------------------


class Random(nn.Module):
    def __init__(self, draws):
        super().__init__()
        self.lin, self.draws = mlp(), draws

    def forward(self, x):
        return self.draws(self.lin(x))


DRAWS = {
    "dropout": nn.Dropout(0.5),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    "rand": lambda x: x * torch.rand_like(x),
    "in place": lambda x: x * torch.empty_like(x).uniform_(),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid().detach()),
    "inside a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(nn.functional.dropout, x, use_reentrant=False),
}


@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
def test_random_numbers(draws):
    net = rg.ReversibleSequence([(mlp(), Random(draws))])
    with pytest.raises(Exception, match=r"update 1: x2 \+= Random\(x1\): fn draws random numbers.*without fullgraph=True"):
        compiled(net)(draw(2, 3, WIDTH))
    net.memory = "store"  # ordinary autograd keeps what was drawn
    if draws is DRAWS["dropout"]:
        compiled(net)(draw(2, 3, WIDTH)).sum().backward()


QUIET = [nn.Dropout(0.5).eval(), nn.Dropout(0.0), lambda x: nn.functional.scaled_dot_product_attention(x, x, x)]


@pytest.mark.parametrize("quiet", QUIET)
def test_no_random_numbers(quiet):
    net = rg.ReversibleSequence([(mlp(), Random(quiet))])
    x = draw(2, 3, WIDTH)
    same(net, [x], [x])


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = mlp()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.lin(x)


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = mlp()
        self.register_buffer("mean", torch.zeros(WIDTH).double())
        self.register_buffer("var", torch.ones(WIDTH).double())

    def forward(self, x):
        return nn.functional.batch_norm(self.lin(x), self.mean, self.var, training=True)


class OtherStatistics(Statistics):
    def forward(self, x):
        return torch.batch_norm(self.lin(x), None, None, self.mean, self.var, True, 0.1, 1e-5, False)


class Assigns(Statistics):
    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return self.lin(x) - self.mean


class EditsList(Statistics):
    def forward(self, x):
        torch._foreach_add_([self.mean], 1.0)
        return self.lin(x) - self.mean


class Edits(nn.Module):
    def forward(self, x):
        return x.mul_(2)


EDITS = [Counts(), nn.BatchNorm1d(WIDTH).double(), Statistics(), OtherStatistics(), Assigns(), EditsList(), Edits()]


@pytest.mark.parametrize("fn", EDITS, ids=lambda fn: type(fn).__name__)
def test_edits(fn):
    net = rg.Reversible([rg.Update("a", fn, "b")])
    with pytest.raises(Exception, match=r"update 0: a \+= .*edits a buffer or an argument.*without fullgraph=True"):
        compiled(net)({"a": draw(), "b": draw() * 1})


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = mlp()
        self.register_buffer("scale", draw(WIDTH, grad=False))

    def forward(self, x):
        return (self.f(x) * self.scale).sin()


def test_a_buffer_that_changes():
    """Between steps it may; between forward and backward it is an error."""
    f = Scaled()
    net = rg.ReversibleSequence([(mlp(), f)])
    x = draw()
    call = compiled(net, "aot_eager")
    for _ in range(2):
        wanted = [x, *net.parameters()]
        assert_same(gradients(lambda: call(x), wanted), gradients(lambda: net(x), wanted))
        f.scale.mul_(2)
    out = call(x)
    f.scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


LATER = {  # and whether it is an error
    "output": (lambda streams, out, side, net: out["a"].relu_(), True),
    "side input": (lambda streams, out, side, net: side.mul_(2), True),
    "buffer": (lambda streams, out, side, net: net.fns[0].scale.mul_(2), True),
    "stream that is kept": (lambda streams, out, side, net: streams["c"].mul_(2), True),
    "stream that is recovered": (lambda streams, out, side, net: streams["a"].mul_(2), False),
    "copy": (lambda streams, out, side, net: (out["a"] * 1).relu_(), False),
}


@pytest.mark.parametrize(("edit", "wrong"), LATER.values(), ids=LATER)
def test_edits_after_the_net(edit, wrong):
    """In the same graph, where no version counter is looked at."""
    updates = [
        rg.Update("a", Scaled(), "b"),
        rg.Update("b", lambda a, c, side: (a * c).sin() * side, ("a", "c"), takes="side"),
    ]
    net = rg.Reversible(updates)
    given = {name: draw() for name in "abc"}

    def model(given, side):
        streams = {name: t * 1 for name, t in given.items()}
        side = side * 1
        out = net(streams, side=side)
        edited = edit(streams, out, side, net)
        return [*out.values(), edited]

    side, wanted = draw(grad=False), [*given.values(), *net.parameters()]
    if wrong:
        with pytest.raises(
            Exception,
            match=r"is edited in place after a reversible net used or returned it|is a view and is being modified inplace",
        ):
            compiled(model)(given, side)
        return
    assert_same(gradients(lambda: compiled(model)(given, side), wanted), gradients(lambda: model(given, side), wanted))


def test_a_tensor_that_would_get_no_gradient():
    scale = draw(WIDTH)
    table = {"scale": scale}

    def looks_up(x):
        return x * table["scale"]

    net = rg.Reversible([rg.Update("a", looks_up, "b")])
    with pytest.raises(Exception, match=r"update 0: .*needs a gradient.*side input"):
        compiled(net)({"a": draw(), "b": draw()})
    scale.requires_grad_(False)
    compiled(net)({"a": draw(), "b": draw()})


class Stretched(rg.Rule):
    def __init__(self):
        self.by = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def apply(self, target, out):
        return target * self.by + out

    def undo(self, target, out):
        return (target - out) / self.by


def test_a_rule_that_would_get_no_gradient():
    """Also in the last update."""
    net = rg.Reversible([rg.Update("a", mlp(), "b", rule=Stretched())])
    with pytest.raises(Exception, match=r"update 0: .*needs a gradient.*side input"):
        compiled(net)({"a": draw(), "b": draw()})


def test_a_tensor_of_the_graph_that_would_get_no_gradient():
    f = mlp()
    box = []
    net = rg.Reversible([rg.Update("a", lambda x: x * box[0], "b")])

    def model(streams):
        box.append(f(streams["b"]))
        return net(streams)

    with pytest.raises(Exception, match=r"update 0: .*needs a gradient.*side input"):
        compiled(model)({"a": draw(), "b": draw()})


def test_other_refusals():
    net = pairs(1, memory=rg.Budget(1 << 20))
    with pytest.raises(Exception, match=r"rg.Budget counts bytes.*StoreLast"):
        compiled(net)(draw())
    net = pairs(1)
    net.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(Exception, match="block 0 has hooks"):
        compiled(net)(draw())
    updates = rg.wirings.pair(*mlps(2))
    with pytest.raises(Exception, match=r"a list of updates.*rg.Reversible\(updates\)"):
        compiled(lambda x: rg.run(updates, {"x1": x, "x2": x}))(draw())
    net = pairs(1)
    net.blocks[0].f = torch.compile(net.blocks[0].f)
    with pytest.raises(Exception, match="fn is compiled already"):
        compiled(net)(draw())
    with pytest.raises(Exception, match=r"update 0: a \+= Linear\(b\): fn returned another"):
        compiled(rg.Reversible([rg.Update("a", nn.Linear(WIDTH, 2 * WIDTH).double(), "b")]))({"a": draw(), "b": draw()})


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_invertible_functions_without_modules(memory):
    """No sources and no side inputs, so nothing that fn returns; side inputs and streams that have no gradients."""
    f, order = mlp(), torch.tensor([2, 0, 1])

    def mixed(x, other, order, power):
        return torch.sinh(x[order]) + power * other[0] * other[1][:, None]

    def separated(y, other, order, power):
        return torch.asinh(y - power * other[0] * other[1][:, None])[order.argsort()]

    updates = [*rg.wirings.invertible(torch.sinh, torch.asinh), rg.Update("v", f, "x")]
    updates += rg.wirings.invertible(mixed, separated, sources="t", takes=["order", "power"])
    updates += rg.wirings.invertible(lambda t: (t[0] * 2, t[1] + 1), lambda t: (t[0] / 2, t[1] - 1), stream="t")
    net = rg.Reversible([*updates, rg.Update("v", f, "x")], memory=memory)
    streams = {"x": draw(), "v": draw(), "t": (draw(), torch.arange(3))}

    def call(streams, **side):
        out = net(streams, **side)
        return out["x"], out["v"], out["t"][0]

    wanted = [streams["x"], streams["v"], streams["t"][0], *net.parameters()]
    found = gradients(lambda: compiled(call)(streams, order=order, power=3), wanted)
    net.memory = "store"
    assert_same(found, gradients(lambda: call(streams, order=order, power=3), wanted))


def test_rules_that_make_another_tree():
    """The trees of streams are known before the trace; other keys would be given the names of the first."""
    updates = rg.wirings.invertible(lambda t: {"b": -t["a"], "c": t["b"]}, lambda t: {"a": -t["b"], "b": t["c"]}, stream="t")
    for memory in ("reverse", "checkpoint"):
        with pytest.raises(Exception, match=r"update 0: t <- <lambda>\(\): the rule makes another tree"):
            compiled(rg.Reversible(updates, memory=memory))({"t": {"a": draw(), "b": draw()}})
