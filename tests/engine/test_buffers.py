"""Buffers move once per step."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from buffers_support import DEPTH, Average, as_, compare, counts, sequence, tensors, train
from support import POLICIES, REPLAYED, WIDTH, assert_same, draw, every_pair, loss_of, mlp, name_of, rg
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class Norm(nn.Module):
    """A branch behind a module that has a state."""

    def __init__(self, norm, width=WIDTH):
        super().__init__()
        self.norm, self.fn = norm.double(), mlp(width)

    def forward(self, x):
        return self.fn(self.norm(x))


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


@pytest.mark.parametrize(("forwards", "name", "memory"), every_pair([1, 2], FNS, POLICIES), ids=name_of)
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


@pytest.mark.parametrize(
    ("name", "layout", "forwards", "memory"),
    every_pair(IMAGES, [torch.contiguous_format, torch.channels_last], [1, 2], POLICIES),
    ids=name_of,
)
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
