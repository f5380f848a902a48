"""Verification by value: faults whose gradients are wrong are reported, sound nets are not."""

import contextlib
import gc
import math
import os
import random
import warnings
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import draw, loss_of, rg
from torch import nn

WIDTH, ROWS = 6, 8
GLOBAL = {"factor": 1.0}
VARIABLE = "RETROGRADE_TEST_FACTOR"
SETTINGS = settings(deadline=None, derandomize=True, max_examples=30, database=None)


# -- faults ------------------------------------------------------------------------------------------------------------


def counter(fn, y):
    fn.calls += 1
    return y * (1 + 0.3 * fn.calls)


def memory_of_the_last(fn, y):
    y, fn.last = y + 0.5 * fn.last, y.detach()
    return y


def moving_average(fn, y):
    fn.last = 0.7 * fn.last + 0.3 * y.detach()
    return y - fn.last


def growing_list(fn, y):
    fn.items.append(1)
    return y * len(fn.items)


def rows_shuffled(fn, y):
    fn.calls += 1
    return y.roll(fn.calls, 0)


def channels_shuffled(fn, y):
    order = list(range(WIDTH))
    random.shuffle(order)
    return y[:, order]


FAULTS = {  # what fn does, and what happens after the forward pass
    "counter": (counter, None),
    "memory": (memory_of_the_last, None),
    "moving average": (moving_average, None),
    "list": (growing_list, None),
    "Python's random": (lambda fn, y: y * random.uniform(0.5, 2), None),
    "numpy's random": (lambda fn, y: y + torch.from_numpy(np.random.randn(*y.shape)).to(y), None),
    "flag": (lambda fn, y: y.sin() if fn.flag else y.exp(), lambda fn: setattr(fn, "flag", False)),
    "dropout.p": (lambda fn, y: fn.drop(y), lambda fn: setattr(fn.drop, "p", 0.8)),
    "mask": (lambda fn, y: y * fn.mask.to(y), lambda fn: setattr(fn, "mask", ~fn.mask)),
    "mask, edited": (lambda fn, y: y * fn.mask.to(y), lambda fn: fn.mask.logical_not_()),
    "global": (lambda fn, y: y * GLOBAL["factor"], lambda fn: GLOBAL.update(factor=1.7)),
    ".data of a weight": (lambda fn, y: y, lambda fn: fn.inner.weight.data.mul_(1.5)),
    ".data of a bias": (lambda fn, y: y, lambda fn: fn.inner.bias.data.add_(1.5)),
    "environment": (lambda fn, y: y * float(os.environ[VARIABLE]), lambda fn: os.environ.update({VARIABLE: "0.4"})),
    "rows": (rows_shuffled, None),
    "channels": (channels_shuffled, None),
    "a hook": (lambda fn, y: y, lambda fn: fn.inner.register_forward_hook(lambda m, a, out: out.flip(0))),
}


class Branch(nn.Module):
    def __init__(self, scale, kind=None):
        super().__init__()
        self.inner, self.drop, self.scale, self.kind = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), scale, kind
        self.calls, self.last, self.items, self.flag = 0, torch.zeros(()), [], True
        self.mask = torch.rand(ROWS, WIDTH) > 0.4

    def forward(self, x):
        y = self.inner(x).tanh()
        return self.scale * (y if self.kind is None else FAULTS[self.kind][0](self, y))


