"""RevTorch, MemCNN and revlib beside what stands in their place: the same where they are right, and right where they are not."""

import copy
import warnings

import pytest
import torch
from support import WIDTH, assert_same, draw, gradients, loss_of, mlp
from torch import nn

from retrograde.compat import memcnn, revlib, revtorch

from .systems import MARKS, assert_equal, gradient_error, measure, peer

pytestmark = MARKS
WRONG = 1e-3  # an error of gradients in float64 that no rounding explains


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.out = mlp(), nn.Linear(WIDTH, 2 * WIDTH).double()

    def forward(self, x):
        return self.out(self.net(x))


def joint():
    return draw(3, 2 * WIDTH)


def a_revtorch(package, depth, dropout=0.0):
    blocks = [package.ReversibleBlock(mlp(dropout=dropout), mlp(dropout=dropout)) for _ in range(depth)]
    return package.ReversibleSequence(nn.ModuleList(blocks))


def a_memcnn(package, depth, dropout=0.0, options=None, **coupling):
    make = Double if coupling.get("adapter") == "AffineAdapterSigmoid" else lambda: mlp(dropout=dropout)
    given = coupling | ({"adapter": getattr(package, coupling["adapter"])} if "adapter" in coupling else {})
    made = [package.create_coupling(make(), make(), **given) for _ in range(depth)]
    return nn.Sequential(*(package.InvertibleModuleWrapper(one, **(options or {})) for one in made))


def a_revlib(package, depth, dropout=0.0, **options):
    return package.ReversibleSequential(*(mlp(dropout=dropout) for _ in range(2 * depth - 1)), **options)


def naive(package, depth):
    return a_memcnn(package, depth, coupling="affine", adapter="AffineAdapterNaive")


def sigmoid(package, depth):
    return a_memcnn(package, depth, coupling="affine", adapter="AffineAdapterSigmoid")


def block(package, depth):
    return nn.Sequential(*(package.ReversibleBlock(mlp(), mlp(), coupling="additive") for _ in range(depth)))


NETS = {
    "revtorch": ("revtorch", revtorch, a_revtorch),
    "memcnn": ("memcnn", memcnn, a_memcnn),
    "memcnn, kept": ("memcnn", memcnn, lambda p, d: a_memcnn(p, d, options={"keep_input": True, "keep_input_inverse": True})),
    "memcnn, disabled": ("memcnn", memcnn, lambda p, d: a_memcnn(p, d, options={"disable": True})),
    "memcnn, naive": ("memcnn", memcnn, naive),
    "memcnn, sigmoid": ("memcnn", memcnn, sigmoid),
    "memcnn, block": ("memcnn", memcnn, block),
    "revlib": ("revlib", revlib, a_revlib),
    "revlib, no savings": ("revlib", revlib, lambda p, d: a_revlib(p, d, memory_mode=p.MemoryModes.no_savings)),
}
every_net = pytest.mark.parametrize("name", NETS)


def both(name, depth, make=None, **options):
    """The original and ours, with the same parameters under the same keys."""
    package, ours, usual = NETS[name]
    make = make or usual
    nets = [make(peer(package), depth, **options), make(ours, depth, **options)]
    nets[1].load_state_dict(nets[0].state_dict(), strict=True)
    nets[0].load_state_dict(nets[1].state_dict(), strict=True)
    assert [key for key, _ in nets[0].named_parameters()] == [key for key, _ in nets[1].named_parameters()]  # optimizers count
    return nets


def measured(net, x, **given):
    """MemCNN empties what it is given: each gets its own, behind an operation."""
    return measure(lambda x, **side: net(x * 1, **side), net, (x,), **given)


@every_net
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_outputs_gradients_and_keys(name, depth):
    original, ours = both(name, depth)
    x = joint()
    assert_equal(measured(ours, x), measured(original, x))


@pytest.mark.parametrize("name", [name for name in NETS if name.startswith("memcnn")])
def test_inverse_of_memcnn(name):
    x = joint()
    original, ours = (inverse(net[0], x) for net in both(name, 1))
    assert_same(ours, original)


def inverse(net, y):
    net.zero_grad()
    y = y.detach().clone().requires_grad_()
    out = net.inverse(y * 1)
    loss_of(out).backward()
    return [out.detach(), y.grad, *(p.grad for p in net.parameters())]


def test_is_invertible_module():
    original = peer("memcnn")
    for package in (original, memcnn):
        good = package.AdditiveCoupling(mlp())
        assert package.is_invertible_module(good, (3, 2 * WIDTH), torch.float64)
        assert package.is_invertible_module(package.InvertibleModuleWrapper(good), (3, 2 * WIDTH), torch.float64)
        assert not package.is_invertible_module(nn.Tanh(), (3, 2 * WIDTH))
        with pytest.raises(ValueError, match="test_input_shape"):
            package.is_invertible_module(good, 3)
        with pytest.raises(NotImplementedError, match="cubic"):
            package.create_coupling(mlp(), coupling="cubic")


