"""rg.Sequential(bits=m) beside the rest of autograd: what is kept, what is reported, and what is refused."""

import contextlib
import gc
import warnings

import pytest
import torch
from bits_support import POLICIES, WIDTH, Layer, assert_equal, draw, gradients, sequential
from support import loss_of, rg
from torch import nn
from torch.utils.checkpoint import checkpoint

from retrograde._engine import context
from retrograde.bench.meter import LiveBytes

ROWS = 1 << 10
STREAM = ROWS * WIDTH  # elements


def both(step, memory="reverse", **options):
    """`step(net, x)` returns tensors; under the policy they are those of store, to the bit."""
    found = []
    for policy in (memory, "store"):
        net, x = sequential(**{"bits": 4, "memory": policy, **options}), draw()
        torch.manual_seed(2)
        found.append([t for t in step(net, x) if t is not None])
    assert_equal(*found)


def all_grads(net, x):
    return [x.grad, *(p.grad for p in net.parameters())]


# -- what is kept ------------------------------------------------------------------------------------------------------


def kept(depth, bits=4, memory="reverse", frozen=0, make=Layer, **options):
    """Bytes between the forward pass and backward, and the peak of a step. Gradients and the input are there before."""
    net = sequential(depth, make=make, bits=bits, memory=memory, **options)
    x = draw(ROWS, WIDTH)
    for layer in net[:frozen]:
        layer.requires_grad_(False)
    for t in (x.requires_grad_(not frozen), *net.parameters()):
        t.grad = torch.zeros_like(t) if t.requires_grad else None
    for layer in net:
        layer.seen = layer.seen_again = Nothing()
    gc.collect()
    with LiveBytes() as meter:
        loss = net(x).sum()
        between = meter.live
        loss.backward()
    assert meter.live <= 8  # the loss
    return between, meter.peak


class Nothing:
    def append(self, _):
        pass


@pytest.mark.parametrize("bits", range(1, 9))
def test_bytes_per_layer(bits):
    """An eighth of the bits for each element, in the forward pass and at the peak, and nothing else."""
    few, many = kept(4, bits), kept(12, bits)
    for a, b in zip(few, many, strict=True):
        assert b - a == 8 * STREAM * bits // 8


def test_frozen_lower_layers_keep_nothing():
    none, some = kept(4), kept(12, frozen=8)
    for a, b in zip(none, some, strict=True):
        assert abs(b - a) <= STREAM  # the input is no leaf that needs a gradient
    assert kept(12)[0] - some[0] == 8 * STREAM // 2


def test_only_reversal_keeps_bits():
    assert kept(12, 8, "checkpoint") == kept(12, 1, "checkpoint")
    peaks = []
    for depth in (3, 12):
        net, x = rg.Sequential([nn.Tanh() for _ in range(depth)], bits=8, memory="reverse"), draw(ROWS, WIDTH)
        with torch.no_grad(), LiveBytes() as meter:
            net(x)
        peaks.append(meter.peak)
    assert peaks[0] == peaks[1]


def test_a_meter_that_would_notice():
    """Checkpointing grows by the inputs of layers, eight times as much."""
    few, many = kept(4, memory="checkpoint"), kept(12, memory="checkpoint")
    assert many[0] - few[0] == 8 * STREAM * 4


def test_bits_leave_as_the_net_runs():
    """Hooks on saved tensors see the bits of each layer when it has run, and each again when it is undone."""
    events = []

    def pack(t):
        events.append(("pack", t.dtype is torch.uint8))
        return t.clone()

    def unpack(t):
        events.append(("unpack", t.dtype is torch.uint8))
        return t

    class Says(nn.Module):
        def forward(self, x):
            events.append(("again" if rg.replaying() else "first", True))
            return x + x.sin()

    net, x = rg.Sequential([Says() for _ in range(3)], bits=2, memory="reverse"), draw()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = net(x)
    out.sum().backward()
    of_bits = [name for name, bits in events if bits]
    assert of_bits == ["first", "pack"] * 3 + ["again", "unpack"] * 3


