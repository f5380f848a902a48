"""How much is kept between the forward pass and backward: a policy turns a program into stretches of one kind each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import unknown

KINDS = ("store", "checkpoint", "reverse")


def check_memory(memory: Any) -> Any:
    if memory not in KINDS:
        raise unknown("memory policy", memory, KINDS)
    return memory


def plan(memory: Any, count: int, streams: Mapping[str, Any]) -> list[tuple[str, int]]:
    """[(kind, number of updates), …] for a program of `count` updates."""
    return [(check_memory(memory), count)]
