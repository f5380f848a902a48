"""rg.check.gradients: passes sound nets, finds planted faults and names the update, and leaves everything as it was."""

import functools
import random
import re
import sys

import numpy as np
import pytest
import torch
from check_support import TICKS, Fault, snapshot, tick
from sound_nets import Leaves, Rotary, Routed
from support import REPLAYED, WIDTH, Attend, draw, every_pair, linear, mlp, mlps, name_of, rg, streams
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


def test_a_norm_of_rows_that_are_alike():
    """The gradient of a bias before it is zero but for rounding, which the norm enlarges."""
    torch.manual_seed(2)
    fns = [nn.Sequential(linear(), nn.BatchNorm1d(WIDTH).double()) for _ in range(3)]
    row = draw(1, WIDTH, grad=False)
    net = rg.Reversible(rg.wirings.leapfrog(fns))
    report = rg.check.gradients(net, {name: row + 1e-6 * draw(4, WIDTH, grad=False) for name in "ab"})
    assert report.ok, str(report)


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_ordinary_layers_with_noise(memory):
    """Noise and dropout are drawn again, nothing drifts, and a layer that counts its calls is found."""

    def net(*more):
        return rg.Sequential(*(nn.Sequential(mlp(), nn.Dropout(0.2)) for _ in range(4)), *more, bits=4, memory=memory)

    report = rg.check.gradients(net(), draw())
    assert report.ok, str(report)
    assert (report.gradient_error, report.recovered) == (0.0, 0.0)
    assert rg.check.drift(net(), draw()).worst.absolute == 0.0
    report = rg.check.gradients(net(Fault("another path"), nn.Tanh()), draw())
    assert not report.ok
    (found,) = report.findings
    assert (found.kind, found.where) == ("stateful", "update 4: x' = Fault(x, seed)")


def test_numpy_random_that_is_loaded_by_its_first_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    report = rg.check.gradients(Playful(), draw())
    assert report.ok, str(report)


def test_modules_in_closures_are_left_alone_too():
    """Not registered in the net, but found in fn."""
    normed = [Normed() for _ in range(2)]
    net = rg.Reversible(rg.wirings.leapfrog([lambda x, fn=fn: fn(x) for fn in normed]))
    report = rg.check.gradients(net, streams())
    assert report.ok
    assert report.findings == []
    assert [fn.norm.num_batches_tracked.item() for fn in normed] == [0, 0]


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


@pytest.mark.parametrize(("where", "memory", "kind"), every_pair([0, 2, 5], REPLAYED, FAULTS), ids=name_of)
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
    assert all("check_support.py:" in finding.line for finding in report.findings)
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
        rg.Reversible(rg.wirings.leapfrog(fns)), {name: t.detach().float() for name, t in streams(4).items()}
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
    assert re.search(
        r"found at first, update 0: x1 \+= Fault\(x2\) \(.*check_support.py:\d+\): stateful: it changes", str(report)
    )


def test_a_fault_inside_a_larger_model():
    net = between_layers()
    net[2].blocks[1].g = Fault("a call counter")
    report = rg.check.gradients(net, draw(8, WIDTH))
    assert not report.ok
    assert report.first == "update 3: x2 += Fault(x1)"
    assert "stateful" in report.cause
    assert report.worst > 1e-3


class Branch(nn.Module):
    """Of the size of its input; with a large summand."""

    def __init__(self, size=1.0, summand=0.0):
        super().__init__()
        self.linear, self.size, self.summand = nn.Linear(WIDTH, WIDTH), size, summand

    def forward(self, x):
        return self.size * self.linear(x / self.size).tanh() + self.summand


class Steep(nn.Module):
    """Makes much of a small difference."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return (1000 * self.linear(x)).sin()


def rounded(size, summand, **kwargs):
    """Updates 3 and 4 add a large summand to b and take it away: with it go the last bits of b, the same on every machine.

    The relative error of what is recovered below them is about 3e-8 * summand / size.
    """
    fns = [Branch(size, s) for s in (0.0, 0.0, 0.0, summand, -summand, 0.0, 0.0)]
    updates = [rg.Update(target, fn, "ab"[target == "a"]) for target, fn in zip("ababbab", fns, strict=True)]
    return rg.Reversible(updates, **kwargs), {name: size * t.detach().float() for name, t in streams(4).items()}


def test_drift_is_found():
    net, x = rounded(0.01, 2e4, arithmetic="float")
    report = rg.check.gradients(net, x)
    assert not report.ok
    (finding,) = report.findings
    assert finding.kind == "drifting"
    assert finding.where == report.first == "update 2: a += Branch(b)"
    assert "recovered with a relative error of " in report.cause
    assert "arithmetic='exact'" in report.cause
    net.arithmetic = "exact"
    report = rg.check.gradients(net, x)
    assert report.ok
    assert report.worst == 0
    assert report.findings == []


def test_a_little_drift_that_is_much_in_a_gradient_is_named():
    net, x = rounded(1.0, 300.0, arithmetic="float")
    net.fns[0] = Steep()
    report = rg.check.gradients(net, x)
    assert not report.ok
    assert [finding.kind for finding in report.findings] == ["drifting"]
    assert report.first == report.findings[0].where == "update 2: a += Branch(b)"
    assert max(row.relative for row in rg.check.drift(net, x).rows) < 1e-4


def test_what_a_faulty_fn_spoils_is_no_drift():
    """Under it the recovered sources are off; above it they are not, or it is drift."""
    for where, kinds in {5: ["stateful"], 0: ["stateful", "drifting"]}.items():
        net, x = rounded(0.01, 2e4, arithmetic="float")
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
