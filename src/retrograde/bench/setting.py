"""What `retrograde bench` is asked to measure, checked, with the defaults of the device."""

from __future__ import annotations

from typing import Any

from .._base.given import at_least, byte_size, device_of
from .._base.loading import Refused
from .variants import Variant, chosen, variants

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dim": 64, "heads": 4, "seq": 128, "batch": 4, "depth": (12,), "rounds": 5},
    "cuda": {"dim": 1024, "heads": 16, "seq": 4096, "batch": 4, "depth": (24,), "rounds": 10},
}


def setting_of(options: Any) -> dict[str, Any]:
    """What to measure, checked; the device's defaults for what was not given."""
    device = device_of(options.device)
    s: dict[str, Any] = {name: getattr(options, name) or default for name, default in DEFAULTS[device].items()}
    for name in s:
        for value in getattr(options, name) if name == "depth" else [getattr(options, name)]:
            at_least(2 if name == "rounds" else 1, **{name: s[name] if value is None else value})
    for size in options.shape:
        at_least(1, shape=size)
    if options.timeout <= 0:
        raise Refused(f"--timeout must be more than 0 seconds, got {options.timeout:g}")
    if options.block is None and s["dim"] % s["heads"]:
        raise Refused(f"--dim {s['dim']} is not a multiple of --heads {s['heads']}")
    if options.block is None and options.shape and (len(options.shape) != 3 or options.shape[-1] != s["dim"]):
        raise Refused(f"--shape {' '.join(map(str, options.shape))}: our block takes (batch, seq, dim), give a --block of yours")
    auto = "bfloat16" if device == "cuda" and options.dtype == "float32" else "none"
    return {
        "device": device,
        **s,
        "depth": sorted(set(s["depth"])),
        "shape": list(options.shape) or [s["batch"], s["seq"], s["dim"]],
        "dtype": options.dtype,
        "autocast": auto if options.autocast == "auto" else options.autocast,
        "block": options.block,
        "seed": options.seed,
        "timeout": options.timeout,
        "profile": options.profile,
    }


def variants_of(options: Any, device: str) -> list[Variant]:
    budgets = {text.replace(" ", ""): byte_size(text, "--budget") for text in options.budget}
    try:
        return chosen(variants(budgets, device), options.variants)
    except ValueError as error:
        raise Refused(f"--variants: {error}") from error
