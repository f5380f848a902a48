"""The fused kernel of exact arithmetic on CUDA against the plain path."""

import pytest
import torch
from exact_support import same
from support import rg
from torch import nn

from retrograde._exact import cuda as fused
from retrograde._exact.cuda import on_grid
from retrograde._exact.range import GRID, LIMIT, Ledger

pytestmark = pytest.mark.gpu
UNIT = 2.0**-GRID
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SIZES = [0, 1, 31, 1023, 1024, 1025, 100_003]


# -- the kernel --------------------------------------------------------------------------------------------------------


def numbers(count, low, high, dtype=torch.float64):
    """Of all magnitudes between two powers of two, of both signs, some of them zero."""
    size = 2.0 ** (torch.rand(count, dtype=torch.float64, device="cuda") * (high - low) + low)
    return (size * torch.randint(-1, 2, (count,), device="cuda")).to(dtype)


def whole(high, low):
    return high.double() + low.double() * UNIT


def halves(wide):
    """Split by the equations alone."""
    high = wide.float()
    low = ((wide - high.double()) / UNIT).nan_to_num(0.0, 0.0, 0.0)
    return high, low.to(torch.int16)


def assert_plus(high, low, part, sign, ledger=None):
    """The kernel against float64, bit by bit; nothing has left the range."""
    new = fused.plus(high, low, part, sign, ledger)
    true = whole(high, low) + sign * on_grid(part, GRID)
    assert [t.dtype for t in new] == [torch.float32, torch.int16]
    for found, expected in zip(new, halves(true), strict=True):
        assert same(found, expected)
        known = ~expected.isnan()
        assert torch.equal(found.signbit()[known], expected.signbit()[known])
    finite = true.isfinite()
    assert torch.equal(whole(*new)[finite], true[finite])
    assert not new[1][~finite].any()
    return new


