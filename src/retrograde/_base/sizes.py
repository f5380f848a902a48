"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from ..errors import ProgramError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)}


def bytes_in(text: str, of: str) -> int:
    """A number of bytes: "3GiB", "512 MiB", "1.5GB" or a plain number. `of` is what an error calls it.

    >>> bytes_in("1.5GiB", "room"), bytes_in("2kb", "room"), bytes_in("4096", "room")
    (1610612736, 2000, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _UNITS or (match[2] in ("", "b") and "." in match[1]):
        raise ProgramError(f"{of} {text!r} is not a size, write it as 3GiB, 512MiB, 1.5GB or a number of bytes")
    size = round(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if size < 1:
        raise ProgramError(f"{of} {text!r} is less than a byte")
    return size
