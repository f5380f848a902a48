"""`retrograde bench`, at sizes that take a moment: what it measures, what it says of what cannot be measured."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from support import ROOT, environment, loaded_by, retrograde_command

import retrograde
from retrograde._base.report import save
from retrograde.bench import compare, layers, worker
from retrograde.bench.__main__ import main, make_parser
from retrograde.bench.compare import Comparison, Found, Measured, compare_gradients, end
from retrograde.bench.kernels import kind_of
from retrograde.bench.measure import Timing
from retrograde.bench.meter import LiveBytes, peak_on_cpu
from retrograde.bench.setting import setting_of, variants_of
from retrograde.bench.sketch import error, sketch
from retrograde.bench.variants import PEERS, Variant, chosen, installed, variants
from retrograde.cli import app
from retrograde.cli.bench import Options
from retrograde.cli.bench_table import doubts, notes, table
from retrograde.cli.parse import parsed
from retrograde.cli.screen import console

SIZES = ["--device", "cpu", "--dim", "16", "--heads", "2", "--seq", "8", "--batch", "2", "--depth", "2", "--rounds", "2"]
SETTING = {"device": "cpu", "dim": 16, "heads": 2, "shape": [2, 8, 16], "depth": [2], "dtype": "float64", "autocast": "none"}
SETTING |= {"block": None, "rounds": 2, "seed": 0, "timeout": 100, "profile": False}
ALL = {variant.name: variant for variant in variants({"1MiB": 2**20})}
EAGER = [name for name, v in ALL.items() if v.compiled == "no" and name not in PEERS]

BLOCKS = """
import os, pathlib, random, signal, time
import torch, retrograde as rg
from torch import nn

class Branch(nn.Module):
    def __init__(self, dim, again=lambda: None, scale=1.0):
        super().__init__()
        self.fc, self.again, self.scale = nn.Linear(dim, dim), again, scale
    def forward(self, x):
        if rg.replaying():
            self.again()
            return self.fc(x * self.scale).tanh()
        return self.fc(x).tanh()

