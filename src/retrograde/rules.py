"""Rules: the ways in which the output of fn changes the target of an update."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ._base.pytrees import Carried, each, flatten, leaf_mismatch, mismatch, tensors
from .errors import ProgramError

__all__ = ["Add", "Affine", "Invertible", "Momentum", "Rule"]

_LARGEST = 4096  # denominator of a factor that exact arithmetic multiplies by


class Rule(ABC):
    """How the output of fn changes the target. `undo(apply(target, out), out)` is `target`.

    Both take the whole stream and the whole output of fn. Write them with differentiable operations. Set `saves = False` only
    if `apply` keeps no tensor for backward, as addition does; what it keeps is then not recovered.
    """

    saves = True
    loses = 0  # bits of each element that undoing needs besides: only streams that are carried exactly note them
    linear: tuple[float, float] | None = None  # (a, b), if it is target = a·target + b·out
    product: tuple[int, int] | None = None  # (n, d), if a = n/d: exact arithmetic knows such a rule
    alone = False  # needs no sources
    can_undo = True
    symbol = "<-"

    @abstractmethod
    def apply(self, target: Any, out: Any) -> Any: ...

    @abstractmethod
    def undo(self, target: Any, out: Any) -> Any: ...

    def mismatch(self, target: Any, out: Any) -> str | None:
        """Why `out` does not fit `target`, or None."""
        return None

    def __repr__(self) -> str:
        """The class, and those arguments that are attributes under the same name."""
        own = vars(self)
        given = ", ".join(f"{name}={own[name]!r}" for name in inspect.signature(type(self)).parameters if name in own)
        return f"{type(self).__name__}({given})"


class Add(Rule):
    """`target += out`, leaf by leaf, dicts by key. The default."""

    saves = False
    linear: tuple[float, float] | None = (1.0, 1.0)
    product: tuple[int, int] | None = (1, 1)
    symbol = "+="
    _tested = True

    def __init_subclass__(cls) -> None:
        cls.linear = cls.product = None  # what is derived from addition need not be one

    def apply(self, target: Any, out: Any) -> Any:
        if type(target) is type(out) is Tensor and target.dtype is out.dtype:  # as a rule
            return target + out
        return _plus(target, out)

    def undo(self, target: Any, out: Any) -> Any:
        if type(target) is type(out) is Tensor and target.dtype is out.dtype:
            return target - out
        return _plus(target, out, -1)

    def mismatch(self, target: Any, out: Any) -> str | None:
        alike = type(target) is type(out) is Tensor and target.dtype is out.dtype is not torch.bool
        if alike and target.shape == out.shape and target.device == out.device:  # as a rule
            return None
        if isinstance(target, Tensor):
            return leaf_mismatch(target, out)
        return mismatch(target.outline() if isinstance(target, Carried) else target, out)


def _plus(target: Any, out: Any, sign: int = 1) -> Any:
    """`target + out`, or minus for sign -1, in the stream's own dtype, as `target += out` would leave it."""
    if isinstance(target, Tensor):
        total = target + out if sign > 0 else target - out
        return total if total.dtype == target.dtype else total.to(target.dtype)
    if isinstance(target, Carried):
        return target.plus(out, sign)
    return each(lambda a, b: _plus(a, b, sign), target, out)


class Affine(Rule):
    """`target = target * exp(log_scale) + shift`, where fn returns the pair `(log_scale, shift)`.

    - `log`: whether fn returns the logarithm of the scale (the default) or the scale itself. No scale may be zero, and a
      small one loses bits of the target for good.
    - `limit`: keeps the scale between exp(-limit) and exp(limit), softly, so that nothing fn returns can do harm.
    """

    symbol = "*+="
    _tested = True

    def __init__(self, *, log: bool = True, limit: float | None = None):
        if limit is not None and not (log and 0 < limit < float("inf")):
            raise ProgramError(f"limit must be a positive number, and needs log=True; got limit={limit!r} with log={log!r}")
        self.log, self.limit = log, limit

    def apply(self, target: Any, out: Any) -> Any:
        return each(lambda t, scale, shift: (t * self._scale(t, scale) + shift).to(t.dtype), target, *out)

    def undo(self, target: Any, out: Any) -> Any:
        return each(lambda t, scale, shift: ((t - shift) / self._scale(t, scale)).to(t.dtype), target, *out)

    def mismatch(self, target: Any, out: Any) -> str | None:
        name = "log_scale" if self.log else "scale"
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            return f"fn must return a pair ({name}, shift) for the affine rule, it returned a {type(out).__name__}"
        if not _continuous(target):
            return "the affine rule is for streams of floating point"
        return mismatch(target, out[0]) or mismatch(target, out[1])

    def _scale(self, t: Tensor, given: Tensor) -> Tensor:
        """In the precision of the stream: what 16 bits make of a scale must be undone as it is."""
        if given.dtype != t.dtype:
            given = given.to(t.dtype)
        if self.limit is not None:
            given = self.limit * (given / self.limit).tanh()
        return given.exp() if self.log else given


