"""Exact arithmetic on streams of every layout, structure and dtype."""

import pytest
import torch
from exact_support import MEMORIES, ROWS, SETTINGS, Case, Fn, amp, assert_equal, draw, every_policy, exact, observed, same
from support import WIDTH, every_pair, name_of, parameters, rg
from torch import nn

# -- layouts, structures, dtypes ---------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda: draw(WIDTH, ROWS).detach().t().requires_grad_(),
    "strided": lambda: draw(ROWS, 2 * WIDTH).detach()[:, ::2].requires_grad_(),
    "expanded": lambda: draw(1, WIDTH).detach().expand(ROWS, WIDTH).requires_grad_(),
    "channels last": lambda: draw(2, 3, 4, WIDTH).detach().to(memory_format=torch.channels_last).requires_grad_(),
    "permuted": lambda: draw(2, WIDTH, 3).detach().permute(2, 0, 1).requires_grad_(),
    "one row": lambda: draw(WIDTH, 1).detach().t().requires_grad_(),
}
RETURNS = {
    "as it is": lambda y: y,
    "transposed": lambda y: y.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda y: y[:1].expand_as(y),
    "strided": lambda y: torch.stack((y, y), -1)[..., 0],
    "the source": lambda y: y,
}


@pytest.mark.parametrize(
    ("returns", "layout", "setting"), every_pair(RETURNS, LAYOUTS, ["bf16 autocast", "float64"]), ids=name_of
)
def test_layouts(setting, layout, returns, recovered):
    """Streams that are not contiguous, and fns that return other layouts than they are given."""
    dtype = SETTINGS[setting][0]
    a, b = LAYOUTS[layout](), LAYOUTS[layout]()
    fns = [Fn() for _ in range(6)]
    used = [lambda x, fn=fn: RETURNS[returns](fn(x)) for fn in fns[:-1]]
    used.append((lambda x: x) if returns == "the source" else fns[-1])
    case = Case(setting, rg.wirings.leapfrog(used), {"a": a, "b": b}, fns=fns)
    case.streams = {"a": a.detach().to(dtype).requires_grad_(), "b": b.detach().to(dtype).requires_grad_()}
    exact(case, "reverse", recovered)


@pytest.mark.parametrize(("setting", "dim", "memory"), every_pair(["bf16 autocast", "float16"], [-1, 1], MEMORIES), ids=name_of)
def test_halves(memory, dim, setting):
    """split="chunk": the streams are views with gaps."""
    dtype, autocast = SETTINGS[setting]
    net = rg.ReversibleSequence([(Fn(), Fn()) for _ in range(4)], split="chunk", merge="cat", dim=dim, arithmetic="exact")
    net.to(dtype)
    x = draw(2, 4, WIDTH * (2 if dim == -1 else 1), dtype=dtype)
    results = []
    for net.memory in (memory, "store"):
        with amp(autocast):
            results.append(observed(lambda: net(x), [x, *net.parameters()]))
    assert_equal(*results)


@pytest.mark.parametrize("setting", ["bf16 autocast", "float16"])
def test_convolutions(setting, recovered):
    """Streams in channels_last through convolutions, which return what layout they like."""

    def conv():
        return nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(4, 4, 1))

    a, b = (draw(2, 4, 5, 6) for _ in range(2))
    case = Case(setting, rg.wirings.leapfrog([conv() for _ in range(8)]), {"a": a, "b": b})
    case.streams = {name: t.detach().to(memory_format=torch.channels_last).requires_grad_() for name, t in case.streams.items()}
    exact(case, "reverse", recovered)


@pytest.mark.parametrize("shape", [(0, WIDTH), (3, 0, WIDTH), (WIDTH,), (1, 1, WIDTH)])
def test_shapes(shape):
    """Nothing at all, or little."""
    case = Case("bf16 autocast", rg.wirings.leapfrog([Fn() for _ in range(4)]), {"a": draw(*shape), "b": draw(*shape)})
    found, true = case.observed("reverse"), case.observed("store")
    assert all(map(same, found, true))


@pytest.mark.parametrize("setting", ["float32", "bfloat16", "float64"])
def test_scalars(setting, recovered):
    """Streams of no dimension."""
    weights = [nn.ParameterList([torch.rand(())]) for _ in range(8)]
    fns = [lambda x, w=w: (x * w[0]).sin() for w in weights]
    streams = {"a": torch.rand((), requires_grad=True), "b": torch.rand((), requires_grad=True)}
    exact(Case(setting, rg.wirings.leapfrog(fns), streams, fns=weights), "reverse", recovered)


class Counted(nn.Module):
    """From a dict of numbers of several kinds to one like it; what is added depends on every leaf."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds, self.weight = kinds, nn.Parameter(torch.rand(3))

    def forward(self, x):
        total = sum((t.to(self.weight.dtype) * (i + 1)).sin() for i, t in enumerate(x.values())) * self.weight
        return {k: (total.detach() * 5).round().to(d) if not d.is_floating_point else total.to(d) for k, d in self.kinds.items()}


KINDS = {
    "counts": {"x": torch.float32, "n": torch.int64},
    "several widths": {"x": torch.float32, "h": torch.bfloat16, "d": torch.float64, "f": torch.float16},
    "small counts": {"h": torch.bfloat16, "n": torch.int8, "m": torch.int32},
}


@pytest.mark.parametrize("kinds", KINDS)
@every_policy
def test_mixed_leaves(memory, kinds, recovered):
    """Whole numbers among the leaves, and leaves of several dtypes: each is recovered as it was, and keeps its dtype."""
    kinds = KINDS[kinds]
    streams = [{k: (torch.randn(3) * 5).to(d).requires_grad_(d.is_floating_point) for k, d in kinds.items()} for _ in range(2)]
    fns = [Counted(kinds) for _ in range(8)]

    def run(memory):
        return rg.run(rg.wirings.leapfrog(fns), dict(zip("ab", streams, strict=True)), memory=memory, arithmetic="exact")

    wanted = [*(t for s in streams for t in s.values() if t.requires_grad), *parameters(fns)]
    found = observed(lambda: run(memory), wanted)
    assert recovered.apart == 0
    assert [t.dtype for t in found[: 2 * len(kinds)]] == [*kinds.values()] * 2
    assert_equal(found, observed(lambda: run("store"), wanted))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_fn_returns_another_dtype(dtype, recovered):
    """Than its stream has."""
    weights = [nn.ParameterList([torch.rand(WIDTH) + 2]) for _ in range(8)]
    fns = [lambda x, w=w[0]: (x.sin() * w).to(dtype) for w in weights]
    case = Case(
        "float32", rg.wirings.leapfrog([*fns, lambda x: (x * weights[0][0]).cos()]), {"a": draw(), "b": draw()}, fns=weights
    )
    exact(case, "reverse", recovered)


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
@pytest.mark.parametrize("memory", ["store", "reverse"])
def test_truth_values_in_a_stream(memory, arithmetic):
    """`or` cannot be undone."""
    streams = {name: {"x": torch.arange(3.0), "on": torch.tensor([True, False, True])} for name in "ab"}
    updates = rg.wirings.leapfrog([lambda s: {"x": s["x"].sin() * (1 + s["on"]), "on": torch.ones(3, dtype=torch.bool)}] * 4)
    with pytest.raises(rg.ProgramError, match=r"update 0.*torch.bool, which cannot be added"):
        rg.run(updates, streams, memory=memory, arithmetic=arithmetic)
