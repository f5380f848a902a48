"""What depth costs: memory and time of a training step under store, torch's checkpoint per function, and reverse.

python -m retrograde.bench.depth --json depth.json
python -m retrograde.bench.depth --from depth.json --plot memory.png
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import retrograde as rg

from .._base.meter import LiveBytes, peak_on_cuda
from .._base.report import origin, save
from .measure import in_turns
from .model import checkpointed, transformer, under
from .report import Report, Row

PROG = "python -m retrograde.bench.depth"
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"width": 64, "heads": 4, "length": 128, "batch": 4, "depths": [6, 12, 24, 48], "rounds": 5},
    "cuda": {"width": 1024, "heads": 16, "length": 4096, "batch": 4, "depths": [6, 12, 24, 48], "rounds": 10},
}

Step = Callable[[], object]


class Bench:
    """One net and its input, and a training step (forward and backward) under each policy."""

    def __init__(self, setting: dict[str, Any], depth: int):
        self.device, self.grads = setting["device"], setting["grads"]
        torch.manual_seed(0)
        with torch.device(self.device):
            self.net = transformer(depth, setting["width"], setting["heads"])
            self.x = torch.randn(setting["batch"], setting["length"], setting["width"])
        for p in self.net.parameters():
            p.grad = torch.zeros_like(p) if self.grads == "kept" else None
        forwards: dict[str, Callable[[], Tensor]] = {
            "store": partial(under, self.net, "store", self.x),
            "checkpoint": partial(checkpointed, self.net, self.x),
            "reverse": partial(under, self.net, "reverse", self.x),
        }
        if setting["budget"]:
            forwards["budget"] = partial(under, self.net, rg.Budget(setting["budget"]), self.x)
        self.steps: dict[str, Step] = {policy: partial(self.step, forward) for policy, forward in forwards.items()}
        self.left_out: list[str] = []  # ran out of memory

    def step(self, forward: Callable[[], Tensor]) -> None:
        self.clear()
        # each weight is used once, so a cache of casts would only hold memory: the engine turns it off, here it is off for all
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda", cache_enabled=False):
            loss = forward().square().mean()
        loss.backward()

    def clear(self) -> None:
        """Gradients back to None, where steps start so."""
        if self.grads == "none":
            self.net.zero_grad(set_to_none=True)

    def peak(self, step: Step) -> tuple[int, int]:
        """Peak bytes over what is there before the step, and the peak of everything."""
        self.clear()
        gc.collect()
        if self.device == "cuda":
            return peak_on_cuda(step)
        before = self.x.nbytes + sum(p.nbytes + (0 if p.grad is None else p.grad.nbytes) for p in self.net.parameters())
        with LiveBytes() as meter:
            step()
        return meter.peak, before + meter.peak

    def peaks(self) -> dict[str, tuple[int, int]]:
        """Of each policy; those that run out of memory move from `steps` to `left_out`."""
        found = {}
        for _ in range(2):  # the first round warms up, and leaves the allocator as the rounds that are timed will find it
            for policy, step in list(self.steps.items()):
                try:
                    found[policy] = self.peak(step)
                except torch.OutOfMemoryError:
                    self.left_out.append(policy)
                if policy in self.left_out:  # only here is the traceback gone, and with it the tensors that it held
                    del self.steps[policy]
                    self.clear()
                    release()
        return found


def release() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def rows_at(setting: dict[str, Any], depth: int, say: Callable[[str], object]) -> list[Row]:
    """One row for each policy that fits into the memory of the device."""
    try:
        bench = Bench(setting, depth)
    except torch.OutOfMemoryError:
        say(f"depth {depth}: out of memory: the parameters")
        return []
    peaks = bench.peaks()
    times = in_turns(bench.steps, setting["rounds"], burn_in=1)
    say(f"depth {depth}: measured" + (f", but out of memory: {', '.join(bench.left_out)}" if bench.left_out else ""))
    return [Row(depth, policy, *peaks[policy], times[policy]) for policy in bench.steps]


def measure(setting: dict[str, Any], argv: Sequence[str], say: Callable[[str], object] = print) -> Report:
    """All depths and policies; `say` hears of each depth when it is done."""
    rows: list[Row] = []
    for depth in setting["depths"]:
        rows += rows_at(setting, depth, say)
        release()
    return Report(**origin(setting["device"], PROG, argv), setting=setting, rows=rows)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def make_parser() -> Parser:
    parser = Parser(PROG, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=count, help="size of a stream")
    parser.add_argument("--heads", type=count)
    parser.add_argument("--length", type=count, help="tokens in a sequence")
    parser.add_argument("--batch", type=count, help="sequences in a step")
    parser.add_argument("--depths", type=counts, help="numbers of blocks, as 6,12,24")
    parser.add_argument("--rounds", type=count, help="timed steps for each policy and depth, 2 or more")
    parser.add_argument(
        "--grads", choices=["kept", "none"], default="kept", help="gradient buffers stay from step to step, or start each as None"
    )
    parser.add_argument("--budget", type=count, metavar="BYTES", help="measure rg.Budget(BYTES) too")
    report = parser.add_mutually_exclusive_group()
    report.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    report.add_argument("--from", type=Path, metavar="PATH", dest="source", help="measure nothing, read this report")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw memory against depth, as a PNG; needs matplotlib")
    return parser


def setting_of(parser: Parser, args: argparse.Namespace) -> dict[str, Any]:
    """What to measure: the arguments, and the device's defaults for those not given."""
    default = DEFAULTS[args.device]
    setting = {name: default[name] if getattr(args, name) is None else getattr(args, name) for name in default}
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here, use --device cpu")
    if setting["width"] % setting["heads"]:
        parser.error(f"--width {setting['width']} is not a multiple of --heads {setting['heads']}")
    if setting["rounds"] < 2:
        parser.error("--rounds must be 2 or more: there is no spread in one")
    precision = "bf16 autocast" if args.device == "cuda" else "float32"
    return {"device": args.device, **setting, "grads": args.grads, "budget": args.budget, "precision": precision}


def load(parser: Parser, args: argparse.Namespace) -> Report:
    given = [f"--{name}" for name in DEFAULTS["cpu"] if getattr(args, name) is not None]
    if given:
        parser.error(f"--from measures nothing, so it does not go with {given[0]}")
    try:
        return Report.load(args.source)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def plot(parser: Parser, report: Report, path: Path) -> None:
    try:
        from .picture import draw
    except ImportError as error:
        parser.error(f"--plot needs matplotlib, pip install 'retrograde[cli]' ({error})")
    try:
        draw(report, path)
    except ValueError as error:
        parser.error(str(error))


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args = parser.parse_args(argv)
    for path in (args.json, args.plot):  # before the measuring, not after it
        if path and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"cannot write a file at {path}")
    if args.source:
        report = load(parser, args)
    else:
        try:
            report = measure(setting_of(parser, args), argv)
        except rg.ProgramError as error:  # a budget that is too small
            parser.error(str(error))
    if args.json:
        save(args.json, report)
    print(report.where(), report.what(), report.table(), sep="\n")
    if args.plot:
        plot(parser, report, args.plot)


if __name__ == "__main__":
    main()
