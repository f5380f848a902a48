"""The plan against the measured peak: predictions of `retrograde plan` and real steps of the same nets, side by side.

python -m retrograde.bench.foretold --device cuda --json foretold.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import retrograde as rg

from .._base.meter import LiveBytes, peak_on_cuda
from .._base.report import origin, save, size
from ..models.blocks import DTYPES, in_layers
from ..planning.predict import Planner
from ..planning.trace import loss_of
from .depth import Parser, count, counts, release
from .model import transformer
from .report import Report

PROG = "python -m retrograde.bench.foretold"
POLICIES = ("store", "checkpoint", "bits", "reverse", "budget")
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"widths": [64, 128], "depths": [12, 48], "length": 128, "batch": 2, "autocast": ["none", "bfloat16"]},
    "cuda": {"widths": [1024, 2048], "depths": [12, 48], "length": 2048, "batch": 4, "autocast": ["bfloat16"]},
}
HEAD = {"cpu": 16, "cuda": 64}  # width of a head


@dataclass
class Compared:
    """A step: bytes as predicted and as measured."""

    width: int
    depth: int
    autocast: str
    policy: str
    predicted_activations: int
    activations: int
    predicted_peak: int  # parameters and gradients too
    peak: int

    @property
    def error(self) -> float:
        """Of the activations, relative."""
        return self.predicted_activations / self.activations - 1


@dataclass
class Comparisons(Report):
    rows: list[Any]  # of Compared

    def what(self) -> str:
        s = self.setting
        grads = "gradient buffers kept" if s["grads"] == "kept" else "gradients start as None"
        return f"{s['batch']} × {s['length']} tokens, float32 parameters and streams, {grads}"

    def table(self) -> str:
        over = "activations" if self.setting["grads"] == "kept" else "over the start"
        heads = (
            "width",
            "depth",
            "autocast",
            "policy",
            f"{over}: told",
            "measured",
            "error",
            "whole peak: told",
            "measured",
            "error",
        )
        rows = [heads, *((str(row.width), str(row.depth), row.autocast, row.policy, *_cells(row)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        worst = max((abs(row.error) for row in self.rows), default=0.0)
        return "\n".join([*lines, f"largest error {worst:.1%}"])


def _cells(row: Compared) -> tuple[str, ...]:
    whole = row.predicted_peak / row.peak - 1
    told, found = size(row.predicted_activations), size(row.activations)
    return told, found, f"{row.error:+.1%}", size(row.predicted_peak), size(row.peak), f"{whole:+.1%}"


def plan_setting(setting: dict[str, Any], width: int, autocast: str) -> dict[str, Any]:
    """The same for the planner."""
    sizes = {"dim": width, "heads": max(1, width // HEAD[setting["device"]]), "seq": setting["length"], "batch": setting["batch"]}
    rest = {"shape": [], "dtype": "float32", "block": None, "model": None, "seed": 0, "devices": 1, "optimizer": "sgd"}
    none = {"budget": None, "memory": None, "room": None, "compile_budget": 0.5}
    return {"device": setting["device"], **sizes, **rest, **none, "autocast": autocast, "grads": setting["grads"]}


class Measuring:
    """One net, its input, and steps of it."""

    def __init__(self, setting: dict[str, Any], width: int, depth: int, autocast: str):
        self.device, self.grads = setting["device"], setting["grads"]
        self.precision = None if autocast == "none" else DTYPES[autocast]
        torch.manual_seed(0)
        with torch.device(self.device):
            self.net = transformer(depth, width, max(1, width // HEAD[self.device]))
            self.x = torch.randn(setting["batch"], setting["length"], width).requires_grad_()
        self.clear()

    def clear(self) -> None:
        for p in self.net.parameters():
            p.grad = torch.zeros_like(p) if self.grads == "kept" else None
        self.x.grad = None

    def step(self, net: Any) -> None:
        with torch.autocast(self.device, self.precision, enabled=self.precision is not None, cache_enabled=False):
            loss = loss_of(net(self.x))
        loss.backward()

    def peak(self, memory: Any) -> tuple[int, int]:
        """Peak of a step over parameters and gradient buffers, the input included; and the peak of everything."""
        net: Any = in_layers(self.net) if memory == "bits" else self.net
        net.memory = "reverse" if memory == "bits" else memory
        if self.device == "cuda":
            self.step(net)  # the first of a kind makes handles and workspaces
        self.clear()
        release()
        held = sum(p.nbytes + (p.nbytes if self.grads == "kept" else 0) for p in self.net.parameters())
        if self.device == "cuda":
            over, _ = peak_on_cuda(lambda: self.step(net))
        else:
            with LiveBytes() as meter:
                self.step(net)
            over = meter.peak
        over += self.x.nbytes
        return over, held + over


def compare(setting: dict[str, Any], say: Callable[[str], object] = print) -> list[Compared]:
    """Every width, depth, precision and policy. The budget is half of what the plan says of store."""
    rows: list[Compared] = []
    for width in setting["widths"]:
        for autocast in setting["autocast"]:
            planner = Planner(plan_setting(setting, width, autocast))
            for depth in setting["depths"]:
                measuring = Measuring(setting, width, depth, autocast)
                for policy in POLICIES:
                    told = planner.at(policy, (depth, setting["length"], setting["batch"]))
                    found = measuring.peak(rg.Budget(told.budget) if policy == "budget" else policy)
                    over = told.step - told.parameters - (told.gradients if setting["grads"] == "kept" else 0)
                    rows.append(Compared(width, depth, autocast, policy, over, found[0], told.step, found[1]))
                del measuring
                release()
                say(f"width {width}, depth {depth}, autocast {autocast}: measured")
    return rows


def make_parser() -> Parser:
    parser = Parser(PROG, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--widths", type=counts, help="sizes of a stream, as 1024,2048")
    parser.add_argument("--depths", type=counts, help="numbers of blocks, as 12,48")
    parser.add_argument("--length", type=count, help="tokens in a sequence")
    parser.add_argument("--batch", type=count, help="sequences in a step")
    parser.add_argument("--autocast", choices=["none", "bfloat16"], nargs="+")
    parser.add_argument(
        "--grads", choices=["kept", "none"], default="kept", help="buffers that stay, or None at the start of a step"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    return parser


def setting_of(parser: Parser, args: argparse.Namespace) -> dict[str, Any]:
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here, use --device cpu")
    default = DEFAULTS[args.device]
    setting = {name: default[name] if getattr(args, name) is None else getattr(args, name) for name in default}
    head = HEAD[args.device]
    for width in setting["widths"]:
        if width % head:
            parser.error(f"--widths {width} is not a multiple of {head}, the width of a head")
    return {"device": args.device, **setting, "grads": args.grads}


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        parser.error(f"cannot write a file at {args.json}")
    setting = setting_of(parser, args)
    report = Comparisons(**origin(setting["device"], PROG, argv), setting=setting, rows=compare(setting))
    if args.json:
        save(args.json, report)
    print(report.where(), report.what(), report.table(), sep="\n")


if __name__ == "__main__":
    main()