@dataclass(frozen=True)
class Case:
    kind: str
    depth: int
    at: int  # the faulty update, as a share of the recomputed ones
    scale: float
    dtype: torch.dtype
    arithmetic: str
    memory: object
    seed: int

    def gradients(self, memory, verify):
        """Of all parameters together, from the same state."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)
        GLOBAL["factor"], os.environ[VARIABLE] = 1.0, "1.0"
        fns = [Branch(self.scale) for _ in range(self.depth)]
        faulty = fns[self.at % (self.depth - 2)]  # StoreLast(2) recomputes these
        faulty.kind = self.kind
        net = rg.Reversible(rg.wirings.leapfrog(fns), memory=memory, arithmetic=self.arithmetic, verify=verify).to(self.dtype)
        given = {name: torch.randn(ROWS, WIDTH, dtype=self.dtype) for name in "ab"}
        loss = loss_of(net(given))
        if (change := FAULTS[self.kind][1]) is not None:
            change(faulty)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]).double()

    def reported(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.gradients(self.memory, "error")
            except rg.ReplayError as error:
                return f"update {self.at % (self.depth - 2)}: " in str(error)
        return any("when backward ran fn again" in str(one.message) for one in caught)


BUDGET = rg.Budget(20 * ROWS * WIDTH * 8)  # enough to store some updates and not all
CASES = st.builds(
    Case,
    kind=st.sampled_from(sorted(FAULTS)),
    depth=st.integers(4, 9),
    at=st.integers(0, 8),
    scale=st.sampled_from([1.0, 1e-2, 1e-4]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    arithmetic=st.sampled_from(["float", "exact"]),
    memory=st.sampled_from(["reverse", "checkpoint", rg.Anchor(3), rg.StoreLast(2), BUDGET]),
    seed=st.integers(0, 999),
)


@pytest.mark.parametrize("kind", sorted(FAULTS))
@settings(SETTINGS, max_examples=15)
@given(case=CASES)
def test_faults_are_reported(kind, case):
    """If gradients are off by 1e-2 or more."""
    case = Case(**{**vars(case), "kind": kind})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small branches are near the grid of exact arithmetic
        true, found = case.gradients("store", "off"), case.gradients(case.memory, "off")
    if float((found - true).norm() / true.norm()) >= 1e-2:
        assert case.reported()


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_the_property_is_not_empty(arithmetic, scale):
    """Most of these faults do make gradients wrong, and are reported."""
    count = 0
    for kind in FAULTS:
        case = Case(kind, 6, 1, scale, torch.float64, arithmetic, "reverse", 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            true, found = case.gradients("store", "off"), case.gradients("reverse", "off")
        wrong = float((found - true).norm() / true.norm()) >= 1e-2
        count += wrong
        assert case.reported() >= wrong, kind
    assert count >= 8


def test_what_a_budget_recomputes_is_verified():
    fns = [Branch(1.0) for _ in range(8)]
    fns[0].kind = "counter"
    size = ROWS * WIDTH * 4
    out = rg.run(
        rg.wirings.leapfrog(fns), {"a": torch.randn(ROWS, WIDTH), "b": torch.randn(ROWS, WIDTH)}, memory=rg.Budget(14 * size)
    )
    with pytest.raises(rg.ReplayError, match=r"update 0: a \+= Branch\(b\)"):
        loss_of(out).backward()


@pytest.mark.parametrize("kind", ["counter", "Python's random", "flag"])
def test_modes_of_verification(kind):
    case = Case(kind, 6, 1, 1.0, torch.float64, "float", "reverse", 0)
    with pytest.raises(
        rg.ReplayError, match=r"update 1: .* returned something else than in the forward pass \(relative difference"
    ):
        case.gradients("reverse", "error")
    with pytest.warns(UserWarning, match=r"update 1: .* returned something else") as caught:
        case.gradients("reverse", "warn")
    assert len(caught) == 1
    case.gradients("reverse", "off")


# -- rules of users ----------------------------------------------------------------------------------------------------


class Scale(rg.Rule):
    """target * (1 + tanh(out) / 2); its undo may be wrong."""

    def __init__(self, wrong=0.0):
        self.wrong = wrong

    def apply(self, target, out):
        return target * (1 + out.tanh() / 2)

    def undo(self, target, out):
        return target / (1 + out.tanh() / 2) * (1 + self.wrong)


class Subtly(rg.Add):
    """An addition whose undo forgets a row."""

    saves = False

    def undo(self, target, out):
        return torch.cat((target[:1], target[1:] - out[1:]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", [Scale(0.5), Subtly()], ids=["scale", "addition"])
def test_a_wrong_undo_is_reported(rule, dtype):
    """Also where no fn below reads the target again, so that no output of a fn shows it."""
    fns = [nn.Linear(WIDTH, WIDTH).to(dtype) for _ in range(3)]
    for updates in (
        [rg.Update("a", fns[0], "b"), rg.Update("b", fns[1], "a", rule=rule), rg.Update("a", fns[2], "b")],
        [rg.Update("a", fns[0], "b", rule=rule)],
        [rg.Update("a", fns[0], "c"), rg.Update("b", fns[1], "c", rule=rule)],
    ):
        given = {name: torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True) for name in "abc"}
        where = next(i for i, update in enumerate(updates) if update.rule is rule)
        with pytest.raises(rg.ReplayError, match=rf"update {where}: .*undo of the rule does not give back the target"):
            loss_of(rg.run(updates, given)).backward()


class Plus(rg.Rule):
    """An addition, as a user would write it."""

    def apply(self, target, out):
        return target + out

    def undo(self, target, out):
        return target - out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("start", ["ordinary", "zero", "tiny", "embeddings"])
@pytest.mark.parametrize("rule", [Scale(), Plus()], ids=["scale", "addition"])
def test_a_right_undo_is_not_reported(rule, start, dtype):
    """Also where the target starts at zero, so that whatever rounding leaves there is more."""
    torch.manual_seed(0)
    fns = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(dtype) for _ in range(96)]
    updates = [rg.Update(u.target, u.fn, u.sources, rule=rule) for u in rg.wirings.leapfrog(fns)]
    streams = {"a": torch.randn(ROWS, WIDTH, dtype=dtype), "b": START[start]((ROWS, WIDTH)).to(dtype)}
    loss_of(rg.run(updates, streams)).backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_scale_near_zero_is_reported(dtype):
    """It loses the target, and what is below is recomputed on something else, of any size."""

    class Vanishing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype)

        def forward(self, x):
            scale, shift = self.linear(x).tanh().chunk(2, -1)
            return scale - (20 if dtype == torch.float32 else 40), shift

    updates = [rg.Update("ab"[i % 2], Vanishing(), "ba"[i % 2], rule=rg.Affine()) for i in range(2)]
    streams = {name: torch.randn(ROWS, WIDTH, dtype=dtype) for name in "ab"}
    with pytest.raises(rg.ReplayError, match=r"update 0: .* returned something else"):
        loss_of(rg.run(updates, streams)).backward()


# -- sound nets --------------------------------------------------------------------------------------------------------


def mlp(width, gain=1.0, norm=True):
    made = nn.Sequential(
        nn.LayerNorm(width) if norm else nn.Identity(), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
    )
    with torch.no_grad():
        made[3].weight.mul_(gain)
    return made


START = {
    "ordinary": lambda shape: torch.randn(shape),
    "zero": torch.zeros,
    "tiny": lambda shape: 1e-12 * torch.randn(shape),
    "embeddings": lambda shape: 0.02 * torch.randn(shape),
    "large": lambda shape: 50 * torch.randn(shape),
    "one large channel": lambda shape: torch.randn(shape) * torch.tensor([200.0] + [1.0] * (shape[-1] - 1)),
}


def prenorm(start, depth, gain, dtype, arithmetic, memory, seed):
    """Gradients of a net of pre-norm branches, for verify="off" or another."""

    def gradients(memory, verify):
        torch.manual_seed(seed)
        net = rg.Reversible(rg.wirings.leapfrog([mlp(16, gain) for _ in range(depth)]), memory=memory, arithmetic=arithmetic)
        net.to(dtype).verify = verify
        streams = {name: START[kind]((ROWS, 16)).to(dtype) for name, kind in zip("ab", start, strict=True)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no value of the stream")  # of exact arithmetic, about tiny streams
            return torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(net(streams)), list(net.parameters()))])

    return gradients


NETS = {
    "depth": st.sampled_from([2, 8, 32, 96, 192]),
    "gain": st.sampled_from([1e-4, 0.1, 1.0, 2.0, 6.0]),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "arithmetic": st.sampled_from(["float", "exact"]),
    "memory": st.sampled_from(["reverse", "checkpoint", rg.Anchor(5), rg.StoreLast(3)]),
    "seed": st.integers(0, 99),
}


@SETTINGS
@given(start=st.tuples(*[st.sampled_from(["ordinary", "embeddings", "large", "one large channel"])] * 2), **NETS)
@example(("embeddings", "embeddings"), 96, 1.0, torch.float32, "float", "reverse", 0)
@example(("ordinary", "ordinary"), 192, 6.0, torch.float32, "float", "reverse", 0)
@example(("ordinary", "zero"), 96, 1.0, torch.float32, "float", "reverse", 0)
@example(("tiny", "ordinary"), 32, 1.0, torch.float32, "float", "reverse", 0)
def test_sound_nets_are_not_reported(start, depth, gain, dtype, arithmetic, memory, seed):
    """Neither by an error nor by a warning."""
    prenorm(start, depth, gain, dtype, arithmetic, memory, seed)(memory, "error")


@SETTINGS
@given(start=st.tuples(st.sampled_from(sorted(START)), st.sampled_from(["zero", "tiny"])), **NETS)
def test_nets_that_start_at_zero_are_not_refused(start, depth, gain, dtype, arithmetic, memory, seed):
    """A norm of zeros makes much of little: such nets do drift. There is no error where their gradients are good."""
    gradients = prenorm(start, depth, gain, dtype, arithmetic, memory, seed)
    true, found = gradients("store", "off"), gradients(memory, "off")
    if float((found - true).norm() / true.norm()) < 1e-3:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* slightly different")
            gradients(memory, "error")


def test_256_blocks():
    torch.manual_seed(0)
    net = rg.ReversibleSequence([(mlp(16), mlp(16)) for _ in range(256)])
    net(torch.randn(ROWS, 16)).square().sum().backward()


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_leaves_of_every_kind(arithmetic):
    """Empty, zero and whole-number leaves; complex ones have no exact form."""

    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4).double()

        def forward(self, x):
            y = {"real": self.linear(x["real"]).tanh(), "empty": x["empty"] * 2, "zero": x["zero"] * 0, "count": x["count"] // 2}
            return y | ({"complex": x["complex"].sin() * 0.1} if "complex" in x else {})

    def tree():
        made = {"real": draw(3, 4), "empty": draw(0, 4), "zero": draw(3, 4, grad=False) * 0, "count": torch.arange(12)}
        return made | ({"complex": torch.randn(5, dtype=torch.complex128)} if arithmetic == "float" else {})

    fns = [Leaves() for _ in range(6)]
    out = rg.run(rg.wirings.leapfrog(fns), {"a": tree(), "b": tree()}, arithmetic=arithmetic)
    sum(loss_of(one["real"]) for one in out.values()).backward()


@pytest.mark.parametrize("leaf", ["real", "count", "complex", "second"])
def test_every_leaf_is_verified(leaf):
    """A fault in one of them alone."""

    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            y = {name: t.sin() if t.is_floating_point() or t.is_complex() else t // 2 for name, t in x.items()}
            self.calls += 1
            y[leaf] = y[leaf] + self.calls
            return y

    def tree():
        numbers = {"real": draw(3, 4), "second": draw(7), "count": torch.arange(12)}
        return numbers | {"complex": torch.randn(5, dtype=torch.complex128)}

    out = rg.run(rg.wirings.leapfrog([Leaves(), Leaves()]), {"a": tree(), "b": tree()})
    with pytest.raises(rg.ReplayError, match="returned something else"):
        loss_of(out["b"]["real"]).backward()


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_other_elements_are_masked(value, memory):
    """With NaN or -inf: the elements that are left do not tell."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.mask = nn.Linear(WIDTH, WIDTH).double(), torch.arange(WIDTH) < 2

        def forward(self, x):
            return self.linear(torch.where(x.isfinite(), x, 0.0)).tanh().masked_fill(self.mask, value)

    fns = [Masked() for _ in range(4)]
    out = rg.run(rg.wirings.leapfrog(fns), {"a": draw(ROWS, WIDTH), "b": draw(ROWS, WIDTH)}, memory=memory)
    fns[1].mask = torch.arange(WIDTH) < 4
    with pytest.raises(rg.ReplayError, match=r"update 1: .* \(other elements are NaN or infinite\)"):
        sum(torch.where(t.isfinite(), t, 0.0).square().sum() for t in out.values()).backward()


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@pytest.mark.parametrize(("rows", "size"), [(4000, 1.0), (2, 1000.0)])
def test_a_fault_in_a_small_leaf(rows, size, memory, arithmetic):
    """A leaf of few or small elements beside one of many or large ones is verified by itself."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.turned = nn.Linear(4, 4), False

        def forward(self, x):
            small = x["small"].flip(0) if self.turned else x["small"]
            return {"small": self.linear(small).tanh(), "large": (x["large"] / size).sin() * size}

    fns = [Two() for _ in range(4)]
    streams = {name: {"small": torch.randn(2, 4), "large": size * torch.randn(rows, 4)} for name in "ab"}
    out = rg.run(rg.wirings.leapfrog(fns), streams, memory=memory, arithmetic=arithmetic)
    fns[1].turned = True
    with pytest.raises(rg.ReplayError, match=r"update 1: .* returned something else"):
        sum(tree["small"].sin().sum() for tree in out.values()).backward()


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_sketches_add_no_tensor_per_update(memory):
    def alive(depth, verify):
        """Tensors between the forward pass and backward."""
        net = rg.Reversible(rg.wirings.leapfrog([Branch(1.0) for _ in range(depth)]), memory=memory, verify=verify)
        out = net({name: torch.randn(ROWS, WIDTH) for name in "ab"})
        gc.collect()
        count = sum(type(one) is torch.Tensor for one in gc.get_objects())
        loss_of(out).backward()
        return count

    alive(2, "error")  # makes the weights of the sketches
    more = [alive(depth, "error") - alive(depth, "off") for depth in (2, 32)]
    assert more[0] == more[1]


# -- on devices --------------------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    """The path of devices, on a CPU: no tensor says that it is on one, so sketches go into tables and are compared later."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda t: False), raising=False)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("leaf", ["small", "large", None])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", rg.Anchor(2)], ids=str)
def test_the_next_forward_pass_reports(memory, leaf):
    fns = [Turns(leaf) for _ in range(4)]
    net = rg.Reversible(rg.wirings.leapfrog(fns), memory=memory, arithmetic="exact")
    streams = {name: {"small": torch.randn(2, 4), "large": (1000 * torch.randn(5, 4)).requires_grad_()} for name in "ab"}

    def step():
        sum(t.sin().sum() for tree in net(streams).values() for t in tree.values()).backward()

    step()
    out = net(streams)
    fns[1].turned = True
    sum(t.sin().sum() for tree in out.values() for t in tree.values()).backward()
    said = r"update 1: .* returned something else .* one optimizer step may have used them"
    with contextlib.nullcontext() if leaf is None else pytest.raises(rg.ReplayError, match=said):
        step()


