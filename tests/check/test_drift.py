"""rg.check.drift, and the curve of drift against depth."""

import builtins
import json
import random
import subprocess
import sys

import pytest
import torch
from support import WIDTH, draw, loaded_by, mlp, mlps, rg
from torch import nn

from retrograde.bench import drift_curve as bench


def pairs(depth, dtype=torch.float32, **kwargs):
    return rg.ReversibleSequence([mlps(2) for _ in range(depth)], **kwargs).to(dtype), draw(8, WIDTH).detach().to(dtype)


def by_hand(net, x):
    """The sources of every update, by running it; and those that subtraction recovers from the end."""
    with torch.no_grad():
        streams, true, back = {"x1": x, "x2": x}, [], []
        updates = net._program_for({}).updates
        for update in updates:
            true.append(streams[update.sources[0]])
            streams[update.target] = streams[update.target] + update.fn(true[-1])
        for update in reversed(updates):
            back.append(streams[update.sources[0]])
            streams[update.target] = streams[update.target] - update.fn(back[-1])
    return true, back[::-1]


def test_rows_are_those_found_by_hand():
    net, x = pairs(6, arithmetic="float")
    found = rg.check.drift(net, x)
    assert [row.index for row in found.rows] == list(range(12))
    assert found.rows[3].update == "x2 += Sequential(x1)"
    for row, a, b in zip(found.rows, *by_hand(net, x), strict=True):
        assert row.absolute == pytest.approx(float((a - b).abs().max()))
        assert row.relative == pytest.approx(float((a - b).double().norm() / a.double().norm()), rel=1e-6)
    assert found.rows[-1].absolute == 0, "the last one has the final streams themselves"
    assert found.worst.relative == max(row.relative for row in found.rows) > 1e-8


def test_gradient_errors_are_those_against_store():
    net, x = pairs(6, torch.float32, arithmetic="float")
    found = rg.check.drift(net, x)
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    vectors = {}
    for memory in ("store", "reverse"):
        net.memory = memory
        leaf = x.clone().requires_grad_()
        wanted = [*net.parameters(), leaf]
        vectors[memory] = torch.autograd.grad(net(leaf), wanted, cotangent)
    a, b = (torch.cat([g.flatten().double() for g in vectors[memory]]) for memory in ("reverse", "store"))
    assert found.gradient_error == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-6)
    assert found.gradient_error > 1e-9
    count = len(list(net.blocks[0].f.parameters()))
    a, b = (torch.cat([g.flatten().double() for g in vectors[memory][:count]]) for memory in ("reverse", "store"))
    assert found.rows[0].gradient == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float_drifts_and_exact_does_not(dtype):
    net, x = pairs(16, dtype, arithmetic="float")
    for arithmetic in ("float", "exact"):
        net.arithmetic = arithmetic
        found = rg.check.drift(net, x)
        numbers = [found.gradient_error, *(row.absolute + row.relative for row in found.rows), found.rows[0].gradient]
        if arithmetic == "exact":
            assert set(numbers) == {0.0}
            assert "against memory='store': 0\n" in str(found)
        else:
            assert found.gradient_error > 1e-8
            assert sum(row.absolute > 0 for row in found.rows) > 24


def test_under_autocast():
    """Backward is outside of it, as in training."""
    net, x = bench.net_of(32, 2), torch.randn(bench.BATCH, bench.WIDTH)
    net.arithmetic = "float"
    with torch.autocast("cpu", torch.bfloat16):
        far = rg.check.drift(net, x)
        net.arithmetic = "auto"
        near = rg.check.drift(net, x)
        inside: list = []
        net.blocks[0].f.register_full_backward_hook(lambda *_: inside.append(torch.is_autocast_enabled("cpu")))
        rg.check.drift(net, x)
    assert inside == [False, False]
    assert far.gradient_error > 1e-4
    assert near.gradient_error == 0


def test_the_policy_does_not_matter_and_stays():
    net, x = pairs(4, arithmetic="float", memory=rg.StoreLast(2))
    found = rg.check.drift(net, x)
    assert net.memory == rg.StoreLast(2)
    assert len(found.rows) == 8
    net.memory = "store"
    assert rg.check.drift(net, x) == found
    assert net.memory == "store"


