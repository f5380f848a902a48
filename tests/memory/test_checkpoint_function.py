"""rg.Checkpoint, in the place of torch.utils.checkpoint.checkpoint."""

import copy
import functools
import pickle
import weakref
from dataclasses import dataclass

import pytest
import support
import torch
import torch.utils._pytree as pytree
from support import WIDTH, Attend, assert_same, draw, linear, loss_of, mlp, mlps, rg
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograde.bench.meter import LiveBytes
from retrograde.ordinary import checkpoint as ours

MEMORY = ["checkpoint", "offload"]


def gradients(make, wanted):
    """Of an output with other things than tensors in it."""
    return support.gradients(lambda: [t for t in pytree.tree_leaves(make()) if isinstance(t, Tensor)], wanted)


def plainly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


class Block(nn.Module):
    """A layer as models have them: arguments of all sorts, several outputs."""

    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        self.attend, self.mlp = Attend(width), mlp(width, dropout)
        self.double()

    def forward(self, x, mask=None, context=None, positions=(), scale=1.0, cache=None):
        h = x + self.attend(x, context=context, mask=mask)
        for p in positions:
            h = h * p
        return h + scale * self.mlp(h), None, {"half": h / 2, "of": "h"}

    def part(self, x):
        return self.mlp(x)


@dataclass
class Out:
    """As the outputs of Hugging Face: registered as a tree."""

    hidden: Tensor
    rest: Tensor | None = None


pytree.register_pytree_node(Out, lambda o: ([o.hidden, o.rest], None), lambda leaves, _: Out(*leaves))


def in_a_closure(block, **given):
    def run(x):
        return block(x, **given)

    return run


