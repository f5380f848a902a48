"""Errors in backward name the update, the cause and the way out, and the next step is right."""

import contextlib

import pytest
import torch
from errors_support import Net, assert_next_step_is_right, edit, refused
from support import REPLAYED, WIDTH, assert_same, draw, gradients, loss_of, mlp, mlps, rg
from torch import nn

# -- changes between the forward pass and backward ---------------------------------------------------------------------


OTHER_VALUE = ("returned something else than in the forward pass", "rg.check.gradients", "memory='store'")
CHANGES = {
    "a weight": (lambda fn: edit(fn.linear.weight), "the parameter 'weight' of shape (6, 6)"),
    "a bias, which no gradient needs": (lambda fn: edit(fn.linear.bias), "the parameter 'bias' of shape (6,)"),
    "a buffer": (lambda fn: edit(fn.table), "the buffer 'table' of shape (1, 6)"),
    "the mode": (lambda fn: fn.eval(), "train() in the forward pass, eval() in backward"),
    "the mode of a part": (lambda fn: fn.drop.eval(), "Dropout (train() in the forward pass, eval() in backward)"),
}
BY_VALUE = {  # seen by what fn returns
    "a part": lambda fn: setattr(fn, "linear", nn.Linear(WIDTH, WIDTH).double()),
    "a hook": lambda fn: fn.register_forward_hook(lambda m, args, out: out * 1.5),
}


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("case", CHANGES)
def test_changed_between_forward_and_backward(case, memory):
    change, what = CHANGES[case]
    net = Net(memory)
    loss = net.loss()
    change(net.faulty)
    with refused(rg.ReplayError, Net.NAME, what, "between the forward pass and backward", "Call backward first", net=net):
        loss.backward()
    net.train()
    assert_next_step_is_right(net)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("case", BY_VALUE)
def test_changed_between_forward_and_backward_and_seen_by_value(case, memory):
    net = Net(memory)
    torch.manual_seed(0)
    loss = net.loss()
    BY_VALUE[case](net.faulty)
    if (case, memory) == ("a hook", "checkpoint"):  # it comes after all that is saved
        loss.backward()
        found = [p.grad for p in net.parameters()]
        net.faulty._forward_hooks.clear()
        assert_same(found, gradients(net.run, list(net.parameters()))[2:])
        return
    with refused(rg.ReplayError, Net.NAME, *OTHER_VALUE, net=net):
        loss.backward()
    net.faulty._forward_hooks.clear()
    assert_next_step_is_right(net)


@pytest.mark.parametrize("memory", REPLAYED)
def test_switched_from_eval_to_train(memory):
    net = Net(memory).eval()
    loss = net.loss()
    net.train()
    with refused(rg.ReplayError, "eval() in the forward pass, train() in backward", net=net):
        loss.backward()


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize(
    ("fn_of", "words"),
    [
        (lambda w: lambda x: (x * w).tanh(), ("of shape (6,)", "between the forward pass and backward")),
        (lambda w: lambda x: (x + w).tanh(), OTHER_VALUE),
    ],
    ids=["saved", "not saved"],
)
def test_a_parameter_that_a_plain_callable_holds(fn_of, words, memory):
    """fn may be any callable whose parameters the user registers."""
    weight = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
    updates = rg.wirings.leapfrog([mlp(), fn_of(weight), mlp(), mlp()])
    loss = loss_of(rg.run(updates, {"a": draw(), "b": draw()}, memory=memory))
    edit(weight)
    with refused(rg.ReplayError, "update 1: b += <lambda>(a)", *words):
        loss.backward()


class Writer(nn.Module):
    """Writes to buffers in every way: large and small, and (BatchNorm) without a trace in the version; or by a new tensor."""

    def __init__(self, fails=lambda: False, replaces=True):
        super().__init__()
        self.linear, self.norm, self.fails, self.replaces = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), fails, replaces
        self.register_buffer("small", torch.zeros(2, 2))
        self.register_buffer("large", torch.zeros(1 << 7, 1 << 8))
        self.register_buffer("replaced", torch.zeros(()))
        self.double()

    def forward(self, x):
        y = self.norm(self.linear(x)).tanh() + self.small.sum()
        self.small.add_(1)
        self.large[0].add_(1)
        if self.replaces:  # then this update keeps its activations
            self.replaced = self.replaced + 1
        if self.fails():
            raise ValueError("planted")
        return y.sin()  # saves a tensor after it: checkpoint stops there


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_weight_of_a_fn_that_writes_to_buffers_changed(steps, replaces, memory):
    """However the engine gets at what such a fn saved, in its first step and later."""
    net = rg.Reversible(rg.wirings.leapfrog([mlp(), Writer(replaces=replaces), mlp()]), memory=memory)
    for _ in range(steps):
        loss_of(net({"a": draw(), "b": draw()})).backward()
    loss = loss_of(net({"a": draw(), "b": draw()}))
    edit(net.fns[1].linear.weight)
    with refused(rg.ReplayError, "update 1: b += Writer(a)", "of shape (6, 6)", "between the forward pass and backward", net=net):
        loss.backward()


