"""Additions on CUDA that take a sketch of what is added: the bits of torch's own, and numbers that show a change."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from retrograde._exact import cuda as fused
from retrograde._exact.range import Ledger

pytestmark = pytest.mark.gpu
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.float64]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
SIZES = [0, 1, 31, 4095, 4096, 4097, 100_003, 1 << 20]
SQUARES, TARGET, INFINITE, NAN = 4, 5, 6, 7  # columns

every_sign = pytest.mark.parametrize("sign", [1, -1])


def draw(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def rows(count=1):
    return torch.zeros(count, 8, dtype=torch.float64, device="cuda")


def sketch(t, number=0):
    table = rows(3)
    assert fused.sketch(t, number, table[1])
    assert not table[0].any()
    assert not table[2].any()
    return table[1]


def apart(a, b):
    """Of two sketches, relative to the first, as an estimate of the distance of what they were taken of."""
    return ((a[:4] - b[:4]).square().mean() / a[SQUARES]).sqrt().item()


def assert_close(a, b, tolerance=1e-9):
    assert (a - b)[:4].abs().max() <= tolerance * a[SQUARES].sqrt()
    assert torch.allclose(a[4:], b[4:], rtol=tolerance, atol=0)


def same_bits(a, b):
    whole = torch.int32 if a.dtype == torch.float32 else torch.int16
    assert a.dtype == b.dtype
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()].view(whole), b[~b.isnan()].view(whole))


# -- a tensor ----------------------------------------------------------------------------------------------------------


def hashed(h):
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def expected(t, number):
    """By the definition, in float64 on the CPU."""
    t = t.cpu().double().flatten()
    at = torch.arange(t.numel())
    key = hashed(torch.tensor((number * 0x9E3779B1 + 1) & 0xFFFFFFFF))
    bits = hashed(((at >> 3) + key) & 0xFFFFFFFF) >> (4 * (at & 7))
    finite = t.isfinite()
    kept = torch.where(finite, t, 0.0)
    found = [((1 - 2 * ((bits >> (3 - k)) & 1)) * kept).sum() for k in range(4)]
    return torch.stack([*found, kept.square().sum(), 0 * kept.sum(), t.isinf().sum().double(), t.isnan().sum().double()]).cuda()


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", [*DTYPES, *WHOLE], ids=str)
def test_definition(dtype, count):
    t = draw(count, scale=3).to(dtype)
    for number in (0, 1, 7):
        assert_close(expected(t, number), sketch(t, number), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tensors(dtype):
    t = draw(1000, 1001, dtype=dtype)
    assert_close(sketch(t), sketch(t.clone()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (1000, 1024)])
def test_exchanges(shape, dtype):
    """Of rows, of channels, and of elements, near and far. (Of two elements all four signs agree for one pair in 16.)"""
    t = draw(*shape, dtype=dtype)
    first, channels, missed = sketch(t), list(range(shape[1])), 0
    for a, b in [(0, 1), (2, 3), (5, 40), (0, shape[1] - 1)]:
        channels[a], channels[b] = channels[b], channels[a]
        assert apart(first, sketch(t[:, channels])) > 1e-2
        channels[a], channels[b] = channels[b], channels[a]
    for a, b in [(0, 1), (2, 3), (5, 40), (0, shape[0] - 1)]:
        other = t.clone()
        other[a], other[b] = t[b], t[a]
        assert apart(first, sketch(other)) > 1e-3 * (shape[0] < 100) + 1e-2 / shape[0] ** 0.5
        other = t.clone()
        other[0, a], other[1, b] = t[1, b], t[0, a]
        missed += (sketch(other) - first)[:4].abs().max().item() < 1e-4
    assert missed <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_size_of_a_change(dtype):
    """Estimated without bias, whatever is changed, and in nearly all cases within a factor of three."""
    shape = (128, 256)
    changes = [
        torch.randn(*shape, device="cuda", dtype=torch.float64),
        torch.ones(*shape, device="cuda", dtype=torch.float64),
        torch.randn(128, 1, device="cuda", dtype=torch.float64).expand(shape),
        torch.randn(256, device="cuda", dtype=torch.float64).expand(shape),
        (torch.arange(256, device="cuda") == 77).double().expand(shape),
        (torch.arange(128, device="cuda") == 77).double()[:, None].expand(shape),
    ]
    for change in changes:
        found = []
        for seed in range(60):
            t = draw(*shape, dtype=dtype)
            other = (t.double() + 1e-2 * change * t.double().norm() / change.norm()).to(dtype)
            true = (t.double() - other.double()).norm() / t.double().norm()
            found.append(apart(sketch(t, seed), sketch(other, seed)) / true.item())
        ratios = torch.tensor(found)
        assert 0.8 < ratios.square().mean().sqrt() < 1.2
        assert ((ratios > 1 / 3) & (ratios < 3)).float().mean() > 0.85


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_are_counted(dtype):
    t = draw(10_007, dtype=dtype)
    without = t.clone()
    places = torch.tensor([3, 4, 5000, 9000, 10_006], device="cuda")
    t[places] = torch.tensor([torch.inf, torch.nan, -torch.inf, torch.nan, torch.nan], device="cuda").to(dtype)
    without[places] = 0
    found = sketch(t)
    assert found[[INFINITE, NAN]].tolist() == [2, 3]
    found[[INFINITE, NAN]] = 0
    assert_close(found, sketch(without), 1e-6)
    assert sketch(torch.full((5000,), torch.nan, device="cuda", dtype=dtype)).tolist() == [0] * 7 + [5000]
    assert not sketch(torch.zeros(5000, device="cuda", dtype=dtype)).any()


@pytest.mark.parametrize("scale", [1e-37, 1e-25, 1e25, 1e37])
def test_squares_beyond_float32(scale):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        t = draw(5000, dtype=dtype, scale=scale)
        assert_close(expected(t, 2), sketch(t, 2), 1e-6)


def test_numbers_of_leaves():
    """They have other weights, and add up in a row."""
    a, b = draw(5000), draw(300, 7, dtype=torch.bfloat16)
    assert apart(sketch(a, 0), sketch(a, 1)) > 0.1
    row = rows()[0]
    assert fused.sketch(a, 0, row)
    assert fused.sketch(b, 1, row)
    assert_close(sketch(a, 0) + sketch(b, 1), row)
    assert apart(sketch(a, 0) + sketch(a * 2, 1), sketch(a * 2, 0) + sketch(a, 1)) > 0.1


def test_layouts():
    """Positions are those in the shape."""
    t = draw(6, 5, 4, 3)
    for other in (
        t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        t.to(memory_format=torch.channels_last),
        torch.stack((t, t), -1)[..., 0],
        torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape),  # not aligned
    ):
        assert_close(sketch(t), sketch(other), 1e-6)  # blocks of another layout are added up in another order
    assert_close(sketch(t[0, 0, 0, 0].expand(100).contiguous()), sketch(t[0, 0, 0, 0].expand(100)))
    assert sketch(t[0, 0, 0, 0])[SQUARES] > 0


def test_more_than_two_to_the_31():
    """Positions do not wrap around."""
    t = torch.zeros(2**32 + 2**20, dtype=torch.bfloat16, device="cuda")
    found = []
    for place in (5, 2**31 + 5, 2**32 + 5, 2**32 + 13):
        t[place] = 1
        found.append(sketch(t))
        t[place] = 0
    assert all(row[SQUARES] == 1 and (row[:4].abs() == 1).all() for row in found)
    assert len({tuple(row.tolist()) for row in found}) > 1


def test_where_no_kernel_can():
    row = rows()[0]
    for t in (
        draw(8).cpu(),
        torch.zeros(8, dtype=torch.complex64, device="cuda"),
        draw(8).as_subclass(type("Own", (Tensor,), {})),
    ):
        assert not fused.sketch(t, 0, row)
    assert not row.any()


# -- target += part, in floating point ---------------------------------------------------------------------------------


PAIRS = [pair for pair in itertools.product(FLOATS, FLOATS) if pair != (torch.float16, torch.bfloat16)]  # left to torch


def plain(target, part, sign):
    return (target + part if sign > 0 else target - part).to(target.dtype)


@every_sign
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(("own", "other"), PAIRS, ids=str)
def test_add(own, other, count, sign):
    """The bits of torch's addition; the sketch and the size beside it, or not."""
    for scale in (1e-6, 1.0, 3e4):
        target, part = draw(count, dtype=own), draw(count, dtype=other, scale=scale)
        row = rows()[0]
        new = fused.add(target, part, sign, 3, row)
        assert same_bits(new, plain(target, part, sign))
        assert same_bits(fused.add(target, part, sign), new)
        kept = part.double().isfinite()
        found = expected(part, 3)
        found[TARGET] = target.double().square().sum()
        assert_close(found, row, 1e-5)
        assert row[INFINITE] == count - kept.sum()