WAYS = {
    "a module": lambda ck, block, x, given: ck(block, x, **given),
    "its call": lambda ck, block, x, given: ck(super(Block, block).__call__, x, **given),
    "its forward": lambda ck, block, x, given: ck(block.forward, x, **given),
    "by position": lambda ck, block, x, given: ck(block, x, given["mask"], given["context"], given["positions"], 0.5),
    "all by keyword": lambda ck, block, x, given: ck(block, x=x, **given),
    "all in a partial": lambda ck, block, x, given: ck(functools.partial(block.__call__, x=x, **given)),
    "partial of a partial": lambda ck, block, x, given: ck(functools.partial(functools.partial(block, mask=None), **given), x),
    "a method": lambda ck, block, x, given: ck(block.part, x),
    "a closure": lambda ck, block, x, given: ck(in_a_closure(block, **given), x),
    "no tensor argument": lambda ck, block, x, given: ck(lambda: block(x, **given)),
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("way", WAYS)
def test_gradients(way, memory):
    """Of parameters, of the input and of what else requires grad, however the function is given."""
    block, x, context = Block(dropout=0.5), draw(2, 5, WIDTH), draw(2, 4, WIDTH)
    positions = (draw(5, WIDTH, grad=False), draw(5, WIDTH))
    given = {"mask": torch.rand(5, 4) > 0.3, "context": context, "positions": positions, "scale": 0.5}
    wanted = [x, context, positions[1], *block.parameters()]
    found = gradients(lambda: WAYS[way](rg.Checkpoint(memory), block, x, given), wanted)
    assert_same(found, gradients(lambda: WAYS[way](plainly, block, x, given), wanted))


def tree_of(x, out):
    return {
        "tensor": out,
        "tuple with None": (out, None, out.detach() * 2, 3),
        "dict": {"a": out, "b": [out.exp(), "text"]},
        "registered class": Out(out),
        "nothing that requires grad": (None, out.detach()),
        "its input": (x, out),
        "twice the same": (out, out),
    }


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("kind", tree_of(torch.ones(1), torch.ones(1)))
def test_outputs(kind, memory):
    """Any tree, with other things in it."""
    layer, x = mlp(), draw()

    def fn(t):
        return tree_of(t, layer(t))[kind]

    found, true = rg.Checkpoint(memory)(fn, x), fn(x)
    leaves, spec = pytree.tree_flatten(found)
    others, true_spec = pytree.tree_flatten(true)
    assert spec == true_spec
    assert [a for a in leaves if not isinstance(a, Tensor)] == [b for b in others if not isinstance(b, Tensor)]
    assert [isinstance(t, Tensor) and t.requires_grad for t in leaves] == [
        isinstance(t, Tensor) and t.requires_grad for t in others
    ]
    if kind != "nothing that requires grad":
        assert_same(gradients(lambda: rg.Checkpoint(memory)(fn, x), [x]), gradients(lambda: fn(x), [x]))


@pytest.mark.parametrize("memory", MEMORY)
def test_outputs_may_be_edited(memory):
    """As models do between layers: `x[mask] = …`, `x += …`."""
    first, second, x, more = mlp(), mlp(), draw(), draw(1, WIDTH)
    wanted = [x, more, *first.parameters(), *second.parameters()]

    def make(ck):
        h = ck(first, x)
        h += more
        h[0] = more[0] * 2
        return ck(second, h)

    assert_same(gradients(lambda: make(rg.Checkpoint(memory)), wanted), gradients(lambda: make(plainly), wanted))


@pytest.mark.parametrize("memory", MEMORY)
def test_chained_and_in_autograd(memory):
    """Two passes before a backward, retain_graph, autograd.grad, second derivatives."""
    fns, x = mlps(3), draw()
    wanted = [x, *nn.ModuleList(fns).parameters()]

    def make(ck):
        y, z = x, x * 2
        for fn in fns:
            y = ck(fn, y)
        for fn in fns:
            z = ck(fn, z)
        (inner,) = torch.autograd.grad(loss_of(y), x, create_graph=True)
        loss_of(y).backward(retain_graph=True)
        torch.autograd.backward(loss_of(y), inputs=[x], retain_graph=True)
        kept = x.grad.clone()
        nn.ModuleList(fns).zero_grad()
        x.grad = None
        return y, z, inner, kept * inner

    ours = gradients(lambda: make(rg.Checkpoint(memory)), wanted)
    assert_same(ours, gradients(lambda: make(plainly), wanted))


AROUND = {
    "itself": lambda ck, fn: lambda x: ck(lambda t: ck(fn, ck(fn, t)), x),
    "torch's checkpoint": lambda ck, fn: lambda x: checkpoint(lambda t: ck(fn, ck(fn, t)), x, use_reentrant=False),
    "inside: torch's checkpoint": lambda ck, fn: lambda x: ck(lambda t: checkpoint(fn, t, use_reentrant=False), x),
    "a reversible net": lambda ck, fn: lambda x: rg.ReversibleSequence([(functools.partial(ck, fn), fn)] * 2)(x),
    "inside: a reversible net": lambda ck, fn: lambda x: ck(rg.ReversibleSequence([(fn, fn)] * 2), x),
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("around", AROUND)
def test_nested(around, memory):
    fn, x = mlp(dropout=0.5), draw()
    wanted = [x, *fn.parameters()]
    found = gradients(lambda: AROUND[around](rg.Checkpoint(memory), fn)(x), wanted)
    assert_same(found, gradients(lambda: AROUND[around](plainly, fn)(x), wanted))


@pytest.mark.parametrize("memory", MEMORY)
def test_hooks_and_autocast_around(memory):
    block, x = nn.Sequential(linear(), nn.Tanh(), linear()).float(), torch.randn(3, WIDTH, requires_grad=True)
    wanted = [x, *block.parameters()]

    def make(ck):
        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.save_on_cpu():
            return ck(block, x).float()

    found, true = (gradients(lambda ck=ck: make(ck), wanted) for ck in (rg.Checkpoint(memory), plainly))
    assert all(map(torch.equal, found, true))


def test_a_tensor_that_is_given_twice_is_one():
    """Some functions look (`q is k`)."""
    seen = []

    def fn(q, k, v, also):
        seen.append(q is k is also["k"] and q is not v)
        return (q * k * v).sin()

    x, y = draw(), draw()
    rg.Checkpoint()(fn, x, x, y, {"k": x}).sum().backward()
    assert seen == [True, True]


def calls_of(monkeypatch):
    """How often the engine runs something."""
    found = []
    run = ours.run
    monkeypatch.setattr(ours, "run", lambda *a, **k: found.append(1) or run(*a, **k))
    return found


def test_without_grad_it_calls_fn(monkeypatch):
    """Without grad, under "store", and where nothing can get a gradient, as in frozen layers below the first that trains."""
    found, layer, x = calls_of(monkeypatch), mlp(), draw()
    with torch.no_grad():
        rg.Checkpoint()(layer, x)
    rg.Checkpoint("store")(layer, x)
    frozen = mlp().requires_grad_(False)
    assert not rg.Checkpoint()(frozen.__call__, x.detach()).requires_grad
    assert found == []
    rg.Checkpoint()(frozen, x)
    rg.Checkpoint()(layer, x.detach())
    rg.Checkpoint()(lambda t: layer(t), x.detach())  # nobody knows
    assert len(found) == 3


@pytest.mark.parametrize("memory", MEMORY)
def test_what_trains_alone(memory):
    """Parameters alone, with inputs that need no grad; and a side input alone, through a frozen layer."""
    block, x, context = Block(), draw(2, 5, WIDTH, grad=False), draw(2, 4, WIDTH)
    for wanted in (list(block.parameters()), [context]):
        block.requires_grad_(len(wanted) > 1)
        found = gradients(lambda: rg.Checkpoint(memory)(block, x, context=context), wanted)
        assert_same(found, gradients(lambda: block(x, context=context), wanted))


# -- memory ------------------------------------------------------------------------------------------------------------


def test_only_arguments_are_kept():
    """Per layer the input, and no copy of a mask that all share."""
    layers = [Block(32) for _ in range(8)]
    mask = torch.ones(16, 16, dtype=torch.bool)

    def kept(ck, depth):
        x = draw(4, 16, 32)
        with LiveBytes() as meter:
            for layer in layers[:depth]:
                x = ck(layer, x, mask)[0]
            held = meter.live
        loss_of(x).backward()
        return held

    size = 4 * 16 * 32 * 8
    assert kept(rg.Checkpoint(), 8) - kept(rg.Checkpoint(), 4) == 4 * size
    assert kept(plainly, 8) - kept(plainly, 4) > 20 * size  # the meter would have seen it


@pytest.mark.parametrize("memory", MEMORY)
def test_nothing_is_left(memory):
    """After backward, and after a loss that was dropped: no argument is alive."""
    for used in (True, False):
        x, mask, layer = draw(2, 5, WIDTH), torch.rand(5, 5) > 0.3, Block()
        out = rg.Checkpoint(memory)(layer, x * 2, mask=mask)[0]
        alive = weakref.ref(layer)
        if used:
            out.sum().backward()
        seen = weakref.ref(mask)
        del x, mask, layer, out
        assert seen() is None
        assert alive() is None


@pytest.mark.gpu
@pytest.mark.parametrize("memory", MEMORY)
def test_on_a_gpu(memory):
    """Gradients to the bit, and under offload device memory that is flat in depth."""
    torch.cuda.init()
    width, rows = 512, 4096

    def step(ck, depth):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)).cuda()
        x = torch.randn(rows, width, device="cuda", requires_grad=True)
        for layer in layers:
            layer[0].weight.grad, layer[0].bias.grad = (torch.zeros_like(p) for p in layer.parameters())
        h = x
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        for layer in layers:
            h = ck(layer, h)
        h.square().sum().backward()
        torch.cuda.synchronize()
        return [x.grad, *(p.grad for p in layers.parameters())], torch.cuda.max_memory_allocated() - start

    found, true = step(rg.Checkpoint(memory), 4)[0], step(plainly, 4)[0]
    assert all(map(torch.equal, found, true))
    stream = rows * width * 4
    grown = step(rg.Checkpoint(memory), 24)[1] - step(rg.Checkpoint(memory), 12)[1]
    assert grown <= 2 * stream if memory == "offload" else 11 * stream < grown < 13 * stream


