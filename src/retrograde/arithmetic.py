"""Which streams are added to exactly, and addition itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import ProgramError, at, too_deep, unknown
from .exact import Exact
from .held import Held, bare
from .outline import dtypes_of
from .streams import each, tensors

NAMES = ("auto", "exact", "float")
_AUTO = "Use arithmetic='auto': streams that are only added to are exact then where functions compute in 16 bits"
_ANCHOR = "Use arithmetic='float' with rg.Anchor(every=n) or memory='checkpoint'"
SIXTEEN = (torch.bfloat16, torch.float16)


def check_arithmetic(name: str) -> str:
    if name not in NAMES:
        raise unknown("arithmetic", name, NAMES)
    return name


def plus(target: Any, out: Any, sign: int = 1) -> Any:
    """`target + out`, or minus for sign -1, in the stream's own dtype, as `target += out` would leave it."""
    if isinstance(target, Tensor):
        total = target + out if sign > 0 else target - out
        return total if total.dtype == target.dtype else total.to(target.dtype)
    if isinstance(target, Exact):
        return target.plus(out, sign)
    return each(lambda a, b: plus(a, b, sign), target, out)


def exact_streams(name: str, program: Any, streams: dict[str, Any], known: Any = None) -> dict[str, bool]:
    """The streams carried exactly, and whether each is multiplied. `known` is what is seen of fns at a glance.

    "auto": all that can be, if some fn computes in 16 bits, or if undoing divides a stream and rounding errors with it.
    """
    if name == "float":
        return {}
    if name == "auto":
        held = program.plan.sixteen if torch.compiler.is_dynamo_compiling() else None  # a trace knows it already
        fits = _real if program.multiplied else _short if _sixteen_bits(program, streams, held, known) else None
        return {t: program.exact[t] for t in program.exact if fits is not None and all(map(fits, tensors(streams[t])))}
    if program.inexact:
        index, why = program.inexact
        raise ProgramError(f"arithmetic='exact' {why}", at(index, program.updates[index]))
    for target in program.exact:
        for t in tensors(streams[target]):
            if t.is_complex() or t.device.type == "mps":
                what = "complex numbers" if t.is_complex() else "mps, which has no float64"
                raise ProgramError(f"arithmetic='exact' does not know {what} (the stream {target!r}). Use arithmetic='float'")
    return program.exact


def exact_targets(updates: Sequence[Any]) -> tuple[dict[str, bool], tuple[int, str] | None]:
    """The targets that exact arithmetic can carry, and whether each is multiplied; the first update that it cannot, and why."""
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
    return {target: multiplied for target, multiplied in found.items() if target not in beyond}, first


def refuse_growth(program: Any, indices: Sequence[int], state: dict[str, Any]) -> None:
    """Products in float: undoing them makes rounding errors larger, and from some depth on nothing is left of the stream."""
    grown: dict[str, float] = {}
    for index in reversed(indices) if program.multiplied else ():
        update = program.updates[index]
        if update.target in program.multiplied and not isinstance(state[update.target], Exact) and update.rule.linear:
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


def _sixteen_bits(program: Any, streams: dict[str, Any], held: bool | None, known: Any) -> bool:
    given = [t for name in program.names for t in tensors(streams[name])]
    if any(t.dtype in SIXTEEN for t in given):
        return True
    if any(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) in SIXTEEN for d in {t.device.type for t in given}):
        return True
    return held_in_sixteen_bits(program, known) if held is None else held


def held_in_sixteen_bits(program: Any, known: Any = None) -> bool:
    """Whether a parameter of some fn, or a tensor that it holds, is of 16 bits."""
    todo: list[Any] = []
    updates = program.updates
    if known is not None:
        if not dtypes_of(known).isdisjoint(SIXTEEN):
            return True
        updates = [update for update, glance in zip(updates, known, strict=True) if glance is None]
    for fn in map(bare, {id(update.fn): update.fn for update in updates}.values()):
        if isinstance(fn, torch.nn.Module):
            todo.append(fn)
        else:
            held = Held(fn)
            todo += held.roots
            if any(t.dtype in SIXTEEN for t in held.tensors):
                return True
    seen = set(todo)
    while todo:
        module = todo.pop()
        for p in module._parameters.values():
            if p is not None and p.dtype in SIXTEEN:
                return True
        sharded = getattr(type(module), "_get_fsdp_state", None)  # what it will be cast to when it is gathered
        if sharded is not None and sharded(module)._mp_policy.param_dtype in SIXTEEN:
            return True
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)
    return False
