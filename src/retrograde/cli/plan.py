"""`retrograde plan`: what fits, told before anything is run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich import box
from rich.table import Table

from .._base.given import at_least, byte_size, picture, writable
from .._base.loading import Refused, load
from .._base.report import size
from ..errors import RetrogradeError
from ..models.blocks import BITS
from ..planning.plan import Plan, Row, make_plan
from ..planning.predict import Planner, ways_of
from ..planning.subject import takes
from .options import Autocast, Dtype, Factory, File, Flag, Number, Numbers, Size
from .screen import console, keep, progress

DEFAULTS = {"cpu": {"dim": 64, "seq": 128, "batch": 4, "depth": 12}, "cuda": {"dim": 1024, "seq": 4096, "batch": 4, "depth": 24}}
RESERVE = "1GiB"
SMALLEST = 2**20  # bytes, of a size that needs no unit


@dataclass
class Options:
    """Predict the memory of a training step under every way to train, how far each goes, and whether reversal is worth it.

    Nothing is run: a step of a few blocks is traced on fake tensors, which have shapes and no memory. Sizes that are not given
    are those of `retrograde bench` on the same device.
    """

    block: Factory = None
    """Your block: a function that takes nothing, the width, or sizes by name (dim, heads); by default, attention and an MLP.
    It returns a pair (f, g), or a module with f and g."""
    model: Factory = None
    """Your whole model instead: a function with any of the arguments depth, dim, heads, seq and batch.
    It returns a model, or a pair (model, inputs)."""
    dim: Number = None
    """Width of a stream."""
    heads: Number = None
    """Attention heads, of our block (one for each 64 of the width)."""
    seq: Number = None
    """Tokens in a sequence."""
    batch: Number = None
    """Sequences in a step, on each device."""
    shape: Numbers = ()
    """Shape of the input, if it is not (batch, seq, dim)."""
    depth: Number = None
    """Number of blocks."""
    dtype: Dtype = "float32"
    """Precision of parameters and input."""
    autocast: Autocast = "auto"
    """auto is bfloat16 for float32 on a GPU, none elsewhere."""
    device: Literal["cuda", "cpu"] = "cuda"
    """The device to plan for; this machine does not need one."""
    gpu_memory: Size = None
    """The memory to fit into, as 24GiB; by default, that of the GPU of this machine, if it has one."""
    reserve: Size = None
    """The part of that memory that CUDA itself, libraries and gaps between tensors take (1GiB; 0 for a CPU)."""
    optimizer: Literal["adamw", "adamw-fused", "momentum", "sgd"] = "adamw"
    """The optimizer, whose states take memory."""
    grads: Literal["none", "kept", "stepped"] = "none"
    """none: each step starts without gradients. kept: gradient buffers stay. stepped: rg.step_in_backward uses them up."""
    budget: Size = None
    """Bytes of rg.Budget; by default, what is left of the memory."""
    compile_budget: float = 0.5
    """The activation memory budget of torch.compile's partitioner, between 0 and 1."""
    devices: int = 1
    """Number of devices over which FSDP2 shards parameters, gradients and states, block by block."""
    json: File = None
    """Write the plan here; - writes it to stdout, instead of the table."""
    plot: File = None
    """Draw the peak against depth, as .png, .svg or .pdf."""
    traceback: Flag = False
    """Show the whole traceback of an error in your code."""


def run(options: Options) -> int:
    planner = Planner(setting_of(options))
    draw = drawing(options)
    with progress() as bar:
        task = bar.add_task("tracing", total=len(ways_of(planner.setting)))
        try:
            plan = make_plan(planner, did=lambda way: bar.advance(task))
        except RetrogradeError as error:
            raise Refused(str(error)) from error
    draw(plan, planner)
    if not keep(options.json, {"command": shlex.join(["retrograde", "plan", *sys.argv[2:]]), **plan.as_dict()}):
        show(plan)
    return 0


