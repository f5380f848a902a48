"""What the tests of training share: a small run, text for it, and processes that can be killed."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from retrograde.training import checkpoints
from retrograde.training.loop import train
from retrograde.training.metrics import read
from retrograde.training.settings import settle

TINY = {
    "depth": 3,
    "width": 16,
    "heads": 2,
    "context": 16,
    "batch": 4,
    "steps": 8,
    "windows": 4,
    "sample": 0,
    "lr": 1e-2,
    "look_every": 8,
}


def text(folder, files=12, lines=60):
    """A folder of small files of made-up text."""
    rng = random.Random(0)
    words = ["def", "return", "import", "lambda", "yield", "x", "y", "+", "=", "(", ")"]
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        rows = [" ".join(rng.choice(words) for _ in range(6)) for _ in range(lines)]
        (folder / f"{i:02d}.py").write_text("\n".join(rows))
    return folder


def tiny(folder, **more):
    return settle(**{**TINY, "device": "cpu", "out": folder / "run", "data": (text(folder / "text"),), **more})


def losses(out):
    return [record["loss"] for record in read(Path(out) / "metrics.jsonl") if "loss" in record]


def trained(folder, **more):
    """The losses, the last checkpoint's tensors and the outcome of a run in this process."""
    settings = tiny(folder, **more)
    outcome = train(settings)
    return losses(settings.out), last(settings.out).tensors, outcome


def last(out):
    return checkpoints.read(checkpoints.found(Path(out) / "checkpoints")[-1])


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Job:
    def __init__(self, launcher, argv, env=None):
        self.launcher, self.log = launcher, f"{launcher.folder}/{launcher.count}"
        launcher.count += 1
        self.pid = launcher.ask({"argv": [str(part) for part in argv], "env": env or {}, "log": self.log})["pid"]
        self.rc = None

    def wait(self):
        if self.rc is None:
            self.rc = self.launcher.ask({"wait": self.pid})["rc"]
        return self.rc

    def kill(self, number=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return self.wait()

    @property
    def out(self):
        return Path(f"{self.log}.out").read_text()

    @property
    def err(self):
        return Path(f"{self.log}.err").read_text()


class Launcher:
    def __enter__(self):
        self.count = 0
        self.folder = tempfile.mkdtemp()
        paths = os.pathsep.join(path for path in sys.path if path)
        env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        script = Path(__file__).with_name("launcher.py")
        self.process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()

    def ask(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, *argv, env=None):
        return Job(self, argv, env)

    def run(self, *argv, env=None):
        job = self.start(*argv, env=env)
        job.wait()
        return job

    def together(self, count, *argv):
        """What torchrun does: the same command in several processes that find each other."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        jobs = [self.start(*argv, env={**env, "RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(count)]
        for job in jobs:
            job.wait()
        return jobs


def command(folder, **more):
    """The command of a small run."""
    options = {**TINY, "device": "cpu", "out": folder / "run", "data": text(folder / "text"), **more}
    argv = ["train"]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        argv += [flag] if value is True else [] if value is False else [flag, str(value)]
    return argv


def until(condition, timeout=60.0):
    """Wait closely until something is so; False where it took too long."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.0002)
    return False


@contextlib.contextmanager
def mounted(folder, *options):
    """A small disk of its own, where this may be done."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
