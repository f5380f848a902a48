"""retrograde: networks as deep as you like in the activation memory of one layer, with the gradients of ordinary training."""

from . import check, wirings
from ._compile.fns import compile_fns
from ._engine.replay import replaying
from ._engine.run import invert, run
from .errors import OutOfRange, ProgramError, ReplayError, RetrogradeError
from .memory import Anchor, Budget, ReverseAbove, StoreLast
from .modules import Reversible, ReversibleSequence
from .optimizer import step_in_backward
from .rules import Add, Affine, Invertible, Momentum, Rule
from .transformer import from_transformer
from .update import ALL, Update

__version__ = "0.1.0"

__all__ = [
    "ALL",
    "Add",
    "Affine",
    "Anchor",
    "Budget",
    "Invertible",
    "Momentum",
    "OutOfRange",
    "ProgramError",
    "ReplayError",
    "RetrogradeError",
    "ReverseAbove",
    "Reversible",
    "ReversibleSequence",
    "Rule",
    "StoreLast",
    "Update",
    "check",
    "compile_fns",
    "from_transformer",
    "invert",
    "replaying",
    "run",
    "step_in_backward",
    "wirings",
]
