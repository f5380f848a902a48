"""How far the second run of each fn is from its first: passes over a net that are watched, and that leave nothing changed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._base.function_modules import modules_of
from .._base.generators import Draws, generators
from .._base.pytrees import tensors
from .._base.torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten
from .._engine import call as calls
from .._engine.replay import replaying
from .._exact.streams import read
from ..errors import NotRepeated, ProgramError, RetrogradeError, at
from ..modules import Net, Reversible
from ..rules import Add, Affine, Inverted, Momentum
from ..update import Update
from .lines import Line, Tracer, parting, totals
from .plain_state import Plain, put_back_python, python_states

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass
class Twice:
    """The second run of a fn beside its first."""

    index: int
    update: Update
    absolute: float  # how far its sources are apart …
    relative: float
    output: float  # … and its output: 0 if it is the same to the bit
    drifted: bool  # the sources are further apart than the tolerance …
    parted: bool  # … or the output is
    rounding: float  # how far rounding in another order may take an output
    drawn: list[str]  # random generators outside of torch that the second run drew from
    changed: list[str]  # plain state that the first run changed
    program: str = ""  # name in the net

    @property
    def where(self) -> str:
        return at(self.index, self.update)


class Pass:
    """One forward and backward pass: what every fn was given and returned in its first run, compared with its second run.

    The updates in `traced` are followed line by line.
    """

    def __init__(self, plain: Plain, traced: Collection[str] = ()):
        self.plain, self.traced = plain, traced
        self.gradients: dict[str, Tensor] = {}
        self.error: RetrogradeError | None = None
        self.updates: list[tuple[int, Update]] = []  # in the order of their first runs
        self.twice: list[Twice] = []  # in the order of backward
        self.edited: dict[str, tuple[Update, list[str]]] = {}  # sources that fn edits, by update
        self.changed: dict[str, list[str]] = {}  # plain state that fn changes
        self.undone: dict[str, tuple[Update, float]] = {}  # by how much undo misses what apply was given, for rules of users
        self.custom: dict[str, list[type]] = {}  # autograd.Functions of users that fn calls
        self.traces: dict[str, list[Tracer]] = {}
        self.states = python_states()
        self._inside: list[tuple[Any, Any, Tracer | None]] = []  # calls that have begun, one inside of the other
        self._firsts: dict[Any, list[tuple[list[Tensor], list[Tensor], list[str]]]] = {}

    def need(self) -> dict[str, Tensor]:
        """The gradients."""
        if self.error is not None:
            raise self.error
        return self.gradients

    def line(self, where: str, what: str) -> Line | None:
        """The line that changes `what` in a traced update; or where its second run parts from the first."""
        found = self.traces.get(where, [])
        changed = next((tracer.changed[what] for tracer in found if what in tracer.changed), None)
        return changed or (parting(found[0], found[-1]) if len(found) > 1 else None)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        calls.observer, calls.entering = self, self.enters
        try:
            yield
        finally:
            calls.observer = calls.entering = None
            self._leave(None)
            self._firsts.clear()

    def enters(self, index: int, update: Update, state: dict[str, Any], sources: list[Any], kwargs: Any) -> None:
        """Before a call."""
        tracer, where = None, at(index, update)
        if where in self.traced:
            own = [*sources, *kwargs.values()]

            def mark() -> dict[str, Any]:
                marks = {"drawn": python_states(), "changed": self.plain.marks_of(update.fn)}
                return marks | {"edited": [totals(value) for value in own]}

            tracer = Tracer(mark)
            self.traces.setdefault(where, []).append(tracer)
        self._inside.append(((index, update), ([totals(source) for source in sources], state.get(update.target)), tracer))
        if tracer is not None:
            tracer.start()

    def _leave(self, key: Any) -> Any:
        """What sources and target were when this call began; those inside of it that have raised are over as well."""
        while self._inside:
            found, given, tracer = self._inside.pop()
            if tracer is not None:
                tracer.stop()
            if found == key:
                return given
        return None

    def __call__(self, index: int, update: Update, sources: list[Any], out: Any) -> None:
        """After it. Behind the sources stands the target, where the rule saves it."""
        given, target = self._leave((index, update))
        then, self.states = self.states, python_states()
        changed, where = self.plain.changed_by(update.fn), at(index, update)
        edited = [name for name, t, was in zip(update.sources, sources, given, strict=False) if totals(t) != was]
        if edited:
            self.edited.setdefault(where, (update, edited))
        seen, gave = ([t.detach().clone() for t in tensors(value)] for value in (sources, out))
        firsts = self._firsts.setdefault((index, id(update)), [])
        if not replaying():
            self.updates.append((index, update))
            firsts.append((seen, gave, changed))
            if changed:
                self.changed[where] = changed
            if (missed := _missed(update, target, out)) is not None:
                self.undone[where] = update, missed
            if custom := _custom(sources, out):
                self.custom[where] = custom
        elif firsts:
            drawn = [name for name, state in self.states.items() if then.get(name, state) != state]
            self.twice.append(_compared(index, update, (seen, gave, drawn), firsts.pop()))


def _missed(update: Update, target: Any, out: Any) -> float | None:
    """How far `undo(apply(target, out), out)` is from the target, for rules that are not ours."""
    rule = update.rule.rule if isinstance(update.rule, Inverted) else update.rule
    if type(rule) in (Add, Affine, Momentum) or update.rule.mismatch(target, out):
        return None
    target = tree_map(lambda t: t.detach().clone(), read(target))
    with torch.no_grad():
        back = update.rule.undo(update.rule.apply(target, out), out)
    pairs = list(zip(tensors(back), tensors(target), strict=True))
    return max((relative(a, b) for a, b in pairs if a.shape == b.shape), default=math.inf)


def _custom(sources: list[Any], out: Any) -> list[type]:
    """The autograd.Functions of users in the graph of a call."""
    stop = {t.grad_fn for source in sources for t in tensors(source)}
    todo = [t.grad_fn for t in tensors(out) if t.grad_fn is not None]
    seen, found = set(stop), []
    while todo and len(seen) < 10_000:
        node: Any = todo.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        kind = getattr(node, "_forward_cls", None)
        if kind is not None and not kind.__module__.startswith(("torch.", "retrograde.")):
            found.append(kind)
        todo += [after for after, _ in node.next_functions]
    return list(dict.fromkeys(found))


def _compared(index: int, update: Update, second: Any, first: Any) -> Twice:
    (seen, gave, drawn), (then_seen, then_gave, changed) = second, first
    far = max(map(relative, seen, then_seen), default=0.0)
    absolute = max(map(_largest, seen, then_seen), default=0.0) if far else 0.0
    same = [(t.shape, t.dtype) for t in gave] == [(t.shape, t.dtype) for t in then_gave]
    output = max(map(relative, gave, then_gave), default=0.0) if same else math.inf
    drifted = far > tolerance(*seen)
    parted = drifted or output > 10 * tolerance(*gave)
    return Twice(index, update, absolute, far, output, drifted, parted, _rounding(*gave), drawn, changed)


class Trial:
    """A net and what it is given, for passes under one memory policy or another."""

    def __init__(self, net: nn.Module, inputs: Any, side: dict[str, Any]):
        if not isinstance(net, nn.Module):
            raise ProgramError(f"a module is needed, got a {type(net).__name__}. Put a list of updates into rg.Reversible")
        self.named: dict[str, Any] = {name: m for name, m in net.named_modules() if isinstance(m, Net)}
        if not self.named:
            raise ProgramError(f"{type(net).__name__} contains no rg.Reversible and no rg.ReversibleSequence")
        self.net, self.given, self.programs = net, (inputs, side), list(self.named.values())
        fns = [fn for program in self.programs for fn in _fns(program)]
        self.modules = list(dict.fromkeys([*net.modules(), *(m for fn in fns for m in modules_of(fn))]))
        self.plain = Plain([])
        self._initialise()
        self.plain = Plain(fns)

    def run(self, memory: Any = None, *, traced: Collection[str] = (), after_another: bool = False) -> Pass:
        """A pass under the policy, or under the net's own; an error of this library is kept in it.

        `after_another`: another step has gone before, on the input in another order, so that caches are filled.
        """
        made = Pass(self.plain, traced)
        with self.unchanged():
            for program in () if memory is None else self.programs:
                program.memory = memory
            if after_another:
                try:
                    self._gradients(Pass(self.plain), turned=True)
                except Exception:  # the net does not take its input in another order
                    return made
                self.plain.look()
            with made.watching():
                try:
                    made.gradients = self._gradients(made)
                except RetrogradeError as error:
                    made.error = error
                except Exception as error:
                    if not (after_another and made.changed):
                        raise
                    why = f"a second step raises {type(error).__name__}: {error}. fn keeps something of the first one"
                    made.error = NotRepeated(why, next(iter(made.changed)))
        names = {id(u): name for name, m in self.named.items() if hasattr(m, "_program") for u in m._program.updates}
        for seen in made.twice:
            seen.program = names.get(id(seen.update), "")
        return made

    def updates(self) -> list[list[Update]]:
        """Those of each program, as it was last run."""
        return [list(m._program.updates) for m in self.programs if hasattr(m, "_program")]

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[list[Any]]:
        """Buffers, random states, policies and plain attributes of fns are afterwards as they were."""
        draws = Draws(generators(tree_leaves(self.given)))
        states = python_states()
        policies = [program.memory for program in self.programs]
        buffers = [one for m in self.modules for one in _buffers(m)]
        try:
            yield buffers
        finally:
            draws.put_back()
            put_back_python(states)
            with torch.no_grad():
                for slots, name, buffer, copy in buffers:
                    slots[name] = buffer if buffer is None else buffer.copy_(copy)
            for program, policy in zip(self.programs, policies, strict=True):
                program.memory = policy
            self.plain.put_back()

    def _initialise(self) -> None:
        """Run the net once if some modules are lazy: a pass would find other modules afterwards than before."""
        slots = [(m, t) for m in self.modules for t in (*m._parameters.values(), *m._buffers.values())]
        lazy = dict.fromkeys(m for m, t in slots if t is not None and is_lazy(t))
        if not lazy:
            return
        with self.unchanged() as buffers, contextlib.ExitStack() as stack, torch.no_grad():
            for module in lazy:  # this hook comes after the module's own, which makes its buffers
                hook = module.register_forward_pre_hook(lambda m, _: buffers.extend(_buffers(m)))
                stack.callback(hook.remove)
            args, kwargs = tree_map(_fresh, self.given)
            self.net(*args, **kwargs)

    def _gradients(self, made: Pass, turned: bool = False) -> dict[str, Tensor]:
        """All gradients of net under fixed random cotangents, by name."""
        flat, spec = tree_flatten(tree_map(_turned if turned else _fresh, self.given))
        wanted = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        wanted |= {f"input {i}": t for i, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad}
        with torch.enable_grad():  # no leaves, as the output of an embedding is none
            flat = [t.clone() if isinstance(t, Tensor) and t.requires_grad else t for t in flat]
            args, kwargs = tree_unflatten(flat, spec)
            outs = [t for t in tree_leaves(self.net(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        generator = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outs]
        made.states = python_states()  # what ran after the last fn may have drawn
        with contextlib.ExitStack() as stack:
            for device in {t.device.type for t in outs}:  # backward belongs outside of autocast
                stack.enter_context(torch.autocast(device, enabled=False))
            found = torch.autograd.grad(outs, list(wanted.values()), cotangents, allow_unused=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(wanted.items(), found, strict=True)}


def _fns(program: Any) -> list[Any]:
    if isinstance(program, Reversible):
        return [update.fn for update in program.program.updates]
    if hasattr(program, "functions"):
        return program.functions()
    return [getattr(block, name) for block in program.blocks for name in "fgjk" if hasattr(block, name)]


def _buffers(module: nn.Module) -> list[tuple[dict[str, Any], str, Any, Any]]:
    """Of each buffer its slot, itself and a copy."""
    made = [(name, b) for name, b in module._buffers.items() if b is None or not is_lazy(b)]
    return [(module._buffers, name, b, None if b is None else b.detach().clone()) for name, b in made]


def _fresh(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point() or value.is_complex())


def _turned(value: Any) -> Any:
    """The same numbers in another order."""
    fresh = _fresh(value)
    if isinstance(fresh, Tensor) and fresh.requires_grad:
        fresh = fresh.detach().flip(tuple(range(fresh.dim()))).requires_grad_()
    return fresh


# -- how far apart -----------------------------------------------------------------------------------------------------


def relative(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """The error of `a` against the size of `b`, or against `least` where that is more; NaN equals NaN here."""
    if bool(((a == b) | ((a != a) & (b != b))).all()):
        return 0.0
    far, scale = norm(_wide(a) - _wide(b)), max(norm(b), least)
    return math.inf if math.isnan(far) else far / scale if scale else far


def vector_error(mine: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """The relative error of all tensors in `mine` as one vector."""
    scale = norm(*(true[name] for name in mine))
    far = norm(*(_wide(mine[name]) - _wide(true[name]) for name in mine))
    return far / scale if scale else far


def norm(*given: Tensor) -> float:
    return sum(float(_wide(t).abs().square().sum()) for t in given) ** 0.5


def tolerance(*given: Tensor) -> float:
    return max((_TOLERANCE.get(t.dtype, 5e-3) for t in given), default=0.0)


def _largest(a: Tensor, b: Tensor) -> float:
    return float((_wide(a) - _wide(b)).abs().max()) if a.numel() else 0.0


def _rounding(*given: Tensor) -> float:
    floats = [t.dtype for t in given if t.is_floating_point() or t.is_complex()]
    return max((max(1e-5, 4 * torch.finfo(dtype).eps) for dtype in floats), default=0.0)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)
