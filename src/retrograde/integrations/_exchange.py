"""A module in another role: its class is exchanged for one of the same name that is derived from it."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..errors import ProgramError


class Exchanged:
    """What all roles have in common."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind, role = type(self).__bases__[1], type(self).__bases__[0]
        return _renew, (kind, role), self.__dict__

    @property
    def gradient_checkpointing(self) -> bool:
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        if enabled:
            raise ProgramError(
                "a reversible model keeps no activations to checkpoint: leave gradient checkpointing off, or set "
                "model.reversible.memory = 'checkpoint'"
            )


@functools.cache
def _exchanged(kind: type, role: type) -> type:
    """`kind` in that role, under its own name: what transformers saves and looks up goes by names of classes."""
    own: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if hasattr(role, "_forward"):
        own |= {"forward": functools.wraps(kind.forward)(role._forward), "forward_of": kind.forward}  # type: ignore[attr-defined]
    return type(kind.__name__, (role, kind), own)


def become(module: nn.Module, role: type) -> None:
    module.__class__ = _exchanged(type(module), role)


def _renew(kind: type, role: type) -> Any:
    return object.__new__(_exchanged(kind, role))
