"""Errors in the forward pass name the update, the cause and the way out."""

import pytest
import torch
from errors_support import Net, assert_next_step_is_right, edit, refused
from support import REPLAYED, WIDTH, draw, loss_of, mlp, mlps, rg
from torch import nn

# -- the program, before anything runs ---------------------------------------------------------------------------------

f, g = nn.Linear(WIDTH, WIDTH).double(), nn.Tanh()
PAIR = rg.wirings.pair(f, g)
TAKING = rg.wirings.pair(f, g, takes=("mask", ()))


X = torch.rand(3, WIDTH, dtype=torch.float64)
STREAMS = {"x1": X, "x2": X}


def sequence(depth=2, **options):
    return rg.ReversibleSequence([(f, g)] * depth, **options)


def set_memory(memory):
    sequence().memory = memory


def set_arithmetic(arithmetic):
    rg.Reversible(PAIR).arithmetic = arithmetic


MEMORIES, ARITHMETICS = ("store", "checkpoint", "reverse"), ("auto", "float")
BAD_PROGRAMS = {
    "target among the sources": (
        lambda: rg.Update("x1", f, ("x2", "x1")),
        ["x1 += Linear(x2, x1)", "the target 'x1' is among the sources", "Read another stream, or split this one"],
    ),
    "fn is not callable": (lambda: rg.Update("x1", 3, "x2"), ["x1 += ", "int", "not callable"]),
    "no sources": (lambda: rg.Update("x1", f, ()), ["x1 += Linear()", "no sources", "Name the streams"]),
    "not an update": (lambda: rg.Reversible([*PAIR, (f, g)]), ["update 2", "tuple", "rg.Update"]),
    "unknown source": (
        lambda: rg.run(PAIR[:1], {"x1": X, "y": X}),
        ["update 0: x1 += Linear(x2)", "unknown stream 'x2'", "Streams given: x1, y"],
    ),
    "unknown target": (
        lambda: rg.Reversible([*PAIR, rg.Update("z", g, "x1")])(STREAMS),
        ["update 2: z += Tanh(x1)", "unknown stream 'z'", "Streams given: x1, x2"],
    ),
    "unknown side input": (
        lambda: rg.run(TAKING, STREAMS, {"masks": None}),
        ["update 0: x1 += Linear(x2)", "unknown side input 'mask'", "Pass it (None is allowed)", "given: masks"],
    ),
    "unknown side input of a module": (
        lambda: rg.Reversible(TAKING)(STREAMS),
        ["update 0: x1 += Linear(x2)", "unknown side input 'mask'", "Pass it"],
    ),
    "unused side input": (
        lambda: rg.Reversible(TAKING)(STREAMS, mask=None, maks=None),
        ["no update takes the side input 'maks'", "taken: mask"],
    ),
    "unused side input of inverse": (
        lambda: rg.Reversible(PAIR).inverse(STREAMS, mask=None),
        ["no update takes the side input 'mask'", "taken: none"],
    ),
    "unused side input of a sequence": (
        lambda: sequence(route=(False, False))(X, mask=None),
        ["no fn takes", "mask", "route=(False, False)"],
    ),
    "side input without a route": (
        lambda: sequence(route={"mask": [(True, True)] * 2})(X, maks=None),
        ["no fn takes the side input 'maks'", "routed: mask"],
    ),
    "side input routed to nobody": (
        lambda: sequence(route={"mask": [(False, False)] * 2})(X, mask=None),
        ["no fn takes", "mask"],
    ),
    "odd width": (
        lambda: sequence(split="chunk")(torch.ones(3, 7)),
        ["odd size 7 along dim -1", "(3, 7)", "Pad it, choose another dim, or use split='copy'"],
    ),
    "odd length": (lambda: sequence(split="chunk", dim=0)(torch.ones(3, 4)), ["odd size 3 along dim 0", "Pad it"]),
    "no thirds": (
        lambda: sequence(split="chunk", streams=3)(torch.ones(3, 8)),
        ["size 8 along dim -1", "three equal parts", "Pad it"],
    ),
    "idle streams": (lambda: sequence(streams=5), ["5 streams for", "some would never change", "Use fewer"]),
    "one stream": (lambda: sequence(streams=1), ["streams must be a whole number, 2 or more", "got 1"]),
    "no number of streams": (lambda: sequence(streams=True), ["streams must be a whole number", "True"]),
    "one stream in turn": (lambda: rg.wirings.leapfrog([f, g], streams=["a"]), ["two names or more", "['a']"]),
    "inverse of other streams": (
        lambda: sequence(streams=3, merge=None).inverse((X, X)),
        ["takes the 3 streams that forward returned", "got a tuple of 2"],
    ),
    "no blocks": (lambda: rg.ReversibleSequence([]), ["no blocks", "at least one (f, g)"]),
    "no updates": (lambda: rg.Reversible([]), ["no updates", "at least one"]),
    "a module is no pair": (lambda: rg.ReversibleSequence([(f, g), f]), ["block 1", "not a pair of callables (f, g)", "Linear"]),
    "three are no pair": (lambda: rg.ReversibleSequence([(f, g, f)]), ["block 0", "not a pair of callables (f, g)", "tuple"]),
    "classes are no functions": (lambda: rg.ReversibleSequence([(f, nn.Tanh)]), ["block 0 has the class Tanh, not an instance"]),
    "one module is no list": (lambda: rg.ReversibleSequence(f), ["the blocks are a Linear", "pairs of callables (f, g)"]),
    "a pair of other things": (lambda: rg.ReversibleSequence([(f, 1)]), ["block 0", "not a pair of callables (f, g)"]),
    "route of the wrong length": (
        lambda: sequence(route={"mask": [(True, False)] * 3}),
        ["route['mask']", "one (to_f, to_g) for each of 2 blocks, got 3"],
    ),
    "route that is no pair": (
        lambda: sequence(route={"mask": [(True, False), True]}),
        ["route['mask'][1]", "(to_f, to_g)", "True"],
    ),
    "route for all that is no pair": (lambda: sequence(route=(True,)), ["route must be a pair of bools (to_f, to_g)", "(True,)"]),
    "inverse of a mean": (
        lambda: sequence().inverse(X),
        ["merge='mean' averages", "cannot be recovered", "merge=None"],
    ),
    "groups of one": (lambda: rg.wirings.groups([f]), ["at least two functions", "1"]),
    "streams of a wiring": (lambda: rg.wirings.pair(f, g, streams="ab"), ["streams must have 2 items", "'ab'"]),
    "memory": (lambda: sequence(memory="reversed"), ["unknown memory policy 'reversed'", *MEMORIES]),
    "memory set later": (lambda: set_memory(None), ["unknown memory policy None", *MEMORIES]),
    "memory of run": (lambda: rg.run(PAIR, STREAMS, memory="Store"), ["unknown memory policy 'Store'", *MEMORIES]),
    "memory of invert": (lambda: rg.invert(PAIR, STREAMS, memory=3), ["unknown memory policy 3", *MEMORIES]),
    "arithmetic": (lambda: sequence(arithmetic="fixed"), ["unknown arithmetic 'fixed'", *ARITHMETICS]),
    "arithmetic set later": (lambda: set_arithmetic("fixed"), ["unknown arithmetic 'fixed'", *ARITHMETICS]),
    "arithmetic of run": (lambda: rg.run(PAIR, STREAMS, arithmetic=""), ["unknown arithmetic ''", *ARITHMETICS]),
    "split": (lambda: sequence(split="half"), ["unknown split 'half'", "copy", "chunk"]),
    "merge": (lambda: sequence(merge="avg"), ["unknown merge 'avg'", "mean", "sum", "cat", "None"]),
}


