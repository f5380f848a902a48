"""Addition that loses nothing: streams are carried on a fixed grid, and what is added is rounded to that grid first.

A value on the grid is a multiple of 2^-24, up to ±32766. That is 39 bits: float64 holds them all, and so do a float32 (`high`,
the rounded value) and an int16 (`low`, the rest in units of the grid) together. Sums and differences of such values are exact, so
undoing an update gives back the very bits. fn reads the value rounded to the stream's own dtype.

- "wide", the plain path: one float64 tensor for each leaf. Rounding is two additions, and the gradient of all of it is one.
- "split", on CUDA: `high` and `low`, in a fused kernel that moves no more bytes than it must (fused.py).
Streams of float64 have a finer grid, 2^-35, and take the plain path.
- "kept", for streams that momentum multiplies by a fraction n/d below 1: the float64, and an int64 that keeps what the product
  loses. That is log2(d/n) bits with each product: no fixed number of bits is enough for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.pytrees import Carried, flatten, unflatten
from .._base.torch_private import TreeSpec, register_pytree_node
from .._base.vaults import opened, vault
from . import cuda as fused
from .noise import Noise, recovered, replaced
from .range import GRID, Ledger

FINE = 35  # bits behind the point, for float64


class Form:
    """How a stream is carried: its tree, and for each leaf its dtype and "wide", "split", "kept", or "plain" (whole numbers).

    `lost` is what undoing needs besides, a stack: (what the last update lost, in a vault; the stack below). None: nobody undoes.
    """

    __slots__ = ("kinds", "ledger", "lost", "spec")

    def __init__(self, kinds: list[tuple[torch.dtype, str]], spec: TreeSpec | None, ledger: Ledger | None, lost: Any = None):
        self.kinds, self.spec, self.ledger = kinds, spec, ledger
        self.lost: Any = lost

    def stream(self, made: list[Tensor]) -> Exact:
        return Exact(made, self)

    def losing(self, lost: Any) -> Form:
        return Form(self.kinds, self.spec, self.ledger, lost)


class Kept(NamedTuple):
    """The form of a stream of which autograd keeps everything."""

    form: Form  # without what was lost, and without a ledger: nobody looks at its range again
    first: int  # of the tensors that was lost

    def stream(self, made: list[Tensor]) -> Exact:
        lost: Any = ()
        for t in reversed(made[self.first :]):
            lost = t, lost
        return Exact(made[: self.first], self.form.losing(lost))


class Note(NamedTuple):
    """Where the sketch of what is added goes: a row in a table."""

    table: Any
    row: int


class Exact(Carried):
    """A stream on the grid, made of one tensor for each leaf, or two where it is split or kept."""

    __slots__ = ()

    def leaves(self) -> list[tuple[torch.dtype, str, list[Tensor]]]:
        if self.form.spec is None:
            return [(*self.form.kinds[0], self.made)]
        rest = iter(self.made)
        return [(dtype, kind, [next(rest) for _ in range(2 if kind in _TWO else 1)]) for dtype, kind in self.form.kinds]

    @property
    def on_cuda(self) -> bool:
        """Whether a kernel adds to it."""
        return any(kind == "split" for _, kind in self.form.kinds) and all(t.is_cuda for t in self.made)

    def read(self) -> Any:
        """The stream as fn sees it."""
        return unflatten([_rounded(made[0], dtype) for dtype, _, made in self.leaves()], self.form.spec)

    def outline(self) -> Any:
        """A tree of tensors that have the stream's shapes."""
        return unflatten([made[0] for _, _, made in self.leaves()], self.form.spec)

    def spoilt_in(self, changed: Exact) -> bool:
        """Whether a finite value is NaN or inf now, as far as that is known without waiting for a device."""
        ledger = self.form.ledger
        if ledger is None or not ledger.strange:
            return False
        ledger.strange = False
        return any(bool((a.isfinite() & ~b.isfinite()).any()) for a, b in zip(self.made, changed.made, strict=True))

    def heads(self, grads: list[Any]) -> list[Any]:
        """For a trace, which differentiates by hand: from the gradients of `made`, one for each leaf."""
        rest = iter(grads)
        found = []
        for _, _, made in self.leaves():
            head, *_ = [next(rest) for _ in made]
            found.append(head)
        return found

    def grads_to(self, grads: list[Any]) -> list[Any]:
        """For a trace: from the gradients of what fn read, those of `made`."""
        found = []
        for grad, (_, _, made) in zip(grads, self.leaves(), strict=True):
            found += [None if grad is None else grad.to(made[0].dtype), *(None for _ in made[1:])]
        return found

    def plus(self, out: Any, sign: int, note: Note | None = None) -> Exact:
        """The stream with `out`, rounded to the grid, added or subtracted. `note`: where the sketch of `out` goes."""
        ledger = self.form.ledger
        parts = [out] if self.form.spec is None else self.form.spec.flatten_up_to(out)
        made: list[Tensor] = []
        for number, ((dtype, kind, own), part) in enumerate(zip(self.leaves(), parts, strict=True)):
            if note is not None and kind != "split":
                note.table.leaf(note.row, number, part.detach())
            if kind == "plain":
                made.append((own[0] + sign * part).to(dtype))
            elif kind == "split":
                row = None if note is None else (note.table.row(note.row, part.device, number), number)
                made += fused.plus(own[0], own[1], part, sign, ledger, row)
            else:
                step = fused.on_grid(part, _bits(dtype))
                total = own[0] + step if sign > 0 else own[0] - step
                made += [total if ledger is None else ledger.within(total, _bits(dtype)), *own[1:]]
        return Exact(made, self.form)

    def drawn_to(self, out: Any, n: int, d: int, undo: bool = False) -> Exact:
        """n/d of the stream and the rest of `out`, on the grid; or that undone. What the product loses is in the int64."""
        ledger = self.form.ledger
        parts = [out] if self.form.spec is None else self.form.spec.flatten_up_to(out)
        made: list[Tensor] = []
        for (dtype, _, (value, rest)), part in zip(self.leaves(), parts, strict=True):
            part, unit = part.to(torch.float64), 2.0 ** -_bits(dtype)
            step = fused.on_grid(part.detach() * ((d - n) / d), _bits(dtype))
            through = torch.lerp(value, part, (n - d) / n if undo else (d - n) / d)  # for the gradients; it saves nothing
            if undo:
                number, rest = _product((value.detach() - step) / unit, rest, d, n)
                number = number * unit
            else:
                number, rest = _product(value.detach() / unit, rest, n, d)
                number = number * unit + step
            total = number + (through - through.detach())  # NaN where that is not finite
            made += [total if ledger is None else ledger.within(total, _bits(dtype)), rest]
        return Exact(made, self.form)

    def noisy(self, out: Any, bits: int, depth: int) -> Exact:
        """What a layer has made of its source, with reversible noise (noise.py), in place of the stream."""
        form, made = self.form, []
        lost: list[Tensor] | None = None if form.lost is None else []
        for own, layer, source, noise in self._noises(out, bits, depth):
            made += replaced(own, layer, source, noise, lost)
        return Exact(made, form.losing((vault(lost), form.lost)) if lost else form)

    def without_noise(self, out: Any, bits: int, depth: int) -> Exact:
        """The stream that `noisy` was given."""
        last, below = self.form.lost
        parts = zip(self._noises(out, bits, depth), opened(last), strict=True)
        made = [t for (own, layer, source, noise), kept in parts for t in recovered(own, layer, source, noise, kept)]
        return Exact(made, self.form.losing(below))

    def _noises(self, out: Any, bits: int, depth: int) -> Iterator[tuple[list[Tensor], Tensor, Tensor, Noise]]:
        *both, seed = out
        layers, sources = ([one] if self.form.spec is None else self.form.spec.flatten_up_to(one) for one in both)
        for number, (dtype, _, own) in enumerate(self.leaves()):
            noise = Noise(seed.to(own[0].device), depth << 16 | number, bits, _bits(dtype), self.form.ledger)
            yield own, layers[number], sources[number], noise


