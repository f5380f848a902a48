"""arithmetic="exact": recovered streams are the same bits, so every gradient equals that of memory="store" to the bit."""

import contextlib
import copy
import functools
import math
import re
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import POLICIES, WIDTH, loss_of, parameters, rg
from test_random_programs import Branch, cases
from test_wirings import TREES, Tree
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from retrograde._engine import call as calls
from retrograde.bench.meter import LiveBytes
from retrograde.errors import OutOfRange

SETTINGS = {  # dtype of the net and its streams, dtype of autocast
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "float64": (torch.float64, None),
    "bf16 autocast": (torch.float32, torch.bfloat16),
    "fp16 autocast": (torch.float32, torch.float16),
}
SHORT = [name for name in SETTINGS if name not in ("float32", "float64")]
LIMIT, GRID, FINE = 32766.0, 2.0**-24, 2.0**-35
ROWS = 4
DRIFTS = pytest.mark.filterwarnings("ignore:.* slightly different")

MEMORIES = ["reverse", "checkpoint", rg.StoreLast(2), rg.Budget(5000), rg.Anchor(3)]  # the budget is enough for some updates

every_setting = pytest.mark.parametrize("setting", SETTINGS)
every_policy = pytest.mark.parametrize("memory", MEMORIES, ids=str)
store_too = pytest.mark.parametrize("memory", ["store", *MEMORIES], ids=str)


# -- programs, and one way to compare them -----------------------------------------------------------------------------


class Fn(nn.Module):
    """A branch of any number of sources and a context, with dropout, and with BatchNorm where asked."""

    def __init__(self, to=WIDTH, *widths, dropout=0.2, norm=nn.LayerNorm):
        super().__init__()
        self.norms = nn.ModuleList(norm(width) for width in widths or (to,))
        self.lifts = nn.ModuleList(nn.Linear(width, 2 * to) for width in widths or (to,))
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(2 * to, to)

    def forward(self, *sources, context=None):
        hidden = sum(lift(norm(x)) for lift, norm, x in zip(self.lifts, self.norms, sources, strict=True))
        return self.out(self.drop((hidden if context is None else hidden * context.cos()).tanh()))


def draw(*shape, dtype=torch.float32, grad=True):
    return torch.randn(*(shape or (ROWS, WIDTH))).to(dtype).requires_grad_(grad)


def cast(value, dtype):
    """New leaves of another dtype."""
    return tree_map(lambda t: t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t, value)


def amp(dtype):
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


class Case:
    """A program with its inputs. `fns` are what it has parameters in, if that is not in its updates."""

    def __init__(self, setting, updates, streams, side=None, fns=None):
        dtype, self.autocast = SETTINGS[setting]
        self.updates, self.streams, self.side = updates, cast(streams, dtype), cast(side or {}, dtype)
        modules = [u.fn for u in updates if isinstance(u.fn, nn.Module)] if fns is None else fns
        self.fns = nn.ModuleList(dict.fromkeys(modules)).to(dtype)

    @property
    def wanted(self):
        return [t for t in (*tree_leaves((self.streams, self.side)), *self.fns.parameters()) if t.requires_grad]

    def out(self, memory, arithmetic="exact", way=rg.run):
        with amp(self.autocast):
            return way(self.updates, self.streams, self.side, memory=memory, arithmetic=arithmetic)

    def observed(self, memory, arithmetic="exact", way=rg.run):
        """Outputs, gradients of all that has some (None stays None), buffers and the random state afterwards."""
        before = [b.clone() for b in self.fns.buffers()]
        found = observed(lambda: self.out(memory, arithmetic, way), self.wanted)
        found += [b.clone() for b in self.fns.buffers()]
        for b, value in zip(self.fns.buffers(), before, strict=True):
            b.copy_(value)
        return found


def observed(make, wanted):
    torch.manual_seed(1)
    out = make()
    loss = loss_of([t.double() for t in tree_leaves(out)])
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [*(t.detach() for t in tree_leaves(out)), *found, torch.rand(3)]


