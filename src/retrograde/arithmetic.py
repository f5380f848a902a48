"""Which streams are added to exactly, and addition itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import ProgramError, at, unknown
from .exact import Exact
from .held import Held
from .streams import each, tensors

NAMES = ("auto", "exact", "float")
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


def exact_streams(name: str, program: Any, streams: dict[str, Any]) -> list[str]:
    """The streams that are carried exactly. "auto": all that can be, if some function computes in 16 bits."""
    if name == "float":
        return []
    targets = dict.fromkeys(update.target for update in program.updates)
    if name == "auto":
        held = program.plan.sixteen if torch.compiler.is_dynamo_compiling() else None  # a trace knows it already
        if not _sixteen_bits(program, streams, held):
            return []
        other = {update.target for update in program.updates if not update.rule.additive}
        return [t for t in targets if t not in other and all(map(_short, tensors(streams[t])))]
    for index, update in enumerate(program.updates):
        if not update.rule.additive:
            raise ProgramError(
                f"arithmetic='exact' is for additions, and the rule here is {type(update.rule).__name__}. Use arithmetic='auto': "
                "streams that are only added to are exact then where functions compute in 16 bits",
                at(index, update),
            )
    for target in targets:
        for t in tensors(streams[target]):
            if t.is_complex() or t.device.type == "mps":
                what = "complex numbers" if t.is_complex() else "mps, which has no float64"
                raise ProgramError(f"arithmetic='exact' does not know {what} (the stream {target!r}). Use arithmetic='float'")
    return list(targets)


def _short(t: Tensor) -> bool:
    """Autocast does not touch float64; and mps has none of it."""
    return not t.is_complex() and t.dtype != torch.float64 and t.device.type != "mps"


def _sixteen_bits(program: Any, streams: dict[str, Any], held: bool | None) -> bool:
    given = [t for name in program.names for t in tensors(streams[name])]
    if any(t.dtype in SIXTEEN for t in given):
        return True
    if any(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) in SIXTEEN for d in {t.device.type for t in given}):
        return True
    return held_in_sixteen_bits(program) if held is None else held


def held_in_sixteen_bits(program: Any) -> bool:
    """Whether a parameter of some fn, or a tensor that it holds, is of 16 bits."""
    todo: list[Any] = []
    for fn in {id(update.fn): update.fn for update in program.updates}.values():
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