@pytest.mark.parametrize("case", BAD_PROGRAMS)
def test_bad_program(case):
    act, words = BAD_PROGRAMS[case]
    with refused(rg.ProgramError, *words, net=nn.ModuleList([f, g])):
        act()


def test_a_side_input_that_fn_has_no_keyword_for():
    """Under the default route every f gets every side input; of updates it is Python's own error, with the update in a note."""
    net, words = sequence(), ("unexpected keyword argument 'mask'", "update 0: x1 += Linear(x2)")
    with refused(rg.ProgramError, *words, "route={'mask'", net=net):
        net(X, mask=None)
    with refused(TypeError, *words, net=net):
        rg.run(TAKING, STREAMS, {"mask": None})


def test_a_refused_policy_leaves_the_old_one():
    net = sequence(memory="checkpoint")
    with refused(rg.ProgramError, *MEMORIES):
        net.memory = "none"
    assert net.memory == "checkpoint"


# -- what fn returns ---------------------------------------------------------------------------------------------------

OUTPUTS = {
    "None": (lambda x, y, _: None, ["fn returned None", "(3, 6)"]),
    "a number": (lambda x, y, _: 1.0, ["fn returned a float", "(3, 6)"]),
    "a tuple": (lambda x, y, _: (y, y), ["fn returned a tuple", "(3, 6)"]),
    "another tree": (lambda x, y, _: {"y": y}, ["fn returned a dict", "(3, 6)"]),
    "another shape": (lambda x, y, _: y[:2], ["fn returned shape (2, 6), the stream has (3, 6)"]),
    "a shape that would broadcast": (lambda x, y, _: y[:1], ["fn returned shape (1, 6), the stream has (3, 6)", "broadcast"]),
    "a scalar": (lambda x, y, _: y.sum(), ["fn returned shape (), the stream has (3, 6)", "broadcast"]),
    "another device": (lambda x, y, _: y.to("meta"), ["fn returned a tensor on meta, the stream is on cpu"]),
    "complex": (lambda x, y, _: y * 1j, ["torch.complex128", "cannot be added to a stream of torch.float64"]),
    "bool": (lambda x, y, _: y > 0, ["torch.bool", "cannot be added to a stream of torch.float64"]),
}


