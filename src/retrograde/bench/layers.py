"""Ordinary transformer layers, and every way to train them in less memory: time, device memory and host memory, in turns.

python -m retrograde.bench.layers --dim 1024 --depth 24 48 --json layers.json
python -m retrograde.bench.layers --rule --dim 256 512 1024 --seq 512 4096 --tokens 16384 --depth 12

With --rule it prints one line for each size: whether the link to host memory keeps up, and what is fastest.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import retrograde as rg

from .._base.given import at_least, byte_size, device_of, writable
from .._base.loading import Refused, one_line
from .._base.meter import peak_on_cpu, peak_on_cuda
from .._base.report import origin, save, size
from .._engine.run import instead
from .._memory.link import MAKE
from .depth import Parser, release
from .measure import Timing, in_turns
from .ways import WAYS, Forward, Size, Subject, Way

PROG = "python -m retrograde.bench.layers"
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dim": [64], "seq": [128], "batch": 4, "depth": [12], "rounds": 5, "dtype": "float32"},
    "cuda": {"dim": [1024], "seq": [4096], "batch": 4, "depth": [24], "rounds": 8, "dtype": "bfloat16"},
}
BURN_IN = 2  # pools of buffers have settled then
FORWARD = "forward alone"


@dataclass
class Row:
    dim: int
    seq: int
    batch: int
    depth: int
    way: str
    seconds: Timing
    to_checkpoint: float | None  # times its time
    activation_bytes: int  # the peak of a step over what is there before it
    pinned_bytes: int | None = None
    predicted_pinned_bytes: int | None = None  # (layers - keep_last) × tokens × width × bytes
    gradient_error: float | None = None  # over all parameters and the input, against ordinary
    layer_forward_ms: float | None = None
    layer_copy_ms: float | None = None  # what a layer keeps over the speed of the link


@dataclass
class Trial:
    """What was found of a way before steps are timed."""

    step: Callable[[], None]
    activation_bytes: int
    gradient_error: float | None
    pinned_bytes: int | None


def link_speed(device: str) -> tuple[float, float] | None:
    """Bytes per second to pinned host memory, and back."""
    if device != "cuda":
        return None
    there = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    here = torch.empty(there.shape, dtype=torch.uint8, pin_memory=True)
    found = []
    for target, source in ((here, there), (there, here)):
        seconds = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        found.append(there.nbytes / statistics.median(seconds))
    return found[0], found[1]


# -- one size ----------------------------------------------------------------------------------------------------------


def gradients(subject: Subject, forward: Forward) -> list[Tensor]:
    """Of one step alone, in the buffers."""
    for t in subject.wanted:
        t.grad.zero_()  # type: ignore[union-attr]
    torch.manual_seed(1)
    subject.step(forward)
    return [t.grad for t in subject.wanted]  # type: ignore[misc]


def apart(found: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """|found - true| / |true| over all of them."""
    of = torch.stack([torch.stack([(a.double() - b).norm(), b.double().norm()]) for a, b in zip(found, true, strict=True)])
    difference, whole = of.norm(dim=0).tolist()
    return difference / whole


def stored(subject: Subject, forward: Forward) -> list[Tensor]:
    """The gradients of a net under memory="store"; none where that does not fit."""
    found: list[Tensor] = []
    with suppress(torch.OutOfMemoryError), instead("store"):
        found += [t.clone() for t in gradients(subject, forward)]
    release()
    return found


def tried(subject: Subject, way: Way, true: list[Tensor]) -> Trial:
    """A way's first steps. `true`: the gradients of ordinary, which that leaves here."""
    forward = way.make(subject)
    subject.step(forward)  # compiles
    reference = stored(subject, forward) if way.own else true
    found = gradients(subject, forward)
    error = apart(found, reference) if reference else None
    if reference is true and not true:
        true += [t.clone() for t in found]
    del found, reference
    rg.offload_release()
    gc.collect()

    def step() -> None:
        subject.step(forward)

    activations = peak_on_cuda(step)[0] if subject.device == "cuda" else peak_on_cpu(step)
    return Trial(step, activations, error, rg.offload_stats().pinned or None)


