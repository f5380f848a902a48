"""retrograde: networks as deep as you like in the activation memory of one layer, with the gradients of ordinary training."""

from . import check, wirings
from ._compile.fns import compile_fns
from ._engine.replay import replaying
from ._engine.run import invert, run
from ._memory.offload import offload_release, offload_stats
from .errors import (
    BudgetTooSmall,
    Edited,
    EditedInBackward,
    Freed,
    NotRepeated,
    OffloadError,
    OutOfRange,
    ProgramError,
    ReplayError,
    RetrogradeError,
    TrainingError,
)
from .memory import Anchor, Budget, Offload, ReverseAbove, StoreLast
from .modules import Reversible
from .optimizer import step_in_backward
from .ordinary.checkpoint import Checkpoint
from .ordinary.sequential import Sequential
from .rules import Add, Affine, Invertible, Momentum, Rule
from .sequence import ReversibleSequence
from .transformer import from_transformer
from .update import ALL, Update

__version__ = "0.1.0"

__all__ = [
    "ALL",
    "Add",
    "Affine",
    "Anchor",
    "Budget",
    "BudgetTooSmall",
    "Checkpoint",
    "Edited",
    "EditedInBackward",
    "Freed",
    "Invertible",
    "Momentum",
    "NotRepeated",
    "Offload",
    "OffloadError",
    "OutOfRange",
    "ProgramError",
    "ReplayError",
    "RetrogradeError",
    "ReverseAbove",
    "Reversible",
    "ReversibleSequence",
    "Rule",
    "Sequential",
    "StoreLast",
    "TrainingError",
    "Update",
    "check",
    "compile_fns",
    "from_transformer",
    "invert",
    "offload_release",
    "offload_stats",
    "replaying",
    "run",
    "step_in_backward",
    "wirings",
]


def __dir__() -> list[str]:
    return sorted(__all__)
