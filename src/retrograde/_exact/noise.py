"""An ordinary layer made reversible by a little noise: the arithmetic, the signs, and the bits that are kept.

With p the state before the last, c the last one and L = layer(c), training computes

    new = L + gamma (p - 2c + L),      gamma = ±2^-m, a random sign for each element

p, c and L lie on the grid of exact arithmetic, so D = p - 2c + L is a whole number of its units, and its product is rounded down
to one: new = L ± floor(D / 2^m). With the m bits that this takes away, new gives back D, and D gives back p. (After BDIA: Zhang,
Lewis, Kleijn, 2025, which has one sign for each sample, and m = 1.)

All of it is done in float64, whose 53 bits hold D: four times the range on the finest grid takes 52.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.torch_private import in_forward_mode, in_transform, in_vmap, quick_apply
from . import cuda as fused
from .cuda import on_grid
from .fake import pretended
from .range import GRID, Ledger

_CHUNK = 1 << 15  # elements at a time for each thread of a CPU: so the steps between stay in its cache


class Noise(NamedTuple):
    """Of one leaf in one update."""

    seed: Tensor
    number: int  # of the update and the leaf: others have other signs
    bits: int  # m
    grid: int  # bits behind the point
    ledger: Ledger | None

    def signs(self, count: int) -> Tensor:
        return signs(self.seed, self.number, count)


def replaced(own: list[Tensor], layer: Tensor, source: Tensor, noise: Noise, note: list[Tensor] | None) -> list[Tensor]:
    """The next state, in the form of `own`. The bits that are needed to undo this go to `note`."""
    if in_transform() or in_forward_mode():  # nothing is undone there
        return [_plainly(own[0], layer, source, noise)]
    if torch.is_grad_enabled() and (layer.requires_grad or source.requires_grad or own[0].requires_grad):
        return list(_with_grad(layer, source, noise, note, *own))
    return _replaced(own, layer, source, noise, note)


def recovered(own: list[Tensor], layer: Tensor, source: Tensor, noise: Noise, kept: Tensor) -> list[Tensor]:
    """The state that `replaced` was given, from what it made."""
    if fused.splits(own):
        return fused.noise_kernels().back(own, layer, source, noise, kept)
    return _recovered(own, layer, source, noise, kept)


def _recovered(own: list[Tensor], layer: Tensor, source: Tensor, noise: Noise, kept: Tensor) -> list[Tensor]:
    value = _value(own)
    count = value.numel()
    found = torch.empty(value.shape, dtype=torch.float64, device=value.device)
    given = value, source, layer, noise.signs(count), unpacked(kept, noise.bits, count)
    _in_chunks(partial(_back, noise), given, (found,))
    return _in_form(found, own)


def _replaced(own: list[Tensor], layer: Tensor, source: Tensor, noise: Noise, note: list[Tensor] | None) -> list[Tensor]:
    if fused.splits(own):
        made = fused.noise_kernels().noisy(own, layer, source, noise, note)
    else:
        made = _made(own, layer, source, noise, note)
    if layer.stride() != made[0].stride() and torch.empty_like(layer, device="meta").stride() == layer.stride():
        made = [torch.empty_like(layer, dtype=t.dtype).copy_(t) for t in made]  # the next layer sees the layout of this one
    return made


def _made(own: list[Tensor], layer: Tensor, source: Tensor, noise: Noise, note: list[Tensor] | None) -> list[Tensor]:
    value = _value(own)
    count, device = value.numel(), value.device
    made = torch.empty(value.shape, dtype=torch.float64, device=device)
    low = [] if note is None else [torch.empty(count, dtype=torch.uint8, device=device)]
    given = value, source, layer, noise.signs(count)
    _in_chunks(partial(_step, noise), given, (made, *low))
    if note is not None:
        note.append(packed(low[0], noise.bits))
    if noise.ledger is not None:
        made = noise.ledger.within(made, noise.grid)
    return _in_form(made, own)


def _step(noise: Noise, p: Tensor, c: Tensor, layer: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
    """new, and the low bits of D."""
    wide = on_grid(layer, noise.grid)
    d = p.sub(c.to(torch.float64), alpha=2.0).add_(wide).mul_(2.0**noise.grid)  # in units of the grid
    high = d.mul(2.0**-noise.bits).floor_()
    low = d.sub_(high, alpha=2.0**noise.bits)
    return wide.add_(high.mul_(sign), alpha=2.0**-noise.grid), low


def _back(noise: Noise, new: Tensor, c: Tensor, layer: Tensor, sign: Tensor, low: Tensor) -> tuple[Tensor]:
    """p again."""
    wide = on_grid(layer, noise.grid)
    d = new.sub(wide).mul_(sign).mul_(2.0**noise.bits).add_(low.to(torch.float64), alpha=2.0**-noise.grid)
    return (d.add_(c.to(torch.float64), alpha=2.0).sub_(wide),)


def _in_chunks(step: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
    """`step` on some elements of all tensors at a time, in the order of their positions. What it returns is written to `made`."""
    flat, out = [t.reshape(-1) for t in given], [t.view(-1) for t in made]
    count = flat[0].numel()
    on_cpu = (pretended(flat[0]) or flat[0].device.type) == "cpu"
    size = _CHUNK * torch.get_num_threads() if on_cpu else max(1, count)
    for start in range(0, count, size):
        for t, part in zip(out, step(*(t[start : start + size] for t in flat)), strict=False):
            t[start : start + size].copy_(part)


class _Replaced(torch.autograd.Function):
    """Autograd keeps the seed alone, from which the signs are made again."""

    @staticmethod
    def forward(
        ctx: Any, layer: Tensor, source: Tensor, noise: Noise, note: list[Tensor] | None, *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(noise.seed)
        ctx.number, ctx.bits, ctx.dtypes, ctx.rest = noise.number, noise.bits, (layer.dtype, source.dtype), len(own) - 1
        made = _replaced(list(own), layer, source, noise, note)
        ctx.mark_non_differentiable(*made[1:])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * (5 + ctx.rest)
        (seed,), dtypes = ctx.saved_tensors, (*ctx.dtypes, grad.dtype)
        sign = partial(signs, seed, ctx.number, grad.numel())
        if torch.is_grad_enabled() or in_vmap() or not grad.is_contiguous():
            made = [t.to(dtype) for t, dtype in zip(_shares(ctx.bits, grad, sign().view(grad.shape)), dtypes, strict=True)]
        else:
            made = [torch.empty(grad.shape, dtype=dtype, device=grad.device) for dtype in dtypes]
            if ctx.rest and fused.splits([grad, seed]):
                fused.noise_kernels().shares(grad, seed, ctx.number, ctx.bits, made)
            else:
                _in_chunks(partial(_shares, ctx.bits), (grad, sign()), made)
        to_layer, to_source, to_own = made
        return to_layer, to_source, None, None, to_own, *(None for _ in range(ctx.rest))


def _shares(bits: int, grad: Tensor, sign: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of L, c and p, as if nothing were rounded."""
    step = grad * _gamma(bits, sign, grad.dtype)
    return grad + step, step * -2.0, step


