"""The net of `plain_loop.py` under Accelerate: accumulation, mixed precision, clipping. Needs `pip install accelerate`.

python examples/accelerate_loop.py
accelerate launch --num_processes 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingImports]
from plain_loop import ACCUMULATE, Decoder, batches


class Loss(torch.nn.Module):
    """What is prepared is what is called: under DDP the loss must be inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Decoder()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net.loss(ids)


def train(steps: int = 100) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE)
    net = Loss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    data = torch.utils.data.DataLoader(torch.cat(list(batches(steps * ACCUMULATE))), batch_size=8)  # type: ignore[arg-type]
    net, optimizer, data = accelerator.prepare(net, optimizer, data)
    losses: list[float] = []
    for ids in data:
        with accelerator.accumulate(net):
            loss = net(ids)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    found = train()
    print(f"loss {found[0]:.2f} at the first step, {found[-1]:.2f} at the last")
