"""Exact arithmetic on CUDA: the fused kernel against the plain path, and training that is equal to store to the bit."""

import contextlib
import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from support import loss_of, parameters, rg
from test_exact import Fn, Recovered, assert_equal, same
from torch import nn
from torch.utils._pytree import tree_leaves

from retrograde._engine import call as calls
from retrograde._exact import cuda as fused
from retrograde._exact.cuda import on_grid
from retrograde._exact.range import GRID, LIMIT, Ledger
from retrograde.errors import OutOfRange

pytestmark = pytest.mark.gpu
UNIT = 2.0**-GRID
WIDTH, LENGTH = 64, 32
SETTINGS = {  # dtype of the net and its streams, dtype of autocast
    "bf16 autocast": (torch.float32, torch.bfloat16),
    "fp16 autocast": (torch.float32, torch.float16),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "float32": (torch.float32, None),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SIZES = [0, 1, 31, 1023, 1024, 1025, 100_003]

every_setting = pytest.mark.parametrize("setting", SETTINGS)


# -- the kernel --------------------------------------------------------------------------------------------------------


def numbers(count, low, high, dtype=torch.float64):
    """Of all magnitudes between two powers of two, of both signs, some of them zero."""
    size = 2.0 ** (torch.rand(count, dtype=torch.float64, device="cuda") * (high - low) + low)
    return (size * torch.randint(-1, 2, (count,), device="cuda")).to(dtype)


def whole(high, low):
    return high.double() + low.double() * UNIT


def halves(wide):
    """Split by the equations alone."""
    high = wide.float()
    low = ((wide - high.double()) / UNIT).nan_to_num(0.0, 0.0, 0.0)
    return high, low.to(torch.int16)


def assert_plus(high, low, part, sign, ledger=None):
    """The kernel against float64, bit by bit; nothing has left the range."""
    new = fused.plus(high, low, part, sign, ledger)
    true = whole(high, low) + sign * on_grid(part, GRID)
    assert [t.dtype for t in new] == [torch.float32, torch.int16]
    for found, expected in zip(new, halves(true), strict=True):
        assert same(found, expected)
        known = ~expected.isnan()
        assert torch.equal(found.signbit()[known], expected.signbit()[known])
    finite = true.isfinite()
    assert torch.equal(whole(*new)[finite], true[finite])
    assert not new[1][~finite].any()
    return new


@pytest.fixture
def ledger():
    made = Ledger(rg.wirings.leapfrog([nn.Tanh() for _ in range(4)]), ["a", "b"])
    made.index = 2
    return made


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plus(dtype, sign, checked, count, ledger):
    """Values and increments of all magnitudes, and back again."""
    high, low = halves(on_grid(numbers(count, -26, 13.9), GRID))
    for least, most in ((-60, 13.9), (-26, -8), (-3, 3), (10, 13.9)):
        part = numbers(count, least, most, dtype)
        new = assert_plus(high, low, part, sign, ledger if checked else None)
        back = fused.plus(*new, part, -sign, None)
        assert torch.equal(back[0], high)
        assert torch.equal(back[1], low)
    if checked:
        assert not ledger.flags_on(high.device).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_ties(sign, dtype):
    """Halves of a unit go to the even neighbour, in the increment and where the sum is split in two."""
    steps = torch.arange(-33, 34, device="cuda", dtype=torch.float64) * UNIT / 4
    starts = torch.tensor([0.0, 1.0, -1.0, 0.5, 3.0, 255.0, 16384.0, -32000.0], dtype=torch.float64, device="cuda")
    near = starts[:, None] + torch.arange(-5, 6, device="cuda") * UNIT
    wide = torch.cat([near, starts[:, None] + torch.tensor([2.0**-k for k in range(9, 24)], device="cuda").double()], 1)
    wide, part = torch.broadcast_tensors(wide.flatten()[:, None], steps)
    assert_plus(*halves(on_grid(wide.contiguous(), GRID)), part.to(dtype).contiguous(), sign)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_zeros(sign, dtype):
    """Never -0.0."""
    zeros = torch.tensor([0.0, -0.0, 2.0**-30, -(2.0**-30), 1.0, -1.0], device="cuda").to(dtype)
    high, low = fused.split(zeros, None)
    assert not high[:4].signbit().any()
    new = assert_plus(high, low, zeros, sign)
    assert not new[0][:4].signbit().any()
    assert not fused.plus(*new, zeros, -sign, None)[0][:4].signbit().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split(dtype, ledger):
    """A stream is put on the grid."""
    t = numbers(10_007, -40, 14.9, dtype)
    high, low = fused.split(t, ledger)
    assert torch.equal(whole(high, low), on_grid(t, GRID))
    assert torch.equal(high, on_grid(t, GRID).float())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_whole_numbers_as_increments(dtype):
    part = torch.randint(0, 100, (1000,), device="cuda").to(dtype)
    assert_plus(*halves(on_grid(numbers(1000, -20, 10), GRID)), part, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_and_inf(sign, dtype, ledger):
    """They stay, as increments and in the stream, and are not flagged; their neighbours do not notice."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5], dtype=torch.float64, device="cuda")
    wide, part = torch.broadcast_tensors(special[:, None], special)
    new = assert_plus(*halves(wide.contiguous()), part.to(dtype).contiguous(), sign, ledger)
    assert not ledger.flags_on(part.device).any()
    assert torch.equal(new[0].isfinite(), wide.isfinite() & part.isfinite())


BEYOND = [32_790.0, -32_790.0, 60_000.0, 1e30, -1e30, 3.3e38, 1e300, -1e300]


@pytest.mark.parametrize("value", BEYOND)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_beyond_the_limit(dtype, value, ledger):
    """Flagged for the update that is at work, and NaN; nothing else is touched. As an increment, and at the start."""
    part = numbers(5000, -20, 13, dtype)
    part[1234] = torch.tensor(value, dtype=torch.float64).to(dtype)
    if not part[1234].isfinite():
        pytest.skip("no such number in this dtype")
    high, low = halves(on_grid(numbers(5000, -20, 13), GRID))
    high[1234] = low[1234] = 0
    for make in (lambda: fused.plus(high, low, part, 1, ledger), lambda: fused.split(part, ledger)):
        new = make()
        assert new[0].isnan().nonzero().flatten().tolist() == [1234]
        assert new[1][1234] == 0
        assert ledger.flags_on(part.device).tolist() == [0, 0, 1, 0, 0, 0]
        ledger.flags_on(part.device).zero_()
    true = whole(high, low) + on_grid(part, GRID)
    keep = torch.arange(5000, device="cuda") != 1234
    assert torch.equal(whole(*fused.plus(high, low, part, 1, ledger))[keep], true[keep])


@pytest.mark.parametrize("sign", [1, -1])
def test_the_limit_itself(sign, ledger):
    """±32766 is fine, and so is what float32 rounds to it; the next number of float32 is not."""
    start = torch.full((3,), sign * (LIMIT - 1), dtype=torch.float64, device="cuda")
    step = torch.tensor([1.0, 1.0 + 2.0**-10, 1.0 + 2.0**-9], dtype=torch.float64, device="cuda") * sign
    new = fused.plus(*halves(start), step, 1, ledger)
    assert new[0].isnan().tolist() == [False, False, True]
    wide = Ledger(ledger.updates, ledger.streams)
    assert wide.within(start + step).isnan().tolist() == [False, False, True]  # the plain path has the same limit
    assert wide.flags_on(start.device).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype):
    """A dense stream in any layout, an increment in any other."""
    base = halves(on_grid(numbers(2 * 3 * 4 * 5, -10, 10), GRID))
    part = numbers(2 * 3 * 4 * 5, -10, 10, dtype)
    for dims in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)):
        inverse = [dims.index(i) for i in range(4)]
        high, low = (t.view(2, 3, 4, 5).permute(dims).contiguous().permute(inverse) for t in base)
        for given in (
            part.view(2, 3, 4, 5),
            part.view(5, 4, 3, 2).permute(3, 2, 1, 0),
            part[:5].expand(2, 3, 4, 5),
            torch.stack((part, part), -1)[:, 0].view(2, 3, 4, 5),
            part[0].expand(2, 3, 4, 5),
        ):
            new = assert_plus(high, low, given, 1)
            assert new[0].stride() == high.stride()
    scalar = halves(on_grid(numbers(1, -3, 3), GRID))
    assert_plus(scalar[0][0], scalar[1][0], part[0], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_gradient_of_plus(sign, dtype):
    """That of addition, twice differentiable."""
    high, low = halves(on_grid(numbers(100, -3, 3), GRID))
    high.requires_grad_()
    part = numbers(100, -3, 3, dtype).requires_grad_()
    new, rest = fused.plus(high, low, part, sign, None)
    assert not rest.requires_grad
    first = torch.autograd.grad((new.sin() * 2).sum(), [high, part], create_graph=True)
    assert [g.dtype for g in first] == [torch.float32, dtype]
    torch.testing.assert_close(first[0], 2 * new.detach().cos())
    torch.testing.assert_close(first[1], (sign * 2 * new.detach().cos()).to(dtype))
    second = torch.autograd.grad(first[0].sum(), [high])[0]
    torch.testing.assert_close(second, -2 * new.detach().sin())


# -- nets --------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention with dropout, by F.scaled_dot_product_attention."""

    def __init__(self, width=WIDTH, heads=2, dropout=0.1):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


def mlp(width=WIDTH):
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
    )


def fns_of(depth, setting, make=Attention):
    return [fn.to("cuda", SETTINGS[setting][0]) for _ in range(depth) for fn in (make(), mlp())]


def draw(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (4, LENGTH, WIDTH)), device="cuda").to(dtype).requires_grad_()


