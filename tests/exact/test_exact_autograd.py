"""Exact arithmetic under autograd's own features, in other programs, in transforms, on tensors without data."""

import functools
import warnings

import pytest
import torch
from exact_support import MEMORIES, ROWS, SETTINGS, Case, Fn, amp, assert_equal, draw, every_policy, observed, sequence, wired
from support import WIDTH, every_pair, loss_of, name_of, parameters, rg
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from retrograde.errors import OutOfRange

# -- autograd ----------------------------------------------------------------------------------------------------------


def twice(case, out):
    """Second derivatives."""
    first = torch.autograd.grad(loss_of([t.double() for t in tree_leaves(out)]), case.wanted, create_graph=True)
    second = torch.autograd.grad(sum(g.double().square().sum() for g in first), case.wanted, allow_unused=True)
    return [*(g.detach() for g in first), *second]


def retained(case, out):
    loss = loss_of([t.double() for t in tree_leaves(out)])
    found = [torch.autograd.grad(loss, case.wanted, retain_graph=True) for _ in range(2)]
    return [*found[0], *found[1], *torch.autograd.grad(loss * 3, case.wanted)]


def some(case, out):
    """Of some inputs alone, in two calls."""
    loss = loss_of([t.double() for t in tree_leaves(out)])
    early, late = [case.streams["a"], case.wanted[4]], [case.side["context"], case.wanted[-1]]
    return [*torch.autograd.grad(loss, late, retain_graph=True), *torch.autograd.grad(loss, early)]


def one_output(case, out):
    return torch.autograd.grad(out["a"].double().sin().sum(), case.wanted, allow_unused=True)


def batched(case, out):
    torch.manual_seed(2)
    rows = torch.randn(3, *out["b"].shape, dtype=out["b"].dtype)
    return torch.autograd.grad(out["a"] * out["b"], case.wanted, rows, is_grads_batched=True)


def in_autocast(case, out):
    """Backward within autocast, which fn does not notice."""
    with amp(torch.bfloat16):
        return retained(case, out)


def inside(case, out):
    """Gradients with respect to an output, and through it."""
    middle = out["a"] * 2
    return torch.autograd.grad((middle * out["b"]).double().sin().sum(), [middle, out["b"], *case.wanted])


WAYS = [twice, retained, some, one_output, batched, in_autocast, inside]


@pytest.mark.parametrize(
    ("way", "setting", "memory"), every_pair(WAYS, ["float32", "bfloat16", "bf16 autocast", "float64"], MEMORIES), ids=name_of
)
def test_autograd(memory, setting, way):
    """Whatever is asked of the graph is as under store."""
    case = wired("leapfrog", setting, 2)
    results = []
    for how in (memory, "store"):
        torch.manual_seed(1)
        results.append([*way(case, case.out(how)), torch.rand(2)])
    if way is twice and memory == rg.Anchor(3) and setting == "float64":
        for a, b in zip(*results, strict=True):  # sums of second derivatives are in another order
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    else:
        assert_equal(*results)


@pytest.mark.parametrize("inner", ["reverse", "checkpoint", rg.StoreLast(1)])
@pytest.mark.parametrize("setting", ["bfloat16", "bf16 autocast", "float32"])
def test_nested(setting, inner, recovered):
    """A program in an fn of another, both exact."""
    case = Case(setting, rg.wirings.leapfrog([sequence(2, inner) for _ in range(4)]), {"a": draw(), "b": draw()})
    found = case.observed("reverse")
    assert recovered.apart == 0
    for fn in case.fns:
        fn.memory = "store"
    assert_equal(found, case.observed("store"))


