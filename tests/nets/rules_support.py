"""What these tests share."""

import pytest
import torch
from support import POLICIES, WIDTH, mlp
from torch import nn
from torch.nn.functional import leaky_relu

every_policy = pytest.mark.parametrize("memory", ["store", *POLICIES], ids=str)


class Halves(nn.Module):
    """A pair of the size of its input, from one net; and a context beside."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net, self.out, self.mix = mlp(dropout=dropout), nn.Linear(WIDTH, 2 * WIDTH).double(), nn.Linear(4, WIDTH).double()

    def forward(self, x, context=None):
        x = x if context is None else x + self.mix(context).tanh()
        scale, shift = self.out(self.net(x)).chunk(2, -1)
        return scale, shift


class Turn(nn.Module):
    """An invertible function of its own: a matrix, a nonlinearity, and what another stream and a context say."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64) + 0.1 * torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.mix = mlp()

    def shift(self, others, context):
        total = sum((self.mix(o) for o in others), start=torch.zeros((), dtype=torch.float64))
        return total if context is None else total + context.mean(-1, keepdim=True)

    def forward(self, x, *others, context=None):
        return leaky_relu(x @ self.weight, 0.5) + self.shift(others, context)

    def inverse(self, y, *others, context=None):
        return leaky_relu(y - self.shift(others, context), 2.0) @ self.weight.inverse()