def streams_of(setting):
    return {name: draw(dtype=SETTINGS[setting][0]) for name in "ab"}


def amp(setting):
    autocast = SETTINGS[setting][1]
    return contextlib.nullcontext() if autocast is None else torch.autocast("cuda", autocast)


def run(fns, streams, setting, memory, arithmetic="exact", verify="error"):
    with amp(setting):
        return rg.run(rg.wirings.leapfrog(fns), streams, memory=memory, arithmetic=arithmetic, verify=verify)


def observed(make, wanted):
    """Outputs, gradients and the random state of the device afterwards."""
    torch.manual_seed(1)
    out = make()
    loss = loss_of([t.double() for t in tree_leaves(out) if t.is_floating_point()])
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [*(t.detach() for t in tree_leaves(out)), *found, torch.rand(3, device="cuda")]


@pytest.fixture
def recovered(monkeypatch):
    log = Recovered()
    monkeypatch.setattr(calls, "observer", log)
    return log


@pytest.fixture
def deterministic(monkeypatch):
    """cuBLAS wants a fixed workspace for it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@every_setting
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", rg.Anchor(5), rg.StoreLast(2)], ids=str)
def test_recovered_streams(memory, setting, recovered):
    """Always the same bits, whatever the order of sums in the gradients: nothing is asked of the algorithms here."""
    fns = fns_of(32, setting)
    observed(lambda: run(fns, streams_of(setting), setting, memory), parameters(fns))
    assert recovered.seen >= 62
    assert recovered.apart == 0


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "float32"])
def test_float_recovers_something_else(setting, recovered):
    """The test above can fail."""
    fns = fns_of(32, setting)
    observed(lambda: run(fns, streams_of(setting), setting, "reverse", "float", "off"), parameters(fns))
    assert recovered.apart > 30


@every_setting
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", rg.Anchor(5), rg.StoreLast(2), rg.Budget(1 << 23)], ids=str)
def test_gradients(memory, setting, deterministic, recovered):
    """Equal to store to the bit, with attention and dropout; the generator stands where store leaves it."""
    fns, streams = fns_of(8, setting), streams_of(setting)
    wanted = [*streams.values(), *parameters(fns)]
    found = observed(lambda: run(fns, streams, setting, memory), wanted)
    assert recovered.apart == 0
    assert_equal(found, observed(lambda: run(fns, streams, setting, "store"), wanted))


@pytest.mark.slow
@every_setting
def test_256_blocks(setting, deterministic, recovered):
    fns, streams = fns_of(256, setting), streams_of(setting)
    wanted = [*streams.values(), *parameters(fns)]
    found = observed(lambda: run(fns, streams, setting, "reverse"), wanted)
    assert (recovered.seen, recovered.apart) == (512, 0)
    assert_equal(found, observed(lambda: run(fns, streams, setting, "store"), wanted))


def test_second_derivatives(deterministic):
    fns, streams = [Fn(WIDTH, dropout=0.0).cuda() for _ in range(6)], streams_of("bf16 autocast")
    wanted = [*streams.values(), *parameters(fns)]

    def both(memory):
        out = run(fns, streams, "bf16 autocast", memory)
        first = torch.autograd.grad(loss_of([t.double() for t in out.values()]), wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.double().square().sum() for g in first), wanted, allow_unused=True)
        return [*(g.detach() for g in first), *second, None]

    assert_equal(both("reverse"), both("store"))


def test_default(deterministic, recovered):
    """Nothing is said about arithmetic, and autocast is on."""
    net = rg.ReversibleSequence([(Attention(), mlp()) for _ in range(8)]).cuda()
    x, results = draw(), []
    for net.memory in ("reverse", "store"):
        with torch.autocast("cuda", torch.bfloat16):
            results.append(observed(lambda: net(x), [x, *net.parameters()]))
    assert recovered.apart == 0
    assert_equal(*results)


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "float32"])
@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_default_is_safe(gain, setting):
    """Within 1e-3 of store at depth 64, usual and twice the usual gain, with whatever algorithms torch takes."""
    net = rg.ReversibleSequence([(mlp(), mlp()) for _ in range(64)]).to("cuda", SETTINGS[setting][0]).eval()
    for block in net.blocks:
        for fn in (block.f, block.g):
            fn[-1].weight.data *= gain
    x, found = draw(dtype=SETTINGS[setting][0]), []
    for net.memory in ("reverse", "store"):
        with amp(setting):
            loss = net(x).float().sin().sum()
        found.append(torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, [x, *net.parameters()])]))
    assert (found[0] - found[1]).norm() <= 1e-3 * found[1].norm()


def test_steps(deterministic):
    """Weights after some steps with a GradScaler, one of which it skips, are those of store."""
    first = nn.ModuleList(fns_of(3, "fp16 autocast"))
    results = []
    for memory in ("reverse", "store"):
        torch.manual_seed(0)
        fns = copy.deepcopy(first)
        optimizer = torch.optim.SGD(fns.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
        for step in range(4):
            streams = {name: draw().detach() for name in "ab"}
            loss = loss_of([t.double() for t in run(list(fns), streams, "fp16 autocast", memory).values()])
            optimizer.zero_grad()
            scaler.scale(loss * (1e38 if step == 1 else 1e-3)).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([*(p.detach() for p in fns.parameters()), torch.tensor(scaler.get_scale())])
    assert not torch.equal(results[0][0], next(first.parameters()))
    assert_equal(*results)


# -- structures and layouts --------------------------------------------------------------------------------------------


class Leaves(nn.Module):
    """From a dict of tensors of one shape and several dtypes to one like it."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds, self.weight = kinds, nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        total = sum((t.to(self.weight.dtype) * (i + 1)).sin() for i, t in enumerate(x.values())) * self.weight
        return {k: total.to(d) if d.is_floating_point else (total.detach() * 5).round().to(d) for k, d in self.kinds.items()}


