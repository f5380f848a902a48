"""Every variant at every depth, each in a process of its own: one that runs out of memory or crashes leaves the others alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import retrograde

from .._base.report import counted
from .measure import Timing
from .report import Report
from .sketch import Sketch, error
from .variants import PACKAGES, PEERS, REFERENCE, Variant, installed

REFERENCES = (REFERENCE, "checkpoint")  # both are ordinary autograd: the first that was measured
OTHERS = "its parameters are not the reference's: does the factory draw random numbers that torch.manual_seed does not reach?"


@dataclass
class Found:
    """A row. Where `failed` says why in a word or two, there are no figures."""

    depth: int
    variant: str
    failed: str | None = None
    detail: str | None = None  # in a line
    seconds: Timing | None = None  # of a step, forward and backward
    first_seconds: float | None = None  # of the first step, compiling included
    activation_bytes: int | None = None  # the peak of a step over what was there before it; gradient buffers were
    peak_bytes: int | None = None  # the peak of everything
    kernels: dict[str, float] | None = None  # seconds of a step by kind of work, where a profile was asked for
    gradient_error: float | None = None  # relative, against `reference`; None where there is none
    reference: str | None = None
    traceback: str | None = None  # of an error in the worker


@dataclass
class Measured:
    """A row, and what its gradients are compared by."""

    row: Found
    gradients: Sketch = field(default_factory=dict)
    same: str = ""  # parameters and input, as a digest


@dataclass
class Comparison(Report):
    rows: list[Any]  # of Found
    versions: dict[str, str] = field(default_factory=dict)
    kind: ClassVar[type] = Found

    def what(self) -> str:
        s = self.setting
        net = s["block"] or f"width {s['dim']}, {counted(s['heads'], 'head')}"
        precision = s["dtype"] if s["autocast"] == "none" else f"{s['dtype']} with {s['autocast']} autocast"
        return f"{net}, input {' × '.join(map(str, s['shape']))}, {precision}, gradient buffers kept"


def measure_all(
    setting: dict[str, Any],
    variants: Sequence[Variant],
    starts: Callable[[int, Variant], object],
    found: Callable[[Measured], object],
) -> None:
    """`starts` hears what is measured next, `found` what came of it."""
    for depth in setting["depth"]:
        for variant in variants:
            starts(depth, variant)
            found(measured(setting, variant, depth))


def measured(setting: dict[str, Any], variant: Variant, depth: int) -> Measured:
    if not installed(variant):
        return Measured(Found(depth, variant.name, "not installed", f"pip install {PACKAGES[variant.way]}"))
    found = in_process({"setting": setting, "variant": variant.as_dict(), "depth": depth}, setting["timeout"])
    gradients, same = found.pop("gradients", {}), found.pop("same", "")
    if "seconds" in found:
        found["seconds"] = Timing(**found["seconds"])
    return Measured(Found(depth, variant.name, **found), gradients, same)


def in_process(asked: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The worker's answer, or how it ended. It never outlives this call."""
    command = [sys.executable, "-m", "retrograde.bench.worker"]
    with tempfile.TemporaryFile("w+") as said:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
        with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as worker:
            try:
                answer, _ = worker.communicate(json.dumps(asked), timeout)
            except subprocess.TimeoutExpired:
                return {"failed": "timed out", "detail": f"after {timeout:g} s, --timeout gives it more"}
            finally:
                end(worker)
        said.seek(0)
        return json.loads(answer) if answer else how_it_ended(worker.returncode, said.read())


def end(worker: subprocess.Popen[str]) -> None:
    """The worker and what it started: compilers run in processes of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def how_it_ended(code: int, said: str) -> dict[str, Any]:
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("USDT")]
    last = lines[-1][:200] if lines else "it said nothing"
    if code >= 0:
        return {"failed": f"exit code {code}", "detail": last}
    name = signal.Signals(-code).name
    return {"failed": name, "detail": "killed from outside: the machine may be out of memory" if name == "SIGKILL" else last}


def compare_gradients(found: Iterable[Measured]) -> list[Found]:
    """The rows, each with the error of its gradients against the reference of its depth."""
    found = list(found)
    for depth in dict.fromkeys(one.row.depth for one in found):
        here = {one.row.variant: one for one in found if one.row.depth == depth and one.row.failed is None}
        reference = next((here[name] for name in REFERENCES if name in here), None)
        if reference is None:
            continue
        for one in here.values():
            one.row.reference = reference.row.variant
            if one.same == reference.same:
                one.row.gradient_error = error(reference.gradients, one.gradients)
            else:
                one.row.detail = OTHERS
    return [one.row for one in found]


def versions() -> dict[str, str]:
    """Of this package and of the peers that are here."""
    found = {"retrograde": retrograde.__version__}
    for module in PEERS.values():
        try:
            found[module] = version(module)
        except PackageNotFoundError:
            continue
    return found
