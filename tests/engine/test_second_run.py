"""What could make a second run differ from the first without a word, or be refused without a reason."""

import gc
import re

import pytest
import torch
from support import POLICIES, REPLAYED, WIDTH, Attend, agree, assert_same, draw, gradients, linear, loss_of, mlp, parameters, rg
from torch import nn
from torch.utils.checkpoint import checkpoint


def wound(fn, memory, other=None):
    return lambda a, b: rg.run(
        [rg.Update("a", fn, "b"), rg.Update("b", other or mlp(), "a"), rg.Update("a", fn, "b")], {"a": a, "b": b}, memory=memory
    )


def fn_agrees(fn, memory, modules, steps=1):
    """Outputs, gradients and buffers under `memory` and under store, from the same start."""
    modules, other = nn.ModuleList(modules), mlp()
    a, b = draw(), draw()
    start = {key: t.clone() for key, t in modules.state_dict().items()}

    def train(memory):
        modules.load_state_dict(start)
        for _ in range(steps):
            found = gradients(lambda: wound(fn, memory, other)(a, b), [a, b, *modules.parameters(), *other.parameters()])
        return found + [t.double().clone() for t in modules.buffers()]

    agree(train, memory)


@pytest.mark.parametrize("memory", POLICIES, ids=str)
@pytest.mark.parametrize("inside", ["sigmoid", "relu, dropout"])
def test_edit_of_a_saved_tensor_that_is_not_the_first_asked_for(memory, inside):
    """Autograd's own error for it, under every policy; the next tensors of the fn are asked for first."""
    first, last = linear(), linear()

    def fn(x):
        h = first(x)
        h = h.sigmoid().mul_(2) if inside == "sigmoid" else nn.functional.dropout(h.relu_(), 0.5, inplace=True)
        return last(h)

    loss = loss_of(wound(fn, memory)(draw(), draw()))
    with pytest.raises(RuntimeError, match=r"fn changed in place a tensor|modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("around", ["checkpoint", "save_on_cpu"])
def test_output_edited_under_hooks_of_others(memory, around):
    """Hooks around the program switch off autograd's version check; ours stays."""
    net = rg.ReversibleSequence([(mlp(), mlp()) for _ in range(3)], merge=None, memory=memory)

    def region(x):
        a, b = net(x)
        a += 1.0
        return (a * b).sin()

    x = draw()
    if around == "checkpoint":
        out = checkpoint(region, x, use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            out = region(x)
    with pytest.raises(rg.ReplayError, match="'x1' was edited in place"):  # under checkpoint it is the source of the last update
        out.sum().backward()


@pytest.mark.parametrize("memory", REPLAYED)
def test_statistics_that_a_first_batch_left_alone(memory):
    """A dry run on zeros moves no running mean; that says nothing about the next batch."""
    norm = nn.BatchNorm1d(WIDTH).double()
    zeros = torch.zeros(3, WIDTH, dtype=torch.float64)
    rg.run([rg.Update("a", norm, "b")], {"a": zeros, "b": zeros}, memory=memory)["a"].sum().backward()
    fn_agrees(norm, memory, [norm], steps=2)


@pytest.mark.parametrize("memory", REPLAYED)
def test_held_tensor_is_exchanged(memory):
    """One closure cell for all turns of a loop: every recomputation would see the last mask."""
    line, a, b = linear(), draw(), draw()
    for _ in range(2):
        mask = torch.rand(3, WIDTH, dtype=torch.float64)
        fn = lambda x: line(x).tanh() * mask  # noqa: E731
        out = wound(fn, memory)(a, b)
        a, b = out["a"], out["b"]
    with pytest.raises(rg.ReplayError, match=r"update 2: a \+= <lambda>\(b\): .* returned something else"):
        loss_of({"a": a, "b": b}).backward()


class Counts(nn.Module):
    """Edits a tensor that it has not registered."""

    def __init__(self):
        super().__init__()
        self.line, self.count = linear(), torch.ones((), dtype=torch.float64)

    def forward(self, x):
        out = self.line(x) * self.count.clone()
        self.count.add_(1)
        return out


@pytest.mark.parametrize("memory", REPLAYED)
def test_held_tensor_that_fn_edits(memory):
    """It is to be registered as a buffer; what is not is seen by its effect."""
    fn = Counts()
    out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], {"a": draw(), "b": draw()}, memory=memory)
    with pytest.raises(rg.ReplayError, match=r"update 1: b \+= Counts\(a\): .* returned something else"):
        loss_of(out).backward()


