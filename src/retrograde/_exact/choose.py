"""Which streams are added to exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from .._base.function_modules import Held
from .._base.pytrees import tensors
from .._base.torch_private import param_dtype_of_fsdp
from ..errors import ProgramError, at, too_deep, unknown
from .streams import Exact

Arithmetic: TypeAlias = Literal["auto", "exact", "float"]
NAMES: tuple[Arithmetic, ...] = get_args(Arithmetic)
_AUTO = "Use arithmetic='auto': streams that are only added to are exact then where functions compute in 16 bits"
_ANCHOR = "Use arithmetic='float' with rg.Anchor(every=n) or memory='checkpoint'"
SIXTEEN = (torch.bfloat16, torch.float16)


def check_arithmetic(name: Any) -> Arithmetic:
    if name not in NAMES:
        raise unknown("arithmetic", name, NAMES)
    return name


def exact_streams(name: str, program: Any, streams: dict[str, Any], held: Sequence[Held] = ()) -> dict[str, bool]:
    """The streams carried exactly, and whether each is multiplied. `held` is what the functions hold.

    "auto": all that can be, if some fn computes in 16 bits, or if undoing divides a stream and rounding errors with it.
    """
    targets = targets_of(program)
    if name == "float" and not targets.lossy:
        return {}
    if name == "auto" and not targets.lossy:
        fits = _real if targets.multiplied else _short if _sixteen_bits(program, streams, held) else None
        return {t: targets.exact[t] for t in targets.exact if fits is not None and all(map(fits, tensors(streams[t])))}
    if targets.beyond:
        index, why = targets.beyond
        raise ProgramError(f"arithmetic='exact' {why}", at(index, program.updates[index]))
    for target in targets.exact:
        for t in tensors(streams[target]):
            if t.is_complex() or t.device.type == "mps":
                what = "complex numbers" if t.is_complex() else "mps, which has no float64"
                raise ProgramError(f"arithmetic='exact' does not know {what} (the stream {target!r}). Use arithmetic='float'")
    return targets.exact


def drifting(program: Any, state: dict[str, Any]) -> set[str]:
    """The streams that undoing recovers with rounding errors: those that are not carried exactly, and those made of them."""
    found = {name for name in program.changing if not isinstance(state[name], Exact)}
    grew = bool(found) and found != program.changing
    while grew:
        more = {update.target for update in program.updates if not found.isdisjoint(update.sources)} - found
        grew = bool(more)
        found |= more
    return found


class Targets(NamedTuple):
    """Of a program: the streams that exact arithmetic can carry, and whether each is multiplied; the first update that it cannot
    follow, and why; all streams that are multiplied."""

    exact: dict[str, bool]
    beyond: tuple[int, str] | None
    multiplied: set[str]
    lossy: bool  # some rule needs streams that are carried exactly, whatever the arithmetic


def targets_of(program: Any) -> Targets:
    """Worked out once for each program."""
    if "targets" not in program.notes:
        program.notes["targets"] = _targets(program.updates)
    return program.notes["targets"]


def _targets(updates: Sequence[Any]) -> Targets:
    found: dict[str, bool] = {}
    rest: dict[str, int] = {}
    beyond: set[str] = set()
    first: tuple[int, str] | None = None
    for index, update in enumerate(updates):
        target, rule, why = update.target, update.rule, None
        found.setdefault(target, False)
        if rule.product is None:
            kind = type(getattr(rule, "rule", rule)).__name__
            gamma = ", by no fraction with a denominator up to 4096" if kind == "Momentum" else ""
            why = f"is for additions and momentum, and the rule here is {kind}{gamma}. {_AUTO}"
        elif rule.product != (1, 1):
            n, d = rule.product
            found[target] = True
            rest[target] = rest.get(target, 0) // n * d + d - 1  # what `rest` may grow to (exact._product)
            if rest[target] >= 2**63 and target not in beyond:
                count = sum(u.target == target and u.rule.product == (n, d) for u in updates[:index])
                why = f"keeps what products lose in 63 bits, enough for {count} by {n}/{d}, and here is one more. {_ANCHOR}"
        if why is not None:
            first = first or (index, why)
            beyond.add(target)
    multiplied = {update.target for update in updates if (update.rule.linear or (1,))[0] != 1}
    exact = {target: product for target, product in found.items() if target not in beyond}
    return Targets(exact, first, multiplied, any(update.rule.loses for update in updates))


def refuse_growth(program: Any, indices: Sequence[int], state: dict[str, Any]) -> None:
    """Products in float: undoing them makes rounding errors larger, and from some depth on nothing is left of the stream."""
    grown: dict[str, float] = {}
    multiplied = targets_of(program).multiplied
    for index in reversed(indices) if multiplied else ():
        update = program.updates[index]
        if update.target in multiplied and not isinstance(state[update.target], Exact) and update.rule.linear:
            grown[update.target] = max(grown.get(update.target, 1.0), 1.0) / update.rule.linear[0]
            rounding = [
                torch.finfo(t.dtype).eps for t in tensors(state[update.target]) if t.is_floating_point() or t.is_complex()
            ]
            error = grown[update.target] * max(rounding, default=0.0)
            if error > 1e-2:
                raise too_deep(at(index, update), error)


def _real(t: Tensor) -> bool:
    return not t.is_complex() and t.device.type != "mps"


def _short(t: Tensor) -> bool:
    """Autocast does not touch float64; and mps has none of it."""
    return _real(t) and t.dtype != torch.float64


def _sixteen_bits(program: Any, streams: dict[str, Any], held: Sequence[Held]) -> bool:
    given = [t for name in program.names for t in tensors(streams[name])]
    if any(t.dtype in SIXTEEN for t in given):
        return True
    devices = {t.device.type for t in given} - {"meta"}  # which autocast does not know
    if any(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) in SIXTEEN for d in devices):
        return True
    if torch.compiler.is_dynamo_compiling():
        return program.notes["plan"].sixteen  # a trace knows it already
    return held_in_sixteen_bits(held)


def held_in_sixteen_bits(held: Sequence[Held]) -> bool:
    """Whether a parameter of some fn is of 16 bits."""
    modules = list(dict.fromkeys(module for one in held for module in one.modules))
    slots = [module._parameters.values() for module in modules if module._parameters]
    if any(p is not None and p.dtype in SIXTEEN for values in slots for p in values):
        return True
    return any(param_dtype_of_fsdp(module) in SIXTEEN for module in modules)
