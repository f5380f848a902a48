"""Rules beyond addition against the same equations by hand: affine and momentum."""

import copy
import warnings

import pytest
import torch
from rules_support import Halves, Turn, every_policy
from support import POLICIES, REPLAYED, WIDTH, assert_same, draw, gradients, loss_of, mlp, mlps, parameters, rg
from torch import nn
from torch.nn.functional import leaky_relu


class Seen(nn.Module):
    """A branch with a context and dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net, self.mix = mlp(dropout=dropout), nn.Linear(4, WIDTH).double()

    def forward(self, x, context=None):
        return self.net(x if context is None else x + self.mix(context).tanh())


class Net:
    """Updates, and the same by hand; three blocks."""

    def __init__(self, kind, dropout=0.0):
        self.kind = kind
        make = {"affine": Halves, "momentum": Seen, "invertible": lambda _: Turn()}[kind]
        self.fns = [make(dropout) for _ in range(3)]
        self.extra = mlps(3)
        self.streams = {"x": draw(), "v": draw()}
        self.context = draw(3, 4)

    def updates(self):
        found = []
        for f, g in zip(self.fns, self.extra, strict=True):
            if self.kind == "affine":
                found += [rg.Update("x", f, "v", ["context"], rg.Affine(limit=1.0)), rg.Update("v", g, "x")]
            elif self.kind == "momentum":
                found += rg.wirings.momentum(f, 0.9, takes=["context"])
            else:
                found += [*rg.wirings.invertible(f, sources="v", takes=["context"]), *rg.wirings.invertible(self.alone)]
                found += [rg.Update("v", g, "x")]
        return found

    @property
    def alone(self):
        return self.fns[0]

    def by_hand(self):
        x, v = self.streams["x"], self.streams["v"]
        for f, g in zip(self.fns, self.extra, strict=True):
            if self.kind == "affine":
                scale, shift = f(v, self.context)
                x = x * scale.tanh().exp() + shift
                v = v + g(x)
            elif self.kind == "momentum":
                v = 0.9 * v + 0.1 * f(x, self.context)
                x = x + v
            else:
                x = self.alone(f(x, v, context=self.context))
                v = v + g(x)
        return {"x": x, "v": v}

    @property
    def wanted(self):
        fns = self.fns if self.kind == "momentum" else [*self.fns, *self.extra]
        return [*self.streams.values(), self.context, *parameters(fns)]

    def run(self, memory, **options):
        return rg.run(self.updates(), self.streams, {"context": self.context}, memory=memory, **options)


KINDS = ["affine", "momentum", "invertible"]
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@every_policy
def test_gradients(kind, memory):
    """Outputs, and gradients of streams, side inputs and parameters; dropout is drawn once."""
    net = Net(kind, dropout=0.3)
    assert_same(gradients(lambda: net.run(memory, arithmetic="float"), net.wanted), gradients(net.by_hand, net.wanted))


@every_kind
@pytest.mark.parametrize("memory", REPLAYED)
def test_more_than_one_backward(kind, memory):
    """retain_graph, two losses, double backward, and a second forward pass before the first backward."""
    net = Net(kind)

    def twice(make):
        first, second = make(), make()
        loss = loss_of(first)
        found = torch.autograd.grad(loss, net.wanted, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(loss, net.wanted, create_graph=True, allow_unused=True)
        penalty = sum(g.square().sum() for g in again if g is not None)
        found += torch.autograd.grad(penalty, net.wanted, allow_unused=True)
        found += torch.autograd.grad(loss_of(second), net.wanted, allow_unused=True)
        return [g for g in found if g is not None]

    assert_same(twice(lambda: net.run(memory, arithmetic="float")), twice(net.by_hand), 1e-8)


@every_kind
@pytest.mark.parametrize("memory", ["store", *REPLAYED])
def test_inverse(kind, memory):
    """It gives back the input, and its own gradients are those of the equations solved by hand."""
    net = Net(kind)
    module = rg.Reversible(net.updates(), memory=memory, arithmetic="float")
    back = module.inverse(net.run(memory, arithmetic="float"), context=net.context)
    assert_same([back["x"], back["v"]], list(net.streams.values()), 1e-8)
    wanted = net.wanted[:3] + list(module.parameters())
    stored = rg.Reversible(net.updates(), memory="store", arithmetic="float")

    def of(one):
        return gradients(lambda: one.inverse(net.streams, context=net.context), wanted)

    assert_same(of(module), of(stored))
    there_and_back = module.inverse(module(net.streams, context=net.context), context=net.context)
    for g in torch.autograd.grad(loss_of(there_and_back), list(module.parameters()), allow_unused=True):
        assert g is None or g.abs().max() < 1e-8


@every_kind
def test_as_a_module(kind):
    """Parameters are registered, copies are whole nets, the state dict loads, and the checks say so."""
    net = Net(kind)
    module = rg.Reversible(net.updates())
    own = net.fns if kind == "momentum" else [*net.fns, *net.extra]
    assert {id(p) for p in module.parameters()} == {id(p) for p in parameters(own)}
    other = copy.deepcopy(module)
    other.load_state_dict(module.state_dict())
    outs = [one(net.streams, context=net.context) for one in (module, other)]
    assert_same(outs[1].values(), outs[0].values())
    loss_of(outs[1]).backward()
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in module.parameters())
    report = rg.check.gradients(module, net.streams, context=net.context)
    assert report.ok, report
    assert report.replayed


@every_kind
@pytest.mark.parametrize("memory", REPLAYED)
def test_autocast(kind, memory):
    """Backward outside of autocast computes as the forward pass did; what 16 bits make of it is told."""
    net = Net(kind)
    for part in (*net.fns, *net.extra):
        part.float()
    if kind == "invertible":  # its matrix is inverted in float32
        net.fns = [Wide(f) for f in net.fns]
    net.streams = {name: t.detach().float().requires_grad_() for name, t in net.streams.items()}
    net.context = net.context.detach().float().requires_grad_()

    def run(memory):
        with torch.autocast("cpu", torch.bfloat16):
            return net.run(memory)

    true = gradients(lambda: run("store"), net.wanted)
    if kind == "momentum":
        assert all(map(torch.equal, gradients(lambda: run(memory), net.wanted), true))
    elif memory == "checkpoint":
        assert_same(gradients(lambda: run(memory), net.wanted), true, 1e-6)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* slightly different")
            assert_same(gradients(lambda: run(memory), net.wanted), true, 0.1)


class Wide(nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.turn = turn

    def forward(self, x, *others, context=None):
        with torch.autocast("cpu", enabled=False):
            x = x @ self.turn.weight
        x = leaky_relu(x, 0.5)
        return x + self.turn.mix(others[0]).float() if others else x

    def inverse(self, y, *others, context=None):
        y = y - self.turn.mix(others[0]).float() if others else y
        with torch.autocast("cpu", enabled=False):
            return leaky_relu(y, 2.0) @ self.turn.weight.inverse()


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiled_functions():
    """`rg.compile_fns` compiles what there is to compile: invertible modules too, and not the `x += v` of momentum."""
    turn, f = Turn(), mlp()
    net = rg.Reversible([*rg.wirings.momentum(f), *rg.wirings.invertible(turn)], arithmetic="float")
    streams = {"x": draw(), "v": draw()}
    wanted = [*streams.values(), turn.weight, *f.parameters()]
    true = gradients(lambda: net(streams), wanted)
    compiled = []
    rg.compile_fns(net, backend=lambda graph, _: compiled.append(graph) or graph.forward)
    assert_same(gradients(lambda: net(streams), wanted), true)
    assert len(compiled) == 2
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_under_torch_func():
    """By ordinary autograd, as every program; exact momentum as well, forwards too."""
    net, streams = deep(3, dtype=torch.float64)
    x, v = streams["x"].detach(), streams["v"]

    def loss(x):
        return net({"x": x, "v": v})["x"].sin().sum()

    (true,) = torch.autograd.grad(loss(streams["x"]), streams["x"])
    assert_same([torch.func.grad(loss)(x)], [true])
    moved = torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1]
    assert_same([moved], [true.sum()])


# -- affine ------------------------------------------------------------------------------------------------------------


@every_policy
def test_affine_with_a_scale(memory):
    """fn returns the scale itself, as MemCNN's does."""
    fns = [Halves(), Halves()]
    net = [lambda x, f=f: (f(x)[0].sigmoid() + 0.5, f(x)[1]) for f in fns]
    streams = {"x1": draw(), "x2": draw()}

    def by_hand():
        x1, x2 = streams["x1"], streams["x2"]
        scale, shift = net[0](x2)
        x1 = x1 * scale + shift
        scale, shift = net[1](x1)
        return {"x1": x1, "x2": x2 * scale + shift}

    updates = rg.wirings.pair(*net, rule=rg.Affine(log=False))
    wanted = [*streams.values(), *(p for f in fns for p in (*f.net.parameters(), *f.out.parameters()))]
    assert_same(gradients(lambda: rg.run(updates, streams, memory=memory), wanted), gradients(by_hand, wanted))


