"""Reversible noise on CUDA: the kernels against plain operations, training that is equal to store to the bit, and CUDA graphs."""

import copy
import math

import pytest
import torch
from exact_support import FLOATS as SETTINGS
from exact_support import assert_equal, same
from support import assert_same, loss_of, rg
from torch import nn

from retrograde._exact import noise
from retrograde._exact.noise import Noise, new_seed
from retrograde._exact.range import GRID, LIMIT, Ledger
from retrograde.ordinary import sequential as sequential_module

pytestmark = pytest.mark.gpu
WIDTH, LENGTH = 64, 32
UNIT = 2.0**-GRID
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


# -- kernels -----------------------------------------------------------------------------------------------------------


def grid(count, size):
    wide = torch.randn(count, dtype=torch.float64, device="cuda") * size
    return wide.clamp(-LIMIT, LIMIT).div(UNIT).round() * UNIT + 0.0


def halves(wide):
    high = wide.float()
    return [high, ((wide - high.double()) / UNIT).nan_to_num(0.0).to(torch.int16)]


def case(count, bits, dtype, size, number=3):
    p, c = halves(grid(count, size)), grid(count, size).to(dtype)
    layer = (torch.randn(count, device="cuda") * size).to(dtype)
    return p, layer, c, Noise(new_seed(torch.device("cuda")), number, bits, GRID, None)


@pytest.mark.parametrize("count", [0, 1, 7, 9, 1000, 1024, 4096, 100_003, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_kernels(bits, dtype, count):
    for size in (1e-4, 1.0, 3000.0):
        p, layer, c, how = case(count, bits, dtype, size)
        note, plainly = [], []
        made, true = noise._replaced(p, layer, c, how, note), noise._made(p, layer, c, how, plainly)
        for found, expected in zip([*made, *note], [*true, *plainly], strict=True):
            assert same(found, expected)
        for found, expected in zip(noise.recovered(made, layer, c, how, note[0]), p, strict=True):
            assert same(found, expected)
            assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_gradients_of_kernels(bits, dtype):
    """In each dtype they are those of plain operations."""
    for count in (5, 100_003, 1 << 16):
        p, layer, c, how = case(count, bits, dtype, 1.0)
        given = [layer.requires_grad_(), c.requires_grad_(), p[0].requires_grad_()]
        made, grad = noise.replaced(p, layer, c, how, None), torch.randn(count, device="cuda")
        found = torch.autograd.grad(made[0], given, grad, retain_graph=True)
        true = torch.autograd.grad(made[0], given, grad, create_graph=True)  # by plain operations
        for a, b in zip(found, true, strict=True):
            assert same(a, b.detach())


def test_a_seed_and_a_number_of_their_own():
    p, layer, c, how = case(4096, 2, torch.float32, 1.0)
    first = noise._replaced(p, layer, c, how, None)[0]
    for other in (
        how._replace(number=4),
        how._replace(number=0),
        how._replace(number=255 << 16),
        how._replace(seed=how.seed + 1),
    ):
        made = noise._replaced(p, layer, c, other, None)[0]
        assert not torch.equal(made, first)
        assert torch.equal(made, noise._made(p, layer, c, other, None)[0])


def test_out_of_range_and_nan():
    for value, stays in ((math.nan, False), (math.inf, False), (-math.inf, False), (1e30, True), (-32769.0, True)):
        p, layer, c, how = case(1000, 4, torch.float32, 1.0)
        layer[[3, 700]] = value
        ledger = Ledger(rg.wirings.leapfrog([nn.Tanh() for _ in range(4)]), ["a", "b"])
        ledger.index = 2
        made, true = noise._replaced(p, layer, c, how._replace(ledger=ledger), []), noise._made(p, layer, c, how, [])
        assert ledger.flags_on(made[0].device).tolist() == [0, 0, int(stays), 0, 0, 0]
        assert not made[0][[3, 700]].isfinite().any()
        assert not made[1][[3, 700]].any()
        rest = torch.ones(1000, dtype=torch.bool, device="cuda")
        rest[[3, 700]] = False
        for found, expected in zip(made, true, strict=True):
            assert torch.equal(found[rest], expected[rest])


# -- training ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.attend = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, gain=None):
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return x + self.drop(self.mlp(x) if gain is None else self.mlp(x) * gain)


def sequential(depth, setting, **options):
    torch.manual_seed(0)
    return rg.Sequential([Layer() for _ in range(depth)], **options).to("cuda", SETTINGS[setting][0])


def draw(*shape, setting="float32"):
    return torch.randn(*shape, device="cuda").to(SETTINGS[setting][0]).requires_grad_()


def observed(net, x, setting, **side):
    wanted = [x, *side.values(), *net.parameters()]
    torch.manual_seed(1)
    with torch.autocast("cuda", SETTINGS[setting][1] or torch.bfloat16, enabled=SETTINGS[setting][1] is not None):
        out = net(x, **side)
    return [out.detach(), *torch.autograd.grad(loss_of(out.double()), wanted), torch.rand(3, device="cuda")]


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("bits", "depth"), [(1, 8), (4, 8), (7, 8), (8, 8), (2, 64)])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", rg.Anchor(5), rg.StoreLast(2)], ids=str)
def test_gradients(memory, bits, depth, setting, deterministic, recovered):
    net = sequential(depth, setting, bits=bits)
    x, gain = draw(4, LENGTH, WIDTH, setting=setting), draw(4, LENGTH, 1, setting=setting)
    found = []
    for net.memory in (memory, "store"):
        found.append(observed(net, x, setting, gain=gain))
    assert_equal(*found)
    assert recovered.apart == 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_eval_is_the_plain_net(setting, deterministic):
    net, x = sequential(5, setting, bits=4, memory="reverse").eval(), draw(4, LENGTH, WIDTH, setting=setting)
    assert_equal(observed(net, x, setting), observed(nn.Sequential(*net), x, setting))


def test_second_derivatives(deterministic):
    found = []
    for memory in ("reverse", "store"):
        torch.manual_seed(0)
        net = rg.Sequential([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)], bits=3, memory=memory).cuda()
        x = draw(6, WIDTH)
        wanted = [x, *net.parameters()]
        first = torch.autograd.grad(net(x).square().sum(), wanted, create_graph=True)
        found.append([*(g.detach() for g in first), *torch.autograd.grad(sum(g.square().sum() for g in first), wanted)])
    assert_equal(*found)


