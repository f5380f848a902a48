"""Bad input: the error names the update, the cause and the way out; nothing is left changed, and the next step is right."""

import contextlib

import pytest
import torch
from support import REPLAYED, WIDTH, assert_same, draw, gradients, loss_of, mlp, mlps, rg
from torch import nn


class Branch(nn.Module):
    """A sound branch with dropout, BatchNorm and a table, until it is given a `fault`."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.25)
        self.register_buffer("table", torch.rand(1, WIDTH) + 1)
        self.fault = None
        self.double()

    def forward(self, x, context=None):
        y = self.drop(self.linear(self.norm(x)).tanh() * self.table)
        y = y if context is None else y * context
        return y if self.fault is None else self.fault(x, y, context)


class Net(rg.Reversible):
    """x1 and x2 change in turn; `faulty` is the fn of the fourth of six updates."""

    NAME = "update 3: x2 += Branch(x1)"

    def __init__(self, memory, fault=None):
        super().__init__(rg.wirings.leapfrog([Branch() for _ in range(6)], streams=("x1", "x2"), takes="context"), memory=memory)
        self.faulty = self.fns[3]
        self.faulty.fault = fault
        self.streams, self.context = {"x1": draw(), "x2": draw()}, draw()

    def run(self):
        return self(self.streams, context=self.context)

    def loss(self):
        return loss_of(self.run())


def situation(net):
    """Everything that a failure must leave alone."""
    state = [torch.get_rng_state(), *(t.clone() for t in net.state_dict().values())]
    flags = [m.training for m in net.modules()] + [p.requires_grad for p in net.parameters()]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), rg.replaying(), hooks]
    slots = [id(t) for m in net.modules() for t in (*m._parameters.values(), *m._buffers.values())]
    return state, (flags, modes, slots)


def message_of(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@contextlib.contextmanager
def refused(kind, *words, net=None):
    """The block fails with just that kind of error and all of the words; the net is as it was."""
    tensors, others = situation(net) if net is not None else ([], ())
    with pytest.raises(kind) as info:
        yield info
    assert issubclass(info.type, kind)
    message = message_of(info.value)
    for word in words:
        assert word in message, f"{word!r} is missing in {message!r}"
    if net is not None:
        tensors_now, others_now = situation(net)
        assert all(map(torch.equal, tensors_now, tensors)), "RNG, a parameter or a buffer was changed"
        assert others_now == others


def assert_next_step_is_right(net):
    """With the fault gone, the same net agrees with store."""
    net.faulty.fault, policy = None, net.memory
    net.streams, net.context = {"x1": draw(), "x2": draw()}, draw()
    found = []
    for memory in (policy, "store"):
        net.memory = memory
        found.append(gradients(net.run, [*net.streams.values(), net.context, *net.parameters()]))
    net.memory = policy
    assert_same(*found)


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


# -- fn edits what is not its own --------------------------------------------------------------------------------------


def edit(t):
    with torch.no_grad():
        t.add_(1)


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


# -- changes between the forward pass and backward ---------------------------------------------------------------------


OTHER_VALUE = ("returned something else than in the forward pass", "rg.check.gradients", "memory='store'")
CHANGES = {
    "a weight": (lambda fn: edit(fn.linear.weight), "the parameter 'weight' of shape (6, 6)"),
    "a bias, which no gradient needs": (lambda fn: edit(fn.linear.bias), "the parameter 'bias' of shape (6,)"),
    "a buffer": (lambda fn: edit(fn.table), "the buffer 'table' of shape (1, 6)"),
    "the mode": (lambda fn: fn.eval(), "train() in the forward pass, eval() in backward"),
    "the mode of a part": (lambda fn: fn.drop.eval(), "Dropout (train() in the forward pass, eval() in backward)"),
}
BY_VALUE = {  # seen by what fn returns
    "a part": lambda fn: setattr(fn, "linear", nn.Linear(WIDTH, WIDTH).double()),
    "a hook": lambda fn: fn.register_forward_hook(lambda m, args, out: out * 1.5),
}


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("case", CHANGES)
def test_changed_between_forward_and_backward(case, memory):
    change, what = CHANGES[case]
    net = Net(memory)
    loss = net.loss()
    change(net.faulty)
    with refused(rg.ReplayError, Net.NAME, what, "between the forward pass and backward", "Call backward first", net=net):
        loss.backward()
    net.train()
    assert_next_step_is_right(net)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("case", BY_VALUE)
def test_changed_between_forward_and_backward_and_seen_by_value(case, memory):
    net = Net(memory)
    loss = net.loss()
    BY_VALUE[case](net.faulty)
    with refused(rg.ReplayError, Net.NAME, *OTHER_VALUE, net=net):
        loss.backward()
    net.faulty._forward_hooks.clear()
    assert_next_step_is_right(net)


@pytest.mark.parametrize("memory", REPLAYED)
def test_switched_from_eval_to_train(memory):
    net = Net(memory).eval()
    loss = net.loss()
    net.train()
    with refused(rg.ReplayError, "eval() in the forward pass, train() in backward", net=net):
        loss.backward()


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize(
    ("fn_of", "words"),
    [
        (lambda w: lambda x: (x * w).tanh(), ("of shape (6,)", "between the forward pass and backward")),
        (lambda w: lambda x: (x + w).tanh(), OTHER_VALUE),
    ],
    ids=["saved", "not saved"],
)
def test_a_parameter_that_a_plain_callable_holds(fn_of, words, memory):
    """fn may be any callable whose parameters the user registers."""
    weight = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
    updates = rg.wirings.leapfrog([mlp(), fn_of(weight), mlp(), mlp()])
    loss = loss_of(rg.run(updates, {"a": draw(), "b": draw()}, memory=memory))
    edit(weight)
    with refused(rg.ReplayError, "update 1: b += <lambda>(a)", *words):
        loss.backward()


class Writer(nn.Module):
    """Writes to buffers in every way: large and small, and (BatchNorm) without a trace in the version; or by a new tensor."""

    def __init__(self, fails=lambda: False, replaces=True):
        super().__init__()
        self.linear, self.norm, self.fails, self.replaces = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), fails, replaces
        self.register_buffer("small", torch.zeros(2, 2))
        self.register_buffer("large", torch.zeros(1 << 7, 1 << 8))
        self.register_buffer("replaced", torch.zeros(()))
        self.double()

    def forward(self, x):
        y = self.norm(self.linear(x)).tanh() + self.small.sum()
        self.small.add_(1)
        self.large[0].add_(1)
        if self.replaces:  # then this update keeps its activations
            self.replaced = self.replaced + 1
        if self.fails():
            raise ValueError("planted")
        return y


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_weight_of_a_fn_that_writes_to_buffers_changed(steps, replaces, memory):
    """However the engine gets at what such a fn saved, in its first step and later."""
    net = rg.Reversible(rg.wirings.leapfrog([mlp(), Writer(replaces=replaces), mlp()]), memory=memory)
    for _ in range(steps):
        loss_of(net({"a": draw(), "b": draw()})).backward()
    loss = loss_of(net({"a": draw(), "b": draw()}))
    edit(net.fns[1].linear.weight)
    with refused(rg.ReplayError, "update 1: b += Writer(a)", "of shape (6, 6)", "between the forward pass and backward", net=net):
        loss.backward()


@pytest.mark.parametrize("memory", REPLAYED)
def test_side_input_changed(memory):
    net = Net(memory)
    loss = net.loss()
    edit(net.context)
    with refused(rg.ReplayError, "the side input 'context'", "in place", "copy", net=net):
        loss.backward()
    assert_next_step_is_right(net)


@pytest.mark.parametrize("name", ["x1", "x2"])
@pytest.mark.parametrize("part", [slice(None), 0], ids=["whole", "row"])
def test_output_edited(name, part):
    """Under reverse every activation is recovered from the output. (Checkpoint keeps other tensors and is not touched.)"""
    net = Net("reverse")
    out = net.run()
    loss = loss_of(out)
    edit(out[name][part])
    with refused(
        rg.ReplayError, f"the stream '{name}'", "edited in place after the forward pass", "`y = y + 1`", "store", net=net
    ):
        loss.backward()
    assert_next_step_is_right(net)


def test_output_of_a_sequence_edited():
    net = rg.ReversibleSequence([mlps(2) for _ in range(3)], merge=None)
    y1, _ = net(draw())
    loss = (y1.mul_(2) ** 2).sum()
    with refused(rg.ReplayError, "the stream 'x1'", "edited in place", "memory='store'", net=net):
        loss.backward()


# -- another path in the second run ------------------------------------------------------------------------------------


def other(*, first, second):
    return lambda x, y, context: (second if rg.replaying() else first)(x, y)


PATHS = {
    "saves less": (other(first=lambda x, y: y.tanh(), second=lambda x, y: y), " before"),
    "saves another shape": (
        other(first=lambda x, y: y * y.sin(), second=lambda x, y: y * y.sum().sin()),
        "it saved a tensor of shape ()",
    ),
    "saves another dtype": (
        other(first=lambda x, y: y.tanh(), second=lambda x, y: y.float().tanh()),
        "it saved a tensor of shape (3, 6), torch.float32, on cpu",
    ),
    "returns another shape": (other(first=lambda x, y: y, second=lambda x, y: y[:2]), "shape (2, 6)"),
}


@pytest.mark.parametrize(
    ("case", "memory"),  # checkpoint undoes nothing, so what fn returns the second time is of no consequence
    [(case, memory) for case in PATHS for memory in REPLAYED if (case, memory) != ("returns another shape", "checkpoint")],
)
def test_another_path_in_the_second_run(case, memory):
    fault, what = PATHS[case]
    net = Net(memory, fault=fault)
    loss = net.loss()
    way_out = ("Usual causes", "rg.replaying()", "memory='store'")
    with refused(rg.ReplayError, Net.NAME, "fn did not do in backward what it did in the forward pass", what, *way_out, net=net):
        loss.backward()
    assert_next_step_is_right(net)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("first", [0, 1])
def test_draws_more_or_other_numbers_in_the_second_run(first, memory):
    """Here what is saved is the same in number and kind."""

    def fn(x):
        for _ in range(first + rg.replaying()):
            torch.rand(3)
        return torch.rand_like(x) * x if first else x.sin()

    updates = rg.wirings.leapfrog([mlp(), fn, mlp(), mlp()])
    loss = loss_of(rg.run(updates, {"a": draw(), "b": draw()}, memory=memory))
    state = torch.get_rng_state()
    with refused(rg.ReplayError, "update 1: b += fn(a)", "random numbers", "Usual causes"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


# -- exceptions inside fn ----------------------------------------------------------------------------------------------


class Interrupt(KeyboardInterrupt):
    pass


def raising(kind, second):
    def fault(x, y, context):
        if rg.replaying() is second:
            raise kind("planted")
        return y

    return fault


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("second", [False, True], ids=["first run", "second run"])
@pytest.mark.parametrize("kind", [ValueError, Interrupt, torch.OutOfMemoryError])
def test_exception_inside_fn(kind, second, memory):
    """The error itself, with the update in a note; in a recomputation, one of ours. Dropout has drawn and BatchNorm has moved."""
    net = Net(memory, fault=raising(kind, second))
    name = [] if kind is Interrupt else [Net.NAME]
    if second:
        loss = net.loss()
        ours = rg.ReplayError if kind is ValueError else kind
        with refused(ours, "planted", *name, net=net) as info:
            loss.backward()
        if kind is ValueError:
            assert "In the forward pass it did not" in str(info.value)
            assert isinstance(info.value.__cause__, ValueError)
    else:
        with refused(kind, "planted", *name, net=net):
            net.run()
    assert all(p.grad is None for p in net.faulty.parameters())
    assert_next_step_is_right(net)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("second", [False, True], ids=["first run", "second run"])
def test_buffers_after_an_exception(second, steps, memory):
    """Those of the update that failed and of the ones before it, in the first step and later."""
    failing = [False]
    replaces = not second  # else nothing is recomputed
    fns = [Writer(fails, replaces) for fails in (lambda: False, lambda: failing[0] and rg.replaying() is second, lambda: False)]
    net, streams = rg.Reversible(rg.wirings.leapfrog(fns), memory=memory), {"a": draw(), "b": draw()}
    for _ in range(steps):
        loss_of(net(streams)).backward()
    failing[0] = True
    if not second:
        with refused(ValueError, "planted", "update 1: b += Writer(a)", net=net):
            net(streams)
    else:
        loss = loss_of(net(streams))
        with refused(rg.ReplayError, "planted", "update 1: b += Writer(a)", net=net):
            loss.backward()
    failing[0] = False
    for memory in (net.memory, "store"):
        net.memory = memory
        loss_of(net(streams)).backward()
    count = 2 + steps + second
    assert [int(t) for fn in fns for t in (fn.small[0, 0], fn.large[0, 0], fn.replaced)] == [count, count, count * replaces] * 3


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("second", [False, True], ids=["first run", "second run"])
def test_exception_under_autocast(second, memory):
    """Forward inside autocast and no attention backend but math, backward outside of both."""
    net = Net(memory, fault=raising(ValueError, second)).float()
    net.streams = {name: t.detach().float().requires_grad_() for name, t in net.streams.items()}
    net.context = None
    seen = []
    net.fns[4].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    backends = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()]
    with torch.autocast("cpu", torch.bfloat16), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        if second:
            loss = net.loss()
        else:
            with refused(ValueError, Net.NAME, net=net):
                net.run()
    if second:
        with refused(rg.ReplayError, Net.NAME, net=net):
            loss.backward()
        assert seen == [True, True]
    assert [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()] == backends


@pytest.mark.parametrize("second", [False, True], ids=["first run", "second run"])
def test_exception_in_a_program_in_a_program(second):
    """Both updates are named."""
    inner = Net("reverse", fault=raising(ValueError, second))

    def outer(x):
        return inner({"x1": x, "x2": x}, context=None)["x1"]

    updates = rg.wirings.leapfrog([mlp(), outer, mlp()])
    words = ["planted", Net.NAME, "update 1: b += outer(a)"]
    if second:
        loss = loss_of(rg.run(updates, {"a": draw(), "b": draw()}))
        with refused(rg.ReplayError, *words[:2], net=inner):
            loss.backward()
    else:
        streams = {"a": draw(), "b": draw()}
        with refused(ValueError, *words, net=inner):
            rg.run(updates, streams)
    assert_next_step_is_right(inner)


def test_a_failed_backward_can_be_repeated():
    """The graph of a failed backward is still good if it was to be kept."""
    net = Net("reverse")
    wanted = [*net.streams.values(), net.context, *net.parameters()]
    true = gradients(net.run, wanted)
    torch.manual_seed(0)
    out = net.run()
    loss = loss_of(out)
    net.faulty.fault = raising(ValueError, True)
    with refused(rg.ReplayError, Net.NAME, net=net):
        loss.backward(retain_graph=True)
    net.faulty.fault = None
    found = torch.autograd.grad(loss, wanted)
    assert_same([*(t.detach() for t in out.values()), *found], true)


def test_freed_graph():
    """A second backward without retain_graph is refused, as ordinary autograd does."""
    net = Net("reverse")
    loss = net.loss()
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()
    assert_next_step_is_right(net)


def test_what_reads_a_sum_has_its_own_name():
    """In lists, and in errors."""
    updates = rg.wirings.leapfrog([nn.Linear(2, 2), torch.sin], streams=("a", "b", "c"))
    assert list(map(repr, updates)) == ["a += Linear(b, c)", "b += sin(c, a)"]
