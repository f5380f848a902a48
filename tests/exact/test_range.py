"""Exact arithmetic: resolution, the range of streams, NaN and inf."""

import math
import re
import warnings

import pytest
import torch
from exact_support import (
    FINE,
    GRID,
    LIMIT,
    MEMORIES,
    ROWS,
    SETTINGS,
    Case,
    Fn,
    assert_equal,
    cast,
    draw,
    every_policy,
    every_setting,
    exact,
    observed,
    store_too,
)
from support import WIDTH, rg
from torch import nn

from retrograde.errors import OutOfRange

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
