"""rg.Sequential(bits=m): trained reversibly, equal to `store` to the bit, and to equations by hand; in eval the plain net."""

import pytest
import torch
from bits_support import POLICIES, ROWS, SETTINGS, WIDTH, Layer, assert_equal, draw, gradients, sequential
from support import every_pair, loss_of, name_of, rg
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from retrograde._base.function_modules import Noised
from retrograde._engine.run import instead
from retrograde._exact.noise import new_seed, signs
from retrograde.rules import Noisy

BITS = range(1, 9)


# -- equal to store ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "setting", "memory"), every_pair(BITS, SETTINGS, POLICIES), ids=name_of)
def test_gradients(bits, setting, memory):
    """Of parameters, the input and a side input, with dropout."""
    net, x, gain = sequential(8, setting, bits=bits), draw(setting=setting), draw(ROWS, 1, setting=setting)
    found = []
    for net.memory in (memory, "store"):
        found.append(gradients(net, x, setting, gain=gain))
    assert_equal(*found)


@pytest.mark.parametrize(("bits", "setting", "depth"), [*every_pair(BITS, SETTINGS, [8, 64]), (4, "float32", 256)])
def test_states_are_recovered(bits, setting, depth):
    """Each layer sees the same bits again; signs of zeros too."""
    net = sequential(depth, setting, bits=bits, memory="reverse")
    gradients(net, draw(setting=setting), setting)
    for layer in net:
        (first,), (again,) = layer.seen, layer.seen_again
        assert torch.equal(first, again)
        assert torch.equal(first.signbit(), again.signbit())


def test_a_deep_net():
    net, x = sequential(256, bits=1), draw()
    found = []
    for net.memory in ("reverse", "store"):
        found.append(gradients(net, x))
    assert_equal(*found)


