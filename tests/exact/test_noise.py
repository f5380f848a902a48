"""The arithmetic of reversible noise: signs, packed bits, and both ways in which a stream is carried."""

import pytest
import torch

from retrograde._exact.noise import Noise, new_seed, packed, recovered, replaced, signs, unpacked
from retrograde._exact.range import GRID, LIMIT

COUNTS = [0, 1, 7, 8, 9, 63, 64, 65, 513, 100_001]


def on_grid(*shape, size=1.0, bits=GRID):
    return (torch.randn(*shape, dtype=torch.float64) * size).clamp(-LIMIT, LIMIT).mul(
        2.0**bits
    ).round() * 2.0**-bits + 0.0  # never -0.0


# -- signs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_signs_are_plus_or_minus_one(count):
    found = signs(new_seed(None), 3, count)
    assert found.shape == (count,)
    assert found.dtype is torch.int8
    assert set(found.tolist()) <= {1, -1}


def test_signs_look_random():
    """Balanced, also in each place of a byte; no two seeds, updates, leaves or neighbours have anything to do with each other."""
    count = 1 << 16
    found = [signs(torch.tensor(seed), number, count).double() for seed in (0, 1, 2**62) for number in (0, 1, 2, 1 << 16)]
    bound = 5 / count**0.5
    for i, one in enumerate(found):
        assert abs(one.mean()) < bound
        assert (one.view(8, -1).mean(1).abs() < 8**0.5 * bound).all()
        for shift in (1, 2, 8, 64, count // 8, count // 4):
            assert abs((one * one.roll(shift)).mean()) < bound
        assert all(abs((one * other).mean()) < bound for other in found[:i])


def test_signs_depend_on_nothing_else():
    """Written down: the same seed gives the same training in later versions."""
    before = torch.random.get_rng_state()
    assert signs(torch.tensor(7), 5, 20).add(1).tolist() == [2, 2, 2, 2, 0, 0, 2, 0, 2, 2, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2]
    assert torch.equal(before, torch.random.get_rng_state())


# -- packed bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", COUNTS)
def test_packed(bits, count):
    low = torch.randint(2**bits, (count,), dtype=torch.uint8)
    kept = packed(low.clone(), bits)
    assert kept.untyped_storage().nbytes() == -(-count // 8) * bits
    assert torch.equal(unpacked(kept, bits, count), low)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def halves(wide):
    high = wide.float()
    return [high, ((wide - high.double()) * 2.0**GRID).nan_to_num(0.0).to(torch.int16)]


@pytest.mark.parametrize("size", [1e-5, 1.0, 3000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_both_forms(bits, dtype, size):
    """In one float64, or in a float32 and an int16 as on CUDA: the same numbers, and both give back what was there."""
    p, c, layer = on_grid(999, size=size), on_grid(999, size=size).to(dtype), (torch.randn(999) * size).to(dtype)
    noise = Noise(new_seed(None), 1, bits, GRID, None)
    note, note_too = [], []
    (wide,) = replaced([p], layer, c, noise, note)
    split = replaced(halves(p), layer, c, noise, note_too)
    assert [t.dtype for t in split] == [torch.float32, torch.int16]
    for found, true in zip(split, halves(wide), strict=True):
        assert torch.equal(found, true)
    assert torch.equal(*note, *note_too)
    (back,) = recovered([wide], layer, c, noise, note[0])
    assert torch.equal(back, p)
    assert torch.equal(back.signbit(), p.signbit())
    for found, true in zip(recovered(split, layer, c, noise, note[0]), halves(p), strict=True):
        assert torch.equal(found, true)


@pytest.mark.parametrize("bits", [1, 8])
@pytest.mark.parametrize("grid", [GRID, 35])
def test_at_the_edges_of_the_range(bits, grid):
    """D takes four times the range, which is what float64 holds on the finer grid."""
    unit = 2.0**-grid
    values = torch.tensor([LIMIT, -LIMIT, LIMIT - unit, unit - LIMIT, 0.0, unit, -unit], dtype=torch.float64)
    p, c, layer = (t.flatten() for t in torch.meshgrid(values, values, values, indexing="ij"))
    noise, note = Noise(new_seed(None), 0, bits, grid, None), []
    (new,) = replaced([p], layer, c, noise, note)
    assert torch.equal(recovered([new], layer, c, noise, note[0])[0], p)
    d = [
        int(a / unit) - 2 * int(b / unit) + int(e / unit) for a, b, e in zip(p.tolist(), c.tolist(), layer.tolist(), strict=True)
    ]
    sign = signs(noise.seed, 0, len(d)).tolist()
    true = [int(e / unit) + s * (one >> bits) for e, s, one in zip(layer.tolist(), sign, d, strict=True)]
    assert [int(t / unit) for t in new.tolist()] == true


def test_gradients_of_both_forms():
    """d/dL = 1 + gamma, d/dp = gamma, d/dc = -2 gamma, as if nothing were rounded; and the gradient of those."""
    p, c, layer = (on_grid(50).requires_grad_() for _ in range(3))
    noise, weight = Noise(new_seed(None), 0, 2, GRID, None), torch.randn(50, dtype=torch.float64, requires_grad=True)
    gamma = signs(noise.seed, 0, 50).double() * 0.25
    (new,) = replaced([p], layer, c, noise, None)
    found = torch.autograd.grad((new * weight).sum(), [layer, p, c], create_graph=True)
    for one, factor in zip(found, (1 + gamma, gamma, -2 * gamma), strict=True):
        assert torch.equal(one, weight * factor)
    (again,) = torch.autograd.grad(found[0].sum() + 3 * found[1].sum() + 5 * found[2].sum(), weight)
    torch.testing.assert_close(again, 1 + gamma + 3 * gamma - 10 * gamma)
    high, low = halves(p.detach())
    made, _ = replaced([high.requires_grad_(), low], layer, c, noise, None)
    for one, factor in zip(torch.autograd.grad(made.sum(), [layer, high, c]), (1 + gamma, gamma, -2 * gamma), strict=True):
        assert torch.equal(one, factor.to(one.dtype))
