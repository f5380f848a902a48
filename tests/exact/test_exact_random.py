"""Exact arithmetic on random programs."""

from dataclasses import replace

import pytest
import torch
from exact_support import SETTINGS, Case, Recovered, draw, observed, same
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Branch, cases
from support import POLICIES, WIDTH, rg

from retrograde._engine import call as calls


@pytest.mark.parametrize("memory", POLICIES, ids=str)
@settings(deadline=None, derandomize=True, max_examples=25, database=None)
@given(case=cases(), setting=st.sampled_from(list(SETTINGS)))
def test_random_program(memory, case, setting):
    """2 to 5 streams, up to 30 updates: frozen, shared and detached fns, dropout, a context, a loss on some streams."""
    case = replace(case, fns=[(kind, False, frozen, dropout) for kind, _, frozen, dropout in case.fns])
    torch.manual_seed(0)
    fns = [Branch(*fn) for fn in case.fns]
    updates = [
        rg.Update(f"s{target}", fns[fn], [f"s{i}" for i in sources], takes=["context"] if takes else ())
        for target, sources, fn, takes in case.updates
    ]
    streams = {f"s{i}": draw(grad=grad) for i, grad in enumerate(case.grads)}
    whole = Case(setting, updates, streams, {"context": draw(1, WIDTH, grad=case.context)}, fns)

    def run(memory):
        out = whole.out(memory)
        return {f"s{i}": out[f"s{i}"] for i in case.loss}

    if not any(t.requires_grad for t in run("store").values()):
        assert not any(t.requires_grad for t in run(memory).values())
        return
    log = calls.observer = Recovered()
    try:
        found = observed(lambda: run(memory), whole.wanted)
    finally:
        calls.observer = None
    assert log.apart == 0
    true = observed(lambda: run("store"), whole.wanted)
    assert all(map(same, found, true))
