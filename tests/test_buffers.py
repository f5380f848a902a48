"""Modules with a state: buffers move once per step, and nets are called, copied, saved and loaded as any module is."""

import copy
import io
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from support import POLICIES, REPLAYED, WIDTH, assert_same, draw, gradients, loss_of, mlp, rg
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

DEPTH = 2


class Norm(nn.Module):
    """A branch behind a module that has a state."""

    def __init__(self, norm, width=WIDTH):
        super().__init__()
        self.norm, self.fn = norm.double(), mlp(width)

    def forward(self, x):
        return self.fn(self.norm(x))


class Average(nn.Module):
    """Scales by a running average of its input, which it updates first. `kind` says how the average is kept.

    Autograd saves a copy of it, since ordinary autograd refuses an edit of what it saved; or itself for "saved".
    """

    def __init__(self, kind, rows=None):
        super().__init__()
        self.kind, self.fn = kind, mlp()
        start = torch.full((WIDTH,) if rows is None else (rows, WIDTH), 2.0, dtype=torch.float64)
        self.register_buffer("average", None if kind == "none" else start)
        if kind == "two names":
            self.fn.register_buffer("alias", self.average)

    def forward(self, x):
        with torch.no_grad():
            mean = x.abs().mean(0)
            if self.average is None:
                self.average = mean
            elif self.kind in ("replaced", "none"):
                self.average = 0.7 * self.average + 0.3 * mean
            elif self.kind == "data":
                self.average.data.mul_(0.7).add_(mean, alpha=0.3)
            else:
                self.average.mul_(0.7).add_(mean, alpha=0.3)
        average = self.fn.alias if self.kind == "two names" else self.average
        average = average if self.kind == "saved" else average.clone()
        return self.fn(x) * (average if average.dim() == 1 else average[-1])


class Functional(nn.Module):
    """F.batch_norm on buffers of its own, which moves them without any trace but their values."""

    def __init__(self):
        super().__init__()
        self.fn = mlp()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("var", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x):
        return self.fn(F.batch_norm(x, self.mean, self.var, training=True, momentum=0.3)) / (1 + self.var)


class Conv(nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1).double()
        self.norm = nn.BatchNorm2d(4).double() if norm else nn.InstanceNorm2d(4, affine=True, track_running_stats=True).double()

    def forward(self, x):
        return self.conv(self.norm(x).tanh())


def spectral():
    return nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), weight_norm(nn.Linear(WIDTH, WIDTH))).double()


FNS = {
    "batch norm": lambda: Norm(nn.BatchNorm1d(WIDTH)),
    "batch norm, cumulative": lambda: Norm(nn.BatchNorm1d(WIDTH, momentum=None)),
    "batch norm, two steps of it": lambda: nn.Sequential(*[nn.BatchNorm1d(WIDTH).double()] * 2, mlp()),
    "spectral norm": spectral,
    "F.batch_norm": Functional,
    **{f"average, {kind}": lambda kind=kind: Average(kind) for kind in ("edited", "replaced", "data", "two names")},
    **{f"table of averages, {kind}": lambda kind=kind: Average(kind, rows=2) for kind in ("edited", "replaced", "data")},
    "average, none at first": lambda: Average("none"),
    "average, saved": lambda: Average("saved"),
}


class FirstSight(nn.Module):
    """Shifts and scales by parameters that it sets from its first batch (ActNorm)."""

    def __init__(self, flag):
        super().__init__()
        self.fn, self.flag = mlp(), flag
        self.shift, self.scale = (nn.Parameter(draw(WIDTH, grad=False)) for _ in range(2))
        if flag == "buffer":
            self.register_buffer("done", torch.tensor(False))
        else:
            self.done = False

    def forward(self, x):
        if not self.done:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / x.std(0))
            if self.flag == "buffer":
                self.done.fill_(True)
            else:
                self.done = True
        return self.fn((x + self.shift) * self.scale)


class Weights(nn.Module):
    """Changes a parameter of its own in each forward pass: clamps it, or lets it decay."""

    def __init__(self, op):
        super().__init__()
        self.fn, self.op = mlp(), op
        self.weight = nn.Parameter(draw(WIDTH, grad=False), requires_grad=op != "frozen average")

    def forward(self, x):
        with torch.no_grad():
            if self.op == "clamp":
                self.weight.clamp_(-0.5, 0.5)
            elif self.op == "frozen average":
                self.weight.mul_(0.7).add_(x.mean(0), alpha=0.3)
            else:
                self.weight.mul_(0.8)
        return self.fn(x) * self.weight


