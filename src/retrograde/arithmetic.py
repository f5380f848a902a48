"""Addition to a stream, and the subtraction that undoes it."""

from __future__ import annotations

from torch import Tensor

from .errors import unknown

NAMES = ("auto", "float")


def check_arithmetic(name: str) -> str:
    if name not in NAMES:
        raise unknown("arithmetic", name, NAMES)
    return name


def add(target: Tensor, out: Tensor) -> Tensor:
    """`target + out` in the stream's own dtype, as `target += out` would leave it."""
    total = target + out
    return total if total.dtype == target.dtype else total.to(target.dtype)


def subtract(target: Tensor, out: Tensor) -> Tensor:
    total = target - out
    return total if total.dtype == target.dtype else total.to(target.dtype)
