"""Burn in, then time the variants in turns: ratios within one run, medians, spread."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass
class Timing:
    median: float  # seconds
    low: float  # quartiles
    high: float


def in_turns(
    variants: Mapping[str, Callable[[], object]],
    rounds: int = 30,
    burn_in: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time each variant once per round, so that a change of the machine's speed meets all of them.

    Garbage is collected between rounds: a collection leaves cold caches to whoever comes next. Each variant is first as often as
    the others.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for turn in range(burn_in + rounds):
        gc.collect()
        order = [*order[1:], order[0]]
        for name in order:
            _wait()
            start = clock()
            variants[name]()
            _wait()
            if turn >= burn_in:
                times[name].append(clock() - start)
    quartiles = {name: statistics.quantiles(seconds, n=4, method="inclusive") for name, seconds in times.items()}
    return {name: Timing(median=q[1], low=q[0], high=q[2]) for name, q in quartiles.items()}


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