class Mixes(nn.Module):
    """Of a tree: each leaf is changed by a function of both."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))

    def forward(self, x):
        mean = sum(t.sin().mean() for t in tree_leaves(x))
        return tree_map(lambda t: t + (t * self.weight[0] + mean * self.weight[1]).tanh(), x)


@pytest.mark.parametrize("memory", POLICIES, ids=str)
def test_trees(memory):
    net = sequential(5, make=Mixes, bits=3)
    x = {"a": draw(3, 5), "b": (draw(7), draw(2, 2))}
    found = []
    for net.memory in (memory, "store"):
        found.append(gradients(net, x))
    assert_equal(*found)


def test_leaves_have_signs_of_their_own():
    net, x = rg.Sequential([nn.Identity()], bits=1), draw(100)
    net[0].forward = lambda x: tree_map(lambda t: t + 1, x)
    a, b = net({"a": x, "b": x + 0}).values()
    assert not torch.equal(a, b)
    torch.testing.assert_close((a - x - 1).abs(), (b - x - 1).abs())


def test_nets_side_by_side():
    """In one program: streams that are not connected are undone each by itself."""
    left, right = sequential(4), sequential(4)
    for layer in right[:2]:
        layer.requires_grad_(False)
    updates = [
        rg.Update(names[(depth + 1) % 2], Noised(net[depth]), (names[depth % 2], "seed"), rule=Noisy(3, depth))
        for depth in range(4)
        for net, names in ((left, "ab"), (right, "cd"))
    ]
    x, seed = torch.randn(ROWS, WIDTH), new_seed(None)
    found = []
    for memory in ("reverse", "store"):
        torch.manual_seed(1)
        out = rg.run(updates, dict.fromkeys("abcd", x) | {"seed": seed}, memory=memory)
        wanted = [p for p in (*left.parameters(), *right.parameters()) if p.requires_grad]
        found.append(torch.autograd.grad(loss_of([out["a"], out["c"]]), wanted))
    assert_equal(*found)
    with pytest.raises(rg.ProgramError, match="needs bits that only backward has"):
        rg.invert(updates, dict.fromkeys("abcd", x) | {"seed": seed})


@pytest.mark.parametrize("arithmetic", ["float", "auto"])
def test_no_arithmetic_is_too_coarse(arithmetic):
    """Whatever a program is told to run with, as by `retrograde check --arithmetic`: noise needs the grid."""
    net, x = sequential(4, bits=2, memory="reverse"), draw()
    true = gradients(net, x)
    with instead(arithmetic=arithmetic):
        assert_equal(gradients(net, x), true)


def test_no_elements_and_odd_numbers_of_them():
    for count in (0, 1, 7, 9, 65):
        net = rg.Sequential([nn.Tanh() for _ in range(4)], bits=3)
        x = draw(count)
        found = []
        for net.memory in ("reverse", "store"):
            torch.manual_seed(0)
            found.append(torch.autograd.grad(net(x).sum(), x)[0])
        assert torch.equal(*found)


def test_layouts():
    """A layer may return another layout than it was given: the next one sees that, as in the plain net."""
    strides = []

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            strides.append(x.stride())
            out = x + self.conv(x).tanh()
            return out.contiguous(memory_format=torch.channels_last)

    net, x = sequential(4, make=Turns, bits=4), draw(2, 3, 4, 5)
    found = []
    for net.memory in ("reverse", "store"):
        found.append(gradients(net, x))
    assert_equal(*found)
    assert set(strides[1:4]) == {x.contiguous(memory_format=torch.channels_last).stride()}


def test_nan_stays_in_its_element():
    class Spoils(nn.Module):
        def forward(self, x):
            return torch.where(torch.arange(x.numel()).view(x.shape) == 3, torch.inf, x.sin() + x)

    layers = [Layer(), Layer(), Spoils(), nn.Tanh(), nn.Tanh()]
    x, found = draw(), []
    for memory in ("reverse", "store"):
        torch.manual_seed(2)
        out = rg.Sequential(layers, bits=4, memory=memory)(x)
        found.append([out.detach(), *torch.autograd.grad(out[1:].sum(), [x, *layers[0].parameters()])])
    assert not found[0][0][0].isfinite().all()
    assert found[0][0][1:].isfinite().all()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


# -- equal to equations by hand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_equations(bits):
    """In float64 with ordinary autograd: new = L + gamma (p - 2c + L), from p = c = x on. The grid rounds to 2^-35."""
    net, x, gain = (
        sequential(5, "float64", bits=bits, memory="reverse"),
        draw(setting="float64"),
        draw(ROWS, 1, setting="float64"),
    )
    for layer in net:
        layer.drop.p = 0.0

    def by_hand(x, gain):
        seed, p, c = new_seed(None), x, x
        for depth, layer in enumerate(net):
            made = layer(c, gain)
            gamma = signs(seed, depth << 16, c.numel()).view(c.shape) * 2.0**-bits
            p, c = c, made + gamma * (p - 2 * c + made)
        return c

    found = gradients(net, x, gain=gain)
    torch.manual_seed(1)
    out = by_hand(x, gain)
    true = [out.detach(), *torch.autograd.grad(loss_of(out), [x, gain, *net.parameters()])]
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("bits", "setting"), every_pair(BITS, ["float32", "bfloat16", "float64"]))
def test_whole_numbers(bits, setting):
    """To the bit, in integers: D = P - 2C + L; new = L ± (D >> m). C is the state as the layer reads it."""
    net, x = sequential(5, setting, bits=bits, memory="reverse"), draw(setting=setting)
    unit = 2.0**35 if setting == "float64" else 2.0**24

    def whole(t):
        return (t.double() * unit).round().to(torch.int64)

    def read(number):
        value = number.double() / unit
        return value if setting == "float64" else value.float().to(x.dtype)

    torch.manual_seed(1)
    out = net(x)
    torch.manual_seed(1)
    seed, p, c = new_seed(None), whole(x.detach()), whole(x.detach())
    for depth, layer in enumerate(net):
        assert torch.equal(read(c), layer.seen[0])
        made = whole(layer(read(c)).detach())
        sign = signs(seed, depth << 16, c.numel()).view(c.shape)
        p, c = c, made + sign * ((p - 2 * whole(read(c)) + made) >> bits)
    assert torch.equal(out, read(c))


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_the_size_of_the_noise_and_its_mean(bits):
    """One layer: 2^-m of what it changes. Two linear ones: their mean over many signs is the plain net."""
    layers, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double(), torch.randn(1, 3).double().expand(20_000, 3)
    with torch.no_grad():
        made, noisy = layers[0](x), rg.Sequential(layers[0], bits=bits)(x)
        torch.testing.assert_close((noisy - made).abs(), (made - x).abs() * 2.0**-bits, rtol=0, atol=1e-10)
        apart = rg.Sequential(*layers, bits=bits)(x) - layers(x)
    assert (apart.mean(0).abs() < 4 * apart.std(0) / 20_000**0.5).all()
    assert (apart.std(0) > 1e-4).all()


def test_seeds():
    """One is drawn in each forward pass, from torch's generator, before anything else is."""
    net, x = sequential(4, bits=2), draw()
    first, second = net(x), net(x)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    first = net(x)
    torch.manual_seed(5)
    assert torch.equal(first, net(x))
    after = torch.rand(3)
    torch.manual_seed(5)
    new_seed(None)
    for layer in net:
        layer(x)
    assert torch.equal(after, torch.rand(3))


