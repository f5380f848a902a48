"""Parts of the gradient, and what requires grad: as under store and by hand."""

import pytest
import torch
from autograd_support import DEPTH, World, agree, backward, memories
from support import POLICIES, WIDTH, Attend, assert_same, draw, every_pair, gradients, loss_of, mlps, name_of, parameters, rg
from torch import nn

# -- what requires grad ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", [["a"], ["b"], ["a", "b"], ["context"], ["a", "b", "context"]])
@memories
def test_inputs_without_grad(memory, without):
    world = World()
    for name in without:
        getattr(world, name).requires_grad_(False)
    _, missing = agree(world, memory, lambda out: backward(world, out))
    assert missing[:3] == [name in without for name in ("a", "b", "context")]


@pytest.mark.parametrize(
    ("inputs", "frozen", "memory"),
    every_pair(
        [True, False],
        [[0], [5], [0, 1], [4, 5], [0, 2, 4], [1, 3, 5], [2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5], range(6)],
        POLICIES,
    ),
    ids=name_of,
)
def test_frozen_fns(memory, frozen, inputs):
    """One fn, blocks from either end or the middle, every f, every g, all but one and all; with inputs that require grad and
    without, so that some or all of what lies below needs no gradient."""
    world = World()
    for p in parameters([world.fns[i] for i in frozen]):
        p.requires_grad_(False)
    for t in (world.a, world.b):
        t.requires_grad_(inputs)
    agree(world, memory, lambda out: backward(world, out))


@memories
def test_half_frozen_fns(memory):
    """Biases alone (every weight frozen), then weights alone."""
    for weights in (False, True):
        world = World()
        for name, p in nn.ModuleList(world.fns).named_parameters():
            p.requires_grad_(name.endswith("weight") == weights)
        world.a.requires_grad_(False)
        world.b.requires_grad_(False)
        agree(world, memory, lambda out: backward(world, out))


@memories
def test_nothing_requires_grad(memory):
    world = World()
    for t in world.leaves:
        t.requires_grad_(False)
    runs = []
    for fn in world.fns:
        fn.register_forward_hook(lambda *_: runs.append(1))
    out = world.out(memory)
    assert len(runs) == 2 * DEPTH
    assert not any(t.requires_grad for t in out.values())
    assert_same(out.values(), world.out("hand").values())


class Spare(nn.Module):
    """A branch with a parameter that it does not use, and one whose result it throws away."""

    def __init__(self):
        super().__init__()
        self.fn, self.unused, self.dropped = Attend(), nn.Linear(2, 2).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x, context):
        self.dropped(x)
        return self.fn(x, context)


@memories
def test_unused_parameters(memory):
    """They get no gradient, None as ever."""
    world = World(Spare)
    _, missing = agree(world, memory, lambda out: backward(world, out))
    assert sum(missing) == 4 * 2 * DEPTH


class Cut(nn.Module):
    """A branch that detaches: no gradient flows to its source, or none to its second half."""

    def __init__(self, where):
        super().__init__()
        self.fn, self.where = Attend(), where

    def forward(self, x, context):
        if self.where == "source":
            return self.fn(x.detach(), context)
        if self.where == "no_grad":
            with torch.no_grad():
                return self.fn(x, context)
        return self.fn(x, context).detach()


@pytest.mark.parametrize("where", ["source", "output", "no_grad"])
@memories
def test_detached_inside(memory, where):
    """Every other fn cuts the graph."""
    kinds = iter([where, "nowhere"] * DEPTH)

    def make():
        kind = next(kinds)
        return Attend() if kind == "nowhere" else Cut(kind)

    world = World(make)
    agree(world, memory, lambda out: backward(world, out))


# -- parts of the gradient ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("streams", "which", "memory"),
    every_pair(["a", "b", "ab"], ["a", "b", "context", "first fn", "middle fn", "last fn", "context and last fn"], POLICIES),
    ids=name_of,
)
def test_grad_of_one(memory, which, streams):
    """`autograd.grad` for an input, one parameter or the context alone, of a loss on some of the output streams."""
    world = World()
    weight = {"first fn": 0, "middle fn": 3, "last fn": 5}
    wanted = [
        getattr(world, name) if hasattr(world, name) else world.fns[weight[name]].kv.weight for name in which.split(" and ")
    ]
    unused = streams == "a" and "last fn" in which

    def act(out):
        streams_out = out()
        found = torch.autograd.grad(loss_of([streams_out[name] for name in streams]), wanted, allow_unused=unused)
        return [*streams_out.values(), *(torch.zeros(1) if g is None else g for g in found)], [g is None for g in found]

    agree(world, memory, act)