def test_affine_limit():
    """What fn returns cannot make the scale too small to be undone."""
    streams = {"a": draw(grad=False), "b": draw(grad=False)}
    off = {}
    for limit in (None, 2.0):
        updates = [rg.Update("a", lambda b: (b * 0 - 60.0, b), "b", rule=rg.Affine(limit=limit))]
        back = rg.invert(updates, rg.run(updates, streams))
        off[limit] = float((back["a"] - streams["a"]).abs().max())
    assert off[None] > 0.1
    assert off[2.0] < 1e-14
    with pytest.raises(rg.ProgramError, match="limit must be a positive number"):
        rg.Affine(log=False, limit=1.0)


def test_affine_in_sixteen_bits_inside_wide_streams():
    """The scale is used in the precision of the stream, so that it is undone to that precision."""
    streams = {"a": torch.randn(100), "b": torch.randn(100)}
    updates = [rg.Update("a", lambda b: (b.bfloat16().tanh(), b.bfloat16()), "b", rule=rg.Affine())]
    out = rg.run(updates, streams, arithmetic="float")
    given = streams["b"].bfloat16()
    assert_same([out["a"]], [streams["a"] * given.tanh().float().exp() + given.float()], 1e-6)
    assert_same([rg.invert(updates, out, arithmetic="float")["a"]], [streams["a"]], 1e-6)


