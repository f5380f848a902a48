"""One training step on fake tensors: every operation of forward and backward happens, but without memory or arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._base.meter import LiveBytes
from .._base.torch_private import compiler_config, fake_device, fake_mode, home_of, run_backward, tree_leaves
from .._exact.fake import as_on
from ..models.blocks import in_layers
from ..modules import Net
from .as_on_cuda import AsOnCuda, workspace
from .partitioned import partition

WINDOWS = 3  # before the first gradient of a parameter, until half of them are there, after that
SIZES = ("parameters", "trainable", "buffers", "kept")
_DEVICE = torch.ops.prim.device.default
Made = tuple[nn.Module, tuple[Any, ...]]  # a model, and what it is called with


@dataclass(frozen=True)
class Traced:
    """What a step of a model at one depth takes, in bytes."""

    parameters: int
    trainable: int  # of these, what gets gradients; they take as much
    buffers: int
    kept: int  # alive between forward and backward
    highest: dict[int, int]  # bytes of gradients that were there -> the most of everything else at such times

    def windows(self, share: float) -> list[float]:
        """The peak in each part of the step, if gradients count with this share of their size as soon as they are there."""
        peaks = [0.0] * WINDOWS
        for there, others in self.highest.items():
            window = 0 if not there else 1 if 2 * there <= self.trainable else 2
            peaks[window] = max(peaks[window], others + share * there)
        return peaks

    def along(self, other: Traced, share: float) -> Traced:
        """The step at another size: this share of the way from the other step to this one, or from nothing if they are one."""
        if other is self or len(other.highest) != len(self.highest):
            scaled = {there: round(share * others) for there, others in self.highest.items()}
            return replace(self, kept=round(share * self.kept), highest=scaled)

        def on_line(a: int, b: int) -> int:
            return round(a + share * (b - a))

        pairs = zip(sorted(other.highest.items()), sorted(self.highest.items()), strict=True)
        return Traced(
            **{
                name: on_line(getattr(other, name), getattr(self, name))
                for name in ("parameters", "trainable", "buffers", "kept")
            },
            highest={on_line(a[0], b[0]): on_line(a[1], b[1]) for a, b in pairs},
        )


class _Meter(LiveBytes):
    """Activations, apart from the gradients that are there."""

    def __init__(self, inputs: int, cuda: bool):
        super().__init__()
        self.live, self.cuda = inputs, cuda
        self.there = 0
        self.highest: dict[int, int] = {0: inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # asked for all the time
            return fake_device(*args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.cuda:
            self.note(workspace(func, args))
        return out

    def _count(self, key: int, storage: torch.UntypedStorage) -> None:
        super()._count(key, storage)
        self.note()

    def note(self, more: int = 0) -> None:
        self.highest[self.there] = max(self.highest.get(self.there, 0), self.live + more)

    def arrived(self, p: Tensor) -> None:
        self.there += p.nbytes


class _Mode(fake_mode()):
    """Fake tensors name their mode, and `copy.deepcopy` would copy it with them; tensors of two modes do not mix."""

    def __deepcopy__(self, memo: Any) -> _Mode:
        return self


class Tracer:
    """Steps on one device at one precision. `budget` is the activation memory budget of the way "compile"."""

    def __init__(self, device: str, autocast: torch.dtype | None = None, budget: float = 0.5):
        self.device, self.autocast, self.budget = device, autocast, budget
        self.mode = _Mode(allow_non_fake_inputs=True)
        self.splits: dict[Any, dict[str, Any]] = {}  # of functions, at each size of the input

    def trace(self, make: Callable[[], Made], way: Any, key: Any = None) -> Traced:
        """`make` is called under fake tensors. `way` is a memory policy, "compile" or "bits"; `key`: sizes of the input."""
        with self.fake(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a step that nobody runs
            with _conversions():
                model, args = make()
            if way == "compile":
                return self._compiled(model, args, self.splits.setdefault(key, {}))
            if way == "bits":
                model = in_layers(model)
            else:
                for net in nets_of(model):
                    net.memory = way
            return _step(model, args, self.device, self.autocast)

    def _compiled(self, model: nn.Module, args: tuple[Any, ...], splits: dict[str, Any]) -> Traced:
        known = len(splits)
        for net in nets_of(model):
            partition(net, splits)
        with compiler_config().patch(activation_memory_budget=self.budget):
            if len(splits) > known:
                with _precision(self.autocast):  # the splits are made here
                    model(*args)
            return _step(model, args, self.device, self.autocast)

    @contextmanager
    def fake(self) -> Iterator[None]:
        """Fake tensors that behave as those on the device."""
        with ExitStack() as stack:
            stack.enter_context(self.mode)
            stack.enter_context(as_on(self.device))
            if self.device == "cuda":
                stack.enter_context(AsOnCuda())
            yield


@contextmanager
def _conversions() -> Iterator[None]:
    """Lets `module.to(…)` work, which refuses fake parameters; they stay on the CPU wherever it says."""

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        done: dict[int, tuple[Tensor, Tensor]] = {}  # tied ones stay tied
        for module in self.modules() if recurse else [self]:
            for held in (module._parameters, module._buffers):
                for name, t in held.items():
                    if t is not None and id(t) not in done:
                        new = fn(t.detach()).cpu()
                        done[id(t)] = t, nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new
                    held[name] = None if t is None else done[id(t)][1]  # type: ignore[assignment]
        return self

    before, nn.Module._apply = nn.Module._apply, apply
    try:
        yield
    finally:
        nn.Module._apply = before


def nets_of(model: nn.Module) -> list[Net]:
    return [module for module in model.modules() if isinstance(module, Net)]


def _step(model: nn.Module, args: tuple[Any, ...], device: str, autocast: torch.dtype | None) -> Traced:
    parameters = list(model.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    inputs = {home_of(t): t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor)}
    for p in trainable:
        p.grad = torch.zeros_like(p)
    meter = _Meter(sum(inputs.values()), device == "cuda")
    hooks = [p.register_post_accumulate_grad_hook(meter.arrived) for p in trainable]
    with meter:
        with _precision(autocast):
            loss = loss_of(model(*args))
        kept = meter.live
        _backward(loss)
    for hook in hooks:
        hook.remove()
    return Traced(
        parameters=sum(p.nbytes for p in parameters),
        trainable=sum(p.nbytes for p in trainable),
        buffers=sum(b.nbytes for b in model.buffers()),
        kept=kept,
        highest=meter.highest,
    )


def _precision(autocast: torch.dtype | None) -> torch.autocast:
    return torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False)


def _backward(loss: Tensor) -> None:
    """`loss.backward()`, which is a torch function itself and would put AsOnCuda aside."""
    run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def loss_of(out: Any) -> Tensor:
    """A number is the loss; of anything else, the mean squares of all tensors."""
    leaves = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    if len(leaves) == 1 and leaves[0].dim() == 0:
        return leaves[0]
    total = [(t if t.dtype in (torch.float32, torch.float64) else t.float()).square().mean() for t in leaves]
    return torch.stack(total).sum() if len(total) > 1 else total[0]