def setting_of(options: Options) -> dict[str, Any]:
    """What to plan, checked; defaults for what was not given."""
    device = options.device
    s: dict[str, Any] = {}
    for name, default in DEFAULTS[device].items():
        s[name] = default if getattr(options, name) is None else getattr(options, name)
        at_least(1, **{name: s[name]})
    at_least(1, devices=options.devices)
    s["heads"] = max(1, s["dim"] // 64) if options.heads is None else options.heads
    at_least(1, heads=s["heads"])
    for length in options.shape:
        at_least(1, shape=length)
    if options.block and options.model:
        raise Refused("--block and --model are two things to plan, give one of them")
    for name in ("block", "model"):
        if getattr(options, name):
            load(getattr(options, name), f"--{name}")
    if options.shape and options.model:
        raise Refused("--shape is for blocks; a --model of yours returns (model, inputs)")
    if options.shape and not options.block:
        raise Refused("--shape: our block takes (batch, seq, dim), give a --block of yours")
    if not (options.block or options.model) and s["dim"] % s["heads"]:
        raise Refused(f"--dim {s['dim']} is not a multiple of --heads {s['heads']}")
    if not 0 <= options.compile_budget <= 1:
        raise Refused(f"--compile-budget must be between 0 and 1, got {options.compile_budget:g}")
    memory, reserve = memory_of(options)
    auto = "bfloat16" if device == "cuda" and options.dtype == "float32" else "none"
    return {
        "device": device,
        **s,
        "batch": options.shape[0] if options.shape else s["batch"],
        "shape": list(options.shape),
        "dtype": options.dtype,
        "autocast": auto if options.autocast == "auto" else options.autocast,
        "block": options.block,
        "model": options.model,
        "memory": memory,
        "reserve": reserve,
        "room": None if memory is None else memory - reserve,
        "optimizer": options.optimizer,
        "grads": options.grads,
        "budget": None if options.budget is None else memory_size(options.budget, "--budget"),
        "compile_budget": options.compile_budget,
        "devices": options.devices,
    }


def memory_of(options: Options) -> tuple[int | None, int]:
    """What there is, and how much of it is not for torch."""
    cuda = options.device == "cuda"
    if options.gpu_memory is not None:
        memory = memory_size(options.gpu_memory, "--gpu-memory")
    else:
        memory = torch.cuda.get_device_properties(0).total_memory if cuda and torch.cuda.is_available() else None
    if options.reserve is None:
        reserve = byte_size(RESERVE, "--reserve") if cuda else 0
    else:
        reserve = 0 if options.reserve.strip() == "0" else memory_size(options.reserve, "--reserve")
    if memory is not None and reserve >= memory:
        raise Refused(f"--reserve {size(reserve)} leaves nothing of --gpu-memory {size(memory)}")
    return memory, reserve


def memory_size(text: str, option: str) -> int:
    """Bytes. A small number without a unit is not meant so."""
    found = byte_size(text, option)
    if text.strip().isdigit() and found < SMALLEST:
        unit = "GiB" if found < 1024 else "MiB"
        raise Refused(f"{option} {text} is {found} bytes, did you mean {text.strip()}{unit}?")
    return found


def drawing(options: Options) -> Callable[[Plan, Planner], None]:
    """Draws if asked to; what would stand in the way is reported at once."""
    writable(options.json, "--json")
    picture(options.plot, "--plot")
    path = options.plot
    if path is None:
        return lambda plan, planner: None
    if not takes({"model": options.model, "shape": options.shape}, "depth"):
        raise Refused(f"--plot draws the peak against depth, and --model {options.model} takes no depth")
    from ..planning.picture import draw

    return lambda plan, planner: draw(plan, planner, path)


def show(plan: Plan) -> None:
    out, s = console(), plan.setting
    out.print(plan.what(), plan.held(), sep="\n", soft_wrap=True, markup=False)
    out.print(table(plan))
    if s["memory"]:
        kept = f", {size(s['reserve'])} of it kept free" if s["reserve"] else ""
        out.print(f"Fits: into {size(s['memory'])}{kept}.", soft_wrap=True)
    for row in plan.rows:
        if row.failed:
            out.print(f"{row.way}: {row.failed}", soft_wrap=True, markup=False)
    out.print(f"Is reversal worth it? {plan.verdict}", soft_wrap=True, markup=False)


def table(plan: Plan) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="bold")
    reached = next((row.reach for row in plan.rows if row.reach), {})
    words = {"depth": "deepest", "seq": "longest", "batch": "largest batch"}
    last = ["fits", *(words[name] for name in reached)] if plan.setting["room"] else []
    for column in ("way", "activations", "peak", *last):
        shown.add_column(column, justify="left" if column == "way" else "right", no_wrap=column == "way")
    for row in plan.rows:
        shown.add_row(name_of(row, plan.setting), *cells(row))
    return shown


def name_of(row: Row, setting: dict[str, Any]) -> str:
    if row.way == "compile":
        return f"torch.compile, budget {setting['compile_budget']:g}"
    if row.way == "bits":
        return f"ordinary layers, bits={BITS}"
    if row.way == "budget" and row.predicted:
        blocks = f", {row.predicted.stored:.0f} of {setting['depth']} blocks stored" if takes(setting, "depth") else ""
        return f"Budget of {size(row.predicted.budget)}{blocks}"
    if row.way == "budget":
        return f"Budget of {size(setting['budget'])}" if setting["budget"] else "Budget"
    return row.way


def cells(row: Row) -> list[str]:
    found = ["too small", ""] if row.predicted is None else [size(row.predicted.activations), size(row.predicted.peak)]
    if row.fits is not None:
        found.append("yes" if row.fits else "no")
    return found + [f"{n:,}" if n else "none" for n in (row.reach or {}).values()]
