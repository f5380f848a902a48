"""rg.check.gradients: passes sound nets, finds planted faults and names the update, and leaves everything as it was."""

import random

import pytest
import torch
from support import REPLAYED, WIDTH, Attend, draw, mlp, mlps, rg
from torch import nn


class Normed(nn.Module):
    """BatchNorm and dropout; the gradient of the bias before the norm is zero, but for rounding."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.double()

    def forward(self, x):
        return self.drop(self.norm(self.linear(x)).tanh())


class Counted(nn.Module):
    """Puts a new tensor into its buffer at every call."""

    def __init__(self):
        super().__init__()
        self.fn = mlp()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.fn(x) * (1 + 1 / self.calls)


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.fn, self.generator = mlp(), torch.Generator()

    def forward(self, x):
        return self.fn(x) * torch.rand(WIDTH, generator=self.generator)


def between_layers():
    """A model that is more than its reversible part."""
    net = rg.ReversibleSequence([mlps(2, dropout=0.2) for _ in range(3)], split="chunk", merge="cat")
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH), net, nn.Dropout(0.2), nn.Linear(2 * WIDTH, 1)
    ).double()


def streams():
    return {"a": draw(4, WIDTH), "b": draw(4, WIDTH)}


SOUND = {
    "pair": lambda: (rg.ReversibleSequence([mlps(2) for _ in range(4)]), [draw()], {}),
    "float32": lambda: (rg.ReversibleSequence([mlps(2) for _ in range(4)]).float(), [draw().detach().float()], {}),
    "dropout": lambda: (rg.ReversibleSequence([mlps(2, dropout=0.3) for _ in range(4)]), [draw()], {}),
    "BatchNorm": lambda: (rg.Reversible(rg.wirings.leapfrog([Normed() for _ in range(4)])), [streams()], {}),
    "a buffer that is replaced": lambda: (rg.Reversible(rg.wirings.leapfrog([Counted() for _ in range(3)])), [streams()], {}),
    "a generator that fn holds": lambda: (rg.Reversible(rg.wirings.leapfrog([Noisy() for _ in range(3)])), [streams()], {}),
    "context and mask": lambda: (
        rg.ReversibleSequence([(Attend(), mlp()) for _ in range(3)]),
        [draw(2, 3, WIDTH)],
        {"context": draw(2, 5, WIDTH, grad=False), "mask": torch.rand(3, 5) > 0.3},
    ),
    "frozen": lambda: (rg.ReversibleSequence([mlps(2) for _ in range(3)]).requires_grad_(False), [draw()], {}),
    "between other layers": lambda: (between_layers(), [draw(8, WIDTH)], {}),
    "a program in a program": lambda: (
        rg.ReversibleSequence([(rg.ReversibleSequence([mlps(2, dropout=0.1)] * 2), mlp()) for _ in range(2)]),
        [draw()],
        {},
    ),
    "eval": lambda: (between_layers().eval(), [draw(8, WIDTH)], {}),
}


def snapshot(net, inputs):
    state = {name: t.clone() for name, t in net.state_dict().items()} | {"rng": torch.get_rng_state()}
    grads = [p.grad for p in net.parameters()] + [t.grad for t in torch.utils._pytree.tree_leaves(inputs)]
    flags = [(m.training, getattr(m, "memory", None)) for m in net.modules()]
    return state, (grads, flags, random.getstate(), torch.is_grad_enabled())


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("case", SOUND)
def test_sound_nets_pass_and_nothing_is_changed(case, memory):
    net, inputs, side = SOUND[case]()
    for module in net.modules():
        if hasattr(module, "memory"):
            module.memory = memory
    state, others = snapshot(net, inputs)
    report = rg.check.gradients(net, *inputs, **side)
    assert report.ok, str(report)
    assert "agree with memory='store'" in str(report)
    assert report.first is None
    wanted = [name for name, p in net.named_parameters() if p.requires_grad]
    assert set(wanted) < set(report.errors), "parameters and inputs are compared"
    now, others_now = snapshot(net, inputs)
    assert now.keys() == state.keys()
    assert [name for name in state if not torch.equal(now[name], state[name])] == []
    assert others_now == others


class Fault(nn.Module):
    """A branch that does not do the same twice."""

    def __init__(self, kind):
        super().__init__()
        self.fn, self.kind, self.calls, self.cache = mlp(), kind, 0, None

    def forward(self, x):
        self.calls += 1
        if self.kind == "a cache":
            self.cache = self.fn(x) if self.cache is None else self.cache
            return self.cache
        y = self.fn(x)
        match self.kind:
            case "python random":
                return y * random.random()
            case "a call counter":
                return y * self.calls
            case "a constant that moves":
                return y.detach() * self.calls + y
            case "another path":
                return y.tanh() if self.calls % 2 else y
            case "an edited source":
                x.detach().add_(1)
            case "an edit of what it saved":
                return y.sigmoid().mul_(2)
        return y


FAULTS = {
    "python random": "random or stateful",
    "a call counter": "random or stateful",
    "a constant that moves": "random or stateful",
    "a cache": "did not do in backward what it did in the forward pass",
    "another path": "did not do in backward what it did in the forward pass",
    "an edited source": "edited its source",
    "an edit of what it saved": "changed in place",
}


@pytest.mark.parametrize("where", [0, 2, 5])
@pytest.mark.parametrize(
    ("kind", "memory"),  # checkpoint undoes nothing, so a constant does no harm there
    [(kind, memory) for kind in FAULTS for memory in REPLAYED if (kind, memory) != ("a constant that moves", "checkpoint")],
)
def test_planted_faults_are_found(kind, where, memory):
    """And the update is named, though the fault spoils the gradients of all updates below it."""
    fns = mlps(6)
    fns[where] = Fault(kind)
    net = rg.Reversible(rg.wirings.leapfrog(fns), memory=memory)
    inputs = [streams()]
    state, others = snapshot(net, inputs)
    report = rg.check.gradients(net, *inputs)
    assert not report.ok
    name = f"update {where}: " + ("b += Fault(a)" if where % 2 else "a += Fault(b)")
    assert report.first == name, str(report)
    assert name in str(report)
    assert FAULTS[kind] in report.cause
    assert report.cause in str(report)
    now, others_now = snapshot(net, inputs)
    assert all(torch.equal(now[key], state[key]) for key in state)
    assert others_now[1] == others[1]


def test_a_fault_inside_a_larger_model():
    net = between_layers()
    net[2].blocks[1].g = Fault("a call counter")
    report = rg.check.gradients(net, draw(8, WIDTH))
    assert not report.ok
    assert report.first == "update 3: x2 += Fault(x1)"
    assert "random or stateful" in report.cause
    assert report.worst > 1e-3


def test_a_wrong_rule_is_found():
    """An undo that is not the inverse of apply: the updates below it see other sources."""

    class Wrong(rg.Add):
        def undo(self, target, out):
            return super().undo(target, out * 1.01)

    updates = rg.wirings.leapfrog(mlps(4))
    updates[2] = rg.Update("a", mlp(), "b", rule=Wrong())
    report = rg.check.gradients(rg.Reversible(updates), streams())
    assert not report.ok
    assert report.first == "update 1: b += Sequential(a)"
    assert "recovered" in report.cause


def test_a_net_without_a_program():
    with pytest.raises(rg.ProgramError, match=r"Linear contains no rg\.Reversible"):
        rg.check.gradients(nn.Linear(2, 2), torch.ones(2))


def test_an_exception_is_passed_on_and_the_policy_is_back():
    net = rg.ReversibleSequence([mlps(2)], memory="checkpoint")
    with pytest.raises(RuntimeError):
        rg.check.gradients(net, draw(3, WIDTH + 1))
    assert net.memory == "checkpoint"
    assert rg.check.gradients(net, draw()).ok