def test_layouts(deterministic):
    net = rg.Sequential([nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(5)], bits=4).cuda()
    net, x = net.to(memory_format=torch.channels_last), draw(2, 8, 5, 7)
    found = []
    for net.memory in ("reverse", "store"):
        found.append(observed(net, x.contiguous(memory_format=torch.channels_last), "float32"))
    assert_equal(*found)


def test_out_of_range():
    class Grows(nn.Module):
        def forward(self, x):
            return x * 1e6

    net = rg.Sequential([nn.Linear(WIDTH, WIDTH), Grows(), nn.Tanh()], bits=4, memory="reverse").cuda()
    out = net(draw(4, WIDTH))
    with pytest.raises(rg.OutOfRange, match=r"update 1: .*left the range.*use bits=None"):
        out.sum().backward()


def test_memory():
    """Bytes of a layer: half a byte for each element, by the allocator."""

    def between(depth):
        net = rg.Sequential([nn.Tanh() for _ in range(depth)], bits=4, memory="reverse", verify="off")
        x = draw(1 << 12, 256)
        before = torch.cuda.memory_allocated()
        out = net(x)
        found = torch.cuda.memory_allocated() - before
        out.sum().backward()
        return found

    between(2)
    assert between(12) - between(4) == 8 * (1 << 20) // 2


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", rg.StoreLast(2)], ids=str)
def test_captured(memory, monkeypatch):
    """Each replay of a CUDA graph draws another seed, and has the gradients of store with this seed."""
    drawn = []

    def noted(device):
        drawn.append(new_seed(device))
        return drawn[-1]

    monkeypatch.setattr(sequential_module, "new_seed", noted)
    torch.manual_seed(0)
    net = rg.Sequential([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)], bits=2, memory=memory).cuda()
    plain, x = copy.deepcopy(net), draw(8, WIDTH)
    plain.memory = "store"
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            net(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for p in net.parameters():
            p.grad.zero_()
        net(x).square().sum().backward()
    captured, seeds = drawn[-1], []
    for _ in range(3):
        graph.replay()
        seeds.append(captured.item())
        monkeypatch.setattr(sequential_module, "new_seed", lambda device: captured.clone())
        plain.zero_grad()
        plain(x).square().sum().backward()
        assert_same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()], 1e-5)
    assert len(set(seeds)) == 3