@pytest.mark.parametrize("memory", REPLAYED)
def test_side_input_changed(memory):
    net = Net(memory)
    loss = net.loss()
    edit(net.context)
    with refused(rg.ReplayError, "the side input 'context'", "in place", "copy", net=net):
        loss.backward()
    assert_next_step_is_right(net)


@pytest.mark.parametrize("name", ["x1", "x2"])
@pytest.mark.parametrize("part", [slice(None), 0], ids=["whole", "row"])
def test_output_edited(name, part):
    """Under reverse every activation is recovered from the output. (Checkpoint keeps other tensors and is not touched.)"""
    net = Net("reverse")
    out = net.run()
    loss = loss_of(out)
    edit(out[name][part])
    with refused(
        rg.ReplayError, f"the stream '{name}'", "edited in place after the forward pass", "`y = y + 1`", "store", net=net
    ):
        loss.backward()
    assert_next_step_is_right(net)


def test_output_of_a_sequence_edited():
    net = rg.ReversibleSequence([mlps(2) for _ in range(3)], merge=None)
    y1, _ = net(draw())
    loss = (y1.mul_(2) ** 2).sum()
    with refused(rg.ReplayError, "the stream 'x1'", "edited in place", "memory='store'", net=net):
        loss.backward()


# -- another path in the second run ------------------------------------------------------------------------------------


def other(*, first, second):
    return lambda x, y, context: (second if rg.replaying() else first)(x, y)


PATHS = {
    "saves less": (other(first=lambda x, y: y.tanh(), second=lambda x, y: y), " before"),
    "saves another shape": (
        other(first=lambda x, y: y * y.sin(), second=lambda x, y: y * y.sum().sin()),
        "it saved a tensor of shape ()",
    ),
    "saves another dtype": (
        other(first=lambda x, y: y.tanh(), second=lambda x, y: y.float().tanh()),
        "it saved a tensor of shape (3, 6), torch.float32, on cpu",
    ),
    "returns another shape": (other(first=lambda x, y: y, second=lambda x, y: y[:2]), "shape (2, 6)"),
}


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("case", PATHS)
def test_another_path_in_the_second_run(case, memory):
    fault, what = PATHS[case]
    net = Net(memory, fault=fault)
    loss = net.loss()
    way_out = ("Usual causes", "rg.replaying()", "memory='store'")
    with refused(rg.ReplayError, Net.NAME, "fn did not do in backward what it did in the forward pass", what, *way_out, net=net):
        loss.backward()
    assert_next_step_is_right(net)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("first", [0, 1])
def test_draws_more_or_other_numbers_in_the_second_run(first, memory):
    """Here what is saved is the same in number and kind."""

    def fn(x):
        for _ in range(first + rg.replaying()):
            torch.rand(3)
        return torch.rand_like(x) * x if first else x.sin()

    updates = rg.wirings.leapfrog([mlp(), fn, mlp(), mlp()])
    loss = loss_of(rg.run(updates, {"a": draw(), "b": draw()}, memory=memory))
    state = torch.get_rng_state()
    words = OTHER_VALUE if memory == "checkpoint" else ("random numbers", "Usual causes")
    harmless = memory == "checkpoint" and not first  # all is saved before it draws, and nothing more runs
    with contextlib.nullcontext() if harmless else refused(rg.ReplayError, "update 1: b += fn(a)", *words):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


# -- exceptions inside fn ----------------------------------------------------------------------------------------------


class Interrupt(KeyboardInterrupt):
    pass


