"""rg.check.gradients: passes sound nets, finds planted faults and names the update, and leaves everything as it was."""

import collections
import functools
import random
import re
import types

import numpy as np
import pytest
import torch
from support import REPLAYED, WIDTH, Attend, draw, mlp, mlps, rg
from test_sound import Leaves, Rotary, Routed
from torch import nn


class Normed(nn.Module):
    """BatchNorm and dropout; the gradient of the bias before the norm is zero, but for rounding."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.double()

    def forward(self, x):
        return self.drop(self.norm(self.linear(x)).tanh())


class Counted(nn.Module):
    """Puts a new tensor into its buffer at every call."""

    def __init__(self):
        super().__init__()
        self.fn = mlp()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.fn(x) * (1 + 1 / self.calls)


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.fn, self.generator = mlp(), torch.Generator()

    def forward(self, x):
        return self.fn(x) * torch.rand(WIDTH, generator=self.generator)


def between_layers():
    """A model that is more than its reversible part."""
    net = rg.ReversibleSequence([mlps(2, dropout=0.2) for _ in range(3)], split="chunk", merge="cat")
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH), net, nn.Dropout(0.2), nn.Linear(2 * WIDTH, 1)
    ).double()


class Scheduled(nn.Module):
    """Counts its steps, and so that a recomputation finds what the first run did."""

    def __init__(self):
        super().__init__()
        self.fn, self.steps, self.drawn, self.seen = mlp(), 0, 0.0, []

    def forward(self, x):
        if not rg.replaying():
            self.steps += 1
            self.drawn = random.random()
            self.seen.append(self.steps)
        return self.fn(x) * (1 + self.drawn / self.steps)


class Logged(nn.Module):
    """Keeps what does not matter for its output, in every run; and torch's old spectral norm, which sets an attribute."""

    def __init__(self):
        super().__init__()
        self.fn, self.calls, self.last, self.shapes = mlp(), 0, None, {}
        self.out = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH).double())

    def forward(self, x):
        self.calls += 1
        self.last = self.out(self.fn(x))
        self.shapes[self.calls] = x.shape
        return self.last


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()).double()


def lazy():
    return nn.Sequential(nn.LazyLinear(WIDTH, dtype=torch.float64), nn.LazyBatchNorm1d(dtype=torch.float64), nn.Dropout(0.2))


