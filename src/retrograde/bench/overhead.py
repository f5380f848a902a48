"""What the engine itself costs: a step on tensors so small that only the work around them counts.

python -m retrograde.bench.overhead [--depth 12] [--rounds 40] [--threads 1]

In one thread, as more of them add the same waiting to all: it is no work of theirs around the tensors. There the time is that of
the CPU, so that other processes on the machine matter little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from .._base.report import counted
from .depth import Parser, count
from .measure import Timing, in_turns
from .model import checkpointed, transformer, under


def overhead(depth: int = 12, rounds: int = 40, width: int = 16) -> dict[str, Timing]:
    """Seconds of forward + backward under store, torch's checkpoint per fn, and reverse."""
    torch.manual_seed(0)
    net = transformer(depth, width)
    x = torch.randn(2, 8, width)

    def step(forward: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: forward().square().sum().backward()

    return in_turns(
        {
            "store": step(lambda: under(net, "store", x)),
            "checkpoint": step(lambda: checkpointed(net, x)),
            "reverse": step(lambda: under(net, "reverse", x)),
        },
        rounds,
        clock=time.thread_time if torch.get_num_threads() == 1 else time.perf_counter,
    )


def main() -> None:
    parser = Parser("python -m retrograde.bench.overhead", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--depth", type=count, default=12, help="number of blocks")
    parser.add_argument("--rounds", type=count, default=40, help="timed steps of each kind, 2 or more")
    parser.add_argument("--threads", type=count, default=1, help="of torch's operations")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    depth, rounds = args.depth, max(args.rounds, 2)
    times = overhead(depth, rounds)
    reverse = times["reverse"].median
    threads = counted(torch.get_num_threads(), "thread")
    print(f"torch {torch.__version__}, {threads}, depth {depth}, {rounds} rounds, medians of a step")
    for name, timing in times.items():
        per_update = timing.median / (2 * depth) * 1e6
        spread = f"quartiles {timing.low / timing.median:.2f} to {timing.high / timing.median:.2f}"
        print(f"  {name:<10} {per_update:7.0f} us per update ({spread})")
    print(f"  reverse / checkpoint {reverse / times['checkpoint'].median:.2f}")
    print(f"  reverse / store      {reverse / times['store'].median:.2f}")


if __name__ == "__main__":
    main()
