"""memory="offload" over the link of a GPU: its streams and events, pinned memory, the allocator.

That copies wait for each other is tested on a CPU as well (test_offload.py). Here most tests run twice: with copies as they are,
and with copies that begin late on the device, after a pause that is far longer than a layer takes.
"""

import gc
import threading

import pytest
import torch
from support import WIDTH as SMALL
from support import assert_same, gradients, loss_of, mlps, rg
from support import draw as draw_small
from test_capture import assert_replays
from torch import nn

from retrograde._base.meter import peak_on_cuda
from retrograde._memory import link, offload

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
DEPTH, WIDTH, ROWS = 8, 64, 1 << 15
STREAM = ROWS * WIDTH * 4
TOLERANCE = 1e-5  # in float32, should an algorithm add up in another order
PAUSE = 4_000_000  # cycles of the device: two milliseconds


class Layer(nn.Module):
    """Its input takes longer to copy than it takes to compute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x).tanh()


class LateLink(link.CudaLink):
    """Copies begin late, and what they write to is NaN until then. `forgets` plants a fault.

    (That a copy back waits for the copy out cannot be forgotten here: the stream has waited for it, and it waits for the stream.)
    """

    forgets = None

    def __init__(self, device):
        super().__init__(device)
        self.gone = []  # events of copies to the host

    def out(self, source, buffer, after):
        pause(self.leaving, after)
        self.gone.append(super().out(source, buffer, after))
        return self.gone[-1]

    def back(self, buffer, target, after):
        target.fill_(255)
        after = (*after, self.mark())
        pause(self.coming, after)
        return super().back(buffer, target, after)

    def wait(self, event, streams):
        out = any(event is one for one in self.gone)
        if self.forgets != ("memory in use" if out else "the copy back"):
            super().wait(event, streams)


def pause(stream, after=()):
    for event in after:
        if event is not None:
            stream.wait_event(event)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE)


@pytest.fixture(params=[link.CudaLink, LateLink], ids=["as it is", "late"])
def lanes(request, monkeypatch):
    """Lanes of this test alone."""
    made = {}
    monkeypatch.setattr(offload, "_LANES", made)
    monkeypatch.setitem(link.MAKE, DEVICE, request.param)
    yield made
    torch.cuda.synchronize()
    gc.collect()
    rg.offload_release()


as_it_is = pytest.mark.parametrize("lanes", [link.CudaLink], ids=["as it is"], indirect=True)
late = pytest.mark.parametrize("lanes", [LateLink], ids=["late"], indirect=True)


def layers(depth=DEPTH):
    return [Layer() for _ in range(depth)]


def net_of(depth=DEPTH, **options):
    return rg.Sequential(layers(depth), **options).to(DEVICE)


def draw(rows=ROWS):
    return torch.randn(rows, WIDTH, device=DEVICE, requires_grad=True)


def compare(nets, run, wanted, memory="offload"):
    """Values and gradients of `run` under a policy, beside those of ordinary autograd."""

    def under(memory):
        for net in nets:
            net.memory = memory
        return gradients(run, wanted)

    assert_same(under(memory), under("store"), TOLERANCE)


def given_back(lanes):
    """Whether nothing of the net is left on the device or in use on the host."""
    gc.collect()
    came = [moved for one in lanes.values() for ref in one.came if (moved := ref()) is not None and moved.back]
    return rg.offload_stats().used == 0 and not came and not any(one.leaving for one in lanes.values())


# -- gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["offload", rg.Offload(keep_last=3), rg.Offload(host=3 * STREAM + 4096)], ids=str)
def test_gradients(lanes, memory):
    net, x = net_of(), draw()
    for _ in range(3):  # the second time over buffers that were used
        compare([net], lambda: net(x), [x, *net.parameters()], memory)
        assert given_back(lanes)
    stats = rg.offload_stats()
    if memory == "offload":
        assert (stats.pinned, stats.copied_out) == ((DEPTH - 1) * STREAM, 3 * (DEPTH - 1) * STREAM)
        assert stats.copied_back <= stats.copied_out
    elif memory.host is not None:
        assert stats.pinned == 3 * STREAM


def test_the_host_far_ahead(lanes):
    """The whole step is queued before the device begins with it."""
    net, x = net_of(), draw()
    wanted = [x, *net.parameters()]
    compare([net], lambda: net(x), wanted)

    def run():
        pause(torch.cuda.current_stream())
        for _ in range(10):
            torch.cuda._sleep(PAUSE)
        return net(x)

    compare([net], run, wanted)


@late
@pytest.mark.parametrize("forgets", ["memory in use", "the copy back"])
def test_a_copy_that_does_not_wait_is_found(lanes, forgets, monkeypatch):
    monkeypatch.setattr(LateLink, "forgets", forgets)
    net, x = net_of(verify="off"), draw()  # it would tell as well, later
    with pytest.raises(AssertionError, match="relative error"):
        compare([net], lambda: net(x), [x, *net.parameters()])
    monkeypatch.setattr(LateLink, "forgets", None)
    torch.cuda.synchronize()
    compare([net], lambda: net(x), [x, *net.parameters()])


def test_again_with_retain_graph_and_in_turns(lanes):
    """Two graphs that are alive at once, each twice."""
    net = net_of()
    xs = [draw(), draw()]
    wanted = [*xs, *net.parameters()]

    def grads(memory):
        net.memory = memory
        first, second = (loss_of(net(x)) for x in xs)
        found = list(torch.autograd.grad(first, wanted, retain_graph=True, allow_unused=True))
        found += torch.autograd.grad(second, wanted, retain_graph=True, allow_unused=True)
        found += torch.autograd.grad(first, wanted, allow_unused=True)
        found += torch.autograd.grad(second, wanted, allow_unused=True)
        return [t for t in found if t is not None]

    assert_same(grads("offload"), grads("store"), TOLERANCE)
    assert given_back(lanes)


def test_second_derivatives(lanes):
    net, x = net_of(4), draw()
    wanted = [x, *net.parameters()]

    def both(memory):
        net.memory = memory
        first = torch.autograd.grad(loss_of(net(x)), wanted, create_graph=True)
        return [*first, *torch.autograd.grad(sum(t.square().sum() for t in first), wanted)]

    assert_same([t.detach() for t in both("offload")], [t.detach() for t in both("store")], TOLERANCE)
    assert given_back(lanes)


def test_autocast(lanes):
    net, x = net_of(), draw()

    def run():
        with torch.autocast(DEVICE, torch.bfloat16):
            return net(x)

    compare([net], run, [x, *net.parameters()])


def test_two_streams_of_values(lanes):
    """A reversible net, whose functions read what others have changed."""
    net = rg.ReversibleSequence([(Layer(), Layer()) for _ in range(4)], streams=3).to(DEVICE)
    x = draw()
    compare([net], lambda: net(x), [x, *net.parameters()])
    assert given_back(lanes)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiled_functions_run_in_the_lean_form_and_what_they_save_moves(lanes):
    torch._dynamo.reset()
    net, x = net_of(), draw()
    wanted = [x, *net.parameters()]
    true = gradients(lambda: net(x), wanted)
    rg.compile_fns(net, backend="aot_eager")
    net.memory, ran = "offload", []
    for layer in net:
        layer.register_forward_hook(lambda *_: ran.append(rg.replaying()))
    assert_same(gradients(lambda: net(x), wanted), true, TOLERANCE)
    assert ran == [False] * DEPTH
    stats = rg.offload_stats()
    assert (DEPTH - 1) * STREAM <= stats.copied_out <= 3 * DEPTH * STREAM
    assert stats.copied_back <= stats.copied_out
    assert given_back(lanes)


# -- streams of the user -------------------------------------------------------------------------------------------------


def test_on_another_stream_than_the_default(lanes):
    net, x, side = net_of(), draw(), torch.cuda.Stream()

    def run():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = net(x * 1)
        torch.cuda.current_stream().wait_stream(side)
        out.record_stream(torch.cuda.current_stream())
        return out

    for _ in range(3):
        compare([net], run, [x, *net.parameters()])
    assert given_back(lanes)


def test_two_nets_on_two_streams(lanes):
    """What backward of one brings back for the other has memory of the wrong stream."""
    nets, x, sides = [net_of(), net_of()], draw(), [torch.cuda.Stream(), torch.cuda.Stream()]

    def run():
        outs = []
        for net, side in zip(nets, sides, strict=True):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                outs.append(net(x * 1))
        for out, side in zip(outs, sides, strict=True):
            torch.cuda.current_stream().wait_stream(side)
            out.record_stream(torch.cuda.current_stream())
        return outs

    for _ in range(3):
        compare(nets, run, [x, *(p for net in nets for p in net.parameters())])
    assert given_back(lanes)


@pytest.mark.parametrize("later", [0, 1, 2, 3])
def test_an_edit_while_the_copy_is_under_way_is_an_error(lanes, later):
    """Of the input of a layer, so many layers later. When its copy is done an edit is harmless."""
    stack, x = [net_of(1) for _ in range(6)], draw()
    wanted = [x, *(p for net in stack for p in net.parameters())]

    def run(edits):
        xs = [x]
        for number, net in enumerate(stack):
            xs.append(net(xs[-1]))
            if edits and number == 1 + later:
                with torch.no_grad():
                    xs[1].add_(1)
        return xs[-1]

    true = gradients(lambda: run(False), wanted)
    for net in stack:
        net.memory = "offload"
    if later < 2:
        with pytest.raises(rg.ReplayError, match="edited in place after the forward pass"):
            gradients(lambda: run(True), wanted)
    else:
        assert_same(gradients(lambda: run(True), wanted), true, TOLERANCE)
    assert_same(gradients(lambda: run(False), wanted), true, TOLERANCE)
    assert given_back(lanes)


# -- memory --------------------------------------------------------------------------------------------------------------


@as_it_is
def test_device_memory_is_flat_in_depth(lanes):
    def peak(depth, memory):
        net, x = net_of(depth, memory=memory), draw()

        def step():
            net(x).sum().backward()

        step()
        step()
        return peak_on_cuda(step)[0]

    assert peak(24, "offload") <= peak(8, "offload") + STREAM // 2
    assert peak(24, "checkpoint") >= peak(8, "checkpoint") + 15 * STREAM, "nothing to save"


class Fails(Layer):
    """In the forward pass, or when it is run again."""

    when = None

    def forward(self, x):
        if self.when is rg.replaying():
            raise ValueError("planted")
        return super().forward(x)


def test_what_was_dropped_and_what_failed_leaves_nothing(lanes):
    net, x = rg.Sequential([*layers(4), Fails(), *layers(4)], memory="offload").to(DEVICE), draw()

    def step():
        net(x).sum().backward()

    def fail(when):
        net[4].when = when
        with pytest.raises((ValueError, rg.ReplayError), match="planted"):
            step()
        net[4].when = None
        gc.collect()

    step()
    step()
    torch.cuda.synchronize()
    allocated, pinned = torch.cuda.memory_allocated(), rg.offload_stats().pinned
    for _ in range(3):
        net(x)
        fail(False)
        loss = net(x).sum()
        del loss
        fail(True)
        step()
        assert given_back(lanes)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= allocated
        assert rg.offload_stats().pinned <= pinned
        assert sum(buffer.size for one in lanes.values() for buffer in one.pool.free) == rg.offload_stats().pinned


def test_freed_by_another_thread(lanes):
    net, x = net_of(memory="offload"), draw()
    for _ in range(3):
        held = [net(x)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert rg.offload_stats().used == 0
        net(x[: ROWS // 2]).sum().backward()
        assert given_back(lanes)
    compare([net], lambda: net(x), [x, *net.parameters()])


@as_it_is
def test_nothing_grows(lanes):
    """Over many steps, by the allocator's figures and ours."""
    net, x, seen = net_of(memory="offload"), draw(), []
    for _ in range(20):
        torch.cuda.reset_peak_memory_stats()
        net(x).sum().backward()
        torch.cuda.synchronize()
        (one,) = lanes.values()
        stats = rg.offload_stats()
        used = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        seen.append((*used, stats.pinned, stats.used, len(one.known), len(one.homes), len(one.came), len(one.leaving)))
    assert len(set(seen[5:])) == 1, seen


