"""What users give on the command line, read and checked: sizes in bytes, paths, devices, counts. Needs no package."""

from __future__ import annotations

import importlib
from pathlib import Path

from ..errors import ProgramError
from .loading import Refused
from .sizes import bytes_in

PICTURES = (".png", ".svg", ".pdf")


def byte_size(text: str, option: str) -> int:
    """A number of bytes: "3GiB", "512 MiB", "1.5GB" or a plain number.

    >>> byte_size("1.5GiB", "--budget"), byte_size("2kb", "--budget"), byte_size("4096", "--budget")
    (1610612736, 2000, 4096)
    """
    try:
        return bytes_in(text, option)
    except ProgramError as error:
        raise Refused(str(error)) from None


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
