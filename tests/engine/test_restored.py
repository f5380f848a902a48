"""What fn itself replaces, makes, resizes or moves while it runs: gradients as under store, and everything moves once."""

import copy
import functools

import pytest
import torch
from support import (
    POLICIES,
    REPLAYED,
    WIDTH,
    agree,
    assert_same,
    draw,
    every_pair,
    linear,
    loss_of,
    mlps,
    name_of,
    net_of,
    rg,
    streams,
)
from torch import nn
from torch.nn import functional

every_policy = pytest.mark.parametrize("memory", POLICIES, ids=str)
every_replayed = pytest.mark.parametrize("memory", REPLAYED)


def train(make, memory, sizes=((3,), (3,)), between=lambda net, step: None):
    """Gradients, outputs and buffers of some steps; each has a forward pass for every size, and then as many backwards."""
    torch.manual_seed(0)
    net = net_of(make(), memory)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    found = []
    for step, rows in enumerate(sizes):
        losses = [loss_of(net(streams(count))) for count in rows]
        optimizer.zero_grad()
        buffers = [b.clone() for b in net.buffers()]
        for loss in losses if step % 2 else reversed(losses):
            loss.backward()
        found += [*(loss.detach() for loss in losses), *buffers]
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        between(net, step)
    return [t.double() for t in found]


# -- rotary embeddings -------------------------------------------------------------------------------------------------


class Grows(nn.Module):
    """As in older Llamas: a table that grows together with a plain integer."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def grow(self, length):
        self.most = length
        at = torch.arange(length, dtype=torch.float64)[:, None]
        self.register_buffer("cos_cached", (at / torch.arange(1, WIDTH + 1)).cos(), persistent=False)

    def forward(self, length):
        if length > self.most:
            self.grow(length)
        return self.cos_cached[:length]


class Dynamic(nn.Module):
    """As dynamic NTK scaling: `inv_freq` is replaced for long inputs, and put back for short ones."""

    def __init__(self, first=4):
        super().__init__()
        self.first = self.most = first
        self.register_buffer("inv_freq", self.scaled(first), persistent=False)
        self.original = self.inv_freq

    def scaled(self, length):
        return 1 / (torch.arange(1, WIDTH + 1, dtype=torch.float64) * length / self.first)

    def forward(self, length):
        if length > self.most:
            self.register_buffer("inv_freq", self.scaled(length), persistent=False)
            self.most = length
        if length < self.first < self.most:
            self.register_buffer("inv_freq", self.original, persistent=False)
            self.most = self.first
        return (torch.arange(length, dtype=torch.float64)[:, None] * self.inv_freq).cos()


class Turned(nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.linear, self.rotary = linear(), rotary

    def forward(self, x):
        return (self.linear(x) * self.rotary(x.shape[0])).tanh()


SIZES = [((3,), (7,), (5,), (2,)), ((3, 7), (7, 2), (9, 3)), ((7, 3, 8), (3, 9), (9,)), ((7, 2), (7,), (2, 7))]


@pytest.mark.parametrize(
    ("memory", "shared", "kind", "sizes"), every_pair(POLICIES, [False, True], [Grows, Dynamic], SIZES), ids=name_of
)
def test_rotary_embeddings(sizes, kind, shared, memory):
    def make():
        if shared:
            rotary = kind()
            return [Turned(rotary) for _ in range(4)]
        return [Turned(kind()) for _ in range(4)]

    agree(lambda memory: train(make, memory, sizes), memory)


# -- parameters and buffers that fn makes ------------------------------------------------------------------------------


class Quantises(nn.Module):
    """To the nearest of a codebook, which an average of the rows replaces in every step."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = linear(), how
        codes = torch.randn(5, WIDTH, dtype=torch.float64)
        if how == "parameter":
            self.codes = nn.Parameter(codes, requires_grad=False)
        else:
            self.register_buffer("codes", codes)

    def forward(self, x):
        y = self.linear(x).tanh()
        nearest = torch.cdist(y.detach(), self.codes.detach()).argmin(-1)
        picked = self.codes[nearest]
        if self.training:
            new = self.codes.detach().lerp(y.detach().mean(0), 0.3)
            if self.how == "parameter":
                self.codes = nn.Parameter(new, requires_grad=False)
            elif self.how == "replaced":
                self.codes = new
            elif self.how == "data":
                self.codes.data.copy_(new)
            else:
                self.codes.copy_(new)
        return y + (picked - y).detach() * 0.5 + y * picked


@every_policy
@pytest.mark.parametrize("how", ["parameter", "replaced", "edited", "data"])
def test_a_codebook_assigned_in_forward(how, memory):
    agree(lambda memory: train(lambda: [Quantises(how) for _ in range(4)], memory, ((3,), (3, 4), (5,))), memory)