@pytest.mark.parametrize("which", [["a"], ["context"], ["b", "fn"], ["fn"]])
@memories
def test_backward_inputs(memory, which):
    """`backward(inputs=…)` leaves every other .grad alone."""
    world = World()
    wanted = [world.fns[2].q.weight if name == "fn" else getattr(world, name) for name in which]

    def act(out):
        loss_of(out()).backward(inputs=wanted)
        return world.grads()

    _, missing = agree(world, memory, act)
    assert missing.count(False) == len(which)


@pytest.mark.parametrize("used", ["s0", "s1", "s2", ["s0", "s2"], ["s2", "s1"]])
@memories
def test_loss_on_some_streams(memory, used):
    """Of three streams, some are in the loss; one of the others is dropped at once."""
    fns, streams = mlps(6), {f"s{i}": draw() for i in range(3)}
    updates = rg.wirings.groups(fns[:3]) + rg.wirings.groups(fns[3:])

    def by_hand():
        s0, s1, s2 = streams.values()
        for f0, f1, f2 in (fns[:3], fns[3:]):
            s0 = s0 + f0(s1 + s2)
            s1 = s1 + f1(s0)
            s2 = s2 + f2(s1)
        return {"s0": s0, "s1": s1, "s2": s2}

    def part(out):
        return [out[name] for name in ([used] if isinstance(used, str) else used)]

    wanted = [*streams.values(), *parameters(fns)]
    found = gradients(lambda: part(rg.run(updates, streams, memory=memory)), wanted)
    assert_same(found, gradients(lambda: part(rg.run(updates, streams, memory="store")), wanted))
    assert_same(found, gradients(lambda: part(by_hand()), wanted))


@pytest.mark.parametrize("order", ["xm", "mx"])
@pytest.mark.parametrize("shared", [False, True])
@memories
def test_two_losses_on_independent_streams(memory, order, shared):
    """Dual wiring: one backward after the other, neither keeps its graph, in either order; functions shared by both or not."""
    fns = mlps(4, dropout=0.3) * 2 if shared else mlps(8, dropout=0.3)
    streams = {name: draw() for name in ("x1", "x2", "m1", "m2")}
    updates = [u for i in (0, 4) for u in rg.wirings.dual(*fns[i : i + 4])]

    def by_hand():
        x1, x2, m1, m2 = streams.values()
        for f, g, j, k in (fns[:4], fns[4:]):
            x1 = x1 + f(x2)
            x2 = x2 + g(x1)
            m1 = m1 + j(m2)
            m2 = m2 + k(m1)
        return {"x1": x1, "x2": x2, "m1": m1, "m2": m2}

    wanted = [*streams.values(), *parameters(fns)]
    results = []
    for how in (memory, "store", "hand"):
        for t in wanted:
            t.grad = None
        torch.manual_seed(0)
        out = by_hand() if how == "hand" else rg.run(updates, streams, memory=how)
        for part in order:
            loss_of([out[part + "1"], out[part + "2"]]).backward()
        results.append([t.grad for t in wanted])
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@memories
def test_streams_that_pass_by(memory):
    """A stream that is read and never updated, and one that no update names: themselves in the output, with their gradients."""
    f, g = mlps(2)
    streams = {"a": draw(), "read": draw(), "idle": draw()}
    updates = [rg.Update("a", f, "read"), rg.Update("a", g, "read")]
    wanted = [*streams.values(), *parameters([f, g])]

    def by_hand():
        a, read, idle = streams.values()
        return {"a": a + f(read) + g(read), "read": read, "idle": idle}

    found = gradients(lambda: rg.run(updates, streams, memory=memory), wanted)
    assert rg.run(updates, streams, memory=memory)["idle"] is streams["idle"]
    assert_same(found, gradients(lambda: rg.run(updates, streams, memory="store"), wanted))
    assert_same(found, gradients(by_hand, wanted))


class Penalised(nn.Module):
    """A branch that leaves a loss of its own beside its output, as a mixture of experts does."""

    def __init__(self):
        super().__init__()
        self.fn = Attend()

    def forward(self, x, context):
        out = self.fn(x, context)
        if not rg.replaying():
            self.penalty = torch.linalg.vector_norm(out)
        else:
            torch.linalg.vector_norm(out)
        return out


@pytest.mark.parametrize("order", ["together", "first", "afterwards"])
@memories
def test_losses_from_inside(memory, order):
    """A loss made inside fn reaches autograd beside the streams: with the main loss, before it or after it."""
    world = World(Penalised)

    def act(out):
        main = loss_of(out())
        inner = [fn.penalty for fn in world.fns]
        if order == "together":
            (main + sum(inner)).backward()
        elif order == "first":
            inner[2].backward(retain_graph=True)
            sum(inner[:2] + inner[3:]).backward(retain_graph=True)
            main.backward()
        else:
            main.backward(retain_graph=True)
            inner[4].backward(retain_graph=True)
            inner[1].backward(retain_graph=True)
        return world.grads()

    agree(world, memory, act)
