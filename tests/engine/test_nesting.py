"""Programs in the company of randomness, sharing, other programs, checkpoint, hooks and autograd inside fn."""

import copy
from functools import partial

import pytest
import torch
from support import POLICIES, WIDTH, assert_same, draw, every_pair, gradients, loss_of, mlp, mlps, name_of, parameters, rg
from torch import nn
from torch.utils.checkpoint import checkpoint

EVERY = ["store", *POLICIES]
every_memory = pytest.mark.parametrize("memory", EVERY)
dropouts = pytest.mark.parametrize("dropout", [0.0, 0.4])
reentrant = pytest.mark.parametrize("use_reentrant", [True, False])


def by_hand(fns, a, b, **side):
    """a += f0(b); b += f1(a); …"""
    for i, fn in enumerate(fns):
        a, b = (a, b + fn(a, **side)) if i % 2 else (a + fn(b, **side), b)
    return a, b


def leapfrog(fns, a, b, memory, **side):
    """The same as a program, or written by hand where memory is None."""
    if memory is None:
        return by_hand(fns, a, b, **side)
    out = rg.run(rg.wirings.leapfrog(fns, takes=tuple(side)), {"a": a, "b": b}, side, memory=memory)
    return out["a"], out["b"]


def accumulated(make, wanted, seed=0):
    """Like `gradients`, by backward(): reentrant checkpoint allows no other way."""
    for t in wanted:
        t.grad = None
    torch.manual_seed(seed)
    out = make()
    loss_of(out).backward()
    return [t.detach() for t in out] + [torch.zeros_like(t) if t.grad is None else t.grad for t in wanted]


def as_by_hand(make, memory, wanted, how=gradients):
    """make(memory) against make(None), by hand; the random state afterwards is the same, too."""
    found, state = how(lambda: make(memory), wanted), torch.get_rng_state()
    assert_same(found, how(lambda: make(None), wanted))
    assert torch.equal(state, torch.get_rng_state())


# -- randomness and sharing --------------------------------------------------------------------------------------------


@every_memory
def test_dropout(memory):
    """Dropout in every fn, in training: the second run drops the same, and the random state moves on as ordinarily."""
    fns = mlps(8, dropout=0.4)
    a, b = draw(), draw()
    as_by_hand(lambda memory: leapfrog(fns, a, b, memory), memory, [a, b, *parameters(fns)])
    first, second = (leapfrog(fns, a, b, memory)[0] for _ in range(2))
    assert not torch.equal(first, second)


class Noisy(nn.Module):
    """Draws in all the ways fn may: F.dropout, rand, randperm, a generator given as a side input."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x, generator):
        x = nn.functional.dropout(self.inner(x), 0.3)
        x = x * torch.rand_like(x) + torch.randn(x.shape, generator=generator, dtype=x.dtype).sin() * x
        return x[:, torch.randperm(x.shape[1])]


@every_memory
def test_other_generators(memory):
    """Random numbers from several sources, a generator of the user's own among them."""
    fns, generator, a, b = [Noisy() for _ in range(4)], torch.Generator(), draw(), draw()

    def make(memory):
        generator.manual_seed(3)
        return leapfrog(fns, a, b, memory, generator=generator)

    as_by_hand(make, memory, [a, b, *parameters(fns)])
    left = generator.get_state()
    make(None)
    assert torch.equal(left, generator.get_state())


class Held(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, generator):
        super().__init__()
        self.inner, self.generator = mlp(), generator

    def forward(self, x):
        return self.inner(x) * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


@every_memory
def test_generator_held_by_fn(memory):
    """A generator that is an attribute of fn: its numbers come again, and it moves on once."""
    generator = torch.Generator()
    fns, a, b = [Held(generator) for _ in range(4)], draw(), draw()

    def make(memory):
        generator.manual_seed(3)
        return leapfrog(fns, a, b, memory)

    as_by_hand(make, memory, [a, b, *parameters(fns)])


