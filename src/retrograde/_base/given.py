"""What users give on the command line, read and checked: sizes in bytes, paths, devices, counts. Needs no package."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from .loading import Refused

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)}
PICTURES = (".png", ".svg", ".pdf")


def byte_size(text: str, option: str) -> int:
    """A number of bytes: "3GiB", "512 MiB", "1.5GB" or a plain number.

    >>> byte_size("1.5GiB", "--budget"), byte_size("2kb", "--budget"), byte_size("4096", "--budget")
    (1610612736, 2000, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in UNITS or (match[2] in ("", "b") and "." in match[1]):
        raise Refused(f"{option} {text!r} is not a size, write it as 3GiB, 512MiB, 1.5GB or a number of bytes")
    size = round(float(match[1]) * UNITS[match[2]]) if "." in match[1] else int(match[1]) * UNITS[match[2]]
    if size < 1:
        raise Refused(f"{option} {text!r} is less than a byte")
    return size


def writable(path: Path | None, option: str) -> None:
    """Refuses a path that no file can be written to, before the work and not after it."""
    if path and path.is_dir():
        raise Refused(f"{option} {path} is a directory, name a file in it")
    if path and not path.parent.is_dir():
        raise Refused(f"{option} {path}: there is no directory {path.parent}")


def picture(path: Path | None, option: str) -> None:
    """Refuses a picture that cannot be drawn or written, before the work and not after it."""
    writable(path, option)
    if path and path.suffix.lower() not in PICTURES:
        raise Refused(f"{option} {path}: pictures end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    if path:
        importlib.import_module("matplotlib")


def device_of(name: str) -> str:
    """The device that auto, cpu or cuda mean here."""
    import torch

    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise Refused("--device cuda: torch finds no CUDA device here, use --device cpu")
    return ("cuda" if there else "cpu") if name == "auto" else name


def at_least(least: int, **options: int) -> None:
    """Refuses options that are smaller; names are those of the fields.

    >>> at_least(1, depth=2)
    """
    for name, value in options.items():
        if value < least:
            raise Refused(f"--{name.replace('_', '-')} must be {least} or more, got {value}")
