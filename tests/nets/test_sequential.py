"""rg.Sequential: ordinary layers with a memory argument."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from support import WIDTH, Attend, assert_same, draw, gradients, loss_of, mlp, rg
from torch import nn

POLICIES = ["checkpoint", "offload", rg.StoreLast(2), rg.StoreLast(blocks=3), rg.Budget(30_000), rg.Offload(keep_last=2)]
every_policy = pytest.mark.parametrize("memory", POLICIES, ids=str)


class Layer(nn.Module):
    """A layer as people have them: attention with a mask and a context, dropout, and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.attend, self.mlp, self.drop, self.norm = Attend(), mlp(), nn.Dropout(0.2), nn.BatchNorm1d(WIDTH).double()

    def forward(self, x, context=None, mask=None):
        x = x + self.drop(self.attend(x, context, mask))
        return self.norm(x + self.mlp(x))


def sequential(depth=5, **options):
    return rg.Sequential([Layer() for _ in range(depth)], **options)


def by_hand(net, x, **side):
    for layer in net:
        x = layer(x, **side)
    return x


def compared(net, memory, run, wanted):
    """Values and gradients of `run` under a policy, beside those of ordinary autograd."""
    true = gradients(lambda: run(by_hand), wanted)
    net.memory = memory
    assert_same(gradients(lambda: run(lambda net, x, **side: net(x, **side)), wanted), true)


@every_policy
def test_gradients(memory):
    net, x, context = sequential(), draw(), draw(4, WIDTH)
    mask = torch.rand(3, 4) > 0.3
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    compared(net, memory, lambda act: act(net, x, context=context, mask=mask), [x, context, *net.parameters()])
    moved = dict(net.named_buffers())
    assert all(not torch.equal(b, buffers[name]) for name, b in moved.items())
    assert all(int(b) == 2 for name, b in moved.items() if name.endswith("num_batches_tracked"))


@every_policy
def test_autocast(memory):
    net, x = sequential().float(), draw().detach().float().requires_grad_()

    def run(act):
        with torch.autocast("cpu", torch.bfloat16):
            return act(net, x)

    compared(net, memory, run, [x, *net.parameters()])


@every_policy
def test_routes(memory):
    net = sequential(4, route={"context": [True, False, True, False], "mask": False})
    x, context = draw(), draw(4, WIDTH)

    def by_route(act):
        if act is by_hand:
            y = x
            for layer, goes in zip(net, [True, False, True, False], strict=True):
                y = layer(y, context=context) if goes else layer(y)
            return y
        return act(net, x, context=context, mask=torch.zeros(()))

    compared(net, memory, by_route, [x, context, *net.parameters()])


class OnTree(nn.Module):
    """Of a tree with a tensor of whole numbers, which it passes on."""

    def __init__(self):
        super().__init__()
        self.a, self.b = mlp(), mlp()

    def forward(self, x):
        return {"a": x["a"] + self.a(x["pair"][0]), "pair": (x["pair"][0] + self.b(x["a"]), x["pair"][1])}


@every_policy
def test_trees(memory):
    net = rg.Sequential([OnTree() for _ in range(4)])
    a, b = draw(), draw()
    numbers = torch.arange(3)

    def run(act):
        out = act(net, {"a": a, "pair": (b, numbers)})
        assert torch.equal(out["pair"][1], numbers)
        return out["a"], out["pair"][0]

    compared(net, memory, run, [a, b, *net.parameters()])