@pytest.fixture
def ledger():
    made = Ledger(rg.wirings.leapfrog([nn.Tanh() for _ in range(4)]), ["a", "b"])
    made.index = 2
    return made


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plus(dtype, sign, checked, count, ledger):
    """Values and increments of all magnitudes, and back again."""
    high, low = halves(on_grid(numbers(count, -26, 13.9), GRID))
    for least, most in ((-60, 13.9), (-26, -8), (-3, 3), (10, 13.9)):
        part = numbers(count, least, most, dtype)
        new = assert_plus(high, low, part, sign, ledger if checked else None)
        back = fused.plus(*new, part, -sign, None)
        assert torch.equal(back[0], high)
        assert torch.equal(back[1], low)
    if checked:
        assert not ledger.flags_on(high.device).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_ties(sign, dtype):
    """Halves of a unit go to the even neighbour, in the increment and where the sum is split in two."""
    steps = torch.arange(-33, 34, device="cuda", dtype=torch.float64) * UNIT / 4
    starts = torch.tensor([0.0, 1.0, -1.0, 0.5, 3.0, 255.0, 16384.0, -32000.0], dtype=torch.float64, device="cuda")
    near = starts[:, None] + torch.arange(-5, 6, device="cuda") * UNIT
    wide = torch.cat([near, starts[:, None] + torch.tensor([2.0**-k for k in range(9, 24)], device="cuda").double()], 1)
    wide, part = torch.broadcast_tensors(wide.flatten()[:, None], steps)
    assert_plus(*halves(on_grid(wide.contiguous(), GRID)), part.to(dtype).contiguous(), sign)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_zeros(sign, dtype):
    """Never -0.0."""
    zeros = torch.tensor([0.0, -0.0, 2.0**-30, -(2.0**-30), 1.0, -1.0], device="cuda").to(dtype)
    high, low = fused.split(zeros, None)
    assert not high[:4].signbit().any()
    new = assert_plus(high, low, zeros, sign)
    assert not new[0][:4].signbit().any()
    assert not fused.plus(*new, zeros, -sign, None)[0][:4].signbit().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split(dtype, ledger):
    """A stream is put on the grid."""
    t = numbers(10_007, -40, 14.9, dtype)
    high, low = fused.split(t, ledger)
    assert torch.equal(whole(high, low), on_grid(t, GRID))
    assert torch.equal(high, on_grid(t, GRID).float())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_whole_numbers_as_increments(dtype):
    part = torch.randint(0, 100, (1000,), device="cuda").to(dtype)
    assert_plus(*halves(on_grid(numbers(1000, -20, 10), GRID)), part, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_and_inf(sign, dtype, ledger):
    """They stay, as increments and in the stream, and are not flagged; their neighbours do not notice."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5], dtype=torch.float64, device="cuda")
    wide, part = torch.broadcast_tensors(special[:, None], special)
    new = assert_plus(*halves(wide.contiguous()), part.to(dtype).contiguous(), sign, ledger)
    assert not ledger.flags_on(part.device).any()
    assert torch.equal(new[0].isfinite(), wide.isfinite() & part.isfinite())


BEYOND = [32_790.0, -32_790.0, 60_000.0, 1e30, -1e30, 3.3e38, 1e300, -1e300]


@pytest.mark.parametrize("value", BEYOND)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_beyond_the_limit(dtype, value, ledger):
    """Flagged for the update that is at work, and NaN; nothing else is touched. As an increment, and at the start."""
    part = numbers(5000, -20, 13, dtype)
    part[1234] = torch.tensor(value, dtype=torch.float64).to(dtype)
    if not part[1234].isfinite():
        pytest.skip("no such number in this dtype")
    high, low = halves(on_grid(numbers(5000, -20, 13), GRID))
    high[1234] = low[1234] = 0
    for make in (lambda: fused.plus(high, low, part, 1, ledger), lambda: fused.split(part, ledger)):
        new = make()
        assert new[0].isnan().nonzero().flatten().tolist() == [1234]
        assert new[1][1234] == 0
        assert ledger.flags_on(part.device).tolist() == [0, 0, 1, 0, 0, 0]
        ledger.flags_on(part.device).zero_()
    true = whole(high, low) + on_grid(part, GRID)
    keep = torch.arange(5000, device="cuda") != 1234
    assert torch.equal(whole(*fused.plus(high, low, part, 1, ledger))[keep], true[keep])


@pytest.mark.parametrize("sign", [1, -1])
def test_the_limit_itself(sign, ledger):
    """±32766 is fine, and so is what float32 rounds to it; the next number of float32 is not."""
    start = torch.full((3,), sign * (LIMIT - 1), dtype=torch.float64, device="cuda")
    step = torch.tensor([1.0, 1.0 + 2.0**-10, 1.0 + 2.0**-9], dtype=torch.float64, device="cuda") * sign
    new = fused.plus(*halves(start), step, 1, ledger)
    assert new[0].isnan().tolist() == [False, False, True]
    wide = Ledger(ledger.updates, ledger.streams)
    assert wide.within(start + step).isnan().tolist() == [False, False, True]  # the plain path has the same limit
    assert wide.flags_on(start.device).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype):
    """A dense stream in any layout, an increment in any other."""
    base = halves(on_grid(numbers(2 * 3 * 4 * 5, -10, 10), GRID))
    part = numbers(2 * 3 * 4 * 5, -10, 10, dtype)
    for dims in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)):
        inverse = [dims.index(i) for i in range(4)]
        high, low = (t.view(2, 3, 4, 5).permute(dims).contiguous().permute(inverse) for t in base)
        for given in (
            part.view(2, 3, 4, 5),
            part.view(5, 4, 3, 2).permute(3, 2, 1, 0),
            part[:5].expand(2, 3, 4, 5),
            torch.stack((part, part), -1)[:, 0].view(2, 3, 4, 5),
            part[0].expand(2, 3, 4, 5),
        ):
            new = assert_plus(high, low, given, 1)
            assert new[0].stride() == high.stride()
    scalar = halves(on_grid(numbers(1, -3, 3), GRID))
    assert_plus(scalar[0][0], scalar[1][0], part[0], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_gradient_of_plus(sign, dtype):
    """That of addition, twice differentiable."""
    high, low = halves(on_grid(numbers(100, -3, 3), GRID))
    high.requires_grad_()
    part = numbers(100, -3, 3, dtype).requires_grad_()
    new, rest = fused.plus(high, low, part, sign, None)
    assert not rest.requires_grad
    first = torch.autograd.grad((new.sin() * 2).sum(), [high, part], create_graph=True)
    assert [g.dtype for g in first] == [torch.float32, dtype]
    torch.testing.assert_close(first[0], 2 * new.detach().cos())
    torch.testing.assert_close(first[1], (sign * 2 * new.detach().cos()).to(dtype))
    second = torch.autograd.grad(first[0].sum(), [high])[0]
    torch.testing.assert_close(second, -2 * new.detach().sin())
