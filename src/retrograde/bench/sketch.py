"""Gradients of two processes are compared by sketches: small, and as good as the gradients for telling how far they are apart.

Each number of a tensor gets a random sign, always the same one, and every `BUCKETS`-th of them are added up: S(g), linear in g.
The expected value of |S(g)|² is |g|², so |S(g) - S(h)| / |S(g)| estimates the relative error |g - h| / |g|: to within about an
eighth for one large tensor, less for many, exactly for tensors of up to `BUCKETS` numbers. Equal gradients have equal sketches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

BUCKETS = 64
Sketch = dict[str, list[float]]


def sketch(named: Iterable[tuple[str, Tensor | None]]) -> Sketch:
    """The sketch of each tensor; none at all counts as zero, as it does for an optimizer.

    >>> error(sketch([("w", torch.tensor([3.0, 4.0]))]), sketch([("w", torch.tensor([3.0, 4.5]))]))
    0.1
    """
    return {name: [] if value is None else _folded(value, seed) for seed, (name, value) in enumerate(named)}


def _folded(value: Tensor, seed: int) -> list[float]:
    flat = value.detach().flatten()
    generator = torch.Generator(flat.device).manual_seed(seed)
    signs = torch.randint(0, 2, flat.shape, dtype=torch.int8, generator=generator, device=flat.device)
    signed = flat.double() * (2 * signs - 1)
    rows = -(-len(flat) // BUCKETS)
    return torch.nn.functional.pad(signed, (0, rows * BUCKETS - len(flat))).view(rows, BUCKETS).sum(0).tolist()


def error(right: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> float:
    """|g - h| / |g| over all tensors together; inf where h is not finite."""
    if right.keys() != other.keys():
        return math.inf
    apart = whole = 0.0
    for name, values in right.items():
        theirs = other[name]
        size = max(len(values), len(theirs))
        pairs = zip(values or [0.0] * size, theirs or [0.0] * size, strict=True)
        apart += sum((a - b) ** 2 for a, b in pairs)
        whole += sum(a**2 for a in values)
    if not math.isfinite(apart):
        return math.inf
    return math.sqrt(apart / whole) if whole else math.inf if apart else 0.0
