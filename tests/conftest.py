import gc
import os
from importlib.util import find_spec

import pytest
import torch
from offload_support import LateLink

from retrograde._memory import link, offload

torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits for the first …
os.environ["OMP_NUM_THREADS"] = "1"  # … and so in the processes that tests start
link.MAKE["cpu"], offload.SMALL = LateLink, 0  # memory="offload" moves everything, as on a GPU

# A machine with torch, numpy and pytest alone runs all other files, as those with a GPU may have no more.
NEEDED = {
    "hypothesis": ["programs.py", "engine/test_random_programs.py", "exact/test_exact_random.py", "verify/test_verify.py"],
    "tyro": ["bench/*", "check/test_check_command.py", "cli/*", "launcher.py"],
}
collect_ignore_glob = [path for package, paths in NEEDED.items() if not find_spec(package) for path in paths]


def pytest_addoption(parser):
    if not find_spec("pytest_timeout"):
        parser.addini("timeout", "of pytest-timeout, without which tests may run for ever")


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # thousands of tests are objects too: no test's collection goes through them


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def launcher():
    """Starts `retrograde` commands as processes of their own."""
    from training_support import Launcher

    with Launcher() as found:
        yield found
