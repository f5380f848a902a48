"""What fn holds, however it holds it: changed between forward and backward it is an error, or restored; nothing else is."""

import functools
import gc
import types
import weakref
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from support import REPLAYED, assert_same, rg
from torch import nn

from retrograde._engine.records import Run

WIDTH = 4


def linear():
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def ones(size=WIDTH):
    return torch.ones(size, dtype=torch.float64)


class Model(nn.Module):
    """Its methods are the functions: they call parts of it, and read a parameter, a buffer and a flag by themselves."""

    def __init__(self):
        super().__init__()
        self.stem, self.f1, self.f2 = linear(), nn.Sequential(linear(), linear()), linear()
        self.pos = nn.Parameter(ones())
        self.register_buffer("off", ones())
        self.head = nn.Sequential(linear())

    def f(self, x):
        return torch.tanh(self.f1(x)) + self.pos + self.off

    def g(self, x):
        return torch.tanh(self.f2(x)) + (1.0 if self.training else 0.0)


def methods():
    model = Model()
    return [model.f, model.g, model.f, model.g], model


def adding_lambda():
    held, other = linear(), linear()

    def fn(x):
        return torch.tanh(x) + held.bias

    return [fn, other, fn], held


def from_a_list():
    layers = [linear() for _ in range(3)]
    return [lambda x, i=i: torch.tanh(layers[i](x)) for i in range(3)], layers


class Boxed(nn.Module):
    """Holds its part in a plain list."""

    def __init__(self, part):
        super().__init__()
        self.box = [part]

    def forward(self, x):
        return torch.tanh(self.box[0](x))


def boxed():
    fns = [Boxed(linear()) for _ in range(3)]
    return fns, fns


def boxed_twice():
    fns = [Boxed(Boxed(linear())) for _ in range(3)]
    return fns, fns


class Empty(nn.Module):
    """Slots that hold None."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_parameter("shift", None)
        self.register_buffer("mask", None)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return y + sum(t for t in (self.shift, self.mask) if t is not None)


def empty():
    fns = [Empty() for _ in range(3)]
    return fns, fns


SCALE = ones()
head = linear()  # no part of any fn, though some have an attribute of that name


class Global(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = linear()

    def forward(self, x):
        return torch.tanh(self.head(x)) * SCALE + SCALE


def global_tensor():
    fns = [Global() for _ in range(3)]
    return fns, fns


SHIFT, UNUSED = ones(), ones()


def shifted(x):
    return x + SHIFT


class ByMethods(nn.Module):
    """The code of its forward is in several places; `scale` belongs to the class."""

    scale, other = ones(), ones()

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = linear(), way

    def forward(self, x):
        return torch.tanh(self.linear(x)) + getattr(self, self.way) if self.way == "read" else self.by(x)

    def by(self, x):
        return {"method": self.shift, "static": self.plain, "helper": self.helped, "class": self.scaled}[self.way](self.linear(x))

    def shift(self, x):
        return torch.tanh(x) + SHIFT

    @staticmethod
    def plain(x):
        return torch.tanh(x) + SHIFT

    def helped(self, x):
        return shifted(torch.tanh(x))

    def scaled(self, x):
        return torch.tanh(x) + self.scale

    @property
    def read(self):
        return SHIFT

    def never_called(self, x):
        return x + UNUSED


class Decorated(ByMethods):
    @torch.amp.autocast("cpu", enabled=False)
    def forward(self, x):
        return torch.tanh(self.linear(x)) + SHIFT


class Descriptor:
    def __init__(self, function):
        self.function = function

    def __get__(self, instance, kind):
        return self.function if instance is None else types.MethodType(self.function, instance)


class Described(ByMethods):
    @Descriptor
    def forward(self, x):
        return torch.tanh(self.linear(x)) + SHIFT


class Above(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return torch.tanh(self.linear(x)) + SHIFT


class Below(Above):
    def forward(self, x):
        return super().forward(x)


AROUND = []


def enclosed(_):
    """A class in a function, and a tensor around it."""
    kept = ones()
    AROUND.append(kept)

    class Enclosed(Above):
        def forward(self, x):
            return torch.tanh(self.linear(x)) + kept

    return Enclosed("")


def by(kind, way=""):
    def make():
        fns = [kind(way) for _ in range(3)]
        return fns, fns

    return make


LOG = []


def logging_class(_):
    log = LOG

    class Logging(Above):
        def forward(self, x):
            y = torch.tanh(self.linear(x))
            if not rg.replaying():
                log.append(y.detach().mean())
            return y

    return Logging("")


class InModel(nn.Module):
    """Its BatchNorm is a part of the model that its method names; so is that of every other one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def forward(self, x):
        return torch.tanh(self.norm(x)) * self.factor()

    def factor(self):
        return MODEL.factor


MODEL = nn.Module()


def with_model():
    MODEL.factor, MODEL.head = 0.5, linear()
    MODEL.fns = nn.ModuleList(InModel() for _ in range(3))
    return list(MODEL.fns), MODEL


def other_scale(_):
    ByMethods.scale = ByMethods.scale * 2


class Caching(nn.Module):
    """`caches` is a name like any other."""

    def __init__(self, caches):
        super().__init__()
        self.linear, self.scale, self.caches = linear(), [ones()], caches

    def forward(self, x):
        return torch.tanh(self.linear(x)) + self.scale[0]


