"""`retrograde drift`: how far recovered streams and gradients drift, by depth."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.markup import escape
from rich.table import Table

import retrograde as rg

from .._base.given import at_least, device_of, picture, writable
from .._base.loading import Refused, one_line
from .._base.report import counted, origin
from .._engine.run import instead
from ..bench.drift_curve import Curve, Point, draw_curve
from ..check.gradients import short
from ..check.lines import raised_at, shown
from ..errors import RetrogradeError
from .net_given import Given, given_net
from .options import Device, Factory, File, Flag, Names, Number, Numbers
from .parse import nearest
from .screen import console, keep, progress

DEFAULTS = {"dim": 64, "heads": 4, "seq": 32, "batch": 2}
DEPTHS = (4, 8, 16, 32, 64)
PRECISIONS: dict[str, tuple[str, str, torch.dtype | None]] = {  # by option: dtype, name in tables, dtype of autocast
    "float64": ("float64", "float64", None),
    "float32": ("float32", "float32", None),
    "autocast-bfloat16": ("float32", "float32, bf16 autocast", torch.bfloat16),
    "autocast-float16": ("float32", "float32, fp16 autocast", torch.float16),
    "bfloat16": ("bfloat16", "bfloat16", None),
    "float16": ("float16", "float16", None),
}
ARITHMETIC = ("float", "exact")


@dataclass
class Options:
    """How far recovered streams and gradients drift, by depth, precision and arithmetic.

    Backward recovers streams by subtraction, which rounds in float arithmetic. Measured are the relative error of all gradients
    as one vector, memory reverse against store, and the largest relative error of the streams that an update was given again.
    Exact arithmetic has neither. Read the orders of magnitude: it is one net at initialisation, one seed.
    """

    block: Factory = None
    """Your block, or a net that takes depth, as for retrograde check; by default, attention and an MLP."""
    depth: Numbers = ()
    """Numbers of blocks, one or several (4 8 16 32 64)."""
    dtype: Names = ()
    """Of float64, float32, autocast-bfloat16, autocast-float16, bfloat16, float16 (float32 autocast-bfloat16 bfloat16)."""
    arithmetic: Names = ()
    """float, exact or both (both)."""
    dim: Number = None
    """Width of a stream (64)."""
    heads: Number = None
    """Attention heads, of our block or of a factory that asks for them (4)."""
    seq: Number = None
    """Tokens in a sequence (32)."""
    batch: Number = None
    """Sequences (2)."""
    shape: Numbers = ()
    """Shape of the input, if it is not (batch, seq, dim)."""
    device: Device = "auto"
    """auto uses a GPU if there is one."""
    seed: int = 0
    """Seed of parameters and input."""
    json: File = None
    """Write the figures here; - writes them to stdout, instead of the tables."""
    plot: File = None
    """Draw the gradients' error against depth, as .png, .svg or .pdf."""
    traceback: Flag = False
    """Show the whole traceback of an error in your code."""


def run(options: Options) -> int:
    setting = setting_of(options)
    writable(options.json, "--json")
    picture(options.plot, "--plot")
    notes: list[str] = []
    curve = Curve(
        **origin(setting["device"], "retrograde drift", sys.argv[2:]), setting=setting, rows=list(measured(setting, notes.append))
    )
    if not keep(options.json, curve):
        show(curve, notes)
    if options.plot:
        draw_curve(curve, options.plot)
    return 0 if any(row.error is not None for row in curve.rows) else 1


