"""How much memory a run takes: the peak so far, and what a step keeps under each policy."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from .._base.meter import LiveBytes
from ..models.language import Language


def peak_bytes(device: str) -> int:
    """Of tensors on a GPU; of the whole process on the CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def kept_by(model: Language, policies: Iterable[Any], rows: int, autocast: bool = False) -> dict[str, int]:
    """Bytes of activations at the peak of a forward and backward pass, under each policy. Gradients are left as they were."""
    device = model.embed.weight.device.type
    tokens = torch.randint(256, (rows, model.context + 1), device=device)
    own, grads = model.net.memory, [p.grad for p in model.parameters()]
    found: dict[str, int] = {}
    try:
        for p in model.parameters():  # gradients exist, so they do not count as activations
            p.grad = torch.zeros_like(p)
        for policy in policies:
            model.net.memory = policy
            found[str(policy)] = _peak(model, tokens, autocast)
    finally:
        model.net.memory = own
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
    return found


def _peak(model: Language, tokens_BL: torch.Tensor, autocast: bool) -> int:
    device = tokens_BL.device.type

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(tokens_BL[:, :-1], tokens_BL[:, 1:])
        loss.backward()

    if device != "cuda":
        with LiveBytes() as meter:
            step()
        return meter.peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before
