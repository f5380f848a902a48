"""rg.check.gradients runs later steps, on other batches."""

import collections
import re

import pytest
import torch
from check_support import Counting, Fault, snapshot
from support import REPLAYED, WIDTH, draw, mlp, mlps, rg, streams
from torch import nn

# -- later steps, on other batches -------------------------------------------------------------------------------------


class Average(nn.Module):
    """A moving average in an attribute, which starts at that of the first batch: recomputed, it is the same there."""

    def __init__(self, decay=0.9):
        super().__init__()
        self.fn, self.decay, self.average = mlp(), decay, None

    def forward(self, x):
        y = self.fn(x)
        now = y.detach().flatten(0, -2).mean(0)
        self.average = now if self.average is None else self.decay * self.average + (1 - self.decay) * now  # here
        return y - self.average


class Buffered(Average):
    """The same in a buffer."""

    def __init__(self):
        super().__init__()
        del self.average
        self.register_buffer("average", torch.zeros(WIDTH).double())

    def forward(self, x):
        y = self.fn(x)
        self.average.mul_(self.decay).add_(y.detach().flatten(0, -2).mean(0), alpha=1 - self.decay)
        return y - self.average


class Tokens(nn.Module):
    """Ids and a mask are all that it takes."""

    def __init__(self, *fns):
        super().__init__()
        self.embed, self.net = nn.Embedding(50, WIDTH).double(), rg.ReversibleSequence([fns])

    def forward(self, ids, mask):
        assert ids.min() >= 0
        assert ids.max() < 50
        assert mask.any(-1).all(), "no row is masked altogether"
        return self.net(self.embed(ids)).masked_fill(~mask[..., None], 0.0)


def ids(batch):
    mask = torch.arange(8) < torch.randint(1, 8, (batch, 1))
    return torch.randint(50, (batch, 8)), mask


@pytest.mark.parametrize("memory", ["store", *REPLAYED])
@pytest.mark.parametrize("batch", [0, 1, 2, 5], ids=lambda batch: f"{batch} rows of ids" if batch else "floats")
def test_a_moving_average_shows_on_another_batch(memory, batch):
    for kind in (Average, Buffered):
        net = Tokens(mlp(), kind()) if batch else rg.ReversibleSequence([(mlp(), kind())])
        given = ids(batch) if batch else (draw(),)
        next(m for m in net.modules() if hasattr(m, "memory")).memory = memory
        state, others = snapshot(net, [])
        report = rg.check.gradients(net, *given)
        now, others_now = snapshot(net, [])
        assert all(torch.equal(now[key], state[key]) for key in state)
        assert others_now == others
        if kind is Buffered:
            assert (report.ok, report.findings, report.steps) == (True, [], 3), str(report)
            continue
        (finding,) = report.findings
        assert net.get_submodule(finding.program).blocks[0].g.average is None, "as it was"
        assert (finding.kind, finding.where) == ("stateful", "update 1: x2 += Average(x1)")
        assert finding.detail.startswith(
            "it changes its attribute 'average', and when recomputed on the same sources, it returned"
        )
        assert finding.detail.endswith(", in step 2, on another batch")
        assert finding.code.endswith("# here")
        assert report.steps == 2
        if memory == "reverse":
            assert not report.ok
            assert report.first == finding.where
            assert "(in step 2, on another batch)" in str(report)


@pytest.mark.parametrize("kind", ["a warm-up", "every hundredth", "every hundredth, before it is counted", "log"])
def test_a_counter_that_will_matter_is_found(kind):
    net = rg.Reversible(rg.wirings.leapfrog([mlp(), Counting(kind), mlp()]))
    report = rg.check.gradients(net, streams())
    assert net.fns[1].calls == 0
    assert report.ok, "in these steps"
    if kind == "log":
        assert report.findings == []
        assert report.notes == ["update 1: b += Counting(a): it changes its attribute 'calls', which did no harm here"]
        return
    (finding,) = report.findings
    assert (finding.kind, finding.where) == ("stateful", "update 1: b += Counting(a)")
    assert re.search(r"it changes its attribute 'calls', .*, when its counters stand at (9999|10000)$", finding.detail)
    assert finding.code.endswith("# here")