@pytest.mark.parametrize(("memory", "reversed_layers"), [(rg.Anchor(4), 6), (rg.StoreLast(2), 4), ("checkpoint", 0)])
def test_bits_are_kept_once(memory, reversed_layers):
    """And for the layers alone that are reversed."""
    bytes_of = []

    def pack(t):
        bytes_of.append(t.nbytes if t.dtype is torch.uint8 else 0)
        return t

    net, x = rg.Sequential([nn.Tanh() for _ in range(6)], bits=2, memory=memory), draw()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = net(x)
    assert sum(bytes_of) == reversed_layers * x.numel() // 4
    assert sum(size > 0 for size in bytes_of) == reversed_layers
    out.sum().backward()


def test_a_budget_counts_the_bits():
    with pytest.raises(rg.BudgetTooSmall) as few:
        gradients(sequential(8, bits=1, memory=rg.Budget(100)), draw(64, WIDTH))
    with pytest.raises(rg.BudgetTooSmall) as many:
        gradients(sequential(8, bits=8, memory=rg.Budget(100)), draw(64, WIDTH))
    assert many.value.least - few.value.least == 8 * 64 * WIDTH * 7 // 8


# -- autograd ----------------------------------------------------------------------------------------------------------


def two_forward_passes(net, x):
    a, b = net(x), net(2 * x)
    loss_of(a).backward()
    loss_of(b).backward()
    return all_grads(net, x)


def two_forward_passes_one_backward(net, x):
    (loss_of(net(x)) + loss_of(net(2 * x))).backward()
    return all_grads(net, x)


def accumulated(net, x):
    for part in x.detach().split(2):
        loss_of(net(part)).backward()
    return all_grads(net, x)


def retained(net, x):
    loss = loss_of(net(x))
    loss.backward(retain_graph=True)
    loss.backward()
    return all_grads(net, x)


def twice_differentiated(net, x):
    wanted = [x, *net.parameters()]
    first = torch.autograd.grad(loss_of(net(x)), wanted, create_graph=True)
    return [*(g.detach() for g in first), *torch.autograd.grad(sum(g.square().sum() for g in first), wanted)]


def of_subsets(net, x):
    loss, ps = loss_of(net(x)), list(net.parameters())
    middle = torch.autograd.grad(loss, ps[12:14], retain_graph=True)
    return [*middle, *torch.autograd.grad(loss, ps[:3], retain_graph=True), *torch.autograd.grad(loss, x)]


def batched(net, x):
    out = net(x)
    return torch.autograd.grad(out, [x, *net.parameters()], torch.randn(3, *out.shape), is_grads_batched=True)


def called_functionally(net, x):
    others = {name: (p.detach() + 0.1).requires_grad_() for name, p in net.named_parameters()}
    return torch.autograd.grad(loss_of(torch.func.functional_call(net, others, (x,))), [x, *others.values()])


def under_save_on_cpu(net, x):
    with torch.autograd.graph.save_on_cpu():
        out = net(x)
    loss_of(out).backward()
    return all_grads(net, x)


def in_a_checkpoint(net, x):
    loss_of(checkpoint(net, x, use_reentrant=False)).backward()
    return all_grads(net, x)


def input_alone(net, x):
    return torch.autograd.grad(loss_of(net.requires_grad_(False)(x)), x)


def lower_layers_frozen(net, x):
    for layer in net[:3]:
        layer.requires_grad_(False)
    return torch.autograd.grad(loss_of(net(x.detach())), list(net[3:].parameters()))


def only_the_middle(net, x):
    net.requires_grad_(False)
    net[2].requires_grad_(True)
    return torch.autograd.grad(loss_of(net(x.detach())), list(net[2].parameters()))


def a_shared_layer(net, x):
    shared = rg.Sequential([net[0], net[1], net[0], net[0]], bits=3, memory=net.memory)
    loss_of(shared(x)).backward()
    return all_grads(shared, x)


def an_outer_program(net, x):
    """Nets with noise are the layers of another one."""
    parts = [rg.Sequential(*net[i : i + 2], bits=3, memory=net.memory) for i in (0, 2, 4)]
    outer = rg.Sequential(parts, bits=5, memory=net.memory)
    loss = loss_of(outer(x))
    loss.backward(retain_graph=True)
    loss.backward()
    return all_grads(net, x)


