"""Nets with buffers called in other ways, copied, saved and loaded."""

import copy
import io
import pickle

import pytest
import torch
from buffers_support import DEPTH, Average, ByHand, as_, compare, sequence, tensors, train
from support import POLICIES, WIDTH, assert_same, draw, every_pair, gradients, loss_of, mlp, name_of, rg
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

# -- called in other ways ----------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """A branch with a buffer that never changes, one that does, and dropout."""

    def __init__(self):
        super().__init__()
        self.fn, self.norm, self.dropout = mlp(), nn.BatchNorm1d(WIDTH).double(), nn.Dropout(0.3)
        self.register_buffer("positions", draw(1, WIDTH, grad=False))

    def forward(self, x):
        return self.dropout(self.fn(self.norm(x) + self.positions) * self.positions)


@pytest.mark.parametrize("given", ["parameters", "parameters and buffers", "one parameter", "computed"])
@pytest.mark.parametrize("memory", POLICIES)
def test_functional_call(memory, given):
    """Gradients go to the tensors that were given, which the net holds no more by the time of backward; given buffers move
    once; the net's own tensors are as before."""
    net = sequence(Positions)
    x = draw()
    own = {name: (t, t.detach().clone()) for name, t in net.state_dict(keep_vars=True).items()}
    results = []
    for how in (memory, "store", "hand"):
        one = ByHand(net.blocks) if how == "hand" else net
        net.memory = "store" if how == "hand" else how
        torch.manual_seed(0)
        tensors = {name: (torch.randn_like(p) * 0.3).requires_grad_() for name, p in net.named_parameters()}
        leaves = [x, *tensors.values()]
        buffers = {name: torch.rand_like(b) if b.is_floating_point() else b.clone() for name, b in net.named_buffers()}
        if given == "computed":
            tensors = {name: t.sin() for name, t in tensors.items()}
        if given == "one parameter":
            tensors = {"blocks.1.f.fn.1.weight": tensors["blocks.1.f.fn.1.weight"]}
            leaves = [x, *tensors.values()]
        if given == "parameters and buffers":
            tensors |= buffers
        first = torch.func.functional_call(one, tensors, (x,))
        second = torch.func.functional_call(one, {k: 2 * t if t.requires_grad else t for k, t in tensors.items()}, (x,))
        found = torch.autograd.grad(loss_of([first, second]), leaves)
        results.append([first.detach(), second.detach(), *found])
        results[-1] += [t.clone() for t in net.buffers() if t.is_floating_point()]
        results[-1] += [t.clone() for t in buffers.values() if t.is_floating_point()]
        for name, t in net.state_dict(keep_vars=True).items():
            assert t is own[name][0]
            if given == "parameters and buffers" or t.requires_grad:
                assert torch.equal(t, own[name][1])
            with torch.no_grad():
                t.copy_(own[name][1])  # statistics as before, for the next of the three
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("memory", POLICIES)
def test_functional_call_in_fn(memory):
    """An fn that calls a module functionally with weights it computes itself."""
    x = draw()
    inner, outer = mlp(), mlp()
    scale = draw(1)

    def fn(t):
        return torch.func.functional_call(inner, {k: p * scale.exp() for k, p in inner.named_parameters()}, (t,))

    wanted = [x, scale, *inner.parameters(), *outer.parameters()]
    found, store = (
        gradients(lambda: rg.run(rg.wirings.pair(fn, outer) * 2, {"x1": x, "x2": x}, memory=how), wanted)
        for how in (memory, "store")
    )
    assert_same(found, store)

    def by_hand():
        x1, x2 = x, x
        for _ in range(2):
            x1 = x1 + fn(x2)
            x2 = x2 + outer(x1)
        return {"x1": x1, "x2": x2}

    assert_same(found, gradients(by_hand, wanted))


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


@pytest.mark.parametrize("kind", ["weight norm", "custom", "cached"])
@pytest.mark.parametrize("memory", POLICIES)
def test_parametrized(memory, kind):
    """Parametrized weights are computed again in the second run; under `cached()` they are computed once per forward pass."""

    def make():
        fn = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), nn.Tanh(), nn.Linear(WIDTH, WIDTH).double())
        if kind == "custom":
            nn.utils.parametrize.register_parametrization(fn[0], "weight", Symmetric())
        else:
            weight_norm(fn[0])
        return fn

    net = sequence(make)
    if kind != "cached":
        compare(net, memory, [draw(), draw()], 2)
        return
    x = draw()

    def out(one):
        with nn.utils.parametrize.cached():
            return one(x)

    results = [
        gradients(lambda: out(one), [x, *one.parameters()]) for one in (as_(how, net) for how in (memory, "store", "hand"))
    ]
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("kind", ["linear", "batch norm", "dropout"])
@pytest.mark.parametrize("memory", POLICIES)
def test_lazy_modules(memory, kind):
    """Modules that get their parameters in the first forward pass, and draw random numbers for them there."""

    def make():
        first = {"linear": nn.Tanh, "batch norm": nn.LazyBatchNorm1d, "dropout": nn.Dropout}[kind]()
        return nn.Sequential(
            first, nn.LazyLinear(8), nn.Dropout(0.4 * (kind == "dropout")), nn.Tanh(), nn.LazyLinear(WIDTH)
        ).double()

    compare(lambda: sequence(make), memory, [draw(), draw()])


