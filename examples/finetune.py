"""A pretrained decoder, fine-tuned with LoRA and reversible noise, beside ordinary autograd, checkpointing and offload.

A small Llama is trained for a minute on the sources of Python's standard library, byte by byte. Copies of it are then fine-tuned
on the text of Python's reference (pydoc), on the same batches: with all activations kept, with checkpoints (in host memory too,
where there is a link to it), and as `reversible_(model, bits=4)`. The last one is saved, and loaded by transformers alone.
Needs `pip install 'retrograde[integrations]'`. Everything printed is measured here and now.

    python examples/finetune.py
    python examples/finetune.py --full --seeds 6 --ways ordinary reverse    # how much quality the noise costs
"""

from __future__ import annotations

import argparse
import copy
import pydoc_data.topics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

from retrograde.bench.meter import LiveBytes, peak_on_cuda
from retrograde.integrations.transformers import checkpoint_, reversible_
from retrograde.models.loss import language_loss

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = ("ordinary", "checkpoint", "offload", "reverse")


class LoRA(nn.Module):
    """`linear(x) + up(down(x))`, where only up and down are trained. With peft it is one line: see docs/finetune.md."""

    def __init__(self, linear: nn.Linear, rank: int = 8):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False, device=linear.weight.device)
        self.up = nn.Linear(rank, linear.out_features, bias=False, device=linear.weight.device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.linear.weight += self.up.weight @ self.down.weight
        return self.linear


def add_lora_(model: Any) -> Any:
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name)))
    return model


def merge_lora_(model: Any) -> Any:
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, getattr(layer.self_attn, name).merged())
    return model


def small_llama(depth: int, width: int, length: int) -> Any:
    heads = max(1, width // 16)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
    )
    return LlamaForCausalLM(config).to(DEVICE)


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
        yield torch.stack([data[start : start + length] for start in starts.tolist()]).long().to(DEVICE)


def loss_of(model: Any, ids: Tensor, chunk: int = 256) -> Tensor:
    """The logits of so many positions exist at the same time."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    return language_loss(hidden.flatten(0, 1), model.lm_head.weight, ids[:, 1:].flatten(), chunk)


def train(model: Any, data: Tensor, steps: int, length: int, rate: float, seed: int = 1) -> Any:
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for ids in batches(data, steps, length, seed):
        loss_of(model, ids).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


@torch.no_grad()
def held_out(model: Any, data: Tensor, length: int) -> float:
    model.eval()
    return float(torch.stack([loss_of(model, ids) for ids in batches(data, 20, length, seed=2)]).mean())


def peak_of(model: Any, data: Tensor, length: int) -> float:
    """MiB at the peak of one training step, above what was there before it."""
    (ids,) = batches(data, 1, length, seed=1)
    model.train()
    if DEVICE.type == "cuda":
        peak, _ = peak_on_cuda(lambda: loss_of(model, ids).backward())
    else:
        with LiveBytes() as meter:
            loss_of(model, ids).backward()
        peak = meter.peak
    model.zero_grad()
    return peak / 2**20


def prepared(original: Any, way: str, full: bool, bits: int) -> Any:
    model = copy.deepcopy(original)
    if not full:
        add_lora_(model)
    if way == "reverse":
        return reversible_(model, bits=bits)
    return model if way == "ordinary" else checkpoint_(model, way)  # type: ignore[arg-type]


def peaks_by_depth(depths: Sequence[int], width: int, length: int, full: bool, bits: int, ways: Sequence[str]) -> None:
    for depth in depths:
        original = small_llama(depth, width, length)
        found = (f"{way} {peak_of(prepared(original, way, full, bits), reference(), length):.1f} MiB" for way in ways)
        print(f"peak of a step at depth {depth}: " + ", ".join(found), flush=True)


def compare(
    depth: int, width: int, length: int, pretrain: int, steps: int, full: bool, bits: int, seeds: int, ways: Sequence[str]
) -> tuple[dict[str, list[float]], Any]:
    """Held-out losses after fine-tuning by way and seed, and the last model."""
    torch.manual_seed(0)
    text = reference()
    cut = len(text) * 9 // 10
    original = train(small_llama(depth, width, length), sources(), pretrain, length, 3e-3)
    print(f"pretrained: {held_out(original, text[cut:], length):.4f} on the text to come", flush=True)
    losses: dict[str, list[float]] = {way: [] for way in ways}
    model = None
    for seed in range(1, seeds + 1):
        for way in ways:
            torch.manual_seed(seed)
            model = prepared(original, way, full, bits)
            peak = peak_of(model, text, length)
            start = time.perf_counter()
            train(model, text[:cut], steps, length, 1e-3 if full else 5e-3, seed)
            took = 1000 * (time.perf_counter() - start) / steps
            losses[way].append(held_out(model, text[cut:], length))
            print(f"seed {seed}: {losses[way][-1]:.4f}, {took:.0f} ms a step, {peak:.1f} MiB under {way}", flush=True)
    return losses, model


def main(given: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=12, help="layers")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--length", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--pretrain", type=int, default=100, help="steps")
    parser.add_argument("--steps", type=int, default=50, help="steps of fine-tuning, more than 10")
    parser.add_argument("--full", action="store_true", help="train all weights, not LoRA")
    parser.add_argument("--bits", type=int, default=4, help="kept for each element and layer")
    parser.add_argument("--seeds", type=int, default=1, help="how often, with other batches")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[w for w in WAYS if w != "offload" or DEVICE.type == "cuda"])
    options = parser.parse_args(given)
    losses, model = compare(**vars(options))
    first, *others = losses
    for way in others:
        apart = [a / b - 1 for a, b in zip(losses[way], losses[first], strict=True)]
        print(f"{way} ended {sum(apart) / len(apart):+.2%} from {first} ({', '.join(f'{one:+.2%}' for one in apart)})")
    depths = [options.depth * times for times in (1, 2, 4)]
    peaks_by_depth(depths, options.width, options.length, options.full, options.bits, options.ways)
    (ids,) = batches(reference(), 1, options.length, seed=2)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        (model if options.full else merge_lora_(model)).eval().save_pretrained(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder).to(DEVICE).eval()
        print(f"saved, and loaded by transformers: the same logits: {torch.equal(loaded(ids).logits, model(ids).logits)}")
    return losses


if __name__ == "__main__":
    main()
