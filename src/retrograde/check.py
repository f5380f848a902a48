"""Is my net right under its memory policy? Compared with ordinary autograd on the same weights, inputs and random numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from . import call as calls
from .errors import ProgramError, RetrogradeError, at
from .held import Held
from .modules import Reversible, ReversibleSequence
from .replay import Draws, generators, replaying
from .streams import tensors
from .update import Update

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass
class Report:
    """What a check found. `ok`, and if not: `first`, the first update where the two part, and `cause`."""

    ok: bool
    errors: dict[str, float] = field(default_factory=dict)  # relative error of each gradient, by name
    first: str | None = None
    cause: str | None = None

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    def __str__(self) -> str:
        if self.ok:
            return f"gradients agree with memory='store' (largest relative error {self.worst:.1e})"
        name = max(self.errors, key=lambda key: self.errors[key], default=None)
        worst = f"; largest relative error {self.worst:.1e}, of {name}" if name else ""
        where = f"\nfirst (backward goes from the last update to update 0) at {self.first}: " if self.first else ": "
        return f"gradients differ from memory='store'{worst}{where}{self.cause}"


def gradients(net: nn.Module, /, *inputs: Any, **side: Any) -> Report:
    """Compare the gradients of `net(*inputs, **side)` under its own memory policy with memory="store".

    Gradients of parameters, inputs and side inputs; tolerance 1e-9 in float64, 1e-4 in float32, 5e-3 below. Nothing is left
    changed: no `.grad`, no buffer, no random state. If they differ, the report names the first update where they part.

    >>> import torch, retrograde as rg
    >>> net = rg.ReversibleSequence([(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)])
    >>> rg.check.gradients(net, torch.randn(2, 4)).ok
    True
    """
    if not isinstance(net, nn.Module):
        raise ProgramError(f"a module is needed, got a {type(net).__name__}. Put a list of updates into rg.Reversible")
    programs = [m for m in net.modules() if isinstance(m, (Reversible, ReversibleSequence))]
    if not programs:
        raise ProgramError(f"{type(net).__name__} contains no rg.Reversible and no rg.ReversibleSequence")
    policies = [program.memory for program in programs]
    log = _Log()
    try:
        with log.watching():
            mine = _gradients(net, inputs, side)
    except RetrogradeError as error:
        return Report(ok=False, first=error.where, cause=str(error))
    try:
        for program in programs:
            program.memory = "store"
        true = _gradients(net, inputs, side)
    finally:
        for program, policy in zip(programs, policies, strict=True):
            program.memory = policy
    total = sum(float(g.abs().double().square().sum()) for g in true.values()) ** 0.5
    if not math.isfinite(total):
        return Report(ok=False, cause="gradients are not finite under memory='store' either")
    errors = {name: _relative(mine[name], true[name], total * _noise(true[name])) for name in true}
    bad = [name for name in true if not errors[name] <= _tolerance(true[name])]
    if not bad:
        return Report(ok=True, errors=errors)
    first, cause = log.parting or log.of_parameter(net, bad)
    return Report(ok=False, errors=errors, first=first, cause=cause)


class _Log:
    """What every fn was given and returned in its first run, compared with its second run."""

    def __init__(self) -> None:
        self.calls: dict[Any, list[tuple[list[Tensor], list[Tensor]]]] = {}
        self.names: dict[Any, tuple[str, Update]] = {}
        self.parting: tuple[str, str] | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        calls.observer = self
        try:
            yield
        finally:
            calls.observer = None

    def __call__(self, index: int, update: Update, sources: list[Any], out: Any) -> None:
        key, name = (index, id(update)), at(index, update)
        self.names[key] = (name, update)
        seen = [t.detach().clone() for t in tensors(sources)]
        gave = [t.detach().clone() for t in tensors(out)]
        if not replaying():
            self.calls.setdefault(key, []).append((seen, gave))
        elif self.calls.get(key) and self.parting is None:
            then_seen, then_gave = self.calls[key].pop()
            apart = max(map(_relative, seen, then_seen), default=0.0)
            apart_out = max(map(_relative, gave, then_gave), default=0.0)
            if apart > _tolerance(*seen):
                cause = f"its sources were recovered with a relative error of {apart:.1e} (drift, or an update above it)"
                self.parting = (name, cause)
            elif apart_out > 10 * _tolerance(*gave):
                cause = (
                    f"fn returned something else in its second run, relative difference {apart_out:.1e}: it is random or stateful"
                )
                self.parting = (name, cause)

    def of_parameter(self, net: nn.Module, bad: list[str]) -> tuple[str | None, str]:
        parameters = dict(net.named_parameters())
        for name, update in reversed(self.names.values()):
            owned = {id(p) for m in Held(update.fn).modules for p in m._parameters.values()}
            for key in bad:
                if id(parameters.get(key)) in owned:
                    return name, f"the gradient of its parameter {key} differs"
        return None, f"the gradient of {bad[0]} differs"


def _gradients(net: nn.Module, inputs: Any, side: dict[str, Any]) -> dict[str, Tensor]:
    """All gradients of net under fixed random cotangents, by name; everything is put back."""
    flat, spec = tree_flatten((inputs, side))
    flat = [
        t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex()) if isinstance(t, Tensor) else t for t in flat
    ]
    draws = Draws(generators(flat) + Held(net).generators)
    before = [(m._buffers, name, b, b.detach().clone()) for m in net.modules() for name, b in m._buffers.items() if b is not None]
    wanted = {name: p for name, p in net.named_parameters() if p.requires_grad}
    wanted |= {f"input {i}": t for i, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad}
    try:
        args, kwargs = tree_unflatten(flat, spec)
        with torch.enable_grad():
            outs = [t for t in tree_leaves(net(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        generator = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outs]
        found = torch.autograd.grad(outs, list(wanted.values()), cotangents, allow_unused=True)
    finally:
        draws.put_back()
        with torch.no_grad():
            for slots, name, buffer, copy in before:
                slots[name] = buffer.copy_(copy)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(wanted.items(), found, strict=True)}


def _relative(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """The error of `a` against the size of `b`, or against `least` where that is more."""
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
    a, b = a.double(), b.double()
    scale = max(float(b.norm()), least)
    apart = float((a - b).norm())
    return apart / scale if scale else apart


def _noise(t: Tensor) -> float:
    """Gradients this much smaller than all of them together are rounding errors, like that of a bias before a BatchNorm."""
    return 10 * torch.finfo(t.dtype).eps / _tolerance(t)


def _tolerance(*given: Tensor) -> float:
    return max((_TOLERANCE.get(t.dtype, 5e-3) for t in given), default=0.0)
