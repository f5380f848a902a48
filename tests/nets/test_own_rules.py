"""Invertible functions of one's own against the same equations by hand."""

import copy

import pytest
import torch
from rules_support import Halves, Turn, every_policy
from support import POLICIES, REPLAYED, WIDTH, assert_same, draw, gradients, loss_of, mlp, rg
from torch import nn

# -- functions of one's own --------------------------------------------------------------------------------------------


class Squeeze(nn.Module):
    """Changes the shape."""

    def forward(self, x):
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)[:, None]

    def inverse(self, y):
        return y[:, 0].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


@every_policy
def test_invertible_that_changes_the_shape(memory):
    turn, squeeze, f = Turn(), Squeeze(), mlp()
    streams = {"x": draw(), "v": draw()}

    def by_hand():
        v = streams["v"] + f(turn(streams["x"]))
        x = squeeze(turn(streams["x"]))
        return {"x": x, "v": v}

    updates = [*rg.wirings.invertible(turn), rg.Update("v", f, "x"), *rg.wirings.invertible(squeeze)]
    wanted = [*streams.values(), turn.weight, *f.parameters()]
    assert_same(gradients(lambda: rg.run(updates, streams, memory=memory), wanted), gradients(by_hand, wanted))


@every_policy
def test_invertible_by_two_functions(memory):
    """On a tuple, by functions that hold a module."""
    turn = Turn()
    streams = {"x": (draw(), draw())}

    def forward(x):
        return x[1], turn(x[0])

    def inverse(y):
        return turn.inverse(y[1]), y[0]

    updates = rg.wirings.invertible(forward, inverse) * 3
    wanted = [*streams["x"], turn.weight]

    def by_hand():
        return {"x": forward(forward(forward(streams["x"])))}

    assert_same(gradients(lambda: rg.run(updates, streams, memory=memory), wanted), gradients(by_hand, wanted))
    assert str(updates[0]) == "x <- forward()"


def test_buffers_of_an_invertible_function_move_once():
    class Counting(Turn):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x, *others, context=None):
            self.calls += 1
            return super().forward(x, *others, context=context)

    turn = Counting()
    for memory in ("store", *POLICIES):
        loss_of(rg.run(rg.wirings.invertible(turn), {"x": draw()}, memory=memory)).backward()
    assert turn.calls == 1 + len(POLICIES)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)

    def inverse(self, y):
        return y - torch.randn_like(y)


def test_random_numbers_in_a_rule():
    """Undoing would draw others. Under checkpoint nothing is undone."""
    updates = [*rg.wirings.invertible(Noisy()), *rg.wirings.invertible(Turn())]
    for memory in ("reverse", rg.Anchor(1), rg.Budget(1)):
        with pytest.raises(rg.ProgramError, match=r"update 0: x <- Noisy\(\): the rule draws random numbers.*checkpoint"):
            rg.run(updates, {"x": draw()}, memory=memory)
    x = draw()
    found = [gradients(lambda memory=memory: rg.run(updates, {"x": x}, memory=memory), [x]) for memory in ("store", "checkpoint")]
    assert_same(*found)


def test_an_inverse_that_is_none_is_found():
    turn = Turn()
    updates = rg.wirings.invertible(turn, lambda y, **_: turn.inverse(y) * 1.01) + rg.wirings.invertible(Turn())
    report = rg.check.gradients(rg.Reversible(updates), {"x": draw()})
    assert not report.ok
    assert report.cause.startswith("wrong rule: undo of its rule Invertible misses")
    assert "wrong rule" in [finding.kind for finding in report.findings]


def test_invertible_that_edits_in_place():
    updates = rg.wirings.invertible(lambda x: x.mul_(2), lambda y: y / 2)
    for memory in ("store", *REPLAYED):
        with pytest.raises(rg.ProgramError, match=r"update 0: .*in place"):
            rg.run(updates, {"x": draw() * 1}, memory=memory)


def test_a_parameter_of_an_invertible_function_that_was_changed():
    turn = Turn()
    out = rg.run(rg.wirings.invertible(turn), {"x": draw()})
    with torch.no_grad():
        turn.weight.mul_(2)
    with pytest.raises(rg.ReplayError, match=r"update 0: x <- Turn\(\): .*changed between"):
        loss_of(out).backward()


