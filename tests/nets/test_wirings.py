"""Every wiring, stream structure and way of routing against the same equations written by hand."""

import pytest
import torch
from support import POLICIES, WIDTH, Attend, assert_same, draw, gradients, mlp, mlps, parameters, rg
from torch import nn
from torch.utils._pytree import tree_leaves
from trees import TREES, Tree, plus

pytestmark = pytest.mark.parametrize("memory", ["store", *POLICIES])


class Mix(nn.Module):
    """A branch of any number of sources and optional side inputs; the affine ones return a pair."""

    def __init__(self, *widths, to=WIDTH, affine=False):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(w, to, dtype=torch.float64) / w**0.5 for w in widths)
        self.out = nn.Linear(to, 2 * to if affine else to).double()
        self.affine = affine

    def forward(self, *sources, context=None, gain=None):
        hidden = sum((x @ w for x, w in zip(sources, self.weights, strict=True)), start=torch.zeros((), dtype=torch.float64))
        hidden = hidden.tanh() if context is None else (hidden + context.sin()).tanh()
        out = self.out(hidden if gain is None else hidden * gain)
        return (0.5 * out.chunk(2, -1)[0].tanh(), out.chunk(2, -1)[1]) if self.affine else out


def compare(run, by_hand, wanted):
    """Outputs and gradients of inputs, side inputs and parameters."""
    assert_same(gradients(run, wanted), gradients(by_hand, wanted))


# -- wirings -----------------------------------------------------------------------------------------------------------

M = 4  # the width of m1 and m2: streams need not be alike


def _pair(s, f, g):
    s["x1"] = s["x1"] + f(s["x2"])
    s["x2"] = s["x2"] + g(s["x1"])


def _dual(s, f, g, j, k):
    s["x1"] = s["x1"] + f(s["x2"])
    s["x2"] = s["x2"] + g(s["x1"])
    s["m1"] = s["m1"] + j(s["m2"])
    s["m2"] = s["m2"] + k(s["m1"])


def _cross(s, f, g, j, k):
    s["x1"] = s["x1"] + f(s["x2"], s["m2"])
    s["x2"] = s["x2"] + k(s["x1"])
    s["m1"] = s["m1"] + j(s["m2"], s["x2"])
    s["m2"] = s["m2"] + g(s["m1"])


def _leapfrog(s, f0, f1, f2):
    s["a"] = s["a"] + f0(s["b"])
    s["b"] = s["b"] + f1(s["a"])
    s["a"] = s["a"] + f2(s["b"])


def _three(s, f0, f1, f2, f3):
    s["a"] = s["a"] + f0(s["b"] + s["c"])
    s["b"] = s["b"] + f1(s["c"] + s["a"])
    s["c"] = s["c"] + f2(s["a"] + s["b"])
    s["a"] = s["a"] + f3(s["b"] + s["c"])


def _groups(s, f0, f1, f2, f3):
    s["s0"] = s["s0"] + f0(s["s1"] + s["s2"] + s["s3"])
    s["s1"] = s["s1"] + f1(s["s0"])
    s["s2"] = s["s2"] + f2(s["s1"])
    s["s3"] = s["s3"] + f3(s["s2"])


def _affine(s, f, g):
    scale, shift = f(s["x1"])
    s["x2"] = s["x2"] * scale.exp() + shift
    s["x1"] = s["x1"] + g(s["x2"])


def _scaled(s, f, g):
    s["x1"] = s["x1"] * (1.5 + f(s["x2"]).tanh())
    s["x2"] = s["x2"] * (1.5 + g(s["x1"]).tanh())


class Scale(rg.Rule):
    """A rule of the user's own, which saves tensors."""

    def apply(self, target, out):
        return target * (1.5 + out.tanh())

    def undo(self, target, out):
        return target / (1.5 + out.tanh())


def _updates_affine(f, g):
    return [rg.Update("x2", f, "x1", rule=rg.Affine()), rg.Update("x1", g, "x2")]


