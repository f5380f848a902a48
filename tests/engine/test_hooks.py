"""Hooks, modes and flags of autograd: as under store and by hand."""

import threading

import pytest
import torch
from autograd_support import DEPTH, Dropped, World, agree, backward, memories, penalty_of
from support import POLICIES, REPLAYED, WIDTH, Attend, assert_same, draw, every_pair, loss_of, mlp, mlps, name_of, parameters, rg
from torch import nn

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


@pytest.mark.parametrize(
    ("which", "freeze", "memory"),
    every_pair(["one weight", "one fn", "every other fn", "all", "context", "input"], [True, False], POLICIES),
    ids=name_of,
)
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
