"""What may happen to a run, done for real: kill -9 at any moment, signals, a full disk, a read-only folder, damaged files."""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from dataclasses import replace

import pytest
import torch
from training_support import command, last, losses, mounted, same, tiny, until

from retrograde.training import checkpoints
from retrograde.training.errors import TrainingError
from retrograde.training.loop import train

# a checkpoint takes a while to write
LARGER = {"depth": 3, "width": 128, "save_every": 2, "look_every": 20, "lr": 3e-3}


def killed_again_and_again(launcher, folder, kills, steps, seed=0):
    """A run that is killed so many times, every other time while it writes; how many left half a checkpoint behind."""
    rng, halves, parts = random.Random(seed), 0, folder / "run" / "checkpoints"
    argv = command(folder, resume=True, steps=steps, **LARGER)
    for i in range(kills):
        job = launcher.start(*argv)
        if i % 2:
            assert until(lambda: list(parts.glob("*.part")) and True)
            time.sleep(rng.random() * 0.004)
        else:
            done = len(losses(folder / "run"))
            ahead = rng.randrange(0, 7)
            until(lambda: len(losses(folder / "run")) >= done + ahead, timeout=3)
            time.sleep(rng.random() * 0.05)
        assert job.kill() == -signal.SIGKILL, job.err
        halves += bool(list(parts.glob("*.part")))
    job = launcher.run(*argv)
    assert job.rc == 0, job.err
    return halves


def survives(launcher, tmp_path, kills, steps):
    whole, often = tmp_path / "whole", tmp_path / "often"
    job = launcher.run(*command(whole, steps=steps, **LARGER))
    assert job.rc == 0, job.err
    halves = killed_again_and_again(launcher, often, kills, steps)
    assert halves >= kills // 4, "hardly any kill hit the writing"
    assert losses(often / "run") == losses(whole / "run")
    kept = last(often / "run")
    assert kept.step == steps
    assert same(kept.tensors, last(whole / "run").tensors)
    names = sorted(path.name for path in (often / "run" / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}.pt" for step in (steps - 2, steps)]


def test_killed_four_times(launcher, tmp_path):
    survives(launcher, tmp_path, kills=4, steps=40)


@pytest.mark.slow
def test_killed_twenty_times(launcher, tmp_path):
    survives(launcher, tmp_path, kills=20, steps=240)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_stop(launcher, tmp_path, number):
    argv = command(tmp_path, steps=100_000, save_every=0, resume=True)
    job = launcher.start(*argv)
    assert until(lambda: len(losses(tmp_path / "run")) > 3)
    assert job.kill(number) == 128 + number, job.err
    done = losses(tmp_path / "run")
    assert last(tmp_path / "run").step == len(done)
    assert f"stopped by signal {int(number)} after step {len(done)}; go on with --resume" in job.out
    job = launcher.start(*argv)
    assert until(lambda: len(losses(tmp_path / "run")) > len(done) + 2)
    job.kill()
    assert losses(tmp_path / "run")[: len(done)] == done


def test_a_full_disk_leaves_the_last_good_checkpoint(launcher, tmp_path):
    with mounted(tmp_path / "disk", "size=640k") as disk:
        argv = command(tmp_path, out=disk / "run", width=64, save_every=2)
        job = launcher.run(*argv)
        assert job.rc == 2, job.err
        line = job.err.strip().splitlines()[-1]
        assert "No space left on device; there is no earlier checkpoint" in line
        argv = command(tmp_path, out=disk / "run", width=16, save_every=2)
        assert launcher.run(*argv).rc == 0
        kept = last(disk / "run")
        with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096) == 4096:
                pass
        more = launcher.run(*argv, "--resume", "--steps", "20")
        assert more.rc == 2
        assert "No space left on device" in more.err
        assert not list((disk / "run" / "checkpoints").glob("*.part"))
        assert same(last(disk / "run").tensors, kept.tensors)
        (disk / "filler").unlink()
        again = launcher.run(*argv, "--resume", "--steps", "20")
        assert again.rc == 0, again.err
        assert last(disk / "run").step == 20


