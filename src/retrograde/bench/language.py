"""A whole training step of the language model: memory and speed under each policy, the optimizer after backward or inside it.

python -m retrograde.bench.language --device cuda --depths 24,96 --json language.json
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .._base.meter import LiveBytes
from .._base.report import origin, save, size
from ..models.language import Language
from ..optimizer import step_in_backward
from ..training.memory import kept_by
from ..training.state import make_optimizer
from .measure import in_turns

POLICIES = ("store", "checkpoint", "reverse")
SIZES = {"width": 1024, "heads": 16, "context": 8192, "batch": 4, "rounds": 4}


class Step:
    """One step of one model: forward, backward and AdamW."""

    def __init__(self, sizes: dict[str, Any], depth: int, memory: Any, inside: bool):
        torch.manual_seed(0)
        self.device, self.autocast = sizes["device"], sizes["precision"] == "bf16"
        with torch.device(self.device):
            self.model = Language(depth, sizes["width"], sizes["heads"], sizes["context"], memory=memory)
            self.tokens_BL = torch.randint(256, (sizes["batch"], sizes["context"] + 1))
        self.optimizer = make_optimizer(self.model, lr=1e-4, weight_decay=0.1)
        self.stepping = step_in_backward(self.optimizer) if inside else None

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            loss = self.model(self.tokens_BL[:, :-1], self.tokens_BL[:, 1:])
        loss.backward()
        if self.stepping is None:
            self.optimizer.step()

    def resting_bytes(self) -> int:
        """Parameters and what AdamW keeps."""
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(t.numel() * t.element_size() for t in [*self.model.parameters(), *kept])

    def peak_bytes(self) -> int:
        """Of the whole step, with parameters, optimizer states, gradients and activations."""
        self.optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self()
            return torch.cuda.max_memory_allocated()
        with LiveBytes() as meter:
            self()
        return self.resting_bytes() + meter.peak


def row(sizes: dict[str, Any], depth: int, memory: Any, inside: bool) -> dict[str, Any]:
    """What is measured at one point; where memory does not suffice, that."""
    found: dict[str, Any] = {"depth": depth, "policy": memory, "step_in_backward": inside}
    try:
        step = Step(sizes, depth, memory, inside)
        step()
        found["resting_bytes"], found["peak_bytes"] = step.resting_bytes(), step.peak_bytes()
        timing = in_turns({"step": step}, sizes["rounds"], burn_in=1)["step"]
        found["seconds"], found["tokens_per_second"] = timing, sizes["batch"] * sizes["context"] / timing.median
        if not inside:
            found["activation_bytes"] = kept_by(step.model, [memory], sizes["batch"], step.autocast)[memory]
    except torch.OutOfMemoryError:
        found["out_of_memory"] = True
    return found


def measure(sizes: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for depth in sizes["depths"]:
        for memory in sizes["policies"]:
            for inside in (False, True):
                rows.append(row(sizes, depth, memory, inside))
                print(line_of(rows[-1]), flush=True)
                gc.collect()
                if sizes["device"] == "cuda":
                    torch.cuda.empty_cache()
    return rows


def line_of(row: dict[str, Any]) -> str:
    when = "step in backward" if row["step_in_backward"] else "step after backward"
    start = f"{row['depth']:>4} blocks  {row['policy']:<10}  {when:<19}"
    if row.get("out_of_memory"):
        return f"{start}  out of memory"
    activations = f"  activations {size(row['activation_bytes']):>10}" if "activation_bytes" in row else ""
    return f"{start}  {row['tokens_per_second']:>9,.0f} tokens/s  whole step {size(row['peak_bytes']):>10}{activations}"


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser("python -m retrograde.bench.language", description=__doc__)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--depths", default="24,96", help="numbers of blocks, with commas")
    parser.add_argument("--policies", default=",".join(POLICIES), help="with commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="bf16")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    args = parser.parse_args(argv)
    if not all(part.isdecimal() and int(part) for part in args.depths.split(",")):
        parser.error(f"--depths {args.depths!r} is not a list of whole numbers")
    if not set(args.policies.split(",")) <= set(POLICIES):
        parser.error(f"--policies {args.policies!r}: known are {', '.join(POLICIES)}")
    if min(args.width, args.heads, args.context, args.batch) < 1 or args.rounds < 2 or args.width % (2 * args.heads):
        parser.error("sizes must be 1 or more, --rounds 2 or more, --width a multiple of twice --heads")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"cannot write a file at {args.json}")
    sizes = {name: getattr(args, name) for name in (*SIZES, "device", "precision")}
    sizes |= {"depths": [int(part) for part in args.depths.split(",")], "policies": args.policies.split(",")}
    report = {**origin(args.device, parser.prog, argv), "setting": sizes, "rows": measure(sizes)}
    if args.json:
        save(args.json, report)


if __name__ == "__main__":
    main()