@as_it_is
def test_buffers_are_pinned_and_given_back(lanes):
    net, x = net_of(memory="offload"), draw()
    loss = net(x).sum()
    (one,) = lanes.values()
    assert (rg.offload_stats().used, rg.offload_release()) == ((DEPTH - 1) * STREAM, 0)  # nothing that is in use
    loss.backward()
    assert rg.offload_stats().used == 0
    assert len(one.pool.free) == DEPTH - 1
    assert all(buffer.bytes.is_pinned() for buffer in one.pool.free)
    pages = [buffer.bytes for buffer in one.pool.free]
    assert rg.offload_release() == (DEPTH - 1) * STREAM
    assert not any(t.is_pinned() for t in pages)
    assert rg.offload_stats()[:2] == (0, 0)
    compare([net], lambda: net(x), [x, *net.parameters()])
    assert rg.offload_stats().pinned == (DEPTH - 1) * STREAM


@as_it_is
def test_lengths_that_vary(lanes):
    net, most = net_of(memory="offload"), 0
    for rows in (ROWS, ROWS // 4, ROWS // 2, ROWS, ROWS // 3, ROWS // 8, ROWS):
        net(draw(rows)).sum().backward()
        most = max(most, rg.offload_stats().pinned)
    assert most == (DEPTH - 1) * STREAM


@as_it_is
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nobody_waits_for_the_device(lanes):
    net, x = net_of(memory="offload"), draw()

    def step():
        net(x).sum().backward()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- where nothing moves -------------------------------------------------------------------------------------------------


@as_it_is
def test_in_a_cuda_graph_it_runs_as_checkpoint_and_says_so_once(lanes, monkeypatch):
    monkeypatch.setattr(offload, "_SAID", set())
    net = rg.Sequential(mlps(4), memory="offload").to(DEVICE)
    x = draw_small(4, SMALL).detach().to(DEVICE).requires_grad_()
    with pytest.warns(UserWarning, match="memory='offload' runs as memory='checkpoint': a CUDA graph is being captured"):
        assert_replays(net, x, 1e-8)
    assert_replays(net, x, 1e-8)  # a warning would be an error
    assert given_back(lanes)
