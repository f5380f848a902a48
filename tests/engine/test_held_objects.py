"""Objects that are side inputs, generators, lists: what fn reads and what it leaves there."""

import functools
import gc
import types
import weakref
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from held_support import MODEL, OTHER, Above, by, gradients, ones, reported_or_harmless
from support import REPLAYED, WIDTH, assert_same, linear, rg
from torch import nn

from retrograde._engine.records import Run


class Table(nn.Module):
    """A buffer made under inference_mode."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        with torch.inference_mode():
            self.register_buffer("table", ones())

    def forward(self, x):
        return torch.tanh(self.linear(x)) + self.table


@pytest.mark.parametrize("memory", REPLAYED)
def test_inference_tensors_may_be_held(memory):
    def make():
        fns = [Table() for _ in range(3)]
        return fns, fns

    assert_same(gradients(make, lambda _: None, memory), gradients(make, lambda _: None, "store"))


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("how", ["edited", "exchanged", "left alone"])
def test_side_input_that_is_an_object(how, memory):
    def make():
        inner = linear()
        return [lambda x, config: torch.tanh(inner(x)) + config.mask] * 3, None

    def change(_):
        if how == "edited":
            config.mask.add_(1)
        elif how == "exchanged":
            config.mask = ones() * 2

    def side():
        nonlocal config
        config = types.SimpleNamespace(mask=ones(), name="some", dropout=0.1)
        return {"config": config}

    config = None
    if how == "left alone":
        assert_same(gradients(make, change, memory, side()), gradients(make, change, "store", side()))
        return
    reported_or_harmless(make, change, memory, OTHER, side)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("forwards", [1, 2])
def test_side_input_that_collects(forwards, memory):
    """Losses that fns leave in an object, which the loop then takes out of it: no change of what fn reads."""
    inner = linear()

    def fn(x, box):
        y = torch.tanh(inner(x)) * box.scale
        loss = y.square().mean()
        if not rg.replaying():
            box.losses.append(loss)
        return y

    def step(memory):
        torch.manual_seed(0)
        box = types.SimpleNamespace(losses=[], scale=ones() * 2)
        x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
        updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2], "box") for i in range(3)]
        outs = [rg.run(updates, {"a": x, "b": x * 0.5}, {"box": box}, memory=memory)["a"].sum() for _ in range(forwards)]
        total = sum(outs) + sum(box.losses)
        box.losses.clear()
        return torch.autograd.grad(total, [x, inner.weight])

    assert_same(step(memory), step("store"))


class Reader:
    """Reads a name in one way or another."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x, box):
        return torch.tanh(self.inner(x)) * self.read(box)

    @staticmethod
    def read(box):
        return box.memory


def from_afar(box, name):
    return getattr(box, name)


class Reading(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, box):
        return torch.tanh(self.inner(x)) * from_afar(box, "memory")


READERS = {
    "function": lambda inner: lambda x, box: torch.tanh(inner(x)) * box.memory,
    "object": Reader,
    "module": Reading,
    "method": lambda inner: Reader(inner).__call__,
    "partial": lambda inner: functools.partial(Reader.__call__, Reader(inner)),
}


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("how", ["left alone", "exchanged", "let go", "edited"])
@pytest.mark.parametrize("reader", READERS)
def test_what_an_encoder_computed_inside_of_an_object(reader, how, memory):
    """Two views and one loss: what the first one read is not there any more."""
    encoder, inner = linear(), linear()
    fn = READERS[reader](inner)

    def step(memory):
        torch.manual_seed(0)
        box, loss = types.SimpleNamespace(), 0.0
        for x in torch.randn(2, 3, WIDTH, dtype=torch.float64):
            box = types.SimpleNamespace() if how == "left alone" else box
            box.memory = encoder(x)
            updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2], "box") for i in range(3)]
            loss = loss + rg.run(updates, {"a": x, "b": x * 0.5}, {"box": box}, memory=memory)["a"].square().sum()
            if how == "let go":
                box.memory = None
            elif how == "edited":
                box.memory.add_(1)
        return torch.autograd.grad(loss, [*encoder.parameters(), *inner.parameters()])

    if how == "left alone":
        assert_same(step(memory), step("store"))
        return
    with pytest.raises(rg.ReplayError, match=f"{OTHER}|it raised TypeError"):
        step(memory)


NOISE = torch.Generator()


class Noisy(nn.Module):
    own = NOISE

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = linear(), way

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return y * torch.rand(WIDTH, generator=NOISE, dtype=x.dtype) if self.way == "forward" else self.noise(y)

    def noise(self, y):
        if self.way == "class":
            return y * torch.rand(WIDTH, generator=self.own, dtype=y.dtype)
        return y * (noise() if self.way == "helper" else torch.rand(WIDTH, generator=NOISE, dtype=y.dtype))