class Trains(nn.Module):
    """A parameter that fn replaces by a new one, which gets the gradient."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))

    def forward(self, x):
        self.scale = nn.Parameter(self.scale.detach() * 0.9)
        return self.linear(x).tanh() * self.scale


@every_policy
def test_a_parameter_assigned_in_forward(memory):
    found = []
    for policy in (memory, "store"):
        torch.manual_seed(0)
        net = net_of([Trains() for _ in range(4)], policy)
        found.append([])
        for _ in range(2):
            loss_of(net(streams())).backward()
            found[-1] += [p.grad for p in net.parameters()]
            net.zero_grad()
    assert_same(*found)


class Initialises(nn.Module):
    """Scale and shift from the data of the first batch, under a flag in a buffer."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = linear(), how
        self.scale, self.shift = (nn.Parameter(f(WIDTH, dtype=torch.float64)) for f in (torch.ones, torch.zeros))
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x):
        y = self.linear(x)
        if not self.ready:
            with torch.no_grad():
                if self.how == "data":
                    self.shift.data.copy_(y.mean(0))
                    self.scale.data.copy_(1 / (y.std(0) + 0.1))
                else:
                    self.shift.copy_(y.mean(0))
                    self.scale.copy_(1 / (y.std(0) + 0.1))
                self.ready.fill_(1)
        return ((y - self.shift) * self.scale).tanh()


@every_policy
@pytest.mark.parametrize("how", ["edited", "data"])
def test_initialisation_from_the_first_batch(how, memory):
    agree(lambda memory: train(lambda: [Initialises(how) for _ in range(4)], memory, ((3,), (3, 4), (5,))), memory)


class Observes(nn.Module):
    """Torch's own observer, which resizes its buffers from what they start with to one number per channel."""

    def __init__(self, entries):
        super().__init__()
        self.linear = linear()
        self.fake = torch.ao.quantization.FakeQuantize(
            torch.ao.quantization.MovingAveragePerChannelMinMaxObserver,
            quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=1,
        )  # fmt: skip
        if entries:
            observer = self.fake.activation_post_process
            observer.min_val, observer.max_val = torch.zeros(entries), torch.zeros(entries)
            self.fake.scale, self.fake.zero_point = torch.ones(entries), torch.zeros(entries, dtype=torch.int32)

    def forward(self, x):
        return self.fake(self.linear(x).float()).to(x.dtype).tanh()


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
@every_policy
@pytest.mark.parametrize("entries", [0, WIDTH])
def test_per_channel_fake_quantisation(entries, memory):
    found = [train(lambda: [Observes(entries) for _ in range(4)], policy, ((3,), (3, 4), (5,))) for policy in (memory, "store")]
    assert_same(*found, tolerance=1e-5)  # it computes in float32


class Resizes(nn.Module):
    """A buffer that is resized in place from 3 elements; afterwards fn may fail."""

    def __init__(self, fails=False):
        super().__init__()
        self.linear, self.fails = linear(), fails
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        y = self.linear(x).tanh()
        if self.seen.shape != x.shape[:1]:
            self.seen.resize_(x.shape[0]).zero_()
        with torch.no_grad():
            self.seen.add_(y.detach().mean(-1))
        if self.fails:
            raise ValueError("planted")
        return y * self.seen.clone()[:, None]


@every_policy
def test_a_buffer_that_is_resized(memory):
    agree(lambda memory: train(lambda: [Resizes() for _ in range(4)], memory, ((5,), (5, 5), (5,))), memory)


class Breaks(nn.Module):
    """Its buffer is written to in a way in which nobody can put it back, as its elements share memory; and it fails."""

    def __init__(self):
        super().__init__()
        self.base = torch.zeros(1, dtype=torch.float64)
        self.register_buffer("seen", self.base.expand(3))

    def forward(self, x):
        self.base.add_(1)
        raise ValueError("planted")


@every_replayed
def test_an_error_while_state_is_put_back_never_hides_the_first(memory):
    fns = [*mlps(2), Resizes(), Resizes(fails=True)]
    net, given = net_of(fns, memory), streams(5)
    with pytest.raises(ValueError, match="planted"):
        net(given)
    assert [fn.seen.tolist() for fn in fns[2:]] == [[0.0] * 3] * 2
    with pytest.raises(ValueError, match="planted") as caught:
        net_of([*mlps(2), Breaks()], memory)(given)
    assert any("could not be put back" in note for note in caught.value.__notes__)


# -- statistics --------------------------------------------------------------------------------------------------------


@every_replayed
def test_large_statistics_warmed_up_on_zeros(memory):
    """Over 64 KiB of them. Zeros move no running mean, which says nothing about the next batch."""
    width = 10_000

    def step(memory):
        torch.manual_seed(0)
        norms = [nn.BatchNorm1d(width).double() for _ in range(2)]
        net, found = net_of(norms, memory), []
        for given in (torch.zeros(2, width, dtype=torch.float64), draw(2, width), draw(2, width)):
            loss_of(net({"a": given, "b": given.clone()})).backward()
            found += [*(p.grad.clone() for p in net.parameters()), *(b.clone().double() for b in net.buffers())]
        return found

    assert_same(step(memory), step("store"))