# -- momentum ----------------------------------------------------------------------------------------------------------


def deep(depth, gamma=0.9, dtype=torch.float32, **options):
    fns = [mlp().to(dtype) for _ in range(depth)]
    net = rg.Reversible([u for f in fns for u in rg.wirings.momentum(f, gamma)], **options)
    return net, {"x": draw(2, WIDTH).to(dtype), "v": torch.zeros(2, WIDTH, dtype=dtype)}


@pytest.mark.parametrize(("gamma", "dtype"), [(0.9, torch.float32), (0.5, torch.float64), (7 / 9, torch.bfloat16)])
def test_momentum_loses_no_bit(gamma, dtype):
    """By itself, without being asked: recovered streams are the very bits, and so are the gradients."""
    net, streams = deep(60, gamma, dtype)
    found = rg.check.drift(net, streams)
    assert len(found.rows) == 120
    assert found.worst.absolute == found.gradient_error == 0
    x, v = streams["x"], streams["v"]
    for update in net.program.updates[::2]:
        v = gamma * v + (1 - gamma) * update.fn(x)
        x = x + v
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-8, torch.bfloat16: 0.1}[dtype]
    assert_same([t.detach() for t in net(streams).values()], [x.detach(), v.detach()], tolerance)


@pytest.mark.parametrize("memory", ["store", *REPLAYED])
def test_gradients_of_the_exact_inverse(memory):
    """It starts from given numbers, and has the gradients of the inverse in float."""
    net, streams = deep(4, dtype=torch.float64, memory=memory, arithmetic="exact")
    wanted = [streams["x"], *net.parameters()]
    found = gradients(lambda: net.inverse(streams), wanted)
    net.memory, net.arithmetic = "store", "float"
    assert_same(found, gradients(lambda: net.inverse(streams), wanted), 1e-7)


