"""The five systems: the original class, ours, and the same equations under ordinary autograd."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from support import WIDTH, draw, loss_of, mlp
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

MARKS = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # the originals warn
DEPTHS, DROPOUTS = [1, 3, 12], [0.0, 0.3]
KINDS = ["original", "ours"]


# -- functions ---------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A branch that also looks at whatever else it is given: another stream or a context, with masks."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.core, self.mix = mlp(dropout=dropout), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x, *others, context=None, context_mask=None, mask=None):
        for other in (*others, context):
            if other is not None:
                seen = other if context_mask is None else other.masked_fill(~context_mask[..., None], 0)
                x = x + self.mix(seen).tanh().mean(1, keepdim=True)
        out = self.core(x)
        return out if mask is None else out.masked_fill(~mask[..., None], 0)


class ChannelsFirst(nn.Module):
    def __init__(self, fn: nn.Module):
        super().__init__()
        self.fn = fn

    def forward(self, x, **side):
        return self.fn(x.transpose(1, -1), **side).transpose(1, -1)


class Keys(nn.Module):
    """A branch on a dict of two tensors of different widths, that mixes them."""

    def __init__(self, fn: nn.Module):
        super().__init__()
        self.fn = fn

    def forward(self, x, **side):
        out = self.fn(torch.cat((x["0"], x["1"]), -1), **side)
        return dict(zip(x, out.split([x["0"].shape[-1], x["1"].shape[-1]], -1), strict=True))


# -- the equations, by hand --------------------------------------------------------------------------------------------


def add(a: Any, b: Any) -> Any:
    return {key: a[key] + b[key] for key in a} if isinstance(a, dict) else a + b


def pairs(blocks, x1, x2, sides):
    for (f, g), (to_f, to_g) in zip(blocks, sides, strict=True):
        x1 = add(x1, f(x2, **to_f))
        x2 = add(x2, g(x1, **to_g))
    return x1, x2


def all_or_none(blocks, route, side):
    return [[side if goes else {} for goes in route]] * len(blocks)


def reformer_by_hand(blocks, x, arg_route=(True, False), layer_dropout=0.0, reverse_thres=0, send_signal=False, **side):
    if layer_dropout:
        dropped = torch.empty(len(blocks)).uniform_(0, 1) < layer_dropout
        blocks = [block for block, drop in zip(blocks, dropped, strict=True) if not drop] or blocks[:1]
    return torch.cat(pairs(blocks, *x.chunk(2, 2), all_or_none(blocks, arg_route, side)), 2)


def axial_by_hand(blocks, x, arg_route=(True, True), **side):
    return sum(pairs(blocks, x, x, all_or_none(blocks, arg_route, side))) / 2


def se3_by_hand(blocks, x, **side):
    return tree_map(lambda a, b: (a + b) / 2, *pairs(blocks, x, x, all_or_none(blocks, (True, False), side)))


def nuwa_by_hand(blocks, x, args_route=None, **side):
    sides = [
        [{name: side[name] for name in side if name in (args_route or {}) and args_route[name][depth][which]} for which in (0, 1)]
        for depth in range(len(blocks))
    ]
    return sum(pairs(blocks, x, x, sides))


def dual_by_hand(blocks, video, audio, types=None, context=None, context_mask=None, video_mask=None, audio_mask=None, **_):
    x1, x2, m1, m2 = video, video, audio, audio
    for (f, g, j, k), kind in zip(blocks, types or self_attention(blocks), strict=True):
        if kind == "inter_modality_cross_attn":
            x1 = x1 + f(x2, m2, mask=video_mask, context_mask=audio_mask)
            x2 = x2 + k(x1)
            m1 = m1 + j(m2, x2, mask=audio_mask, context_mask=video_mask)
            m2 = m2 + g(m1)
        else:
            crosses = kind == "intra_modality_cross_attn"
            side = {"context": context, "context_mask": context_mask} if crosses else {}
            x1 = x1 + f(x2, **side, **({"mask": video_mask} if crosses else {}))
            x2 = x2 + g(x1)
            m1 = m1 + j(m2, **side, **({"mask": audio_mask} if crosses else {}))
            m2 = m2 + k(m1)
    return [(x1 + x2) / 2, (m1 + m2) / 2]


def self_attention(blocks):
    return ["intra_modality_self_attn"] * len(blocks)


# -- a system ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    name: str
    package: str  # the module of the original; ours has the same names
    klass: str
    by_hand: Callable
    inputs: Callable[[], tuple]
    wrap: Callable[[nn.Module], nn.Module] = lambda fn: fn
    functions: int = 2  # in one block
    always: dict = field(default_factory=dict)  # keyword arguments that each call needs
    context: Callable[..., tuple] = lambda depth, both=False: ({}, {})  # arguments of the class and of a call that use a context

    def __str__(self):
        return self.name

    def module(self, kind: str):
        if kind == "original":
            return peer(self.package)
        return importlib.import_module(f"retrograde.compat.{self.name}")

    def blocks(self, depth: int, core: Callable[[], nn.Module] = mlp) -> nn.ModuleList:
        return nn.ModuleList(nn.ModuleList(self.wrap(core()) for _ in range(self.functions)) for _ in range(depth))

    def build(self, kind: str, blocks: nn.ModuleList, **options):
        """A net on copies of the blocks: "original", "ours" or "by hand". With it, the copies."""
        blocks = copy.deepcopy(blocks)
        if kind == "by hand":
            return partial(self.by_hand, blocks, **self.always, **options), blocks
        return Called(self.make(kind, blocks, **options), self.always), blocks

    def make(self, kind: str, blocks, **options) -> nn.Module:
        if self.functions == 4:
            options["block_types"] = options.pop("types", None) or self_attention(blocks)
        return getattr(self.module(kind), self.klass)(blocks, **options)


def peer(name: str) -> Any:
    """A module of an original package."""
    os.environ.setdefault("CLEAR_CACHE", "1")  # se3-transformer-pytorch: no cache in the home directory
    if name.startswith("nuwa_pytorch"):
        try:
            importlib.import_module("torchvision")
        except (ImportError, RuntimeError):  # a build for another torch; nuwa's image models need it, and no test needs them
            sys.modules.update({f"torchvision{part}": MagicMock() for part in ("", ".datasets", ".transforms", ".utils")})
    return pytest.importorskip(name)


class Called(nn.Module):
    """A net with the keyword arguments that each call needs."""

    def __init__(self, net: nn.Module, always: dict):
        super().__init__()
        self.net, self.always = net, always

    def forward(self, *args, **side):
        return self.net(*args, **{**self.always, **side})


def dicts():
    return ({"0": draw(3, 5, 4), "1": draw(3, 5, WIDTH - 4)},)


SYSTEMS = {
    s.name: s
    for s in (
        System(
            "reformer", "reformer_pytorch.reversible", "ReversibleSequence", reformer_by_hand,
            inputs=lambda: (draw(3, 5, 2 * WIDTH),),
            context=lambda depth, both=False: ({}, {"arg_route": (True, both)}),
        ),
        System(
            "axial_attention", "axial_attention.reversible", "ReversibleSequence", axial_by_hand,
            inputs=lambda: (draw(3, WIDTH, 5),), wrap=ChannelsFirst,
            context=lambda depth, both=False: ({}, {"arg_route": (True, both)}),
        ),
        System(
            "se3_transformer", "se3_transformer_pytorch.reversible", "ReversibleSequence", se3_by_hand,
            inputs=dicts, wrap=Keys,
        ),
        System(
            "nuwa", "nuwa_pytorch.reversible", "ReversibleSequence", nuwa_by_hand,
            inputs=lambda: (draw(3, 5, WIDTH),),
            context=lambda depth, both=False: ({"args_route": {"context": ((True, both),) * depth}}, {}),
        ),
        System(
            "nuwa_video_audio", "nuwa_pytorch.reversible_video_audio", "DualModalityReversibleSequence", dual_by_hand,
            inputs=lambda: (draw(3, 5, WIDTH), draw(3, 4, WIDTH)), functions=4, always={"context": None},
            context=lambda depth, both=False: ({"types": ["intra_modality_cross_attn"] * depth}, {}),
        ),
    )
}  # fmt: skip


# -- comparing ---------------------------------------------------------------------------------------------------------


def is_float(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def leaves(tree: Any, grad: bool = True) -> Any:
    """Copies that stand at the start of a graph."""
    return tree_map(lambda t: t.detach().clone().requires_grad_(grad) if is_float(t) else t, tree)


def measure(
    call, module: nn.Module, inputs: tuple, *, seed: int = 0, grad: bool = True, loss=loss_of, **side
) -> dict[str, Tensor]:
    """Outputs; gradients of the module's parameters, the inputs and the side inputs, by `backward()`; the next random number."""
    inputs, side = leaves((inputs, side), grad)
    module.zero_grad()
    torch.manual_seed(seed)
    out = call(*inputs, **side)
    loss(out).backward()
    given = [t for t in tree_leaves((inputs, side)) if is_float(t)]
    return {
        **{f"output {i}": t.detach() for i, t in enumerate(tree_leaves(out))},
        **{f"gradient of {name}": grad_of(p) for name, p in module.named_parameters()},
        **{f"gradient of input {i}": grad_of(t) for i, t in enumerate(given)},
        "next random number": torch.rand(1),
    }


