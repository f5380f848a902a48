"""The errors that this library raises on purpose."""

from __future__ import annotations

__all__ = [
    "BudgetTooSmall",
    "Edited",
    "EditedInBackward",
    "Freed",
    "NotRepeated",
    "OffloadError",
    "OutOfRange",
    "ProgramError",
    "ReplayError",
    "RetrogradeError",
    "TrainingError",
]


class RetrogradeError(Exception):
    """Base of all errors that this library raises on purpose. `where` names the update, if it is about one."""

    def __init__(self, message: str, where: str | None = None):
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class ProgramError(RetrogradeError, ValueError):
    """The updates, the streams, the side inputs or an argument do not fit together."""


class BudgetTooSmall(ProgramError):
    """A budget in which no function can run. `least` is what the updates so far need."""

    def __init__(self, limit: int, least: int, where: str):
        super().__init__(
            f"rg.Budget({limit}) is too small: with nothing stored this takes {least} bytes, for the streams, their gradients "
            "and what fn saves. Give at least that, or use smaller inputs",
            where,
        )
        self.least = least


class Edited(ProgramError):
    """fn has edited what it was given."""


class OutOfRange(RetrogradeError, ArithmeticError):
    """A stream has left the range of exact arithmetic."""


class ReplayError(RetrogradeError, RuntimeError):
    """Backward cannot repeat the forward pass, so its gradients would be wrong."""


class NotRepeated(ReplayError):
    """fn, or what it holds, is not what it was in the forward pass."""


class EditedInBackward(ReplayError):
    """The backward pass of fn has edited a recovered stream."""


class Freed(ReplayError):
    """What backward would start from is gone."""


class OffloadError(RetrogradeError, RuntimeError):
    """Host memory that `memory="offload"` needs is not to be had."""


class TrainingError(RetrogradeError):
    """Settings, data or a checkpoint that `retrograde train` cannot use, or a run that cannot go on."""
