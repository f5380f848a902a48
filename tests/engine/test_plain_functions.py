"""Functions that are no modules, also with a wiring of ours around them: what they hold is found, and no more is asked of it."""

import functools

import pytest
import torch
from support import WIDTH, assert_same, linear
from torch import nn

import retrograde as rg


def by_memory(make, memories=("store", "reverse")):
    """Gradients of the input under each policy, for nets made alike."""
    found = []
    for memory in memories:
        torch.manual_seed(0)
        net = make()
        net.memory = memory
        x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
        net(x).square().sum().backward()
        found.append([x.grad])
    return found


def sequence(fns, streams):
    return rg.ReversibleSequence(list(zip(fns[::2], fns[1::2], strict=True)), streams=streams)


class Noisy:
    """A generator, some steps away."""

    def __init__(self, generator):
        self.inner, self.kept = linear(), {"generator": [generator]}

    def run(self, x, scale):
        noise = torch.rand(WIDTH, generator=self.kept["generator"][0], dtype=torch.float64)
        return self.inner(x).tanh() * noise * scale


@pytest.mark.parametrize("streams", [2, 3])
def test_a_generator_is_found(streams):
    def make():
        generator = torch.Generator().manual_seed(1)
        return sequence([functools.partial(Noisy(generator).run, scale=2.0) for _ in range(6)], streams)

    assert_same(*by_memory(make))


class Adds:
    """A tensor in a dict in a list of an object."""

    def __init__(self):
        self.inner, self.table = linear(), [{"w": torch.ones(WIDTH, dtype=torch.float64)}]

    def __call__(self, x):
        return self.inner(x).tanh() + self.table[0]["w"]


@pytest.mark.parametrize("streams", [2, 3])
def test_a_tensor_that_is_exchanged_is_told(streams):
    fns = [Adds() for _ in range(4)]
    out = sequence(fns, streams)(torch.randn(5, WIDTH, dtype=torch.float64))
    for fn in fns:
        fn.table[0]["w"] = torch.full((WIDTH,), 5.0, dtype=torch.float64)
    with pytest.raises(rg.ReplayError, match="returned something else"):
        out.square().sum().backward()


class Layers:
    def __init__(self):
        self.layers = [linear(), nn.BatchNorm1d(WIDTH).double(), nn.Dropout(0.5)]

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("streams", [2, 3])
def test_statistics_move_once(streams):
    made = []

    def make():
        made.append([Layers() for _ in range(6)])
        return sequence([layers.run for layers in made[-1]], streams)

    assert_same(*by_memory(make))
    for stored, reversed_ in zip(*made, strict=True):
        assert reversed_.layers[1].num_batches_tracked == 1
        assert torch.equal(reversed_.layers[1].running_mean, stored.layers[1].running_mean)


class Block(nn.Module):
    """f does not use what g changes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = linear(), nn.Linear(WIDTH, WIDTH, bias=False).double(), nn.BatchNorm1d(WIDTH).double()

    def f(self, x):
        return self.a(x).tanh()

    def g(self, x):
        return self.norm(self.b(x))


@pytest.mark.parametrize("streams", [2, 3])
def test_methods_of_a_block(streams):
    assert_same(*by_memory(lambda: rg.ReversibleSequence([Block() for _ in range(3)], streams=streams)))


def test_methods_in_turn_and_in_groups():
    for wire in (lambda fns: rg.wirings.leapfrog(fns, streams=("a", "b", "c")), rg.wirings.groups):
        block = Block()
        updates = wire([block.f, block.g, block.f])
        names = {name for update in updates for name in (update.target, *update.sources)}
        streams = {name: torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True) for name in sorted(names)}
        found = []
        for memory in ("store", "reverse"):
            out = rg.run(updates, streams, memory=memory)
            loss = sum(t.square().sum() for t in out.values())
            found.append(torch.autograd.grad(loss, [*streams.values(), *block.parameters()]))
        assert_same(*found)


def test_hooks_of_a_block_with_batch_norm():
    def make():
        blocks = [(linear(), nn.BatchNorm1d(WIDTH).double()) for _ in range(3)]
        net = rg.ReversibleSequence(blocks, streams=3)
        net.blocks[1].register_forward_hook(lambda *_: None)
        return net

    assert_same(*by_memory(make))


def test_sixteen_bits_in_a_function_of_a_sum():
    """Found as in any other: the streams are carried exactly."""
    inner = linear().bfloat16()
    fns = [lambda x: inner(x.bfloat16()).float() for _ in range(6)]
    found = []
    for memory in ("store", "reverse"):
        torch.manual_seed(0)
        x = torch.randn(5, WIDTH, requires_grad=True)
        net = sequence(fns, 3)
        net.memory = memory
        net(x).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_source_without_tensors():
    """One of two sources is an empty tree: fn gets both again."""

    class Fn(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x, extra=None):
            y = self.inner(x).tanh()
            return y if extra is None else y + 2

    torch.manual_seed(0)
    updates = [rg.Update(a, Fn(), (b, "e")) for a, b in ("ab", "ba", "ab")]
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    found = []
    for memory in ("store", "reverse", "checkpoint"):
        out = rg.run(updates, {"a": x, "b": x * 2, "e": ()}, memory=memory)
        wanted = [x, *(p for update in updates for p in update.fn.parameters())]
        found.append(torch.autograd.grad(out["a"].square().sum() + out["b"].square().sum(), wanted))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
