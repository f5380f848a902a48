"""rg.compile_fns: functions in two forms, and budgets that choose between them; Budget("auto")."""

import copy
import pickle
import threading

import pytest
import torch
from support import WIDTH, assert_same, draw, gradients, loss_of, mlps, rg
from torch import nn

from retrograde._base import lean as form
from retrograde._memory import budget
from retrograde.bench.meter import LiveBytes

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Chain(nn.Module):
    """Operations that are cheap to compute anew, between two matrix products."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))

    def forward(self, x):
        y = self.first(x)
        for _ in range(6):
            y = (y.tanh() + y.sin()).exp().log1p()
        return self.last(y)


def net_of(blocks=4, **options):
    return rg.ReversibleSequence([(Chain(), Chain()) for _ in range(blocks)], **options)


def chosen(net, x):
    """How many updates are reversed, stored in the lean form, stored in full, once that is known; gradients equal store's."""
    net._program_for({}).notes.setdefault("learned", {}).clear()
    plain = copy.deepcopy(net)
    plain.memory = "store"
    true = gradients(lambda: plain(x), [x, *plain.parameters()])
    for _ in range(4):
        assert_same(gradients(lambda: net(x), [x, *net.parameters()]), true)
    (learned,) = net._program_for({}).notes.setdefault("learned", {}).values()
    count = 2 * len(net.blocks)
    return count - learned.stored, learned.stored - learned.full, learned.full


def test_recomputations_leave_the_thread_in_its_form():
    net = rg.compile_fns(rg.ReversibleSequence([tuple(mlps(2)) for _ in range(3)], memory=rg.Budget(2_500)), backend="eager")
    for _ in range(2):  # the full form, the lean one
        loss_of(net(draw())).backward()
        assert not form._LOCAL.lean