def rows_at(at: Size, s: dict[str, Any], names: Sequence[str], link: Any, say: Callable[[str], object] = print) -> list[Row]:
    """A row for each way that fits into memory."""
    trials: dict[str, Trial] = {}
    true: list[Tensor] = []
    try:
        subject = Subject(at, s["device"], s["host"])
    except torch.OutOfMemoryError:
        say(f"{words_of(at)}: out of memory: the parameters")
        return []
    for name in names:
        failed = None
        try:
            trials[name] = tried(subject, WAYS[name], true)
        except Exception as error:  # out of memory, as a rule; the others go on
            failed = one_line(error)
        if failed:  # only here is the traceback gone, and with it the tensors that it held
            say(f"{name} is left out: {failed}")
        release()
    true.clear()
    plain = WAYS["ordinary"].make(subject)

    def forward_alone() -> None:
        with torch.no_grad(), subject.autocast():
            plain(subject.x)

    steps = {name: trial.step for name, trial in trials.items()}
    times = in_turns({**steps, FORWARD: forward_alone}, s["rounds"], BURN_IN)
    base = times.get("checkpoint")
    found = []
    for name, trial in trials.items():
        row = Row(at.dim, at.seq, at.batch, at.depth, name, times[name], None, trial.activation_bytes, trial.pinned_bytes)
        row.gradient_error, row.to_checkpoint = trial.gradient_error, base and times[name].median / base.median
        keeps = WAYS[name].keeps
        if keeps is not None:
            row.predicted_pinned_bytes = (at.depth - keeps) * at.kept_bytes()
            row.layer_forward_ms = times[FORWARD].median / at.depth * 1e3
            row.layer_copy_ms = at.kept_bytes() / link[0] * 1e3 if link else None
        found.append(row)
    return found


# -- the command -------------------------------------------------------------------------------------------------------


def make_parser() -> Parser:
    parser = Parser(PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, nargs="+", metavar="INT", help="widths")
    parser.add_argument("--heads", type=int, metavar="INT", help="attention heads; without it, one for each 64 of the width")
    parser.add_argument("--seq", type=int, nargs="+", metavar="INT", help="tokens in a sequence")
    parser.add_argument("--batch", type=int, metavar="INT", help="sequences in a step")
    parser.add_argument("--tokens", type=int, metavar="INT", help="tokens in a step, in place of --batch")
    parser.add_argument("--depth", type=int, nargs="+", metavar="INT", help="numbers of layers")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="precision of parameters and input")
    parser.add_argument("--autocast", choices=["none", "bfloat16"], default="none")
    parser.add_argument("--ways", nargs="+", default=["*"], metavar="NAME", help=f"names or patterns: {', '.join(WAYS)}")
    parser.add_argument("--rounds", type=int, metavar="INT", help="timed steps of each way, 2 or more")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--host", metavar="SIZE", help="rg.Offload(host=SIZE); without it, as much as the system says is available"
    )
    parser.add_argument("--rule", action="store_true", help="print a line for each size: where offload is free")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    return parser


def setting_of(args: argparse.Namespace) -> dict[str, Any]:
    """What to measure, checked, with the device's defaults for what was not given."""
    device = device_of(args.device)
    s: dict[str, Any] = {k: default if getattr(args, k) is None else getattr(args, k) for k, default in DEFAULTS[device].items()}
    for name in ("dim", "seq", "depth"):
        at_least(1, **{name: min(s[name])})
    at_least(1, **{k: v for k, v in vars(args).items() if k in ("batch", "heads", "tokens") and v is not None})
    at_least(2, rounds=s["rounds"])
    s |= {"device": device, "autocast": args.autocast, "heads": args.heads, "tokens": args.tokens}
    s |= {"host": args.host and byte_size(args.host, "--host"), "batch": None if args.tokens else s["batch"]}
    for seq in s["seq"] if args.tokens is not None else ():
        if args.tokens % seq:
            raise Refused(f"--tokens {args.tokens} is not a multiple of --seq {seq}")
    for dim in s["dim"]:
        if dim % heads_of(s, dim):
            raise Refused(f"--dim {dim} is not a multiple of --heads {heads_of(s, dim)}")
    return s


