"""Drop-ins without the packages they replace: outputs and gradients are those by hand, also where the originals are wrong."""

import copy

import pytest
import torch
from compat_support import SYSTEMS, build
from support import WIDTH, assert_same, draw, gradients, loss_of, mlp, rg
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

every_system = pytest.mark.parametrize("system", SYSTEMS)


# -- outputs and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("depth", [1, 3, 12])
@every_system
def test_outputs_and_gradients_are_those_by_hand(system, depth, dropout):
    """Of the inputs, of the side inputs and of all parameters."""
    it = build(system, depth, dropout)
    assert_same(gradients(it, it.wanted), gradients(it.hand, it.wanted))


@pytest.mark.parametrize("options", [{"memory": "store"}, {"memory": rg.StoreLast(3)}, {"arithmetic": "exact"}], ids=str)
@every_system
def test_memory_and_arithmetic_are_arguments(system, options):
    it = build(system, **options)
    tolerance = 1e-5 if "arithmetic" in options else 1e-9  # a grid of 2^-24
    assert_same(gradients(it, it.wanted), gradients(it.hand, it.wanted), tolerance)


@every_system
def test_each_function_runs_once_more_in_backward(system):
    """So the net is reversed, and not stored."""
    it = build(system)
    again = []
    for block in it.net.blocks:
        block.f.net.register_forward_hook(lambda *_: again.append(rg.replaying()))
    loss = loss_of(it())
    assert again == [False] * 3
    loss.backward()
    assert again == [False] * 3 + [True] * 3


# -- where the originals are wrong -------------------------------------------------------------------------------------


@every_system
def test_an_input_without_grad(system):
    it = build(system)
    for t in torch.utils._pytree.tree_leaves(it.inputs):
        t.requires_grad_(False)
    assert_same(gradients(it, it.wanted), gradients(it.hand, it.wanted))


@every_system
def test_context_of_an_encoder(system):
    """Its backward runs once, whoever takes it: both f and g do, but in se3_transformer."""
    it, encoder, source = build(system), mlp(), draw(2, 4, WIDTH, grad=False)
    calls = []

    def out(call):
        context = encoder(source)
        context.register_hook(lambda _: calls.append(call))
        return getattr(it.with_context(context), call)()

    wanted = [*encoder.parameters(), *it.net.parameters()]
    assert_same(gradients(lambda: out("__call__"), wanted), gradients(lambda: out("hand"), wanted))
    assert calls == ["__call__", "hand"]


def in_dtype(dtype, it):
    def cast(t):
        return t.detach().to(dtype).requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    it.net.to(dtype)
    it.inputs, it.side = torch.utils._pytree.tree_map(cast, (it.inputs, it.side))
    return it


@every_system
def test_autocast_in_the_forward_pass_alone(system):
    """To the bit what ordinary autograd gives."""
    it = in_dtype(torch.float32, build(system, 6, dropout=0.25))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return it()

    found = gradients(step, it.wanted)
    it.net.memory = "store"
    assert all(map(torch.equal, found, gradients(step, it.wanted)))

    def by_hand():
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return it.hand()

    assert_same(found, gradients(by_hand, it.wanted), 2e-2)


@every_system
def test_bfloat16_at_depth_64(system):
    """To the bit what ordinary autograd gives; the originals are off by tens of percent."""
    it = in_dtype(torch.bfloat16, build(system, 64))
    found = gradients(it, it.wanted)
    it.net.memory = "store"
    assert all(map(torch.equal, found, gradients(it, it.wanted)))


@every_system
def test_two_forward_passes_before_a_backward(system):
    it = build(system, dropout=0.25)

    def twice(call):
        return [call(), call()]

    assert_same(gradients(lambda: twice(it), it.wanted), gradients(lambda: twice(it.hand), it.wanted))


class Normed(nn.Module):
    """BatchNorm over all but the last dim, and a spectral norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.double()

    def forward(self, x, *_, **__):
        return self.linear(self.norm(x.flatten(0, -2)).view_as(x)).tanh()


@every_system
def test_buffers_move_once(system):
    """Statistics and power iterations are where one forward pass leaves them, and the gradients are right."""
    it = build(system, make=Normed)
    twin = copy.deepcopy(it)
    assert_same(gradients(it, it.net.parameters()), gradients(twin.hand, twin.net.parameters()))
    found, true = dict(it.net.named_buffers()), dict(twin.net.named_buffers())
    assert found.keys() == true.keys()
    for name, buffer in found.items():
        torch.testing.assert_close(buffer, true[name], msg=name)
        assert not name.endswith("num_batches_tracked") or buffer == 1


@pytest.mark.parametrize("tie_weights", [True, False])
@every_system
def test_functional_call(system, tie_weights):
    """Gradients reach the tensors that were given, with their values."""
    it = build(system)
    twin = copy.deepcopy(it)
    given = {name: (p.detach() * 1.5).requires_grad_() for name, p in it.net.named_parameters()}
    wanted = [t for t in it.wanted if not isinstance(t, nn.Parameter)] + list(given.values())

    def call():
        return functional_call(it.net, given, it.inputs, it.side | it.route, tie_weights=tie_weights)

    with torch.no_grad():
        for p in twin.net.parameters():
            p *= 1.5
    assert_same(gradients(call, wanted), gradients(twin.hand, twin.wanted))


@every_system
def test_double_backward(system):
    it = build(system, 2)

    def penalty(call):
        first = torch.autograd.grad(loss_of(call()), it.wanted[:1], create_graph=True)
        return [t.square().sum() for t in first]

    assert_same(gradients(lambda: penalty(it), it.wanted), gradients(lambda: penalty(it.hand), it.wanted))


@every_system
def test_output_edited_in_place(system):
    it = build(system)

    def edited(call):
        out = call()
        for t in torch.utils._pytree.tree_leaves(out):
            t.mul_(2)
        return out

    assert_same(gradients(lambda: edited(it), it.wanted), gradients(lambda: edited(it.hand), it.wanted))


@every_system
def test_parameter_changed_before_backward(system):
    it = build(system)
    loss = loss_of(it())
    with torch.no_grad():
        next(it.net.blocks[1].f.parameters()).add_(1)
    with pytest.raises(
        rg.ReplayError, match=r"the parameter 'weight' of shape .* was changed between the forward pass and backward"
    ):
        loss.backward()


@every_system
def test_backward_in_eval(system):
    """On a net that was never run in training."""
    it = build(system, dropout=0.5)
    it.net.eval()
    assert_same(gradients(it, it.wanted), gradients(it.hand, it.wanted))


@every_system
def test_shapes_that_do_not_fit(system):
    it = build(system)
    fn = it.net.blocks[1].f.net
    fn.forward = lambda x, *_, **__: torch.zeros(7, dtype=torch.float64)
    with pytest.raises(rg.ProgramError, match=rf"update \d: x1 \+= {type(fn).__name__}\(x2.*\): fn returned"):
        it()


@every_system
def test_hooks_on_a_block_would_not_run(system):
    it = build(system)
    it.net.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(rg.ProgramError, match=r"block 1, a Reversible.*Block, has hooks that would never run"):
        it()