def _updates_scaled(f, g):
    return [rg.Update("x1", f, "x2", rule=Scale()), rg.Update("x2", g, "x1", rule=Scale())]


X, A = ("x1", "x2"), ("a", "b")
WIRINGS = {  # streams with their widths, functions, wiring, the equations by hand
    "pair": (dict.fromkeys(X, WIDTH), lambda: mlps(2), rg.wirings.pair, _pair),
    "dual": ({"x1": 6, "x2": 6, "m1": M, "m2": M}, lambda: [*mlps(2), mlp(M), mlp(M)], rg.wirings.dual, _dual),
    "cross": (
        {"m2": M, "x1": 6, "m1": M, "x2": 6},  # in another order than the updates name them
        lambda: [Mix(6, M), mlp(M), Mix(M, 6, to=M), mlp(6)],
        rg.wirings.cross,
        _cross,
    ),
    "leapfrog": (dict.fromkeys(A, WIDTH), lambda: mlps(3), lambda *fns: rg.wirings.leapfrog(fns), _leapfrog),
    "three in turn": (
        dict.fromkeys("abc", WIDTH),
        lambda: mlps(4),
        lambda *fns: rg.wirings.leapfrog(fns, streams=("a", "b", "c")),
        _three,
    ),
    "groups": ({f"s{i}": WIDTH for i in range(4)}, lambda: mlps(4), lambda *fns: rg.wirings.groups(fns), _groups),
    "affine": ({"x1": M, "x2": WIDTH}, lambda: [Mix(M, affine=True), Mix(WIDTH, to=M)], _updates_affine, _affine),
    "own rule": (dict.fromkeys(X, WIDTH), lambda: mlps(2), _updates_scaled, _scaled),
}


@pytest.mark.parametrize("name", WIRINGS)
def test_wiring(name, memory):
    """Three blocks of every wiring."""
    widths, make, wiring, step = WIRINGS[name]
    blocks = [make() for _ in range(3)]
    streams = {stream: draw(3, width) for stream, width in widths.items()}
    updates = [update for fns in blocks for update in wiring(*fns)]

    def by_hand():
        s = dict(streams)
        for fns in blocks:
            step(s, *fns)
        return s

    wanted = [*streams.values(), *parameters(fn for fns in blocks for fn in fns)]
    compare(lambda: rg.run(updates, streams, memory=memory), by_hand, wanted)
    compare(lambda: rg.Reversible(updates, memory=memory)(streams), by_hand, wanted)


def test_renamed_streams(memory):
    """`streams=` of a wiring: the same equations under other names, side by side in one program."""
    fns = mlps(4)
    s = {name: draw() for name in "pqrs"}
    updates = rg.wirings.pair(*fns[:2], streams=("p", "q")) + rg.wirings.leapfrog(fns[2:], streams=("q", "r"))

    def by_hand():
        p = s["p"] + fns[0](s["q"])
        q = s["q"] + fns[1](p)
        q2 = q + fns[2](s["r"])
        return {"p": p, "q": q2, "r": s["r"] + fns[3](q2), "s": s["s"]}

    compare(lambda: rg.run(updates, s, memory=memory), by_hand, [*s.values(), *parameters(fns)])


# -- streams of any structure ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
def test_trees(name, memory):
    """Streams are pytrees whose leaves differ in shape, whose keys differ in order, and of which some do not require grad."""
    a, b = TREES[name]()
    fns = [Tree(a), Tree(b), Tree(a), Tree(b)]

    def by_hand():
        s, t = a, b
        for f, g in zip(fns[::2], fns[1::2], strict=True):
            s = plus(s, f(t))
            t = plus(t, g(s))
        return {"a": s, "b": t}

    wanted = [*(t for t in tree_leaves((a, b)) if t.requires_grad), *parameters(fns)]
    compare(lambda: rg.run(rg.wirings.leapfrog(fns), {"a": a, "b": b}, memory=memory), by_hand, wanted)