def an_outer_program_twice_differentiated(net, x):
    parts = [rg.Sequential(*net[i : i + 2], bits=3, memory=net.memory) for i in (0, 2)]
    return twice_differentiated(rg.Sequential(parts, bits=5, memory=net.memory), x)


def stepping_inside(net, x):
    with rg.step_in_backward(torch.optim.SGD(net.parameters(), 0.1)):
        loss_of(net(x)).backward()
    return list(net.parameters())


FEATURES = [
    two_forward_passes,
    two_forward_passes_one_backward,
    accumulated,
    retained,
    twice_differentiated,
    of_subsets,
    batched,
    called_functionally,
    under_save_on_cpu,
    in_a_checkpoint,
    input_alone,
    lower_layers_frozen,
    only_the_middle,
    a_shared_layer,
    an_outer_program,
    an_outer_program_twice_differentiated,
    stepping_inside,
]


@pytest.mark.parametrize("step", FEATURES, ids=lambda f: f.__name__)
def test_autograd(step):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*create_graph=True will create a reference cycle.*")
        both(step)


@pytest.mark.parametrize("memory", POLICIES, ids=str)
def test_policies_side_by_side(memory):
    both(two_forward_passes, memory)
    both(lower_layers_frozen, memory)


def test_where_generators_cannot_be_read(monkeypatch):
    """As if a CUDA graph were being captured: the seed is a tensor that nobody looks at."""
    monkeypatch.setattr(context, "capturing", lambda: True)
    monkeypatch.setattr(context, "generators", lambda side: [])
    both(two_forward_passes)


def test_batch_norm_moves_once():
    def step(net, x):
        loss_of(net(x)).backward()
        return [*all_grads(net, x), *(b.float() for b in net.buffers())]

    both(step, make=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()))


@pytest.mark.filterwarnings("ignore:saved-tensor hooks are not allowed", "ignore:`torch.jit.script` is deprecated")
def test_transforms():
    """They run as store; their gradients are those of autograd but for rounding."""
    net, x = sequential(4, bits=3, memory="reverse"), draw()
    parameters = dict(net.named_parameters())

    def loss(parameters):
        torch.manual_seed(1)
        return loss_of(torch.func.functional_call(net, parameters, (x,)))

    found = torch.func.grad(loss)(parameters).values()
    true = torch.autograd.grad(loss(parameters), list(parameters.values()))
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for layer in net:
        layer.drop.p = 0.0

    def out(x):
        torch.manual_seed(1)
        return net(x)

    v = torch.randn_like(x)
    _, along = torch.func.jvp(out, (x.detach(),), (v,))
    again = torch.autograd.functional.jvp(out, x.detach(), v)[1]
    torch.testing.assert_close(along, again, rtol=1e-4, atol=1e-4)
    assert torch.func.vmap(net, randomness="different")(torch.randn(5, 3, WIDTH)).shape == (5, 3, WIDTH)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiled_layers():
    torch._dynamo.reset()

    def step(net, x):
        for layer in net:
            layer.forward = torch.compile(layer.plain, backend="aot_eager")
        loss_of(net(x)).backward()
        return all_grads(net, x)

    class Plain(Layer):
        def plain(self, x):
            return x + self.drop(self.down(self.up(self.norm(x)).tanh()))

    both(step, make=Plain, depth=3)
    net = sequential(3, make=Plain, bits=4, memory="reverse")
    with pytest.raises(
        Exception, match=r"ProgramError: rg.Sequential\(bits=…\) in training is not supported under torch.compile"
    ):
        torch.compile(net, backend="aot_eager", fullgraph=True)(draw())
    x = draw()
    torch.testing.assert_close(torch.compile(net.eval(), backend="aot_eager", fullgraph=True)(x), net(x))
    torch._dynamo.reset()


# -- reported, and not -------------------------------------------------------------------------------------------------


class Counts(Layer):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


def test_hidden_state_is_reported():
    layers = [Layer(), Counts(), Layer()]
    with pytest.raises(
        rg.NotRepeated, match=r"update 1: x = Counts\(x', seed\): when backward ran fn again, it returned something"
    ):
        gradients(rg.Sequential(layers, bits=4, memory="reverse"), draw())


