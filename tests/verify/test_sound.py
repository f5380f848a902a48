"""Sound code that gets no false alarm, and gradients as under store."""

import inspect
import types
from functools import partial

import pytest
import torch
from sound_nets import Leaves, Rotary, Routed
from support import POLICIES, REPLAYED, WIDTH, agree, draw, linear, loss_of, mlps, net_of, parameters, rg, streams
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

every_policy = pytest.mark.parametrize("memory", POLICIES, ids=str)
every_replayed = pytest.mark.parametrize("memory", REPLAYED)


# -- hooks and callbacks -----------------------------------------------------------------------------------------------


@every_replayed
@pytest.mark.parametrize("when", ["added", "removed", "both"])
def test_hooks_that_only_record(when, memory):
    def step(memory):
        fns, seen = mlps(4), []
        net = net_of(fns, memory)

        def hook():
            return fns[1].register_forward_hook(lambda module, args, out: seen.append(out.detach().norm()))

        handle = hook() if when != "added" else None
        loss = loss_of(net(streams()))
        if handle is not None:
            handle.remove()
        if when != "removed":
            hook()
        return torch.autograd.grad(loss, list(net.parameters()))

    agree(step, memory)


@every_replayed
@pytest.mark.parametrize("when", ["added", "removed", "moved"])
def test_hooks_that_compute_what_they_record(when, memory):
    """Under grad, so that they save tensors, of the shape of others: what is asked for is found all the same."""

    def step(memory):
        fns, seen = [nn.Sequential(linear(), nn.Tanh()) for _ in range(4)], []
        net = net_of(fns, memory)

        def hook(module):
            return module.register_forward_hook(lambda module, args, out: seen.append(out.exp().sum().item()))

        handle = hook(fns[1][0]) if when != "added" else None
        loss = loss_of(net(streams()))
        if handle is not None:
            handle.remove()
        if when != "removed":
            hook(fns[1][-1])
        return torch.autograd.grad(loss, list(net.parameters()))

    agree(step, memory)


HARMLESS = {  # they change nothing
    "before": lambda m: m.register_forward_pre_hook(lambda module, args: tuple(t.clone() for t in args)),
    "same": lambda m: m.register_forward_hook(lambda module, args, kwargs, out: out * 1, with_kwargs=True),
    "backward": lambda m: m.register_full_backward_hook(lambda module, before, after: None),
    "before backward": lambda m: m.register_full_backward_pre_hook(lambda module, after: None),
    "of a tensor": lambda m: m.register_forward_hook(lambda module, args, out: out.retain_grad()),
}


@every_replayed
@pytest.mark.parametrize("when", ["added", "removed"])
@pytest.mark.parametrize("kind", HARMLESS)
def test_hooks_of_other_kinds(kind, when, memory):
    def step(memory):
        fns = mlps(4)
        net = net_of(fns, memory)
        handle = HARMLESS[kind](fns[1][1]) if when == "removed" else None
        loss = loss_of(net(streams()))
        if handle is None:
            HARMLESS[kind](fns[1][1])
        else:
            handle.remove()
        return torch.autograd.grad(loss, list(net.parameters()))

    agree(step, memory)


class Calls(nn.Module):
    """Shows what it computes to whoever has asked."""

    def __init__(self):
        super().__init__()
        self.linear, self.callback = linear(), None

    def forward(self, x):
        y = self.linear(x).tanh()
        if self.callback is not None:
            self.callback(y)
        return y


@every_replayed
def test_a_callback_that_is_gone_in_backward(memory):
    def step(memory):
        net = net_of([Calls() for _ in range(4)], memory)
        seen = []
        for fn in net.fns:
            fn.callback = seen.append
        loss = loss_of(net(streams()))
        for fn in net.fns:
            fn.callback = None
        return torch.autograd.grad(loss, list(net.parameters()))

    agree(step, memory)


# -- caches ------------------------------------------------------------------------------------------------------------


@every_policy
def test_a_cache_that_grows_before_the_first_backward(memory):
    def step(memory):
        net = net_of([Rotary() for _ in range(4)], memory)
        losses = [loss_of(net({"a": draw(rows, WIDTH), "b": draw(rows, WIDTH)})) for rows in (3, 7)]
        return [g for loss in losses for g in torch.autograd.grad(loss, list(net.parameters()))]

    if not isinstance(memory, rg.ReverseAbove):
        agree(step, memory)


