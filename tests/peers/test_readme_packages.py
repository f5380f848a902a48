"""What the READMEs and test suites of RevTorch, MemCNN and revlib do, with the package and with ours."""

import copy
from functools import partial

import pytest
import torch
from support import assert_same, draw, loss_of
from torch import nn
from torch.nn import functional as F

from retrograde.compat import memcnn, revlib, revtorch

from .systems import MARKS, peer
from .training import assert_trains

pytestmark = MARKS
CHANNELS = 4


def conv(inner, outer):
    return nn.Conv2d(inner, outer, 3, padding=1)


def images(channels=3, grad=False):
    return draw(2, channels, 6, 6, grad=grad)


def both(name, ours, make):
    """What `make` builds of the package and of ours, with the same parameters under the same keys."""
    original, net = (make(package).double() for package in (peer(name), ours))
    net.load_state_dict(original.state_dict(), strict=True)
    return original, net


def steps(given, count=3):
    """On other inputs in each."""
    return [lambda model: loss_of(model(given())) / 100] * count


# -- RevTorch ----------------------------------------------------------------------------------------------------------


class PartiallyReversible(nn.Module):
    def __init__(self, package):
        super().__init__()

        def half():
            return nn.Sequential(nn.ReLU(), conv(CHANNELS, CHANNELS))

        self.first, self.last = nn.Conv2d(3, 2 * CHANNELS, 3), nn.Conv2d(2 * CHANNELS, 10, 3)
        blocks = [package.ReversibleBlock(half(), half()) for _ in range(4)]
        self.sequence = package.ReversibleSequence(nn.ModuleList(blocks))

    def forward(self, x):
        x = self.last(F.relu(self.sequence(self.first(x))))
        return F.avg_pool2d(x, (x.shape[2], x.shape[3])).flatten(1)


def test_revtorch():
    losses = [lambda model: F.cross_entropy(model(images()), torch.randint(0, 10, (2,)))] * 3
    assert_trains(*both("revtorch", revtorch, PartiallyReversible), losses)


# -- MemCNN ------------------------------------------------------------------------------------------------------------


def operation():
    """One that edits its own output in place."""
    return nn.Sequential(conv(CHANNELS, CHANNELS), nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True))


def test_memcnn_in_eval():
    """The README's example, from the input to the output and back."""
    outs = []
    x = torch.rand(2, 2 * CHANNELS, 6, 6)
    fns = operation(), operation()
    for package in (peer("memcnn"), memcnn):
        coupling = package.AdditiveCoupling(Fm=copy.deepcopy(fns[0]), Gm=copy.deepcopy(fns[1])).eval()
        wrapper = package.InvertibleModuleWrapper(fn=coupling, keep_input=True, keep_input_inverse=True).eval()
        assert package.is_invertible_module(coupling, test_input_shape=x.shape)
        assert package.is_invertible_module(wrapper, test_input_shape=x.shape)
        y = wrapper.forward(x)
        assert torch.allclose(wrapper.inverse(y), x, atol=1e-6)
        outs.append(y.detach())
    assert_same([outs[1]], [outs[0]], 1e-6)


@pytest.mark.parametrize("keep_input", [True, False])
def test_memcnn_in_training(keep_input):
    def make(package):
        couplings = [package.AdditiveCoupling(Fm=operation(), Gm=operation()) for _ in range(3)]
        options = {"keep_input": keep_input, "keep_input_inverse": keep_input}
        return nn.Sequential(conv(3, 2 * CHANNELS), *(package.InvertibleModuleWrapper(one, **options) for one in couplings))

    assert_trains(*both("memcnn", memcnn, make), steps(images), 1e-8)


def resnet(where, package, patch):
    """A RevNet of the package's own, with these couplings and wrappers."""
    for name in ("create_coupling", "InvertibleModuleWrapper"):
        patch.setattr(where, name, getattr(package, name))
    options = {"channels_per_layer": [8, 8, 16, 16], "strides": [1, 1, 2, 2], "init_kernel_size": 3}
    return where.ResNet(where.RevBasicBlock, [2, 2, 2], num_classes=10, **options)


def test_resnet_of_memcnn(monkeypatch):
    """With the package's wrappers it does not train: they empty what the ReLU before them has saved."""
    where = peer("memcnn.models.resnet")
    losses = [lambda model: F.cross_entropy(model(images()), torch.randint(0, 10, (2,)))] * 3
    original, ours = both("memcnn", memcnn, lambda package: resnet(where, package, monkeypatch))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0](original).backward()
    assert_trains(None, ours, losses, 1e-8)


class Scaling(nn.Module):
    """Scale and shift of an affine coupling."""

    def __init__(self):
        super().__init__()
        self.conv = conv(CHANNELS, 2 * CHANNELS)

    def forward(self, x):
        scale, shift = self.conv(x).chunk(2, 1)
        return scale.tanh().exp(), shift


BLOCKS = {"AdditiveBlock": ("additive", lambda: conv(CHANNELS, CHANNELS)), "AffineBlock": ("affine", Scaling)}


