import pytest
import torch

torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits for the first


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