IMAGES = {"batch norm": Conv, "instance norm": lambda: Conv(norm=False)}


class ByHand(nn.Module):
    """The equations of a ReversibleSequence, and its state-dict keys."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        x1, x2 = x, x
        for block in self.blocks:
            x1 = x1 + block.f(x2)
            x2 = x2 + block.g(x1)
        return (x1 + x2) / 2


def sequence(make):
    return rg.ReversibleSequence([(make(), make()) for _ in range(DEPTH)])


def as_(how, net):
    """A copy of net (or what it makes) under a policy, or by hand."""
    net = copy.deepcopy(net) if isinstance(net, nn.Module) else net()
    if how == "hand":
        return ByHand(net.blocks)
    net.memory = how
    return net


def tensors(state):
    return [t for t in state.values() if t.is_floating_point()]


def counts(state):
    return {name: t for name, t in state.items() if not t.is_floating_point()}


def train(net, batches, forwards=1, rate=0.05):
    """Some steps of SGD, each with that many forward passes before as many backwards. All gradients, and the state."""
    optimizer = None
    grads = []
    for batch in batches:
        torch.manual_seed(len(grads))
        xs = [(batch + i).detach().requires_grad_() for i in range(forwards)]
        losses = [loss_of(net(x)) for x in xs]
        optimizer = optimizer or torch.optim.SGD(net.parameters(), rate)  # lazy parameters exist now
        optimizer.zero_grad()
        state = {k: t.clone() for k, t in net.state_dict().items()}
        for loss in losses:
            loss.backward()
        for k, t in net.state_dict().items():  # backward moved nothing, to the bit
            assert torch.equal(t, state[k]), k
        grads += [x.grad for x in xs] + [p.grad.clone() for p in net.parameters() if p.requires_grad and p.grad is not None]
        optimizer.step()
    return grads, net.state_dict()


def compare(net, memory, batches, forwards=1):
    """Gradients and state of a net after training, against store and the equations by hand."""
    found, state = train(as_(memory, net), batches, forwards)
    for oracle in ("store", "hand"):
        true, true_state = train(as_(oracle, net), batches, forwards)
        assert_same(found, true)
        assert state.keys() == true_state.keys()
        assert_same(tensors(state), tensors(true_state))
        for name, t in counts(true_state).items():
            assert torch.equal(state[name], t), name
    return state


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("name", FNS)
@pytest.mark.parametrize("memory", POLICIES)
def test_moves_once(memory, name, forwards):
    """Training a net whose fns update a state: right gradients; backward moves no state, and it ends as store leaves it."""
    if name == "average, saved" and forwards == 2:
        forwards = 1  # ordinary autograd refuses that one as well
    net = sequence(FNS[name])
    before = copy.deepcopy(net.state_dict())
    state = compare(net, memory, [draw(), draw()], forwards)
    moved = [k for k in state if k.rpartition(".")[2] in ("running_mean", "_u", "mean", "average")]
    assert len(moved) >= 2 * DEPTH
    assert all(k not in before or not torch.equal(before[k], state[k]) for k in moved)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("memory", POLICIES)
def test_images(memory, forwards, layout, name):
    """Convolutions behind BatchNorm2d and InstanceNorm2d, in both memory formats."""
    net = sequence(IMAGES[name]).to(memory_format=layout)
    compare(net, memory, [draw(3, 4, 5, 5).detach().to(memory_format=layout) for _ in range(2)], forwards)


@pytest.mark.parametrize("kind", ["edited", "replaced", "data"])
@pytest.mark.parametrize("memory", REPLAYED)
def test_large_buffers(memory, kind):
    """Buffers of more than 1 MiB, as codebooks are, move once as well: from the first step on, in both of two forward passes."""
    net = rg.ReversibleSequence([(Average(kind, rows=1 << 15), mlp()), (mlp(), Average(kind, rows=1 << 15))])
    compare(net, memory, [draw(), draw()], 2)


@pytest.mark.parametrize("memory", REPLAYED)
def test_large_statistics(memory):
    width = (1 << 17) + 8
    net = rg.ReversibleSequence([(nn.Sequential(nn.BatchNorm1d(width), nn.Tanh()).double(), nn.Tanh())])
    compare(net, memory, [draw(3, width)])


@pytest.mark.parametrize("memory", POLICIES)
def test_shared_batch_norm(memory):
    """One BatchNorm at every depth: its statistics move at each, and each second run sees those of its own turn."""
    shared = Norm(nn.BatchNorm1d(WIDTH))
    average = Average("edited")
    net = rg.ReversibleSequence([(shared, average)] * 3)
    state = compare(net, memory, [draw(), draw()], 2)
    assert {int(t) for t in counts(state).values()} == {12}


class Unregistered(nn.Module):
    """A branch that keeps its norm out of its own state, in a tuple."""

    def __init__(self):
        super().__init__()
        self.fn, self.hidden = mlp(), (nn.BatchNorm1d(WIDTH).double(),)

    def forward(self, x):
        return self.fn(self.hidden[0](x)) / (1 + self.hidden[0].running_var)


@pytest.mark.parametrize("memory", POLICIES)
def test_unregistered_modules(memory):
    """Modules in a tuple are no children; their statistics move once all the same."""
    net, batches = sequence(Unregistered), [draw(), draw()]
    results = []
    for how in (memory, "store", "hand"):
        one = as_(how, net)
        hidden = [fn.hidden[0] for block in one.blocks for fn in (block.f, block.g)]
        results.append(train(one, batches, 2)[0] + [t for norm in hidden for t in (norm.running_mean, norm.running_var)])
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("memory", POLICIES)
def test_evaluation(memory):
    """Eval mode: the gradients of the running statistics' normalisation, and nothing moves."""
    net = sequence(FNS["batch norm"])
    loss_of(net(draw())).backward()
    net.eval()
    state = compare(net, memory, [draw()])
    assert {int(t) for t in counts(state).values()} == {1}


