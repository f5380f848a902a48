"""A line of JSON for each step; after a resume it goes on where the checkpoint stands."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import TrainingError, reason


class Metrics:
    """Appends records to `path`, flushed line by line."""

    def __init__(self, path: Path, step: int = 0):
        """Records of later steps, and half a line that a kill left, are dropped."""
        self.path = path
        try:
            kept = [record for record in read(path) if record["step"] <= step] if step else []
            part = path.with_name(f"{path.name}.part")
            part.write_text("".join(map(_line, kept)), encoding="utf-8")
            os.replace(part, path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error

    def add(self, record: dict[str, Any]) -> None:
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> TrainingError:
        return TrainingError(f"cannot write {self.path}: {reason(error)}; checkpoints are as they were")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """Whole records; what is not one is left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found
