"""DDP and FSDP2 with two gloo processes: gradients equal those of one process. The cases are in distributed_worker.py."""

import re
import subprocess
import sys

import pytest
from distributed_worker import RUNS
from support import ROOT

WORKER = ROOT / "tests" / "distributed_worker.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What all cases printed; run once, in two processes."""
    file = tmp_path_factory.mktemp("gloo") / "rendezvous"
    command = [sys.executable, str(WORKER)]
    other = subprocess.Popen([*command, "1", str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        done = subprocess.run([*command, "0", str(file)], capture_output=True, text=True, timeout=240, check=False)
    finally:
        other.kill()
        other.wait()
    parts = re.split(r"^CASE (.*) (ok|failed)$", done.stdout, flags=re.MULTILINE)
    found = {name: (result, text) for name, result, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)}
    found["stderr"] = ("", done.stderr[-2000:])
    return found


@pytest.mark.parametrize(("case", "policy"), RUNS)
def test_gradients(results, case, policy):
    result, text = results.get(f"{case} [{policy}]", ("not run", results["stderr"][1]))
    assert result == "ok", text
