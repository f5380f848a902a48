"""What defines a run: sizes, optimizer, precision, memory; with defaults for a small CPU and for a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from .errors import TrainingError

DEFAULTS: dict[str, Any] = {
    "out": Path("runs/language"),
    "data": (),
    "streams": 3,
    "bits": None,
    "accumulate": 1,
    "weight_decay": 0.1,
    "step_in_backward": False,
    "arithmetic": "auto",
    "compile": False,
    "parallel": "none",
    "seed": 0,
    "sample": 300,
    "resume": False,
}
DEVICE: dict[str, dict[str, Any]] = {
    "cpu": {"depth": 12, "width": 96, "heads": 4, "context": 128, "batch": 8, "steps": 400, "lr": 2e-3, "windows": 32},
    "cuda": {"depth": 24, "width": 512, "heads": 8, "context": 1024, "batch": 32, "steps": 1500, "lr": 1e-3, "windows": 256},
}
DEVICE["cpu"] |= {"precision": "float32", "dropout": 0.0}
DEVICE["cuda"] |= {"precision": "bf16", "dropout": 0.2}
SHAPE = ("depth", "width", "heads", "context", "streams")  # another one needs another checkpoint
FREE = ("out", "data", "resume", "device", "parallel", "sample")  # may change from one start of a run to the next
CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "precision": ("auto", "float32", "bf16"),
    "parallel": ("none", "ddp", "fsdp"),
    "arithmetic": ("auto", "float", "exact"),
}
STEP_IN_BACKWARD = {  # what it goes with, and why not with the rest
    "clip": ((0,), "clipping by the global norm needs all gradients at once"),
    "accumulate": ((1,), "accumulation keeps gradients over several backward passes"),
    "parallel": (("none", "fsdp"), "ddp averages gradients at the end of backward, after the step"),
}


@dataclass(frozen=True)
class Settings:
    """Made by `settle`, which fills in what depends on the device."""

    out: Path
    data: tuple[Path, ...]  # none: the standard library's sources
    depth: int
    width: int
    heads: int
    context: int
    streams: int  # 1 for an ordinary residual net
    bits: int | None  # of one that reversible noise makes reversible
    dropout: float  # share of what is added to the streams
    batch: int  # sequences of a step, over all processes and pieces
    accumulate: int  # pieces of a batch, one after the other
    steps: int
    lr: float
    warmup: int
    clip: float  # 0 for none
    weight_decay: float
    step_in_backward: bool
    device: str
    precision: str
    memory: Any
    arithmetic: str
    compile: bool
    parallel: str
    seed: int
    windows: int  # of held-out text that are looked at; 0 for all of it
    look_every: int
    save_every: int  # 0 for one checkpoint, at the end
    sample: int  # bytes written at the end
    resume: bool

    def check(self) -> None:
        for name in ("depth", "width", "heads", "context", "streams", "batch", "steps", "accumulate", "look_every"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("windows", "warmup", "clip", "weight_decay", "seed", "save_every", "sample", "lr"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise TrainingError(f"{name} must be 0 or more, got {value}")
        if not 0 <= self.dropout < 1:
            raise TrainingError(f"dropout must be 0 or more and less than 1, got {self.dropout}")
        if self.bits is not None and self.streams != 1:
            raise TrainingError(f"bits {self.bits} does not go with streams {self.streams}: it is for streams 1, an ordinary net")
        if self.bits is not None and not 1 <= self.bits <= 8:
            raise TrainingError(f"bits must be from 1 to 8, got {self.bits}")
        for name, (fine, why) in STEP_IN_BACKWARD.items() if self.step_in_backward else ():
            if getattr(self, name) not in fine:
                raise TrainingError(f"{name} {getattr(self, name)} does not go with step_in_backward: {why}")

    def lr_at(self, step: int) -> float:
        """Warm-up, then half a cosine down to a tenth, for the step of this number, from 1 on."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        way = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * way)))

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        found = asdict(replace(self, memory=str(self.memory)))
        return {**found, "out": str(self.out), "data": [str(path) for path in self.data]}


def settle(given: Mapping[str, Any] | None = None, /, **more: Any) -> Settings:
    """Settings from those that are given; None, or not given, means the default for the device.

    >>> settle(device="cpu", depth=3).depth
    3
    """
    given = {name: value for name, value in {**(given or {}), **more}.items() if value is not None}
    for name, known in CHOICES.items():
        if given.get(name, known[0]) not in known:
            raise TrainingError(f"{name} {given[name]!r} is not one of: {', '.join(known)}")
    device = given.get("device", "auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("device cuda: this machine has no CUDA device that torch can use")
    precision = given.get("precision", "auto")
    steps = given.get("steps", DEVICE[device]["steps"])
    found = {
        **DEFAULTS,
        **DEVICE[device],
        "clip": 0.0 if given.get("step_in_backward") else 1.0,
        "memory": "store" if given.get("streams") == 1 and given.get("bits") is None else "reverse",
        "warmup": max(1, steps // 20),
        "look_every": max(1, steps // 10),
        "save_every": max(1, steps // 4),
        **given,
        "device": device,
        "precision": DEVICE[device]["precision"] if precision == "auto" else precision,
    }
    settings = Settings(**found)
    settings.check()
    return settings


def completed(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint, with those that older ones do not name."""
    return {"dropout": 0.0, "bits": None, "streams": 1 if kept.get("one_stream") else 2, **kept}


def differences(kept: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a run goes on with that it did not begin with; another shape is an error."""
    kept = completed(kept)
    names = [field.name for field in fields(Settings) if field.name not in FREE and kept.get(field.name) != now[field.name]]
    if shape := [name for name in names if name in SHAPE]:
        then, given = (", ".join(f"{name} {all_of.get(name)}" for name in shape) for all_of in (kept, now))
        raise TrainingError(f"the checkpoint has {then}, this command {given}: give the sizes that the run began with")
    return [f"{name} {now[name]} (was {kept.get(name)})" for name in names]
