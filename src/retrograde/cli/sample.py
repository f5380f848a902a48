"""`retrograde sample`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from ..errors import RetrogradeError
from ..training.data import END
from ..training.trained import load_model
from .given import Refused, at_least


@dataclass
class Options:
    """Let a model that `retrograde train` made write."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/language")
    """The folder of a run, or one of its checkpoints."""
    prompt: str = ""
    """The text to go on from. Without: the beginning of a file."""
    bytes: int = 500
    """How much to write."""
    temperature: float = 0.8
    """0 writes the likeliest byte each time, 1 draws as the model believes."""
    seed: int = 0
    """Of the draws."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""


def run(options: Options) -> int:
    at_least(1, bytes=options.bytes)
    at_least(0, seed=options.seed)
    if not 0 <= options.temperature < float("inf"):
        raise Refused(f"--temperature must be 0 or more, got {options.temperature}")
    try:
        model = load_model(options.run, options.device)
    except RetrogradeError as error:
        raise Refused(str(error)) from error
    prompt = options.prompt.encode() or bytes([END])
    text = model.extend(prompt, options.bytes, options.temperature, torch.Generator().manual_seed(options.seed))
    sys.stdout.write(options.prompt + text.decode("utf-8", errors="replace") + "\n")
    return 0
