"""torch.func transforms and forward-mode AD run the program as store, with one warning; batched backwards need neither."""

import contextlib
import warnings

import pytest
import torch
from support import POLICIES, REPLAYED, WIDTH, assert_same, draw, gradients, loss_of, mlps, parameters, rg
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp
from torch.utils._pytree import tree_leaves

HOWS = ["store", "hand"]


def net_of(fns, how):
    """x -> the mean of the two streams, under a policy or by hand."""
    pairs = list(zip(fns[::2], fns[1::2], strict=True))
    if how != "hand":
        return rg.ReversibleSequence(pairs, memory=how)

    def by_hand(x):
        x1, x2 = x, x
        for f, g in pairs:
            x1 = x1 + f(x2)
            x2 = x2 + g(x1)
        return (x1 + x2) / 2

    return by_hand


@contextlib.contextmanager
def warned(how, times=1):
    """Exactly so many warnings for a policy, and none for store and the equations by hand."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [str(w.message) for w in caught if "memory='store'" in str(w.message)]  # torch has deprecations of its own
    assert len(ours) == (0 if how in HOWS else times)


TRANSFORMS = {
    "grad": lambda net, x, v: grad(lambda t: loss_of([net(t)]))(x),
    "grad of grad": lambda net, x, v: grad(lambda t: (grad(lambda s: loss_of([net(s)]))(t) * v).sum())(x),
    "vjp": lambda net, x, v: vjp(net, x)[1](v),
    "jacrev": lambda net, x, v: jacrev(net)(x),
    "jacfwd": lambda net, x, v: jacfwd(net)(x),
    "hessian": lambda net, x, v: hessian(lambda t: net(t).sin().sum())(x),
    "jvp": lambda net, x, v: jvp(net, (x,), (v,)),
    "forward AD": lambda net, x, v: dual(net, x, v),
    "vmap": lambda net, x, v: torch.vmap(net)(x),
    "vmap of grad": lambda net, x, v: torch.vmap(grad(lambda t: loss_of([net(t)])))(x),
}


def dual(net, x, v):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(net(forward_ad.make_dual(x, v))))


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("memory", REPLAYED)
def test_runs_as_store(memory, name):
    """The values of the same transform of the equations by hand; one warning per call; afterwards the net reverses again."""
    fns = mlps(4)
    x, v = draw(2, WIDTH, grad=False), draw(2, WIDTH, grad=False)
    results = []
    for how in (memory, *HOWS):
        net = net_of(fns, how)
        with warned(how):
            results.append(tree_leaves(TRANSFORMS[name](net, x, v)))
        with warned(how):
            TRANSFORMS[name](net, x, v)  # each call says so
    detached = [[t.detach() for t in result] for result in results]
    assert_same(detached[0], detached[1])
    assert_same(detached[0], detached[2])
    x.requires_grad_()
    runs = []
    handle = fns[0].register_forward_hook(lambda *_: runs.append(rg.replaying()))
    found = gradients(lambda: net_of(fns, memory)(x), [x, *parameters(fns)])
    handle.remove()
    assert runs == [False, True]
    assert_same(found, gradients(lambda: net_of(fns, "hand")(x), [x, *parameters(fns)]))


@pytest.mark.parametrize("name", ["grad", "vjp", "jvp", "forward AD", "vmap"])
@pytest.mark.parametrize("memory", POLICIES)
def test_backward_through_a_transform(memory, name):
    """Parameters and inputs get their gradients through the transform."""
    fns = mlps(4)
    x, v = draw(2, WIDTH), draw(2, WIDTH)
    results = []
    for how in (memory, *HOWS):
        with warned(how):
            results.append(gradients(lambda: TRANSFORMS[name](net_of(fns, how), x, v), [x, *parameters(fns)]))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("memory", POLICIES)
def test_gradients_per_sample(memory):
    """The classic: vmap of grad of functional_call, over the batch and over the parameters of an ensemble."""
    fns = mlps(4)
    xs = draw(3, WIDTH, grad=False)
    hand = torch.nn.ModuleList(fns)
    expected = []
    for x in xs:
        found = gradients(lambda: net_of(fns, "hand")(x[None]), hand.parameters())
        expected.append(found[1:])
    true = [torch.stack(gs) for gs in zip(*expected, strict=True)]
    for how in (memory, "store"):
        net = net_of(fns, how)
        weights = {name: p.detach() for name, p in net.named_parameters()}
        with warned(how):
            found = torch.vmap(grad(lambda w, t: loss_of([functional_call(net, w, (t[None],))])), (None, 0))(weights, xs)
        assert_same([found[name] for name, _ in net.named_parameters()], true)
        ensemble = {name: torch.stack([w, 2 * w]) for name, w in weights.items()}
        with warned(how):
            outs = torch.vmap(lambda w: functional_call(net, w, (xs,)))(ensemble)
        for out, factor in zip(outs, (1, 2), strict=True):
            one = {name: factor * w for name, w in weights.items()}
            net.memory = "store"
            assert_same([out], [functional_call(net, one, (xs,))])


@pytest.mark.parametrize("memory", POLICIES)
def test_no_warning_without_gradients(memory):
    """Under no_grad nothing is kept by any policy, so there is nothing to say."""
    fns = mlps(4)
    xs = draw(3, WIDTH, grad=False)
    with torch.no_grad(), warned(memory, times=0):
        found = [torch.vmap(net_of(fns, memory))(xs), *jvp(net_of(fns, memory), (xs,), (xs.cos(),))]
    with torch.no_grad():
        true = [torch.vmap(net_of(fns, "hand"))(xs), *jvp(net_of(fns, "hand"), (xs,), (xs.cos(),))]
    assert_same(found, true)


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("memory", POLICIES)
def test_vmap_with_dropout(memory, randomness):
    """Random numbers under vmap are drawn as under store."""
    fns = mlps(4, dropout=0.4)
    xs = draw(3, 2, WIDTH)
    results = []
    for how in (memory, *HOWS):
        with warned(how):
            batched = torch.vmap(net_of(fns, how), randomness=randomness)
            results.append(gradients(lambda: batched(xs), [xs, *parameters(fns)]))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def by_flag(out, wanted, rows, **kwargs):
    return torch.autograd.grad(out, wanted, rows, is_grads_batched=True, **kwargs)


def by_vmap(out, wanted, rows, **kwargs):
    return torch.vmap(lambda row: torch.autograd.grad(out, wanted, row, **kwargs))(rows)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("batched", [by_flag, by_vmap])
@pytest.mark.parametrize("memory", REPLAYED)
def test_batched_grads(memory, batched, create_graph, dropout):
    """Backward under vmap: fn runs again outside of it, once for all rows, with the same dropout."""
    fns = mlps(4, dropout)
    x, rows = draw(), draw(5, 3, WIDTH, grad=False)
    wanted = [x, *parameters(fns)]
    runs = []
    handle = fns[1].register_forward_hook(lambda *_: runs.append(rg.replaying()))
    results = []
    for how in (memory, *HOWS):
        torch.manual_seed(0)
        out = net_of(fns, how)(x).sin()
        runs.clear()
        found = batched(out, wanted, rows, create_graph=create_graph, retain_graph=True)
        if not create_graph:
            assert runs == ([] if how in HOWS else [True])
        singly = [torch.autograd.grad(out, wanted, row, retain_graph=True) for row in rows]
        assert_same([g.detach() for g in found], [torch.stack(gs) for gs in zip(*singly, strict=True)])
        results.append([out.detach(), *(g.detach() for g in found)])
        if create_graph:
            second = torch.autograd.grad(loss_of(found), wanted, allow_unused=True)
            results[-1] += [torch.zeros(1) if g is None else g for g in second]
        results[-1].append(torch.rand(3))  # the generator stands where store leaves it
    handle.remove()
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("memory", POLICIES)
def test_batched_grads_of_stateful_fns(memory):
    """Under `is_grads_batched` too, statistics stay as the forward pass left them."""
    bodies = mlps(4)
    results = []
    for how in (memory, *HOWS):
        fns = [torch.nn.Sequential(torch.nn.BatchNorm1d(WIDTH).double(), body) for body in bodies]
        torch.manual_seed(0)
        x, rows = draw(), draw(5, 3, WIDTH, grad=False)
        out = net_of(fns, how)(x).sin()
        found = torch.autograd.grad(out, [x, *parameters(fns)], rows, is_grads_batched=True)
        results.append([*found, *(b for fn in fns for b in (fn[0].running_mean, fn[0].running_var))])
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("memory", POLICIES)
def test_jacobian_and_hessian(memory, vectorize):
    """torch.autograd.functional works by double backward and batched backwards, without a transform: nothing to warn of."""
    fns = mlps(4)
    x = draw(2, WIDTH)
    results = []
    for how in (memory, *HOWS):
        net = net_of(fns, how)
        functional = torch.autograd.functional
        with warned(how, times=0):
            found = [
                functional.jacobian(net, x, vectorize=vectorize),
                functional.hessian(lambda t: loss_of([net(t)]), x, vectorize=vectorize),
                functional.jvp(net, x, x.cos())[1],
                functional.hvp(lambda t: loss_of([net(t)]), x, x.cos())[1],
            ]
        results.append(found)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("memory", POLICIES)
def test_fn_uses_vmap(memory):
    """An fn may use vmap and jvp inside; it runs under the policy."""
    inner = mlps(4)
    x = draw(4, WIDTH)

    def batched(fn):
        return lambda t: torch.vmap(fn)(t) + jvp(fn, (t,), (t.sin(),))[1]

    fns = [batched(fn) for fn in inner]
    results = []
    for how in (memory, *HOWS):
        with warned(how, times=0):
            results.append(gradients(lambda: net_of(fns, how)(x), [x, *parameters(inner)]))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
