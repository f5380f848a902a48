"""The display of a training run: a live line on a terminal, a line for each evaluation elsewhere."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .._base.report import counted, size
from ..training.settings import Settings
from .screen import console


class Watch:
    """Hears of every step."""

    def __init__(self, settings: Settings):
        self.settings, self.peak, self.bits, self.first = settings, 0, math.nan, 1
        self.parameters = 0
        self.screen = console(stderr=True)
        self.rates: deque[float] = deque(maxlen=20)
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}")
        live = self.screen.is_terminal and not int(os.environ.get("RANK", 0))  # one bar for all processes
        self.progress = Progress(*columns, console=self.screen, transient=True, disable=not live, expand=True)

    def __enter__(self) -> Watch:
        self.progress.start()
        self.task = self.progress.add_task("starting", total=self.settings.steps)
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def title(self) -> str:
        s = self.settings
        noise = f" with {s.bits} bits" if s.bits else ""
        net = f"one stream{noise}" if s.streams == 1 else f"{s.streams} reversible streams"
        sizes = f"{counted(s.depth, 'block')} of width {s.width}, {self.parameters / 1e6:.2f} M parameters"
        return f"{sizes}, {net}, memory {s.memory}"

    def on_event(self, what: str, record: dict[str, Any]) -> None:
        getattr(self, f"_{what}")(record)

    def _start(self, record: dict[str, Any]) -> None:
        s = self.settings
        self.parameters, self.first, self.began = record["parameters"], record["first"], time.perf_counter()
        self._line(f"{self.title()}; {s.batch} × {s.context} bytes a step, {s.precision} on {s.device}")
        self._line(record["text"])

    def _note(self, record: dict[str, Any]) -> None:
        self._line(record["text"])

    def _step(self, record: dict[str, Any]) -> None:
        self.peak = record["peak_bytes"]
        self.rates.append(record["tokens_per_second"])
        done = record["step"] - self.first + 1
        left = (time.perf_counter() - self.began) / done * (self.settings.steps - record["step"])
        self.now = (
            f"loss {record['loss'] / math.log(2):.3f} bits · held-out {self.bits:.3f} · {self._rate()} bytes/s · "
            f"peak {size(self.peak)} · {_clock(left)} left"
        )
        self.progress.update(self.task, completed=record["step"], description=self.now)

    def _evaluated(self, record: dict[str, Any]) -> None:
        self.bits = record["held_out_bits"]
        more = f"   {self._rate()} bytes/s, peak {size(self.peak)}" if self.rates else ""
        self._line(f"step {record['step']:>6}   held-out bits per byte {self.bits:.3f}{more}")

    def _saved(self, record: dict[str, Any]) -> None:
        self.progress.update(self.task, description=f"saved {record['path']}")

    def _rate(self) -> str:
        return f"{sum(self.rates) / len(self.rates):,.0f}"

    def _line(self, text: str) -> None:
        self.screen.print(text, soft_wrap=True, markup=False)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
