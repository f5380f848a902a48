"""Recomputations: one for each update, in reverse; those that do something else, fail, edit, or ask for what they saved."""

import pytest
import torch
from support import WIDTH, Attend, agree, assert_same, draw, gradients, loss_of, mlps, parameters, rg
from torch import nn

LOG = []  # of runs, around the fns: one that held a list would have no outline


class Fn(nn.Module):
    """Writes down its runs, and does something else in some of them: `unusual` is a name, which tells nothing."""

    def __init__(self, name, unusual="nothing"):
        super().__init__()
        self.inner, self.name, self.unusual = nn.Linear(WIDTH, WIDTH).double(), name, unusual

    def forward(self, x, shift=None):
        LOG.append(f"{self.name} again" if rg.replaying() else self.name)
        unusual = self.unusual if rg.replaying() else "nothing"
        source, x = x, x[:1].square().expand(x.shape) if unusual == "saves others" else x.square()
        y = self.inner(UNUSUAL.get(unusual, UNUSUAL["nothing"])(x)).sigmoid()
        if unusual == "edits":
            y.detach().mul_(2)
        if unusual == "asks":
            ask(y, source)
        return y[:1] if unusual == "returns others" else y if shift is None else y + shift


def inner_gradient(x):
    with torch.enable_grad():
        inside = x.detach().requires_grad_()
        return x + 0 * torch.autograd.grad(inside.pow(3).sum(), inside)[0]


def failing(_):
    raise ValueError("not again")


def failing_once(x):
    return x if LOG.count("f1 again") > 1 else failing(x)


def drawing_and_failing(x):
    return failing(x + torch.rand(()))


def ask(y, x):
    """For what was just saved; and go on without it."""
    try:
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        LOG.append("gradient")
    except rg.ReplayError:
        LOG.append("refused")


UNUSUAL = {
    "nothing": lambda x: x,
    "draws": lambda x: x + 0 * torch.rand(()),
    "saves more": lambda x: x.exp().log(),
    "fails": failing,
    "fails once": failing_once,
    "draws and fails": drawing_and_failing,
    "gradient": inner_gradient,
}


@pytest.fixture(autouse=True)
def fresh():
    LOG.clear()


def pairs(fns, **takes):
    return [rg.Update("ab"[i % 2], fn, "ba"[i % 2], **takes) for i, fn in enumerate(fns)]


def program_agrees(updates, streams, side=None, memory="reverse", **how):
    """Gradients of parameters, streams and side inputs, against store."""
    side = side or {}
    given = [t for t in (*streams.values(), *side.values()) if t.requires_grad]
    wanted = [*parameters(u.fn for u in updates), *given]

    agree(lambda memory: gradients(lambda: rg.run(updates, streams, side, memory=memory, **how), wanted), memory)


STREAMS = {
    "tensors": lambda: {"a": draw(), "b": draw()},
    "edited before": lambda: {"a": draw(grad=False).add_(1).requires_grad_(), "b": draw(grad=False).add_(1).requires_grad_()},
    "without grad": lambda: {"a": draw(grad=False), "b": draw()},
    "strided": lambda: {"a": draw(2, 3, WIDTH), "b": draw(2, WIDTH, 3).transpose(1, 2).detach().requires_grad_()},
}


@pytest.mark.parametrize("kind", STREAMS)
def test_one_recomputation_for_each_update(kind):
    fns = [Fn(f"f{i}") for i in range(6)]
    streams = STREAMS[kind]()
    loss_of(rg.run(pairs(fns), streams)).backward()
    names = [f"f{i}" for i in range(6)]
    assert [*names, *(f"{name} again" for name in reversed(names))] == LOG
    program_agrees(pairs(fns), streams)


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
@pytest.mark.parametrize("memory", ["reverse", rg.Anchor(4)], ids=str)
def test_under_policies_and_arithmetics(arithmetic, memory):
    program_agrees(pairs(mlps(7)), STREAMS["tensors"](), memory=memory, arithmetic=arithmetic)


def test_with_side_inputs():
    side = {"context": draw(4, WIDTH), "mask": torch.rand(3, 4) > 0.3}
    program_agrees(pairs([Attend() for _ in range(6)], takes=rg.ALL), STREAMS["tensors"](), side)