def good(dim): return Branch(dim), Branch(dim)
def fixed(): print("hello"); return good(6)
class Module(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.f, self.g = good(dim)
def wrong(dim): return Branch(dim, scale=1.5), Branch(dim)  # another function in the second run
def crashing(dim): return Branch(dim, lambda: os.kill(os.getpid(), signal.SIGSEGV)), Branch(dim)
def leaving(dim): return Branch(dim, lambda: os._exit(3)), Branch(dim)
def full(*args): raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
def greedy(dim): return Branch(dim, full), Branch(dim)
def failing(dim): return Branch(dim), lambda x: 1 / 0
def asleep():
    pathlib.Path("asleep").write_text(str(os.getpid()))
    time.sleep(100)
def sleepy(dim): return Branch(dim, asleep), Branch(dim)
def own(dim):
    f, g = good(dim)
    with torch.no_grad():
        f.fc.weight.mul_(random.SystemRandom().random())
    return f, g
def one(dim): return Branch(dim)
def three(dim): return [Branch(dim)] * 3
def raising(dim): raise RuntimeError("no luck")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory, with blocks in it."""
    (tmp_path / "blocks.py").write_text(BLOCKS)
    monkeypatch.delitem(sys.modules, "blocks", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    return tmp_path


@pytest.fixture(autouse=True)
def _only_gradients(monkeypatch):
    """In this process nothing but gradients is looked at, so nothing else takes time."""
    monkeypatch.setattr(worker, "in_turns", lambda steps, *_: dict.fromkeys(steps, Timing(1.0, 1.0, 1.0)))
    monkeypatch.setattr(worker, "peak", lambda step, *_: (1, 1))


def measured_here(name, **setting):
    """What the worker would find, in this process."""
    found = worker.outcome({"setting": SETTING | setting, "variant": ALL[name].as_dict(), "depth": 2})
    gradients, same = found.pop("gradients", {}), found.pop("same", "")
    return Measured(Found(2, name, **found), gradients, same)


# -- what it measures --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run and its folder."""
    folder = tmp_path_factory.mktemp("bench")
    paths = ["--json", "bench.json", "--plot", "bench.png", "--plot-depth", "depth.png", "--profile"]
    chosen = ["--variants", "reverse", "memcnn" if not installed(ALL["memcnn"]) else "store-half"]
    return folder, retrograde_command("bench", *SIZES, *chosen, *paths, cwd=folder)


def test_a_run(done):
    folder, process = done
    assert (process.returncode, process.stderr) == (0, "")
    report = json.loads((folder / "bench.json").read_text())
    assert report["command"].startswith("retrograde bench --device cpu --dim 16")
    assert report["machine"]["torch"] == torch.__version__
    assert report["versions"]["retrograde"]
    assert report["setting"]["shape"] == [2, 8, 16]
    ordinary, reverse, _ = report["rows"]
    assert (ordinary["variant"], reverse["variant"]) == ("ordinary", "reverse")
    assert ordinary["gradient_error"] == 0
    assert 0 < reverse["gradient_error"] < 1e-5
    assert 0 < reverse["activation_bytes"] < ordinary["activation_bytes"] < ordinary["peak_bytes"]
    for row in (ordinary, reverse):
        assert 0 < row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
        assert row["first_seconds"] > 0
        assert row["reference"] == "ordinary"


def test_shows_a_table_without_colours(done):
    out = done[1].stdout
    assert "\x1b" not in out
    assert "width 16, 2 heads, input 2 × 8 × 16, float32" in out
    assert [line.split()[1] for line in out.splitlines() if line.strip().startswith("2 ")][:2] == ["ordinary", "reverse"]


@pytest.mark.skipif(installed(ALL["memcnn"]), reason="memcnn is here")
def test_a_peer_that_is_asked_for_and_not_here(done):
    row = json.loads((done[0] / "bench.json").read_text())["rows"][2]
    assert (row["variant"], row["failed"], row["seconds"]) == ("memcnn", "not installed", None)
    assert "pip install memcnn" in done[1].stdout


def test_where_the_time_goes(done):
    """Matrix products and attention are there, and by far not everything on tensors as small as these."""
    ordinary, reverse, _ = json.loads((done[0] / "bench.json").read_text())["rows"]
    for row in (ordinary, reverse):
        assert row["kernels"].keys() == {"matrix products", "attention", "the rest"}
        assert all(0 < seconds < 10 for seconds in row["kernels"].values())
    assert "where the time goes, ms of a step" in done[1].stdout
    assert kind_of("aten::addmm") == "matrix products"
    assert kind_of("aten::_scaled_dot_product_flash_attention_for_cpu") == "attention"
    assert kind_of("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>") == "the rest"


def test_pictures(done):
    for name in ("bench.png", "depth.png"):
        assert (done[0] / name).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", EAGER)
def test_every_way_has_the_gradients_of_ordinary_autograd(name):
    _, row = compare_gradients([measured_here("ordinary"), measured_here(name)])
    assert row.failed is None
    assert row.gradient_error < 1e-12


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("name", ["ordinary-fullgraph", "checkpoint-compiled", "partition-0.3", "reverse-compiled"])
def test_compiled_ways_have_them_too(name, monkeypatch):
    config = pytest.importorskip("torch._functorch.config")
    for place, compiler in ((torch, "compile"), (retrograde, "compile_fns")):
        monkeypatch.setattr(place, compiler, partial(getattr(place, compiler), backend="aot_eager"))
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=1.0):
        _, row = compare_gradients([measured_here("ordinary"), measured_here(name)])
    assert row.detail is None
    assert row.gradient_error < 1e-12


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_way_as_it_is():
    """The whole list, compiled by inductor, in processes."""
    found = [compare.measured(SETTING, variant, 2) for variant in ALL.values() if installed(variant)]
    for row in compare_gradients(found):
        if row.variant != "reverse-fullgraph":
            assert row.failed is None, row.detail
            assert row.gradient_error < 1e-12


@pytest.mark.filterwarnings("ignore:.* returned something else")
def test_a_block_that_does_another_thing_the_second_time_is_seen(here):
    """The gradients of the good block are right, those of the wrong one are not: the figure tells them apart."""
    errors = {}
    for block in ("blocks:good", "blocks:wrong"):
        _, row = compare_gradients([measured_here(name, block=block) for name in ("ordinary", "reverse")])
        errors[block] = row.gradient_error
    assert errors["blocks:good"] < 1e-12
    assert errors["blocks:wrong"] > 0.05