def same(a, b):
    """The same numbers in the same dtype, NaN for NaN, None for None."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()]))


def assert_equal(found, true):
    assert len(found) == len(true)
    assert sum(t is not None and bool(t.any()) for t in true[:-1]) > 1, "nothing to compare"
    apart = [i for i, (a, b) in enumerate(zip(found, true, strict=True)) if not same(a, b)]
    assert not apart, f"{len(apart)} of {len(true)} tensors differ, the first is {apart[0]} of {true[apart[0]].shape}"


class Recovered:
    """What every fn is given in its first and in its second run: `apart` counts the updates where that is not the same."""

    def __init__(self):
        self.first, self.seen, self.apart = {}, 0, 0

    def __call__(self, index, update, sources, out):
        key, given = (index, id(update)), [t.detach().clone() for t in tree_leaves(sources)]
        if not rg.replaying():
            self.first[key] = given
            return
        self.seen += 1
        self.apart += not all(map(self.bits, self.first[key], given))

    @staticmethod
    def bits(a, b):
        """Equal, the signs of zeros and the layout too."""
        return same(a, b) and torch.equal(torch.signbit(a), torch.signbit(b)) and a.stride() == b.stride()


@pytest.fixture
def recovered(monkeypatch):
    log = Recovered()
    monkeypatch.setattr(calls, "observer", log)
    return log


def exact(case, memory, recovered=None, way=rg.run):
    """Both are under exact arithmetic: a policy, and ordinary autograd."""
    found = case.observed(memory, way=way)
    if recovered is not None:
        assert recovered.seen
        assert recovered.apart == 0, f"recovered other sources for {recovered.apart} of {recovered.seen} updates"
    assert_equal(found, case.observed("store", way=way))
    return found


def wired(name, setting, depth, make=Fn):
    """Blocks of a wiring, every fn with the context."""
    takes, narrow = "context", 4
    block = {
        "pair": lambda: rg.wirings.pair(make(), make(), takes=[takes] * 2),
        "dual": lambda: rg.wirings.dual(make(), make(), make(narrow), make(narrow), takes=[takes] * 4),
        "cross": lambda: rg.wirings.cross(
            make(WIDTH, WIDTH, narrow), make(narrow), make(narrow, narrow, WIDTH), make(), takes=[takes] * 4
        ),
        "leapfrog": lambda: rg.wirings.leapfrog([make(), make(), make()], takes=takes),
        "three in turn": lambda: rg.wirings.leapfrog([make(), make(), make()], streams=("a", "b", "c"), takes=takes),
        "groups": lambda: rg.wirings.groups([make(), make(), make()], takes=takes),
    }[name]
    updates = [update for _ in range(depth) for update in block()]
    names = dict.fromkeys(u.target for u in updates)
    streams = {name: draw(ROWS, narrow if name.startswith("m") else WIDTH) for name in names}
    return Case(setting, updates, streams, {"context": draw(ROWS, 1)})


WIRINGS = ["pair", "dual", "cross", "leapfrog", "three in turn", "groups"]


# -- equal to the bit --------------------------------------------------------------------------------------------------


@every_setting
@pytest.mark.parametrize("name", WIRINGS)
@every_policy
def test_wiring(memory, name, setting, recovered):
    """Gradients of parameters, inputs and context."""
    exact(wired(name, setting, 4), memory, recovered)


@every_setting
def test_deep(setting, recovered):
    exact(wired("pair", setting, 16), "reverse", recovered)
    assert recovered.seen == 32


@pytest.mark.parametrize("setting", ["bf16 autocast", "bfloat16"])
def test_deeper(setting, recovered):
    """The small twin of the one below."""
    fns = [Fn(2) for _ in range(256)]
    exact(Case(setting, rg.wirings.leapfrog(fns), {"a": draw(2, 2), "b": draw(2, 2)}), "reverse", recovered)


@pytest.mark.slow
@every_setting
@pytest.mark.parametrize("name", WIRINGS)
def test_256_blocks(name, setting, recovered):
    exact(wired(name, setting, 256), "reverse", recovered)
    assert recovered.seen >= 512


@DRIFTS
@pytest.mark.parametrize("setting", SHORT)
def test_float_is_not_equal(setting, recovered):
    """The tests above can fail: arithmetic="float" recovers something else, and has other gradients."""
    case = wired("pair", setting, 16)
    found = case.observed("reverse", "float")
    assert recovered.apart > 20
    true = case.observed("store", "float")
    assert sum(not same(a, b) for a, b in zip(found, true, strict=True)) > 10


@pytest.mark.parametrize(("setting", "tolerance"), [("float32", 1e-4), ("float64", 1e-7)])
@pytest.mark.parametrize("name", WIRINGS)
def test_exact_is_close_to_float(name, setting, tolerance):
    """Outputs and gradients are those of the equations, up to the rounding of increments to the grid."""
    case = wired(name, setting, 4)
    for way in (rg.run, rg.invert):
        found, true = case.observed("reverse", way=way), case.observed("store", "float", way=way)
        assert not all(map(same, found, true))
        for a, b in zip(found, true, strict=True):
            assert (a - b).norm() <= tolerance * b.norm()


@every_setting
@every_policy
def test_batchnorm(memory, setting, recovered):
    """Statistics, which are among what is compared, move once."""
    case = wired("pair", setting, 4, functools.partial(Fn, norm=nn.BatchNorm1d))
    found = exact(case, memory, recovered)
    assert any(not torch.equal(a, b) for a, b in zip(found[-len(list(case.fns.buffers())) :], case.fns.buffers(), strict=True))


@every_setting
@pytest.mark.parametrize("name", TREES)
def test_trees(name, setting, recovered):
    """Streams of several leaves, dicts among them, whose keys are in another order in what fn returns."""
    dtype = SETTINGS[setting][0]
    a, b = cast(TREES[name](), dtype)
    exact(Case(setting, rg.wirings.leapfrog([Tree(t) for t in (a, b) * 4]), {"a": a, "b": b}), "reverse", recovered)


@pytest.mark.parametrize("memory", POLICIES, ids=str)
@settings(deadline=None, derandomize=True, max_examples=25, database=None)
@given(case=cases(), setting=st.sampled_from(list(SETTINGS)))
def test_random_program(memory, case, setting):
    """2 to 5 streams, up to 30 updates: frozen, shared and detached fns, dropout, a context, a loss on some streams."""
    case = replace(case, fns=[(kind, False, frozen, dropout) for kind, _, frozen, dropout in case.fns])
    torch.manual_seed(0)
    fns = [Branch(*fn) for fn in case.fns]
    updates = [
        rg.Update(f"s{target}", fns[fn], [f"s{i}" for i in sources], takes=["context"] if takes else ())
        for target, sources, fn, takes in case.updates
    ]
    streams = {f"s{i}": draw(grad=grad) for i, grad in enumerate(case.grads)}
    whole = Case(setting, updates, streams, {"context": draw(1, WIDTH, grad=case.context)}, fns)

    def run(memory):
        out = whole.out(memory)
        return {f"s{i}": out[f"s{i}"] for i in case.loss}

    if not any(t.requires_grad for t in run("store").values()):
        assert not any(t.requires_grad for t in run(memory).values())
        return
    log = calls.observer = Recovered()
    try:
        found = observed(lambda: run(memory), whole.wanted)
    finally:
        calls.observer = None
    assert log.apart == 0
    true = observed(lambda: run("store"), whole.wanted)
    assert all(map(same, found, true))


@pytest.mark.parametrize("grad", ["grad", "no_grad", "inference"])
@every_setting
def test_output_without_gradients(setting, grad):
    """The numbers of the output do not depend on whether there will be a backward pass, nor on the policy."""
    case = wired("cross", setting, 3)
    case.fns.eval()
    true = case.out("store")
    how = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[grad]
    for memory in POLICIES:
        with how():
            out = case.out(memory)
        assert all(torch.equal(out[k], true[k]) for k in true)


@pytest.mark.parametrize("setting", ["bf16 autocast", "float32"])
def test_steps(setting):
    """Weights after some steps of training are those of store."""
    results = []
    first = wired("pair", setting, 8)
    for memory in ("reverse", "store"):
        case = copy.deepcopy(first)
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(case.fns.parameters(), 0.01)
        for _ in range(5):
            optimizer.zero_grad()
            loss_of([t.double() for t in case.out(memory).values()]).backward()
            optimizer.step()
        results.append([p.detach() for p in case.fns.parameters()])
        assert not torch.equal(results[-1][0], next(first.fns.parameters()))
    assert_equal(*results)


# -- range and resolution ----------------------------------------------------------------------------------------------


class Step(nn.Module):
    """Adds numbers of its own, whatever the source is; with a gradient for both."""

    def __init__(self, by):
        super().__init__()
        self.by = nn.Parameter(by)

    def forward(self, x):
        return self.by + 0 * x.detach().sin() * self.by


@pytest.mark.filterwarnings("ignore:no value of the stream")
@every_setting
@pytest.mark.parametrize("size", [30_000.0, 32_640.0])
@pytest.mark.parametrize("unit", [14, 24])
def test_resolution(unit, size, setting, recovered):
    """Streams of ±30000: steps of 2^-14, or of 2^-24, are not lost. What is left when the 30000 are taken away is their sum."""
    dtype, count = SETTINGS[setting][0], 16
    signs = torch.tensor([1.0, -1.0]).repeat(ROWS, WIDTH // 2)
    start = cast({"a": size * signs, "b": -size * signs}, dtype)
    unit = 2.0**-unit
    steps = [Step(torch.randint(1, 4, (ROWS, WIDTH)) * unit * signs * (-1) ** i).to(dtype) for i in range(count)]
    back = [Step(-start["a"]), Step(-start["b"])]
    case = Case(setting, rg.wirings.leapfrog(steps + back), start)
    case.streams["a"].requires_grad_()
    found = exact(case, "reverse", recovered)
    for i in (0, 1):
        total = sum(step.by.detach().double() for step in steps[i::2])
        assert total.abs().min() >= count / 2 * unit
        assert torch.equal(found[i], total.float().to(dtype))


def test_float_has_no_such_resolution():
    """The test above can fail: in float32 every one of those steps is lost."""
    a = torch.full((ROWS, WIDTH), 30_000.0)
    steps = [Step(torch.full((ROWS, WIDTH), 2.0**-14)) for _ in range(64)]
    updates = [rg.Update("a", step, "b") for step in steps]
    assert torch.equal(rg.run(updates, {"a": a, "b": a}, arithmetic="float")["a"], a)
    assert torch.equal(rg.run(updates, {"a": a, "b": a}, arithmetic="exact")["a"], a + 2.0**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding(dtype):
    """Increments are rounded to the nearest multiple of the grid, ties to even."""
    grid = GRID if dtype == torch.float32 else FINE
    units = torch.tensor([0.0, 0.4, 0.5, 0.6, 1.5, 2.5, -0.4, -0.5, -0.6, -1.5, 7.25, 1e4 + 0.75], dtype=dtype)
    out = rg.run([rg.Update("a", lambda x: x * grid, "b")], {"a": torch.zeros(12, dtype=dtype), "b": units}, arithmetic="exact")
    assert torch.equal(out["a"] / grid, units.round())


@every_setting
def test_whole_range(setting, recovered):
    """Values of all magnitudes, from one end of the range to the other."""
    dtype = SETTINGS[setting][0]
    size = 2.0 ** torch.arange(-30, 15.0, 0.5)
    start = {"a": draw(90).detach().sign() * size, "b": draw(90).detach().sign() * size.flip(0)}
    gains = [Gain(2.0**-k) for k in (0, 12, 3, 20, 7, 1)]
    case = Case(setting, rg.wirings.leapfrog(gains), cast(start, dtype))
    case.streams["a"].requires_grad_()
    exact(case, "reverse", recovered)


class Gain(nn.Module):
    """x * weight, within ±400."""

    def __init__(self, gain):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), gain))

    def forward(self, x):
        return (x * self.weight).clamp(-400, 400)


class Faulty(Fn):
    """A sound branch with dropout and statistics until it is given a fault."""

    fault = None

    def forward(self, x, context=None):
        y = super().forward(x, context=context)
        return y if self.fault is None else self.fault(y)


def faulty(setting="float32", fault=None):
    case = Case(
        setting,
        rg.wirings.leapfrog([Faulty(norm=nn.BatchNorm1d) for _ in range(6)], takes="context"),
        {"a": draw(), "b": draw()},
        {"context": draw(ROWS, 1)},
    )
    case.fns[3].fault = fault
    return case


NAME = "update 3: b += Faulty(a)"


def situation(case):
    state = [torch.get_rng_state(), *(t.clone() for t in case.fns.state_dict().values())]
    return state, (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), rg.replaying())


def assert_next_step_is_right(case, memory):
    for fn in case.fns:
        fn.fault = None
    if memory != "store":
        exact(case, memory)
    assert all(t is None or t.isfinite().all() for t in case.observed(memory))


def one(value):
    """A fault in one element alone."""

    def fault(y):
        y = y.clone()
        y[1, 2] = value
        return y

    return fault


FAULTS = {
    "a little": one(32790.0),
    "a little, below": one(-32790.0),
    "far": one(60_000.0),
    "all": lambda y: y * 0 + 50_000,
    "beside NaN": lambda y: one(-60_000.0)(one(math.nan)(y)[:, [1, 2, 0, 3, 4, 5]]),
    "beside inf": lambda y: one(-60_000.0)(one(math.inf)(y)[:, [1, 2, 0, 3, 4, 5]]),
}
HUGE = {"huge": one(1e30), "huge, below": one(-1e30), "largest": one(3.3e38)}  # not in float16
LEAVING = [("float32", fault, memory) for fault in {**FAULTS, **HUGE} for memory in ["store", *MEMORIES]]
LEAVING += [(setting, fault, "reverse") for setting in SETTINGS for fault in FAULTS if setting != "float32"]
LEAVING += [(setting, fault, "reverse") for setting in ("bfloat16", "bf16 autocast", "float64") for fault in HUGE]


@pytest.mark.parametrize(("setting", "fault", "memory"), LEAVING, ids=str)
def test_leaving_the_range(memory, setting, fault):
    """An error in the forward pass that names update and limit; nothing is left changed, and the next step is right."""
    case = faulty(setting, {**FAULTS, **HUGE}[fault])
    for grad in (True, False):
        tensors, others = situation(case)
        with torch.set_grad_enabled(grad), pytest.raises(OutOfRange, match=re.escape(NAME)) as info:
            case.out(memory)
        assert "the stream 'b' left the range" in str(info.value)
        assert "±32766" in str(info.value)
        assert info.value.where == NAME
        now, others_now = situation(case)
        assert others_now == others
        if memory != "store" and grad:  # ordinary autograd promises no such thing
            assert all(map(torch.equal, now, tensors))
    assert_next_step_is_right(case, memory)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_limit_itself(setting, sign):
    """The largest number of the dtype within ±32766 is fine, the next one is not: at the start, and as a sum."""
    dtype = SETTINGS[setting][0]
    most = {torch.bfloat16: 32640.0, torch.float16: 32752.0}.get(dtype, LIMIT)
    beyond = {
        torch.bfloat16: 32768.0,
        torch.float16: 32768.0,
    }.get(dtype, LIMIT + 2**-9)
    ones, zeros = torch.ones(3, dtype=dtype, requires_grad=True), torch.zeros(3, dtype=dtype, requires_grad=True)
    for value, fits in ((most, True), (beyond, False)):
        for streams, factor in (({"a": zeros, "b": ones}, value), ({"a": ones * sign * value, "b": ones}, 0.0)):
            updates = [rg.Update("a", lambda x: x * (sign * factor), "b")]
            if fits:
                out = rg.run(updates, streams, arithmetic="exact")["a"]
                assert torch.equal(out, ones * (sign * value))
                out.sum().backward()
            else:
                with pytest.raises(OutOfRange):
                    rg.run(updates, streams, arithmetic="exact")


@pytest.mark.parametrize(("name", "value"), [("a", 33_000.0), ("b", -33_000.0), ("b", 1e30)])
@store_too
def test_input_beyond_the_limit(memory, name, value):
    """The stream is named, and fn does not run."""
    case = faulty()
    ran = []
    case.fns[0].register_forward_hook(lambda *_: ran.append(1))
    sound = case.streams[name]
    case.streams[name] = sound.detach().index_fill(1, torch.tensor([1]), value).requires_grad_()
    before = torch.get_rng_state()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(OutOfRange, match=f"the stream '{name}' was given.*±32766") as info:
            case.out(memory)
        assert info.value.where is None
    assert not ran
    assert torch.equal(torch.get_rng_state(), before)
    case.streams[name] = sound
    assert_next_step_is_right(case, memory)


def test_streams_that_are_only_read_have_no_limit():
    """Nothing is added to them."""
    c = torch.full((ROWS, WIDTH), 1e9, requires_grad=True)
    fns = [lambda x, c: (x + c / 1e9).sin(), lambda x, c: (x * c / 1e9).cos()]
    updates = [rg.Update("a", fns[0], ("b", "c")), rg.Update("b", fns[1], ("a", "c"))] * 3
    exact(Case("float32", updates, {"a": draw(), "b": draw(), "c": c}), "reverse")


def test_range_in_the_inverse():
    """The update and the limit are named there too."""
    case = faulty(fault=one(-40_000.0))
    with pytest.raises(OutOfRange, match=r"update \d: b -= Faulty\(a\).*±32766"):
        case.out("reverse", way=rg.invert)


def test_error_is_one_of_ours():
    assert issubclass(OutOfRange, rg.RetrogradeError)
    assert issubclass(OutOfRange, ArithmeticError)


NOT_FINITE = [("bf16 autocast", value, memory, 3) for value in (math.nan, math.inf, -math.inf) for memory in MEMORIES]
NOT_FINITE += [(setting, value, "reverse", at) for setting in SETTINGS for value, at in ((math.nan, 0), (math.inf, 5))]


@pytest.mark.parametrize(("setting", "value", "memory", "at"), NOT_FINITE, ids=str)
def test_nan_and_inf(memory, setting, value, at):
    """From fn: outputs as under store; a finite gradient is that of store; the next step is clean."""
    case = faulty(setting)
    case.fns[at].fault = one(value)
    found, true = case.observed(memory), case.observed("store")
    outs = len(case.streams)
    assert_equal([*found[:outs], None], [*true[:outs], None])
    assert not all(t.isfinite().all() for t in true[:outs])
    for a, b in zip(found[outs:], true[outs:], strict=True):
        assert torch.equal(a[a.isfinite()], b[a.isfinite()])
    assert_next_step_is_right(case, memory)


@every_policy
def test_nan_that_the_loss_does_not_see(memory):
    """Rows do not mix in these fns: NaN stays in its row, and every gradient through the other rows is that of store."""
    case = Case("bf16 autocast", rg.wirings.leapfrog([Faulty(dropout=0.0) for _ in range(8)]), {"a": draw(), "b": draw()})
    case.fns[4].fault = one(math.nan)
    keep = torch.tensor([0, 2, 3])

    def sound(memory):
        streams = [case.streams["a"], case.streams["b"]]
        found = observed(lambda: [t[keep] for t in case.out(memory).values()], streams)
        return [*found[:2], *(g[keep] for g in found[2:4]), found[4]]

    found = sound(memory)
    assert all(t.isfinite().all() for t in found)
    assert_equal(found, sound("store"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_at_the_start(value):
    """In a stream: as under store, without an error."""
    case = faulty()
    case.streams["a"] = one(value)(case.streams["a"].detach()).requires_grad_()
    outs = [case.observed(memory)[:2] for memory in ("reverse", "store")]
    assert_equal([*outs[0], None], [*outs[1], None])


@pytest.mark.parametrize("setting", ["float32", "bfloat16", "float64"])
@store_too
def test_negative_zero(memory, setting, recovered):
    """fn tells -0.0 from 0.0: it sees the same in both runs, wherever the zero comes from."""

    class Angle(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.25))

        def forward(self, x):
            signs = torch.atan2(x, -torch.ones_like(x)) + torch.ones_like(x).copysign(x)
            return (signs * self.gain).round() * x.sign().abs() - 0.0 * self.gain * x

    zeros = torch.tensor([-0.0, 0.0, -0.0, 1.0, -1.0, -(2.0**-30)])
    a = zeros.repeat(ROWS, 1).requires_grad_()
    b = zeros.flip(0).repeat(ROWS, 1).requires_grad_()
    case = Case(setting, rg.wirings.leapfrog([Angle() for _ in range(6)]), {"a": a, "b": b})
    found = case.observed(memory)
    assert recovered.apart == 0
    assert_equal(found, case.observed("store"))


# -- layouts, structures, dtypes ---------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda: draw(WIDTH, ROWS).detach().t().requires_grad_(),
    "strided": lambda: draw(ROWS, 2 * WIDTH).detach()[:, ::2].requires_grad_(),
    "expanded": lambda: draw(1, WIDTH).detach().expand(ROWS, WIDTH).requires_grad_(),
    "channels last": lambda: draw(2, 3, 4, WIDTH).detach().to(memory_format=torch.channels_last).requires_grad_(),
    "permuted": lambda: draw(2, WIDTH, 3).detach().permute(2, 0, 1).requires_grad_(),
    "one row": lambda: draw(WIDTH, 1).detach().t().requires_grad_(),
}
RETURNS = {
    "as it is": lambda y: y,
    "transposed": lambda y: y.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda y: y[:1].expand_as(y),
    "strided": lambda y: torch.stack((y, y), -1)[..., 0],
    "the source": lambda y: y,
}


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("setting", ["bf16 autocast", "float64"])
def test_layouts(setting, layout, returns, recovered):
    """Streams that are not contiguous, and fns that return other layouts than they are given."""
    dtype = SETTINGS[setting][0]
    a, b = LAYOUTS[layout](), LAYOUTS[layout]()
    fns = [Fn() for _ in range(6)]
    used = [lambda x, fn=fn: RETURNS[returns](fn(x)) for fn in fns[:-1]]
    used.append((lambda x: x) if returns == "the source" else fns[-1])
    case = Case(setting, rg.wirings.leapfrog(used), {"a": a, "b": b}, fns=fns)
    case.streams = {"a": a.detach().to(dtype).requires_grad_(), "b": b.detach().to(dtype).requires_grad_()}
    exact(case, "reverse", recovered)


@pytest.mark.parametrize("setting", ["bf16 autocast", "float16"])
@pytest.mark.parametrize("dim", [-1, 1])
@every_policy
def test_halves(memory, dim, setting):
    """split="chunk": the streams are views with gaps."""
    dtype, autocast = SETTINGS[setting]
    net = rg.ReversibleSequence([(Fn(), Fn()) for _ in range(4)], split="chunk", merge="cat", dim=dim, arithmetic="exact")
    net.to(dtype)
    x = draw(2, 4, WIDTH * (2 if dim == -1 else 1), dtype=dtype)
    results = []
    for net.memory in (memory, "store"):
        with amp(autocast):
            results.append(observed(lambda: net(x), [x, *net.parameters()]))
    assert_equal(*results)


@pytest.mark.parametrize("setting", ["bf16 autocast", "float16"])
def test_convolutions(setting, recovered):
    """Streams in channels_last through convolutions, which return what layout they like."""

    def conv():
        return nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(4, 4, 1))

    a, b = (draw(2, 4, 5, 6) for _ in range(2))
    case = Case(setting, rg.wirings.leapfrog([conv() for _ in range(8)]), {"a": a, "b": b})
    case.streams = {name: t.detach().to(memory_format=torch.channels_last).requires_grad_() for name, t in case.streams.items()}
    exact(case, "reverse", recovered)


@pytest.mark.parametrize("shape", [(0, WIDTH), (3, 0, WIDTH), (WIDTH,), (1, 1, WIDTH)])
def test_shapes(shape):
    """Nothing at all, or little."""
    case = Case("bf16 autocast", rg.wirings.leapfrog([Fn() for _ in range(4)]), {"a": draw(*shape), "b": draw(*shape)})
    found, true = case.observed("reverse"), case.observed("store")
    assert all(map(same, found, true))


@pytest.mark.parametrize("setting", ["float32", "bfloat16", "float64"])
def test_scalars(setting, recovered):
    """Streams of no dimension."""
    weights = [nn.ParameterList([torch.rand(())]) for _ in range(8)]
    fns = [lambda x, w=w: (x * w[0]).sin() for w in weights]
    streams = {"a": torch.rand((), requires_grad=True), "b": torch.rand((), requires_grad=True)}
    exact(Case(setting, rg.wirings.leapfrog(fns), streams, fns=weights), "reverse", recovered)


class Counted(nn.Module):
    """From a dict of numbers of several kinds to one like it; what is added depends on every leaf."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds, self.weight = kinds, nn.Parameter(torch.rand(3))

    def forward(self, x):
        total = sum((t.to(self.weight.dtype) * (i + 1)).sin() for i, t in enumerate(x.values())) * self.weight
        return {k: (total.detach() * 5).round().to(d) if not d.is_floating_point else total.to(d) for k, d in self.kinds.items()}


