"""Lines of the user's code: which one makes a change, where two runs of a function part, where a function stands."""

from __future__ import annotations

import functools
import gc
import linecache
import math
import os
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._base.function_modules import Around
from .._base.pytrees import tensors

Line = tuple[str, int]  # file and number


class Tracer:
    """Follows one run of a function line by line, while `mark` tells what must not change, by what it is."""

    def __init__(self, mark: Callable[[], dict[str, Any]]):
        self.mark = mark
        self.changed: dict[str, Line] = {}  # the first line that changed it
        self.trail: list[tuple[Line | None, Any]] = []  # each line that ran, and the values around it
        self.last: Line | None = None

    def start(self) -> None:
        self.before, self.seen, self.collecting = sys.gettrace(), self.mark(), gc.isenabled()
        gc.disable()  # what it calls, at some moment or other, are no lines of this function
        sys.settrace(self._enter)

    def stop(self) -> None:
        sys.settrace(self.before)
        if self.collecting:
            gc.enable()
        self._look()

    def _enter(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        return self._step if is_users(frame.f_code.co_filename) else None

    def _step(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return"):
            self._look()
            values = {name: value for name, value in frame.f_locals.items() if name != "self"}
            self.trail.append((self.last, _print_of(arg if event == "return" else values)))
            self.last = _line_of(frame if event == "line" else frame.f_back)
        return self._step

    def _look(self) -> None:
        now = self.mark()
        for name, value in now.items():
            if self.last is not None and value != self.seen[name]:
                self.changed.setdefault(name, self.last)
        self.seen = now


def _line_of(frame: types.FrameType | None) -> Line | None:
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def parting(first: Tracer, second: Tracer) -> Line | None:
    """The first line after which the two runs are not the same."""
    for (line, values), (_, others) in zip(first.trail, second.trail, strict=False):
        if line is not None and values != others:
            return line
    return None


def _print_of(value: Any, depth: int = 0) -> Any:
    """Something that differs where values do; of what is no tensor and no number, nothing."""
    if isinstance(value, (int, float, complex, str, type(None))):
        return repr(value)
    if isinstance(value, Tensor):
        with torch.no_grad():
            wide = value.detach().to(torch.complex128 if value.is_complex() else torch.float64).flatten()
            weighted = wide * torch.linspace(1, 2, wide.numel(), dtype=torch.float64, device=wide.device)
            sums = [repr(s.item()) for s in (wide.sum(), weighted.sum())]
        return tuple(value.shape), str(value.dtype), *sums
    if depth < 2 and isinstance(value, (list, tuple)):
        return [_print_of(part, depth + 1) for part in value[:32]]
    if depth < 2 and isinstance(value, dict):
        return {str(key): _print_of(part, depth + 1) for key, part in list(value.items())[:64]}
    return None


def totals(value: Any) -> list[float]:
    """Tells whether tensors were edited, also where no version counter does."""
    with torch.no_grad():
        found = [t.detach().double().sum().item() for t in tensors(value) if not t.is_complex()]
    return [0.0 if math.isnan(number) else number for number in found]


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is the user's own: neither torch's, nor numpy's, nor Python's, nor ours."""
    if file.startswith("<frozen") or not file:
        return False
    path = os.path.abspath(file)
    if "site-packages" in path or "dist-packages" in path or not path.startswith(_python()):
        return not path.startswith(_libraries())
    return False


@functools.cache
def _python() -> str:
    return os.path.join(sysconfig.get_paths()["stdlib"], "")


@functools.cache
def _libraries() -> tuple[str, ...]:
    folders = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(torch.__file__)]
    if (numpy := sys.modules.get("numpy")) and numpy.__file__:
        folders.append(os.path.dirname(numpy.__file__))
    return tuple(os.path.join(folder, "") for folder in folders)


# -- where things stand ------------------------------------------------------------------------------------------------


def definition(fn: Any) -> Line | None:
    """Where the code of a function, or of the forward of a module, begins, if it is the user's own."""
    while isinstance(fn, (functools.partial, Around)):
        fn = fn.func if isinstance(fn, functools.partial) else fn.fn
    if isinstance(fn, nn.Module):
        fn = getattr(type(fn), "forward", None)  # TorchScript's has none
    elif not isinstance(fn, (types.FunctionType, types.MethodType)):
        fn = vars(type(fn)).get("__call__")
    code = getattr(fn, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None and is_users(code.co_filename) else None


def raised_at(error: BaseException) -> Line | None:
    """The user's own line that an exception came from."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            found = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return found


def shown(line: Line | None) -> str:
    """As `file:number`, from the current directory if the file is in it."""
    if line is None:
        return ""
    path = os.path.abspath(line[0])
    here = os.path.join(os.getcwd(), "")
    return f"{path.removeprefix(here) if os.path.exists(path) else line[0]}:{line[1]}"


def text(line: Line | None) -> str:
    return "" if line is None else linecache.getline(*line).strip()