@every_sign
@pytest.mark.parametrize(("own", "other"), PAIRS, ids=str)
def test_add_with_nan_and_inf(own, other, sign):
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 6e4, -6e4, 1e-7, 1e-40, 3e38], device="cuda")
    target, part = (t.contiguous() for t in torch.broadcast_tensors(special.to(own)[:, None], special.to(other)))
    row = rows()[0]
    assert same_bits(fused.add(target, part, sign, 0, row), plain(target, part, sign))
    assert_close(expected(part, 0)[[0, 1, 2, 3, 4, 6, 7]], row[[0, 1, 2, 3, 4, 6, 7]], 1e-5)
    assert torch.allclose(row[TARGET], torch.where(target.isfinite(), target, 0).double().square().sum())


def test_add_is_the_same_both_ways():
    """First run and undo, whatever the target is; and without an addition."""
    for own, other in PAIRS:
        part, (a, b) = draw(70_001, dtype=other), rows(2)
        fused.add(draw(70_001, dtype=own), part, 1, 4, a)
        fused.add(draw(70_001, dtype=own), part, -1, 4, b)
        a[TARGET] = b[TARGET] = 0
        assert_close(a, b)
        assert_close(a, sketch(part, 4))


@every_sign
@pytest.mark.parametrize(("own", "other"), PAIRS, ids=str)
def test_gradient_of_add(own, other, sign):
    """That of addition, twice differentiable; nothing is saved."""
    target, part = draw(100, dtype=own).requires_grad_(), draw(100, dtype=other).requires_grad_()
    results = []
    for make in (lambda: fused.add(target, part, sign, 0, rows()[0]), lambda: plain(target, part, sign)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
            new = make()
        assert not kept
        first = torch.autograd.grad((new.sin() * 2).sum(), [target, part], create_graph=True)
        second = torch.autograd.grad(first[0].sum() + first[1].float().square().sum(), [target, part])
        results.append([new.detach(), *first, *second])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_gradients_of_one_side():
    target, part, row = draw(64), draw(64, dtype=torch.bfloat16).requires_grad_(), rows()[0]
    fused.add(target, part, -1, 0, row).sum().backward()
    assert torch.equal(part.grad, -torch.ones_like(part))
    assert target.grad is None
    target.requires_grad_()
    fused.add(target, part.detach(), -1, 0, row).sum().backward()
    assert torch.equal(target.grad, torch.ones_like(target))
    with torch.no_grad():
        assert not fused.add(target, part, 1, 0, row).requires_grad


def test_where_add_is_left_to_torch():
    row, t = rows()[0], draw(8, 8)
    others = [t.t(), t.double(), t.cpu(), t[0], t.to(torch.complex64), t.long(), t.as_subclass(type("Own", (Tensor,), {}))]
    assert fused.add(t.half(), t.bfloat16(), 1, 0, row) is None
    for other in (*others, torch._neg_view(t)):
        assert fused.add(t, other, 1, 0, row) is None
        assert fused.add(other, t, 1, 0, row) is None
    with torch.autograd.forward_ad.dual_level():
        assert fused.add(t, t, 1, 0, row) is None
    assert torch.func.vmap(lambda x: x * (fused.add(x, x, 1, 0, row) is None))(t).equal(t)
    assert not row.any()
    assert fused.add(nn.Parameter(t), t, 1, 0, row) is not None


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger():
    return Ledger([], ["a"])


@every_sign
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
def test_exact(dtype, count, sign, ledger):
    """The same bits with a sketch and without."""
    high, low = fused.split(draw(count), None)
    part = draw(count, scale=3).to(dtype)
    for given in (None, ledger):
        row = rows()[0]
        new = fused.plus(high, low, part, sign, given, (row, 5))
        for a, b in zip(new, fused.plus(high, low, part, sign, given), strict=True):
            assert torch.equal(a, b)
        assert_close(expected(part, 5), row, 1e-5)
        assert_close(sketch(part, 5), row, 1e-6)
    assert not count or not ledger.flags_on(high.device).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_layouts(dtype):
    """The sketch does not depend on them."""
    base, part = draw(2, 3, 4, 5), draw(2, 3, 4, 5, dtype=dtype)
    for stream in (base, base.to(memory_format=torch.channels_last), base.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)):
        high, low = fused.split(stream, None)
        assert high.stride() == stream.stride()
        for given in (part, part.to(memory_format=torch.channels_last), torch.stack((part, part), -1)[..., 1]):
            row = rows()[0]
            new = fused.plus(high, low, given, 1, None, (row, 2))
            for a, b in zip(new, fused.plus(high, low, given, 1, None), strict=True):
                assert torch.equal(a, b)
            assert_close(sketch(part, 2), row, 1e-6)


