"""How much is kept between the forward pass and backward: a policy turns a program into stretches of one kind each."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from ._base.pytrees import tensors
from ._base.sizes import bytes_in
from .errors import ProgramError, unknown
from .update import Program

__all__ = ["Anchor", "Budget", "Kind", "Memory", "Offload", "Policy", "ReverseAbove", "StoreLast"]

Kind: TypeAlias = Literal["store", "checkpoint", "offload", "reverse"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# kind, number of updates, and how: a limit in bytes for "reverse" and "checkpoint", an Offload for "offload"
Stretch: TypeAlias = "tuple[Kind, int, int | str | Offload | None]"


class Policy(ABC):
    """Derive from this for a policy of your own."""

    needs_undo = True  # False: layers that cannot be undone (`rg.Sequential`) are checkpointed where `plan` says "reverse"

    @abstractmethod
    def plan(self, blocks: Sequence[int]) -> list[Stretch]:
        """The stretches of a program, given the number of updates in each of its blocks.

        A list of `(kind, count, how)`, from the first update to the last: "store", "checkpoint", "offload" or "reverse", a number
        of updates, and None. All counts add up to `sum(blocks)`. "reverse" may have a limit instead of None: bytes, or "auto";
        "offload" may have an `rg.Offload`.
        """


class _Counted(Policy):
    """A policy with two arguments of which one is given: a number of updates, or one of blocks."""

    def __post_init__(self) -> None:
        updates, blocks = vars(self)
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            name = type(self).__name__
            raise ProgramError(f"rg.{name}: give either {updates}=… (counted in updates) or {blocks}=… (in blocks)")
        _positive(self, given[0], getattr(self, given[0]))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value is not None)
        return f"{type(self).__name__}({given})"


@dataclass(frozen=True, repr=False)
class StoreLast(_Counted):
    """Ordinary autograd for the last `blocks` blocks, or for the last `k` updates, and reversal below them: time for memory.

    A block of `rg.ReversibleSequence` is two updates, f and g. In other nets a block is a run of updates that changes each stream
    at most once.

    >>> import retrograde as rg
    >>> rg.StoreLast(blocks=4), rg.StoreLast(8)
    (StoreLast(blocks=4), StoreLast(k=8))
    """

    k: int | None = None
    blocks: int | None = None
    needs_undo = False

    def plan(self, blocks: Sequence[int]) -> list[Stretch]:
        count = sum(blocks)
        stored = min(self.k, count) if self.blocks is None else sum(blocks[-self.blocks :])  # type: ignore[type-var]
        below: list[Stretch] = [("reverse", count - stored, None)] if stored < count else []
        return [*below, ("store", stored, None)]


@dataclass(frozen=True, repr=False)
class Anchor(_Counted):
    """Reversal, with the streams kept every `every_blocks` blocks, or `every` updates: drift starts anew there.

    Blocks are those of `rg.StoreLast`.
    """

    every: int | None = None
    every_blocks: int | None = None

    def plan(self, blocks: Sequence[int]) -> list[Stretch]:
        parts, every = (blocks, self.every_blocks) if self.every is None else ([1] * sum(blocks), self.every)
        return [("reverse", sum(parts[start : start + every]), None) for start in range(0, len(parts), every)]  # type: ignore[operator]


@dataclass(frozen=True)
class Budget(Policy):
    """Store as many of the last updates as fit into `bytes` of activations, and reverse the rest.

    `bytes` is a number, a size like "4GiB" or "512MB", or "auto". Counted are the streams, their gradients, what is stored, and
    room for one function at work. `Budget("auto")` takes what is free on the device of the streams, less a tenth, and less the
    gradients that parameters do not have yet. An optimizer that makes its states in its first step needs more: run one step
    before, or give a number.

    With functions that `rg.compile_fns` has compiled, updates are stored in the lean form, and the last ones in full where there
    is room.
    """

    bytes: int | str
    needs_undo = False

    def __post_init__(self) -> None:
        if not isinstance(self.bytes, str):
            _positive(self, "bytes", self.bytes, ', a size like "4GiB", or "auto"')
        elif self.bytes != "auto":
            object.__setattr__(self, "bytes", bytes_in(self.bytes, 'rg.Budget takes "auto" or a size:'))

    def plan(self, blocks: Sequence[int]) -> list[Stretch]:
        return [("reverse", sum(blocks), self.bytes)]


@dataclass(frozen=True)
class Offload(Policy):
    """Like "checkpoint", with the kept inputs moved to host memory while the net runs on, and back before backward needs them.

    - `host`: at most so many bytes of host memory, a number or a size like "64GiB". What does not fit stays on the device.
    - `keep_last`: the inputs of the last so many blocks stay on the device, as backward needs them at once.

    `memory="offload"` is `rg.Offload()`. Where there is no link to move them over (on a CPU, say), it runs as "checkpoint" and
    warns once. The host memory is pinned, and kept for the next pass: `rg.offload_stats()` counts it, `rg.offload_release()`
    gives it back.
    """

    host: int | str | None = None
    keep_last: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.host, str):
            object.__setattr__(self, "host", bytes_in(self.host, "rg.Offload takes a size:"))
        elif self.host is not None:
            _positive(self, "host", self.host, ', or a size like "64GiB"')
        _positive(self, "keep_last", self.keep_last)

    def plan(self, blocks: Sequence[int]) -> list[Stretch]:
        return [("offload", sum(blocks), self)]


@dataclass(frozen=True)
class Checkpointed(Policy):
    """Another policy, with checkpoints where it reverses: what `rg.Sequential(bits=…)` runs under without noise."""

    inner: Kind | Policy
    needs_undo = False

    def plan(self, blocks: Sequence[int]) -> list[Stretch]:
        return [(self.inner, sum(blocks), None)] if isinstance(self.inner, str) else self.inner.plan(blocks)


@dataclass(frozen=True)
class ReverseAbove:
    """Ordinary autograd for inputs of at most `length` along `dim`, reversal for longer ones."""

    length: int
    dim: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or isinstance(self.length, bool) or self.length < 0:
            raise ProgramError(f"{self}: length must be a whole number, 0 or more")
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise ProgramError(f"{self}: dim must be a whole number")

    def measured(self, value: Any) -> Kind:
        """The kind for this input: a tensor, or the first tensor in it."""
        first = next(iter(tensors(value)), None)
        if first is None or not -first.dim() <= self.dim < first.dim():
            got = "no tensor" if first is None else f"shape {tuple(first.shape)}"
            raise ProgramError(f"{self}: the input has no dim {self.dim} to measure, got {got}. Give another dim")
        return "reverse" if first.shape[self.dim] > self.length else "store"


Memory: TypeAlias = Kind | Policy | ReverseAbove


def _positive(policy: Any, name: str, value: Any, or_else: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ProgramError(f"{policy}: {name} must be a whole number (an int), 1 or more{or_else}")


def check_memory(memory: Any) -> Memory:
    if memory == "overlap":
        warnings.warn("memory='overlap' does not exist any more: it runs as memory='reverse'", stacklevel=3)
        return "reverse"
    if isinstance(memory, (Policy, ReverseAbove)) or (isinstance(memory, str) and memory in KINDS):
        return memory  # type: ignore[return-value]
    policies = ("StoreLast", "Anchor", "Budget", "Offload", "ReverseAbove")
    raise unknown("memory policy", memory, [*KINDS, *(f"rg.{name}(…)" for name in policies)])


def settled(memory: Memory, value: Any) -> Kind | Policy:
    """The policy for this input: `ReverseAbove` becomes a kind."""
    return memory.measured(value) if isinstance(memory, ReverseAbove) else memory


def plan(memory: Memory, program: Program, streams: Mapping[str, Any]) -> list[Stretch]:
    """The stretches of a program, by the number of updates in each of its blocks."""
    found, blocks = settled(check_memory(memory), list(streams.values())), program.blocks
    if isinstance(found, str):
        stretches: list[Stretch] = [(found, sum(blocks), None)]
    else:
        stretches = found.plan(blocks)
        _check_plan(found, stretches, sum(blocks))
    if program.one_way is not None and any(kind == "reverse" for kind, _, _ in stretches):
        if isinstance(found, str) or found.needs_undo:
            raise ProgramError(
                f"memory={memory!r} undoes updates, and a layer x = layer(x) cannot be undone. Use rg.Sequential(…, bits=4), "
                "which trains with a little noise that makes it reversible, or memory='checkpoint', 'offload' or rg.Budget(…)",
                program.one_way,
            )
        stretches = [("checkpoint" if kind == "reverse" else kind, count, how) for kind, count, how in stretches]
    return stretches


def _check_plan(policy: Policy, stretches: list[Stretch], count: int) -> None:
    for kind, _, how in stretches:
        if kind not in KINDS:
            raise unknown(f"kind of stretch in the plan of {policy!r}:", kind, KINDS)
        fits = isinstance(how, Offload) if kind == "offload" else kind == "reverse" and (how == "auto" or isinstance(how, int))
        if how is not None and not fits:
            way_out = 'Only "reverse" may have one, a number of bytes or "auto"; and "offload" an rg.Offload'
            raise ProgramError(f"the plan of {policy!r} has the limit {how!r} for {kind!r}. {way_out}")
    if any(number < 0 for _, number, _ in stretches) or sum(number for _, number, _ in stretches) != count:
        numbers = " + ".join(str(number) for _, number, _ in stretches)
        raise ProgramError(f"the plan of {policy!r} covers {numbers} updates, and the program has {count}")
