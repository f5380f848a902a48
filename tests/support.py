"""What the tests share: small nets with non-trivial branches, and one way to compare gradients."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

ROOT = Path(__file__).parents[1]  # of the repository
REPLAYED: list[Any] = ["checkpoint", "reverse"]  # under these every fn runs twice
POLICIES: list[Any] = [*REPLAYED, "offload", rg.StoreLast(2), rg.Budget(30_000), rg.Anchor(3), rg.ReverseAbove(0, dim=0)]
WIDTH = 6


def every_pair(*lists: Iterable[Any]) -> list[tuple]:
    """Rows with a value of each list, in which every value stands at least once beside every value of every other list.

    For `parametrize`, where all combinations would be many: what goes wrong for two values together is found, as each alone is.
    """
    values = [list(one) for one in lists]
    pairs = list(itertools.combinations(range(len(values)), 2))

    def beside(row: tuple[int, ...]) -> set[tuple[int, ...]]:
        return {(i, row[i], j, row[j]) for i, j in pairs}

    candidates = {row: beside(row) for row in itertools.product(*(range(len(one)) for one in values))}
    missing = set().union(*candidates.values())
    rows = []
    while missing:
        best = max(candidates, key=lambda row: len(candidates[row] & missing))
        missing -= candidates.pop(best)
        rows.append(tuple(one[k] for one, k in zip(values, best, strict=True)))
    return rows


def name_of(value: Any) -> str:
    """For the ids of tests."""
    return getattr(value, "__name__", str(value))


def mlp(width: int = WIDTH, dropout: float = 0.0) -> nn.Module:
    """A branch with a nonlinearity, a norm and two weights; its output is of the size of its input."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(2 * width, width)
    ).double()


def mlps(count: int, dropout: float = 0.0) -> list[nn.Module]:
    return [mlp(dropout=dropout) for _ in range(count)]


class Attend(nn.Module):
    """Attention of x over a context (or over itself), with a mask."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm, self.q, self.kv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.double()

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        k, v = self.kv(x if context is None else context).chunk(2, -1)
        scores = self.q(x) @ k.transpose(-1, -2) / x.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        return self.out(scores.softmax(-1) @ v)


def draw(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*(shape or (3, WIDTH)), dtype=torch.float64, requires_grad=grad)


def loss_of(out: Any) -> Tensor:
    """A loss with a different, nonlinear gradient in every element of every output."""
    flat = torch.utils._pytree.tree_leaves(out)
    return sum(((t * (i + 1)).sin() * (t + i)).sum() for i, t in enumerate(flat) if t.requires_grad)  # type: ignore[return-value]


def gradients(make: Callable[[], Any], wanted: Iterable[Tensor], seed: int = 0) -> list[Tensor]:
    """Output leaves, then gradients of `loss_of(make())`, all from the same random state."""
    wanted = list(wanted)
    torch.manual_seed(seed)
    out = make()
    found = torch.autograd.grad(loss_of(out), wanted, allow_unused=True)
    outs = [t.detach() for t in torch.utils._pytree.tree_leaves(out)]
    return outs + [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def assert_same(found: Iterable[Tensor], true: Iterable[Tensor], tolerance: float = 1e-9) -> None:
    """Relative error of every tensor under `tolerance`; at least one of them is not zero."""
    found, true = list(found), list(true)
    assert len(found) == len(true)
    assert any(t.abs().max() > 0 for t in true), "nothing to compare: all gradients are zero"
    for i, (a, b) in enumerate(zip(found, true, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        scale = b.norm()
        error = (a - b).norm() / (scale if scale > 0 else 1)
        assert error <= tolerance, f"tensor {i} of shape {tuple(a.shape)}: relative error {error:.1e}"


def streams(rows: int = 3) -> dict[str, Tensor]:
    return {"a": draw(rows, WIDTH), "b": draw(rows, WIDTH)}


def linear(out: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, out, bias).double()


def net_of(fns: list[nn.Module], memory: Any, **options: Any) -> rg.Reversible:
    """The streams a and b change in turn."""
    return rg.Reversible(rg.wirings.leapfrog(fns), memory=memory, **options)


def agree(step: Callable[[Any], Iterable[Tensor]], memory: Any) -> None:
    """`step(memory)` returns tensors; from the same random state they are those of `step("store")`."""
    found = []
    for policy in (memory, "store"):
        torch.manual_seed(0)
        found.append(step(policy))
    assert_same(*found)


class Logged(nn.Module):
    """A branch that writes down its runs: "f0" the first, "f0 again" the recomputation."""

    def __init__(self, name: str, log: list[str]):
        super().__init__()
        self.fn, self.name, self.log = mlp(), name, log

    def forward(self, *sources: Tensor) -> Tensor:
        self.log.append(f"{self.name} again" if rg.replaying() else self.name)
        return self.fn(sum(sources[1:], start=sources[0]))


def parameters(fns: Iterable[nn.Module]) -> list[nn.Parameter]:
    return list(nn.ModuleList(fns).parameters())


def environment() -> dict[str, str]:
    """For a process that is to find what this one finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@functools.cache
def loaded_by(*statements: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after the statements."""
    code = "\n".join([*statements, "import sys, json", "print(json.dumps(sorted(sys.modules)))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    return set(json.loads(done.stdout.splitlines()[-1]))


def retrograde_command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """The finished process of `retrograde …`."""
    command = [sys.executable, "-m", "retrograde", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(), timeout=120, check=False)


__all__ = [
    "POLICIES",
    "REPLAYED",
    "ROOT",
    "WIDTH",
    "Attend",
    "Logged",
    "agree",
    "assert_same",
    "draw",
    "environment",
    "every_pair",
    "gradients",
    "linear",
    "loaded_by",
    "loss_of",
    "mlp",
    "mlps",
    "name_of",
    "net_of",
    "parameters",
    "retrograde_command",
    "rg",
    "streams",
]