KINDS = {
    "counts": {"x": torch.float32, "n": torch.int64},
    "several widths": {"x": torch.float32, "h": torch.bfloat16, "d": torch.float64, "f": torch.float16},
    "small counts": {"h": torch.bfloat16, "n": torch.int8, "m": torch.int32},
}


@pytest.mark.parametrize("kinds", KINDS)
@every_policy
def test_mixed_leaves(memory, kinds, recovered):
    """Whole numbers among the leaves, and leaves of several dtypes: each is recovered as it was, and keeps its dtype."""
    kinds = KINDS[kinds]
    streams = [{k: (torch.randn(3) * 5).to(d).requires_grad_(d.is_floating_point) for k, d in kinds.items()} for _ in range(2)]
    fns = [Counted(kinds) for _ in range(8)]

    def run(memory):
        return rg.run(rg.wirings.leapfrog(fns), dict(zip("ab", streams, strict=True)), memory=memory, arithmetic="exact")

    wanted = [*(t for s in streams for t in s.values() if t.requires_grad), *parameters(fns)]
    found = observed(lambda: run(memory), wanted)
    assert recovered.apart == 0
    assert [t.dtype for t in found[: 2 * len(kinds)]] == [*kinds.values()] * 2
    assert_equal(found, observed(lambda: run("store"), wanted))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_fn_returns_another_dtype(dtype, recovered):
    """Than its stream has."""
    weights = [nn.ParameterList([torch.rand(WIDTH) + 2]) for _ in range(8)]
    fns = [lambda x, w=w[0]: (x.sin() * w).to(dtype) for w in weights]
    case = Case(
        "float32", rg.wirings.leapfrog([*fns, lambda x: (x * weights[0][0]).cos()]), {"a": draw(), "b": draw()}, fns=weights
    )
    exact(case, "reverse", recovered)


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
@pytest.mark.parametrize("memory", ["store", "reverse"])
def test_truth_values_in_a_stream(memory, arithmetic):
    """`or` cannot be undone."""
    streams = {name: {"x": torch.arange(3.0), "on": torch.tensor([True, False, True])} for name in "ab"}
    updates = rg.wirings.leapfrog([lambda s: {"x": s["x"].sin() * (1 + s["on"]), "on": torch.ones(3, dtype=torch.bool)}] * 4)
    with pytest.raises(rg.ProgramError, match=r"update 0.*torch.bool, which cannot be added"):
        rg.run(updates, streams, memory=memory, arithmetic=arithmetic)