class Views(nn.Module):
    """Two buffers in one memory: one is written, the other read."""

    def __init__(self):
        super().__init__()
        self.line = linear()
        self.register_buffer("whole", torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("part", self.whole[:1])

    def forward(self, x):
        out = self.line(x) * self.part.clone()
        with torch.no_grad():
            self.whole.mul_(0.5).add_(x.mean(0))
        return out


@pytest.mark.parametrize("memory", REPLAYED)
def test_buffers_in_one_memory(memory):
    fn = Views()
    fn_agrees(fn, memory, [fn])


class Carries(nn.Module):
    """Recurrent state that carries a gradient."""

    def __init__(self):
        super().__init__()
        self.line = linear()
        self.register_buffer("state", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x):
        out = self.line(x) * self.state
        self.state = out.mean(0)
        return out


@pytest.mark.parametrize("memory", REPLAYED)
def test_buffer_that_carries_a_gradient(memory):
    fn, results = Carries(), []
    a, b = draw(), draw()
    for policy in (memory, "store"):
        fn.state = torch.ones(WIDTH, dtype=torch.float64)
        out = rg.run([rg.Update("a", fn, "b"), rg.Update("b", fn, "a")], {"a": a, "b": b}, memory=policy)
        results.append(torch.autograd.grad(loss_of(out), [a, b, *fn.parameters()]))
    assert_same(*results)


@pytest.mark.parametrize("memory", REPLAYED)
def test_forward_hook_taken_away(memory):
    fn = nn.Sequential(linear(), nn.Tanh())
    handle = fn[0].register_forward_hook(lambda _, __, out: out + 1.5)
    loss = loss_of(wound(fn, memory)(draw(), draw()))
    handle.remove()
    with pytest.raises(rg.ReplayError, match=r"update 2: a \+= Sequential\(b\): .* returned something else"):
        loss.backward()


@pytest.mark.parametrize("memory", REPLAYED)
def test_side_list_that_fn_fills(memory):
    def fn(x, memory):
        memory.append(x.detach())
        return x.tanh() * len(memory)

    x = draw()
    with pytest.raises(rg.ProgramError, match="changed a list or a dict among the side inputs"):
        rg.run([rg.Update("a", fn, "b", "memory")], {"a": x, "b": x}, {"memory": [x]}, memory=memory)


class Helper:
    def __init__(self):
        self.norm = nn.BatchNorm1d(WIDTH).double()


class WithHelper(nn.Module):
    """A norm behind a plain object, which no state dict shows."""

    def __init__(self):
        super().__init__()
        self.helper, self.line = Helper(), linear()

    def forward(self, x):
        return self.line(self.helper.norm(x))


@pytest.mark.parametrize("memory", REPLAYED)
def test_modules_behind_an_attribute(memory):
    fn = WithHelper()
    fn_agrees(fn, memory, [fn, fn.helper.norm], steps=2)


class Scaled(rg.Add):
    """A rule with a state of its own."""

    saves = True

    def __init__(self):
        self.scale = torch.full((), 0.5, dtype=torch.float64)

    def apply(self, target, out):
        return target + out * self.scale

    def undo(self, target, out):
        return target - out * self.scale


def test_tensor_that_a_rule_holds():
    rule = Scaled()
    out = rg.run([rg.Update("a", mlp(), "b", rule=rule), rg.Update("b", mlp(), "a")], {"a": draw(), "b": draw()})
    rule.scale.mul_(2)
    with pytest.raises(rg.ReplayError, match=r"a tensor of shape \(\) that fn holds on to was changed"):
        loss_of(out).backward()


@pytest.mark.parametrize("memory", REPLAYED)
def test_module_used_without_a_call(memory):
    """The weight is saved, the bias is not: both are the module's, and it was used."""
    line = linear()
    fn = lambda x: nn.functional.linear(x, line.weight, line.bias).tanh()  # noqa: E731
    loss = loss_of(wound(fn, memory)(draw(), draw()))
    with torch.no_grad():
        line.bias.add_(1)
    with pytest.raises(rg.ReplayError, match="the parameter 'bias' of shape"):
        loss.backward()


# -- refused without a reason ------------------------------------------------------------------------------------------


class Whole(nn.Module):
    """Methods of the model as fns: each holds all of it and uses a part."""

    def __init__(self, memory):
        super().__init__()
        self.norms, self.lines = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2)), nn.ModuleList([linear(), linear()])
        self.memory = memory
        self.double()

    def f(self, x):
        return self.lines[0](self.norms[0](x))

    def g(self, x):
        return self.lines[1](self.norms[1](x)).tanh()

    def forward(self, x):
        out = rg.run([rg.Update("a", self.f, "b"), rg.Update("b", self.g, "a")] * 2, {"a": x, "b": x.sin()}, memory=self.memory)
        return out["a"] * out["b"]