class Playful(nn.Module):
    """A model that draws from Python's and numpy's generators outside of its fns."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (rg.ReversibleSequence([mlps(2, dropout=0.1)]) for _ in range(2))

    def forward(self, x):
        x = self.first(x * random.random()) * np.random.rand()
        return self.second(x) * random.random() * np.random.rand()


def streams():
    return {"a": draw(4, WIDTH), "b": draw(4, WIDTH)}


SOUND = {
    "pair": lambda: (rg.ReversibleSequence([mlps(2) for _ in range(4)]), [draw()], {}),
    "float32": lambda: (rg.ReversibleSequence([mlps(2) for _ in range(4)]).float(), [draw().detach().float()], {}),
    "dropout": lambda: (rg.ReversibleSequence([mlps(2, dropout=0.3) for _ in range(4)]), [draw()], {}),
    "BatchNorm": lambda: (rg.Reversible(rg.wirings.leapfrog([Normed() for _ in range(4)])), [streams()], {}),
    "a buffer that is replaced": lambda: (rg.Reversible(rg.wirings.leapfrog([Counted() for _ in range(3)])), [streams()], {}),
    "a generator that fn holds": lambda: (rg.Reversible(rg.wirings.leapfrog([Noisy() for _ in range(3)])), [streams()], {}),
    "context and mask": lambda: (
        rg.ReversibleSequence([(Attend(), mlp()) for _ in range(3)]),
        [draw(2, 3, WIDTH)],
        {"context": draw(2, 5, WIDTH, grad=False), "mask": torch.rand(3, 5) > 0.3},
    ),
    "frozen": lambda: (rg.ReversibleSequence([mlps(2) for _ in range(3)]).requires_grad_(False), [draw()], {}),
    "between other layers": lambda: (between_layers(), [draw(8, WIDTH)], {}),
    "a program in a program": lambda: (
        rg.ReversibleSequence([(rg.ReversibleSequence([mlps(2, dropout=0.1)] * 2), mlp()) for _ in range(2)]),
        [draw()],
        {},
    ),
    "spectral norm": lambda: (rg.Reversible(rg.wirings.leapfrog([spectral() for _ in range(4)])), [streams()], {}),
    "a schedule": lambda: (rg.Reversible(rg.wirings.leapfrog([Scheduled() for _ in range(3)])), [streams()], {}),
    "a log": lambda: (rg.Reversible(rg.wirings.leapfrog([Logged() for _ in range(3)])), [streams()], {}),
    "draws outside of fns": lambda: (Playful(), [draw()], {}),
    "exact": lambda: (rg.ReversibleSequence([mlps(2, dropout=0.1)] * 4, arithmetic="exact"), [draw()], {}),
    "float32, depth 8": lambda: (
        rg.ReversibleSequence([mlps(2) for _ in range(8)], arithmetic="float").float(),
        [draw().detach().float()],
        {},
    ),
    "a cache that grows": lambda: (rg.Reversible(rg.wirings.leapfrog([Rotary() for _ in range(3)])), [streams()], {}),
    "a loss left in an attribute": lambda: (
        rg.Reversible(rg.wirings.leapfrog([Leaves(lambda fn, loss: setattr(fn, "last", loss)) for _ in range(3)])),
        [streams()],
        {},
    ),
    "experts": lambda: (rg.Reversible(rg.wirings.leapfrog([Routed() for _ in range(3)])), [streams()], {}),
    "eval": lambda: (between_layers().eval(), [draw(8, WIDTH)], {}),
}


def snapshot(net, inputs):
    state = {name: t.clone() for name, t in net.state_dict().items()} | {"rng": torch.get_rng_state()}
    grads = [p.grad for p in net.parameters()] + [t.grad for t in torch.utils._pytree.tree_leaves(inputs)]
    flags = [(m.training, getattr(m, "memory", None)) for m in net.modules()]
    plain = [{name: repr(value) for name, value in m.__dict__.items() if name in PLAIN} for m in net.modules()]
    drawn = random.getstate(), repr(np.random.get_state())
    return state, (grads, flags, drawn, plain, torch.is_grad_enabled())


PLAIN = ("calls", "cache", "steps", "drawn", "seen", "last", "shapes")


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("case", SOUND)
def test_sound_nets_pass_and_nothing_is_changed(case, memory):
    net, inputs, side = SOUND[case]()
    for module in net.modules():
        if hasattr(module, "memory"):
            module.memory = memory
    state, others = snapshot(net, inputs)
    report = rg.check.gradients(net, *inputs, **side)
    assert report.ok, str(report)
    assert "agree with memory='store'" in str(report)
    assert report.first is None
    assert report.findings == [], str(report)
    assert report.steps == 3
    wanted = [name for name, p in net.named_parameters() if p.requires_grad]
    assert set(wanted) < set(report.errors), "parameters and inputs are compared"
    now, others_now = snapshot(net, inputs)
    assert now.keys() == state.keys()
    assert [name for name in state if not torch.equal(now[name], state[name])] == []
    assert others_now == others


def test_lazy_modules_are_initialised_and_no_more():
    net, other = (rg.Reversible(rg.wirings.leapfrog([lazy() for _ in range(3)])) for _ in range(2))
    x = streams()
    state = torch.get_rng_state()
    report = rg.check.gradients(net, x)
    assert report.ok, str(report)
    assert report.findings == []
    assert torch.equal(torch.get_rng_state(), state)
    for i in range(3):
        assert torch.equal(net.fns[i][1].running_mean, torch.zeros(WIDTH, dtype=torch.float64))
        assert net.fns[i][1].num_batches_tracked == 0
        assert net.fns[i][0].in_features == WIDTH
    assert rg.check.drift(other, x).rows, "and so by drift"


def test_modules_in_closures_are_left_alone_too():
    """Not registered in the net, but found in fn."""
    normed = [Normed() for _ in range(2)]
    net = rg.Reversible(rg.wirings.leapfrog([lambda x, fn=fn: fn(x) for fn in normed]))
    report = rg.check.gradients(net, streams())
    assert report.ok
    assert report.findings == []
    assert [fn.norm.num_batches_tracked.item() for fn in normed] == [0, 0]


class Fault(nn.Module):
    """A branch that is recomputed as something else."""

    def __init__(self, kind):
        super().__init__()
        self.fn, self.kind, self.calls, self.cache, self.rng = mlp(), kind, 0, None, random.Random(0)
        self.by_shape, self.history = {}, []

    def forward(self, x):
        if self.kind in ("a call counter", "a constant that moves", "another path"):
            self.calls += 1
        if self.kind == "a cache":
            self.cache = self.fn(x) if self.cache is None else self.cache
            return self.cache
        if self.kind == "a cache by shape":
            if x.shape not in self.by_shape:
                self.by_shape[x.shape] = self.fn(x)
            return self.by_shape[x.shape]
        y = self.fn(x)
        match self.kind:
            case "python random":
                return y * random.random()
            case "a branch by python random":
                return y if random.random() < 2 else x
            case "numpy's random":
                return y * np.random.rand()
            case "a generator of its own":
                return y * self.rng.random()
            case "the time":
                return y * tick()
            case "noise":  # another in every call, as the order of atomic additions is
                return y * (1 + 1e-7 * torch.linspace(-1, 1, WIDTH).roll(tick()).to(y))
            case "a call counter":
                return y * self.calls
            case "a history":
                self.history.append(y.detach())
                return y * len(self.history)
            case "a constant that moves":
                return y.detach() * self.calls + y
            case "another path":
                return y.tanh() if self.calls % 2 else y
            case "an edited source":
                x.detach().add_(1)
            case "edited data":
                x.data.clamp_(-0.5, 0.5)
            case "an edit of what it saved":
                return y.sigmoid().mul_(2)
        return y


TICKS = types.SimpleNamespace(number=0)


def tick():
    """Another number in every call, out of anybody's sight."""
    TICKS.number += 1
    return TICKS.number