@pytest.mark.parametrize("memory", POLICIES)
def test_statistics_that_move_in_eval_mode(memory):
    """F.batch_norm(training=True) and running averages in eval mode: they move once all the same."""
    net = rg.ReversibleSequence([(Functional(), Average("edited")), (Average("data", rows=2), Functional())]).eval()
    before = copy.deepcopy(net.state_dict())
    state = compare(net, memory, [draw(), draw()], 2)
    assert not any(torch.equal(before[k], state[k]) for k in state if k.endswith((".mean", ".var", ".average")))


@pytest.mark.parametrize("memory", POLICIES)
def test_kept_graph(memory):
    """Three backwards of one forward pass: the old values serve each, and the statistics stay moved once."""
    net = sequence(lambda: nn.Sequential(FNS["batch norm"](), Average("edited"), nn.Dropout(0.3)))
    x = draw()
    results = []
    for how in (memory, "store", "hand"):
        one = as_(how, net)
        torch.manual_seed(1)
        loss = loss_of(one(x))
        wanted = [x, *one.parameters()]
        results.append([g for _ in range(3) for g in torch.autograd.grad(loss, wanted, retain_graph=True)])
        results[-1] += tensors(one.state_dict())
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("flag", ["buffer", "attribute"])
@pytest.mark.parametrize("memory", POLICIES)
def test_set_by_the_first_batch(memory, flag):
    """Parameters that fn sets from the data in its first forward pass, as ActNorm does."""
    compare(sequence(lambda: FirstSight(flag)), memory, [draw(), draw()])


@pytest.mark.parametrize("memory", POLICIES)
def test_clamped_weights(memory):
    """An fn that clamps its weights first finds them clamped in the second run."""
    compare(sequence(lambda: Weights("clamp")), memory, [draw(), draw()])


@pytest.mark.parametrize("op", ["decay", "frozen average"])
@pytest.mark.parametrize("memory", POLICIES)
def test_moving_parameters(memory, op):
    """A parameter that fn moves by itself, each time to another value: such updates keep their activations."""
    compare(sequence(lambda: Weights(op)), memory, [draw(), draw()])


@pytest.mark.parametrize("memory", POLICIES)
def test_backwards_in_threads(memory):
    """Backwards of several graphs of one net at the same time: second runs do not meet in its buffers or the generator."""
    net = sequence(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH).double(), mlp(dropout=0.3)))
    xs = [draw() for _ in range(3)]
    results, errors = [], []

    def repeat(loss, x, found):
        try:
            found += [g for _ in range(8) for g in torch.autograd.grad(loss, x, retain_graph=True)]
        except rg.RetrogradeError as error:
            errors.append(error)

    for how in (memory, "store"):
        one = as_(how, net)
        torch.manual_seed(0)
        found = [[] for _ in xs]
        jobs = [(loss_of(one(x)), x, grads) for x, grads in zip(xs, found, strict=True)]
        threads = [threading.Thread(target=repeat, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results.append([t for grads in found for t in grads] + tensors(one.state_dict()))
    assert errors == []
    assert_same(*results)


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


@pytest.mark.parametrize("make", [as_sequence, as_program])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("memory", POLICIES)
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