# -- autograd ----------------------------------------------------------------------------------------------------------


def twice(case, out):
    """Second derivatives."""
    first = torch.autograd.grad(loss_of([t.double() for t in tree_leaves(out)]), case.wanted, create_graph=True)
    second = torch.autograd.grad(sum(g.double().square().sum() for g in first), case.wanted, allow_unused=True)
    return [*(g.detach() for g in first), *second]


def retained(case, out):
    loss = loss_of([t.double() for t in tree_leaves(out)])
    found = [torch.autograd.grad(loss, case.wanted, retain_graph=True) for _ in range(2)]
    return [*found[0], *found[1], *torch.autograd.grad(loss * 3, case.wanted)]


def some(case, out):
    """Of some inputs alone, in two calls."""
    loss = loss_of([t.double() for t in tree_leaves(out)])
    early, late = [case.streams["a"], case.wanted[4]], [case.side["context"], case.wanted[-1]]
    return [*torch.autograd.grad(loss, late, retain_graph=True), *torch.autograd.grad(loss, early)]


def one_output(case, out):
    return torch.autograd.grad(out["a"].double().sin().sum(), case.wanted, allow_unused=True)


def batched(case, out):
    torch.manual_seed(2)
    rows = torch.randn(3, *out["b"].shape, dtype=out["b"].dtype)
    return torch.autograd.grad(out["a"] * out["b"], case.wanted, rows, is_grads_batched=True)