FAULTS = {  # kind of the finding, and what its detail says
    "python random": ("non-deterministic", "it draws from Python's random"),
    "a branch by python random": ("non-deterministic", "this time its output was the same"),
    "numpy's random": ("non-deterministic", "it draws from numpy's global generator"),
    "a generator of its own": ("stateful", "it changes its attribute 'rng'"),
    "the time": ("non-deterministic", "random or stateful"),
    "noise": ("non-deterministic", "noise of "),
    "a call counter": ("stateful", "it changes its attribute 'calls'"),
    "a history": ("stateful", "it changes its attribute 'history'"),
    "a constant that moves": ("stateful", "it changes its attribute 'calls'"),
    "a cache": ("stateful", "did not do in backward what it did in the forward pass"),
    "a cache by shape": ("stateful", "(it changes its attribute 'by_shape')"),
    "another path": ("stateful", "did not do in backward what it did in the forward pass"),
    "an edited source": ("editing", "edited its source"),
    "edited data": ("editing", "it edits its source"),
    "an edit of what it saved": ("refused", "changed in place"),
}


OF_OUTPUT = ("python random", "numpy's random", "a generator of its own", "a call counter", "a history", "a constant that moves")


def harmless(kind, where, memory):
    """Whether the gradients are right all the same. A factor is no tensor that fn saves: it matters where an update is undone."""
    if kind in OF_OUTPUT:  # checkpoint undoes nothing, and below update 0 nothing is recovered
        return memory == "checkpoint" or where == 0
    return kind == "a branch by python random"


