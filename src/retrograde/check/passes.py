"""How far the recomputation of each fn is from its first run, watched in one forward and backward pass."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .._base.pytrees import tensors
from .._base.torch_private import tree_map
from .._engine import call as calls
from .._engine.replay import replaying
from .._exact.streams import read
from ..errors import RetrogradeError, at
from ..rules import by_user
from ..update import Update
from .lines import Line, Tracer, parting, totals
from .plain_state import Change, Plain, python_states

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class Place(NamedTuple):
    """An update in a net."""

    program: str  # the name of the module whose forward runs the program
    where: str


@dataclass
class Recomputed:
    """The recomputation of a fn beside its first run."""

    place: Place
    index: int
    update: Update
    absolute: float  # how far its sources are apart …
    relative: float
    output: float  # … and its output: 0 if it is the same to the bit
    drift: float  # the sources are so many times the tolerance apart
    parted: bool  # they are more than once, or the output is
    rounding: float  # how far rounding in another order may take an output
    drawn: list[str]  # random generators outside of torch that the recomputation drew from
    changed: list[str]  # plain state that the first run changed


class Pass:
    """One forward and backward pass: what every fn was given and returned in its first run, compared with its recomputation.

    The updates in `traced` are followed line by line. `found` hears of each fn before it is called.
    """

    def __init__(self, net: nn.Module, plain: Plain, found: Callable[[Any], None], traced: Collection[Place] = ()):
        self.plain, self.traced, self._found = plain, traced, found
        self.gradients: dict[str, Tensor] = {}
        self.error: RetrogradeError | None = None
        self.updates: dict[Place, tuple[int, Update]] = {}  # in the order of their first runs
        self.recomputed: list[Recomputed] = []  # in the order of backward
        self.edited: dict[Place, list[str]] = {}  # sources that fn edits
        self.changed: dict[Place, list[Change]] = {}  # plain state that fn changes
        self.changed_again: set[Any] = set()  # … and changes once more when it is recomputed
        self.undone: dict[Place, float] = {}  # by how much undo misses what apply was given, for rules of users
        self.custom: dict[Place, list[type]] = {}  # autograd.Functions of users that fn calls
        self.traces: dict[Place, list[Tracer]] = {}
        self.states = python_states()
        self.last: Place | None = None  # whose fn was called last
        self._names = {id(m): name for name, m in net.named_modules()}
        self._running: list[str] = []  # modules of the net, one inside of the other
        self._programs: dict[int, str] = {}  # by the id of an update, the module that runs it
        self._inside: list[tuple[Any, Any, Tracer | None]] = []  # calls that have begun, one inside of the other
        self._firsts: dict[Any, list[tuple[list[Tensor], list[Tensor], list[Change]]]] = {}
        self._held: list[Update] = []  # so that no other one gets the id of one

    def need(self) -> dict[str, Tensor]:
        """The gradients."""
        if self.error is not None:
            raise self.error
        return self.gradients

    def line(self, place: Place, what: str) -> Line | None:
        """The line that changes `what` in a traced update; or where its recomputation parts from the first run."""
        found = self.traces.get(place, [])
        changed = next((tracer.changed[what] for tracer in found if what in tracer.changed), None)
        return changed or (parting(found[0], found[-1]) if len(found) > 1 else None)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        calls.observer, calls.entering = self, self.enters
        handles = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ]
        try:
            yield
        finally:
            calls.observer = calls.entering = None
            for handle in handles:
                handle.remove()
            self._leave(None)
            self._firsts.clear()
            self._held.clear()

    def _begins(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._names:
            self._running.append(self._names[id(module)])

    def _ends(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._names and self._running:
            self._running.pop()

    def _place(self, index: int, update: Update) -> Place:
        if id(update) not in self._programs:
            self._held.append(update)
            self._programs[id(update)] = self._running[-1] if self._running else ""
        return Place(self._programs[id(update)], at(index, update))

    def enters(self, index: int, update: Update, state: dict[str, Any], sources: list[Any], kwargs: Any) -> None:
        """Before a call."""
        self._found(update.fn)
        tracer, place = None, self._place(index, update)
        self.last = place
        if not replaying():
            self.updates[place] = index, update
        if place in self.traced:
            own = [*sources, *kwargs.values()]

            def mark() -> dict[str, Any]:
                marks = {"drawn": python_states(), "changed": self.plain.marks_of(update.fn)}
                return marks | {"edited": [totals(value) for value in own]}

            tracer = Tracer(mark)
            self.traces.setdefault(place, []).append(tracer)
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
        changed, place = self.plain.changed_by(update.fn), self._place(index, update)
        edited = [name for name, t, was in zip(update.sources, sources, given, strict=False) if totals(t) != was]
        if edited:
            self.edited[place] = edited
        seen, gave = ([t.detach().clone() for t in tensors(value)] for value in (sources, out))
        firsts = self._firsts.setdefault((index, id(update)), [])
        if not replaying():
            firsts.append((seen, gave, changed))
            if changed:
                self.changed[place] = changed
            if (missed := _missed(update, target, out)) is not None:
                self.undone[place] = missed
            if custom := _custom(sources, out):
                self.custom[place] = custom
        elif firsts:
            drawn = [name for name, state in self.states.items() if then.get(name, state) != state]
            self.changed_again |= {change.key for change in changed}
            self.recomputed.append(_compared(place, index, update, (seen, gave, drawn), firsts.pop()))


def _missed(update: Update, target: Any, out: Any) -> float | None:
    """How far `undo(apply(target, out), out)` is from the target, for rules that are not ours."""
    if not by_user(update.rule) or update.rule.mismatch(target, out):
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


def _compared(place: Place, index: int, update: Update, second: Any, first: Any) -> Recomputed:
    (seen, gave, drawn), (then_seen, then_gave, changed) = second, first
    far = max(map(relative, seen, then_seen), default=0.0)
    absolute = max(map(_largest, seen, then_seen), default=0.0) if far else 0.0
    same = [(t.shape, t.dtype) for t in gave] == [(t.shape, t.dtype) for t in then_gave]
    output = max(map(relative, gave, then_gave), default=0.0) if same else math.inf
    drift = far / tolerance(*seen) if far else 0.0
    parted = drift > 1 or output > 10 * tolerance(*gave)
    names = list(map(str, changed))
    return Recomputed(place, index, update, absolute, far, output, drift, parted, _rounding(*gave), drawn, names)


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
