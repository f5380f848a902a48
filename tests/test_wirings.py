"""Every wiring against the same equations written by hand."""

import pytest
from support import POLICIES, assert_same, draw, gradients, mlps, parameters, rg


@pytest.mark.parametrize("memory", ["store", *POLICIES])
def test_pair(memory):
    fns = mlps(6)
    a, b = draw(), draw()
    updates = [u for f, g in zip(fns[::2], fns[1::2], strict=True) for u in rg.wirings.pair(f, g)]

    def by_hand():
        x1, x2 = a, b
        for f, g in zip(fns[::2], fns[1::2], strict=True):
            x1 = x1 + f(x2)
            x2 = x2 + g(x1)
        return {"x1": x1, "x2": x2}

    wanted = [a, b, *parameters(fns)]
    found = gradients(lambda: rg.run(updates, {"x1": a, "x2": b}, memory=memory), wanted)
    assert_same(found, gradients(by_hand, wanted))