def test_momentum_drifts_in_float():
    """By 1/gamma with each update; where nothing would be left, it is an error that names the ways out, and they work."""
    shallow, deeper = (rg.check.drift(*deep(depth, arithmetic="float")).gradient_error for depth in (12, 72))
    assert 0 < shallow < 1e-6 < 1e-5 < deeper
    net, streams = deep(150, arithmetic="float")
    with pytest.raises(rg.ProgramError, match=r"update 8\d: v ~= Sequential\(x\): .*gamma.*exact.*rg\.Anchor.*checkpoint"):
        net(streams)
    for net.memory in (rg.Anchor(30), "checkpoint", "store"):
        net(streams)
    net.memory, net.arithmetic = "reverse", "exact"
    net(streams)


def test_momentum_beyond_the_room():
    """Each product loses log2(1/gamma) bits, and there is room for 63: then an error, and in parts it works."""
    net, streams = deep(80, 0.5, arithmetic="exact")
    with pytest.raises(rg.ProgramError, match=r"update 1\d\d: .*63 bits, enough for 6\d by 1/2.*rg\.Anchor"):
        net(streams)
    net.arithmetic = "auto"
    with pytest.raises(rg.ProgramError, match="divides by gamma"):
        net(streams)
    net.memory = rg.Anchor(10)
    assert rg.check.gradients(net, streams).ok


def test_momentum_by_no_fraction():
    net, streams = deep(3, 0.12345678, arithmetic="exact")
    with pytest.raises(rg.ProgramError, match=r"update 0: .*Momentum, by no fraction"):
        net(streams)
    net.arithmetic = "auto"
    assert rg.check.gradients(net, streams).ok
    for gamma in (0, 1, 1.5, "0.9"):
        with pytest.raises(rg.ProgramError, match="gamma must be a number between 0 and 1"):
            rg.Momentum(gamma)


def test_momentum_of_whole_numbers():
    with pytest.raises(rg.ProgramError, match=r"update 0: .*floating point"):
        rg.run(rg.wirings.momentum(nn.Tanh()), {"x": draw(), "v": torch.zeros(3, WIDTH, dtype=torch.int64)}, arithmetic="float")


def test_momentum_beyond_the_range():
    """A velocity that the inverse makes too large is an error, as with additions."""
    updates = [u for _ in range(40) for u in rg.wirings.momentum(lambda x: x * 0, 0.5)]
    streams = {"x": torch.ones(3), "v": torch.ones(3)}
    with pytest.raises(rg.OutOfRange, match="left the range of exact arithmetic"):
        rg.invert(updates, streams)


def test_momentum_of_trees_and_mixed_with_additions():
    """Dicts by key, exactly; other updates may add to the velocity."""
    fns = mlps(6)

    def on(f):
        return lambda tree: {key: f(t) for key, t in reversed(tree.items())}

    streams = {name: {"p": draw(), "q": draw(2, WIDTH)} for name in "xv"}
    updates = []
    for f, g in zip(fns[::2], fns[1::2], strict=True):
        updates += [*rg.wirings.momentum(on(f)), rg.Update("v", on(g), "x")]
    wanted = [*(t for s in streams.values() for t in s.values()), *parameters(fns)]

    def by_hand():
        out = {}
        for key in "pq":
            x, v = streams["x"][key], streams["v"][key]
            for f, g in zip(fns[::2], fns[1::2], strict=True):
                v = 0.9 * v + 0.1 * f(x)
                x = x + v
                v = v + g(x)
            out[key] = x, v
        return {"x": {key: out[key][0] for key in "pq"}, "v": {key: out[key][1] for key in "pq"}}

    true = gradients(lambda: rg.run(updates, streams, memory="store"), wanted)
    assert_same(true, gradients(by_hand, wanted), 1e-8)
    for memory in POLICIES:
        assert all(map(torch.equal, gradients(lambda: rg.run(updates, streams, memory=memory), wanted), true))