def test_a_budget_takes_the_lean_form_first_and_the_full_one_where_there_is_room():
    net = rg.compile_fns(net_of(), backend="aot_eager")
    x = draw(16, WIDTH)
    net.memory = rg.Budget(1 << 40)
    assert chosen(net, x) == (0, 0, 8)
    (learned,) = net._program_for({}).notes.setdefault("learned", {}).values()
    full, lean = map(sum, learned.sizes)
    assert lean < full / 2
    around = 2 * 2 * x.nbytes + learned.largest
    net.memory = rg.Budget(around + lean // 2)
    reverse, some, none = chosen(net, x)
    assert (reverse + some, none) == (8, 0)
    assert 3 <= some <= 4
    net.memory = rg.Budget(around + lean)
    assert chosen(net, x) == (0, 8, 0)
    net.memory = rg.Budget(around + (lean + full) // 2)
    none, some, rest = chosen(net, x)
    assert none == 0
    assert 3 <= rest <= 4


@pytest.mark.parametrize("share", [0.3, 0.7, 1.3, 3.0])
def test_never_beyond_the_budget(share):
    """At a new size in the first pass too, as a meter of live bytes sees it."""
    net = rg.compile_fns(net_of(), backend="eager")
    for rows in (256, 512):
        x = draw(rows, WIDTH)
        lean = 8 * x.nbytes
        net.memory = rg.Budget(int(4 * x.nbytes + share * lean + 40 * x.nbytes))
        for _ in range(5):
            with LiveBytes() as meter:
                loss_of(net(x)).backward()
            own = sum(p.nbytes for p in net.parameters()) + x.nbytes
            assert meter.peak <= net.memory.bytes + own


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store", rg.StoreLast(2)], ids=str)
def test_everywhere_else_the_full_form_runs(memory):
    net = net_of(2)
    plain = copy.deepcopy(net)
    rg.compile_fns(net, backend="aot_eager")
    net.memory, plain.memory = memory, "store"
    x = draw(5, WIDTH)
    found = gradients(lambda: net(x), [x, *net.parameters()])
    assert_same(found, gradients(lambda: plain(x), [x, *plain.parameters()]))


def test_inductor():
    net = rg.compile_fns(net_of(1, memory=rg.Budget(1 << 20)))
    assert list(net.state_dict()) == list(net_of(1).state_dict())
    chosen(net, draw(5, WIDTH))


def test_three_streams():
    """Of what stands in a sum, the function inside is compiled, and a budget chooses its form."""
    net = rg.compile_fns(net_of(3, streams=3, memory=rg.Budget(1 << 20)), backend="aot_eager")
    chosen(net, draw(5, WIDTH))


def test_a_copy_is_not_compiled():
    net = rg.compile_fns(net_of(1), backend="eager")
    assert copy.deepcopy(net).blocks[0].f._compiled_call_impl is None


def test_reversible_too():
    net = rg.compile_fns(rg.Reversible(rg.wirings.leapfrog(mlps(3)), memory=rg.Budget(1 << 20)), backend="eager")
    streams = {"a": draw(), "b": draw()}
    wanted = [*streams.values(), *net.parameters()]
    found = gradients(lambda: net(streams), wanted)
    net.memory = "store"
    assert_same(found, gradients(lambda: net(streams), wanted))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rg.compile_fns(net_of(1), lean=1.5), "between 0 and 1"),
        (lambda: rg.compile_fns(nn.Linear(2, 2)), "takes an rg.Sequential, .*Give the one inside"),
        (lambda: rg.compile_fns(rg.Reversible([rg.Update("a", torch.sin, "b")])), "compiles modules in place"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(rg.ProgramError, match=words):
        make()


# -- what is free ------------------------------------------------------------------------------------------------------


def test_auto_takes_what_is_free(monkeypatch):
    net = net_of(4, memory=rg.Budget("auto"))
    plain = copy.deepcopy(net)
    plain.memory = "store"
    x = draw(16, WIDTH)
    wanted = [x, *net.parameters()]
    true = gradients(lambda: plain(x), [x, *plain.parameters()])
    limits = []
    real = budget.Purse.__init__

    def noted(self, limit, *more):
        limits.append(limit)
        real(self, limit, *more)

    monkeypatch.setattr(budget.Purse, "__init__", noted)
    assert_same(gradients(lambda: net(x), wanted), true)
    assert limits[-1] > 1 << 20
    for free in (90_000, 200_000):  # the least that was seen stays
        monkeypatch.setattr(budget, "free_bytes", lambda *_, free=free: free)
        assert_same(gradients(lambda: net(x), wanted), true)
        assert limits[-1] == 90_000


def test_auto_leaves_room_for_gradients():
    net = net_of(4)
    x = draw(2, WIDTH)
    program = net._program_for({})
    before = budget.free_bytes(program, [x])
    big = nn.Linear(8192, 8192)
    other = rg.Reversible([rg.Update("a", big, "b")]).program
    assert budget.free_bytes(other, [x]) < before - big.weight.nbytes // 2


def test_other_words_are_refused():
    with pytest.raises(rg.ProgramError, match=r'takes "auto" or a size: .* is not a size'):
        rg.Budget("all")


class Scaled(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.scale, self.p = nn.Parameter(torch.ones(64).double()), p

    def forward(self, x):
        return nn.functional.dropout((x * self.scale).exp().log(), self.p)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("rows", [[64], [2, 64]], ids=str)
def test_dropout_is_the_same_in_both_directions(backend, rows, monkeypatch):
    """The gradient of a linear function with dropout tells its mask; torch's partitioner would draw another one in backward."""
    monkeypatch.setattr(budget.Learned, "_choose", lambda self, *_: setattr(self, "stored", 1))  # in the lean form
    net = rg.Reversible([rg.Update("a", Scaled(0.5), "b")], memory=rg.Budget(1 << 30), arithmetic="float")
    rg.compile_fns(net, backend=backend)
    for _ in range(4):
        net.zero_grad()
        out = net({"a": torch.zeros(*rows).double(), "b": torch.ones(*rows).double()})["a"]
        out.square().sum().backward()
        true = 2 * out.detach().square()
        assert torch.allclose(net.fns[0].scale.grad, true if len(rows) == 1 else true.sum(0))


# -- programs inside of programs ---------------------------------------------------------------------------------------


class Inner(nn.Module):
    """A program as a function of another."""

    def __init__(self, **options):
        super().__init__()
        self.net = rg.compile_fns(net_of(1, **options), backend="aot_eager")

    @torch.compiler.disable
    def forward(self, x):
        return self.net(x)


def same_as_store(net, x, passes=4):
    plain = copy.deepcopy(net)
    for part in plain.modules():
        if isinstance(part, (rg.Reversible, rg.ReversibleSequence)):
            part.memory = "store"
    true = gradients(lambda: plain(x), [x, *plain.parameters()])
    for _ in range(passes):
        assert_same(gradients(lambda: net(x), [x, *net.parameters()]), true)


@pytest.mark.parametrize("memory", ["reverse", rg.Budget(1 << 30)], ids=str)
def test_a_program_inside_of_a_lean_function_runs_in_its_own_form(memory):
    net = rg.ReversibleSequence([(Inner(memory=memory), Inner(memory=memory)) for _ in range(2)], memory=rg.Budget(1 << 30))
    same_as_store(rg.compile_fns(net, backend="eager"), draw(5, WIDTH))


@pytest.mark.parametrize("limit", [1 << 30, "auto"])
def test_a_program_that_is_run_again_does_not_change_its_plan(limit, monkeypatch):
    """The inner program learns and the free memory shrinks while the outer one runs it again."""
    free = iter([*[1 << 40] * 10, *[1 << 39] * 10])  # less in the third pass, when the inner one is run again
    monkeypatch.setattr(budget, "free_bytes", lambda *_: next(free))
    inner = Inner(memory=rg.Budget(limit))
    same_as_store(rg.ReversibleSequence([(inner, Chain()), (Chain(), inner)]), draw(5, WIDTH))


# -- what was learned holds for what it was learned on -----------------------------------------------------------------


def test_outputs_are_no_sources():
    """As under every policy: the gradient of an output is that of what is done with it, before and after sizes are known."""
    net = rg.Reversible(rg.wirings.leapfrog([Chain(), Chain()]), memory=rg.Budget(1 << 30))
    rg.compile_fns(net, backend="eager")
    for _ in range(4):
        out = net({"a": draw(), "b": draw()})
        assert torch.autograd.grad(loss_of(out["b"]), out["a"], allow_unused=True) == (None,)
        assert torch.autograd.grad(loss_of(net({"a": draw(), "b": draw()})["a"]), out["b"], allow_unused=True) == (None,)


class Wide(nn.Module):
    """Saves what depends on the side input."""

    def __init__(self):
        super().__init__()
        self.lin, self.drop = nn.Linear(WIDTH, WIDTH).double(), nn.Dropout(0.5)

    def forward(self, x, context, whole=False):
        rows = context if whole else context[:1]
        return self.drop(self.lin(x)).sin() + (rows @ x.sum(0)).sin().exp().sum()


CHANGES = {
    "a longer side input": lambda net, side: side.update(context=draw(500, WIDTH, grad=False)),
    "a side input with a gradient": lambda net, side: side["context"].requires_grad_(),
    "a flag": lambda net, side: side.update(whole=True),
    "parameters": lambda net, side: net.blocks[0].f.lin.requires_grad_(False),
    "evaluation": lambda net, side: net.eval(),
    "exact arithmetic": lambda net, side: setattr(net, "arithmetic", "exact"),
    "compiled again": lambda net, side: rg.compile_fns(net, backend="eager", lean=0.9),
    "autocast": None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_sizes_is_learned_anew(change):
    net = rg.ReversibleSequence([(Wide(), Wide())], route=(True, True), memory=rg.Budget(1 << 30), arithmetic="float")
    rg.compile_fns(net, backend="eager")
    side = {"context": draw(5, WIDTH, grad=False), "whole": False}
    x = draw()
    learned = net._program_for(side).notes.setdefault("learned", {})
    for _ in range(3):
        net(x, **side)
    assert [len(one.sizes) for one in learned.values()] == [2]
    if change == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            net(x, **side)
    else:
        CHANGES[change](net, side)
        net(x, **side)
    assert [len(one.sizes) for one in learned.values()] == [2, 1]


def test_no_more_is_kept_than_some_sizes():
    net = rg.compile_fns(
        rg.ReversibleSequence([(nn.Tanh(), nn.Tanh())], memory=rg.Budget(1 << 30)), backend="eager", dynamic=True
    )
    for rows in range(2, 400):
        net(torch.ones(rows, 2, requires_grad=True))
    learned = net._program_for({}).notes.setdefault("learned", {})
    assert 50 < len(learned) < 300
    net.blocks[0].f._compiled_call_impl = net.blocks[0].g._compiled_call_impl = None
    learned.clear()
    net(torch.ones(3, 2, requires_grad=True))
    assert not learned  # there is nothing to learn


def test_auto_is_not_held_to_what_was_too_little(monkeypatch):
    net = net_of(1, memory=rg.Budget("auto"))
    x = draw()
    monkeypatch.setattr(budget, "free_bytes", lambda *_: 1)
    with pytest.raises(rg.ProgramError, match="too small"):
        net(x)
    monkeypatch.undo()
    same_as_store(net, x, 1)


def test_a_net_that_has_learned_can_be_copied():
    net = rg.compile_fns(net_of(1, memory=rg.Budget(1 << 30)), backend="eager")
    for _ in range(3):
        net(draw())
    twin = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert not twin._program_for({}).notes
    same_as_store(twin, draw(), 1)


@pytest.mark.parametrize("arithmetic", ["auto", "exact"])
def test_while_another_thread_compiles(arithmetic, monkeypatch):
    """`torch.compiler.is_compiling` is of the whole process, and true then."""
    net = net_of(1, arithmetic=arithmetic)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    same_as_store(net, draw(), 1)
    if arithmetic == "exact":
        with pytest.raises(rg.OutOfRange):
            net(1e30 * draw())


def test_threads_share_what_is_learned():
    net = rg.compile_fns(net_of(2, memory=rg.Budget(1 << 30)), backend="eager")
    x, failed = draw(), []

    def work():
        try:
            same_as_store(net, x)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# -- offload -------------------------------------------------------------------------------------------------------------


def test_under_offload_the_lean_form_runs_and_what_it_saves_moves():
    """Nothing is run again; parameters stay where they are."""
    net, x = rg.Sequential([Chain() for _ in range(5)]), draw(64, WIDTH)
    wanted = [x, *net.parameters()]
    true = gradients(lambda: net(x), wanted)
    rg.compile_fns(net, backend="aot_eager")
    net.memory, ran = "offload", []
    for layer in net:
        layer.register_forward_hook(lambda *_: ran.append(rg.replaying()))
    before = rg.offload_stats()
    assert_same(gradients(lambda: net(x), wanted), true)
    assert ran == [False] * 5
    after = rg.offload_stats()
    moved = after.copied_out - before.copied_out
    assert 4 * x.nbytes <= moved <= 12 * x.nbytes  # of each layer but the last the input, or little more
    assert after.copied_back - before.copied_back <= moved, "something came back twice"
    loss = loss_of(net(x))
    with torch.no_grad():
        net[2].last.weight.add_(1)
    with pytest.raises(rg.NotRepeated, match=r"update 2: .*edited in place after the forward pass"):
        loss.backward()
