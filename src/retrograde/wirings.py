"""Wirings: functions that return the updates of one block, or of a whole net, as a list.

A net is a sum of such lists:

>>> import torch, retrograde as rg
>>> layers = [(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]
>>> [update for f, g in layers for update in rg.wirings.pair(f, g)]
[x1 += Linear(x2), x2 += Tanh(x1), x1 += Linear(x2), x2 += Tanh(x1)]

`streams` renames the streams, `takes` says for each function which side inputs it gets (see `rg.Update`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._base.function_modules import Arguments, OfSum, Twice
from .errors import ProgramError
from .rules import Add, Invertible, Momentum, Rule
from .update import Update

__all__ = ["cross", "dual", "groups", "invertible", "leapfrog", "midpoint", "momentum", "pair"]

Fn = Callable[..., Any]


def pair(
    f: Fn, g: Fn, *, streams: Sequence[str] = ("x1", "x2"), takes: Sequence[Any] = ((), ()), rule: Rule | None = None
) -> list[Update]:
    """x1 += f(x2); x2 += g(x1). RevNet, Reformer; with `rule=rg.Affine()` RealNVP, Glow."""
    x1, x2 = _exactly(2, "streams", streams)
    to_f, to_g = _exactly(2, "takes", takes)
    rule = Add() if rule is None else rule
    return [Update(x1, f, x2, to_f, rule), Update(x2, g, x1, to_g, rule)]


def dual(
    f: Fn, g: Fn, j: Fn, k: Fn, *, streams: Sequence[str] = ("x1", "x2", "m1", "m2"), takes: Sequence[Any] = ((), (), (), ())
) -> list[Update]:
    """Two pairs side by side: x1 += f(x2); x2 += g(x1); m1 += j(m2); m2 += k(m1)."""
    x1, x2, m1, m2 = _exactly(4, "streams", streams)
    to_f, to_g, to_j, to_k = _exactly(4, "takes", takes)
    return pair(f, g, streams=(x1, x2), takes=(to_f, to_g)) + pair(j, k, streams=(m1, m2), takes=(to_j, to_k))


def cross(
    f: Fn, g: Fn, j: Fn, k: Fn, *, streams: Sequence[str] = ("x1", "x2", "m1", "m2"), takes: Sequence[Any] = ((), (), (), ())
) -> list[Update]:
    """Two pairs that read each other: x1 += f(x2, m2); x2 += k(x1); m1 += j(m2, x2); m2 += g(m1)."""
    x1, x2, m1, m2 = _exactly(4, "streams", streams)
    to_f, to_g, to_j, to_k = _exactly(4, "takes", takes)
    return [
        Update(x1, f, (x2, m2), to_f),
        Update(x2, k, x1, to_k),
        Update(m1, j, (m2, x2), to_j),
        Update(m2, g, m1, to_g),
    ]


def leapfrog(fns: Sequence[Fn], *, streams: Sequence[str] = ("a", "b"), takes: Any = ()) -> list[Update]:
    """From a flat list of functions: a += f0(b); b += f1(a); a += f2(b); … All get the same side inputs.

    Over more than two streams each function reads the sum of the others: a += f0(b + c); b += f1(c + a); c += f2(a + b); …
    """
    if isinstance(streams, str) or len(streams) < 2:
        raise ProgramError(f"streams must be two names or more, got {streams!r}")
    return [turn(i, fn, streams, takes) for i, fn in enumerate(fns)]


def midpoint(fns: Sequence[Fn], *, streams: Sequence[str] = ("a", "b"), takes: Any = ()) -> list[Update]:
    """The midpoint rule, from a flat list of functions: a += 2 f0(b); b += 2 f1(a); a += 2 f2(b); …

    The streams are the last two states of x = x + f(x). The next state is the one before the last, plus twice f of the last.
    """
    return leapfrog([Twice(fn) for fn in fns], streams=_exactly(2, "streams", streams), takes=takes)


def turn(index: int, fn: Fn, streams: Sequence[str], takes: Any = ()) -> Update:
    """The update of this number, where functions change the streams in turn and read all others."""
    at = index % len(streams)
    others = (*streams[at + 1 :], *streams[:at])
    return Update(streams[at], fn if len(others) == 1 else OfSum(fn), others, takes)


def groups(fns: Sequence[Fn], *, streams: Sequence[str] | None = None, takes: Any = ()) -> list[Update]:
    """One function per stream, as in RevGNN: s0 += f0(s1 + s2 + …); s1 += f1(s0); s2 += f2(s1); …"""
    names = [f"s{i}" for i in range(len(fns))] if streams is None else _exactly(len(fns), "streams", streams)
    if len(names) < 2:
        raise ProgramError(f"groups needs at least two functions, it got {len(names)}")
    first, *others = names
    chain = zip(others, fns[1:], names, strict=False)
    return [Update(first, OfSum(fns[0]), others, takes), *(Update(name, fn, before, takes) for name, fn, before in chain)]


def momentum(f: Fn, gamma: float = 0.9, *, streams: Sequence[str] = ("x", "v"), takes: Any = ()) -> list[Update]:
    """v = gamma * v + (1 - gamma) * f(x); x += v. A layer of a momentum residual net; v may start at zero."""
    x, v = _exactly(2, "streams", streams)
    return [Update(v, f, x, takes, Momentum(gamma)), Update(x, itself, v)]


def itself(v: Any) -> Any:
    return v


itself.to_compile = ()  # type: ignore[attr-defined]  # by rg.compile_fns


def invertible(
    forward: Fn, inverse: Fn | None = None, *, stream: str = "x", sources: str | Sequence[str] = (), takes: Any = ()
) -> list[Update]:
    """x = forward(x, *sources, **side), undone by inverse(x, *sources, **side): functions of your own.

    Without `inverse` it is `forward.inverse`, as modules of invertible nets have it.
    """
    if inverse is None:
        inverse = getattr(forward, "inverse", None)
    if not callable(forward) or not callable(inverse) or isinstance(forward, type):
        raise ProgramError(f"invertible needs a function and its inverse, or a module with both; got {forward!r} and {inverse!r}")
    return [Update(stream, Arguments(forward, inverse), sources, takes, Invertible(forward, inverse))]


def _exactly(count: int, what: str, given: Sequence[Any]) -> Sequence[Any]:
    if isinstance(given, str) or len(given) != count:
        raise ProgramError(f"{what} must have {count} items, got {given!r}")
    return given
