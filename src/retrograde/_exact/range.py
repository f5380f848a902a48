"""Which update left the range of exact arithmetic: told at once on the CPU, at the end of backward where a device would wait."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import errors
from .._base.torch_private import at_end_of_backward, in_transform
from .fake import pretended

LIMIT = 32766.0
_EDGE = LIMIT + 2.0**-10  # rounds to the limit in float32, where the fused kernel looks
GRID = 24  # bits behind the point


class Ledger:
    """Of one forward pass. `index` is the update at work, or behind them all a stream that is put on the grid at first."""

    def __init__(self, updates: Sequence[Any], streams: Sequence[str]):
        self.updates, self.streams = updates, streams
        self.index = len(updates)
        self.noisy = any(update.rule.loses for update in updates)
        self.strange = False  # NaN or inf has come up
        self.warned = False  # of values that are too small for the grid
        self.flags: dict[torch.device, Tensor] = {}  # on each device, one for each value of `index`
        self.copies: list[tuple[Tensor, Any]] = []  # of the flags, on their way to the CPU

    def within(self, t: Tensor, bits: int = GRID) -> Tensor:
        """`t`, if it is within the limit. A finite value beyond it is an error, and until that can be told, NaN."""
        if not torch.compiler.is_dynamo_compiling() and pretended(t):
            return t
        told = not torch.compiler.is_dynamo_compiling() and type(t) is Tensor and not t.is_meta and not in_transform()
        value = t.detach()
        if told and value.device.type == "cpu":
            low, high = torch.aminmax(value) if value.numel() else (value.sum(), value.sum())
            size = max(-low.item(), high.item())
            if size <= LIMIT:
                if 0 < size < 2.0 ** (12 - bits) and not self.warned:
                    self.warned = True
                    warnings.warn(errors.small_values(self.name(self.index), size, 2.0**-bits, self.noisy), stacklevel=2)
                return t
        beyond = value.isfinite().logical_and_(value.abs() > _EDGE)
        if told and value.device.type == "cpu":
            if beyond.any():
                raise self.error(self.index, float(value[beyond].abs().max()))
            self.strange = True
            return t  # NaN and inf stay what they are
        if told:
            self.flags_on(value.device)[self.index] += beyond.any()
        return t + torch.zeros_like(value).masked_fill_(beyond, torch.nan)  # an addition saves nothing for backward

    def flags_on(self, device: torch.device) -> Tensor:
        if device not in self.flags:
            self.flags[device] = torch.zeros(len(self.updates) + len(self.streams), dtype=torch.int32, device=device)
        return self.flags[device]

    def close(self, outputs: Iterable[Tensor]) -> None:
        """After the forward pass: have the flags looked at when backward through the outputs ends."""
        if not self.flags:
            return
        for flags in self.flags.values():
            if flags.device.type != "cuda":
                self.copies.append((flags, None))
            elif not torch.cuda.is_current_stream_capturing():
                copy = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
                self.copies.append((copy, torch.cuda.current_stream(flags.device).record_event()))
        self.flags = {}
        for t in outputs:
            if t.requires_grad:
                t.register_hook(self._in_backward)

    def _in_backward(self, _: Tensor) -> None:
        at_end_of_backward(self.settle)

    def settle(self) -> None:
        for flags, event in self.copies:
            if event is not None:
                event.synchronize()  # of the forward pass, long ago
            if flags.any():
                raise self.error(int(flags.nonzero()[0]))
        self.copies = []

    def name(self, index: int) -> str:
        """The stream that is written at this index."""
        return self.updates[index].target if index < len(self.updates) else self.streams[index - len(self.updates)]

    def error(self, index: int, reached: float | None = None) -> errors.OutOfRange:
        if index < len(self.updates):
            update = self.updates[index]
            return errors.out_of_range(errors.at(index, update), update.target, LIMIT, reached, self.noisy)
        return errors.input_out_of_range(self.name(index), LIMIT, self.noisy)
