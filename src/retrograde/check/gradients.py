"""Is my net right under its memory policy? Compared with ordinary autograd on the same weights, inputs and random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._base.function_modules import modules_of
from ..errors import RetrogradeError
from ..update import Update
from .findings import Finding, drifting, faults, with_lines, wrong_backward
from .passes import Pass, Place, norm, relative, tolerance, vector_error
from .trial import Trial

STEPS = 3
_LITTLE = 0.01
FAR = (9_999, 10_000)  # where counters are set to: a check of theirs may come before or after they are counted up
_NOT_FINITE = "gradients are not finite under memory='store' either"
_IN_STEP = "in step {}, on another batch"


@dataclass
class Report:
    """What a check found. `ok`, and if not: `first`, the first update where the two part, and `cause`."""

    ok: bool
    errors: dict[str, float] = field(default_factory=dict)  # relative error of each gradient, by name
    first: str | None = None
    cause: str | None = None
    findings: list[Finding] = field(default_factory=list)  # also where gradients agree; from the last update to update 0
    replayed: int = 0  # how many functions were recomputed in backward
    gradient_error: float = 0.0  # of all gradients as one vector, relative to memory="store"
    recovered: float = 0.0  # the largest relative error of the recovered sources of an update …
    furthest: str | None = None  # … and that update
    notes: list[str] = field(default_factory=list)  # what is no fault, but good to know
    steps: int = 1  # how many were taken, each on another batch; a fault is in the last one

    def __bool__(self) -> bool:
        return self.ok

    @property
    def faulty(self) -> bool:
        """Whether there is more than noise of the size of rounding."""
        return not self.ok or not all(f.harmless for f in self.findings)

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    def __str__(self) -> str:
        if self.ok and self.replayed == 0:
            said = "gradients agree with memory='store', as no function was recomputed: another policy may find faults"
        elif self.ok:
            steps = f" in {self.steps} steps" if self.steps > 1 else ""
            said = f"gradients agree with memory='store'{steps} (largest relative error {self.worst:.1e})"
        else:
            name = max(self.errors, key=lambda key: self.errors[key], default=None)
            worst = f"; largest relative error {self.worst:.1e}, of {name}" if name else ""
            found = next((f for f in self.findings if f.where == self.first), None)
            line = f" ({found.line})" if found and found.line else ""
            where = f"\nfirst (backward goes from the last update to update 0) at {self.first}{line}: " if self.first else ": "
            said = f"gradients differ from memory='store'{worst}{where}{self.cause}"
        others = [f"found at {finding}" for finding in self.findings if self.ok or finding.where != self.first]
        more = [f"and {len(others) - 5} more, in .findings"] if len(others) > 5 else []
        return "\n".join([said, *others[:5], *more])


def gradients(net: nn.Module, /, *inputs: Any, **side: Any) -> Report:
    """Compare the gradients of `net(*inputs, **side)` under its own memory policy with memory="store", over three steps.

    `net` is any module whose forward runs reversible programs. The first step has the inputs given, the others have batches made
    of them: elements of floating tensors, and rows of ids and masks, are drawn again. Each step starts from the state that the
    one before has left. Gradients of parameters, inputs and side inputs are compared; tolerance 1e-9 in float64, 1e-4 in float32,
    5e-3 below. If they differ, the report names the first update where they part. Besides, `findings` has the fns that on the
    same sources do not return the same bits twice (non-deterministic, or stateful: what they change changes what they return),
    that edit their sources, whose rule or autograd.Function is wrong, and the first update whose sources are recovered with an
    error above the tolerance (drifting); each with the line to change, where it can be known. Nothing is left changed: no
    `.grad`, no parameter or buffer, no random state, no plain attribute; but lazy modules are initialised.

    >>> import torch, retrograde as rg
    >>> net = rg.ReversibleSequence([(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)])
    >>> rg.check.gradients(net, torch.randn(2, 4)).ok
    True
    """
    with Trial(net, inputs, side) as trial:
        report, watched = _step(trial)
        while not report.faulty and trial.step + 1 < STEPS:
            trial.next_step()
            try:
                later, watched = _step(trial)
            except RetrogradeError:
                raise
            except Exception as error:
                why = f"the net does not take a batch made of its input: {type(error).__name__}: {error}"
                report.notes.append(f"one step was checked, as {why}")
                break
            if later.cause == _NOT_FINITE:
                report.notes.append("one step was checked, as gradients are not finite on a batch made of the input")
                break
            report = _together(report, later)
        if not report.faulty and watched is not None:
            report.findings += _of_counters(trial, watched)
    return report


def _together(before: Report, later: Report) -> Report:
    """What is known after one step more."""
    later.steps = before.steps + 1
    if later.faulty:
        later.findings = [replace(f, detail=f"{f.detail}, {_IN_STEP.format(later.steps)}") for f in later.findings]
        later.cause = later.cause and f"{later.cause} ({_IN_STEP.format(later.steps)})"
    later.findings = later.findings or before.findings  # noise
    later.notes = later.notes or before.notes
    if not later.ok:
        return later
    later.errors = {name: max(error, before.errors.get(name, 0.0)) for name, error in later.errors.items()}
    later.gradient_error = max(later.gradient_error, before.gradient_error)
    if before.recovered > later.recovered:
        later.recovered, later.furthest = before.recovered, before.furthest
    return later


def _step(trial: Trial) -> tuple[Report, Pass | None]:
    """One step, on its own batch and from its own state; and the pass under checkpoint, unless something went wrong before."""
    own = trial.run()
    if own.error is not None:
        first, findings = own.error.where, with_lines(own, faults(own), trial.run)
        cause = _cause_at(findings, first) or str(own.error).removeprefix(f"{first}: ")
        return Report(ok=False, first=first, cause=cause, findings=findings), None
    watched, findings, notes = _on_the_same_sources(trial, own)
    findings += with_lines(own, drifting(own, findings), trial.run)
    true = trial.run("store").need()
    total = norm(*true.values())
    if not math.isfinite(total):
        return Report(ok=False, cause=_NOT_FINITE, findings=findings), None
    errors = {name: relative(own.gradients[name], true[name], total * _noise(true[name])) for name in true}
    bad = [name for name in true if not errors[name] <= tolerance(true[name])]
    first, cause = None, None
    if bad:
        first, cause = _parting(own, findings) or _of_parameter(own, trial.net, bad)
        if not findings:  # a little drift may be much in a gradient
            fault = wrong_backward(own, first)
            findings = [fault] if fault else with_lines(own, drifting(own, [], _LITTLE), trial.run)
            first, cause = (findings[0].where, findings[0].cause) if findings else (first, cause)
    furthest = max(own.recomputed, key=lambda t: t.relative, default=None)
    report = Report(
        ok=not bad,
        errors=errors,
        first=first,
        cause=cause,
        findings=findings,
        replayed=len(own.recomputed),
        gradient_error=vector_error(own.gradients, true),
        recovered=furthest.relative if furthest else 0.0,
        furthest=furthest.place.where if furthest and furthest.relative else None,
        notes=notes,
    )
    return report, watched


def _on_the_same_sources(trial: Trial, own: Pass) -> tuple[Pass, list[Finding], list[str]]:
    """Faults of fns that are recomputed on the very same sources: under checkpoint, or where all were recovered to the bit."""
    same = len(own.recomputed) >= len(own.updates) and not any(t.relative for t in own.recomputed)
    made = own if same else trial.run("checkpoint")
    memory = None if same else "checkpoint"
    if found := faults(made):
        return made, with_lines(made, found, partial(trial.run, memory)), []
    names = ((place.where, " and its ".join(map(str, changes))) for place, changes in made.changed.items())
    return made, [], [f"{where}: it changes its {what}, which did no harm here" for where, what in names]


def _of_counters(trial: Trial, watched: Pass) -> list[Finding]:
    """Faults that show where a counter gets far: a warm-up that ends, something that is done at every hundredth call."""
    counters = {
        change.key: change
        for changes in watched.changed.values()
        for change in changes
        if type(change.value) is int and change.key in watched.changed_again
    }
    for number in FAR if counters else ():
        far = [change._replace(value=number) for change in counters.values()]
        again = partial(trial.run, "checkpoint", counters=far)
        made = again()
        if found := [f for f in faults(made) if f.kind == "stateful"]:
            found = with_lines(made, found, again)
            return [replace(f, detail=f"{f.detail}, when its counters stand at {number}") for f in found]
    return []


def _parting(own: Pass, findings: list[Finding]) -> tuple[str, str] | None:
    """The first update whose fn is at fault; or the first that was recomputed as something else, and why."""
    for f in findings:
        if f.kind != "drifting":
            return f.where, f.cause
    for t in own.recomputed:
        if t.parted:
            cause = _cause_at(findings, t.place.where, t.place.program)
            return t.place.where, cause or f"fn was recomputed as something else, relative difference {t.output:.1e}"
    return next(((f.where, f.cause) for f in findings), None)


def _cause_at(findings: list[Finding], where: str | None, program: str | None = None) -> str | None:
    """What was found at an update."""
    fitting = (f for f in findings if f.where == where and program in (None, f.program))
    return next((f.cause for f in fitting), None)


def _of_parameter(own: Pass, net: nn.Module, bad: list[str]) -> tuple[str | None, str]:
    names = {id(p): name for name, p in net.named_parameters() if name in bad}
    for place, (_, update) in reversed(own.updates.items()):
        for name in _parameters_of(update, names):
            return place.where, f"the gradient of its parameter {name} differs"
    return None, f"the gradient of {bad[0]} differs"


def _parameters_of(update: Update, names: dict[int, str]) -> list[str]:
    held = [id(p) for m in modules_of(update.fn) for p in m._parameters.values()]
    return [names[key] for key in held if key in names]


def _noise(t: Tensor) -> float:
    """Gradients this much smaller than all of them together are rounding errors, like that of a bias before a BatchNorm.

    Where the rows of a batch are alike, a norm makes much of their differences: hence a thousandth at least.
    """
    return min(max(10 * torch.finfo(t.dtype).eps / tolerance(t), 1e-3), 0.05)


# -- drift -------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """An update: how far its recovered sources are from the true ones."""

    index: int
    update: str
    absolute: float  # the largest difference
    relative: float  # the norm of the difference against that of the true ones
    gradient: float | None  # relative error of the gradients of its own parameters, if it has any
    program: str = ""  # name in the net


@dataclass
class Drift:
    """What `rg.check.drift` measured. `print` it for a table."""

    rows: list[Row]
    gradient_error: float  # of all gradients as one vector, relative to memory="store"

    @property
    def worst(self) -> Row:
        """The update whose sources are furthest off."""
        return max(self.rows, key=lambda row: row.relative)

    def __str__(self) -> str:
        said = f"relative error of all gradients against memory='store': {short(self.gradient_error)}"
        if not self.rows:
            return f"{said}\nno fn was recomputed, so nothing was recovered"
        shown = self._shown()
        texts = [f"{row.program and row.program + ', '}{row.index}: {row.update}" for row in shown]
        width = max(map(len, texts))
        lines = [f"{'update':<{width}}  {'absolute':>9}  {'relative':>9}  {'gradients':>9}"]
        for text, row in zip(texts, shown, strict=True):
            figures = "".join(f"  {short(number):>9}" for number in (row.absolute, row.relative, row.gradient))
            lines.append(f"{text:<{width}}{figures}{'  worst' if row is self.worst and row.relative else ''}")
        left_out = [f"{len(shown)} of {len(self.rows)} updates, all in .rows"] if len(shown) < len(self.rows) else []
        return "\n".join([said, *lines, *left_out])

    def _shown(self) -> list[Row]:
        """All rows, or some twenty of them and the worst."""
        last = len(self.rows) - 1
        numbers = (
            range(last + 1) if last < 24 else sorted({round(i * last / 19) for i in range(20)} | {self.rows.index(self.worst)})
        )
        return [self.rows[i] for i in numbers]

    def plot(self, path: str | Path) -> None:
        """Draw it as a PNG; needs matplotlib (pip install retrograde[cli])."""
        from .picture import draw_updates

        draw_updates(self, Path(path))


def short(number: float | None) -> str:
    return "–" if number is None else f"{number:.1e}" if number else "0"


def drift(net: nn.Module, /, *inputs: Any, **side: Any) -> Drift:
    """How far the recovered sources of each update are from the true ones, under memory="reverse" and the net's own arithmetic.

    There is a row for each update that was recomputed. Nothing is left changed, as with `gradients`.

    >>> import torch, retrograde as rg
    >>> net = rg.ReversibleSequence([(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)], arithmetic="exact")
    >>> found = rg.check.drift(net, torch.randn(2, 4))
    >>> found.worst.absolute, found.gradient_error
    (0.0, 0.0)
    """
    with Trial(net, inputs, side) as trial:
        own = trial.run("reverse")
        mine, true = own.need(), trial.run("store").need()
    names = {id(p): name for name, p in net.named_parameters() if p.requires_grad}
    rows: dict[Place, Row] = {}
    for t in reversed(own.recomputed):
        held = _parameters_of(t.update, names)
        error = vector_error({name: mine[name] for name in held}, true) if held else None
        row = Row(t.index, str(t.update), t.absolute, t.relative, error, t.place.program)
        if t.place not in rows or rows[t.place].relative < t.relative:  # a program that is called twice has its updates once
            rows[t.place] = row
    return Drift(list(rows.values()), vector_error(mine, true))
