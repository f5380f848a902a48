"""The optimizer inside backward: each parameter steps as soon as its gradient is there, so that gradients never pile up.

1. Autograd adds up all uses of a parameter in one graph before it accumulates: a tied weight steps once, with its whole gradient.
2. A hook then steps that parameter alone, with the optimizer's own state and the present options of its group, and frees its
   gradient. Where a function that has the parameter is still to be recomputed in this backward pass, the step waits for that.
3. No moment exists at which all gradients do: what needs one (clipping by the global norm, accumulation over several backward
   passes) is refused, as is a gradient that comes in pieces.
4. DDP averages gradients over processes at the end of backward, and a GradScaler divides them after it: too late. DDP is seen
   where it calls a program, and refused there; a scaled loss looks like any other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ._base.torch_private import active_ddp, at_end_of_backward
from ._engine.backward import needed
from ._engine.run import before_each_run
from .errors import ProgramError

_OWNER: Any = WeakIdKeyDictionary()  # parameter: weakly, the StepInBackward that steps it


def step_in_backward(optimizer: Optimizer) -> StepInBackward:
    """From here on `loss.backward()` steps the parameters of `optimizer`; call `optimizer.zero_grad()` before each one.

    Learning-rate schedulers and `state_dict` go on working. `optimizer.step()` raises an error, so that a loop that clips or
    accumulates cannot go wrong silently, and a program inside DistributedDataParallel raises one before the first step. FSDP2
    works. Do not use it with a `GradScaler`: the loss of a backward pass does not show that it was scaled. `remove()` on what is
    returned ends it.

    >>> import torch, retrograde as rg
    >>> net = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(net.parameters())
    >>> stepping = rg.step_in_backward(optimizer)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     net(torch.ones(2, 4)).sum().backward()
    >>> net.weight.grad is None
    True
    """
    return StepInBackward(optimizer)


class StepInBackward:
    """What `step_in_backward` returns; also a context manager that removes itself."""

    def __init__(self, optimizer: Optimizer):
        if not isinstance(optimizer, Optimizer):
            raise ProgramError(f"step_in_backward takes an optimizer of torch, got a {type(optimizer).__name__}")
        if isinstance(optimizer, LBFGS):
            raise ProgramError("LBFGS needs all gradients at once, so it cannot step inside backward")
        self.optimizer = optimizer
        self._lock = threading.Lock()  # backward has a thread for each device
        self._inside = False
        self._waiting: list[Tensor] = []  # for functions that are still to be recomputed
        self._stepped: set[int] = set()
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._refuse_taken(parameters)
        self._handles: list[Any] = [optimizer.register_step_pre_hook(self._refuse_step)]
        me = weakref.ref(self)
        if _refuse_ddp not in before_each_run:
            before_each_run.append(_refuse_ddp)

        def step(p: Tensor) -> None:  # the collector does not look into these hooks: the other one keeps self alive
            owner = me()
            assert owner is not None
            owner._step(p)

        for p in parameters:
            _OWNER[p] = me
            self._handles += [p.register_hook(self._whole(p)), p.register_post_accumulate_grad_hook(step)]
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._next  # type: ignore[method-assign]

    def remove(self) -> None:
        """The optimizer is as it was: `optimizer.step()` steps."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._handles.clear()
            self.optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
            for p, owner in list(_OWNER.items()):
                if owner() is self:
                    del _OWNER[p]

    def __enter__(self) -> StepInBackward:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _refuse_taken(self, parameters: list[Tensor]) -> None:
        for p in parameters:
            if p in _OWNER:
                raise ProgramError(
                    f"a parameter of shape {tuple(p.shape)} steps inside backward already. Shared parameters belong to one "
                    "optimizer; `remove()` on what step_in_backward returned frees them"
                )
            if p.grad is not None:
                raise ProgramError("there are gradients already, which would be added to. Call optimizer.zero_grad() first")

    def _next(self, set_to_none: bool = True) -> None:
        self._stepped.clear()
        self._waiting.clear()
        self._zero_grad(set_to_none=True)

    def _refuse_step(self, *_: object) -> None:
        if not self._inside:
            raise ProgramError(
                "this optimizer steps inside backward, where no moment has all gradients. Leave out optimizer.step(); for "
                "clipping by the global norm, for accumulation and for gradient scaling, leave out rg.step_in_backward"
            )

    def _whole(self, p: Tensor) -> Any:
        def refuse_pieces(_: Tensor) -> None:
            if id(p) in self._stepped or p.grad is not None:
                raise ProgramError(
                    f"a second gradient for a parameter of shape {tuple(p.shape)} since optimizer.zero_grad(): the first one has "
                    "been stepped on. Accumulation over several backward passes, and parameters shared between them, do not go "
                    "with rg.step_in_backward; in an ordinary loop call optimizer.zero_grad() before each backward"
                )

        return refuse_pieces

    def _step(self, p: Tensor) -> None:
        """Step this parameter and those that have waited, as far as nothing needs them any more."""
        with self._lock:
            candidates, waited = [*self._waiting, p], bool(self._waiting)
            self._waiting = [q for q in candidates if needed(q)]
            for q in candidates:
                if all(q is not one for one in self._waiting):
                    self._step_alone(q)
            if self._waiting and not waited:
                at_end_of_backward(self._step_the_rest)

    def _step_the_rest(self) -> None:
        with self._lock:
            while self._waiting:
                self._step_alone(self._waiting.pop())

    def _step_alone(self, p: Tensor) -> None:
        """The optimizer's own step, on a list of groups that has this parameter alone."""
        group = self._group_of[id(p)]
        alone = {**group, "params": [p]}
        groups, self.optimizer.param_groups = self.optimizer.param_groups, [alone]
        self._inside = True
        try:
            self.optimizer.step()
        finally:
            self._inside = False
            self.optimizer.param_groups = groups
        self._stepped.add(id(p))
        p.grad = None
        if any(alone[key] is not value for key, value in group.items() if key != "params"):
            raise ProgramError(
                f"{type(self.optimizer).__name__} changes its groups in each step, so it cannot step inside backward"
            )


def _refuse_ddp(modules: Iterable[Module]) -> None:
    """For a program that DistributedDataParallel calls, if some optimizer steps its parameters inside backward."""
    if not len(_OWNER) or not torch.distributed.is_available():
        return
    ddp = active_ddp()
    if ddp is None or torch.distributed.get_world_size(ddp.process_group) == 1:
        return
    if any(p is not None and p in _OWNER for module in modules for p in module._parameters.values()):
        raise ProgramError(
            "DistributedDataParallel averages gradients over processes after rg.step_in_backward has stepped on them, so the "
            "processes would drift apart. Shard with fully_shard (FSDP2), which averages them before, or leave out "
            "rg.step_in_backward"
        )
