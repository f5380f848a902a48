"""Ordinary layers with reversible noise, and one way to compare their training under two policies."""

import contextlib

import torch
from support import loss_of, rg
from torch import nn
from torch.utils._pytree import tree_leaves

WIDTH, ROWS = 6, 4
POLICIES = ["checkpoint", "reverse", rg.Anchor(3), rg.StoreLast(2), rg.Budget(20_000)]
SETTINGS = {  # dtype of the net and its input, dtype of autocast
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "float64": (torch.float64, None),
    "autocast": (torch.float32, torch.bfloat16),
}


class Layer(nn.Module):
    """x = layer(x), with dropout; it may take a gain. What it is given and what it draws are written down."""

    def __init__(self, width=WIDTH, dropout=0.2):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop, self.seen, self.seen_again = nn.Dropout(dropout), [], []

    def forward(self, x, gain=None):
        (self.seen_again if rg.replaying() else self.seen).append(x.detach().clone())
        hidden = self.up(self.norm(x)).tanh()
        return x + self.drop(self.down(hidden if gain is None else hidden * gain))


def sequential(depth=6, setting="float32", make=Layer, **options):
    torch.manual_seed(0)
    return rg.Sequential([make() for _ in range(depth)], **options).to(SETTINGS[setting][0])


def draw(*shape, setting="float32"):
    return torch.randn(*(shape or (ROWS, WIDTH))).to(SETTINGS[setting][0]).requires_grad_()


def amp(setting):
    dtype = SETTINGS[setting][1]
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def gradients(net, x, setting="float32", **side):
    """Outputs, and gradients of the input, of side inputs and of parameters, always from the same random state."""
    wanted = [t for t in (*tree_leaves((x, side)), *net.parameters()) if t.requires_grad]
    torch.manual_seed(1)
    with amp(setting):
        out = net(x, **side)
    found = torch.autograd.grad(loss_of([t.double() for t in tree_leaves(out)]), wanted)
    return [*(t.detach() for t in tree_leaves(out)), *found]


def assert_equal(found, true):
    """To the bit, and there is something to compare."""
    found, true = list(found), list(true)
    assert len(found) == len(true)
    assert any(bool(t.any()) for t in true)
    for i, (a, b) in enumerate(zip(found, true, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"tensor {i} of shape {tuple(a.shape)} differs by {(a - b).abs().max():.1e}"