def grad_of(t: Tensor) -> Tensor:
    return torch.zeros_like(t) if t.grad is None else t.grad.clone()


def assert_equal(found: dict[str, Tensor], true: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert found.keys() == true.keys()
    assert any(t.norm() > 0 for name, t in true.items() if name.startswith("gradient")), "nothing to compare"
    for name in true:
        error = relative(found[name], true[name])
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def relative(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    return float((a - b).norm() / (b.norm() if b.norm() > 0 else 1))


def gradient_error(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Relative error of all gradients taken together."""
    names = [name for name in true if name.startswith("gradient")]
    a, b = (torch.cat([d[name].flatten().double() for name in names]) for d in (found, true))
    return relative(a, b)


def compare(system: System, blocks: nn.ModuleList, options: dict | None = None, tolerance: float = 1e-9, **side) -> None:
    """Ours, the original and the equations by hand agree on the same functions, inputs and seed."""
    inputs, options = system.inputs(), options or {}
    call, own = system.build("by hand", blocks, **options)
    true = measure(call, own, inputs, **side)
    for kind in KINDS:
        call, own = system.build(kind, blocks, **options)
        assert_equal(measure(call, own, inputs, **side), true, tolerance)


def compare_blocks(system: System, name: str, fns: list, inputs: tuple, **side) -> None:
    """A block by itself: the output and the keys of the original; ours is part of the graph as well."""
    blocks = [getattr(system.module(kind), name)(*copy.deepcopy(fns)) for kind in KINDS]
    outs = []
    for block in blocks:
        torch.manual_seed(0)
        outs.append(tree_leaves(block(*inputs, **side)))
    assert all(relative(ours.detach(), original.detach()) < 1e-12 for original, ours in zip(*outs, strict=True))
    assert all(ours.requires_grad for ours in outs[1])
    assert_same_keys(*blocks)


CLASSES = ("ReversibleSequence", "SequentialSequence", "DualModalityReversibleSequence")


def hosts(where: Any, systems: System | tuple[System, ...], make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The same model of the package twice, as it is and with our classes in place of its own; the weights are loaded strictly."""
    original = make()
    with pytest.MonkeyPatch.context() as patch:
        for system in systems if isinstance(systems, tuple) else (systems,):
            ours = system.module("ours")
            for name in set(CLASSES) & set(vars(ours)):
                patch.setattr(where, name, getattr(ours, name))
        model = make()
    assert type(model) is type(original)
    assert any(type(m).__module__.startswith("retrograde.compat") for m in model.modules())
    assert not any(type(m).__module__.startswith("retrograde") for m in original.modules())
    model.load_state_dict(original.state_dict(), strict=True)
    return original, model


def compare_hosts(original: nn.Module, ours: nn.Module, inputs: tuple, tolerance: float = 1e-9, **given) -> None:
    assert_equal(measure(ours, ours, inputs, **given), measure(original, original, inputs, **given), tolerance)


def trained(model: nn.Module, inputs: tuple, lr: float = 0.01, **side) -> list[Tensor]:
    """How far three steps moved the parameters."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    torch.manual_seed(0)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model(*inputs, **side)).backward()
        optimizer.step()
    return [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]


def assert_same_keys(original: nn.Module, ours: nn.Module) -> None:
    """The same keys in the same order, and checkpoints that load both ways."""
    assert list(ours.state_dict()) == list(original.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in original.named_parameters()]
    for source, target in ((original, ours), (ours, original)):
        with torch.no_grad():
            for p in source.parameters():
                p.add_(torch.rand_like(p))
        target.load_state_dict(source.state_dict(), strict=True)
        assert all(torch.equal(a, b) for a, b in zip(target.state_dict().values(), source.state_dict().values(), strict=True))