def test_refusals():
    for given in ((nn.Linear(2, 2),), (nn.Tanh(), None), (Turn,), (3, 4)):
        with pytest.raises(rg.ProgramError, match="a function and its inverse"):
            rg.wirings.invertible(*given)
    with pytest.raises(rg.ProgramError, match="no sources"):
        rg.Update("x", mlp(), ())
    with pytest.raises(rg.ProgramError, match=r"update 0: .*additions and momentum.*Invertible"):
        rg.run(rg.wirings.invertible(Turn()), {"x": draw()}, arithmetic="exact")
    with pytest.raises(rg.ProgramError, match=r"update 0: .*additions and momentum.*Affine"):
        rg.run([rg.Update("a", Halves(), "b", rule=rg.Affine())], {"a": draw(), "b": draw()}, arithmetic="exact")
    error = None
    try:
        rg.run(rg.wirings.invertible(Turn()), {"x": draw(3, WIDTH + 1)})
    except RuntimeError as raised:
        error = raised
    assert error.__notes__ == ["raised by the rule of update 0: x <- Turn()"]


def test_an_inverse_that_edits_in_place():
    """It would edit the output of the net, and the streams that all below is recovered from."""
    f = mlp()

    def inverse_of_sources(y, v):
        return y - v.mul_(2) / 2

    for inverse, forward, sources in [(lambda y: y.sub_(1), lambda x: x + 1, ()), (inverse_of_sources, torch.add, "v")]:
        updates = [rg.Update("v", f, "x"), *rg.wirings.invertible(forward, inverse, sources=sources), rg.Update("v", f, "x")]
        out = rg.run(updates, {"x": draw(), "v": draw()})
        with pytest.raises(rg.ProgramError, match=r"update 1: x <- .*undo of the rule edited.*in place.*copy"):
            loss_of(out).backward()
        loss_of(rg.run(updates, {"x": draw(), "v": draw()}, memory="checkpoint")).backward()


class Spectral(nn.Module):
    """Forward and inverse both move the buffer that their matrix depends on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.register_buffer("u", torch.randn(WIDTH, dtype=torch.float64))

    def matrix(self):
        with torch.no_grad():
            v = nn.functional.normalize(self.weight.T @ self.u, dim=0)
            self.u.copy_(nn.functional.normalize(self.weight @ v, dim=0))
        return torch.eye(WIDTH, dtype=torch.float64) + 0.5 * self.weight / (self.u.clone() @ self.weight @ v)

    def forward(self, x):
        return x @ self.matrix()

    def inverse(self, y):
        return y @ self.matrix().inverse()


@pytest.mark.parametrize("memory", REPLAYED)
def test_an_inverse_that_moves_buffers(memory):
    """Forward is run again with the buffers that it found at first, and not with those that the inverse has left."""
    one, f = Spectral(), mlp()
    other, streams = copy.deepcopy(one), {"x": draw(), "v": draw()}

    def of(module, memory):
        updates = [*rg.wirings.invertible(module), rg.Update("v", f, "x"), *rg.wirings.invertible(module)]
        return gradients(lambda: rg.run(updates, streams, memory=memory), [*streams.values(), module.weight])

    assert_same(of(one, memory), of(other, "store"))
    assert torch.equal(one.u, other.u)


def test_what_is_no_tensor():
    for memory in ("store", *REPLAYED):
        with pytest.raises(rg.ProgramError, match=r"update 0: x <- .*apply of the rule returned a NoneType.*forward"):
            rg.run(rg.wirings.invertible(lambda x: None, lambda y: y), {"x": draw()}, memory=memory)
    updates = [rg.Update("v", mlp(), "x"), *rg.wirings.invertible(torch.sinh, lambda y: None)]
    with pytest.raises(rg.ProgramError, match=r"update 1: x <- sinh\(\): undo of the rule returned a NoneType.*inverse"):
        loss_of(rg.run(updates, {"x": draw(), "v": draw()})).backward()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e13), (torch.float64, 3e9)])
def test_the_inverse_of_momentum_far_beyond_the_range(dtype, size):
    """More than an int64 holds on the grid: an error, and no zeros."""
    streams = {"x": torch.ones(3, dtype=dtype), "v": torch.zeros(3, dtype=dtype)}
    with pytest.raises(rg.OutOfRange, match="the stream 'v' left the range of exact arithmetic"):
        rg.invert(rg.wirings.momentum(lambda x: x * size), streams)


def test_affine_refusals():
    for limit in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(rg.ProgramError, match="limit must be a positive number"):
            rg.Affine(limit=limit)
    whole = torch.arange(18).reshape(3, 6)
    with pytest.raises(rg.ProgramError, match=r"update 0: .*the affine rule is for streams of floating point"):
        rg.run([rg.Update("a", lambda b: (b, b), "b", rule=rg.Affine(log=False))], {"a": whole, "b": whole})
