"""Where the time of a step goes: seconds of kernels by kind, as torch's profiler sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

STEPS = 3
ATTENTION = ("attention", "flash", "fmha", "sdpa")  # in names of kernels, or of operations on a CPU
PRODUCTS = (
    "gemm",
    "nvjet",
    "cutlass",
    "xmma",
    "splitk",
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "mkldnn_linear",
)


def kind_of(name: str) -> str:
    """
    >>> kind_of("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT"), kind_of("void pytorch_flash::flash_bwd_kernel<cutlass::bfloat16_t>")
    ('matrix products', 'attention')
    """
    name = name.lower()
    if any(part in name for part in ATTENTION):
        return "attention"
    return "matrix products" if any(part in name for part in PRODUCTS) else "the rest"


def kernel_seconds(step: Callable[[], object], device: str) -> dict[str, float]:
    """Seconds of a step by kind: of kernels on a GPU, of operations without what they call on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
    found: dict[str, float] = {"matrix products": 0.0, "attention": 0.0, "the rest": 0.0}
    events: Any = profiler.key_averages()
    for event in events:
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        found[kind_of(event.key)] += spent / 1e6 / STEPS
    return found
