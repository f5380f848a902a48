"""A pretrained net becomes reversible while it is fine-tuned: its coefficient β rises from 0."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ProgramError

__all__ = ["Measured", "Retrofit"]

_log = logging.getLogger("retrograde")


@dataclass(frozen=True)
class Measured:
    """At a step of the optimizer: β, the measured error of the gradients under reversal, and the memory policy from there on."""

    step: int
    beta: float
    error: float
    memory: Any

    def __str__(self) -> str:
        return f"retrofit: step {self.step}, beta {self.beta:.3f}, gradient error {self.error:.1e}, memory {self.memory}"


class Retrofit:
    """Raises β of a model from `reversible_(model, beta=0)` over `steps` steps, and switches reversal on when it can be.

    Call `step()` after each step of the optimizer, or give `callback()` to the `Trainer`. β = `end * schedule(progress)`, with a
    progress from 0 to 1; linear by default. An `end` below 1, as 0.9, stays closer to the original net, and each layer undone
    divides rounding errors by it: for float32. In 16 bits only β = 1 has exact arithmetic.

    Every `check_every` steps the next forward pass in training measures the error of gradients under reversal against
    checkpointing, for a random gradient of the output: two forward and backward passes of the layers more. While it is under
    `tolerance` the model runs under its own memory policy, else under "checkpoint"; at β = 1, with reversal on, nothing more is
    measured. Every measurement is logged (logger "retrograde", INFO) and kept in `history`. To go on after a break give the step
    as `start`; a `Trainer` that resumes from a checkpoint does so by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: int,
        *,
        end: float = 1.0,
        start: int = 0,
        check_every: int | None = None,
        tolerance: float = 1e-2,
        schedule: Callable[[float], float] = float,
    ):
        stack: Any = getattr(model, "reversible", None)
        if stack is None:
            raise ProgramError("Retrofit takes a model from reversible_(model, beta=0)")
        if steps < 1:
            raise ProgramError(f"Retrofit needs at least one step, got {steps}")
        if not 0 < end <= 1:
            raise ProgramError(f"end, the last beta, must be above 0 and at most 1, got {end}")
        self.stack, self.steps, self.end, self.count = stack, steps, end, start
        self.tolerance, self.schedule = tolerance, schedule
        self.check_every = check_every or max(1, steps // 20)
        self.history: list[Measured] = []
        self._asked: int | None = None
        self._set()

    @property
    def beta(self) -> float:
        return self.stack.beta

    def step(self) -> None:
        """One step of the optimizer is done."""
        self._settle()
        self.count += 1
        self._set()
        settled = self.beta == 1 and self.stack.reversing
        if self.count == self.steps or (not settled and self.count % self.check_every == 0):
            self.stack.due, self.stack.error, self._asked = True, None, self.count

    def _set(self) -> None:
        self.stack.beta = self.end * (1.0 if self.count >= self.steps else self.schedule(self.count / self.steps))

    def _settle(self) -> None:
        """What the forward pass of this step has measured, if it was asked to."""
        error = self.stack.error
        if self._asked is None or error is None:
            return
        self.stack.reversing = error < self.tolerance
        made = Measured(self._asked, self.beta, error, self.stack.used_memory)
        self._asked = None
        self.history.append(made)
        _log.info("%s", made)

    def callback(self) -> Any:
        """A `TrainerCallback` that steps with the trainer, and adds β and the error to what it prints and keeps in its log."""
        kind: Any = importlib.import_module("transformers").TrainerCallback
        retrofit = self

        class RetrofitCallback(kind):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step > retrofit.count:  # resumed from a checkpoint
                    retrofit.count = state.global_step
                    retrofit._set()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                retrofit.step()

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                found = {"beta": retrofit.beta}
                if retrofit.history:
                    found["gradient_error"] = retrofit.history[-1].error
                for row in (logs, *state.log_history[-1:]):
                    row.update(found)

        return RetrofitCallback()
