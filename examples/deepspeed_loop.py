"""The net of `plain_loop.py` under DeepSpeed: accumulation, ZeRO, clipping. Needs `pip install deepspeed`.

python examples/deepspeed_loop.py              # one process, on a CPU too
deepspeed examples/deepspeed_loop.py           # all GPUs
"""

from __future__ import annotations

import os

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
from accelerate_loop import Loss
from plain_loop import ACCUMULATE, batches

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def train(steps: int = 100, stage: int = 1) -> list[float]:
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    torch.manual_seed(0)
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=Loss(), config=settings)
    losses: list[float] = []
    for index, ids in enumerate(batches(steps * ACCUMULATE)):
        loss = engine(ids.to(engine.device))
        engine.backward(loss)
        engine.step()
        if index % ACCUMULATE == 0:
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    found = train()
    print(f"loss {found[0]:.2f} at the first step, {found[-1]:.2f} at the last")