@pytest.mark.parametrize("where", [0, 2, 5])
@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("kind", FAULTS)
def test_planted_faults_are_found(kind, where, memory):
    """And the update is named, though the fault spoils the gradients of all updates below it."""
    fns = mlps(6)
    fns[where] = Fault(kind)
    net = rg.Reversible(rg.wirings.leapfrog(fns), memory=memory)
    inputs = [streams()]
    state, others = snapshot(net, inputs)
    report = rg.check.gradients(net, *inputs)
    name = f"update {where}: " + ("b += Fault(a)" if where % 2 else "a += Fault(b)")
    told, detail = FAULTS[kind]
    assert all("test_check.py:" in finding.line for finding in report.findings)
    assert report.ok == harmless(kind, where, memory), str(report)
    assert bool(report) is report.ok  # `assert rg.check.gradients(net, x)` is what people write
    if not report.ok:
        assert report.first == name, str(report)
        assert detail in report.cause
        assert report.cause in str(report)
    assert [(finding.kind, finding.where) for finding in report.findings] == [(told, name)], str(report)
    assert all(detail in finding.detail for finding in report.findings)
    assert name in str(report)
    assert detail in str(report)
    now, others_now = snapshot(net, inputs)
    assert all(torch.equal(now[key], state[key]) for key in state)
    assert others_now == others


@pytest.mark.parametrize("kind", [kind for kind, (told, _) in FAULTS.items() if told in ("stateful", "non-deterministic")])
@pytest.mark.parametrize("memory", ["store", rg.StoreLast(6)], ids=str)
def test_faults_are_found_where_the_policy_recomputes_nothing(kind, memory):
    """The gradients are right, and would not be under another policy."""
    fns = mlps(6)
    fns[3] = Fault(kind)
    report = rg.check.gradients(rg.Reversible(rg.wirings.leapfrog(fns), memory=memory), streams())
    assert report.ok == (kind not in ("the time", "noise")), "those differ even from one forward pass to the next"
    assert report.first in (None, "update 3: b += Fault(a)")
    told, detail = FAULTS[kind]
    assert [(finding.kind, finding.where) for finding in report.findings] == [(told, "update 3: b += Fault(a)")]
    assert detail in str(report)


def test_noise_of_atomics_in_float32_is_found_though_gradients_agree():
    fns = [fn.float() for fn in mlps(6)]
    fns[2] = Fault("noise").float()
    report = rg.check.gradients(
        rg.Reversible(rg.wirings.leapfrog(fns)), {name: t.detach().float() for name, t in streams().items()}
    )
    assert report.ok
    (finding,) = report.findings
    assert (finding.kind, finding.where) == ("non-deterministic", "update 2: a += Fault(b)")
    assert finding.detail.startswith("noise of "), finding.detail
    assert 1e-8 < float(finding.detail.split()[2].rstrip(",")) < 1e-6
    assert "agree" in str(report)
    assert finding.detail in str(report)


def test_state_of_fns_that_are_no_modules():
    calls = 0

    def counted(x):
        nonlocal calls
        calls += 1
        return x.sin() * calls

    class Counting:
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            return x.sin() * self.calls

        def method(self, x):
            return self(x)

    found = {}
    for name, fn in {
        "closure": counted,
        "object": Counting(),
        "method": Counting().method,
        "partial": functools.partial(Counting()),
    }.items():
        report = rg.check.gradients(rg.Reversible([rg.Update("a", fn, "b"), rg.Update("b", torch.sin, "a")]), streams())
        (finding,) = report.findings
        assert (finding.kind, finding.where.split(":")[0]) == ("stateful", "update 0")
        found[name] = finding.detail.partition(",")[0]
    assert found.pop("closure") == "it changes its variable 'calls'"
    assert set(found.values()) == {"it changes its attribute 'calls'"}


