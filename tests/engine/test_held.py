"""What fn holds on to without being given it, and that changes before backward: an error."""

import types

import pytest
import torch
from held_support import MODEL, OTHER, SHIFT, UNUSED, Above, by, gradients, ones, reported_or_harmless
from support import REPLAYED, WIDTH, assert_same, linear, rg
from torch import nn


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
    reported_or_harmless(make, change, memory, words)


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
