"""memory="overlap": the next update runs again beside the gradients of the present one, on a second stream."""

from types import SimpleNamespace

import pytest
import torch
from support import WIDTH, assert_same, draw, gradients, loss_of, mlp, mlps, parameters, rg
from test_capture import assert_replays
from test_memory import assert_flat, bottle, plain, saved_by
from test_order import NAMES, Net, ReadsTwice, runs
from torch import nn

from retrograde import ahead
from retrograde.ahead import Ahead, lane_on


def test_order():
    """Each fn runs again just before the gradient of the one above it."""
    net = Net("overlap")
    out = net.forward()
    assert net.log == NAMES
    assert net.backward(out) == ["g2 again", "f2 again", "g2 back", "g1 again", "f2 back", "f1 again", "g1 back", "g0 again",
                                 "f1 back", "f0 again", "g0 back", "f0 back"]  # fmt: skip


def test_nothing_runs_ahead_of_the_lowest():
    net = Net("overlap")
    for name in ("f0", "g0", "f1"):
        net.fns[name].requires_grad_(False)
    net.inputs = {name: t.detach() for name, t in net.inputs.items()}
    assert net.backward(net.forward()) == ["g2 again", "f2 again", "g2 back", "g1 again", "f2 back"]


def test_a_stored_update_needs_no_run():
    """One whose parameters were made in its first run is kept; the update below it runs ahead all the same."""
    net = Net("overlap", f1=nn.LazyLinear(WIDTH).double())
    assert net.backward(net.forward()) == ["g2 again", "f2 again", "g2 back", "g1 again", "f2 back", "g1 back", "g0 again",
                                           "f1 back", "f0 again", "g0 back", "f0 back"]  # fmt: skip


@pytest.mark.parametrize("kinds", [("cuda",), ()])
def test_without_streams_it_is_reverse(kinds, monkeypatch):
    monkeypatch.setattr(ahead, "KINDS", kinds)
    net = Net("overlap")
    assert net.backward(net.forward()) == runs(*reversed(NAMES))


def test_sharded_functions_are_in_turn():
    """FSDP gathers parameters for the gradients of one module at a time."""

    class Sharded(nn.Linear):
        def _get_fsdp_state(self):
            return SimpleNamespace(_mp_policy=SimpleNamespace(param_dtype=None))

    net = Net("overlap", f1=Sharded(WIDTH, WIDTH).double())
    assert net.backward(net.forward()) == runs(*reversed(NAMES))


def test_one_device_alone():
    cpu, meta, first, second = (torch.device(name) for name in ("cpu", "meta", "cuda:0", "cuda:1"))
    assert lane_on([first]) == first
    assert lane_on([first, first]) == first
    assert [lane_on(devices) for devices in ([first, second], [first, cpu], [meta], [])] == [None] * 4


def test_flat():
    """What a second fn saves is all that it costs, and what the first saved until its gradients are done."""
    fn = bottle()
    bound = 2 + 2 + 2 * saved_by(fn) + 1
    assert assert_flat(plain(fn, "overlap"), 8, 64) <= 1.01 * (bound + 1)