def test_two_faults_and_the_program_they_are_in():
    net = nn.ModuleDict({name: rg.ReversibleSequence([mlps(2) for _ in range(2)]) for name in ("first", "second")})
    net["first"].blocks[0].f, net["second"].blocks[1].g = Fault("a call counter"), Fault("python random")
    net.forward = lambda x: net["second"](net["first"](x))
    report = rg.check.gradients(net, draw())
    assert not report.ok
    assert report.first == "update 3: x2 += Fault(x1)"
    found = [(finding.program, finding.kind, finding.where) for finding in report.findings]
    assert found == [
        ("second", "non-deterministic", "update 3: x2 += Fault(x1)"),
        ("first", "stateful", "update 0: x1 += Fault(x2)"),
    ]
    assert re.search(r"found at first, update 0: x1 \+= Fault\(x2\) \(.*test_check.py:\d+\): stateful: it changes", str(report))


def test_a_fault_inside_a_larger_model():
    net = between_layers()
    net[2].blocks[1].g = Fault("a call counter")
    report = rg.check.gradients(net, draw(8, WIDTH))
    assert not report.ok
    assert report.first == "update 3: x2 += Fault(x1)"
    assert "stateful" in report.cause
    assert report.worst > 1e-3


def steep(dtype=torch.float32, std=3.0, **kwargs):
    """Activations that grow: what is recovered by subtraction is far off."""
    fns = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double() for _ in range(24)]
    for fn in fns:
        nn.init.normal_(fn[0].weight, std=std)
        nn.init.normal_(fn[2].weight, std=std)
    return rg.Reversible(rg.wirings.leapfrog(fns), **kwargs).to(dtype), {
        name: t.detach().to(dtype) for name, t in streams().items()
    }


def test_drift_is_found():
    net, x = steep(arithmetic="float")
    report = rg.check.gradients(net, x)
    assert not report.ok
    (finding,) = report.findings
    assert finding.kind == "drifting"
    assert finding.where == report.first
    assert "recovered with a relative error of " in report.cause
    assert "arithmetic='exact'" in report.cause
    net.arithmetic = "exact"
    report = rg.check.gradients(net, x)
    assert report.ok
    assert report.worst == 0
    assert report.findings == []


def test_a_little_drift_that_is_much_in_a_gradient_is_named():
    net, x = steep(std=2.0, arithmetic="float")
    report = rg.check.gradients(net, x)
    assert not report.ok
    assert [finding.kind for finding in report.findings] == ["drifting"]
    assert report.first == report.findings[0].where
    assert max(row.relative for row in rg.check.drift(net, x).rows) < 1e-4


def test_what_a_faulty_fn_spoils_is_no_drift():
    """Under it the recovered sources are off; above it they are not, or it is drift."""
    for where, kinds in {22: ["stateful"], 0: ["stateful", "drifting"]}.items():
        net, x = steep(std=4.0, arithmetic="float")
        net.fns[where] = Fault("a call counter").float()
        assert [finding.kind for finding in rg.check.gradients(net, x).findings] == kinds


def test_a_wrong_rule_is_found():
    """An undo that is not the inverse of apply: the updates below it see other sources."""

    class Wrong(rg.Add):
        def undo(self, target, out):
            return super().undo(target, out * 1.01)

    updates = rg.wirings.leapfrog(mlps(4))
    updates[2] = rg.Update("a", mlp(), "b", rule=Wrong())
    report = rg.check.gradients(rg.Reversible(updates), streams())
    assert not report.ok
    assert report.first == "update 2: a += Sequential(b)"
    assert "undo of its rule Wrong misses what apply was given by" in report.cause
    (finding,) = report.findings
    assert (finding.kind, finding.code) == ("wrong rule", "def undo(self, target, out):")


def test_a_net_without_a_program():
    with pytest.raises(rg.ProgramError, match=r"the forward of Linear ran no reversible program: it must call rg\.run"):
        rg.check.gradients(nn.Linear(2, 2), torch.ones(2))


