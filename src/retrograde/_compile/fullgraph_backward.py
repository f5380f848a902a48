"""Backward of a stretch in a trace: down the list of updates, each run once more for its output and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn.utils.stateless import _reparametrize_module

from .._base.pytrees import flatten, unflatten
from .._exact.streams import Exact, read
from .fullgraph_check import refuse_edit, second_run


def call(job: Any, index: int, own: list[Tensor], sources: list[Any], side: Any, then: Callable[[Any], Any]) -> Any:
    """`then` of what fn returns, with these for parameters and buffers: functional_call without its search for tied ones."""
    update, body = job.program.updates[index], job.plan.bodies[index]
    held = {name: own[slot] for name, slot in job.plan.own[index]}
    with _reparametrize_module(body, held):
        made = then(body(*sources, **update.side_inputs(side)))
    for name, slot in job.plan.own[index]:
        if held[name] is not own[slot]:  # what stands there after the call
            refuse_edit(job.plan.where[index])
    return made


def backward(job: Any, saved: list[Tensor], grads: list[Tensor]) -> tuple[Any, ...]:
    """The gradients of all that the stretch was given, from the tensors that it saved and those of what it returned."""
    first = sum(count for count, _ in job.specs.values())
    state = job.state(iter(saved[:first]))
    side_tensors, own = saved[first : first + len(job.side_needs)], saved[first + len(job.side_needs) :]
    grad: dict[str, list[Any]] = {name: [None] * count for name, (count, _) in job.specs.items()}
    rest = iter(grads)
    for name in job.targets:
        grad[name] = [next(rest) for _ in grad[name]]
    of_side: list[Any] = [None] * len(side_tensors)
    of_own: list[Any] = [None] * len(own)
    for index in reversed(range(job.start, job.stop)):
        _back(job, index, state, grad, side_tensors, of_side, own, of_own)
    return (None, *[g for name in job.specs for g in grad[name]], *of_side, *of_own)


def _back(
    job: Any,
    index: int,
    state: dict[str, Any],
    grad: dict[str, list[Any]],
    side_tensors: list[Tensor],
    of_side: list[Any],
    own: list[Tensor],
    of_own: list[Any],
) -> None:
    """One update: run fn again, undo it, add its gradients."""
    update = job.program.updates[index]
    names = list(dict.fromkeys(update.sources))
    slots = list(dict.fromkeys(slot for _, slot in job.plan.own[index] if job.own_needs[slot]))
    needed = [i for i, needs in enumerate(job.side_needs) if needs]
    seen = {name: flatten(read(state[name])) for name in names}
    after, given = state[update.target], grad[update.target]

    def again(leaves: list[Tensor], mine: list[Tensor], theirs: list[Tensor], then: Callable[[Any], Any]) -> Any:
        values = {
            name: unflatten(part, spec) for name, part, (_, spec) in zip(names, _put(leaves, seen), seen.values(), strict=True)
        }
        parameters = list(own)
        for slot, t in zip(slots, mine, strict=True):
            parameters[slot] = t
        side = list(side_tensors)
        for i, t in zip(needed, theirs, strict=True):
            side[i] = t
        return call(job, index, parameters, [values[name] for name in update.sources], job.side(side), then)

    leaves = [t for flat, _ in seen.values() for t in flat if _smooth(t)]
    inputs = leaves, [own[slot] for slot in slots], [side_tensors[i] for i in needed]
    second_run(1)
    if job.plan.inside[index]:
        before, of_before, found = _of_whole(update, again, inputs, after, given, job.keeps)
    else:
        before, of_before, found = _of_parts(update, again, inputs, after, given, job.keeps)
    second_run(-1)
    state[update.target], grad[update.target] = before, of_before
    of_leaves, of_mine, of_theirs = found
    rest = iter(of_leaves)
    for name in names:
        flat = seen[name][0]
        parts = [next(rest) if _smooth(t) else None for t in flat]
        if isinstance(state[name], Exact):
            parts = state[name].grads_to(parts)
        grad[name] = [_sum(a, b) for a, b in zip(grad[name], parts, strict=True)]
    for slot, g in zip(slots, of_mine, strict=True):
        of_own[slot] = _sum(of_own[slot], g)
    for i, g in zip(needed, of_theirs, strict=True):
        of_side[i] = _sum(of_side[i], g)


def _of_parts(update: Any, again: Any, inputs: Any, after: Any, given: list[Any], keeps: bool) -> tuple[Any, list[Any], Any]:
    """The target before, its gradients and those of all inputs, from one run of fn; the rule is differentiated beside it."""
    rule = update.rule

    def fn(leaves: list[Tensor], mine: list[Tensor], theirs: list[Tensor]) -> Any:
        out = again(leaves, mine, theirs, _as_it_is)
        parts = flatten(out)[0] if rule.linear is None else _partners(after, out)
        return [part if _smooth(part) else part.to(torch.float32) for part in parts], out

    made: Any = vjp(fn, *inputs, has_aux=True)
    parts, pull, out = made
    before = after if keeps else rule.undo(after, out)
    if rule.linear is None:
        _, back, *_ = vjp(rule.apply, before, out)
        of_before, of_out = back(unflatten(given, flatten(after)[1]))
        return before, flatten(of_before)[0], pull(flatten(of_out)[0])
    a, b = rule.linear
    heads = after.heads(given) if isinstance(after, Exact) else given
    of_parts = [(g if b == 1 else -g if b == -1 else g * b).to(part.dtype) for g, part in zip(heads, parts, strict=True)]
    return before, given if a == 1 else [g * a if g is not None and _smooth(g) else g for g in given], pull(of_parts)


def _of_whole(update: Any, again: Any, inputs: Any, after: Any, given: list[Any], keeps: bool) -> tuple[Any, list[Any], Any]:
    """The same where the rule does the work itself: fn and rule are differentiated as one."""
    rule = update.rule
    before = after if keeps else again(*inputs, lambda out: rule.undo(after, out))
    flat, spec = flatten(before)

    def whole(leaves: list[Tensor], mine: list[Tensor], theirs: list[Tensor], targets: list[Tensor]) -> Any:
        rest = iter(targets)
        target = unflatten([next(rest) if _smooth(t) else t for t in flat], spec)
        made = flatten(again(leaves, mine, theirs, lambda out: rule.apply(target, out)))[0]
        return [t for t in made if _smooth(t)]

    targets = [t for t in flat if _smooth(t)]
    made, pull, *_ = vjp(whole, *inputs, targets)
    heads = [g for g in given if g is not None and _smooth(g)]
    *found, of_targets = pull([g.to(t.dtype) for g, t in zip(heads, made, strict=True)])
    rest = iter(of_targets)
    return before, [next(rest) if _smooth(t) else None for t in flat], found


def _as_it_is(out: Any) -> Any:
    return out


def _put(leaves: list[Tensor], seen: dict[str, Any]) -> list[list[Tensor]]:
    """The leaves of each source, with these for those that have gradients."""
    rest = iter(leaves)
    return [[next(rest) if _smooth(t) else t for t in flat] for flat, _ in seen.values()]


def _partners(value: Any, out: Any) -> list[Tensor]:
    """The leaves of what was added to a stream, in the order of the stream's own."""
    spec = value.form.spec if isinstance(value, Exact) else flatten(value)[1]
    return [out] if spec is None else spec.flatten_up_to(out)


def _smooth(t: Tensor) -> bool:
    """Whether there are gradients of such numbers."""
    return t.is_floating_point() or t.is_complex()


def _sum(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a + b
