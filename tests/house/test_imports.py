"""What an import loads, and the engine on tensors that hold no data."""

import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from support import REPLAYED, ROOT, loaded_by, rg
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

STEP = """
import torch, retrograde as rg
net = rg.ReversibleSequence([(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1)) for _ in range(2)])
with torch.autocast("cpu"):
    loss = net(torch.ones(2, 4, requires_grad=True)).sum()
loss.backward()
"""


ABOVE = ("bench", "cli", "integrations", "models", "training")
DROP_INS = "from retrograde.compat import axial_attention, nuwa, nuwa_video_audio, reformer, se3_transformer"


@pytest.mark.parametrize("statements", ["import retrograde", STEP, DROP_INS], ids=["import", "a step", "the drop-ins"])
def test_loads_torch_and_the_standard_library_alone(statements):
    """Neither the import nor an ordinary step loads a third package or torch's compiler, which takes seconds to import."""
    of_torch = {name.partition(".")[0] for name in loaded_by("import torch")}
    loaded = loaded_by(statements)
    extra = {name.partition(".")[0] for name in loaded} - of_torch - set(sys.stdlib_module_names) - {"retrograde"}
    assert extra == set()
    assert "retrograde._engine.run" in loaded
    assert not {
        name
        for name in loaded
        if name.startswith(("torch._dynamo", "torch._inductor", *(f"retrograde.{name}" for name in ABOVE)))
    }
    assert ("retrograde.compat" in loaded) == (statements is DROP_INS)


class Branch(nn.Module):
    """Dropout, BatchNorm, a context and a buffer."""

    def __init__(self, width):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.5)
        self.register_buffer("table", torch.ones(width))

    def forward(self, x, context):
        return self.drop(self.norm(self.linear(x + context)) * self.table)


@pytest.mark.parametrize("memory", REPLAYED)
@pytest.mark.parametrize("rule", [rg.Add(), rg.Affine(), rg.Momentum()], ids=["add", "affine", "momentum"])
def test_runs_under_fake_tensor_mode(memory, rule):
    """Forward and backward without data, far beyond the memory of this machine: shapes, dtypes and devices are right."""
    rows, width = 1 << 28, 1 << 12
    state = torch.get_rng_state()
    with FakeTensorMode():
        fns = [Branch(width) for _ in range(4)]

        def twice(fn):
            return (lambda x, context: (fn(x, context), fn(x, context))) if isinstance(rule, rg.Affine) else fn

        updates = [
            rg.Update(target, twice(fn), source, takes="context", rule=rule)
            for fn, target, source in zip(fns, "abab", "baba", strict=True)
        ]
        streams = {name: torch.randn(rows, width, requires_grad=True) for name in "ab"}
        context = torch.randn(width, requires_grad=True)
        out = rg.run(updates, streams, {"context": context}, memory=memory)
        assert all(isinstance(t, FakeTensor) and t.shape == (rows, width) and t.requires_grad for t in out.values())
        wanted = [*streams.values(), context, *nn.ModuleList(fns).parameters()]
        for t in wanted:
            assert t.grad is None
        (out["a"].square().mean() + out["b"].sum()).backward()
    for t in wanted:
        assert isinstance(t.grad, FakeTensor)
        assert (t.grad.shape, t.grad.dtype, t.grad.device) == (t.shape, t.dtype, t.device)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("memory", REPLAYED)
def test_fake_tensors_tell_another_path(memory):
    """The second run is checked there as well, so the fake run above did run it."""
    with FakeTensorMode():
        x = torch.randn(8, 8, requires_grad=True)
        out = rg.run([rg.Update("a", lambda x: x if rg.replaying() else x.sin(), "b")], {"a": x, "b": x}, memory=memory)
        with pytest.raises(rg.ReplayError, match=r"update 0: a \+= <lambda>\(b\)"):
            out["a"].sum().backward()


@pytest.mark.parametrize("name", ["integrations", "peers"])
def test_other_libraries_are_imported_by_their_own_tests_alone(name):
    """`make test-slow` runs where they are not installed."""
    (conftest,) = (ROOT / "tests" / name).glob("conftest.py")
    ignored = runpy.run_path(str(conftest))["pytest_ignore_collect"]
    for asked, expected in ((name, None), ("slow", True), ("not slow and not peers and not integrations", True)):
        assert ignored(SimpleNamespace(option=SimpleNamespace(markexpr=asked))) is expected
