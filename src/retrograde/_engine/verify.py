"""Is what backward recomputes what the forward pass computed? The sketches of both are compared (sketch.py).

Two things make a recomputation differ: fn is not the same function any more, or its inputs have drifted, as undoing updates in
floating point rounds. Both make gradients wrong by about as much as the output of fn differs. Besides, the undo of a rule of the
user's may be wrong, which the output of fn does not show: there the targets are compared as well.

On a CPU the sketches are numbers, and an error is raised at once. On other devices they are rows of tables, which are copied to
the host without waiting for them, and compared when they have arrived: at the latest in the next forward pass of the program.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from .. import errors
from .._base.cuda_graph import capturing
from .._base.pytrees import tensors
from .._base.torch_private import at_end_of_backward, graph_task, home_of
from .._exact.samples import seen, sketchable
from .._exact.sketch import PROJECTIONS, SQUARES, TARGET, WIDTH, Table, squares, take
from ..rules import by_user

Verify: TypeAlias = Literal["error", "warn", "off"]
NAMES: tuple[Verify, ...] = get_args(Verify)
FLOOR = 300  # roundings of a stream: a difference smaller than so many is lost in the stream anyway
SLACK = {True: 1e-6, False: 1.0}  # so much of what a rule of the user's has made counts with its target, which may start at zero
DRIFT = {True: (1e-5, 1e-3), False: (1e-2, 5e-2)}  # where inputs drift, by whether streams are float64: warn from, raise from

_LOCK = threading.Lock()
_WAITING: list[_Case] = []


def check_verify(verify: Any) -> Verify:
    if verify not in NAMES:
        raise errors.unknown("verify", verify, NAMES)
    return verify


class Limits(NamedTuple):
    """How far two sketches may be apart, relative to the size of what was sketched."""

    warn: float
    error: float
    floor: float  # so much of the target counts as well
    what: str  # "output", "drifting output" or "target"


class Verification:
    """Of one forward pass and the backward passes through it."""

    def __init__(self, program: Any, verify: str, streams: Sequence[Tensor], leaves: int):
        self.program, self.verify, self.count = program, verify, len(program.updates)
        self.leaves = leaves  # of the stream that has the most
        floats = [t.dtype for t in streams if t.is_floating_point() or t.is_complex()]
        eps = max((torch.finfo(dtype).eps for dtype in floats), default=0.0)
        self.drift = DRIFT[eps < 1e-10]
        self.drifting = Limits(*self.drift, FLOOR * min(eps, torch.finfo(torch.float32).eps), "drifting output")
        self.slack = SLACK[eps < 1e-10]
        self.table = self._table()
        self.tables: dict[int, tuple[Table, dict[int, Limits]]] = {}  # of recomputations, by graph task

    def _table(self) -> Table:
        return Table(2 * self.count, max(3, self.leaves))  # as many rows again for the targets of rules of users

    def first(self) -> Table:
        return self.table

    def second(self) -> Table:
        return self._again()[0]

    def _again(self) -> tuple[Table, dict[int, Limits]]:
        """What the graph task that is running recomputes: the table, and the rows to compare."""
        task = graph_task()
        if task < 0:  # somebody reads saved tensors outside of a backward pass
            return self._table(), {}
        if task not in self.tables:
            self.tables[task] = self._table(), {}
            at_end_of_backward(partial(self._end, task))
        return self.tables[task]

    def note(self, record: Any, row: list[float] | None, target: Any, changed: Any) -> None:
        """The sketch of what fn returned in the first run, and that of the target before the rule of a user changes it."""
        record.row = row
        if by_user(record.update.rule):
            at = self.count + record.index
            record.target_row = take(at, target, self.first)
            self.table.stream(at, changed)

    def note_saved(self, record: Any, saved: Sequence[Tensor], others: Iterable[Tensor]) -> None:
        """The sketch of what fn has saved, where the recomputation stops before fn returns. The others are not made by fn."""
        foreign = {home_of(t) for t in others}
        record.own = [j for j, t in enumerate(saved) if home_of(t) not in foreign and sketchable(t)]
        record.row = take(record.index, seen(saved, record.own), self.first)

    def compare_saved(self, record: Any, saved: Sequence[Any]) -> None:
        found = seen(saved, record.own)
        row = take(record.index, found, self.second)
        self._compare(record.index, record.row, row, Limits(*_steady(found), 0.0, "output"), found, None)

    def compare(self, record: Any, row: list[float] | None, out: Any, target: Any, changed: Any) -> None:
        """The same of a recomputation, where `target` is what undo made of it."""
        users = by_user(record.update.rule)
        if row is not None and row == record.row and not users and all(t.is_cpu for t in tensors(out)):
            return
        limits = self.drifting if record.drifts else Limits(*_steady(out), 0.0, "output")
        self._compare(record.index, record.row, row, limits, out, changed)
        if users and record.kept is None:
            at, limits = self.count + record.index, Limits(*self.drift, self.slack, "target")
            self._compare(at, record.target_row, take(at, target, self.second), limits, target, changed)

    def _compare(self, at: int, first: Any, second: Any, limits: Limits, out: Any, stream: Any) -> None:
        """Leaf by leaf: a fault in a small one counts as much as in a large one."""
        if first is not None and second is not None and first != second:
            pairs = list(zip(_leaves(first), _leaves(second), strict=False))
            if len(first) != len(second) or any(a[PROJECTIONS:] != b[PROJECTIONS:] for a, b in pairs):
                self.report(at, math.inf, limits)
            elif any(_apart(a, b) > limits.warn / 16 * _norm(a) for a, b in pairs):  # else nobody needs to look closer
                sizes, of = squares(out), squares(stream) if limits.floor else []
                floors = of if len(of) == len(sizes) else [sum(of)] * len(sizes)
                leaves = zip(pairs, sizes, floors, strict=True)
                far = _furthest((_apart(*pair), size + limits.floor**2 * floor) for pair, size, floor in leaves)
                if far > limits.warn:
                    self.report(at, far, limits)
        if not all(t.is_cpu for t in tensors(out)):
            self._again()[1][at] = limits

    def _end(self, task: int) -> None:
        table, wanted = self.tables.pop(task)
        if wanted:
            case = _Case(self, table, wanted)
            with _LOCK:
                _WAITING.append(case)

    def where(self, at: int) -> str:
        return errors.at(at % self.count, self.program.updates[at % self.count])

    def report(self, at: int, far: float, limits: Limits) -> None:
        _report(self.program, self.verify, self.where(at), far, limits)


def _report(program: Any, verify: str, where: str, far: float, limits: Limits, late: bool = False) -> None:
    """An error, or one warning per program."""
    serious = far > limits.error
    if limits.what == "target":
        error = errors.wrong_undo(where, far, late)
    elif serious:
        error = errors.other_value(where, far, limits.what == "drifting output", late)
    else:
        error = errors.drifted(where, far)
    if serious and verify == "error":
        raise error
    notes = {} if program is None else program.notes
    if not notes.get("warned"):
        notes["warned"] = True
        warnings.warn(str(error), stacklevel=2)


def _steady(out: Any) -> tuple[float, float]:
    """Where inputs are the same to the bit: what the order of atomic additions may do to an output. On a CPU there are none."""
    found = [t for t in tensors(out) if t.is_floating_point() or t.is_complex()]
    eps = max((torch.finfo(t.dtype).eps for t in found), default=0.0)
    limit = max(1e-3, 4 * eps) if any(not t.is_cpu for t in found) else min(1e-3, math.sqrt(eps))
    return limit, limit


def _leaves(row: list[float]) -> list[list[float]]:
    return [row[at : at + WIDTH] for at in range(0, len(row), WIDTH)]


def _apart(first: Sequence[float], second: Sequence[float]) -> float:
    return math.dist(first[:PROJECTIONS], second[:PROJECTIONS]) / math.sqrt(PROJECTIONS)


def _norm(row: Sequence[float]) -> float:
    return math.hypot(*row[:PROJECTIONS]) / math.sqrt(PROJECTIONS)


# -- on devices --------------------------------------------------------------------------------------------------------


def settle(program: Any) -> None:
    """Decide the cases of this program, and all others that have arrived. The first error is raised; later calls go on."""
    if capturing():  # nobody may ask an event then
        return
    while case := next((case for case in _WAITING if case.program() is program or case.arrived()), None):
        with _LOCK:
            if case not in _WAITING:
                continue
            _WAITING.remove(case)
        case.decide()


class _Case:
    """The tables of a forward pass and of a backward pass, on their way to the host. They keep no program alive."""

    def __init__(self, of: Verification, again: Table, wanted: dict[int, Limits]):
        self.program, self.verify, self.count = weakref.ref(of.program), of.verify, of.count
        self.wanted = {at: (limits, of.where(at)) for at, limits in wanted.items()}
        devices = [device for device in again.on if device in of.table.on]
        self.tables = [(_to_host(of.table.on[device]), _to_host(again.on[device])) for device in devices]
        self.events = [torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"]

    def arrived(self) -> bool:
        return all(event.query() for event in self.events)

    def decide(self) -> None:
        """Report the first update, in the order of backward, that was recomputed as something else."""
        for event in self.events:
            event.synchronize()
        pairs = [(first.tolist(), second.tolist()) for first, second in self.tables]
        has_nan = any(row[-1] for first, _ in pairs for row in first)  # gradients are NaN as well, there is nothing to report
        found, rows = [], 2 * self.count
        for at in sorted(self.wanted, key=lambda at: (-(at % self.count), at)):
            limits, where = self.wanted[at]
            far = max((_far(first[at::rows], second[at::rows], limits.floor) for first, second in pairs), default=0.0)
            if far > limits.warn and not (has_nan and math.isinf(far)):
                found.append((where, far, limits))
        if found:
            first = next((one for one in found if one[1] > one[2].error), found[0])
            _report(self.program(), self.verify, *first, late=True)


def _far(first: list[list[float]], second: list[list[float]], floor: float) -> float:
    """How far the rows of an update are apart, leaf by leaf."""
    if any(a[TARGET + 1 :] != b[TARGET + 1 :] for a, b in zip(first, second, strict=True)):
        return math.inf
    return _furthest((_apart(a, b), a[SQUARES] + floor**2 * a[TARGET]) for a, b in zip(first, second, strict=True))


def _furthest(leaves: Iterable[tuple[float, float]]) -> float:
    """Of how far each leaf is apart and the square of its size."""
    return max(apart / math.sqrt(size) if size else math.inf if apart else 0.0 for apart, size in leaves)


def _to_host(table: Tensor) -> Tensor:
    if table.device.type != "cuda":
        return table.cpu()
    return torch.empty(table.shape, dtype=table.dtype, pin_memory=True).copy_(table, non_blocking=True)