def test_several_leaves(deterministic, recovered):
    """Split ones, a float64 one and whole numbers in one stream."""
    kinds = {"x": torch.float32, "h": torch.bfloat16, "d": torch.float64, "n": torch.int64, "f": torch.float16}
    fns = [Leaves(kinds).cuda() for _ in range(8)]
    streams = {
        name: {k: (draw(3, WIDTH).detach() * 3).to(d).requires_grad_(d.is_floating_point) for k, d in kinds.items()}
        for name in "ab"
    }
    wanted = [*(t for t in tree_leaves(streams) if t.requires_grad), *parameters(fns)]
    results = [observed(lambda: run(fns, streams, "float32", memory), wanted) for memory in ("reverse", "store")]
    assert recovered.seen
    assert recovered.apart == 0
    assert_equal(*results)
    assert [t.dtype for t in results[0][: len(kinds)]] == list(kinds.values())


@pytest.mark.parametrize("setting", ["bf16 autocast", "float16"])
def test_strided_streams(setting, deterministic, recovered):
    """Halves with gaps, transposed ones, channels_last; and fns that return other layouts."""
    dtype = SETTINGS[setting][0]
    base = draw(4, LENGTH, 2 * WIDTH, dtype=dtype).detach()
    layouts = {
        "halves": [t.requires_grad_() for t in base.chunk(2, -1)],
        "transposed": [draw(LENGTH, 4, WIDTH, dtype=dtype).detach().transpose(0, 1).requires_grad_() for _ in "ab"],
        "expanded": [draw(1, LENGTH, WIDTH, dtype=dtype).detach().expand(4, -1, -1).requires_grad_() for _ in "ab"],
        "permuted": [draw(4, WIDTH, LENGTH, dtype=dtype).detach().permute(0, 2, 1).requires_grad_() for _ in "ab"],
    }
    fns = fns_of(4, setting)
    others = [lambda x, fn=fn: fn(x).transpose(0, 1).contiguous().transpose(0, 1) for fn in fns]
    for streams in layouts.values():
        for used in (fns, others):
            given = dict(zip("ab", streams, strict=True))
            wanted = [*streams, *parameters(fns)]
            found = observed(lambda: run(used, given, setting, "reverse"), wanted)
            assert_equal(found, observed(lambda: run(used, given, setting, "store"), wanted))
    assert recovered.apart == 0


