"""`retrograde sample`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from .._base.given import at_least, writable
from .._base.loading import Refused
from ..errors import RetrogradeError
from ..training.data import END
from ..training.trained import load_model
from .options import Device, File, Text
from .screen import harmless, keep
from .train import with_dashes


@dataclass
class Options:
    """Generate text from a model that `retrograde train` made."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="[RUN]")] = Path("runs/language")
    """The folder of a run, or one of its checkpoints."""
    prompt: Text = ""
    """The text to continue; by default, the beginning of a file."""
    bytes: int = 500
    """Bytes to generate."""
    temperature: float = 0.8
    """0 takes the most likely byte each time, 1 samples from the model's probabilities."""
    seed: int = 0
    """Seed of the samples."""
    device: Device = "auto"
    """auto uses a GPU if there is one."""
    json: File = None
    """Write the text and how it was made here; - writes it to stdout, and nothing else there."""


def run(options: Options) -> int:
    at_least(1, bytes=options.bytes)
    at_least(0, seed=options.seed)
    writable(options.json, "--json")
    if not 0 <= options.temperature < float("inf"):
        raise Refused(f"--temperature must be 0 or more, got {options.temperature}")
    try:
        model = load_model(options.run, options.device)
    except RetrogradeError as error:
        raise Refused(with_dashes(str(error))) from error
    prompt = options.prompt.encode() or bytes([END])
    text = model.extend(prompt, options.bytes, options.temperature, torch.Generator().manual_seed(options.seed))
    written = text.decode("utf-8", errors="replace")
    if not keep(options.json, {**vars(options), "run": str(options.run), "json": None, "text": written}):
        shown = options.prompt + written + "\n"
        sys.stdout.write(harmless(shown) if sys.stdout.isatty() else shown)
    return 0