def in_autocast(case, out):
    """Backward within autocast, which fn does not notice."""
    with amp(torch.bfloat16):
        return retained(case, out)


def inside(case, out):
    """Gradients with respect to an output, and through it."""
    middle = out["a"] * 2
    return torch.autograd.grad((middle * out["b"]).double().sin().sum(), [middle, out["b"], *case.wanted])


WAYS = [twice, retained, some, one_output, batched, in_autocast, inside]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setting", ["float32", "bfloat16", "bf16 autocast", "float64"])
@every_policy
def test_autograd(memory, setting, way):
    """Whatever is asked of the graph is as under store."""
    case = wired("leapfrog", setting, 2)
    results = []
    for how in (memory, "store"):
        torch.manual_seed(1)
        results.append([*way(case, case.out(how)), torch.rand(2)])
    if way is twice and memory == rg.Anchor(3) and setting == "float64":
        for a, b in zip(*results, strict=True):  # sums of second derivatives are in another order
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    else:
        assert_equal(*results)


def sequence(depth, memory, arithmetic="exact"):
    return rg.ReversibleSequence([(Fn(), Fn()) for _ in range(depth)], memory=memory, arithmetic=arithmetic)


@pytest.mark.parametrize("inner", ["reverse", "checkpoint", rg.StoreLast(1)])
@pytest.mark.parametrize("setting", ["bfloat16", "bf16 autocast", "float32"])
def test_nested(setting, inner, recovered):
    """A program in an fn of another, both exact."""
    case = Case(setting, rg.wirings.leapfrog([sequence(2, inner) for _ in range(4)]), {"a": draw(), "b": draw()})
    found = case.observed("reverse")
    assert recovered.apart == 0
    for fn in case.fns:
        fn.memory = "store"
    assert_equal(found, case.observed("store"))


@pytest.mark.parametrize(("outer", "inner"), [("float", "exact"), ("exact", "float")])
def test_nested_with_float(outer, inner):
    """In float32, where float is good enough to see that nothing else is wrong."""
    case = Case("float32", rg.wirings.leapfrog([sequence(2, "reverse", inner) for _ in range(4)]), {"a": draw(), "b": draw()})
    found = case.observed("reverse", outer)
    for fn in case.fns:
        fn.memory = "store"
    true = case.observed("store", outer)
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_nested_in_checkpoint():
    """A float program that keeps the sources of its fns: the exact one inside sees the same bits."""
    case = Case("bf16 autocast", rg.wirings.leapfrog([sequence(3, "reverse") for _ in range(4)]), {"a": draw(), "b": draw()})
    found = case.observed("checkpoint", "float")
    for fn in case.fns:
        fn.memory = "store"
    assert_equal(found, case.observed("store", "float"))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("setting", ["bfloat16", "bf16 autocast"])
def test_inside_torch_checkpoint(setting, reentrant):
    case = wired("pair", setting, 4)

    def around(memory):
        def run(a, b):
            out = rg.run(case.updates, {"x1": a, "x2": b}, case.side, memory=memory, arithmetic="exact")
            return out["x1"], out["x2"]

        with amp(case.autocast):
            return torch.utils.checkpoint.checkpoint(run, *case.streams.values(), use_reentrant=reentrant)

    if reentrant:  # it has no autograd.grad

        def step(make):
            torch.manual_seed(1)
            loss_of([t.double() for t in make()]).backward()
            found = [t.grad for t in case.wanted]
            for t in case.wanted:
                t.grad = None
            return [*found, torch.rand(1)]
    else:
        step = functools.partial(observed, wanted=case.wanted)
    assert_equal(step(lambda: around("reverse")), step(lambda: around("store")))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch's own
@pytest.mark.parametrize("name", ["grad", "vmap", "vmap of grad", "jvp"])
@pytest.mark.parametrize("setting", ["bfloat16", "bf16 autocast", "float32"])
def test_transforms(setting, name):
    """They run as store, with a warning, and have its values."""
    dtype, autocast = SETTINGS[setting]
    net = sequence(3, "reverse").eval().to(dtype)
    x, v = draw(ROWS, WIDTH, dtype=dtype, grad=False), draw(ROWS, WIDTH, dtype=dtype, grad=False)

    def loss(t):
        return net(t).double().sin().sum()

    transform = {
        "grad": lambda: [torch.func.grad(loss)(x)],
        "vmap": lambda: [torch.vmap(net)(x)],
        "vmap of grad": lambda: [torch.vmap(torch.func.grad(loss))(x)],
        "jvp": lambda: list(torch.func.jvp(net, (x,), (v,))),
    }[name]
    with amp(autocast):
        with pytest.warns(UserWarning, match="runs as memory='store'"):
            found = transform()
        net.memory = "store"
        true = transform()
        plain = [net(x)] if name in ("vmap", "jvp") else torch.autograd.grad(loss(x.requires_grad_()), [x])
    assert all(map(torch.equal, found, true))
    torch.testing.assert_close(found[0], plain[0].detach(), rtol=0.02, atol=0.02)


def test_beyond_the_limit_in_a_transform():
    """No value can be looked at there: it becomes NaN, and does not pass for a number."""
    updates = [rg.Update("a", lambda x: x * 40_000, "b")]
    run = torch.vmap(lambda t: rg.run(updates, {"a": t, "b": t}, memory="store", arithmetic="exact")["a"])
    out = run(torch.tensor([[0.5, 1.0], [0.25, -1.0]]))
    assert torch.equal(out.isnan(), torch.tensor([[False, True], [False, True]]))