class Shear(nn.Module):
    """Returns one of its inputs as it is."""

    def forward(self, a, b):
        return a + b.sin(), b

    def inverse(self, a, b):
        return a - b.sin(), b


class Twice(nn.Module):
    def forward(self, x):
        y = x * x
        return y, y

    def inverse(self, y, z):
        return torch.max(y.sqrt(), z.sqrt())


@pytest.mark.parametrize(
    "case", [(nn.Identity, (3, 4)), (Shear, ((3, 4), (3, 4))), (Twice, (3, 4))], ids=lambda case: case[0].__name__
)
def test_is_invertible_module_warns_of_shared_tensors(case):
    make, shape = case
    module = make()
    if make is nn.Identity:
        module.inverse = module.forward
    for package in (peer("memcnn"), memcnn):
        with pytest.warns(UserWarning, match="same tensor|share the same|that it was given"):
            assert package.is_invertible_module(module, shape)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert package.is_invertible_module(package.AdditiveCoupling(mlp()), (3, 2 * WIDTH), torch.float64)


# -- known faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["revtorch", "revlib"])
def test_input_without_grad(name):
    """RevTorch and revlib lose all gradients when the input does not require one."""
    original, ours = both(name, 3)
    x = joint()
    assert not original(x.detach()).requires_grad
    found = measure(ours, ours, (x,), grad=False)
    del found["gradient of input 0"]
    ours.memory = "store"
    true = measure(ours, ours, (x,), grad=False)
    del true["gradient of input 0"]
    assert_equal(found, true)


def test_memcnn_empties_the_input_of_the_caller():
    original, ours = both("memcnn", 1)
    x = joint().detach()
    kept = x.clone()
    original(x)
    assert x.untyped_storage().size() == 0
    x = kept.clone()
    ours(x).sum().backward()
    assert torch.equal(x, kept)


@pytest.mark.parametrize("preserve", [False, True])
def test_memcnn_under_dropout(preserve):
    original, ours = both("memcnn", 2, dropout=0.4, options={"preserve_rng_state": preserve})
    plain = copy.deepcopy(ours)
    for wrapper in plain:
        wrapper.disable = True
    x = joint()
    found = [measured(net, x) for net in (original, ours, plain)]
    for one in found:
        one.pop("next random number")  # the original draws in backward
    assert gradient_error(found[0], found[2]) > WRONG
    assert_equal(found[1], found[2])


def test_revtorch_under_dropout():
    """Unless told to seed torch anew in every block, it draws other masks in backward."""
    original, ours = both("revtorch", 2, dropout=0.4)
    x = joint()
    found = [measured(net, x) for net in (original, ours)]
    ours.memory = "store"
    found.append(measured(ours, x))
    for one in found:
        one.pop("next random number")
    assert gradient_error(found[0], found[2]) > WRONG
    assert_equal(found[1], found[2])


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, context):
        return self.net(x + context)


def told(package, depth, **options):
    return package.ReversibleSequential(*(Told() for _ in range(depth)), **options)


def test_revlib_with_a_context():
    """One that an encoder made: the original goes through the encoder's graph once for each module, and crashes."""
    original, ours = both("revlib", 3, told)
    encoder, text, x = mlp(), draw(), joint()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss_of(original(x, encoder(text))).backward()
    wanted = [x, text, *encoder.parameters(), *ours.parameters()]
    found = gradients(lambda: ours(x, encoder(text)), wanted)
    ours.memory = "store"
    assert_same(found, gradients(lambda: ours(x, encoder(text)), wanted))
    with pytest.raises(TypeError, match="missing"):
        original(x, layerwise_args_kwargs=[([text], {})] * 3)
    ours(x, layerwise_args_kwargs=[([text], {})] * 3)


def test_revlib_with_a_coupling():
    """Its own example of one, momentum: the original takes it for an addition in backward."""

    def make(package, depth, **options):
        return a_revlib(package, depth, coupling_forward=[forward], coupling_inverse=[back], **options)

    def forward(stream, out):
        return 0.9 * stream + 0.1 * out

    def back(stream, out):
        return (stream - 0.1 * out) / 0.9

    original, ours = both("revlib", 3, make)
    stored = make(peer("revlib"), 3, memory_mode=peer("revlib").MemoryModes.no_savings)
    stored.load_state_dict(ours.state_dict())
    x = joint()
    found = [measured(net, x) for net in (original, ours, stored)]
    assert gradient_error(found[0], found[2]) > WRONG
    assert_equal(found[1], found[2])


def test_revlib_on_two_copies():
    original, ours = both("revlib", 1, lambda package, _: package.ReversibleSequential(mlp(), mlp(), split_dim=None))
    x = draw()
    with pytest.raises(TypeError, match="dim"):
        original(x)
    assert ours(x).shape == (3, 2 * WIDTH)
