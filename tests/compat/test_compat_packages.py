"""The drop-in replacements for RevTorch, MemCNN and revlib, without the packages: right by hand, also where those are not."""

import copy
import warnings

import pytest
import torch
from support import REPLAYED, WIDTH, assert_same, draw, gradients, loss_of, mlp, rg
from torch import nn

from retrograde.bench.meter import LiveBytes
from retrograde.compat import memcnn, revlib, revtorch


def joint():
    """An input that holds both halves along dim 1, channels first."""
    return draw(3, 2 * WIDTH)


class Double(nn.Module):
    """f of an affine coupling: twice the channels."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net, self.out = mlp(dropout=dropout), nn.Linear(WIDTH, 2 * WIDTH).double()

    def forward(self, x):
        return self.out(self.net(x))


class Pair(Double):
    def forward(self, x):
        scale, shift = super().forward(x).chunk(2, -1)
        return scale.exp(), shift


def halves_by_hand(blocks, x, step):
    x1, x2 = x.chunk(2, 1)
    for f, g in blocks:
        x1 = step(x1, f(x2))
        x2 = step(x2, g(x1))
    return torch.cat((x1, x2), 1)


def add(x, out):
    return x + out


def scaled(x, out):
    return x * out[0] + out[1]


def a_revtorch(dropout, memory):
    blocks = [(mlp(dropout=dropout), mlp(dropout=dropout)) for _ in range(3)]
    net = revtorch.ReversibleSequence(nn.ModuleList(revtorch.ReversibleBlock(f, g) for f, g in blocks), memory=memory)
    return net, lambda x: halves_by_hand(blocks, x, add)


def a_memcnn(dropout, memory, coupling="additive", adapter=None):
    make = mlp if coupling == "additive" else Double if adapter is memcnn.AffineAdapterSigmoid else mlp if adapter else Pair
    made = [
        memcnn.create_coupling(make(dropout=dropout), make(dropout=dropout), coupling=coupling, adapter=adapter) for _ in range(3)
    ]
    net = nn.Sequential(*(memcnn.InvertibleModuleWrapper(one, keep_input=memory == "checkpoint") for one in made))
    step = add if coupling == "additive" else scaled
    return net, lambda x: halves_by_hand([(one.Fm, one.Gm) for one in made], x, step)


def a_chain(dropout, memory):
    net, by_hand = a_memcnn(dropout, memory)
    return memcnn.InvertibleSequential(*net, memory=memory), by_hand


def a_revlib(dropout, memory):
    fns = [mlp(dropout=dropout) for _ in range(5)]

    def by_hand(x):
        x0, x1 = x.chunk(2, 1)
        for f in fns:
            x0, x1 = x1, x0 + f(x1)
        return torch.cat((x0, x1), 1)

    return revlib.ReversibleSequential(*fns, memory=memory), by_hand


NETS = {
    "revtorch": a_revtorch,
    "memcnn": a_memcnn,
    "memcnn, affine": lambda *a: a_memcnn(*a, "affine"),
    "memcnn, naive": lambda *a: a_memcnn(*a, "affine", memcnn.AffineAdapterNaive),
    "memcnn, sigmoid": lambda *a: a_memcnn(*a, "affine", memcnn.AffineAdapterSigmoid),
    "memcnn, chain": a_chain,
    "revlib": a_revlib,
}
every_net = pytest.mark.parametrize("make", NETS.values(), ids=NETS)


@every_net
@pytest.mark.parametrize("memory", REPLAYED)
def test_by_hand(make, memory):
    """With dropout; two forward passes before a backward; and an input that needs no gradient, and is left alone."""
    net, by_hand = make(0.3, memory)
    x, wanted = joint(), list(net.parameters())
    assert_same(gradients(lambda: (net(x), net(x)), [x, *wanted]), gradients(lambda: (by_hand(x), by_hand(x)), [x, *wanted]))
    plain = x.detach()
    kept = plain.clone()
    assert_same(gradients(lambda: net(plain), wanted), gradients(lambda: by_hand(plain), wanted))
    assert torch.equal(plain, kept)


@every_net
def test_inverse(make):
    net, _ = make(0.0, "reverse")
    x = joint()
    if isinstance(net, nn.Sequential) and not hasattr(net, "inverse"):
        back = net(x)
        for part in reversed(net):
            back = part.inverse(back)
    else:
        back = net.inverse(net(x))
    assert_same([back], [x])
    back.sum().backward()
    assert (x.grad - 1).abs().max() < 1e-8


@pytest.mark.parametrize("make", [a_revtorch, a_chain, a_revlib])
def test_memory_is_flat_and_the_checks_know_them(make):
    net, _ = make(0.0, "reverse")
    report = rg.check.gradients(net, joint())
    assert report.ok, report
    assert report.replayed
    peaks = []
    for depth in (4, 16):
        big = [nn.Linear(64, 64) for _ in range(2 * depth)]
        x = torch.randn(256, 128)
        if make is a_revlib:
            net = revlib.ReversibleSequential(*big)
        else:
            pairs = list(zip(big[::2], big[1::2], strict=True))
            blocks = [revtorch.ReversibleBlock(f, g) for f, g in pairs]
            wrappers = [memcnn.InvertibleModuleWrapper(memcnn.AdditiveCoupling(f, g)) for f, g in pairs]
            net = revtorch.ReversibleSequence(blocks) if make is a_revtorch else memcnn.InvertibleSequential(*wrappers)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        with LiveBytes() as meter:
            net(x).sum().backward()
        peaks.append(meter.peak)
    assert peaks[1] <= peaks[0] * 1.02


# -- RevTorch ----------------------------------------------------------------------------------------------------------


def test_revtorch_other_dims_and_a_block_by_itself():
    """Blocks may be split along different dims; a block has gradients of its own."""
    fns = [mlp() for _ in range(4)]
    blocks = [revtorch.ReversibleBlock(*fns[:2], split_along_dim=1), revtorch.ReversibleBlock(*fns[2:], 0, True)]
    net = revtorch.ReversibleSequence(blocks, eagerly_discard_variables=False)
    x = draw(4, WIDTH, WIDTH)

    def by_hand(only=2):
        y = x
        for block, dim in list(zip(blocks, (1, 0), strict=True))[:only]:
            a, b = y.chunk(2, dim)
            a = a + block.f_block(b)
            y = torch.cat((a, b + block.g_block(a)), dim)
        return y

    assert_same(gradients(lambda: net(x), [x, *net.parameters()]), gradients(by_hand, [x, *net.parameters()]))
    own = [x, *blocks[0].parameters()]
    assert_same(gradients(lambda: blocks[0](x), own), gradients(lambda: by_hand(1), own))
    assert_same([net.inverse(net(x))], [x])
    with pytest.raises(rg.ProgramError, match="block 1 is a Tanh, not a ReversibleBlock"):
        revtorch.ReversibleSequence(nn.ModuleList([blocks[0], nn.Tanh()]))
    with pytest.raises(rg.ProgramError, match="odd size 5 along dim 1"):
        net(draw(4, 5))


# -- MemCNN ------------------------------------------------------------------------------------------------------------


class Shear(nn.Module):
    """An invertible module of two inputs."""

    def __init__(self):
        super().__init__()
        self.f = mlp()

    def forward(self, a, b):
        return a + self.f(b), b

    def inverse(self, a, b):
        return a - self.f(b), b


class Turn(nn.Module):
    def __init__(self, size=2 * WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size, dtype=torch.float64) + 0.1 * torch.randn(size, size, dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight

    def inverse(self, y):
        return y @ self.weight.inverse()


@pytest.mark.parametrize("options", [{}, {"keep_input": True, "keep_input_inverse": True}, {"disable": True}], ids=str)
def test_memcnn_wraps_modules_with_an_inverse(options):
    shear = Shear()
    net = memcnn.InvertibleModuleWrapper(shear, **options)
    a, b = draw(), draw()
    wanted = [a, b, *shear.parameters()]
    assert_same(gradients(lambda: net(a, b), wanted), gradients(lambda: shear(a, b), wanted))
    assert_same(gradients(lambda: net.inverse(a, b), wanted), gradients(lambda: shear.inverse(a, b), wanted))


def test_memcnn_chain_of_all_kinds():
    """Couplings along two dims, modules with an inverse, wrapped or not; keys are those of nn.Sequential."""
    parts = [memcnn.InvertibleModuleWrapper(Turn()), Turn(), memcnn.AdditiveCoupling(mlp()), memcnn.ReversibleBlock(mlp(), mlp())]
    parts += [memcnn.InvertibleModuleWrapper(memcnn.AdditiveCoupling(mlp(2 * WIDTH), split_dim=0)), Turn()]
    net, plain = memcnn.InvertibleSequential(*parts), nn.Sequential(*copy.deepcopy(parts))
    for part in plain.modules():
        if isinstance(part, memcnn.InvertibleModuleWrapper):
            part.disable = True
    plain.load_state_dict(net.state_dict())
    x = draw(4, 2 * WIDTH)
    found, true = (gradients(lambda one=one: one(x), [x, *one.parameters()]) for one in (net, plain))
    assert_same(found, true)
    assert_same([net.inverse(net(x))], [x], 1e-8)
    with pytest.raises(rg.ProgramError, match="Tanh has no method inverse"):
        memcnn.InvertibleSequential(nn.Tanh())


@pytest.mark.parametrize("implementation", [-1, 0, 1])
def test_memcnn_implementations(implementation):
    fns = [mlp(dropout=0.3), mlp(dropout=0.3)]
    net = memcnn.create_coupling(*fns, implementation_fwd=implementation, implementation_bwd=implementation)
    x = joint()
    wanted = [x, *net.parameters()]
    by_hand = gradients(lambda: halves_by_hand([fns], x, add), wanted)
    assert_same(gradients(lambda: net(x), wanted), by_hand)
    with pytest.raises(NotImplementedError, match="unknown implementation 2") as info:
        memcnn.AffineCoupling(Pair(), implementation_fwd=2)
    assert isinstance(info.value, rg.RetrogradeError)
    with pytest.raises(NotImplementedError, match="unknown coupling 'cubic'"):
        memcnn.create_coupling(*fns, coupling="cubic")
    assert memcnn.AdditiveCoupling(fns[0]).Gm is not fns[0]


def test_memcnn_is_invertible_module():
    class Off(Turn):
        def inverse(self, y):
            return super().inverse(y) + 0.1

    shape, turn = (3, 2 * WIDTH), Turn()
    for module, true in {turn: True, memcnn.InvertibleModuleWrapper(turn): True, Off(): False, nn.Tanh(): False}.items():
        assert memcnn.is_invertible_module(module, shape, torch.float64) is true
    with pytest.warns(UserWarning, match="Shear: forward returns a tensor that it was given"):  # as MemCNN does
        assert memcnn.is_invertible_module(Shear(), ((3, WIDTH), (3, WIDTH)), torch.float64)
    with pytest.raises(ValueError, match="a shape, or a tuple of shapes"):
        memcnn.is_invertible_module(turn, "3, 4")
    state = torch.get_rng_state()
    memcnn.is_invertible_module(turn, shape, torch.float64)
    assert torch.equal(torch.get_rng_state(), state)


def test_memcnn_random_inverse_is_refused():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

        inverse = forward

    x = joint()
    with pytest.raises(rg.ProgramError, match=r"x <- Noise\(\): the rule draws random numbers"):
        memcnn.InvertibleModuleWrapper(Noise())(x)
    memcnn.InvertibleModuleWrapper(Noise(), keep_input=True)(x).sum().backward()


def test_memcnn_odd_channels():
    with pytest.raises(rg.ProgramError, match="even number of channels"):
        memcnn.AffineAdapterSigmoid(nn.Linear(4, 5))(torch.randn(2, 4))


# -- revlib ------------------------------------------------------------------------------------------------------------


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, context=0.0, gain=1.0):
        return self.net(x + context) * gain


def told_by_hand(fns, x, sides):
    x0, x1 = x.chunk(2, 1)
    for f, side in zip(fns, sides, strict=True):
        x0, x1 = x1, x0 + f(x1, *side)
    return torch.cat((x0, x1), 1)


def test_revlib_context_from_an_encoder():
    """Its backward runs once."""
    fns, encoder, text, x = [Told() for _ in range(4)], mlp(), draw(), joint()
    net, passes = revlib.ReversibleSequential(*fns), []

    def encoded():
        hidden = encoder(text)
        hidden.register_hook(lambda _: passes.append(1))
        return hidden

    wanted = [x, text, *encoder.parameters(), *net.parameters()]
    found = gradients(lambda: net(x, encoded(), gain=2.0), wanted)
    assert len(passes) == 1
    assert_same(found, gradients(lambda: told_by_hand(fns, x, [(encoder(text), 2.0)] * 4), wanted))


def test_revlib_layerwise_arguments():
    fns, x, contexts = [Told() for _ in range(3)], joint(), [draw() for _ in range(3)]
    net = revlib.ReversibleSequential(*fns)
    own = [([c], {"gain": i + 1.0}) for i, c in enumerate(contexts)]
    wanted = [x, *contexts, *net.parameters()]
    sides = [(c, i + 1.0) for i, c in enumerate(contexts)]
    found = gradients(lambda: net(x, layerwise_args_kwargs=own), wanted)
    assert_same(found, gradients(lambda: told_by_hand(fns, x, sides), wanted))
    assert_same([net.inverse(net(x, layerwise_args_kwargs=own), layerwise_args_kwargs=own)], [x])
    with pytest.raises(rg.ProgramError, match="2 pairs"):
        net(x, layerwise_args_kwargs=own[:2])


@pytest.mark.parametrize("mode", revlib.MemoryModes)
def test_revlib_couplings(mode):
    """The user's own, in turn with addition, under every memory mode."""
    fns, x = [mlp() for _ in range(4)], joint()

    def forward(stream, out):
        return 0.9 * stream + 0.1 * out.sin()

    def inverse(stream, out):
        return (stream - 0.1 * out.sin()) / 0.9

    net = revlib.ReversibleSequential(*fns, coupling_forward=[forward, None], coupling_inverse=[inverse, None], memory_mode=mode)

    def by_hand():
        x0, x1 = x.chunk(2, 1)
        for i, f in enumerate(fns):
            x0, x1 = x1, forward(x0, f(x1)) if i % 2 == 0 else x0 + f(x1)
        return torch.cat((x0, x1), 1)

    wanted = [x, *net.parameters()]
    assert_same(gradients(lambda: net(x), wanted), gradients(by_hand, wanted))
    assert_same([net.inverse(net(x))], [x])