@pytest.mark.parametrize(
    ("variant", "error", "dtype", "told"),
    [
        ("reverse", 0.3, "float32", True),
        ("reverse", 1e-4, "float32", False),
        ("reverse", 0.3, "bfloat16", False),
        ("reverse-compiled", 0.3, "float32", False),
        ("reverse", None, "float32", False),
    ],
)
def test_a_large_error_sends_to_check(variant, error, dtype, told):
    setting = {"block": "blocks:wrong", "dtype": dtype, "variants": [v.as_dict() for v in ALL.values()]}
    rows = [Found(2, "ordinary", gradient_error=0.0), Found(2, variant, gradient_error=error)]
    lines = [*doubts(Comparison({}, "", "", setting, rows))]
    assert [line.endswith("run `retrograde check blocks:wrong`") for line in lines] == [True] * told


@pytest.mark.parametrize(("block", "shape"), [("good", [3, 16]), ("fixed", [2, 5, 6]), ("Module", [4, 2, 2, 16])])
def test_blocks_of_users(block, shape, here):
    ordinary, reverse = compare_gradients(
        [measured_here(name, block=f"blocks:{block}", shape=shape) for name in ("ordinary", "reverse")]
    )
    assert ordinary.failed is None
    assert reverse.gradient_error < 1e-12


def test_parameters_that_differ_are_not_compared(here):
    _, row = compare_gradients([measured_here(name, block="blocks:own") for name in ("ordinary", "checkpoint")])
    assert row.gradient_error is None
    assert "torch.manual_seed" in row.detail


def test_autocast_and_16_bits():
    for setting in ({"autocast": "bfloat16", "dtype": "float32"}, {"dtype": "bfloat16"}):
        _, row = compare_gradients([measured_here(name, **setting) for name in ("ordinary", "reverse")])
        assert 0 < row.gradient_error < 0.1


def test_the_meter_counts_what_the_other_one_does():
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(5)))
    x = torch.randn(32, 64)

    def step():
        layers.zero_grad()
        layers(x).relu().sum().backward()

    with LiveBytes() as meter:
        step()
    assert peak_on_cpu(step) == pytest.approx(meter.peak, rel=0.02)


# -- sketches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [1e-6, 1e-2, 1.0])
def test_sketches_tell_how_far_apart_gradients_are(wanted):
    rights = [torch.randn(50, 40), torch.randn(1000, 3), torch.randn(7)]
    moves = [torch.randn_like(t) for t in rights]
    scale = wanted * math.sqrt(sum(t.square().sum() for t in rights) / sum(t.square().sum() for t in moves))
    others = [t + scale * move for t, move in zip(rights, moves, strict=True)]
    right, other = (sketch((str(i), t) for i, t in enumerate(ts)) for ts in (rights, others))
    assert error(right, other) == pytest.approx(wanted, rel=0.3)
    assert error(right, right) == 0


def test_sketches_of_no_and_of_broken_gradients():
    zero, one, broken = (sketch([("w", value)]) for value in (None, torch.ones(3), torch.tensor([1.0, math.nan, 1.0])))
    assert error(one, zero) == 1
    assert error(zero, zero) == 0
    assert error(zero, one) == error(one, broken) == error(one, {}) == math.inf


# -- what cannot be measured -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "failed"), [("crashing", "SIGSEGV"), ("leaving", "exit code 3")])
def test_the_end_of_a_worker_is_told(block, failed, here):
    row = compare.measured(SETTING | {"block": f"blocks:{block}"}, ALL["reverse"], 2).row
    assert (row.failed, row.detail, row.seconds) == (failed, "it said nothing", None)


def test_a_worker_that_takes_too_long_is_ended(monkeypatch):
    workers = []
    monkeypatch.setattr(compare, "end", lambda worker: (workers.append(worker), end(worker)))
    row = compare.measured(SETTING | {"timeout": 0.3}, ALL["reverse"], 2).row
    assert (row.failed, row.detail) == ("timed out", "after 0.3 s, --timeout gives it more")
    assert workers[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("block", "failed", "detail"),
    [
        ("greedy", "out of memory", "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"),
        ("failing", "ZeroDivisionError", "ZeroDivisionError: division by zero"),
        ("raising", "refused", "--block blocks:raising raises RuntimeError: no luck"),
    ],
)
def test_errors_in_a_worker_are_told(block, failed, detail, here):
    row = measured_here("reverse", block=f"blocks:{block}").row
    assert (row.failed, row.detail, row.seconds) == (failed, detail, None)