class Own(nn.Module):
    """A block that runs its program itself."""

    def __init__(self, fn=None):
        super().__init__()
        self.f, self.g = mlp(dropout=0.1), fn or mlp()

    def forward(self, x, **how):
        return sum(rg.run([rg.Update("a", self.f, "b"), rg.Update("b", self.g, "a")], {"a": x, "b": x}, **how).values()) / 2


def test_modules_that_call_run_are_found_by_running_them():
    x = draw(4, WIDTH)
    sound = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Own(), Own())
    state, others = snapshot(sound, [])
    report = rg.check.gradients(sound, x)
    assert (report.ok, report.findings, report.replayed, report.steps) == (True, [], 4, 3), str(report)
    assert 0 < report.worst < 1e-9
    assert all(torch.equal(t, state[name]) for name, t in snapshot(sound, [])[0].items())
    assert snapshot(sound, [])[1] == others
    found = rg.check.drift(sound, x)
    assert [(row.program, row.index) for row in found.rows] == [("1", 0), ("1", 1), ("2", 0), ("2", 1)]
    for position in (1, 2):
        faulty = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Own(), Own())
        faulty[position] = Own(Fault("a call counter"))
        (finding,) = rg.check.gradients(faulty, x).findings
        assert (finding.program, finding.where) == (str(position), "update 1: b += Fault(a)")
        assert (finding.kind, "check_support.py:" in finding.line) == ("stateful", True)


def test_the_engine_does_not_verify_meanwhile():
    """The check compares by itself, and tells more: no error, no warning by value."""

    class Raising(Own):
        def forward(self, x):
            return super().forward(x, verify="error")

    report = rg.check.gradients(Raising(Fault("python random")), draw())
    assert [finding.kind for finding in report.findings] == ["non-deterministic"]
    with pytest.raises(rg.ReplayError):
        Raising(Fault("python random"))(draw()).sum().backward()


def test_a_batch_that_does_not_fit_is_a_note():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = rg.ReversibleSequence([mlps(2)])

        def forward(self, x):
            if not (x.diff(dim=0) > 0).all():
                raise ValueError("times must grow")
            return self.net(x)

    report = rg.check.gradients(Sorted(), torch.arange(4 * WIDTH).view(4, WIDTH).double())
    assert (report.ok, report.steps) == (True, 1)
    assert report.notes == [
        "one step was checked, as the net does not take a batch made of its input: ValueError: times must grow"
    ]


def test_a_step_that_raises_because_of_one_before():
    """Where the first batch would raise the error as well, it is no matter of the batch."""

    class Full(Average):
        def forward(self, x):
            if not rg.replaying():
                self.decay -= 0.5
                if self.decay < 0:
                    raise ValueError("no more")
            return self.fn(x)

    report = rg.check.gradients(rg.ReversibleSequence([(mlp(), Full())]), draw())
    assert not report.ok
    (finding,) = report.findings
    assert (finding.kind, finding.where) == ("stateful", "update 1: x2 += Full(x1)")
    assert "a later step raises ValueError: no more" in finding.detail
    assert "in its attribute 'decay'" in finding.detail


def test_parameters_that_fn_edits_are_put_back():
    class Initialised(nn.Module):
        """Sets its weight from its first batch."""

        def __init__(self):
            super().__init__()
            self.fn, self.scale = mlp(), nn.Parameter(torch.ones(WIDTH).double())
            self.register_buffer("made", torch.tensor(False))

        def forward(self, x):
            if not self.made:
                self.scale.data.copy_(1 / x.detach().std(0))
                self.made.fill_(True)
            return self.fn(x) * self.scale

    net = rg.ReversibleSequence([(Initialised(), mlp())])
    report = rg.check.gradients(net, draw(8, WIDTH))
    assert report.ok, str(report)
    assert torch.equal(net.blocks[0].f.scale, torch.ones(WIDTH).double())
    assert not net.blocks[0].f.made


QUEUE = collections.deque([1, 2])


def test_globals_that_nothing_changes_are_not_touched():
    """`__builtins__` is among the globals of a function: to clear and refill it would end the process."""

    def fn(x):
        return x.sin() * len(QUEUE)

    going = iter(QUEUE)
    assert rg.check.gradients(rg.Reversible([rg.Update("a", fn, "b"), rg.Update("b", torch.sin, "a")]), streams()).ok
    assert next(going) == 1, "it would raise an error after an edit"
