"""memory="overlap" on streams that keep time: nobody reads too early, and no memory is given out too early."""

import pytest
import torch
from races import watched
from support import draw, loss_of, mlp, mlps, rg
from test_order import Nested, ReadsTwice
from torch import nn

from retrograde.ahead import Ahead


def program(fns, **how):
    return rg.run(rg.wirings.leapfrog(fns), {"a": draw(), "b": draw()}, memory="overlap", **how)


class OutOfTurn(torch.autograd.Function):
    """Reads what all others of its kind have saved."""

    @staticmethod
    def forward(ctx, x, all_of_them):
        ctx.save_for_backward(x.sin())
        ctx.all = all_of_them
        if not rg.replaying():
            all_of_them.append(ctx)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        for other in ctx.all:
            grad = grad + other.saved_tensors[0]
        return grad, None


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_plain(monkeypatch, arithmetic):
    with watched(monkeypatch):
        loss_of(program(mlps(6), arithmetic=arithmetic)).backward()


def test_nested(monkeypatch):
    with watched(monkeypatch):
        loss_of(program([Nested([Nested(mlps(2), "overlap"), mlp()], "overlap") for _ in range(3)])).backward()


def test_double_backward(monkeypatch):
    fns, a = mlps(4), draw()
    with watched(monkeypatch):
        out = rg.run(rg.wirings.leapfrog(fns), {"a": a, "b": draw()}, memory="overlap")
        (grad,) = torch.autograd.grad(loss_of(out), a, create_graph=True)
        grad.square().sum().backward()


def test_out_of_turn(monkeypatch):
    """A walk that another takes the place of may be at work on the second stream."""
    found, fns = [], mlps(4)
    with watched(monkeypatch):
        loss_of(program([lambda x, fn=fn: OutOfTurn.apply(fn(x), found) for fn in fns])).backward(retain_graph=True)


def test_two_main_streams(monkeypatch):
    """A pass on one stream inside a pass on another: what the second stream of the one gives back, the other may not take."""
    fns = mlps(5)
    updates = [rg.Update(target, fn, source) for target, fn, source in zip("xzzzx", fns, "yxxxy", strict=True)]
    with watched(monkeypatch) as watch:
        out = rg.run(updates, {name: draw() for name in "xyz"}, memory="overlap")
        other = torch.cpu.Stream("other")
        other.wait_stream(watch.main)
        with torch.cpu.stream(other):
            inner = loss_of(program(mlps(3)))

        def inside(_):
            with torch.cpu.stream(other):
                inner.backward()

        fns[0][1].weight.register_hook(inside)
        loss_of(out["x"]).backward()


@pytest.mark.parametrize("method", ["start", "join"])
def test_the_watch_sees(monkeypatch, method):
    """Without the waits there are faults."""
    true = getattr(Ahead, method)

    def deaf(self, *args):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cpu.Stream, "wait_stream", lambda *_: None)
            return true(self, *args)

    monkeypatch.setattr(Ahead, method, deaf)
    with pytest.raises(AssertionError, match="may not have written"), watched(monkeypatch):
        loss_of(program(mlps(4))).backward()


# -- what is edited meanwhile --------------------------------------------------------------------------------------------


def stepped(updates, parameters, seen):
    """The gradients of `seen` with an optimizer that steps the parameters in backward."""
    rg.step_in_backward(torch.optim.SGD(list(parameters), 0.1))
    loss_of([rg.run(updates, {name: draw() for name in "xyz"}, memory="overlap")[name] for name in seen]).backward()


def test_stepped_in_an_update_that_the_loss_does_not_see():
    """f is done with when its last update is, as far as gradients go; but it runs again to recover z, as under "reverse"."""
    f, g = mlp(), mlp()
    updates = [rg.Update("x", lambda y, z: g(y + z), ("y", "z")), rg.Update("z", f, "x"), rg.Update("x", f, "y")]
    with pytest.raises(rg.ReplayError, match=r"update 1.*was changed"):
        stepped(updates, f.parameters(), "x")


def test_stepped_where_it_is_used_without_a_gradient():
    f, g = mlp(), mlp()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = f, g

        def forward(self, x):
            with torch.no_grad():
                y = self.f(x)
            return self.g(x + y)

    with pytest.raises(rg.ReplayError, match=r"update 0.*was changed"):
        stepped([rg.Update("x", Both(), "y"), rg.Update("y", f, "x")], f.parameters(), "xy")


def test_a_side_input_is_edited_meanwhile():
    """One that fn has saved."""
    fns, scale = mlps(3), torch.randn(3, 6, dtype=torch.float64)
    updates = rg.wirings.leapfrog([lambda x, scale, fn=fn: fn(x) * scale for fn in fns], takes=["scale"])
    out = rg.run(updates, {"a": draw(), "b": draw()}, {"scale": scale}, memory="overlap")
    fns[2][1].weight.register_hook(lambda grad: (scale.mul_(2), None)[1])
    with pytest.raises(rg.ReplayError, match="update 1"):
        loss_of(out).backward()


def test_a_fault_that_concerns_nobody():
    """An update that runs ahead and cannot be repeated is no error where its gradient is not asked for."""
    fns = mlps(4)
    loss = loss_of(program(fns))
    with torch.no_grad():
        fns[2][1].weight.mul_(2)
    torch.autograd.grad(loss, list(fns[3].parameters()))


def test_a_walk_that_failed_at_its_end():
    """The lowest update is read twice and fails the second time; the error is kept, and with it the walk."""
    runs = []

    def fn(x):
        if rg.replaying():
            runs.append(1)
            if len(runs) == 2:
                raise ValueError("second run")
        return ReadsTwice.apply(x)

    with pytest.raises(ValueError, match="second run") as kept:
        loss_of(rg.run([rg.Update("a", fn, "b")], {"a": draw(), "b": draw()}, memory="reverse")).backward()
    loss_of(program(mlps(2))).backward()
    del kept
