"""Fake tensors are on the CPU, where some functions keep other tensors than on CUDA: here they keep what they would there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import layer_norm
from torch.overrides import TorchFunctionMode

from .._base.torch_private import tree_map

WIDEST_HEAD = 256  # of CUDA's fused attention
DROPOUT = 10  # where multi_head_attention_forward is told of it
IN_FLOAT32 = {  # by autocast on CUDA, and not on the CPU
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow", "square", "softplus", "layer_norm", "rms_norm", "group_norm", "norm", "dist", "cdist", "cosine_similarity", "softmax",
    "log_softmax", "logsumexp", "sum", "prod", "cumsum", "cumprod", "cross_entropy", "nll_loss", "kl_div", "l1_loss", "mse_loss",
    "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits",
}  # fmt: skip


class AsOnCuda(TorchFunctionMode):
    """Autocast, normalization, dropout and attention as on CUDA, in bytes if not in numbers.

    It sees the functions that modules call, not what torch's own functions call inside.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_wide, (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return self._called(name, func, args, kwargs)
        return self._called(name, func, args, kwargs)

    def _called(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "rms_norm":  # one function there as well, which saves its input and a number for each row
            return _as_layer_norm(*args, **kwargs)
        if name == "dropout":
            return _dropout(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return _attention(func, *args, **kwargs)
        if name == "multi_head_attention_forward" and not kwargs.get("need_weights", True):
            return func(*args[:DROPOUT], 0.0, *args[DROPOUT + 1 :], **kwargs)
        return func(*args, **kwargs)


def _wide(t: Any) -> Any:
    return t.float() if isinstance(t, Tensor) and t.dtype in (torch.bfloat16, torch.float16) else t


def _as_layer_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return layer_norm(input, normalized_shape, weight, None, eps or 1e-6)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """The mask is kept as booleans."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _attention(
    func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
) -> Tensor:
    """Dropped weights are drawn again from a seed. Heads that are too wide have all their weights in memory."""
    if query.shape[-1] <= WIDEST_HEAD:
        return func(query, key, value, attn_mask, 0.0, *args, **kwargs)
    with sdpa_kernel(SDPBackend.MATH):
        return func(query, key, value, attn_mask, dropout_p, *args, **kwargs)


def workspace(func: Any, args: Any) -> int:
    """Bytes that CUDA's kernel of this operation takes for itself while it runs, where they are many."""
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 4 * args[1].numel()  # the gradient of the queries is added up in float32
    return 0
