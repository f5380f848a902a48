"""What these tests share."""

import copy

import torch
from support import WIDTH, assert_same, loss_of, mlp, rg
from torch import nn

DEPTH = 2


class Average(nn.Module):
    """Scales by a running average of its input, which it updates first. `kind` says how the average is kept.

    Autograd saves a copy of it, since ordinary autograd refuses an edit of what it saved; or itself for "saved".
    """

    def __init__(self, kind, rows=None):
        super().__init__()
        self.kind, self.fn = kind, mlp()
        start = torch.full((WIDTH,) if rows is None else (rows, WIDTH), 2.0, dtype=torch.float64)
        self.register_buffer("average", None if kind == "none" else start)
        if kind == "two names":
            self.fn.register_buffer("alias", self.average)

    def forward(self, x):
        with torch.no_grad():
            mean = x.abs().mean(0)
            if self.average is None:
                self.average = mean
            elif self.kind in ("replaced", "none"):
                self.average = 0.7 * self.average + 0.3 * mean
            elif self.kind == "data":
                self.average.data.mul_(0.7).add_(mean, alpha=0.3)
            else:
                self.average.mul_(0.7).add_(mean, alpha=0.3)
        average = self.fn.alias if self.kind == "two names" else self.average
        average = average if self.kind == "saved" else average.clone()
        return self.fn(x) * (average if average.dim() == 1 else average[-1])


class ByHand(nn.Module):
    """The equations of a ReversibleSequence, and its state-dict keys."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        x1, x2 = x, x
        for block in self.blocks:
            x1 = x1 + block.f(x2)
            x2 = x2 + block.g(x1)
        return (x1 + x2) / 2


def sequence(make):
    return rg.ReversibleSequence([(make(), make()) for _ in range(DEPTH)])


def as_(how, net):
    """A copy of net (or what it makes) under a policy, or by hand."""
    net = copy.deepcopy(net) if isinstance(net, nn.Module) else net()
    if how == "hand":
        return ByHand(net.blocks)
    net.memory = how
    return net


def tensors(state):
    return [t for t in state.values() if t.is_floating_point()]


def counts(state):
    return {name: t for name, t in state.items() if not t.is_floating_point()}


def train(net, batches, forwards=1, rate=0.05):
    """Some steps of SGD, each with that many forward passes before as many backwards. All gradients, and the state."""
    optimizer = None
    grads = []
    for batch in batches:
        torch.manual_seed(len(grads))
        xs = [(batch + i).detach().requires_grad_() for i in range(forwards)]
        losses = [loss_of(net(x)) for x in xs]
        optimizer = optimizer or torch.optim.SGD(net.parameters(), rate)  # lazy parameters exist now
        optimizer.zero_grad()
        state = {k: t.clone() for k, t in net.state_dict().items()}
        for loss in losses:
            loss.backward()
        for k, t in net.state_dict().items():  # backward moved nothing, to the bit
            assert torch.equal(t, state[k]), k
        grads += [x.grad for x in xs] + [p.grad.clone() for p in net.parameters() if p.requires_grad and p.grad is not None]
        optimizer.step()
    return grads, net.state_dict()


def compare(net, memory, batches, forwards=1):
    """Gradients and state of a net after training, against store and the equations by hand."""
    found, state = train(as_(memory, net), batches, forwards)
    for oracle in ("store", "hand"):
        true, true_state = train(as_(oracle, net), batches, forwards)
        assert_same(found, true)
        assert state.keys() == true_state.keys()
        assert_same(tensors(state), tensors(true_state))
        for name, t in counts(true_state).items():
            assert torch.equal(state[name], t), name
    return state
