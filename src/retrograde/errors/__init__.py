"""What can go wrong: the kinds of errors (`kinds.py`, which users import), and what they say (`messages.py`)."""

from .kinds import *  # noqa: F403
from .kinds import __all__ as __all__
from .messages import *  # noqa: F403
