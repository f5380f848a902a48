"""What changes between two passes, inside of one, or between the forward pass and backward."""

import collections
import copy
import sys
import threading

import pytest
import torch
from torch import nn

import retrograde as rg

held = None  # what a fn takes from around it


class Fn(nn.Module):
    """What it adds is not saved for backward: only a look at what it holds tells of an edit."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = 2.0
        self.table = None

    def forward(self, x):
        y = self.inner(x) * self.scale
        for t in (self.table, getattr(self, "later", None), getattr(self.inner, "extra", None), held):
            y = y if t is None else y + t
        return y


def net_of(count=2):
    torch.manual_seed(0)
    return rg.ReversibleSequence([(Fn(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(count)]).double()


def gradients(net, memory, x):
    net.memory = memory
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def assert_as_stored(net):
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(gradients(net, "reverse", x), gradients(net, "store", x))


@pytest.fixture
def net():
    made = net_of()
    assert_as_stored(made)
    return made


@pytest.fixture(autouse=True)
def nothing_around():
    yield
    globals()["held"] = None


def exchanged_child(net):
    net.blocks[0].f.inner = nn.Linear(4, 4).double()
    return net.blocks[0].f.inner.weight


def exchanged_parameter(net):
    net.blocks[0].f.inner.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    return net.blocks[0].f.inner.weight


def another_dict(net):
    linear = net.blocks[0].f.inner
    linear._parameters = {"weight": nn.Parameter(torch.randn(4, 4, dtype=torch.float64)), "bias": linear.bias}
    return linear.weight


def another_attribute(net):
    net.blocks[0].f.table = torch.randn(4, dtype=torch.float64)
    return net.blocks[0].f.table


def a_new_attribute(net):
    net.blocks[-1].f.later = torch.randn(4, dtype=torch.float64)
    return net.blocks[-1].f.later


def another_global(_):
    globals()["held"] = torch.randn(4, dtype=torch.float64)
    return held


class Other(Fn):
    def forward(self, x):
        return super().forward(x) + beside


beside = torch.randn(4, dtype=torch.float64)


def another_class(net):
    net.blocks[0].f.__class__ = Other
    return beside


def a_buffer(net):
    net.blocks[0].f.inner.register_buffer("extra", torch.randn(4, dtype=torch.float64))
    return net.blocks[0].f.inner.extra


CHANGES = [
    exchanged_child,
    exchanged_parameter,
    another_dict,
    another_attribute,
    a_new_attribute,
    another_global,
    another_class,
    a_buffer,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_between_passes(net, change):
    """The new tensor is used, and an edit of it after the forward pass is reported."""
    t = change(net)
    assert_as_stored(net)
    net.memory = "reverse"
    out = net(torch.randn(3, 4, dtype=torch.float64))
    with torch.no_grad():
        t.add_(1)
    with pytest.raises(rg.ReplayError, match=r"changed|returned something else"):
        out.sum().backward()


def edited(fn):
    with torch.no_grad():
        fn.inner.bias.add_(1)


def moved(fn):
    fn.inner.bias.data = fn.inner.bias.data + 1


def hooked(fn):
    fn.inner.register_forward_hook(lambda module, args, out: out * 2)


def without_child(fn):
    fn.inner = nn.Linear(4, 4).double()


def evaluating(fn):
    fn.inner.eval()


@pytest.mark.parametrize("change", [edited, moved, hooked, without_child, evaluating])
def test_changed_between_forward_and_backward(net, change):
    net.memory = "reverse"
    out = net(torch.randn(3, 4, dtype=torch.float64))
    change(net.blocks[0].f)
    with pytest.raises(rg.ReplayError, match=r"changed|returned something else"):
        out.sum().backward()


class Grows(nn.Module):
    """Adds whatever it has under this name, once it has something there."""

    def __init__(self, buffers):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        if buffers:
            self.register_buffer("table", torch.randn(4))

    def forward(self, x):
        y = self.inner(x).tanh()
        return y if getattr(self, "later", None) is None else (y + self.later).sin()


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_slots_made_between_forward_and_backward(buffers, kind):
    """The first run knew nothing of them, nor does the recomputation; afterwards they are there."""
    made = rg.Reversible(rg.wirings.leapfrog([Grows(buffers) for _ in range(4)])).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    found = []
    for memory in ("reverse", "checkpoint", "store"):
        made.memory = memory
        loss = sum(t.square().sum() for t in made({"a": x, "b": 2 * x}).values())
        wanted = list(made.parameters())
        for fn in made.fns:
            new = torch.randn(4, dtype=torch.float64)
            fn.register_parameter("later", nn.Parameter(new)) if kind == "parameter" else fn.register_buffer("later", new)
        found.append(torch.autograd.grad(loss, wanted))
        assert all(isinstance(fn.later, torch.Tensor) for fn in made.fns)
        for fn in made.fns:
            del fn.later
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


class Adapted(nn.Module):
    """Computes in 16 bits from the pass on in which it is given a gain."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x).tanh()
        return (y.bfloat16() * self.gain).float() if self._parameters else y


def test_sixteen_bits_that_come_later():
    """Seen before the pass, as arithmetic depends on it: the first of a module's parameters, and the last of a net."""
    made = rg.Reversible([rg.Update("ab"[i % 2], Adapted(), "ba"[i % 2]) for i in range(4)])
    x = torch.randn(3, 4)
    for step in range(1, 7):
        if step == 3:
            made.fns[-1].gain = nn.Parameter(torch.randn(4).bfloat16())
        found = []
        for made.memory in ("reverse", "store"):
            out = made({"a": x, "b": 2 * x})
            loss = sum(t.square().sum() for t in out.values())
            found.append([*(t.detach() for t in out.values()), *torch.autograd.grad(loss, list(made.parameters()))])
        if step >= 3:
            assert all(map(torch.equal, *found))