_with_grad = quick_apply(_Replaced)  # where no transform is around


def _gamma(bits: int, sign: Tensor, dtype: torch.dtype) -> Tensor:
    return sign.to(dtype).mul_(2.0**-bits)


def _plainly(p: Tensor, layer: Tensor, source: Tensor, noise: Noise) -> Tensor:
    """The same by operations that autograd knows, which keep what they please."""
    sign = noise.signs(p.numel()).view(p.shape)
    through = layer + _gamma(noise.bits, sign, p.dtype) * (p - 2.0 * source + layer)
    made, _ = _step(noise, p.detach(), source.detach(), layer.detach(), sign)
    made = made + (through - through.detach())
    return made if noise.ledger is None else noise.ledger.within(made, noise.grid)


# -- how a stream is carried -------------------------------------------------------------------------------------------


def _value(own: list[Tensor]) -> Tensor:
    """A leaf as one float64, where it is in two parts as well (streams.py)."""
    if len(own) == 1:
        return own[0]
    high, low = own
    return high.to(torch.float64).add(low, alpha=2.0**-GRID)


def _in_form(value: Tensor, own: list[Tensor]) -> list[Tensor]:
    if len(own) == 1:
        return [value]
    high = value.to(torch.float32)
    return [high, value.sub_(high).mul_(2.0**GRID).nan_to_num_(0.0).to(torch.int16)]  # of NaN and inf there is no rest


# -- signs -------------------------------------------------------------------------------------------------------------


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


_PLACE, _NUMBER = _signed(0x9E3779B97F4A7C15), 0xD1342543DE82EF95  # both are odd: steps on a circle of 2^64


def new_seed(device: torch.device | None) -> Tensor:
    """From torch's generator, so whoever sets that draws the same one. It stays on the device."""
    return torch.randint(2**63 - 1, (), device=device)


def signs(seed: Tensor, number: int, count: int) -> Tensor:
    """±1 for each of so many elements, in int8. Element e has bit e // n of byte e % n of a hash, where n is an eighth of all."""
    run = -(-count // 8)
    words = torch.arange(1, -(-run // 8) + 1, device=seed.device).mul_(_PLACE)
    octets = _mixed(words + seed + _signed(number * _NUMBER)).view(torch.uint8)[:run]
    found = octets >> torch.arange(8, dtype=torch.uint8, device=seed.device)[:, None]
    return found.bitwise_and_(1).view(torch.int8).mul_(-2).add_(1).view(-1)[:count]


def _mixed(h: Tensor) -> Tensor:
    """A hash of 64 bits (the end of SplitMix64). Shifts of signed numbers keep the sign, which is taken off."""
    h = (h ^ ((h >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    h = (h ^ ((h >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return h ^ ((h >> 31) & (2**33 - 1))


# -- kept bits ---------------------------------------------------------------------------------------------------------


def _fields(bits: int) -> list[tuple[int, int]]:
    """Width and place of the fields that so many bits are cut into: 4, 2 and 1 divide a byte."""
    return [(width, bits & (width - 1)) for width in (8, 4, 2, 1) if bits & width]


def packed(low: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits, in so many eighths of a byte each. A field of all numbers stands next to the next one."""
    run = -(-low.numel() // 8)
    low = torch.nn.functional.pad(low, (0, 8 * run - low.numel()))
    made = []
    for width, place in _fields(bits):
        parts = (low if width == bits else (low >> place) & (2**width - 1)).view(8 // width, width * run)
        together = parts[0]
        for number in range(1, 8 // width):
            together = together | (parts[number] << (number * width))
        made.append(together)
    return torch.cat(made) if len(made) > 1 else made[0]


def unpacked(kept: Tensor, bits: int, count: int) -> Tensor:
    """The numbers that were packed."""
    run, start = kept.numel() // bits, 0
    low = torch.zeros(8 * run, dtype=torch.uint8, device=kept.device)
    for width, place in _fields(bits):
        together = kept[start : start + width * run]
        start += width * run
        for number, part in enumerate(low.view(8 // width, width * run)):
            part |= ((together >> (number * width)) & (2**width - 1)) << place
    return low[:count]
