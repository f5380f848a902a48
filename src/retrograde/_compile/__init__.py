"""torch.compile: functions in two forms (`fns`), and whole models in one graph (`fullgraph`), which registers itself here."""

from .._base import tracing
from . import fullgraph

tracing.fullgraph = fullgraph
