"""What reversible noise costs: a step of transformer layers in `rg.Sequential(bits=m)` under "reverse", against "checkpoint".

python -m retrograde.bench.bits [--device cuda] [--width 512] [--bits 4] [--rounds 20] [--threads 1]

Beside them "checkpoint" that runs the whole of each layer again: it may stop when everything is saved, before the last matrix
product, and reversal may not. What is left of the difference is the noise.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import retrograde as rg

from ..models.blocks import DTYPES, Attention, mlp
from .depth import Parser, count
from .measure import Timing, in_turns


class Layer(nn.Module):
    """x + attention(x), and then x + mlp(x)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention, self.mlp = Attention(width, heads), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


def steps(layers: list[nn.Module], x: Tensor, bits: int, rounds: int) -> dict[str, Timing]:
    """Seconds of forward and backward."""

    def step(net: nn.Module, whole: bool = False) -> None:
        hooks = [layer.register_forward_hook(lambda *_: None) for layer in layers if whole]  # who has one is never stopped
        net(x).sum().backward()
        for hook in hooks:
            hook.remove()

    plain = rg.Sequential(layers, memory="checkpoint")
    kinds = {
        "store": partial(step, rg.Sequential(layers, memory="store")),
        "checkpoint": partial(step, plain),
        "checkpoint, whole": partial(step, plain, whole=True),
        "checkpoint, noise": partial(step, rg.Sequential(layers, bits=bits, memory="checkpoint")),
        "reverse, noise": partial(step, rg.Sequential(layers, bits=bits, memory="reverse")),
    }
    return in_turns(kinds, rounds, burn_in=2)


def main() -> None:
    parser = Parser("python -m retrograde.bench.bits", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    for name, default, what in (
        ("width", 512, "of a layer"),
        ("heads", 8, "of attention"),
        ("depth", 8, "number of layers"),
        ("batch", 4, "sequences in a step"),
        ("seq", 256, "tokens in a sequence"),
        ("bits", 4, "of each element that a layer keeps"),
        ("rounds", 10, "timed steps of each kind, 2 or more"),
        ("threads", torch.get_num_threads(), "of torch's operations"),
    ):
        parser.add_argument(f"--{name}", type=count, default=default, help=what)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    x = torch.randn(args.batch, args.seq, args.width, device=args.device, dtype=DTYPES[args.dtype], requires_grad=True)
    layers: list[nn.Module] = [Layer(args.width, args.heads).to(x.device, x.dtype) for _ in range(args.depth)]
    times = steps(layers, x, args.bits, max(args.rounds, 2))
    base = times["checkpoint"].median
    print(f"torch {torch.__version__}, {', '.join(f'{name} {value}' for name, value in vars(args).items())}, medians of a step")
    for name, timing in times.items():
        spread = f"quartiles {timing.low / timing.median:.2f} to {timing.high / timing.median:.2f}"
        print(f"  {name:<18} {timing.median * 1e3:9.1f} ms, {timing.median / base:.3f} of checkpoint ({spread})")


if __name__ == "__main__":
    main()