def test_exact_with_nan_inf_and_beyond(ledger):
    part = draw(5000, dtype=torch.bfloat16)
    part[[7, 4000]], part[8], part[9] = torch.nan, torch.inf, 40_000.0
    high, low = fused.split(draw(5000), None)
    row = rows()[0]
    new = fused.plus(high, low, part, 1, ledger, (row, 0))
    assert row[[INFINITE, NAN]].tolist() == [1, 2]
    assert ledger.flags_on(high.device).tolist() == [1]
    assert new[0].isnan().nonzero().flatten().tolist() == [7, 9, 4000]


def test_gradient_of_exact():
    high, low = fused.split(draw(100), None)
    high.requires_grad_()
    part = draw(100, dtype=torch.bfloat16).requires_grad_()
    found = []
    for mark in (None, (rows()[0], 0)):
        new, _ = fused.plus(high, low, part, -1, None, mark)
        first = torch.autograd.grad(new.sin().sum(), [high, part], create_graph=True)
        found.append([*first, *torch.autograd.grad(first[0].sum(), [high, part])])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits():
    """No addition synchronises, once its kernel has been made."""
    target, part, table = draw(4096), draw(4096, dtype=torch.bfloat16), rows(2)
    high, low = fused.split(target, None)

    def step():
        fused.add(target, part, 1, 0, table[0])
        fused.plus(high, low, part, 1, None, (table[1], 0))
        fused.sketch(part, 0, table[0])

    step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.allclose(table[0, :5], 4 * sketch(part)[:5])
