"""More than one backward pass, and second derivatives: as under store and by hand."""

import pytest
import torch
from autograd_support import Dropped, World, agree, backward, memories, penalty_of
from support import WIDTH, assert_same, draw, loss_of, parameters, rg
from torch import nn

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
