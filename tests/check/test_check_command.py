"""`retrograde check` and `retrograde drift`: planted faults are found and their lines named, sound nets pass."""

import gc
import json
import sys

import numpy as np
import planted
import pytest
import torch
from support import ROOT, retrograde_command
from torch import nn

import retrograde as rg
from retrograde.cli import app

HERE = ROOT / "tests"
SIZES = ["--device", "cpu", "--dim", "8", "--depth", "3", "--seq", "6", "--batch", "3"]
LINES = (HERE / "planted.py").read_text().splitlines()


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    """planted.py is in the current directory."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))


def check(capsys, name, *more):
    """The exit code, the verdict and what is shown."""
    code = app.main(["check", f"planted:{name}", *SIZES, *more])
    shown = capsys.readouterr()
    assert shown.err == ""
    assert app.main(["check", f"planted:{name}", *SIZES, *more, "--json", "-"]) == code
    return code, json.loads(capsys.readouterr().out), shown.out


@pytest.mark.parametrize("name", planted.FAULTS)
def test_faults_are_found_with_their_lines(name, capsys):
    more = ["--depth", "12", "--dtype", "bfloat16"] if name == "drifting" else []
    code, verdict, shown = check(capsys, name, *more)
    assert code == 1, shown
    assert not verdict["sound"]
    (fault,) = verdict["faults"]
    assert fault["kind"] == planted.FAULTS[name], shown
    assert f"{fault['kind']}: " in shown
    assert fault["updates"][0] in shown
    if name == "drifting":  # no line of the user's is to blame
        assert fault["line"] == ""
    else:
        file, _, number = fault["line"].partition(":")
        assert file == "planted.py"
        assert LINES[int(number) - 1].endswith("# here"), fault["line"]
        assert f"{fault['line']}: {fault['code']}" in shown
    assert ("instead: " in shown) == (name != "wrong_shape")
    assert shown.endswith("\n1 fault\n"), shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("name", planted.SOUND)
def test_sound_nets_pass(name, capsys):
    code, verdict, shown = check(capsys, name)
    assert code == 0, shown
    assert verdict["sound"]
    assert (verdict["faults"], verdict["warnings"]) == ([], [])
    assert {answer["verdict"] for answer in verdict["answers"].values()} == {"ok"}
    assert shown.endswith("sound\n")
    assert verdict["gradient_error"] < 1e-5
    if name == "sixteen_bits":
        assert verdict["gradient_error"] == verdict["recovered"] == 0
        assert "input 3 × 6 × 8 bfloat16" in shown
    assert verdict["notes"] == [] or name == "logged"
    assert "nothing that functions keep changes what they return, in 3 steps on different batches" in shown
    if name == "logged":
        assert "note: update 0: x1 += Logged(x2): it changes its attribute 'calls'" in shown
        assert "(and 2 more like it)" in shown


def test_a_line_is_named_whenever_garbage_is_collected(capsys, request):
    """What the collector calls is Python code as well: a finalizer, a callback such as hypothesis has one."""

    def collected(phase, info):
        assert phase in ("start", "stop")

    thresholds = gc.get_threshold()
    request.addfinalizer(lambda: gc.set_threshold(*thresholds))
    gc.callbacks.append(collected)
    request.addfinalizer(lambda: gc.callbacks.remove(collected))
    for objects in (50, 60, 80, 110):
        gc.set_threshold(objects)
        _, verdict, shown = check(capsys, "replaying")
        assert [LINES[int(fault["line"].split(":")[1]) - 1][-6:] for fault in verdict["faults"]] == ["# here"], shown
    assert gc.isenabled()


def test_the_same_fault_in_all_blocks_is_told_once(capsys):
    _, verdict, shown = check(capsys, "counter")
    assert verdict["faults"][0]["updates"] == [f"update {i}: x1 += Counter(x2)" for i in (4, 2, 0)]
    assert "fault 1: update 4: x1 += Counter(x2), and 2 more like it" in shown
    for question in ("keeps no state", "repeats exactly"):  # what it keeps makes it return something else
        assert verdict["answers"][question] == {"verdict": "FAULT", "why": "3 functions: see below"}


RNG = np.random.default_rng(0)


class DrawsFromGlobal(planted.Branch):
    def forward(self, x):
        return self.fn(x) * RNG.standard_normal()


class RectifiesInPlace(planted.Branch):
    def __init__(self, dim):
        super().__init__(dim)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.fn(self.act(x))


class EditsBesides(RectifiesInPlace):
    def forward(self, x):
        x -= 1
        return self.fn(self.act(x))


class Functional(planted.Branch):
    def forward(self, x):
        return self.fn(nn.functional.relu(x, inplace=True))


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        (DrawsFromGlobal, "draw from torch's generators, as torch.rand"),
        (planted.NumpyGenerator, "draw from torch's generators, as torch.rand"),
        (planted.NumpyRandom, "torch.rand for np.random.rand"),
        (planted.PythonRandom, "torch.rand for random.random"),
        (planted.Counter, "keep it in a buffer"),
        (RectifiesInPlace, "write inplace=False for ReLU 'act': "),
        (EditsBesides, "let fn work on a copy"),
        (Functional, "write inplace=False: "),
    ],
)
def test_advice_fits_the_fault(kind, instead, monkeypatch, capsys):
    monkeypatch.setattr(planted, "given", planted.block_of(kind), raising=False)
    assert app.main(["check", "planted:given", *SIZES]) == 1
    shown = capsys.readouterr().out
    (said,) = [line for line in shown.splitlines() if line.startswith("  instead: ")]
    assert instead in said
    assert ("buffer" in shown) == (kind is planted.Counter)
    assert shown.lower().count("let fn work on a copy") == (kind is EditsBesides), "once"


def test_nothing_is_left_changed():
    planted.STEP = 5
    assert app.main(["check", "planted:global_step", *SIZES]) == 1
    assert planted.STEP == 5


def test_arithmetic_dtype_and_memory(capsys):
    assert check(capsys, "growing", "--depth", "12", "--arithmetic", "float")[0] == 1
    assert check(capsys, "growing", "--depth", "12", "--arithmetic", "exact")[0] == 1, "it leaves the range"
    assert check(capsys, "growing", "--depth", "12", "--memory", "checkpoint")[0] == 0
    code, verdict, shown = check(capsys, "dropout", "--dtype", "float64", "--memory", "store")
    assert code == 0
    assert verdict["gradient_error"] < 1e-14
    assert "note: under memory store no function is recomputed here, so it was checked under reverse" in shown
    _, verdict, shown = check(capsys, "dropout", "--autocast", "bfloat16")
    assert verdict["recovered"] == 0, "auto is exact there"
    assert "under bfloat16 autocast" in shown


def test_a_module_that_calls_run_takes_the_options(capsys):
    for more, said in {
        (): "memory own, arithmetic own",
        ("--memory", "checkpoint"): "memory checkpoint, arithmetic own",
        ("--arithmetic", "exact"): "memory own, arithmetic exact",
    }.items():
        code, verdict, shown = check(capsys, "runs_itself", *more)
        assert code == 0, shown
        assert said in shown
        assert (verdict["recovered"] == 0) == bool(more)
    assert app.main(["drift", "--block", "planted:runs_itself", *SIZES[2:], "--dtype", "float32", "--json", "-"]) == 0
    rows = {row["arithmetic"]: row["error"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["exact"] == 0 < rows["float"]


def test_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, start in {"drift.png": b"\x89PNG", "drift.svg": b"<?xml", "drift.pdf": b"%PDF"}.items():
        assert app.main(["check", "planted:dropout", *SIZES, "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
        assert f"drawn to {tmp_path / name}" in capsys.readouterr().out


def test_as_a_process(tmp_path):
    """For continuous integration: exit codes, and no colours where there is no terminal."""
    for name, code in {"planted:python_random": 1, "planted:attention": 0}.items():
        done = retrograde_command("check", name, *SIZES, "--json", str(tmp_path / "verdict.json"), cwd=HERE)
        assert (done.returncode, done.stderr) == (code, "")
        assert json.loads((tmp_path / "verdict.json").read_text())["sound"] == (code == 0)
        assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "MODULE:FACTORY is missing (see retrograde check --help)"),
        (["planted"], "check 'planted' is not of the form module:function"),
        (["planted:none"], "check planted:none: planted has no 'none'"),
        (["planted:mlp"], "check planted:mlp: the forward of Sequential ran no reversible program"),
        (["planted:SIDE"], "must return"),
        (["planted:HALF"], "must return (f, g), a module with f and g, a list of rg.Update, a net that runs programs"),
        (["planted:dropout", "--shape", "2", "3"], "the net raises RuntimeError"),
        (["planted:dropout", "--dim", "0"], "--dim must be 1 or more, got 0"),
        (["planted:dropout", "--plot", "x.foo"], "--plot x.foo: pictures end in .png, .svg or .pdf"),
        (["planted:dropout", "--memory", "none"], "--memory 'none' is not one of"),
        (["planted:dropout", "--dtipe", "float32"], "there is no option --dtipe, did you mean --dtype?"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_misuse_is_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(planted, "HALF", lambda: 3, raising=False)
    monkeypatch.setattr(planted, "SIDE", lambda: (nn.Linear(2, 2), torch.ones(2), 3, 4), raising=False)
    assert app.main(["check", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1


def test_a_fn_that_raises_names_its_line(capsys):
    assert app.main(["check", "planted:wrong_shape", *SIZES, "--shape", "3"]) == 2
    assert "at planted.py:" in capsys.readouterr().err


def test_nets_with_inputs_of_their_own(monkeypatch, capsys):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.net = nn.Embedding(9, 8), rg.ReversibleSequence([(planted.mlp(8), planted.mlp(8))])

        def forward(self, tokens, scale):
            return self.net(self.embed(tokens)) * scale

    tokens = torch.randint(9, (2, 5))
    monkeypatch.setattr(planted, "tokens", lambda: (Tokens(), (tokens, 2.0)), raising=False)
    monkeypatch.setattr(planted, "side", lambda: [Tokens(), tokens, {"scale": torch.ones(())}], raising=False)
    for name in ("tokens", "side"):
        code, _, shown = check(capsys, name)
        assert code == 0, shown
        assert "input 2 × 5 int64" in shown


def test_factories_get_the_sizes_that_they_name(monkeypatch, capsys):
    def model(depth, dim, seq, batch):  # as for retrograde plan
        return rg.ReversibleSequence([(planted.mlp(dim), planted.mlp(dim)) for _ in range(depth)]), torch.randn(batch, seq, dim)

    def block(channels, *, heads, depth, bias=True):
        assert (channels, heads, depth, bias) == (8, 4, 3, True)
        return planted.mlp(channels), planted.mlp(channels)

    monkeypatch.setattr(planted, "model", model, raising=False)
    monkeypatch.setattr(planted, "block", block, raising=False)
    monkeypatch.setattr(planted, "by_position", lambda width, /, heads=3: block(width, heads=heads + 1, depth=3), raising=False)
    for name in ("model", "block", "by_position"):
        assert "input 3 × 6 × 8 float32" in check(capsys, name)[2]
    assert app.main(["drift", "--block", "planted:model", "--depth", "2", "--dtype", "float32", "--json", "-"]) == 0
    capsys.readouterr()
    for name, factory in {"two": lambda width, height: None, "more": lambda dim, height: None}.items():
        monkeypatch.setattr(planted, name, factory, raising=False)
        assert app.main(["check", f"planted:{name}"]) == 2
        assert "and arguments named dim, depth, seq, batch or heads" in capsys.readouterr().err


# -- drift -------------------------------------------------------------------------------------------------------------


def test_drift(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    sizes = ["--dim", "8", "--heads", "2", "--seq", "4", "--batch", "2", "--depth", "2", "10", "--device", "cpu"]
    files = ["--json", str(tmp_path / "drift.json"), "--plot", str(tmp_path / "drift.png")]
    assert app.main(["drift", *sizes, "--dtype", "float32", "bfloat16", *files]) == 0
    found = json.loads((tmp_path / "drift.json").read_text())
    rows = {(row["dtype"], row["arithmetic"], row["depth"]): row for row in found["rows"]}
    assert len(rows) == 8
    for (dtype, arithmetic, _), row in rows.items():
        low, high = (0, 0) if arithmetic == "exact" else (1e-8, 1e-5) if dtype == "float32" else (1e-3, 1)
        assert low <= row["error"] <= high
        assert low <= row["streams"] <= high
    assert rows["bfloat16", "float", 10]["error"] > rows["bfloat16", "float", 2]["error"]
    said = capsys.readouterr().out
    assert "relative error of the gradients" in said
    assert "of the recovered streams" in said
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")


def test_drift_of_a_block_of_ones_own(capsys):
    arguments = ["--block", "planted:growing", "--dim", "8", "--depth", "4"]
    assert app.main(["drift", *arguments, "--arithmetic", "float", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "float32, bf16 autocast", "bfloat16"]
    assert rows[0]["error"] < 1e-3 < rows[2]["error"]


def test_errors_of_exact_arithmetic_send_to_check(capsys):
    for name, told in {"counter": True, "dropout": False}.items():
        assert app.main(["drift", "--block", f"planted:{name}", "--dim", "8", "--depth", "2", "--dtype", "float32"]) == 0
        said = capsys.readouterr().out
        assert ("is not recomputed as it was: run `retrograde check planted:counter`" in said) == told, said


def test_what_cannot_be_measured_is_told(capsys):
    arguments = ["--block", "planted:growing", "--dim", "8", "--depth", "2", "64", "--dtype", "float32", "--arithmetic", "exact"]
    assert app.main(["drift", *arguments]) == 0
    said = capsys.readouterr().out
    assert "–" in said
    assert "left the range of exact arithmetic" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--depth 0", "--depth must be 1 or more, got 0"),
        ("--dtype bfloat", "--dtype 'bfloat' is not one of: float64, float32"),
        ("--arithmetic exakt", "did you mean exact?"),
        ("--dim 10 --heads 4", "--dim 10 is not a multiple of --heads 4"),
        ("--shape 2 8", "our block takes (batch, seq, dim)"),
        ("--plot x.gif", "--plot x.gif: pictures end in .png, .svg or .pdf"),
        ("--block planted:none", "planted has no 'none'"),
        ("--block planted:dropout --shape 2 3 --depth 1", "--block planted:dropout raises RuntimeError"),
    ],
)
def test_misuse_of_drift_is_one_line(arguments, message, capsys):
    assert app.main(["drift", *arguments.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1
