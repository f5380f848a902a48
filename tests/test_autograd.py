"""Autograd's own graph is in place: whatever part of it is asked for, how often, and with which hooks."""

import threading
from functools import partial

import pytest
import torch
from support import POLICIES, REPLAYED, WIDTH, Attend, assert_same, draw, gradients, loss_of, mlp, mlps, parameters, rg
from torch import nn

DEPTH = 3  # blocks of two updates


class World:
    """A net with a context, its leaves, and three ways to run it."""

    def __init__(self, make=Attend):
        self.fns = [make() for _ in range(2 * DEPTH)]
        self.a, self.b, self.context = draw(2, 3, WIDTH), draw(2, 3, WIDTH), draw(2, 4, WIDTH)
        self.updates = rg.wirings.leapfrog(self.fns, takes="context")

    @property
    def leaves(self):
        return [self.a, self.b, self.context, *parameters(self.fns)]

    def out(self, how):
        if how != "hand":
            return rg.run(self.updates, {"a": self.a, "b": self.b}, {"context": self.context}, memory=how)
        a, b = self.a, self.b
        for f, g in zip(self.fns[::2], self.fns[1::2], strict=True):
            a = a + f(b, context=self.context)
            b = b + g(a, context=self.context)
        return {"a": a, "b": b}

    def clear(self):
        for t in self.leaves:
            t.grad = None

    def grads(self):
        """The .grad of every leaf, zeros for None; and which are None."""
        missing = [t.grad is None for t in self.leaves]
        return [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in self.leaves], missing


def agree(world, memory, act):
    """`act` on the function that makes the outputs returns tensors and anything else: both as under store and by hand."""
    results = []
    for how in (memory, "store", "hand"):
        world.clear()
        torch.manual_seed(0)
        results.append(act(partial(world.out, how)))
    found, *true = results
    for one in true:
        noise = 1e-12 * max(t.norm() for t in one[0])  # for a gradient that is zero up to rounding
        assert_same(*([t * (t.norm() > noise) for t in tensors] for tensors in (found[0], one[0])))
        assert found[1:] == one[1:]
    return found


def backward(world, out):
    loss_of(out()).backward()
    return world.grads()


memories = pytest.mark.parametrize("memory", POLICIES)


# -- what requires grad ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", [["a"], ["b"], ["a", "b"], ["context"], ["a", "b", "context"]])
@memories
def test_inputs_without_grad(memory, without):
    world = World()
    for name in without:
        getattr(world, name).requires_grad_(False)
    _, missing = agree(world, memory, lambda out: backward(world, out))
    assert missing[:3] == [name in without for name in ("a", "b", "context")]


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize(
    "frozen", [[0], [5], [0, 1], [4, 5], [0, 2, 4], [1, 3, 5], [2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5], range(6)]
)
@memories
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


@pytest.mark.parametrize("streams", ["a", "b", "ab"])
@pytest.mark.parametrize("which", ["a", "b", "context", "first fn", "middle fn", "last fn", "context and last fn"])
@memories
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


# -- more than once ----------------------------------------------------------------------------------------------------


@memories
def test_kept_graph(memory):
    """Three backwards of one graph, the last of which frees it; a fourth is refused as ever."""
    world = World(lambda: Dropped(0.3))

    def act(out):
        loss = loss_of(out())
        found = []
        for keep in (True, True, False):
            world.clear()
            loss.backward(retain_graph=keep)
            found += world.grads()[0]
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            loss.backward()
        return (found,)

    found = agree(world, memory, act)[0]
    third = len(found) // 3
    assert all(torch.equal(a, b) for a, b in zip(found[:third], found[third : 2 * third], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found[:third], found[2 * third :], strict=True))


@memories
def test_kept_graph_in_parts(memory):
    """With the graph kept, parts of it in an order that goes up as well as down."""
    world = World()

    def act(out):
        streams = out()
        found = []
        for name, wanted in [
            ("a", world.fns[0].q.weight),
            ("b", world.fns[5].q.weight),
            ("b", world.a),
            ("a", world.fns[4].kv.weight),
            ("b", world.context),
        ]:
            found += torch.autograd.grad(loss_of([streams[name]]), wanted, retain_graph=True)
        return (found,)

    agree(world, memory, act)


