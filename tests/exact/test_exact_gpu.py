"""Exact arithmetic on CUDA: training that is equal to store to the bit."""

import contextlib
import copy
import functools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from exact_support import FLOATS as SETTINGS
from exact_support import Fn, assert_equal, same
from exact_support import observed as observed_on
from support import loss_of, parameters, rg
from torch import nn
from torch.utils._pytree import tree_leaves

from retrograde._exact import cuda as fused
from retrograde.errors import OutOfRange

pytestmark = pytest.mark.gpu
WIDTH, LENGTH = 64, 32

every_setting = pytest.mark.parametrize("setting", SETTINGS)


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


observed = functools.partial(observed_on, device="cuda")


def run(fns, streams, setting, memory, arithmetic="exact", verify="error"):
    with amp(setting):
        return rg.run(rg.wirings.leapfrog(fns), streams, memory=memory, arithmetic=arithmetic, verify=verify)


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