class Model(nn.Module):
    """Its buffers are used by functions that are no modules."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False).double()  # the norm takes away a bias
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("var", torch.ones(WIDTH, dtype=torch.float64))

    def method(self, x, scale=1.0):
        return functional.batch_norm(self.linear(x), self.mean, self.var, training=True) * scale


NORM = nn.BatchNorm1d(WIDTH).double()  # for a plain function: it calls it


def calls_a_global(x):
    return NORM(x).tanh()


def closure(model):
    return lambda x: functional.batch_norm(model.linear(x), model.mean, model.var, training=True).tanh()


def normed(layer, mean, var, x):
    return functional.batch_norm(layer(x), mean, var, training=True).tanh()


def over_statistics(layer, means, var):
    return lambda x: normed(layer, means[0], var, x)


FUNCTIONS = {
    "a method": lambda model: model.method,
    "a partial": lambda model: functools.partial(model.method, scale=0.5),
    "a partial of a plain function": lambda model: functools.partial(Model.method, model),
    "a partial of the statistics themselves": lambda model: functools.partial(normed, model.linear, model.mean, model.var),
    "a closure": closure,
    "a closure over the statistics themselves": lambda model: over_statistics(model.linear, [model.mean], model.var),
    "a plain function that calls a global module": lambda model: calls_a_global,
}


@every_policy
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_buffers_of_functions_that_are_no_modules(kind, memory):
    def step(memory):
        torch.manual_seed(0)
        NORM.reset_running_stats()
        model = Model()
        fns, found = [FUNCTIONS[kind](model), mlps(1)[0]] * 2, []
        for _ in range(2):
            out = rg.run(rg.wirings.leapfrog(fns), streams(), memory=memory)
            found += torch.autograd.grad(loss_of(out), list(model.parameters()), allow_unused=True)
            found += [b.clone().double() for b in (*model.buffers(), *NORM.buffers())]
        return [t for t in found if t is not None]

    assert_same(step(memory), step("store"))


# -- export ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strict", "arithmetic"), [(False, "auto"), (True, "exact")])
def test_export_with_grad_and_training_afterwards(strict, arithmetic):
    """Strictly in a model: torch does not know positional arguments without a name, as those of a net by itself."""
    blocks = [(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(2)]
    net = rg.ReversibleSequence(blocks, arithmetic=arithmetic)
    model = nn.Sequential(net, nn.Linear(4, 4)) if strict else net
    x = torch.randn(3, 4)
    before = copy.deepcopy(model.state_dict())
    exported = torch.export.export(model, (x,), strict=strict).module()
    assert torch.allclose(exported(x), model(x))
    found = []
    for memory in ("reverse", "store"):
        net.memory = memory
        model.zero_grad()
        model(x).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert_same(*found, tolerance=1e-5)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


# -- infinite numbers --------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Returns -inf where it is masked, as scores do; who reads them takes care."""

    def __init__(self, value=-torch.inf):
        super().__init__()
        self.linear, self.value = linear(), value

    def forward(self, x):
        y = self.linear(torch.where(x.isfinite(), x, 0.0)).tanh()
        mask = torch.zeros_like(y, dtype=torch.bool)
        mask[0, :2] = True
        return y.masked_fill(mask, self.value)


@every_policy
@pytest.mark.parametrize("verify", ["error", "off"])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_infinite_at_masked_positions(arithmetic, value, verify, memory):
    def step(memory):
        torch.manual_seed(0)
        net = net_of([Masked(value) for _ in range(4)], memory, arithmetic=arithmetic, verify=verify)
        out = net(streams())
        assert not all(t.isfinite().all() for t in out.values())
        loss = sum(torch.where(t.isfinite(), t, 0.0).square().sum() for t in out.values())
        return torch.autograd.grad(loss, list(net.parameters()))

    assert_same(step(memory), step("store"))


class ScaledAndMasked(Masked):
    def forward(self, x):
        return 0.3 * torch.where(x.isfinite(), x, 0.0).tanh(), super().forward(x)


RULES = {"affine": (rg.Affine(), ScaledAndMasked), "momentum": (rg.Momentum(0.9), Masked)}


@every_policy
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
@pytest.mark.parametrize("rule", RULES)
def test_infinite_at_masked_positions_under_other_rules(rule, value, memory):
    def step(memory):
        torch.manual_seed(0)
        kind, fn = RULES[rule]
        updates = [rg.Update("ab"[i % 2], fn(value), "ba"[i % 2], rule=kind) for i in range(4)]
        wanted = [p for update in updates for p in update.fn.parameters()]
        out = rg.run(updates, streams(), memory=memory)
        loss = sum(torch.where(t.isfinite(), t, 0.0).square().sum() for t in out.values())
        return torch.autograd.grad(loss, wanted)

    assert_same(step(memory), step("store"))