@pytest.mark.parametrize("memory", POLICIES, ids=str)
def test_methods_of_the_whole_model(memory):
    model, x = Whole(memory), draw()
    start = {key: t.clone() for key, t in model.state_dict().items()}
    results = []
    for model.memory in (memory, "store"):
        model.load_state_dict(start)
        results.append(gradients(lambda: model(x), [x, *model.parameters()]) + [t.double().clone() for t in model.buffers()])
    assert_same(*results)


@pytest.mark.parametrize("memory", POLICIES, ids=str)
def test_lazy_module_that_is_held_and_not_used(memory):
    parts = nn.ModuleList([linear(), nn.LazyLinear(3)])
    other, a, b = mlp(), draw(), draw()
    wanted = [a, b, *parts[0].parameters()]
    fn = lambda x: parts[0](x).tanh()  # noqa: E731
    assert_same(*(gradients(lambda: wound(fn, m, other)(a, b), wanted) for m in (memory, "store")))


@pytest.mark.parametrize("memory", REPLAYED)
def test_optimizer_in_backward_with_closures(memory):
    """Parameters step as soon as their gradient is there; fns that hold all of them mind only their own."""
    lines = nn.ModuleList(linear() for _ in range(4))
    fns = [lambda x, i=i: lines[i](x).tanh() for i in range(4)]
    for p in lines.parameters():
        p.register_post_accumulate_grad_hook(step)
    start = {key: t.clone() for key, t in lines.state_dict().items()}
    a, b, results = draw(), draw(), []
    for policy in (memory, "store"):
        lines.load_state_dict(start)
        lines.zero_grad()
        loss_of(rg.run(rg.wirings.leapfrog(fns), {"a": a, "b": b}, memory=policy)).backward()
        results.append([p.detach().clone() for p in lines.parameters()])
    assert_same(*results)


def step(p):
    with torch.no_grad():
        p.sub_(p.grad, alpha=0.1)


