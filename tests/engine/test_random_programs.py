"""Random programs against a loop written by hand and against store."""

import pytest
import torch
from hypothesis import given, settings
from programs import Branch, cases
from support import POLICIES, WIDTH, assert_same, draw, loss_of, parameters, rg


def observed(make, wanted):
    """Outputs, gradients (None stays None) and the random state afterwards."""
    torch.manual_seed(1)
    out = make()
    found = torch.autograd.grad(loss_of(out), wanted, allow_unused=True)
    return [t.detach() for t in out.values()], found, torch.rand(2)


@pytest.mark.parametrize("memory", POLICIES)
@settings(deadline=None, derandomize=True, max_examples=60, database=None)
@given(case=cases())
def test_random_program(memory, case):
    """2 to 5 streams, up to 30 updates: affine, frozen, shared and detached fns, dropout, a context, a loss on some streams."""
    torch.manual_seed(0)
    fns = [Branch(*fn) for fn in case.fns]
    first = {f"s{i}": draw(grad=grad) for i, grad in enumerate(case.grads)}
    context = draw(1, WIDTH, grad=case.context)
    updates = [
        rg.Update(
            f"s{target}",
            fns[fn],
            [f"s{i}" for i in sources],
            takes=["context"] if takes else (),
            rule=rg.Affine() if fns[fn].affine else rg.Add(),
        )
        for target, sources, fn, takes in case.updates
    ]

    def run(memory):
        out = rg.run(updates, first, {"context": context}, memory=memory)
        return {f"s{i}": out[f"s{i}"] for i in case.loss}

    def by_hand():
        s = list(first.values())
        for target, sources, fn, takes in case.updates:
            out = fns[fn](*(s[i] for i in sources), **({"context": context} if takes else {}))
            s[target] = s[target] * out[0].exp() + out[1] if fns[fn].affine else s[target] + out
        return {f"s{i}": s[i] for i in case.loss}

    wanted = [t for t in (*first.values(), context, *parameters(fns)) if t.requires_grad]
    if not isinstance(loss_of(by_hand()), torch.Tensor):
        assert not any(t.requires_grad for t in run(memory).values())
        return
    some = [t for i, t in enumerate(wanted) if case.only[i % len(case.only)]] or wanted
    true_out, true, true_rng = observed(by_hand, some)
    for policy in ("store", memory):
        out, found, rng = observed(lambda: run(policy), some)
        assert torch.equal(rng, true_rng)
        assert [g is None for g in found] == [g is None for g in true]
        pairs = [(a, b) for a, b in zip(found, true, strict=True) if b is not None]
        assert_same([*out, *(a for a, _ in pairs)], [*true_out, *(b for _, b in pairs)])
