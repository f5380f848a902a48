"""Checkpoints of several processes, by torch.distributed.checkpoint: a folder that loads on any number of them.

Its `.metadata` is a pickle, which runs code when it is loaded: load folders that you trust. Only tensors go in; step, settings
and random states are JSON beside them.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .checkpoints import FORMAT, Kept, clean, saving
from .errors import TrainingError, reason
from .parallel import Alone

RUN = "run.json"


def write_folder(folder: Path, kept: Kept, parallel: Alone) -> Path:
    """All processes write into one folder, which is renamed once all are done."""
    path = folder / f"step-{kept.step:08d}"
    part = path.with_name(f"{path.name}.part")
    if parallel.rank == 0:
        shutil.rmtree(part, ignore_errors=True)
    randoms: list[Any] = [None] * parallel.world
    dist.all_gather_object(randoms, {name: base64.b64encode(bytes(t.tolist())).decode() for name, t in kept.random.items()})
    error: Exception | None = _try_save(kept.tensors or {}, part)
    if parallel.rank == 0:
        about = {"format": FORMAT, "step": kept.step, "seconds": kept.seconds, "settings": kept.settings, "data": kept.data}
        try:
            with saving(folder, path):
                if error is not None:
                    raise error
                with (part / RUN).open("w", encoding="utf-8") as file:
                    json.dump({**about, "random": randoms, "files": _sizes(part)}, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
            clean(folder)
        except TrainingError as found:
            error = found
    elif error is not None:
        error = TrainingError(f"cannot write {path}: {reason(error)}")
    parallel.together(error)
    return path


def _try_save(tensors: dict[str, Tensor], part: Path) -> OSError | RuntimeError | None:
    """What went wrong on any process; all of them hear of it."""
    try:
        save(tensors, storage_writer=FileSystemWriter(part, sync_files=True))
        return None
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        return first if isinstance(first, (OSError, RuntimeError)) else RuntimeError(reason(first))
    except (OSError, RuntimeError) as error:
        return error


def _sizes(part: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(part.iterdir()) if path.name != RUN}


def read_folder(path: Path) -> Kept:
    """All but the tensors."""
    try:
        about = json.loads((path / RUN).read_text(encoding="utf-8"))
        if not isinstance(about, dict) or about.pop("format", None) != FORMAT:
            raise TrainingError(f"{path} is not a checkpoint of retrograde train")
        rank = dist.get_rank() if dist.is_initialized() else 0
        randoms, sizes = about.pop("random"), about.pop("files")
        random = {name: _tensor(text) for name, text in randoms[rank % len(randoms)].items()}
        wrong = [name for name, size in sizes.items() if not (path / name).is_file() or (path / name).stat().st_size != size]
        if wrong:
            raise ValueError(f"{wrong[0]} is not as it was written")
        return Kept(**about, random=random)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TrainingError(f"{path} is damaged or no checkpoint of retrograde train ({reason(error)})") from error


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def load_folder(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill these tensors, sharded or whole, from the folder."""
    sharded = any(hasattr(t, "device_mesh") for t in tensors.values())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "torch.distributed is unavailable": meant
            load(tensors, storage_reader=FileSystemReader(path), no_dist=not sharded)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise TrainingError(f"{path} does not fit this model or is damaged ({reason(error)})") from error