class Momentum(Rule):
    """`target = gamma * target + (1 - gamma) * out`, with `gamma` between 0 and 1: the velocity of a momentum residual net.

    Undoing divides by gamma, and rounding errors with it: in float they grow by 1/gamma with each update. Exact arithmetic keeps
    what the product would lose (docs/rules.md).
    """

    saves = False
    symbol = "~="
    _tested = True
    _own = True

    def __init_subclass__(cls) -> None:
        cls._own = False  # what is derived from it need not be linear

    def __init__(self, gamma: float = 0.9):
        if not isinstance(gamma, (int, float)) or not 0 < gamma < 1:
            raise ProgramError(f"gamma must be a number between 0 and 1, got {gamma!r}: 0 leaves no way back, and 1 adds nothing")
        self.gamma = gamma
        if self._own:
            self.linear = gamma, 1 - gamma
            near = Fraction(gamma).limit_denominator(_LARGEST)
            if float(near) == gamma:
                self.product = near.numerator, near.denominator

    def apply(self, target: Any, out: Any) -> Any:
        if isinstance(target, Carried):
            return target.drawn_to(out, *self.product)  # type: ignore[misc]
        return each(lambda t, o: torch.lerp(t, o.to(t.dtype), 1 - self.gamma), target, out)

    def undo(self, target: Any, out: Any) -> Any:
        if isinstance(target, Carried):
            return target.drawn_to(out, *self.product, undo=True)  # type: ignore[misc]
        return each(lambda t, o: torch.lerp(t, o.to(t.dtype), 1 - 1 / self.gamma), target, out)

    def mismatch(self, target: Any, out: Any) -> str | None:
        target = target.outline() if isinstance(target, Carried) else target
        if not _continuous(target):
            return "momentum is for streams of floating point"
        return mismatch(target, out)


def _continuous(target: Any) -> bool:
    return all(t.is_floating_point() or t.is_complex() for t in tensors(target))


class Invertible(Rule):
    """`target = forward(target, *sources, **side)`, undone by `inverse(target, …)`: functions of your own.

    `rg.wirings.invertible` makes updates with it.

    fn hands over the sources and side inputs as they are (`Arguments`).
    """

    alone = True

    def __init__(self, forward: Callable[..., Any], inverse: Callable[..., Any]):
        self.forward, self.inverse = forward, inverse

    def apply(self, target: Any, out: Any) -> Any:
        sources, side = out
        return self.forward(target, *sources, **side)

    def undo(self, target: Any, out: Any) -> Any:
        sources, side = out
        return self.inverse(target, *sources, **side)


_ONE_WAY = "a layer x = layer(x) replaces its input, so it cannot be undone"
_LOST = "undoing a layer with reversible noise needs bits that only backward has"


class Replace(Rule):
    """`target = out`: ordinary layers, `x = layer(x)`. Nothing of the target is left, so there is no way back."""

    saves = False
    can_undo = False
    symbol = "="
    _tested = True

    def apply(self, target: Any, out: Any) -> Any:
        return out

    def undo(self, target: Any, out: Any) -> Any:
        raise ProgramError(_ONE_WAY)

    def mismatch(self, target: Any, out: Any) -> str | None:
        (flat, spec), (made, other) = flatten(target), flatten(out)
        if spec != other:
            return f"a layer must return a {_kind(target)} like its input, and it returned a {_kind(out)}"
        for a, b in zip(flat, made, strict=True):
            if not isinstance(b, Tensor):
                return leaf_mismatch(a, b)
            if a.shape != b.shape:
                return f"the layer returned shape {tuple(b.shape)}, its input has {tuple(a.shape)}"
        return None


class Noisy(Rule):
    """`target = layer(source)` with a little noise, by which the target can be recovered from it (_exact/noise.py).

    fn returns what the layer has made, the source, and the seed of the signs. It is the source as fn reads it, rounded to the
    dtype of the stream: both forms are recovered, and the layer has seen no more than this one.
    """

    saves = False
    product: tuple[int, int] | None = (1, 1)
    symbol = "="
    _tested = True

    def __init__(self, bits: int, depth: int):
        self.bits = self.loses = bits
        self.depth = depth  # layers have signs of their own

    def apply(self, target: Any, out: Any) -> Any:
        return target.noisy(out, self.bits, self.depth)

    def undo(self, target: Any, out: Any) -> Any:
        return target.without_noise(out, self.bits, self.depth)

    def mismatch(self, target: Any, out: Any) -> str | None:
        made, source, _ = out
        if why := Replace().mismatch(source, made):
            return why
        for a, b in zip(tensors(source), tensors(made), strict=True):
            if not a.is_floating_point():
                return f"reversible noise is for streams of floating point, and this one has {a.dtype}: pass it as a side input"
            if (a.dtype, a.device) != (b.dtype, b.device):
                return f"the layer returned {b.dtype} on {b.device}, its input is {a.dtype} on {a.device}: let it convert back"
        return None


class Result(Replace):
    """The same for a target that is new: whatever fn returns, tensors and other things in a tree."""

    _tested = True

    def mismatch(self, target: Any, out: Any) -> str | None:
        return None


def _kind(value: Any) -> str:
    return "tensor" if isinstance(value, Tensor) else type(value).__name__ + " of the same structure"


class Inverted(Rule):
    """Another rule with apply and undo swapped."""

    def __init__(self, rule: Rule):
        if not rule.can_undo or rule.loses:
            raise ProgramError(_LOST if rule.loses else _ONE_WAY)
        self.rule, self.saves, self.alone = rule, rule.saves, rule.alone
        self.symbol = "-=" if rule.symbol == "+=" else f"undo {rule.symbol}"
        if rule.linear is not None:
            a, b = rule.linear
            self.linear = 1 / a, -b / a
        self.product = rule.product and (rule.product[1], rule.product[0])

    def apply(self, target: Any, out: Any) -> Any:
        return self.rule.undo(target, out)

    def undo(self, target: Any, out: Any) -> Any:
        return self.rule.apply(target, out)

    def mismatch(self, target: Any, out: Any) -> str | None:
        return self.rule.mismatch(target, out)


def by_user(rule: Rule) -> bool:
    """Whether `undo` is the user's own, and may be wrong."""
    return "_tested" not in vars(type(rule.rule if isinstance(rule, Inverted) else rule))  # what is derived from one may be wrong
