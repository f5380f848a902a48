"""torch.compile(fullgraph=True): functions of all kinds, and the compiler's work."""

import copy
import functools

import pytest
import torch
from fullgraph_support import KINDS, compiled, mlp, mlps, pairs, same
from support import WIDTH, assert_same, draw, gradients, parameters, rg
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- functions of all kinds --------------------------------------------------------------------------------------------


def test_shared_and_frozen():
    """One function twice, two that share a weight, one that is frozen, one without parameters."""
    f, g, h, k = mlps(4)
    g[0].weight = f[0].weight
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
            return self.net(self.net.blocks[0].f(x)) @ self.net.blocks[1].g[0].weight.T

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
    net = rg.ReversibleSequence([(pairs(1), mlp()), (mlp(), pairs(1))])
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
    net = pairs(1)
    x = draw(2, 3, WIDTH, grad=False)

    def model(x):
        return torch.vmap(lambda t: net(t))(x), torch.func.grad(lambda t: net(t).sin().sum())(x)

    assert_same(compiled(model)(x), model(x))


def test_no_gradient():
    net = pairs(1)
    x = draw(grad=False)
    call = compiled(net)
    with torch.no_grad():
        assert_same([call(x)], [net(x)])
    net.requires_grad_(False)
    assert_same([call(x)], [net(x)])


# -- the compiler's work -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_no_compiling_after_the_first_step(dynamic):
    net = pairs(1)
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
    net = pairs(1)
    x = draw()
    call = compiled(net)

    def check():
        wanted = [x, *(p for p in net.parameters() if p.requires_grad)]
        assert_same(gradients(lambda: call(x), wanted), gradients(lambda: net(x), wanted))

    check()
    net.blocks[0].f = mlp()
    check()
    net.blocks[0].g[0].weight = nn.Parameter(draw(2 * WIDTH, WIDTH).detach())
    check()
    net.blocks[0].f.requires_grad_(False)
    check()
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.blocks[0].f[0].weight.mul_(2)
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


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = mlp()

    def forward(self, x, context=None):
        return self.f(x if context is None else x * context)


@pytest.mark.parametrize("by_name", [False, True])
def test_other_routes_and_names(by_name):
    """A new route is seen. Side inputs that come and go need one trace each, and no more."""
    net = rg.ReversibleSequence([(Given(), Given())])
    x, context = draw(3, WIDTH), draw(3, WIDTH)
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

    assert kept(1, "reverse") == kept(2, "reverse")
    assert kept(1, "store") < kept(2, "store")


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_inductor(arithmetic):
    """The small twin of the matrix below."""
    net = pairs(1, arithmetic=arithmetic)
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