def test_checks():
    x = torch.randn(4, WIDTH)
    net = sequential(4, bits=4, memory="reverse")
    assert rg.check.gradients(net, x).ok
    assert rg.check.drift(net, x).gradient_error == 0
    net = rg.Sequential([Layer(), Counts(), Layer()], bits=4, memory="reverse")
    found = rg.check.gradients(net, x)
    assert not found.ok
    assert "Counts" in str(found)


@pytest.mark.parametrize("setting", ["float32", "bfloat16"])
def test_sound_nets_are_silent(setting):
    """Exact: sketches are equal, so even the tightest limits hold. Warnings are errors here."""
    for depth in (3, 40):
        net = sequential(depth, setting, bits=2, memory="reverse")
        for _ in range(3):
            gradients(net, draw(setting=setting), setting)


def test_edited_between():
    net, x = sequential(4, bits=4, memory="reverse"), draw()
    out = net(x)
    with torch.no_grad():
        net[1].up.weight.mul_(1.1)
    with pytest.raises(rg.NotRepeated, match=r"the parameter 'weight' of shape .* was changed between"):
        out.sum().backward()
    out = net(x)
    loss = out.square().sum()
    out.detach().mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was edited in place after the forward pass"):
        loss.backward()


def test_freed():
    net, x = sequential(3, bits=4, memory="reverse"), draw()
    loss = net(x).sin().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 9, -1, 2.0, True, "4"])
def test_bits(bits):
    with pytest.raises(rg.ProgramError, match="bits must be a whole number from 1 to 8, or None"):
        rg.Sequential([nn.Tanh()], bits=bits)
    with pytest.raises(rg.ProgramError, match="bits must be a whole number from 1 to 8, or None"):
        rg.Sequential([nn.Tanh()]).bits = bits


def test_without_bits_nothing_is_reversed():
    with pytest.raises(rg.ProgramError, match=r"a layer x = layer\(x\) cannot be undone\. Use rg\.Sequential\(…, bits=4\)"):
        sequential(3, memory="reverse")(draw())


class Does(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda x: x[:, :2], r"update 1: x = Does\(x', seed\): the layer returned shape \(4, 2\), its input has \(4, 6\)"),
        (lambda x: x.double(), "the layer returned torch.float64 on cpu, its input is torch.float32 on cpu: let it convert back"),
        (
            lambda x: (x, x),
            r"a layer must return a tensor like its input, and it returned a tuple.* \(of attention, `out\[0\]`\)",
        ),
        (lambda x: None, "it returned a NoneType"),
        (lambda x: x.mul_(2), """fn edited its source "x'" in place"""),
    ],
)
@pytest.mark.parametrize("memory", ["reverse", "store"])
def test_layers_that_do_not_fit(what, message, memory):
    net = rg.Sequential([nn.Linear(WIDTH, WIDTH), Does(what)], bits=4, memory=memory)
    with pytest.raises(rg.ProgramError, match=message):
        net(draw())


def test_whole_numbers_are_refused():
    net = rg.Sequential([Does(lambda x: x + 1)], bits=4)
    with pytest.raises(rg.ProgramError, match=r"reversible noise is for streams of floating point, and this one has torch.int64"):
        net(torch.arange(3))
    with pytest.raises(rg.ProgramError, match="complex numbers"):
        net(torch.ones(3, dtype=torch.complex64))


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
def test_out_of_range(memory):
    net = rg.Sequential([nn.Identity(), Does(lambda x: x * 1e6)], bits=4, memory=memory)
    way = "use bits=None, which trains without noise, and memory='checkpoint' or 'offload'"
    with pytest.raises(rg.OutOfRange, match=rf"update 1: .*the stream 'x' left the range .*{way}"):
        net(draw())
    with pytest.raises(rg.OutOfRange, match=f"was given with values beyond the range .*{way}"):
        net(draw() * 1e6)
    with pytest.warns(UserWarning, match=f"precision is lost. Scale the stream, or {way}"), contextlib.suppress(rg.OutOfRange):
        net(draw() * 1e-6)