def test_convolutions(deterministic, recovered):
    torch_flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True)
    fns = [
        nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1)).cuda() for _ in range(6)
    ]
    streams = {name: draw(2, 8, 9, 10).detach().to(memory_format=torch.channels_last).requires_grad_() for name in "ab"}
    wanted = [*streams.values(), *parameters(fns)]
    with torch_flags:
        results = [observed(lambda: run(fns, streams, "bf16 autocast", memory), wanted) for memory in ("reverse", "store")]
    assert recovered.apart == 0
    assert_equal(*results)


# -- without Triton ----------------------------------------------------------------------------------------------------


@every_setting
def test_plain_path(setting, monkeypatch, recovered):
    """The same outputs to the bit; its gradients are added up in float64, so they are close."""
    fns, streams = [fn.eval() for fn in fns_of(8, setting, mlp)], streams_of(setting)
    wanted = [*streams.values(), *parameters(fns)]
    found = observed(lambda: run(fns, streams, setting, "reverse"), wanted)
    monkeypatch.setattr(fused, "_kernels", lambda: None)
    plain = observed(lambda: run(fns, streams, setting, "reverse"), wanted)
    assert recovered.apart == 0
    for a, b in zip(found[:2], plain[:2], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(found[2:], plain[2:], strict=True):
        assert (a.double() - b.double()).norm() <= 0.02 * b.double().norm()


def test_plain_path_is_equal_to_store(monkeypatch, deterministic):
    monkeypatch.setattr(fused, "_kernels", lambda: None)
    fns, streams = fns_of(4, "bf16 autocast"), streams_of("bf16 autocast")
    wanted = [*streams.values(), *parameters(fns)]
    assert_equal(*(observed(lambda: run(fns, streams, "bf16 autocast", memory), wanted) for memory in ("reverse", "store")))


# -- range -------------------------------------------------------------------------------------------------------------


class Faulty(nn.Module):
    """A sound branch until it is given a value for one element."""

    value = None

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        y = self.inner(x)
        if self.value is not None:
            y = torch.where(torch.arange(y.numel(), device=y.device).view_as(y) == 1234, self.value, y)
        return y


def faulty(count=6):
    return [Faulty().cuda() for _ in range(count)]


@pytest.fixture(params=["fused", "plain"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(fused, "_kernels", lambda: None)


@pytest.mark.parametrize("value", [40_000.0, -60_000.0, 1e30])
@pytest.mark.parametrize("memory", ["reverse", "store", "checkpoint", rg.Anchor(2), rg.StoreLast(2)], ids=str)
def test_leaving_the_range(memory, value, path):
    """Told by backward, with the update and the limit; the output is NaN there; the next step is right."""
    fns, streams = faulty(), streams_of("bf16 autocast")
    fns[3].value = value
    out = run(fns, streams, "bf16 autocast", memory)
    assert out["b"].isnan().any()
    with pytest.raises(OutOfRange, match=re.escape("update 3: b += Faulty(a)")) as info:
        (out["a"].sum() + out["b"].nan_to_num().sum()).backward()
    assert "the stream 'b' left the range" in str(info.value)
    assert "±32766" in str(info.value)
    fns[3].value = None
    wanted = [*streams.values(), *parameters(fns)]
    found = observed(lambda: run(fns, streams, "bf16 autocast", memory), wanted)
    true = observed(lambda: run(fns, streams, "bf16 autocast", "store"), wanted)
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["a", "b"])
def test_input_beyond_the_limit(name, path):
    """The stream that is at fault is named, or none is."""
    fns, streams = faulty(), streams_of("bf16 autocast")
    streams[name] = streams[name].detach().index_fill(1, torch.tensor([3], device="cuda"), 33_000.0).requires_grad_()
    out = run(fns, streams, "bf16 autocast", "reverse")
    with pytest.raises(OutOfRange, match="beyond the range of exact arithmetic, ±32766") as info:
        out[name].nan_to_num().sum().backward()
    other = {"a": "b", "b": "a"}[name]
    assert f"the stream '{other}'" not in str(info.value)


def test_first_update_is_named(path):
    """Of several that left the range."""
    fns, streams = faulty(), streams_of("bf16 autocast")
    fns[1].value = fns[4].value = 50_000.0
    out = run(fns, streams, "bf16 autocast", "reverse")
    with pytest.raises(OutOfRange, match="update 1: "):
        loss_of(out).backward()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_from_fn(value, path):
    """No error, the outputs of store, and a clean next step."""
    fns, streams = [fn.eval() for fn in faulty()], streams_of("bf16 autocast")
    fns[2].value = value
    wanted = [*streams.values(), *parameters(fns)]
    results = [observed(lambda: run(fns, streams, "bf16 autocast", memory), wanted) for memory in ("reverse", "store")]
    assert all(map(same, results[0][:2], results[1][:2]))
    assert not results[0][0].isfinite().all()
    fns[2].value = None
    assert all(t.isfinite().all() for t in observed(lambda: run(fns, streams, "bf16 autocast", "reverse"), wanted))


def test_without_gradients(path):
    """Nothing is told under no_grad; the value does not pass for a number."""
    fns, streams = faulty(), streams_of("bf16 autocast")
    fns[3].value = 40_000.0
    with torch.no_grad():
        out = run(fns, streams, "bf16 autocast", "reverse")
    assert out["b"].isnan().any()


# -- no waiting for the device -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_waiting():
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # of a prototype feature
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_setting
@pytest.mark.parametrize("memory", ["reverse", "store", rg.Anchor(3)], ids=str)
def test_a_step_does_not_synchronise(memory, setting, path):
    """Forward and backward, after the kernels have been made."""
    fns, streams = fns_of(4, setting), streams_of(setting)

    def step():
        out = run(fns, streams, setting, memory)
        (out["a"].float().sin().sum() + out["b"].float().cos().sum()).backward()

    step()
    step()
    with no_waiting():
        step()


def test_waiting_is_noticed():
    """The test above can fail."""
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        torch.ones(1, device="cuda").item()


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_fns(backend, deterministic, recovered):
    torch._dynamo.reset()
    fns = [mlp().eval().cuda() for _ in range(4)]
    compiled = [torch.compile(fn, backend=backend) for fn in fns]
    streams = streams_of("bf16 autocast")
    wanted = [*streams.values(), *parameters(fns)]
    found = observed(lambda: run(compiled, streams, "bf16 autocast", "reverse"), wanted)
    assert recovered.apart == 0
    assert_equal(found, observed(lambda: run(compiled, streams, "bf16 autocast", "store"), wanted))
    torch._dynamo.reset()