def test_affine_trees(memory):
    """log_scale and shift come as dicts, in another key order than the stream's."""
    a, b = {"q": draw(2, 3), "k": draw(4)}, draw(5)
    scale, shift, back = Tree(a), Tree(a), Tree(b)

    def both(source):
        return {k: 0.3 * t.tanh() for k, t in scale(source).items()}, shift(source)

    def by_hand():
        s, t = a, b
        for _ in range(2):
            by, to = both(t)
            s = {key: s[key] * by[key].exp() + to[key] for key in s}
            t = t + back(s)
        return {"a": s, "b": t}

    updates = [rg.Update("a", both, "b", rule=rg.Affine()), rg.Update("b", back, "a")] * 2
    wanted = [*a.values(), b, *parameters([scale, shift, back])]
    compare(lambda: rg.run(updates, {"a": a, "b": b}, memory=memory), by_hand, wanted)


def test_groups_of_trees(memory):
    """The sum of the other streams is by key; Tree counts leaves, so it is given the keys in one order."""
    s = [{"q": draw(2), "k": draw(3)}, {"k": draw(3), "q": draw(2)}, {"q": draw(2), "k": draw(3)}]
    fns = [Tree(s[0]) for _ in s]

    ordered = [lambda x, fn=fn: fn({"q": x["q"], "k": x["k"]}) for fn in fns]

    def by_hand():
        s0 = plus(s[0], ordered[0](plus(s[1], s[2])))
        s1 = plus(s[1], ordered[1](s0))
        return {"s0": s0, "s1": s1, "s2": plus(s[2], ordered[2](s1))}

    streams = {f"s{i}": value for i, value in enumerate(s)}
    wanted = [*tree_leaves(s), *parameters(fns)]
    compare(lambda: rg.run(rg.wirings.groups(ordered), streams, memory=memory), by_hand, wanted)


# -- layouts and dtypes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "channels last"])
def test_layouts(layout, memory):
    """Streams that are not contiguous."""
    make = {
        "transposed": lambda: draw(WIDTH, 3).t(),
        "strided": lambda: draw(3, 2 * WIDTH)[:, ::2],
        "expanded": lambda: draw(1, WIDTH).expand(3, WIDTH),
        "channels last": lambda: draw(2, 3, 4, WIDTH).to(memory_format=torch.channels_last),
    }[layout]
    a, b = make(), make()
    fns = mlps(4)

    def by_hand():
        s, t = a, b
        for f, g in zip(fns[::2], fns[1::2], strict=True):
            s = s + f(t)
            t = t + g(s)
        return {"a": s, "b": t}

    compare(lambda: rg.run(rg.wirings.leapfrog(fns), {"a": a, "b": b}, memory=memory), by_hand, [a, b, *parameters(fns)])


def test_other_dtype(memory):
    """fn in float32 on float64 streams: the sum is in the dtype of the stream."""
    a, b = draw(), draw()
    fns = [mlp().float() for _ in range(4)]
    low = [lambda x, fn=fn: fn(x.float()) for fn in fns]

    def by_hand():
        s, t = a, b
        for f, g in zip(low[::2], low[1::2], strict=True):
            s = s + f(t)
            t = t + g(s)
        return {"a": s, "b": t}

    wanted = [a, b, *parameters(fns)]
    run = rg.run(rg.wirings.leapfrog(low), {"a": a, "b": b}, memory=memory)
    assert {t.dtype for t in run.values()} == {torch.float64}
    # float32 roundings inside fn may flip on the last bit of a recovered stream
    found = gradients(lambda: rg.run(rg.wirings.leapfrog(low), {"a": a, "b": b}, memory=memory), wanted)
    assert_same(found, gradients(by_hand, wanted), tolerance=1e-6)


# -- side inputs -------------------------------------------------------------------------------------------------------