def heads_of(s: dict[str, Any], dim: int) -> int:
    return s["heads"] or max(1, dim // 64)


def sizes_of(s: dict[str, Any]) -> list[Size]:
    return [
        Size(dim, heads_of(s, dim), seq, s["tokens"] // seq if s["tokens"] else s["batch"], depth, s["dtype"], s["autocast"])
        for dim, seq, depth in itertools.product(s["dim"], s["seq"], s["depth"])
    ]


def ways_of(patterns: Sequence[str], device: str) -> tuple[list[str], list[str]]:
    """Names of ways to measure, ordinary and checkpoint among them as all are compared with these, and of those left out."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in WAYS):
            raise Refused(f"--ways: no way is called {pattern!r}, there are: {', '.join(WAYS)}")
    chosen = [name for name in WAYS if name in ("ordinary", "checkpoint") or any(fnmatchcase(name, p) for p in patterns)]
    left_out = [name for name in chosen if WAYS[name].link and device not in MAKE]
    return [name for name in chosen if name not in left_out], left_out


def words_of(at: Size) -> str:
    how = f"{at.autocast} autocast" if at.autocast != "none" else at.dtype
    return f"width {at.dim}, {at.heads} heads, {at.batch} × {at.seq} tokens, {at.depth} layers, {how}"


def table(rows: Sequence[Row]) -> str:
    """Of one size."""
    lines = [
        f"  {'way':<20} {'median, quartiles (ms)':>28} {'to checkpoint':>13} {'activations':>12} {'pinned':>10} {'error':>8}"
    ]
    for row in rows:
        t = row.seconds
        time_ = f"{t.median * 1e3:.1f} ({t.low * 1e3:.1f} to {t.high * 1e3:.1f})"
        ratio = "–" if row.to_checkpoint is None else f"{row.to_checkpoint:.3f}"
        pinned = "–" if row.pinned_bytes is None else size(row.pinned_bytes)
        error = "–" if row.gradient_error is None else f"{row.gradient_error:.1e}"
        lines.append(f"  {row.way:<20} {time_:>28} {ratio:>13} {size(row.activation_bytes):>12} {pinned:>10} {error:>8}")
        if row.predicted_pinned_bytes is not None:
            lines.append(f"  {'':<20} pinned memory as predicted: {size(row.predicted_pinned_bytes)}; {verdict(row)}")
    return "\n".join([*lines, *comparisons({row.way: row.seconds.median for row in rows})])


def comparisons(times: dict[str, float]) -> list[str]:
    """What copying costs, beside what it costs where the device waits for it, and where nothing is copied."""
    lines = []
    if {"save-on-cpu", "rg-offload"} <= times.keys():
        ours, theirs = (times[name] - times["checkpoint"] for name in ("rg-offload", "save-on-cpu"))
        lines.append(f"  over checkpoint: rg-offload {ours * 1e3:.1f} ms, save-on-cpu {theirs * 1e3:.1f} ms")
    if {"partition", "rg-offload-compiled"} <= times.keys():
        lines.append(f"  rg-offload-compiled / partition: {times['rg-offload-compiled'] / times['partition']:.3f}")
    return lines


def verdict(row: Row) -> str:
    forward, moves = row.layer_forward_ms or 0.0, row.layer_copy_ms or 0.0
    keeps_up = "the link keeps up" if moves <= forward else "the link is the limit"
    return f"forward of a layer {forward:.2f} ms, copying what it keeps {moves:.2f} ms: {keeps_up}"


def rule(rows: Sequence[Row]) -> str:
    """A line for each size."""
    lines = [f"{'width':>6} {'length':>7} {'layers':>6}  {'copy / forward of a layer':>28}  to checkpoint: rg-offload, reverse"]
    for at, same in itertools.groupby(rows, lambda row: (row.dim, row.seq, row.depth)):
        ways = {row.way: row for row in same}
        offload, reverse = ways.get("rg-offload"), ways.get("reverse")
        moves, ratio = "–", "–"
        if offload and offload.layer_copy_ms and offload.layer_forward_ms:
            copied, computed = offload.layer_copy_ms, offload.layer_forward_ms
            moves = f"{copied:.3f} / {computed:.3f} ms = {copied / computed:.2f}"
            ratio = f"{offload.to_checkpoint:.3f}"
        other = f"{reverse.to_checkpoint:.3f}" if reverse else "–"
        lines.append(f"{at[0]:>6} {at[1]:>7} {at[2]:>6}  {moves:>28}  {ratio:>25}, {other:>7}")
    return "\n".join(lines)


def measure(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The report, written after each size."""
    s = setting_of(args)
    names, left_out = ways_of(args.ways, s["device"])
    writable(args.json, "--json")
    link = link_speed(s["device"])
    s["link"] = link and f"{link[0] / 1e9:.1f} GB/s out and {link[1] / 1e9:.1f} GB/s back"
    rows: list[Row] = []
    report = {**origin(s["device"], PROG, argv), "setting": s, "rows": rows}
    print(f"{report['machine']['device']}, torch {torch.__version__}, {report['date']}; link: {s['link'] or 'none'}")
    if left_out:
        print(f"left out, as there is no link to host memory from {s['device']}: {', '.join(left_out)}")
    for at in sizes_of(s):
        found = rows_at(at, s, names, link)
        rows += found
        print(words_of(at), table(found), sep="\n", flush=True)
        if args.json:
            save(args.json, report)
        rg.offload_release()
        release()
    return report


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        report = measure(args, argv)
    except Refused as refusal:
        parser.error(str(refusal))
    if args.rule:
        print(rule(report["rows"]))
    return 0 if report["rows"] else 1


if __name__ == "__main__":
    sys.exit(main())
