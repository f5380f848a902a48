"""A pretrained net becomes reversible while it is fine-tuned, and is compared with fine-tuning the original.

A small Llama is trained on the sources of Python's standard library, byte by byte. Then two copies of it are fine-tuned on the
text of Python's reference (pydoc), on the same batches: one as it is, one from `reversible_(model, beta=0)` under a `Retrofit`.
Needs `pip install 'retrograde[integrations]'`. Everything printed is measured here and now.

    python examples/retrofit.py
"""

from __future__ import annotations

import argparse
import copy
import logging
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

from retrograde.integrations.transformers import Retrofit, reversible_

Compared = tuple[float, float, float, Retrofit]


def small_llama(depth: int, width: int, length: int) -> Any:
    heads = max(1, width // 16)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=length,
        )
    )


def sources(most: int = 1 << 20) -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return as_bytes(b"".join(file.read_bytes() for file in files)[:most])


def reference() -> Tensor:
    return as_bytes("\n".join(pydoc_data.topics.topics.values()).encode())


def as_bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(data: Tensor, count: int, length: int, seed: int, batch: int = 16) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(data) - length, (batch,), generator=generator)
        yield torch.stack([data[start : start + length] for start in starts.tolist()]).long()


def train(model: Any, data: Tensor, steps: int, length: int, rate: float, retrofit: Retrofit | None = None, seed: int = 1) -> Any:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for ids in batches(data, steps, length, seed):
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if retrofit is not None:
            retrofit.step()
    return model


@torch.no_grad()
def held_out(model: Any, data: Tensor, length: int) -> float:
    model.eval()
    losses = [model(input_ids=ids, labels=ids).loss for ids in batches(data, 20, length, seed=2)]
    return float(torch.stack(losses).mean())


def compare(depth: int, width: int, length: int, pretrain: int, steps: int, rise: int, end: float, seed: int = 0) -> Compared:
    """Held-out losses after fine-tuning the original and the retrofit, and how far their outputs are apart at the start."""
    torch.manual_seed(seed)
    text = reference()
    cut = len(text) * 9 // 10
    original = train(small_llama(depth, width, length), sources(), pretrain, length, 3e-3)
    print(f"pretrained: {held_out(original, text[cut:], length):.4f} on the text to come")
    model = reversible_(copy.deepcopy(original), beta=0.0)
    ids = text[None, :length].long()
    with torch.no_grad():
        apart = float((original(ids).logits - model(ids).logits).abs().max())
    retrofit = Retrofit(model, rise, end=end)
    train(original, text[:cut], steps, length, 1e-3)
    train(model, text[:cut], steps, length, 1e-3, retrofit)
    return held_out(original, text[cut:], length), held_out(model, text[cut:], length), apart, retrofit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=6, help="layers")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--pretrain", type=int, default=800, help="steps")
    parser.add_argument("--steps", type=int, default=800, help="steps of fine-tuning")
    parser.add_argument("--rise", type=int, default=250, help="steps in which beta rises from 0 to its end")
    parser.add_argument("--end", type=float, default=0.9, help="the last beta")
    parser.add_argument("--seed", type=int, default=0, help="of the weights at the start")
    options = vars(parser.parse_args())
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    plain, mine, apart, retrofit = compare(**options)
    on = next((made for made in retrofit.history if made.memory == "reverse"), None)
    print(f"outputs apart by at most {apart:.1e} at the start")
    print(f"held-out loss after fine-tuning: original {plain:.4f}, retrofit {mine:.4f} ({mine / plain - 1:+.2%})")
    print(f"reversal switched on at step {on.step}, beta {on.beta:.2f}" if on else "reversal never switched on")


if __name__ == "__main__":
    main()