# -- modules around ----------------------------------------------------------------------------------------------------


class Child(nn.Module):
    """Knows its parent without registering it."""

    def __init__(self, parent):
        super().__init__()
        self.parent, self.linear = [parent], linear()

    def forward(self, x):
        return self.linear(x).tanh() * self.parent[0].scale


class Parent(nn.Module):
    def __init__(self, memory):
        super().__init__()
        self.scale, self.head = 0.5, nn.Sequential(linear(), nn.BatchNorm1d(WIDTH).double())
        self.net = net_of([Child(self) for _ in range(4)], memory)

    def forward(self, given):
        out = self.net(given)
        return self.head(out["a"] + out["b"])


@every_policy
def test_a_parent_whose_head_has_batch_norm(memory):
    def step(memory):
        model = Parent(memory)
        found = []
        for _ in range(2):
            loss = loss_of(model(streams()))
            found += torch.autograd.grad(loss, list(model.parameters()))
        return [*found, *(b.double() for b in model.buffers())]

    agree(step, memory)


class Symmetric(nn.Module):
    def forward(self, weight):
        return (weight + weight.T).sin()


@every_policy
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("around", ["forward", "backward", "both", "neither"])
def test_cached_parametrizations(around, shared, memory):
    def step(memory):
        fns = [nn.Sequential(linear(), nn.Tanh()) for _ in range(1 if shared else 4)]
        for fn in fns:
            parametrize.register_parametrization(fn[0], "weight", Symmetric())
        net = net_of(fns * 4 if shared else fns, memory)
        given = streams()

        def wanted(loss):
            return torch.autograd.grad(loss, list(net.parameters()))

        if around == "both":
            with parametrize.cached():
                return wanted(loss_of(net(given)))
        if around == "forward":
            with parametrize.cached():
                loss = loss_of(net(given))
            return wanted(loss)
        loss = loss_of(net(given))
        if around == "backward":
            with parametrize.cached():
                found = wanted(loss)
            assert not parametrize._cache
            return found
        return wanted(loss)

    agree(step, memory)


# -- losses that fns leave behind --------------------------------------------------------------------------------------


def in_attribute(memory):
    fns = [Leaves(lambda fn, loss: setattr(fn, "aux", loss)) for _ in range(4)]
    net = net_of(fns, memory)
    found = []
    for _ in range(2):
        loss = loss_of(net(streams())) + sum(fn.aux for fn in fns)
        found += torch.autograd.grad(loss, list(net.parameters()))
    return found


def in_a_list(memory, cleared="before"):
    losses = []
    net = net_of([Leaves(lambda fn, loss: losses.append(loss)) for _ in range(4)], memory)
    found = []
    for _ in range(2):
        if cleared == "before":
            losses.clear()
        loss = loss_of(net(streams()))
        assert len(losses) == 4
        loss = loss + sum(losses)
        if cleared == "after":
            losses.clear()
        found += torch.autograd.grad(loss, list(net.parameters()))
        if cleared == "after":
            losses.clear()
    return found


def on_a_shared_object(memory):
    box = types.SimpleNamespace(aux=0.0)

    def leave(fn, loss):
        box.aux = box.aux + loss

    net = net_of([Leaves(leave) for _ in range(4)], memory)
    found = []
    for _ in range(2):
        box.aux = 0.0
        loss = loss_of(net(streams()))
        found += torch.autograd.grad(loss + box.aux, list(net.parameters()))
    return found


LOSSES = {
    "in an attribute": in_attribute,
    "in a list, cleared before": in_a_list,
    "in a list, cleared after": lambda memory: in_a_list(memory, "after"),
    "on a shared object": on_a_shared_object,
}


@every_policy
@pytest.mark.parametrize("where", LOSSES)
def test_auxiliary_losses(where, memory):
    agree(LOSSES[where], memory)


# -- what fn does ------------------------------------------------------------------------------------------------------