def test_revlib_two_copies_a_module_by_itself_and_refusals():
    fns, x = [mlp(), mlp()], draw()
    net = revlib.ReversibleSequential(*fns, split_dim=None)
    x0 = x + fns[0](x)
    assert_same([net(x)], [torch.cat((x0, x + fns[1](x0)), -1)])
    assert_same([net.inverse(net(x))], [x])
    first, second = net[0]((x, x))
    assert_same([first, second], [x, x0])
    loss_of([first, second]).backward()
    assert fns[0][1].weight.grad is not None
    for options, match in {
        "fused_optimizer": (torch.optim.SGD, r"rg\.step_in_backward"),
        "target_device": ("cuda", "target_device"),
        "coupling_forward": ([add], "both coupling_forward and coupling_inverse"),
    }.items():
        with pytest.raises(rg.ProgramError, match=match[1]):
            revlib.ReversibleSequential(*fns, **{options: match[0]})
    with pytest.raises(rg.ProgramError, match="no modules"):
        revlib.ReversibleSequential()


def test_nothing_warns_and_pickles_are_whole():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = memcnn.InvertibleSequential(memcnn.ReversibleBlock(mlp(), coupling="additive"))
        other = copy.deepcopy(net)
        assert torch.equal(net(x := joint()), other(x))