class Moving(nn.Module):
    """Moves everything that can be moved."""

    def __init__(self):
        super().__init__()
        self.fn, self.norm, self.calls = mlp(dropout=0.2), nn.BatchNorm1d(WIDTH).double(), 0

    def forward(self, x):
        if not rg.replaying():
            self.calls += 1
            random.random()
        return self.norm(self.fn(x))


def test_nothing_is_changed():
    net = rg.ReversibleSequence([(Moving(), Moving()) for _ in range(3)], memory="checkpoint")
    x = draw(8, WIDTH)
    state = {name: t.clone() for name, t in net.state_dict().items()}
    others = random.getstate(), torch.get_rng_state().tolist(), [m.calls for m in net.modules() if isinstance(m, Moving)]
    found = rg.check.drift(net, x)
    assert found.gradient_error < 1e-12
    assert len(found.rows) == 6
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())
    assert others == (
        random.getstate(),
        torch.get_rng_state().tolist(),
        [m.calls for m in net.modules() if isinstance(m, Moving)],
    )
    assert x.grad is None
    assert all(p.grad is None for p in net.parameters())
    assert net.memory == "checkpoint"


def test_several_programs_and_functions_without_parameters():
    first = rg.ReversibleSequence([(mlp(), nn.Tanh())])
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), first, nn.ModuleDict({"inner": pairs(2, torch.float64)[0]})["inner"])
    found = rg.check.drift(net, draw())
    assert [(row.program, row.index) for row in found.rows] == [("1", 0), ("1", 1), ("2", 0), ("2", 1), ("2", 2), ("2", 3)]
    assert [row.gradient is None for row in found.rows] == [False, True, False, False, False, False]
    lines = str(found).splitlines()
    assert lines[2].startswith("1, 0: x1 += Sequential(x2) ")
    assert lines[3].startswith("1, 1: x2 += Tanh(x1) ")
    assert lines[3].endswith("–")


def test_a_program_that_is_called_twice_has_its_updates_once():
    net, x = pairs(3)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(self.net(x))

    found, inner = rg.check.drift(Twice(), x), rg.check.drift(net, x)
    assert [row.index for row in found.rows] == [row.index for row in inner.rows] == list(range(6))
    assert all(a.relative >= b.relative for a, b in zip(found.rows, inner.rows, strict=True))


def test_errors_are_passed_on():
    calls = []

    def cached(x):
        calls.append(x)
        return x.sin() if len(calls) == 1 else x.detach()

    net = rg.ReversibleSequence([(cached, mlp())], memory="store")
    with pytest.raises(rg.ReplayError, match=r"update 0: x1 \+= cached\(x2\)"):
        rg.check.drift(net, draw())
    assert net.memory == "store"
    with pytest.raises(rg.ProgramError, match=r"the forward of Linear ran no reversible program: it must call rg\.run"):
        rg.check.drift(nn.Linear(2, 2), torch.ones(2))


def test_table_is_aligned_and_short_nets_are_whole():
    net, x = pairs(5, arithmetic="float")
    lines = str(rg.check.drift(net, x)).splitlines()
    assert lines[0].startswith("relative error of all gradients against memory='store': ")
    assert lines[1].split() == ["update", "absolute", "relative", "gradients"]
    assert len(lines) == 12
    assert {len(line.removesuffix("  worst")) for line in lines[1:]} == {len(lines[1])}
    assert sum(line.endswith("  worst") for line in lines) == 1


def test_table_of_a_long_net_has_some_rows_and_the_worst():
    rows = [rg.check.Row(i, "a += f(b)", 0.0, 1.0 if i == 333 else 1e-6, None) for i in range(512)]
    text = str(rg.check.Drift(rows, 1e-3))
    shown = [line for line in text.splitlines() if "a += f(b)" in line]
    assert len(shown) == 21
    assert shown[0].startswith("0: ")
    assert shown[-1].startswith("511: ")
    assert next(line for line in shown if line.startswith("333: ")).endswith("worst")
    assert "21 of 512 updates" in text