def setting_of(options: Options) -> dict[str, Any]:
    """What to measure, checked."""
    sizes = {name: default if getattr(options, name) is None else getattr(options, name) for name, default in DEFAULTS.items()}
    at_least(1, **sizes)
    at_least(0, seed=options.seed)
    for name in ("depth", "shape"):
        for value in getattr(options, name):
            at_least(1, **{name: value})
    for name, known in (("dtype", PRECISIONS), ("arithmetic", ARITHMETIC)):
        for word in getattr(options, name):
            if word not in known:
                raise Refused(f"--{name} {word!r} is not one of: {', '.join(known)}{nearest(word, known)}")
    if options.block is None and sizes["dim"] % sizes["heads"]:
        raise Refused(f"--dim {sizes['dim']} is not a multiple of --heads {sizes['heads']}")
    if options.block is None and options.shape and (len(options.shape) != 3 or options.shape[-1] != sizes["dim"]):
        raise Refused(f"--shape {' '.join(map(str, options.shape))}: our block takes (batch, seq, dim), give a --block of yours")
    return {
        **sizes,
        "block": options.block,
        "shape": list(options.shape) or [sizes["batch"], sizes["seq"], sizes["dim"]],
        "depth": sorted(set(options.depth or DEPTHS)),
        "dtype": list(dict.fromkeys(options.dtype or ("float32", "autocast-bfloat16", "bfloat16"))),
        "arithmetic": [name for name in ARITHMETIC if name in (options.arithmetic or ARITHMETIC)],
        "device": device_of(options.device),
        "seed": options.seed,
    }


def measured(setting: dict[str, Any], note: Callable[[str], None]) -> Iterator[Point]:
    """A point for each precision, depth and arithmetic; `note` hears why there is no figure, where there is none."""
    with progress() as bar:
        task = bar.add_task("", total=len(setting["dtype"]) * len(setting["depth"]) * len(setting["arithmetic"]))
        for name in setting["dtype"]:
            dtype, shown_as, autocast = PRECISIONS[name]
            for depth in setting["depth"]:
                given = given_net(setting["block"], "--block", {**setting, "depth": depth, "dtype": dtype})
                for arithmetic in setting["arithmetic"]:
                    bar.update(task, description=f"{shown_as}, depth {depth}, {arithmetic}")
                    yield Point(shown_as, 1, depth, arithmetic, *errors_of(setting, given, autocast, arithmetic, note))
                    bar.advance(task)


def errors_of(
    setting: dict[str, Any], given: Given, autocast: torch.dtype | None, arithmetic: Any, note: Callable[[str], None]
) -> tuple[float | None, float | None]:
    """Of the gradients and of the streams."""
    try:
        with (
            instead(arithmetic=arithmetic),
            torch.autocast(setting["device"], autocast) if autocast else contextlib.nullcontext(),
        ):
            found = rg.check.drift(given.net, *given.inputs, **given.side)
    except RetrogradeError as error:
        note(f"{arithmetic}: {error}")
        return None, None
    except Exception as error:
        at = shown(raised_at(error))
        place = f" at {at}" if at else ""
        raise Refused(f"--block {setting['block']} raises {one_line(error)}{place}, with {given.what()}") from error
    return found.gradient_error, found.worst.relative if found.rows else 0.0


def show(curve: Curve, notes: list[str]) -> None:
    out, s = console(), curve.setting
    net = s["block"] or f"attention and an MLP, width {s['dim']}, {counted(s['heads'], 'head')}"
    out.print(escape(f"{net}, input {' × '.join(map(str, s['shape']))}"), escape(curve.where()), sep="\n", soft_wrap=True)
    for title, streams in (("relative error of the gradients", False), ("of the recovered streams", True)):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="bold")
        table.add_column(title)
        table.add_column("arithmetic")
        for depth in s["depth"]:
            table.add_column(counted(depth, "block") if depth == s["depth"][0] else str(depth), justify="right")
        for (dtype, _, arithmetic), errors in curve.lines(streams).items():
            table.add_row(dtype, arithmetic, *(short(errors.get(depth)) for depth in s["depth"]))
        out.print(table)
    if s["block"] and any(row.arithmetic == "exact" and (row.error or row.streams) for row in curve.rows):
        cause = "exact arithmetic recovers streams to the bit, so a function is not recomputed as it was"
        notes = [*notes, f"{cause}: run `retrograde check {s['block']}`"]
    for line in dict.fromkeys(notes):
        out.print(escape(line), soft_wrap=True)
