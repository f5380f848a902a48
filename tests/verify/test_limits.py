"""What cannot be seen, as docs/guarantees.md says: if one of these tests fails, the page promises too little."""

import contextlib

import pytest
import torch
from support import REPLAYED, WIDTH, draw, linear, loss_of, mlps, rg
from torch import nn


def error_of(fns, memory, change, arithmetic="float", dtype=torch.float64):
    """Of all gradients together, where `change` comes between the forward pass and backward."""
    found = []
    for policy in (memory, "store"):
        torch.manual_seed(0)
        net = rg.Reversible(rg.wirings.leapfrog(fns()), memory=policy, arithmetic=arithmetic).to(dtype)
        loss = loss_of(net({"a": draw().to(dtype), "b": draw().to(dtype)}))
        change(net)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
    return float((found[0] - found[1]).norm() / found[1].norm())


class StraightThrough(nn.Module):
    """Its gradient depends on a plain attribute, and its output does not."""

    def __init__(self):
        super().__init__()
        self.linear, self.slope = nn.Linear(WIDTH, WIDTH).double(), 1.0

    def forward(self, x):
        y = (self.linear(x) * self.slope).tanh()
        return y.detach().sign() + y - y.detach()


def steeper(net):
    net.fns[1].slope = 2.0


def test_a_gradient_that_the_output_does_not_show():
    assert error_of(lambda: [StraightThrough() for _ in range(4)], "reverse", steeper) > 1e-2
    with pytest.raises(rg.ReplayError):  # where nothing is undone, what fn saved is compared
        error_of(lambda: [StraightThrough() for _ in range(4)], "checkpoint", steeper)


class Slightly(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.slope = nn.Linear(WIDTH, WIDTH).double(), 1.0

    def forward(self, x):
        return (self.linear(x) * self.slope).tanh()


def slightly_steeper(net):
    net.fns[1].slope += 1e-6


def test_differences_below_the_thresholds():
    """In floating point a recomputation may differ by what drift may make of it."""
    assert 0 < error_of(lambda: [Slightly() for _ in range(4)], "reverse", slightly_steeper) < 1e-4
    with pytest.raises(rg.ReplayError):
        error_of(lambda: [Slightly() for _ in range(4)], "reverse", slightly_steeper, "exact")


class Offset(Slightly):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True)) + 100


def test_a_fault_in_a_small_part_of_an_output():
    """Where most of an output is a constant, what changes is small beside it, and its gradient is not."""

    def steeper_one(net):
        net.fns[1].slope = 2.0

    def floats():
        return [Offset() for _ in range(4)]

    with pytest.raises(rg.ReplayError):
        error_of(floats, "reverse", steeper_one)  # in float64
    assert error_of(floats, "reverse", steeper_one, dtype=torch.float32) > 1e-2


class Own(torch.Tensor):
    pass


class Wraps(Slightly):
    def forward(self, x):
        return super().forward(x).as_subclass(Own)


def test_outputs_of_a_tensor_subclass():
    assert error_of(lambda: [Wraps() for _ in range(4)], "reverse", steeper) > 1e-2
    with pytest.raises(rg.ReplayError):  # what it saved is none
        error_of(lambda: [Wraps() for _ in range(4)], "checkpoint", steeper)


NORM = nn.BatchNorm1d(WIDTH).double()


class CallsAGlobal(nn.Module):
    def forward(self, x):
        return NORM(x).tanh()


def twice_is_an_error(memory):
    """Under "checkpoint" what is saved is compared, and batch_norm saves its statistics."""
    return pytest.raises(rg.NotRepeated) if memory == "checkpoint" else contextlib.nullcontext()


def reads_a_global(x):
    return nn.functional.batch_norm(x, NORM.running_mean, NORM.running_var, training=True).tanh()


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("fn", [CallsAGlobal(), reads_a_global], ids=["a module", "a function that does not call it"])
def test_statistics_of_a_module_that_is_found_in_a_global(fn, memory):
    """Gradients are right; the statistics move twice. (A plain function may call what it likes.)"""
    moved = []
    for policy in (memory, "store"):
        torch.manual_seed(0)
        NORM.reset_running_stats()
        out = rg.run(rg.wirings.leapfrog([fn, *mlps(1)]), {"a": draw(), "b": draw()}, memory=policy)
        with twice_is_an_error(policy):
            loss_of(out).backward()
        moved.append(NORM.running_mean.clone())
    assert torch.allclose(moved[0], 1.9 * moved[1])  # each step goes a tenth of the way


class Unregistered(nn.Module):
    """Its statistics are plain attributes: no buffers."""

    def __init__(self):
        super().__init__()
        self.mean, self.var = torch.zeros(WIDTH, dtype=torch.float64), torch.ones(WIDTH, dtype=torch.float64)

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.var, training=True).tanh()


@pytest.mark.parametrize("memory", REPLAYED)
def test_statistics_that_are_no_buffers(memory):
    """Gradients are right; the statistics move twice."""
    moved = []
    for policy in (memory, "store"):
        torch.manual_seed(0)
        fn = Unregistered()
        out = rg.run(rg.wirings.leapfrog([fn, *mlps(1)]), {"a": draw(), "b": draw()}, memory=policy)
        with twice_is_an_error(policy):
            loss_of(out).backward()
        moved.append(fn.mean)
    assert torch.allclose(moved[0], 1.9 * moved[1])


class Aside(nn.Module):
    """Two branches side by side; the first has a fault in a few of many rows."""

    def __init__(self):
        super().__init__()
        self.linear, self.other, self.slope = linear(), linear(), torch.ones(4000, 1, dtype=torch.float64)

    def forward(self, x):
        return (self.linear(x) * self.slope).tanh() + self.other(x).tanh()


def a_few_rows(net):
    net.fns[1].slope.data[1:40] = 3.0


def test_a_few_rows_of_a_branch_beside_the_last_one():
    """Under "checkpoint" the last saved tensor is compared as a whole, and others by a sample."""

    def found(memory, change):
        torch.manual_seed(0)
        net = rg.Reversible(rg.wirings.leapfrog([Aside() for _ in range(4)]), memory=memory)
        loss = loss_of(net({"a": draw(4000, WIDTH), "b": draw(4000, WIDTH)}))
        with torch.no_grad():
            change(net)
        return torch.autograd.grad(loss, net.fns[1].linear.weight)[0]

    true = found("store", lambda _: None)
    assert (found("checkpoint", a_few_rows) - true).norm() > 1e-3 * true.norm()
    with pytest.raises(rg.ReplayError):
        found("checkpoint", lambda net: net.fns[1].slope.data.mul_(3.0))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_whole_trace_is_not_verified():
    def step(memory):
        torch.manual_seed(0)
        torch._dynamo.reset()
        net = rg.ReversibleSequence([tuple(mlps(2)) for _ in range(2)], memory=memory)
        loss = loss_of(torch.compile(net, fullgraph=True, backend="eager")(draw()))
        net.blocks[0].f[1].weight.data.mul_(2)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])

    found, true = step("reverse"), step("store")
    assert float((found - true).norm() / true.norm()) > 1e-2


def test_the_last_backward_pass_on_a_device(monkeypatch):
    """It reports in the next forward pass of the program; here no tensor says that it is on a CPU."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda t: False), raising=False)
    net = rg.Reversible(rg.wirings.leapfrog([Slightly() for _ in range(4)]))
    out = net({"a": draw(), "b": draw()})
    steeper(net)
    loss_of(out).backward()  # says nothing
    with pytest.raises(rg.ReplayError, match=r"update 1: .* returned something else"):
        net({"a": draw(), "b": draw()})
