"""The folder of a run: `checkpoints/`, `metrics.jsonl`, `curves.png`, `sample.txt`; one run at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import checkpoints
from .errors import TrainingError, reason
from .parallel import Alone

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None


class Folder:
    """Made where it is not there. Refused: a run that is there already, another process at work, a read-only place."""

    def __init__(self, path: Path, resume: bool, parallel: Alone):
        self.path, self.resume, self.parallel = path, resume, parallel
        self.checkpoints, self.metrics = path / "checkpoints", path / "metrics.jsonl"
        self._lock: Any = None

    def __enter__(self) -> Folder:
        error = None
        try:
            if self.parallel.rank == 0:
                self._prepare()
        except OSError as found:
            error = TrainingError(f"cannot write to {self.path}: {reason(found)}")
        except TrainingError as found:
            error = found
        try:
            self.parallel.together(error)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _prepare(self) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("w")
        if fcntl:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainingError(f"another process is training in {self.path}") from None
        if checkpoints.found(self.checkpoints) and not self.resume:
            raise TrainingError(f"{self.path} holds a run already: resume it, or name another folder with out")
        checkpoints.clean(self.checkpoints)

    def __exit__(self, *_: object) -> None:
        if self._lock:
            self._lock.close()
