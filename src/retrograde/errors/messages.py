"""What can go wrong, said once: every message names the update, the cause and the way out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from .kinds import (
    Edited,
    EditedInBackward,
    Freed,
    NotRepeated,
    OffloadError,
    OutOfRange,
    ProgramError,
    ReplayError,
)


def at(index: int, update: object) -> str:
    return f"update {index}: {update}"


def unknown(what: str, got: object, known: Iterable[object]) -> ProgramError:
    return ProgramError(f"unknown {what} {got!r}; known: {', '.join(map(str, known))}")


def out_of_range(where: str, name: str, limit: float, reached: float | None, noisy: bool) -> OutOfRange:
    size = "" if reached is None else f" (at {reached:.6g})"
    way = _NO_NOISE if noisy else "arithmetic='float', with memory='checkpoint' if rg.check.gradients reports drift"
    return OutOfRange(
        f"the stream {name!r} left the range of exact arithmetic, ±{limit:.0f}{size}. Usually the net is diverging: lower the "
        f"learning rate, or put a norm at the start of fn. If such values are intended, scale the stream, or use {way}",
        where,
    )


def input_out_of_range(name: str, limit: float, noisy: bool) -> OutOfRange:
    return OutOfRange(
        f"the stream {name!r} was given with values beyond the range of exact arithmetic, ±{limit:.0f}. Scale the input, or use "
        + (_NO_NOISE if noisy else "arithmetic='float'")
    )


_NO_NOISE = "bits=None, which trains without noise, and memory='checkpoint' or 'offload'"


def too_deep(where: str, error: float) -> ProgramError:
    return ProgramError(
        f"undoing the updates from here on divides by gamma so often that rounding errors would grow to {error:.0e} of the "
        "stream, and gradients would be wrong. Use arithmetic='exact', rg.Anchor(every_blocks=n), which bounds the "
        "error, or memory='checkpoint'",
        where,
    )


def small_values(name: str, size: float, unit: float, noisy: bool) -> str:
    return (
        f"no value of the stream {name!r} is above {size:.1e}, and exact arithmetic rounds to multiples of {unit:.1e}: "
        "precision is lost. Scale the stream, or use " + (_NO_NOISE if noisy else "arithmetic='float'")
    )


def scripted(where: str) -> ProgramError:
    return ProgramError(
        "fn is or holds a module of TorchScript, which saves different tensors in each run, so it cannot be run again. Use the "
        "module that it was made of (torch.compile works on it), or memory='store'",
        where,
    )


def edited_by_fn(where: str, what: str) -> Edited:
    return Edited(f"fn edited {what} in place. Work on a copy: `x = x.clone()`, or `x + 1` instead of `x += 1`", where)


def edited_by_rule(where: str, step: str) -> Edited:
    return Edited(
        f"{step} of the rule edited the target or an argument in place. Work on a copy: `x.clone()`, or `x - 1` instead "
        "of `x.sub_(1)`. For an invertible function, apply is its forward and undo its inverse",
        where,
    )


def no_tensor(where: str, step: str, got: object) -> ProgramError:
    return ProgramError(
        f"{step} of the rule returned a {type(got).__name__} instead of a tensor. For an invertible function, apply is its "
        "forward and undo its inverse",
        where,
    )


def changed_since(where: str, what: str) -> NotRepeated:
    way = "Call backward first"
    if what.startswith("a tensor"):
        way += ", or give the tensor itself as a side input, or in a dict"
    if what.startswith("the parameter"):
        way += ". If your optimizer steps inside backward, use rg.step_in_backward: it waits until nothing needs the parameter"
    return NotRepeated(
        f"{what} was changed between the forward pass and backward, so fn cannot be run again as it was. {way}", where
    )


def held_tensor(shape: Any) -> str:
    return f"a tensor of shape {tuple(shape)} that fn holds on to"


def edited_side_input(where: str) -> NotRepeated:
    return NotRepeated(
        "a side input of fn was edited in place during backward, by a hook perhaps, so fn cannot be run again as it was. Edit a "
        "copy, or wait until backward is done",
        where,
    )


def random_rule(where: str) -> ProgramError:
    return ProgramError(
        "the rule draws random numbers when it is applied, and undoing it would draw others. Draw them in fn, or use "
        "memory='checkpoint'",
        where,
    )


def edited_inside(where: str, shape: Any) -> ReplayError:
    return ReplayError(
        f"fn changed in place a tensor of shape {tuple(shape)} that its own gradient needs. "
        "Use the out-of-place form of that operation; ordinary autograd refuses it as well",
        where,
    )


def edited_output(what: str) -> ReplayError:
    return ReplayError(
        f"{what} was edited in place after the forward pass; backward recovers every activation from it. "
        "Edit a copy (`y = y + 1` instead of `y += 1`), or run the net with memory='store'"
    )


def edited_while_kept(where: str, shape: Any) -> NotRepeated:
    return NotRepeated(
        f"a tensor of shape {tuple(shape)} that the gradient of fn needs was edited in place after the forward pass. Call "
        "backward first, or edit a copy",
        where,
    )


def no_pinned_memory(size: int) -> OffloadError:
    return OffloadError(
        f"{size} bytes of host memory could not be pinned, so that a device can copy there. Allow more locked memory "
        "(`ulimit -l`), move less (rg.Offload(host=…)), or use memory='checkpoint'"
    )


def no_host_memory(size: int, left: int) -> OffloadError:
    return OffloadError(
        f"what is to move to host memory takes {size} bytes more, and {left} are available. Move less "
        f"(rg.Offload(host={left // 2})), or use memory='checkpoint' or a smaller batch"
    )


def host_too_small(host: int, least: int) -> OffloadError:
    return OffloadError(
        f"rg.Offload(host={host}) has no room for what one layer keeps, {least} bytes, so nothing would move. Give more, or use "
        "memory='checkpoint'"
    )


def edited_in_backward(where: str) -> EditedInBackward:
    return EditedInBackward(
        "the backward pass of fn edited in place a tensor that fn had saved, and earlier activations are recovered from it. Let "
        "the backward of your autograd.Function work on a copy (`x * 2` instead of `x.mul_(2)`), or use memory='store'",
        where,
    )


def other_value(where: str, far: float, drifts: bool, late: bool) -> NotRepeated:
    return NotRepeated(
        f"when backward ran fn again, it returned something else than in the forward pass {_apart(far)}, so gradients would be "
        f"wrong{_late(late)}. {_CAUSES} {_DRIFT if drifts else ''}rg.check.gradients(net, x) shows where it comes from; with "
        "memory='store' nothing is run again",
        where,
    )


def drifted(where: str, far: float) -> NotRepeated:
    return NotRepeated(
        f"when backward ran fn again, it returned something slightly different {_apart(far)}, and gradients are off by about as "
        f"much. {_DRIFT}{_CAUSES}",
        where,
    )


def wrong_undo(where: str, far: float, late: bool) -> NotRepeated:
    return NotRepeated(
        f"undo of the rule does not give back the target as it was before apply {_apart(far)}, so gradients would be "
        f"wrong{_late(late)}. undo(apply(target, out), out) must be the target, up to rounding; if it cannot be, use "
        "memory='checkpoint'",
        where,
    )


_CAUSES = (
    "fn must depend on its inputs, parameters and buffers alone: it must not draw from Python's or numpy's random generators, "
    "count calls or keep results in attributes, or read a flag, a mask or a global that changed after the forward pass."
)
_DRIFT = (
    "Or the inputs of fn have drifted, as undoing updates in floating point adds rounding errors: arithmetic='exact' does not "
    "drift (for additions), memory='checkpoint' and rg.Anchor(every_blocks=n) drift less. "
)


def _apart(far: float) -> str:
    return f"(relative difference {far:.1e})" if math.isfinite(far) else "(other elements are NaN or infinite)"


def _late(late: bool) -> str:
    return " (found after backward was over: one optimizer step may have used them)" if late else ""


def raised_again(where: str, error: BaseException) -> NotRepeated:
    return NotRepeated(
        f"when backward ran fn again, it raised {type(error).__name__}: {error}. In the forward pass it did not, so fn has "
        "changed since, or its inputs have drifted. Make fn depend on its inputs alone (rg.replaying() is true while it runs "
        "again), or use memory='store'",
        where,
    )


def stuck(where: str) -> ReplayError:
    return ReplayError(
        "another thread has been recomputing for minutes, perhaps waiting for this one: a fn that calls autograd itself, "
        "on several devices. Use memory='store' for that program",
        where,
    )


def freed() -> Freed:
    return Freed(
        "the activations of this program are gone: its graph has been through a backward pass, or all of its outputs were "
        "deleted. Use retain_graph=True in the first backward, and keep the outputs until the last"
    )


def other_path(where: str, difference: str) -> NotRepeated:
    return NotRepeated(
        f"fn did not do in backward what it did in the forward pass: {difference}. Usual causes: random numbers from outside "
        "torch's generators, a cache or a counter inside fn, a flag that was changed. Make fn depend on its inputs alone "
        "(rg.replaying() is true while it runs again), or use memory='store'",
        where,
    )
