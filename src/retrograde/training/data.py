"""Text as bytes: files are mapped into memory, never read as a whole, and split by file into train and held-out."""

from __future__ import annotations

import hashlib
import mmap
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from .._base.report import counted
from .errors import TrainingError, reason

END = 0  # stands after every file; text has no such byte
PROBE = 1 << 16  # bytes looked at to tell text from other files
HELD_OUT = 10  # every tenth file, or a tenth of a single one


@dataclass(frozen=True)
class Part:
    """A stretch of a file; `size` is that of the whole file when training began."""

    path: Path
    begin: int
    end: int
    size: int


class Text:
    """Parts one after the other, each followed by the byte END. A window may reach over several of them."""

    def __init__(self, parts: Iterable[Part]):
        self.parts = list(parts)
        self.ends = list(accumulate(part.end - part.begin + 1 for part in self.parts))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def window(self, start: int, count: int) -> Tensor:
        """Bytes as integers."""
        found, i = bytearray(), bisect_right(self.ends, start)
        while len(found) < count:
            part = self.parts[i]
            offset = start + len(found) - (self.ends[i - 1] if i else 0)
            piece = _mapped(part)[part.begin + offset : min(part.end, part.begin + offset + count - len(found))]
            found += piece
            if len(found) < count:
                found.append(END)
                i += 1
        return torch.frombuffer(found, dtype=torch.uint8).long()

    def batch(self, seed: int, step: int, rows: int, context: int, mine: slice = slice(None)) -> Tensor:
        """Windows of context + 1 bytes that depend on seed and step alone: the place in the data is the number of the step.

        Only the rows in `mine` are read.
        """
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
        starts = torch.randint(len(self) - context, (rows,), generator=generator)
        return torch.stack([self.window(start, context + 1) for start in starts[mine].tolist()])

    def spread(self, count: int, context: int) -> list[int]:
        """Starts of windows that do not overlap, spread evenly; all there are for 0."""
        whole = (len(self) - 1) // context
        count = min(count or whole, whole)
        return [i * whole // count * context for i in range(count)]


@dataclass(frozen=True)
class Data:
    train: Text
    held_out: Text
    name: str
    skipped: int  # binary and empty files in folders

    def summary(self) -> str:
        train, held_out = (f"{len(t) / 1e6:.1f} MB in {counted(len(t.parts), 'file')}" for t in (self.train, self.held_out))
        left = f"; {counted(self.skipped, 'empty or binary file')} left out" if self.skipped else ""
        return f"{self.name}: {train}, held out {held_out}{left}"

    @property
    def mark(self) -> str:
        """Tells another set of files, or other sizes, from this one."""
        found = hashlib.sha256()
        for part in [*self.train.parts, *self.held_out.parts]:
            found.update(f"{part.path.name}\0{part.begin}\0{part.end}\0".encode())
        return found.hexdigest()[:16]

    def held_out_bytes(self) -> bytes:
        """All of the held-out text, for comparison with a compressor."""
        return bytes(self.held_out.window(0, len(self.held_out)).to(torch.uint8).tolist())


def open_data(paths: Sequence[Path], context: int) -> Data:
    """The text of these files and folders, or of Python's standard library; an error where it cannot be used."""
    files, skipped = _standard_library() if not paths else _given(paths)
    name = ", ".join(map(str, paths)) if paths else "the sources of Python's standard library"
    if not files:
        empty = f" ({skipped} are empty or binary)" if skipped else ""
        raise TrainingError(f"data: no text files in {name}{empty}")
    if len(files) == 1:
        ((path, size),) = files
        cut = size - size // HELD_OUT
        train, held_out = [Part(path, 0, cut, size)], [Part(path, cut, size, size)]
    else:
        parts = [Part(path, 0, size, size) for path, size in files]
        first = min(HELD_OUT, len(parts)) - 1
        held_out = parts[first::HELD_OUT]
        train = [part for i, part in enumerate(parts) if i % HELD_OUT != first]
    data = Data(Text(train), Text(held_out), name, skipped)
    for what, text in (("train on", data.train), ("hold out", data.held_out)):
        if len(text) < context + 2:
            raise TrainingError(
                f"data: {len(text) - len(text.parts)} bytes to {what} in {name} are too few for a context of {context}. "
                "Give more text, or a smaller context"
            )
    return data


def _standard_library() -> tuple[list[tuple[Path, int]], int]:
    root = Path(sysconfig.get_paths()["stdlib"])
    apart = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = [path for path in sorted(root.rglob("*.py")) if not apart & set(path.relative_to(root).parts)]
    if not files:
        raise TrainingError(f"data: this Python has no sources in {root}; name your own text with data")
    return _texts(files, folder=True)


def _given(paths: Sequence[Path]) -> tuple[list[tuple[Path, int]], int]:
    found: dict[Path, tuple[Path, int]] = {}
    skipped = 0
    for path in paths:
        if not path.exists():
            raise TrainingError(f"data: there is no file or folder {path}")
        texts, left = _texts(_inside(path) if path.is_dir() else [path], folder=path.is_dir())
        skipped += left
        for file, size in texts:
            found.setdefault(file.resolve(), (file, size))
    return list(found.values()), skipped


def _inside(folder: Path) -> list[Path]:
    """All files below, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise TrainingError(f"data: cannot read {error.filename}: {reason(error)}") from error

    found: list[Path] = []
    for root, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(root, name) for name in files if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
    return sorted(found)


def _texts(files: Iterable[Path], folder: bool) -> tuple[list[tuple[Path, int]], int]:
    """Files with text and their sizes. What is empty or binary is left out of a folder, and an error where it was named."""
    texts, skipped = [], 0
    for path in files:
        if not path.is_file():
            raise TrainingError(f"data: {path} is neither a file nor a folder")
        try:
            with path.open("rb") as file:
                start, size = file.read(PROBE), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise TrainingError(f"data: cannot read {path}: {reason(error)}") from error
        if start and END not in start:
            texts.append((path, size))
        elif folder:
            skipped += 1
        else:
            raise TrainingError(f"data: {path} is {'not text: it has zero bytes' if start else 'empty'}")
    return texts, skipped


def _mapped(part: Part) -> mmap.mmap:
    try:
        if os.stat(part.path).st_size != part.size:
            raise TrainingError(f"data: {part.path} has changed its size since training began")
        return _map(part.path, part.size)
    except OSError as error:
        raise TrainingError(f"data: cannot read {part.path}: {reason(error)}") from error


@lru_cache(maxsize=1024)
def _map(path: Path, size: int) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
