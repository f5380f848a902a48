"""torch.compile on functions and around whole models: gradients as without it, and no compiling after the first step."""

import copy

import pytest
import torch
from support import REPLAYED, assert_same, every_pair, name_of, rg
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own: it looks at .grad of what is no leaf, and more
WIDTH = 8
MEMORIES = [*REPLAYED, rg.StoreLast(2)]


class Branch(nn.Sequential):
    def forward(self, x):
        """Of its own: `module.compile()` leaves the frames of torch's modules alone, and so compiles nothing of a Sequential."""
        return super().forward(x)


def branch(dropout=0.0, kind=Branch):
    return kind(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))


class Model(nn.Module):
    def __init__(self, split, dropout=0.0, blocks=2):
        super().__init__()
        width = WIDTH if split == "copy" else 2 * WIDTH
        self.first = nn.Linear(width, width)
        merge = "mean" if split == "copy" else "cat"
        self.net = rg.ReversibleSequence([(branch(dropout), branch(dropout)) for _ in range(blocks)], split=split, merge=merge)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        return self.last(self.net(self.first(x)).tanh()).square().sum()


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(call, model, x):
    model.zero_grad()
    torch.manual_seed(1)
    call(x).backward()
    return [p.grad.clone() for p in model.parameters()]


def same_as_plain(model, memory, backend, dynamic, compiled, tolerance=2e-5, lengths=(4, 6)):
    """Three steps of each length; compiled only when something new comes."""
    plain = copy.deepcopy(model)
    plain.net.memory = "store"
    model.net.memory = memory
    width = model.first.in_features
    counter = CompileCounterWithBackend(backend)
    call = compiled(model, lambda thing: torch.compile(thing, backend=counter, dynamic=dynamic))
    for rows in lengths:
        for turn in range(3):
            x = torch.randn(2, rows, width)
            assert_same(step(call, model, x), step(plain, plain, x), tolerance)
            if turn == 0:
                seen = counter.frame_count
        assert counter.frame_count == seen, "compiled again in a later step"
    assert counter.frame_count > 0


def each_fn(model, compile_):
    for block in model.net.blocks:
        block.f, block.g = compile_(block.f), compile_(block.g)
    return model


def in_place(model, compile_):
    """`module.compile()`, which keeps the module and the keys of its state dict."""
    for block in model.net.blocks:
        for fn in (block.f, block.g):
            fn._compiled_call_impl = compile_(fn._call_impl)
    return model


def whole(model, compile_):
    return compile_(model)


@pytest.mark.parametrize(
    ("compiled", "dynamic", "split", "memory"),
    every_pair([each_fn, in_place, whole], [False, True], ["copy", "chunk"], MEMORIES),
    ids=name_of,
)
def test_aot_eager(memory, split, dynamic, compiled):
    same_as_plain(Model(split), memory, "aot_eager", dynamic, compiled)


@pytest.mark.parametrize("compiled", [each_fn, whole])
def test_inductor(compiled):
    """The small twin of the matrix below."""
    same_as_plain(Model("chunk", blocks=1), "reverse", "inductor", None, compiled, tolerance=1e-4, lengths=[4])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [each_fn, in_place, whole])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("split", ["copy", "chunk"])
@pytest.mark.parametrize("memory", [*MEMORIES, rg.Anchor(3), rg.Budget(20_000)], ids=str)
def test_inductor_matrix(memory, split, dynamic, compiled):
    same_as_plain(Model(split), memory, "inductor", dynamic, compiled, tolerance=1e-4)


class Plain(nn.Module):
    """Without a length: `torch.compile(module)` has one that fails then."""

    def __init__(self):
        super().__init__()
        self.inner = branch()

    def forward(self, x):
        return self.inner(x)


def test_functions_of_a_class_of_ones_own():
    model = Model("copy")
    for block in model.net.blocks:
        block.f, block.g = Plain(), Plain()
    same_as_plain(model, "reverse", "aot_eager", False, each_fn)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("compiled", [each_fn, whole])
def test_dropout(compiled, memory):
    """The second run of a compiled fn draws the same numbers: the net's own policy against store, both compiled."""
    model = Model("copy", dropout=0.3)
    call = compiled(model, lambda thing: torch.compile(thing, backend="aot_eager"))
    x, found = torch.randn(2, 4, WIDTH), {}
    for model.net.memory in ("store", memory):
        found[model.net.memory] = step(call, model, x)
    assert_same(found[memory], found["store"], 2e-5)


@pytest.mark.parametrize("memory", ["reverse", rg.Budget(1 << 20)], ids=str)
def test_our_own_hooks_are_not_compiled(memory):
    """Where the compiler lets a function run as it is, it goes on to what is called in there, and that is our hooks."""
    found = {}
    for policy in ("store", memory):
        torch._dynamo.reset()
        counters.clear()
        plain = [branch(kind=nn.Sequential) for _ in range(6)]
        net = rg.ReversibleSequence(zip(plain[::2], plain[1::2], strict=True), memory=policy)
        for block in net.blocks:
            block.f.compile(backend="aot_eager")
            block.g.compile(backend="aot_eager")
        net(torch.randn(2, 8, requires_grad=True)).sum().backward()
        found[policy] = dict(counters["frames"])
    assert found[memory] == found["store"]
