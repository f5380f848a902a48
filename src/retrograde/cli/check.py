"""`retrograde check`: is your block or net sound?"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch

import retrograde as rg

from .._base.given import at_least, device_of, picture, writable
from .._base.loading import Refused, one_line
from .._base.report import origin
from .._engine.run import instead
from ..check.gradients import Report
from ..check.lines import raised_at, shown
from ..errors import RetrogradeError
from ..models.blocks import DTYPES
from .check_table import Checked, judge, show
from .net_given import Given, given_net
from .options import Autocast, Device, Factory, File, Flag, Net, Number, Numbers, Policy
from .screen import keep
from .train import policy

DEFAULTS = {"dim": 64, "heads": 4, "seq": 32, "batch": 2, "depth": 12}


@dataclass
class Options:
    """Is your block or net sound? Does each function repeat exactly, keep no state, leave its inputs alone; how far do the
    recovered streams drift at this depth and precision; do the gradients agree with ordinary autograd?

    The factory is a function in a module that is installed or in the current directory. It takes nothing, or the width, or any
    of dim, depth, seq, batch and heads by name. It returns a block, as for retrograde bench: (f, g), or a module with f and g.
    Or it returns a list of rg.Update, or a whole net: any module whose forward runs reversible programs. Or (net, inputs) or
    (net, inputs, side), where inputs are a tensor or a tuple, and side is a dict of keyword arguments. Without inputs, the net
    gets a random tensor of shape (batch, seq, dim). Three steps are checked, each on another batch made of the inputs.

    Each fault is shown with its update, the line to change and what to write instead. The exit code is 0 if the net is sound,
    1 if it has faults, 2 for arguments that cannot be used.
    """

    net: Net = None
    """The factory of your block or net, as my_block:block."""
    block: Factory = None
    """The same; other commands call it --block."""
    dim: Number = None
    """Width of a stream, for the factory and the input (64)."""
    depth: Number = None
    """Number of blocks (12)."""
    heads: Number = None
    """Attention heads, for a factory that asks for them (4)."""
    seq: Number = None
    """Tokens in a sequence (32)."""
    batch: Number = None
    """Sequences (2)."""
    shape: Numbers = ()
    """Shape of the input, if it is not (batch, seq, dim)."""
    dtype: Literal["own", "float32", "bfloat16", "float16", "float64"] = "own"
    """Precision of parameters and floating inputs; own is what the factory made, float32 for blocks."""
    autocast: Autocast = "auto"
    """auto is bfloat16 for float32 on a GPU, none elsewhere."""
    memory: Policy = None
    """Another policy than the net's own: reverse, checkpoint, last:K, anchor:N or budget:3GiB (reverse for blocks)."""
    arithmetic: Literal["own", "auto", "float", "exact"] = "own"
    """Another arithmetic than the net's own (auto for blocks)."""
    device: Device = "auto"
    """auto uses a GPU if there is one."""
    seed: int = 0
    """Seed of parameters and input."""
    json: File = None
    """Write the verdict here; - writes it to stdout, instead of the text."""
    plot: File = None
    """Draw the drift update by update, as .png, .svg or .pdf."""
    traceback: Flag = False
    """Show the whole traceback of an error in your code."""


def run(options: Options) -> int:
    setting = setting_of(options)
    writable(options.json, "--json")
    picture(options.plot, "--plot")
    spec = spec_of(options)
    given = given_net(spec, "check", setting)
    memory = None if options.memory is None else policy(options.memory)
    arithmetic = None if options.arithmetic == "own" else options.arithmetic
    with autocast_of(setting, given), instead(arithmetic=arithmetic):
        report, notes, memory = checked(spec, given, memory)
        verdict = Checked(
            **origin(setting["device"], "retrograde check", sys.argv[2:]),
            setting={**setting, "net": spec, "what": given.what(), **ways(given, memory, arithmetic)},
            **judge(report, notes),
        )
        drawn = draw(options, given) if options.plot else None
    if not keep(options.json, verdict):
        show(verdict, drawn)
    return 0 if verdict.sound else 1


def spec_of(options: Options) -> str:
    """The factory, with or without the name of its option."""
    if options.net and options.block:
        raise Refused(f"{options.net} and --block {options.block} are two nets to check, give one of them")
    spec = options.net or options.block
    if spec is None:
        raise Refused("MODULE:FACTORY is missing (see retrograde check --help)")
    return spec


def setting_of(options: Options) -> dict[str, Any]:
    """Sizes and precision, checked."""
    sizes = {name: default if getattr(options, name) is None else getattr(options, name) for name, default in DEFAULTS.items()}
    at_least(1, **sizes)
    for size in options.shape:
        at_least(1, shape=size)
    at_least(0, seed=options.seed)
    return {
        **sizes,
        "shape": list(options.shape) or [sizes["batch"], sizes["seq"], sizes["dim"]],
        "dtype": None if options.dtype == "own" else options.dtype,
        "autocast": options.autocast,
        "device": device_of(options.device),
        "seed": options.seed,
    }


def autocast_of(setting: dict[str, Any], given: Given) -> contextlib.AbstractContextManager[Any]:
    """What is asked for; auto is bfloat16 for float32 on a GPU."""
    name, first = setting["autocast"], next(given.net.parameters(), None)
    if name == "auto":
        name = "bfloat16" if setting["device"] == "cuda" and first is not None and first.dtype == torch.float32 else "none"
    setting["autocast"] = name
    return contextlib.nullcontext() if name == "none" else torch.autocast(setting["device"], DTYPES[name])


def ways(given: Given, memory: Any, arithmetic: str | None) -> dict[str, str]:
    """What was asked for, or else what the net has. A module that calls rg.run by itself does not show it."""

    def of(name: str, asked: Any) -> str:
        own = dict.fromkeys(str(getattr(program, name)) for program in given.programs)
        return str(asked) if asked is not None else ", ".join(own) or "own"

    return {"memory": of("memory", memory), "arithmetic": of("arithmetic", arithmetic)}


def checked(spec: str, given: Given, memory: Any) -> tuple[Report, list[str], Any]:
    """The report under the policy of the net or another one, and under reverse where that policy recomputes nothing."""
    with instead(memory):
        report, notes = _gradients(spec, given), []
    if report.ok and not report.replayed:
        was = ways(given, memory, None)["memory"]
        notes.append(f"under memory {was} no function is recomputed here, so it was checked under reverse")
        memory = "reverse"
        with instead(memory):
            report = _gradients(spec, given)
    return report, notes + report.notes, memory


def _gradients(spec: str, given: Given) -> Report:
    try:
        return rg.check.gradients(given.net, *given.inputs, **given.side)
    except RetrogradeError as error:
        raise Refused(f"check {spec}: {error}") from error
    except Exception as error:
        at = shown(raised_at(error))
        place = f" at {at}" if at else ""
        raise Refused(
            f"check {spec}: the net raises {one_line(error)}{place}, with {given.what()}. See --dim and --shape, or let the "
            "factory return (net, inputs) or (net, inputs, side)"
        ) from error


def draw(options: Options, given: Given) -> str:
    try:
        rg.check.drift(given.net, *given.inputs, **given.side).plot(options.plot or "")
    except RetrogradeError as error:
        return f"nothing was drawn: {error}"
    return f"drawn to {options.plot}"
