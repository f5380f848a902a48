"""One call of fn, watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import errors
from .._base.pytrees import flatten, tensors
from .._exact import cuda as fused
from .._exact.sketch import Table, take
from .._exact.streams import Exact, Note, read
from ..rules import Add, Inverted
from ..update import Update
from .replay import replaying

Streams: TypeAlias = dict[str, Any]
_version = attrgetter("_version")
_SEE = "Return what the rule of this update takes (docs/rules.md)"

observer: Callable[..., None] | None = None  # rg.check looks over the engine's shoulder through this, after a call …
entering: Callable[..., None] | None = None  # … and before it


def sources_of(update: Update, state: Streams) -> list[Any]:
    """What fn reads; a stream that it reads twice is one and the same."""
    if len(update.sources) == 1:
        value = state[update.sources[0]]
        return [value if type(value) is Tensor else read(value)]
    seen = {name: read(state[name]) for name in update.sources}
    return [seen[name] for name in update.sources]


def call(index: int, update: Update, state: Streams, sources: list[Any], side: Mapping[str, Any], mode: Any = None) -> Any:
    """fn's output, under a mode if one is given; the streams and the side inputs are as they were, or it is an error."""
    kwargs = update.side_inputs(side) if side and update.takes else {}
    own: list[Any] = [*sources, *state.values(), *kwargs.values()]
    try:
        versions = list(map(_version, own))
    except (AttributeError, RuntimeError):  # trees of tensors have none, nor have inference tensors
        own = [t for value in own for t in tensors(value) if not t.is_inference()]
        versions = list(map(_version, own))
    if entering is not None:
        entering(index, update, state, sources, kwargs)
    try:
        if mode is None:
            out = update.fn(*sources, **kwargs)
        else:
            with mode:
                out = update.fn(*sources, **kwargs)
    except Exception as error:
        where = errors.at(index, update)
        error.add_note(f"raised by fn in {where}" + (f", with takes={[*kwargs]}" if isinstance(error, TypeError) else ""))
        if "saved tensor hooks" in str(error):
            error.add_note("torch.func transforms inside fn need memory='store', or torch.autograd.grad in their place")
        if replaying() and not isinstance(error, (errors.RetrogradeError, torch.OutOfMemoryError)):
            raise errors.raised_again(where, error) from error
        raise
    if list(map(_version, own)) != versions:
        edited = {id(t) for t, version in zip(own, versions, strict=True) if t._version != version}
        raise errors.edited_by_fn(errors.at(index, update), _name_of(edited, update, state, sources, kwargs))
    if observer is not None and not update.rule.saves:
        observe(index, update, sources, out)
    return out


def apply(index: int, update: Update, target: Any, out: Any) -> Any:
    """The target as the rule changes it, by code that may be the user's; what it was given is as it was, or it is an error."""
    return _by_rule(index, update, update.rule.apply, target, out)


def undo(index: int, update: Update, target: Any, out: Any) -> Any:
    """The target as it was before the update. The arithmetic of the library itself is not watched."""
    if not update.rule.saves:
        return update.rule.undo(target, out)
    return _by_rule(index, update, update.rule.undo, target, out)


def _by_rule(index: int, update: Update, step: Callable[[Any, Any], Any], target: Any, out: Any) -> Any:
    own = [t for t in tensors((target, out)) if not t.is_inference()]
    versions = [t._version for t in own]
    try:
        made = step(target, out)
    except Exception as error:
        error.add_note(f"raised by the rule of {errors.at(index, update)}")
        raise
    if [t._version for t in own] != versions:
        raise errors.edited_by_rule(errors.at(index, update), step.__name__)
    for t in flatten(made)[0]:
        if not isinstance(t, Tensor):
            raise errors.no_tensor(errors.at(index, update), step.__name__, t)
    return made


def put_on(
    index: int, update: Update, target: Any, out: Any, table: Callable[[], Table] | None, *, back: bool = False, known: Any = None
) -> tuple[Any, list[float] | None]:
    """The target as its rule changes it, or changes it `back`; and the sketch of `out` (sketch.py).

    `known`: what the target was before, where the change cannot be undone.
    """
    rule, row = update.rule, None
    if table is not None:
        sign = 0 if known is not None else _sign(rule, back)
        if sign and (made := _fused(index, target, out, sign, table)) is not None:
            return made, None
        row = take(index, out, table)
    if known is not None:
        return known, row
    return (undo(index, update, target, out) if back else rule.apply(target, out)), row


def _sign(rule: Any, back: bool) -> int:
    """1 if the target is added to, -1 if it is subtracted from, 0 if something else is done to it."""
    inner = rule.rule if isinstance(rule, Inverted) else rule
    return 0 if type(inner) is not Add else -1 if back is (rule is inner) else 1


def _fused(index: int, target: Any, out: Any, sign: int, table: Callable[[], Table]) -> Any:
    """The addition and the sketch in one CUDA kernel, or None where there is none."""
    if isinstance(target, Exact) and target.on_cuda:
        table().start(index)
        return target.plus(out, sign, Note(table(), index))
    if isinstance(target, Tensor) and isinstance(out, Tensor) and target.is_cuda and fused.addable(target, out):
        table().start(index)
        return fused.add(target, out, sign, 0, table().row(index, target.device))
    return None


def observed() -> bool:
    """Whether `rg.check` wants to see what calls return."""
    return observer is not None


def observe(index: int, update: Update, seen: list[Any], out: Any) -> None:
    """Tell `rg.check` what a call saw and gave. A rule that saves has seen the target as well."""
    if observer is not None:
        observer(index, update, seen, out)


def _name_of(edited: set[int], update: Update, state: Streams, sources: list[Any], kwargs: Mapping[str, Any]) -> str:
    for name, value in (*zip(update.sources, sources, strict=True), *state.items()):
        if any(id(t) in edited for t in tensors(value)):
            return f"its source {name!r}" if name in update.sources else f"the stream {name!r}"
    return next(f"the side input {name!r}" for name, value in kwargs.items() if any(id(t) in edited for t in tensors(value)))


def fitting(index: int, update: Update, target: Any, out: Any) -> Any:
    """fn's output, if its rule can apply it to the target."""
    why = update.rule.mismatch(target, out)
    if why:
        way_out = (
            "Return one tensor of the stream's shape (of attention, `out[0]`)" if update.rule.symbol in ("+=", "=") else _SEE
        )
        raise errors.ProgramError(f"{why}. {way_out}", errors.at(index, update))
    if isinstance(target, Exact) and target.form.ledger is not None:
        target.form.ledger.index = index
    return out