def test_a_value_is_asked_for_twice():
    """By a Function that reads its saved tensors again while the next update is done already."""

    class Fn(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return ReadsTwice.apply(self.inner(x))

    net = rg.ReversibleSequence([(Fn(), Fn()) for _ in range(3)], memory="overlap")
    x = draw()
    found = gradients(lambda: net(x), [x, *net.parameters()])
    net.memory = "store"
    assert_same(found, gradients(lambda: net(x), [x, *net.parameters()]))


def test_a_fault_below_is_told_above():
    """It names the update that failed; the pass can be repeated afterwards."""
    fns = mlps(4)
    streams = {"a": draw(), "b": draw()}
    updates = rg.wirings.leapfrog(fns)
    true = gradients(lambda: rg.run(updates, streams, memory="store"), parameters(fns))
    loss = loss_of(rg.run(updates, streams, memory="overlap"))
    with torch.no_grad():
        fns[1][1].weight.mul_(2)
    with pytest.raises(rg.ReplayError, match="update 1"):
        loss.backward()
    with torch.no_grad():
        fns[1][1].weight.div_(2)
    assert_same(gradients(lambda: rg.run(updates, streams, memory="overlap"), parameters(fns)), true)


class Told:
    """A stream that writes down who waits for whom."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


def test_who_waits(monkeypatch):
    """The second stream waits before it starts, the first before it goes on, and both at the end."""
    net = Net("overlap")
    side, main = Told("side", net.log), Told("main", net.log)
    monkeypatch.setitem(ahead._STREAMS, (torch.device("cpu"), main), side)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda _: main)
    started, joined = "side waits for main", "main waits for side"
    found = net.backward(net.forward())
    assert found[:7] == ["g2 again", started, "f2 again", "g2 back", joined, started, "g1 again"]
    assert found[-7:] == [started, "f0 again", "g0 back", joined, "f0 back", started, joined]


def test_what_both_streams_use_is_held():
    """Until each has waited for the other; `Ahead` has it in its hands."""
    lane = Ahead(torch.device("cpu"))
    walk = ahead.Walk({"a": object()}, {}, 3, 0)
    first, second = dict(walk.state), {"a": object()}

    def again(further):
        further.state, further.at = second, 2
        return ["saved"]

    lane.start(walk, again)
    assert (walk.state, walk.at) == (first, 3)
    values = lane.join(walk)
    assert (walk.state, walk.at, values) == (second, 2, ["saved"])
    values.clear()  # autograd takes them one by one
    assert lane.lent == (first, ["saved"])
    lane.leave()
    assert lane.lent is lane.used is lane.done is None


# -- on a GPU ----------------------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Takes its time in the second run, so that the streams are far apart; `late` cycles of the device."""

    def __init__(self, late, width=256):
        super().__init__()
        self.inner, self.late = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)),
            late,
        )

    def forward(self, x):
        if rg.replaying() and self.late > 0:
            torch.cuda._sleep(self.late)
        x = self.inner(x)
        return Late.apply(x, -self.late) if self.late < 0 else x


class Late(torch.autograd.Function):
    """The identity; its gradient takes time."""

    @staticmethod
    def forward(ctx, x, cycles):
        ctx.cycles = cycles
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(ctx.cycles)
        return grad, None


def slow(late):
    torch.manual_seed(0)
    return rg.ReversibleSequence([(Slow(late), Slow(late)) for _ in range(6)], memory="overlap").cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("late", [1_000_000, -1_000_000, 0], ids=["second runs", "gradients", "neither"])
def test_slow_streams(late):
    """Memory that one stream gives back is not taken by the other in the meantime."""
    net = slow(late)
    x = torch.randn(512, 256, device="cuda", requires_grad=True)
    wanted = [x, *net.parameters()]
    net.memory = "reverse"
    true = gradients(lambda: net(x), wanted)
    net.memory = "overlap"
    for _ in range(5):
        assert_same(gradients(lambda: net(x), wanted), true, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("late", [300_000, -300_000, 0], ids=["second runs", "gradients", "neither"])
def test_captured(late):
    assert_replays(slow(late), torch.randn(512, 256, device="cuda", requires_grad=True), 1e-4)


@pytest.mark.gpu
def test_captured_where_some_gradients_are_not_wanted():
    """What ran ahead and was never asked for is waited for all the same, or the capture would fail."""
    net = slow(0)
    x = torch.randn(64, 256, device="cuda")
    last = list(net.blocks[-1].parameters())
    graph = torch.cuda.CUDAGraph()
    torch.autograd.grad(net(x).square().sum(), last)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(net(x).square().sum(), last)
    graph.replay()
    net.memory = "store"
    assert_same(found, torch.autograd.grad(net(x).square().sum(), last), 1e-4)
