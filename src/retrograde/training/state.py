"""The tensors of a run under their names: parameters and what AdamW keeps for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from .errors import TrainingError

MODEL, OPTIMIZER = "model.", "optimizer."


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> AdamW:
    """Matrices decay, gains do not. Its state is there from the start, so that a checkpoint has a place to be loaded to."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=lr, betas=(0.9, 0.95))
    for p in parameters:
        optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def tensors(model: nn.Module, optimizer: AdamW | None) -> dict[str, Tensor]:
    """All tensors of the run, not copies."""
    found = {f"{MODEL}{name}": p.detach() for name, p in model.named_parameters()}
    if optimizer is not None:
        for name, p in model.named_parameters():
            found |= {f"{OPTIMIZER}{name}.{key}": value for key, value in optimizer.state[p].items()}
    return found


def put(kept: dict[str, Any], model: nn.Module, optimizer: AdamW | None, where: str) -> None:
    """Copy the tensors of a whole checkpoint into the run, each process its own part of them."""
    places = tensors(model, optimizer)
    for name, place in places.items():
        value = kept.get(name)
        if not isinstance(value, Tensor) or value.shape != place.shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TrainingError(f"{where} does not fit this model: {name} needs shape {tuple(place.shape)}, found {got}")
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(_shared_out(kept[name], place))


def _shared_out(value: Tensor, place: Tensor) -> Tensor:
    if not hasattr(place, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(place.device), place.device_mesh, place.placements)  # type: ignore[attr-defined]


def random_state(device: str) -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    return found | {"cuda": torch.cuda.get_rng_state()} if device == "cuda" else found


def set_random_state(kept: dict[str, Tensor], device: str) -> None:
    torch.set_rng_state(kept["cpu"].cpu())
    if device == "cuda" and "cuda" in kept:
        torch.cuda.set_rng_state(kept["cuda"].cpu())
