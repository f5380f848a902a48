"""`retrograde train`."""

from __future__ import annotations

import lzma
import os
import re
import sys
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from .._base.given import at_least, byte_size, picture, writable
from .._base.loading import Refused
from .._base.report import machine, origin, size
from ..errors import RetrogradeError
from ..memory import KINDS, Anchor, Budget, StoreLast
from ..training.errors import reason
from ..training.loop import Outcome, train
from ..training.metrics import read
from ..training.settings import Settings, settle
from .options import Arithmetic, Device, File, Flag, Number, Paths, Policy, Real
from .screen import console, harmless, keep
from .watch import Watch

SETTINGS = {"dim": "width", "seq": "context", "dtype": "precision"}  # of a run, where they have another name than the option
XZ_LIMIT = 1 << 26  # bytes; a compressor takes a second for each megabyte or two


@dataclass
class Options:
    """Train a deep reversible language model over bytes, end to end: data, checkpoints, curves and a sample.

    Without options it takes about two minutes on two CPU cores, and trains a larger model on a GPU. Under torchrun it trains on
    several processes: torchrun --nproc-per-node 8 -m retrograde train --parallel fsdp
    """

    out: Annotated[Path, arg(metavar="PATH")] = Path("runs/language")
    """Folder for checkpoints, metrics.jsonl, curves.png and sample.txt."""
    resume: Flag = False
    """Continue from the last checkpoint in --out, or start if there is none."""
    data: Paths = ()
    """Text files or folders; by default, the sources of Python's standard library."""
    depth: Number = None
    """Number of blocks, each attention and an MLP (12 on a CPU, 24 on a GPU)."""
    dim: Number = None
    """Width of a stream (96, 512)."""
    heads: Number = None
    """Attention heads (4, 8)."""
    seq: Number = None
    """Bytes in a sequence: the context of a prediction (128, 1024)."""
    streams: Number = None
    """Streams of the reversible net (3); 1 is an ordinary residual net of the same size."""
    bits: Number = None
    """With --streams 1: train the ordinary net reversibly, by a little noise and so many kept bits (1 to 8; 4 is a good
    start)."""
    dropout: Real = None
    """Dropout on the output of attention and MLPs (0, 0.2)."""
    batch: Number = None
    """Sequences in a step, over all processes (8, 32)."""
    accumulate: int = 1
    """Accumulate gradients over this many parts of the batch."""
    steps: Number = None
    """Optimizer steps (400, 1500)."""
    lr: Real = None
    """Learning rate of AdamW after warmup (2e-3, 1e-3); it falls to a tenth along a cosine."""
    warmup: Number = None
    """Steps of warmup (a twentieth of all)."""
    clip: Real = None
    """Clip gradients to this norm, 0 for no clipping (1.0; 0 with --step-in-backward)."""
    weight_decay: float = 0.1
    """Weight decay of matrices."""
    step_in_backward: Flag = False
    """Update parameters inside backward, so that gradients never take memory all at once."""
    device: Device = "auto"
    """auto uses a GPU if there is one."""
    dtype: Literal["auto", "float32", "bf16", "bfloat16"] = "auto"
    """bf16 and bfloat16 are autocast over float32 parameters (float32 on a CPU, bf16 on a GPU)."""
    memory: Policy = None
    """What is kept for backward: reverse, checkpoint, offload, store, last:K, anchor:N or budget:3GiB (reverse; store for
    --streams 1 without --bits)."""
    arithmetic: Arithmetic = "auto"
    """exact gives the gradients of --memory store to the bit."""
    compile: Flag = False
    """Compile each function with torch.compile."""
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    """How the processes of torchrun share the work."""
    seed: int = 0
    """Seed of weights, batches and the sample."""
    windows: Number = None
    """Sequences of held-out text in an evaluation, 0 for all of it (32, 256)."""
    look_every: Number = None
    """Steps between evaluations (a tenth of all)."""
    save_every: Number = None
    """Steps between checkpoints, 0 for one at the end (a quarter of all)."""
    sample: int = 300
    """Bytes of text to generate at the end."""
    json: File = None
    """Write a report here: sizes, steps, bits per byte, memory, files; - writes it to stdout, and nothing else there."""
    plot: File = None
    """Draw the curves here, as .png, .svg or .pdf, instead of to curves.png in --out."""


OLD_NAMES = {"--width": "--dim", "--context": "--seq", "--precision": "--dtype"}  # of options; they work as they did