def test_an_exception_is_passed_on_and_the_policy_is_back():
    net = rg.ReversibleSequence([mlps(2)], memory="checkpoint")
    x = draw(3, WIDTH + 1)
    states = torch.get_rng_state(), random.getstate()
    for check in (rg.check.gradients, rg.check.drift):
        with pytest.raises(RuntimeError):
            check(net, x)
        assert net.memory == "checkpoint"
        assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert rg.check.gradients(net, draw()).ok


class Failing(nn.Module):
    """Draws, counts and moves its buffers; then raises, in the given one of all calls."""

    def __init__(self, call):
        super().__init__()
        self.fn, self.call, self.calls = Normed(), call, 0

    def forward(self, x):
        tick()
        self.calls += 1
        y = self.fn(x) * random.random() * np.random.rand()
        if TICKS.number == self.call:
            raise KeyError("no")
        return y


@pytest.mark.parametrize("call", range(1, 7))
def test_nothing_is_changed_where_fn_raises(call):
    """In a forward pass the error is passed on; in a recomputation it is a finding. Then more passes look for the line."""
    net = rg.Reversible(rg.wirings.leapfrog([Normed(), Failing(call), Normed()]))
    x = streams()
    state, others = snapshot(net, [])
    TICKS.number = 0
    if call in (1, 3, 5):
        with pytest.raises(KeyError):
            rg.check.gradients(net, x)
        assert TICKS.number == call
    else:
        report = rg.check.gradients(net, x)
        assert not report.ok
        assert report.first == "update 1: b += Failing(a)"
    now, others_now = snapshot(net, [])
    assert all(torch.equal(now[key], state[key]) for key in state)
    assert others_now == others


def test_drift_in_16_bits_is_no_agreement():
    """Gradients that are off by percents: the noise that is allowed for small ones must not hide that."""
    torch.manual_seed(0)
    net = rg.ReversibleSequence([(mlp(32), mlp(32)) for _ in range(32)], arithmetic="float").bfloat16()
    x = torch.randn(8, 32).bfloat16()
    assert rg.check.drift(net, x).gradient_error > 5e-3
    assert not rg.check.gradients(net, x).ok
    net.arithmetic = "auto"
    assert rg.check.gradients(net, x).worst == 0


@pytest.mark.parametrize("memory", ["store", rg.StoreLast(100)], ids=str)
def test_nothing_to_compare(memory):
    net = rg.ReversibleSequence([(mlp(4), mlp(4))], memory=memory)
    report = rg.check.gradients(net, torch.randn(2, 4).double())
    assert (report.ok, report.replayed) == (True, 0)
    assert "no function was recomputed: another policy may find faults" in str(report)
    net.memory = "reverse"
    assert rg.check.gradients(net, torch.randn(2, 4).double()).replayed == 2


# -- later steps, on other batches -------------------------------------------------------------------------------------


class Average(nn.Module):
    """A moving average in an attribute, which starts at that of the first batch: recomputed, it is the same there."""

    def __init__(self, decay=0.9):
        super().__init__()
        self.fn, self.decay, self.average = mlp(), decay, None

    def forward(self, x):
        y = self.fn(x)
        now = y.detach().flatten(0, -2).mean(0)
        self.average = now if self.average is None else self.decay * self.average + (1 - self.decay) * now  # here
        return y - self.average


class Buffered(Average):
    """The same in a buffer."""

    def __init__(self):
        super().__init__()
        del self.average
        self.register_buffer("average", torch.zeros(WIDTH).double())

    def forward(self, x):
        y = self.fn(x)
        self.average.mul_(self.decay).add_(y.detach().flatten(0, -2).mean(0), alpha=1 - self.decay)
        return y - self.average


