"""Memory, by a meter of live tensor bytes: flat in depth under reverse, nothing left behind, nothing for gc to do.

Figures are in streams: one stream is 256 KiB, and parameters are small beside it. Inputs, parameters and their gradients exist
before the meter starts, so they do not count.
"""

import gc

import pytest
import torch
from support import rg
from torch import Tensor, nn

from retrograde._engine.records import Record
from retrograde.bench.meter import LiveBytes

ROWS, WIDTH = 1 << 12, 16
STREAM = ROWS * WIDTH * 4


def with_gradient(t):
    t.grad = torch.zeros_like(t)
    return t


def stream(grad=True):
    t = torch.randn(ROWS, WIDTH, requires_grad=grad)
    return with_gradient(t) if grad else t


def prepared(module):
    """With small weights: large ones would drift at such depths."""
    for p in module.parameters():
        p.data.mul_(0.25)
        with_gradient(p)
    return module


def bottle():
    return prepared(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


def pairs(depth, fn, takes=((), ())):
    return [u for _ in range(depth) for u in rg.wirings.pair(fn, fn, takes=takes)]


def total(out):
    return sum(t.sum() for t in out.values())


@pytest.fixture(autouse=True, scope="module")
def _no_gc():
    """What is freed is freed by reference counts. One thread: they wait for each other, and these tensors are small.

    The first step in a process leaves a few cycles inside torch, whatever it runs; it is taken here.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.randn(2, WIDTH, requires_grad=True)
    with LiveBytes():
        total(rg.run(pairs(1, nn.Linear(WIDTH, WIDTH)), {"x1": x, "x2": x})).backward()
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(threads)


def peak(step):
    """Peak of one step, in streams; what it leaves behind must be nothing."""
    with LiveBytes() as meter:
        step()
    assert meter.live == 0, f"{meter.live / STREAM:.2f} streams are left"
    return meter.peak / STREAM


def assert_flat(make_step, *depths):
    peaks = [peak(make_step(depth)) for depth in depths]
    assert max(peaks) <= 1.01 * min(peaks), dict(zip(depths, peaks, strict=True))
    return max(peaks)


def plain(fn, memory="reverse", loss=total, pull=Tensor.backward):
    """depth -> one step of a pair net whose blocks share one fn."""

    def make(depth):
        streams = {"x1": stream(), "x2": stream()}

        def step():
            value = loss(rg.run(pairs(depth, fn), streams, memory=memory))
            pull(value)

        return step

    return make


# -- flat in depth -----------------------------------------------------------------------------------------------------


def saved_by(fn):
    """What one call of fn has autograd save, in streams: its source and everything else that is no parameter."""
    own = {p.untyped_storage()._cdata for p in fn.parameters()}
    saved = {}

    def pack(t):
        saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fn(stream())
    assert out.shape == (ROWS, WIDTH)
    return sum(size for key, size in saved.items() if key not in own) / STREAM


BRANCHES = {
    "linear": lambda: prepared(nn.Linear(WIDTH, WIDTH)),
    "bottle": bottle,
    "wide": lambda: prepared(
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    ),
}


@pytest.mark.parametrize(("branch", "depths"), [("bottle", (8, 64, 256)), ("linear", (4, 16)), ("wide", (4, 16))])
def test_flat_and_within_the_bound(branch, depths):
    """All streams, their gradients, what one fn saves, its output: no more, at any depth."""
    fn = BRANCHES[branch]()
    bound = 2 + 2 + saved_by(fn) + 1
    assert assert_flat(plain(fn), *depths) <= 1.01 * bound


def test_the_meter_sees_store_grow():
    """Under store every update keeps its source and tanh's output: two streams each. Checkpoint keeps the sources."""
    fn = bottle()
    assert peak(plain(fn, "store")(64)) - peak(plain(fn, "store")(8)) == pytest.approx(2 * 112, rel=0.01)
    assert peak(plain(fn, "checkpoint")(64)) - peak(plain(fn, "checkpoint")(8)) == pytest.approx(112, rel=0.01)


@pytest.mark.parametrize("name", ["x1", "x2"])
def test_flat_when_the_loss_uses_some_of_the_streams(name):
    fn = bottle()
    assert assert_flat(plain(fn, loss=lambda out: out[name].sum()), 4, 32) <= 1.01 * peak(plain(fn)(4))


@pytest.mark.parametrize("wanted", ["x1", "x2", "parameter"])
def test_flat_under_autograd_grad(wanted):
    fn = bottle()

    def make(depth):
        streams = {"x1": stream(), "x2": stream()}
        asked = fn[0].weight if wanted == "parameter" else streams[wanted]
        return lambda: torch.autograd.grad(total(rg.run(pairs(depth, fn), streams)), asked)

    assert assert_flat(make, 4, 32) <= 1.01 * peak(plain(fn)(4))


@pytest.mark.parametrize("times", [1, 4])
def test_flat_under_retain_graph(times):
    """A graph that is kept keeps its final streams as well, and only those, however often it is used."""
    fn = bottle()

    def pull(loss):
        for _ in range(times):
            loss.backward(retain_graph=True)

    assert assert_flat(plain(fn, pull=pull), 4, 16) <= 1.01 * (peak(plain(fn)(4)) + 2)


@pytest.mark.parametrize("first", [0, 3])
def test_a_retained_graph_holds_no_more_than_before(first):
    """Also where backward goes only part of the way down, and leaves its walk in the middle."""
    fns = [bottle() for _ in range(4)]
    streams = {"a": stream(), "b": stream()}
    with LiveBytes() as meter:
        loss = total(rg.run(rg.wirings.leapfrog(fns), streams))
        before = meter.live
        assert before >= 2 * STREAM
        for _ in range(3):
            torch.autograd.grad(loss, fns[first][0].weight, retain_graph=True)
            assert meter.live == before


class Program(nn.Module):
    """A reversible program as the branch of another."""

    def __init__(self, depth):
        super().__init__()
        self.net = rg.Reversible(pairs(depth, bottle()))

    def forward(self, x):
        out = self.net({"x1": x, "x2": x})
        return 0.1 * (out["x1"] + out["x2"]).sin()


def test_flat_for_a_program_in_a_program():
    """In the depth of the outer program, and in that of the inner one."""
    assert_flat(plain(Program(1)), 4, 16, 64)
    assert_flat(lambda inner: plain(Program(inner))(2), 2, 16)


class Auxiliary(nn.Module):
    """Leaves a loss in an attribute, and may append it to a list that nobody clears before the end."""

    def __init__(self, losses=None):
        super().__init__()
        self.body, self.losses, self.aux_loss = bottle(), losses, None

    def forward(self, x):
        y = self.body(x)
        self.aux_loss = y.square().mean()
        if self.losses is not None:
            self.losses.append(self.aux_loss)
        return y


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@pytest.mark.parametrize("listed", [False, True])
def test_flat_where_functions_leave_a_tensor_of_their_graph(listed, memory):
    """Beyond what a policy keeps anyway, losses keep nothing alive: neither before backward, nor during and after it."""

    def make(leaves):
        def step_of(depth):
            losses = [] if listed else None
            fns = [Auxiliary(losses) if leaves else bottle() for _ in range(2 * depth)]
            streams = {"x1": stream(), "x2": stream()}
            updates = rg.wirings.leapfrog(fns, streams=("x1", "x2"))

            def step():
                loss = total(rg.run(updates, streams, memory=memory))
                if leaves:
                    loss = loss + sum(fn.aux_loss for fn in fns)
                loss.backward()
                for fn in fns:
                    fn.aux_loss = None
                if losses:
                    losses.clear()

            return step

        return step_of

    with_losses, without = ([peak(make(leaves)(depth)) for depth in (2, 16)] for leaves in (True, False))
    assert with_losses[1] - with_losses[0] <= without[1] - without[0] + 0.2  # a few numbers


class Seeded(nn.Module):
    """A program whose first update reads a constant: for the gradient of the input alone its walk ends in the middle."""

    def __init__(self, fn):
        super().__init__()
        self.net, self.seed = rg.Reversible(rg.wirings.leapfrog([fn] * 4)), stream(grad=False)

    def forward(self, x):
        return self.net({"a": x, "b": self.seed})["b"]


def test_flat_where_inner_walks_end_in_the_middle():
    fn, streams = bottle(), {"x1": stream(), "x2": stream()}
    branch = Seeded(fn)

    def make(depth):
        return lambda: torch.autograd.grad(total(rg.run(pairs(depth, branch), streams)), streams["x2"])

    assert_flat(make, 2, 8)


class Look(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, context):
        return self.b(torch.tanh(self.a(x) + context))


def test_flat_with_a_context_made_by_an_encoder():
    """The context and its gradient come on top, once."""
    encoder, fn, source = prepared(nn.Linear(WIDTH, WIDTH)), prepared(Look()), stream(grad=False)

    def make(depth):
        streams = {"x1": stream(), "x2": stream()}
        updates = pairs(depth, fn, takes=("context", "context"))
        return lambda: total(rg.run(updates, streams, {"context": encoder(source)})).backward()

    assert assert_flat(make, 4, 32) <= 1.01 * (peak(plain(bottle())(4)) + 2)


class ScaleShift(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.a(x).tanh() / 8, self.b(x)


class Masked(nn.Module):
    """Reads a mask and a table of 256 KiB and writes small buffers, as attention beside a norm does."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.rand(ROWS, WIDTH) > 0.5)
        self.register_buffer("table", torch.rand(4 * ROWS))

    def forward(self, x):
        return self.norm(self.linear(x)).masked_fill(self.mask, 0.0) * self.table[:ROWS, None]


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.fn = bottle()

    def forward(self, x):
        return {key: self.fn(t) for key, t in x.items()}


def affine(depth):
    fn, streams = prepared(ScaleShift()), {"a": stream(), "b": stream()}
    names = [("a", "b"), ("b", "a")] * depth
    updates = [rg.Update(target, fn, source, rule=rg.Affine()) for target, source in names]
    return lambda: total(rg.run(updates, streams)).backward()


class Shear(nn.Module):
    """An invertible function on a pair."""

    def __init__(self):
        super().__init__()
        self.fn = bottle()

    def forward(self, x):
        return x[1], x[0] + self.fn(x[1])

    def inverse(self, y):
        return y[1] - self.fn(y[0]), y[0]


def invertible(depth):
    fn, streams = Shear(), {"x": (stream(), stream())}
    updates = rg.wirings.invertible(fn) * depth
    return lambda: sum(t.sum() for t in rg.run(updates, streams)["x"]).backward()


def momentum(depth, arithmetic="auto"):
    fn, streams = bottle(), {"x": stream(), "v": stream()}
    updates = rg.wirings.momentum(fn) * depth
    return lambda: total(rg.run(updates, streams, arithmetic=arithmetic)).backward()


def momentum_in_float(depth):
    return momentum(depth, "float")


def inverted(depth):
    fn, streams = bottle(), {"x1": stream(), "x2": stream()}
    return lambda: total(rg.invert(pairs(depth, fn), streams)).backward()


def chunked(depth):
    x = with_gradient(torch.randn(ROWS, 2 * WIDTH, requires_grad=True))
    net = rg.ReversibleSequence([[bottle()] * 2] * depth, split="chunk", merge="cat")
    return lambda: net(x).sum().backward()


def dicts(depth):
    fn = Tree()
    streams = {name: {"a": stream(), "b": stream()} for name in ("x1", "x2")}
    return lambda: sum(total(out) for out in rg.run(pairs(depth, fn), streams).values()).backward()


def independent(depth):
    fn, streams = bottle(), {name: stream() for name in ("x1", "x2", "m1", "m2")}
    updates = [u for _ in range(depth) for u in rg.wirings.dual(fn, fn, fn, fn)]
    return lambda: total(rg.run(updates, streams)).backward()


def buffers(depth):
    return plain(prepared(Masked()))(depth)


KINDS = [affine, invertible, momentum, momentum_in_float, inverted, chunked, dicts, independent, buffers]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_flat_for_every_kind_of_program(make):
    assert_flat(make, 4, 16)


# -- nothing is left ---------------------------------------------------------------------------------------------------


def drop_output(net):
    out = net()
    assert out["x1"].requires_grad


def drop_loss(net):
    loss = total(net())
    assert loss.requires_grad


def backward(net):
    total(net()).backward()


def backward_and_hold_output(net):
    """After backward an output holds itself and nothing else."""
    out = net()
    total(out).backward()
    assert net.meter.live == len(out) * STREAM


def retained(net):
    loss = total(net())
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def twice_differentiated(net):
    x = torch.ones((), requires_grad=True)
    (first,) = torch.autograd.grad((total(net()) * x).sin(), x, create_graph=True)
    first.backward()


def hook_fails(net):
    """An exception in the middle of backward that has nothing to do with any fn."""
    out = net()

    def fail(_):
        raise KeyError("hook")

    net.fn.a.weight.register_hook(fail)
    failed(lambda: total(out).backward(), KeyError)


def failed(act, kind=RuntimeError):
    """Like pytest.raises, but keeps no traceback, and so no frame and no tensor."""
    try:
        act()
    except kind:
        return
    pytest.fail("did not raise")


class Nest(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.net = rg.Reversible(pairs(2, fn, takes=("context", "context")))

    def forward(self, x, context):
        return self.net({"x1": x, "x2": x}, context=context)["x2"]


class Step:
    """A net with a context that is made for each call."""

    def __init__(self, memory, nested, meter):
        self.fn, self.encoder, self.meter = prepared(Look()), prepared(nn.Linear(WIDTH, WIDTH)), meter
        self.net = rg.Reversible(pairs(2, Nest(self.fn) if nested else self.fn, takes=("context", "context")), memory=memory)
        self.streams, self.source = {"x1": stream(), "x2": stream()}, stream(grad=False)

    def __call__(self):
        return self.net(self.streams, context=self.encoder(self.source))


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@pytest.mark.parametrize(
    "use",
    [drop_output, drop_loss, backward, backward_and_hold_output, retained, twice_differentiated, hook_fails],
    ids=lambda use: use.__name__,
)
@pytest.mark.parametrize("nested", [False, True])
def test_everything_is_freed_without_gc(use, memory, nested):
    """Store leaves nothing either, but for a gradient that autograd itself forgets when a hook fails."""
    left = {}
    for policy in (memory, "store"):
        meter = LiveBytes()
        step = Step(policy, nested, meter)
        with meter:
            use(step)
        assert meter.peak >= 3 * STREAM
        left[policy] = meter.live / STREAM
    assert left[memory] <= left["store"]
    assert left["store"] == 0 or use is hook_fails


class Fails(nn.Module):
    """Raises in one of its two runs."""

    def __init__(self, second):
        super().__init__()
        self.linear, self.second = prepared(nn.Linear(WIDTH, WIDTH)), second

    def forward(self, x):
        y = self.linear(x).tanh()
        if rg.replaying() is self.second:
            raise RuntimeError("planted")
        return y.sin()  # saves a tensor after it: checkpoint stops there


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@pytest.mark.parametrize("second", [False, True])
def test_everything_is_freed_after_an_exception_in_fn(second, memory):
    """At once what the failed run made; with the loss, or with retain_graph, what the graph holds."""
    fn = bottle()
    updates = [*pairs(2, fn), rg.Update("x1", Fails(second), "x2"), *pairs(2, fn)]
    streams = {"x1": stream(), "x2": stream()}
    with LiveBytes() as meter:
        if second:
            loss = total(rg.run(updates, streams, memory=memory))
            before = meter.live
            failed(lambda: loss.backward(retain_graph=True))
            assert meter.live <= before, "the failed walk is still there"
            failed(lambda: loss.backward())
            del loss
        else:
            failed(lambda: rg.run(updates, streams, memory=memory))
        assert meter.peak >= 4 * STREAM
        assert meter.live == 0, f"{meter.live / STREAM:.2f} streams are left"


# -- the random state, counted apart -----------------------------------------------------------------------------------


def random_states():
    """How many states of random generators the records of all runs hold."""
    records = [record for record in gc.get_objects() if type(record) is Record]
    return len({id(mark) for record in records for marks in getattr(record, "drawn", ()) for mark in marks})


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_only_updates_that_draw_keep_a_random_state(memory):
    """5 kB on the CPU (before it and after it, shared with the next that draws), until backward. The meter does not see it."""
    x = torch.randn(2, WIDTH, requires_grad=True)

    def kept(count, drawing):
        fns = [nn.Dropout(0.5) if i in drawing else nn.Tanh() for i in range(count)]
        before = random_states()
        out = rg.run(rg.wirings.leapfrog(fns), {"a": x, "b": x}, memory=memory)
        found = random_states() - before
        total(out).backward()
        del out
        assert random_states() == before
        return found

    none = kept(8, ())
    assert kept(16, ()) == none <= 2
    assert 3 <= kept(16, (2, 5, 9)) - none <= 2 * 3
    assert 7 <= kept(8, range(1, 8)) - none <= 7 + 1
    assert torch.get_rng_state().nbytes < 6000


def test_flat_under_autocast():
    """Autocast keeps its casts of weights until its block ends; not those of a program."""

    def make(depth):
        fns = [prepared(nn.Linear(256, 256)) for _ in range(depth)]
        streams = {name: with_gradient(torch.randn(64, 256, requires_grad=True)) for name in ("a", "b")}

        def step():
            with torch.autocast("cpu", torch.bfloat16):
                out = rg.run(rg.wirings.leapfrog(fns), streams)
                assert torch.is_autocast_cache_enabled()
            total(out).backward()

        return step

    assert_flat(make, 4, 16)