def run(options: Options) -> int:
    at_least(0, sample=options.sample, seed=options.seed)
    writable(options.json, "--json")
    picture(options.plot, "--plot")
    given = {SETTINGS.get(f.name, f.name): getattr(options, f.name) for f in fields(options) if f.name not in ("json", "plot")}
    given["precision"] = options.dtype.replace("bfloat16", "bf16")
    if options.memory is not None:
        given["memory"] = policy(options.memory)
    try:
        settings = settle(given)
        with Watch(settings) as watch:
            outcome = train(settings, watch.on_event)
    except RetrogradeError as error:
        raise Refused(with_dashes(str(error))) from error
    if not int(os.environ.get("RANK", 0)):
        try:
            close(settings, outcome, watch, options)
        except OSError as error:
            raise Refused(f"cannot write to {settings.out}: {reason(error)}; trained to {outcome.checkpoint}") from error
    return 128 + outcome.signal if outcome.signal else 0


def report_of(settings: Settings, outcome: Outcome, watch: Watch, held_out: list[float], peak: int) -> dict[str, Any]:
    """What came of it, for --json."""
    return {
        **origin(settings.device, "retrograde train", sys.argv[2:]),
        "setting": settings.plain(),
        "parameters": watch.parameters,
        "steps": outcome.step,
        "seconds": outcome.seconds,
        "signal": outcome.signal,
        "held_out_bits": held_out,
        "peak_bytes": peak,
        "checkpoint": str(outcome.checkpoint),
        "sample": outcome.sample.decode("utf-8", errors="replace") if outcome.sample else None,
    }


def policy(text: str, option: str = "--memory") -> Any:
    """The policy of retrograde that a word names.

    >>> policy("last:8"), policy("budget:1KiB"), policy("reverse")
    (StoreLast(k=8), Budget(bytes=1024), 'reverse')
    """
    kind, _, number = text.partition(":")
    if kind == "budget" and number:
        return Budget(byte_size(number, option))
    if kind in ("last", "anchor") and number.isdecimal() and int(number):
        return StoreLast(int(number)) if kind == "last" else Anchor(int(number))
    if text not in KINDS:
        raise Refused(f"{option} {text!r} is not one of: {', '.join(KINDS)}, last:K, anchor:N, budget:3GiB")
    return text


def with_dashes(message: str) -> str:
    """The message with the names of options in place of those of settings.

    >>> with_dashes("clip 1.0 does not go with step_in_backward: all gradients at once")
    '--clip 1.0 does not go with --step-in-backward: all gradients at once'
    """
    options = {field.name: field.name for field in fields(Options)} | {setting: name for name, setting in SETTINGS.items()}

    def option(match: re.Match[str]) -> str:
        return f"--{options[match[1]].replace('_', '-')}"

    names = "|".join(options)
    message = re.sub(rf"(?:^|(?<= with ))({names})\b(?! parameters)", option, message)
    return re.sub(rf"(?<![-\w])((?=\w+_)(?:{names}))\b", option, message)


def close(settings: Settings, outcome: Outcome, watch: Watch, options: Options) -> None:
    """What there is at the end: where it stands, the files, a sample."""
    screen, out = console(), settings.out
    records = read(out / "metrics.jsonl")
    curves = options.plot or out / "curves.png"
    lines = [f"checkpoint   {outcome.checkpoint}", f"metrics      {out / 'metrics.jsonl'}"]
    if find_spec("matplotlib"):
        from ..training.picture import draw

        where = machine(settings.device)
        what = f"{watch.title()} · {where['device']}, torch {where['torch']}"
        draw(records, curves, what)
        lines.append(f"curves       {curves}")
    if outcome.signal:
        lines.append(f"stopped by signal {outcome.signal} after step {outcome.step}; go on with --resume")
    elif outcome.sample:
        (out / "sample.txt").write_bytes(outcome.sample)
        lines.append(f"sample       {out / 'sample.txt'}")
    held_out = [record["held_out_bits"] for record in records if "held_out_bits" in record]
    peak = max((record.get("peak_bytes", 0) for record in records), default=0)
    if keep(options.json, report_of(settings, outcome, watch, held_out, peak)):
        return
    learnt = f"held-out bits per byte {held_out[0]:.2f} at the start, {held_out[-1]:.2f} now; " if held_out else ""
    took = f"{outcome.step} of {settings.steps} steps in {outcome.seconds:.0f} s"
    screen.print(f"{took}; {learnt}peak memory {size(peak)}", soft_wrap=True)
    if settings.windows == 0 and held_out and len(outcome.data.held_out) <= XZ_LIMIT:
        text = outcome.data.held_out_bytes()
        packed = 8 * len(lzma.compress(text, preset=9)) / len(text)
        screen.print(
            f"xz -9 needs {packed:.3f} bits per byte for the same held-out text, the model {held_out[-1]:.3f}", soft_wrap=True
        )
    for line in lines:
        screen.print(line, soft_wrap=True)
    if outcome.sample:
        screen.print(harmless(outcome.sample.decode("utf-8", errors="replace")), markup=False, soft_wrap=True)