TAKES = {  # takes of f and of g; what f and g get by hand
    "names": ([["context"], ("gain",)], [{"context": "context"}, {"gain": "gain"}]),
    "a string": (["context", "gain"], [{"context": "context"}, {"gain": "gain"}]),
    "nothing": ([(), ["gain", "context"]], [{}, {"context": "context", "gain": "gain"}]),
    "renamed": ([{"context": "gain"}, {"gain": "context"}], [{"context": "gain"}, {"gain": "context"}]),
    "one for both": ([{"context": "gain", "gain": "gain"}, ()], [{"context": "gain", "gain": "gain"}, {}]),
    "all": ([rg.ALL, rg.ALL], [{"context": "context", "gain": "gain"}] * 2),
}


@pytest.mark.parametrize("name", TAKES)
def test_takes(name, memory):
    """Each fn gets the side inputs that `takes` names, under the keyword it says; gradients flow to them."""
    takes, kwargs = TAKES[name]
    fns = [Mix(WIDTH) for _ in range(4)]
    side = {"context": draw(3, 1), "gain": draw(1, WIDTH)}
    a, b = draw(), draw()
    updates = [u for i in (0, 2) for u in rg.wirings.pair(*fns[i : i + 2], takes=takes)]

    def by_hand():
        s, t = a, b
        to_f, to_g = ({keyword: side[its] for keyword, its in each.items()} for each in kwargs)
        for f, g in zip(fns[::2], fns[1::2], strict=True):
            s = s + f(t, **to_f)
            t = t + g(s, **to_g)
        return {"x1": s, "x2": t}

    wanted = [a, b, *side.values(), *parameters(fns)]
    compare(lambda: rg.run(updates, {"x1": a, "x2": b}, side, memory=memory), by_hand, wanted)


def test_side_inputs_of_any_kind(memory):
    """Trees of tensors with None, bools and strings among them; a view, one without grad, one that is a stream as well."""
    fn = mlp()
    base, plain, a, b = draw(6, WIDTH), draw(3, WIDTH, grad=False), draw(), draw()

    def f(x, tree, flag, nothing):
        assert flag is True
        assert nothing is None
        assert tree["note"] == "on"
        first, (second, third) = tree["parts"]
        return fn(x * first.sin() + second) * third.cos()

    side = {"nothing": None, "tree": {"parts": [base[::2], (plain, b)], "note": "on"}, "flag": True}

    def by_hand():
        s, t = a, b
        for _ in range(2):
            s = s + f(t, **side)
            t = t + f(s, **side)
        return {"a": s, "b": t}

    updates = rg.wirings.leapfrog([f] * 4, takes=rg.ALL)
    compare(lambda: rg.run(updates, {"a": a, "b": b}, side, memory=memory), by_hand, [a, b, base, *fn.parameters()])


# -- ReversibleSequence ------------------------------------------------------------------------------------------------


