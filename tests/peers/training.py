"""Models as the READMEs of the originals make them, trained for a few steps: the original, ours, ours with stored activations.

Sizes are scaled down; flags, and the defaults of all other arguments, stay.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.compat import memcnn
from retrograde.modules import Net

from .systems import grad_of

Losses = Sequence[Callable[[nn.Module], Tensor]]  # one for each step


def train(model: nn.Module, losses: Losses, lr: float = 0.05) -> list[dict[str, Tensor]]:
    """The loss and the gradients of all parameters in each step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    found = []
    for step, loss_of_step in enumerate(losses):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of_step(model)
        loss.backward()
        found.append({"loss": loss.detach(), **{name: grad_of(p) for name, p in model.named_parameters()}})
        optimizer.step()
    return found


def stored(model: nn.Module) -> nn.Module:
    """A copy that keeps all activations."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if isinstance(part, Net):
            part.memory = "store"
        elif isinstance(part, memcnn.InvertibleModuleWrapper):
            part.disable = True
        elif isinstance(part, (memcnn.AdditiveCoupling, memcnn.AffineCoupling)):
            part.implementation_fwd = part.implementation_bwd = -1
    return model


def watched(model: nn.Module, losses: Losses, lr: float) -> tuple[list[dict[str, Tensor]], bool]:
    """The same as `train`, and whether modules were recomputed in backward."""
    found: list[bool] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: found.append(rg.replaying()))
    try:
        gradients = train(model, losses, lr)
    finally:
        handle.remove()
    return gradients, any(found)


def furthest(found: list[dict[str, Tensor]], true: list[dict[str, Tensor]]) -> tuple[float, str]:
    """The largest relative error of a loss or a gradient, and where it is. What is a millionth of all together is rounding."""
    errors = [(0.0, "")]
    for step, (a, b) in enumerate(zip(found, true, strict=True)):
        assert a.keys() == b.keys()
        total = math.hypot(*(float(t.norm()) for t in b.values()))
        for name, t in b.items():
            scale = max(float(t.norm()), 1e-6 * total)
            errors.append((float((a[name] - t).norm()) / scale, f"step {step}, {name}"))
    return max(errors)


def assert_trains(
    original: nn.Module | None,
    ours: nn.Module,
    losses: Losses,
    tolerance: float = 1e-9,
    lr: float = 0.05,
    wrong: bool = False,
    reversible: bool = True,
) -> None:
    """Ours has the gradients of stored activations in every step, and so has the original, unless it is known to be wrong."""
    true = train(stored(ours), losses, lr)
    assert any(t.norm() > 0 for name, t in true[-1].items() if name != "loss"), "nothing to compare"
    found, recomputed = watched(ours, losses, lr)
    assert recomputed == reversible
    error, where = furthest(found, true)
    assert error <= tolerance, f"ours: relative error {error:.1e} in {where}"
    if original is None:
        return
    error, where = furthest(train(original, losses, lr), true)
    if wrong:
        assert error > 1e-3, "the original is right"
    else:
        assert error <= tolerance, f"the original: relative error {error:.1e} in {where}"
