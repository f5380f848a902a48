"""One variant at one depth, in a process of its own: JSON on stdin says what, JSON on stdout what was found. Needs torch alone.

echo '{"setting": {…}, "variant": {…}, "depth": 12}' | python -m retrograde.bench.worker
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .._base.loading import Refused, one_line
from .._base.meter import peak_on_cpu, peak_on_cuda
from ..models.blocks import DTYPES, net_of
from .kernels import kernel_seconds
from .measure import in_turns
from .sketch import sketch
from .subject import forward_of, input_of, preallocate

BURN_IN = 6  # a budget over compiled functions needs as many steps to settle


def measure(setting: dict[str, Any], variant: dict[str, Any], depth: int) -> dict[str, Any]:
    """A first step, which compiles and whose gradients are sketched; a step whose memory is measured; steps that are timed."""
    device = setting["device"]
    seed(setting["seed"])
    with torch.device(device):
        net = net_of(setting, depth)
    x = input_of(setting)
    preallocate(net, x)
    named = [*net.named_parameters(), ("the input", x)]
    same = hashlib.sha256(repr(sketch(named)).encode()).hexdigest()  # all variants must have the same
    forward = forward_of(variant, net)
    precision = None if setting["autocast"] == "none" else DTYPES[setting["autocast"]]

    def step() -> None:
        # each weight is used once, so a cache of casts would only hold memory
        with torch.autocast(device, precision, enabled=precision is not None, cache_enabled=False):
            y = forward(x)
        y = y if y.dtype in (torch.float32, torch.float64) else y.float()
        (y.square().sum() / y.numel() ** 0.5).backward()  # gradients that neither vanish nor overflow in 16 bits

    seed(setting["seed"])
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    found: dict[str, Any] = {"first_seconds": time.perf_counter() - start, "same": same}
    found["gradients"] = sketch((name, t.grad) for name, t in named)
    for _ in range(BURN_IN):
        step()
    if variant["captured"]:
        found["activation_bytes"], found["peak_bytes"], timed = captured(step)
    else:
        kept = sum(t.nbytes + (0 if t.grad is None else t.grad.nbytes) for _, t in named) + sum(b.nbytes for b in net.buffers())
        found["activation_bytes"], found["peak_bytes"] = peak(step, device, kept)
        timed = step
    found["seconds"] = vars(in_turns({"step": timed}, setting["rounds"], 1)["step"])
    if setting["profile"]:
        found["kernels"] = kernel_seconds(timed, device)
    return found


def seed(number: int) -> None:
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    torch.manual_seed(number)


def peak(step: Callable[[], object], device: str, kept: int) -> tuple[int, int]:
    """Peak bytes over what is there before the step, and the peak of everything."""
    gc.collect()
    if device == "cuda":
        return peak_on_cuda(step)
    activations = peak_on_cpu(step)
    return activations, kept + activations


def captured(step: Callable[[], object]) -> tuple[int, int, Callable[[], object]]:
    """Peak bytes over what was there before, the peak of everything, and the step as a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    gc.collect()
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            step()

    return *peak_on_cuda(capture), graph.replay


def outcome(asked: dict[str, Any]) -> dict[str, Any]:
    """What was measured, or {"failed": in a word or two, "detail": in a line}."""
    try:
        return measure(asked["setting"], asked["variant"], asked["depth"])
    except Exception as error:
        found = {"failed": type(error).__name__, "detail": one_line(error, 600), "traceback": traceback.format_exc()}
        if isinstance(error, Refused):
            found |= {"failed": "refused", "detail": str(error)}
        elif isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
            found["failed"] = "out of memory"
        return found


def leave_with_parent() -> None:
    """So that no worker goes on measuring for nobody."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    leave_with_parent()
    asked = json.load(sys.stdin)
    answer = os.dup(1)
    os.dup2(2, 1)  # what the user's code prints is no answer
    warnings.simplefilter("ignore")
    found = outcome(asked)
    with contextlib.suppress(BrokenPipeError), os.fdopen(answer, "w") as out:
        json.dump(found, out)


if __name__ == "__main__":
    main()