# -- what backward could not repeat --------------------------------------------------------------------------------------


class Cache:
    """Of keys, as of a model that generates text."""

    def __init__(self):
        self.keys = []

    def update(self, k):
        self.keys.append(k)
        return torch.cat(self.keys, 1)


def test_a_cache_that_fn_writes():
    """The recomputation would read what the first run has written."""
    attend, cache, x = Attend(), Cache(), draw(2, 5, WIDTH)
    out = rg.Checkpoint()(lambda t, cache: attend(t, context=cache.update(t)), x, cache=cache)
    with pytest.raises(rg.ReplayError, match=r"update 0: out = .*\(args\)"):
        loss_of(out).backward()


@pytest.mark.parametrize("kind", ["list", "dict", "dict in a tuple"])
def test_a_list_or_a_dict_that_fn_writes(kind):
    """Where there are tensors in it: the caller would not see what fn has written."""
    layer, x = mlp(), draw()
    given = {"list": [x * 2], "dict": {"a": x * 2}, "dict in a tuple": (x, {"a": x * 2})}[kind]

    def fn(t, given):
        out = layer(t)
        inner = given[1] if isinstance(given, tuple) else given
        inner.append(out) if isinstance(inner, list) else inner.update(a=out)
        return out

    with pytest.raises(rg.ProgramError, match="fn changed a list or a dict among its arguments"):
        rg.Checkpoint()(fn, x, given)


