"""Is reversal worth it here, or is something simpler enough: in words."""

from __future__ import annotations

from typing import Any

from .._base.report import size
from .predict import Predicted

WORTH = 0.10  # of the peak: a smaller saving over checkpointing is not worth another architecture
SIMPLER = {"store": "ordinary training", "checkpoint": "checkpointing"}


def verdict(setting: dict[str, Any], rows: dict[str, Predicted]) -> tuple[bool, str]:
    """Whether to reverse, and why; `rows` by way."""
    room = setting["room"]
    if not room:
        return _without_room(setting, rows)
    for way, words in SIMPLER.items():
        if rows[way].peak <= room:
            saved = rows[way].peak - rows["reverse"].peak
            rest = f" Reversal would leave {size(saved)} more free." if saved > WORTH * rows[way].peak else ""
            return False, f"No: {words} fits, it takes {size(rows[way].peak)} of {size(room)}.{rest}"
    best = rows["reverse"]
    if best.peak <= room:
        short = size(rows["checkpoint"].peak - room)
        return True, f"Yes: reversal fits with {size(best.peak)} of {size(room)}, and checkpointing is {short} short."
    held = max(best.optimizer, best.parameters + best.gradients + best.states + best.gathered)
    if held > room:
        way_out = "fewer parameters, a lighter optimizer or more --devices"
        return False, f"No: nothing fits. Parameters, gradients and optimizer alone take {size(held)} of {size(room)}: {way_out}."
    return False, f"No: nothing fits at these sizes, reversal takes {size(best.peak)} of {size(room)}. {_smaller(rows)}"


def _smaller(rows: dict[str, Predicted]) -> str:
    return f"It is {size(rows['checkpoint'].peak - rows['reverse'].peak)} less than checkpointing: a shorter input may fit."


def _without_room(setting: dict[str, Any], rows: dict[str, Predicted]) -> tuple[bool, str]:
    """Against checkpointing, as no memory is given."""
    checkpoint, reverse = rows["checkpoint"], rows["reverse"]
    saved = checkpoint.peak - reverse.peak
    peaks = f"{size(reverse.peak)} reversed, {size(checkpoint.peak)} with checkpointing, {size(rows['store'].peak)} stored"
    if saved > WORTH * checkpoint.peak:
        return True, f"Yes, if memory is short: {peaks}."
    return False, f"No: {peaks}. {hidden(setting, checkpoint, reverse)}".rstrip()


def hidden(setting: dict[str, Any], checkpoint: Predicted, reverse: Predicted) -> str:
    """Why reversal saves activations, and hardly any of the peak."""
    fewer = checkpoint.activations - reverse.activations
    if fewer <= WORTH * checkpoint.activations:
        return "The net is too shallow for reversal to save much."
    if checkpoint.optimizer >= checkpoint.step:
        return f"It saves {size(fewer)} of activations, but the step of the optimizer is what takes most."
    if setting["grads"] == "none" and checkpoint.step + WORTH * checkpoint.peak < sum(
        (checkpoint.parameters, checkpoint.gradients, checkpoint.states, checkpoint.gathered, checkpoint.activations)
    ):
        return (
            f"It saves {size(fewer)} of activations, but gradients grow while activations shrink, and hide that: with --grads "
            "kept or stepped it would count."
        )
    return f"It saves {size(fewer)} of activations, which is little beside the parameters and what belongs to them."
