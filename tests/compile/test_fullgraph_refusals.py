"""torch.compile(fullgraph=True): what cannot be traced rightly is refused."""

import pytest
import torch
from fullgraph_support import compiled, mlp, mlps, pairs, same
from support import WIDTH, assert_same, draw, gradients, rg
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