def test_over_trees():
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x):
            return {"q": self.inner(x["p"]).tanh(), "p": self.inner(x["q"]).sin()}

    fns = [Leaves() for _ in range(5)]
    first = {name: {"p": draw(), "q": draw()} for name in "ab"}
    wanted = [*parameters(fns), *(t for tree in first.values() for t in tree.values())]
    found = [gradients(lambda p=policy: rg.run(pairs(fns), first, memory=p), wanted) for policy in ("reverse", "store")]
    assert_same(*found)


def test_fns_that_draw():
    program_agrees(pairs(mlps(6, dropout=0.5)), STREAMS["tensors"]())


TOLD = {
    "draws": "it drew other random numbers",
    "saves more": "it saved [0-9]+ tensors for its gradient",
    "saves others": r"it saved a tensor of shape \(1, 6\)",
    "returns others": r"fn returned shape \(1, 6\)",
    "edits": "a tensor of shape .* that fn holds on to was changed",
}


@pytest.mark.parametrize("unusual", TOLD)
def test_other_than_the_first_time(unusual):
    """An error, and nothing is left behind."""
    fns = [Fn("f0"), Fn("f1", unusual), Fn("f2"), Fn("f3")]
    loss = loss_of(rg.run(pairs(fns), STREAMS["tensors"]()))
    state = torch.get_rng_state()
    with pytest.raises(rg.ReplayError, match=rf"(?s)update 1: b \+= Fn\(a\).*({TOLD[unusual]})"):
        loss.backward()
    assert LOG.count("f1 again") == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert torch.is_autocast_cache_enabled()
    assert not rg.replaying()


@pytest.mark.parametrize("unusual", ["fails", "fails once", "draws and fails"])
def test_failing_the_second_time(unusual):
    """What fn raises is explained; it is not run once more."""
    fns = [Fn("f0"), Fn("f1", unusual), Fn("f2"), Fn("f3")]
    loss = loss_of(rg.run(pairs(fns), STREAMS["tensors"]()))
    state = torch.get_rng_state()
    with pytest.raises(rg.ReplayError, match=r"update 1: b \+= Fn\(a\): .* it raised ValueError: not again") as caught:
        loss.backward()
    assert isinstance(caught.value.__cause__, ValueError)
    assert LOG.count("f1 again") == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert not rg.replaying()


def test_asking_for_what_was_just_saved():
    """In the recomputation alone."""
    program_agrees(pairs([Fn("f0"), Fn("f1", "asks"), Fn("f2"), Fn("f3")]), STREAMS["tensors"]())
    assert [word for word in LOG if word in ("refused", "gradient")] == ["gradient"]


def test_gradients_inside_of_fn_the_second_time_alone():
    """What it saves for them nobody asks for afterwards, and it returns what it returned before."""
    program_agrees(pairs([Fn("f0"), Fn("f1", "gradient"), Fn("f2"), Fn("f3")]), STREAMS["tensors"]())


class Editing(nn.Module):
    """Edits what it is given, when it is run again."""

    def __init__(self, what):
        super().__init__()
        self.inner, self.what = nn.Linear(WIDTH, WIDTH).double(), what

    def forward(self, x, side=None):
        if rg.replaying():
            with torch.no_grad():
                (x if self.what == "source" else side).add_(1)
        return self.inner(x).sin()


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("what", "told"), [("source", "its source 'a'"), ("side", "the side input 'side'")])
def test_edits_the_second_time_alone(what, told, dtype, arithmetic):
    """Also where what fn is given is a copy of the stream, as exact arithmetic makes one in float32."""
    fns = [fn.to(dtype) for fn in (*mlps(1), Editing(what), *mlps(2))]
    updates = pairs(fns)
    updates[1] = rg.Update("b", fns[1], "a", takes="side")
    streams = {name: t.detach().to(dtype).requires_grad_() for name, t in STREAMS["tensors"]().items()}
    loss = loss_of(rg.run(updates, streams, {"side": draw(grad=False).to(dtype)}, arithmetic=arithmetic))
    with pytest.raises(rg.ProgramError, match=rf"update 1: b \+= Editing\(a\): fn edited {told} in place"):
        loss.backward()