@pytest.mark.parametrize("memory", ["store", *REPLAYED])
@pytest.mark.parametrize("case", OUTPUTS)
def test_fn_returns(case, memory):
    fault, words = OUTPUTS[case]
    net = Net(memory, fault=fault)
    with refused(rg.ProgramError, Net.NAME, *words, "Return ", net=None if memory == "store" else net):
        net.run()
    assert_next_step_is_right(net)


TREES = {
    "a missing key": lambda x: {"a": x["a"]},
    "one key too many": lambda x: {**x, "c": x["a"]},
    "a tensor": lambda x: x["a"],
    "a list": lambda x: [x["a"], x["b"]],
    "a deeper tree": lambda x: {"a": {"a": x["a"]}, "b": x["b"]},
    "another shape in a leaf": lambda x: {"a": x["b"], "b": x["b"]},
    "an integer stream": lambda x: {"a": x["a"], "b": x["b"], "n": x["n"] / 2},
}


@pytest.mark.parametrize("memory", ["store", *REPLAYED])
@pytest.mark.parametrize("case", TREES)
def test_fn_returns_another_tree(case, memory):
    def stream():
        leaves = {"a": draw(), "b": draw(2, 2)}
        return leaves | ({"n": torch.ones(2, dtype=torch.int64)} if case == "an integer stream" else {})

    def fn(x):
        return TREES[case](x)

    with refused(rg.ProgramError, "update 1: x2 += fn(x1): fn returned", "Return one tensor"):
        rg.run([rg.Update("x1", lambda x: x, "x2"), rg.Update("x2", fn, "x1")], {"x1": stream(), "x2": stream()}, memory=memory)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: x, "a pair (log_scale, shift)"),
        (lambda x: (x, x[:1]), "fn returned shape (1, 6)"),
        (lambda x: (x, None), "None"),
    ],
)
def test_fn_returns_no_scale_and_shift(fn, words):
    with refused(rg.ProgramError, "update 0: a *+= <lambda>(b)", words):
        rg.run([rg.Update("a", fn, "b", rule=rg.Affine())], {"a": draw(), "b": draw()})


EDITS = {
    "its source": (lambda x, y, context: (x.add_(1), y)[1], "its source 'x1'"),
    "its source without grad": (lambda x, y, context: (edit(x), y)[1], "its source 'x1'"),
    "a row of its source": (lambda x, y, context: (edit(x[0]), y)[1], "its source 'x1'"),
    "a side input": (lambda x, y, context: (edit(context), y)[1], "the side input 'context'"),
}


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("case", EDITS)
def test_fn_edits(case, memory):
    fault, what = EDITS[case]
    net = Net(memory, fault=fault)
    with refused(rg.ProgramError, Net.NAME, f"fn edited {what} in place", "clone()", net=net):
        net.run()
    assert_next_step_is_right(net)


def test_fn_edits_its_source_which_is_also_its_target():
    """split="copy": both streams are the input at first."""
    net = rg.ReversibleSequence([(nn.Sequential(nn.ReLU(inplace=True), f), g)])
    with refused(rg.ProgramError, "update 0: x1 += Sequential(x2)", "fn edited its source 'x2' in place", net=net):
        net(X.clone())


@pytest.mark.parametrize("name", ["x2", "other"])
@pytest.mark.parametrize("memory", REPLAYED)
def test_fn_edits_a_kept_stream(name, memory):
    """The target, and a stream that the update has nothing to do with."""
    streams = {"x1": draw(), "x2": draw(), "other": draw()}

    def fn(x):
        edit(streams[name])
        return x.sin()

    sound = mlp()
    updates = [rg.Update("x1", sound, "other"), rg.Update("x2", fn, "x1")]
    with refused(rg.ProgramError, "update 1: x2 += fn(x1)", f"fn edited the stream '{name}' in place", "clone()", net=sound):
        rg.run(updates, streams, memory=memory)


@pytest.mark.parametrize("memory", REPLAYED)
def test_fn_edits_what_its_own_gradient_needs(memory):
    """Ordinary autograd refuses it too; the hooks would hide it."""
    net = Net(memory, fault=lambda x, y, context: y.sigmoid().mul_(2))
    loss = net.loss()
    with refused(rg.ReplayError, Net.NAME, "changed in place a tensor of shape (3, 6)", "out-of-place form", net=net):
        loss.backward()
    assert_next_step_is_right(net)


class InPlace(torch.autograd.Function):
    """x², whose backward works in place on what it saved: ordinary autograd does not mind."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].mul_(2)


@pytest.mark.parametrize("index", [1, 3, 5])
def test_backward_edits_a_recovered_stream(index):
    """What is below would be recovered from the edited one."""
    fns = mlps(6)
    fns[index] = InPlace.apply
    updates, streams = rg.wirings.leapfrog(fns), {"a": draw(), "b": draw()}
    with pytest.raises(rg.ReplayError, match=rf"update {index}: b \+= apply\(a\): the backward pass of fn edited in place"):
        loss_of(rg.run(updates, streams)).backward()
