"""Installs a wheel into a fresh environment outside of this folder, and tries library and command there: `make dist`.

python tests/docs/try_wheel.py dist/retrograde-0.1.0-py3-none-any.whl

torch and the packages of the command come from the environment of the Python that runs this.
"""

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

LIBRARY = """
import sys
from pathlib import Path
import torch
import retrograde as rg

assert Path(rg.__file__).is_relative_to(sys.prefix), rg.__file__
assert (Path(rg.__file__).parent / "py.typed").exists()
net = rg.ReversibleSequence([(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)) for _ in range(3)]).double()
x, found = torch.randn(2, 4, dtype=torch.float64), {}
for memory in ("store", "reverse"):
    net.memory = memory
    found[memory] = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(*found.values(), strict=True))
print("library", rg.__version__)
"""
BLOCK = """
from torch import nn

def block(dim):
    return nn.Linear(dim, dim), nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim))
"""
SIZES = ["--device", "cpu", "--dim", "8", "--seq", "4", "--batch", "2", "--depth", "2"]
COMMANDS = [
    ["--version"],
    ["check", "my_block:block", *SIZES],
    ["plan", "--block", "my_block:block", *SIZES],
    ["bench", "--block", "my_block:block", *SIZES, "--rounds", "2", "--variants", "reverse"],
    ["train", *SIZES, "--heads", "2", "--seq", "16", "--steps", "2", "--windows", "1", "--sample", "5", "--out", "run"],
    ["sample", "run", "--bytes", "5"],
]


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "environment")
        venv.create(environment)
        python = environment / "bin" / "python"
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "torch_of_another.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        pip = [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check", "install", "--no-index"]
        here = Path(folder, "here")
        here.mkdir()
        (here / "my_block.py").write_text(BLOCK)
        commands = [
            [*pip, "--no-deps", "--force-reinstall", wheel],
            [*pip, f"{wheel}[cli]"],  # what it says that it needs is there
            [python, "-I", "-c", LIBRARY],
            *([environment / "bin" / "retrograde", *command] for command in COMMANDS),
        ]
        for command in commands:
            done = subprocess.run(command, cwd=here, env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
            print("ok:", " ".join([Path(command[0]).name, *map(str, command[1:])]).strip().partition("\n")[0])


if __name__ == "__main__":
    main()
