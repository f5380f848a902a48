"""Checkpoints on disk: written beside and renamed, so that there is never half of one; the last two are kept.

A checkpoint of one process is a file, `step-00000400.pt`; a sharded one is a folder, `step-00000400` (sharded.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import TrainingError, reason

FORMAT = "retrograde train, 1"
KEPT = 2
ROOM = 1 << 16  # bytes; a failure with less left is that of a full disk, whatever name it comes under
FULL = os.strerror(errno.ENOSPC)
NAME = re.compile(r"step-(\d{8,})(\.pt)?")


@dataclass
class Kept:
    """What a checkpoint holds besides tensors. Tensors are there where it is a file; those of a folder are loaded in place."""

    step: int
    seconds: float
    settings: dict[str, Any]
    data: str
    random: dict[str, Tensor]
    tensors: dict[str, Tensor] | None = None


def found(folder: Path) -> list[Path]:
    """Whole checkpoints, the oldest first."""
    names = {path: NAME.fullmatch(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    return sorted((path for path, match in names.items() if match), key=step_of)


def step_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def clean(folder: Path, keep: int = KEPT) -> None:
    """Remove what a killed run left half written, and all but the last checkpoints."""
    for path in [*folder.glob("step-*.part"), *found(folder)[:-keep]]:
        if path.is_dir():  # under a name that is no checkpoint's: a kill in between leaves no half of one
            gone = path if path.suffix == ".part" else path.rename(path.with_name(f"{path.name}.part"))
            shutil.rmtree(gone, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write(folder: Path, kept: Kept) -> Path:
    """A checkpoint of one process. Where it cannot be written, the ones before it are left as they are."""
    path = folder / f"step-{kept.step:08d}.pt"
    with saving(folder, path) as part, part.open("wb") as file:
        torch.save({"format": FORMAT, **vars(kept)}, file)
        file.flush()
        os.fsync(file.fileno())
    clean(folder)
    return path


@contextlib.contextmanager
def saving(folder: Path, path: Path) -> Iterator[Path]:
    """A path to write to, renamed when all is on the disk; errors are told in words."""
    part = path.with_name(f"{path.name}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield part
        os.replace(part, path)
        sync(folder)
    except (OSError, RuntimeError) as error:
        last = found(folder)[-1:] if folder.is_dir() else []
        full = folder.is_dir() and shutil.disk_usage(folder).free < ROOM
        with contextlib.suppress(OSError):
            shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
        left = f"the last good checkpoint is {last[0]}" if last else "there is no earlier checkpoint"
        raise TrainingError(f"cannot write {path}: {FULL if full else reason(error)}; {left}") from error


def sync(folder: Path) -> None:
    """A rename is on the disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> Kept:
    """A checkpoint; one that is damaged or made by something else is an error. Files hold tensors and plain values alone."""
    if path.is_dir():
        from .sharded import read_folder

        return read_folder(path)
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # torch does not look at the checksums
        if broken:
            raise _damaged(path, f"the checksum of {broken} is wrong")
        holds = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise _damaged(path, reason(error)) from error
    if not isinstance(holds, dict) or holds.pop("format", None) != FORMAT:
        raise TrainingError(f"{path} is not a checkpoint of retrograde train")
    try:
        return Kept(**holds)
    except TypeError as error:
        raise _damaged(path, reason(error)) from error


def _damaged(path: Path, why: str) -> TrainingError:
    way_out = "if it is one of a run, delete it to go on from the one before"
    return TrainingError(f"{path} is damaged or no checkpoint of retrograde train ({why}); {way_out}")
