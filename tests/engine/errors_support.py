"""What these tests share."""

import contextlib

import pytest
import torch
from support import WIDTH, assert_same, draw, gradients, loss_of, rg
from torch import nn


class Branch(nn.Module):
    """A sound branch with dropout, BatchNorm and a table, until it is given a `fault`."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.25)
        self.register_buffer("table", torch.rand(1, WIDTH) + 1)
        self.fault = None
        self.double()

    def forward(self, x, context=None):
        y = self.drop(self.linear(self.norm(x)).tanh() * self.table)
        y = y if context is None else y * context
        if self.fault is None:
            return y
        y = self.fault(x, y, context)
        return y.sin() if isinstance(y, torch.Tensor) and y.is_floating_point() else y  # saves a tensor: checkpoint stops here


class Net(rg.Reversible):
    """x1 and x2 change in turn; `faulty` is the fn of the fourth of six updates."""

    NAME = "update 3: x2 += Branch(x1)"

    def __init__(self, memory, fault=None):
        super().__init__(rg.wirings.leapfrog([Branch() for _ in range(6)], streams=("x1", "x2"), takes="context"), memory=memory)
        self.faulty = self.fns[3]
        self.faulty.fault = fault
        self.streams, self.context = {"x1": draw(), "x2": draw()}, draw()

    def run(self):
        return self(self.streams, context=self.context)

    def loss(self):
        return loss_of(self.run())


def situation(net):
    """Everything that a failure must leave alone."""
    state = [torch.get_rng_state(), *(t.clone() for t in net.state_dict().values())]
    flags = [m.training for m in net.modules()] + [p.requires_grad for p in net.parameters()]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), rg.replaying(), hooks]
    slots = [id(t) for m in net.modules() for t in (*m._parameters.values(), *m._buffers.values())]
    return state, (flags, modes, slots)


def message_of(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@contextlib.contextmanager
def refused(kind, *words, net=None):
    """The block fails with just that kind of error and all of the words; the net is as it was."""
    tensors, others = situation(net) if net is not None else ([], ())
    with pytest.raises(kind) as info:
        yield info
    assert issubclass(info.type, kind)
    message = message_of(info.value)
    for word in words:
        assert word in message, f"{word!r} is missing in {message!r}"
    if net is not None:
        tensors_now, others_now = situation(net)
        assert all(map(torch.equal, tensors_now, tensors)), "RNG, a parameter or a buffer was changed"
        assert others_now == others


def assert_next_step_is_right(net):
    """With the fault gone, the same net agrees with store."""
    net.faulty.fault, policy = None, net.memory
    net.streams, net.context = {"x1": draw(), "x2": draw()}, draw()
    found = []
    for memory in (policy, "store"):
        net.memory = memory
        found.append(gradients(net.run, [*net.streams.values(), net.context, *net.parameters()]))
    net.memory = policy
    assert_same(*found)


# -- fn edits what is not its own --------------------------------------------------------------------------------------


def edit(t):
    with torch.no_grad():
        t.add_(1)
