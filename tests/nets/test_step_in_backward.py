"""rg.step_in_backward against ordinary stepping: the same weights, no gradients that pile up, and what it refuses."""

import copy
import gc
import weakref

import pytest
import torch
from support import rg
from torch import nn
from torch.utils.checkpoint import checkpoint

from retrograde.bench.meter import LiveBytes
from retrograde.models.language import Language

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
}


class Tied(nn.Module):
    """A reversible net with a block used twice, between an embedding and a head of the same weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 8))
        block = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))
        self.net = rg.ReversibleSequence([block, (nn.Linear(8, 8), nn.Linear(8, 8)), block])

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.net(self.weight[tokens]) @ self.weight.T, tokens.roll(1))


def trained(model, make, inside, steps=4):
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    stepping = rg.step_in_backward(optimizer) if inside else None
    for i in range(steps):
        torch.manual_seed(i)
        optimizer.zero_grad()
        model(torch.randint(11, (20,))).backward()
        if stepping is None:
            optimizer.step()
        schedule.step()
    return optimizer


@pytest.mark.parametrize("memory", ["store", "checkpoint", "reverse"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_equals_ordinary_stepping(make, memory):
    """Tied weights and a shared block included: each parameter steps once, with its whole gradient."""
    one = Tied()
    other = copy.deepcopy(one)
    start = copy.deepcopy(one.state_dict())
    one.net.memory = other.net.memory = memory
    a, b = trained(one, make, inside=False), trained(other, make, inside=True)
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert not torch.equal(p, start[name])
        assert q.grad is None
    kept, found = a.state_dict()["state"], b.state_dict()["state"]
    assert kept.keys() == found.keys()
    for i, x in kept.items():
        assert x.keys() == found[i].keys()
        assert all(torch.equal(torch.as_tensor(x[key]), torch.as_tensor(found[i][key])) for key in x)


def test_gradients_do_not_pile_up():
    def peak(inside, depth):
        torch.manual_seed(0)
        model = Language(depth, width=32, heads=2, context=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if inside:
            rg.step_in_backward(optimizer)
        tokens = torch.randint(256, (1, 9))
        with LiveBytes() as meter:
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        return meter.peak

    assert peak(inside=True, depth=12) < 1.02 * peak(inside=True, depth=4)
    grown = peak(inside=False, depth=12) - peak(inside=False, depth=4)
    assert grown > 8 * 4 * 11 * 32**2  # the gradients of eight more blocks


def optimized(**options):
    net = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(net.parameters(), **options)
    return net, optimizer, rg.step_in_backward(optimizer)


def test_clipping_loops_are_refused():
    net, optimizer, _ = optimized()
    net(torch.ones(1, 3)).sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with pytest.raises(rg.ProgramError, match="clipping by the global norm"):
        optimizer.step()


def test_accumulation_is_refused():
    net, optimizer, _ = optimized()
    net(torch.ones(1, 3)).sum().backward()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(rg.ProgramError, match="Accumulation over several backward passes"):
        net(torch.ones(1, 3)).sum().backward()
    assert all(torch.equal(before[name], p) for name, p in net.state_dict().items())
    optimizer.zero_grad()
    net(torch.ones(1, 3)).sum().backward()


def test_gradients_that_were_there_are_refused():
    net = nn.Linear(3, 3)
    net(torch.ones(1, 3)).sum().backward()
    with pytest.raises(rg.ProgramError, match="there are gradients already"):
        rg.step_in_backward(torch.optim.AdamW(net.parameters()))


def test_parameters_shared_by_backward_passes_are_refused():
    """Reentrant checkpoints run a backward pass each, so that a shared weight gets its gradient in pieces."""
    net, _, _ = optimized()
    x = torch.ones(1, 3, requires_grad=True)
    loss = checkpoint(net, checkpoint(net, x, use_reentrant=True), use_reentrant=True).sum()
    with pytest.raises(rg.ProgramError, match="parameters shared between them"):
        loss.backward()


def test_parameters_shared_by_optimizers_are_refused():
    net, _, stepping = optimized()
    with pytest.raises(rg.ProgramError, match="Shared parameters belong to one optimizer"):
        rg.step_in_backward(torch.optim.SGD(net.parameters()))
    stepping.remove()
    with rg.step_in_backward(torch.optim.SGD(net.parameters(), lr=0.1)):
        net(torch.ones(1, 3)).sum().backward()
    assert net.weight.grad is None


def test_remove_gives_the_optimizer_back():
    net, optimizer, stepping = optimized()
    stepping.remove()
    net(torch.ones(1, 3)).sum().backward()
    assert net.weight.grad is not None
    before = net.weight.clone()
    optimizer.step()
    assert not torch.equal(before, net.weight)
    optimizer.zero_grad(set_to_none=False)
    assert net.weight.grad is not None


def test_what_cannot_step_alone_is_refused():
    net = nn.Linear(3, 3)
    with pytest.raises(rg.ProgramError, match="LBFGS"):
        rg.step_in_backward(torch.optim.LBFGS(net.parameters()))

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group["count"] + 1000
            return super().step(closure)

    rg.step_in_backward(Counting([{"params": list(net.parameters()), "count": 1000}]))
    with pytest.raises(rg.ProgramError, match="Counting changes its groups"):
        net(torch.ones(1, 3)).sum().backward()


def test_a_parameter_that_a_later_recomputation_needs():
    """It is read without a gradient further down: by then it has stepped, which changes what fn returns."""
    first = nn.Linear(4, 4)
    net = rg.ReversibleSequence([(nn.Linear(4, 4), lambda x: x * first.weight.detach().sum() + x.sin()), (first, nn.Tanh())])
    rg.step_in_backward(torch.optim.SGD([*net.parameters()], lr=1.0))
    with pytest.raises(rg.ReplayError, match="returned something else than in the forward pass"):
        net(torch.randn(2, 4, requires_grad=True)).sum().backward()


def test_what_is_no_optimizer():
    with pytest.raises(rg.ProgramError, match="takes an optimizer of torch, got a Linear"):
        rg.step_in_backward(nn.Linear(2, 2))


def test_a_scaled_loss_is_noticed_when_the_scaler_steps():
    net = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu")
    with rg.step_in_backward(optimizer):
        scaler.scale(net(torch.ones(2, 4)).sum()).backward()
        with pytest.raises((AssertionError, rg.ProgramError)):
            scaler.step(optimizer)


def test_a_scaler_of_another_loop_is_left_alone():
    other = nn.Linear(4, 4)
    scaler, theirs = torch.amp.GradScaler("cpu"), torch.optim.SGD(other.parameters(), 0.1)
    net = nn.Linear(4, 4)
    with rg.step_in_backward(torch.optim.SGD(net.parameters(), 0.1)):
        scaler.scale(other(torch.ones(2, 4)).sum()).backward()
        before = net.weight.detach().clone()
        net(torch.ones(2, 4)).sum().backward()
        assert not torch.equal(before, net.weight)
        scaler.step(theirs)
        scaler.update()


class Shifted(nn.Module):
    """Ends in a trainable addition: the gradient of the shift is there before anything of this function is recomputed."""

    def __init__(self, shift=None):
        super().__init__()
        self.linear, self.shift = nn.Linear(4, 4), nn.Parameter(torch.rand(4)) if shift is None else shift

    def forward(self, x):
        return self.linear(x).tanh() + self.shift


class Within(Shifted):
    """A program inside, and a shift after it."""

    def __init__(self, shift=None):
        super().__init__(shift)
        self.linear = rg.ReversibleSequence([(Shifted(shift), Shifted(shift)) for _ in range(2)])


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", rg.StoreLast(3), rg.Budget(2000)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", [Shifted, Within])
def test_a_function_that_ends_in_a_trainable_addition(kind, shared, memory):
    """The step waits until nothing needs the parameter any more; after backward nothing waits."""
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        shift = nn.Parameter(torch.rand(4)) if shared else None
        net = rg.Reversible(rg.wirings.leapfrog([kind(shift) for _ in range(6)]), memory=memory).double()
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        stepping = rg.step_in_backward(optimizer) if inside else None
        for _ in range(3):
            optimizer.zero_grad()
            out = net({name: torch.randn(3, 4, dtype=torch.float64) for name in "ab"})
            sum(t.sin().sum() for t in out.values()).backward()
            if stepping is None:
                optimizer.step()
            else:
                assert not stepping._waiting
                assert all(p.grad is None for p in net.parameters())
        results.append([p.detach() for p in net.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_hooks_that_step_too_early_are_reported():
    net = rg.Reversible(rg.wirings.leapfrog([Shifted() for _ in range(4)]))

    def step(p):
        with torch.no_grad():
            p.sub_(0.1 * p.grad)
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    with pytest.raises(rg.ReplayError, match=r"the parameter 'shift' .* use rg.step_in_backward: it waits"):
        sum(t.sum() for t in net({name: torch.randn(3, 4) for name in "ab"}).values()).backward()


@pytest.mark.parametrize("kept", [True, False])
def test_nothing_outlives_the_model(kept):
    """The collector does not look into post-accumulate hooks: one that holds its optimizer would hold the parameters for ever."""

    def trained_once():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        stepping = rg.step_in_backward(optimizer)
        if not kept:  # it goes on stepping
            del stepping, optimizer
            gc.collect()
        before = model.weight.detach().clone()
        model(torch.ones(2, 4)).sum().backward()
        assert not torch.equal(before, model.weight)
        return weakref.ref(model.weight)

    weight = trained_once()
    gc.collect()
    assert weight() is None
