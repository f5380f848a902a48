"""Golden order: what runs when. Each fn once forward and once in backward, in reverse; nothing else."""

import pytest
import torch
from support import Attend, draw, loss_of, mlp, rg
from torch import nn
from torch.utils.checkpoint import checkpoint

memories = pytest.mark.parametrize("memory", ["checkpoint", "reverse"])
reentrant = pytest.mark.parametrize("use_reentrant", [True, False])


class Mark(torch.autograd.Function):
    """The identity; writes down when backward has come through a fn, and whether that counts as a second run."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        assert not rg.replaying()
        ctx.log.append(f"{ctx.name} back")
        return grad, None, None


class Logged(nn.Module):
    """A fn that writes down its runs: "f0" the first, "f0 again" the second, "f0 back" when its gradient is done."""

    def __init__(self, name, log, inner=None):
        super().__init__()
        self.name, self.log, self.inner = name, log, mlp() if inner is None else inner

    def forward(self, x):
        self.log.append(f"{self.name} again" if rg.replaying() else self.name)
        return self.inner(Mark.apply(x, self.log, self.name) if x.requires_grad else x)


NAMES = ["f0", "g0", "f1", "g1", "f2", "g2"]
BOTH = ("x1", "x2")


class Net:
    """Three pair blocks, their log and their inputs."""

    def __init__(self, memory, grad=True, **inner):
        self.log = []
        self.fns = {name: Logged(name, self.log, inner.get(name)) for name in NAMES}
        self.inputs = {"x1": draw(grad=grad), "x2": draw(grad=grad)}
        self.memory = memory

    def forward(self):
        fns = list(self.fns.values())
        updates = [u for f, g in zip(fns[::2], fns[1::2], strict=True) for u in rg.wirings.pair(f, g)]
        return rg.run(updates, self.inputs, memory=self.memory)

    def backward(self, out, loss=BOTH, wanted=None, **kwargs):
        """What backward writes down."""
        self.log.clear()
        total = loss_of([out[name] for name in loss])
        if wanted is None:
            total.backward(**kwargs)
        else:
            torch.autograd.grad(total, wanted, **kwargs)
        return list(self.log)


def runs(*names):
    """Second run and gradient of one fn after the other."""
    return [event for name in names for event in (f"{name} again", f"{name} back")]


@memories
def test_all(memory):
    """First runs in order; then, one by one in reverse, a second run and the gradient that needs it."""
    net = Net(memory)
    out = net.forward()
    assert net.log == NAMES
    assert net.backward(out) == runs(*reversed(NAMES))
    assert not rg.replaying()


def test_store():
    """Ordinary autograd has no second runs."""
    net = Net("store")
    out = net.forward()
    assert net.log == NAMES
    assert net.backward(out) == [f"{name} back" for name in reversed(NAMES)]


@memories
def test_repeated_backward(memory):
    """Each backward over a retained graph is one more run of each fn, not two."""
    net = Net(memory)
    out = net.forward()
    for keep in (True, True, False):
        assert net.backward(out, retain_graph=keep) == runs(*reversed(NAMES))


@memories
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad(memory, mode):
    """Nothing is run again where there is no backward."""
    net = Net(memory)
    with mode():
        net.forward()
    assert net.log == NAMES


@memories
def test_nothing_requires_grad(memory):
    net = Net(memory, grad=False)
    for fn in net.fns.values():
        fn.requires_grad_(False)
    out = net.forward()
    assert net.log == NAMES
    assert not any(t.requires_grad for t in out.values())


@memories
@pytest.mark.parametrize(
    ("frozen", "grad", "expected"),
    [
        (NAMES, True, runs("g2", "f2", "g1", "f1", "g0", "f0")),  # the gradient of the inputs needs them all
        (["g2", "f1"], True, runs("g2", "f2", "g1", "f1", "g0", "f0")),
        (["f0", "g0"], False, [*runs("g2", "f2", "g1"), "f1 again"]),  # below f1 nothing has a gradient
        (["f0", "g0", "f1", "g1", "f2"], False, ["g2 again"]),
        (["f0"], False, [*runs("g2", "f2", "g1", "f1"), "g0 again"]),
    ],
)
def test_frozen(memory, frozen, grad, expected):
    """Frozen fns are run again only where a gradient passes through them or beneath them."""
    net = Net(memory, grad=grad)
    for name in frozen:
        net.fns[name].requires_grad_(False)
    assert net.backward(net.forward()) == expected


@memories
@pytest.mark.parametrize(
    ("loss", "beyond", "expected"),
    [
        ("x1", ["g2"], runs("f2", "g1", "f1", "g0", "f0")),  # g2 changes x2 alone
        ("x2", [], runs("g2", "f2", "g1", "f1", "g0", "f0")),
    ],
)
def test_loss_on_some_streams(memory, loss, beyond, expected):
    """An update that the loss does not see has no gradient; reverse runs its fn once to undo it, checkpoint does not."""
    net = Net(memory)
    passed = [f"{name} again" for name in beyond] if memory == "reverse" else []
    assert net.backward(net.forward(), loss=[loss]) == passed + expected
    assert all(p.grad is None for name in beyond for p in net.fns[name].parameters())


@memories
def test_hooks_where_the_loss_does_not_come(memory):
    """Hooks of the user fire there as often as under store: never."""
    fired = []

    class Hooked(Attend):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(lambda grad: fired.append("tensor"))
            return y

    net = Net(memory, g2=Hooked())
    net.fns["g2"].register_full_backward_hook(lambda *_: fired.append("module"))
    net.backward(net.forward(), loss=["x1"])
    assert fired == []
    net.backward(net.forward(), loss=["x2"])
    assert sorted(fired) == ["module", "tensor"]


@memories
@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("x1", runs("g2", "f2", "g1", "f1", "g0")),  # x1 is added to f0(x2): no gradient of f0 is needed
        ("x2", runs("g2", "f2", "g1", "f1", "g0", "f0")),
        ("g2", ["g2 again"]),
        ("f1", [*runs("g2", "f2", "g1"), "f1 again"]),
    ],
)
def test_grad_of_one(memory, wanted, expected):
    """autograd.grad of one input, or of the parameters of one fn: no fn below what is asked for is run."""
    net = Net(memory)
    asked = [net.inputs[wanted]] if wanted in net.inputs else list(net.fns[wanted].parameters())
    assert net.backward(net.forward(), wanted=asked) == expected


@memories
def test_saving_nothing(memory):
    """A fn that saves nothing: reverse runs it once more to undo its update, but not at the bottom; checkpoint never."""
    identity = nn.Identity()
    net = Net(memory, f0=identity, g1=identity)
    expected = [*runs("g2", "f2"), "g1 back", *runs("f1", "g0"), "f0 back"]
    if memory == "reverse":
        expected.insert(5, "g1 again")
    assert net.backward(net.forward()) == expected


@memories
def test_independent_streams(memory):
    """Two losses on independent streams: each backward runs its own half."""
    log = []
    f, g, j, k = (Logged(name, log) for name in "fgjk")
    out = rg.run(rg.wirings.dual(f, g, j, k) * 2, {name: draw() for name in ("x1", "x2", "m1", "m2")}, memory=memory)
    for loss, expected in (("m2", "kjkj"), ("x2", "gfgf")):
        log.clear()
        loss_of(out[loss]).backward()
        assert log == runs(*expected)
    out = rg.run(rg.wirings.dual(f, g, j, k) * 2, {name: draw() for name in ("x1", "x2", "m1", "m2")}, memory=memory)
    log.clear()
    loss_of(out).backward()
    assert log == runs(*"kjgfkjgf")


@memories
def test_streams_with_a_common_source(memory):
    """Streams that share no more than a source that never changes are independent, too."""
    log = []
    f, g = (Logged(name, log) for name in "fg")
    out = rg.run([rg.Update("a", f, "c"), rg.Update("b", g, "c")], {name: draw() for name in "abc"}, memory=memory)
    for loss, expected in (("a", "f"), ("b", "g")):
        log.clear()
        loss_of(out[loss]).backward()
        assert log == runs(expected)


@memories
def test_rule_that_saves(memory):
    """An affine update runs its fn as often as an additive one."""
    log = []
    scale = Logged("s", log, nn.Sequential(mlp(), nn.Tanh()))
    shift = Logged("t", log)
    updates = [rg.Update("a", lambda x: (scale(x), shift(x)), "b", rule=rg.Affine()), rg.Update("b", shift, "a")] * 2
    out = rg.run(updates, {"a": draw(), "b": draw()}, memory=memory)
    assert log == ["s", "t", "t"] * 2
    log.clear()
    loss_of(out).backward()
    assert log == ["t again", "t back", "s again", "t again", "t back", "s back"] * 2


@memories
def test_inverse(memory):
    """The inverse is a program like any other: it goes down, its backward up."""
    net = Net(memory)
    fns = list(net.fns.values())
    updates = [u for f, g in zip(fns[::2], fns[1::2], strict=True) for u in rg.wirings.pair(f, g)]
    out = rg.invert(updates, net.inputs, memory=memory)
    assert net.log == list(reversed(NAMES))
    assert net.backward(out) == runs(*NAMES)


# -- what more costs ---------------------------------------------------------------------------------------------------


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        assert torch.equal(ctx.saved_tensors[0], ctx.saved_tensors[0])
        return grad * ctx.saved_tensors[0].cos()


@memories
def test_saved_tensors_read_three_times(memory):
    """Each further reading of the same saved tensor by a custom Function costs one more run of that fn, and of no other."""
    net = Net(memory, f1=ReadsTwice.apply)
    expected = [*runs("g2", "f2", "g1"), *["f1 again"] * 3, "f1 back", *runs("g0", "f0")]
    assert net.backward(net.forward()) == expected


def counts(log, name):
    """First, second and gradient runs of a fn."""
    return [log.count(name), log.count(f"{name} again"), log.count(f"{name} back")]


class Nested(nn.Module):
    """A fn that is a program of one update per fn."""

    def __init__(self, fns, memory):
        super().__init__()
        self.fns, self.memory = nn.ModuleList(fns), memory

    def forward(self, x):
        out = rg.run(rg.wirings.leapfrog(list(self.fns)), {"a": x, "b": x.sin()}, memory=self.memory)
        return out["a"] + out["b"]


@memories
def test_program_in_program(memory):
    """A program in a program costs one more run for each level: its fn is run with the outer second run, and then for its own."""
    log = []
    inner = Nested([Logged("i0", log), Logged("i1", log)], memory)
    out = rg.run([rg.Update("a", Logged("o", log, inner), "b")], {"a": draw(), "b": draw()}, memory=memory)
    assert log == ["o", "i0", "i1"]
    log.clear()
    loss_of(out).backward()
    assert log == ["o again", "i0 again", "i1 again", *runs("i1", "i0"), "o back"]


@memories
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_levels(memory, levels):
    """At level n a fn is run n + 1 times: linear in the levels, whatever their number of updates."""
    log = []
    fn = Logged(str(levels), log)
    for level in reversed(range(1, levels)):
        fn = Logged(str(level), log, Nested([fn], memory))
    out = rg.run([rg.Update("a", fn, "b")] * 2, {"a": draw(), "b": draw()}, memory=memory)
    loss_of(out).backward()
    assert [counts(log, str(level)) for level in range(1, levels + 1)] == [[2, 2 * level, 2] for level in range(1, levels + 1)]


@memories
@reentrant
def test_checkpoint_in_fn(memory, use_reentrant):
    """A checkpointed part of fn is run three times: by fn, by its recomputation, and by checkpoint, for which it is a first run.

    Under "checkpoint" fn stops where the part begins, if that saves nothing itself.
    """
    log = []
    part = Logged("part", log)

    class Fn(nn.Module):
        def forward(self, x):
            return checkpoint(part, x.tanh(), use_reentrant=use_reentrant)

    out = rg.run(rg.wirings.leapfrog([Fn(), Fn()]), {"a": draw(), "b": draw()}, memory=memory)
    forward = log[:]
    loss_of(out).backward()
    early = memory == "checkpoint" and not use_reentrant
    assert log[len(forward) :] == [*(["part again"] if not early else []), "part", "part back"] * 2
    assert forward == ["part"] * 2


@memories
@reentrant
def test_program_in_checkpoint(memory, use_reentrant):
    """Each fn is run three times: forward, by checkpoint (for which it is a first run), and its second run."""
    log = []
    fns = [Logged(name, log) for name in "fg"]

    def program(a, b):
        return tuple(rg.run(rg.wirings.leapfrog(fns), {"a": a, "b": b}, memory=memory).values())

    out = checkpoint(program, draw(), draw(), use_reentrant=use_reentrant)
    forward = log[:]
    loss_of(out).backward()
    assert [event for event in forward if "back" not in event] == ["f", "g"]
    assert log[len(forward) :] == ["f", "g", *runs("g", "f")]


@memories
def test_gradient_in_fn(memory):
    """autograd.grad inside fn is part of fn: it is run where fn is, and costs no run of its own."""
    log, energy = [], mlp()

    def force(x):
        log.append("again" if rg.replaying() else "first")
        return torch.autograd.grad(energy(x).sin().sum(), x, create_graph=True)[0]

    out = rg.run(rg.wirings.leapfrog([force] * 3), {"a": draw(), "b": draw()}, memory=memory)
    loss_of(out).backward()
    assert log == ["first"] * 3 + ["again"] * 3


# -- replaying ---------------------------------------------------------------------------------------------------------


@memories
def test_replaying(memory):
    """True in second runs alone: not in tensor hooks, not in the backward of a Function, not after an error in a second run."""
    seen = {"hook": [], "fn": []}

    def fn(x, fail=()):
        seen["fn"].append(rg.replaying())
        if rg.replaying() and fail:
            raise ValueError("second run")
        y = x.sin()
        y.register_hook(lambda grad: seen["hook"].append(rg.replaying()))
        return y

    def program(fail):
        out = rg.run(rg.wirings.leapfrog([fn, fn], takes=["fail"]), {"a": draw(), "b": draw()}, {"fail": fail}, memory=memory)
        loss_of(out).backward()

    program([])
    assert seen == {"hook": [False] * 2, "fn": [False, False, True, True]}
    with pytest.raises(rg.ReplayError, match="second run"):
        program([1])
    assert not rg.replaying()
    seen["fn"].clear()
    program([])
    assert seen["fn"] == [False, False, True, True]
