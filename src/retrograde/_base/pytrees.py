"""Streams as users give them (a tensor, or any pytree of tensors), seen as flat lists of leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .torch_private import TreeSpec, tree_flatten, tree_unflatten
from .tracing import at_trace_time

S = TypeVar("S")  # a stream: a tensor, or a tree of tensors


class Carried:
    """A stream in another form than the user's: tensors, and what makes a stream of them."""

    __slots__ = ("form", "made")

    def __init__(self, made: list[Tensor], form: Any):
        self.made, self.form = made, form

    def plus(self, out: Any, sign: int) -> Any:
        """The stream with `out` added or subtracted."""
        raise NotImplementedError

    def drawn_to(self, out: Any, n: int, d: int, undo: bool = False) -> Any:
        """n/d of the stream and the rest of `out`; or that undone."""
        raise NotImplementedError

    def noisy(self, out: Any, bits: int, depth: int) -> Any:
        """What a layer has made, with reversible noise, in place of the stream."""
        raise NotImplementedError

    def without_noise(self, out: Any, bits: int, depth: int) -> Any:
        """The stream as it was before that."""
        raise NotImplementedError

    def outline(self) -> Any:
        """A tree of tensors that have the stream's shapes."""
        raise NotImplementedError


def flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of a stream and what puts them together again (None for a single tensor)."""
    if isinstance(value, Tensor):
        return [value], None
    return (value.made, value.form) if isinstance(value, Carried) else tree_flatten(value)


def unflatten(flat: list[Any], spec: Any) -> Any:
    if spec is None:
        return flat[0]
    return tree_unflatten(flat, spec) if isinstance(spec, TreeSpec) else spec.stream(flat)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a stream or a side input."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Carried):
        return value.made
    return [] if value is None else [t for t in tree_flatten(value)[0] if isinstance(t, Tensor)]


def each(op: Callable[..., Tensor], value: Any, *others: Any) -> Any:
    """`op` on every leaf of `value` and its partners in `others`; dicts are matched by key."""
    if isinstance(value, Tensor):
        return op(value, *others)
    flat, spec = tree_flatten(value)
    return tree_unflatten([op(*group) for group in zip(flat, *map(spec.flatten_up_to, others), strict=True)], spec)


def mismatch(value: Any, other: Any) -> str | None:
    """Why `other` cannot be combined with the stream `value` leaf by leaf, or None."""
    if isinstance(value, Tensor):
        return leaf_mismatch(value, other)
    flat, spec = tree_flatten(value)
    try:
        partners = spec.flatten_up_to(other)
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(value, dict) and isinstance(other, dict) and value.keys() != other.keys():
            return f"fn returned the keys {sorted(map(str, other))}, the stream has {sorted(map(str, value))}"
        return f"fn returned another tree than the stream's ({error})"
    for a, b in zip(flat, partners, strict=True):
        why = leaf_mismatch(a, b)
        if why:
            return why
    return None


def leaf_mismatch(a: Tensor, b: Any) -> str | None:
    if not isinstance(b, Tensor):
        return f"fn returned {_kind(b)} where the stream has a tensor of shape {tuple(a.shape)}"
    if a.shape != b.shape:
        return f"fn returned shape {tuple(b.shape)}, the stream has {tuple(a.shape)} (nothing is broadcast)"
    if a.device != b.device:
        return f"fn returned a tensor on {b.device}, the stream is on {a.device}"
    if b.dtype == torch.bool or (a.dtype != b.dtype and not _can_cast(b.dtype, a.dtype)):
        return f"fn returned {b.dtype}, which cannot be added to a stream of {a.dtype}"
    return None


@at_trace_time
def _can_cast(given: torch.dtype, wanted: torch.dtype) -> bool:
    return torch.can_cast(given, wanted)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def dense(value: Any) -> Any:
    """The stream without gaps or overlaps in memory: a recovered stream is dense, and fn must see the same layout twice."""
    return each(_dense_leaf, value)


def _dense_leaf(t: Tensor) -> Tensor:
    if t.is_contiguous() or torch.empty_like(t, device="meta").stride() == t.stride():
        return t
    return t.contiguous()


def with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`t` in the given layout."""
    if t.stride() == strides:
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def detached(value: Any) -> Any:
    flat, spec = flatten(value)
    return unflatten([t.detach() if isinstance(t, Tensor) else t for t in flat], spec)
