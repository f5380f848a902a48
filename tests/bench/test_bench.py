"""The benchmark of depth, in a few seconds on the CPU."""

import gc
import json
import subprocess
import sys

import pytest
import torch
from support import loaded_by

from retrograde._base.report import save
from retrograde.bench import bits, exact, language, training
from retrograde.bench import depth as bench
from retrograde.bench.measure import in_turns
from retrograde.bench.overhead import overhead
from retrograde.bench.report import Report

TINY = ["--device", "cpu", "--width", "16", "--heads", "2", "--length", "32", "--batch", "2", "--depths", "3,9", "--rounds", "2"]


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """Each step begins with a garbage collection, which need not walk through all that pytest and torch have loaded."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The path of a report, and the report."""
    path = tmp_path_factory.mktemp("bench") / "depth.json"
    bench.main([*TINY, "--budget", "300000", "--json", str(path)])
    return path, Report.load(path)


def tiny(*more):
    """The setting of a run that takes a moment."""
    parser = bench.make_parser()
    return bench.setting_of(parser, parser.parse_args([*TINY, *more]))


def by_policy(report):
    """{policy: its rows, by depth}"""
    return {name: [row for row in report.rows if row.policy == name] for name in {row.policy: 0 for row in report.rows}}


def test_flat_under_reverse_alone(kept):
    found = {name: [row.activation_bytes for row in rows] for name, rows in by_policy(kept[1]).items()}
    assert found.keys() == {"store", "checkpoint", "reverse", "budget"}
    shallow, deep = found["reverse"]
    assert deep == pytest.approx(shallow, rel=0.02)
    stream = 2 * 32 * 16 * 4
    assert found["checkpoint"][1] - found["checkpoint"][0] == pytest.approx(6 * 2 * stream, rel=0.1)
    assert found["store"][1] > 2 * found["store"][0]
    assert found["store"][1] > 2 * found["checkpoint"][1] > 2 * deep
    assert max(found["budget"]) <= 300_000


def test_whole_peak_counts_parameters_and_gradients(kept):
    parameters = 12 * 16**2 + 2 * 2 * 16 + (3 + 1 + 4 + 1) * 16  # weights, norms and biases of a block
    for row in kept[1].rows:
        assert row.peak_bytes - row.activation_bytes == row.depth * parameters * 4 * 2 + 2 * 32 * 16 * 4


def test_gradients_that_start_as_none_hide_the_saving():
    """With fewer tokens than six times the width, gradients grow faster in backward than checkpoints are freed."""
    setting = tiny("--length", "4")
    none, kept = (bench.Bench(setting | {"grads": grads}, 9).peaks() for grads in ("none", "kept"))
    assert none["checkpoint"] == pytest.approx(none["reverse"], rel=0.02)
    assert kept["checkpoint"][0] > 1.5 * kept["reverse"][0]


def test_report(kept):
    path, report = kept
    again = path.with_name("again.json")
    save(again, report)
    assert again.read_text() == path.read_text()
    assert not list(path.parent.glob("*.part"))
    raw = json.loads(path.read_text())
    assert raw["machine"].keys() == {"device", "torch", "python", "threads"}
    assert "retrograde.bench.depth --device cpu --width 16" in raw["command"]
    assert len(raw["rows"]) == 8
    for row in raw["rows"]:
        assert 0 < row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]


def test_shows_what_it_measured(kept, capsys):
    bench.main(["--from", str(kept[0])])
    out = capsys.readouterr().out
    assert "reverse" in out
    assert torch.__version__ in out
    assert "2 × 32 tokens" in out


def test_a_point_without_memory_is_left_out(monkeypatch):
    def greedy(net, memory, x):
        if memory == "store" and len(net.blocks) == 2:
            raise torch.OutOfMemoryError("not on this machine")
        return under(net, memory, x)

    under = bench.under
    monkeypatch.setattr(bench, "under", greedy)
    heard = []
    report = bench.measure(tiny("--depths", "1,2"), "", heard.append)
    assert [row.depth for row in by_policy(report)["store"]] == [1]
    assert [row.depth for row in by_policy(report)["reverse"]] == [1, 2]
    assert "–" in report.table()
    assert heard == ["depth 1: measured", "depth 2: measured, but out of memory: store"]