@pytest.mark.parametrize("name", BLOCKS)
def test_old_names_of_memcnn(name):
    """They save memory by themselves. The original's AffineBlock is wrong: it forgets a scale in the gradient of its input."""
    file, make_fn = BLOCKS[name]

    def make(package):
        block = getattr(package, name)
        return nn.Sequential(conv(3, 2 * CHANNELS), *(block(make_fn(), make_fn()) for _ in range(2)), block(make_fn()))

    original, ours = both(f"memcnn.models.{file}", memcnn, make)
    assert_trains(original, ours, steps(images), wrong=name == "AffineBlock")
    ours.load_state_dict(original.state_dict())
    x = images(2 * CHANNELS)
    assert_same([ours[-1].inverse(x)], [original[-1].inverse(x)])
    assert_same([ours[-1].inverse(ours[-1](x))], [x])


def test_two_backward_passes_of_memcnn():
    """`num_bwd_passes=2` of the package is `retain_graph=True` here."""

    def make(package):
        coupling = package.AdditiveCoupling(Fm=operation(), Gm=operation())
        return package.InvertibleModuleWrapper(coupling, keep_input=True, keep_input_inverse=True, num_bwd_passes=2)

    original, ours = both("memcnn", memcnn, make)
    x = images(2 * CHANNELS, grad=True)
    found = []
    for net, options in ((original, {}), (ours, {"retain_graph": True})):
        y = net(x)
        back = [net.inverse(y), net.inverse(y)]
        for i, one in enumerate(back):
            (one - i).sin().sum().backward(**(options if i == 0 else {}))
        found.append([p.grad for p in net.parameters()])
    assert_same(found[1], found[0], 1e-8)
    y = ours(x).sin()
    y.sum().backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.sum().backward()


# -- revlib ------------------------------------------------------------------------------------------------------------


def merge(stream, out):
    return 0.99 * stream + 0.01 * out


def unmerge(stream, out):
    return (stream - 0.01 * out) / 0.99


def test_momentum_of_revlib():
    """Its own addition is among the couplings. The original is wrong: backward takes all of them for additions."""

    def make(package):
        layers = [layer for _ in range(4) for layer in (conv(CHANNELS, CHANNELS), nn.Identity())]
        couplings = {
            "coupling_forward": [merge, package.additive_coupling_forward],
            "coupling_inverse": [unmerge, package.additive_coupling_inverse],
        }
        return package.ReversibleSequential(*layers, **couplings)

    assert_trains(*both("revlib", revlib, make), steps(lambda: images(2 * CHANNELS, grad=True)), wrong=True)


def block():
    """A branch of an iRevNet."""

    def layer(inner, outer):
        return nn.Sequential(conv(inner, outer), nn.Dropout(0.2), nn.BatchNorm2d(outer), nn.ReLU())

    return nn.Sequential(layer(CHANNELS, 2 * CHANNELS), layer(2 * CHANNELS, CHANNELS), conv(CHANNELS, CHANNELS))


def revnet(package, depth=3, shared=False, mode="autograd_function"):
    blocks = [block()] * depth if shared else [block() for _ in range(depth)]
    core = package.ReversibleSequential(*blocks, memory_mode=package.MemoryModes[mode])
    return nn.Sequential(conv(3, 2 * CHANNELS), core, conv(2 * CHANNELS, 5))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("depth", [1, 8])
@pytest.mark.parametrize("mode", ["no_savings", "checkpoint", "autograd_graph", "autograd_function"])
def test_revnet_of_revlib(depth, shared, mode):
    make = partial(revnet, depth=depth, shared=shared, mode=mode)
    assert_trains(*both("revlib", revlib, make), steps(images, 2), 1e-8, reversible=mode != "no_savings")


class Reformer(nn.Module):
    def __init__(self, package):
        super().__init__()
        parts, width = peer("reformer_pytorch.reformer_pytorch"), 16
        layers = []
        for _ in range(3):
            feed_forward = parts.Chunk(4, parts.FeedForward(width, activation=nn.GELU), along_dim=-2)
            layers += [nn.Sequential(nn.LayerNorm(width), fn) for fn in (parts.LSHSelfAttention(width, 2, 8, 4), feed_forward)]
        self.tokens, self.positions = nn.Embedding(20, 2 * width), parts.AbsolutePositionalEmbedding(2 * width, 64)
        self.core = package.ReversibleSequential(*layers, split_dim=-1)
        self.out = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, 20))

    def forward(self, x):
        return self.out(self.core(self.tokens(x) + self.positions(x)))


def test_reformer_of_revlib():
    assert_trains(*both("revlib", revlib, Reformer), steps(lambda: torch.randint(0, 20, (2, 64))))


def test_offload_tensor():
    values = []
    for package in (peer("revlib"), revlib):
        x = draw(3, 4)
        package.offload_tensor(x, torch.zeros(1)).square().sum().backward()
        values.append(x.grad / x.detach())
    assert_same([values[1]], [values[0]])