@every_policy
def test_functional_call(memory):
    """Gradients go to the tensors that were given."""
    net = sequence(3, memory)
    x = draw()
    given = {name: (torch.randn_like(p) * 0.3).requires_grad_() for name, p in net.named_parameters()}
    results = []
    for net.memory in (memory, "store"):
        with amp(torch.bfloat16):
            results.append(observed(lambda: torch.func.functional_call(net, given, (x,)), [x, *given.values()]))
    assert_equal(*results)


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("memory", ["store", "reverse", "checkpoint", rg.Anchor(3), rg.Budget(1 << 38)], ids=str)
def test_fake_tensors(memory, dtype, default_dtype):
    """Forward and backward without data."""
    default_dtype(dtype)
    with FakeTensorMode():
        fns = [Fn(64) for _ in range(4)]
        streams = {name: torch.randn(1 << 24, 64, requires_grad=True) for name in "ab"}
        out = rg.run(rg.wirings.leapfrog(fns), streams, memory=memory, arithmetic="exact")
        assert all(isinstance(t, FakeTensor) and t.dtype == dtype for t in out.values())
        (out["a"].float().square().mean() + out["b"].float().sum()).backward()
        for t in (*streams.values(), *parameters(fns)):
            assert (t.grad.shape, t.grad.dtype) == (t.shape, t.dtype)


def test_meta_tensors():
    """On the meta device too."""
    fns = [Fn(64, dropout=0.0).to("meta") for _ in range(4)]
    streams = {name: torch.randn(8, 64, device="meta", requires_grad=True) for name in "ab"}
    out = rg.run(rg.wirings.leapfrog(fns), streams, arithmetic="exact")
    (out["a"].square().mean() + out["b"].sum()).backward()
    assert streams["a"].grad.shape == (8, 64)


def test_saved_on_the_cpu():
    """Hooks around the program apply to what it keeps."""
    case = wired("pair", "bf16 autocast", 4)
    packed = []

    def run():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.dtype) or t.clone(), lambda t: t):
            return case.out("reverse")

    found = observed(run, case.wanted)
    assert packed == [torch.float64, torch.float64, torch.float32]  # the final streams and the context
    assert_equal(found, case.observed("store"))


def test_nested_error_names_both():
    """The update of the inner program that left the range, and that of the outer one whose fn it is."""
    inner = rg.Reversible(rg.wirings.leapfrog([nn.Tanh(), lambda x: x * 0 + 40_000.0]), arithmetic="exact")
    updates = rg.wirings.leapfrog([nn.Tanh(), lambda x: inner({"a": x, "b": x})["b"]])
    for memory in MEMORIES:
        with pytest.raises(OutOfRange, match=r"update 1: b \+= <lambda>\(a\)") as info:
            rg.run(updates, {"a": draw(), "b": draw()}, memory=memory, arithmetic="exact")
        assert info.value.__notes__ == ["raised by fn in update 1: b += <lambda>(a)"]


class Halved(rg.Add):
    """Somebody's own rule, made of ours."""

    def apply(self, target, out):
        return target + out / 2

    def undo(self, target, out):
        return target - out / 2


@pytest.mark.parametrize("memory", ["store", "reverse"])
def test_rule_derived_from_add(memory):
    """It does its own arithmetic on tensors: refused under exact by a word about it, and in float under auto."""
    updates = [rg.Update("a", Fn(), "b", rule=Halved()), rg.Update("b", Fn(), "a", rule=Halved())]
    streams = {"a": draw(), "b": draw()}
    with amp(torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert rg.run(updates, streams, memory=memory)["a"].requires_grad
        with pytest.raises(rg.ProgramError, match=r"update 0: .*Halved"):
            rg.run(updates, streams, memory=memory, arithmetic="exact")


class Marked(torch.Tensor):
    """A subclass that does nothing."""


def test_subclass_beyond_the_limit():
    """An error, or NaN: not a number that is wrong."""
    t = torch.ones(3).as_subclass(Marked)
    try:
        out = rg.run([rg.Update("a", lambda x: x * 40_000, "b")], {"a": t, "b": t}, arithmetic="exact")["a"]
    except OutOfRange:
        return
    assert out.isnan().all()


# -- the default -------------------------------------------------------------------------------------------------------


def deep(depth, setting, gain, width=16, rows=8):
    """A net as one builds it, without a word about arithmetic; its last linear layers scaled by `gain`."""
    torch.manual_seed(3)

    def fn():
        made = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        with torch.no_grad():
            made[-1].weight *= gain
        return made

    dtype, autocast = SETTINGS[setting]
    return rg.ReversibleSequence([(fn(), fn()) for _ in range(depth)]).to(dtype), draw(rows, width, dtype=dtype), autocast


def relative_error(net, x, autocast):
    """Of all gradients as one vector, against store."""
    found, memory = [], net.memory
    for net.memory in (memory, "store"):
        with amp(autocast):
            loss = net(x).float().sin().sum()
        found.append(torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, [x, *net.parameters()])]))
    net.memory = memory
    return float((found[0] - found[1]).norm() / found[1].norm())


def safe(*args):
    net, x, autocast = deep(*args)
    assert net.arithmetic == "auto"
    error = relative_error(net, x, autocast)
    assert error <= 1e-3
    return net, x, autocast


@pytest.mark.parametrize("gain", [1.0, 2.0])
@pytest.mark.parametrize("setting", SHORT)
def test_default_is_safe(setting, gain):
    safe(32, setting, gain)


@pytest.mark.slow
@pytest.mark.parametrize("gain", [1.0, 2.0])
@pytest.mark.parametrize("setting", SHORT)
def test_default_is_safe_at_256(setting, gain):
    """And float is not (under autocast by 1e-3 to 4e-3 here, with a margin for other machines)."""
    net, x, autocast = safe(256, setting, gain, 32, 16)
    net.arithmetic, net.verify = "float", "off"
    assert relative_error(net, x, autocast) > (1e-3 if autocast is None else 5e-4)


@DRIFTS
@pytest.mark.parametrize("setting", ["bfloat16", "float16"])
def test_float_is_not_safe(setting):
    """The test above can fail."""
    net, x, autocast = deep(32, setting, 2.0)
    net.arithmetic = "float"
    assert relative_error(net, x, autocast) > 1e-3


def chosen(updates, streams, setting="float32", **options):
    """What "auto" is like: "exact", "float", or neither."""
    outs = {}
    for arithmetic in ("auto", "exact", "float"):
        torch.manual_seed(0)
        with amp(SETTINGS[setting][1]):
            outs[arithmetic] = rg.run(updates, streams, arithmetic=arithmetic, **options)
    alike = [name for name in ("exact", "float") if all(torch.equal(outs["auto"][k], outs[name][k]) for k in streams)]
    assert len(alike) == 1, f"auto is like {alike}"
    return alike[0]


def sixteen_bit_lambda(module):
    return lambda x: module(x.bfloat16())