# -- eval, and without bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["store", *POLICIES, rg.ReverseAbove(0, dim=0)], ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_eval_is_the_plain_net(setting, memory):
    """To the bit, with gradients too: nothing can be undone without noise, so what would be reversed is checkpointed."""
    net, x, gain = sequential(5, setting, bits=4, memory=memory).eval(), draw(setting=setting), draw(ROWS, 1, setting=setting)
    plain = nn.Sequential(*net)
    plain.forward = lambda x, gain: [x := layer(x, gain) for layer in net][-1]
    assert_equal(gradients(net, x, setting, gain=gain), gradients(plain, x, setting, gain=gain))
    with torch.no_grad():
        assert torch.equal(net(x), nn.Sequential(*net)(x))
    if memory == "reverse":
        assert all(layer.seen_again for layer in net)


def test_noise_follows_the_mode_of_the_container():
    net, x = sequential(3, bits=2, memory="reverse"), draw()
    plain = nn.Sequential(*net)
    for layer in net:
        layer.eval()
    with torch.no_grad():
        assert not torch.equal(net(x), plain(x))
        net.training = False
        assert torch.equal(net(x), plain(x))
    assert sequential(3, bits=None, memory="checkpoint")(x).grad_fn is not None


def test_bits_may_be_set_at_any_time():
    net, x = sequential(3, memory="store"), draw()
    for layer in net:
        layer.drop.p = 0.0
    plain = net(x)
    net.bits = 8
    noisy = net(x)
    assert not torch.equal(noisy, plain)
    torch.testing.assert_close(noisy, plain, rtol=0, atol=0.1)
    net.bits = 1
    assert (net(x) - plain).abs().mean() > 10 * (noisy - plain).abs().mean()
    net.bits = None
    assert torch.equal(net(x), plain)


def test_state_dicts_and_slices():
    net = sequential(4, bits=5, memory="reverse")
    assert net.state_dict().keys() == nn.Sequential(*net).state_dict().keys()
    part = net[1:3]
    assert (part.bits, part.memory, len(part)) == (5, "reverse", 2)
    assert repr(net).startswith("Sequential(\n  bits=5, memory='reverse'")


# -- midpoint ----------------------------------------------------------------------------------------------------------


def test_midpoint_is_noise_without_randomness():
    """gamma = 1: new = L + (p - 2c + L), which is p + 2 f(c) where L = c + f(c)."""
    fns = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(5)]
    p, c = (draw(setting="float64") for _ in range(2))
    out = rg.run(rg.wirings.midpoint(fns), {"a": p, "b": c}, memory="reverse")
    found = torch.autograd.grad(loss_of([out["a"], out["b"]]), [p, c, *nn.ModuleList(fns).parameters()])
    before, last = p, c
    for fn in fns:
        made = last + fn(last)
        before, last = last, made + (before - 2 * last + made)
    true = torch.autograd.grad(loss_of([last, before]), [p, c, *nn.ModuleList(fns).parameters()])
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    with pytest.raises(rg.ProgramError, match="streams must have 2 items"):
        rg.wirings.midpoint(fns, streams="abc")
