"""Cross entropy of a large head without all of its logits at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

__all__ = ["chunked_loss", "language_loss"]

CHUNK = 4096  # positions whose logits exist at the same time


def language_loss(x_ND: Tensor, head_VD: Tensor, next_N: Tensor, chunk: int = CHUNK) -> Tensor:
    """The mean cross entropy of `linear(x, head)`: by torch's own chunked operation where torch has one, else by ours."""
    if len(x_ND) <= chunk:
        return _mean(x_ND, head_VD, next_N, len(x_ND))
    fused = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if fused is None or not torch.is_grad_enabled():
        return chunked_loss(x_ND, head_VD, next_N, chunk)
    return fused(x_ND, head_VD, next_N, options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk))


def chunked_loss(x_ND: Tensor, head_VD: Tensor, next_N: Tensor, chunk: int = CHUNK) -> Tensor:
    """The logits of each chunk are made, reduced to a number and forgotten; backward makes them again."""
    total = x_ND.new_zeros((), dtype=torch.float32)
    for x, following in zip(x_ND.split(chunk), next_N.split(chunk), strict=True):
        if torch.is_grad_enabled():
            total = total + checkpoint(_mean, x, head_VD, following, len(x_ND), use_reentrant=False)
        else:
            total = total + _mean(x, head_VD, following, len(x_ND))
    return total


def _mean(x_ND: Tensor, head_VD: Tensor, next_N: Tensor, count: int) -> Tensor:
    logits_NV = linear(x_ND, head_VD)
    return cross_entropy(logits_NV.float(), next_N, reduction="sum") / count
