"""What every report needs: bytes in words, the machine and the date, files that are never half written."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch


def size(count: float) -> str:
    """Bytes in words.

    >>> size(3 * 2**30), size(2**20), size(100 * 2**10)
    ('3.00 GiB', '1.0 MiB', '100.0 KiB')
    """
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 or not count else f"{count / 2**10:.1f} KiB"


def counted(count: int, what: str) -> str:
    """
    >>> counted(1, "thread"), counted(2, "thread")
    ('1 thread', '2 threads')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    return {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def origin(device: str, prog: str, argv: Sequence[str]) -> dict[str, Any]:
    """What every report begins with: the machine, the date and the command."""
    return {"machine": machine(device), "date": date.today().isoformat(), "command": shlex.join([*prog.split(), *argv])}


def save(path: Path, report: Any) -> None:
    with beside(path) as part:
        part.write_text(as_json(report), encoding="utf-8")


def as_json(report: Any) -> str:
    """Numbers that are not finite become null, as JSON has none."""
    plain = json.loads(json.dumps(report, default=vars), parse_constant=lambda _: None)
    return json.dumps(plain, indent=1) + "\n"


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A path to write to, renamed to `path` once all is written: there is never half a file."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