def caching(caches):
    def make():
        fns = [Caching(caches) for _ in range(3)]
        return fns, fns

    return make


def reuse_the_address(fns):
    """`p.data = other`, until the old storage's address is given out again; or it never is."""
    p = fns[1].linear.bias
    home = p.untyped_storage()._cdata
    p.data = p.data.clone()
    for k in range(2000):
        p.data = [p.data * 1.5 for _ in range(k % 7 + 1)][-1].clamp(-9, 9)
        if p.untyped_storage()._cdata == home:
            break


def swap_layers(model):
    model.f1[0], model.f1[1] = model.f1[1], model.f1[0]


def swap_two(model):
    model.stem, model.f2 = linear(), linear()


def gradients(make, change, memory, side=None):
    torch.manual_seed(0)
    fns, held = make()
    updates = [rg.Update("ab"[i % 2], fn, "ba"[i % 2], rg.ALL) for i, fn in enumerate(fns)]
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    out = rg.run(updates, {"a": x, "b": x * 0.5}, side, memory=memory)
    with torch.no_grad():
        change(held)
    return torch.autograd.grad(out["a"].square().sum() + out["b"].sin().sum(), x)


OTHER = "returned something else|that fn holds on to was changed"
CHANGED = {
    "a method adds a parameter of its model": (methods, lambda m: m.pos.add_(1), OTHER),
    "a method adds a buffer of its model": (methods, lambda m: m.off.add_(1), OTHER),
    "a method reads a flag of its model": (methods, lambda m: setattr(m, "training", False), OTHER),
    "a function adds a parameter of a module": (adding_lambda, lambda m: m.bias.add_(1), OTHER),
    "a part that is used and one that is not": (methods, swap_two, OTHER),
    "two layers exchanged": (methods, swap_layers, OTHER),
    "a layer in a list of a closure": (from_a_list, lambda layers: layers.__setitem__(1, linear()), OTHER),
    "a layer in a list of a module": (boxed, lambda fns: fns[1].box.__setitem__(0, linear()), OTHER),
    "a parameter two lists away": (boxed_twice, lambda fns: fns[1].box[0].box[0].bias.add_(1), "the parameter 'bias'"),
    "a global tensor": (global_tensor, lambda _: SCALE.mul_(1.5), OTHER),
    "a global tensor in a method": (by(ByMethods, "method"), lambda _: SHIFT.add_(1), OTHER),
    "… in a static method": (by(ByMethods, "static"), lambda _: SHIFT.add_(1), OTHER),
    "… in a property": (by(ByMethods, "read"), lambda _: SHIFT.add_(1), OTHER),
    "… in a function that a method calls": (by(ByMethods, "helper"), lambda _: SHIFT.add_(1), OTHER),
    "… below a decorator": (by(Decorated), lambda _: SHIFT.add_(1), OTHER),
    "… in the class above": (by(Below), lambda _: SHIFT.add_(1), OTHER),
    "a tensor around a class": (by(enclosed), lambda _: AROUND[-1].add_(1), OTHER),
    "a tensor of the class": (by(ByMethods, "class"), lambda _: ByMethods.scale.add_(1), OTHER),
    "… of a forward behind a descriptor": (by(Described), lambda _: SHIFT.add_(1), OTHER),
    "another tensor of the class": (by(ByMethods, "class"), other_scale, OTHER),
    "a tensor beside an attribute `caches`": (caching({"k": 1}), lambda fns: fns[1].scale[0].add_(1), OTHER),
    "other data at the same address": (caching(None), reuse_the_address, "the parameter 'bias'"),
}


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("case", CHANGED)
def test_changed_since(case, memory):
    make, change, words = CHANGED[case]
    with pytest.raises(rg.ReplayError, match=words):
        gradients(make, change, memory)


def fill(name, value):
    return lambda fns: [setattr(fn, name, value) for fn in fns]


FINE = {
    "a parameter where there was none": (empty, fill("shift", nn.Parameter(ones()))),
    "a buffer where there was none": (empty, fill("mask", ones())),
    "another module in the model": (methods, lambda m: setattr(m, "extra", linear())),
    "a part of the model that no function uses": (methods, lambda m: m.head[0].weight.add_(1)),
    "a layer of the list that others use": (from_a_list, lambda layers: layers.append(linear())),
    "a global with the name of an attribute": (global_tensor, lambda _: head.weight.add_(1)),
    "what a method names is the model, and another part of it steps": (with_model, lambda model: model.head.weight.add_(1)),
    "a list around a class": (by(logging_class), lambda _: LOG.clear()),
    "a tensor of the class that no code names": (by(ByMethods, "method"), lambda _: ByMethods.other.add_(1)),
    "a global in a method that is not called": (by(ByMethods, "method"), lambda _: UNUSED.add_(1)),
    "an attribute `caches` that has no truth value": (caching(torch.zeros(2)), lambda _: None),
}


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("case", FINE)
def test_not_its_own(case, memory):
    make, change = FINE[case]
    assert_same(gradients(make, change, memory), gradients(make, change, "store"))


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

    config = types.SimpleNamespace(mask=ones(), name="some", dropout=0.1)
    if how == "left alone":
        assert_same(gradients(make, change, memory, {"config": config}), gradients(make, change, "store", {"config": config}))
        return
    with pytest.raises(rg.ReplayError, match=OTHER):
        gradients(make, change, memory, {"config": config})


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
