"""From steps of a few blocks to any depth: what each way to train takes in memory, on one device or sharded over several.

A step of a net is made of equal blocks, so its peak in each part of the step (trace.py) is a straight line in depth. Two depths
give the line; where a net is not deeper than these, it is traced itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import BudgetTooSmall
from ..memory import Budget
from .subject import takes, traced, tracer_of
from .trace import Traced

LOW, HIGH = 4, 6  # blocks; below four, recovered streams may not yet be of full number
WAYS = ("store", "checkpoint", "compile", "bits", "reverse", "budget")
OPTIMIZERS = {  # of the size of the parameters: states, and what a step holds for itself on CUDA and elsewhere
    "adamw": (2, 1, 0),  # on CUDA all square roots at once
    "adamw-fused": (2, 0, 0),
    "momentum": (1, 0, 0),
    "sgd": (0, 0, 0),
}
PLENTY = 1 << 60
Sizes = tuple[int, int, int]  # depth, seq, batch


def ways_of(setting: dict[str, Any]) -> list[str]:
    """Layers with reversible noise are made of blocks; a model is taken as it is."""
    return [way for way in WAYS if way != "bits" or setting["model"] is None]


@dataclass(frozen=True)
class Predicted:
    """Bytes on one device."""

    way: str
    parameters: int  # buffers too
    gradients: int  # all of them
    states: int  # of the optimizer
    gathered: int  # where parameters are sharded: what is whole for a moment
    activations: int  # the peak of a step over all of these, inputs included
    step: int  # the peak of forward and backward, everything included
    optimizer: int  # the peak of the optimizer's step
    stored: float = 0.0  # blocks, under a budget
    budget: int = 0

    @property
    def peak(self) -> int:
        return max(self.step, self.optimizer)


class Planner:
    """Predictions for one setting. Steps that were traced are remembered."""

    def __init__(self, setting: dict[str, Any]):
        self.setting = setting
        self.deepens = takes(setting, "depth")
        self.tracer = tracer_of(setting)
        self.known: dict[Any, Traced] = {}
        self.least: dict[tuple[int, int], int] = {}
        self.shares = 1 / setting["devices"]

    def trace(self, way: Any, depth: int, seq: int, batch: int) -> Traced:
        key = (way, depth, seq, batch)
        if key not in self.known:
            self.known[key] = traced(self.tracer, self.setting, way, depth, seq, batch)
        return self.known[key]

    def along(self, way: Any, sizes: Sizes, measure: Callable[[Traced], float]) -> float:
        """A measure that is linear in depth."""
        return self.all_along(way, sizes, lambda t: [measure(t)])[0]

    def all_along(self, way: Any, sizes: Sizes, measure: Callable[[Traced], list[float]]) -> list[float]:
        """Several measures that are."""
        depth, seq, batch = sizes
        if depth <= HIGH or not self.deepens:
            return measure(self.trace(way, depth, seq, batch))
        both = (measure(self.trace(way, at, seq, batch)) for at in (LOW, HIGH))
        return [low + (high - low) * (depth - LOW) / (HIGH - LOW) for low, high in zip(*both, strict=True)]

    def activations(self, way: Any, sizes: Sizes, share: float) -> float:
        """The peak of a step, gradients counted with this share."""
        return max(self.all_along(way, sizes, lambda t: t.windows(share)))

    def fixed(self, sizes: Sizes, way: str = "reverse") -> dict[str, int]:
        """What does not depend on the way; a step of this one is traced for it."""
        if self.setting["model"] is None:  # parameters of blocks are the same for every input
            sizes = sizes[0], self.setting["seq"], self.setting["batch"]
        count = OPTIMIZERS[self.setting["optimizer"]][0]
        own, trainable, buffers = (
            self.along(way, sizes, lambda t, name=name: getattr(t, name)) for name in ("parameters", "trainable", "buffers")
        )
        return {
            "parameters": round(own * self.shares + buffers),
            "gradients": round(trainable * self.shares),
            "states": round(count * trainable * self.shares),
            "gathered": self.gathered(own, trainable, sizes, way),
        }

    def gathered(self, own: float, trainable: float, sizes: Sizes, way: str) -> int:
        """Whole for a moment under FSDP2, where each block is a unit: parameters of two blocks, the one at work and the next,
        gradients of one and their flat copy for the reduce-scatter, and what is in no block, all the time."""
        if self.setting["devices"] == 1:
            return 0
        depth, seq, batch = sizes
        if not self.deepens:  # where its blocks are is not known
            return round(own + trainable)
        low, high = (self.trace(way, at, seq, batch) for at in (LOW, HIGH))
        block, trained = ((getattr(high, n) - getattr(low, n)) / (HIGH - LOW) for n in ("parameters", "trainable"))
        return round(2 * (block + trained) + own - depth * block + trainable - depth * trained)

    def at(self, way: str, sizes: Sizes, budget: int | None = None) -> Predicted:
        """The way at these sizes; raises BudgetTooSmall."""
        fixed = self.fixed(sizes, "reverse" if way == "budget" else way)
        grads = self.setting["grads"]
        share = self.shares if grads == "none" else 0.0
        stored, policy = 0.0, way
        if way == "budget":
            budget = self.budget(sizes) if budget is None else budget
            activations, stored = self.within(budget, sizes, 0.0)
            step = self.within(budget, sizes, share)[0]
        else:
            activations, step = (self.activations(policy, sizes, s) for s in (0.0, share))
        step += sum(fixed.values()) - (0 if grads == "kept" else fixed["gradients"])
        held = fixed["parameters"] + fixed["states"]
        cuda, elsewhere = OPTIMIZERS[self.setting["optimizer"]][1:]
        beside = (cuda if self.setting["device"] == "cuda" else elsewhere) * fixed["gradients"]
        optimizer = held if grads == "stepped" else held + fixed["gradients"] + beside
        return Predicted(way, **fixed, activations=round(activations), step=round(step), optimizer=round(optimizer),
                         stored=stored, budget=budget or 0)  # fmt: skip

    def budget(self, sizes: Sizes) -> int:
        """For `rg.Budget`: as given, or what is left on the device, or half of what is stored without one if that is enough."""
        if self.setting["budget"]:
            return self.setting["budget"]
        if not self.setting["room"]:
            return max(self.least_budget(sizes), round(self.activations("store", sizes, 0.0) / 2))
        return max(1, self.setting["room"] - self.beside_budget(sizes))

    def beside_budget(self, sizes: Sizes) -> int:
        """All but activations; gradients too, which are there when the last of these are."""
        fixed = self.fixed(sizes)
        return sum(fixed.values()) - (fixed["gradients"] if self.setting["grads"] == "stepped" else 0)

    def least_budget(self, sizes: Sizes) -> int:
        """What a budget must be for every function to be at work in it: the same at every depth."""
        depth, seq, batch = sizes
        limit = self.least.get((seq, batch), 1)
        while (seq, batch) not in self.least:
            try:
                self.trace(Budget(limit), min(depth, 2) if self.deepens else depth, seq, batch)
                self.least[seq, batch] = limit
            except BudgetTooSmall as error:  # of the updates so far
                limit = error.least
        return limit

    def within(self, limit: int, sizes: Sizes, share: float) -> tuple[float, float]:
        """The peak of a step under a budget, and how many of the last blocks it stores.

        A net with so many blocks less, and the budget less by what these would store, has a peak that is less by that; and of
        blocks that are not stored, more change nothing.
        """
        depth, seq, batch = sizes
        low, high = (self.trace(Budget(PLENTY), at, seq, batch) for at in ((LOW, HIGH) if self.deepens else (depth, depth)))
        block = (high.kept - low.kept) / (HIGH - LOW)
        less, few = 0, depth
        if self.deepens and depth > HIGH and block > 0:
            others = max(low.windows(0.0)) - LOW * block
            less = max(0, min(int((limit - others) / block) - LOW, depth - HIGH))
            few = min(depth - less, 2 * LOW)  # of which it stores up to LOW, as a budget keeps more free than `others`
        found = self.trace(Budget(round(limit - less * block)), few, seq, batch)
        stored = less + max(0.0, found.kept - self.trace("reverse", few, seq, batch).kept) / block if block > 0 else 0.0
        trainable = self.along("reverse", sizes, lambda t: t.trainable) - found.trainable
        first = found.trainable / few
        start = max(others + share * there for there, others in found.highest.items() if there <= first) + less * block
        return max(start, *(others + share * (there + trainable) for there, others in found.highest.items() if there)), stored


class Between(Planner):
    """Predictions for sizes that were not traced, from one or two that were: bytes grow as n, or on the line through both."""

    def __init__(self, planner: Planner, traced: list[Sizes]):
        vars(self).update(vars(planner))
        self.planner, self.traced = planner, traced
        self.known = {}

    def trace(self, way: Any, depth: int, seq: int, batch: int) -> Traced:
        key = (way, depth, seq, batch)
        if key in self.planner.known:
            return self.planner.known[key]
        if key not in self.known:
            steps = [self.planner.trace(way, depth, *sizes[1:]) for sizes in self.traced]
            self.known[key] = steps[-1].along(steps[0], self.share(seq, batch))
        return self.known[key]

    def least_budget(self, sizes: Sizes) -> int:
        first, last = (self.planner.least_budget((sizes[0], *one[1:])) for one in (self.traced[0], self.traced[-1]))
        share = self.share(*sizes[1:])
        return round(share * last if first == last else first + share * (last - first))

    def share(self, seq: int, batch: int) -> float:
        """Of the way from the first that was traced to the last, or from nothing."""
        (first, last), here = (one[1] * one[2] for one in (self.traced[0], self.traced[-1])), seq * batch
        return here / last if first == last else (here - first) / (last - first)