class Casts(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.layer, self.dtype = mlp().to(dtype), dtype

    def forward(self, x):
        return self.layer(x.to(self.dtype))


@every_policy
def test_a_layer_may_change_the_dtype(memory):
    """As nn.Sequential lets it."""
    net, x = rg.Sequential([Casts(torch.float64), Casts(torch.float32), Casts(torch.float64)]), draw()
    compared(net, memory, lambda act: act(net, x), [x, *net.parameters()])


@every_policy
@pytest.mark.parametrize("depth", [1, 2])
def test_shallow_nets_and_shared_layers(memory, depth):
    layer = Layer()
    net, x = rg.Sequential([layer] * depth), draw()
    compared(net, memory, lambda act: act(net, x), [x, *net.parameters()])
    assert len(list(net.parameters())) == len(list(layer.parameters()))


def test_the_output_may_be_edited():
    """It is no source of anything."""
    net, x = sequential(), draw()
    for memory in ("checkpoint", "offload", "store"):
        net.memory = memory
        loss_of(net(x).mul_(2)).backward()


def test_no_layers():
    x = draw()
    assert rg.Sequential([])(x) is x


# -- a container ---------------------------------------------------------------------------------------------------------


def test_keys_are_those_of_torch():
    layers = [mlp(), mlp()]
    named = OrderedDict(first=layers[0], second=layers[1])
    for given in ((*layers,), (named,), ([*layers],), (nn.ModuleList(layers),), (dict(named),)):
        plain = nn.Sequential(named) if isinstance(given[0], dict) else nn.Sequential(*layers)
        assert rg.Sequential(*given).state_dict().keys() == plain.state_dict().keys()
        rg.Sequential(*given).load_state_dict(plain.state_dict())


def test_habits_of_a_container():
    net = sequential(5, memory=rg.StoreLast(blocks=2), verify="warn", route={"mask": [True, False, True, False, True]})
    assert len(net) == 5
    assert [*net] == [net[i] for i in range(5)]
    part = net[1:4].eval()
    assert isinstance(part, rg.Sequential)
    assert [*part] == [net[1], net[2], net[3]]
    assert (part.memory, part.verify, part.route) == (net.memory, "warn", {"mask": (False, True, False)})
    assert part.state_dict().keys() == nn.Sequential(*net)[1:4].state_dict().keys()
    x = draw()
    net.eval()
    net.route = None
    before = net(x)
    net[2] = nn.Identity()
    assert torch.equal(net(x), by_hand(net, x))
    assert not torch.equal(net(x), before)
    net.append(Layer().eval())
    assert torch.equal(net(x), by_hand(net, x))
    del net[0]
    assert len(net) == 5
    assert torch.equal(net(x), by_hand(net, x))


def test_copies_and_pickles():
    net, x = sequential(3).eval(), draw()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), net(x))
        assert other.memory == "checkpoint"
    assert "memory='checkpoint'" in repr(net)


def test_an_empty_route_means_none():
    assert sequential(2, route={}).route == {}
    with pytest.raises(rg.ProgramError, match=r"no layer takes the side input 'mask'.*route=\{'mask': True\}"):
        sequential(2, route={})(draw(), mask=None)


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["reverse", rg.Anchor(2), rg.ReverseAbove(0, dim=0)], ids=str)
def test_reversal_is_refused_with_the_reason(memory):
    net = sequential(3, memory=memory)
    with pytest.raises(rg.ProgramError, match="cannot be undone"):
        net(draw())


class Halves(nn.Module):
    def forward(self, x):
        return x[:, : WIDTH // 2]


REFUSED = {
    "a shape": (Halves(), r"the layer returned shape \(3, 3\), its input has \(3, 6\)"),
    "a pair": (type("Pair", (nn.Module,), {"forward": lambda self, x: (x, x)})(), "returned a tuple.*out\\[0\\]"),
    "None": (type("Nothing", (nn.Module,), {"forward": lambda self, x: None})(), "returned a NoneType"),
}


@pytest.mark.parametrize("memory", ["store", *POLICIES[:2]])
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_layer_must_return(case, memory):
    layer, message = REFUSED[case]
    net = rg.Sequential([mlp(), layer, mlp()], memory=memory)
    with pytest.raises(rg.ProgramError, match=f"update 1: x = .*{message}"):
        net(draw())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((3,), "takes a list of modules, got a int"),
        (([mlp(), torch.tanh],), "layer 1 of rg.Sequential is a builtin_function_or_method"),
        ((nn.Linear,), "takes a list of modules, got a type"),
        (([nn.Tanh],), "the class Tanh, not an instance"),
    ],
)
def test_what_is_no_layer(given, message):
    with pytest.raises(rg.ProgramError, match=message):
        rg.Sequential(*given)


@pytest.mark.parametrize("goes", [[True], "yes", [True, 1, False], None])
def test_routes_that_are_none(goes):
    with pytest.raises(rg.ProgramError, match=r"route\['mask'\] must be True, False or one bool for each of 3 layers"):
        sequential(3, route={"mask": goes})


def test_side_inputs_that_do_not_fit():
    net = rg.Sequential([mlp(), mlp()])
    with pytest.raises(rg.ProgramError, match=r"update 0: .*the side inputs mask.*route=\{'mask': \[True, False"):
        net(draw(), mask=None)