class Tokens(nn.Module):
    """Ids and a mask are all that it takes."""

    def __init__(self, *fns):
        super().__init__()
        self.embed, self.net = nn.Embedding(50, WIDTH).double(), rg.ReversibleSequence([fns])

    def forward(self, ids, mask):
        assert ids.min() >= 0
        assert ids.max() < 50
        assert mask.any(-1).all(), "no row is masked altogether"
        return self.net(self.embed(ids)).masked_fill(~mask[..., None], 0.0)


def ids(batch):
    mask = torch.arange(8) < torch.randint(1, 8, (batch, 1))
    return torch.randint(50, (batch, 8)), mask


@pytest.mark.parametrize("memory", ["store", *REPLAYED])
@pytest.mark.parametrize("batch", [0, 1, 2, 5], ids=lambda batch: f"{batch} rows of ids" if batch else "floats")
def test_a_moving_average_shows_on_another_batch(memory, batch):
    for kind in (Average, Buffered):
        net = Tokens(mlp(), kind()) if batch else rg.ReversibleSequence([(mlp(), kind())])
        given = ids(batch) if batch else (draw(),)
        next(m for m in net.modules() if hasattr(m, "memory")).memory = memory
        state, others = snapshot(net, [])
        report = rg.check.gradients(net, *given)
        now, others_now = snapshot(net, [])
        assert all(torch.equal(now[key], state[key]) for key in state)
        assert others_now == others
        if kind is Buffered:
            assert (report.ok, report.findings, report.steps) == (True, [], 3), str(report)
            continue
        (finding,) = report.findings
        assert net.get_submodule(finding.program).blocks[0].g.average is None, "as it was"
        assert (finding.kind, finding.where) == ("stateful", "update 1: x2 += Average(x1)")
        assert finding.detail.startswith(
            "it changes its attribute 'average', and when recomputed on the same sources, it returned"
        )
        assert finding.detail.endswith(", in step 2, on another batch")
        assert finding.code.endswith("# here")
        assert report.steps == 2
        if memory == "reverse":
            assert not report.ok
            assert report.first == finding.where
            assert "(in step 2, on another batch)" in str(report)


class Counting(nn.Module):
    """Does something else after many calls, or in every hundredth; in `log`, nothing that matters."""

    def __init__(self, kind):
        super().__init__()
        self.fn, self.kind, self.calls, self.flag = mlp(), kind, 0, False

    def forward(self, x):
        late = self.calls % 100 == 0 and self.calls > 0
        self.calls += 1  # here
        y = self.fn(x)
        match self.kind:
            case "a warm-up":
                return y * min(1.0, self.calls**0 if self.calls < 500 else 0.5)
            case "every hundredth":
                return y if self.calls % 100 else 2 * y
            case "every hundredth, before it is counted":
                return 2 * y if late else y
        return y


@pytest.mark.parametrize("kind", ["a warm-up", "every hundredth", "every hundredth, before it is counted", "log"])
def test_a_counter_that_will_matter_is_found(kind):
    net = rg.Reversible(rg.wirings.leapfrog([mlp(), Counting(kind), mlp()]))
    report = rg.check.gradients(net, streams())
    assert net.fns[1].calls == 0
    assert report.ok, "in these steps"
    if kind == "log":
        assert report.findings == []
        assert report.notes == ["update 1: b += Counting(a): it changes its attribute 'calls', which did no harm here"]
        return
    (finding,) = report.findings
    assert (finding.kind, finding.where) == ("stateful", "update 1: b += Counting(a)")
    assert re.search(r"it changes its attribute 'calls', .*, when its counters stand at (9999|10000)$", finding.detail)
    assert finding.code.endswith("# here")


class Own(nn.Module):
    """A block that runs its program itself."""

    def __init__(self, fn=None):
        super().__init__()
        self.f, self.g = mlp(dropout=0.1), fn or mlp()

    def forward(self, x, **how):
        return sum(rg.run([rg.Update("a", self.f, "b"), rg.Update("b", self.g, "a")], {"a": x, "b": x}, **how).values()) / 2


