"""memory="offload": gradients of store, flat memory on the device, and copies that wait for each other.

The link of these tests copies as late as it may (offload_support.py). All gradient tests of the suite run under offload as well,
as it is one of `support.POLICIES`.
"""

import gc
import threading

import pytest
import torch
from offload_support import LateLink
from support import assert_same, draw, gradients, loss_of, mlps, rg
from torch import nn

from retrograde._base.meter import LiveBytes
from retrograde._memory import lane, link, offload, pinned

DEPTH, WIDTH = 8, 64
SHAPE = (64, WIDTH)
STREAM = 64 * WIDTH * 8


class Layer(nn.Module):
    """A residual layer that saves little beside its input."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width).double()

    def forward(self, x):
        return x + self.linear(x).tanh()


@pytest.fixture
def lanes(monkeypatch):
    """Lanes of this test alone."""
    made = {}
    monkeypatch.setattr(offload, "_LANES", made)
    return made


def layers(depth=DEPTH):
    return [Layer() for _ in range(depth)]


def on_device(lanes):
    """Streams that lanes still hold on the device."""
    return [one for found in lanes.values() for one in (*found.leaving, *(m for m in (r() for r in found.came) if m and m.back))]


def given_back(lanes):
    """Whether nothing of the net is left on the device or in use on the host."""
    gc.collect()
    return rg.offload_stats().used == 0 and not on_device(lanes)


# -- what moves ---------------------------------------------------------------------------------------------------------


def test_every_layer_but_the_last_moves_and_comes_back_once(lanes):
    net, x = rg.Sequential(layers(), memory="offload"), draw(*SHAPE)
    out = net(x)
    assert rg.offload_stats().copied_out == (DEPTH - 1) * STREAM
    assert rg.offload_stats().used == (DEPTH - 1) * STREAM
    out.sum().backward()
    stats = rg.offload_stats()
    assert stats.copied_back <= stats.copied_out
    assert stats.copied_back >= (DEPTH - 2) * STREAM, "the one before the last may still be here"
    assert given_back(lanes)


def test_keep_last(lanes):
    net = rg.Sequential(layers(), memory=rg.Offload(keep_last=3))
    net(draw(*SHAPE)).sum().backward()
    assert rg.offload_stats().copied_out == (DEPTH - 3) * STREAM


def test_small_tensors_parameters_and_side_inputs_stay(lanes, monkeypatch):
    class Scaled(Layer):
        def forward(self, x, scale):
            return super().forward(x) * scale

    start = nn.Parameter(torch.randn(*SHAPE, dtype=torch.float64))
    net = rg.Sequential([Scaled() for _ in range(3)], memory="offload")
    loss_of(net(start, scale=draw(*SHAPE))).backward()
    assert rg.offload_stats().copied_out == STREAM  # the input of the second layer
    monkeypatch.setattr(offload, "SMALL", STREAM + 1)
    loss_of(net(start, scale=draw(*SHAPE))).backward()
    assert rg.offload_stats().copied_out == STREAM


@pytest.mark.parametrize("depth", [8, 16])
def test_device_memory_is_flat_in_depth(lanes, depth):
    """Less what is on the host, which on a CPU the meter cannot tell apart."""
    net, x = rg.Sequential(layers(depth), memory="offload"), draw(*SHAPE)
    net(x).sum().backward()  # gradients are there, and buffers
    most = []

    def note(*_):
        most.append(meter.live)

    for layer in net:
        layer.register_forward_hook(note)
    for p in net.parameters():
        p.grad.zero_()
    with LiveBytes() as meter:
        net(x).sum().backward()
    assert len(most) == 2 * depth
    assert max(most) <= 8.1 * STREAM  # as many at depth 8 as at depth 16


def test_what_many_updates_read_moves_once(lanes):
    """A stream that several updates read, and one of which two streams are halves."""
    fns = mlps(4)
    updates = [rg.Update("a", fns[0], "b"), rg.Update("c", fns[1], "b"), rg.Update("b", fns[2], "a"), rg.Update("a", fns[3], "b")]
    whole = draw(3, 18)
    parts = whole.detach().chunk(3, 0)

    def run(memory):
        one = whole * 1
        a, b, c = (one[:, 6 * i : 6 * i + 6].contiguous() for i in range(3))
        return rg.run(updates, {"a": a, "b": b, "c": c}, memory=memory)

    wanted = [whole, *(p for fn in fns for p in fn.parameters())]
    assert_same(gradients(lambda: run("offload"), wanted), gradients(lambda: run("store"), wanted))
    assert parts[0].nbytes * 2 <= rg.offload_stats().copied_out  # b once, a once; the last block stays
    assert rg.offload_stats().copied_out == 2 * 3 * 6 * 8


def halves(x):
    whole = x * 1
    return whole[:, ::2], whole[:, 1::2]


@pytest.mark.parametrize(
    "start",
    [
        lambda x: x.mean(0, keepdim=True).expand(64, -1),
        lambda x: (x * 1).t(),
        lambda x: halves(x)[1].repeat(1, 2),
        lambda x: (x * 1)[:, :WIDTH].flip(0),
        lambda x: torch.cat([x, x, x])[64:128],
    ],
    ids=["stride 0", "transposed", "repeated", "flipped", "a part of a larger storage"],
)
def test_layouts(lanes, start):
    net, x = rg.Sequential(layers(4)), draw(*SHAPE)

    def run(memory):
        net.memory = memory
        return net(start(x))

    wanted = [x, *net.parameters()]
    assert_same(gradients(lambda: run("offload"), wanted), gradients(lambda: run("store"), wanted))
    assert rg.offload_stats().copied_out > 0


class Views(nn.Module):
    """Returns a tree of two views of one storage, as a layer that splits what it computed."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        out = self.layer(torch.cat([x["a"], x["b"]], 1))
        return {"a": out[:, : WIDTH // 2], "b": out[:, WIDTH // 2 :]}


def test_views_of_one_storage_move_once(lanes):
    net = rg.Sequential([Views() for _ in range(5)])
    x = {"a": draw(64, WIDTH // 2), "b": draw(64, WIDTH // 2)}

    def run(memory):
        net.memory = memory
        return net(x)

    wanted = [*x.values(), *net.parameters()]
    assert_same(gradients(lambda: run("offload"), wanted), gradients(lambda: run("store"), wanted))
    assert rg.offload_stats().copied_out == 4 * STREAM


# -- when ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgets", ["out", "back"])
def test_a_copy_that_does_not_wait_is_found(lanes, forgets, monkeypatch):
    """Without one of its waits, the engine's own verification, or the gradients, tell."""
    net, x = rg.Sequential(layers()), draw(*SHAPE)
    wanted = [x, *net.parameters()]
    true = gradients(lambda: net(x), wanted)
    net.memory = "offload"
    assert_same(gradients(lambda: net(x), wanted), true)
    monkeypatch.setattr(LateLink, "forgets", forgets)
    with pytest.raises((rg.NotRepeated, AssertionError)):
        assert_same(gradients(lambda: net(x), wanted), true)


def test_what_came_back_for_another_stream_is_not_used(lanes, monkeypatch):
    """Its memory is of that stream, which may use it again before this one is done."""
    where, memory = ["first"], {}

    def back(self, buffer, target, after):
        memory[target.untyped_storage().data_ptr()] = where[0]
        return LateLink.out(self, buffer, target, after)

    def view(self, storage):
        assert memory.get(storage.data_ptr(), where[0]) == where[0]
        return whole(self, storage)

    whole = lane.Kept.view
    monkeypatch.setattr(LateLink, "here", lambda self: where[0])
    monkeypatch.setattr(LateLink, "back", back)
    monkeypatch.setattr(lane.Kept, "view", view)
    net, other, x = rg.Sequential(layers()), rg.Sequential(layers()), draw(*SHAPE)
    wanted = [x, *net.parameters(), *other.parameters()]
    true = gradients(lambda: other(net(x)), wanted)
    net.memory = other.memory = "offload"

    class Switch(torch.autograd.Function):
        """As autograd runs each node of the backward pass on the stream of its forward pass."""

        @staticmethod
        def forward(ctx, t):
            where[0] = "second"
            return t.clone()

        @staticmethod
        def backward(ctx, grad):
            where[0] = "first"
            return grad

    assert_same(gradients(lambda: other(Switch.apply(net(x))), wanted), true)
    assert where == ["first"]
    assert given_back(lanes)


def test_a_device_tensor_stays_until_its_copy_is_done(lanes, monkeypatch):
    """The stream waits for the copy before the memory is let go."""
    waits = []
    monkeypatch.setattr(LateLink, "wait", lambda self, event, streams: (waits.append((event.name, streams)), event.synchronize()))
    net = rg.Sequential(layers(), memory="offload")
    out = net(draw(*SHAPE))
    (found,) = lanes.values()
    assert [one for one in waits if one[0] == "out"] == [("out", {"compute"})] * (DEPTH - 2)
    assert len(found.leaving) == 1
    out.sum().backward()
    assert not found.leaving


@pytest.mark.parametrize("later", [0, 1, 2, 3])
def test_an_edit_while_the_copy_is_under_way_is_an_error(lanes, later):
    """Of the input of a layer, so many layers later. When its copy is done an edit is harmless."""
    stack = [rg.Sequential([Layer()], memory="offload") for _ in range(6)]
    xs = [draw(*SHAPE)]
    for number, net in enumerate(stack):
        xs.append(net(xs[-1]))
        if number == 1 + later:
            with torch.no_grad():
                xs[1].add_(1)
    loss = xs.pop().sum()
    del xs[2:]
    if later < 2:
        with pytest.raises(rg.ReplayError, match="edited in place after the forward pass"):
            loss.backward()
    else:
        loss.backward()
    del loss, xs
    stack[0](draw(*SHAPE)).sum().backward()
    assert given_back(lanes)


def test_an_edit_of_what_never_moved_is_an_error(lanes):
    x = draw(*SHAPE) * 1
    loss = rg.Sequential([Layer()], memory="offload")(x).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(rg.ReplayError, match="edited in place"):
        loss.backward()


# -- what is left --------------------------------------------------------------------------------------------------------


def test_a_dropped_loss_gives_everything_back(lanes):
    net, x = rg.Sequential(layers(), memory="offload"), draw(*SHAPE)
    net(x)
    assert rg.offload_stats().used == 0
    net(x[:1]).sum().backward()  # what was still on its way goes with the next backward
    assert given_back(lanes)


@pytest.mark.parametrize("second", [False, True], ids=["forward", "backward"])
def test_an_exception_gives_everything_back(lanes, second):
    class Fails(Layer):
        def forward(self, x):
            if failing and rg.replaying() is second:
                raise ValueError("planted")
            return super().forward(x)

    failing = True
    net, x = rg.Sequential([*layers(3), Fails(), *layers(3)], memory="offload"), draw(*SHAPE)
    with pytest.raises((ValueError, rg.ReplayError), match="planted"):
        net(x).sum().backward()
    failing = False
    net(x).sum().backward()
    assert given_back(lanes)


def test_no_books_are_kept_of_what_is_gone(lanes):
    net, x = rg.Sequential(layers(), memory="offload"), draw(*SHAPE)
    for _ in range(5):
        net(x).sum().backward()
    (found,) = lanes.values()
    assert len(found.known) <= 1  # x itself
    assert not [*found.homes, *found.came, *found.leaving]


def test_a_branch_that_the_loss_does_not_reach(lanes):
    net, other, x = rg.Sequential(layers(), memory="offload"), rg.Sequential(layers(), memory="offload"), draw(*SHAPE)
    y, z = net(x), other(x)
    y.sum().backward()
    del z, y
    assert given_back(lanes)


def test_again_with_retain_graph_and_in_turns(lanes):
    """Two graphs that are alive at once, each twice."""
    net = rg.Sequential(layers())
    xs = [draw(*SHAPE), draw(*SHAPE)]
    wanted = [*xs, *net.parameters()]

    def grads(memory):
        net.memory = memory
        first, second = (loss_of(net(x)) for x in xs)
        found = list(torch.autograd.grad(first, wanted, retain_graph=True, allow_unused=True))
        found += torch.autograd.grad(second, wanted, retain_graph=True, allow_unused=True)
        found += torch.autograd.grad(first, wanted, allow_unused=True)
        found += torch.autograd.grad(second, wanted, allow_unused=True)
        return [t for t in found if t is not None]

    assert_same(grads("offload"), grads("store"))
    assert given_back(lanes)


def test_frozen_layers(lanes):
    """The input needs no gradient, and the first layers have none: nothing of them is kept or moved."""
    net, x = rg.Sequential(layers(), memory="offload"), draw(*SHAPE, grad=False)
    for layer in net[:4]:
        layer.requires_grad_(False)
    wanted = [p for p in net.parameters() if p.requires_grad]
    found = gradients(lambda: net(x), wanted)
    assert rg.offload_stats().copied_out == 3 * STREAM
    net.memory = "store"
    assert_same(found, gradients(lambda: net(x), wanted))


def test_in_threads(lanes):
    net = rg.Sequential(layers(), memory="offload")
    failed = []

    def step():
        try:
            x = draw(*SHAPE)
            (grad,) = torch.autograd.grad(loss_of(net(x)), x)
            with torch.no_grad():
                pass
            assert grad.isfinite().all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert given_back(lanes)


# -- host memory ---------------------------------------------------------------------------------------------------------


def test_buffers_are_reused_across_passes_and_shapes(lanes):
    """Lengths go up and down: no more is pinned than the longest needs."""
    net = rg.Sequential(layers(), memory="offload")
    lengths = [256, 64, 128, 512, 320, 512, 64, 448, 512]
    for length in lengths:
        net(draw(length, WIDTH)).sum().backward()
    stats = rg.offload_stats()
    assert stats.pinned == (DEPTH - 1) * 512 * WIDTH * 8
    assert stats.used == 0
    assert rg.offload_release() == stats.pinned
    assert rg.offload_stats().pinned == 0
    net(draw(*SHAPE)).sum().backward()
    assert rg.offload_stats().pinned == (DEPTH - 1) * STREAM


def test_a_limit_of_host_memory(lanes):
    """What does not fit stays on the device."""
    net, x = rg.Sequential(layers()), draw(*SHAPE)
    wanted = [x, *net.parameters()]
    true = gradients(lambda: net(x), wanted)
    net.memory = rg.Offload(host=3 * STREAM + 100)
    assert_same(gradients(lambda: net(x), wanted), true)
    assert rg.offload_stats().pinned == 3 * STREAM
    net.memory = rg.Offload(host=STREAM - 1)
    with pytest.raises(rg.OffloadError, match=rf"host={STREAM - 1}\) has no room for what one layer keeps, {STREAM} bytes"):
        net(x)


def test_too_little_host_memory_is_told_before_anything_runs(lanes, monkeypatch):
    net, x = rg.Sequential(layers(), memory="offload"), draw(*SHAPE)
    monkeypatch.setattr(offload, "available", lambda: 3 * STREAM)
    with pytest.raises(rg.OffloadError, match=rf"takes {(DEPTH - 1) * STREAM} bytes more, and {3 * STREAM} are available"):
        net(x)
    monkeypatch.setattr(offload, "available", lambda: None)  # where the system does not say
    monkeypatch.setattr(pinned, "available", lambda: STREAM - 1)  # and then there is less
    with pytest.raises(rg.OffloadError, match=rf"takes {STREAM} bytes more"):
        net(x)
    monkeypatch.setattr(pinned, "available", lambda: None)
    net(x).sum().backward()
    assert given_back(lanes)


def test_no_pinned_memory(lanes, monkeypatch):
    class Refuses:
        def cudaHostRegister(self, *_):
            return 2

    monkeypatch.setattr(pinned, "_runtime", Refuses)
    monkeypatch.setattr(LateLink, "pin", staticmethod(pinned.pin))
    net, x = rg.Sequential(layers(), memory="offload"), draw(*SHAPE)
    with pytest.raises(rg.OffloadError, match=f"{STREAM} bytes of host memory could not be pinned"):
        net(x)
    net.memory = "checkpoint"
    net(x).sum().backward()
    assert given_back(lanes)


def test_pinned_memory_is_pages_of_its_own(monkeypatch):
    """From the first byte of the storage, where torch looks whether a tensor is pinned."""
    registered = {}

    class Runtime:
        def cudaHostRegister(self, start, size, flags):
            registered[start] = size
            return 0

        def cudaHostUnregister(self, start):
            del registered[start]
            return 0

    monkeypatch.setattr(pinned, "_runtime", Runtime)
    pages = [pinned.pin(size) for size in (4096, 3 * 4096, 1 << 20)]
    assert registered == {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in pages}
    assert all(start % 4096 == 0 for start in registered)
    for t in pages:
        t.fill_(7)
        pinned.unpin(t)
    assert not registered


def test_available_memory_of_this_machine():
    assert pinned.available() is None or pinned.available() > 1 << 20


@pytest.mark.parametrize(
    ("limit", "left"), [("max", 64 << 20), ("1000000", 1_000_000 - 700_000 + 300_000), ("9223372036854771712", 64 << 20)]
)
@pytest.mark.parametrize(
    "own", ["0::/", "0::/jobs/7", "4:memory:/docker/that/is/not/here\n3:cpu:/"], ids=["container", "job", "old"]
)
def test_available_memory_of_a_container(tmp_path, monkeypatch, own, limit, left):
    """Less than the machine has. The pages of files count as used there, and can be had."""
    old = "memory" in own
    group = {
        "memory.limit_in_bytes" if old else "memory.max": limit,
        "memory.usage_in_bytes" if old else "memory.current": "700000\n",
        "memory.stat": "anon 350000\nfile 350000\nactive_file 100000\ninactive_file 200000\n",
    }
    files = {"proc/meminfo": "MemTotal: 99999 kB\nMemAvailable:  65536 kB\n", "proc/self/cgroup": own}
    files |= {f"{'groups/memory' if old else 'groups'}/{name}": text for name, text in group.items()}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(pinned, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(pinned, "_GROUPS", tmp_path / "groups")
    assert pinned.available() == left
    if "jobs" in own:
        inner = tmp_path / "groups" / "jobs" / "7"
        inner.mkdir(parents=True)
        for name, text in group.items():
            (inner / name).write_text(text)
        (inner / "memory.max").write_text("900000")
        assert pinned.available() == 500_000
    for path in tmp_path.glob("*/meminfo"), tmp_path.glob("**/memory.stat"):
        for one in path:
            one.unlink()
    assert pinned.available() is None


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "much", "3 GiBs"])
def test_limits_that_are_none(given):
    with pytest.raises(rg.ProgramError, match=r"host must be|takes a size"):
        rg.Offload(host=given)


def test_sizes_in_words():
    assert rg.Offload(host="2GiB").host == 2 << 30
    with pytest.raises(rg.ProgramError, match="keep_last must be a whole number"):
        rg.Offload(keep_last=0)


# -- where nothing moves -------------------------------------------------------------------------------------------------


def test_without_a_link_it_runs_as_checkpoint_and_says_so_once(monkeypatch):
    monkeypatch.delitem(link.MAKE, "cpu")
    monkeypatch.setattr(offload, "_SAID", set())
    net, x = rg.Sequential(layers(3), memory="offload"), draw(*SHAPE)
    with pytest.warns(UserWarning, match=r"memory='offload' runs as memory='checkpoint': there is no link .* from cpu"):
        found = gradients(lambda: net(x), [x])
    net.memory = "store"
    assert_same(found, gradients(lambda: net(x), [x]))
    net.memory = "offload"
    net(x)


def test_inside_of_other_hooks_nothing_moves(lanes):
    """An enclosing checkpoint or program frees what is kept, and runs all of it again."""
    net, x = rg.Sequential(layers(), memory="offload"), draw(*SHAPE)
    wanted = [x, *net.parameters()]
    outer = rg.Sequential([net, Layer()], memory="checkpoint")
    true = gradients(lambda: outer(x), wanted)
    assert rg.offload_stats().copied_out == 0
    for around in (
        lambda: torch.utils.checkpoint.checkpoint(outer, x, use_reentrant=False),
        lambda: outer(x),
    ):
        assert_same(gradients(around, wanted), true)
    with torch.autograd.graph.save_on_cpu():
        assert_same(gradients(lambda: outer(x), wanted), true)
    assert rg.offload_stats().copied_out == 0


def test_the_chain_of_prefetches_is_in_the_order_of_the_forward_pass(lanes, monkeypatch):
    """When backward asks for one, the one before it is on its way; never two."""
    order = []
    load = lane.Lane._load
    monkeypatch.setattr(lane.Lane, "_load", lambda self, moved: (order.append(moved), load(self, moved))[1])
    net = rg.Sequential(layers(), memory="offload")
    out = net(draw(*SHAPE)).sum()
    (found,) = lanes.values()
    before = found.latest()
    chain = []
    while before is not None:
        chain.append(before)
        before = before.previous and before.previous()
    del before
    out.backward()
    assert order == chain[-len(order) :]
    assert len(order) >= DEPTH - 2