def noise():
    return torch.rand(WIDTH, generator=NOISE, dtype=torch.float64)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("way", ["forward", "method", "helper", "class", "function"])
def test_a_global_generator(way, memory):
    """It is to be a side input, or an attribute of fn: a generator that only code names is not restored."""

    def make():
        NOISE.manual_seed(1)
        inner = linear()
        fns = [(lambda x: torch.tanh(inner(x)) * noise()) if way == "function" else Noisy(way) for _ in range(4)]
        return fns, fns

    with pytest.raises(rg.ReplayError, match=OTHER):
        gradients(make, lambda _: None, memory)


@pytest.mark.parametrize("memory", REPLAYED)
def test_what_a_loop_keeps_in_a_side_object_for_itself(memory):
    """fn does not name it, so it is no change of what fn reads."""
    inner = linear()

    def fn(x, box):
        return torch.tanh(inner(x)) * box.factor

    def step(memory):
        torch.manual_seed(0)
        box = types.SimpleNamespace(factor=2.0, loss=0.0)
        for x in torch.randn(3, 3, WIDTH, dtype=torch.float64):
            updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2], "box") for i in range(3)]
            box.last = rg.run(updates, {"a": x, "b": x * 0.5}, {"box": box}, memory=memory)["a"]
            box.loss = box.loss + box.last.square().sum()
        return torch.autograd.grad(box.loss, list(inner.parameters()))

    assert_same(step(memory), step("store"))


@pytest.mark.parametrize("memory", REPLAYED)
def test_what_fns_leave_in_a_side_object(memory):
    """In each pass: what was there before is not what a recomputation reads."""
    inner = linear()

    def fn(x, box):
        y = torch.tanh(inner(x)) * box.factor
        box.aux = y.square().mean()
        return y

    def step(memory):
        torch.manual_seed(0)
        box, loss = types.SimpleNamespace(factor=2.0), 0.0
        for x in torch.randn(3, 3, WIDTH, dtype=torch.float64):
            updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2], "box") for i in range(3)]
            loss = loss + rg.run(updates, {"a": x, "b": x * 0.5}, {"box": box}, memory=memory)["a"].square().sum() + box.aux
        return torch.autograd.grad(loss, list(inner.parameters()))

    assert_same(step(memory), step("store"))


class Unbound:
    """A stranger: it raises when it is asked anything."""

    def __getattribute__(self, name):
        raise RuntimeError("unbound")


def strangers(_):
    nested = torch.nested.nested_tensor([ones(), ones(2)])
    proxy = weakref.proxy(MODEL)
    unbound = Unbound()

    class Strange(Above):
        box, lazy = defaultdict(list), nn.UninitializedBuffer()

        def forward(self, x):
            assert self.box is not self.lazy is not proxy is not unbound
            return torch.tanh(self.linear(x))

    Strange.unbound = unbound
    module = Strange("")
    module.ragged = [nested]
    return module


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("memory", REPLAYED)
def test_strangers_around_the_code(memory):
    """What is found there is asked for its type alone."""
    nothing = by(strangers), lambda _: None
    assert_same(gradients(*nothing, memory), gradients(*nothing, "store"))
    fns, _ = by(strangers)()
    assert not fns[0].box


def runs():
    gc.collect()
    return sum(type(thing) is Run for thing in gc.get_objects())


@pytest.mark.parametrize("how", ["attribute", "closure", "function"])
def test_graphs_in_a_list_that_fns_hold_are_let_go(how):
    """A pass without a backward: what is held of it is held weakly, as the collector cannot see autograd's graph."""
    losses, inner, others = [], linear(), runs()

    class Collecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.losses = linear(), losses if how == "attribute" else None

        def forward(self, x):
            return collecting(self.inner(x))

    def collecting(y):
        y = torch.tanh(y)
        losses.append(y.square().mean())
        return y

    fn = (lambda x: collecting(inner(x))) if how == "function" else Collecting()
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")] * 2, {"a": x, "b": x})
    losses.clear()
    del out
    assert runs() == others


@dataclass
class Scaled:
    """Equal by value, so it has no hash."""

    scale: torch.Tensor

    def __call__(self, x):
        return torch.tanh(x * self.scale)


@pytest.mark.parametrize("memory", REPLAYED)
def test_fn_without_a_hash(memory):
    def make():
        return [Scaled(ones() * 2), linear(), Scaled(ones() * 3)], None

    assert_same(gradients(make, lambda _: None, memory), gradients(make, lambda _: None, "store"))
