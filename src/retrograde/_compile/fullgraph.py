"""The path of `torch.compile(fullgraph=True)`: a stretch of updates becomes one autograd Function, traced with the model around.

Forward keeps the final streams. Backward goes down the list: run fn once more for its output and its gradient (`torch.func.vjp`),
undo the update, go on. There are no hooks in a trace, and what the engine checks at run time is looked up in the trace itself
(fullgraph_check.py): a function that draws random numbers, edits what is not its own, or uses a tensor that needs a gradient and
is neither its parameter nor its argument is refused, as its second run would be another or its gradient incomplete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import errors
from .. import memory as policies
from .._base.function_modules import Held
from .._base.pytrees import dense, flatten, tensors, unflatten
from .._base.tracing import at_trace_time, named, refuse
from .._exact.choose import check_arithmetic, exact_streams, held_in_sixteen_bits, refuse_growth, targets_of
from .._exact.range import Ledger
from .._exact.streams import carried, read
from ..update import Program, Update
from .fullgraph_backward import backward, call
from .fullgraph_check import check_update, note_given, note_made, second_run, transformed


class Plan:
    """What the trace needs to know of a program: for each update a module that holds its fn, and all parameters and buffers."""

    def __init__(self, program: Program):
        self.names = sorted(program.names)
        self.where = [errors.at(index, update) for index, update in enumerate(program.updates)]
        self.sixteen = held_in_sixteen_bits([Held(update.fn) for update in program.updates])
        self.bodies = [_body(index, update) for index, update in enumerate(program.updates)]
        # whether the rule does the work itself: it has modules, or its fn hands over what may be anything, or nothing
        self.inside = [bool(Held(None, update.rule).roots) or update.rule.alone for update in program.updates]
        self.slots: list[tuple[int, tuple[str, ...], str]] = []  # of each distinct one: where a module that has it keeps it
        self.own: list[list[tuple[str, int]]] = []  # for each update: the names of its own, and slots
        known: dict[int, int] = {}
        for index, body in enumerate(self.bodies):
            self.own.append([])
            for prefix, module in body.named_modules():  # each once, though it may have several names
                path = prefix.split(".") if prefix else []
                for last, t in (*module._parameters.items(), *module._buffers.items()):
                    if t is None:
                        continue
                    if id(t) not in known:
                        known[id(t)] = len(self.slots)
                        self.slots.append((index, tuple(path), last))
                    self.own[-1].append((".".join([*path, last]), known[id(t)]))


class _Holder(nn.Module):
    """A function that is no module, with the modules that it holds on to."""

    def __init__(self, fn: Any, parts: Iterable[nn.Module]):
        super().__init__()
        self.fn, self.parts = (fn,), nn.ModuleList(dict.fromkeys(parts))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn[0](*args, **kwargs)


def _body(index: int, update: Update) -> nn.Module:
    if isinstance(update.fn, torch._dynamo.OptimizedModule):
        raise errors.ProgramError(
            "fn is compiled already, and under fullgraph=True the whole model is. Give the function itself",
            errors.at(index, update),
        )
    roots = Held(update.fn, update.rule).roots
    return roots[0] if roots == [update.fn] else _Holder(update.fn, roots)


@at_trace_time
def _prepare(key: str | None, streams: tuple[str, ...], side: tuple[str, ...]) -> bool:
    if key is None:
        raise errors.ProgramError(
            "a trace cannot look into a list of updates, as it may change. Under fullgraph=True make a module of them: "
            "rg.Reversible(updates) in the model's __init__"
        )
    program = named(key)
    program.check(dict.fromkeys(streams, torch.empty(0)), dict.fromkeys(side))
    make_plan(program)
    return True


def make_plan(program: Program) -> None:
    """Its plan; the same object as long as it holds, as traces depend on it."""
    plan = Plan(program)
    targets_of(program)
    if "plan" not in program.notes or vars(program.notes["plan"]) != vars(plan):
        program.notes["plan"] = plan


def run(program: Any, streams: Any, side: Any, memory: Any, arithmetic: str) -> dict[str, Any]:
    """`rg.run`, inside a trace."""
    side = dict(side or {})
    _prepare(program.key if isinstance(program, Program) else None, tuple(streams), tuple(side))
    plan = program.notes["plan"]
    check_arithmetic(arithmetic)
    inside = second_run() or transformed() or not torch.is_grad_enabled()
    state = {name: dense(value) if name in plan.names and not inside else value for name, value in streams.items()}
    stretches = policies.plan(memory, program, state)
    exact = exact_streams(arithmetic, program, state)
    ledger = Ledger(program.updates, list(exact))
    for name in exact:
        state[name] = carried(state[name], ledger, exact[name])
    start = 0
    for kind, count, limit in stretches:
        if kind == "store" or inside:
            _store(program, plan, range(start, start + count), state, side)
        elif limit is not None:
            refuse("rg.Budget counts bytes as it goes, which a trace cannot. Under fullgraph=True use rg.StoreLast(k)")
        elif kind == "checkpoint":
            for index in range(start, start + count):
                _reverse(program, plan, index, index + 1, state, side, True)
        else:
            refuse_growth(program, range(start, start + count), state)
            _reverse(program, plan, start, start + count, state, side, False)
        start += count
    for name in exact:
        state[name] = read(state[name])
    return state


def _store(program: Program, plan: Plan, indices: range, state: dict[str, Any], side: dict[str, Any]) -> None:
    for index in indices:
        update = program.updates[index]
        out = update.fn(*[read(state[name]) for name in update.sources], **update.side_inputs(side))
        state[update.target] = update.rule.apply(state[update.target], _fitting(plan, index, update, state[update.target], out))


def _fitting(plan: Plan, index: int, update: Update, target: Any, out: Any) -> Any:
    if update.rule.mismatch(target, out):  # its text is none yet: shapes are symbols here
        refuse(
            "fn returned another tree, shape, dtype or device than the target has. Without torch.compile the error says which",
            plan.where[index],
        )
    return out


def _applied(job: Job, index: int, target: Any, out: Any) -> Any:
    update = job.program.updates[index]
    made = update.rule.apply(target, _fitting(job.plan, index, update, target, out))
    if flatten(made)[1] != flatten(target)[1]:
        refuse("the rule makes another tree of the target, which a trace cannot follow", job.plan.where[index])
    return made


class Job:
    """One stretch: what is not a tensor, for forward and backward."""

    def __init__(self, program: Program, plan: Plan, start: int, stop: int, keeps: bool):
        self.program, self.plan, self.start, self.stop = program, plan, start, stop
        self.keeps = keeps  # the streams before, in place of those after
        self.targets: list[str] = []
        self.specs: dict[str, Any] = {}  # of each stream, how many tensors it is made of and what puts them together
        self.side_leaves: list[Any] = []  # with None for tensors
        self.side_needs: list[bool] = []  # whether each tensor among them needs a gradient
        self.side_spec: Any = None
        self.own_needs: list[bool] = []
        self.modes: list[Any] = []

    def state(self, rest: Any) -> dict[str, Any]:
        return {name: unflatten([next(rest) for _ in range(count)], spec) for name, (count, spec) in self.specs.items()}

    def side(self, given: list[Any]) -> Any:
        if self.side_spec is None:
            return {}
        rest = iter(given)
        return unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in self.side_leaves], self.side_spec)


_TENSOR = "a tensor stands here"


def _reverse(program: Any, plan: Plan, start: int, stop: int, state: Any, side: Any, keeps: bool) -> None:
    """One Function for these updates; `state` has the streams after them."""
    job = Job(program, plan, start, stop, keeps)
    targets = {program.updates[index].target for index in range(start, stop)}
    used = targets.union(*(program.updates[index].sources for index in range(start, stop)))
    given: list[Tensor] = []
    for name in plan.names:
        if name in used:
            flat, spec = flatten(state[name])
            job.specs[name] = len(flat), spec
            given += flat
    job.targets = [name for name in job.specs if name in targets]
    flat, job.side_spec = flatten(side) if side else ([], None)
    job.side_leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat]
    given_side = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    job.side_needs = [t.requires_grad for t in given_side]
    job.modes = _modes(given)
    own = [_own(plan.bodies[index], path, name) for index, path, name in plan.slots]
    job.own_needs = [t.requires_grad for t in own]
    views = [t.view_as(t) for t in (*given, *given_side, *own)]
    kept = [keeps or name not in targets for name, (count, _) in job.specs.items() for _ in range(count)]
    note_given((*kept, *(True for _ in views[len(kept) :])))
    made = _Stretch.apply(job, *views)
    if not keeps:
        note_made(len([t.detach() for t in made]))
    rest = iter(made)
    for name in job.targets:
        count, spec = job.specs[name]
        state[name] = unflatten([next(rest) for _ in range(count)], spec)


def _own(body: Any, path: tuple[str, ...], name: str) -> Tensor:
    for part in path:
        body = body._modules[part]
    return body._parameters[name] if name in body._parameters else body._buffers[name]


def _modes(given: list[Tensor]) -> list[tuple[str, bool, torch.dtype]]:
    """Autocast, as backward is to find it: it is traced wherever forward is, and runs outside of it."""
    devices = dict.fromkeys([*(t.device.type for t in given), "cpu"])
    return [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]


def _under(modes: list[Any], call: Callable[..., Any], *args: Any) -> Any:
    if not modes:
        return call(*args)
    device, enabled, dtype = modes[0]
    with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
        return _under(modes[1:], call, *args)


# Up to then, in a trace, the gradient of an output that an operation returned unchanged, as `.to` may, was zero. Not so a view's,
# which cannot be edited in place.
_LOSES_UNCHANGED = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


class _Stretch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Job, *given: Tensor) -> tuple[Tensor, ...]:
        first = sum(count for count, _ in job.specs.values())
        state = job.state(iter(given[:first]))
        before = dict(state)
        side_tensors = list(given[first : first + len(job.side_needs)])
        side, own = job.side(side_tensors), list(given[first + len(job.side_needs) :])
        for index in range(job.start, job.stop):
            update = job.program.updates[index]
            sources, target = [read(state[name]) for name in update.sources], state[update.target]
            state[update.target] = call(job, index, own, sources, side, partial(_applied, job, index, target))
            check_update(job.plan.where[index])
        for name in job.targets if _LOSES_UNCHANGED else ():
            flat, spec = flatten(state[name])
            state[name] = unflatten([t.view_as(t) for t in flat], spec)
        ctx.job = job
        kept = before if job.keeps else state
        ctx.save_for_backward(*[t for name in job.specs for t in tensors(kept[name])], *side_tensors, *own)
        return tuple(t for name in job.targets for t in tensors(state[name]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        job: Job = ctx.job
        return _under(job.modes, backward, job, list(ctx.saved_tensors), list(grads))