def raising(kind, second):
    def fault(x, y, context):
        if rg.replaying() is second:
            raise kind("planted")
        return y

    return fault


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("second", [False, True], ids=["first run", "second run"])
@pytest.mark.parametrize("kind", [ValueError, Interrupt, torch.OutOfMemoryError])
def test_exception_inside_fn(kind, second, memory):
    """The error itself, with the update in a note; in a recomputation, one of ours. Dropout has drawn and BatchNorm has moved."""
    net = Net(memory, fault=raising(kind, second))
    name = [] if kind is Interrupt else [Net.NAME]
    if second:
        loss = net.loss()
        ours = rg.ReplayError if kind is ValueError else kind
        with refused(ours, "planted", *name, net=net) as info:
            loss.backward()
        if kind is ValueError:
            assert "In the forward pass it did not" in str(info.value)
            assert isinstance(info.value.__cause__, ValueError)
    else:
        with refused(kind, "planted", *name, net=net):
            net.run()
    assert all(p.grad is None for p in net.faulty.parameters())
    assert_next_step_is_right(net)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("second", [False, True], ids=["first run", "second run"])
def test_buffers_after_an_exception(second, steps, memory):
    """Those of the update that failed and of the ones before it, in the first step and later."""
    failing = [False]
    replaces = not second  # else nothing is recomputed
    fns = [Writer(fails, replaces) for fails in (lambda: False, lambda: failing[0] and rg.replaying() is second, lambda: False)]
    net, streams = rg.Reversible(rg.wirings.leapfrog(fns), memory=memory), {"a": draw(), "b": draw()}
    for _ in range(steps):
        loss_of(net(streams)).backward()
    failing[0] = True
    if not second:
        with refused(ValueError, "planted", "update 1: b += Writer(a)", net=net):
            net(streams)
    else:
        loss = loss_of(net(streams))
        with refused(rg.ReplayError, "planted", "update 1: b += Writer(a)", net=net):
            loss.backward()
    failing[0] = False
    for memory in (net.memory, "store"):
        net.memory = memory
        loss_of(net(streams)).backward()
    count = 2 + steps + second
    assert [int(t) for fn in fns for t in (fn.small[0, 0], fn.large[0, 0], fn.replaced)] == [count, count, count * replaces] * 3


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("second", [False, True], ids=["first run", "second run"])
def test_exception_under_autocast(second, memory):
    """Forward inside autocast and no attention backend but math, backward outside of both."""
    net = Net(memory, fault=raising(ValueError, second)).float()
    net.streams = {name: t.detach().float().requires_grad_() for name, t in net.streams.items()}
    net.context = None
    seen = []
    net.fns[4].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    backends = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()]
    with torch.autocast("cpu", torch.bfloat16), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        if second:
            loss = net.loss()
        else:
            with refused(ValueError, Net.NAME, net=net):
                net.run()
    if second:
        with refused(rg.ReplayError, Net.NAME, net=net):
            loss.backward()
        assert seen == [True, True]
    assert [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()] == backends


@pytest.mark.parametrize("second", [False, True], ids=["first run", "second run"])
def test_exception_in_a_program_in_a_program(second):
    """Both updates are named."""
    inner = Net("reverse", fault=raising(ValueError, second))

    def outer(x):
        return inner({"x1": x, "x2": x}, context=None)["x1"]

    updates = rg.wirings.leapfrog([mlp(), outer, mlp()])
    words = ["planted", Net.NAME, "update 1: b += outer(a)"]
    if second:
        loss = loss_of(rg.run(updates, {"a": draw(), "b": draw()}))
        with refused(rg.ReplayError, *words[:2], net=inner):
            loss.backward()
    else:
        streams = {"a": draw(), "b": draw()}
        with refused(ValueError, *words, net=inner):
            rg.run(updates, streams)
    assert_next_step_is_right(inner)


def test_a_failed_backward_can_be_repeated():
    """The graph of a failed backward is still good if it was to be kept."""
    net = Net("reverse")
    wanted = [*net.streams.values(), net.context, *net.parameters()]
    true = gradients(net.run, wanted)
    torch.manual_seed(0)
    out = net.run()
    loss = loss_of(out)
    net.faulty.fault = raising(ValueError, True)
    with refused(rg.ReplayError, Net.NAME, net=net):
        loss.backward(retain_graph=True)
    net.faulty.fault = None
    found = torch.autograd.grad(loss, wanted)
    assert_same([*(t.detach() for t in out.values()), *found], true)


def test_freed_graph():
    """A second backward without retain_graph is refused, as ordinary autograd does."""
    net = Net("reverse")
    loss = net.loss()
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()
    assert_next_step_is_right(net)


def test_what_reads_a_sum_has_its_own_name():
    """In lists, and in errors."""
    updates = rg.wirings.leapfrog([nn.Linear(2, 2), torch.sin], streams=("a", "b", "c"))
    assert list(map(repr, updates)) == ["a += Linear(b, c)", "b += sin(c, a)"]