def test_plot(kept, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    bench.main(["--from", str(kept[0]), "--plot", str(path)])
    data = path.read_bytes()
    assert data[:4] == b"\x89PNG"
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1400, 800)
    assert len(data) < 80_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--depths 6,,12", "argument --depths: '' is not a whole number"),
        ("--depths 0", "argument --depths: '0' is not a whole number"),
        ("--width wide", "argument --width: 'wide'"),
        ("--batch -1", "argument --batch: "),
        ("--rounds 1", "--rounds must be 2 or more"),
        ("--width 10 --heads 4", "--width 10 is not a multiple of --heads 4"),
        ("--grads some", "argument --grads: invalid choice"),
        ("--budget 1 --depths 1", "rg.Budget(1) is too small"),
        ("--json no/such/folder/depth.json", "cannot write a file at no/such/folder"),
        ("--from no/such/file.json", "no/such/file.json"),
        ("--from depth.json --json depth.json", "not allowed with argument"),
        ("--from depth.json --width 8", "--from measures nothing, so it does not go with --width"),
        ("--fast", "unrecognized arguments: --fast"),
    ],
)
def test_bad_arguments_give_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        bench.main(["--device", "cpu", *arguments.split()])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}]}', '{"rows": []}'])
def test_another_file_is_no_report(text, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        bench.main(["--from", str(path)])
    assert "is not a report of this command" in capsys.readouterr().err


def test_measuring_needs_torch_alone():
    loaded = loaded_by("import retrograde.bench.depth")
    assert not loaded & {"matplotlib", "rich", "tyro"}


def test_runs_as_a_module(kept):
    done = subprocess.run(
        [sys.executable, "-m", "retrograde.bench.depth", "--from", str(kept[0])], capture_output=True, text=True, check=True
    )
    assert "checkpoint" in done.stdout


def test_overhead():
    assert overhead(depth=2, rounds=2).keys() == {"store", "checkpoint", "reverse"}


def test_cost_of_noise(capsys, monkeypatch):
    sizes = ["--width", "8", "--heads", "2", "--depth", "2", "--batch", "1", "--seq", "4", "--rounds", "2", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["bits", *sizes])
    bits.main()
    assert "reverse, noise" in capsys.readouterr().out


def test_cost_of_exact_arithmetic():
    sizes = {"width": 8, "heads": 2, "length": 4, "batch": 2, "depth": 2, "rounds": 2}
    assert set(exact.additions("cpu", 2, 64)) >= {"float", "exact, plain"}
    assert set(exact.steps("cpu", sizes, compiled=False)) == {
        f"{a}, {m}" for a in ("float", "exact") for m in ("reverse", "store")
    }


def test_training_is_compared_and_drawn(tmp_path, monkeypatch, capsys):
    path, picture = tmp_path / "training.json", tmp_path / "training.png"
    sizes = ["--depth", "1", "--width", "8", "--length", "8", "--steps", "3", "--every", "2", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["training", *sizes, "--json", str(path)])
    training.main()
    assert "bfloat16: store" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 12
    assert [step for step, _ in rows[0]["curve"]] == [1, 2]
    monkeypatch.setattr(sys, "argv", ["training", "--from", str(path), "--plot", str(picture)])
    training.main()
    assert picture.stat().st_size > 1000


def test_a_whole_step_of_the_language_model(tmp_path, capsys, monkeypatch):
    path = tmp_path / "language.json"
    sizes = ["--device", "cpu", "--width", "32", "--heads", "2", "--context", "32", "--batch", "1", "--rounds", "2"]
    language.main([*sizes, "--depths", "3,9", "--policies", "checkpoint,reverse", "--json", str(path)])
    rows = {(r["depth"], r["policy"], r["step_in_backward"]): r for r in json.loads(path.read_text())["rows"]}
    assert len(rows) == 8
    assert capsys.readouterr().out.count("tokens/s") == 8
    flat = [rows[depth, "reverse", False]["activation_bytes"] for depth in (3, 9)]
    assert flat[1] == pytest.approx(flat[0], rel=0.02)
    over = {key: row["peak_bytes"] - row["resting_bytes"] for key, row in rows.items()}
    assert over[9, "reverse", True] < 0.5 * over[9, "reverse", False]  # no gradients but those of one function
    assert over[9, "reverse", True] < over[9, "checkpoint", True]

    def greedy(*_):
        raise torch.OutOfMemoryError("not on this machine")

    monkeypatch.setattr(language, "kept_by", greedy)
    language.main([*sizes, "--depths", "1", "--policies", "store"])
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", ["--depths 0", "--policies all", "--rounds 1", "--width 10 --heads 4", "--json no/such/file"]
)
def test_bad_sizes_of_the_language_model(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        language.main(arguments.split())
    assert left.value.code == 2
    assert capsys.readouterr().err


def test_quartiles_lie_within_what_was_measured():
    """Of two measurements far apart, too: none is below the shortest, let alone below zero."""
    times = iter([0.0, 1.0, 1.0, 10.0])
    found = in_turns({"step": lambda: None}, rounds=2, burn_in=0, clock=lambda: next(times))["step"]
    assert (found.low, found.median, found.high) == (3.0, 5.0, 7.0)