class Same(nn.Module):
    """Attention that looks whether its inputs are one and the same tensor, as torch's own does."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True).double()

    def forward(self, q, k=None, v=None, context=None):
        k, v = (context, context) if k is None else (k, v)
        return self.attention(q, k, v, need_weights=False)[0]


@pytest.mark.parametrize("memory", POLICIES, ids=str)
@pytest.mark.parametrize("case", ["one source thrice", "context is the input", "one input for all"])
def test_the_same_tensor_twice(memory, case):
    fn, other, x = Same(), Attend(), draw(2, 3, WIDTH)

    def make(memory):
        if case == "one source thrice":
            return rg.run([rg.Update("a", fn, ("b", "b", "b")), rg.Update("b", other, "a")], {"a": x, "b": x}, memory=memory)
        if case == "context is the input":
            net = rg.ReversibleSequence([(fn, other)] * 2, memory=memory)
            return net(x, context=x)
        updates = [rg.Update("a", fn, ("b", "c", "c")), rg.Update("b", fn, ("c", "a", "a"))]
        return rg.run(updates, dict.fromkeys("abc", x), memory=memory)

    wanted = [x, *parameters([fn, other])]
    assert_same(gradients(lambda: make(memory), wanted), gradients(lambda: make("store"), wanted))


@pytest.mark.parametrize("memory", REPLAYED)
def test_backward_inside_backward(memory):
    """A tensor hook inside fn goes through a part of the same graph while the outer backward does not keep it."""
    line, last, found = linear(), linear(), []

    def fn(x):
        h = line(x).tanh()
        aux = last(h).square().sum()
        if h.requires_grad and not rg.replaying():

            def inner(_):
                handle.remove()  # it would be called again for the inner gradient
                found.append(torch.autograd.grad(aux, h, retain_graph=True)[0])

            handle = h.register_hook(inner)
        return last(h)

    a, b, results = draw(), draw(), []
    other = mlp()
    for policy in (memory, "store"):
        found.clear()
        out = wound(fn, policy, other)(a, b)
        results.append([*torch.autograd.grad(loss_of(out), [a, b, *line.parameters()]), *found])
    assert_same(*results)


class Graph(nn.Module):
    """A sparse buffer, as in a graph network."""

    def __init__(self):
        super().__init__()
        self.line = linear()
        self.register_buffer("edges", torch.eye(3, dtype=torch.float64).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.edges, self.line(x).tanh())


@pytest.mark.parametrize("memory", POLICIES, ids=str)
def test_sparse_buffer(memory):
    fn, other = Graph(), mlp()
    a, b = draw(), draw()
    wanted = [a, b, *parameters([fn])]
    assert_same(*(gradients(lambda: wound(fn, m, other)(a, b), wanted) for m in (memory, "store")))


@pytest.mark.parametrize("memory", REPLAYED)
def test_activation_left_on_a_module(memory):
    """`self.last = h`, not detached: one graph is alive at a time, without gc."""

    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.last = linear(), None

        def forward(self, x):
            self.last = self.line(x).tanh()
            return self.last

    fn, other = Leaves(), mlp()

    def storages():
        return sum(type(t) is torch.Tensor and t.shape == (3, WIDTH) for t in gc.get_objects())

    gc.collect()
    gc.disable()
    counts = []
    for _ in range(4):
        wound(fn, memory, other)(draw(), draw())
        counts.append(storages())
    gc.enable()
    assert counts[1] == counts[2] == counts[3]


@pytest.mark.gpu
def test_part_of_fn_on_another_device():
    """Backward of the two devices runs in two threads, in no promised order."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.here, self.there = linear().cuda(), linear()
            self.grid = torch.randn(400, WIDTH, dtype=torch.float64)

        def forward(self, x):
            return self.here(x).tanh() * self.there(self.grid).tanh().mean(0).cuda()

    fns = [Two() for _ in range(6)]
    a, b = (torch.randn(3, WIDTH, dtype=torch.float64, device="cuda", requires_grad=True) for _ in range(2))
    wanted = [a, b, *parameters(fns)]
    runs = [gradients(lambda: rg.run(rg.wirings.leapfrog(fns), {"a": a, "b": b}, memory=m), wanted) for m in ("reverse", "store")]
    assert_same(*runs)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("drawing", [True, False])
def test_a_hook_draws_between_the_updates_of_backward(drawing, memory):
    """No fn moves the generators, so they are not set for each; one that borrows them must yet find them as they were."""

    def noisy(x):
        with torch.random.fork_rng(devices=[]):
            y = x.sin() * torch.rand_like(x)
        if drawing and y.requires_grad and not rg.replaying():
            y.register_hook(lambda grad: grad * torch.rand(()))
        return y

    def step(policy):
        a, b = draw(), draw()
        found = gradients(lambda: rg.run(rg.wirings.leapfrog([noisy] * 5), {"a": a, "b": b}, memory=policy), [a, b])
        return [*found, torch.get_rng_state().double()]

    torch.manual_seed(1)
    expected = step("store")
    torch.manual_seed(1)
    assert_same(step(memory), expected)


@pytest.mark.parametrize("memory", REPLAYED)
def test_autograd_inside_of_the_second_run_alone(memory):
    """What fn saves is not numbered unless it asks for some of it itself; here it does so only in its second run."""
    seen = []

    def fn(x):
        y = x.sin()
        if rg.replaying():
            seen.append(torch.autograd.grad(y.sum(), x, retain_graph=True)[0])
        return y.tanh()

    a, b = draw(), draw()
    run = {policy: lambda policy=policy: wound(fn, policy, torch.cos)(a, b) for policy in (memory, "store")}
    assert_same(gradients(run[memory], [a, b]), gradients(run["store"], [a, b]))
    assert len(seen) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, draw())], ids=["scripted", "traced"])
@pytest.mark.parametrize("inside", [False, True])
def test_torchscript_is_refused(memory, make, inside):
    """Its executor looks at the first runs and changes what the next ones save; store does not mind."""
    fn = make(linear())
    fn = nn.Sequential(fn, nn.Tanh()) if inside else fn
    refused = r"update 0: a .*TorchScript.*Use the module that it was made of"
    with pytest.raises(rg.ProgramError, match=refused):
        wound(fn, memory)(draw(), draw())
    net = rg.Reversible([rg.Update("a", fn, "b")], memory=memory)
    assert re.search(refused, str(rg.check.gradients(net, {"a": draw(), "b": draw()})))
    loss_of(wound(fn, "store")(draw(), draw())).backward()
