"""Is what backward recomputes what the forward pass computed? The sketches of both are compared (sketch.py).

Two things make a recomputation differ: fn is not the same function any more, or its inputs have drifted, as undoing updates in
floating point rounds. Both make gradients wrong by about as much as the output of fn differs.

On a CPU both sketches are numbers, and an error is raised at once. On other devices the tables are copied to the host without
waiting for them, and compared when they have arrived: at the latest in the next forward pass of the program.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import errors
from .rules import by_user
from .sketch import PROJECTIONS, SQUARES, TARGET, Sketches, Table, squares
from .streams import tensors

NAMES = ("error", "warn", "off")
_ROOT = math.sqrt(PROJECTIONS)
FLOOR = 300  # roundings of a stream: a difference smaller than so many is lost in the stream anyway
DRIFT = {True: (1e-5, 1e-3), False: (1e-2, 5e-2)}  # where inputs drift, by whether streams are float64: warn from, raise from

_task = torch._C._current_graph_task_id
_LOCK = threading.Lock()
_WAITING: list[_Case] = []


def check_verify(verify: str) -> str:
    if verify not in NAMES:
        raise errors.unknown("verify", verify, NAMES)
    return verify


class Verification:
    """Of one forward pass and the backward passes through it."""

    def __init__(self, program: Any, verify: str, streams: Iterable[Tensor]):
        self.program, self.verify = program, verify
        floats = [t.dtype for t in streams if t.is_floating_point() or t.is_complex()]
        self.eps = max((torch.finfo(dtype).eps for dtype in floats), default=0.0)
        self.has_nan = False  # in the output of some fn: gradients are NaN as well, and nothing is to be said of it
        self._table = Table(2 * len(program.updates))  # as many again for the targets of rules of users
        self._tables: dict[int, Table] = {}  # of recomputations, by graph task
        self._wanted: dict[int, dict[int, _Limits]] = {}
        self.first, self.second = Sketches(lambda: self._table), Sketches(self._again)

    def _again(self) -> Table:
        """The table for what the graph task that is running recomputes."""
        task = _task()
        if task < 0:  # somebody reads saved tensors outside of a backward pass
            return Table(self._table.count)
        if task not in self._tables:
            self._tables[task] = Table(self._table.count)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))  # type: ignore[attr-defined]
        return self._tables[task]

    def take_first(self, record: Any, target: Any) -> None:
        """Before the first application of a rule that may not undo what it does: the sketch of the target."""
        if by_user(record.update.rule):
            record.target_row = self.first.take(self._of_target(record.index), target)

    def note(self, row: list[float] | None) -> None:
        """The sketch of the first output of an update."""
        self.has_nan = self.has_nan or (row is not None and row[-1] > 0)

    def compare(self, record: Any, row: list[float] | None, out: Any, target: Any) -> None:
        """What fn returned when it was recomputed, and what undo made of the target, with the sketches of the first run."""
        if (
            not by_user(record.update.rule)
            and row is not None
            and self._alike(record, row)
            and all(t.is_cpu for t in tensors(out))
        ):
            return  # as a rule
        limits = _Limits(False, record.drifts, self.eps, out)
        self._compare(record.index, record.index, record.row, row, limits, out, target)
        if by_user(record.update.rule) and record.kept is None:
            row, limits = self.second.take(self._of_target(record.index), target), _Limits(True, True, self.eps, target)
            self._compare(record.index, self._of_target(record.index), record.target_row, row, limits, target, None)

    def _alike(self, record: Any, row: list[float]) -> bool:
        """Whether nobody needs to look closer."""
        first = record.row
        if first is None or first[PROJECTIONS:] != row[PROJECTIONS:]:
            return False
        return first == row or (record.drifts and _apart(first, row) <= DRIFT[self.eps < 1e-10][0] / 16 * _norm(first))

    def _of_target(self, index: int) -> int:
        """The row of the target of an update."""
        return len(self.program.updates) + index

    def _compare(self, index: int, at: int, first: Any, second: Any, limits: _Limits, out: Any, target: Any) -> None:
        if first is not None and second is not None:
            self._compare_now(index, first, second, limits, out, target)
        task = _task()
        if task in self._tables and not all(t.is_cpu for t in tensors(out)):
            self._wanted.setdefault(task, {})[at] = limits

    def _compare_now(self, index: int, first: list[float], second: list[float], limits: _Limits, out: Any, target: Any) -> None:
        if first == second:
            return
        if first[PROJECTIONS:] != second[PROJECTIONS:]:
            if self.has_nan:
                return
            far = math.inf
        else:
            apart = _apart(first, second)
            far = apart / (_norm(first) or 1.0)
            if far <= limits.warn / 16:  # the size of the output as four projections tell it, which may be several times off
                return
            size = squares(out)
            floor = limits.floor**2 * (squares(target) if target is not None else 0.0)
            far = apart / math.sqrt(size + floor) if size + floor else math.inf
        if far > limits.warn:
            self.report(index, far, limits)

    def _end(self, task: int) -> None:
        table, wanted = self._tables.pop(task), self._wanted.pop(task, {})
        if wanted:
            case = _Case(self, self._table, table, wanted)
            with _LOCK:
                _WAITING.append(case)

    def report(self, index: int, far: float, limits: _Limits, late: bool = False) -> None:
        """An error, or one warning per program."""
        where = errors.at(index, self.program.updates[index])
        serious = far > limits.error
        if limits.of_target:
            error = errors.wrong_undo(where, far, late)
        elif serious or not limits.drifts:
            error = errors.other_value(where, far, limits.drifts, late)
        else:
            error = errors.drifted(where, far)
        if serious and self.verify == "error":
            raise error
        if not self.program.warned:
            self.program.warned = True
            warnings.warn(str(error), stacklevel=2)


class _Limits:
    """How far the sketches of an update may be apart."""

    __slots__ = ("drifts", "error", "floor", "of_target", "warn")

    def __init__(self, of_target: bool, drifts: bool, eps: float, out: Any):
        self.of_target, self.drifts = of_target, drifts
        self.floor = 0.0
        if drifts:
            self.warn, self.error = DRIFT[eps < 1e-10]
            self.floor = 0.0 if of_target else FLOOR * min(eps, torch.finfo(torch.float32).eps)
        else:
            self.warn = self.error = _steady(out)


def _steady(out: Any) -> float:
    """Where inputs are the same to the bit: what the order of atomic additions may do to an output. On a CPU there are none."""
    found = [t for t in tensors(out) if t.is_floating_point() or t.is_complex()]
    eps = max((torch.finfo(t.dtype).eps for t in found), default=0.0)
    return max(1e-3, 4 * eps) if any(not t.is_cpu for t in found) else min(1e-3, math.sqrt(eps))


def _apart(first: Sequence[float], second: Sequence[float]) -> float:
    return math.dist(first[:PROJECTIONS], second[:PROJECTIONS]) / _ROOT


def _norm(row: Sequence[float]) -> float:
    return math.hypot(*row[:PROJECTIONS]) / _ROOT


# -- on devices --------------------------------------------------------------------------------------------------------


def settle(program: Any) -> None:
    """Decide the cases of this program, and all others that have arrived. The first error is raised; later calls go on."""
    while case := next((case for case in _WAITING if case.of.program is program or case.arrived()), None):
        with _LOCK:
            if case not in _WAITING:
                continue
            _WAITING.remove(case)
        case.decide()


class _Case:
    """The tables of a forward pass and of a backward pass, on their way to the host."""

    def __init__(self, of: Verification, first: Table, second: Table, wanted: dict[int, _Limits]):
        self.of, self.wanted = of, wanted
        self.tables: list[tuple[Tensor, Tensor]] = []
        self.events: list[Any] = []
        for device, table in second.on.items():
            if device in first.on:
                self.tables.append((_to_host(first.on[device]), _to_host(table)))
                if device.type == "cuda":
                    self.events.append(torch.cuda.current_stream(device).record_event())

    def arrived(self) -> bool:
        return all(event.query() for event in self.events)

    def decide(self) -> None:
        """Report the first update, in the order of backward, that was recomputed as something else."""
        for event in self.events:
            event.synchronize()
        pairs = [(first.tolist(), second.tolist()) for first, second in self.tables]
        has_nan = self.of.has_nan or any(row[-1] for first, _ in pairs for row in first)
        found, count = [], len(self.of.program.updates)
        for index in sorted(self.wanted, key=lambda i: (-(i % count), i)):
            limits = self.wanted[index]
            far = max((_far(first[index], second[index], limits.floor) for first, second in pairs), default=0.0)
            if far > limits.warn and not (has_nan and math.isinf(far)):
                found.append((index % count, far, limits))
        serious = (one for one in found if one[1] > one[2].error)
        if found:
            self.of.report(*next(serious, found[0]), late=True)


def _far(first: list[float], second: list[float], floor: float) -> float:
    if first[TARGET + 1 :] != second[TARGET + 1 :]:
        return math.inf
    apart = _apart(first, second)
    scale = math.sqrt(first[SQUARES] + floor**2 * first[TARGET])
    return apart / scale if scale else math.inf if apart else 0.0


def _to_host(table: Tensor) -> Tensor:
    if table.device.type != "cuda":
        return table.cpu()
    return torch.empty(table.shape, dtype=table.dtype, pin_memory=True).copy_(table, non_blocking=True)