# -- copied, saved, loaded ---------------------------------------------------------------------------------------------


def stateful():
    return nn.Sequential(nn.BatchNorm1d(WIDTH).double(), mlp(dropout=0.3), Average("edited"))


def as_sequence():
    return rg.ReversibleSequence([(stateful(), stateful()) for _ in range(DEPTH)], split="chunk", merge="cat")


def as_program():
    fns = [stateful() for _ in range(3)]
    net = rg.Reversible([*rg.wirings.leapfrog([*fns, fns[0]]), rg.Update("a", torch.sin, "b")])
    return Halves(net)


class Halves(nn.Module):
    """A Reversible from tensor to tensor."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat(list(self.net({"a": a, "b": b}).values()), -1)

    @property
    def memory(self):
        return self.net.memory

    @memory.setter
    def memory(self, memory):
        self.net.memory = memory


def through_file(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_state(net):
    """A new net that loads the state of the old one."""
    other = as_sequence() if isinstance(net, rg.ReversibleSequence) else as_program()
    other.memory = net.memory
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    assert other.load_state_dict(torch.load(file)) == ([], [])
    return other


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "file": through_file,
    "state dict": through_state,
}


@pytest.mark.parametrize(
    ("make", "how", "when", "memory"),
    every_pair([as_sequence, as_program], COPIES, ["before", "after", "between"], POLICIES),
    ids=name_of,
)
def test_copies(memory, when, how, make):
    """A copy, made before or after a step or between its two passes, trains on as the net does; the two share nothing."""
    net = make()
    batches = [draw(3, 2 * WIDTH, grad=False) for _ in range(3)]
    state = net.state_dict()
    assert len({t.data_ptr() for t in state.values()}) == len(state)  # each tensor once
    oracle = copy.deepcopy(net)
    oracle.memory = "store"
    net.memory = memory
    if when == "after":
        train(net, batches[:1])
        train(oracle, batches[:1])
    if when == "between":
        torch.manual_seed(0)
        loss = loss_of(net(batches[0]))
        other = COPIES[how](net)
        loss.backward()
        torch.manual_seed(0)
        loss_of(oracle(batches[0]))
    else:
        other = COPIES[how](net)
    assert other.memory == memory
    before = {k: t.clone() for k, t in net.state_dict().items()}
    found, state = train(other, batches[1:])
    for name, t in net.state_dict().items():
        assert torch.equal(t, before[name]), name
    true, true_state = train(oracle, batches[1:])
    assert_same(found, true)
    assert_same(tensors(state), tensors(true_state))
    net.zero_grad()
    found, state = train(net, batches[1:])  # and so does the original
    assert_same(found, true)
    assert_same(tensors(state), tensors(true_state))


def test_state_dict_keys():
    """Natural keys, with nothing of the engine; a module at several depths of a program stands there once."""
    fn = {*mlp().state_dict()}
    net = rg.ReversibleSequence([(mlp(), mlp()) for _ in range(2)])
    loss_of(net(draw())).backward()
    assert {*net.state_dict()} == {f"blocks.{i}.{name}.{key}" for i in range(2) for name in "fg" for key in fn}
    shared = mlp()
    net = rg.Reversible(rg.wirings.leapfrog([shared, mlp(), shared]))
    assert {*net.state_dict()} == {f"fns.{i}.{key}" for i in range(2) for key in fn}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("memory", POLICIES)
def test_loading(memory, assign):
    """Another state loaded between two steps is the one that the next step uses; exchanging a module as well."""
    net, other = sequence(stateful), sequence(stateful)
    net.memory = memory
    batches = [draw(grad=False) for _ in range(2)]
    train(net, batches[:1])
    net.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    exchanged = mlp()
    net.blocks[1].g, other.blocks[1].g = exchanged, copy.deepcopy(exchanged)
    for p in net.parameters():
        p.grad = None
    found, state = train(net, batches[1:])
    for oracle in ("store", "hand"):
        true, true_state = train(as_(oracle, other), batches[1:])
        assert_same(found, true)
        assert_same(tensors(state), tensors(true_state))
