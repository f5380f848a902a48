"""Two gloo processes on the CPU: the losses of one, and checkpoints that load on another number of processes."""

import json
import shutil
import subprocess
import sys

import pytest
from training_support import command, last, losses, mounted

from retrograde.training import checkpoints
from retrograde.training.errors import TrainingError
from retrograde.training.trained import load_model

RUN = {"steps": 8, "save_every": 4, "accumulate": 2}


def apart(a, b):
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def runs(launcher, tmp_path_factory):
    """One process, two under ddp, two under fsdp: their folders."""
    root = tmp_path_factory.mktemp("parallel")
    one = launcher.run(*command(root / "one", **RUN))
    assert one.rc == 0, one.err
    for kind in ("ddp", "fsdp"):
        for job in launcher.together(2, *command(root / kind, parallel=kind, **RUN)):
            assert job.rc == 0, job.err
    return root


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_losses_of_one_process(runs, kind):
    alone, shared = losses(runs / "one" / "run"), losses(runs / kind / "run")
    assert alone[-1] < alone[0] - 0.1
    assert apart(alone, shared) < 1e-5


def test_two_processes_write_one_checkpoint(runs):
    names = {kind: sorted(path.name for path in (runs / kind / "run" / "checkpoints").iterdir()) for kind in ("ddp", "fsdp")}
    assert names == {"ddp": ["step-00000004.pt", "step-00000008.pt"], "fsdp": ["step-00000004", "step-00000008"]}
    folder = runs / "fsdp" / "run" / "checkpoints" / "step-00000008"
    assert {path.name for path in folder.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp", "run.json"}
    about = json.loads((folder / "run.json").read_text())
    assert about["step"] == 8
    assert len(about["random"]) == 2


def resumed(launcher, runs, tmp_path, source, processes, kind):
    """The last four steps again, from the middle of another run."""
    shutil.copytree(runs / source, tmp_path, dirs_exist_ok=True)
    newest = checkpoints.found(tmp_path / "run" / "checkpoints")[-1]
    shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    argv = command(tmp_path, parallel=kind, resume=True, **RUN)
    jobs = [launcher.run(*argv)] if processes == 1 else launcher.together(processes, *argv)
    for job in jobs:
        assert job.rc == 0, job.err
    return losses(tmp_path / "run")


@pytest.mark.parametrize(
    ("source", "processes", "kind"),
    [("fsdp", 1, "none"), ("ddp", 1, "none"), ("one", 2, "fsdp"), ("fsdp", 2, "ddp")],
)
def test_resumes_on_another_number_of_processes(launcher, runs, tmp_path, source, processes, kind):
    """From one process to two under ddp: test_dropout does."""
    found = resumed(launcher, runs, tmp_path, source, processes, kind)
    assert apart(found, losses(runs / "one" / "run")) < 1e-5


def test_resumes_sharded_to_the_bit(launcher, runs, tmp_path):
    assert resumed(launcher, runs, tmp_path, "fsdp", 2, "fsdp") == losses(runs / "fsdp" / "run")


@pytest.mark.parametrize(
    ("kind", "noise"), [("ddp", {}), ("fsdp", {}), ("ddp", {"streams": 1, "bits": 4}), ("fsdp", {"streams": 1, "bits": 4})]
)
def test_dropout(launcher, tmp_path, kind, noise):
    """Two processes drop what one process drops in as many pieces; also from the middle on, where the checkpoint is of one.
    The noise of an ordinary net with bits is the same as well."""
    more = {"steps": 4, "save_every": 2, "dropout": 0.3, **noise}
    alone = launcher.run(*command(tmp_path, accumulate=2, **more))
    assert alone.rc == 0, alone.err
    wanted, newest = losses(tmp_path / "run"), tmp_path / "run" / "checkpoints" / "step-00000004.pt"
    newest.unlink()
    for out, resume in ((tmp_path / "two", False), (tmp_path / "run", True)):
        for job in launcher.together(2, *command(tmp_path, out=out, parallel=kind, resume=resume, **more)):
            assert job.rc == 0, job.err
        assert apart(losses(out), wanted) < 1e-5


def test_step_in_backward_under_fsdp(launcher, runs, tmp_path):
    more = {"steps": 4, "accumulate": 1}
    for job in launcher.together(2, *command(tmp_path / "a", parallel="fsdp", step_in_backward=True, **more)):
        assert job.rc == 0, job.err
    alone = launcher.run(*command(tmp_path / "b", clip=0, **more))
    assert alone.rc == 0, alone.err
    assert apart(losses(tmp_path / "a" / "run"), losses(tmp_path / "b" / "run")) < 1e-5


def test_a_sharded_model_writes(runs):
    text = load_model(runs / "fsdp" / "run", "cpu").extend(b"def", 10, temperature=0)
    assert text == load_model(runs / "ddp" / "run", "cpu").extend(b"def", 10, temperature=0)


@pytest.mark.parametrize("what", ["run.json", ".metadata", "__1_0.distcp", "cut"])
def test_a_damaged_folder_is_told(runs, tmp_path, what):
    folder = tmp_path / "step-00000008"
    shutil.copytree(runs / "fsdp" / "run" / "checkpoints" / "step-00000008", folder)
    if what == "cut":
        (folder / "__0_0.distcp").write_bytes(b"short")
    else:
        (folder / what).unlink()
    with pytest.raises(TrainingError, match=r"step-00000008 is damaged or no checkpoint of retrograde train \(.*\)") as caught:
        load_model(folder, "cpu")
    assert "\n" not in str(caught.value)


def test_a_batch_that_does_not_divide(launcher, tmp_path):
    for job in launcher.together(2, *command(tmp_path, parallel="ddp", batch=3)):
        assert job.rc == 2
        assert "batch 3 does not divide into 2 pieces" in job.err


def test_what_one_process_finds_stops_all_in_a_line_each(launcher, runs, tmp_path):
    (tmp_path / "run").write_text("a file")
    jobs = launcher.together(2, *command(tmp_path, parallel="ddp"))
    assert [job.rc for job in jobs] == [2, 2]
    said = [[line for line in job.err.splitlines() if not line.startswith("[W")] for job in jobs]  # gloo may warn of the machine
    assert [len(lines) for lines in said] == [1, 1]
    assert said[0][0].startswith("retrograde: cannot write to ")
    assert said[1][0] == "retrograde: another process stopped the run, and says why"


def test_a_full_disk_under_fsdp(launcher, tmp_path):
    with mounted(tmp_path / "disk", "size=300k") as disk:
        jobs = launcher.together(2, *command(tmp_path, parallel="fsdp", out=disk / "run", width=64, save_every=2))
        assert [job.rc for job in jobs] == [2, 2]
        assert "No space left on device; there is no earlier checkpoint" in jobs[0].err
        assert all("Traceback" not in job.err for job in jobs)
        assert list((disk / "run" / "checkpoints").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_under_torchrun_itself(launcher, tmp_path, kind):
    alone = launcher.run(*command(tmp_path / "one", **RUN))
    assert alone.rc == 0, alone.err
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "retrograde"]
    done = subprocess.run(
        [*start, *command(tmp_path / kind, parallel=kind, **RUN)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert apart(losses(tmp_path / kind / "run"), losses(tmp_path / "one" / "run")) < 1e-5
    assert "8 of 8 steps" in done.stdout
    assert done.stdout.count("8 of 8 steps") == 1
    assert last(tmp_path / kind / "run").step == 8
