"""Several processes under torchrun: who am I, what is wrapped around the model, what all must agree on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import TrainingError


class Alone:
    """One process."""

    rank, world, device = 0, 1, "cpu"

    def wrap(self, model: nn.Module) -> Any:
        return model

    def piece(self, model: Any, last: bool) -> Any:
        """Around the forward and backward pass of a piece of the batch."""
        return nullcontext()

    def at_rest(self, model: Any) -> None:
        """Parameters are those that the optimizer knows, as they are not after a forward pass under fsdp."""

    def mean(self, value: Tensor) -> Tensor:
        return value

    def largest(self, value: int) -> int:
        """The largest of the processes' values, so that all do the same."""
        return value

    def together(self, error: Exception | None) -> None:
        """Go on, all of them, or stop, all of them: the one with the error raises it."""
        if self.largest(error is not None):
            raise error or TrainingError("another process stopped the run, and says why")


class Several(Alone):
    """`kind` is "ddp", where each process has the whole model, or "fsdp", where each has a part of every tensor."""

    def __init__(self, kind: str, device: str):
        self.kind, self.device = kind, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def wrap(self, model: nn.Module) -> Any:
        if self.kind == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(model)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device, (self.world,))
        for block in model.net.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def piece(self, model: Any, last: bool) -> Any:
        if self.kind == "fsdp":
            model.set_requires_gradient_sync(last)
            return nullcontext()
        return nullcontext() if last else model.no_sync()

    def at_rest(self, model: Any) -> None:
        if self.kind == "fsdp":
            for module in model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()

    def mean(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value / self.world

    def largest(self, value: int) -> int:
        found = torch.tensor(value, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)


@contextmanager
def processes(kind: str, device: str) -> Iterator[Alone]:
    """The process group of torchrun, or one process alone."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if kind == "none":
        if world > 1:
            raise TrainingError(f"torchrun started {world} processes: say how they share the work, with parallel ddp or fsdp")
        yield Alone()
        return
    if "RANK" not in os.environ:
        raise TrainingError(f"parallel {kind} is for several processes: torchrun --nproc-per-node N -m retrograde train …")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Several(kind, device)
    finally:
        dist.destroy_process_group()
        time.sleep(0.2)  # gloo's threads let go of the last tensors; Python, if it ended now, would abort the process under them