def test_a_budget_that_is_too_small_is_told():
    asked = {"setting": SETTING, "variant": Variant("small", "retrograde", memory={"budget": 9}).as_dict(), "depth": 2}
    assert "rg.Budget(9) is too small" in worker.outcome(asked)["detail"]


def test_killed_workers_and_what_they_said():
    assert "out of memory" in compare.how_it_ended(-signal.SIGKILL, "words")["detail"]
    assert compare.how_it_ended(1, "first\nTypeError: last\n\nUSDT:x\n") == {"failed": "exit code 1", "detail": "TypeError: last"}


def test_exit_code_1_where_nothing_was_measured(here, capsys):
    assert app.main(["bench", *SIZES, "--block", "blocks:failing", "--variants", "ordinary"]) == 1
    out = capsys.readouterr().out
    assert "ordinary, depth 2: ZeroDivisionError: division by zero" in out


def test_an_interrupt_ends_the_worker_and_shows_what_there_is(here):
    command = [sys.executable, "-m", "retrograde", "bench", *SIZES, "--block", "blocks:sleepy", "--variants", "reverse"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=here,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell ignores it for what it runs in the background
    )
    for _ in range(1000):
        if (here / "asleep").exists() and (here / "asleep").read_text():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "retrograde: interrupted\n")
    assert "ordinary" in out
    with pytest.raises(ProcessLookupError):
        os.kill(int((here / "asleep").read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--block blocks:better", "--block blocks:better: blocks has no 'better'"),
        ("--block nowhere:good", "no module 'nowhere'"),
        ("--block blocks", "'blocks' is not of the form module:function"),
        ("--block blocks:raising", "--block blocks:raising raises RuntimeError: no luck"),
        ("--block blocks:one", "must return (f, g), or a module with f and g: block 0 is a Branch"),
        ("--block blocks:three", "must return (f, g), or a module with f and g: block 0 is a list of three functions"),
        ("--depth 0", "--depth must be 1 or more, got 0"),
        ("--depth 2 -1", "--depth must be 1 or more, got -1"),
        ("--depth two", "--depth 'two' is not a whole number"),
        ("--dim 0", "--dim must be 1 or more, got 0"),
        ("--rounds 1", "--rounds must be 2 or more, got 1"),
        ("--dim 10 --heads 4", "--dim 10 is not a multiple of --heads 4"),
        ("--shape 2 8", "our block takes (batch, seq, dim)"),
        ("--shape 2 0 16 --block blocks:good", "--shape must be 1 or more, got 0"),
        ("--timeout 0", "--timeout must be more than 0"),
        ("--dtype int8", "--dtype 'int8' is not one of: float32, "),
        ("--budget lots", "--budget 'lots' is not a size"),
        ("--variants reversed", "no variant is called 'reversed', there are: ordinary, "),
        ("--variants reverse-captured", "; that one is for a GPU: --device cuda"),
        ("--json no/such/folder/bench.json", "--json no/such/folder/bench.json: there is no directory no/such/folder"),
        ("--plot .", "--plot . is a directory"),
        ("--plot-depth no/x.png", "--plot-depth no/x.png: there is no directory no"),
    ],
)
def test_refusals_come_before_anything_starts(arguments, message, here, capsys, monkeypatch):
    monkeypatch.setattr(compare, "in_process", lambda *_: pytest.fail("a worker was started"))
    assert app.main(["bench", *SIZES, *arguments.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("retrograde: ")
    assert said.err.count("\n") == 1
    assert message in said.err


def test_no_cuda_here(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert app.main(["bench", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "retrograde: --device cuda: torch finds no CUDA device here, use --device cpu\n"


def test_pictures_need_matplotlib(monkeypatch, capsys):
    """Told before anything starts."""
    monkeypatch.setattr(compare, "in_process", lambda *_: pytest.fail("a worker was started"))
    for name in [
        n for n in sys.modules if n.startswith(("matplotlib.", "retrograde.bench.frontier", "retrograde.bench.picture"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert app.main(["bench", *SIZES, "--plot", "x.png"]) == 2
    assert capsys.readouterr().err.endswith("pip install 'retrograde[cli]'\n")


def test_workers_need_torch_alone():
    loaded = loaded_by("import retrograde.bench.worker")
    assert not loaded & {"tyro", "rich", "matplotlib"}


# -- choosing and showing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "bench.md"], ids=lambda page: page.name)
def test_commands_in_the_documentation_are_accepted(page):
    commands = re.findall(r"^(?:\$ )?retrograde bench(.*)", page.read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        options = parsed(Options, shlex.split(command, comments=True), "retrograde bench")
        assert setting_of(options)
        assert variants_of(options, "cuda")


def test_the_script_for_a_gpu(tmp_path):
    """Its commands are accepted, in files of their own; a part that is not there is told."""
    echo = tmp_path / "echo"
    echo.write_text(f"""#!{sys.executable}\nimport shlex, sys\nprint(shlex.join(sys.argv[1:]))\n""")
    echo.chmod(0o755)

    def script(*arguments, **env):
        command = [ROOT / "benchmarks" / "gpu.sh", *arguments]
        env = {**os.environ, "PYTHON": str(echo), **env}
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    done = script(tmp_path / "out")
    assert done.returncode == 0, done.stderr
    files = []
    for line in done.stdout.splitlines():
        start, _, command = line.partition(" --")
        arguments = shlex.split(f"--{command}")
        if start == "-m retrograde.bench.layers":
            options = layers.make_parser().parse_args(arguments)
            assert layers.ways_of(options.ways, "cuda")[1] == []
            options.device = "cpu"
            assert len(layers.sizes_of(layers.setting_of(options))) in (2, 6)
        else:
            assert start == "-m retrograde.bench"
            options = make_parser().parse_args(arguments)
            assert len(variants_of(options, "cuda")) > 2
        files.append(options.json)
    assert len(files) == len(set(files)) == 12
    assert len(script(tmp_path / "out", "frontier", "peers").stdout.splitlines()) == 3
    assert "--host 64GiB" in script(tmp_path / "out", "widths", OFFLOAD_HOST="64GiB").stdout
    for arguments, said in ((["out", "deep"], "no part deep"), ([], "FOLDER")):
        refused = script(*[tmp_path / name if name == "out" else name for name in arguments])
        assert refused.returncode == 2
        assert said in refused.stderr


def test_the_command_where_torch_is_all_there_is(tmp_path, capsys):
    """The same report as `retrograde bench` writes; nothing that it loads comes with an extra."""
    path = tmp_path / "bench.json"
    assert main([*SIZES, "--variants", "reverse", "--json", str(path)]) == 0
    assert [row.variant for row in Comparison.load(path).rows] == ["ordinary", "reverse"]
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["2", "reverse"]
    with pytest.raises(SystemExit, match="2"):
        main(["--dim", "10", "--heads", "4"])
    assert capsys.readouterr().err == "python -m retrograde.bench: --dim 10 is not a multiple of --heads 4\n"
    assert not loaded_by("import retrograde.bench.__main__") & {"tyro", "rich", "matplotlib"}


def test_both_commands_take_the_same_options():
    own = {action.dest for action in make_parser()._actions} - {"help"}
    assert own == {field.name for field in fields(Options)} - {"plot", "plot_depth", "traceback"}


def names(patterns):
    return [variant.name for variant in chosen(ALL.values(), patterns)]


def test_patterns():
    assert names(["checkpoint*", "budget-1MiB"]) == ["ordinary", "checkpoint", "checkpoint-compiled", "budget-1MiB"]
    assert set(names([])) >= {name for name in ALL if name not in PEERS}
    with pytest.raises(ValueError, match="no variant is called 'x'"):
        names(["x"])


def test_peers_that_are_not_here_are_chosen_by_name_alone(monkeypatch):
    monkeypatch.setattr("retrograde.bench.variants.find_spec", lambda name: None if name == "revlib" else object())
    assert "revlib" not in names([])
    assert names(["rev*"])[-1] == "revtorch"
    assert names(["revlib"]) == ["ordinary", "revlib"]


def figures(variant, depth, scale):
    return Found(depth, variant, None, None, Timing(scale, scale, scale), 1.0, round(scale * 2**30), 2**31)


def shown(rows):
    out = console()
    with out.capture() as captured:
        out.print(table(rows))
        for line in notes(rows):
            out.print(line)
    return captured.get()


def test_without_ordinary_there_are_no_ratios_and_checkpoint_is_the_reference():
    found = [Measured(Found(4, "ordinary", "out of memory", "OutOfMemoryError: so sad"))]
    found += [Measured(figures("checkpoint", 4, 2.0), {"w": [1.0]}), Measured(figures("reverse", 4, 1.0), {"w": [1.5]})]
    rows = compare_gradients(found)
    assert [row.gradient_error for row in rows] == [None, 0.0, 0.5]
    text = shown(rows)
    assert "out of memory" in text
    assert "–" in text
    assert "gradient error, depth 4: against checkpoint" in text
    assert "ordinary, depth 4: OutOfMemoryError: so sad" in text


def test_ratios():
    text = shown([figures("ordinary", 4, 2.0), replace(figures("reverse", 4, 3.0), activation_bytes=2**29), figures("x", 8, 1.0)])
    row = next(line for line in text.splitlines() if "reverse" in line).split()
    assert row[2:8] == ["3000.0", "(3000.0–3000.0)", "1.50", "512.0", "MiB", "0.25"]


def test_the_frontier(tmp_path):
    pytest.importorskip("matplotlib")
    from retrograde.bench.frontier import best, draw_depth, draw_frontier

    rows = [
        replace(figures(name, depth, scale), activation_bytes=size)
        for name, depth, scale, size in [
            ("ordinary", 2, 1.0, 9),
            ("reverse", 2, 2.0, 2),
            ("slow", 2, 3.0, 2),
            ("large", 2, 1.5, 10),
            ("store-half", 2, 1.4, 5),
        ]
    ]
    assert [row.variant for row in best(rows)] == ["reverse", "store-half", "ordinary"]
    many = [figures(name, depth, 1 + i / 9) for depth in (2, 4) for i, name in enumerate(ALL)]
    many.append(Found(8, "ordinary", "out of memory"))
    report = Comparison({"device": "CPU", "threads": 1, "torch": "2"}, "2026-01-01", "", SETTING, many)
    for draw in (draw_frontier, draw_depth):
        draw(report, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 5000


def runs(tmp_path, *runs, **other):
    """Files of runs, each a pace and by variant how many times that it took, at depths 2 and 4."""
    paths = []
    for pace, taken in runs:
        rows = [figures(name, depth, pace * times) for depth in (2, 4) for name, times in taken.items()]
        paths.append(tmp_path / f"{len(paths)}.json")
        machine = {"device": "CPU", "threads": 1, "torch": "2"}
        save(paths[-1], Comparison(machine, "2026-01-01", "", SETTING | (other if len(paths) > 1 else {}), rows))
    return paths


def test_a_frontier_of_several_runs(tmp_path):
    """Times are scaled to the ordinary net's of the first run."""
    pytest.importorskip("matplotlib")
    from retrograde.bench.frontier import joined, main

    first = {"ordinary": 1.0, "reverse": 1.5}
    paths = runs(tmp_path, (1.0, first), (3.0, {"ordinary": 1.0, "reverse": 9.0, "budget-1GiB": 1.25}), depth=[4], rounds=1)
    found = joined([Comparison.load(path) for path in paths])
    assert {(row.depth, row.variant): row.seconds.median for row in found.rows} == {
        (depth, name): times for depth in (2, 4) for name, times in (first | {"budget-1GiB": 1.25}).items()
    }
    assert main([*map(str, paths), str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").stat().st_size > 5000


@pytest.mark.parametrize("case", ["another width", "no ordinary", "no report", "no file", "no picture"])
def test_what_makes_no_frontier(tmp_path, case, capsys):
    pytest.importorskip("matplotlib")
    from retrograde.bench.frontier import main

    second = {"reverse": 1.0} if case == "no ordinary" else {"ordinary": 1.0}
    paths = runs(tmp_path, (1.0, {"ordinary": 1.0}), (1.0, second), **({"dim": 7} if case == "another width" else {}))
    if case == "no report":
        paths[1].write_text("[]")
    elif case == "no file":
        paths[1].unlink()
    picture = tmp_path / ("missing/p.png" if case == "no picture" else "p.png")
    said = {
        "another width": "dim differs",
        "no ordinary": "no depth at which all have the ordinary net",
        "no report": "1.json is not a report",
        "no file": "No such file",
        "no picture": "REPORT... PICTURE",
    }
    assert main([*map(str, paths), str(picture)]) == 2
    assert said[case] in capsys.readouterr().err
    assert not picture.exists()