class Forked(nn.Module):
    """Draws from the global generator and puts its state back, so that fns share a mask."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            return nn.functional.dropout(self.inner(x), 0.4)


@every_memory
def test_draws_that_are_put_back(memory):
    """fn that draws without moving the random state sees the same numbers again, wherever the state is by then."""
    fns, a, b = [Forked(), mlp(dropout=0.4), Forked(), Forked()], draw(), draw()

    def make(memory):
        out = leapfrog(fns, a, b, memory)
        torch.rand(5)
        return out

    as_by_hand(make, memory, [a, b, *parameters(fns)])


@every_memory
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_two_backwards(memory, order):
    """On different inputs, with dropout, in either order; random numbers drawn in between do not matter."""
    fns = mlps(6, dropout=0.4)
    inputs = [draw() for _ in range(4)]
    wanted = [*inputs, *parameters(fns)]

    def make(memory):
        torch.manual_seed(0)
        outs = [leapfrog(fns, *inputs[:2], memory), leapfrog(fns, *inputs[2:], memory)]
        torch.rand(7)
        found = []
        for i in order:
            found += torch.autograd.grad(loss_of(outs[i]), wanted, allow_unused=True)
            torch.rand(3)
        return [torch.zeros(()) if g is None else g for g in found]

    assert_same(make(memory), make(None))


@every_memory
@dropouts
def test_shared_modules(memory, dropout):
    """The same module at several depths, on both streams, and the very same Update more than once."""
    f, g = mlps(2, dropout)
    a, b = draw(), draw()
    fns = [f, g, f, f, g, g, f, g]
    as_by_hand(lambda memory: leapfrog(fns, a, b, memory), memory, [a, b, *parameters([f, g])])
    repeated = rg.wirings.leapfrog([f, g]) * 4

    def make(memory):
        if memory is None:
            return leapfrog([f, g] * 4, a, b, None)
        return tuple(rg.run(repeated, {"a": a, "b": b}, memory=memory).values())

    as_by_hand(make, memory, [a, b, *parameters([f, g])])


TWICE = {
    "after itself": lambda net, a, b: net(*net(a, b)),
    "side by side": lambda net, a, b: (*net(a, b), *net(b.sin(), a.cos())),
    "one in the input of the other": lambda net, a, b: net(a, net(a, b)[1] * b),
    "of its own output twice": lambda net, a, b: net(*(out := net(a, b))) + net(out[1], out[0]),
}


@every_memory
@pytest.mark.parametrize("name", TWICE)
def test_net_twice_in_one_graph(memory, name):
    """The state of a forward pass is not on the module."""
    fns = mlps(4, dropout=0.4)
    a, b = draw(), draw()
    as_by_hand(lambda memory: TWICE[name](lambda *x: leapfrog(fns, *x, memory), a, b), memory, [a, b, *parameters(fns)])


@every_memory
def test_net_as_its_own_side_input(memory):
    """The output of one pass is the context of the next."""
    fns = [Inside(1) for _ in range(4)]
    a, b = draw(), draw()

    def make(memory):
        for fn in fns:
            fn.memory = memory
        first = leapfrog(fns, a, b, memory, context=b.sin())
        return leapfrog(fns, a, b, memory, context=first[0] + first[1])

    as_by_hand(make, memory, [a, b, *parameters(fns)])


# -- programs inside programs ------------------------------------------------------------------------------------------


class Inside(nn.Module):
    """A branch that is `levels` programs deep; each level makes a side input for the next from its source and its own context."""

    def __init__(self, levels, dropout=0.0, memory=None):
        super().__init__()
        self.first, self.memory = mlp(dropout=dropout), memory
        self.project = nn.Linear(WIDTH, WIDTH).double()
        self.inner = nn.ModuleList(Inside(levels - 1, dropout) for _ in range(2)) if levels > 1 else None
        self.last = mlp(dropout=dropout)

    def forward(self, x, context):
        h = self.first(x) * context.sin()
        if self.inner is not None:
            for fn in self.inner:
                fn.memory = self.memory
            a, b = leapfrog(list(self.inner), h, x.tanh(), self.memory, context=self.project(x + context))
            h = a * b.cos()
        return self.last(h)


@pytest.mark.parametrize(("outer", "inner", "size"), every_pair(POLICIES, EVERY, [(2, 0.0), (2, 0.4), (3, 0.4)]), ids=name_of)
def test_programs_inside_programs(outer, inner, size):
    """Two and three levels under every mixture of policies; the inner side inputs are computed inside the outer fn."""
    levels, dropout = size
    fns = [Inside(levels, dropout) for _ in range(3)]
    a, b, context = draw(), draw(), draw(1, WIDTH)

    def make(memory):
        for fn in fns:
            fn.memory = memory and inner
        return leapfrog(fns, a, b, memory, context=context)

    as_by_hand(make, outer, [a, b, context, *parameters(fns)])


@every_memory
def test_sequence_inside_sequence(memory):
    """Modules as fns: a ReversibleSequence is a branch of another, and is shared between depths."""
    inner = [mlps(2, dropout=0.4) for _ in range(2)]
    nested = rg.ReversibleSequence(inner, merge="sum", memory=memory)
    other = mlp(dropout=0.4)
    net = rg.ReversibleSequence([(nested, other), (other, nested)], memory=memory)
    x = draw()

    def plain(fns, x):
        x1 = x2 = x
        for f, g in fns:
            x1 = x1 + f(x2)
            x2 = x2 + g(x1)
        return x1 + x2

    def make(memory):
        if memory is not None:
            return (net(x),)
        same = lambda x: plain(inner, x)  # noqa: E731
        return (plain([(same, other), (other, same)], x) / 2,)

    as_by_hand(make, memory, [x, *net.parameters()])


class Plain:
    """Not a module, and not callable."""

    def __init__(self, norm, linear):
        self.norm, self.linear = norm, linear

    def branch(self, x):
        return self.linear(self.norm(x)).tanh()


def _nested(plain):
    updates = rg.wirings.leapfrog([nn.Sequential(plain.norm, plain.linear), plain.linear])

    def fn(x):
        out = rg.run(updates, {"a": x, "b": x.sin()})
        return (out["a"] * out["b"]).tanh()

    return fn


BEHIND = {"method": lambda plain: plain.branch, "partial": lambda plain: partial(Plain.branch, plain), "program": _nested}


@pytest.mark.parametrize("memory", POLICIES)
@pytest.mark.parametrize("name", BEHIND)
def test_modules_behind_plain_callables(memory, name):
    """fn is no module, and holds on to its modules through an object or a list of updates: they are found there."""
    plain = Plain(nn.BatchNorm1d(WIDTH).double(), nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH).double()))
    modules, a, b = nn.ModuleList([plain.norm, plain.linear]), draw(), draw()
    fn, before = BEHIND[name](plain), copy.deepcopy(modules.state_dict())

    def step(memory):
        modules.load_state_dict(before)
        out = gradients(lambda: leapfrog([fn] * 4, a, b, memory), [a, b, *modules.parameters()])
        return out, [t.double() for t in copy.deepcopy(modules.state_dict()).values()]

    (found, buffers), (true, true_buffers) = step(memory), step("store")
    assert_same(found, true)
    assert_same(buffers, true_buffers)


@every_memory
@pytest.mark.parametrize("also_streams", [True, False])
def test_loss_left_behind_by_fn(memory, also_streams):
    """fn leaves a loss of its own on the side, as a mixture of experts does; alone or with a loss on the streams."""
    inner, a, b = mlp(dropout=0.3), draw(), draw()
    streams, losses = (), []

    def fn(x):
        h = inner(x)
        left = h.square().sin().mean()
        if not rg.replaying():
            losses.append(left)
        return h.tanh()

    def make(memory):
        nonlocal streams
        losses.clear()
        streams = leapfrog([fn] * 4, a, b, memory)
        return [*losses, *(streams if also_streams else ())]

    as_by_hand(make, memory, [a, b, *inner.parameters()])


# -- checkpoint and other users of hooks -------------------------------------------------------------------------------


@every_memory
@reentrant
@dropouts
def test_program_inside_checkpoint(memory, use_reentrant, dropout):
    """Two checkpointed programs, one after the other, with a context."""
    nets = [[Inside(1, dropout) for _ in range(4)] for _ in range(2)]
    a, b, context = draw(), draw(), draw(1, WIDTH)

    def make(memory):
        x = a, b
        for fns in nets:
            call = lambda a, b, c, fns=fns: leapfrog(fns, a, b, memory, context=c.cos())  # noqa: E731
            x = call(*x, context) if memory is None else checkpoint(call, *x, context, use_reentrant=use_reentrant)
        return x

    as_by_hand(make, memory, [a, b, context, *parameters(fn for fns in nets for fn in fns)], accumulated)


class Checkpointed(nn.Module):
    """A branch with a part that is checkpointed."""

    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.first, self.inner, self.last = mlp(), inner, mlp()
        self.use_reentrant, self.on = use_reentrant, True

    def forward(self, x, context):
        h = self.first(x)
        h = (
            checkpoint(self.inner, h, context.sin(), use_reentrant=self.use_reentrant)
            if self.on
            else self.inner(h, context.sin())
        )
        return self.last(h * x)


@pytest.mark.parametrize(
    ("memory", "use_reentrant", "size"), every_pair(EVERY, [True, False], [(1, 0.0), (1, 0.4), (2, 0.4)]), ids=name_of
)
def test_checkpoint_inside_program(memory, use_reentrant, size):
    """A checkpointed part of fn; with two levels a program inside that."""
    levels, dropout = size
    fns = [Checkpointed(Inside(levels, dropout), use_reentrant) for _ in range(4)]
    a, b, context = draw(), draw(), draw(1, WIDTH)

    def make(memory):
        for fn in fns:
            fn.on, fn.inner.memory = memory is not None, memory
        return leapfrog(fns, a, b, memory, context=context)

    as_by_hand(make, memory, [a, b, context, *parameters(fns)], accumulated)


@pytest.mark.filterwarnings("ignore:None of the inputs")  # torch's own: inside a reentrant checkpoint nothing has a grad
@every_memory
@reentrant
def test_checkpoint_around_checkpoint_inside(memory, use_reentrant):
    """Checkpoint, program, checkpoint, program, with dropout."""
    fns = [Checkpointed(Inside(2, 0.4), use_reentrant) for _ in range(2)]
    a, b, context = draw(), draw(), draw(1, WIDTH)

    def make(memory):
        for fn in fns:
            fn.on, fn.inner.memory = memory is not None, memory
        call = lambda a, b, c: leapfrog(fns, a, b, memory, context=c)  # noqa: E731
        return call(a, b, context) if memory is None else checkpoint(call, a, b, context, use_reentrant=use_reentrant)

    as_by_hand(make, memory, [a, b, context, *parameters(fns)], accumulated)


@pytest.mark.parametrize("memory", POLICIES)
def test_hooks_around_a_program(memory):
    """What a program keeps passes through the hooks around it (save_on_cpu and the user's own) and comes back from there."""
    fns = [Inside(2, 0.4) for _ in range(4)]
    a, b, context = draw(), draw(), draw(1, WIDTH)
    packed = []

    def pack(t):
        packed.append(t.shape)
        return t.clone()

    hooks = [torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(pack, torch.clone)]
    for hook in hooks:

        def make(memory):
            for fn in fns:
                fn.memory = memory
            if memory is None:
                return leapfrog(fns, a, b, None, context=context)
            with hook:
                return leapfrog(fns, a, b, memory, context=context)

        as_by_hand(make, memory, [a, b, context, *parameters(fns)])
    per_run = {"reverse": 3, "checkpoint": 4 * 2}  # streams and context; one source and the context for each update
    assert len(packed) == per_run.get(memory, len(packed))


# -- autograd inside fn ------------------------------------------------------------------------------------------------


class Force(nn.Module):
    """fn whose output is a gradient: of an energy, or of what a program makes of it."""

    def __init__(self, deep=False):
        super().__init__()
        self.energy = mlp()
        self.fns = nn.ModuleList(mlps(2)) if deep else None
        self.memory = None

    def forward(self, x, context):
        x = x if x.requires_grad else x.requires_grad_()
        e = self.energy(x * context.cos())
        if self.fns is not None:
            e = sum(leapfrog(list(self.fns), e, x.sin(), self.memory))
        return -torch.autograd.grad(e.sin().sum(), x, create_graph=True)[0]


@every_memory
@pytest.mark.parametrize("deep", [False, True])
def test_gradient_inside_fn(memory, deep):
    """A Hamiltonian net: fn calls autograd.grad with create_graph, through a program of its own where `deep`."""
    fns = [Force(deep) for _ in range(4)]
    a, b, context = draw(), draw(), draw(1, WIDTH)

    def make(memory):
        for fn in fns:
            fn.memory = memory
        return leapfrog(fns, a, b, memory, context=context)

    as_by_hand(make, memory, [a, b, context, *parameters(fns)])


class Constant(Force):
    """The gradient enters as a number, without a graph."""

    def forward(self, x, context):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            e = (self.energy(y) * context).sin().sum()
        return self.energy(x) * torch.autograd.grad(e, y)[0]


@every_memory
def test_gradient_inside_fn_without_graph(memory):
    """autograd.grad inside fn that frees its graph."""
    fns = [Constant() for _ in range(4)]
    a, b, context = draw(), draw(), draw(1, WIDTH)
    as_by_hand(lambda memory: leapfrog(fns, a, b, memory, context=context), memory, [a, b, context, *parameters(fns)])


class ReadsTwice(torch.autograd.Function):
    """x * w, with a backward that reads its saved tensors anew for each gradient."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]


class Product(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner = mlp(), inner

    def forward(self, x, context):
        return self.inner(ReadsTwice.apply(self.first(x), x.sin()), context)


@every_memory
@pytest.mark.parametrize("levels", [1, 2])
def test_saved_tensors_read_twice(memory, levels):
    """A custom Function reads its saved tensors twice; with two levels, after a program in the same fn has had its backward."""
    fns = [Product(Inside(levels)) for _ in range(4)]
    a, b, context = draw(), draw(), draw(1, WIDTH)

    def make(memory):
        for fn in fns:
            fn.inner.memory = memory
        return leapfrog(fns, a, b, memory, context=context)

    as_by_hand(make, memory, [a, b, context, *parameters(fns)])
