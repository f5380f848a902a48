"""arithmetic="exact": recovered streams are the same bits, so every gradient equals that of memory="store" to the bit."""

import copy
import functools

import pytest
import torch
from exact_support import (
    DRIFTS,
    FINE,
    GRID,
    MEMORIES,
    SETTINGS,
    SHORT,
    Case,
    Fn,
    assert_equal,
    cast,
    draw,
    every_setting,
    exact,
    same,
    store_too,
    wired,
)
from support import POLICIES, every_pair, loss_of, name_of, rg
from torch import nn
from trees import TREES, Tree

from retrograde.bench.meter import LiveBytes

WIRINGS = ["pair", "dual", "cross", "leapfrog", "three in turn", "groups"]


# -- equal to the bit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "name", "memory"), every_pair(SETTINGS, WIRINGS, MEMORIES), ids=name_of)
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


@pytest.mark.parametrize(("setting", "memory"), every_pair(SETTINGS, MEMORIES), ids=name_of)
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
