"""rg.compile_fns: functions in two forms, and budgets that choose between them; Budget("auto")."""

import copy

import pytest
import torch
from support import WIDTH, assert_same, draw, gradients, mlps, rg
from torch import nn

from retrograde import engine, purse

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


def forms_of(net, x, backend="aot_eager", passes=6):
    """Which form stored updates ran in, pass by pass as long as it is counted, with gradients compared to store."""
    seen = []
    real = purse.Learned.look_at

    def look_at(self, made, count):
        seen.append((["lean" if record.lean else "full" for record, _ in made.stored], made.total + made.base + made.largest))
        return real(self, made, count)

    wanted = [x, *net.parameters()]
    plain = copy.deepcopy(net)
    plain.memory = "store"
    true = gradients(lambda: plain(x), [x, *plain.parameters()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(purse.Learned, "look_at", look_at)
        for _ in range(passes):
            assert_same(gradients(lambda: net(x), wanted), true)
    return seen


def sizes(net, x):
    """What it takes to store all in the lean form, and in full."""
    found = {}
    for lean in (True, False):
        one = purse.Purse(1 << 40, [x, x])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "Purse", lambda *_, one=one: one)
            net.memory = rg.Budget(1 << 40)
            net._program_for({}).learned.clear()
            if not lean:
                patch.setattr(
                    purse.Learned, "__init__", lambda self: vars(self).update(full=8, growing=False, last=None, stored=None)
                )
            net(x)
        net._program_for({}).learned.clear()
        found[lean] = one.base + one.total + one.largest
    return found[True], found[False]


def test_a_budget_takes_the_lean_form_first_and_the_full_one_where_there_is_room():
    net = rg.compile_fns(net_of(), backend="aot_eager")
    x = draw(16, WIDTH)
    lean, full = sizes(net, x)
    assert lean < full / 2
    # not enough for all in the lean form: the rest is reversed
    net.memory = rg.Budget(int(0.8 * lean))
    seen = forms_of(net, x)
    assert len(seen) == 2  # alike: nothing more is counted
    assert 0 < len(seen[-1][0]) < 8
    assert set(seen[-1][0]) == {"lean"}
    # between the two: all are stored, some of the last in full, and most of what is given is used
    budget = (lean + full) // 2
    net.memory = rg.Budget(budget)
    seen = forms_of(net, x)
    forms, used = seen[-1]
    assert seen[-1] == seen[-2]
    assert len(seen) < 6
    assert len(forms) == 8
    assert 2 <= forms.count("full") < 8
    assert forms == sorted(forms, reverse=True)
    assert 0.8 * budget < used <= budget
    # more than all of it takes
    net.memory = rg.Budget(2 * full)
    assert forms_of(net, x)[-1][0] == ["full"] * 8
    # at a size that has not been seen it is lean again, and within the budget
    net.memory = rg.Budget(budget * 2)
    assert forms_of(net, draw(32, WIDTH), passes=1)[0][1] <= budget * 2


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
    forms_of(net, draw(5, WIDTH), passes=2)


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
        (lambda: rg.compile_fns(nn.Linear(2, 2)), "takes an rg.Reversible"),
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
    real = purse.Purse.__init__

    def noted(self, limit, *more):
        limits.append(limit)
        real(self, limit, *more)

    monkeypatch.setattr(purse.Purse, "__init__", noted)
    assert_same(gradients(lambda: net(x), wanted), true)
    assert limits[-1] > 1 << 20
    for free in (90_000, 200_000):  # the least that was seen stays
        monkeypatch.setattr(engine, "free_bytes", lambda *_, free=free: free)
        assert_same(gradients(lambda: net(x), wanted), true)
        assert limits[-1] == 90_000


def test_auto_leaves_room_for_gradients():
    net = net_of(4)
    x = draw(2, WIDTH)
    program = net._program_for({})
    before = purse.free_bytes(program, [x])
    big = nn.Linear(8192, 8192)
    other = rg.Reversible([rg.Update("a", big, "b")]).program
    assert purse.free_bytes(other, [x]) < before - big.weight.nbytes // 2


def test_other_words_are_refused():
    with pytest.raises(rg.ProgramError, match='1 or more, or "auto"'):
        rg.Budget("all")