class Dropped(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.fn, self.dropout = Attend(), nn.Dropout(dropout)

    def forward(self, x, context):
        return self.dropout(self.fn(x, context))


@memories
def test_accumulation(memory):
    """Gradients of three batches add up in .grad; and two forward passes before one backward of their sum."""
    world = World(lambda: Dropped(0.3))

    def act(out):
        for _ in range(3):
            loss_of(out()).backward()
        (loss_of(out()) + 2 * loss_of(out())).backward()
        return world.grads()

    agree(world, memory, act)


@memories
def test_eval_mode(memory):
    """Backward in eval mode: no dropout, the same in both runs."""
    world = World(lambda: Dropped(0.9))
    for fn in world.fns:
        fn.eval()
    found = agree(world, memory, lambda out: backward(world, out))[0]
    assert_same(found, agree(world, memory, lambda out: backward(world, out))[0])
    for fn in world.fns:
        fn.dropout.p = 0.0
    assert_same(found, agree(world, memory, lambda out: backward(world, out))[0])


# -- second derivatives ------------------------------------------------------------------------------------------------


def penalty_of(grads):
    return sum(((g + 1) ** 2).sum() for g in grads if g is not None)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("of", ["inputs", "all"])
@memories
def test_gradient_penalty(memory, of, dropout):
    """create_graph, then backward of the gradient's norm and the loss together. (Memory is not flat there: what the first
    backward computes with is kept.)"""
    world = World(lambda: Dropped(dropout))

    def act(out):
        loss = loss_of(out())
        wanted = world.leaves if of == "all" else [world.a, world.context]
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        (penalty_of(first) + loss).backward()
        return [*first, *world.grads()[0]], world.grads()[1]

    found = agree(world, memory, act)[0]
    assert all(t.abs().max() > 0 for t in found[:2])


@memories
def test_third_derivatives(memory):
    world = World()

    def act(out):
        first = torch.autograd.grad(loss_of(out()), [world.a, world.context], create_graph=True)
        second = torch.autograd.grad(penalty_of(first), [world.a, world.fns[1].q.weight], create_graph=True)
        penalty_of(second).backward()
        return [*first, *second, *world.grads()[0]], world.grads()[1]

    agree(world, memory, act)


@pytest.mark.parametrize("deleted", [True, False])
@memories
def test_second_backward_of_a_linear_loss(memory, deleted):
    """The loss is linear, so the second backward does not come by the end of the program; the outputs may be gone by then.
    Once, and again with the graph kept: a product with the Hessian for each of several vectors."""
    world = World()
    vectors = [draw(2, 3, WIDTH, grad=False) for _ in range(3)]

    def act(out):
        streams = out()
        first = torch.autograd.grad(streams["a"].sum() + 2 * streams["b"].sum(), world.a, create_graph=True)[0]
        if deleted:
            del streams
        found = [first]
        for v in vectors:
            found += torch.autograd.grad(first, [world.a, world.fns[3].q.weight, world.context], v, retain_graph=True)
        first.backward(vectors[0])
        return [*found, *world.grads()[0]], world.grads()[1]

    agree(world, memory, act)


@memories
def test_output_edited_before_the_second_backward(memory):
    """An output edited after a backward with create_graph: the values of store, or an error that says so."""
    world = World()

    def second(how):
        streams = world.out(how)
        first = torch.autograd.grad(streams["a"].sum() + 2 * streams["b"].sum(), world.a, create_graph=True)[0]
        with torch.no_grad():
            streams["b"].detach().mul_(2)  # the last to be updated: ordinary autograd has not saved it
        return torch.autograd.grad(first.sin().sum(), [world.a, world.context])

    true = second("store")
    try:
        found = second(memory)
    except rg.ReplayError as error:
        assert "'b' was edited in place" in str(error)  # noqa: PT017
    else:
        assert_same(found, true)


@memories
def test_gradcheck(memory):
    """First and second derivatives against finite differences, batched backwards included."""
    fns = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double() for _ in range(4)]
    updates = rg.wirings.leapfrog(fns)
    a, b = draw(1, 2), draw(1, 2)

    def net(a, b, *weights):
        return tuple(rg.run(updates, {"a": a, "b": b}, memory=memory).values())

    inputs = (a, b, *parameters(fns))
    assert torch.autograd.gradcheck(net, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(net, inputs, check_batched_grad=True)


# -- hooks -------------------------------------------------------------------------------------------------------------


def count_hooks(world, memory, scale=1.0):
    """How often each kind of hook fires in one step, and the gradients when backward hooks scale what they see."""

    def act(out):
        fired = {}
        handles = []

        def note(name, value=None):
            fired[name] = fired.get(name, 0) + 1
            return value

        def scaled(name):
            return lambda grad: note(name, grad * scale)

        for i, fn in enumerate(world.fns):
            handles += [
                fn.register_full_backward_hook(
                    lambda m, gi, go, i=i: note(f"full {i}", tuple(None if g is None else g * scale for g in gi))
                ),
                fn.register_full_backward_pre_hook(lambda m, go, i=i: note(f"pre {i}", tuple(g * scale for g in go))),
                fn.q.register_full_backward_hook(lambda m, gi, go, i=i: note(f"inner {i}")),
                fn.q.weight.register_hook(scaled(f"weight {i}")),
                fn.kv.weight.register_post_accumulate_grad_hook(lambda p, i=i: note(f"accumulated {i}")),
            ]
        handles += [world.a.register_hook(scaled("a")), world.context.register_hook(scaled("context"))]
        handles.append(world.b.register_post_accumulate_grad_hook(lambda p: note("b accumulated")))
        streams = out()
        streams["a"].register_hook(lambda grad: note("output a"))
        streams["b"].register_hook(scaled("output b"))
        torch.autograd.graph.register_multi_grad_hook(tuple(streams.values()), lambda grads: note("multi"))
        loss_of(streams).backward()
        for handle in handles:
            handle.remove()
        return *world.grads(), fired

    return agree(world, memory, act)


@memories
def test_backward_hooks(memory):
    """Full backward hooks, tensor hooks and post-accumulate hooks fire as often as under store, and what they change counts."""
    world = World()
    plain, _, fired = count_hooks(world, memory)
    assert set(fired.values()) == {1}
    assert len(fired) == 5 * 2 * DEPTH + 6
    scaled, _, _ = count_hooks(world, memory, scale=1.1)
    assert any(not torch.allclose(a, b) for a, b in zip(plain, scaled, strict=True))


@memories
def test_hooks_of_the_net(memory):
    """A backward hook on the net itself, and gradients kept on the outputs."""
    fns, x = mlps(4), draw()
    results, fired = [], []
    for how in (memory, "store"):
        net = rg.ReversibleSequence(zip(fns[::2], fns[1::2], strict=True), merge=None, memory=how)
        net.register_full_backward_hook(lambda m, gi, go: fired.append((len(gi), len(go))))
        x1, x2 = net(x)
        x1.retain_grad()
        x2.retain_grad()
        loss_of([x1, x2]).backward(inputs=[x, *fns[0].parameters()])
        results.append([x1.grad, x2.grad, x.grad, *(p.grad for p in fns[0].parameters())])
        x.grad = None
        fns[0].zero_grad()
    assert fired == [(1, 2)] * 2
    assert_same(*results)


@pytest.mark.parametrize("memory", REPLAYED)
def test_forward_hooks(memory):
    """Forward hooks fire twice, once for each run (`rg.replaying()` tells which); what they change is changed in both."""
    world = World()
    fired = []
    for i, fn in enumerate(world.fns):
        fn.register_forward_pre_hook(lambda m, args, i=i: fired.append((f"pre {i}", rg.replaying())))
        fn.register_forward_hook(lambda m, args, out, i=i: (fired.append((f"post {i}", rg.replaying())), out * 1.5)[1])
    agree(world, memory, lambda out: backward(world, out))
    names = [f"{when} {i}" for i in range(2 * DEPTH) for when in ("pre", "post")]
    once, again = [(n, False) for n in names], {(n, True) for n in names}
    assert fired[: len(names)] == once
    assert set(fired[len(names) : 2 * len(names)]) == again
    assert fired[2 * len(names) :] == once * 2  # store and by hand


@memories
def test_retained_grads(memory):
    """retain_grad on the outputs, and on an input that is no leaf."""
    world = World()
    leaf = world.a
    results = []
    for how in (memory, "store", "hand"):
        world.a = leaf.sin()
        world.a.retain_grad()
        streams = world.out(how)
        for t in streams.values():
            t.retain_grad()
        loss_of(streams).backward()
        results.append([world.a.grad, streams["b"].grad, streams["a"].grad])
    assert_same(results[0][:2], results[2][:2])
    assert_same(results[0], results[1])  # a is read by the last update, so by hand its gradient has a second part


# -- modes and flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [False, True])
@memories
def test_anomaly_mode(memory, second):
    """The same gradients under anomaly detection; and it finds a nan that fn's backward makes."""
    world = World()

    def act(out):
        with torch.autograd.set_detect_anomaly(True):
            first = torch.autograd.grad(loss_of(out()), [world.a, world.context], create_graph=second)
            return ([*first, *(torch.autograd.grad(penalty_of(first), world.leaves, allow_unused=False) if second else [])],)

    agree(world, memory, act)
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    bad = rg.Update("a", lambda t: t.square().sqrt(), "b")
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="Error detected in PowBackward0"):
        with pytest.raises(RuntimeError, match="returned nan"):
            rg.run([bad], {"a": x, "b": x}, memory=memory)["a"].sum().backward()


