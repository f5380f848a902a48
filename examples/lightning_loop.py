"""The net of `plain_loop.py` under Lightning: accumulation, mixed precision, clipping. Needs `pip install lightning`.

python examples/lightning_loop.py
"""

from __future__ import annotations

from typing import Any

import lightning  # pyright: ignore[reportMissingImports]
import torch
from plain_loop import ACCUMULATE, Decoder, batches


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Decoder()
        self.losses: list[float] = []

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net.loss(ids)
        if index % ACCUMULATE == 0:
            self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(steps: int = 100, **options: Any) -> list[float]:
    torch.manual_seed(0)
    module = Module()
    data = torch.utils.data.DataLoader(torch.cat(list(batches(steps * ACCUMULATE))), batch_size=8)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        max_steps=steps,
        max_epochs=1,
        accelerator="auto",
        precision="bf16-mixed",
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(module, data)
    return module.losses


if __name__ == "__main__":
    found = train()
    print(f"loss {found[0]:.2f} at the first step, {found[-1]:.2f} at the last")
