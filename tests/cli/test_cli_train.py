"""`retrograde train` and `retrograde sample` as commands: what they print, and one line for every wrong input."""

import json
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from support import ROOT
from training_support import command, losses

from retrograde.cli.app import main
from retrograde.models.language import Language


def errors(capsys, *argv):
    """The exit code, and what was said on stderr."""
    code = main([str(part) for part in argv])
    return code, capsys.readouterr().err


def test_train_then_sample(tmp_path, capsys):
    assert main(command(tmp_path, sample=40, windows=0)) == 0
    said, run = capsys.readouterr(), tmp_path / "run"
    assert "3 blocks of width 16, 0.01 M parameters, 3 reversible streams, memory reverse; 4 × 16 bytes a step" in said.err
    assert "float32 on cpu" in said.err
    assert "held out" in said.err
    assert said.err.count("held-out bits per byte") == 2
    assert "8 of 8 steps" in said.out
    assert "xz -9 needs" in said.out
    for name in ("checkpoints/step-00000008.pt", "metrics.jsonl", "curves.png", "sample.txt"):
        assert str(run / name) in said.out
        assert (run / name).stat().st_size > 0
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert len((run / "sample.txt").read_bytes()) == 40
    for line in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(line)

    def sample(*more):
        assert main(["sample", *map(str, more)]) == 0
        return capsys.readouterr().out

    kept = json.loads(sample(run, "--prompt", "def ", "--bytes", "20", "--seed", "3", "--json", "-"))
    assert (kept["run"], kept["prompt"], kept["seed"]) == (str(run), "def ", 3)
    assert sample(run, "--prompt", "def ", "--bytes", "20", "--seed", "3") == f"def {kept['text']}\n"
    one = sample(run, "--prompt", "def ", "--bytes", "20", "--seed", "3", "--device", "cpu")
    assert one.startswith("def ")
    assert one == sample(run / "checkpoints" / "step-00000008.pt", "--prompt", "def ", "--bytes", 20, "--seed", 3)
    assert one != sample(run, "--prompt", "def ", "--bytes", 20, "--seed", 4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"depth": 0}, "--depth must be 1 or more, got 0"),
        ({"width": 18}, "--dim 18 is not a multiple of twice the heads, 2"),
        ({"dim": 18}, "--dim 18 is not a multiple of twice the heads, 2"),
        ({"seq": 100_000}, "bytes to train on in"),
        ({"steps": "many"}, "many"),
        ({"batch": -4}, "--batch must be 1 or more, got -4"),
        ({"lr": "nan"}, "--lr must be 0 or more, got nan"),
        ({"dropout": 1}, "--dropout must be 0 or more and less than 1, got 1.0"),
        ({"memory": "none"}, "--memory 'none' is not one of: store, checkpoint, offload, reverse, last:K, anchor:N, budget:3GiB"),
        ({"memory": "last:0"}, "--memory 'last:0' is not one of"),
        ({"memory": "budget:lots"}, "--memory 'lots' is not a size"),
        ({"memory": "budget:10"}, "rg.Budget(10) is too small"),
        ({"arithmetic": "fast"}, "arithmetic"),
        ({"data": "nowhere"}, "--data: there is no file or folder nowhere"),
        ({"context": 100_000}, "bytes to train on in"),
        ({"parallel": "ddp"}, "--parallel ddp is for several processes: torchrun"),
        ({"step_in_backward": True, "clip": 1}, "--clip 1.0 does not go with --step-in-backward"),
        ({"step_in_backward": True, "accumulate": 2}, "--accumulate 2 does not go with --step-in-backward"),
        ({"streams": 1, "memory": "reverse"}, "a net of one stream cannot be reversed"),
        ({"bits": 4}, "--bits 4 does not go with --streams 3"),
        ({"streams": 1, "bits": 0}, "--bits must be from 1 to 8, got 0"),
        ({"sample": -1}, "--sample must be 0 or more"),
        ({"seed": -1}, "--seed must be 0 or more"),
        ({"fast": True}, "--fast"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, capsys, more, message):
    code, said = errors(capsys, *command(tmp_path, **more))
    assert code == 2
    line = said.splitlines()[-1]
    assert line.startswith("retrograde: ")
    assert message in line
    assert "Traceback" not in said
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_the_outcome_as_json_and_the_curves_elsewhere(tmp_path, capsys):
    assert main(command(tmp_path, json="-", plot=tmp_path / "curves.svg", sample=9)) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["steps"], told["setting"]["depth"], len(told["held_out_bits"])) == (8, 3, 2)
    assert told["checkpoint"].endswith("step-00000008.pt")
    assert told["sample"]
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    assert not (tmp_path / "run" / "curves.png").exists()


def test_a_run_is_not_written_over(tmp_path, capsys):
    assert main(command(tmp_path)) == 0
    kept = losses(tmp_path / "run")
    code, said = errors(capsys, *command(tmp_path))
    assert code == 2
    assert "holds a run already: resume it, or name another folder" in said.splitlines()[-1]
    assert losses(tmp_path / "run") == kept
    assert main(command(tmp_path, resume=True)) == 0
    assert losses(tmp_path / "run") == kept


def test_lost_metrics_do_no_harm(tmp_path, capsys):
    assert main(command(tmp_path)) == 0
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert main(command(tmp_path, resume=True)) == 0
    assert "8 of 8 steps" in capsys.readouterr().out


def test_out_of_memory_is_one_line(tmp_path, capsys, monkeypatch):
    def greedy(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

    monkeypatch.setattr(Language, "forward", greedy)
    code, said = errors(capsys, *command(tmp_path))
    assert code == 2
    assert "CUDA out of memory. Tried to allocate 20 GiB. A smaller batch" in said.splitlines()[-1]


def test_policies(tmp_path):
    found = []
    for memory in ("store", "last:3", "anchor:2", "budget:1MiB"):
        assert main(command(tmp_path / memory, memory=memory, steps=2)) == 0
        found.append(losses(tmp_path / memory / "run"))
    for run in found:
        assert run == pytest.approx(found[0], abs=1e-5)


def test_a_sample_does_not_command_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("retrograde.cli.sample.load_model", lambda *_: SimpleNamespace(extend=lambda *_: b"a\x1b[2J\tb\x07"))
    for terminal, text in ((False, "a\x1b[2J\tb\x07\n"), (True, "a\ufffd[2J\tb\ufffd\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal, raising=False)
        assert main(["sample", str(tmp_path)]) == 0
        assert capsys.readouterr().out == text


def test_the_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = "--steps 2 --depth 4 --width 16 --batch 2 --sample 5 --windows 2"
    monkeypatch.setattr("sys.argv", ["demo.py", *sizes.split()])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert "2 of 2 steps" in said
    for depth in (2, 4, 8):
        assert f"{depth} blocks" in said
    assert "checkpoint   demo-output" in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "there is no run and no checkpoint at nowhere"),
        ([".", "--bytes", "0"], "--bytes must be 1 or more"),
        ([".", "--temperature", "-1"], "--temperature must be 0 or more"),
        ([".", "--temperature", "nan"], "--temperature must be 0 or more"),
        (["."], "is damaged or no checkpoint of retrograde train"),
        (["empty"], "has no checkpoint yet"),
        (["text.pt"], "is damaged or no checkpoint of retrograde train"),
    ],
)
def test_wrong_samples(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "text.pt").write_text("no zip")
    code, said = errors(capsys, "sample", *argv)
    assert code == 2
    assert message in said
    assert said.count("\n") == 1