def test_frozen_between_forward_and_backward(net):
    """requires_grad as it was then: the same gradients as store."""
    found = []
    x = torch.randn(3, 4, dtype=torch.float64)
    for memory in ("reverse", "store"):
        net.memory = memory
        net.zero_grad()
        out = net(x)
        net.blocks[0].f.inner.weight.requires_grad_(False)
        out.square().sum().backward()
        net.blocks[0].f.inner.weight.requires_grad_(True)
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    torch.testing.assert_close(*found)


class Failing(nn.Module):
    """Makes a buffer and fails."""

    def forward(self, x):
        self.register_buffer("count", torch.zeros(()))
        raise ValueError("no")


def test_buffers_made_in_a_pass_that_fails_are_gone():
    fn = Failing()
    net = rg.Reversible([rg.Update("a", fn, "b")])
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(ValueError, match="no"):
        net({"a": x, "b": x})
    assert not fn._buffers


class Sets(nn.Module):
    """Sets what others take from around them."""

    def __init__(self, value):
        super().__init__()
        self.inner, self.value = nn.Linear(4, 4), value

    def forward(self, x):
        if not rg.replaying():
            globals()["held"] = None if self.value is None else torch.full((4,), self.value, dtype=torch.float64)
        return self.inner(x).tanh()


def test_a_global_that_another_function_sets_in_the_pass():
    """It is gone by the end: fn cannot be run again as it was."""
    made = rg.Reversible(rg.wirings.leapfrog([Sets(3.0), Fn(), Sets(None)] * 2)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    for _ in range(3):
        with pytest.raises(rg.ReplayError, match="returned something else"):
            sum(t.square().sum() for t in made({"a": x, "b": 2 * x}).values()).backward()


def test_other_dicts_between_forward_and_backward(net):
    """As `__setstate__` puts them in: of children, and of parameters."""
    x = torch.randn(3, 4, dtype=torch.float64)
    other = copy.deepcopy(net)

    def as_the_other():
        net.blocks[0].f.__setstate__(other.blocks[0].f.__dict__)

    def other_children():
        net.blocks[0].g._modules = dict(other.blocks[0].g._modules)

    def other_parameters():
        net.blocks[1].g[0]._parameters = dict(other.blocks[1].g[0]._parameters)

    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    for change in (as_the_other, other_children, other_parameters):
        net.memory = "reverse"
        loss = net(x).square().sum()
        change()
        with pytest.raises(rg.ReplayError, match=r"returned something else|it raised AttributeError"):
            loss.backward()
        assert_as_stored(net)


def test_a_thread_without_gradients_beside_a_training_one():
    net, x, done = net_of(), torch.randn(3, 4, dtype=torch.float64), threading.Event()

    def look():
        with torch.no_grad():
            while not done.is_set():
                net(x)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(300):
            net(x).square().sum().backward()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


class Measured(nn.Module):
    """Makes a buffer of the first input that it sees; one that is edited in every call, if asked to."""

    def __init__(self, moves=False):
        super().__init__()
        self.inner, self.moves = nn.Linear(4, 4), moves

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", x.detach().std() + 1)
        if self.moves:
            self.scale += 1
        return torch.tanh(self.inner(x) + self.scale)


def first_pass(fns, memory):
    """Gradients of a first pass, of functions that are not yet known."""
    x = torch.linspace(-2, 3, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    net = rg.Reversible(rg.wirings.leapfrog(fns), memory=memory).double()
    out = net({"a": x, "b": x.cos()})
    (out["a"].square().sum() + out["b"].square().sum()).backward()
    return [x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_buffer_made_by_an_update_and_found_by_the_next(moves, part):
    def made():
        torch.manual_seed(0)
        shared = Measured(moves)
        return [nn.Sequential(nn.Linear(4, 4), shared) if part else shared for _ in range(4)]

    torch.testing.assert_close(first_pass(made(), "reverse"), first_pass(made(), "store"))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.tanh(x @ self.p) * (x @ self.q)


def test_names_exchanged_between_forward_and_backward():
    """The same parameters in the same order, under other names."""
    fn = Gated()
    net = rg.Reversible([rg.Update("a", fn, "b"), rg.Update("b", nn.Tanh(), "a")]).double()
    p, q = fn.p, fn.q
    x = {"a": torch.randn(3, 4, dtype=torch.float64), "b": torch.randn(3, 4, dtype=torch.float64)}
    expected = torch.autograd.grad(net(x)["b"].sum(), (p, q))
    out = net(x)["b"].sum()
    del fn.p, fn.q
    fn.q, fn.p = p, q
    torch.testing.assert_close(torch.autograd.grad(out, (p, q)), expected)


def test_hooks_in_a_new_dict(net):
    """Some people get rid of hooks that way."""
    fn = net.blocks[0].g
    fn._forward_hooks = collections.OrderedDict()
    handle = fn.register_forward_hook(lambda module, args, out: out * 2)
    net.memory = "reverse"
    out = net(torch.randn(3, 4, dtype=torch.float64))
    handle.remove()
    with pytest.raises(rg.ReplayError, match="returned something else"):
        out.sum().backward()