class Turns(nn.Module):
    """Exchanges the rows of one leaf from some time on."""

    def __init__(self, leaf):
        super().__init__()
        self.linear, self.leaf, self.turned = nn.Linear(4, 4), leaf, False

    def forward(self, x):
        if self.turned and self.leaf is not None:
            x = x | {self.leaf: x[self.leaf].flip(0)}
        return {"small": self.linear(x["small"]).tanh(), "large": (x["large"] / 1000).sin() * 1000}


@pytest.mark.usefixtures("device")
def test_what_waits_to_be_compared_keeps_no_module_alive():
    net = rg.ReversibleSequence([(nn.Linear(4, 4), nn.Tanh())])
    net(torch.randn(2, 4)).sum().backward()
    gone = weakref.ref(net.blocks[0].f)
    del net
    gc.collect()
    assert gone() is None


# -- drift -------------------------------------------------------------------------------------------------------------


def drifting(gain, dtype, depth, arithmetic, memory="reverse"):
    """Sketches, gradients and what was said, of a net whose activations grow."""
    torch.manual_seed(0)
    fns = [mlp(16, gain, norm=False) for _ in range(depth)]
    found = []
    for policy in ("store", memory):
        net = rg.Reversible(rg.wirings.leapfrog(fns), memory=policy, arithmetic=arithmetic).to(dtype)
        torch.manual_seed(1)
        out = net({name: torch.randn(ROWS, 16).to(dtype) for name in "ab"})
        net.verify = "off"
        loss = sum(t.double().sin().sum() for t in out.values())
        found.append(torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
    return float((found[1] - found[0]).norm() / found[0].norm())


@pytest.mark.parametrize(
    ("dtype", "arithmetic"), [(torch.float32, "float"), (torch.bfloat16, "float"), (torch.float16, "float")], ids=str
)
def test_drift_is_reported_in_time(dtype, arithmetic):
    """Before the gradients of all parameters together are off by 5e-2: a warning or an error."""
    largest = 0.0
    for gain in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
        for depth in (4, 8, 16, 24, 32, 48):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    error = drifting(gain, dtype, depth, arithmetic)
                except rg.ReplayError:
                    break
            if any("drifted" in str(one.message) for one in caught):
                continue
            assert not error >= 5e-2, (gain, depth, error)
            largest = max(largest, error)
        else:
            continue
    assert math.isfinite(largest)


def test_drift_warns_once_per_program_and_names_the_way_out():
    torch.manual_seed(0)
    fns, given = [nn.Linear(16, 16) for _ in range(80)], {name: torch.randn(ROWS, 16) for name in "ab"}

    def steps(net):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                sum(t.sin().sum() for t in net(given).values()).backward()
        return [str(one.message) for one in caught]

    (warned,) = steps(rg.Reversible(rg.wirings.leapfrog(fns), verify="warn"))
    assert "inputs of fn have drifted" in warned
    assert "arithmetic='exact'" in warned
    assert not steps(rg.Reversible(rg.wirings.leapfrog(fns), arithmetic="exact"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", rg.Anchor(5)], ids=str)
def test_sketches_agree_to_the_bit_under_exact_arithmetic(memory, dtype, monkeypatch):
    seen = []
    from retrograde._engine import verify

    of_outputs, of_saved = verify.Verification.compare, verify.Verification._compare

    def noting(self, record, row, *rest):
        seen.append(record.row == row)
        of_outputs(self, record, row, *rest)

    def noting_saved(self, at, first, second, *rest):
        seen.append(first == second)
        of_saved(self, at, first, second, *rest)

    if memory == "checkpoint":  # what fns saved is compared
        monkeypatch.setattr(verify.Verification, "_compare", noting_saved)
    else:
        monkeypatch.setattr(verify.Verification, "compare", noting)
    torch.manual_seed(0)
    net = rg.Reversible(rg.wirings.leapfrog([mlp(16, 2.0) for _ in range(48)]), memory=memory, arithmetic="exact").to(dtype)
    loss = net({name: torch.randn(ROWS, 16).to(dtype) for name in "ab"})
    sum(t.double().sin().sum() for t in loss.values()).backward()
    assert len(seen) == 48
    assert all(seen)