def test_modules_that_call_run_are_found_by_running_them():
    x = draw(4, WIDTH)
    sound = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Own(), Own())
    state, others = snapshot(sound, [])
    report = rg.check.gradients(sound, x)
    assert (report.ok, report.findings, report.replayed, report.steps) == (True, [], 4, 3), str(report)
    assert 0 < report.worst < 1e-9
    assert all(torch.equal(t, state[name]) for name, t in snapshot(sound, [])[0].items())
    assert snapshot(sound, [])[1] == others
    found = rg.check.drift(sound, x)
    assert [(row.program, row.index) for row in found.rows] == [("1", 0), ("1", 1), ("2", 0), ("2", 1)]
    for position in (1, 2):
        faulty = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Own(), Own())
        faulty[position] = Own(Fault("a call counter"))
        (finding,) = rg.check.gradients(faulty, x).findings
        assert (finding.program, finding.where) == (str(position), "update 1: b += Fault(a)")
        assert (finding.kind, "test_check.py:" in finding.line) == ("stateful", True)


def test_the_engine_does_not_verify_meanwhile():
    """The check compares by itself, and tells more: no error, no warning by value."""

    class Raising(Own):
        def forward(self, x):
            return super().forward(x, verify="error")

    report = rg.check.gradients(Raising(Fault("python random")), draw())
    assert [finding.kind for finding in report.findings] == ["non-deterministic"]
    with pytest.raises(rg.ReplayError):
        Raising(Fault("python random"))(draw()).sum().backward()


def test_a_batch_that_does_not_fit_is_a_note():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = rg.ReversibleSequence([mlps(2)])

        def forward(self, x):
            if not (x.diff(dim=0) > 0).all():
                raise ValueError("times must grow")
            return self.net(x)

    report = rg.check.gradients(Sorted(), torch.arange(4 * WIDTH).view(4, WIDTH).double())
    assert (report.ok, report.steps) == (True, 1)
    assert report.notes == [
        "one step was checked, as the net does not take a batch made of its input: ValueError: times must grow"
    ]


def test_a_step_that_raises_because_of_one_before():
    """Where the first batch would raise the error as well, it is no matter of the batch."""

    class Full(Average):
        def forward(self, x):
            if not rg.replaying():
                self.decay -= 0.5
                if self.decay < 0:
                    raise ValueError("no more")
            return self.fn(x)

    report = rg.check.gradients(rg.ReversibleSequence([(mlp(), Full())]), draw())
    assert not report.ok
    (finding,) = report.findings
    assert (finding.kind, finding.where) == ("stateful", "update 1: x2 += Full(x1)")
    assert "a later step raises ValueError: no more" in finding.detail
    assert "in its attribute 'decay'" in finding.detail


def test_parameters_that_fn_edits_are_put_back():
    class Initialised(nn.Module):
        """Sets its weight from its first batch."""

        def __init__(self):
            super().__init__()
            self.fn, self.scale = mlp(), nn.Parameter(torch.ones(WIDTH).double())
            self.register_buffer("made", torch.tensor(False))

        def forward(self, x):
            if not self.made:
                self.scale.data.copy_(1 / x.detach().std(0))
                self.made.fill_(True)
            return self.fn(x) * self.scale

    net = rg.ReversibleSequence([(Initialised(), mlp())])
    report = rg.check.gradients(net, draw(8, WIDTH))
    assert report.ok, str(report)
    assert torch.equal(net.blocks[0].f.scale, torch.ones(WIDTH).double())
    assert not net.blocks[0].f.made


QUEUE = collections.deque([1, 2])


def test_globals_that_nothing_changes_are_not_touched():
    """`__builtins__` is among the globals of a function: to clear and refill it would end the process."""

    def fn(x):
        return x.sin() * len(QUEUE)

    going = iter(QUEUE)
    assert rg.check.gradients(rg.Reversible([rg.Update("a", fn, "b"), rg.Update("b", torch.sin, "a")]), streams()).ok
    assert next(going) == 1, "it would raise an error after an edit"