@every_policy
def test_routing_by_top_k(memory):
    def step(memory):
        net = net_of([Routed() for _ in range(6)], memory)
        return torch.autograd.grad(loss_of(net({"a": draw(32, WIDTH), "b": draw(32, WIDTH)})), list(net.parameters()))

    agree(step, memory)


class Selective(nn.Module):
    """Torch's selective activation checkpointing inside of fn."""

    def __init__(self, **options):
        super().__init__()
        self.inner, self.options = nn.Sequential(linear(), nn.Tanh(), linear()), options

    def forward(self, x):
        def policy(ctx, op, *args, **kwargs):
            keeps = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        made = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=made, **self.options)


HOOKS = "respect_saved_tensors_hooks"  # an argument that torch 2.15 has, and warns where it is not given
CHOICES = [{}, {HOOKS: True}, {HOOKS: False}] if HOOKS in inspect.signature(checkpoint).parameters else [{}]


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context")
@pytest.mark.parametrize("options", CHOICES, ids=str)
@every_policy
def test_selective_checkpointing_inside_of_fn(memory, options):
    def step(memory):
        net = net_of([Selective(**options) for _ in range(4)], memory)
        return torch.autograd.grad(loss_of(net(streams())), list(net.parameters()))

    agree(step, memory)


# -- side inputs -------------------------------------------------------------------------------------------------------


@every_policy
def test_an_object_whose_tensors_the_loop_replaces_and_fn_does_not_read(memory):
    inner = linear()

    def fn(x, box):
        return inner(x).tanh() * box.scale

    def step(memory):
        box = types.SimpleNamespace(scale=2.0, last=torch.ones(3))
        updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2], "box") for i in range(4)]
        loss = loss_of(rg.run(updates, streams(), {"box": box}, memory=memory))
        box.last = torch.zeros(5)
        return torch.autograd.grad(loss, list(inner.parameters()))

    agree(step, memory)


@every_policy
@pytest.mark.parametrize("kind", ["mask", "ids"])
def test_a_mask_that_the_caller_edits_afterwards(kind, memory):
    """Small ones are copied: encoders do `mask &= …` after the net that they give it to."""
    table = nn.Embedding(9, WIDTH).double()

    def fn(x, given):
        y = inner(x).tanh()
        return y.masked_fill(given[:, None], 0.5) if given.dtype == torch.bool else y + table(given)

    inner = linear()

    def step(memory):
        given = torch.arange(12) % 2 == 0 if kind == "mask" else torch.arange(12) % 9
        updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2], "given") for i in range(4)]
        loss = loss_of(rg.run(updates, {"a": draw(12, WIDTH), "b": draw(12, WIDTH)}, {"given": given}, memory=memory))
        if memory != "store":  # there autograd itself refuses
            given.zero_()
        return torch.autograd.grad(loss, [*inner.parameters(), table.weight], allow_unused=True)[:2]

    agree(step, memory)


@pytest.mark.parametrize("memory", REPLAYED)
def test_a_large_side_input_is_kept_by_reference(memory):
    """Above an eighth of the streams' bytes, and floating point: an edit is an error."""
    updates = [rg.Update("a", lambda x, given: x.sin() * given, "b", "given"), rg.Update("b", mlps(1)[0], "a")]
    for given in (torch.ones(3, WIDTH, dtype=torch.int64), torch.ones(WIDTH, dtype=torch.float64)):
        loss = loss_of(rg.run(updates, streams(), {"given": given}, memory=memory))
        given.add_(1)
        with pytest.raises(rg.ReplayError, match="the side input 'given' was edited in place"):
            loss.backward()


def test_verify_takes_three_words():
    updates = rg.wirings.pair(*mlps(2), streams=("a", "b"))
    with pytest.raises(rg.ProgramError, match="unknown verify 'loud'; known: error, warn, off"):
        rg.run(updates, streams(), verify="loud")
    with pytest.raises(rg.ProgramError, match="unknown verify"):
        rg.Reversible(updates, verify="no")
    net = rg.ReversibleSequence([mlps(2)], verify="warn")
    net.verify = "off"
    with pytest.raises(rg.ProgramError, match="unknown verify"):
        net.verify = None
    assert parameters([net])