register_pytree_node(Exact, lambda stream: (stream.made, stream.form), lambda made, form: form.stream(list(made)))


_TWO = ("split", "kept")


def _product(number: Tensor, rest: Tensor, n: int, d: int) -> tuple[Tensor, Tensor]:
    """n/d times a whole number, rounded to a whole number; `rest` takes up what is lost, and grows by d/n as it does.

    The product with n and d exchanged gives back both. After Maclaurin et al. (2015), who undo the momentum of SGD.
    """
    finite = number.abs() < 2.0**50  # a larger one, which the inverse may meet, is out of range before the product and after
    share = torch.div(rest, n, rounding_mode="floor")
    wide = torch.where(finite, number, 0.0).to(torch.int64) * n + (rest - share * n)
    made = torch.div(wide, d, rounding_mode="floor")
    return torch.where(finite, made.to(torch.float64), number), share * d + (wide - made * d)


def carried(value: Any, ledger: Ledger, keeps: bool = False) -> Exact:
    """A stream, put on the grid; `keeps` if it will be multiplied."""
    flat, spec = flatten(value)
    made: list[Tensor] = []
    kinds: list[tuple[torch.dtype, str]] = []
    for t in flat:
        if not t.is_floating_point():
            kinds.append((t.dtype, "plain"))
            made.append(t)
        elif t.dtype != torch.float64 and not keeps and fused.usable(t):
            kinds.append((t.dtype, "split"))
            made += fused.split(t, ledger)
        else:
            kinds.append((t.dtype, "kept" if keeps else "wide"))
            made.append(ledger.within(fused.on_grid(t, _bits(t.dtype)), _bits(t.dtype)))
            if keeps:
                made.append(torch.zeros_like(made[-1], dtype=torch.int64, requires_grad=False))
    return Exact(made, Form(kinds, spec, ledger))


def noting(value: Any, on: bool) -> Any:
    """The stream, which from here on notes what updates lose, or does not."""
    if not isinstance(value, Exact):
        return value
    return Exact(value.made, value.form.losing((value.form.lost or ()) if on else None))


def whole(value: Any) -> tuple[list[Tensor], Any]:
    """All tensors of a stream, also what its updates have lost, and what makes a stream of them again."""
    flat, spec = flatten(value)
    if not isinstance(spec, Form):
        return flat, spec
    lost, rest = [], spec.lost
    while rest:
        last, rest = rest
        lost.append(last)
    return [*flat, *lost], Kept(Form(spec.kinds, spec.spec, None), len(flat))


def read(value: Any) -> Any:
    """A stream as fn sees it, however it is carried."""
    return value.read() if isinstance(value, Exact) else value


def _bits(dtype: torch.dtype) -> int:
    return FINE if dtype == torch.float64 else GRID


def _rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    if t.dtype == dtype:
        return t
    if t.dtype == torch.float64 != dtype:
        t = t.to(torch.float32)  # and from there to 16 bits, as where it is split
    return t.to(dtype)