def test_a_limit_on_file_sizes(tmp_path):
    """The same without a disk of its own: a write fails in the middle of a checkpoint."""
    settings = tiny(tmp_path, width=64)
    train(settings)
    kept = last(settings.out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        with pytest.raises(
            TrainingError, match=r"cannot write .*step-00000009.pt: File too large; the last good .*step-00000008.pt"
        ):
            train(replace(settings, steps=9, resume=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert same(last(settings.out).tensors, kept.tensors)
    assert not list((settings.out / "checkpoints").glob("*.part"))


def test_a_read_only_folder(launcher, tmp_path):
    with mounted(tmp_path / "disk", "ro") as disk:
        job = launcher.run(*command(tmp_path, out=disk / "run"))
    assert job.rc == 2
    assert job.err.splitlines()[-1] == f"retrograde: cannot write to {disk / 'run'}: Read-only file system"


def test_a_folder_that_becomes_read_only(tmp_path):
    """Checkpoints that were written stay; what went wrong is one line."""
    with mounted(tmp_path / "disk", "size=9m") as disk:
        settings = tiny(tmp_path, out=disk / "run", save_every=4)

        def lock(what, record):
            if what == "saved":
                subprocess.run(["mount", "--bind", disk, disk], check=True)
                subprocess.run(["mount", "-o", "remount,ro,bind", disk], check=True)

        try:
            with pytest.raises(TrainingError, match=r"cannot write .*: Read-only file system") as caught:
                train(settings, lock)
            assert "\n" not in str(caught.value)
        finally:
            subprocess.run(["umount", "-l", disk], check=True)
        assert last(settings.out).step == 4


def test_out_is_a_file(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(TrainingError, match=r"cannot write to .*run: (File exists|Not a directory)"):
        train(tiny(tmp_path))
    assert (tmp_path / "run").read_text() == "mine"


def test_two_runs_in_one_folder(launcher, tmp_path):
    job = launcher.start(*command(tmp_path, steps=100_000))
    try:
        assert until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        with pytest.raises(TrainingError, match="another process is training in"):
            train(tiny(tmp_path, resume=True))
    finally:
        job.kill()


def cut(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def foreign(path):
    torch.save({"weights": torch.zeros(3)}, path)


def harmful(path):
    """A pickle that would run code."""

    class Run:
        def __reduce__(self):
            return os.mkdir, (str(path.parent / "ran"),)

    torch.save({"format": checkpoints.FORMAT, "step": Run()}, path)


def partial(path):
    torch.save({"format": checkpoints.FORMAT, "step": 8}, path)


@pytest.mark.parametrize("damage", [cut, flip, foreign, harmful, partial, lambda path: path.write_text("text")])
def test_damaged_checkpoints_are_told(tmp_path, damage):
    settings = tiny(tmp_path, save_every=4)
    train(settings)
    path = settings.out / "checkpoints" / "step-00000008.pt"
    damage(path)
    with pytest.raises(
        TrainingError, match=r"step-00000008.pt is (damaged or no|not a) checkpoint of retrograde train"
    ) as caught:
        train(replace(settings, resume=True))
    assert "\n" not in str(caught.value)
    assert not (path.parent / "ran").exists()
    path.unlink()
    train(replace(settings, resume=True))
    assert last(settings.out).step == 8


def test_checkpoints_hold_plain_values_alone(tmp_path):
    settings = tiny(tmp_path)
    train(settings)
    holds = torch.load(settings.out / "checkpoints" / "step-00000008.pt", weights_only=True)
    assert holds.keys() == {"format", "step", "seconds", "settings", "data", "random", "tensors"}


def test_leftovers_are_removed(tmp_path):
    settings = tiny(tmp_path, save_every=2, steps=2)
    train(settings)
    folder = settings.out / "checkpoints"
    (folder / "step-00000004.pt.part").write_bytes(b"half")
    (folder / "step-00000006.part").mkdir()
    (folder / "step-00000006.part" / "__0_0.distcp").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    train(replace(settings, steps=4, resume=True))
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "step-00000002.pt", "step-00000004.pt"]


def test_half_a_line_of_metrics(tmp_path):
    settings = tiny(tmp_path, steps=4)
    train(settings)
    with (settings.out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    train(replace(settings, steps=6, resume=True))
    assert len(losses(settings.out)) == 6
    assert losses(settings.out)[4] != 1.0


def test_a_copied_run_goes_on_elsewhere(tmp_path):
    settings = tiny(tmp_path, steps=4)
    train(settings)
    shutil.copytree(settings.out, tmp_path / "copy")
    train(replace(settings, out=tmp_path / "copy", steps=5, resume=True))
    assert last(tmp_path / "copy").step == 5