class Into(nn.Module):
    """Casts its input to what its module is in."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.to(next(self.module.parameters()).dtype))


CHOICES = {
    "a net in float32": ("float", "float32", lambda: [Fn() for _ in range(8)]),
    "a net in float64": ("float", "float64", lambda: [Fn().double() for _ in range(8)]),
    "one fn of many has 16 bits": (
        "exact", "float32", lambda: [*(Fn() for _ in range(7)), Into(Fn().bfloat16())],
    ),
    "one in float16": ("exact", "float32", lambda: [*(Fn() for _ in range(7)), Into(Fn().half())]),
    "a lambda over such a module": ("exact", "float32", lambda: [*(Fn() for _ in range(7)), sixteen_bit_lambda(Fn().bfloat16())]),
    "a partial of a method": (
        "exact", "float32", lambda: [*(Fn() for _ in range(7)), functools.partial(Into(Fn().bfloat16()).forward)],
    ),
    "bf16 autocast": ("exact", "bf16 autocast", lambda: [Fn() for _ in range(8)]),
    "fp16 autocast": ("exact", "fp16 autocast", lambda: [Fn() for _ in range(8)]),
    "16-bit streams, fns in float32": ("exact", "bfloat16", lambda: [Into(Fn()) for _ in range(8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("memory", ["reverse", "store", rg.Anchor(3)], ids=str)
def test_auto(name, memory):
    """Exact where something computes in 16 bits, float elsewhere; the same under every policy."""
    choice, setting, make = CHOICES[name]
    dtype = SETTINGS[setting][0]
    streams = {"a": draw(dtype=dtype), "b": draw(dtype=dtype)}
    assert chosen(rg.wirings.leapfrog(make()), streams, setting, memory=memory) == choice


def test_auto_of_one_stream_in_16_bits():
    """One is enough, even if it is only read."""
    streams = {"a": draw(), "b": draw(), "c": draw(dtype=torch.bfloat16)}
    updates = [rg.Update("a", lambda x, c: (x + c).sin(), ("b", "c")), rg.Update("b", torch.nn.Tanh(), "a")] * 4
    assert chosen(updates, streams) == "exact"


@pytest.mark.parametrize("setting", SHORT)
def test_default_is_equal_to_the_bit(setting, recovered):
    case = wired("cross", setting, 4)
    found = case.observed("reverse", "auto")
    assert recovered.apart == 0
    assert_equal(found, case.observed("store", "auto"))


class Casts(Fn):
    """Autocast that cannot be seen from outside."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def hidden(fn=None):
    return rg.wirings.leapfrog([Fn(), Fn(), fn or Casts(), Fn()]), {"a": draw(), "b": draw()}


@pytest.mark.parametrize(
    ("memory", "arithmetic"),
    [
        ("reverse", "auto"),
        ("reverse", "float"),
        ("reverse", "exact"),
        ("store", "auto"),
        ("checkpoint", "auto"),
        (rg.StoreLast(2), "auto"),
    ],
    ids=str,
)
def test_hidden_autocast_is_no_fault(memory, arithmetic):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(rg.run(*hidden(), memory=memory, arithmetic=arithmetic)).backward()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fixed", "", "Exact", None])
def test_unknown_name(name):
    with pytest.raises(rg.ProgramError, match=r"unknown arithmetic .*known: auto, exact, float"):
        rg.run(*hidden(), arithmetic=name)
    with pytest.raises(rg.ProgramError, match=r"unknown arithmetic .*known: auto, exact, float"):
        sequence(1, "reverse", name)