def test_an_empty_dict_that_fn_writes():
    """It stays the caller's, as with torch's function; gradients through what was written are right."""
    fns, x = mlps(2), draw()
    wanted = [x, *nn.ModuleList(fns).parameters()]

    def make(ck):
        class Shared(dict):
            """Nothing that torch.utils._pytree knows."""

        shared = Shared()

        def first(t, shared):
            shared["h"] = fns[0](t)
            return shared["h"] * t

        def second(t, shared):
            return fns[1](t * shared["h"])

        return ck(second, ck(first, x, shared), shared)

    assert_same(gradients(lambda: make(rg.Checkpoint()), wanted), gradients(lambda: make(plainly), wanted))


EDITS = {
    "its input": (lambda x, mask: x.mul_(2), "the stream 'args' was edited in place"),
    "a mask": (lambda x, mask: mask.logical_not_(), "the side input 'other args' was edited in place"),
}


@pytest.mark.parametrize("what", EDITS)
def test_edited_before_backward(what):
    edit, message = EDITS[what]
    block, x, mask = Block(), draw(2, 5, WIDTH) * 1, torch.rand(5, 5) > 0.3
    out = rg.Checkpoint()(block, x, mask)[0]
    with torch.no_grad():
        edit(x, mask)
    with pytest.raises(rg.ReplayError, match=message):
        loss_of(out).backward()


def test_fn_may_not_edit_its_input():
    with pytest.raises(rg.Edited, match="fn edited its source 'args' in place"):
        rg.Checkpoint()(lambda t: t.add_(1).sin(), draw() * 1)


def test_something_else_the_second_time():
    """By value, with the function's name; and verify="off"."""
    layer, x, factor = mlp(), draw(), [1.0]

    def scaled(t):
        return (layer(t) * factor[0]).sin()

    for verify in ("error", "off"):
        factor[0] = 1.0
        out = rg.Checkpoint(verify=verify)(scaled, x)
        factor[0] = 2.0
        if verify == "error":
            with pytest.raises(rg.NotRepeated, match=r"update 0: out = .*scaled\(args\): when backward ran fn again"):
                loss_of(out).backward()
        else:
            loss_of(out).backward()


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return (super().forward(x) * self.calls).sin()


class Model(nn.Module):
    """Layers under rg.Checkpoint."""

    def __init__(self, *layers):
        super().__init__()
        self.layers, self.checkpoint = nn.ModuleList(layers), rg.Checkpoint()

    def forward(self, x):
        for layer in self.layers:
            x = self.checkpoint(layer, x).tanh()
        return x


def test_check():
    """It takes a net that runs under rg.Checkpoint, and names the function at fault."""
    report = rg.check.gradients(Model(linear(), linear()), draw())
    assert (report.ok, report.findings, report.steps) == (True, [], 3), str(report)
    report = rg.check.gradients(Model(linear(), Counting(WIDTH, WIDTH).double()), draw())
    (finding,) = report.findings
    assert not report.ok
    assert (finding.kind, finding.where) == ("stateful", "update 0: out = Counting(args)")
    assert "self.calls += 1" in finding.code


def test_tensors_that_nobody_can_see():
    """A class that torch.utils._pytree does not know, with all that requires grad in it."""

    class Hidden:
        def __init__(self, t):
            self.t = t

    with pytest.raises(rg.ProgramError, match=r"fn returned a Hidden, .*register_pytree_node"):
        rg.Checkpoint()(lambda t: Hidden(t.sin()), draw())