@pytest.mark.parametrize(("outer", "inner"), [("float", "exact"), ("exact", "float")])
def test_nested_with_float(outer, inner):
    """In float32, where float is good enough to see that nothing else is wrong."""
    case = Case("float32", rg.wirings.leapfrog([sequence(2, "reverse", inner) for _ in range(4)]), {"a": draw(), "b": draw()})
    found = case.observed("reverse", outer)
    for fn in case.fns:
        fn.memory = "store"
    true = case.observed("store", outer)
    for a, b in zip(found, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_nested_in_checkpoint():
    """A float program that keeps the sources of its fns: the exact one inside sees the same bits."""
    case = Case("bf16 autocast", rg.wirings.leapfrog([sequence(3, "reverse") for _ in range(4)]), {"a": draw(), "b": draw()})
    found = case.observed("checkpoint", "float")
    for fn in case.fns:
        fn.memory = "store"
    assert_equal(found, case.observed("store", "float"))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("setting", ["bfloat16", "bf16 autocast"])
def test_inside_torch_checkpoint(setting, reentrant):
    case = wired("pair", setting, 4)

    def around(memory):
        def run(a, b):
            out = rg.run(case.updates, {"x1": a, "x2": b}, case.side, memory=memory, arithmetic="exact")
            return out["x1"], out["x2"]

        with amp(case.autocast):
            return torch.utils.checkpoint.checkpoint(run, *case.streams.values(), use_reentrant=reentrant)

    if reentrant:  # it has no autograd.grad

        def step(make):
            torch.manual_seed(1)
            loss_of([t.double() for t in make()]).backward()
            found = [t.grad for t in case.wanted]
            for t in case.wanted:
                t.grad = None
            return [*found, torch.rand(1)]
    else:
        step = functools.partial(observed, wanted=case.wanted)
    assert_equal(step(lambda: around("reverse")), step(lambda: around("store")))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch's own
@pytest.mark.parametrize("name", ["grad", "vmap", "vmap of grad", "jvp"])
@pytest.mark.parametrize("setting", ["bfloat16", "bf16 autocast", "float32"])
def test_transforms(setting, name):
    """They run as store, with a warning, and have its values."""
    dtype, autocast = SETTINGS[setting]
    net = sequence(3, "reverse").eval().to(dtype)
    x, v = draw(ROWS, WIDTH, dtype=dtype, grad=False), draw(ROWS, WIDTH, dtype=dtype, grad=False)

    def loss(t):
        return net(t).double().sin().sum()

    transform = {
        "grad": lambda: [torch.func.grad(loss)(x)],
        "vmap": lambda: [torch.vmap(net)(x)],
        "vmap of grad": lambda: [torch.vmap(torch.func.grad(loss))(x)],
        "jvp": lambda: list(torch.func.jvp(net, (x,), (v,))),
    }[name]
    with amp(autocast):
        with pytest.warns(UserWarning, match="runs as memory='store'"):
            found = transform()
        net.memory = "store"
        true = transform()
        plain = [net(x)] if name in ("vmap", "jvp") else torch.autograd.grad(loss(x.requires_grad_()), [x])
    assert all(map(torch.equal, found, true))
    torch.testing.assert_close(found[0], plain[0].detach(), rtol=0.02, atol=0.02)


def test_beyond_the_limit_in_a_transform():
    """No value can be looked at there: it becomes NaN, and does not pass for a number."""
    updates = [rg.Update("a", lambda x: x * 40_000, "b")]
    run = torch.vmap(lambda t: rg.run(updates, {"a": t, "b": t}, memory="store", arithmetic="exact")["a"])
    out = run(torch.tensor([[0.5, 1.0], [0.25, -1.0]]))
    assert torch.equal(out.isnan(), torch.tensor([[False, True], [False, True]]))


@every_policy
def test_functional_call(memory):
    """Gradients go to the tensors that were given."""
    net = sequence(3, memory)
    x = draw()
    given = {name: (torch.randn_like(p) * 0.3).requires_grad_() for name, p in net.named_parameters()}
    results = []
    for net.memory in (memory, "store"):
        with amp(torch.bfloat16):
            results.append(observed(lambda: torch.func.functional_call(net, given, (x,)), [x, *given.values()]))
    assert_equal(*results)


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("memory", ["store", "reverse", "checkpoint", rg.Anchor(3), rg.Budget(1 << 38)], ids=str)
def test_fake_tensors(memory, dtype, default_dtype):
    """Forward and backward without data."""
    default_dtype(dtype)
    with FakeTensorMode():
        fns = [Fn(64) for _ in range(4)]
        streams = {name: torch.randn(1 << 24, 64, requires_grad=True) for name in "ab"}
        out = rg.run(rg.wirings.leapfrog(fns), streams, memory=memory, arithmetic="exact")
        assert all(isinstance(t, FakeTensor) and t.dtype == dtype for t in out.values())
        (out["a"].float().square().mean() + out["b"].float().sum()).backward()
        for t in (*streams.values(), *parameters(fns)):
            assert (t.grad.shape, t.grad.dtype) == (t.shape, t.dtype)


def test_meta_tensors():
    """On the meta device too."""
    fns = [Fn(64, dropout=0.0).to("meta") for _ in range(4)]
    streams = {name: torch.randn(8, 64, device="meta", requires_grad=True) for name in "ab"}
    out = rg.run(rg.wirings.leapfrog(fns), streams, arithmetic="exact")
    (out["a"].square().mean() + out["b"].sum()).backward()
    assert streams["a"].grad.shape == (8, 64)


def test_saved_on_the_cpu():
    """Hooks around the program apply to what it keeps."""
    case = wired("pair", "bf16 autocast", 4)
    packed = []

    def run():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.dtype) or t.clone(), lambda t: t):
            return case.out("reverse")

    found = observed(run, case.wanted)
    assert packed == [torch.float64, torch.float64, torch.float32]  # the final streams and the context
    assert_equal(found, case.observed("store"))


def test_nested_error_names_both():
    """The update of the inner program that left the range, and that of the outer one whose fn it is."""
    inner = rg.Reversible(rg.wirings.leapfrog([nn.Tanh(), lambda x: x * 0 + 40_000.0]), arithmetic="exact")
    updates = rg.wirings.leapfrog([nn.Tanh(), lambda x: inner({"a": x, "b": x})["b"]])
    for memory in MEMORIES:
        with pytest.raises(OutOfRange, match=r"update 1: b \+= <lambda>\(a\)") as info:
            rg.run(updates, {"a": draw(), "b": draw()}, memory=memory, arithmetic="exact")
        assert info.value.__notes__ == ["raised by fn in update 1: b += <lambda>(a)"]


class Halved(rg.Add):
    """Somebody's own rule, made of ours."""

    def apply(self, target, out):
        return target + out / 2

    def undo(self, target, out):
        return target - out / 2


@pytest.mark.parametrize("memory", ["store", "reverse"])
def test_rule_derived_from_add(memory):
    """It does its own arithmetic on tensors: refused under exact by a word about it, and in float under auto."""
    updates = [rg.Update("a", Fn(), "b", rule=Halved()), rg.Update("b", Fn(), "a", rule=Halved())]
    streams = {"a": draw(), "b": draw()}
    with amp(torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert rg.run(updates, streams, memory=memory)["a"].requires_grad
        with pytest.raises(rg.ProgramError, match=r"update 0: .*Halved"):
            rg.run(updates, streams, memory=memory, arithmetic="exact")


class Marked(torch.Tensor):
    """A subclass that does nothing."""


def test_subclass_beyond_the_limit():
    """An error, or NaN: not a number that is wrong."""
    t = torch.ones(3).as_subclass(Marked)
    try:
        out = rg.run([rg.Update("a", lambda x: x * 40_000, "b")], {"a": t, "b": t}, arithmetic="exact")["a"]
    except OutOfRange:
        return
    assert out.isnan().all()
