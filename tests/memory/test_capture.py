"""Forward and backward inside a CUDA graph: what is drawn differs from replay to replay, and is the same in both runs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import WIDTH, assert_same, draw, gradients, mlp, mlps, rg
from torch import nn

from retrograde._base.cuda_graph import Drawn, DrawnAgain, draws
from retrograde._engine import context

RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of features": lambda x: F.dropout1d(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "in place": lambda x: x * torch.empty_like(x).uniform_(),
    "edited afterwards": lambda x: x * torch.empty_like(x).bernoulli_(0.5).div_(0.5),
    "edited out of place": lambda x: x * torch.rand_like(x).mul_(2),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0],
    "permutation": lambda x: x[torch.randperm(len(x))],
    "two": lambda x: F.dropout(x * torch.bernoulli(torch.full_like(x, 0.5)), 0.3),
}


@pytest.mark.parametrize("fn", RANDOM.values(), ids=RANDOM)
def test_what_was_drawn_is_handed_out_again(fn):
    x = draw(30, 8)
    with Drawn() as drawn:
        first = fn(x)
    assert drawn.kept
    (true,) = torch.autograd.grad(first.square().sum(), x)
    for _ in range(2):  # nothing of what is kept is edited
        with DrawnAgain(drawn, "update 0"):
            again = fn(x)
        assert torch.equal(first, again)
        assert torch.equal(true, torch.autograd.grad(again.square().sum(), x)[0])
    assert not torch.equal(first, fn(x))


@pytest.mark.parametrize("fn", [nn.Dropout(0.5).eval(), nn.Dropout(0.0), lambda x: F.scaled_dot_product_attention(x, x, x)])
def test_what_draws_nothing_is_computed_again(fn):
    x = draw(2, 3, WIDTH)
    with Drawn() as drawn:
        fn(x)
    assert not drawn.kept


def test_more_is_drawn():
    with Drawn() as drawn:
        torch.rand(2)
    with DrawnAgain(drawn, "update 3: a += f(b)"), pytest.raises(rg.ReplayError, match=r"update 3: .*drew more random numbers"):
        torch.rand(2) + torch.rand(2)


def test_which_operations_draw():
    aten = torch.ops.aten
    x = torch.ones(3)
    assert draws(aten.native_dropout.default, (x, 0.5, True), {})
    assert not draws(aten.native_dropout.default, (x, 0.5, False), {})
    assert not draws(aten.native_dropout.default, (x,), {"p": 0.0, "train": True})
    assert not draws(aten.mul.Tensor, (x, x), {})


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", rg.StoreLast(2), rg.Budget(1 << 20)], ids=str)
@pytest.mark.parametrize("draws", [nn.Dropout(0.3), RANDOM["edited afterwards"]], ids=["dropout", "by hand"])
def test_the_engine_where_generators_cannot_be_read(memory, draws, monkeypatch):
    """As if a graph were being captured: no state is looked at, and the second run finds the numbers of the first."""
    monkeypatch.setattr(context, "capturing", lambda: True)
    monkeypatch.setattr(context, "generators", lambda side: [])

    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = mlp()

        def forward(self, x):
            return draws(self.lin(x))

    net = rg.ReversibleSequence([(Random(), Random()) for _ in range(2)], memory=memory)
    x = draw()
    wanted = [x, *net.parameters()]
    found = gradients(lambda: net(x), wanted)
    net.memory = "store"
    assert_same(found, gradients(lambda: net(x), wanted))


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def captured(net, x):
    """A graph of forward and backward, which writes gradients to `.grad`; and the loss that it computes."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            net(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    net.zero_grad(set_to_none=False)
    x.grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for p in (x, *net.parameters()):
            p.grad.zero_()
        out = net(x)
        out.square().sum().backward()
    return graph, out


def assert_replays(net, x, tolerance):
    """A captured step has the gradients of ordinary autograd, for one input after the other."""
    graph, _ = captured(net, x)
    plain = copy.deepcopy(net)
    plain.memory = "store"
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        y = x.detach().clone().requires_grad_()
        plain.zero_grad()
        plain(y).square().sum().backward()
        assert_same([x.grad, *(p.grad for p in net.parameters())], [y.grad, *(p.grad for p in plain.parameters())], tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["float", "exact"])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", rg.StoreLast(2)], ids=str)
def test_whole_step(memory, arithmetic):
    net = rg.ReversibleSequence([tuple(mlps(2)) for _ in range(3)], memory=memory, arithmetic=arithmetic).cuda()
    assert_replays(net, draw(4, WIDTH).detach().cuda().requires_grad_(), 1e-8)


@pytest.mark.gpu
def test_whole_step_with_dropout():
    """The gradient of a linear net with dropout is the mask itself: the two runs must have used the same one."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return F.dropout(x * self.scale, 0.5)

    net = rg.Reversible([rg.Update("a", Scaled(), "b")], arithmetic="float").cuda()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net({"a": torch.zeros_like(x), "b": x})["a"]

    wrapped = Wrapped()
    x = torch.ones(64, device="cuda", requires_grad=True)
    graph, out = captured(wrapped, x)
    seen = []
    for _ in range(4):
        graph.replay()
        # out = 2 m (m is 0 or 1), d/dscale of out^2 = 2 out * 2 m x = 2 out^2
        assert torch.equal(net.fns[0].scale.grad, 2 * out.detach() ** 2)
        seen.append(out.detach().clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