class Channels(nn.Module):
    """A mlp over dim 1."""

    def __init__(self, width):
        super().__init__()
        self.inner = mlp(width)

    def forward(self, x):
        return self.inner(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("merge", ["mean", "sum", "cat", None])
@pytest.mark.parametrize(("split", "dim"), [("copy", -1), ("copy", 1), ("chunk", -1), ("chunk", 1)])
def test_sequence(split, dim, merge, memory):
    """Split and merge, also channels first."""
    size = 2 * M if split == "chunk" else M
    x = draw(2, 3, size) if dim == -1 else draw(2, size, 3, 2)
    blocks = [[(mlp if dim == -1 else Channels)(M) for _ in "fg"] for _ in range(3)]
    net = rg.ReversibleSequence(blocks, split=split, dim=dim, merge=merge, memory=memory)

    def by_hand():
        x1, x2 = (x, x) if split == "copy" else x.chunk(2, dim)
        for f, g in blocks:
            x1 = x1 + f(x2)
            x2 = x2 + g(x1)
        if merge in ("mean", "sum"):
            return (x1 + x2) / (2 if merge == "mean" else 1)
        return torch.cat((x1, x2), dim) if merge == "cat" else (x1, x2)

    compare(lambda: net(x), by_hand, [x, *net.parameters()])


@pytest.mark.parametrize(
    ("streams", "split", "merge"),
    [(3, "copy", "mean"), (3, "copy", None), (3, "chunk", "cat"), (4, "copy", "sum"), (5, "chunk", "mean")],
)
def test_sequence_of_more_streams(streams, split, merge, memory):
    """In turn, each function of the sum of the others; the copies that a function reads add up to the input."""
    x, context = draw(2, 3, WIDTH * (streams if split == "chunk" else 1)), draw(3, WIDTH)
    blocks = [(Attend(), mlp()) for _ in range(4)]
    net = rg.ReversibleSequence(blocks, streams=streams, split=split, merge=merge, memory=memory)

    def by_hand():
        s = [x / (streams - 1)] * streams if split == "copy" else list(x.chunk(streams, -1))
        for number, (f, g) in enumerate(blocks):
            for at, fn in ((2 * number % streams, f), ((2 * number + 1) % streams, g)):
                read = sum(t for i, t in enumerate(s) if i != at)
                s[at] = s[at] + (fn(read, context) if fn is f else fn(read))
        if merge in ("mean", "sum"):
            return sum(s) / (streams if merge == "mean" else 1)
        return torch.cat(s, -1) if merge == "cat" else tuple(s)

    compare(lambda: net(x, context=context), by_hand, [x, context, *net.parameters()])


def test_sequence_of_trees(memory):
    """Split and merge work leaf by leaf."""
    x = {"q": draw(2, 4), "k": draw(3, 2)}
    half = {"q": draw(2, 2), "k": draw(3, 1)}
    blocks = [(Tree(half), Tree(half)) for _ in range(2)]
    net = rg.ReversibleSequence(blocks, split="chunk", merge="cat", memory=memory)

    def by_hand():
        x1, x2 = {k: t.chunk(2, -1)[0] for k, t in x.items()}, {k: t.chunk(2, -1)[1] for k, t in x.items()}
        for f, g in blocks:
            x1 = plus(x1, f(x2))
            x2 = plus(x2, g(x1))
        return {k: torch.cat((x1[k], x2[k]), -1) for k in x}

    compare(lambda: net(x), by_hand, [*x.values(), *net.parameters()])


PER_DEPTH = {"context": [(True, False), (False, True), (False, False)], "gain": [(True, True), (False, False), (True, False)]}
ROUTES = {
    "default": (None, [(True, False)] * 3, [(True, False)] * 3),
    "to g": ((False, True), [(False, True)] * 3, [(False, True)] * 3),
    "to both": ((True, True), [(True, True)] * 3, [(True, True)] * 3),
    "per depth": (PER_DEPTH, PER_DEPTH["context"], PER_DEPTH["gain"]),
}


@pytest.mark.parametrize("name", ROUTES)
def test_routes(name, memory):
    """A pair routes all side inputs alike, a dict each by depth; a call may leave out what is routed."""
    route, to_context, to_gain = ROUTES[name]
    blocks = [[Mix(WIDTH), Mix(WIDTH)] for _ in range(3)]
    net = rg.ReversibleSequence(blocks, memory=memory, **({} if route is None else {"route": route}))
    x, context, gain = draw(), draw(3, 1), draw(1, WIDTH)

    def by_hand(**side):
        x1 = x2 = x
        for (f, g), contexts, gains in zip(blocks, to_context, to_gain, strict=True):
            to_f, to_g = (
                {name: t for name, t in side.items() if {"context": contexts, "gain": gains}[name][which]} for which in (0, 1)
            )
            x1 = x1 + f(x2, **to_f)
            x2 = x2 + g(x1, **to_g)
        return (x1 + x2) / 2

    wanted = [x, context, gain, *net.parameters()]
    for side in ({"context": context, "gain": gain}, {"gain": gain}, {"gain": gain, "context": None}, {}):
        compare(lambda: net(x, **side), lambda: by_hand(**side), wanted)
