"""The second run sees the modes of the forward pass: autocast, attention backends, random numbers of the device."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from support import REPLAYED, WIDTH, assert_same, draw, gradients, loss_of, parameters, rg
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEPTH = 3


class Spy(nn.Module):
    """A branch in float32 that writes down the dtypes it sees, apart for its first and its second run."""

    def __init__(self, log, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout, self.log = nn.Dropout(dropout), log

    def forward(self, x):
        h = self.up(self.norm(x))
        out = self.down(self.dropout(h.tanh()))
        modes = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")]
        self.log[rg.replaying()].append((id(self), modes, x.dtype, h.dtype, out.dtype))
        return out.sin()  # saves something: until then a recomputation goes on


class Heads(nn.Module):
    """Self-attention by F.scaled_dot_product_attention, which notes the backends that are allowed."""

    def __init__(self, log):
        super().__init__()
        self.qkv, self.log = nn.Linear(WIDTH, 3 * WIDTH), log

    def forward(self, x):
        flags = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
        self.log[rg.replaying()].append(flags)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def by_hand(fns, x):
    a, b = x, x
    for f, g in zip(fns[::2], fns[1::2], strict=True):
        a = a + f(b)
        b = b + g(a)
    return {"a": a, "b": b}


def outputs(fns, memory, x):
    return by_hand(fns, x) if memory == "hand" else rg.run(rg.wirings.leapfrog(fns), {"a": x, "b": x}, memory=memory)


def train(fns, memory, x, device, dtype, forward_in, backward_in, scaler=None):
    """Outputs and gradients of one step, and what the fns saw in both runs."""
    log = fns[0].log
    log.update({False: [], True: []})
    wanted = [x, *parameters(fns)]
    for t in wanted:
        t.grad = None
    torch.manual_seed(0)
    with torch.autocast(device, dtype) if forward_in else contextlib.nullcontext():
        out = outputs(fns, memory, x)
        loss = loss_of({k: t.float() for k, t in out.items()})
        loss = loss if scaler is None else scaler.scale(loss)
        if forward_in and backward_in:
            loss.backward()
    if not (forward_in and backward_in):
        with torch.autocast(device, dtype) if backward_in else contextlib.nullcontext():
            loss.backward()
    return [*(t.detach() for t in out.values()), *(t.grad for t in wanted)], log[False], log[True]


def compare(memory, device, dtype, forward_in, backward_in, dropout=0.0, scaler=None):
    log = {}
    fns = [Spy(log, dropout).to(device) for _ in range(2 * DEPTH)]
    x = torch.randn(4, WIDTH, device=device, requires_grad=True)
    found, first, second = train(fns, memory, x, device, dtype, forward_in, backward_in, scaler)
    for oracle in ("store", "hand"):
        true, seen, again = train(fns, oracle, x, device, dtype, forward_in, backward_in, scaler)
        assert_same(found, true, 5e-3)
        assert not again
        assert first == seen
    assert second == first[::-1]
    return first


@pytest.mark.parametrize(("forward_in", "backward_in"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("memory", REPLAYED)
def test_autocast(memory, forward_in, backward_in):
    """bfloat16 on the CPU, around the forward pass, the backward pass or both: fn sees the same dtypes twice, those of store."""
    seen = compare(memory, "cpu", torch.bfloat16, forward_in, backward_in)
    assert {s[3] for s in seen} == {torch.bfloat16 if forward_in else torch.float32}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("memory", REPLAYED)
def test_autocast_steps(memory, cache):
    """Some steps of training, weights cast once per forward pass or for each use: no cast outlives the weight it was made of."""

    def trained(how):
        torch.manual_seed(0)
        fns = [Spy({False: [], True: []}) for _ in range(4)]
        x = torch.randn(4, WIDTH, requires_grad=True)
        optimizer = torch.optim.SGD(parameters(fns), 0.1)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                loss = loss_of(outputs(fns, how, x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [x.grad, *(p.detach() for p in parameters(fns)), *(p.grad for p in parameters(fns))]

    found = trained(memory)
    assert_same(found, trained("store"), 5e-3)
    assert_same(found, trained("hand"), 5e-3)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_attention_backend(memory, where, device):
    """`sdpa_kernel(MATH)` around one of the two passes alone: the second run uses the backend of the first."""
    log = {}
    fns = [Heads(log).to(device, torch.float64 if device == "cpu" else torch.float32) for _ in range(4)]
    x = draw(2, 5, WIDTH).to(fns[0].qkv.weight.device, fns[0].qkv.weight.dtype).detach().requires_grad_()

    def step(how):
        log.update({False: [], True: []})
        with sdpa_kernel(SDPBackend.MATH) if where == "forward" else contextlib.nullcontext():
            out = outputs(fns, how, x)
        with sdpa_kernel(SDPBackend.MATH) if where == "backward" else contextlib.nullcontext():
            return torch.autograd.grad(loss_of(out), [x, *parameters(fns)]), log[True]

    before = torch.backends.cuda.flash_sdp_enabled()
    found, second = step(memory)
    assert second == [(where == "backward",) * 2] * 4
    assert torch.backends.cuda.flash_sdp_enabled() is before
    for oracle in ("store", "hand"):
        assert_same(found, step(oracle)[0], 1e-9 if device == "cpu" else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward_in", [False, True])
@pytest.mark.parametrize("memory", REPLAYED)
def test_cuda_autocast(memory, backward_in, dtype):
    """bf16 and fp16 on the device, with dropout and a scaled loss; the same dtypes as store."""
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=dtype is torch.float16)
    seen = compare(memory, "cuda", dtype, True, backward_in, dropout=0.3, scaler=scaler)
    assert {s[3] for s in seen} == {dtype}


@pytest.mark.gpu
@pytest.mark.parametrize("memory", REPLAYED)
def test_grad_scaler_steps(memory):
    """Steps with a GradScaler, one of which it skips for its infinities: the same weights and scales as store."""
    results = []
    for how in (memory, "store"):
        torch.manual_seed(0)
        fns = [Spy({False: [], True: []}, 0.2).cuda() for _ in range(4)]
        optimizer = torch.optim.SGD(parameters(fns), 0.01)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14, growth_interval=2)
        scales = []
        for step in range(4):
            x = torch.randn(4, WIDTH, device="cuda")
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(outputs(fns, how, x)) * (1e38 if step == 1 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append((scales, [p.detach() for p in parameters(fns)]))
    assert results[0][0] == results[1][0]
    assert len(set(results[0][0])) > 1
    assert_same(results[0][1], results[1][1], 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", REPLAYED)
def test_cuda_dropout(memory):
    """Two forward passes before two backwards on the device, with dropout: the masks of the forward pass; afterwards the
    generator stands where store leaves it."""
    fns = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.4)).double().cuda() for _ in range(4)]
    x = draw().cuda().detach().requires_grad_()

    def both(how):
        one, two = outputs(fns, how, x), outputs(fns, how, x)
        assert not torch.equal(one["a"], two["a"])
        return [one, two]

    results = []
    for how in (memory, "store", "hand"):
        results.append(gradients(lambda: both(how), [x, *parameters(fns)]))
        results[-1].append(torch.rand(5, device="cuda"))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


class ReadsUnderAutocast(torch.autograd.Function):
    """The identity; its backward reads what it saved inside of autocast."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.autocast("cpu", torch.bfloat16):
            (x,) = ctx.saved_tensors
        return grad + 0 * x


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_asked_for_inside_of_autocast(memory):
    """Not in the first update that is run again, but in one below: the second run is without it all the same."""

    class Fn(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.lin, self.last = nn.Linear(8, 8), last

        def forward(self, x):
            y = self.lin(x.tanh())
            return ReadsUnderAutocast.apply(y) if self.last else y

    torch.manual_seed(0)
    net = rg.ReversibleSequence([(Fn(depth < 2), Fn(depth < 2)) for depth in range(4)], memory=memory, arithmetic="float")
    x = torch.randn(3, 8, requires_grad=True)
    found = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
    net.memory = "store"
    for a, b in zip(found, torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