class Pair(nn.Module):
    """log_scale and shift."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = Fn(dropout=0.0), Fn(dropout=0.0)

    def forward(self, x):
        return 0.3 * self.scale(x).tanh(), self.shift(x)


def affine():
    return [rg.Update("a", Fn(), "b"), rg.Update("b", Pair(), "a", rule=rg.Affine())]


@store_too
@pytest.mark.parametrize("way", [rg.run, rg.invert])
def test_affine_has_no_exact_form(memory, way):
    which = {rg.run: r"update 1: b \*\+= Pair\(a\)", rg.invert: r"update 0: b undo \*\+= Pair\(a\)"}[way]
    with pytest.raises(rg.ProgramError, match=rf"{which}.*arithmetic='exact' is for additions"):
        way(affine(), {"a": draw(), "b": draw()}, memory=memory, arithmetic="exact")


@pytest.mark.parametrize("memory", ["reverse", "store", "checkpoint"])
def test_affine_in_16_bits(memory):
    """As float, with a warning where it drifts; the stream that is only added to is exact."""
    updates = affine() * 2
    fns = nn.ModuleList({id(u.fn): u.fn for u in updates}.values()).bfloat16()
    streams = {"a": draw(dtype=torch.bfloat16), "b": draw(dtype=torch.bfloat16)}
    wanted = [*streams.values(), *fns.parameters()]

    def make(memory, arithmetic="auto"):
        return rg.run(updates, streams, memory=memory, arithmetic=arithmetic)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = observed(lambda: make(memory), wanted)
    assert not caught or (memory == "reverse" and "drifted" in str(caught[0].message))
    true = observed(lambda: make("store"), wanted)
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.1)


def test_complex_streams():
    a = {name: torch.randn(3, dtype=torch.complex64) for name in "ab"}
    with pytest.raises(rg.ProgramError, match=r"complex numbers.*'a'.*arithmetic='float'"):
        rg.run(rg.wirings.leapfrog([torch.sin, torch.cos]), a, arithmetic="exact")
    nested = {"a": {"x": torch.zeros(3), "z": a["a"]}, "b": torch.zeros(3)}
    with pytest.raises(rg.ProgramError, match=r"complex numbers.*'a'"):
        rg.run([rg.Update("a", lambda x: {"x": x, "z": x + 0j}, "b")], nested, arithmetic="exact")


def test_complex_streams_beside_16_bits():
    """Under auto they are added to in float, and the others exactly."""
    z, x = torch.randn(3, dtype=torch.complex64, requires_grad=True), draw(3, dtype=torch.bfloat16)
    updates = [rg.Update("z", lambda x: x.sin().to(torch.complex64), "x"), rg.Update("x", lambda z: z.real.cos(), "z")] * 4
    results = []
    for memory in ("reverse", "store"):
        out = rg.run(updates, {"z": z, "x": x}, memory=memory)
        results.append(torch.autograd.grad(out["x"].double().sum() + out["z"].abs().sum(), [z, x]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("setting", ["float32", "float64", "bfloat16"])
@store_too
def test_fn_edits_its_source(memory, setting):
    """The same error as under float."""
    messages = []
    for arithmetic in ("exact", "float"):
        torch.manual_seed(0)
        case = Case(setting, rg.wirings.leapfrog([Fn(), lambda x: x.mul_(2).sin(), Fn()]), {"a": draw(), "b": draw()})
        with pytest.raises(rg.ProgramError, match=r"update 1: b \+= <lambda>\(a\): fn edited its source 'a' in place") as info:
            case.out(memory, arithmetic)
        messages.append(str(info.value))
    assert messages[0] == messages[1]


def refused_or_right(step, memory):
    """An error about the edit, or what store gives for the same without one."""
    try:
        found = step(memory, True)
    except RuntimeError as error:
        found = error
    if isinstance(found, RuntimeError):
        assert re.search("in place|inplace", str(found))
    else:
        assert_equal([*found, None], [*step("store", False), None])


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("setting", ["float32", "float64", "bf16 autocast", "bfloat16"])
@every_policy
def test_output_is_edited(memory, setting, name):
    """After the forward pass."""
    case = Case(setting, rg.wirings.leapfrog([Fn(dropout=0.0) for _ in range(6)]), {"a": draw(), "b": draw()})

    def step(memory, edit):
        out = case.out(memory)
        if edit:
            out[name].mul_(3.0)
        else:
            out[name] = out[name] * 3.0
        return torch.autograd.grad(loss_of([t.double() for t in out.values()]), case.wanted)

    refused_or_right(step, memory)


@pytest.mark.parametrize("setting", ["float32", "float64", "bf16 autocast", "bfloat16"])
@every_policy
def test_input_is_edited(memory, setting):
    """The streams that were given, after the forward pass."""
    start = {"a": draw(grad=False), "b": draw(grad=False)}
    case = Case(setting, rg.wirings.leapfrog([Fn(dropout=0.0) for _ in range(6)]), start)

    def step(memory, edit):
        given = {k: t.clone() for k, t in case.streams.items()}
        with amp(case.autocast):
            out = rg.run(case.updates, given, memory=memory, arithmetic="exact")
        if edit:
            for t in given.values():
                t.zero_()
        return torch.autograd.grad(loss_of([t.double() for t in out.values()]), case.wanted)

    refused_or_right(step, memory)


# -- the inverse -------------------------------------------------------------------------------------------------------


BACK = [("bf16 autocast", name, memory) for name in WIRINGS for memory in MEMORIES]
BACK += [(setting, name, "reverse") for setting in SETTINGS for name in ("pair", "cross") if setting != "bf16 autocast"]


@pytest.mark.parametrize(("setting", "name", "memory"), BACK, ids=str)
def test_inverse(memory, name, setting, recovered):
    """Gradients of the inverse are equal to the bit too."""
    case = wired(name, setting, 3)
    found = case.observed(memory, way=rg.invert)
    assert recovered.apart == 0
    assert_equal(found, case.observed("store", way=rg.invert))


@pytest.mark.parametrize("setting", ["float32", "float64"])
@store_too
def test_there_and_back(memory, setting):
    """The output is rounded to the dtype, and fn is run on what is rounded: a few units of the last place."""
    case = wired("pair", setting, 8)
    case.fns.eval()
    out = case.out(memory)
    back = rg.invert(case.updates, out, case.side, memory=memory, arithmetic="exact")
    unit = max(GRID, torch.finfo(torch.float32).eps) if setting == "float32" else FINE
    for name, t in case.streams.items():
        assert (out[name] - t).abs().max() > 0.1
        assert (back[name] - t).abs().max() <= 64 * unit


def test_inverse_of_whole_numbers():
    """Where every number is on the grid and in the dtype, there and back is the identity."""
    fns = [lambda x: (x * 0.37).round() * 2.0**-10 for _ in range(8)]
    first = {"a": (draw(grad=False) * 100).round(), "b": (draw(grad=False) * 100).round()}
    updates = rg.wirings.leapfrog(fns)
    back = rg.invert(updates, rg.run(updates, first, arithmetic="exact"), arithmetic="exact")
    assert all(torch.equal(back[k], first[k]) for k in first)


# -- torch.compile, FSDP -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("setting", ["bf16 autocast", "bfloat16"])
def test_compiled_fns(setting):
    torch._dynamo.reset()
    fns = [Fn(dropout=0.0) for _ in range(4)]
    updates = rg.wirings.leapfrog([torch.compile(fn, backend="aot_eager") for fn in fns])
    case = Case(setting, updates, {"a": draw(), "b": draw()}, fns=fns)
    exact(case, "reverse")
    exact(case, rg.StoreLast(2))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_compiled_around():
    """The whole model, dropout included."""
    torch._dynamo.reset()
    net = sequence(2, "reverse")
    around = torch.compile(lambda x: net(x * 2).sin(), backend="aot_eager")
    x, results = draw(), []
    for net.memory in ("reverse", "store"):
        with amp(torch.bfloat16):
            results.append(observed(lambda: around(x), [x, *net.parameters()]))
    assert_equal(*results)
    torch._dynamo.reset()


SHARDED = ["fns", "pairs", "blocks", "root"]


def sharded(rank, file):
    """One of two gloo processes: under bf16 by FSDP2's mixed precision, the default is exact, and equal to store to the bit."""
    from distributed_worker import HALF, WORLD, Model, several, shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    for where in SHARDED:
        found = {}
        for memory, arithmetic in (("reverse", "auto"), ("store", "auto"), ("store", "exact"), ("reverse", "float")):
            torch.manual_seed(0)
            model = shard(Model(context=True), where, HALF)
            model.net.memory, model.net.arithmetic = memory, arithmetic
            grads = several(model, model, 2, rank)
            found[memory, arithmetic] = [step[name] for step in grads for name in sorted(step)]
        mine = found.pop(("reverse", "auto"))
        equal = {f"{m} {a}": all(map(torch.equal, mine, other)) for (m, a), other in found.items()}
        if rank == 0:
            print("CASE", where, equal, flush=True)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def sharding(tmp_path_factory):
    """What both processes found, by where the net was sharded."""
    command = [sys.executable, __file__]
    file = str(tmp_path_factory.mktemp("gloo") / "rendezvous")
    other = subprocess.Popen([*command, "1", file], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        done = subprocess.run([*command, "0", file], capture_output=True, text=True, timeout=120, check=False)
    finally:
        other.kill()
        other.wait()
    return dict(re.findall(r"^CASE (\w+) (.*)$", done.stdout, flags=re.MULTILINE)), done.stderr[-2000:]


@pytest.mark.parametrize("where", SHARDED)
def test_mixed_precision_of_fsdp(sharding, where):
    found, stderr = sharding
    assert found.get(where) == str({"store auto": True, "store exact": True, "reverse float": False}), stderr


if __name__ == "__main__":
    sharded(int(sys.argv[1]), sys.argv[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("times", [150, 250, 400, 600])
def test_budget_is_kept(times, dtype):
    """The tensors of 64 bits that sums are made of count as well."""
    width, batch = 32, 64
    limit = times * width * batch
    net = rg.ReversibleSequence([(branch32(width), branch32(width)) for _ in range(12)], arithmetic="exact").to(dtype)
    net.memory = rg.Budget(limit)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(batch, width).to(dtype)
    with LiveBytes() as meter:
        net(x).float().square().sum().backward()
    assert 0.7 * limit < meter.peak <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flat_in_depth(dtype):
    peaks = []
    for depth in (4, 16, 64):
        net = rg.ReversibleSequence([(branch32(16), branch32(16)) for _ in range(depth)], arithmetic="exact").to(dtype)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        x = torch.randn(32, 16).to(dtype)
        with LiveBytes() as meter:
            net(x).float().square().sum().backward()
        peaks.append(meter.peak)
    assert max(peaks) <= 1.01 * min(peaks), peaks
    assert meter.live == 0


def branch32(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("where", ["given", "made"])
def test_values_too_small_for_the_grid_are_told(where, dtype):
    """Once in a pass, with the stream's name; streams of ordinary size and zeros are not."""
    scale = 1e-5 if dtype == torch.float32 else 1e-8
    a = torch.rand(8, dtype=dtype) * (scale if where == "given" else 0)
    updates = [rg.Update("a", lambda b: b * scale, "b")] * 2
    with pytest.warns(match="no value of the stream 'a' is above") as caught:
        rg.run(updates, {"a": a, "b": torch.rand(8, dtype=dtype)}, arithmetic="exact")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rg.run(updates, {"a": torch.rand(8, dtype=dtype), "b": torch.zeros(8, dtype=dtype)}, arithmetic="exact")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("memory", ["reverse", rg.Anchor(2), rg.Budget(5000)], ids=str)
def test_what_cannot_be_undone_is_kept(memory, value):
    """NaN or inf in a stream: what lies below is recovered all the same, and the gradients are those of store, finite or not."""
    linear = nn.Linear(4, 4)

    def spoil(b):
        return torch.where(torch.arange(4) == 2, torch.full_like(b, value), b)

    updates = [rg.Update("b", torch.relu, "a"), rg.Update("b", linear, "a"), rg.Update("a", spoil, "b")]
    updates += [rg.Update("b", lambda a: a.nan_to_num(0.5, 0.5, 0.5).tanh(), "a"), rg.Update("a", spoil, "b")]
    found = []
    for policy in ("store", memory):
        torch.manual_seed(0)
        streams = {"a": torch.randn(3, 4, requires_grad=True), "b": torch.randn(3, 4, requires_grad=True)}
        out = rg.run(updates, streams, memory=policy, arithmetic="exact")
        found.append(torch.autograd.grad(out["b"].square().sum(), [*streams.values(), *linear.parameters()]))
    assert all(g.isfinite().all() for g in found[0])
    assert all(map(torch.equal, *found))