# -- what is refused, and what makes no difference ---------------------------------------------------------------------


def test_arguments_of_torchs_function():
    layer, x = mlp(), draw()
    for given in ({"use_reentrant": True}, {"use_reentrant": False}, {"preserve_rng_state": False, "debug": True}):
        assert torch.equal(rg.Checkpoint()(layer, x, **given), layer(x))
    for given in ({"context_fn": lambda: None}, {"determinism_check": "none"}, {"early_stop": False}):
        with pytest.raises(rg.ProgramError, match=f"rg.Checkpoint: {next(iter(given))}.* is not supported"):
            rg.Checkpoint()(layer, x, **given)


@pytest.mark.parametrize("memory", ["reverse", rg.StoreLast(2), rg.Budget("auto"), rg.Anchor(2), rg.ReverseAbove(4)], ids=str)
def test_policies_that_need_a_net(memory):
    with pytest.raises(rg.ProgramError, match=r"rg.Checkpoint takes 'checkpoint', .*use rg.Sequential"):
        rg.Checkpoint(memory)


def test_unknown_options():
    with pytest.raises(rg.ProgramError, match="unknown memory policy 'all'"):
        rg.Checkpoint("all")
    with pytest.raises(rg.ProgramError, match="unknown verify"):
        rg.Checkpoint(verify="perhaps")


def test_an_argument_called_memory():
    """As of torch's decoder layer: the policy is no argument of the call."""
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 12, 0.1, batch_first=True).double()
    x, memory = draw(2, 5, WIDTH), draw(2, 4, WIDTH)
    wanted = [x, memory, *layer.parameters()]
    found = gradients(lambda: rg.Checkpoint()(layer, x, memory=memory, tgt_is_causal=False), wanted)
    assert_same(found, gradients(lambda: layer(x, memory=memory), wanted))


def test_copies_and_pickles():
    first = rg.Checkpoint(rg.Offload(keep_last=2), verify="warn")
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert (other.memory, other.verify, repr(other)) == (first.memory, "warn", "Checkpoint(Offload(host=None, keep_last=2))")


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_around(fullgraph):
    """The compiler sees all of fn, as in torch's own function."""
    fns, x = nn.ModuleList(mlps(3)), draw()
    count = []

    def backend(graph, _):
        count.append(sum("linear" in str(node.target) for m in graph.modules() for node in getattr(m, "graph", graph).nodes))
        return graph

    def make(x, ck):
        for fn in fns:
            x = ck(fn, x)
        return x

    torch.compiler.reset()
    wanted = [x, *fns.parameters()]
    compiled, ours = torch.compile(make, backend=backend, fullgraph=fullgraph), rg.Checkpoint()
    assert_same(gradients(lambda: compiled(x, ours), wanted), gradients(lambda: make(x, plainly), wanted))
    assert len(count) == 1
    assert count[0] >= 6


def test_compiled_around_nothing_moves():
    layer, x, ck = mlp(), draw(), rg.Checkpoint("offload")
    torch.compiler.reset()
    with pytest.warns(UserWarning, match=r"runs as 'checkpoint'. Compile what it calls instead"):
        out = torch.compile(lambda t: ck(layer, t), backend="eager")(x)
    assert torch.equal(out, layer(x))


@pytest.mark.parametrize("memory", MEMORY)
def test_compiled_inside(memory):
    """`layer.compile()`: both runs are compiled."""
    layers, x, runs = nn.ModuleList(Block() for _ in range(2)), draw(2, 5, WIDTH), []
    wanted = [x, *layers.parameters()]

    def make(ck):
        return ck(layers[1].__call__, ck(layers[0].__call__, x)[0])

    true = gradients(lambda: make(plainly), wanted)

    def backend(graph, _):
        return lambda *args: runs.append(1) or graph(*args)

    torch.compiler.reset()
    for layer in layers:
        layer.compile(backend=backend)
    assert_same(gradients(lambda: make(rg.Checkpoint(memory)), wanted), true)
    assert len(runs) == 4


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """There is no backward pass: fn as it is."""

    model, x = Model(linear(), linear()), draw(grad=False)
    torch.testing.assert_close(torch.export.export(model, (x,), strict=strict).module()(x), model(x))