def size_of(path):
    from PIL import Image

    with Image.open(path) as picture:
        return picture.size


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_plot(tmp_path, arithmetic):
    pytest.importorskip("matplotlib")
    net, x = pairs(6, arithmetic=arithmetic)
    found = rg.check.drift(net, x)
    path = tmp_path / "drift.png"
    found.plot(path)
    found.plot(str(path))
    assert size_of(path) == (1400, 800)
    assert [p.name for p in tmp_path.iterdir()] == ["drift.png"], "nothing is left beside it"


def test_plot_of_rows_without_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    rg.check.Drift([rg.check.Row(0, "a += f(b)", float("nan"), float("inf"), None)], float("nan")).plot(tmp_path / "one.png")
    rg.check.Drift([], 0.0).plot(tmp_path / "none.png")
    assert "nothing was recovered" in str(rg.check.Drift([], 0.0))


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError("no such module")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'retrograde\[cli\]'"):
        rg.check.Drift([rg.check.Row(0, "a += f(b)", 0.0, 0.0, None)], 0.0).plot(tmp_path / "drift.png")
    assert list(tmp_path.iterdir()) == []


def test_checking_loads_no_matplotlib_and_no_bench():
    step = """
import torch, retrograde as rg
net = rg.ReversibleSequence([(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)])
print(rg.check.drift(net, torch.ones(2, 4)), rg.check.gradients(net, torch.ones(2, 4)), file=__import__("sys").stderr)
"""
    assert not {name for name in loaded_by(step) if name.startswith(("matplotlib", "retrograde.bench"))}


# -- the curve ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "drift.json"
    bench.main(["--depths", "2,12", "--json", str(path)])
    return path, bench.Curve.load(path)


def test_curve(kept):
    path, curve = kept
    found = json.loads(path.read_text())
    assert found.keys() == {"machine", "date", "command", "setting", "rows"}
    assert found["command"].startswith("python -m retrograde.bench.drift_curve --depths 2,12 --json ")
    assert found["machine"]["torch"] == torch.__version__
    lines = curve.lines()
    assert len(lines) == 5 * 2 * 2
    for (dtype, _, arithmetic), errors in lines.items():
        assert set(errors) == {2, 12}
        if arithmetic == "exact":
            assert set(errors.values()) == {0.0}
        else:
            assert min(errors.values()) > 0
            if dtype == "bfloat16":
                assert errors[12] > 5e-3
    assert "| bfloat16 | 2 | exact | 0 | 0 |" in curve.table()


def test_curve_agrees_with_the_check():
    """Both measure the same, up to the cotangent and the input's own gradient."""
    net = bench.net_of(12, 2).to(torch.bfloat16)
    measured = bench.error_of(net, None, "float")
    net.arithmetic = "float"
    checked = rg.check.drift(net, torch.randn(bench.BATCH, bench.WIDTH).bfloat16()).gradient_error
    assert measured == pytest.approx(checked, rel=0.5)


def test_gain_scales_the_last_layer():
    one, two = bench.net_of(2, 1), bench.net_of(2, 2)
    assert torch.equal(two.blocks[1].g[-1].weight, 2 * one.blocks[1].g[-1].weight)
    assert torch.equal(two.blocks[1].g[1].weight, one.blocks[1].g[1].weight)


def test_picture_from_a_report(kept, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "drift.png"
    bench.main(["--from", str(kept[0]), "--plot", str(picture)])
    assert size_of(picture) == (1400, 800)
    assert picture.stat().st_size < 100_000
    assert kept[1].table() in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["drift.png"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--depths", "0"], "'0' is not a whole number"),
        (["--from", "{}/none.json"], "none.json"),
        (["--from", "{}/other.json"], "is not a report of this command"),
        (["--from", "{}/other.json", "--depths", "4"], "does not go with --depths"),
        (["--json", "{}/no/such/folder.json"], "cannot write a file"),
    ],
    ids=["depth 0", "no file", "another file", "two wishes", "no folder"],
)
def test_wrong_arguments(argv, said, tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"rows": [{}]}')
    with pytest.raises(SystemExit) as stopped:
        bench.main([part.format(tmp_path) for part in argv])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_command_says_what_it_takes():
    done = subprocess.run(
        [sys.executable, "-m", "retrograde.bench.drift_curve", "--help"], capture_output=True, text=True, check=True
    )
    assert "--plot" in done.stdout