def edited_parameter(fn, _):
    with torch.no_grad():
        fn.inner.bias.add_(1)


def edited_side_input(_, side):
    side.add_(1)


@pytest.mark.parametrize(("change", "told"), [(edited_parameter, "the parameter 'bias'"), (edited_side_input, "a side input")])
def test_changed_in_the_middle_of_backward(change, told):
    """By a hook, when the walk is on its way."""
    fns = [Fn(f"f{i}") for i in range(6)]
    side = draw(grad=False)
    loss = loss_of(rg.run(pairs(fns, takes={"shift": "side"}), STREAMS["tensors"](), {"side": side}))
    fns[3].inner.weight.register_post_accumulate_grad_hook(lambda _: change(fns[1], side))
    with pytest.raises(rg.ReplayError, match=told):
        loss.backward()


class Box:
    """A side input that is no tensor, and holds one."""

    def __init__(self, t):
        self.t = t


class Opens(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x, box):
        return self.inner(x).sin() + box.t


def test_tensor_inside_of_a_side_input_edited_in_the_middle_of_backward():
    fns, box = [Opens() for _ in range(6)], Box(draw(grad=False))
    loss = loss_of(rg.run(pairs(fns, takes="box"), STREAMS["tensors"](), {"box": box}))

    def edit(_):
        box.t.add_(1)

    fns[3].inner.weight.register_post_accumulate_grad_hook(edit)
    with pytest.raises(rg.ReplayError, match="returned something else"):
        loss.backward()


class Differentiates(nn.Module):
    """Calls autograd itself, both times."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        LOG.append("d")
        return self.inner(inner_gradient(x)).sin()


class Scale(rg.Rule):
    """Saves for its gradient, and has no attributes."""

    def apply(self, target, out):
        return target * (1 + out.sigmoid())

    def undo(self, target, out):
        return target / (1 + out.sigmoid())


@pytest.mark.parametrize("case", ["autograd inside", "rule that saves"])
def test_autograd_inside_and_rules_that_save(case):
    inside = case == "autograd inside"
    fns = [Differentiates() if inside else Fn("f") for _ in range(4)]
    updates = pairs(fns) if inside else pairs(fns, rule=Scale())
    program_agrees(updates, STREAMS["tensors"]())
    assert len(LOG) == 12  # 4 + 4 under reverse, 4 under store


class Spoils(nn.Module):
    """Makes NaN of one element: subtraction does not bring it back."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        return self.inner(x).sin() + torch.tensor([torch.nan] + [0.0] * (WIDTH - 1), dtype=x.dtype)


class Careful(Spoils):
    def forward(self, x):
        return self.inner(x.nan_to_num()).sin()


def test_streams_that_cannot_be_undone():
    fns = [*mlps(2), Spoils(), Careful(), Careful(), Careful()]
    streams = STREAMS["tensors"]()
    wanted = [*parameters(fns), *streams.values()]
    found = []
    for memory in ("reverse", "store"):
        out = rg.run(pairs(fns), streams, memory=memory, arithmetic="exact")
        loss = sum(t.nan_to_num().square().sum() for t in out.values())
        found.append(torch.autograd.grad(loss, wanted))
    assert any(not t.isfinite().all() for t in out.values())
    assert_same(*found, tolerance=0.0)


def test_asked_for_again_and_twice():
    """retain_graph, and a backward that reads its saved tensors twice."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            return grad * (ctx.saved_tensors[0].exp() + ctx.saved_tensors[0].exp()) / 2

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x):
            return Twice.apply(self.inner(x).tanh())

    fns = [Reads() for _ in range(4)]
    streams = STREAMS["tensors"]()
    wanted = [*parameters(fns), *streams.values()]
    found = []
    for memory in ("reverse", "store"):
        loss = loss_of(rg.run(pairs(fns), streams, memory=memory))
        found.append([g for _ in range(2) for g in torch.autograd.grad(loss, wanted, retain_graph=True)])
    assert_same(*found)
