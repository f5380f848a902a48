"""SIGINT and SIGTERM: finish the step, save, stop. A second SIGINT stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Asked:
    """Inside, `signal` is the number of the signal that asked to stop, 0 for none. Signals are as before on the way out."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Asked:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
