"""`retrograde bench`."""

from __future__ import annotations

from dataclasses import dataclass

from .screen import console


@dataclass
class Options:
    """Compare time, memory and gradients of your block under every way to train it."""


def run(options: Options) -> int:
    console().print("not there yet")
    return 0
