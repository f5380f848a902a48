"""What the runs of one forward pass share: side inputs, modes, random generators, and the sketches that verify recomputations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .. import errors
from .._base.cuda_graph import capturing
from .._base.function_modules import Held
from .._base.generators import Draws, generators
from .._base.pytrees import tensors
from .._base.torch_private import tree_flatten, tree_unflatten
from .._exact.choose import drifting
from ..update import Program
from .call import Streams
from .module_state import ModuleState
from .replay import modes
from .verify import Verification

_HOLE = object()
_SHARE = 8  # masks and ids of at most this share of the streams' bytes are copied


class Context:
    """Of one forward pass over a program."""

    def __init__(self, program: Program, held: list[Held], streams: Streams, side: Streams, verify: str):
        self.held = held  # by the functions
        self.drifting = drifting(program, streams)
        own = [t for name in program.names for t in tensors(streams[name])]
        flat: list[Any]
        flat, self.side_spec = tree_flatten(side) if side else ([], None)
        copies = _copies(flat, sum(t.nbytes for t in own) // _SHARE) if program.copies else {}
        if copies:
            flat = [copies.get(id(t), t) for t in flat]
            side = tree_unflatten(flat, self.side_spec)  # type: ignore[arg-type]
        # inference tensors cannot be saved by autograd, and cannot change either
        kept = [isinstance(t, Tensor) and not t.is_inference() for t in flat]
        self.side = side
        self.tensors: list[Tensor] = [t for t, is_kept in zip(flat, kept, strict=True) if is_kept]
        self.grads = [t.requires_grad for t in self.tensors]
        self.others = [_HOLE if is_kept else t for t, is_kept in zip(flat, kept, strict=True)]
        self.modes = modes()
        self.capturing = capturing()
        self.draws = Draws([g for g in generators(flat) if not (self.capturing and g.device.type == "cuda")])
        self.modules: list[ModuleState] = []  # of the updates that have run
        self.known: list[list[Any]] = []  # what fns have saved, the last kinds: most are like one that came before
        leaves = max((len(tensors(streams[name])) for name in program.names), default=1)
        self.verification = None if verify == "off" or self.capturing else Verification(program, verify, own, leaves)

    def check_side(self) -> None:
        """fns may have put something into a list or a dict: no version tells."""
        if self.side_spec is not None and self.side_spec.num_nodes > 1 + len(self.others):  # there are such
            now = tree_flatten(self.side)[0]
            rest = iter(self.tensors)
            then = [next(rest) if other is _HOLE else other for other in self.others]
            if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
                raise errors.ProgramError("fn changed a list or a dict among the side inputs. Let it return what it has to tell")

    def signature(self, streams: Iterable[Tensor]) -> Iterable[Any]:
        """What decides what fns save, as far as it is known before they run: shapes and flags, but no numbers."""
        yield from ((t.shape, t.dtype, t.device, t.requires_grad) for t in (*streams, *self.tensors))
        yield from (o if isinstance(o, (bool, str)) else type(o) for o in self.others)
        yield from self.modes

    def forget(self) -> None:
        """After the forward pass: what is needed again is in the hands of autograd."""
        self.side, self.tensors, self.modules, self.held = {}, [], [], []

    def side_again(self, saved: Iterable[Tensor]) -> Streams:
        if self.side_spec is None:
            return {}
        pairs = zip(saved, self.grads, strict=True)
        rest = iter([t if t.requires_grad is grad else t.detach().requires_grad_(grad) for t, grad in pairs])
        return tree_unflatten([next(rest) if other is _HOLE else other for other in self.others], self.side_spec)


def _copies(flat: list[Any], limit: int) -> dict[int, Tensor]:
    """Of small masks and ids, by the id of each: callers edit them after the call (`mask &= …`)."""
    return {
        id(t): t.clone()
        for t in flat
        if type(t) is Tensor and not t.is_floating_point() and not t.is_complex() and 0 < t.nbytes <= limit
    }
