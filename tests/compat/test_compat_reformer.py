"""The drop-in for reformer-pytorch: signals, thresholds, layer dropout, caches."""

import pytest
import torch
from compat_support import Told, both_halves, build, pairs_by_hand
from support import REPLAYED, assert_same, gradients, loss_of, mlp
from torch import nn

from retrograde.compat import reformer


def told(depth=2, send_signal=True, **options):
    log = []
    blocks = [(Told(log, "f"), Told(log, "g")) for _ in range(depth)]
    return reformer.ReversibleSequence(blocks, send_signal=send_signal, **options), log


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_signals(training, memory):
    """`_reverse` in the second run, but not in eval, where nothing was cached."""
    net, log = told(memory=memory)
    net.train(training)
    loss = loss_of(net(both_halves()))
    assert log == [("f", False, 0), ("g", False, 0), ("f", False, 1), ("g", False, 1)]
    log.clear()
    loss.backward()
    assert log == [("g", training, 1), ("f", training, 1), ("g", training, 0), ("f", training, 0)]


def test_signals_go_beside_the_arguments_whatever_the_route():
    seen = []

    def fn(x, **given):
        seen.append(sorted(given))
        return x.sin()

    net = reformer.ReversibleSequence([(fn, fn)], send_signal=True)
    net(both_halves(), mask=None)
    net(both_halves(), arg_route=(False, True), mask=None, _depth=7)
    net(both_halves(), arg_route=(False, False), mask=None)
    both, signals = ["_depth", "_reverse", "mask"], ["_depth", "_reverse"]
    assert seen == [both, signals, signals, both, signals, signals]


def test_no_signals_unless_asked_for():
    net, log = told(send_signal=False)
    net(both_halves())
    assert set(log) == {("f", None, None), ("g", None, None)}


@pytest.mark.parametrize(("length", "reversed_"), [(4, False), (5, False), (6, True)])
def test_reverse_thres(length, reversed_):
    """At it and under it ordinary autograd without signals, above it reversal."""
    net, log = told(reverse_thres=5)
    loss = loss_of(net(both_halves(length)))
    first = list(log)
    loss.backward()
    if reversed_:
        assert len(log) == 8
        assert first[0] == ("f", False, 0)
    else:
        assert log == first == [("f", None, None), ("g", None, None)] * 2


@pytest.mark.parametrize("thres", [0, 5], ids=["above the threshold", "under the threshold"])
@pytest.mark.parametrize("p", [0.3, 0.6, 1.0])
def test_layer_dropout(p, thres):
    """The blocks that a seed keeps, by one draw before all others; their gradients, and none for the rest."""
    it = build("reformer", 5, 0.25, layer_dropout=p, reverse_thres=thres)

    def hand():
        dropped = torch.empty(5).uniform_(0, 1) < p
        kept = [block for block, drop in zip(it.net.blocks, dropped, strict=True) if not drop] or it.net.blocks[:1]
        return torch.cat(pairs_by_hand(kept, *it.inputs[0].chunk(2, 2), it.side, it.side), 2)

    for seed in range(4):
        assert_same(gradients(it, it.wanted, seed), gradients(hand, it.wanted, seed))


def test_layer_dropout_keeps_the_depths():
    net, log = told(6, layer_dropout=0.5)
    x = both_halves()
    torch.manual_seed(1)
    dropped = torch.empty(6).uniform_(0, 1) < 0.5
    torch.manual_seed(1)
    net(x)
    kept = [i for i, drop in enumerate(dropped.tolist()) if not drop]
    assert 0 < len(kept) < 6
    assert [depth for _, _, depth in log] == [i for i in kept for _ in range(2)]


def test_layer_dropout_is_for_training():
    net, log = told(layer_dropout=1.0)
    net.eval()
    x, state = both_halves(), torch.get_rng_state()
    net(x)
    assert len(log) == 4
    assert torch.equal(torch.get_rng_state(), state)


class Cached(nn.Module):
    """As LSH attention does: random numbers are drawn, cached by depth, and in the second run read from the cache."""

    def __init__(self):
        super().__init__()
        self.fn, self.cache = mlp(), {}

    def forward(self, x, _reverse=False, _depth=None):
        drawn = torch.rand_like(x)
        if _reverse:
            drawn = self.cache[_depth]
        elif self.training:
            self.cache = {**self.cache, _depth: drawn}
        return self.fn(x * drawn)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_cache_in_tied_weights(training):
    """What one depth caches is no edit of what another holds, over several steps."""
    f, g = Cached(), mlp()
    net = reformer.ReversibleSequence([(f, lambda x, **_: g(x))] * 3, send_signal=True).train(training)
    x = both_halves()
    wanted = [x, *f.parameters(), *g.parameters()]

    def hand():
        x1, x2 = x.chunk(2, 2)
        for _ in range(3):
            x1 = x1 + f.fn(x2 * torch.rand_like(x2))
            x2 = x2 + g(x1)
        return torch.cat((x1, x2), 2)

    for seed in range(3):
        assert_same(gradients(lambda: net(x), wanted, seed), gradients(hand, wanted, seed))