@pytest.mark.parametrize("which", ["one weight", "one fn", "every other fn", "all", "context", "input"])
@pytest.mark.parametrize("freeze", [True, False])
@memories
def test_toggled_in_between(memory, freeze, which):
    """requires_grad switched between the two passes: the gradients of the graph as it was made, and the flags stay."""
    world = World()
    toggled = {
        "one weight": [world.fns[3].kv.weight],
        "one fn": parameters(world.fns[2:3]),
        "every other fn": parameters(world.fns[::2]),
        "all": parameters(world.fns),
        "context": [world.context],
        "input": [world.a],
    }[which]

    def act(out):
        for t in toggled:
            t.requires_grad_(freeze)
        streams = out()
        for t in toggled:
            t.requires_grad_(not freeze)
        loss_of(streams).backward()
        assert all(t.requires_grad is not freeze for t in toggled)
        return world.grads()

    agree(world, memory, act)


@memories
def test_backward_under_no_grad_and_elsewhere(memory):
    """Backward called under no_grad, and in another thread."""
    world = World(lambda: Dropped(0.3))

    def act(out):
        loss = loss_of(out())
        with torch.no_grad():
            loss.backward(retain_graph=True)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return world.grads()

    agree(world, memory, act)


class Inner(nn.Module):
    """A branch that is itself a gradient: autograd.grad inside fn."""

    def __init__(self):
        super().__init__()
        self.fn = mlp()

    def forward(self, x, context):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = (self.fn(x).sin() * context.mean(1, keepdim=True)).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


@memories
def test_fn_that_is_a_gradient(memory):
    """An fn that calls autograd.grad with create_graph on its own source."""
    world = World(Inner)
    agree(world, memory, lambda out: backward(world, out))


class Twice(torch.autograd.Function):
    """Reads its saved tensors twice in backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.sin() * w

    @staticmethod
    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        _, w = ctx.saved_tensors
        return grad * x.cos() * w, (grad * x.sin()).sum((0, 1))


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.fn, self.w = Attend(), nn.Parameter(draw(WIDTH, grad=False))

    def forward(self, x, context):
        return Twice.apply(self.fn(x, context), self.w)


@memories
def test_saved_tensors_read_twice(memory):
    """Custom functions that read ctx.saved_tensors more than once, at every depth, with the graph kept."""
    world = World(Custom)

    def act(out):
        loss = loss_of(out())
        loss.backward(retain_graph=True)
        loss.backward()
        return world.grads()

    agree(world, memory, act)
