"""A trained model from the folder of its run."""

from __future__ import annotations

from pathlib import Path

from ..models.language import Language
from . import checkpoints
from .errors import TrainingError
from .settings import SHAPE, completed, settle
from .state import put, tensors


def load_model(path: Path, device: str = "auto") -> Language:
    """The model of a checkpoint, or of the last one in the folder of a run, ready to write."""
    if not path.exists():
        raise TrainingError(f"there is no run and no checkpoint at {path}")
    if (path / "checkpoints").is_dir():
        found = checkpoints.found(path / "checkpoints")
        if not found:
            raise TrainingError(f"{path} has no checkpoint yet")
        path = found[-1]
    kept = checkpoints.read(path)
    try:
        settings = completed(kept.settings)
        sizes = {name: settings[name] for name in SHAPE}
    except (KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{path} does not say how large its model is") from error
    model = Language(**sizes, memory="store")
    if kept.tensors is None:
        from .sharded import load_folder

        load_folder(path, tensors(model, None))
    else:
        put(kept.tensors, model, None, str(path))
    return model.to(settle(device=device).device).eval()
